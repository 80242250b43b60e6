"""Test O-LoRA, SD-LoRA, LoRA-Sub, CL-LoRA and SPU against their formulas in float64."""

from itertools import pairwise

import pytest
import torch
from stepping import RATE, SCALE, adapted, begin, end, features, images, learn, new_task, step_of, texts, train, update

from dulbe_peft.adapter.config import DENSE
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.papers.cl_lora import block_of, lower_and_upper, row_scales
from dulbe_peft.papers.sd_lora import directions, scaled
from dulbe_peft.photos.cost import trainable_parameters
from dulbe_peft.strategies import Step, make_strategy


def test_o_lora_penalty_equals_the_formula_and_is_added_to_the_loss(tiny_clip):
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
            old = torch.stack(earlier[name])
            total += 0.25 * float((current @ old.T).abs().sum())
            gradient = 2 * current + 0.25 * torch.sign(current @ old.T) @ old
            torch.testing.assert_close(basis.grad.T.double(), gradient, rtol=1e-5, atol=1e-5)
            assert layer.dulbe_shared_B["default"].grad is None and not layer.dulbe_history_P["default"].requires_grad
    assert penalty.item() == pytest.approx(total, rel=1e-5)


RANK = 3
LOWER, UPPER = (f"vision_model.encoder.layers.{block}.mlp.fc1" for block in (0, 1))


def pairs_of(layer):
    """Return (A', B) of every pair in the history, in float64."""
    down, up = (getattr(layer, f"dulbe_history_{kind}")["default"].double() for kind in "PB")
    return list(zip(down.split(RANK, dim=1), up.split(RANK, dim=1), strict=True))


@pytest.mark.parametrize("restart", [True, False])
def test_sd_lora_equals_the_formula_and_trains_old_magnitudes_but_not_directions(tiny_clip, restart):
    rate = 0.05
    strategy, adapter = make_strategy(f"sd_lora:restart={restart},magnitude_rate={rate}".lower()), adapted(tiny_clip())
    for index in range(2):
        learn(strategy, adapter, index)
    layer, task, x = adapter.dual_mode_layers()[UPPER], new_task(adapter, 2), torch.randn(5, 32)
    begin(strategy, task)
    before, seen = pairs_of(layer), []
    ended = [float(down.norm() * up.norm()) for down, up in before]
    initial = [0.8] * 3 if restart else [*ended, 0.8]
    with strategy.training(task) as trained, torch.no_grad():
        up = layer.current_up("default").clone()
        layer.set_up_projections("default", torch.randn(64, RANK))
        torch.testing.assert_close(task.notes[UPPER]().tolist(), initial, rtol=1e-5, atol=0)
        # All layers share one tensor.
        trained[-1].copy_((torch.tensor([0.3, -2.0, 1.7]) - torch.tensor(initial)) * RATE / rate)
        linear = layer.base_layer
        literal = x.double() @ linear.weight.double().T + linear.bias.double()
        for m, (down, old_up) in zip((0.3, -2.0), before, strict=True):
            literal += m * (x.double() @ down @ old_up.T) / (down.norm() * old_up.norm())
        literal += 1.7 * x.double() @ layer.dulbe_P["default"].double() @ layer.current_up("default").double().T
        torch.testing.assert_close(layer(x).double(), literal, rtol=1e-4, atol=1e-4)
        layer.set_up_projections("default", up)

    moved = [initial]
    train(strategy, task, watch=lambda: (seen.append(features(adapter)), moved.append(task.notes[UPPER]().tolist())))
    magnitudes = task.notes[UPPER]().tolist()
    first = [abs(after - before) for after, before in zip(moved[2], moved[1], strict=True)]
    assert first == pytest.approx([rate, rate, 0.0], rel=1e-2)  # Adam's first step; B_t is 0, so m_t has no gradient
    up = layer.current_up("default").double()
    end(strategy, task)
    torch.testing.assert_close(features(adapter), seen[-1], rtol=1e-4, atol=1e-5)  # ending the task changes no output
    assert (seen[-1] - seen[0]).norm() > 0.01
    after = pairs_of(layer)
    for m, norm, (old_down, old_up), (down, up_now) in zip(magnitudes, ended, before, after):
        assert torch.equal(down, old_down)
        torch.testing.assert_close(up_now, m / norm * old_up, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after[2][1], magnitudes[2] * up, rtol=1e-5, atol=1e-7)


def test_untrained_sd_lora_pair_has_no_effect():
    down, up = torch.randn(6, 2 * RANK), torch.randn(4, 2 * RANK)
    up[:, :RANK] = 0
    units, magnitudes = directions(down, up, RANK)
    assert magnitudes[0] == 0 and not units[:, :RANK].any() and torch.isfinite(units).all()
    torch.testing.assert_close(scaled(units, magnitudes), up)


