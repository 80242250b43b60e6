"""The frozen bases of one layer's modes, and a check of the bases of a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dulbe_peft.utils.torch_settings import without_autocast


@dataclass(frozen=True, eq=False)
class ModeBases:
    """One layer's bases, and the share of the gradient that they capture.

    Attributes:
        shared: P_S, (d_in, r_S), float32, orthonormal columns.
        residual: P_R, (d_in, r_R), float32, orthonormal columns, orthogonal to P_S.
        shared_capture: |G P_S|^2 / |G|^2, in [0, 1]; 0 if G is zero.
        residual_capture: |G P_R|^2 / |G|^2, in [0, 1]; 0 if G is zero.
        support_rank: K_eff, the number of historical directions in the support; 0 in the first task.
    """

    shared: torch.Tensor
    residual: torch.Tensor
    shared_capture: float = 0.0
    residual_capture: float = 0.0
    support_rank: int = 0


def check_modes(modes: object, shapes: Mapping[str, tuple[tuple[int, ...], ...]], orthonormal: bool) -> None:
    """Raise an error unless `modes` has finite bases P_S and P_R for exactly the layers and shapes in `shapes`.

    With `orthonormal`, their columns must be orthonormal, too.
    """
    if not isinstance(modes, Mapping) or not all(isinstance(value, ModeBases) for value in modes.values()):
        raise TypeError(f"modes must be a mapping of layer names to ModeBases, got {modes!r:.100}")
    missing, unknown = sorted(set(shapes) - set(modes)), sorted(set(modes) - set(shapes))
    if missing or unknown:
        raise ValueError(f"modes must hold every adapted layer and no other: missing {missing}, unknown {unknown}")
    for name, expected in shapes.items():
        got = tuple(modes[name].shared.shape), tuple(modes[name].residual.shape)
        if len(got[0]) == len(got[1]) == 2 and [g[0] for g in got] == [e[0] for e in expected] and got != expected:
            ranks, expected_ranks = ((shapes[0][1], shapes[1][1]) for shapes in (got, expected))
            raise ValueError(
                f"modes of layer {name!r} have shared_rank {ranks[0]} and residual_rank {ranks[1]}, but the adapter's "
                f"configuration has {expected_ranks[0]} and {expected_ranks[1]}: allocate_modes(..., config=...) "
                "takes the ranks from it"
            )
        if got != expected:
            raise ValueError(f"bases of layer {name!r} have shapes {got}, expected {expected}")
        bases = torch.cat([modes[name].shared, modes[name].residual], dim=1).detach().float()
        if not torch.isfinite(bases).all():
            raise ValueError(f"bases of layer {name!r} hold NaN or infinity")
        with without_autocast(bases):
            error = (bases.T @ bases - torch.eye(bases.shape[1], device=bases.device)).abs().max().item()
        if orthonormal and error >= 1e-3:
            raise ValueError(f"bases of layer {name!r} are not orthonormal: |P'P - I| reaches {error}")
