"""The measures behind the paper's diagnostic figures: functions of tensors that give numbers, without any drawing.

demand    gradient of a new task: how large, and which part the modes and the occupied directions take
depths    bridge ensemble: what each depth alone tells, and which depths each class trusts

`feature_drift` has a third: features and prototypes of old classes before and after a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.geodesics import bridge_prototypes
from dulbe_peft.subspaces.allocation import supports_and_modes


@dataclass(frozen=True)
class LayerDemand:
    """How much a new task wants to change one layer, and along which directions.

    `energy` is |G|^2, the squared Frobenius norm of the prospective gradient. The others are shares of it: `shared`
    |G P_S|^2 and `residual` |G P_R|^2 along the modes, `occupied` |G U|^2 along the occupied directions. `chance` is
    K / d_in, what K random directions would take; both are None where no task has been learned.
    """

    energy: float
    shared: float
    residual: float
    occupied: float | None = None
    chance: float | None = None

    @property
    def neither(self) -> float:
        """The part that neither the shared nor the residual modes take: the task cannot write there."""
        return max(0.0, 1.0 - self.shared - self.residual)


@torch.no_grad()
def layer_demands(
    gradients: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int = 1,
    residual_rank: int | Mapping[str, int] = 8,
    support_rank: int = 128,
) -> dict[str, LayerDemand]:
    """The energy of each layer's gradient G, (d_out, d_in), and its parts along modes and occupied directions.

    `stats` has S, (d_in, d_in), or a sketch of it; at most `support_rank` eigenvectors of S are called occupied.

    Reference:
        Appendix "Gradient-space alignment", rho_S and rho_R, and figures "gradient-space diagnostics" and "Motivating
        observations" (a).

    >>> gradient, history = {"layer": torch.diag(torch.tensor([3.0, 0.0, 4.0]))}, torch.diag(torch.tensor([9.0, 1, 0]))
    >>> demand = layer_demands(gradient, {"layer": history}, 1, 1, support_rank=1)["layer"]
    >>> demand.energy, round(demand.occupied, 2), round(demand.chance, 2), round(demand.residual, 2)
    (25.0, 0.36, 0.33, 0.64)
    """
    supports, modes = supports_and_modes(gradients, stats, shared_rank, residual_rank, support_rank)
    found = {}
    for name, gradient in gradients.items():
        matrix = gradient.double()
        energy = float(matrix.square().sum())
        occupied = chance = None
        if name in supports:
            support = supports[name].double()
            occupied = min(1.0, float((matrix @ support).square().sum()) / energy) if energy else 0.0
            chance = support.shape[1] / support.shape[0]
        plan = modes[name]
        found[name] = LayerDemand(energy, plan.shared_capture, plan.residual_capture, occupied, chance)
    return found


@dataclass(frozen=True)
class DepthAccuracy:
    """Shares of images that are named right at every bridge depth, and by all depths together.

    Attributes:
        depths: (K,), 0 is the visual end and 1 the text.
        alone: (K,), accuracy of the classifier that has this one depth.
        classes: (C, K), the same for the images of each class; NaN for a class without images.
        uniform: accuracy of the mean over the head's own depths.
        weighted: accuracy of the head itself, which weighs its depths by their reliability.
    """

    depths: torch.Tensor
    alone: torch.Tensor
    classes: torch.Tensor
    uniform: float
    weighted: float


@torch.no_grad()
def depth_accuracy(
    head: BridgeEnsembleHead, features: torch.Tensor, labels: torch.Tensor, depths: torch.Tensor | None = None
) -> DepthAccuracy:
    """Accuracy of images, (n, d), with labels, (n,), at each bridge depth, (K,); None takes the head's own depths.

    Reference:
        Table "Ablation of the bridge-prototype ensemble"; figures "accuracy across bridge depths" and "Effect of
        fixed bridge depth".
    """
    count = len(head.class_names)
    labels = labels.long().to(head.device)
    features = features.to(head.device, torch.float32)
    images, visual, texts = head._compared(features, {})
    own = head.depths.float()
    wanted = own if depths is None else depths.to(own)
    at_depths = bridge_prototypes(visual, texts, wanted).transpose(0, 1)
    right = torch.stack([(images @ bridges.T).argmax(dim=1) == labels for bridges in at_depths], dim=1)
    mean = bridge_prototypes(visual, texts, own).mean(dim=1)
    return DepthAccuracy(
        depths=wanted.cpu(),
        alone=right.double().mean(dim=0).cpu(),
        classes=torch.stack([right[labels == index].double().mean(dim=0) for index in range(count)]).cpu(),
        uniform=float(((images @ mean.T).argmax(dim=1) == labels).double().mean()),
        weighted=float((head(features).argmax(dim=1) == labels).double().mean()),
    )


@dataclass(frozen=True)
class ReliabilityProfile:
    """Mean and spread of pi_c over the classes at every depth, (K_b,), and each class's expected depth, (C,)."""

    depths: torch.Tensor
    mean: torch.Tensor
    spread: torch.Tensor
    expected: torch.Tensor


@torch.no_grad()
def reliability_profile(head: BridgeEnsembleHead) -> ReliabilityProfile:
    """The reliability of every depth over the classes: figure "Effect of the reliability temperature" (a)."""
    weights = head.reliability.double().cpu()
    expected = head.expected_depth().double().cpu()
    return ReliabilityProfile(
        head.depths.double().cpu(), weights.mean(dim=0), weights.std(dim=0, correction=0), expected
    )
