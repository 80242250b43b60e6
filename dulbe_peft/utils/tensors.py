"""Read and write safetensors files, which are complete or absent and hold only finite values, and digest tensors."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SAMPLES = 256  # how many values of each weight identify a model


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file completely or not at all, with the file mode that the umask gives."""
    from dulbe_peft.utils.files import replacing  # here, because most users of this module write no files

    with replacing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in the header of a safetensors file, without reading its tensors."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors, on the CPU, and the metadata of a safetensors file. NaN or infinity raises a ValueError.

    The tensors are copies at aligned addresses, because some processors round products differently by the address. So
    what is loaded computes the same bits as what was saved.
    """
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensors, metadata


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity. If its sum is finite, this needs no extra memory."""
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def identity(tensors: Collection[torch.Tensor], samples: bool = False) -> tuple[Any, ...]:
    """Return a cache key for results computed from tensors, which changes if a tensor is replaced or written to.

    PyTorch does not count writes through `.data`, writes to inference tensors, or writes by collective operations,
    such as DDP's copies of buffers. With `samples`, the key therefore includes about 256 values of each tensor. The
    tensors must be kept as long as the key, so that their ids stay unique.
    """
    key = tuple((id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)
    return key + tuple(map(sampled_values, tensors)) if samples else key


def sampled_values(tensor: torch.Tensor) -> bytes:
    """Return about 256 values of a tensor, or all if there are fewer, as the bytes of float64."""
    return _samples(tensor.detach().flatten()).numpy().tobytes()


def _samples(flat: torch.Tensor) -> torch.Tensor:
    """Return about 256 evenly spaced values of a tensor, (n,), or all if there are fewer, as float64 on the CPU."""
    return flat[:: max(1, len(flat) // SAMPLES)].double().cpu()


def has_values() -> bool:
    """Return whether Python can read the values of tensors, which it cannot while a graph is traced or compiled."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the weights' names, shapes, dtypes and about 256 values of each."""
    return _digest(weights, _samples)


def rounded_digest(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> str:
    """Return the SHA-256 of the weights' names, shapes and about 256 values of each, rounded to `dtype`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLES)].to(dtype).double().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' names, shapes, dtypes and all bytes, in the order of their names."""
    # The stride of an empty tensor can be 0, and then it cannot be viewed as bytes.
    return _digest(tensors, lambda flat: flat.contiguous().view(torch.uint8) if len(flat) else flat)


def _digest(weights: Mapping[str, torch.Tensor], values: Callable[[torch.Tensor], torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        # torchao's quantised tensors cannot be viewed as bytes.
        flat = (tensor if type(tensor) is torch.Tensor else tensor.dequantize()).detach().flatten()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(values(flat).cpu().numpy().data)
    return digest.hexdigest()


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
