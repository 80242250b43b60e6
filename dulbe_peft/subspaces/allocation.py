"""Where each layer of a new task may write: the frozen bases of its shared and residual modes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.subspaces.support import allocate_layer, historical_support
from dulbe_peft.utils.checks import check_int


@torch.no_grad()
def allocate_modes(
    probe: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int = 1,
    residual_rank: int = 8,
    support_rank: int = 128,
) -> dict[str, ModeBases]:
    """Plan the modes of a task from its prospective gradient and the history of layer inputs. Touches no model.

    Args:
        probe: layer name -> G, (d_out, d_in), as `probe_gradients` returns them.
        stats: layer name -> S, (d_in, d_in), or a sketch F of it, (fewer than d_in, d_in), with F'F near S: an
            `OccupationStatistics` or any mapping; None or empty at the first task. A layer without an entry is planned
            as at the first task.
        shared_rank: r_S.
        residual_rank: r_R.
        support_rank: K_h; clamped to what a layer and its data allow.

    Returns:
        Layer name -> [`ModeBases`], in the order of `probe`, on each gradient's device.

    Raises:
        ValueError: a rank is negative, both are 0 or do not fit a layer, or a matrix has the wrong shape or is not
            finite; the message names the layer.
        TypeError: a rank is not an int, or a matrix is no floating-point tensor.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation".
    """
    supports = occupied_directions(probe, stats, shared_rank, residual_rank, support_rank)
    return modes_beside(probe, supports, shared_rank, residual_rank)


def occupied_directions(
    probe: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int,
    residual_rank: int,
    support_rank: int,
) -> dict[str, torch.Tensor]:
    """Layer name -> U, (d_in, K), for the layers that have a statistic; arguments and errors as `allocate_modes`."""
    ranks = {"shared_rank": shared_rank, "residual_rank": residual_rank, "support_rank": support_rank}
    for name, value in ranks.items():
        check_int(name, value, 0)
    statistics = {name: stats[name] for name in probe if name in stats} if stats else {}
    _check_matrices(probe, statistics, shared_rank + residual_rank)
    # Layers that share a statistic share its decomposition; `statistics` keeps the objects alive, so ids are unique.
    supports: dict[int, torch.Tensor] = {}
    found = {}
    for name, matrix in statistics.items():
        device = probe[name].device
        if id(matrix) not in supports:
            label = f"statistic of layer {name!r}"
            supports[id(matrix)] = historical_support(matrix.to(device), support_rank, residual_rank, label)
        found[name] = supports[id(matrix)].to(device)
    return found


def modes_beside(
    probe: Mapping[str, torch.Tensor], supports: Mapping[str, torch.Tensor], shared_rank: int, residual_rank: int
) -> dict[str, ModeBases]:
    """The modes of every layer, given the occupied directions that `occupied_directions` found."""
    modes = {}
    for name, gradient in probe.items():
        support = supports.get(name)
        label = f"gradient of layer {name!r}"
        shared, residual = allocate_layer(gradient, support, shared_rank, residual_rank, label)
        captured = _capture(gradient, shared), _capture(gradient, residual)
        modes[name] = ModeBases(shared, residual, *captured, 0 if support is None else support.shape[1])
    return modes


def _capture(gradient: torch.Tensor, basis: torch.Tensor) -> float:
    """|G P|^2 / |G|^2, 0 where G is zero."""
    largest = gradient.abs().max().float()
    if largest == 0:
        return 0.0
    scaled = gradient.float() / largest
    share = (scaled @ basis).square().sum() / scaled.square().sum()
    return min(1.0, share.item())


def _check_matrices(probe: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor], rank: int) -> None:
    if not rank:
        raise ValueError("shared_rank and residual_rank are both 0: at least one must be positive")
    if not probe:
        raise ValueError("probe is empty: expected one gradient per adapted layer")
    for kind, matrices in (("gradient", probe), ("statistic", statistics)):
        for name, matrix in matrices.items():
            what = f"{kind} of layer {name!r}"
            if not isinstance(matrix, torch.Tensor) or not matrix.is_floating_point():
                raise TypeError(f"{what} must be a floating-point tensor, got {matrix!r:.100}")
            if matrix.ndim != 2 or not matrix.numel():
                raise ValueError(f"{what} must be a matrix, got shape {tuple(matrix.shape)}")
            width = probe[name].shape[1]
            if rank > width:
                raise ValueError(
                    f"shared_rank + residual_rank = {rank} exceeds the {width} input features of layer {name!r}"
                )
            if kind == "statistic" and (matrix.shape[1] != width or len(matrix) > width):
                sizes = f"{(width, width)}, or a sketch of fewer rows,"
                raise ValueError(f"{what} must be {sizes} as its gradient says, got {tuple(matrix.shape)}")
