"""Test LfI's pseudo-captions: the losses against literal float64 versions, and where the vectors stand in a text."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lives import differences, everything, learned, tiny_learner
from PIL import Image
from tiny_encoders import IMAGE_ONLY, WITH_TEXT, make_model, make_processor
from torch.nn import functional as F

from dulbe_peft import LearnerArguments
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import load_clip, padded_tokens, pixel_values, unit_text_embeds
from dulbe_peft.papers import pseudo_captions
from dulbe_peft.papers.lfi import Lfi
from dulbe_peft.papers.pseudo_captions import Captions, generation_loss, reference_pairs, token_embedding
from dulbe_peft.strategies import make_strategy
from dulbe_peft.streams.digits import digit_tasks

TAU = 7.0


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape, seed):
    return F.normalize(drawn(*shape, seed=seed), dim=1)


def literal_contrast(z, e, same):
    """Mean over both directions of -log of the share of the pairs with `same(i, j)`, pair by pair."""
    n, total = len(z), 0.0
    score = [
        [math.exp(TAU * sum(float(a) * float(b) for a, b in zip(z[i], e[j], strict=True))) for j in range(n)]
        for i in range(n)
    ]
    for i in range(n):
        row, column = score[i], [score[j][i] for j in range(n)]
        for line in (row, column):
            total -= math.log(sum(line[j] for j in range(n) if same(i, j)) / sum(line)) / n / 2
    return total


def literal_words(vectors, words):
    total = 0.0
    for vector in vectors:
        cosines = [float(vector @ word) / float(vector.norm() * word.norm()) for word in words]
        total += sum(1 - cosine for cosine in sorted(cosines)[-5:]) / 5 / len(vectors)
    return total


@pytest.mark.parametrize("references", [0, 3])
def test_generation_loss_equals_a_literal_version_in_float64(references):
    z, e, labels, v = unit(5, 6, seed=0), unit(5, 6, seed=1), torch.tensor([0, 1, 0, 2, 1]), drawn(5, 2, 4, seed=2)
    words, pairs = drawn(9, 4, seed=3), (unit(3, 6, seed=4), unit(3, 6, seed=5))
    actual = generation_loss(z, e, labels, TAU, v, F.normalize(words, dim=1), pairs if references else None)
    if references:  # each of which has a class of its own
        z, e, labels = torch.cat([z, pairs[0]]), torch.cat([e, pairs[1]]), torch.tensor([0, 1, 0, 2, 1, 3, 4, 5])
    clip = literal_contrast(z, e, lambda i, j: i == j)
    classes = literal_contrast(z, e, lambda i, j: labels[i] == labels[j])
    expected = clip + classes + literal_words(v.reshape(10, 4), words)
    assert classes < clip and float(actual) == pytest.approx(expected, rel=1e-12)


def test_loss_of_a_step_adds_the_contrast_of_images_and_their_captions():
    z, e, means, texts = unit(4, 6, seed=0), unit(3, 6, seed=1), drawn(3, 6, seed=2), unit(9, 6, seed=3)
    index, step = torch.tensor([7, 0, 8, 3]), SimpleNamespace(features=z, text=e, labels=torch.tensor([0, 2, 1, 1]))
    step.logit_scale, step.index = TAU, index
    notes = {"means": means, "captions": SimpleNamespace(embeds=lambda rows: texts[rows])}
    plain, with_captions = (Lfi(captions=k).loss(SimpleNamespace(notes=notes), step) for k in (0, 3))
    expected = 0.1 * literal_contrast(z, texts[index], lambda i, j: i == j)
    assert float(with_captions - plain) == pytest.approx(expected, rel=1e-9)


def captions_of(kind, count=2):
    encoder = Encoder(
        make_model(kind), make_processor(kind), LearnerArguments(precision="float32"), torch.device("cpu")
    )
    names, prompts = ["cat", "digit"], ["a cat.", "my digit."]
    return Captions.begun(encoder, names, prompts, torch.tensor([1, 0, 1]), count)


@pytest.mark.parametrize("kind", WITH_TEXT)
def test_vectors_stand_between_the_prompt_and_the_end_of_the_text(kind):
    captions = captions_of(kind)
    clip, processor = captions.encoder.clip, captions.encoder.processor
    table, tokenize = token_embedding(clip).weight, processor.tokenizer
    own = [tokenize(name, add_special_tokens=False)["input_ids"] * 2 for name in ("cat", "digit")]
    torch.testing.assert_close(captions.vectors[0], table[[own[1][0], own[1][1]]])
    word = own[1][0]  # in place of both vectors of image 2
    rows = [[*tokenize(p)["input_ids"]] for p in ("my digit", "a cat")]
    rows = [
        [*row[:-1], *middle, row[-1]]
        for row, middle in [(rows[0], own[1][:2]), (rows[1], own[0][:2]), (rows[0], [word, word])]
    ]
    inputs = padded_tokens(processor, rows, clip)
    vectors = torch.stack([captions.vectors[0], captions.vectors[1], table[[word, word]]]).detach()
    with torch.no_grad():
        torch.testing.assert_close(captions.embeds(torch.arange(3), vectors), unit_text_embeds(clip, inputs))
    assert not token_embedding(clip)._forward_hooks


def test_training_lowers_the_loss_repeats_bit_for_bit_and_moves_each_image_alone(monkeypatch):
    captions, generator = captions_of("clip"), lambda: torch.Generator().manual_seed(0)
    features, words = (
        unit(3, captions.encoder.embed_dim, seed=0).float(),
        F.normalize(token_embedding(captions.encoder.clip).weight, dim=1),
    )

    def loss(of):
        with torch.no_grad():
            return float(
                generation_loss(features, of.embeds(torch.arange(3)), of.labels, TAU, of.vectors, words, None)
            )

    made = captions.trained(features, TAU, None, generator())
    assert loss(made) < loss(captions) and torch.equal(
        made.vectors, captions.trained(features, TAU, None, generator()).vectors
    )
    assert not made.vectors.requires_grad
    pairs = features.roll(1, 0), features
    assert not torch.equal(made.vectors, captions.trained(features, TAU, pairs, generator()).vectors)
    monkeypatch.setattr(pseudo_captions, "BATCH", 1)  # alone, an image is compared with nothing: only L_vocab is left
    alone = captions.trained(features, TAU, None, generator())
    assert torch.equal(alone.vectors, captions.trained(-features, TAU, None, generator()).vectors)


@pytest.mark.parametrize("kind", IMAGE_ONLY[:1])
def test_towers_without_token_embeddings_are_refused(kind):
    with pytest.raises(ValueError, match="captions are token embeddings, but a .* has no text tower"):
        token_embedding(make_model(kind))


def test_long_prompts_and_references_without_captions_are_refused():
    with pytest.raises(ValueError, match="captions=20 adds 20, but the text tower takes at most 24"):
        captions_of("clip", 20)
    for spec in (
        "lfi:reference_images=x",
        "lfi:captions=3,reference_texts=x",
        "lfi:reference_images=x,reference_texts=x",
    ):
        with pytest.raises(ValueError, match="references of the strategy 'lfi' are images with captions"):
            make_strategy(spec)


@pytest.mark.slow
def test_learner_keeps_no_captions_and_repeats_bit_for_bit(tmp_path):
    few = ("text", "bayes:features=20")
    one, other = (learned(tiny_learner("lfi:captions=2", few), 2) for _ in range(2))
    assert not differences(everything(one), everything(other)) and one.memory is None
    plain = learned(tiny_learner("lfi", few), 2)
    assert everything(one).keys() == everything(plain).keys() and differences(everything(one), everything(plain))
    for name, learner in {"one": one, "plain": plain}.items():
        learner.save_pretrained(tmp_path / name)
    sizes = [sum(file.stat().st_size for file in (tmp_path / n).glob("*.safetensors")) for n in ("one", "plain")]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("augment", ["none", "flip"])
def test_step_knows_the_place_of_each_image(monkeypatch, augment):
    seen, drawer = [], np.random.default_rng(0)
    images = [
        (Image.fromarray(drawer.integers(0, 256, (16, 16, 3), dtype=np.uint8)), label)
        for label in [0, 1, 1, 0, 1, 0, 0]
    ]

    def loss(self, task, step):
        pixels = torch.stack([pixel_values(task.encoder.processor, images[row][0]) for row in step.index.tolist()])
        expected = task.encoder.image_embeds(pixels).detach()
        seen.extend(step.index.tolist())
        assert step.labels.tolist() == [images[row][1] for row in step.index.tolist()]
        flipped = task.encoder.image_embeds(pixels.flip(-1)).detach()
        for feature, *views in zip(step.features.detach(), expected, flipped, strict=True):
            near = min(float((feature - view).abs().max()) for view in views[: 1 if augment == "none" else 2])
            assert near < 1e-4
        return step.task_loss

    monkeypatch.setattr(Lfi, "loss", loss)
    learner = tiny_learner("lfi", ("text",), epochs=2, augment=augment)
    learner.learn_task(images, ["a", "b"])
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7)) and seen[:7] != seen[7:]


def test_references_are_pairs_and_captions_in_another_order_are_reported(base, tmp_path):
    tasks = digit_tasks()[:2]
    images = [tasks[number % 2].train[number] for number in range(8)]
    folder = tmp_path / "images"
    for number, image in enumerate(images):
        kind = tasks[number % 2].class_names[image["label"]]
        (folder / "train" / kind).mkdir(parents=True, exist_ok=True)
        image["image"].save(folder / "train" / kind / f"{number}.png")
    data = load_data(str(folder))
    lines = [f"a photo of the digit {data.class_names[label]}." for label in data.labels]
    encoder = Encoder.at_rest(*load_clip("demo"), LearnerArguments(precision="float32", device="cpu"))

    def pairs(captions):
        (tmp_path / "captions.txt").write_text("\n".join(captions))
        return reference_pairs(encoder, str(folder), str(tmp_path / "captions.txt"))

    features, texts = pairs(lines)
    names = list(data.class_names)
    of = encoder.text_embeds(names, {name: [f"a photo of the digit {name}."] for name in names})
    torch.testing.assert_close(texts, of[torch.as_tensor(data.labels)])
    torch.testing.assert_close(features, encoder.dataset_embeds(encoder.images(data)))
    with pytest.warns(UserWarning, match="line i must be the caption of image i, and the first image is .*png"):
        pairs(lines[len(lines) // 2 :] + lines[: len(lines) // 2])
    with pytest.raises(ValueError, match="has 7 lines, but there are 8 reference images"):
        pairs(lines[1:])
