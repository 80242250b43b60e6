"""Train one task of a strategy step by step on the tiny CLIP, calling the trainer's hooks in their order."""

from contextlib import nullcontext

import torch
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig, LearnerArguments
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.strategies import NewTask, Step
from dulbe_peft.strategies.losses import cross_modal_loss
from dulbe_peft.subspaces.inputs import collect_statistics
from dulbe_peft.subspaces.occupation import OccupationStatistics

SCALE, RATE = 10.0, 0.02
RANKS = {"shared_rank": 1, "residual_rank": 2}


def adapted(clip, **config):
    """Add an adapter without text LoRA and return it. Its ranks are 1 and 2 unless `config` says otherwise."""
    return get_peft_model(clip, DualModeLoraConfig(**RANKS | config, text_rank=0)).base_model


def new_task(adapter, index=0, memory=None):
    return NewTask(index, adapter, LearnerArguments(device="cpu", learning_rate=RATE), memory)


def images(index):
    """Return six images that are characteristic of the task, and their labels."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, 3, 16, 16, generator=generator) + 3 * torch.randn(3, 16, 16, generator=generator), [0, 1] * 3


def texts(index):
    generator = torch.Generator().manual_seed(100 + index)
    return torch.nn.functional.normalize(torch.randn(2, 16, generator=generator), dim=1)


def features(adapter, index=0):
    """Return the features of a task's images by the present model, without gradients."""
    with torch.no_grad():
        return unit_image_embeds(adapter.model, images(index)[0])


def step_of(task):
    pixels, labels = images(task.index)
    labels, text = torch.tensor(labels), texts(task.index)

    def encode():
        return unit_image_embeds(task.adapter.model, pixels)

    z = encode()
    return Step(cross_modal_loss(z, text, labels, SCALE), z, labels, text, None, encode, encode, SCALE)


def measure(task, into):
    """Add the statistics of the task's images by the present model to `into`, and return it."""
    # A strategy may measure while weights are scaled, which the public function refuses for an adapter.
    clip, layers = task.adapter.model, task.adapter.dual_mode_layers()
    clip.dual_mode_layers = lambda: layers
    collect_statistics(clip, [images(task.index)[0]], unit_image_embeds, into=into)
    del clip.dual_mode_layers
    return into


def begin(strategy, task):
    """Measure the inputs, plan the bases and install them."""
    if "inputs" in strategy.needs:
        with strategy.measuring(task) or nullcontext():
            measure(task, task.inputs)
    modes = strategy.plan(task)
    if modes is not None:
        task.adapter.begin_task(modes, orthonormal=strategy.orthonormal)


def train(strategy, task, steps=3, optimizer=torch.optim.Adam, lr=0.02, watch=lambda: None):
    """Take steps on the task's images.

    `watch` is called before each step, when the gradients are in place, and after the last step.
    """
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
    inputs = OccupationStatistics()
    return strategy.remember(task, measure(task, inputs) if strategy.remembers_inputs else inputs)


def learn(strategy, adapter, index, memory=None, **options):
    """Learn one whole task, and return what the strategy remembers."""
    task = new_task(adapter, index, memory)
    begin(strategy, task)
    train(strategy, task, **options)
    return end(strategy, task)


def update(layer):
    """Return the sum of a layer's history and current modes, (d_out, d_in), in float64."""
    down = torch.cat([layer.dulbe_history_P["default"], layer.dulbe_P["default"]], dim=1).double()
    return torch.cat([layer.dulbe_history_B["default"], layer.current_up("default")], dim=1).double() @ down.T