def test_lora_sub_measures_inputs_of_the_model_minus_the_old_updates(tiny_clip):
    strategy, adapter = make_strategy("lora_sub"), adapted(tiny_clip())
    assert strategy.measuring(new_task(adapter)) is None
    learn(strategy, adapter, 0, lr=0.05)
    task = new_task(adapter, 1)
    begin(strategy, task)
    space = task.notes[UPPER].double()
    assert 1 < space.shape[1] < 32
    for sign in (-1, 1):
        model, seen = tiny_clip(), []
        for (
            key,
            layer,
        ) in adapter.dual_mode_layers().items():  # in all layers, because each changes the inputs of the next
            model.get_submodule(key).weight.data += sign * update(layer).float()
        model.get_submodule(UPPER).register_forward_pre_hook(lambda _, args, to=seen: to.append(args[0].detach()))
        with torch.no_grad():
            unit_image_embeds(model, images(1)[0])
        tokens = seen[0].flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(sum(torch.outer(x, x) for x in tokens))
        count = next(k for k in range(1, 33) if values[-k:].sum() >= 0.99 * values.sum())
        expected = vectors[:, -count:]
        distance = (space @ space.T - expected @ expected.T).norm()
        assert distance < 1e-4 if sign < 0 else distance > 0.1


@pytest.mark.parametrize("normalize", [False, True])
def test_lora_sub_projects_the_steps_of_a_but_not_of_b_after_the_first_task(tiny_clip, normalize):
    strategy, adapter = make_strategy(f"lora_sub:energy=0.8,normalize={normalize}"), adapted(tiny_clip())
    plain = adapted(tiny_clip())
    for kind, model in ((strategy, adapter), (make_strategy("merged_lora"), plain)):
        learn(kind, model, 0, lr=0.2)
    assert torch.equal(features(adapter), features(plain))
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
            step = -5.0 * before[f"A {name}"][1]  # the step of plain gradient descent
            inside = space @ space.T @ step / (space.shape[1] ** 0.5 if normalize else 1.0)
            moved, left_out = moved + inside.norm(), left_out + (step - space @ space.T @ step).norm()
            torch.testing.assert_close(after[f"A {name}"][0] - before[f"A {name}"][0], inside, rtol=1e-3, atol=1e-6)
            expected = before[f"B {name}"][0] - 5.0 * before[f"B {name}"][1]
            torch.testing.assert_close(after[f"B {name}"][0], expected, rtol=1e-4, atol=1e-6)
    assert moved > 1e-2 and left_out > 1e-2


def test_lora_sub_with_projected_start_confines_the_whole_update(tiny_clip):
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


def test_cl_lora_keeps_a_of_lower_layers_and_merges_block_weights_of_upper_ones(tiny_clip):
    strategy, adapter = make_strategy("cl_lora"), adapted(tiny_clip())
    memory = learn(strategy, adapter, 0)
    task, x = new_task(adapter, 1, memory), torch.randn(5, 32)
    begin(strategy, task)
    (lower, layer), seen = (adapter.dual_mode_layers()[name] for name in (LOWER, UPPER)), []
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

    first, second = lower.dulbe_history_P["default"].split(3, dim=1)
    assert torch.equal(first, second)
    torch.testing.assert_close(first.T @ first, torch.eye(3), rtol=0, atol=1e-5)
    assert all(up.norm() > 1e-3 for up in lower.dulbe_history_B["default"].split(3, dim=1))
    first, second = layer.dulbe_history_P["default"].split(3, dim=1)
    assert (first - second).norm() > 0.1
    assert (first.T @ first - torch.eye(3)).norm() > 1e-3  # it was orthonormal before training


def test_cl_lora_penalty_on_similar_weights_equals_the_formula(tiny_clip):
    strategy, adapter = make_strategy("cl_lora:similarity=0.3"), adapted(tiny_clip())
    old = torch.tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, -1.0, 2.0, -1.0]])
    task = new_task(adapter, 2, {"block_weights": old})
    weights = torch.tensor([0.7, 1.2, 0.9, 1.4], requires_grad=True)
    task.notes["block_weights"] = weights
    penalty = strategy.penalty(task)
    penalty.backward()
    mu = weights.detach().double().requires_grad_()
    expected = 0.3 * (old.double() @ mu / (old.double().norm(dim=1) * mu.norm())).abs().mean()
    expected.backward()
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(weights.grad.double(), mu.grad, rtol=1e-4, atol=1e-7)
    assert strategy.penalty(new_task(adapter)) is None


