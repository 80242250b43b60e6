"""Gradient-projection memories: which input directions of a layer the finished tasks occupy, and which are free.

An energy matrix K, (d, d), symmetric and positive semi-definite in float64, says how much a task uses each direction:
the energy of a unit vector v is v'Kv, and the energy of all directions is tr K. A method chooses K, for example X'X of
the layer's inputs.

    gpm        take the directions of most energy outside the occupied ones until a share of tr K is occupied
    dual_gpm   the same, stored as a basis of whichever side has at most d/2 dimensions

Reference: Saha et al., "Gradient Projection Memory for Continual Learning", arXiv 2103.09762; Liang and Li, "Adaptive
Plasticity Improvement for Continual Learning", CVPR 2023 (DualGPM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.subspaces.decompositions import (
    EPS64,
    eigh,
    fix_signs,
    orthonormal_complement,
    to_float64,
    top_eigenvectors,
)

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

    @classmethod
    def unoccupied(cls, width: int) -> Subspace:
        """The start: no direction of `width` dimensions is occupied."""
        return cls(torch.zeros(width, 0))

    def free_basis(self) -> torch.Tensor:
        """An orthonormal basis Z of the free directions, float64."""
        basis = to_float64(self.basis, f"basis of {self.side} directions")
        if self.side == FREE:
            return basis
        width, taken = basis.shape
        return orthonormal_complement(basis, width - taken) if taken else torch.eye(width).to(basis)


def directions_to_take(energies: torch.Tensor, total: float, share: float) -> int:
    """How many directions to take, largest energy first, until those left hold at most (1 - share) of the total.

    The direction that crosses the threshold is taken, too. A share of 1 takes every direction that has energy.

    >>> directions_to_take(torch.tensor([6.0, 3.0, 0.9, 0.1]), total=20.0, share=0.9)
    2
    """
    left = energies.clamp(min=0).flip(0).cumsum(0).flip(0)  # energy of direction i and of all after it
    return int((left > (1 - share) * total * (1 + ROUNDING)).sum())


def split(old: Subspace, energy: torch.Tensor, share: float, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bases of the free directions that a task with K occupies from now on, and of those that stay free, float64.

    The task's energies in the free directions are the eigenvalues of Z'KZ.
    """
    free = old.free_basis().to(energy)
    energies, vectors = eigh(free.T @ energy @ free, name)
    count = directions_to_take(energies, float(energy.trace()), share)
    return free @ vectors[:, :count], free @ vectors[:, count:]


def gpm(old: Subspace, energy: torch.Tensor, share: float, name: str) -> Subspace:
    """The occupied directions, with those added that a task with K needs to have `share` of its energy occupied."""
    taken, _ = split(old, energy, share, name)
    return Subspace(torch.cat([old.basis.to(taken), taken], dim=1))


def dual_gpm(old: Subspace, energy: torch.Tensor, share: float, name: str) -> Subspace:
    """As `gpm`, but stored as a basis of the free directions once the occupied ones are more than d/2.

    What was stored as free directions stays so: the task's directions leave the basis.
    """
    taken, left = split(old, energy, share, name)
    if old.side == FREE or old.basis.shape[1] + taken.shape[1] > len(energy) / 2:
        return Subspace(left, FREE)
    return Subspace(torch.cat([old.basis.to(taken), taken], dim=1))


def top_directions(old: Subspace, energy: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """The `count` free directions of most energy, (d, count) in float64: top eigenvectors of Z Z' K Z Z', then zeros.

    A zero column of P trains nothing, because x P = 0 there. So a layer without enough free directions that have
    energy above rounding trains fewer.
    """
    free = old.free_basis().to(energy)
    inside = free.T @ energy @ free
    rounding = len(energy) * EPS64 * float(energy.trace())
    _, vectors = top_eigenvectors(inside, min(count, len(inside)), name, absolute=rounding)
    basis = fix_signs(free @ vectors)
    return F.pad(basis, (0, count - basis.shape[1]))


@dataclass(frozen=True)
class ProjectionMemoryStrategy(Strategy):
    """A strategy that remembers which directions are occupied, as tensors named "side:LAYER,LAYER".

    Layers that read one tensor share an entry. Further images of known classes change no occupied direction: those are
    no sum over images.
    """

    remembers_inputs = True
    orthonormal = False  # a column without a free direction is 0
    sides: ClassVar[tuple[str, ...]] = (OCCUPIED, FREE)

    @staticmethod
    def to_memory(subspaces: Mapping[tuple[str, ...], Subspace]) -> dict[str, torch.Tensor]:
        """Subspaces by the layers that share them, as named float32 tensors on the CPU."""
        return {
            f"{subspace.side}:{','.join(names)}": subspace.basis.to("cpu", torch.float32).contiguous()
            for names, subspace in subspaces.items()
        }

    @staticmethod
    def from_memory(memory: Memory | None) -> dict[str, Subspace]:
        """Layer name -> subspace, from what `to_memory` made; empty where there is none."""
        subspaces = {}
        for key, basis in (memory or {}).items():
            side, _, names = key.partition(":")
            subspaces.update(dict.fromkeys(names.split(","), Subspace(basis, side)))
        return subspaces

    def check_memory(self, memory: Memory | None, widths: Mapping[str, int]) -> None:
        if not memory:
            return
        subspaces = self.from_memory(memory)
        if set(subspaces) != set(widths) or any(subspace.side not in self.sides for subspace in subspaces.values()):
            expected = f"{'/'.join(self.sides)}:LAYER,LAYER for all {len(widths)} layers of the model"
            raise ValueError(f"the file holds {sorted(memory)[:3]}, the strategy {self.name!r} keeps {expected}")
        for name, width in widths.items():
            basis = subspaces[name].basis
            if basis.ndim != 2 or basis.shape[0] != width or basis.shape[1] > width or basis.dtype != torch.float32:
                found = f"{tuple(basis.shape)}, {basis.dtype}"
                raise ValueError(f"basis of {name!r} has shape {found}, expected ({width}, at most {width}), float32")
