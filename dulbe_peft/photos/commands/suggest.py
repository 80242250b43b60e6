"""examples:
  dulbe-peft suggest --model openai/clip-vit-base-patch16 heap --count 50 --page label.html
  dulbe-peft suggest june heap --csv label.csv
  dulbe-peft suggest june heap --csv label.csv --group folder

The most useful photographs come first. Half of them are typical of groups of similar photographs that
the learner does not know yet. The other half are those of which it is least sure; if it expects to be
wrong more often than right, they are drawn at random instead. If many photographs are unlike anything
learned, only these are grouped. Learned photographs and copies are left out. Without LEARNER, every
suggestion is typical of a group.

With --group or --group-seconds, as for run, one photograph stands for each item; items with a label
come after the others, and further photographs of an item last. The table has a column group, which
learn --labels needs, because its paths and times need not tell the same items apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.photos.commands.advice import next_command, print_next_command
from dulbe_peft.photos.commands.flags import ONLY, OVERWRITE, File, Page
from dulbe_peft.photos.commands.options import Load, answers_of, command, learner_options, settings_of
from dulbe_peft.photos.commands.paths import check_given, check_images, claim, message_stream
from dulbe_peft.photos.data.source import GROUPING, DataSource
from dulbe_peft.utils.settings import AtLeastOne, setting
from dulbe_peft.utils.terminal import counted, printable

if TYPE_CHECKING:
    from torch import Tensor

    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.photos.suggesting import Suggestion

HEADER = ["path", "reason", "predicted", "novelty"]
MOST_SIMILAR = 5  # how many similar photographs the page shows beside a suggestion


@command(settings=settings_of(DataSource, GROUPING))
@learner_options(optional=True, choose=True)
def suggest(
    learner: str | None,
    load: Load,
    photos: tuple[str, ...] = setting((), "image files or folders", place=True, metavar="PHOTOS..."),
    count: AtLeastOne = setting(50, "how many photographs"),
    csv: File | None = setting(None, "write path, reason, predicted, novelty; - is standard output"),
    page: Page | None = setting(None, "also write a page with pictures"),
    only: File | None = ONLY,
    overwrite: bool = OVERWRITE,
    **groups: Any,
) -> None:
    if learner is not None and not _is_learner(learner):
        photos, learner = (learner, *photos), None
    if not photos:
        raise ValueError("name the photographs: dulbe-peft suggest [LEARNER] [--model M] PHOTOS...")
    if only and learner is None:
        raise ValueError("--only names classes of a learner: give LEARNER, too")
    check_given(only=only)
    check_images(photos)
    claim(("--csv", csv, ".csv"), ("--page", page, ".html"), corrected={"--csv"}, overwrite=overwrite)
    from dulbe_peft.utils.files import is_stream, write_csv

    table = None if csv is None or is_stream(csv) else csv
    loaded = load(learner=learner)
    from dulbe_peft.photos.suggesting import new_photographs, suggestions

    fresh, stream = new_photographs(loaded, list(photos), **groups), message_stream(csv, page)
    images, features, notes, labelled, items = fresh
    classifier, possible = loaded.classifier if loaded.tasks else None, answers_of(only, None, loaded.class_names)
    suggested = suggestions(features, count, classifier, 0, images.groups, labelled, **possible)
    names = [images.item_name(suggestion.row) for suggestion in suggested]
    if table is not None and Path(table).resolve().parent != Path.cwd():  # its paths are relative to its own folder
        names = [os.path.abspath(name) for name in names]
    print("\n".join([f"{counted(len(suggested), 'photograph')} of {len(images)}", *notes]), file=stream)
    lines: list[list[object]] = [
        [name, s.reason, s.proposed, "" if s.novelty is None else float(f"{s.novelty:.6g}")]
        for name, s in zip(names, suggested, strict=True)
    ]
    header = HEADER
    if items:
        header, lines = [*HEADER, "group"], [[*line, items[s.row]] for line, s in zip(lines, suggested, strict=True)]
    new = f"{Path(learner).name}-labelled" if learner else "labelled"
    if csv is not None:
        write_csv(csv, header, lines)
    if page is not None:
        serves = learner is not None and Path(photos[0]).is_dir()
        serve = next_command("serve", learner, photos=photos[0], output=new) if serves else ""
        _write_page(Path(page), images, features, suggested, serve)
    if csv is None and page is None:
        print("\n".join(f"{printable(n)}\t{printable(s.reason)}" for n, s in zip(names, suggested, strict=True)))
    else:
        print(f"written: {' and '.join(file for file in (csv, page) if file)}", file=stream)
    advice = "write a table LABELS.csv with the columns path and label and a line for each photograph; then"
    if table:
        advice = f"correct the column predicted of {table}, and rename it to label; then"
    print(advice, file=stream)
    first = ("learn", learner) if learner else ("run", "--model", loaded.state.base_name[0])
    which: dict[str, Any] = {}
    if table and items:  # the table has a column of groups, unless all are empty
        which = {"group": "group" if any(items[s.row] for s in suggested) else None, "group_seconds": None}
    print_next_command(*first, labels=table or "LABELS.csv", output=new, to=stream, **which)


def _is_learner(path: str) -> bool:
    """Return whether the first argument is a learner: a folder that holds one, or a Hub id by its form."""
    from dulbe_peft.checkpoints.layout import LEARNER_FILE, task_folders
    from dulbe_peft.data.decoding import image_suffixes

    folder = Path(path)
    if folder.exists():
        return folder.is_dir() and ((folder / LEARNER_FILE).is_file() or bool(task_folders(folder)))
    return not (path.startswith((".", "/", "~")) or path.count("/") > 1 or path.lower().endswith(image_suffixes()))


def _write_page(
    path: Path, images: LabelledImages, features: Tensor, suggested: Sequence[Suggestion], command: str
) -> None:
    """Write a page of the suggestions and the `command` that opens the page to label them.

    Suggestions that stand for a group are shown with the most similar photographs.
    """
    from dulbe_peft.photos.report.html import write_page
    from dulbe_peft.photos.report.pictures import picture

    rows = []
    for suggestion in suggested:
        similar = (features @ features[suggestion.row]).argsort(descending=True).tolist() if suggestion.group else []
        others = [picture(images, row) for row in similar[: MOST_SIMILAR + 1] if row != suggestion.row][:MOST_SIMILAR]
        name = printable(images.item_name(suggestion.row))
        rows.append((name, suggestion, picture(images, suggestion.row), others))
    write_page(path, "suggest.html", {"rows": rows, "count": len(images), "command": command})
