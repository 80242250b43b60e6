"""examples:
  dulbe-peft check photos --page photos.html --csv photos.csv
  dulbe-peft check photos --check-labels --model openai/clip-vit-base-patch16 --page photos.html

The command decodes every image and compares all images with each other. The page shows duplicates
side by side, and a few photographs of each class. --check-labels lists the ten images whose label is
most doubtful, because they look like another class; the table lists all of them, with the proposed
class and its probability. With --group or --group-seconds, as for run, whole items are judged and
listed first. The command estimates how many labels are wrong, and swaps some labels on
purpose to count how many of these it finds. --move-to moves the files of the table into one folder
for each finding, so that you can look at them there; of two copies, it moves the second. The exit
status is 2 if images cannot be read, and 0 otherwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import LABELS, NO_STORE, OVERWRITE, File, Folder, Page
from dulbe_peft.photos.commands.options import command, data_settings, load_learner, settings_of
from dulbe_peft.photos.commands.paths import FOLDER, check_given, claim, message_stream
from dulbe_peft.photos.data.source import UNLABELLED, DataSource
from dulbe_peft.photos.runs.setup import data_or_labels
from dulbe_peft.utils.files import write_csv
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import announce, counted, printable

if TYPE_CHECKING:
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.photos.data.grouping import Parts
    from dulbe_peft.photos.data.inventory import Found, Inventory, Pictures
    from dulbe_peft.photos.doubtful_labels import Doubt, Trial


class Doubtful(NamedTuple):
    """The photographs of an item, or one image; its name, what it looks like, the proposed class, its probability."""

    images: list[Found]
    name: str
    why: str
    proposed: str
    probability: str

    @property
    def label(self) -> str:
        return self.images[0].label


STRIP = 8  # thumbnails shown for each class
STRIPS, VIEWED = 5, 6  # strips of photographs that look alike, and photographs in each
PAIRS = 100  # duplicates shown on the page
DOUBTFUL = 10  # doubtful labels shown
DOUBTS = "images that look like another class (the label may be wrong, or the picture unusual):"
VIEWS = (
    "many photographs look like one another; if they show the same items, give their groups (--group): without them, "
    "the other views of an item make its wrong label look right, and no share of wrong labels can be relied on"
)
CONFIRMED = "; the label is probably wrong"
NO_DOUBTS = "no image looks more like another class than like its own"
HEADER = ["split", "path", "finding", "detail", "proposed_class", "probability"]
TRUSTED = 0.8  # if a smaller share of the swapped labels is found, other wrong labels are probably missed, too
LEFT_OUT, LOOKS, MOVED = "left out", "looks like another class", "moved.csv"
SMALL = 64  # pixels; smaller images show little to a model that expects 224 pixels


@command(
    settings=[
        *data_settings("train_split", "test_split", "test_data"),
        *settings_of(LearnerArguments, ("device", "whole_images")),
    ]
)
def check(
    data: str | None = setting(None, "images, as for run", place=True),
    labels: str | None = LABELS,
    page: Page | None = setting(None, "write a page with pictures"),
    csv: File | None = setting(None, "write a table of the findings; - is standard output"),
    move_to: Folder | None = setting(None, "move the files of the table here, except those listed as left out"),
    check_labels: bool = setting(False, "list images that look like another class; needs --model"),
    model: str | None = setting(None, "model for --check-labels, as for run"),
    no_store: bool = NO_STORE,
    overwrite: bool = OVERWRITE,
    device: str | None = None,
    whole_images: bool | None = None,
    **splits: object,
) -> int:
    check_given(data=data or labels)
    data = data_or_labels(data, labels, "DATA")
    claim(("--move-to", move_to, FOLDER), apart=[data])
    claim(("--page", page, ".html"), ("--csv", csv, ".csv"), overwrite=overwrite)
    if check_labels != (model is not None):
        raise ValueError("--check-labels and --model MODEL, such as openai/clip-vit-base-patch16, need each other")
    from dulbe_peft.data.folders import ImageFolder

    machine = {"device": device or "auto", "whole_images": bool(whole_images)}
    learner = None if model is None else load_learner(None, model, machine, store=not no_store)
    announce(f"reading {data}")
    opened = DataSource.of({"data": data, **splits}).open(every=True)
    train, test, inventory = opened
    if page is not None and train.features is not None:
        raise ValueError(f"{data!r} is a table of features, which has no pictures for --page")
    if move_to is not None and not isinstance(train, ImageFolder):
        raise ValueError(f"--move-to moves the files of a folder, and {data!r} is not a folder")
    parts = opened.parts
    tiny, words = _tiny(parts, inventory.pictures), message_stream(page, csv)
    name = data.rpartition("/")[2] if data.startswith("hf:") else Path(data).resolve().name
    small = ["", f"narrower than {SMALL} pixels: {counted(len(tiny), 'image')}"] if tiny else []
    from dulbe_peft.photos.data.grouping import bursts_of

    alike, views = ("", []) if train.groups is not None else bursts_of(parts)
    print("\n".join([*([alike, ""] if alike else []), inventory.format(), *small]), file=words)
    doubtful: list[Doubtful] = []
    reliability: list[str] = []
    if learner is not None:
        doubtful, reliability, looking = _doubtful(parts, learner, inventory.group_names)
        if looking:
            alike, views = VIEWS, looking
            print(f"\n{VIEWS}", file=words)
        print("\n".join(["", *_listed(doubtful), *reliability]), file=words)
    if page is not None:
        content: dict[str, object] = {"name": name, "alike": alike, "problems": [*inventory.problems(), *small]}
        content |= {"doubtful": doubtful[:DOUBTFUL], "found": len(doubtful), "reliability": reliability}
        _write_page(Path(page), parts, inventory, views, content)
    rows = [*_findings(parts, inventory, doubtful, tiny)]
    if csv is not None:
        width = len(HEADER)
        write_csv(csv, HEADER, ([*map(printable, row), *[""] * (width - len(row))] for row in rows))
    if move_to is not None:
        count = _move(rows, Path(move_to), Path(data))
        print(f"moved to {move_to}: {counted(count, 'file')}; {MOVED} there lists where they were", file=words)
    if page or csv:
        print(f"\nwritten: {' and '.join(filter(None, (page, csv)))}", file=words)
    print(file=words)
    more: dict[str, object] = {"data": None if labels else data}
    more |= {"test_fraction": 0.2 if test is None else None, "output": f"out-{name.partition('.')[0]}"}
    if test is None and any(UNLABELLED in why for _, why in inventory.left_out):
        more["test_split"] = "none"
    print_next_command("run", model=model or "openai/clip-vit-base-patch16", **more, to=words)
    return 2 if inventory.unreadable else 0


def _write_page(
    path: Path, parts: Parts, inventory: Inventory, views: list[list[tuple[str, int]]], content: dict[str, object]
) -> None:
    """Write the page, with a strip of training images for each class, and strips of `views`, which look alike."""
    import numpy as np

    from dulbe_peft.photos.report.html import write_page
    from dulbe_peft.photos.report.pictures import picture

    train, strips = next(iter(parts.values())), []
    for label, name in enumerate(train.class_names):
        places = np.flatnonzero(train.labels == label)
        some = places[np.linspace(0, len(places) - 1, min(STRIP, len(places)), dtype=int)]
        strips.append((name, len(places), [picture(train, int(index)) for index in some]))
    by_harm = sorted(inventory.duplicates, key=lambda pair: pair.first.split == pair.second.split)  # leaks first
    content |= {"inventory": inventory, "strips": strips, "pairs": by_harm[:PAIRS], "printable": printable}
    content["views"] = [[picture(parts[split], at) for split, at in of[:VIEWED]] for of in views[:STRIPS]]
    content["picture"] = lambda image: picture(parts[image.split], image.place)
    write_page(path, "check.html", content)


def _findings(
    parts: Parts, inventory: Inventory, doubtful: list[Doubtful], tiny: list[list[str]]
) -> Iterator[list[str]]:
    """Yield the rows of the table, without the last two columns if they are empty."""
    from dulbe_peft.photos.data.inventory import ALIKE

    for image, why in inventory.unreadable:
        yield [image.split, image.name, "unreadable", why]
    for name, why in inventory.left_out:
        yield ["", name, LEFT_OUT, why]
    kinds = dict(zip(ALIKE, ("duplicate", "same pixels", "near copy"), strict=True))
    for first, second, how in inventory.duplicates:
        yield [second.split, second.name, kinds[how], f"of {first.split}: {first.name}"]
    for found in doubtful:
        for image in found.images:
            yield [image.split, image.name, LOOKS, found.why, found.proposed, found.probability]
    yield from tiny
    for (split, at), (_, blank, _) in inventory.pictures.items():
        if blank:
            yield [split, parts[split].item_name(at), "blank", blank]


def _doubtful(
    parts: Parts, learner: ClassIncrementalLearner, group_names: Mapping[int, str]
) -> tuple[list[Doubtful], list[str], list[list[tuple[str, int]]]]:
    """Return the items or images with doubtful labels, lines on labels and names, and photographs that look alike."""
    import numpy as np
    import torch

    from dulbe_peft.classifiers.groups import MANY_ALIKE, examples_alike, share_alike
    from dulbe_peft.photos.data.inventory import Found
    from dulbe_peft.photos.doubtful_labels import doubtful_labels, items_of, misnamed_classes, try_swapped_labels
    from dulbe_peft.training.state import FEW_ITEMS, about_labels, about_names

    names = next(iter(parts.values())).class_names
    features = np.concatenate([learner.image_embeds(part).cpu().numpy() for part in parts.values()])
    labels = np.concatenate([part.labels for part in parts.values()])
    alike = learner.encoder.has_names and learner.encoder.projection is None
    texts = learner.text_embeds(names).cpu().numpy() if alike else None
    places = [(split, part, index) for split, part in parts.items() for index in range(len(part))]
    given = features, labels, texts, learner.logit_scale
    groups = [part.groups for part in parts.values() if part.groups is not None]
    alone = np.concatenate(groups) if groups else None
    (doubts, wrong), rows = doubtful_labels(*given, alone), []
    for doubt in doubts:
        label, other = names[labels[doubt.image]], names[doubt.predicted]
        images = [Found(split, at, part.item_name(at), label) for split, part, at in (places[i] for i in doubt.images)]
        several = len(images) > 1
        named = group_names.get(int(alone[doubt.image])) if several and alone is not None else None
        views = f"{doubt.alike} of {len(images)} photographs look" if several else "looks"
        why = f"{views} like {printable(other)!r}, not like {printable(label)!r} (probability {doubt.own:.1%})"
        why += CONFIRMED * (wrong is not None and doubt.wrong[0] > 0.5)
        rows.append(Doubtful(images, named or images[0].name, why, other, f"{doubt.probability:.4f}"))
    misnamed, exchanged = misnamed_classes(*given, alone)
    shown, lines = (torch.from_numpy(features), torch.from_numpy(labels)), list[str]()
    many = alone is None and share_alike(*shown) > MANY_ALIKE
    looking = [[places[row] for row in of] for of in examples_alike(*shown, STRIPS, VIEWED)] if many else []
    if alone is not None:
        items = {*items_of(labels, alone)}
        lines.append(
            f"{len(items & {d.images for d in doubts})} of {counted(len(items), 'item')} look like another class"
        )
    unit = "image" if alone is None else "item"
    if wrong is not None:
        lines += [*about_labels(wrong, alone is not None), *_expected(doubts[:DOUBTFUL], unit)]
    elif alone is not None:
        lines.append(FEW_ITEMS)
    pairs = [(names[one], names[other]) for one, other in exchanged]
    lines += about_names([names[label] for label in misnamed], pairs)
    lines += _reliability(try_swapped_labels(*given, alone), unit)
    return rows, lines, [[(split, at) for split, _, at in of] for of in looking]


def _listed(doubtful: list[Doubtful]) -> list[str]:
    """Return a line for each of the first doubtful labels, below a heading."""
    lines = [DOUBTS if doubtful else NO_DOUBTS]
    lines += [f"  {printable(found.name)}: {found.why}" for found in doubtful[:DOUBTFUL]]
    if len(doubtful) > DOUBTFUL:
        lines.append(f"  ... and {len(doubtful) - DOUBTFUL} more, which --csv FILE lists")
    return lines


def _expected(first: list[Doubt], unit: str = "image") -> list[str]:
    """Say how many of the first doubtful labels are expected to be errors, with the ends of the interval."""
    if not first:
        return []
    number, low, high = (round(sum(each)) for each in zip(*(doubt.wrong for doubt in first), strict=True))
    listed = counted(len(first), "image" if unit == "image" else "finding")
    told = f"at most {high}" if number == 0 < high else f"about {number} ({low} to {high})"
    return [f"of the first {listed}, {told} are expected to have a wrong label"]


def _reliability(trial: Trial | None, unit: str = "image") -> list[str]:
    """Describe in plain words what a trial with swapped labels says about the doubtful labels."""
    if trial is None:
        return [f"the reliability of these doubts is not known: too few classes have two {unit}s or more"]
    what = "labels" if unit == "image" else "labels of whole items"
    recall, others = trial.found / trial.swapped, trial.others_doubted / max(trial.others, 1)
    line = (
        f"trial with {trial.swapped} {what} swapped on purpose: {trial.found} of them ({100 * recall:.0f} %) were "
        f"found, and {100 * others:.0f} % of the other labels were doubted, too"
    )
    if recall < TRUSTED:
        return [line, "this model misses many wrong labels, so labels that are not listed may be wrong, too"]
    if others > recall / 2:
        return [line, "this model doubts many correct labels, so most of its doubts may be unfounded"]
    return [line]


def _tiny(parts: Parts, pictures: Pictures) -> list[list[str]]:
    """Return the rows of the table about small images, or none if most images are small and probably meant to be."""
    small = [(place, size) for place, (_, _, size) in pictures.items() if min(size) < SMALL]
    tiny = [[split, parts[split].item_name(at), "tiny", "{} x {}".format(*size)] for (split, at), size in small]
    return tiny if 2 * len(tiny) <= len(pictures) else []


def _move(rows: list[list[str]], folder: Path, data: Path) -> int:
    """Move the files of the table into one folder per finding, without replacing files, and return their number."""
    wanted = {path: finding for _, path, finding, *_ in reversed(rows) if finding != LEFT_OUT}
    moves = [(Path(path), folder / finding / Path(path).relative_to(data)) for path, finding in wanted.items()]
    taken = [target for _, target in moves if os.path.lexists(target)] + [folder / MOVED] * (folder / MOVED).exists()
    if taken:
        raise FileExistsError(f"{taken[0]} already exists from an earlier call: give --move-to another folder")
    for path in (path for path, _ in moves if path.is_symlink()):
        raise ValueError(f"{path} is a symbolic link, which would be broken in another folder: remove it by hand")
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / MOVED, ["from", "to"], [[printable(str(path)) for path in move] for move in moves])
    for path, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    return len(moves)
