"""CLAP4CLIP: texts attend to the class means, and an adapter per task gives each text a Gaussian that is added to it.

t_c = e_c + G(e_1 .. e_C; v_1 .. v_C)_c     G: a decoder layer; a text attends to texts of its task, and to all v
q_c = N(M_b t_c + m_b, diag(s)^2)           s = 0.001 + 0.999 softplus(S_b t_c + s_b);  b: the task of class c
score = tau z . (t_c + u_c)                 u_c: samples from q_c in training, the mean of q_c in prediction
loss: cross-entropy over samples, images and all seen classes
      + 15 x cross-entropy of e_c . (mean sample of u_c') over the task's classes c', with c as the target
      + 0.001 x mean over the task's classes of KL(q_c, N(0, I))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.classifiers.state import Fitted, Layout, State, once, shared
from dulbe_peft.papers.fitting import ReplayedMeans, fit, minibatches, stand_ins, task_generator
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed

HIDDEN = 2048  # width inside G
LANGUAGE, PRIOR = 15.0, 0.001
WARMUP, FINAL = 0.3, 1e-3  # share of the steps in which the rate rises, and the factor that remains after the cosine
TUNED, TUNING = 2, 0.1  # epochs of the fine-tuning on class means, and the factor of its learning rate


@dataclass(frozen=True)
class Clap4ClipRule(ReplayedMeans):
    """CLAP4CLIP's classifier.

    It stores G, each class's text and mean feature, and M, m, S and s of each task: 8 d (d + 1) bytes. A task trains G
    and its own adapter; then the adapters of all tasks are fine-tuned on a balanced set of all classes. With few
    images training changes little, because the samples start far wider than a text is long.

    Differences from the authors' code:

    - The authors use 20 stored images of each old class. Here the mean feature of an old class is repeated instead,
      so the variation between its images is lost.
    - Their texts attend to the images of the batch, so that a prediction depends on the other test images. Here the
      texts attend to the class means.
    - A prediction uses the mean of q_c instead of 20 samples.
    - S and the biases in G start at 0. The authors' S starts at the variance between a class's prompts, which is below
      1e-6; here only the mean of the prompts is known.
    - Left out are dropout and what the authors' command does not switch on: priors from data, distillation and a
      hierarchy.

    Args:
        epochs, batch_size: Number of passes over a task's features, and number of features per step.
        learning_rate: Learning rate of SGD, by default the authors' 1e-3 x 32 / 20 for batches of 32; fine-tuning
            uses a tenth of it.
        samples: Number of samples from q_c in each step.
        exemplars: How often a class mean is repeated; at most the number of images that the class had.
        seed: Seed of the initial values, of the order of the features and of the samples.

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
    summary = "CLAP4CLIP's rule: texts that attend to the class means, each shifted by the mean of a learned Gaussian"
    belongs_to = "clap4clip"
    by_task = "adapters"

    @property
    def numbers(self) -> int:
        return 2 * self.embed_dim * (self.embed_dim + 1)

    def tensors(self) -> dict[str, Layout]:
        guide = shared(sum(parameter.numel() for parameter in decoder(self.embed_dim).parameters()))
        return {"guide": guide} | super().tensors()

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, changes = state.classes, self.with_means(state, images, labels, new)
        texts, means, task = state.text_embeds.float(), changes["means"], changes["task"]
        generator, layer = task_generator(self.seed, old), decoder(self.embed_dim)
        guide = state.guide.float().clone() if old else initial_guide(self.embed_dim, generator).to(images)
        adapters = [*(row.float().clone() for row in state.adapters), initial_adapter(texts, generator)]

        def train(rows: Tensor, labels: Tensor, leaves: list[Tensor], epochs: int, rate: float, warmup: float) -> None:
            for tensor in (guide, *adapters):
                tensor.requires_grad_(any(tensor is leaf for leaf in leaves))
            plan = rates(epochs * -(-len(rows) // self.batch_size), rate, warmup)
            optimizer = torch.optim.SGD(leaves, rate)

            def loss(_: int, batch: Tensor) -> Tensor:
                optimizer.param_groups[0]["lr"] = next(plan)
                guided = guided_texts(layer, guide, texts, means, task)
                mean, deviation = text_gaussians(adapters, guided, task)
                noise = torch.randn(self.samples, *mean.shape, generator=generator).to(mean)
                samples = mean + deviation * noise
                scores = self.logit_scale * rows[batch] @ (guided + samples).transpose(1, 2)
                total = F.cross_entropy(scores.flatten(0, 1), labels[batch].repeat(self.samples))
                divergence = ((mean**2 + deviation**2 - 1) / 2 - deviation.log()).sum(dim=1)
                for number, adapter in enumerate(adapters):
                    if adapter.requires_grad:
                        classes = task == number
                        near = texts[classes] @ samples.mean(dim=0)[classes].T
                        total = total + LANGUAGE * F.cross_entropy(near, torch.arange(len(near), device=near.device))
                        total = total + PRIOR * divergence[classes].mean()
                return total

            fit(loss, optimizer, (minibatches(rows, self.batch_size, generator) for _ in range(epochs)))

        rows, classes = stand_ins(state.means, state.counts, self.exemplars)
        rows, classes = torch.cat([images, F.normalize(rows, dim=1)]), torch.cat([labels, classes])
        train(rows, classes, [guide, adapters[-1]], self.epochs, self.learning_rate, WARMUP)
        if old:
            rows, classes = stand_ins(means, changes["counts"], self.exemplars)
            train(F.normalize(rows, dim=1), classes, adapters, TUNED, TUNING * self.learning_rate, 0)
        return changes | {"guide": guide.detach(), "adapters": torch.stack(adapters).detach()}

    def scores(self, state: State, images: Tensor) -> Tensor:
        return images @ self.fitted(state).weight.T

    def fitted(self, state: State) -> ShiftedTexts:
        return ShiftedTexts.of(self, state)


class ShiftedTexts(Fitted):
    """The texts of the classes, shifted by the means of their Gaussians."""

    rule: Clap4ClipRule

    @once
    def weight(self) -> Tensor:
        """tau (t_c + E[u_c]), (C, d), float32."""
        state = self.state
        parts = state.guide.float(), state.text_embeds.float(), state.means.float(), state.task
        guided = guided_texts(decoder(self.rule.embed_dim), *parts)
        return self.rule.logit_scale * (guided + text_gaussians(state.adapters.float(), guided, state.task)[0])


def decoder(width: int) -> nn.TransformerDecoderLayer:
    """Return G without its parameters, which the vector `guide` holds.

    A functional call writes to the module, so threads must not share one.
    """
    with torch.device("meta"):
        return nn.TransformerDecoderLayer(width, 1, HIDDEN, dropout=0.0, activation="gelu", batch_first=True)


def guided_texts(layer: nn.Module, guide: Tensor, texts: Tensor, means: Tensor, task: Tensor) -> Tensor:
    """Return t_c of all classes, (C, d), from G, their texts and mean features, (C, d), and tasks, (C,)."""
    shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    parts = guide.split([shape.numel() for shape in shapes.values()])
    numbers = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    inputs = texts[None], F.normalize(means, dim=1)[None]
    masked = task[:, None] != task
    return texts + torch.func.functional_call(layer, numbers, inputs, {"tgt_mask": masked})[0]


def text_gaussians(adapters: Sequence[Tensor] | Tensor, guided: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of q_c, (C, d) each; the classes are in task order."""
    width = guided.shape[1]
    parts = []
    for number, row in enumerate(adapters):
        matrix = row.view(2 * width, width + 1)
        parts.append(F.linear(guided[task == number], matrix[:, :-1], matrix[:, -1]))
    mean, raw = torch.cat(parts).chunk(2, dim=1)
    return mean, 0.001 + 0.999 * F.softplus(raw)


def initial_guide(width: int, generator: torch.Generator) -> Tensor:
    """Return the initial parameters of G, (parameters,): as PyTorch initialises them, except that biases are 0."""
    parts = []
    for name, parameter in decoder(width).named_parameters():
        bound = math.sqrt(6 / sum(parameter.shape)) if "in_proj" in name else 1 / math.sqrt(parameter.shape[-1])
        if parameter.ndim == 2:
            parts.append(bound * (2 * torch.rand(parameter.numel(), generator=generator) - 1))
        else:
            parts.append(torch.full(parameter.shape, float("norm" in name and "weight" in name)))
    return torch.cat(parts)


def initial_adapter(texts: Tensor, generator: torch.Generator) -> Tensor:
    """Return one row with M = E' E / d, E the texts of all seen classes, (C, d), S = 0, and random uniform m and s."""
    width = texts.shape[1]
    biases = (2 * torch.rand(2 * width, 1, generator=generator) - 1).to(texts) / math.sqrt(width)
    matrices = torch.cat([texts.T @ texts / width, torch.zeros_like(texts.T @ texts)])
    return torch.cat([matrices, biases], dim=1).flatten()


def rates(steps: int, rate: float, warmup: float) -> Iterator[float]:
    """Yield the learning rate of each step: a linear warm-up, then a cosine down to a thousandth of `rate`."""
    rising = int(warmup * steps)
    yield from (rate * (step + 1) / (rising + 1) for step in range(rising))
    for step in range(steps - rising):
        yield rate * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * step / (steps - rising))) / 2)


@dataclass(frozen=True)
class Clap4Clip(Frozen):
    """Train nothing: the method is implemented by the classifier `clap4clip`."""

    name = "clap4clip"
    classifiers = ("clap4clip",)
