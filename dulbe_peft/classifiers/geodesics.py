"""Compute geodesics from visual prototypes to text embeddings, and the reliability of each depth on them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import without_autocast


def slerp(start: Tensor, end: Tensor, fraction: float | Tensor) -> Tensor:
    """Interpolate between unit vectors on the great circle, at constant angular speed.

    The result is finite and of unit norm for every pair. For exactly opposite vectors, a fixed great circle is used.

    Args:
        start: (..., d), unit vectors, d >= 2.
        end: (..., d), unit vectors that broadcast with `start`.
        fraction: Position between `start`, 0, and `end`, 1. A number, or a tensor that broadcasts with the vectors and
            whose last dimension is 1.

    Returns:
        (..., d), unit vectors.

    Raises:
        ValueError: If a vector is not finite or not of unit norm, the dimensions differ, or a fraction is outside [0,
            1].

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
    # If the sine is within rounding of 0, the direction of `across` is noise, so a fixed axis replaces it.
    degenerate = sine < 8 * torch.finfo(working).eps
    axis = F.one_hot(start.abs().argmin(-1), start.shape[-1]).to(working)
    across = torch.where(degenerate, axis, across / sine.clamp(min=torch.finfo(working).tiny))
    for _ in range(2):
        across = F.normalize(across - (across * start).sum(-1, keepdim=True) * start, dim=-1)
    angle = alpha * torch.atan2(sine, cosine)
    return F.normalize(angle.cos() * start + angle.sin() * across, dim=-1).to(dtype)


def _check_unit(vectors: Tensor, name: str) -> Tensor:
    """Return the vectors at exactly unit norm. Half-precision inputs may differ from it by a few thousandths."""
    norms = vectors.norm(dim=-1, keepdim=True)
    off = ~((norms - 1).abs() < 1e-2)
    if has_values() and off.any():
        raise ValueError(f"{name} must be finite unit vectors, got one of norm {norms[off][0].item():.4g}")
    return vectors / norms


def bridge_prototypes(visual_prototypes: Tensor, text_embeds: Tensor, depths: Tensor) -> Tensor:
    """Return b_c(alpha_k), (C, K_b, d): the bridge of every class at every depth.

    Args:
        visual_prototypes: v_c, (C, d), unit vectors.
        text_embeds: e_c, (C, d), unit vectors.
        depths: alpha_k, (K_b,).
    """
    return slerp(visual_prototypes[:, None], text_embeds[:, None], depths[:, None])


def reliability(
    image_embeds: Tensor,
    labels: Tensor,
    bridges: Tensor,
    logit_scale: float,
    first_class: int = 0,
    chunk_elements: int = 2**24,
) -> Tensor:
    """Return rho_c(alpha_k), (C - first_class, K_b): mean probability of a class over its own images at each depth.

    Args:
        image_embeds: (n, d), unit features.
        labels: (n,), the class of each image, an index into `bridges`, at least `first_class`.
        bridges: (C, K_b, d), bridge prototypes.
        logit_scale: tau.
        first_class: Classes before this one only compete; their reliability is not computed.
        chunk_elements: Size limit of intermediate matrices.
    """
    confidence = own_probabilities(image_embeds, labels, bridges, logit_scale, chunk_elements=chunk_elements)
    targets = labels - first_class
    sums = confidence.new_zeros(len(bridges) - first_class, bridges.shape[1]).index_add(0, targets, confidence)
    return sums / targets.bincount(minlength=len(sums))[:, None]


def own_probabilities(
    image_embeds: Tensor,
    labels: Tensor,
    bridges: Tensor,
    logit_scale: float,
    own_scores: Tensor | None = None,
    chunk_elements: int = 2**24,
) -> Tensor:
    """Return the probability of each image's class at each depth, (n, K_b).

    The arguments are those of `reliability`. `own_scores`, (n, K_b), replace the products of an image and the bridges
    of its class.
    """
    classes, num_depths, _ = bridges.shape
    chunks = [image_embeds.new_zeros(0, num_depths, dtype=torch.float32)]
    with without_autocast(image_embeds):
        for rows in torch.arange(len(image_embeds)).to(labels).split(max(1, chunk_elements // classes)):
            features, targets, probabilities = image_embeds[rows].float(), labels[rows, None], []
            for depth in range(num_depths):
                prototypes = bridges[:, depth].float()
                if own_scores is None:
                    logits = logit_scale * features @ prototypes.T
                else:
                    scores = (features @ prototypes.T).scatter(1, targets, own_scores[rows, depth, None])
                    logits = logit_scale * scores
                probabilities.append(logits.softmax(dim=1).gather(1, targets))
            chunks.append(torch.cat(probabilities, dim=1))
    return torch.cat(chunks)
