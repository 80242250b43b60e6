"""Tensor files: safetensors only, whole or not there, finite, readable by whom the umask allows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file whole or not at all, with the mode the umask gives.

    Raises:
        OSError: the file cannot be written; one that was there is as it was.
    """
    with replacing(path) as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, with the mode the umask gives."""
    path = Path(path)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    temporary = folder / path.name
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            yield temporary
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        # safetensors writes files that only their owner can read.
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        folder.rmdir()


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no safetensors file, or a tensor holds NaN or infinity.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")
    return tensors, metadata
