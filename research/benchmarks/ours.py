"""The library's side of a benchmark, with public functions: an adapted vision tower and one training step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig, ModeBases, bidirectional_kl, cross_modal_loss, route_gradients
from research.benchmarks import literal
from research.benchmarks.models import LOGIT_SCALE, encode


def adapted(tower: Any, tasks: int) -> Any:
    """Return a vision tower that has finished `tasks` tasks, with small random updates, and begun the next one."""
    model = get_peft_model(tower, DualModeLoraConfig(text_rank=0))
    generator = torch.Generator().manual_seed(1)
    for task in range(tasks + 1):
        model.begin_task(random_bases(model, generator))
        if task < tasks:
            with torch.no_grad():
                for parameter in (*model.shared_parameters(), *model.residual_parameters()):
                    parameter.copy_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def random_bases(model: Any, generator: torch.Generator) -> dict[str, ModeBases]:
    """Return orthonormal bases with one shared and eight residual directions for each layer."""
    bases = {}
    for name, layer in model.dual_mode_layers().items():
        columns = torch.linalg.qr(torch.randn(layer.in_features, 9, generator=generator))[0]
        bases[name] = ModeBases(columns[:, :1], columns[:, 1:])
    return bases


def literal_twin(model: Any, tower: Any) -> Any:
    """Return the same model in the literal implementation, with the history added to the weights and B = 0."""
    twin = literal.adapt(copy.deepcopy(tower))
    with torch.no_grad():
        for name, layer in literal.layers(twin).items():
            fast = model.dual_mode_layers()[name]
            layer.base.weight.copy_(fast.folded_weight("default"))
            layer.shared_down.weight.copy_(fast.dulbe_P["default"][:, :1].T)
            layer.residual_down.weight.copy_(fast.dulbe_P["default"][:, 1:].T)
    return twin


def teacher_embeds(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the features of the model at the start of this task. In a real task, the probe pass computes them."""
    with torch.no_grad(), model.previous_task():
        return encode(model, pixels)


def step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    text: torch.Tensor,
    old_text: torch.Tensor,
    teacher: torch.Tensor,
) -> None:
    """Make a training step, with given text embeddings, (classes, d), and given teacher features of the batch."""
    pixels, labels = batch
    features = encode(model, pixels)
    task_loss = cross_modal_loss(features, text, labels, LOGIT_SCALE)
    structure_loss = bidirectional_kl(LOGIT_SCALE * features @ old_text.T, LOGIT_SCALE * teacher @ old_text.T)
    route_gradients(model, task_loss, structure_loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
