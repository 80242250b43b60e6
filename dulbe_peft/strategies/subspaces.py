"""Gradient-projection memories: which input directions of a layer the finished tasks occupy, and which are free.

All functions here are pure and compute in float64. An energy matrix K, (d, d), symmetric and positive semi-definite,
says how much a task uses each direction: the energy of a unit vector v is v'Kv, and the energy of all is tr K. A
method chooses K, for example X'X of the layer's inputs.

    grow       GPM: take the directions of most energy outside the occupied ones until a share of tr K is occupied
    dual_gpm   the same, stored as a basis of whichever side has at most d/2 dimensions
    pack       how a method stores its subspaces: named tensors "occupied:LAYER,LAYER" or "free:LAYER,LAYER"

Reference: Saha et al., "Gradient Projection Memory for Continual Learning", arXiv 2103.09762; Liang and Li, "Adaptive
Plasticity Improvement for Continual Learning", CVPR 2023 (DualGPM).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dulbe_peft.subspaces.decompositions import EPS64, eigh, fix_signs, to_float64, top_eigenvectors
from dulbe_peft.subspaces.support import orthonormal_complement

OCCUPIED, FREE = "occupied", "free"
ROUNDING = 1e-12  # a share that is missed by less counts as reached


@dataclass(frozen=True, eq=False)
class Subspace:
    """The occupied directions of a layer, through a basis of them or of their complement.

    Attributes:
        basis: (d, m), orthonormal columns, 0 <= m <= d.
        side: "occupied" where the basis spans the occupied directions, "free" where it spans the others.
    """

    basis: torch.Tensor
    side: str = OCCUPIED

    def free(self) -> torch.Tensor:
        """An orthonormal basis of the free directions, float64."""
        basis = to_float64(self.basis, f"basis of {self.side} directions")
        if self.side == FREE:
            return basis
        width, taken = basis.shape
        return orthonormal_complement(basis, width - taken) if taken else torch.eye(width).to(basis)


def nothing(width: int) -> Subspace:
    """No direction of `width` dimensions is occupied."""
    return Subspace(torch.zeros(width, 0))


def directions_to_take(energies: torch.Tensor, total: float, share: float) -> int:
    """How many directions to take until those left hold at most (1 - share) of the total energy.

    The direction that crosses the threshold is taken, too. A share of 1 takes every direction that has energy.

    >>> directions_to_take(torch.tensor([6.0, 3.0, 0.9, 0.1]), total=20.0, share=0.9)
    2

    Args:
        energies: of the free directions, in descending order.
        total: the energy of all directions, occupied ones included.
        share: the share of `total` to occupy, at most 1.
    """
    left = energies.clamp(min=0).flip(0).cumsum(0).flip(0)  # energy of direction i and of all after it
    return int((left > (1 - share) * total * (1 + ROUNDING)).sum())


def split(old: Subspace, energy: torch.Tensor, share: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The free directions that a task occupies from now on, and those that stay free.

    With an orthonormal basis Z of the free directions, the task's energies there are the eigenvalues of Z'KZ.

    Args:
        old: what earlier tasks occupy.
        energy: K, (d, d), float64.
        share: how much of tr K is to be occupied afterwards.
        name: what an error message calls K.

    Returns:
        Orthonormal bases of both parts, float64.
    """
    free = old.free().to(energy)
    energies, vectors = eigh(free.T @ energy @ free, name)
    count = directions_to_take(energies, float(energy.trace()), share)
    return free @ vectors[:, :count], free @ vectors[:, count:]


def grow(old: Subspace, energy: torch.Tensor, share: float, name: str) -> Subspace:
    """The occupied directions, with those added that a task needs to have `share` of its energy occupied.

    Args:
        old: what earlier tasks occupy, stored as occupied directions.
        energy: K, (d, d), float64.
        share: how much of tr K is to be occupied.
        name: what an error message calls K.
    """
    taken, _ = split(old, energy, share, name)
    return Subspace(torch.cat([old.basis.to(taken), taken], dim=1))


