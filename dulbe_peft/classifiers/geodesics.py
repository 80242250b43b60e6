"""The geodesic from a visual prototype to its text embedding, and how reliable each depth of it is."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import without_autocast


def slerp(start: Tensor, end: Tensor, fraction: float | Tensor) -> Tensor:
    """Points on the great circle from one unit vector to another, at equal angular speed.

    Finite and of unit norm for every pair; for exactly opposite vectors a fixed great circle is taken.

    Args:
        start, end: (..., d), unit vectors, d >= 2, which broadcast.
        fraction: how far to go, 0 is `start`, 1 is `end`; a number, or a tensor that broadcasts with the vectors and
            whose last dimension is 1.

    Raises:
        ValueError: a vector is not finite or not of unit norm, the dimensions differ, or a fraction is outside [0, 1].

    Reference:
        "Reliability-Guided Bridge-Prototype Ensemble", the geodesic b_c(alpha_k).
    """
    if start.ndim < 1 or end.ndim < 1 or start.shape[-1] != end.shape[-1] or start.shape[-1] < 2:
        shapes = f"{tuple(start.shape)} and {tuple(end.shape)}"
        raise ValueError(f"start and end must be (..., d) with the same d >= 2, got {shapes}")
    dtype = torch.promote_types(start.dtype, end.dtype)
    if not dtype.is_floating_point:
        raise TypeError(f"start and end must be floating-point tensors, got {start.dtype} and {end.dtype}")
    working = torch.promote_types(dtype, torch.float32)
    start = _check_unit(start.to(working), "start")
    end = _check_unit(end.to(working), "end")
    alpha = torch.as_tensor(fraction if isinstance(fraction, Tensor) else float(fraction), device=start.device)
    if alpha.ndim and alpha.shape[-1] != 1:
        raise ValueError(
            f"fraction must end in a dimension of 1, got {tuple(alpha.shape)}: use fraction.unsqueeze(-1)"
        )
    if has_values() and not ((alpha >= 0) & (alpha <= 1)).all():
        raise ValueError(f"fraction must lie in [0, 1], got {fraction!r}")
    alpha = alpha.to(working)
    start, end = torch.broadcast_tensors(start, end)
    cosine = (start * end).sum(-1, keepdim=True)
    across = end - cosine * start
    across = across - (across * start).sum(-1, keepdim=True) * start
    sine = across.norm(dim=-1, keepdim=True)
    # Below rounding the direction of `across` is noise that need not be orthogonal to `start`: take a fixed one.
    degenerate = sine < 8 * torch.finfo(working).eps
    axis = F.one_hot(start.abs().argmin(-1), start.shape[-1]).to(working)
    across = torch.where(degenerate, axis, across / sine.clamp(min=torch.finfo(working).tiny))
    for _ in range(2):
        across = F.normalize(across - (across * start).sum(-1, keepdim=True) * start, dim=-1)
    angle = alpha * torch.atan2(sine, cosine)
    return F.normalize(angle.cos() * start + angle.sin() * across, dim=-1).to(dtype)


def _check_unit(vectors: Tensor, name: str) -> Tensor:
    """The vectors at exactly unit norm; half-precision inputs are off by up to a few thousandths."""
    norms = vectors.norm(dim=-1, keepdim=True)
    off = ~((norms - 1).abs() < 1e-2)
    if has_values() and off.any():
        raise ValueError(f"{name} must hold finite unit vectors, got one of norm {norms[off][0].item():.4g}")
    return vectors / norms


def bridge_prototypes(visual_prototypes: Tensor, text_embeds: Tensor, depths: Tensor) -> Tensor:
    """Every class's bridge at every depth: (C, d) and (C, d) unit vectors and (K_b,) depths to (C, K_b, d)."""
    return slerp(visual_prototypes[:, None], text_embeds[:, None], depths[:, None])


def reliability(
    image_embeds: Tensor,
    labels: Tensor,
    bridges: Tensor,
    logit_scale: float,
    first_class: int = 0,
    chunk_elements: int = 2**24,
) -> Tensor:
    """rho_c(alpha_k), (C - first_class, K_b): mean probability of a class over its own images at each depth.

    `image_embeds` are (n, d) unit features, and `labels` their rows of the `bridges`, (C, K_b, d), from `first_class`
    on; the others are rivals alone.
    """
    classes, num_depths, _ = bridges.shape
    rows = max(1, chunk_elements // classes)
    chunks = []
    with without_autocast(image_embeds):
        for features, own in zip(image_embeds.float().split(rows), labels.split(rows), strict=True):
            probabilities = []
            for depth in range(num_depths):
                logits = logit_scale * features @ bridges[:, depth].float().T
                probabilities.append(logits.softmax(dim=1).gather(1, own[:, None]))
            chunks.append(torch.cat(probabilities, dim=1))
    confidence, own = torch.cat(chunks), labels - first_class
    sums = confidence.new_zeros(classes - first_class, num_depths).index_add(0, own, confidence)
    return sums / own.bincount(minlength=len(sums))[:, None]


def own_probabilities(
    image_embeds: Tensor,
    labels: Tensor,
    bridges: Tensor,
    own_scores: Tensor,
    logit_scale: float,
    chunk_elements: int = 2**24,
) -> Tensor:
    """The probability of each image's class at each depth, (n, K_b), with scores of its class that are given.

    `image_embeds` are (n, d) unit features, `labels` their rows of the `bridges`, (C, K_b, d), and `own_scores`,
    (n, K_b), stand in for the products of an image and the bridges of its class.
    """
    classes, num_depths, _ = bridges.shape
    rows = max(1, chunk_elements // classes)
    chunks = [own_scores[:0]]
    with without_autocast(image_embeds):
        for features, own, scores in zip(
            image_embeds.float().split(rows), labels.split(rows), own_scores.split(rows), strict=True
        ):
            probabilities = []
            for depth in range(num_depths):
                logits = features @ bridges[:, depth].float().T
                logits = logit_scale * logits.scatter(1, own[:, None], scores[:, [depth]])
                probabilities.append(logits.softmax(dim=1).gather(1, own[:, None]))
            chunks.append(torch.cat(probabilities, dim=1))
    return torch.cat(chunks)
