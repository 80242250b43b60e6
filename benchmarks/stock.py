"""What a user would run instead: PEFT's own LoRA on the same layers, cross-entropy, one backward pass, Adam."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from benchmarks.models import LOGIT_SCALE, encode


def lora(tower: Any, rank: int = 9) -> Any:
    """A vision tower with LoRA of this rank on the layers that the method adapts."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["k_proj", "v_proj", "fc1", "fc2"])
    return get_peft_model(tower, config).train()


def adam(model: Any) -> torch.optim.Optimizer:
    """Adam over what is trained."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], text: Any) -> None:
    """One training step; text embeddings (classes, d) are given."""
    pixels, labels = batch
    loss = F.cross_entropy(LOGIT_SCALE * encode(model, pixels) @ text.T, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
