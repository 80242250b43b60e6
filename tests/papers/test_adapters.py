"""Test networks beside the MLPs, mixtures of experts, and two towers, against literal float64 versions."""

import copy
import math

import pytest
import torch
from literal_tower import literal_tower, normal
from lives import images_of, learned, tiny_base, tiny_learner
from torch.nn import functional as F

from dulbe_peft.encoders.loading import unit_image_embeds, unit_text_embeds
from dulbe_peft.papers import moe_adapters
from dulbe_peft.papers.adapters import bottleneck
from dulbe_peft.papers.aper import Adapted, Aper
from dulbe_peft.papers.moe_adapters import Experts, MoeAdapters, gates, mixture
from dulbe_peft.papers.two_towers import joined

IMAGES = images_of(0, 1, 2, 3, seed=9)
WIDTH, TEXT_WIDTH, BLOCKS, R = 32, 24, 2, 3


@pytest.fixture
def clip64():
    return copy.deepcopy(tiny_base()[0]).double()


def unit(clip, pixels, encoding):
    """Return the features before `unit_image_embeds` rounds them to float32, as far as the encoding goes."""
    return encoding.image_embeds(clip, pixels, None).double()


def literal_bottleneck(x, down, up, first, second):
    rows = []
    for token in x:
        hidden = [max(0.0, float(token @ d + b)) for d, b in zip(down, first, strict=True)]
        rows.append(up @ torch.tensor(hidden, dtype=torch.float64) + second)
    return torch.stack(rows)


def test_aper_s_features_equal_a_literal_tower_and_start_at_the_untouched_ones(clip64):
    pixels = torch.stack([image for image, _ in IMAGES]).double()
    tensors = {"down": normal(BLOCKS, R, WIDTH), "up": normal(BLOCKS, WIDTH, R, seed=1)}
    tensors |= {"down_bias": normal(BLOCKS, R, seed=2), "up_bias": normal(BLOCKS, WIDTH, seed=3)}
    actual = unit(clip64, pixels, Adapted(tensors, 0.1))

    def beside(block, y):
        parts = (tensors[name][block] for name in ("down", "up", "down_bias", "up_bias"))
        return 0.1 * literal_bottleneck(y, *parts)

    for row in range(4):
        expected = literal_tower(clip64, pixels[row], {}, beside=beside)
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-7)
    zero = tensors | {name: torch.zeros_like(tensors[name]) for name in ("up", "up_bias")}
    assert torch.equal(Adapted(zero, 0.1).image_embeds(clip64, pixels, None), unit_image_embeds(clip64, pixels))
    sizes = {"down": (12, 64, 768), "up": (12, 768, 64), "down_bias": (12, 64), "up_bias": (12, 768)}
    assert sum(math.prod(size) for size in sizes.values()) == 1_189_632  # as published for ViT-B


def test_class_means_and_cosines_of_joined_features_equal_literal_ones():
    learner = learned(tiny_learner("aper:bottleneck=4", ("prototype", "text")), 2)
    clip, (f0, f1) = tiny_base()[0], ([], [])
    tensors = {name: tensor.double() for name, tensor in learner.memory.items()}

    def beside(block, y):
        parts = (tensors[name][block] for name in ("down", "up", "down_bias", "up_bias"))
        return 0.1 * literal_bottleneck(y, *parts)

    for pixels, _ in IMAGES:
        f0.append(literal_tower(clip, pixels, {}))
        f1.append(literal_tower(clip, pixels, {}, beside=beside))
    both = torch.cat([torch.stack(f0), torch.stack(f1)], dim=1)
    images = [pixels for pixels, _ in IMAGES]
    torch.testing.assert_close(learner.image_embeds(images).double(), both / math.sqrt(2), rtol=0, atol=1e-5)
    means = learner.classifiers["prototype"].visual_prototypes.double()
    cosines = learner.classifiers["prototype"].logits(learner.image_embeds(images)).double() / learner.logit_scale
    for row in range(4):
        for c in range(len(means)):
            assert float(cosines[row, c]) == pytest.approx(
                float(F.cosine_similarity(both[row], means[c], dim=0)), abs=1e-5
            )
    assert means.shape[1] == 2 * f0[0].shape[0]


