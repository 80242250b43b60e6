"""A class-incremental stream: an order of classes, an initial increment, an increment.

    class order     [ 87  0  52 | 58  44 | 91  68 ]      initial_increment=3, increment=2
    tasks               0           1        2
    labels            0  1   2    0   1    0   1         a task's labels index its own class_names

A dataset is anything with `len(dataset)` and `dataset[i]` giving a {"image", "label"} dict or an (image, label)
pair. Where the labels can be had alone (`.labels`, `.targets`, a "label" column), no image is decoded for them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

# The order iCaRL drew for CIFAR-100, which later work on it keeps.
# fmt: off
ICARL_CIFAR100_ORDER = (
    87, 0, 52, 58, 44, 91, 68, 97, 51, 15, 94, 92, 10, 72, 49, 78, 61, 14, 8, 86, 84, 96, 18, 24, 32, 45, 88, 11,
    4, 67, 69, 66, 77, 47, 79, 93, 29, 50, 57, 83, 17, 81, 41, 12, 37, 59, 25, 20, 80, 73, 1, 28, 6, 46, 62, 82,
    53, 9, 31, 75, 38, 63, 33, 74, 27, 22, 36, 3, 16, 21, 60, 19, 70, 90, 89, 43, 5, 42, 65, 76, 40, 30, 23, 85, 2,
    95, 56, 48, 71, 64, 98, 13, 99, 7, 34, 55, 54, 26, 35, 39,
)
# fmt: on
CLASS_NAME_STYLES = ("verbatim", "spaces")


def check_class_names(names: Iterable[str], seen: Collection[str] = ()) -> tuple[str, ...]:
    """Class names as a tuple of plain strings; any text will do, for a name is data and never a path.

    Args:
        names: names of the classes, in the order their labels index.
        seen: names that are taken already, for example by earlier tasks.

    Raises:
        TypeError: `names` is a single string or has no order, or a name is not a string.
        ValueError: there is no name; a name is blank, holds a control character such as NUL, or cannot be written as
            UTF-8; or it occurs twice, here or in `seen`.
    """
    if isinstance(names, str):
        raise TypeError(f"class_names must be a sequence of strings, got the single string {names!r}")
    if isinstance(names, Set) or not isinstance(names, Iterable):
        raise TypeError(f"class_names must be a sequence of strings, got {names!r:.100}, which has no order")
    taken = set(seen)
    checked: list[str] = []
    positions: dict[str, int] = {}
    for position, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"class_names[{position}] must be a string, got {name!r} of type {type(name).__name__}")
        name = str(name)  # numpy's strings are a subclass that JSON and pickle need not meet
        if not name.strip():
            raise ValueError(f"class_names[{position}] is {name!r}; a class name must not be blank")
        if any(unicodedata.category(character) == "Cc" for character in name):
            raise ValueError(f"class_names[{position}] is {name!r}; a class name must not hold control characters")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"class_names[{position}] is {name!r}, which cannot be written as UTF-8") from error
        if name in positions:
            raise ValueError(f"class_names[{position}] and [{positions[name]}] are both {name!r}; names must differ")
        if name in taken:
            raise ValueError(f"class_names[{position}] is {name!r}, a class that was seen already")
        positions[name] = position
        checked.append(name)
    if not checked:
        raise ValueError("class_names is empty; at least one class is needed")
    return tuple(checked)


def format_class_name(name: str, style: str = "verbatim") -> str:
    """A class name as it goes into a prompt: as it stands, or with underscores turned into spaces.

    Raises:
        ValueError: `style` is neither "verbatim" nor "spaces".
    """
    if style not in CLASS_NAME_STYLES:
        raise ValueError(f"class name style is {style!r}; it must be one of {', '.join(CLASS_NAME_STYLES)}")
    return name.replace("_", " ") if style == "spaces" else name


def format_prompts(class_names: Iterable[str], template: str, style: str = "verbatim") -> list[str]:
    """One prompt per class: `template` with its "{}" replaced by the name, whatever characters the name holds.

    Raises:
        TypeError: `template` is not a string.
        ValueError: `template` does not hold "{}" exactly once, `style` is unknown, or two classes give one prompt.
    """
    if not isinstance(template, str):
        raise TypeError(f"template must be a string, got {template!r} of type {type(template).__name__}")
    if template.count("{}") != 1:
        raise ValueError(f'template is {template!r}; it must hold "{{}}" exactly once, where the class name goes')
    prompts: dict[str, str] = {}
    for name in class_names:
        prompt = template.replace("{}", format_class_name(name, style))
        if prompt in prompts:
            raise ValueError(f"classes {prompts[prompt]!r} and {name!r} give the same prompt {prompt!r}: rename one")
        prompts[prompt] = name
    return list(prompts)


def read_sample(dataset: Any, index: int) -> tuple[Any, int]:
    """Image and label of `dataset[index]`, which may be a {"image", "label"} mapping or a pair.

    Raises:
        TypeError: the sample has another form, or its label is no integer.
        ValueError: there is no such sample, or the mapping lacks a key.
    """
    try:
        sample = dataset[index]
    except (IndexError, KeyError) as error:
        raise ValueError(f"dataset has length {len(dataset)} but no sample {index}: {error!r}") from error
    if isinstance(sample, Mapping):
        if "image" not in sample or "label" not in sample:
            raise ValueError(f"sample {index} has the keys {sorted(map(str, sample))}; 'image' and 'label' are needed")
        image, label = sample["image"], sample["label"]
    elif isinstance(sample, (tuple, list)) and len(sample) == 2:
        image, label = sample
    else:
        raise TypeError(
            f"sample {index} is a {type(sample).__name__}; "
            'it must be a {"image", "label"} mapping or an (image, label) pair'
        )
    value = np.asarray(label)
    if value.ndim or value.dtype.kind not in "iu":
        raise TypeError(f"the label of sample {index} is {label!r} of type {type(label).__name__}; it must be an int")
    return image, int(value)


def _label_array(values: Any, source: str) -> np.ndarray:
    """Labels as int64, refusing the bools and floats that a cast would let through."""
    if isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{source}[{index}] is {value!r}; labels must be ints")
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{source} has {array.ndim} dimensions; one label per image is needed")
    if array.dtype.kind not in "iu":
        first = f", the first is {values[0]!r}" if array.size else ""
        raise TypeError(f"{source} must hold ints, got values of type {array.dtype}{first}")
    return array.astype(np.int64)


def dataset_labels(dataset: Any) -> np.ndarray:
    """Labels of a dataset, int64 of shape (len(dataset),), without decoding an image wherever that is possible.

    Raises:
        TypeError: `dataset` has no length or no items, is a mapping of splits, or a label is not an int.
        ValueError: there is not one label per image, or a label is negative.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(f"dataset is a mapping with the keys {sorted(map(str, dataset))}; pass one of its splits")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"dataset is a {type(dataset).__name__}; it must have __len__ and __getitem__")
    column_names = getattr(dataset, "column_names", None)
    if getattr(dataset, "labels", None) is not None:
        labels = _label_array(dataset.labels, "dataset.labels")
    elif getattr(dataset, "targets", None) is not None:
        labels = _label_array(dataset.targets, "dataset.targets")
    elif isinstance(column_names, list):
        if "label" not in column_names:
            raise ValueError(f"dataset has the columns {column_names}; name the one with the labels 'label'")
        labels = _label_array(dataset.with_format(None)["label"][:], "dataset['label']")
    elif hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        labels = dataset_labels(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    else:
        labels = np.array([read_sample(dataset, index)[1] for index in range(len(dataset))], dtype=np.int64)
    if len(labels) != len(dataset):
        raise ValueError(f"dataset has {len(labels)} labels but {len(dataset)} images")
    if len(labels) and labels.min() < 0:
        index = int(labels.argmin())
        raise ValueError(f"the label of sample {index} is {labels[index]}; labels must not be negative")
    return labels


def dataset_class_names(dataset: Any) -> tuple[str, ...] | None:
    """Class names a dataset carries (`.class_names`, `.classes`, `.features["label"].names`), or None."""
    for attribute in ("class_names", "classes"):
        names = getattr(dataset, attribute, None)
        if names is not None:
            return check_class_names(names)
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping) and getattr(features.get("label"), "names", None) is not None:
        return check_class_names(features["label"].names)
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        return dataset_class_names(dataset.dataset)
    return None


