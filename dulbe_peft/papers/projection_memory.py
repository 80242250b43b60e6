"""Gradient projection memory: tracks which input directions of a layer earlier tasks occupy and which are free.

An energy matrix K, (d, d) in float64, measures how much a task uses each direction: the energy of a unit vector v is
v'Kv, and the total energy is tr K. Each method chooses its K, for example X'X of the layer's inputs.

Reference: Saha et al., "Gradient Projection Memory for Continual Learning", arXiv 2103.09762; Liang and Li, "Adaptive
Plasticity Improvement for Continual Learning", CVPR 2023 (DualGPM).
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
ROUNDING = 1e-12  # relative tolerance within which a share of the energy counts as reached


@dataclass(frozen=True, eq=False)
class Subspace:
    """The occupied directions of a layer: an orthonormal basis, (d, m), of them or, if side is "free", of the rest."""

    basis: torch.Tensor
    side: str = OCCUPIED

    @property
    def free(self) -> int:
        """Number of free directions."""
        width, count = self.basis.shape
        return count if self.side == FREE else width - count

    def free_basis(self) -> torch.Tensor:
        """Return an orthonormal basis Z of the free directions in float64."""
        basis = to_float64(self.basis, f"basis of {self.side} directions")
        if self.side == FREE:
            return basis
        width, taken = basis.shape
        return orthonormal_complement(basis, width - taken) if taken else torch.eye(width).to(basis)


def directions_to_take(energies: torch.Tensor, total: float, share: float) -> int:
    """Count the directions to take, largest energy first, until the rest hold at most (1 - share) of the total."""
    left = energies.clamp(min=0).flip(0).cumsum(0).flip(0)  # energy of direction i and all later ones
    return int((left > (1 - share) * total * (1 + ROUNDING)).sum())


def gpm(
    old: Subspace, energy: torch.Tensor, share: float, name: str, dual: bool = False, one_less: bool = False
) -> Subspace:
    """Add the free directions of highest energy to the occupied ones until these hold `share` of the energy of K.

    With `one_less`, leave out the last of these directions unless it is the only one. With `dual`, the result stores a
    basis of the side, occupied or free, that has at most d/2 dimensions.
    """
    free = old.free_basis().to(energy)
    energies, vectors = eigh(free.T @ energy @ free, name)
    count = directions_to_take(energies, float(energy.trace()), share)
    count = max(1, count - 1) if one_less else count
    if dual and (old.side == FREE or old.basis.shape[1] + count > len(energy) / 2):
        return Subspace(free @ vectors[:, count:], FREE)
    return Subspace(torch.cat([old.basis.to(free), free @ vectors[:, :count]], dim=1))


def top_directions(old: Subspace, energy: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """Return the `count` free directions of highest energy, (d, count) in float64.

    Missing directions are columns of zeros, along which nothing is trained.
    """
    free = old.free_basis().to(energy)
    inside = free.T @ energy @ free
    rounding = len(energy) * EPS64 * float(energy.trace())
    vectors = top_eigenvectors(inside, min(count, len(inside)), name, absolute=rounding)
    basis = fix_signs(free @ vectors)
    return F.pad(basis, (0, count - basis.shape[1]))


@dataclass(frozen=True)
class ProjectionMemoryStrategy(Strategy):
    """Base of strategies that remember the occupied directions between tasks.

    They are saved as tensors named "side:LAYER,LAYER"; layers that read the same input share one tensor.
    """

    remembers_inputs = True
    memory_kind = dict
    orthonormal = False  # where free directions run out, columns of the basis are 0

    @staticmethod
    def to_memory(subspaces: Mapping[tuple[str, ...], Subspace]) -> dict[str, torch.Tensor]:
        """Return the subspaces, keyed by the layers that share them, as named float32 tensors on the CPU."""
        return {
            f"{subspace.side}:{','.join(names)}": subspace.basis.to("cpu", torch.float32).contiguous()
            for names, subspace in subspaces.items()
        }

    @staticmethod
    def from_memory(memory: Memory | None) -> dict[str, Subspace]:
        """Return the inverse of `to_memory`, a subspace per layer name; empty if there is no memory yet."""
        subspaces = {}
        for key, basis in (memory or {}).items():
            side, _, names = key.partition(":")
            subspaces.update(dict.fromkeys(names.split(","), Subspace(basis, side)))
        return subspaces
