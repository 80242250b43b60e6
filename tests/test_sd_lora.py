"""SD-LoRA: the forward pass of directions and magnitudes, what is trained, and the border between tasks."""

import torch
from stepping import adapted, begin, end, features, learn, new_task, train

from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.sd_lora import directions, scaled

RANK = 3
NAME = "vision_model.encoder.layers.1.mlp.fc1"


def pairs_of(layer):
    """(A', B) of every pair in the history, float64."""
    down, up = (getattr(layer, f"dulbe_history_{kind}")["default"].double() for kind in "PB")
    return list(zip(down.split(RANK, dim=1), up.split(RANK, dim=1), strict=True))


def after_two_tasks(clip):
    strategy, adapter = make_strategy("sd_lora"), adapted(clip)
    for index in range(2):
        learn(strategy, adapter, index)
    return strategy, adapter, adapter.dual_mode_layers()[NAME]


def test_the_forward_pass_is_the_papers(tiny_clip):
    strategy, adapter, layer = after_two_tasks(tiny_clip())
    task, x = new_task(adapter, 2), torch.randn(5, 32)
    begin(strategy, task)
    with strategy.training(task), torch.no_grad():
        layer.set_up_projections("default", torch.randn(64, RANK))
        magnitudes = task.notes[NAME]
        expected = [float(down.norm() * up.norm()) for down, up in pairs_of(layer)] + [0.8]
        torch.testing.assert_close(magnitudes.tolist(), expected, rtol=1e-5, atol=0)
        magnitudes.copy_(torch.tensor([0.3, -2.0, 1.7]))
        linear = layer.base_layer
        literal = x.double() @ linear.weight.double().T + linear.bias.double()
        for m, (down, up) in zip((0.3, -2.0), pairs_of(layer), strict=True):
            literal += m * (x.double() @ down @ up.T) / (down.norm() * up.norm())
        literal += 1.7 * x.double() @ layer.dulbe_P["default"].double() @ layer.current_up("default").double().T
        torch.testing.assert_close(layer(x).double(), literal, rtol=1e-4, atol=1e-4)


def test_magnitudes_are_trained_on_and_directions_are_not(tiny_clip):
    strategy, adapter, layer = after_two_tasks(tiny_clip())
    task = new_task(adapter, 2)
    begin(strategy, task)
    before, seen = pairs_of(layer), []
    train(strategy, task, watch=lambda: seen.append(features(adapter)))
    magnitudes = task.notes[NAME].tolist()
    up = layer.current_up("default").double()
    end(strategy, task)
    torch.testing.assert_close(features(adapter), seen[-1], rtol=1e-4, atol=1e-5)  # the border changes no output
    assert (seen[-1] - seen[0]).norm() > 0.01
    after = pairs_of(layer)
    for m, (old_down, old_up), (down, up_now) in zip(magnitudes, before, after):
        assert torch.equal(down, old_down)
        direction = old_up / (old_down.norm() * old_up.norm())
        assert abs(m - float(old_down.norm() * old_up.norm())) > 1e-3
        torch.testing.assert_close(up_now, m * direction, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after[2][1], magnitudes[2] * up, rtol=1e-5, atol=1e-7)
    assert abs(magnitudes[2] - 0.8) > 1e-3


def test_a_pair_that_was_never_trained_stays_without_effect():
    down, up = torch.randn(6, 2 * RANK), torch.randn(4, 2 * RANK)
    up[:, :RANK] = 0
    units, magnitudes = directions(down, up, RANK)
    assert magnitudes[0] == 0 and not units[:, :RANK].any() and torch.isfinite(units).all()
    torch.testing.assert_close(scaled(units, magnitudes), up)
