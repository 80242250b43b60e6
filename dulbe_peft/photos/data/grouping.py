"""Groups of images that belong together, such as the frames of one animal or one burst, as --group names them."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from dulbe_peft.classifiers.groups import MANY_ALIKE
from dulbe_peft.data.columns import NO_VALUE, clock
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.unlabelled import package_columns
from dulbe_peft.photos.data.looking import times_taken
from dulbe_peft.utils.terminal import counted, printable

Parts = Mapping[str, LabelledImages]  # the images of one split or two; the training split comes first
DEPLOYMENT = "deploymentID"  # Camtrap DP's column of a camera's stay at a place
# A camera takes up to ten photographs when it is triggered. So a burst of one trigger lasts at most nine times as long
# as the time between two photographs, and fewer than ten photographs may well be a single burst.
BURST = 10
MINUTE = 60.0  # seconds; photographs that were taken this close together may well show the same
FOLDER = "folder"  # groups are the folders in which the files are


def grouped(
    parts: Parts,
    group: str | None,
    seconds: float | None,
    times: Mapping[str, Sequence[float | None]],
) -> tuple[dict[str, LabelledImages], dict[str, list[str | None]], list[str]]:
    """Return the splits with the groups of their images, the names of these groups, and sentences about them.

    The name of an image that is a group of its own is None. Without `group` and `seconds`, there are no names.

    Args:
        parts: Split -> images.
        group: A column of the data, "folder", or a regular expression whose first group names an image's group in its
            path. An image without a value, an inner folder or a match is a group of its own.
        seconds: If given, images that were taken within this time of one another are a group, if `group` does not
            tell them apart, or without `group` their folder or deployment. An image without a time is a group of its
            own.
        times: Split -> the time of each image in seconds, or None; used if `seconds` is given.

    Raises:
        ValueError: If no image has a group, or none was taken at a known time.
    """
    if group is None and seconds is None:
        return dict(parts), {}, []
    if seconds is None:
        keys = {split: _keys(images, group) for split, images in parts.items()}
    else:
        apart = {split: _places(images) if group is None else _keys(images, group) for split, images in parts.items()}
        keys = _bursts(times, apart, seconds)
    alone = sum(key is None for of in keys.values() for key in of)
    if alone == sum(map(len, keys.values())):
        what = f"--group is {group!r}" if group is not None else f"--group-seconds is {seconds:g}"
        raise ValueError(f"{what}, but no image has a group: {_why_alone(group, seconds)}")
    notes = _notes(parts, keys)
    if seconds is not None:
        notes += _long(times, keys, seconds)
    if alone:
        notes.append(
            f"{counted(alone, 'image')} without a group, each a group of its own: {_why_alone(group, seconds)}"
        )
    return {split: images.grouped(_named(images, keys[split])) for split, images in parts.items()}, keys, notes


def bursts_of(parts: Parts) -> tuple[str, list[list[tuple[str, int]]]]:
    """Return a sentence, and the largest bursts, if many photographs were taken within a minute of another one.

    Only photographs of the same class and place are compared. A burst is a list of splits and indices. Return "" and
    no bursts if at most a share of `MANY_ALIKE` of the photographs are in bursts.
    """
    bursts: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    times = {split: times_taken(images) for split, images in parts.items()}
    keys = _bursts(times, {split: _places(images) for split, images in parts.items()}, MINUTE)
    for split, of in keys.items():
        for index, (key, label) in enumerate(zip(of, parts[split].labels.tolist(), strict=True)):
            if key is not None:
                bursts[key, label].append((split, index))
    several = sorted((of for of in bursts.values() if len(of) > 1), key=len, reverse=True)
    together, total = sum(map(len, several)), sum(map(len, parts.values()))
    if together <= MANY_ALIKE * total:
        return "", []
    words = (
        f"{together} of {counted(total, 'photograph')} were taken within {MINUTE:g} seconds of another one of their "
        "class and place; if these show the same items or animals, give their groups "
        f"(--group-seconds {MINUTE:g} or --group)"
    )
    return words, several


class Unlabelled(NamedTuple):
    """Photographs without labels, and to which group each belongs.

    Attributes:
        images: The photographs, with the numbers of their groups.
        names: The name of each photograph's group, or None for a group of its own.
        times: When each photograph was taken, in seconds since 1970, or None; empty without `seconds`.
        sites: Where each photograph was taken: its deployment, or else its folder.
        notes: Sentences about the groups.
    """

    images: LabelledImages
    names: list[str | None]
    times: list[float | None]
    sites: list[str]
    notes: list[str]


def grouped_photographs(images: LabelledImages, group: str | None, seconds: float | None) -> Unlabelled:
    """Return the groups of photographs without labels, see `grouped`.

    Photographs of a Camtrap DP package have its columns, such as deploymentID, and eventID.
    """
    images.columns = {**images.columns, **package_columns(images)}
    times = [] if seconds is None else times_taken(images)
    parts, names, notes = grouped({"": images}, group, seconds, {"": times})
    return Unlabelled(parts[""], names[""], times, _places(images), notes)


def _why_alone(group: str | None, seconds: float | None) -> str:
    """Say what an image without a group lacks."""
    if seconds is not None:
        return "the photographs do not say when they were taken" + ("" if group is None else f", or have no {group!r}")
    if group == FOLDER:
        return "the files are directly in the folders of the classes, or in the given folder"
    return f"the value is missing, or no path matches {group!r}"


def _keys(images: LabelledImages, group: str | None) -> list[str | None]:
    """Return the name of each image's group, or None for an image without a group; "" for all if `group` is None."""
    if group is None:
        return [""] * len(images)
    if group in images.columns:
        values = images.columns[group]()
        texts = [str(values[position]).strip() for position in images.indices.tolist()]
        return [None if text.lower() in NO_VALUE else text for text in texts]
    paths = [images.path_of(index) for index in range(len(images))]
    if group == FOLDER and images.by_path:
        return [_folder(path, isinstance(images, ImageFolder)) for path in paths]
    try:
        pattern = re.compile(group)
    except re.error as error:
        raise ValueError(f"--group {group!r} is no regular expression: {error}") from error
    if not pattern.groups:
        listed = f"its columns are {', '.join(map(repr, images.columns))}" if images.columns else "it has no columns"
        raise ValueError(
            f"--group is {group!r}, expected a column of the data ({listed}), {FOLDER!r} for the folders of files, or "
            "a regular expression with a group in parentheses, such as '(item[0-9]+)'"
        )
    matches = [pattern.search(path) for path in paths]
    return [match[1] or None if match else None for match in matches]


