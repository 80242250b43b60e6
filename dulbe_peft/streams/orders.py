"""The order in which the classes of a stream arrive."""

from collections.abc import Iterable, Sequence

import numpy as np

from dulbe_peft.data.names import normalized
from dulbe_peft.utils.settings import check_int

# The class order that iCaRL drew for CIFAR-100 and that later papers use too.
# fmt: off
ICARL_CIFAR100_ORDER = (
    87, 0, 52, 58, 44, 91, 68, 97, 51, 15, 94, 92, 10, 72, 49, 78, 61, 14, 8, 86, 84, 96, 18, 24, 32, 45, 88, 11,
    4, 67, 69, 66, 77, 47, 79, 93, 29, 50, 57, 83, 17, 81, 41, 12, 37, 59, 25, 20, 80, 73, 1, 28, 6, 46, 62, 82,
    53, 9, 31, 75, 38, 63, 33, 74, 27, 22, 36, 3, 16, 21, 60, 19, 70, 90, 89, 43, 5, 42, 65, 76, 40, 30, 23, 85, 2,
    95, 56, 48, 71, 64, 98, 13, 99, 7, 34, 55, 54, 26, 35, 39,
)
# fmt: on


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
        if class_order != "icarl":
            raise ValueError(f'class_order is {class_order!r}; the only order with a name is "icarl"')
        if num_classes != len(ICARL_CIFAR100_ORDER):
            raise ValueError(f'class_order "icarl" is for the 100 classes of CIFAR-100, got {num_classes} classes')
        return np.array(ICARL_CIFAR100_ORDER, dtype=np.int64)
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