def test_names_are_compared_by_the_mean_of_both_towers_scores():
    learner = learned(tiny_learner("loda:towers=2", ("text",), learning_rate=1e-2, update_share=1.0), 2)
    images, names = [pixels for pixels, _ in IMAGES], learner.class_names
    z, e = learner.image_embeds(images), learner.text_embeds(names)
    with learner.model.disable_adapter(), learner.encoder.encoding_by(None):
        z0, e0 = learner.image_embeds(images), learner.text_embeds(names)
    with learner.encoder.encoding_by(None):
        z1, e1 = learner.image_embeds(images), learner.text_embeds(names)
    assert (z0 - z1).abs().max() > 1e-3 and (e0 - e1).abs().max() > 1e-4
    torch.testing.assert_close(z @ e.T, (z0 @ e0.T + z1 @ e1.T) / 2, rtol=0, atol=1e-5)
    plain = learned(tiny_learner("loda", ("text",), learning_rate=1e-2, update_share=1.0), 2)
    assert torch.equal(plain.image_embeds(images), z1)  # training is the same
    torch.testing.assert_close(joined(z0, z1).norm(dim=1), torch.ones(4))


# ---------------------------------------------------------------------- experts


def experts(width, blocks=BLOCKS, count=3, seed=0):
    shapes = {"router": (blocks, width, count), "noise": (blocks, width, count)}
    shapes |= {"down": (blocks, count, R, width), "up": (blocks, count, width, R)}
    shapes |= {"down_bias": (blocks, count, R), "up_bias": (blocks, count, width)}
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def literal_mixture(x, kept, block, top):
    """Return 0.1 times the mixture for the tokens x, (tokens, width), of one image or text."""
    scores = [float(x[0] @ column) for column in kept["router"][block].T]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:top]
    total = sum(math.exp(scores[i]) for i in best)
    return 0.1 * sum(math.exp(scores[i]) / total * literal_expert(x, kept, block, i) for i in best)


def literal_expert(x, kept, block, i):
    return literal_bottleneck(x, *(kept[name][block, i] for name in ("down", "up", "down_bias", "up_bias")))


@pytest.mark.parametrize("top", [1, 2, 3])
def test_experts_of_images_equal_a_literal_tower(clip64, top):
    pixels, kept = torch.stack([image for image, _ in IMAGES]).double(), experts(WIDTH)
    encoding = Experts(MoeAdapters(experts=3, top=top), {f"vision.{name}": tensor for name, tensor in kept.items()})
    actual = unit(clip64, pixels, encoding)
    for row in range(4):
        expected = literal_tower(clip64, pixels[row], {}, beside=lambda block, y: literal_mixture(y, kept, block, top))
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-7)


def test_mixture_and_gates_equal_literal_ones():
    scores, x, kept = normal(2, 3), normal(2, 4, WIDTH), experts(WIDTH, 1)
    share = gates(scores, 2)
    for row in range(2):
        best = scores[row].argsort(descending=True)[:2].tolist()
        total = sum(math.exp(scores[row, i]) for i in best)
        expected = [math.exp(scores[row, i]) / total if i in best else 0.0 for i in range(3)]
        assert share[row].tolist() == pytest.approx(expected, rel=1e-12)
        parts = [expected[i] * literal_expert(x[row], kept, 0, i) for i in range(3)]
        networks = (kept[name][0] for name in ("down", "up", "down_bias", "up_bias"))
        torch.testing.assert_close(mixture(x, share, *networks)[row], sum(parts))
    assert torch.equal(gates(scores, 9), scores.softmax(dim=1))


