"""CL-LoRA: which bases are shared, the block weights and their penalty, and the distillation at the early exit."""

import pytest
import torch
from stepping import SCALE, adapted, begin, end, features, images, learn, new_task, step_of, texts, train

from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.cl_lora import block_of, lower_and_upper, row_scales

LOWER = "vision_model.encoder.layers.0.mlp.fc1"
UPPER = "vision_model.encoder.layers.1.mlp.fc1"


def test_lower_layers_keep_their_a_and_upper_ones_get_and_train_a_new_one(tiny_clip):
    strategy, adapter, memory = make_strategy("cl_lora"), adapted(tiny_clip()), None
    for index in range(2):
        memory = learn(strategy, adapter, index, memory)
    lower, upper = (adapter.dual_mode_layers()[name] for name in (LOWER, UPPER))
    first, second = lower.dulbe_history_P["default"].split(3, dim=1)
    assert torch.equal(first, second)
    torch.testing.assert_close(first.T @ first, torch.eye(3), rtol=0, atol=1e-5)
    first, second = upper.dulbe_history_P["default"].split(3, dim=1)
    assert (first - second).norm() > 0.1
    assert (first.T @ first - torch.eye(3)).norm() > 1e-3  # it was orthonormal before it was trained
    assert all(up.norm() > 1e-3 for up in lower.dulbe_history_B["default"].split(3, dim=1))


def test_block_weights_scale_the_upper_update_and_are_merged_with_it(tiny_clip):
    strategy, adapter = make_strategy("cl_lora"), adapted(tiny_clip())
    memory = learn(strategy, adapter, 0)
    task, x = new_task(adapter, 1, memory), torch.randn(5, 32)
    begin(strategy, task)
    layer, seen = adapter.dual_mode_layers()[UPPER], []
    index = lower_and_upper(adapter.dual_mode_layers(), 0.5)[1].index(UPPER)

    def watch():
        with torch.no_grad():
            update = layer.current_up("default").double() @ layer.dulbe_P["default"].double().T
            weight = layer.folded_weight("default").double() + float(task.notes["block_weights"][index]) * update
            literal = x.double() @ weight.T + layer.base_layer.bias.double()
            torch.testing.assert_close(layer(x).double(), literal, rtol=1e-4, atol=1e-4)
            seen.append(features(adapter, 1))

    start = 0.5 + torch.rand(4, generator=task.generator(salt=1))
    train(strategy, task, watch=watch)
    weights = task.notes["block_weights"].detach()
    assert ((start >= 0.5) & (start <= 1.5)).all() and ((weights - start).abs() > 1e-3).any()
    memory = end(strategy, task)
    torch.testing.assert_close(features(adapter, 1), seen[-1], rtol=1e-4, atol=1e-5)
    assert memory["block_weights"].shape == (2, 4) and torch.equal(memory["block_weights"][1], weights)


def test_the_penalty_on_similar_weights_and_its_gradient(tiny_clip):
    strategy, adapter = make_strategy("cl_lora:similarity=0.3"), adapted(tiny_clip())
    old = torch.tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, -1.0, 2.0, -1.0]])
    task = new_task(adapter, 2, {"block_weights": old})
    weights = torch.tensor([0.7, 1.2, 0.9, 1.4], requires_grad=True)
    task.notes["block_weights"] = weights
    penalty = strategy.penalty(task)
    penalty.backward()
    expected, gradient, mu = 0.0, torch.zeros(4).double(), weights.detach().double()
    for row in old.double():
        cosine = row @ mu / (row.norm() * mu.norm())
        expected += 0.3 * abs(float(cosine)) / 2
        gradient += 0.3 / 2 * cosine.sign() * (row / (row.norm() * mu.norm()) - cosine * mu / mu.norm() ** 2)
    assert penalty.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights.grad.double(), gradient, rtol=1e-4, atol=1e-7)
    assert strategy.penalty(new_task(adapter)) is None


def exit_features(clip, weights, pixels):
    """The first block of a plain tower with the given weights, then its last norm and projection, by hand."""
    vision = clip.vision_model
    hidden = vision.pre_layrnorm(vision.embeddings(pixels))
    with torch.no_grad():
        for name, weight in weights.items():
            clip.get_submodule(name).weight.copy_(weight)
    for name in weights:
        clip.get_submodule(name).weight.requires_grad_()
    hidden = vision.encoder.layers[0](hidden, None)
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    z = clip.visual_projection(vision.post_layernorm(hidden[:, 0]))
    return z / z.norm(dim=1, keepdim=True)


def gradients(strategy, task):
    """Gradients of B by layer, and those of the block weights, after one step that is not made."""
    layers = task.adapter.dual_mode_layers()
    with strategy.training(task):
        torch.manual_seed(1)
        for layer in layers.values():
            layer.set_up_projections("default", 0.3 * torch.randn(layer.out_features, 3))
        strategy.backward(task, step_of(task))
        found = {
            name: torch.cat([layer.dulbe_shared_B["default"].grad, layer.dulbe_residual_B["default"].grad], dim=1)
            for name, layer in layers.items()
        }
        task.adapter.zero_grad()
        return found, task.notes["block_weights"].grad


def test_the_distillation_reaches_the_lower_up_projections_alone_scaled_by_row(tiny_clip):
    on, off = make_strategy("cl_lora"), make_strategy("cl_lora:distillation=0")
    adapter = adapted(tiny_clip())
    memory = learn(on, adapter, 0, lr=0.1)
    task = new_task(adapter, 1, memory)
    begin(on, task)
    (with_it, weights), (without, same_weights) = gradients(on, task), gradients(off, task)
    assert torch.equal(weights, same_weights)

    lower = {name: layer for name, layer in adapter.dual_mode_layers().items() if block_of(name) == 0}
    old = {name: layer.folded_weight("default").detach() for name, layer in lower.items()}
    now = {
        name: old[name] + (layer.current_up("default") @ layer.dulbe_P["default"].T).detach()
        for name, layer in lower.items()
    }
    pixels, text = images(1)[0].double(), texts(1).double()
    assert len(adapter.model.vision_model.encoder.layers) == 2  # the tower is whole again
    teacher = exit_features(tiny_clip().double(), old, pixels).detach()
    clip = tiny_clip().double()
    student = exit_features(clip, now, pixels)
    probabilities = (SCALE * teacher @ text.T / 2).softmax(dim=1)
    loss = -5 * (probabilities * (SCALE * student @ text.T / 2).log_softmax(dim=1)).sum() / len(pixels)
    loss.backward()
    for name, layer in adapter.dual_mode_layers().items():
        if name not in lower:
            assert torch.equal(with_it[name], without[name])
            continue
        gradient = clip.get_submodule(name).weight.grad @ layer.dulbe_P["default"].double()
        norms = layer.dulbe_history_B["default"].double().norm(dim=1)
        literal = gradient * (layer.out_features * norms / norms.sum())[:, None]
        added = (with_it[name] - without[name]).double()
        assert literal.norm() > 1e-4
        torch.testing.assert_close(added, literal, rtol=1e-3, atol=1e-4 * float(literal.norm()))


def test_row_scales_have_mean_one_and_are_one_where_nothing_was_learned():
    up = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(row_scales(up), torch.tensor([[2.5], [0.5], [0.0]]))
    assert torch.equal(row_scales(torch.zeros(3, 2)), torch.ones(3, 1))
