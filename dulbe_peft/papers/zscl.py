"""ZSCL: distillation keeps the similarities between reference images and texts as they were in the pristine model.

    loss = cross-entropy over the current classes
         + distillation * T^2 (mean over images of KL(p || q) over texts + mean over texts of KL(p || q) over images)
    p, q: softmax of tau z_0 . e_0 / T and of tau z . e_0 / T        0: both towers of the pristine model

Each step samples a batch of reference images. The texts are the names of their classes, or are read from a file. With
`average`, each tensor of the adapter is replaced at the end of the task by its mean over the start and all steps.

Reference: Zheng et al., "Preventing Zero-Shot Transfer Degradation in Continual Learning of Vision-Language Models",
arXiv 2303.06628, and the authors' public code, which is the source of T = 2 and of the weight.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import logit_scale
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.strategies.base import Modes, NewTask
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.strategies.losses import bidirectional_kl
from dulbe_peft.utils.files import read_lines
from dulbe_peft.utils.settings import Positive, Weight


@dataclass
class References:
    """Reference images, and the pristine model's embeddings of them and of the texts."""

    encoder: Encoder
    images: PixelDataset
    features: torch.Tensor  # (m, d)
    text: torch.Tensor  # (texts, d)
    generator: torch.Generator

    def loss(self, temperature: float) -> torch.Tensor:
        """Return the distillation loss on a newly sampled batch of reference images."""
        rows = torch.randperm(len(self.images), generator=self.generator)[: self.encoder.args.batch_size]
        pixels = torch.stack([self.images[row][0] for row in rows.tolist()]).to(self.encoder.device)
        text = logit_scale(self.encoder.clip) * self.text.T
        before = self.features[rows.to(self.features.device)] @ text
        return bidirectional_kl(self.encoder.image_embeds(pixels) @ text, before, temperature, temperature)


@dataclass(frozen=True)
class Zscl(Lora):
    """Train a LoRA pair with ZSCL's distillation."""

    reference_images: str = ""  # same forms as for `--data`; ~ and environment variables such as $DATA are expanded
    reference_texts: str = ""  # a file with one text per line, also expanded; by default the images' class names
    distillation: Weight = 1.0
    temperature: Positive = 2.0
    average: bool = True

    name = "zscl"

    def plan(self, task: NewTask) -> Modes | None:
        if not self.reference_images:
            raise ValueError("the strategy 'zscl' needs reference images: pass zscl:reference_images=FOLDER")
        return super().plan(task)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        task.notes["references"] = self.references(task)
        with super().training(task) as bases:
            trained = {id(tensor): tensor for tensor in [*bases, *task.adapter.parameters()] if tensor.requires_grad}
            task.notes["means"] = [(tensor, tensor.detach().clone()) for tensor in trained.values()]
            task.notes["count"] = 1
            yield bases

    def references(self, task: NewTask) -> References:
        """Load the reference images and texts and embed them with the pristine model."""
        encoder = task.encoder
        assert encoder is not None
        images = load_data(expand_path(self.reference_images))
        texts = read_lines(expand_path(self.reference_texts)) if self.reference_texts else None
        if texts == []:
            raise ValueError(f"reference_texts {self.reference_texts!r} contains no text: write one text per line")
        names, given = texts or list(images.class_names), {text: (text,) for text in texts or ()}
        pixels = encoder.images(images, keep=True)
        with task.adapter.scaled(0):
            features, text = encoder.dataset_embeds(pixels, "references"), encoder.text_embeds(names, given)
        return References(encoder, pixels, features, text, task.generator(salt=1))

    def penalty(self, task: NewTask) -> torch.Tensor:
        return self.distillation * task.notes["references"].loss(self.temperature)

    def after_step(self, task: NewTask) -> None:
        task.notes["count"] += 1
        for tensor, mean in task.notes["means"]:
            mean += (tensor - mean) / task.notes["count"]

    def finish(self, task: NewTask) -> None:
        for tensor, mean in task.notes["means"] if self.average else ():
            tensor.copy_(mean)


def expand_path(path: str) -> str:
    """Expand ~ and environment variables in the path of reference images or texts; a missing variable is an error."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$(\w+|\{\w+\})", expanded):
        raise ValueError(
            f"the references are {path!r}, but the environment variable {unset[1].strip('{}')} is not set: it stands "
            "for a folder or file of your own, so set it, or give the path itself"
        )
    return expanded