class ClassSubset:
    """The images of some classes of a dataset, with labels that index `class_names`.

    Args:
        dataset: the dataset the images come from.
        indices: positions in `dataset`, shape (n,), int64.
        labels: label of each of them in this subset, shape (n,), int64.
        class_names: names of the subset's classes.
        source_labels: the label each sample must carry in `dataset`, shape (n,), int64.
    """

    def __init__(
        self,
        dataset: Any,
        indices: np.ndarray,
        labels: np.ndarray,
        class_names: tuple[str, ...],
        source_labels: np.ndarray,
    ) -> None:
        self.dataset = dataset
        self.indices = indices
        self.labels = labels
        self.class_names = class_names
        self.source_labels = source_labels

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = int(self.indices[index])
        image, label = read_sample(self.dataset, position)
        if label != self.source_labels[index]:  # a target_transform, say, would put the image into another class
            raise ValueError(
                f"sample {position} of the dataset gives the label {label}, "
                f"but its list of labels says {self.source_labels[index]}"
            )
        return {"image": image, "label": int(self.labels[index])}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def item_name(self, index: int) -> str:
        """Name of an image for messages: its path where the dataset knows it."""
        position = int(self.indices[index])
        name = getattr(self.dataset, "item_name", None)
        return str(name(position)) if name is not None else f"item {position}"

    def content_id(self, index: int) -> str:
        """What tells this image from others without reading it; its position where the dataset knows no better."""
        position = int(self.indices[index])
        content_id = getattr(self.dataset, "content_id", None)
        return str(content_id(position)) if content_id is not None else f"#{position}"


