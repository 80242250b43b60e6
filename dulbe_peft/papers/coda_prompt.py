"""CODA-Prompt: an image's prompt is a weighted sum of components, whose weights come from attended queries and keys.

    P_m (2 length, width), K_m (d,), A_m (d,)    `components` new ones for each task, in each of the first blocks
    w_m = cos(q * A_m, K_m)                      elementwise product; no softmax and no selection
    p   = sum_m w_m P_m                          (2 length, width): the first half are keys, the rest are values

    loss = cross-entropy over the task's classes
         + orthogonal sum over blocks of  mean (K K' - I)^2 + mean (A A' - I)^2 + mean (P P' - I)^2

Components of finished tasks take part in w and p, but are frozen: their gradients are exactly 0. The rows of a new
task start as normal vectors minus their projections on all earlier rows, then at length 1.

The published method splits 100 components over the tasks, so it must know their number. Here the tables grow.

Reference: Smith et al., "CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual
Learning", arXiv 2211.13218, and the authors' public code: Adam at 1e-3, batches of 128, 20 epochs on CIFAR-100 and 50
on ImageNet-R. The paper's penalty is 0.1; the code's is now 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.encoders.loading import embed_dim
from dulbe_peft.papers.prompts import Draw, Pairs, PromptStrategy, blocks_of, width_of
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.utils.settings import AtLeastOne, Weight

TABLES = ("prompts", "keys", "attention")


def orthogonal_rows(old: Tensor, new: Tensor) -> Tensor:
    """Subtract from each row of `new`, (m, width), its projections on all earlier rows, and scale it to length 1.

    `old`, (M, width), are earlier rows, which need not be orthogonal to one another. A row of which nothing is left,
    because there are more rows than dimensions, is only scaled.
    """
    rows = list(old.double())
    for row in new.double():
        rest = row - sum(((row @ each) / (each @ each) * each for each in rows), torch.zeros_like(row))
        rest = rest if rest.norm() > 1e-6 * row.norm() else row
        rows.append(rest / rest.norm())
    return torch.stack(rows[len(old) :]).to(new.dtype)


def component_weights(queries: Tensor, keys: Tensor, attention: Tensor) -> Tensor:
    """Return w_m = cos(q * A_m, K_m), (n, M), for queries, (n, d), and two tables, (M, d)."""
    return (F.normalize(queries[:, None] * attention, dim=2) * F.normalize(keys, dim=1)).sum(dim=2)


def orthogonality(table: Tensor) -> Tensor:
    """Return the mean over all entries of (T T' - I)^2 for a table of rows, (M, ...)."""
    rows = table.flatten(1)
    return (rows @ rows.T - torch.eye(len(rows)).to(rows)).square().mean()


@dataclass(frozen=True)
class CodaPrompt(PromptStrategy):
    """Train prompt components, their keys and their attention for each task."""

    length: AtLeastOne = 4  # tokens of keys, and as many of values; the authors' 4 of each
    components: AtLeastOne = 10  # new ones for each task; the authors' 100 divided by the number of tasks
    blocks: AtLeastOne = 5  # the first blocks, or all of a model with fewer
    orthogonal: Weight = 0.1  # the paper's; the public code now has 0

    name = "coda_prompt"
    published_rate = 1e-3

    def begin(self, task: NewTask, old: Mapping[str, Tensor], draw: Draw) -> dict[str, Tensor]:
        assert task.encoder is not None
        clip = task.encoder.clip
        blocks, width, d = min(self.blocks, len(blocks_of(clip))), width_of(clip), embed_dim(clip)
        new = {}
        for name, row in zip(TABLES, ((2 * self.length, width), (d,), (d,)), strict=True):
            drawn = torch.randn(blocks, self.components, *row, generator=draw.generator).to(draw.device)
            before = old[name] if name in old else drawn[:, :0]
            pairs = zip(before.flatten(2), drawn.flatten(2), strict=True)
            new[name] = torch.stack([orthogonal_rows(*pair) for pair in pairs]).view_as(drawn)
        return new

    def joined(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: torch.cat([*([old[n].detach()] if n in old else []), new[n]], dim=1) for n in TABLES}

    def prefixes(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int | None) -> Pairs:
        pairs = {}
        for block, (prompts, keys, attention) in enumerate(zip(*(tensors[name] for name in TABLES), strict=True)):
            weights = component_weights(queries, keys, attention)
            keys, values = torch.einsum("nm,mlw->nlw", weights, prompts).chunk(2, dim=1)
            pairs[block] = keys, values
        return pairs

    def term(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int) -> Tensor:
        tables = (table for name in TABLES for table in tensors[name])
        return self.orthogonal * torch.stack([orthogonality(table) for table in tables]).sum()
