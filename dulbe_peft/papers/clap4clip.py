"""CLAP4CLIP: texts that have seen the class means, and for each task a Gaussian of what is added to them.

t_c = e_c + G(e_1 .. e_C; v_1 .. v_C)_c     G: a transformer's decoder layer; a text sees its own task's, and all v
q_c = N(M_b t_c + m_b, diag(s)^2)           s = 0.001 + 0.999 softplus(S_b t_c + s_b);  b: the task of class c
score = tau z . (t_c + u_c)                 u_c: draws from q_c in training, their mean in answers
loss: cross-entropy over draws, images and all seen classes
      + 15 x cross-entropy over a task's classes c' of e_c . (mean draw of u_c'), where c is right
      + 0.001 x mean over a task's classes of KL(q_c, N(0, I))
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.papers.fitting import ReplayedMeans, fit, minibatches, stand_ins, task_generator
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed

HIDDEN = 2048  # width inside G
LANGUAGE, PRIOR = 15.0, 0.001
WARMUP, FINAL = 0.3, 1e-3  # the share of steps over which the rate rises, and what a cosine leaves of it
TUNED, TUNING = 2, 0.1  # epochs of the tuning on class means, and its part of the rate


class Clap4ClipClassifier(ReplayedMeans):
    """G, each class's text and mean feature, and of each task M, m, S and s, 8 d (d + 1) bytes.

    A task trains G and its own adapter; then all tasks' adapters are tuned on all classes alike. The authors do both
    with 20 stored images of each old class. Here an old class's mean feature stands for as many images: how they
    differ is lost. In the authors' code texts see the images of the batch, in answers those of the test, so that an
    answer depends on the others; here they see the class means. An answer takes the mean of q_c, not 20 draws. S and
    the biases in G start at 0; the authors' S starts at the variance between a class's prompts, of which only the mean
    is known here, and is then below 1e-6. Dropout is left out, and what their command does not switch on: priors from
    data, distillation, a hierarchy. Draws start far wider than a text is long, so few images train little.

    Args:
        epochs, batch_size: passes over a task's features, and features per step.
        learning_rate: of SGD, the authors' 1e-3 x 32 / 20 for batches of 32; a tenth of it tunes.
        samples: draws of a step.
        exemplars: as how many images a class mean stands, at most as it had.
        seed: of what starts at random, of the order of the features and of the draws.

    Reference:
        Jha et al., "CLAP4CLIP: Continual Learning with Probabilistic Finetuning for Vision-Language Models", arXiv
        2403.19137, and the authors' public code; settings from its command for CIFAR-100.
    """

    epochs: AtLeastOne = 5
    batch_size: AtLeastOne = 32
    learning_rate: Positive = 1.6e-3
    samples: AtLeastOne = 20
    exemplars: AtLeastOne = 20
    seed: Seed = 0

    name = "clap4clip"
    summary = "CLAP4CLIP's rule: names that have seen the class means, and to each the mean of a learned Gaussian"
    belongs_to = "clap4clip"
    by_task = "adapters"

    def register(self) -> None:
        self.register_buffer("guide", torch.zeros(sum(p.numel() for p in decoder(self.embed_dim).parameters())))
        self.keep_means(2 * self.embed_dim * (self.embed_dim + 1))

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, changes = len(self._class_names), self.with_means(images, labels, new)
        texts, means, task = self.text_embeds.float(), changes["means"], changes["task"]
        generator = task_generator(self.seed, old)
        guide = self.guide.float().clone() if old else started_guide(self.embed_dim, generator).to(images)
        adapters = [*(row.float().clone() for row in self.adapters), started_adapter(texts, generator)]

        def train(rows: Tensor, labels: Tensor, leaves: list[Tensor], epochs: int, rate: float, warmup: float) -> None:
            for tensor in (guide, *adapters):
                tensor.requires_grad_(any(tensor is leaf for leaf in leaves))
            plan = rates(epochs * -(-len(rows) // self.batch_size), rate, warmup)
            optimizer = torch.optim.SGD(leaves, rate)

            def loss(_: int, batch: Tensor) -> Tensor:
                optimizer.param_groups[0]["lr"] = next(plan)
                seen = guided(guide, texts, means, task)
                mean, deviation = gaussians_of(adapters, seen, task)
                noise = torch.randn(self.samples, *mean.shape, generator=generator).to(mean)
                draws = mean + deviation * noise
                scores = self.logit_scale * rows[batch] @ (seen + draws).transpose(1, 2)
                total = F.cross_entropy(scores.flatten(0, 1), labels[batch].repeat(self.samples))
                divergence = ((mean**2 + deviation**2 - 1) / 2 - deviation.log()).sum(dim=1)
                for number, adapter in enumerate(adapters):
                    if adapter.requires_grad:
                        own = task == number
                        near = texts[own] @ draws.mean(dim=0)[own].T
                        total = total + LANGUAGE * F.cross_entropy(near, torch.arange(len(near), device=near.device))
                        total = total + PRIOR * divergence[own].mean()
                return total

            fit(loss, optimizer, (minibatches(rows, self.batch_size, generator) for _ in range(epochs)))

        rows, classes = stand_ins(self.means, self.counts, self.exemplars)
        rows, classes = torch.cat([images, F.normalize(rows, dim=1)]), torch.cat([labels, classes])
        train(rows, classes, [guide, adapters[-1]], self.epochs, self.learning_rate, WARMUP)
        if old:
            rows, classes = stand_ins(means, changes["counts"], self.exemplars)
            train(F.normalize(rows, dim=1), classes, adapters, TUNED, TUNING * self.learning_rate, 0)
        return changes | {"guide": guide.detach(), "adapters": torch.stack(adapters).detach()}

    def _weight(self) -> Tensor:
        given = self.text_embeds.float(), self.means.float(), self.task
        seen = guided(self.guide.float(), *given)
        return self.logit_scale * (seen + gaussians_of(self.adapters.float(), seen, self.task)[0])

    def logits(self, images: Tensor) -> Tensor:
        return images @ self.derived("weight", self._weight).T


def decoder(width: int) -> nn.TransformerDecoderLayer:
    """G without its numbers, which are one vector, `guide`; a new one each time, for threads may not share it."""
    with torch.device("meta"):
        return nn.TransformerDecoderLayer(width, 1, HIDDEN, dropout=0.0, activation="gelu", batch_first=True)


def guided(guide: Tensor, texts: Tensor, means: Tensor, task: Tensor) -> Tensor:
    """t_c of all classes, (C, d), from their texts and mean features, (C, d), and tasks, (C,)."""
    layer = decoder(texts.shape[1])
    shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    parts = guide.split([shape.numel() for shape in shapes.values()])
    numbers = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    inputs = texts[None], F.normalize(means, dim=1)[None]
    apart = task[:, None] != task
    return texts + torch.func.functional_call(layer, numbers, inputs, {"tgt_mask": apart})[0]


def gaussians_of(adapters: Sequence[Tensor] | Tensor, seen: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of q_c, (C, d) each, by an adapter a task; the classes stand in the order of the tasks."""
    width = seen.shape[1]
    parts = []
    for number, row in enumerate(adapters):
        matrix = row.view(2 * width, width + 1)
        parts.append(F.linear(seen[task == number], matrix[:, :-1], matrix[:, -1]))
    mean, raw = torch.cat(parts).chunk(2, dim=1)
    return mean, 0.001 + 0.999 * F.softplus(raw)


