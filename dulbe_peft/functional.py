"""The paper's tensor maths, each formula one pure function: supports and bases, slerp, reliability, losses.

Nothing here knows of models or files. Decompositions run in float64, losses and features in at least float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from dulbe_peft.decompositions import EPS64, eigh, fix_signs, second_moment, to_float64, top_eigenvectors

EPS32 = torch.finfo(torch.float32).eps


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which an enclosing autocast does not turn products on `tensor`'s device into half precision."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


# ---------------------------------------------------------------------- supports and bases


def historical_support(
    statistic: torch.Tensor, support_rank: int, residual_rank: int, name: str = "S"
) -> torch.Tensor:
    """Dominant eigenvectors of an occupation statistic: the directions earlier tasks used.

    Args:
        statistic: S, (d_in, d_in), symmetric positive semi-definite; or a factor F, (fewer than d_in, d_in), which
            stands for S = F'F.
        support_rank: K_h, how many eigenvectors to take at most.
        residual_rank: r_R, how many dimensions must stay outside the support.
        name: what an error message calls the matrix.

    Returns:
        U, (d_in, K_eff), float32, orthonormal columns in descending order of their eigenvalue. K_eff is the smallest
        of K_h, the number of eigenvalues above d_in * eps(float32) * the largest, and d_in - r_R; it may be 0.

    Raises:
        ValueError: the matrix has more rows than columns, is not finite, is square but not symmetric positive
            semi-definite, or cannot be decomposed.

    Reference:
        "Historical Visual-Mode Occupation", the eigendecomposition of S_<t.
    """
    if statistic.ndim != 2 or statistic.shape[0] > statistic.shape[1]:
        shape = f"got shape {tuple(statistic.shape)}"
        raise ValueError(f"{name} must be a square matrix, or a factor of fewer rows than columns, {shape}")
    rows, width = statistic.shape
    count = max(0, min(support_rank, width - residual_rank, rows))
    floor = width * EPS32
    if rows == width:
        _, vectors = top_eigenvectors(second_moment(statistic, name), count, name, relative=floor)
    else:
        # F'F has the eigenvalues of the small matrix FF'; an eigenvector w of FF' gives F'w of F'F.
        factor = to_float64(statistic, name)
        _, small = top_eigenvectors(factor @ factor.T, count, name, relative=floor)
        vectors = torch.linalg.qr(F.normalize(factor.T @ small, dim=0)).Q
    return fix_signs(vectors).to(statistic.device, torch.float32)


def allocate_layer(
    gradient: torch.Tensor, support: torch.Tensor | None, shared_rank: int, residual_rank: int, name: str = "G"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frozen bases of one layer's shared and residual modes.

    Without a support (the first task) the top right singular vectors of G, the first r_S of them shared. With one,
    P_S = U q, q the top eigenvectors of U'G'GU, and P_R the top right singular vectors of G(I - UU'). Directions that
    the gradient does not determine are filled up: those of P_R outside U; those of P_S that a support of fewer than
    r_S columns leaves open by the singular vectors of G(I - UU') that follow P_R.

    Args:
        gradient: G, (d_out, d_in), prospective gradient.
        support: U, (d_in, K_eff), orthonormal columns, K_eff <= d_in - r_R; None at the first task.
        shared_rank: r_S.
        residual_rank: r_R.
        name: what an error message calls the gradient.

    Returns:
        P_S, (d_in, r_S), and P_R, (d_in, r_R), float32, together orthonormal; P_R is orthogonal to U.

    Raises:
        ValueError: G is not a finite matrix, the ranks exceed d_in, or U does not fit.

    Reference:
        "Rewritable Shared Mode", "Low-Interference Residual Modes", "Subspace-Frozen Parameterization"; for r_S > 1
        appendix Eq. layer_shared_basis.
    """
    if gradient.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions (d_out, d_in), got shape {tuple(gradient.shape)}")
    width = gradient.shape[1]
    if shared_rank + residual_rank > width:
        raise ValueError(f"{name}: shared_rank {shared_rank} + residual_rank {residual_rank} exceed d_in = {width}")
    matrix = to_float64(gradient, name)
    if support is None:
        basis = _dominant_directions(matrix, matrix.new_zeros(width, 0), shared_rank + residual_rank, name)
        shared, residual = basis[:, :shared_rank], basis[:, shared_rank:]
    else:
        occupied = _check_support(support, width, residual_rank, name)
        inside = min(shared_rank, occupied.shape[1])
        response = matrix @ occupied
        _, rotation = eigh(response.T @ response, f"U'G'GU of {name}", inside)
        outside = _dominant_directions(matrix, occupied, residual_rank + shared_rank - inside, name)
        shared = torch.cat([fix_signs(occupied @ rotation), outside[:, residual_rank:]], dim=1)
        residual = outside[:, :residual_rank]
    shared, residual = (basis.to(gradient.device, torch.float32).contiguous() for basis in (shared, residual))
    return shared, residual