@dataclass(frozen=True)
class Task:
    """One step of a stream: training images, test images (or None) and the names of its new classes.

    The labels of both datasets index `class_names`.
    """

    train: Any
    test: Any
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_names", check_class_names(self.class_names))


def _check_count(name: str, value: Any, num_classes: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if not 1 <= value <= num_classes:
        raise ValueError(f"{name} is {value}; it must lie in 1..{num_classes}, the number of classes")
    return int(value)


def _resolve_order(class_order: Any, seed: int | None, class_names: tuple[str, ...]) -> np.ndarray:
    """The order of classes as a permutation of 0..C-1, int64."""
    num_classes = len(class_names)
    if class_order is not None and seed is not None:
        raise ValueError(f"class_order and seed={seed!r} are both given; a stream has one order")
    if class_order is None:
        if seed is None:
            return np.arange(num_classes)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed must be an int, got {seed!r} of type {type(seed).__name__}")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must lie in 0..{2**32 - 1}, got {seed}")
        return np.random.RandomState(seed).permutation(num_classes).astype(np.int64)
    if isinstance(class_order, str):
        if class_order != "icarl":
            raise ValueError(f'class_order is {class_order!r}; the one order known by name is "icarl"')
        if num_classes != len(ICARL_CIFAR100_ORDER):
            raise ValueError(f'class_order "icarl" is for the 100 classes of CIFAR-100, got {num_classes} classes')
        return np.array(ICARL_CIFAR100_ORDER, dtype=np.int64)
    if not isinstance(class_order, Iterable):
        raise TypeError(f"class_order must be a sequence of ints or class names, got {class_order!r}")
    entries = list(class_order)
    if entries and all(isinstance(entry, str) for entry in entries):
        labels = {name: label for label, name in enumerate(class_names)}
        unknown = [name for name in entries if name not in labels]
        if unknown:
            raise ValueError(f"class_order names {unknown[0]!r}, which is no class of the dataset")
        entries = [labels[name] for name in entries]
    for position, entry in enumerate(entries):
        if isinstance(entry, (bool, np.bool_)) or not isinstance(entry, (int, np.integer)):
            raise TypeError(f"class_order[{position}] is {entry!r}; the entries must be all ints or all class names")
    if sorted(entries) != list(range(num_classes)):
        absent = sorted(set(range(num_classes)) - set(entries))
        detail = f"{absent[0]} is absent" if absent else f"it has {len(entries)} entries"
        raise ValueError(f"class_order must hold each of 0..{num_classes - 1} once, but {detail}")
    return np.array(entries, dtype=np.int64)


def checked_labels(dataset: Any, class_names: Sequence[str], name: str = "dataset") -> np.ndarray:
    """Labels of a dataset that must not be empty, int64 of shape (len(dataset),), each an index of `class_names`.

    Args:
        name: what messages call the dataset.

    Raises:
        TypeError: as `dataset_labels`.
        ValueError: as `dataset_labels`, or the dataset is empty, or a label is out of range.
    """
    labels = dataset_labels(dataset)
    if not len(labels):
        raise ValueError(f"{name} is empty; at least one image is needed")
    if labels.max() >= len(class_names):
        index = int(labels.argmax())
        raise ValueError(
            f"the label of {name} sample {index} is {labels[index]}; there are {len(class_names)} classes, "
            f"so labels must lie in 0..{len(class_names) - 1}"
        )
    return labels