def started_guide(width: int, generator: torch.Generator) -> Tensor:
    """G's numbers at the start, (parameters,): those of PyTorch, but for biases of 0."""
    parts = []
    for name, parameter in decoder(width).named_parameters():
        bound = math.sqrt(6 / sum(parameter.shape)) if "in_proj" in name else 1 / math.sqrt(parameter.shape[-1])
        if parameter.ndim == 2:
            parts.append(bound * (2 * torch.rand(parameter.numel(), generator=generator) - 1))
        else:
            parts.append(torch.full(parameter.shape, float("norm" in name and "weight" in name)))
    return torch.cat(parts)


def started_adapter(texts: Tensor, generator: torch.Generator) -> Tensor:
    """M = E' E / d over the texts of all seen classes, (C, d), S = 0, and m and s uniform, as one row."""
    width = texts.shape[1]
    biases = (2 * torch.rand(2 * width, 1, generator=generator) - 1).to(texts) / math.sqrt(width)
    matrices = torch.cat([texts.T @ texts / width, torch.zeros_like(texts.T @ texts)])
    return torch.cat([matrices, biases], dim=1).flatten()


def rates(steps: int, rate: float, warmup: float) -> Iterator[float]:
    """The learning rate of each step: evenly up over a part of them, then down on a cosine to a thousandth."""
    rising = int(warmup * steps)
    yield from (rate * (step + 1) / (rising + 1) for step in range(rising))
    for step in range(steps - rising):
        yield rate * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * step / (steps - rising))) / 2)


@dataclass(frozen=True)
class Clap4Clip(Frozen):
    """Trains nothing; the classifier `clap4clip` has the paper's rule."""

    name = "clap4clip"
    classifiers = ("clap4clip",)