def _places(images: LabelledImages) -> list[str]:
    """Return where each image was taken, such as by which camera: its deployment, or else its folder.

    A folder with the name of the image's class is left out, because a burst may show several classes.
    """
    known = _keys(images, DEPLOYMENT) if DEPLOYMENT in images.columns else [None] * len(images)
    if not images.by_path:
        return [place or "" for place in known]
    names = images.class_names or ()
    labels = [names[label] if 0 <= label < len(names) else None for label in images.labels.tolist()]
    folders = [PurePosixPath(images.path_of(index)).parts[:-1] for index in range(len(images))]
    inner = ["/".join(part for part in of if part != label) for of, label in zip(folders, labels, strict=True)]
    return [place or folder for place, folder in zip(known, inner, strict=True)]


def _folder(path: str, of_classes: bool) -> str | None:
    """Return the folder of a file: class/ITEM in a folder of classes, even if ITEM contains folders."""
    folders = PurePosixPath(path).parts[:-1]
    folders = folders[:2] if of_classes else folders
    return "/".join(folders) if len(folders) > (1 if of_classes else 0) else None


def _bursts(
    times: Mapping[str, Sequence[float | None]], keys: Mapping[str, Sequence[str | None]], seconds: float
) -> dict[str, list[str | None]]:
    """Divide each group where no photograph was taken for longer than `seconds`."""
    taken: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    bursts: dict[str, list[str | None]] = {split: [None] * len(each) for split, each in times.items()}
    for split, each in times.items():
        for index, (key, time) in enumerate(zip(keys[split], each, strict=True)):
            if key is not None and time is not None:
                taken[key].append((time, split, index))
    for key, rows in taken.items():
        rows.sort()
        first, before = rows[0][0], rows[0][0]
        for time, split, index in rows:
            first = time if time - before > seconds else first
            before, bursts[split][index] = time, f"{key} at {clock(first)}".strip()
    return bursts


def _long(
    times: Mapping[str, Sequence[float | None]], keys: Mapping[str, Sequence[str | None]], seconds: float
) -> list[str]:
    """Return a sentence on bursts that last much longer than the time between two photographs of a burst."""
    spans: dict[str, tuple[float, float]] = {}
    for split, of in keys.items():
        for key, time in zip(of, times[split], strict=True):
            if key is not None and time is not None:
                first, last = spans.get(key, (time, time))
                spans[key] = min(first, time), max(last, time)
    long = sorted((first - last, key) for key, (first, last) in spans.items() if last - first > BURST * seconds)
    if not long:
        return []
    span, key = long[0]
    return [
        f"{counted(len(long), 'group')} much longer than --group-seconds {seconds:g}, such as {printable(key)!r} with "
        f"{-span:g} seconds: if its photographs do not show the same, give fewer seconds"
    ]


def _named(images: LabelledImages, keys: Sequence[str | None]) -> list[str]:
    """Return a text for each image's group. The content of an image without a group tells it apart."""
    contents = images.contents() if None in keys else [b""] * len(keys)
    return [
        f"group {key}" if key is not None else f"image {(content or images.item_name(index).encode()).hex()}"
        for index, (key, content) in enumerate(zip(keys, contents, strict=True))
    ]


def _notes(parts: Parts, keys: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Return sentences on the groups, on those in two splits, and on classes that lie in one group."""
    sizes = Counter(key for of in keys.values() for key in of if key is not None)
    name, most = sizes.most_common(1)[0]
    notes = [f"{counted(len(sizes), 'group')} of images, of which {printable(name)!r} has {most}"]
    total = sum(map(len, keys.values()))
    if 2 * most > total >= BURST:
        notes.append(f"the group {printable(name)!r} holds {most} of {total} images: is it really one item or event?")
    inside = [{key for key in of if key is not None} for of in keys.values()]
    shared = sorted(set.intersection(*inside)) if len(inside) > 1 else []
    if shared:
        both = f"{counted(len(shared), 'group')} in training and test images, such as {printable(shared[0])!r}"
        notes.append(f"{both}, so the accuracy is too optimistic")
    split, train = next(iter(parts.items()))
    owners: dict[str, set[int]] = defaultdict(set)
    for key, label in zip(keys[split], train.labels.tolist(), strict=True):
        if key is not None:
            owners[key].add(label)
    if mixed := [key for key, labels in owners.items() if len(labels) > 1]:
        notes.append(f"{counted(len(mixed), 'group')} with images of several classes, such as {printable(mixed[0])!r}")
    return notes


def in_one_group(images: LabelledImages, keys: Sequence[str | None]) -> list[str]:
    """Return the classes with several images, all of which are in one group, given the names of their groups."""
    texts = np.array([key if key is not None else f"\0{index}" for index, key in enumerate(keys)])
    return [
        images.class_names[label]
        for label in np.unique(images.labels[images.labels >= 0])
        if (images.labels == label).sum() > 1 and len(set(texts[images.labels == label])) == 1
    ]
