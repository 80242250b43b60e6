"""O-LoRA's penalty and its gradient against the formulas, entry by entry in float64."""

import pytest
import torch
from stepping import adapted, begin, end, new_task, train

from dulbe_peft.strategies import Step, make_strategy


def test_the_penalty_is_the_formula_s_and_joins_the_loss(tiny_clip):
    strategy, adapter, earlier = make_strategy("o_lora:lambda_1=0.25"), adapted(tiny_clip()), {}
    layers = adapter.dual_mode_layers()
    for index in range(3):
        task = new_task(adapter, index)
        begin(strategy, task)
        assert index or strategy.penalty(task) is None
        train(strategy, task)
        for name, layer in layers.items():
            earlier.setdefault(name, []).extend(layer.dulbe_P["default"].detach().double().T)  # rows of A_i
        end(strategy, task)
    task = new_task(adapter, 3)
    begin(strategy, task)
    with adapter.trained_bases() as bases:
        penalty, nothing = strategy.penalty(task), torch.zeros(0)
        loss = sum(basis.square().sum() for basis in bases)
        strategy.backward(task, Step(loss, nothing, nothing, nothing, None, lambda: nothing, lambda: nothing, 1.0))
        total = 0.0
        for (name, layer), basis in zip(layers.items(), bases, strict=True):
            current = layer.dulbe_P["default"].detach().double().T  # A_t, a row for each direction
            gradient = 2 * current
            for row in earlier[name]:
                for place, new in enumerate(current):
                    total += 0.25 * float((row @ new).abs())
                    gradient[place] += 0.25 * torch.sign(row @ new) * row
            torch.testing.assert_close(basis.grad.T.double(), gradient, rtol=1e-5, atol=1e-5)
            assert layer.dulbe_shared_B["default"].grad is None and not layer.dulbe_history_P["default"].requires_grad
    assert penalty.item() == pytest.approx(total, rel=1e-5)
