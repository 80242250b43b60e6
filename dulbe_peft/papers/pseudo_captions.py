"""Pseudo-captions: before a task, K vectors are trained for each image, which describe it beside its class's name.

    text of image i   [start, tokens of "a photo of a NAME", V_i, end]     V_i: K token embeddings
    L_gen             L_CLIP + L_SCL + L_vocab                             V is trained, all weights are frozen

    L_CLIP    mean over images and over texts of logsumexp(all) - own pair, of the scores tau z . e
    L_SCL     the same with the logsumexp of all pairs of the same class in place of the own pair
    L_vocab   mean over the vectors of the mean cosine distance to the 5 nearest token embeddings of the vocabulary

L_CLIP and L_SCL compare images of the task with their texts and, if there are references, with pairs of reference
images and captions, each a class of its own. Without references, they compare the images of the task alone.

V_i begins as the tokens of the name, repeated in a cycle. AdamW at 1e-3 with decay 0.2 trains it for 5 epochs. A batch
has 512 images of the task and 512 reference pairs, which each step draws anew. An image stays in its batch, so no step
moves vectors of other images. Features and texts are those of the untouched model.

Reference: "Learning from Itself", CVPR 2026. It also stops early, which is not done here; its authors' code trains the
length and the direction of each vector, and has 10 vectors.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.encoding import hooked
from dulbe_peft.encoders.loading import encoder_of, longest_text, padded_tokens, prompt_tokens, unit_text_embeds
from dulbe_peft.papers.zscl import expand_path
from dulbe_peft.utils.files import read_lines

RATE, DECAY, EPOCHS, BATCH, NEAREST = 1e-3, 0.2, 5, 512, 5
Pairs = tuple[Tensor, Tensor]  # unit features of images and of their texts, each (m, d)


def contrastive_loss(images: Tensor, texts: Tensor, classes: Tensor, tau: float) -> Tensor:
    """Return L_SCL, a scalar; it is L_CLIP, CLIP's own loss, if every pair has a class of its own.

    Args:
        images: Z, (n, d), unit features.
        texts: E, (n, d), unit, of the same pairs.
        classes: (n,), integers.
        tau: Factor of the cosines.
    """
    scores, others = tau * images @ texts.T, classes[:, None] != classes
    rows, columns = (
        (each.logsumexp(dim=1) - each.masked_fill(others, -torch.inf).logsumexp(dim=1)).mean()
        for each in (scores, scores.T)
    )
    return (rows + columns) / 2


def word_distance(vectors: Tensor, words: Tensor) -> Tensor:
    """Return L_vocab, a scalar, of vectors, (m, width), and the unit embeddings of the vocabulary, (v, width)."""
    unit = F.normalize(vectors, dim=1)
    with torch.no_grad():
        parts = [(part @ words.T).topk(min(NEAREST, len(words)), dim=1).indices for part in unit.split(256)]
    return 1 - (unit[:, None] * words[torch.cat(parts)]).sum(dim=2).mean()


def generation_loss(
    images: Tensor, texts: Tensor, labels: Tensor, tau: float, vectors: Tensor, words: Tensor, pairs: Pairs | None
) -> Tensor:
    """Return L_gen, a scalar.

    Args:
        images: (n, d), unit features of images of the task.
        texts: (n, d), unit features of their texts.
        labels: (n,), their classes, not negative.
        tau: Factor of the cosines.
        vectors: V, (n, K, width).
        words: (v, width), unit embeddings of the vocabulary.
        pairs: Reference images and captions, or None.
    """
    if pairs is not None:
        images, texts = (torch.cat(both) for both in zip((images, texts), pairs, strict=True))
        labels = torch.cat([labels, -1 - torch.arange(len(pairs[0])).to(labels)])
    each = torch.arange(len(images)).to(labels)
    contrast = contrastive_loss(images, texts, each, tau) + contrastive_loss(images, texts, labels, tau)
    return contrast + word_distance(vectors.flatten(0, 1), words)


@dataclass(frozen=True, eq=False)
class Captions:
    """The texts of the images of a task.

    Attributes:
        encoder: Encodes them.
        tokens: The text tower's inputs for each class, with tokens of the name in the place of the vectors.
        places: (classes,), the place of the first vector in the text of each class.
        labels: (n,), the class of each image.
        vectors: V, (n, K, width).
    """

    encoder: Encoder
    tokens: dict[str, Tensor]
    places: Tensor
    labels: Tensor
    vectors: Tensor

    @classmethod
    def begun(
        cls, encoder: Encoder, names: Sequence[str], prompts: Sequence[str], labels: Tensor, count: int
    ) -> "Captions":
        """Return captions with `count` vectors, which are the tokens of the names of the classes.

        Raises:
            ValueError: If the text tower cannot read token embeddings, or a text gets too long for it.
        """
        clip, processor, device = encoder.clip, encoder.processor, encoder.device
        table, special = token_embedding(clip).weight.detach(), set(processor.tokenizer.all_special_ids)
        rows, places, starts = list[tuple[int, ...]](), list[int](), list[list[int]]()
        prompts = [prompt.rstrip(". ") for prompt in prompts]
        for name, ids in zip(names, prompt_tokens(processor, prompts, clip), strict=True):
            if len(ids) + count > longest_text(clip):
                raise ValueError(
                    f"the prompt of class {name!r} has {len(ids)} tokens, and captions={count} adds {count}, but the "
                    f"text tower takes at most {longest_text(clip)}: choose fewer captions or a shorter prompt"
                )
            own = processor.tokenizer(name, add_special_tokens=False)["input_ids"] or ids
            starts.append([own[number % len(own)] for number in range(count)])
            places.append(len(ids) - (ids[-1] in special))
            rows.append((*ids[: places[-1]], *starts[-1], *ids[places[-1] :]))
        tokens = {name: each.to(device) for name, each in padded_tokens(processor, rows, clip).items()}
        labels = labels.to(device)
        vectors = table[torch.tensor(starts, device=device)].float()[labels]
        return cls(encoder, tokens, torch.tensor(places, device=device), labels, vectors)

    def embeds(self, rows: Tensor, vectors: Tensor | None = None) -> Tensor:
        """Return the unit features, (rows, d), of the texts of some images, with their vectors or the given ones."""
        vectors = self.vectors[rows] if vectors is None else vectors
        at = self.places[self.labels[rows], None] + torch.arange(vectors.shape[1], device=rows.device)

        def replaced(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            return output.scatter(1, at[:, :, None].expand_as(vectors), vectors.to(output))

        tokens = {name: each[self.labels[rows]] for name, each in self.tokens.items()}
        with hooked((token_embedding(self.encoder.clip).register_forward_hook, replaced)), self.encoder.autocast():
            return unit_text_embeds(self.encoder.clip, tokens)

    def trained(self, features: Tensor, tau: float, pairs: Pairs | None, generator: torch.Generator) -> "Captions":
        """Return captions that fit the unit features, (n, d), of the images."""
        found = self.vectors.clone()
        words = F.normalize(token_embedding(self.encoder.clip).weight.detach().float(), dim=1)
        with self.encoder.without_adapter(), torch.enable_grad():
            for rows in torch.randperm(len(found), generator=generator).to(found.device).split(BATCH):
                vectors = self.vectors[rows].requires_grad_()
                optimizer = torch.optim.AdamW([vectors], lr=RATE, weight_decay=DECAY)
                for _ in range(EPOCHS):
                    drawn = None
                    if pairs is not None:
                        chosen = torch.randperm(len(pairs[0]), generator=generator)[:BATCH].to(found.device)
                        drawn = pairs[0][chosen], pairs[1][chosen]
                    given = features[rows], self.embeds(rows, vectors), self.labels[rows], tau, vectors, words, drawn
                    vectors.grad = torch.autograd.grad(generation_loss(*given), vectors)[0]
                    optimizer.step()
                found[rows] = vectors.detach()
        return replace(self, vectors=found)


def token_embedding(clip: Any) -> Any:
    """Return the layer of the text tower that embeds tokens, or raise a `ValueError` if it has none."""
    record = encoder_of(clip)
    layer = None if record.text_tower is None else clip.get_submodule(record.text_tower).get_input_embeddings()
    if getattr(layer, "weight", None) is None:
        raise ValueError(
            f"captions are token embeddings, but a {type(clip).__name__} has no text tower that reads them: "
            "set captions=0"
        )
    return layer


@torch.no_grad()
def reference_pairs(encoder: Encoder, images: str, texts: str) -> Pairs:
    """Return the unit features, by the untouched model, of reference images and of their captions, each (m, d).

    Args:
        encoder: Encodes them.
        images: As for `load_data`.
        texts: A file with one caption per line, in the order of the images.
    """
    data, lines = load_data(expand_path(images)), read_lines(expand_path(texts))
    if len(lines) != len(data):
        raise ValueError(
            f"reference_texts {texts!r} has {len(lines)} lines, but there are {len(data)} reference images: write one "
            "caption per line, in the order of the images"
        )
    features, rows = encoder.query_embeds(encoder.images(data), "references"), []
    with encoder.without_adapter():
        ids = prompt_tokens(encoder.processor, lines, encoder.clip)
        for start in range(0, len(ids), 256):
            tokens = padded_tokens(encoder.processor, ids[start : start + 256], encoder.clip)
            rows.append(encoder.token_embeds({name: each.to(encoder.device) for name, each in tokens.items()}))
    found = torch.cat(rows)
    nearer = (features * (found - found.roll(1, dims=0))).sum(dim=1)  # to the own caption than to the one before
    if float(nearer.mean()) <= float(nearer.std(correction=0)) / len(lines) ** 0.5:
        warnings.warn(
            f"the captions in {texts!r} fit their images no better than other captions do: line i must be the caption "
            f"of image i, and the first image is {data.item_name(0)}",
            stacklevel=2,
        )
    return features, found
