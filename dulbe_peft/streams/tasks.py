"""A class-incremental stream, defined by an order of classes, an initial increment and an increment.

class order     [ 87  0  52 | 58  44 | 91  68 ]      initial_increment=3, increment=2
tasks               0           1        2
labels            0  1   2    0   1    0   1         labels index the class_names of their task
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dulbe_peft.data.images import LabelledImages, labelled_images, named_images
from dulbe_peft.data.names import check_class_names, normalized
from dulbe_peft.streams.orders import ICARL_CIFAR100_ORDER, MAGMAX_CIFAR100_ORDER, NAMED_ORDERS
from dulbe_peft.utils.settings import check_int


def resolve_labels(names: Sequence[str], class_names: tuple[str, ...], setting: str) -> np.ndarray:
    """Return the labels of the classes `names`, int64; error messages call the setting that gives them `setting`."""
    labels = {name: label for label, name in enumerate(class_names)}
    unknown = [name for name in names if normalized(name) not in labels]
    if unknown:
        raise ValueError(f"{setting} names {unknown[0]!r}, which is not a class of the dataset")
    return np.array([labels[normalized(name)] for name in names], dtype=np.int64)


def resolve_order(
    class_order: Sequence[int] | Sequence[str] | str | None, seed: int | None, class_names: tuple[str, ...]
) -> np.ndarray:
    """Return the order of the classes as a permutation of 0..C-1, int64."""
    num_classes = len(class_names)
    if class_order is not None and seed is not None:
        raise ValueError(f"class_order and seed={seed!r} are both given: pass only one of them")
    if class_order is None:
        if seed is None:
            return np.arange(num_classes)
        seed = check_int("seed", seed, 0, 2**32 - 1)
        return np.random.RandomState(seed).permutation(num_classes).astype(np.int64)
    if isinstance(class_order, str):
        return _named_order(class_order, num_classes)
    if not isinstance(class_order, Iterable):
        raise TypeError(f"class_order must be a sequence of ints or class names, got {class_order!r}")
    given: Sequence[object] = list(class_order)
    names = [entry for entry in given if isinstance(entry, str)]
    if names and len(names) == len(given):
        given = resolve_labels(names, class_names, "class_order").tolist()
    entries = [check_int(f"class_order[{position}]", entry, 0) for position, entry in enumerate(given)]
    if sorted(entries) != list(range(num_classes)):
        absent = sorted(set(range(num_classes)) - set(entries))
        detail = f"{absent[0]} is missing" if absent else f"it has {len(entries)} entries"
        raise ValueError(f"class_order must contain each of 0..{num_classes - 1} once, but {detail}")
    return np.array(entries, dtype=np.int64)


def _named_order(name: str, num_classes: int) -> np.ndarray:
    if name == "natural":
        return resolve_order(None, None, ("",) * num_classes)
    if name == "pilot":
        return resolve_order(None, 1993, ("",) * num_classes)
    if name not in NAMED_ORDERS:
        raise ValueError(f"class_order is {name!r}; the orders with a name are {', '.join(NAMED_ORDERS)}")
    order = ICARL_CIFAR100_ORDER if name == "icarl" else MAGMAX_CIFAR100_ORDER
    if num_classes != len(order):
        raise ValueError(f"class_order {name!r} is for the 100 classes of CIFAR-100, got {num_classes} classes")
    return np.array(order, dtype=np.int64)


@dataclass(frozen=True)
class Task:
    """One step of a stream: training images, test images (or None) and the names of its new classes.

    The labels of both data sets index `class_names`. Any data set that `learn_task` accepts is converted to one with
    `len`, items {"image", "label"}, `labels` and `class_names`.

    Raises:
        TypeError: If `learn_task` does not accept a data set of this type.
        ValueError: If a data set is empty, a label is out of range, or the names contradict those of the data set.
    """

    train: Any
    test: Any
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_names", check_class_names(self.class_names))
        object.__setattr__(self, "train", named_images(self.train, self.class_names))
        if self.test is not None:
            object.__setattr__(self, "test", named_images(self.test, self.class_names))


def class_incremental_tasks(
    train: object,
    test: object = None,
    class_names: Sequence[str] | None = None,
    *,
    increment: int,
    initial_increment: int | None = None,
    class_order: Sequence[int] | Sequence[str] | str | None = None,
    seed: int | None = None,
    first_tasks: Sequence[Sequence[str]] = (),
) -> list[Task]:
    """Split a dataset into tasks of `increment` new classes each; the last task has the remaining classes.

    Args:
        train: Training images; labels index `class_names`.
        test: Test images with the same labels, or None.
        class_names: Names of all classes; None takes the names in the data sets.
        increment: Number of classes of each task.
        initial_increment: Number of classes of the first task, such as 50 for "B50"; None takes `increment`.
        class_order: All labels or all names in the order they arrive, or a name: "icarl" and "magmax" for the
            orders of CIFAR-100 in the code of these papers, "pilot" for `seed=1993`, "natural" for that of the data.
        seed: Seed of a random order, `RandomState(seed).permutation(C)`, in place of `class_order`; published
            protocols use 1993.
        first_tasks: Class names of the first tasks, if an earlier run has finished them.

    Raises:
        TypeError: If a count, the seed, a label or an entry of the order has the wrong type.
        ValueError: If the numbers, the order or the names do not fit the data, a class has no training image, or a
            task has no test image.
    """
    train, test, names = _with_same_names(train, test, class_names)
    increment = check_int("increment", increment, 1, len(names))
    wanted = increment if initial_increment is None else initial_increment
    first = check_int("initial_increment", wanted, 1, len(names))
    order = resolve_order(class_order, seed, names)
    finished = [resolve_labels(task, names, "first_tasks") for task in first_tasks]
    if finished:
        order, first = order[~np.isin(order, np.concatenate(finished))], increment
    tasks: list[Task] = []
    for classes in [*finished, *(np.split(order, range(first, len(order), increment)) if len(order) else [])]:
        task_names = tuple(names[label] for label in classes)
        held_out = None if test is None else test.select(task_names)
        if held_out is not None and not len(held_out):
            raise ValueError(f"task {len(tasks) + 1} has no test image for any of its classes {list(task_names)}")
        tasks.append(Task(train.select(task_names), held_out, task_names))
    return tasks


def _with_same_names(
    train: object, test: object, class_names: Sequence[str] | None
) -> tuple[LabelledImages, LabelledImages | None, tuple[str, ...]]:
    """Return both data sets with the same class names, after a check that every class has a training image."""
    train, test = labelled_images(train), None if test is None else labelled_images(test)
    if class_names is None:
        class_names = train.class_names or (() if test is None else test.class_names)
        if test is not None and test.class_names not in ((), class_names):
            differing = sorted(set(class_names) ^ set(test.class_names))
            detail = f"{differing[0]!r} is in only one of them" if differing else "their order differs"
            raise ValueError(f"train and test disagree on the class names: {detail}")
    train = named_images(train, class_names or None, title="train")
    names = train.class_names
    test = None if test is None else named_images(test, names, title="test")
    for label, count in enumerate(np.bincount(train.labels, minlength=len(names))):
        if not count:
            raise ValueError(f"class {label} ({names[label]!r}) has no training image")
    return train, test, names