def _common_class_names(train: Any, test: Any) -> tuple[str, ...]:
    train_names = dataset_class_names(train)
    test_names = None if test is None else dataset_class_names(test)
    if train_names is not None and test_names is not None and train_names != test_names:
        differing = sorted(set(train_names) ^ set(test_names))
        detail = f"{differing[0]!r} is in one only" if differing else "they stand in another order"
        raise ValueError(f"train and test disagree on the class names: {detail}")
    names = train_names or test_names
    if names is None:
        raise ValueError("the dataset carries no class names; pass class_names")
    return names


def _take(dataset: Any, labels: np.ndarray, classes: np.ndarray, names: tuple[str, ...]) -> ClassSubset:
    """The images of `classes`, in the dataset's order, labelled by their class's position in `classes`."""
    positions = np.full(int(max(labels.max(), classes.max())) + 1, -1, dtype=np.int64)
    positions[classes] = np.arange(len(classes))
    indices = np.flatnonzero(positions[labels] >= 0)
    return ClassSubset(dataset, indices, positions[labels[indices]], names, labels[indices])


def select_classes(dataset: Any, class_names: Sequence[str]) -> ClassSubset:
    """The images of the named classes of a dataset that carries class names, labelled by their place in `class_names`.

    Raises:
        ValueError: the dataset carries no class names, or has no class of such a name.
    """
    wanted, carried = check_class_names(class_names), dataset_class_names(dataset)
    if carried is None:
        raise ValueError("the dataset carries no class names to select by")
    absent = sorted(set(wanted) - set(carried))
    if absent:
        raise ValueError(f"the dataset has no class {absent[0]!r}")
    labels = checked_labels(dataset, carried)
    return _take(dataset, labels, np.array([carried.index(name) for name in wanted], dtype=np.int64), wanted)


def class_incremental_tasks(
    train: Any,
    test: Any = None,
    class_names: Sequence[str] | None = None,
    *,
    increment: int,
    initial_increment: int | None = None,
    class_order: Sequence[int] | Sequence[str] | str | None = None,
    seed: int | None = None,
) -> list[Task]:
    """Split a dataset into tasks of `increment` new classes each.

    Args:
        train: training images; labels index `class_names`.
        test: test images with the same labels, or None.
        class_names: names of all classes; None takes those the datasets carry.
        increment: new classes per task; the last task takes what is left.
        initial_increment: classes of the first task, 50 for "B50"; None is `increment`.
        class_order: all labels or all names in the order they arrive, or "icarl" for iCaRL's order of CIFAR-100.
        seed: draws the order as `RandomState(seed).permutation(C)` instead; 1993 in the protocols of the field.

    Raises:
        TypeError: a count, the seed, a label or an entry of the order has the wrong type.
        ValueError: a count or label is out of range, the order is no permutation, a dataset is empty, a class has no
            training image, a task has no test image, or the class names are missing, double or contradictory.
    """
    names = _common_class_names(train, test) if class_names is None else check_class_names(class_names)
    increment = _check_count("increment", increment, len(names))
    first = (
        increment if initial_increment is None else _check_count("initial_increment", initial_increment, len(names))
    )
    order = _resolve_order(class_order, seed, names)
    train_labels = checked_labels(train, names, "train")
    test_labels = None if test is None else checked_labels(test, names, "test")
    for label, count in enumerate(np.bincount(train_labels, minlength=len(names))):
        if not count:
            raise ValueError(f"class {label} ({names[label]!r}) has no training image")
    tasks: list[Task] = []
    for classes in np.split(order, range(first, len(names), increment)):
        task_names = tuple(names[label] for label in classes)
        held_out = None if test_labels is None else _take(test, test_labels, classes, task_names)
        if held_out is not None and not len(held_out):
            raise ValueError(f"task {len(tasks)} has no test image for any of its classes {list(task_names)}")
        tasks.append(Task(_take(train, train_labels, classes, task_names), held_out, task_names))
    return tasks
