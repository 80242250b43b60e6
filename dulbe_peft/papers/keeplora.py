"""KeepLoRA: frozen bases from the new task's gradient, outside the weight's principal and the old tasks' directions.

Before the first task, the occupied directions of a layer are W_p: the fewest first right singular vectors of W_0
(d_out x d_in) with sum of sigma_i^2 >= eps_w |W_0|^2. Before every task, with G the gradient of the
cross-entropy over the task's images, and Q = [W_p, M] an orthonormal basis of all directions occupied so far:

    A_t = V_r'                    V_r: top r right singular vectors of G (I - Q Q')
    W_t = W_{t-1} + B_t A_t       B_t trained from 0, all else frozen

After the task, with X the inputs in the merged model, the leading right singular vectors of X (I - Q Q') are added to
M until Q holds a share eps_f of |X|^2. Their energies are the eigenvalues of (I - Q Q') X'X (I - Q Q').

Reference: "KeepLoRA: Continual Learning with Residual Gradient Adaptation", arXiv 2601.19659, section 3.
"""

from dataclasses import dataclass

import torch

from dulbe_peft.papers.projection_memory import (
    ProjectionMemoryStrategy,
    Subspace,
    directions_to_take,
    gpm,
    top_directions,
)
from dulbe_peft.strategies.base import GRADIENTS, Memory, Modes, NewTask
from dulbe_peft.subspaces.decompositions import to_float64
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.records import Fraction


def principal_directions(weight: torch.Tensor, share: float, name: str = "W") -> torch.Tensor:
    """Return W_p, (d_in, p) in float64: the fewest right singular vectors of W with the given share of |W|^2."""
    _, scales, right = torch.linalg.svd(to_float64(weight, name), full_matrices=False)
    energies = scales.square()
    return right[: directions_to_take(energies, float(energies.sum()), share)].T


@dataclass(frozen=True)
class KeepLora(ProjectionMemoryStrategy):
    """Take bases from the new task's gradient, outside the weight's principal directions and old input directions."""

    eps_w: Fraction = 0.85
    eps_f: Fraction = 0.99

    name = "keeplora"
    needs = frozenset({GRADIENTS})

    def plan(self, task: NewTask) -> Modes:
        bases = {}
        for name, old in self._occupied(task).items():
            label = f"gradient of layer {name!r}"
            gradient = to_float64(task.gradients[name], label)
            bases[name] = top_directions(old, gradient.T @ gradient, task.rank(name), label)
        return task.modes(bases)

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        after: dict[tuple[str, ...], Subspace] = {}
        for name, old in self._occupied(task).items():
            label = f"inputs of layer {name!r}"
            after[name,] = gpm(old, to_float64(inputs[name], label), self.eps_f, label)
        return self.to_memory(after)

    def _occupied(self, task: NewTask) -> dict[str, Subspace]:
        """Return Q for each layer name: [W_p, M], or W_p alone at the first task."""
        if task.memory:
            return self.from_memory(task.memory)
        return {
            name: Subspace(principal_directions(layer.get_base_weight(), self.eps_w, name))
            for name, layer in task.layers.items()
        }
