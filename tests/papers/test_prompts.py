"""Test prompts against literal float64 versions, and that each image's answer depends on this image alone."""

import copy
import threading

import numpy as np
import pytest
import torch
from literal_tower import literal_tower, normal
from lives import images_of, learned, tiny_base, tiny_learner
from tiny_encoders import IMAGE_ONLY, WITH_TEXT, make_model
from torch.nn import functional as F

from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import image_shape, unit_image_embeds
from dulbe_peft.papers.coda_prompt import component_weights, orthogonal_rows, orthogonality
from dulbe_peft.papers.dualprompt import DualPrompt
from dulbe_peft.papers.l2p import inserted, nearest
from dulbe_peft.papers.prompts import blocks_of, prefixed, width_of
from dulbe_peft.strategies import make_strategy

SPECS = {
    "dualprompt": "dualprompt:general_blocks=1",
    "dualprompt linear": "dualprompt:general_blocks=1,head=linear",
    "coda_prompt": "coda_prompt:components=3",
    "l2p": "l2p:pool=6,length=4,chosen=2,blocks=2",
    "l2p tokens": "l2p:form=tokens,chosen=2",
    "l2p tokens linear": "l2p:form=tokens,chosen=2,head=linear",
}
IMAGES = images_of(0, 1, 2, 3, 0, 1, 2, 3, seed=9) * 3


@pytest.fixture
def clip64():
    return copy.deepcopy(tiny_base()[0]).double()


def test_prefixes_and_tokens_equal_a_literal_tower_in_float64(clip64):
    pixels, width = torch.stack([image for image, _ in IMAGES[:3]]).double(), width_of(clip64)
    prefixes = {block: (normal(3, 2, width, seed=block), normal(3, 2, width, seed=9 + block)) for block in (0, 1)}
    gradients = [tensor.requires_grad_() for pair in prefixes.values() for tensor in pair]
    with prefixed(clip64, prefixes):
        actual = F.normalize(clip64.get_image_features(pixels).pooler_output, dim=1)
    for row in range(3):
        expected = literal_tower(clip64, pixels[row], {b: (k[row], v[row]) for b, (k, v) in prefixes.items()})
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-12)
    assert all(each.abs().sum() > 0 for each in torch.autograd.grad(actual.sum(), gradients))
    tokens = normal(3, 4, width, seed=4)
    for pooled in (False, True):
        with inserted(clip64, tokens, pooled):
            actual = F.normalize(clip64.get_image_features(pixels).pooler_output, dim=1)
        for row in range(3):
            expected = literal_tower(clip64, pixels[row], {}, tokens[row], pooled)
            torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", [*WITH_TEXT, *IMAGE_ONLY])
