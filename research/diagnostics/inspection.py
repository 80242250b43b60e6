"""What needs a learner and images: how a new task would change its layers, and which patches of an image count."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dulbe_peft.data.images import named_images
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders.loading import encoder_of, unit_image_embeds
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.trainer import TaskTrainer
from dulbe_peft.training.turns import in_turn
from research.diagnostics.measures import LayerDemand, layer_demands


@in_turn
def inspect_task(
    learner: ClassIncrementalLearner, dataset: Any, class_names: Sequence[str] | None = None
) -> dict[str, LayerDemand]:
    """How much a task that the learner has not learned asks of every layer, and which part the modes would take.

    The learner stays as it is. The probe runs every image once forward and backward. A learner that keeps other things
    than occupation statistics is judged without a history.

    Reference:
        Figures "gradient-space diagnostics" and "Motivating observations" (a).

    >>> demands = inspect_task(learner, photos, ["cat", "dog"])  # doctest: +SKIP
    >>> {name: (demand.occupied, demand.chance) for name, demand in demands.items()}  # doctest: +SKIP
    """
    state = learner.state
    if state.adapter is None:
        raise ValueError("the model has no adapter, so no layer of it has a task's gradient")
    images = learner.encoder.images(named_images(dataset, class_names))
    gradients, _ = TaskTrainer(state, learner.encoder, images).probe()
    config = state.adapter.active_config
    residual_ranks = {name: config.ranks_of(name)[1] for name in gradients}
    stats = state.memory if isinstance(state.memory, OccupationStatistics) else OccupationStatistics()
    return layer_demands(gradients, stats, config.shared_rank, residual_ranks, config.support_rank)


@in_turn
def relevance_maps(learner: ClassIncrementalLearner, images: Any, prototypes: torch.Tensor) -> torch.Tensor:
    """Which patches of an image make it similar to a prototype: gradient times activation, patch by patch.

        r_p = sum over the width of A_p * d cos(z, b) / d A_p

    A are the normalised tokens that the attention of the last vision block reads. Behind the block, an encoder with a
    class token reads this token alone, so the gradient is zero at every patch. Before its layer norm, which does not
    see a token's length, the product is always zero.

    `images` is whatever `predict` takes. `prototypes` are b, (P, d), of any length but 0: text embeddings, visual
    prototypes, or bridge prototypes at a depth, `head.bridge_prototypes()[c]`. The maps are
    (images, P, grid_h, grid_w), float32 on the CPU. Above 0 the patch makes the image more similar to the prototype.

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
        raise ValueError(f"{record.title} gives each image a grid of its own, and maps need one grid for all images")
    directions = nn.functional.normalize(prototypes.to(learner.device, torch.float32), dim=1)
    pixels = learner.encoder.images(unlabelled_images(images))
    each = (pixels[index][0][None].to(learner.device) for index in range(len(pixels)))
    return torch.cat([token_relevance(learner.clip, pixel, directions) for pixel in each]).cpu()


def token_relevance(model: nn.Module, pixels: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
    """`relevance_maps` of a model and pixels (n, 3, height, width), unit prototypes (P, d): (n, P, grid_h, grid_w)."""
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
    # One image does not depend on another, so their sum has the slopes of each.
    slopes = [torch.autograd.grad(column, tokens[0], retain_graph=True)[0] for column in similarity.sum(dim=0)]
    relevance = torch.stack([(tokens[0] * slope).sum(dim=-1).detach() for slope in slopes], dim=1)
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    grid = [side // vision.patch_size for side in pixels.shape[-2:]]
    # The class token and registers come first.
    return relevance[:, :, -grid[0] * grid[1] :].unflatten(-1, grid)


def _last_norm(model: nn.Module) -> nn.Module:
    """The layer norm before the attention of the vision tower's last block."""
    text = encoder_of(model).text_tower
    towers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and (text is None or text not in name.split("."))
    ]
    # Every served block has two norms, and declares the attention's before the MLP's.
    return next(module for module in max(towers, key=len)[-1].modules() if isinstance(module, nn.LayerNorm))