def orthonormal_complement(basis: torch.Tensor, count: int) -> torch.Tensor:
    """`count` orthonormal directions outside a basis, the same ones at every call.

    Args:
        basis: (d, k), orthonormal columns, k >= 0.
        count: how many columns to return, at most d - k.

    Returns:
        (d, count), in `basis`' dtype, orthogonal to its columns.

    Raises:
        ValueError: fewer than `count` dimensions are left.
    """
    width, taken = basis.shape
    if count > width - taken:
        raise ValueError(f"{count} directions outside a basis of {taken} do not fit into {width} dimensions")
    if count == 0:
        return basis.new_zeros(width, 0)
    reflectors, scales = torch.geqrf(basis)
    chosen = torch.eye(width, dtype=basis.dtype, device=basis.device)[:, taken : taken + count]
    return torch.ormqr(reflectors, scales, chosen)


def _dominant_directions(matrix: torch.Tensor, avoid: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """Top right singular vectors of `matrix` (I - `avoid` `avoid`'), filled up outside it; float64, (d, count)."""
    width = matrix.shape[1]
    projected = matrix - (matrix @ avoid) @ avoid.T
    wide = matrix.shape[0] < width
    # The smaller Gram matrix is enough: squaring costs half the digits, which float64 has to spare for a float32 G.
    gram = projected @ projected.T if wide else projected.T @ projected
    # Against |G|, not |G(I - UU')|: what is left of a G inside U is rounding, and its directions fall back into U.
    threshold = max(matrix.shape) * EPS64 * float(matrix.square().sum())
    _, vectors = top_eigenvectors(gram, min(count, len(gram)), f"Gram matrix of {name}", absolute=threshold)
    directions = projected.T @ vectors if wide else vectors
    directions = torch.linalg.qr(F.normalize(directions, dim=0)).Q
    rest = orthonormal_complement(torch.cat([avoid, directions], dim=1), count - directions.shape[1])
    return torch.cat([fix_signs(directions), rest], dim=1)


def _check_support(support: torch.Tensor, width: int, residual_rank: int, name: str) -> torch.Tensor:
    """The support in float64, orthonormal beyond the rounding of its float32 columns."""
    if support.ndim != 2 or support.shape[0] != width or support.shape[1] > width - residual_rank:
        expected = f"(d_in, at most d_in - residual_rank) = ({width}, at most {width - residual_rank})"
        raise ValueError(f"support of {name} must have shape {expected}, got {tuple(support.shape)}")
    occupied = to_float64(support, f"support of {name}")
    identity = torch.eye(support.shape[1], dtype=torch.float64, device=occupied.device)
    if support.shape[1] and (occupied.T @ occupied - identity).abs().max() > 1e-3:
        raise ValueError(f"support of {name} must have orthonormal columns")
    return torch.linalg.qr(occupied).Q


# ---------------------------------------------------------------------- bridges


def slerp(start: torch.Tensor, end: torch.Tensor, fraction: float | torch.Tensor) -> torch.Tensor:
    """Points on the great circle from one unit vector to another, at equal angular speed.

    Finite and of unit norm for every pair: equal vectors give `start`; for exactly opposite ones a fixed great circle
    is taken.

    Args:
        start: (..., d), unit vectors, d >= 2.
        end: (..., d), unit vectors; broadcasts with `start`.
        fraction: how far to go, 0 is `start`, 1 is `end`; a number, or a tensor that broadcasts with the vectors and
            whose last dimension is 1.

    Returns:
        Unit vectors of the broadcast shape, in the vectors' promoted dtype; computed in at least float32.

    Raises:
        ValueError: a vector is not finite or not of unit norm, the dimensions differ, or a fraction is outside [0, 1].
        TypeError: the vectors are not floating-point tensors, or the fraction is no number or tensor.

    Reference:
        "Reliability-Guided Bridge-Prototype Ensemble", the geodesic b_c(alpha_k); appendix Eq.
        bridge_calibrated_depth.
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
    try:
        alpha = torch.as_tensor(fraction, device=start.device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"fraction must be a number or a tensor, got {fraction!r:.100}") from error
    if alpha.ndim and alpha.shape[-1] != 1:
        raise ValueError(
            f"fraction must end in a dimension of 1, got {tuple(alpha.shape)}: use fraction.unsqueeze(-1)"
        )
    try:
        torch.broadcast_shapes(start.shape, end.shape, alpha.shape)
    except RuntimeError as error:
        shapes = f"{tuple(start.shape)}, {tuple(end.shape)} and {tuple(alpha.shape)}"
        raise ValueError(f"start, end and fraction must broadcast, got shapes {shapes}") from error
    if not ((alpha >= 0) & (alpha <= 1)).all():
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


def _check_unit(vectors: torch.Tensor, name: str) -> torch.Tensor:
    """The vectors at exactly unit norm; half-precision inputs are off by up to a few thousandths."""
    norms = vectors.norm(dim=-1, keepdim=True)
    off = ~((norms - 1).abs() < 1e-2)
    if off.any():
        raise ValueError(f"{name} must hold finite unit vectors, got one of norm {norms[off][0].item():.4g}")
    return vectors / norms


def bridge_prototypes(
    visual_prototypes: torch.Tensor, text_embeds: torch.Tensor, depths: torch.Tensor
) -> torch.Tensor:
    """Every class's bridge at every depth: (C, d) and (C, d) unit vectors and (K_b,) depths to (C, K_b, d).

    Reference:
        "Reliability-Guided Bridge-Prototype Ensemble", b_c(alpha_k).
    """
    return slerp(visual_prototypes[:, None], text_embeds[:, None], depths[:, None])


def reliability(
    image_embeds: torch.Tensor,
    labels: torch.Tensor,
    bridges: torch.Tensor,
    logit_scale: float,
    first_class: int = 0,
    chunk_elements: int = 2**24,
) -> torch.Tensor:
    """Mean probability of a class over its own images, under the classifier of each depth over all classes.

    Args:
        image_embeds: (n, d), unit features.
        labels: (n,), integers, rows of `bridges`, all at least `first_class`.
        bridges: (C, K_b, d), bridge prototypes of all seen classes.
        logit_scale: tau.
        first_class: row of the first class to measure; each from there on needs at least one image.
        chunk_elements: how many logits to hold at a time.

    Returns:
        rho, (C - first_class, K_b), float32, in [0, 1].

    Raises:
        ValueError: a measured class has no image.

    Reference:
        "Reliability-Guided Bridge-Prototype Ensemble", rho_c(alpha_k).
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
    confidence = torch.cat(chunks)
    means = []
    for index in range(first_class, classes):
        own_rows = confidence[labels == index]
        if not len(own_rows):
            raise ValueError(f"class {index} has no image: its reliability cannot be measured")
        means.append(own_rows.mean(dim=0))
    return torch.stack(means)


def reliability_weights(rho: torch.Tensor, temperature: float) -> torch.Tensor:
    """pi_c = softmax over the depths of rho_c / beta; (C, K_b) to (C, K_b).

    Reference:
        "Reliability-Guided Bridge-Prototype Ensemble", pi_c(alpha_k).
    """
    # A smaller beta is 0 in the tensor's type, and 0 / 0 is no number. The limit is the same: the best depth alone.
    return (rho / max(temperature, torch.finfo(rho.dtype).tiny)).softmax(dim=1)


# ---------------------------------------------------------------------- losses


def cross_modal_loss(
    image_embeds: torch.Tensor, text_embeds: torch.Tensor, labels: torch.Tensor, logit_scale: float | torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of image-text logits over the current task's classes, the mean over the batch.

    Args:
        image_embeds: Z, (n, d), unit features.
        text_embeds: E, (classes, d), unit embeddings.
        labels: (n,), integers, rows of `text_embeds`.
        logit_scale: tau itself, 100 for CLIP, never its logarithm.

    Returns:
        A scalar, in at least float32.

    Raises:
        ValueError: the shapes do not fit, the batch is empty, or (where looking costs no device synchronisation, that
            is on the CPU) a label is out of range.
        TypeError: the labels are not integers.

    Reference:
        "Current-Task Cross-Modal Objective", L_c-ce.
    """
    if image_embeds.ndim != 2 or text_embeds.ndim != 2 or image_embeds.shape[1] != text_embeds.shape[1]:
        shapes = f"{tuple(image_embeds.shape)} and {tuple(text_embeds.shape)}"
        raise ValueError(f"image_embeds and text_embeds must be (n, d) and (classes, d), got {shapes}")
    if labels.shape != image_embeds.shape[:1] or not len(labels):
        raise ValueError(f"labels must be ({len(image_embeds)},) and not empty, got shape {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if labels.device.type == "cpu" and not 0 <= int(labels.min()) <= int(labels.max()) < len(text_embeds):
        bad = labels[(labels < 0) | (labels >= len(text_embeds))][0].item()
        raise ValueError(f"label {bad} is out of range for {len(text_embeds)} classes")
    dtype = torch.promote_types(torch.promote_types(image_embeds.dtype, text_embeds.dtype), torch.float32)
    with without_autocast(image_embeds):
        logits = logit_scale * image_embeds.to(dtype) @ text_embeds.to(dtype).T
        return F.cross_entropy(logits, labels.long())


def bidirectional_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    class_temperature: float = 5.0,
    instance_temperature: float = 0.1,
    reduction: str = "mean",
) -> torch.Tensor:
    """Old semantic-structure loss: KL(teacher || student) over the old classes and over the batch's images.

    Args:
        student_logits: (n, old classes), tau z.e of the model in training.
        teacher_logits: the same of the model before the task; receives no gradient.
        class_temperature: tau_C, of the softmax over the classes of each image.
        instance_temperature: tau_I, of the softmax over the images of each class.
        reduction: "mean": the class term is the mean over images, the instance term the mean over old classes;
            "batchmean": both sums are divided by n. Each term is multiplied by its temperature squared either way.

    Returns:
        A scalar, in at least float32, at least 0 up to rounding.

    Raises:
        ValueError: the shapes differ or are empty, a temperature is not in 1e-6..1e6, or the reduction is
            unknown.

    Reference:
        "Old Semantic-Structure Objective", L_bi-kl.
    """
    if student_logits.ndim != 2 or student_logits.shape != teacher_logits.shape or not student_logits.numel():
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(f"student_logits and teacher_logits must both be (n, old classes), not empty, got {shapes}")
    for name, value in (("class_temperature", class_temperature), ("instance_temperature", instance_temperature)):
        if not 1e-6 <= value <= 1e6:  # beyond, its square or the divided logits leave float32
            raise ValueError(f"{name} must be positive, from 1e-6 to 1e6, got {value}")
    if reduction not in ("mean", "batchmean"):
        raise ValueError(f"reduction must be 'mean' or 'batchmean', got {reduction!r}")
    images, classes = student_logits.shape
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student, teacher = student_logits.to(dtype), teacher_logits.detach().to(dtype)
    class_term = class_temperature**2 * _kl_sum(student / class_temperature, teacher / class_temperature, dim=1)
    instance_term = instance_temperature**2 * _kl_sum(
        student / instance_temperature, teacher / instance_temperature, dim=0
    )
    return class_term / images + instance_term / (classes if reduction == "mean" else images)


def _kl_sum(student: torch.Tensor, teacher: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum of KL(softmax(teacher) || softmax(student)) over all slices along `dim`, in log-space."""
    return F.kl_div(student.log_softmax(dim), teacher.log_softmax(dim), reduction="sum", log_target=True)