def dual_gpm(old: Subspace, energy: torch.Tensor, share: float, name: str) -> Subspace:
    """As `grow`, but stored as a basis of the free directions once the occupied ones are more than d/2.

    What was stored as free directions stays so: the task's directions leave the basis.
    """
    taken, left = split(old, energy, share, name)
    if old.side == FREE or old.basis.shape[1] + taken.shape[1] > len(energy) / 2:
        return Subspace(left, FREE)
    return Subspace(torch.cat([old.basis.to(taken), taken], dim=1))


def top_directions(old: Subspace, energy: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """The `count` free directions of most energy; zero columns stand for directions that do not exist.

    A zero column of P trains nothing, because x P = 0 there. So a layer without enough free directions that have
    energy above rounding trains fewer.

    Args:
        old: what earlier tasks occupy; Z is an orthonormal basis of the free directions.
        energy: K, (d, d), float64.
        count: how many columns to return.
        name: what an error message calls K.

    Returns:
        (d, count), float64: the top eigenvectors of Z Z' K Z Z' inside Z, then zeros.
    """
    free = old.free().to(energy)
    inside = free.T @ energy @ free
    rounding = len(energy) * EPS64 * float(energy.trace())
    _, vectors = top_eigenvectors(inside, min(count, len(inside)), name, absolute=rounding)
    basis = fix_signs(free @ vectors)
    return F.pad(basis, (0, count - basis.shape[1]))


# ---------------------------------------------------------------------- as named tensors


def pack(subspaces: Mapping[tuple[str, ...], Subspace]) -> dict[str, torch.Tensor]:
    """Subspaces by the layers that share them, as float32 tensors on the CPU, named "side:LAYER,LAYER"."""
    return {
        f"{subspace.side}:{','.join(names)}": subspace.basis.to("cpu", torch.float32).contiguous()
        for names, subspace in subspaces.items()
    }


def unpack(memory: Mapping[str, torch.Tensor] | None) -> dict[str, Subspace]:
    """Layer name -> subspace, from what `pack` made; empty where there is none."""
    subspaces = {}
    for key, basis in (memory or {}).items():
        side, _, names = key.partition(":")
        subspaces.update(dict.fromkeys(names.split(","), Subspace(basis, side)))
    return subspaces


def check_packed(memory: object, widths: Mapping[str, int], sides: Sequence[str] = (OCCUPIED, FREE)) -> None:
    """Raise a `ValueError` unless `memory` is what `pack` makes of these layers, each of them once; None passes.

    Args:
        memory: what was read from a file.
        widths: layer name -> d_in.
        sides: the sides that the method stores.
    """
    if not memory:
        return
    if not isinstance(memory, dict):
        raise ValueError(f"the file holds {type(memory).__name__}, expected one basis a layer")
    seen: list[str] = []
    for key, basis in memory.items():
        side, _, names = key.partition(":")
        layers = names.split(",")
        unknown = [name for name in layers if name not in widths]
        if side not in sides or unknown:
            raise ValueError(f"tensor {key!r} is no basis of this model: expected {'/'.join(sides)}:LAYER,LAYER")
        seen += layers
        for width in sorted({widths[name] for name in layers}):
            if basis.ndim != 2 or basis.shape[0] != width or basis.shape[1] > width or basis.dtype != torch.float32:
                shape = f"{tuple(basis.shape)}, {basis.dtype}"
                raise ValueError(f"tensor {key!r} has shape {shape}, expected ({width}, at most {width}), float32")
        error = (basis.T @ basis - torch.eye(basis.shape[1], device=basis.device)).abs()
        if basis.shape[1] and not error.max() < 1e-3:
            raise ValueError(f"columns of tensor {key!r} are not orthonormal: |F'F - I| reaches {error.max():.3g}")
    if sorted(seen) != sorted(widths):
        odd = sorted(set(widths) - set(seen)) or sorted({name for name in seen if seen.count(name) > 1})
        raise ValueError(f"the memory must hold every layer once; missing or repeated: {odd[:3]}")
