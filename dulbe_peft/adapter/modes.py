"""The frozen bases of one layer's modes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class ModeBases:
    """One layer's bases, and how much of the gradient they take in.

    Attributes:
        shared: P_S, (d_in, r_S), float32, orthonormal columns.
        residual: P_R, (d_in, r_R), float32, orthonormal columns, orthogonal to P_S.
        shared_capture: |G P_S|^2 / |G|^2, in [0, 1]; 0 where G is zero.
        residual_capture: |G P_R|^2 / |G|^2, in [0, 1]; 0 where G is zero.
        support_rank: K_eff, how many historical directions were set apart; 0 at the first task.
    """

    shared: torch.Tensor
    residual: torch.Tensor
    shared_capture: float = 0.0
    residual_capture: float = 0.0
    support_rank: int = 0
