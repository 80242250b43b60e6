"""LfI: two heads, one of names and one of class means, teach each other while a task is trained.

    p_clip = softmax(tau z . e_c)          e_c: text of class c             both over the classes of the task
    p_vis  = softmax(tau z . g_c)          g_c: at first the mean of the class's features by the untouched model;
                                           trained with the task, and then dropped
    l      = cross-entropy of one image
    a      = sigmoid(gamma (l_vis - l_clip) / (l_vis + l_clip))             for each image, without gradient
    q      = a p_clip + (1 - a) p_vis                                       without gradient
    loss   = mean l_clip + mean l_vis + distillation mean [KL(p_vis || q) + KL(p_clip || q)]

The head with the smaller loss has the larger weight in q, from which both learn.

The paper also makes a pseudo-caption for each image, three vectors beside the class's name, from 512 image-caption
pairs of COCO, and adds a contrastive loss between the images of a batch and their captions. They are not made here.
In the authors' code, the divergence is KL(q || p), the weights are linear in the losses, and all of CLIP is trained.

Reference: "Learning from Itself", CVPR 2026, whose formulas are used, and the authors' public code for its rates: SGD
at 1e-4 with momentum 0.9, batches of 64, 20 epochs, gradients clipped to 1, for all weights of CLIP.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dulbe_peft.papers.fitting import class_means
from dulbe_peft.strategies.base import NewTask, Step
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.utils.processes import used_by_all
from dulbe_peft.utils.settings import Positive, Weight


def mutual_loss(
    images: torch.Tensor, texts: torch.Tensor, means: torch.Tensor, labels: torch.Tensor, tau: float, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross-entropy of both heads together, and the mean divergence of both from q.

    Args:
        images: Z, (n, d), unit features.
        texts: E, (C, d), unit.
        means: G, (C, d), which are normalised here.
        labels: (n,), rows of `texts` and `means`.
        tau: Factor of the cosines.
        gamma: How much the smaller loss counts more.
    """
    by_text = (tau * images @ texts.T).log_softmax(dim=1)
    by_mean = (tau * images @ F.normalize(means, dim=1).T).log_softmax(dim=1)
    losses = F.nll_loss(by_text, labels, reduction="none"), F.nll_loss(by_mean, labels, reduction="none")
    with torch.no_grad():
        text, mean = losses
        odds = (gamma * (mean - text) / (mean + text + torch.finfo(text.dtype).eps))[:, None]
        target = torch.logaddexp(F.logsigmoid(odds) + by_text, F.logsigmoid(-odds) + by_mean)
    far = sum((each.exp() * (each - target)).sum(dim=1).mean() for each in (by_mean, by_text))
    return losses[0].mean() + losses[1].mean(), torch.as_tensor(far)


@dataclass(frozen=True)
class Lfi(Lora):
    """Train one pair with two heads that teach each other, which is the paper's LfI with LoRA, without captions."""

    gamma: Positive = 3.0  # the paper's
    distillation: Weight = 1.0  # the paper's

    name = "lfi"
    classifiers = ("text", "bayes")

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        assert task.encoder is not None and task.images is not None
        features = task.encoder.query_embeds(task.images, f"task {task.index + 1} means")
        means = class_means(features, torch.as_tensor(task.images.labels))
        task.notes["means"] = F.normalize(means, dim=1).to(features).requires_grad_()
        with super().training(task) as bases:
            yield [*bases, task.notes["means"]]

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        means = used_by_all(task.notes["means"])
        heads, far = mutual_loss(step.features, step.text, means, step.labels, step.logit_scale, self.gamma)
        return heads + self.distillation * far
