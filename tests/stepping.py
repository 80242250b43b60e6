"""One task of a strategy by hand, on the tiny CLIP: the trainer's hooks in their order, an optimiser of the test's."""

from contextlib import nullcontext

import torch
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig, LearnerArguments
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.strategies import NewTask, Step
from dulbe_peft.strategies.losses import cross_modal_loss
from dulbe_peft.subspaces.inputs import collect_statistics
from dulbe_peft.subspaces.occupation import OccupationStatistics

SCALE = 10.0
RANKS = {"shared_rank": 1, "residual_rank": 2}


def adapted(clip, **config):
    """An adapter of ranks 1 and 2 where `config` names no others, without text LoRA."""
    return get_peft_model(clip, DualModeLoraConfig(**RANKS | config, text_rank=0)).base_model


def new_task(adapter, index=0, memory=None):
    return NewTask(index, adapter, LearnerArguments(device="cpu"), memory)


def images(index):
    """Six images of the task's own kind and their labels."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, 3, 16, 16, generator=generator) + 3 * torch.randn(3, 16, 16, generator=generator), [0, 1] * 3


def texts(index):
    generator = torch.Generator().manual_seed(100 + index)
    return torch.nn.functional.normalize(torch.randn(2, 16, generator=generator), dim=1)


def features(adapter, index=0):
    """Features of a task's images by the model as it is, without gradients."""
    with torch.no_grad():
        return unit_image_embeds(adapter.model, images(index)[0])


def step_of(task):
    pixels, labels = images(task.index)
    labels, text = torch.tensor(labels), texts(task.index)

    def encode():
        return unit_image_embeds(task.adapter.model, pixels)

    z = encode()
    return Step(cross_modal_loss(z, text, labels, SCALE), z, labels, text, None, encode, encode, SCALE)


def begin(strategy, task):
    """Measure, plan and install the bases."""
    if "inputs" in strategy.needs:
        with strategy.measuring(task) or nullcontext():
            forward = unit_image_embeds
            collect_statistics(
                task.adapter, [images(task.index)[0]], lambda _, x: forward(task.adapter.model, x), into=task.inputs
            )
    modes = strategy.plan(task)
    if modes is not None:
        task.adapter.begin_task(modes, orthonormal=strategy.orthonormal)


def train(strategy, task, steps=3, optimizer=torch.optim.Adam, lr=0.02, watch=lambda: None):
    """Steps on the task's images; `watch` is called before each step, with gradients in place, and after the last."""
    with strategy.training(task) as extra:
        parameters = [p for p in task.adapter.parameters() if p.requires_grad] + extra
        stepper = optimizer(parameters, lr=lr)
        for _ in range(steps):
            stepper.zero_grad()
            strategy.backward(task, step_of(task))
            watch()
            stepper.step()
            with torch.no_grad():
                strategy.after_step(task)
        watch()


def end(strategy, task):
    with torch.no_grad():
        strategy.finish(task)
    task.adapter.fold_if_trained(strategy.keeps_factors)
    return strategy.remember(task, OccupationStatistics())


def learn(strategy, adapter, index, memory=None, **options):
    """One whole task; returns what the strategy remembers."""
    task = new_task(adapter, index, memory)
    begin(strategy, task)
    train(strategy, task, **options)
    return end(strategy, task)


def update(layer):
    """History and current modes of a layer, (d_out, d_in) in float64."""
    down = torch.cat([layer.dulbe_history_P["default"], layer.dulbe_P["default"]], dim=1).double()
    return torch.cat([layer.dulbe_history_B["default"], layer.current_up("default")], dim=1).double() @ down.T
