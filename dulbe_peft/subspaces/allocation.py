"""Where each layer of a new task may write: the frozen bases of its shared and residual modes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.subspaces.support import allocate_layer, historical_support
from dulbe_peft.utils.checks import check_int


def allocate_modes(
    probe: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int = 1,
    residual_rank: int | Mapping[str, int] = 8,
    support_rank: int = 128,
) -> dict[str, ModeBases]:
    """Plan the modes of a task from its prospective gradient and the history of layer inputs. Touches no model.

    Args:
        probe: layer name -> G, (d_out, d_in), as `probe_gradients` returns them.
        stats: layer name -> S, (d_in, d_in), or a sketch F of it, (fewer than d_in, d_in), with F'F near S: an
            `OccupationStatistics` or any mapping; None or empty at the first task. A layer without an entry is planned
            as at the first task.
        shared_rank: r_S.
        residual_rank: r_R, one for all layers or layer name -> r_R.
        support_rank: K_h; clamped to what a layer and its data allow.

    Returns:
        Layer name -> [`ModeBases`], in the order of `probe`, on each gradient's device.

    Raises:
        ValueError: a rank is negative, both are 0 or do not fit a layer, or a matrix has the wrong shape or is not
            finite; the message names the layer.
        TypeError: a rank is not an int.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation".
    """
    return supports_and_modes(probe, stats, shared_rank, residual_rank, support_rank)[1]


@torch.no_grad()
def supports_and_modes(
    probe: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int,
    residual_rank: int | Mapping[str, int],
    support_rank: int,
) -> tuple[dict[str, torch.Tensor], dict[str, ModeBases]]:
    """U, (d_in, K), of the layers that have a statistic, and the modes of all; see `allocate_modes`."""
    check_int("shared_rank", shared_rank, 0)
    check_int("support_rank", support_rank, 0)
    residual_ranks = residual_rank if isinstance(residual_rank, Mapping) else dict.fromkeys(probe, residual_rank)
    # Layers that share a statistic share its decomposition; the statistic is kept alive, so that its id is unique.
    decomposed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    supports, modes = {}, {}
    for name, gradient in probe.items():
        label = f"gradient of layer {name!r}"
        if gradient.ndim != 2:
            raise ValueError(f"{label} must be a matrix, got shape {tuple(gradient.shape)}")
        width, rank = gradient.shape[1], check_int("residual_rank", residual_ranks[name], 0)
        if not 0 < shared_rank + rank <= width:
            total = f"shared_rank + residual_rank = {shared_rank + rank} of layer {name!r}"
            raise ValueError(f"{total} must be from 1 to its {width} input features")
        if stats and name in stats:
            matrix = stats[name]
            if matrix.ndim != 2 or matrix.shape[1] != width or len(matrix) > width:
                sizes = f"{(width, width)}, or a sketch of fewer rows, as its gradient says"
                raise ValueError(f"statistic of layer {name!r} must be {sizes}, got {tuple(matrix.shape)}")
            if (id(matrix), rank) not in decomposed:
                inputs = matrix.to(gradient.device), support_rank, rank, f"statistic of layer {name!r}"
                decomposed[id(matrix), rank] = matrix, historical_support(*inputs)
            supports[name] = decomposed[id(matrix), rank][1].to(gradient.device)
        support = supports.get(name)
        shared, residual = allocate_layer(gradient, support, shared_rank, rank, label)
        captured = _capture(gradient, shared), _capture(gradient, residual)
        modes[name] = ModeBases(shared, residual, *captured, 0 if support is None else support.shape[1])
    return supports, modes


def _capture(gradient: torch.Tensor, basis: torch.Tensor) -> float:
    """|G P|^2 / |G|^2, 0 where G is zero; the largest entry is divided out, so that no square leaves float32."""
    largest = gradient.abs().max().float()
    if largest == 0:
        return 0.0
    scaled = gradient.float() / largest
    return min(1.0, ((scaled @ basis).square().sum() / scaled.square().sum()).item())
