"""Buffers that grow with the classes, and a state dict that brings its own number of classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dulbe_peft.classifiers.calibration import TaskTemperature, read_temperatures, write_temperatures
from dulbe_peft.data.names import check_class_names

EXTRA_STATE = "_extra_state"


class GrowingState(nn.Module):
    """A module whose state is class names, a calibration and buffers, of which some have one row a class.

    A float64 buffer stays float64 whatever the module is converted to, and stays on the CPU where a device has no
    float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self._class_names: list[str] = []
        self._calibration: tuple[TaskTemperature, ...] = ()
        self._rows: set[str] = set()
        self._derived: dict[str, Any] = {}

    def register_rows(self, name: str, *row_shape: int, dtype: torch.dtype = torch.float32) -> None:
        """Register a buffer with one row a class, empty at first; `register_buffer` makes those that do not grow."""
        self.register_buffer(name, torch.zeros(0, *row_shape, dtype=dtype))
        self._rows.add(name)

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` computes from the buffers, kept until a buffer changes."""
        if name not in self._derived:
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._derived[name] = make()
        return self._derived[name]

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise a ValueError for buffer values of the right shapes that this classifier cannot have."""

    def added_since(self, classes: int) -> dict[str, torch.Tensor]:
        """The buffers that earlier versions did not save, with the values that stand for "unknown".

        Args:
            classes: how many classes the older state has.
        """
        return {}

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]], classes: int) -> None:
        """Raise a `ValueError` unless buffers of these shapes fit this module with this number of classes."""
        for name, buffer in self.tensors().items():
            expected = (classes, *buffer.shape[1:]) if name in self._rows else tuple(buffer.shape)
            if name in shapes and tuple(shapes[name]) != expected:
                kind = _kind(buffer.dtype)
                raise ValueError(f"{name} must be {kind} {expected} for {classes} classes, got {tuple(shapes[name])}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers that belong to the state, by name."""
        left_out = self._non_persistent_buffers_set
        return {name: tensor for name, tensor in self._buffers.items() if tensor is not None and name not in left_out}

    def get_extra_state(self) -> torch.Tensor:
        """Class names and calibration as UTF-8 JSON in a uint8 tensor, which every serialiser can carry."""
        return encode_extra_state(self._class_names, self._calibration)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self._class_names, self._calibration = _decode_extra_state(state)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self._derived = {}

        def convert(tensor: torch.Tensor) -> torch.Tensor:
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
        keys = [*self.tensors(), EXTRA_STATE]
        state_dict = _completed(self, state_dict, prefix)
        missing = [prefix + key for key in keys if prefix + key not in state_dict]
        if missing:
            missing_keys += missing
            return
        state = {key: state_dict[prefix + key] for key in keys}
        try:
            self._check(state)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"state is inconsistent: {error}")
            return
        for key, buffer in self.tensors().items():
            self._buffers[key] = buffer.new_zeros(state[key].shape)
        self._derived = {}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _check(self, state: dict[str, Any]) -> None:
        names, _ = _decode_extra_state(state.pop(EXTRA_STATE))
        if names:
            check_class_names(names)
        for name, buffer in self.tensors().items():
            tensor = state[name]
            if not isinstance(tensor, torch.Tensor) or _kind(tensor.dtype) != _kind(buffer.dtype):
                got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ValueError(f"{name} must be {_kind(buffer.dtype)}, got {got}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds NaN or infinity")
        self.check_shapes({name: tuple(tensor.shape) for name, tensor in state.items()}, len(names))
        self.check_state(state)


def _completed(module: GrowingState, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The state with what an earlier version left out: all of `added_since`, or none of it."""
    later = module.added_since(0)
    if not later or any(prefix + name in state_dict for name in later):
        return state_dict
    try:
        names, _ = _decode_extra_state(state_dict[prefix + EXTRA_STATE])
    except (KeyError, ValueError, TypeError):  # the checks that follow say what is wrong
        return state_dict
    return state_dict | {prefix + name: value for name, value in module.added_since(len(names)).items()}


def encode_extra_state(names: list[str], temperatures: Sequence[TaskTemperature]) -> torch.Tensor:
    """A plain list of names where no temperature has been fitted, as version 0.1 wrote and reads it."""
    content: Any = names
    if temperatures:
        content = {"class_names": names, "calibration": write_temperatures(temperatures)}
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def _decode_extra_state(state: torch.Tensor) -> tuple[list[str], tuple[TaskTemperature, ...]]:
    try:
        content = json.loads(bytes(state.tolist()).decode())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"class names in the state are damaged: {error}") from error
    saved = None
    if isinstance(content, dict):
        saved = content.get("calibration")
        content = content.get("class_names")
    if not isinstance(content, list):
        raise TypeError(f"class names in the state must be a list, got {content!r}")
    return content, read_temperatures(saved)


def _kind(dtype: torch.dtype) -> str:
    return "floating-point" if dtype.is_floating_point else "integer"
