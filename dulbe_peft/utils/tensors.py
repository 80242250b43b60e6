"""Files of tensors: safetensors only, whole or not there, and finite."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SAMPLES = 256  # values of each weight that tell a model from others


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all, with the mode the umask gives."""
    from dulbe_peft.utils.files import replacing  # what only computes with tensors writes no file

    with replacing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file's header; no tensor is read, and no memory is taken for one."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, on the CPU; a tensor with NaN or infinity is a ValueError."""
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensors, metadata


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity; takes no memory where its sum is finite."""
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def identity(tensors: Collection[torch.Tensor], samples: bool = False) -> tuple[Any, ...]:
    """Return a key of what has been computed from tensors: another one where one is replaced or written to.

    PyTorch does not count writes through `.data`, to tensors of inference mode, or by collective operations, as when
    DDP copies buffers: with `samples`, 256 values of each tensor are a part of the key. As long as the key is kept,
    the tensors must be, so that their ids stay unique.
    """
    key = tuple((id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)
    return key + tuple(map(sampled_values, tensors)) if samples else key


def sampled_values(tensor: torch.Tensor) -> bytes:
    """Return 256 values of a tensor, or all of fewer, as the bytes of float64."""
    return _samples(tensor.detach().flatten()).numpy().tobytes()


def _samples(flat: torch.Tensor) -> torch.Tensor:
    """Return 256 values of a tensor, (n,), or all of fewer, in float64 on the CPU."""
    return flat[:: max(1, len(flat) // SAMPLES)].double().cpu()


def has_values() -> bool:
    """Return whether Python may look at the values of tensors: not while a graph is made, to compile or export it."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the weights' names, shapes, types and 256 values of each."""
    return _digest(weights, _samples)


def rounded_digest(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> str:
    """Return the SHA-256 of the weights' names, shapes and 256 values of each, rounded to a type."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)].to(dtype).double().cpu()
        found.update(f"{name} {tuple(tensor.shape)}".encode() + values.numpy().tobytes())
    return found.hexdigest()


def whole_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the weights' names, shapes, types and all values."""
    return _digest(weights, lambda flat: flat.contiguous().view(torch.uint8))


def _digest(weights: Mapping[str, torch.Tensor], values: Callable[[torch.Tensor], torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        # A quantised tensor of torchao's kind has no views.
        flat = (tensor if type(tensor) is torch.Tensor else tensor.dequantize()).detach().flatten()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + values(flat).cpu().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
