"""L2P: a pool of prompts for all tasks, from which each image takes those whose keys are nearest to its query.

    pool P (size, length, width), keys K (size, d)         s_m = cos(q, K_m); the `chosen` prompts with the largest s

    form=prefix   L2P++, as CODA-Prompt's paper compares it: the first half of each chosen prompt are keys, the rest
                  values, of the first `blocks` blocks, with a pool for each; the feature is that of the class token
    form=tokens   L2P: the chosen prompts are tokens after the class token, and with head=linear the feature is the
                  mean of their outputs. With head=text it is that of the class token, which names can be compared with

    loss = cross-entropy over the task's classes - key_weight mean over images of the sum of the chosen s_m

Keys move by this term alone, and only if they are chosen, so the first task's prompts tend to be chosen ever after:
this is a property of the method. Every image chooses on its own, in training and in prediction. The paper's penalty
on prompts that were chosen often, which its public code does not have, is not here either.

Reference: Wang et al., "Learning to Prompt for Continual Learning", arXiv 2112.08654: 10 prompts of length 5, 5 of
them chosen, a rate of 0.03 batch / 256, gradients clipped to 1, 5 epochs, key_weight 1 in the authors' public code (a
stored configuration has 4 of 10 prompts of length 10), 0.1 in ports. L2P++ in the public code of CODA-Prompt, arXiv
2211.13218: 30 prompts of length 20, 5 of them chosen, block 0, or blocks 0 to 4 as "deep", Adam at 1e-3. The code sums
the term over pairs of images of a batch, which is not intended.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dulbe_peft.encoders.encoding import hooked
from dulbe_peft.encoders.loading import embed_dim, encoder_of, unit_image_embeds
from dulbe_peft.papers.prompts import Draw, Pairs, Prompted, PromptStrategy, blocks_of, cosines, width_of
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.utils.settings import AtLeastOne, Weight


def nearest(queries: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest cosines of each query, (n, count), and the numbers of their keys, (n, count)."""
    best = cosines(queries, keys).topk(min(count, len(keys)), dim=1)
    return best.values, best.indices


@contextmanager
def inserted(clip: Any, tokens: Tensor, pooled: bool) -> Iterator[None]:
    """Insert tokens, (n, p, width), after the class token of a CLIP-like tower while the block runs.

    With `pooled`, the output is the mean of their outputs after the last layer norm, instead of the class token's.
    """
    tower, count = clip.vision_model, tokens.shape[1]
    outputs: list[Tensor] = []

    def insert(_: nn.Module, __: Any, result: Tensor) -> Tensor:
        return torch.cat([result[:, :1], tokens.to(result.dtype), result[:, 1:]], dim=1)

    def keep(_: nn.Module, __: object, result: Any) -> None:
        outputs[:] = [result.last_hidden_state[:, 1 : 1 + count]]

    hooks: list[Any] = [(tower.embeddings.register_forward_hook, insert)]
    if pooled:
        hooks.append((tower.encoder.register_forward_hook, keep))
        hooks.append((tower.post_layernorm.register_forward_pre_hook, lambda *_: (outputs[0],)))
        hooks.append((tower.post_layernorm.register_forward_hook, lambda *given: given[-1].mean(dim=1)))
    with hooked(*hooks):
        yield


class Chosen(Prompted):
    """Encode images with the prompts of the pool that each of them chooses, in either form."""

    def image_embeds(self, clip: object, pixels: Tensor, queries: Tensor | None) -> Tensor:
        strategy = self.strategy
        assert isinstance(strategy, L2P) and queries is not None
        if strategy.form == "prefix":
            return super().image_embeds(clip, pixels, queries)
        tokens = strategy.selected(self.tensors, queries, 0).flatten(1, 2)
        with inserted(clip, tokens, strategy.head == "linear"):
            return unit_image_embeds(clip, pixels)


@dataclass(frozen=True)
class L2P(PromptStrategy):
    """Train a pool of prompts and their keys in all tasks."""

    form: Literal["prefix", "tokens"] = "prefix"
    pool: AtLeastOne | None = None  # None: the published 30 for prefixes, 10 for tokens
    length: AtLeastOne | None = None  # of a prompt; None: the published 20 for prefixes, 5 for tokens
    chosen: AtLeastOne = 5  # prompts of an image; the published 5
    blocks: AtLeastOne = 1  # for prefixes: the first blocks, or all of a model with fewer; "deep" is 5
    key_weight: Weight = 1.0

    name = "l2p"
    published_rate = 1e-3
    encoder_class = Chosen

    def begin(self, task: NewTask, old: Mapping[str, Tensor], draw: Draw) -> dict[str, Tensor]:
        assert task.encoder is not None
        clip, prefix = task.encoder.clip, self.form == "prefix"
        size, length = self.pool or (30 if prefix else 10), self.length or (20 if prefix else 5)
        if prefix and length % 2:
            raise ValueError(f"length must be even for prefixes, half keys and half values, got {length}")
        if not prefix and not (encoder_of(clip).cls_token and hasattr(clip, "vision_model")):
            raise ValueError(
                f"form=tokens puts prompts after the class token of a tower like CLIP's, and a {type(clip).__name__} "
                "has none: use form=prefix"
            )
        if old:
            return {name: old[name].clone() for name in ("pool", "keys")}
        blocks = min(self.blocks, len(blocks_of(clip))) if prefix else 1
        pool = draw.uniform(blocks, size, length, width_of(clip))
        return {"pool": pool, "keys": draw.uniform(blocks, size, embed_dim(clip))}

    def selected(self, tensors: Mapping[str, Tensor], queries: Tensor, block: int) -> Tensor:
        """Return the chosen prompts of each image, (n, chosen, length, width)."""
        return tensors["pool"][block][nearest(queries, tensors["keys"][block], self.chosen)[1]]

    def prefixes(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int | None) -> Pairs:
        pairs = {}
        for block in range(len(tensors["pool"])):
            keys, values = self.selected(tensors, queries, block).chunk(2, dim=2)
            pairs[block] = keys.flatten(1, 2), values.flatten(1, 2)
        return pairs

    def term(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int) -> Tensor:
        near = [nearest(queries, keys, self.chosen)[0] for keys in tensors["keys"]]
        return -self.key_weight * torch.stack(near).sum(dim=2).mean(dim=1).sum()
