"""Buffers that grow with the classes, and a state dict that brings its own number of classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dulbe_peft.classifiers.calibration import TaskTemperature
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.records import Record, first_problem

EXTRA_STATE = "_extra_state"
UNIT_ROWS = ("visual_prototypes", "text_embeds")
MOST_IMAGES = 2**40  # of a class: sums over the counts of all classes stay far below the largest int64


class ExtraState(Record):
    """What a state dict holds beside the tensors: as JSON in a uint8 tensor, which every serialiser can carry."""

    class_names: list[str]
    calibration: tuple[TaskTemperature, ...]

    def to_tensor(self) -> Tensor:
        return torch.tensor(list(self.model_dump_json().encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> ExtraState:
        try:
            return cls.model_validate_json(bytes(tensor.tolist()))
        except ValidationError as error:
            raise ValueError(f"class names in the state are damaged: {first_problem(error)}") from error


class GrowingState(nn.Module):
    """A module whose state is class names, a calibration and buffers, of which some have one row a class.

    A float64 buffer stays float64 whatever the module is converted to, and stays on the CPU where a device has no
    float64.
    """

    if TYPE_CHECKING:  # every attribute that is not set in a constructor is a buffer

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(self) -> None:
        super().__init__()
        self.calibration: tuple[TaskTemperature, ...] = ()
        self._class_names: list[str] = []
        self._rows: set[str] = set()
        self._ragged: set[str] = set()
        self._derived: dict[str, Any] = {}

    def register_rows(self, name: str, *row_shape: int, dtype: torch.dtype = torch.float32) -> None:
        """Register a buffer with one row a class, empty at first; `register_buffer` makes those that do not grow."""
        self.register_buffer(name, torch.zeros(0, *row_shape, dtype=dtype))
        self._rows.add(name)

    def register_ragged(self, name: str, width: int, dtype: torch.dtype) -> None:
        """Register a buffer with 0 to `width` rows a class, each of `width` numbers."""
        self.register_buffer(name, torch.zeros(0, width, dtype=dtype))
        self._ragged.add(name)

    def tensors(self) -> dict[str, Tensor]:
        """The buffers that belong to the state, by name."""
        left_out = self._non_persistent_buffers_set
        return {name: tensor for name, tensor in self._buffers.items() if tensor is not None and name not in left_out}

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` computes from the buffers, kept until a buffer changes."""
        if name not in self._derived:
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._derived[name] = make()
        return self._derived[name]

    def fork(self) -> Self:
        """A module with the same classes that can learn on without changing this one; tensors are shared."""
        twin = copy.copy(self)
        twin._buffers, twin._derived = dict(self._buffers), {}
        return twin

    def install(self, changes: Mapping[str, Tensor]) -> None:
        """Put new values of buffers in, all at once."""
        buffers = self.tensors()
        self._buffers |= {n: value.to(buffers[n].dtype).to(buffers[n].device) for n, value in changes.items()}
        self._derived = {}

    def with_new_rows(self, new: int) -> dict[str, Tensor]:
        """The buffers with one row a class, with zeros in rows for so many new classes."""
        rows = {name: self.tensors()[name] for name in self._rows}
        return {name: torch.cat([rows[name], rows[name].new_zeros(new, *rows[name].shape[1:])]) for name in rows}

    def shape_with(self, name: str, classes: int) -> tuple[int, ...]:
        """The shape of a buffer with so many classes, which have as many rows each as those of today."""
        shape = tuple(self.tensors()[name].shape)
        if name in self._ragged:
            return (-(-shape[0] * classes // max(1, len(self._class_names))), *shape[1:])
        return (classes, *shape[1:]) if name in self._rows else shape

    @property
    def state_size(self) -> int:
        """Numbers kept."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def nbytes(self) -> int:
        """Bytes that the kept numbers take."""
        return self.nbytes_with(len(self._class_names))

    def nbytes_with(self, classes: int) -> int:
        """Bytes that the kept numbers take with so many classes."""
        shapes = {name: self.shape_with(name, classes) for name in self.tensors()}
        return sum(math.prod(shapes[name]) * tensor.element_size() for name, tensor in self.tensors().items())

    @property
    def device(self) -> torch.device:
        """Where features are taken to; float64 buffers may have to stay on the CPU."""
        tensors = list(self.tensors().values())
        return next((tensor for tensor in tensors if tensor.dtype != torch.float64), tensors[0]).device

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], classes: int) -> None:
        """Raise a `ValueError` unless these are the shapes of all tensors with this number of classes."""
        buffers = self.tensors()
        for problem, names in (("Missing", set(buffers) - set(shapes)), ("Unexpected", set(shapes) - set(buffers))):
            if names:
                raise ValueError(f"{problem} key(s) among the tensors: {', '.join(sorted(names)):.200}")
        for name in buffers:
            expected = self.shape_with(name, classes)
            if name in self._ragged and len(shapes[name]) == 2:
                expected = (min(shapes[name][0], classes * expected[1]), expected[1])
            if tuple(shapes[name]) != expected:
                raise ValueError(f"{name} must be {expected} for {classes} classes, got {tuple(shapes[name])}")

    def get_extra_state(self) -> Tensor:
        return ExtraState(class_names=self._class_names, calibration=self.calibration).to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        extra = ExtraState.from_tensor(state)
        self._class_names, self.calibration = extra.class_names, extra.calibration

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._derived = {}

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dtype != torch.float64 or tensor.is_meta:
                return fn(tensor)
            device = fn(torch.zeros(1, device=tensor.device)).device
            return tensor if device.type == "mps" else tensor.to(device)

        return super()._apply(convert, recurse)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Resizes to the number of classes in the file; a state that is incomplete or inconsistent changes nothing."""
        missing = [prefix + key for key in (*self.tensors(), EXTRA_STATE) if prefix + key not in state_dict]
        if missing:
            missing_keys += missing
            return
        state = {key: state_dict[prefix + key] for key in self.tensors()}
        try:
            self._check(state, ExtraState.from_tensor(state_dict[prefix + EXTRA_STATE]).class_names)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"state is inconsistent: {error}")
            return
        for key, buffer in self.tensors().items():
            self._buffers[key] = buffer.new_zeros(state[key].shape)
        self._derived = {}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _check(self, state: Mapping[str, Tensor], class_names: list[str]) -> None:
        if class_names:
            check_class_names(class_names)
        for name, buffer in self.tensors().items():
            if state[name].is_floating_point() != buffer.is_floating_point():
                raise ValueError(f"{name} must be of the kind of {buffer.dtype}, got {state[name].dtype}")
            if not torch.isfinite(state[name]).all():
                raise ValueError(f"{name} holds NaN or infinity")
            if not buffer.is_floating_point() and ((state[name] < 0) | (state[name] > MOST_IMAGES)).any():
                found = f"{state[name].tolist()!r:.100}"
                raise ValueError(f"{name} must be numbers of images, 0 to {MOST_IMAGES}, got {found}")
            if name in UNIT_ROWS and not ((state[name].float().norm(dim=-1) - 1).abs() < 1e-2).all():
                raise ValueError(f"{name} must hold unit vectors")
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, len(class_names))
