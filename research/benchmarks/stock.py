"""Stock LoRA for comparison: PEFT's LoRA on the same layers, with cross-entropy, one backward pass and Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from research.benchmarks.literal import LiteralLearner
from research.benchmarks.models import LOGIT_SCALE, encode


def lora(tower: Any, rank: int = 9) -> Any:
    """Return a vision tower, or both towers, with LoRA of this rank on the layers that DuLBE adapts."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["k_proj", "v_proj", "fc1", "fc2"])
    return get_peft_model(tower, config).train()


def adam(model: Any) -> torch.optim.Optimizer:
    """Return Adam for the trainable parameters."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], text: Any) -> None:
    """Make a training step with given text embeddings, (classes, d)."""
    pixels, labels = batch
    loss = F.cross_entropy(LOGIT_SCALE * encode(model, pixels) @ text.T, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class LoraLearner(LiteralLearner):
    """Learns whole tasks with LoRA in both towers: epochs with Adam, then a pass for the class means."""

    def adapted(self, clip: Any) -> Any:
        return lora(clip)

    def learn_task(self, pixels: torch.Tensor, labels: torch.Tensor, names: Sequence[str]) -> None:
        data = TensorDataset(pixels, labels)
        with self.profile.phase("train"):
            optimizer = adam(self.clip)
            for _ in range(self.epochs):
                for images, targets in self._batches(data, shuffle=True):
                    features = self._image_embeds(self.clip, images)
                    F.cross_entropy(self.scale * features @ self._text_embeds(names).T, targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        self.names += names
        with self.profile.phase("close"), torch.no_grad():
            self._prototypes(data, len(names))
            self.text = self._text_embeds(self.names)
