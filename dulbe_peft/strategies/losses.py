"""The losses of the DuLBE paper: cross-modal classification and bidirectional KL divergence."""

import warnings

import torch
from torch.nn import functional as F

from dulbe_peft.utils.torch_settings import without_autocast

_UNIT = 0.05  # how far the length of a unit vector in half precision may be from 1


def cross_modal_loss(
    image_embeds: torch.Tensor, text_embeds: torch.Tensor, labels: torch.Tensor, logit_scale: float | torch.Tensor
) -> torch.Tensor:
    """Compute the cross-entropy of image-text logits over the current task's classes, averaged over the batch.

    Args:
        image_embeds: Z, (n, d), unit features.
        text_embeds: E, (classes, d), unit embeddings.
        labels: (n,), integers, row indices of `text_embeds`.
        logit_scale: tau itself, 100 for CLIP; not its logarithm.

    Returns:
        A scalar, in at least float32. On the CPU, rows that are not unit vectors cause a warning.

    Raises:
        ValueError: If the shapes do not match, the batch is empty, or (on the CPU) a label is out of range.

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
    if labels.device.type == "cpu":
        for name, rows in (("image_embeds", image_embeds), ("text_embeds", text_embeds)):
            lengths = rows.detach().norm(dim=1)
            if (lengths - 1).abs().max() > _UNIT:
                warnings.warn(
                    f"{name} has rows of length {lengths.min():.3g} to {lengths.max():.3g}, and the loss expects unit "
                    "vectors: normalise them",
                    stacklevel=2,
                )
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
    """Compute the old semantic-structure loss: KL(teacher || student) over old classes and over the batch's images.

    Args:
        student_logits: (n, old classes), tau z.e from the model in training.
        teacher_logits: (n, old classes), the same from the model before the task; receives no gradient.
        class_temperature: Tau_C, for the softmax over the classes of each image, from 1e-6 to 1e6.
        instance_temperature: Tau_I, for the softmax over the images of each class, from 1e-6 to 1e6.
        reduction: "mean": the class term is the mean over images, and the instance term is the mean over old classes;
            "batchmean": both sums are divided by n. In both cases, each term is multiplied by its squared temperature.

    Returns:
        A scalar, in at least float32. It is not negative, except for rounding.

    Reference:
        "Old Semantic-Structure Objective", L_bi-kl.
    """
    if student_logits.ndim != 2 or student_logits.shape != teacher_logits.shape or not student_logits.numel():
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(f"student_logits and teacher_logits must both be (n, old classes), not empty, got {shapes}")
    for name, value in (("class_temperature", class_temperature), ("instance_temperature", instance_temperature)):
        if not 1e-6 <= value <= 1e6:  # otherwise its square or the divided logits can leave float32's range
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
    """Return the sum of KL(softmax(teacher) || softmax(student)) over all slices along `dim`, in log-space."""
    return F.kl_div(student.log_softmax(dim), teacher.log_softmax(dim), reduction="sum", log_target=True)
