"""The tensors that a classifier keeps, their layout, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import torch
from torch import Tensor, distributed

from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.tensors import has_values, identity, is_finite
from dulbe_peft.utils.torch_settings import float32_by_default, one_thread

T_co = TypeVar("T_co", covariant=True)
CLASSES = ".classes"  # contains a dot, so it cannot be the name of a tensor
MOST_IMAGES = 2**40  # images of one class, so that sums over all classes stay far below the largest int64


@dataclass(frozen=True, eq=False)
class Layout:
    """Shape and type of a tensor; see `per_class` and `shared`. An axis that is a name grows with the classes.

    Attributes:
        start: The tensor of a classifier without classes; None means zeros.
        unit: Whether the rows are unit vectors.
        may_be_zero: Whether a row of unit vectors may be zero instead.
        adds: Whether the tensors of two classifiers are added when they are merged.
        moves: Whether it follows drift z -> z M: rows of classes, z, become z M, and sums S of z' z become M' S M.
        power: Power of an image's weight by which a summand is multiplied, if the tensor is a sum over images; 0 if it
            is a mean or a choice.
        views: Whether it is computed from all views of an image, and not from the image alone.
    """

    axes: tuple[int | str, ...]
    dtype: torch.dtype
    start: Tensor | None = None
    unit: bool = False
    may_be_zero: bool = False
    adds: bool = False
    moves: bool = False
    power: float = 0.0
    views: bool = True

    @property
    def grows(self) -> bool:
        """Whether it has rows for classes."""
        return any(isinstance(axis, str) for axis in self.axes)

    def empty(self) -> Tensor:
        """Return the tensor of a classifier without classes."""
        if self.start is not None:
            return self.start.clone()
        return torch.zeros([0 if isinstance(axis, str) else axis for axis in self.axes], dtype=self.dtype)


def per_class(*row_shape: int | str, dtype: torch.dtype = torch.float32, of: str = CLASSES, **facts: Any) -> Layout:
    """Lay out a tensor with one row per class, which is empty at first.

    Args:
        row_shape: Shape of a row. An entry may be a name, as in `of`, if the columns grow.
        dtype: Type of the tensor. A float64 tensor stays float64 if the classifier is converted to another type, and
            stays on the CPU if a device has no float64.
        of: What the rows belong to. The default means one row per class. The name of a tensor of integers means as
            many rows per class as that tensor says, from 0 to the width of a row. Any other name means a number of
            rows that the rule itself manages.
        facts: `unit`, `may_be_zero`, `adds`, `moves`, `power` and `views` of `Layout`.
    """
    return Layout((of, *row_shape), dtype, **facts)


def shared(*shape: int, dtype: torch.dtype = torch.float32, start: Tensor | None = None, **facts: Any) -> Layout:
    """Lay out a tensor that does not grow; at first it is `start` or zero. `facts` are as in `per_class`."""
    sizes = shape if start is None else tuple(start.shape)
    return Layout(sizes, dtype if start is None else start.dtype, start, **facts)


class State(Mapping[str, Tensor]):
    """The tensors of a classifier by name, also as attributes, and its class names. Nothing changes them.

    Attributes:
        layouts: The layout of each tensor.
        class_names: All seen classes, in the order in which they were learned.
        fitted: What follows from the tensors, as far as it was asked for; see `Fitted.of`.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        tensors: Mapping[str, Tensor],
        class_names: Sequence[str],
        fitted: dict[type[Fitted], Fitted] | None = None,
    ) -> None:
        self.layouts, self._tensors, self.class_names = layouts, tensors, class_names
        self.fitted: dict[type[Fitted], Fitted] = {} if fitted is None else fitted

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

    def replaced(self, changes: Mapping[str, Tensor], class_names: Sequence[str] | None = None) -> State:
        """Return a state with other values of some tensors, in the types and on the devices of the present ones."""
        new = {name: value.to(self[name].dtype).to(self[name].device) for name, value in changes.items()}
        kept = {kind: each for kind, each in self.fitted.items() if not new.keys() & each.state.keys()}
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


@contextmanager
def computing() -> Iterator[None]:
    """Compute what is kept. A tensor made in inference mode could not be used in training later."""
    with torch.inference_mode(False), torch.no_grad(), one_thread(), float32_by_default():
        yield


class once(Generic[T_co]):
    """A property of `Fitted` that is computed when it is first read."""

    def __init__(self, make: Callable[[Any], T_co]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, fitted: None, owner: type) -> Self: ...
    @overload
    def __get__(self, fitted: object, owner: type) -> T_co: ...
    def __get__(self, fitted: object | None, owner: type) -> T_co | Self:
        if fitted is None:
            return self
        if not has_values():  # while a graph is exported or compiled, which computes the value itself
            return self.make(fitted)
        with computing():
            value = self.make(fitted)
        vars(fitted)[self.name] = value  # is found before this property from now on
        return value


class Fitted:
    """What follows from the tensors of a state: chosen settings, solved equations, a temperature.

    `Rule.fitted` returns it. For values of its own, a rule derives a class with a property for each, computed `once`.

    Attributes:
        reads: Names of the tensors that it is computed from; None means all. It is kept until one of them changes.
        rule: The rule.
        state: The state, with these tensors only.
    """

    reads: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, rule: Any, state: State) -> None:
        kept = {name: state[name] for name in state if self.reads is None or name in self.reads}
        self.rule: Any = rule
        self.state = State(state.layouts, kept, state.class_names)
        # The key changes if a tensor is replaced or written to; the tensors are kept, so that ids stay unique.
        samples = distributed.is_available() and distributed.is_initialized()
        self.key = identity(kept.values(), samples) if has_values() else ()

    @classmethod
    def of(cls, rule: object, state: State) -> Self:
        """Return what follows from a state, which is kept there until a tensor changes."""
        new, old = cls(rule, state), state.fitted.get(cls)
        if not has_values():  # while a graph is exported, which computes the values itself
            return new
        if not isinstance(old, cls) or old.rule is not rule or old.key != new.key:
            state.fitted[cls] = old = new
        return old

    def keep(self, **values: object) -> Self:
        """Set properties that are already known; return this object."""
        vars(self).update(values)
        return self

    def after(self, state: State) -> Self:
        """Return what follows from a state without some images, with the choices that were made with these images."""
        return self.of(self.rule, state)

    def beside(self, state: State) -> Self:
        """Return what `after` returns, for a state in which only the class means and numbers of images differ."""
        return self.after(state)

    def chosen(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Choose values of tensors on held-out images of new classes, which the state has not learned.

        A `ValueError` means that too little was learned; the task then does not contribute to the temperature.
        """
        return {}

    @once
    def temperature(self) -> float | None:
        """T of the probabilities; None if it is fitted to the records of the tasks."""
        return None

    @once
    def calibrated(self) -> bool:
        """Whether anything besides these records determines the temperature."""
        return False

    @once
    def warning(self) -> str:
        """A sentence that is warned with once, after images were learned, or ""."""
        return ""

    @once
    def solved(self) -> dict[str, Tensor]:
        """Tensors in float32 that take long to compute from the others, and are therefore saved with them."""
        return {}

    @once
    def solved_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes that `solved` can have for this number of classes."""
        return []


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