def test_prefixes_work_in_every_tower_and_are_off_afterwards(model_type, attention):
    model = make_model(model_type)
    model.set_attn_implementation(attention)
    pixels = torch.rand(2, *image_shape(model), generator=torch.Generator().manual_seed(0))
    if pixels.ndim == 3:  # packed patches: the last two numbers of a patch are its position
        pixels[..., -2:] = torch.tensor([[i // 2, i % 2] for i in range(pixels.shape[1])])
    with torch.no_grad():
        before = unit_image_embeds(model, pixels)
        prompt = normal(1, 3, width_of(model)).float()
        with prefixed(model, {0: (prompt.expand(2, -1, -1), -prompt.expand(2, -1, -1))}):
            changed = unit_image_embeds(model, pixels)
        with prefixed(model, {}):
            assert torch.equal(unit_image_embeds(model, pixels), before)
        assert torch.equal(unit_image_embeds(model, pixels), before)
    assert (changed - before).abs().max() > 1e-4
    assert {block.config._attn_implementation for block in blocks_of(model)} == {attention}


def test_prefixes_do_not_reach_other_threads_and_end_with_an_error(clip64):
    pixels, width, seen = torch.stack([IMAGES[0][0]]).double(), width_of(clip64), []
    before, usual = unit_image_embeds(clip64, pixels), clip64.config._attn_implementation
    pair = (normal(1, 2, width), normal(1, 2, width, seed=1))

    def other():
        seen.append(unit_image_embeds(clip64, pixels))
        with prefixed(clip64, {1: pair}):
            seen.append(unit_image_embeds(clip64, pixels))

    with pytest.raises(KeyError, match="stop"), prefixed(clip64, {0: pair}):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        first = unit_image_embeds(clip64, pixels)
        raise KeyError("stop")
    assert torch.equal(seen[0], before) and torch.equal(unit_image_embeds(clip64, pixels), before)
    assert not torch.equal(seen[1], first) and not torch.equal(first, before)
    assert {block.config._attn_implementation for block in blocks_of(clip64)} == {usual}


# ---------------------------------------------------------------------- the selections, image by image


def selections(learner, tensors):
    """Return what each image's prompts should be, by loops in float64: block -> p_k and p_v, or tokens."""
    strategy, encoder = learner.strategy, learner.encoder
    with torch.no_grad():
        queries = encoder.query_embeds(encoder.images(ImagesOf(IMAGES).images), "queries").double()
    kept = {name: tensor.double() for name, tensor in tensors.items()}
    for q in queries:
        if strategy.name == "dualprompt":
            cosines = [float(q @ k / (q.norm() * k.norm())) for k in kept["keys"]]
            expert = kept["experts"][int(np.argmax(cosines))]
            general = {b: (g[0], g[1]) for b, g in enumerate(kept["general"])}
            yield general | {len(general) + b: (e[0], e[1]) for b, e in enumerate(expert)}, None
        elif strategy.name == "coda_prompt":
            found = {}
            for b, table in enumerate(kept["prompts"]):
                p = torch.zeros_like(table[0])
                for m, component in enumerate(table):
                    a = q * kept["attention"][b, m]
                    p += a @ kept["keys"][b, m] / (a.norm() * kept["keys"][b, m].norm()) * component
                found[b] = p[: len(p) // 2], p[len(p) // 2 :]
            yield found, None
        else:
            chosen = []
            for b, keys in enumerate(kept["keys"]):
                order = sorted(range(len(keys)), key=lambda m: -float(q @ keys[m] / keys[m].norm()))[: strategy.chosen]
                chosen.append([kept["pool"][b, m] for m in order])
            if strategy.form == "tokens":
                yield {}, torch.cat(chosen[0])
            else:
                halves = {b: [(p[: len(p) // 2], p[len(p) // 2 :]) for p in each] for b, each in enumerate(chosen)}
                yield {b: tuple(map(torch.cat, zip(*each, strict=True))) for b, each in halves.items()}, None


class ImagesOf:
    def __init__(self, items):
        from dulbe_peft.data.unlabelled import unlabelled_images

        self.images = unlabelled_images([pixels for pixels, _ in items])


@pytest.fixture(scope="module", params=SPECS)
def two_tasks(request):
    """Return a learner of two tasks, and the tensors that it had after the first one."""
    learner = learned(tiny_learner(SPECS[request.param], ("text", "linear_head"), epochs=1), 1)
    head = learner.classifiers["linear_head"].head.clone()
    first = {name: tensor.clone() for name, tensor in learner.memory.items()}
    weights = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learned(learner, 1, 1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.model.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert torch.equal(learner.classifiers["linear_head"].head[:2], head)
    return learner, first


@pytest.mark.plain("dualprompt", "l2p tokens linear", "coda_prompt")
def test_features_equal_a_literal_version_image_by_image(two_tasks):
    learner, _ = two_tasks
    pooled = learner.strategy.head == "linear" and getattr(learner.strategy, "form", "") == "tokens"
    base = tiny_base()[0]
    actual = learner.image_embeds([pixels for pixels, _ in IMAGES])
    for row, (prefixes, tokens) in enumerate(selections(learner, learner.memory)):
        expected = literal_tower(base, IMAGES[row][0], prefixes, tokens, pooled)
        torch.testing.assert_close(actual[row].double(), expected, rtol=0, atol=1e-5)


def test_rows_of_the_first_task_stay_bit_identical(two_tasks):
    learner, first = two_tasks
    rows = {"experts": 0, "prompts": 1, "attention": 1}
    rows |= {"keys": 0} if learner.strategy.name == "dualprompt" else {}
    rows |= {"keys": 1} if learner.strategy.name == "coda_prompt" else {}
    for name, axis in rows.items():
        if name in first:
            assert torch.equal(learner.memory[name].narrow(axis, 0, first[name].shape[axis]), first[name])
            assert learner.memory[name].shape[axis] == 2 * first[name].shape[axis]
    assert any(not torch.equal(learner.memory[name], tensor) for name, tensor in first.items())


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["dualprompt", "coda_prompt", "l2p", "l2p tokens linear"])
def test_a_task_smaller_than_the_batch_trains_in_one_epoch(name):
    learner = tiny_learner(SPECS[name], ("text",), epochs=1, batch_size=64)
    learned(learner, 1)
    started = tiny_learner(SPECS[name], ("text",), epochs=1, batch_size=64, learning_rate=1e-12)
    learned(started, 1)
    moved = [not torch.equal(learner.memory[key], tensor) for key, tensor in started.memory.items()]
    assert all(moved) and len(learner.record.loss) == 1


def test_after_one_task_every_image_has_the_first_expert_prompt():
    learner = learned(tiny_learner(SPECS["dualprompt"], ("text",)), 1)
    assert learner.memory["keys"].shape[0] == learner.memory["experts"].shape[0] == 1
    worst = -F.normalize(normal(1, learner.memory["keys"].shape[1]).float(), dim=1)
    pairs = learner.strategy.prefixes(learner.memory, worst.expand(5, -1), None)
    assert all(torch.equal(row, learner.memory["experts"][0, 0, 0]) for row in pairs[1][0])


def test_failed_task_leaves_prompts_and_attention_as_they_were(monkeypatch):
    learner = learned(tiny_learner(SPECS["dualprompt"], ("text",)), 1)
    before, digest = learner.image_embeds([IMAGES[0][0]]), learner.encoder.encoding.digest
    usual = learner.clip.config._attn_implementation
    for name, error in (("term", RuntimeError("in a step")), ("prefixes", KeyboardInterrupt("in a pass"))):
        with monkeypatch.context() as patch:
            patch.setattr(DualPrompt, name, lambda *_, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(type(error), match="in a"):
                learned(learner, 1, 1)
        assert {block.config._attn_implementation for block in blocks_of(learner.clip)} == {usual}
        assert learner.encoder._encodings == [] and any(p.requires_grad for p in learner.model.parameters())
        assert torch.equal(learner.image_embeds([IMAGES[0][0]]), before) and len(learner.tasks) == 1
        assert learner.encoder.encoding.digest == digest


def test_queries_come_from_the_store_of_the_untouched_model(tmp_path, base, digit_folders, monkeypatch):
    """A prompted learner asks the store for the frozen model's features, and so makes one pass instead of two."""
    from small_runs import learner_of, tasks_of

    tasks, store = tasks_of(digit_folders(2, 4, 2)), FeatureStore(tmp_path / "store")
    frozen = learner_of(base, "frozen", ("lda",))
    frozen.use_store(store)
    frozen.learn_task(tasks[0].train)
    prompted = learner_of(base, "dualprompt", ("text",))
    prompted.use_store(store)
    passes = []
    plain = unit_image_embeds
    for module in ("dulbe_peft.encoders.loading", "dulbe_peft.papers.prompts"):
        monkeypatch.setattr(f"{module}.unit_image_embeds", lambda *a, m=module: passes.append(m) or plain(*a))
    prompted.learn_task(tasks[0].train)
    asked = [name for name in passes if name.endswith("loading")]
    assert len(passes) > 3 and len(asked) <= 2  # those that compare positions in a batch
    with prompted.encoder.without_adapter():
        assert prompted.encoder.key == frozen.encoder.key
    assert prompted.encoder.key != frozen.encoder.key


# ---------------------------------------------------------------------- the formulas in float64


def test_dualprompt_term_pulls_the_key_of_the_task_only():
    strategy, q, keys = make_strategy("dualprompt:key_weight=0.5"), normal(6, 8), normal(3, 8, seed=1).requires_grad_()
    term = strategy.term({"keys": keys}, q, 1)
    expected = -0.5 * sum(q[i] @ keys[1] / (q[i].norm() * keys[1].norm()) for i in range(6)) / 6
    torch.testing.assert_close(term, expected)
    (gradient,) = torch.autograd.grad(term, keys)
    assert gradient[1].norm() > 0 and not gradient[[0, 2]].any()


def test_l2p_term_moves_only_chosen_keys():
    strategy, q = make_strategy("l2p:chosen=2,key_weight=0.5"), normal(6, 8)
    keys = normal(1, 5, 8, seed=1).requires_grad_()
    term, expected, chosen = strategy.term({"keys": keys}, q, 0), 0.0, set()
    for i in range(6):
        near = [(float(q[i] @ k / (q[i].norm() * k.norm())), m) for m, k in enumerate(keys.detach()[0])]
        expected -= 0.5 * sum(cosine for cosine, _ in sorted(near)[-2:]) / 6
        chosen |= {m for _, m in sorted(near)[-2:]}
    assert term.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(term, keys)
    assert {m for m in range(5) if gradient[0, m].any()} == chosen
    assert nearest(q, keys[0], 9)[1].shape == (6, 5)  # no more than there are


def test_coda_weights_penalty_and_start_equal_literal_versions():
    q, keys, attention = normal(4, 6), normal(5, 6, seed=1), normal(5, 6, seed=2)
    weights = component_weights(q, keys, attention)
    for i in range(4):
        for m in range(5):
            a = q[i] * attention[m]
            assert float(weights[i, m]) == pytest.approx(float(a @ keys[m] / (a.norm() * keys[m].norm())), rel=1e-12)
    table = normal(3, 2, 4)
    rows = [row.flatten() for row in table]
    expected = sum((float(rows[i] @ rows[j]) - (i == j)) ** 2 for i in range(3) for j in range(3)) / 9
    assert float(orthogonality(table)) == pytest.approx(expected, rel=1e-12)
    old = normal(2, 6, seed=3)  # not orthogonal to each other
    new = orthogonal_rows(old, normal(3, 6, seed=4))
    torch.testing.assert_close(new.norm(dim=1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(new @ new.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.5)
    drawn, u = normal(3, 6, seed=4)[0], old
    rest = drawn - (drawn @ u[0]) / (u[0] @ u[0]) * u[0] - (drawn @ u[1]) / (u[1] @ u[1]) * u[1]
    torch.testing.assert_close(new[0], rest / rest.norm())
    many = orthogonal_rows(torch.eye(2, dtype=torch.float64), normal(3, 2, seed=5))
    torch.testing.assert_close(many.norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_gradients_of_old_components_are_exactly_zero():
    strategy, width = make_strategy("coda_prompt:blocks=1"), 4
    shapes = {"prompts": (1, 3, 8, width), "keys": (1, 3, 6), "attention": (1, 3, 6)}
    old = {name: normal(*shape, seed=i).requires_grad_() for i, (name, shape) in enumerate(shapes.items())}
    new = {name: normal(*shape, seed=9 + i).requires_grad_() for i, (name, shape) in enumerate(shapes.items())}
    tensors = strategy.joined(old, new)
    pairs = strategy.prefixes(tensors, normal(2, 6), 1)
    loss = pairs[0][0].square().sum() + pairs[0][1].square().sum() + strategy.term(tensors, normal(2, 6), 1)
    loss.backward()
    assert all(tensor.grad is None for tensor in old.values()) and all(t.grad.abs().sum() > 0 for t in new.values())
    assert pairs[0][0].shape == (2, 4, width) and pairs[0][1].shape == (2, 4, width)


def test_linear_head_has_the_rows_that_were_trained_with_the_prompts():
    learner = learned(tiny_learner("l2p:head=linear,chosen=2", None, learning_rate=1e-3), 2)
    assert list(learner.classifiers) == ["linear_head", "bayes"]
    head = learner.classifiers["linear_head"].head.double()
    z = learner.image_embeds([pixels for pixels, _ in IMAGES[:4]]).double()
    expected = [[z.shape[1] ** 0.5 * float(z[i] @ row[:-1]) + float(row[-1]) for row in head] for i in range(4)]
    actual = learner.classifiers["linear_head"].logits(z.float()).double()
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    still = learned(tiny_learner("l2p:head=linear,chosen=2", None, learning_rate=1e-12), 1)
    moved = (head[:2] - still.classifiers["linear_head"].head.double()).abs()
    assert 1e-4 < moved.max() <= 2 * 1e-3  # one step of Adam for each of the batches
