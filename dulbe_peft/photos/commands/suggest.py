"""examples:
  dulbe-peft suggest --model openai/clip-vit-base-patch16 heap --count 50 --page label.html
  dulbe-peft suggest june heap --csv label.csv

The most useful photographs come first. Half of them are typical of what the learner does not know yet,
one for each group of photographs that are alike; of the other half it is least sure, or they are drawn
at random where it expects to be wrong more often than right. Where many are unlike anything learned,
the groups are theirs. Photographs that the learner has learned, and copies, are left out. Without
LEARNER all of them are typical of a group.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.photos.commands.named import check_images, claim, say_next, words_of
from dulbe_peft.photos.commands.options import OVERWRITE, File, Load, Page, command, learner_options
from dulbe_peft.utils.settings import AtLeastOne, setting
from dulbe_peft.utils.terminal import counted, printable

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.photos.suggesting import Suggestion

HEADER = ["path", "reason", "class", "novelty"]
ALIKE = 5  # other photographs of a group on the page


@command()
@learner_options(optional=True, choose=True)
def suggest(
    learner: str | None,
    load: Load,
    photos: tuple[str, ...] = setting((), "image files or folders", place=True, metavar="PHOTOS..."),
    count: AtLeastOne = setting(50, "how many photographs"),
    csv: File | None = setting(None, "write path, reason, class, novelty; - is standard output"),
    page: Page | None = setting(None, "write a page with pictures, too"),
    overwrite: bool = OVERWRITE,
) -> None:
    if learner is not None and not _is_learner(learner):
        photos, learner = (learner, *photos), None
    if not photos:
        raise ValueError("name the photographs: dulbe-peft suggest [LEARNER] [--model M] PHOTOS...")
    check_images(photos)
    claim(("--csv", csv, ".csv"), ("--page", page, ".html"), reads=photos, overwrite=overwrite)
    from dulbe_peft.utils.files import is_stream, step_aside, write_csv

    table = None if csv is None or is_stream(csv) else csv
    corrected = table if table and os.path.isfile(table) and os.path.getsize(table) else None
    if corrected and not overwrite:
        raise FileExistsError(f"{table} may hold your corrections: choose another name, or --overwrite")
    loaded = load(learner=learner)
    from dulbe_peft.photos.suggesting import new_photographs, suggestions

    (images, features, said), words = new_photographs(loaded, list(photos)), words_of(csv, page)
    found = suggestions(features, count, loaded.classifier if loaded.tasks else None)
    names = [images.item_name(one.row) for one in found]
    if table is not None and Path(table).resolve().parent != Path.cwd():  # in which its paths begin
        names = [os.path.abspath(name) for name in names]
    print("\n".join([f"{counted(len(found), 'photograph')} of {len(images)}", *said]), file=words)
    lines: list[list[Any]] = [
        [printable(name), one.reason, one.proposed, "" if one.novelty is None else float(f"{one.novelty:.6g}")]
        for name, one in zip(names, found, strict=True)
    ]
    if corrected:
        step_aside(Path(corrected))
    new = f"{Path(learner).name}-labelled" if learner else "labelled"
    if csv is not None:
        write_csv(csv, HEADER, lines, errors="surrogateescape")
    if page is not None:
        serve = (
            f"dulbe-peft serve {shlex.quote(learner)} --photos {shlex.quote(photos[0])} --output {shlex.quote(new)}"
        )
        _write_page(Path(page), images, features, found, serve if learner and Path(photos[0]).is_dir() else "")
    if csv is None and page is None:
        print("\n".join(f"{name}\t{printable(reason)}" for name, reason, *_ in lines))
    else:
        print(f"written: {' and '.join(file for file in (csv, page) if file)}", file=words)
    what = "LABELS.csv is a table that you write: the columns path and label, a line for each photograph"
    print(f"correct the column class of {table}, and call it label; then" if table else what, file=words)
    first = ("learn", learner) if learner else ("run", "--model", loaded.state.base_name[0])
    say_next(*first, labels=table or "LABELS.csv", output=new, to=words)


def _is_learner(path: str) -> bool:
    """Whether what is named first is a learner: a folder that holds one, or something that lies nowhere here."""
    from dulbe_peft.checkpoints.layout import LEARNER_FILE, task_folders
    from dulbe_peft.data.decoding import image_suffixes

    folder = Path(path)
    if folder.exists():
        return folder.is_dir() and ((folder / LEARNER_FILE).is_file() or bool(task_folders(folder)))
    return not (path.startswith((".", "/", "~")) or path.count("/") > 1 or path.lower().endswith(image_suffixes()))


def _write_page(path: Path, images: LabelledImages, features: Any, found: Sequence[Suggestion], command: str) -> None:
    """Write suggestions in their order, each of a group beside those most like it, and the `command` to label them."""
    from dulbe_peft.photos.report.html import write_page
    from dulbe_peft.photos.report.pictures import picture

    rows = []
    for one in found:
        alike = (features @ features[one.row]).argsort(descending=True).tolist() if one.group else []
        others = [picture(images, row) for row in alike[: ALIKE + 1] if row != one.row][:ALIKE]
        rows.append((printable(images.item_name(one.row)), one, picture(images, one.row), others))
    write_page(path, "suggest.html", {"rows": rows, "count": len(images), "command": command})
