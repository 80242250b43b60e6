"""Plain LoRA in the text tower: appendix, "Training schedule and text adaptation"."""

import math
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer, temporarily
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.linear import Updates, dense


class _Scaled(NamedTuple):
    adapter: str
    scale: float


class TextLoraLinear(DualModeLayer):
    """A linear layer of the text tower with one plain LoRA for all tasks: y = W x + (text_alpha / text_rank) B A x."""

    adapter_layer_names = ("dulbe_text_A", "dulbe_text_B")
    other_param_names = ("scaling",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: DualModeLoraConfig, key: str = "") -> None:
        super().__init__(base_layer)
        self.scaling: dict[str, float] = {}
        self.dulbe_text_A = nn.ParameterDict({})
        self.dulbe_text_B = nn.ParameterDict({})
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: DualModeLoraConfig, key: str = "") -> None:
        """Add `adapter_name` with a random A, and with B = 0 or, if `init_weights` is False, a random B."""
        self.scaling[adapter_name] = config.text_alpha / config.text_rank
        down = nn.init.xavier_uniform_(torch.empty(config.text_rank, self.in_features, dtype=torch.float32))
        up = torch.zeros(self.out_features, config.text_rank, dtype=torch.float32)
        if not config.init_weights:
            nn.init.kaiming_uniform_(up, a=math.sqrt(5))
        self.dulbe_text_A[adapter_name] = nn.Parameter(down)
        self.dulbe_text_B[adapter_name] = nn.Parameter(up)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def check_scale(self, adapter: str, config: DualModeLoraConfig) -> None:
        """Raise an error if a configuration has another scale than the layer has."""
        scale = config.text_alpha / config.text_rank if config.text_rank else 0.0
        if scale != self.scaling[adapter]:
            raise ValueError(
                f"the configuration has text_alpha / text_rank = {scale}, but the adapter {adapter!r} of the model "
                f"has {self.scaling[adapter]}, so its text LoRA would act otherwise: use the same values, or another "
                "name"
            )

    def updates(self, adapter: str) -> Updates:
        scale = self.scaling[adapter] * (1.0 if self._held is None else self._held.scale)
        return [(self.dulbe_text_A[adapter].T, scale * self.dulbe_text_B[adapter])]

    def get_delta_weight(self, adapter: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.scaling[adapter] * dense((self.dulbe_text_A[adapter].T, self.dulbe_text_B[adapter]), dtype)

    @torch.no_grad()
    def scale_update(self, adapter: str, scale: float) -> None:
        """Multiply B, and so the update, by `scale`."""
        self.dulbe_text_B[adapter].mul_(scale)

    def scaled(self, adapter: str, scale: float) -> AbstractContextManager[None]:
        return temporarily(self, "_held", _Scaled(adapter, scale))

    @property
    def acts_as_saved(self) -> bool:
        return self._held is None or self._held.scale == 1
