"""Align and digest tensors, and read and write safetensors files: complete or absent, and with finite values only."""

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

SAMPLES = 256  # how many values of each weight identify a model
ALIGNMENT = 64  # bytes; torch allocates memory at multiples of it
_PART = 2**22  # values that are copied at once
_PAGE, _DONTNEED = 2**16, 4  # bytes, a multiple of every page of Linux; its MADV_DONTNEED


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is on the CPU and its address is not a multiple of 64 bytes.

    Some processors round products differently by the address. What torch computes is aligned, but a row of it, an
    array of NumPy, and a tensor in a mapped file need not be.
    """
    return tensor if _is_aligned(tensor) else tensor.clone()


def from_array(array: np.ndarray) -> torch.Tensor:
    """Return an array as an `aligned` tensor."""
    return aligned(torch.from_numpy(array))


def align_weights(model: nn.Module) -> None:
    """Make the weights and buffers of a model `aligned`, one at a time. Their values stay."""
    for tensor in _plain_weights(model):
        if not _is_aligned(tensor):
            tensor.data = tensor.data.clone()


def unmap_weights(model: nn.Module) -> None:
    """Copy the weights of a model that was just loaded out of its file, to aligned addresses.

    transformers maps a file into memory, so weights lie wherever its header ends, and they would change if the file
    were overwritten. What was copied is freed, so memory for one copy of the weights is enough.
    """
    mapped = _mapped_files()
    for tensor in _plain_weights(model):
        old = tensor.data.contiguous()
        tensor.data = torch.empty_like(old)
        for new_part, part in zip(tensor.data.view(-1).split(_PART), old.view(-1).split(_PART), strict=True):
            new_part.copy_(part)
            start, end = part.data_ptr(), part.data_ptr() + part.nbytes
            if any(first <= start and end <= last for first, last in mapped):
                _free_pages(start, end)


def _plain_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights and buffers on the CPU that are no tensors of another package, such as quantised ones."""
    tensors = chain(model.parameters(), model.buffers())
    return [tensor for tensor in tensors if type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"]


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.data_ptr() % ALIGNMENT == 0


def _mapped_files() -> list[tuple[int, int]]:
    """Return the addresses, from start to end, at which Linux has mapped files into this process."""
    if sys.platform != "linux":
        return []
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(errors="replace").splitlines()]
    parts = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].startswith("/")]
    return [(int(first, 16), int(last, 16)) for first, last in parts]


def _free_pages(start: int, end: int) -> None:
    """Free the whole pages of a mapped file between two addresses; a later read would load them again."""
    start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file completely or not at all, with the file mode that the umask gives.

    The same tensors and metadata give the same bytes.
    """
    from dulbe_peft.utils.files import replacing  # here, because most users of this module write no files

    with replacing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)
        if len(metadata) > 1:
            _sort_metadata(temporary)


def _sort_metadata(path: str | Path) -> None:
    """Write the entries of a safetensors file's metadata in alphabetical order; safetensors gives them any order."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise ValueError(f"{path}: a sorted header has {len(text)} bytes, and the written one {length}")
        file.seek(8)
        file.write(text.ljust(length))


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in the header of a safetensors file, without reading its tensors."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors, on the CPU, and the metadata of a safetensors file. NaN or infinity raises a ValueError.

    The tensors are `aligned`, so what is loaded computes the same bits as what was saved.
    """
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: aligned(file.get_tensor(name)) for name in list(file.keys())}
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensors, metadata


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity. If its sum is finite, this needs no extra memory."""
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def identity(tensors: Collection[torch.Tensor], samples: bool = False) -> tuple[object, ...]:
    """Return a cache key for results computed from tensors, which changes if a tensor is replaced or written to.

    PyTorch does not count writes through `.data`, writes to inference tensors, or writes by collective operations,
    such as DDP's copies of buffers. With `samples`, the key therefore includes about 256 values of each tensor. The
    tensors must be kept as long as the key, so that their ids stay unique.
    """
    key = tuple((id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)
    return key + tuple(sampled_values(t) for t in tensors if not t.is_meta) if samples else key


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
        # The file is not mapped, so memory for one copy is enough, and a file that is replaced changes nothing.
        with safe_open(path, framework="pt", backend="pread") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error


def give_back_memory() -> None:
    """Return freed memory to the system, which the C library of Linux otherwise keeps, up to gigabytes."""
    with suppress(OSError, AttributeError, TypeError):  # other systems
        ctypes.CDLL(None).malloc_trim(0)
