"""LoDA: a general LoRA pair for directions that old and new tasks share, and an isolated pair for the new task alone.

With S_old the sum of X'X over the finished tasks and S_t that of the new one, both before training on it:

    general    P_G = the top eigenvectors of S_old + S_t
    isolated   P_I = the orthonormalised top generalised eigenvectors of (S_t, S_old): large X_t u, small X_old u
               S_old + rho I = L L',  L^-1 S_t L^-T = V diag(l) V',  P_I = orthonormalised L^-T V
    training   dW = B_G P_G' + B_I P_I'; P_G and P_I are frozen
    afterwards W <- W + B_G Lambda P_G' + B_I P_I';  S_old <- S_old + S_t

The adapter's shared mode is the general pair and its residual mode the isolated one. The two need not be orthogonal.

The available sources do not give these formulas of the paper, so they are derived here:
- C = B_G Lambda keeps the outputs of old inputs as they were and those of new inputs as they are after training:
      min over C of |C P_G' X_old'|^2 + |(C - B_G) P_G' X_t'|^2;  Lambda = (P_G' S_t P_G) (P_G' (S_old + S_t) P_G)^-1
- The ridge is rho = ridge * trace(S_old) / d_in. Without it, directions that no old task uses would always win, even
  where S_t is small.
- At the first task P_G takes the first r_S eigenvectors of S_t and P_I the next r_R; Lambda is 1.

Reference: He et al., "Task-Driven Subspace Decomposition for Knowledge Sharing and Isolation in LoRA-based Continual
Learning", arXiv 2603.00191.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.papers.two_towers import TwoTowers
from dulbe_peft.strategies.base import INPUTS, Memory, Modes, NewTask
from dulbe_peft.strategies.occupation import OccupationStrategy, old_statistic
from dulbe_peft.subspaces.decompositions import fix_signs, orthonormal_complement, to_float64, top_eigenvectors
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.settings import Positive


def general_pair(moment: torch.Tensor, count: int, name: str = "S") -> torch.Tensor:
    """Return the top eigenvectors of S, (d, d) in float64, completed to orthonormal columns, (d, count)."""
    vectors = top_eigenvectors(moment, count, name)
    return torch.cat([fix_signs(vectors), orthonormal_complement(vectors, count - vectors.shape[1])], dim=1)


def isolated_pair(old: torch.Tensor, new: torch.Tensor, count: int, ridge: float, name: str = "S") -> torch.Tensor:
    """Return P_I, (d, count), from S_old and S_t, (d, d), in float64; rho is `ridge` times S_old's mean eigenvalue."""
    identity = torch.eye(len(old), dtype=old.dtype, device=old.device)
    rho = ridge * float(old.trace()) / len(old)
    for _ in range(10):  # sums in float32 may have slightly negative eigenvalues
        factor, failed = torch.linalg.cholesky_ex(old + rho * identity)
        if not failed:
            break
        rho *= 10
    else:
        raise ValueError(f"old {name} is not positive semi-definite: expected a sum of X'X")
    half = torch.linalg.solve_triangular(factor, new, upper=False)
    whitened = torch.linalg.solve_triangular(factor, half.T, upper=False)
    vectors = general_pair((whitened + whitened.T) / 2, count, name)
    return fix_signs(torch.linalg.qr(torch.linalg.solve_triangular(factor.T, vectors, upper=True)).Q)


def recalibration(basis: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return Lambda = (P'S_t P) (P'(S_old + S_t) P)^-1, (r, r), for a basis P, (d, r)."""
    total = basis.T @ (old + new) @ basis
    return basis.T @ new @ basis @ torch.linalg.pinv(total, hermitian=True)


@dataclass(frozen=True)
class Loda(OccupationStrategy):
    """LoDA without its gradient-aligned optimisation."""

    ridge: Positive = 1e-3
    towers: Literal[1, 2] = 1  # 2: LoDA-CLIP, with the scores of the untouched model as well; see `two_towers`

    name = "loda"
    needs = frozenset({INPUTS})
    orthonormal = False
    remembers_inputs = False  # the inputs were already collected before the task

    def encoding(self, memory: Memory | None) -> Encoding | None:
        return TwoTowers() if self.towers == 2 else None

    def plan(self, task: NewTask) -> Modes:
        bases: dict[str, torch.Tensor] = {}
        for names in task.inputs.groups:
            label = f"inputs of layer {names[0]!r}"
            new, old = to_float64(task.inputs[names[0]], label), old_statistic(task, names[0])
            rank = max(map(task.rank, names))
            if old is None:
                basis = general_pair(new, rank, label)
            else:
                general = general_pair(old.to(new) + new, task.ranks[0], label)
                isolated = isolated_pair(old.to(new), new, rank - task.ranks[0], self.ridge, label)
                basis = torch.cat([general, isolated], dim=1)
            bases.update(dict.fromkeys(names, basis))
        return task.modes(bases)

    def finish(self, task: NewTask) -> None:
        adapter, layers, rank = task.adapter_name, task.layers, task.ranks[0]
        for names in task.inputs.groups:
            new, old = to_float64(task.inputs[names[0]], names[0]), old_statistic(task, names[0])
            if old is None or not rank:
                continue
            basis = layers[names[0]].dulbe_P[adapter][:, :rank].to(new)
            scale = recalibration(basis, old.to(new), new)
            for name in names:
                up = layers[name].current_up(adapter).to(new)
                layers[name].set_up_projections(adapter, torch.cat([up[:, :rank] @ scale, up[:, rank:]], dim=1))

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        """Return S_old + S_t; `inputs` is not used, because S_t comes from the model before training."""
        return super().remember(task, task.inputs)