def exit_features(clip, weights, pixels):
    """Compute the features of a plain tower with the given weights that ends after its first block."""
    vision = clip.vision_model
    hidden = vision.pre_layrnorm(vision.embeddings(pixels))
    for name, weight in weights.items():
        clip.get_submodule(name).weight = torch.nn.Parameter(weight.double())
    hidden = vision.encoder.layers[0](hidden, None)
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    z = clip.visual_projection(vision.post_layernorm(hidden[:, 0]))
    return z / z.norm(dim=1, keepdim=True)


def gradients(strategy, task):
    """Return the gradients of B by layer, and of the block weights, without making the step."""
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


def test_cl_lora_distillation_trains_only_lower_up_projections_scaled_by_row(tiny_clip):
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
    assert len(adapter.model.vision_model.encoder.layers) == 2  # the tower has all its blocks again
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


def test_cl_lora_row_scales_have_mean_one_and_are_one_for_an_untrained_layer():
    up = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(row_scales(up), torch.tensor([[2.5], [0.5], [0.0]]))
    assert torch.equal(row_scales(torch.zeros(3, 2)), torch.ones(3, 1))


def test_spu_trains_only_the_weights_with_the_largest_gradients(tiny_clip):
    """Compare two tasks with a model in float64 in which all other gradients are set to zero."""
    strategy, adapter = make_strategy("spu:share=0.07"), adapted(tiny_clip(), target_modules=["fc1"])
    clip, layers = tiny_clip().double(), adapter.dual_mode_layers()
    weights = [clip.get_submodule(name).weight for name in layers]
    assert {name.rpartition(".")[2] for name in layers} == {"fc1"} and len(layers) == 2

    def gradients_of(index):
        pixels, labels = images(index)
        z = torch.nn.functional.normalize(clip.get_image_features(pixels.double()).pooler_output, dim=1)
        loss = torch.nn.functional.cross_entropy(SCALE * z @ texts(index).double().T, torch.tensor(labels))
        return torch.autograd.grad(loss, weights)

    for index in range(2):
        start = [weight.detach().clone() for weight in weights]
        gradients = gradients_of(index)
        chosen = [g.abs() >= g.abs().flatten().sort().values[-int(0.07 * g.numel())] for g in gradients]
        optimizer = torch.optim.Adam(weights, lr=0.02)
        for _ in range(3):
            for weight, gradient, mask in zip(weights, gradients_of(index), chosen, strict=True):
                weight.grad = torch.where(mask, gradient, 0)
            optimizer.step()
        task = new_task(adapter, index)
        task.gradients = {name: gradient.float() for name, gradient in zip(layers, gradients, strict=True)}
        begin(strategy, task)
        train(strategy, task)
        end(strategy, task)
        for layer, weight, before, mask in zip(layers.values(), weights, start, chosen, strict=True):
            torch.testing.assert_close(layer.folded_weight("default").double(), weight, rtol=1e-4, atol=2e-5)
            changed = weight.detach() != before
            assert torch.equal(changed, mask) and 0 < changed.sum() == int(0.07 * changed.numel())
            assert not layer.is_trained("default") and layer.history_rank("default") == DENSE
    fresh = adapted(tiny_clip(), target_modules=["fc1"])
    counts = trainable_parameters(fresh, strategy)
    assert counts["total"] == counts["other"] == sum(int(mask.sum()) for mask in chosen)


def test_spu_with_all_weights_of_all_layers_is_plain_fine_tuning(tiny_clip):
    """Adam's first step is the rate times the sign of the gradient, except where the gradient is near 0."""
    strategy, adapter = make_strategy("spu:share=1"), adapted(tiny_clip(), target_modules="all-linear")
    clip, layers = tiny_clip().double(), adapter.dual_mode_layers()
    assert len(layers) == 12  # six in each of two blocks
    weights = [clip.get_submodule(name).weight for name in layers]
    for index in range(2):
        pixels, labels = images(index)
        z = torch.nn.functional.normalize(clip.get_image_features(pixels.double()).pooler_output, dim=1)
        loss = torch.nn.functional.cross_entropy(SCALE * z @ texts(index).double().T, torch.tensor(labels))
        gradients = torch.autograd.grad(loss, weights)
        task = new_task(adapter, index)
        task.gradients = {name: gradient.float() for name, gradient in zip(layers, gradients, strict=True)}
        begin(strategy, task)
        train(strategy, task, steps=1)
        end(strategy, task)
        for layer, weight, gradient in zip(layers.values(), weights, gradients, strict=True):
            learned = layer.folded_weight("default").double()
            # An entry is a sum over 6 images of 5 tokens, which float32 rounds by far less than a thousandth.
            large = gradient.abs() > 1e-3 * gradient.abs().max()
            step = (learned - weight).detach()
            assert large.double().mean() > 0.9
            torch.testing.assert_close(step[large], -0.02 * gradient.sign()[large], rtol=1e-3, atol=1e-6)
            weight.data.copy_(learned)
