"""O-LoRA, SD-LoRA and LoRA-Sub against their formulas in float64."""

from itertools import pairwise

import pytest
import torch
from stepping import adapted, begin, end, features, images, learn, new_task, train, update

from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.strategies import Step, make_strategy
from dulbe_peft.strategies.sd_lora import directions, scaled


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


def test_the_inputs_are_those_of_a_model_that_unlearned_the_old_tasks(tiny_clip):
    strategy, adapter = make_strategy("lora_sub"), adapted(tiny_clip())
    assert strategy.measuring(new_task(adapter)) is None
    learn(strategy, adapter, 0, lr=0.05)
    task, name = new_task(adapter, 1), "vision_model.encoder.layers.1.mlp.fc1"
    begin(strategy, task)
    space = task.notes[name].double()
    assert 1 < space.shape[1] < 32
    for sign in (-1, 1):
        model, seen = tiny_clip(), []
        for key, layer in adapter.dual_mode_layers().items():  # in all layers, or the last one's inputs would differ
            model.get_submodule(key).weight.data += sign * update(layer).float()
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0].detach()))
        with torch.no_grad():
            unit_image_embeds(model, images(1)[0])
        tokens = seen[0].flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(sum(torch.outer(x, x) for x in tokens))
        count = next(k for k in range(1, 33) if values[-k:].sum() >= 0.99 * values.sum())
        expected = vectors[:, -count:]
        apart = (space @ space.T - expected @ expected.T).norm()
        assert apart < 1e-4 if sign < 0 else apart > 0.1


@pytest.mark.parametrize("normalize", [False, True])
def test_every_step_of_a_goes_into_the_space_and_b_is_free(tiny_clip, normalize):
    strategy, adapter = make_strategy(f"lora_sub:energy=0.8,normalize={normalize}"), adapted(tiny_clip())
    learn(strategy, adapter, 0, lr=0.2)
    task = new_task(adapter, 1)
    begin(strategy, task)
    layers, rows = adapter.dual_mode_layers(), []

    def watch():
        rows.append({})
        for name, layer in layers.items():
            free = layer.dulbe_residual_B["default"]
            pairs = ((layer.dulbe_P["default"], f"A {name}"), (free, f"B {name}"))
            rows[-1].update({key: (p.detach().double().clone(), p.grad.double().clone()) for p, key in pairs})

    train(strategy, task, steps=4, optimizer=torch.optim.SGD, lr=5.0, watch=watch)
    moved, left_out = 0.0, 0.0
    for before, after in pairwise(rows):
        for name in layers:
            space = task.notes[name].double()
            step = -5.0 * before[f"A {name}"][1]  # what plain gradient descent adds
            inside = space @ space.T @ step / (space.shape[1] ** 0.5 if normalize else 1.0)
            moved, left_out = moved + inside.norm(), left_out + (step - space @ space.T @ step).norm()
            torch.testing.assert_close(after[f"A {name}"][0] - before[f"A {name}"][0], inside, rtol=1e-3, atol=1e-6)
            expected = before[f"B {name}"][0] - 5.0 * before[f"B {name}"][1]
            torch.testing.assert_close(after[f"B {name}"][0], expected, rtol=1e-4, atol=1e-6)
    assert moved > 1e-2 and left_out > 1e-2


def test_the_first_task_is_plain_lora(tiny_clip):
    ours, plain = adapted(tiny_clip()), adapted(tiny_clip())
    learn(make_strategy("lora_sub"), ours, 0)
    learn(make_strategy("merged_lora"), plain, 0)
    assert torch.equal(features(ours), features(plain))


def test_a_projected_start_confines_the_whole_update(tiny_clip):
    strategy, adapter = make_strategy("lora_sub:energy=0.8,project_start=true"), adapted(tiny_clip())
    learn(strategy, adapter, 0)
    old = {name: update(layer) for name, layer in adapter.dual_mode_layers().items()}
    task = new_task(adapter, 1)
    begin(strategy, task)
    train(strategy, task)
    spaces = {name: task.notes[name].double() for name in old}
    end(strategy, task)
    for name, layer in adapter.dual_mode_layers().items():
        new = update(layer) - old[name]
        assert new.norm() > 1e-3
        assert (new - new @ spaces[name] @ spaces[name].T).norm() < 1e-5 * new.norm()
