"""The tensors that a classifier keeps, their layout, and what was computed from them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.tensors import has_values, identity, is_finite
from dulbe_peft.utils.torch_settings import float32_by_default, one_thread

CLASSES = ".classes"  # contains a dot, so it cannot be the name of a tensor
MOST_IMAGES = 2**40  # images of one class, so that sums over all classes stay far below the largest int64


@dataclass(frozen=True, eq=False)
class Layout:
    """Shape and type of a tensor; see `per_class` and `shared`. An axis that is a name grows with the classes."""

    axes: tuple[int | str, ...]
    dtype: torch.dtype
    start: Tensor | None = None
    unit: bool = False
    may_be_zero: bool = False

    @property
    def grows(self) -> bool:
        """Whether it has rows for classes."""
        return any(isinstance(axis, str) for axis in self.axes)

    def empty(self) -> Tensor:
        """Return the tensor of a classifier without classes."""
        if self.start is not None:
            return self.start.clone()
        return torch.zeros([0 if isinstance(axis, str) else axis for axis in self.axes], dtype=self.dtype)


def per_class(
    *row_shape: int | str,
    dtype: torch.dtype = torch.float32,
    of: str = CLASSES,
    unit: bool = False,
    may_be_zero: bool = False,
) -> Layout:
    """Lay out a tensor with one row per class, which is empty at first.

    Args:
        row_shape: Shape of a row. An entry may be a name, as in `of`, if the columns grow.
        dtype: Type of the tensor. A float64 tensor stays float64 if the classifier is converted to another type, and
            stays on the CPU if a device has no float64.
        of: What the rows belong to. The default means one row per class. The name of a tensor of integers means as
            many rows per class as that tensor says, from 0 to the width of a row. Any other name means a number of
            rows that the rule itself manages.
        unit: Whether the rows are unit vectors.
        may_be_zero: Whether a row of unit vectors may be zero instead.
    """
    return Layout((of, *row_shape), dtype, None, unit, may_be_zero)


def shared(*shape: int, dtype: torch.dtype = torch.float32, start: Tensor | None = None) -> Layout:
    """Lay out a tensor that does not grow; at first it is `start` or zero."""
    return Layout(shape if start is None else tuple(start.shape), dtype if start is None else start.dtype, start)


class Derived(NamedTuple):
    """A value that was computed from tensors, and the key of these tensors.

    The tensors are stored, too, because ids of deleted tensors could be used again.
    """

    of: tuple[str, ...] | None
    key: tuple[object, ...]
    sources: tuple[Tensor, ...]
    value: Any


class State(Mapping[str, Tensor]):
    """The tensors of a classifier by name, also as attributes, and its class names. Nothing changes them.

    Attributes:
        layouts: The layout of each tensor.
        class_names: All seen classes, in the order in which they were learned.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        tensors: Mapping[str, Tensor],
        class_names: Sequence[str],
        derived: dict[str, Derived] | None = None,
    ) -> None:
        self.layouts, self._tensors, self.class_names = layouts, tensors, class_names
        self._derived: dict[str, Derived] = {} if derived is None else derived

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self._tensors:
            raise AttributeError(f"there is no tensor {name!r}")
        return self._tensors[name]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def device(self) -> torch.device:
        """The device on which features are classified. float64 tensors may be on the CPU instead."""
        tensors = list(self.values())
        return next((tensor for tensor in tensors if tensor.dtype != torch.float64), tensors[0]).device

    def derived(self, name: str, make: Callable[[], object], of: Collection[str] | None = None) -> Any:
        """Return what `make` computes, and cache it until one of the tensors `of`, by default any, changes."""
        if not has_values():  # while a graph is exported, which computes the value itself
            return make()
        cached = self._derived.get(name)
        if cached is None or cached.key != self._key(of):
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad(), one_thread(), float32_by_default():
                value = make()
            self.keep_derived(name, value, of)
            return value
        return cached.value

    def keep_derived(self, name: str, value: object, of: Collection[str] | None = None) -> None:
        """Let `derived` return this value until a tensor changes."""
        sources = tuple(self[each] for each in self._sources(of))
        self._derived[name] = Derived(None if of is None else tuple(of), self._key(of), sources, value)

    def _sources(self, of: Collection[str] | None) -> list[str]:
        return [name for name in self if of is None or name in of]

    def _key(self, of: Collection[str] | None) -> tuple[object, ...]:
        tensors = [self[name] for name in self._sources(of)]
        return identity(tensors, samples=distributed.is_available() and distributed.is_initialized())

    def replaced(self, changes: Mapping[str, Tensor], class_names: Sequence[str] | None = None) -> "State":
        """Return a state with other values of some tensors, in the types and on the devices of the present ones."""
        new = {name: value.to(self[name].dtype).to(self[name].device) for name, value in changes.items()}
        kept = {n: each for n, each in self._derived.items() if each.of is not None and not new.keys() & set(each.of)}
        names = self.class_names if class_names is None else class_names
        return State(self.layouts, {**self, **new}, names, kept)

    def with_rows(self, **further: Tensor) -> dict[str, Tensor]:
        """Return tensors with further rows added, in the type of these rows, by name."""
        return {name: torch.cat([self[name].to(rows.dtype), rows]) for name, rows in further.items()}

    def with_new_rows(self, new: int) -> dict[str, Tensor]:
        """Return the tensors with one row per class, extended by rows of zeros for `new` classes."""
        kept = {name: self[name] for name, layout in self.layouts.items() if layout.axes[:1] == (CLASSES,)}
        return {name: torch.cat([kept[name], kept[name].new_zeros(new, *kept[name].shape[1:])]) for name in kept}

    def rows_of(self, kept: Tensor) -> dict[str, Tensor]:
        """Return the tensors that grow, with the rows and columns of the classes for which `kept`, (C,), is True."""
        changes = {}
        for name, layout in self.layouts.items():
            if layout.grows:
                changes[name] = self[name]
            for place, axis in enumerate(layout.axes):
                if axis == CLASSES or axis in self:
                    rows = kept if axis == CLASSES else kept.repeat_interleave(self[str(axis)].cpu())
                    changes[name] = changes[name][(slice(None),) * place + (rows.to(self[name].device),)]
        return changes

    def nbytes(self, classes: int) -> int:
        """Return the size of the tensors in bytes for a number of classes.

        The average number of rows per class is taken to be the present one.
        """
        known, total = max(1, self.classes), 0
        for name, tensor in self.items():
            sizes = list(tensor.shape)
            for place, axis in enumerate(self.layouts[name].axes):
                if isinstance(axis, str):
                    sizes[place] = classes if axis == CLASSES else -(-sizes[place] * classes // known)
            total += math.prod(sizes) * tensor.element_size()
        return total

    def check(self) -> None:
        """Raise a `ValueError` unless a classifier with these class names could have these tensors."""
        if self.class_names:
            check_class_names(self.class_names)
        for name, layout in self.layouts.items():
            tensor = self[name]
            if tensor.is_floating_point() != layout.dtype.is_floating_point:
                raise ValueError(f"{name} must be of the kind of {layout.dtype}, got {tensor.dtype}")
            if not is_finite(tensor):
                raise ValueError(f"{name} contains NaN or infinity")
            if not tensor.is_floating_point() and ((tensor < 0) | (tensor > MOST_IMAGES)).any():
                given = f"{tensor.tolist()!r:.100}"
                raise ValueError(f"{name} must be numbers of images, 0 to {MOST_IMAGES}, got {given}")
            lengths = tensor.float().norm(dim=-1) if layout.unit else torch.ones(0)
            if not (((lengths - 1).abs() < 1e-2) | ((lengths == 0) & layout.may_be_zero)).all():
                raise ValueError(f"{name} must consist of unit vectors")
        check_shapes(self.layouts, {name: tuple(tensor.shape) for name, tensor in self.items()}, self.classes)
        for name, layout in self.layouts.items():
            counts = self.get(str(layout.axes[0])) if layout.axes else None
            if counts is not None and int(counts.sum()) != len(self[name]):
                raise ValueError(
                    f"{layout.axes[0]} adds up to {int(counts.sum())}, but {name} has {len(self[name])} rows"
                )


def check_shapes(layouts: Mapping[str, Layout], shapes: Mapping[str, tuple[int, ...]], classes: int) -> None:
    """Raise a `ValueError` unless the tensors of a classifier with this number of classes have these shapes."""
    for problem, names in (("Missing", set(layouts) - set(shapes)), ("Unexpected", set(shapes) - set(layouts))):
        if names:
            raise ValueError(f"{problem} key(s) among the tensors: {', '.join(sorted(names)):.200}")
    sizes: dict[int | str, int] = {CLASSES: classes}
    for name, layout in layouts.items():
        axes = layout.axes
        for axis, size in zip(axes, shapes[name]):
            if isinstance(axis, str):  # the first tensor with an axis determines its size for the others
                sizes.setdefault(axis, min(size, classes * axes[-1]) if isinstance(axes[-1], int) else size)
        expected = tuple(sizes.get(axis, axis) for axis in axes)
        if tuple(shapes[name]) != expected:
            raise ValueError(f"{name} must be {expected} for {classes} classes, got {tuple(shapes[name])}")
