"""DualPrompt: general prompts that all tasks train, and one expert prompt for each task, found by its key.

    G      (general blocks, 2, length, width)            keys and values for the first `general_blocks` blocks
    E_t    (expert blocks, 2, length, width)             for the `expert_blocks` blocks after them
    k_t    (d,)                                          one key for each task, for all blocks

    training    task t uses G and E_t and trains both; E_t starts as a copy of E_{t-1}
                loss = cross-entropy over the task's classes - key_weight mean cos(q, k_t)
    prediction  the E_s with the largest cos(q, k_s) among the learned tasks, for each image on its own

A model with fewer blocks has expert prompts in those that it has. Keys exist only for tasks that were learned, so the
key of a later task cannot win, as it can in the authors' code.

Reference: Wang et al., "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning", arXiv 2204.04799,
and the authors' public code: on CIFAR-100, 5 general and 5 expert tokens (20 on ImageNet-R), batches of 24, a constant
rate of 0.0028, gradients clipped to 1, and 5 epochs. Here the rate follows the learner's schedule, without clipping.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dulbe_peft.encoders.loading import embed_dim
from dulbe_peft.papers.prompts import Draw, Pairs, PromptStrategy, blocks_of, cosines, width_of
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.utils.settings import AtLeastOne, Weight


@dataclass(frozen=True)
class DualPrompt(PromptStrategy):
    """Train general prompts, and an expert prompt with its key for each task."""

    general_length: AtLeastOne = 5  # tokens; the authors' 5, and 3 in CODA-Prompt's comparison
    expert_length: AtLeastOne = 5  # tokens; the authors' 5 or 20, and 10 in CODA-Prompt's comparison
    general_blocks: AtLeastOne = 2
    expert_blocks: AtLeastOne = 3
    key_weight: Weight = 1.0  # the authors'; ports to PyTorch have 0.1

    name = "dualprompt"
    published_rate = 0.0028

    def begin(self, task: NewTask, old: Mapping[str, Tensor], draw: Draw) -> dict[str, Tensor]:
        assert task.encoder is not None
        clip = task.encoder.clip
        blocks, width = len(blocks_of(clip)), width_of(clip)
        experts = min(self.expert_blocks, blocks - self.general_blocks)
        if experts < 1:
            raise ValueError(
                f"the vision tower has {blocks} blocks, and general_blocks is {self.general_blocks}, so none is left "
                "for expert prompts: choose a smaller general_blocks"
            )
        key = draw.uniform(1, embed_dim(clip))
        if old:
            return {"general": old["general"].clone(), "experts": old["experts"][-1:].clone(), "keys": key}
        general = draw.uniform(self.general_blocks, 2, self.general_length, width)
        return {"general": general, "experts": draw.uniform(1, experts, 2, self.expert_length, width), "keys": key}

    def joined(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = {n: torch.cat([*([old[n]] if n in old else []), new[n]]) for n in ("experts", "keys")}
        return {"general": new["general"], **rows}

    def prefixes(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int | None) -> Pairs:
        general, experts, n = tensors["general"], tensors["experts"], len(queries)
        if task is None:
            chosen = experts[cosines(queries, tensors["keys"]).argmax(dim=1)]  # (n, blocks, 2, length, width)
        else:
            chosen = experts[task].expand(n, *experts.shape[1:])
        pairs = {b: (k.expand(n, *k.shape), v.expand(n, *v.shape)) for b, (k, v) in enumerate(general)}
        first = len(general)
        return pairs | {first + b: (chosen[:, b, 0], chosen[:, b, 1]) for b in range(chosen.shape[1])}

    def term(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int) -> Tensor:
        return -self.key_weight * cosines(queries, tensors["keys"][task : task + 1]).mean()
