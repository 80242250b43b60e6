"""Measure, with a learner and images, how a new task would change its layers, and which patches of an image matter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dulbe_peft.data.images import named_images
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders.loading import encoder_of, unit_image_embeds
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.locking import takes_turn
from dulbe_peft.training.task_trainer import TaskTrainer
from research.diagnostics.measures import LayerDemand, layer_demands


@takes_turn
def inspect_task(
    learner: ClassIncrementalLearner, dataset: Any, class_names: Sequence[str] | None = None
) -> dict[str, LayerDemand]:
    """Measure how a new task would change every layer, and which part of the change the modes could represent.

    The learner is not changed. As `learn_task` would, this runs at most `planning_images` images forward and backward.
    If the learner does not keep occupation statistics, earlier tasks are not taken into account.

    Reference:
        Figures "gradient-space diagnostics" and "Motivating observations" (a).

    >>> demands = inspect_task(learner, photos, ["cat", "dog"])  # doctest: +SKIP
    >>> {name: (demand.occupied, demand.chance) for name, demand in demands.items()}  # doctest: +SKIP
    """
    state = learner.state
    if state.adapter is None:
        raise ValueError("the model has no adapter, so a task has no gradient in its layers")
    images = learner.encoder.images(named_images(dataset, class_names))
    gradients, _ = TaskTrainer(state, learner.encoder, images).probe()
    config = state.adapter.active_config
    residual_ranks = {name: config.ranks_of(name)[1] for name in gradients}
    stats = state.memory if isinstance(state.memory, OccupationStatistics) else OccupationStatistics()
    return layer_demands(gradients, stats, config.shared_rank, residual_ranks, config.support_rank)


@takes_turn
def relevance_maps(learner: ClassIncrementalLearner, images: Any, prototypes: torch.Tensor) -> torch.Tensor:
    """Return maps of which patches make an image similar to a prototype: gradient times activation at each patch.

        r_p = sum over the width of A_p * d cos(z, b) / d A_p

    A are the normalised tokens that the attention of the last vision block reads. After that block, an encoder with a
    class token only reads this token, so that the gradient at every patch would be zero. Before the layer norm, whose
    output does not depend on a token's length, the product would always be zero.

    Args:
        learner: a learner whose encoder has one grid of patches for all images.
        images: the images, as for `predict`.
        prototypes: b, (P, d), of any length other than 0: text embeddings, visual prototypes, or bridge prototypes
            at a depth, `head.bridge_prototypes()[c]`.

    Returns:
        The maps, (images, P, grid_h, grid_w), float32, on the CPU. A patch with a positive value makes the image more
        similar to the prototype.

    Reference:
        Appendix "Bridge-depth attribution", figure "Prototype-conditioned Layer Grad x Act maps". The paper does not
        name its layer; the choice is ours.

    >>> relevance_maps(learner, "photo.jpg", learner.text_embeds(["cat", "dog"])).shape  # doctest: +SKIP
    torch.Size([1, 2, 14, 14])
    """
    width = learner.encoder.embed_dim
    if prototypes.ndim != 2 or prototypes.shape[1] != width:
        raise ValueError(f"prototypes must be (P, {width}) as the features, got shape {tuple(prototypes.shape)}")
    record = encoder_of(learner.clip)
    if record.patches:
        raise ValueError(f"{record.title} has a different grid for each image, but maps need one grid for all images")
    directions = nn.functional.normalize(prototypes.to(learner.device, torch.float32), dim=1)
    pixels = learner.encoder.images(unlabelled_images(images))
    inputs = (pixels[index][0][None].to(learner.device) for index in range(len(pixels)))
    return torch.cat([token_relevance(learner.clip, image, directions) for image in inputs]).cpu()


def token_relevance(model: nn.Module, pixels: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
    """Compute relevance maps, (n, P, grid_h, grid_w), from pixels (n, 3, height, width) and unit prototypes (P, d)."""
    tokens: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        tokens.append(output.detach().requires_grad_())
        return tokens[0]

    handle = _last_norm(model).register_forward_hook(keep)
    try:
        with torch.enable_grad():
            similarity = unit_image_embeds(model, pixels) @ prototypes.T
    finally:
        handle.remove()
    # The images do not depend on each other, so the gradient of their sum contains the gradient of each.
    gradients = [torch.autograd.grad(column, tokens[0], retain_graph=True)[0] for column in similarity.sum(dim=0)]
    relevance = torch.stack([(tokens[0] * gradient).sum(dim=-1).detach() for gradient in gradients], dim=1)
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    grid = [side // vision.patch_size for side in pixels.shape[-2:]]
    # The class token and registers come first.
    return relevance[:, :, -grid[0] * grid[1] :].unflatten(-1, grid)


def _last_norm(model: nn.Module) -> nn.Module:
    """Return the layer norm before the attention of the vision tower's last block."""
    text = encoder_of(model).text_tower
    towers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and (text is None or text not in name.split("."))
    ]
    # Every supported block has two norms, of which the attention's is declared before the MLP's.
    return next(module for module in max(towers, key=len)[-1].modules() if isinstance(module, nn.LayerNorm))
