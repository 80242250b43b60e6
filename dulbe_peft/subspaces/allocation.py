"""Plan where each layer may write during a new task: its historical support, and the frozen bases of its modes."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from dulbe_peft.subspaces.decompositions import (
    EPS64,
    eigh,
    fix_signs,
    orthonormal_complement,
    second_moment,
    to_float64,
    top_eigenvectors,
)
from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.utils.settings import check_int

EPS32 = torch.finfo(torch.float32).eps
NO_STATISTICS = (
    "this adapter has a history, but no statistics were given, so the modes are planned as in a first task and may "
    "overwrite earlier tasks: call collect_statistics at the end of each task, and pass the statistics"
)


def allocate_modes(
    grad_probe: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int | None = None,
    residual_rank: int | Mapping[str, int] | None = None,
    support_rank: int | None = None,
    config: Any = None,
) -> dict[str, ModeBases]:
    """Plan the modes of a task from its prospective gradient and the statistics of earlier layer inputs.

    No model is read or changed.

    Args:
        grad_probe: Layer name -> G, (d_out, d_in), as `probe_gradients` returns them.
        stats: Layer name -> S, (d_in, d_in): an `OccupationStatistics` or any mapping. A layer without an entry is
            planned as in the first task.
        shared_rank: R_S. None takes the value of `config`, or 1 without a configuration.
        residual_rank: R_R for all layers, or layer name -> r_R. None takes the value of `config`, or 8 without one.
        support_rank: K_h, reduced to what a layer and its data allow. None takes the value of `config`, or 128
            without one.
        config: The adapter's configuration. None takes the configuration that `probe_gradients` put into `grad_probe`.

    Returns:
        A dict of layer name -> [`ModeBases`], in the order of `grad_probe`, on each gradient's device.

    Raises:
        ValueError: If the ranks do not fit a layer, or a matrix has the wrong shape or is not finite; the message
            names the layer.
        TypeError: If the gradients or the statistics are not a mapping.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation".
    """
    for name, value in (("grad_probe", grad_probe), ("stats", stats or {})):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping of layer names to matrices, got a {type(value).__name__}")
    if not stats and getattr(grad_probe, "has_history", False):
        warnings.warn(NO_STATISTICS, stacklevel=2)
    config = getattr(grad_probe, "config", None) if config is None else config
    if shared_rank is None:
        shared_rank = 1 if config is None else config.shared_rank
    if residual_rank is None:
        residual_rank = 8 if config is None else {name: config.ranks_of(name)[1] for name in grad_probe}
    if support_rank is None:
        support_rank = 128 if config is None else config.support_rank
    return supports_and_modes(grad_probe, stats, shared_rank, residual_rank, support_rank)[1]


@torch.no_grad()
def supports_and_modes(
    probe: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int,
    residual_rank: int | Mapping[str, int],
    support_rank: int,
) -> tuple[dict[str, torch.Tensor], dict[str, ModeBases]]:
    """Return the support U, (d_in, K), of each layer with a statistic, and the modes of all layers.

    See `allocate_modes` for the arguments.
    """
    check_int("shared_rank", shared_rank, 0)
    check_int("support_rank", support_rank, 0)
    residual_ranks = residual_rank if isinstance(residual_rank, Mapping) else dict.fromkeys(probe, residual_rank)
    # Layers that share a statistic share its decomposition. Keeping the statistic alive keeps its id unique.
    decomposed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    supports, modes = {}, {}
    for name, gradient in probe.items():
        label = f"gradient of layer {name!r}"
        if not isinstance(gradient, torch.Tensor) or gradient.ndim != 2:
            raise ValueError(f"{label} must be a matrix, got {getattr(gradient, 'shape', gradient)!r:.100}")
        width, rank = gradient.shape[1], check_int("residual_rank", residual_ranks[name], 0)
        if not 0 < shared_rank + rank <= width:
            total = f"shared_rank + residual_rank = {shared_rank + rank} of layer {name!r}"
            raise ValueError(f"{total} must be from 1 to its {width} input features")
        if stats and name in stats:
            matrix = stats[name]
            if matrix.shape != (width, width):
                sizes = f"{(width, width)} to match its gradient, got {tuple(matrix.shape)}"
                raise ValueError(f"statistic of layer {name!r} must be {sizes}")
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
    """Return |G P|^2 / |G|^2, or 0 if G is zero. Dividing by the largest entry keeps squares inside float32."""
    largest = gradient.abs().max().float()
    if largest == 0:
        return 0.0
    scaled = gradient.float() / largest
    return min(1.0, ((scaled @ basis).square().sum() / scaled.square().sum()).item())


def historical_support(
    statistic: torch.Tensor, support_rank: int, residual_rank: int, name: str = "S"
) -> torch.Tensor:
    """Return U, (d_in, K_eff), float32: the dominant eigenvectors of an occupation statistic S, (d_in, d_in).

    They span the input directions that earlier tasks used. K_eff is the smallest of K_h, d_in - r_R, and the number of
    eigenvalues above d_in * eps(float32) times the largest one; it may be 0.

    Reference:
        "Historical Visual-Mode Occupation", the eigendecomposition of S_<t.
    """
    width = len(statistic)
    count = max(0, min(support_rank, width - residual_rank))
    vectors = top_eigenvectors(second_moment(statistic, name), count, name, relative=width * EPS32)
    return fix_signs(vectors).to(statistic.device, torch.float32)


def allocate_layer(
    gradient: torch.Tensor, support: torch.Tensor | None, shared_rank: int, residual_rank: int, name: str = "G"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P_S, (d_in, r_S), and P_R, (d_in, r_R), of one layer: float32, together orthonormal, P_R orthogonal to U.

    Without a support U (in the first task), they are the top right singular vectors of G, (d_out, d_in), of which the
    first r_S are shared. With a support, P_S = U q, where q are the top eigenvectors of U'G'GU, and P_R holds the top
    right singular vectors of G(I - UU'). If the gradient determines too few directions for P_R, other directions
    outside U fill it up. If U has fewer than r_S columns, the singular vectors of G(I - UU') that follow P_R fill up
    P_S.

    Reference:
        "Rewritable Shared Mode", "Low-Interference Residual Modes", "Subspace-Frozen Parameterization"; for r_S > 1
        appendix Eq. layer_shared_basis.
    """
    matrix = to_float64(gradient, name)
    if support is None:
        no_support = matrix.new_zeros(matrix.shape[1], 0)
        basis = _dominant_directions(matrix, no_support, shared_rank + residual_rank, name)
        shared, residual = basis[:, :shared_rank], basis[:, shared_rank:]
    else:
        # The columns of U were rounded to float32; QR makes them orthonormal in float64.
        occupied = torch.linalg.qr(support.to(matrix)).Q
        inside = min(shared_rank, occupied.shape[1])
        response = matrix @ occupied
        _, rotation = eigh(response.T @ response, f"U'G'GU of {name}", inside)
        outside = _dominant_directions(matrix, occupied, residual_rank + shared_rank - inside, name)
        shared = torch.cat([fix_signs(occupied @ rotation), outside[:, residual_rank:]], dim=1)
        residual = outside[:, :residual_rank]
    shared, residual = (basis.to(gradient.device, torch.float32).contiguous() for basis in (shared, residual))
    return shared, residual


def _dominant_directions(matrix: torch.Tensor, avoid: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """Return the top right singular vectors of `matrix` (I - `avoid` `avoid`'), (d, count), float64.

    If there are fewer than `count`, other directions orthogonal to `avoid` fill up the columns.
    """
    projected = matrix - (matrix @ avoid) @ avoid.T
    wide = matrix.shape[0] < matrix.shape[1]
    # The smaller Gram matrix is enough. Squaring loses half of the digits, but float64 has twice as many as the
    # float32 G.
    gram = projected @ projected.T if wide else projected.T @ projected
    # Relative to |G|, not to |G(I - UU')|: if G lies inside U, only rounding errors are left outside, and their
    # directions would fall back into U.
    threshold = max(matrix.shape) * EPS64 * float(matrix.square().sum())
    vectors = top_eigenvectors(gram, min(count, len(gram)), f"Gram matrix of {name}", absolute=threshold)
    directions = projected.T @ vectors if wide else vectors
    directions = torch.linalg.qr(F.normalize(directions, dim=0)).Q
    rest = orthonormal_complement(torch.cat([avoid, directions], dim=1), count - directions.shape[1])
    return torch.cat([fix_signs(directions), rest], dim=1)
