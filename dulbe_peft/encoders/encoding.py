"""Change how a model encodes images and texts, for strategies whose tensors act in every pass.

A strategy returns an `Encoding` from its hook `encoding`. The encoder calls it instead of the model, and its `digest`
becomes part of the encoder's key.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.encoders.loading import embed_dim, encoder_of, unit_image_embeds, unit_text_embeds
from dulbe_peft.utils.tensors import tensors_digest

Hook = Callable[..., Any]


class Encoding:
    """How a strategy encodes images and texts. This base class encodes them as the model does.

    Args:
        settings: Everything besides the tensors by which the features differ, as text.
        tensors: Named tensors by which the features differ.
    """

    queries: ClassVar[bool] = False  # whether images are encoded from their features by the untouched model
    names: ClassVar[bool] = True  # whether texts can be compared with the features, or with their projection

    def __init__(self, settings: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.settings, self.tensors = settings, tensors

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything by which the features differ from those of the model."""
        text = f"{type(self).__name__} {self.settings} {tensors_digest(self.tensors)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def image_embeds(self, clip: object, pixels: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """Return unit image features, (n, width) in float32.

        `queries`, (n, d), are the unit features of the same images by the untouched model, if `queries` of the class
        is set.
        """
        return unit_image_embeds(clip, pixels)

    def text_embeds(self, clip: object, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return unit text embeddings, (prompts, width) in float32, of the output of `tokenize`.

        If `names` is not set, they are those of the model, which cannot be compared with the image features.
        """
        return unit_text_embeds(clip, tokens)

    def width(self, clip: PreTrainedModel) -> int:
        """Return the width of the image features."""
        return embed_dim(clip)

    def projection(self, clip: PreTrainedModel) -> torch.Tensor | None:
        """Return W, (d, width), if texts, (n, d), are compared with W u / |W u| of features u; None: with u."""
        return None


class Unprojected(Encoding):
    """Encode images with what the projection into the space of texts reads: the pooled output of the vision tower."""

    def __init__(self) -> None:
        super().__init__("", {})

    def image_embeds(self, clip: object, pixels: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        read: list[torch.Tensor] = []
        with hooked((projection_of(clip).register_forward_pre_hook, lambda _, given: read.append(given[0]))):
            unit_image_embeds(clip, pixels)
        return F.normalize(read[0].float(), dim=-1)

    def width(self, clip: PreTrainedModel) -> int:
        return int(projection_of(clip).in_features)

    def projection(self, clip: PreTrainedModel) -> torch.Tensor | None:
        layer = projection_of(clip)
        if isinstance(layer, (BaseTunerLayer, ModulesToSaveWrapper)) or layer.bias is not None:
            raise ValueError(
                "features is 'unprojected', but the projection that names need has a bias or an adapter: leave "
                "visual_projection out of the adapter's modules, or features at 'projected'"
            )
        return layer.weight.detach().float()


def projection_of(clip: object) -> Any:
    """Return the linear layer that projects image features, or raise a `ValueError` if the model has none."""
    projection = getattr(clip, "visual_projection", None)
    if projection is None:
        raise ValueError(
            f"features is 'unprojected', but a {type(clip).__name__} does not project its image features: leave "
            "features at 'projected', which is the same"
        )
    return projection


def encoding_of(args: LearnerArguments) -> Encoding | None:
    """Return the encoding that the settings ask for; None: as the model does."""
    return Unprojected() if args.features == "unprojected" else None


@contextmanager
def untouched(clip: nn.Module) -> Iterator[None]:
    """Use the model without its adapters while the block runs.

    Raises:
        ValueError: If an adapter is merged into the base weights.
    """
    parts: list[Any] = [m for m in clip.modules() if isinstance(m, (BaseTunerLayer, ModulesToSaveWrapper))]
    if any(getattr(part, "merged_adapters", None) for part in parts):
        raise ValueError("an adapter is merged into the base weights: call unmerge_adapter() first")
    before = [part._disable_adapters for part in parts]
    try:
        for part in parts:
            part._disable_adapters = True
        yield
    finally:
        for part, disabled in zip(parts, before, strict=True):
            part._disable_adapters = disabled


def vision_modules(clip: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every part of the model outside its text tower."""
    text = encoder_of(clip).text_tower
    for name, module in clip.named_modules():
        if text is None or not (name == text or name.startswith(f"{text}.")):
            yield name, module


_running: ContextVar[frozenset[object]] = ContextVar("running", default=frozenset())  # the blocks of `hooked`


@contextmanager
def hooked(*hooks: tuple[Callable[[Hook], RemovableHandle], Hook]) -> Iterator[None]:
    """Call hooks while the block runs. Each one comes after the method of a module that registers it.

    Other threads and asyncio tasks that use the model are not affected.
    """
    block = object()

    def here(hook: Hook) -> Hook:
        return lambda *given: hook(*given) if block in _running.get() else None

    with ExitStack() as stack:
        stack.callback(_running.reset, _running.set(_running.get() | {block}))
        for register, hook in hooks:
            stack.callback(register(here(hook)).remove)
        yield
