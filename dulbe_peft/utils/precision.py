"""Products that stay in full precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which an enclosing autocast does not turn products on `tensor`'s device into half precision."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
