"""A learner's model with the adapter folded into its weights, and its classifier behind it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from dulbe_peft.classifiers import Classifier
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.training.state import LearnerState


def merged_model(state: LearnerState) -> Any:
    """A copy of the model on the CPU with W_0 + dW in place of W_0, a plain model of transformers."""
    model: Any = copy.deepcopy(state.model)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    return model.cpu().eval().requires_grad_(False)


class ImageEncoder(nn.Module):
    """Pixel values (batch, 3, height, width) to unit features (batch, d), by a model without adapters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return unit_image_embeds(self.model, pixel_values)


class Head(nn.Module):
    """Unit features (batch, d) to calibrated probabilities (batch, C), or to their log-scores."""

    def __init__(self, classifier: Classifier, probabilities: bool = True) -> None:
        super().__init__()
        self.classifier = copy.deepcopy(classifier).cpu()
        self.temperature, self.probabilities = classifier.temperature, probabilities
        # What a classifier computes from its buffers once must not become a part of the graph.
        self.classifier.logits(torch.eye(1, classifier.embed_dim))

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        logits = self.classifier.logits(embedding) / self.temperature
        return logits.softmax(dim=1) if self.probabilities else logits