def test_noise_and_dropout_act_in_training_only(clip64):
    """Without noise weights, the noise has the deviation softplus(0) + 0.01; hidden values are dropped by a tenth."""
    kept = {f"vision.{name}": tensor for name, tensor in experts(WIDTH).items()}
    kept["vision.noise"] = torch.zeros_like(kept["vision.noise"])
    pixels, seen = IMAGES[0][0].double().expand(500, -1, -1, -1), []
    usual = moe_adapters.gates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_adapters, "gates", lambda scores, top: seen.append(scores.detach()) or usual(scores, top))
        for training in (False, True):
            strategy = MoeAdapters(experts=3, top=2, dropout=0)
            unit(clip64, pixels, Experts(strategy, kept, training))
    quiet, noisy = seen[0], seen[BLOCKS]
    assert quiet.std(dim=0).max() < 1e-12
    # 1,500 draws: the deviation of their deviation is 1 / sqrt(3000).
    assert float((noisy - quiet).std()) == pytest.approx(math.log(2) + 0.01, rel=5 / 3000**0.5)
    ones = torch.ones(40, 50, dtype=torch.float64)
    networks = torch.eye(50).double(), torch.eye(50).double(), torch.zeros(50).double(), torch.zeros(50).double()
    dropped = bottleneck(ones, *networks, dropout=0.1)
    assert set(dropped.flatten().tolist()) == {0.0, 1 / 0.9}
    assert float((dropped == 0).double().mean()) == pytest.approx(0.1, abs=5 * (0.09 / 2000) ** 0.5)
    tensors = {name: tensor[:, 0] for name, tensor in experts(WIDTH).items()}
    alike, other = (unit(clip64, pixels[:2], Adapted(tensors, 0.1, dropout)) for dropout in (0.0, 0.5))
    assert torch.equal(alike[0], alike[1]) and not torch.equal(other[0], other[1])


def test_sizes_are_the_published_ones():
    """In ViT-B/16, 2.42 million parameters in the vision tower and 1.61 million in the text tower."""
    sizes = {}
    for width in (768, 512):
        networks = 2 * (2 * 64 * width + 64 + width)
        sizes[width] = 12 * (2 * 2 * width + networks)
    assert sizes == {768: 2_416_128, 512: 1_611_264}
    made = MoeAdapters()._start(tiny_base()[0], torch.Generator())
    for tower, width in (("vision", WIDTH), ("text", TEXT_WIDTH)):
        count = sum(tensor.numel() for name, tensor in made.items() if name.startswith(f"{tower}."))
        assert count == BLOCKS * (2 * 2 * width + 2 * (2 * 64 * width + 64 + width))


def test_gates_of_texts_are_the_same_for_every_text(clip64):
    """The router reads the start token, which no later token changes under a causal mask."""
    kept, seen = {f"text.{name}": tensor for name, tensor in experts(TEXT_WIDTH).items()}, []
    encoding = Experts(MoeAdapters(experts=3, top=2), kept)
    tokens = {"input_ids": torch.tensor([[0, 5, 6, 1], [0, 9, 8, 1]])}
    usual = moe_adapters.gates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_adapters, "gates", lambda scores, top: seen.append(scores) or usual(scores, top))
        changed = encoding.text_embeds(clip64, tokens)
    assert len(seen) == BLOCKS and all(torch.allclose(scores[0], scores[1], atol=1e-12) for scores in seen)
    assert (changed - unit_text_embeds(clip64, tokens)).abs().max() > 1e-3


def test_experts_start_at_the_untouched_model_and_train_both_towers():
    learner = tiny_learner("moe_adapters:bottleneck=4,dropout=0", ("text",), learning_rate=1e-12)
    images, plain = [pixels for pixels, _ in IMAGES], tiny_learner("moe_adapters", ("text",)).image_embeds
    learned(learner, 1)
    torch.testing.assert_close(learner.image_embeds(images), plain(images), rtol=0, atol=1e-6)
    start = {name: tensor.clone() for name, tensor in learner.memory.items()}
    trained = learned(tiny_learner("moe_adapters:bottleneck=4,dropout=0", ("text",)), 1)
    text, names = trained.text_embeds(trained.class_names), trained.class_names
    assert all(not torch.equal(trained.memory[f"{tower}.up"], start[f"{tower}.up"]) for tower in ("vision", "text"))
    assert not torch.equal(text, learner.text_embeds(names))
    torch.testing.assert_close(trained.classifiers["text"].text_embeds, text, rtol=0, atol=1e-6)


def test_aper_trains_in_the_first_task_only():
    for head in ("text", "cosine"):
        learner = learned(tiny_learner(f"aper:bottleneck=4,head={head}", ("prototype",)), 1)
        first = {name: tensor.clone() for name, tensor in learner.memory.items()}
        assert (
            learner.record.loss != []
            and first["up"].abs().max() > 0
            and set(first)
            == {
                "down",
                "up",
                "down_bias",
                "up_bias",
            }
        )
        learned(learner, 1, 1)
        assert learner.record.loss == [] and all(torch.equal(learner.memory[n], t) for n, t in first.items())
    assert Aper().encoding(None).width(tiny_base()[0]) == 2 * 16
