"""O-LoRA's penalty and its gradient against the formulas, entry by entry in float64."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig, LearnerArguments, ModeBases
from dulbe_peft.strategies import NewTask, make_strategy
from dulbe_peft.strategies.base import Step


def random_modes(adapter):
    return {
        name: ModeBases(torch.randn(layer.in_features, 1), torch.randn(layer.in_features, 2))
        for name, layer in adapter.dual_mode_layers().items()
    }


def adapter_with_tasks(clip, count):
    """An adapter with `count` finished tasks, and with new bases; returns it and the finished tasks' modes."""
    adapter = get_peft_model(clip, DualModeLoraConfig(shared_rank=1, residual_rank=2)).base_model
    finished = [random_modes(adapter) for _ in range(count)]
    for modes in finished:
        adapter.begin_task(modes, orthonormal=False)
        for layer in adapter.dual_mode_layers().values():
            layer.set_up_projections("default", torch.randn(layer.out_features, 3))
    adapter.begin_task(random_modes(adapter), orthonormal=False)
    return adapter, finished


def test_penalty_and_gradient_are_the_formulas(tiny_clip):
    adapter, finished = adapter_with_tasks(tiny_clip(), 3)
    task = NewTask(3, adapter, LearnerArguments())
    layers = adapter.dual_mode_layers()
    with adapter.trained_bases() as bases:
        penalty = make_strategy("o_lora:lambda_1=0.25").penalty(task)
        penalty.backward()
        total = 0.0
        for (name, layer), basis in zip(layers.items(), bases, strict=True):
            current = layer.dulbe_P["default"].detach().double().T  # A_t, a row for each direction
            gradient = torch.zeros_like(current)
            for modes in finished:
                earlier = torch.cat([modes[name].shared, modes[name].residual], dim=1).double().T  # A_i
                for row in earlier:
                    for place, new in enumerate(current):
                        total += 0.25 * float((row @ new).abs())
                        gradient[place] += 0.25 * torch.sign(row @ new) * row
            torch.testing.assert_close(basis.grad.T.double(), gradient, rtol=1e-5, atol=1e-5)
            assert layer.dulbe_shared_B["default"].grad is None and not layer.dulbe_history_P["default"].requires_grad
    assert penalty.item() == pytest.approx(total, rel=1e-5)


def test_the_penalty_joins_the_loss(tiny_clip):
    adapter, _ = adapter_with_tasks(tiny_clip(), 1)
    task = NewTask(1, adapter, LearnerArguments())
    strategy = make_strategy("o_lora")
    with adapter.trained_bases() as bases:
        loss = sum(basis.square().sum() for basis in bases)
        nothing = torch.zeros(0)
        strategy.backward(task, Step(loss, nothing, nothing, nothing, None, lambda: nothing, lambda: nothing, 1.0))
        pull = torch.autograd.grad(strategy.penalty(task), bases)
        for basis, away in zip(bases, pull, strict=True):
            assert away.any()
            torch.testing.assert_close(basis.grad, 2 * basis + away)


def test_the_first_task_has_no_penalty(tiny_clip):
    adapter, _ = adapter_with_tasks(tiny_clip(), 0)
    assert make_strategy("o_lora").penalty(NewTask(0, adapter, LearnerArguments())) is None
