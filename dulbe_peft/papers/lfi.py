"""LfI: two heads, one of names and one of class means, teach each other while a task is trained.

    p_clip = softmax(tau z . e_c)          e_c: text of class c             both over the classes of the task
    p_vis  = softmax(tau z . g_c)          g_c: at first the mean of the class's features by the untouched model;
                                           trained with the task, and then dropped
    l      = cross-entropy of one image
    a      = sigmoid(gamma (l_vis - l_clip) / (l_vis + l_clip))             for each image, without gradient
    q      = a p_clip + (1 - a) p_vis                                       without gradient
    loss   = mean l_clip + mean l_vis + distillation mean [KL(p_vis || q) + KL(p_clip || q)]
             + contrast L_CLIP(images, captions)     CLIP's own loss over the batch, if `captions` is not 0

The head with the smaller loss has the larger weight in q, from which both learn.

With `captions=K`, `pseudo_captions` first trains K vectors for each image, which stand beside the class's name in its
text. The paper has 3, which it trains beside image-caption pairs of COCO: `reference_images` and `reference_texts`.
Without references, captions are compared with those of the task alone. They are dropped after the task.

In the authors' code, the divergence is KL(q || p), the weights are linear in the losses, and all of CLIP is trained.

Reference: "Learning from Itself", CVPR 2026, whose formulas are used, and the authors' public code for its rates: SGD
at 1e-4 with momentum 0.9, batches of 64, 20 epochs, gradients clipped to 1, for all weights of CLIP.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch.nn import functional as F

from dulbe_peft.data.names import format_prompts
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import logit_scale
from dulbe_peft.papers.fitting import class_means
from dulbe_peft.papers.pseudo_captions import Captions, contrastive_loss, reference_pairs
from dulbe_peft.strategies.base import NewTask, Step
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.utils.processes import gather_rows, on_main_process, padded_shard, used_by_all
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
    """Train one pair with two heads that teach each other, which is the paper's LfI with LoRA."""

    gamma: Positive = 3.0  # the paper's
    distillation: Weight = 1.0  # the paper's
    captions: Annotated[int, Ge(0)] = 0  # vectors for each image; the paper has 3
    contrast: Weight = 0.1  # the paper's
    reference_images: str = ""  # as in `zscl`
    reference_texts: str = ""  # a file with one caption per line, in the order of the images; ~ and $DATA are expanded

    name = "lfi"
    classifiers = ("text", "bayes")

    def __post_init__(self) -> None:
        super().__post_init__()
        references = self.reference_images, self.reference_texts
        if any(references) and not (all(references) and self.captions):
            raise ValueError(
                "references of the strategy 'lfi' are images with captions: pass reference_images, reference_texts "
                f"and captions=3, got {references[0]!r}, {references[1]!r} and captions={self.captions}"
            )

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        assert task.encoder is not None and task.images is not None
        features = task.encoder.query_embeds(task.images, f"task {task.index + 1} means")
        means = class_means(features, torch.as_tensor(task.images.labels))
        task.notes["means"] = F.normalize(means, dim=1).to(features).requires_grad_()
        if self.captions:
            task.notes["captions"] = self._captions(task, task.encoder, features)
        with super().training(task) as bases:
            yield [*bases, task.notes["means"]]

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        means = used_by_all(task.notes["means"])
        heads, far = mutual_loss(step.features, step.text, means, step.labels, step.logit_scale, self.gamma)
        loss = heads + self.distillation * far
        if not self.captions:
            return loss
        assert step.index is not None
        rows = torch.tensor(padded_shard(step.index.tolist()), device=step.index.device)
        texts = gather_rows(task.notes["captions"].embeds(rows), len(step.index))
        each = torch.arange(len(texts), device=texts.device)
        return loss + self.contrast * contrastive_loss(step.features, texts, each, step.logit_scale)

    def _captions(self, task: NewTask, encoder: Encoder, features: torch.Tensor) -> Captions:
        """Train the captions of the task's images, whose features by the untouched model are given."""
        assert task.images is not None
        names, labels = task.images.images.class_names, torch.as_tensor(task.images.labels)
        prompts = [encoder.prompts(name, task.class_texts, training=True)[0] for name in names]
        shown = [format_prompts(name, ["{}"], task.args.class_name_style)[0] for name in names]
        start, pairs = Captions.begun(encoder, shown, prompts, labels, self.captions), None
        if self.reference_images:
            pairs = reference_pairs(encoder, self.reference_images, self.reference_texts)
        given = features, logit_scale(encoder.clip), pairs, task.generator(salt=3)
        vectors = on_main_process(lambda: start.trained(*given).vectors.cpu())
        return replace(start, vectors=vectors.to(encoder.device))
