"""Small networks beside the MLP of every block, which read its tokens x, (n, tokens, width), before the layer norm.

    x' = x + MLP(norm(x)) + update(x)       x: the tokens after the attention, with its residual

Where a block scales the output of its MLP, the update is not scaled.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.encoders.encoding import hooked
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.papers.fitting import uniform

_MLP = re.compile(r"(.*layers?\.\d+)\.mlp$")
_NORMS = ("layer_norm2", "layernorm_after", "norm2")  # transformers' names of the norm whose output an MLP reads


def mlp_blocks(clip: nn.Module, text: bool = False) -> list[tuple[nn.Module, nn.Module]]:
    """Return each block of the vision tower, or of the text tower with `text`, and the norm before its MLP."""
    tower = encoder_of(clip).text_tower
    names = [match[1] for name, _ in clip.named_modules() if (match := _MLP.search(name))]
    blocks = [
        clip.get_submodule(name) for name in names if text == (tower is not None and name.startswith(f"{tower}."))
    ]
    if not blocks:
        which = "text" if text else "vision"
        raise ValueError(f"the {which} tower of a {type(clip).__name__} has no MLP of its own in each block")
    return [(block, next(getattr(block, name) for name in _NORMS if hasattr(block, name))) for block in blocks]


def width_of_mlps(clip: nn.Module, text: bool = False) -> int:
    """Return the width of the tokens that the MLPs read and write."""
    config: Any = clip.config
    part = getattr(config, "text_config" if text else "vision_config", config)
    return int(part.hidden_size)


@contextmanager
def beside_mlps(
    blocks: Sequence[tuple[nn.Module, nn.Module]], update: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """Add `update(number, x)` to the output of each block while the context is active."""
    read: dict[int, Tensor] = {}

    def keep(number: int) -> Callable[..., None]:
        return lambda _, given: read.update({number: given[0]})

    def add(number: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: object, result: Any) -> Any:
            tokens, *rest = result if isinstance(result, tuple) else (result,)
            tokens = tokens + update(number, read.pop(number)).to(tokens.dtype)
            return (tokens, *rest) if isinstance(result, tuple) else tokens

        return hook

    hooks: list[Any] = []
    for number, (block, norm) in enumerate(blocks):
        hooks += [(norm.register_forward_pre_hook, keep(number)), (block.register_forward_hook, add(number))]
    with hooked(*hooks):
        yield


def bottleneck(
    x: Tensor, down: Tensor, up: Tensor, down_bias: Tensor, up_bias: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Return U relu(D x + b) + c for every token.

    Args:
        x: (..., width).
        down: D, (r, width).
        up: U, (width, r).
        down_bias: b, (r,).
        up_bias: c, (width,).
        dropout: Share of the hidden values that are set to 0; the others are scaled up.
    """
    hidden = F.dropout(F.linear(x, down, down_bias).relu(), dropout, training=dropout > 0)
    return F.linear(hidden, up, up_bias)


def started(generator: torch.Generator, *shape: int) -> Tensor:
    """Return down-projections, (..., r, width), uniform between -1 / sqrt(width) and 1 / sqrt(width)."""
    return uniform(generator, shape[-1], *shape)
