"""LoRA-Sub: which model is measured, which directions are kept, and where a step goes."""

from itertools import pairwise

import pytest
import torch
from stepping import adapted, begin, end, features, images, learn, new_task, train, update

from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.strategies import make_strategy


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
