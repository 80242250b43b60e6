"""Prompts: trained keys and values, or tokens, that stand beside those of an image in a frozen tower.

    prefix   in a block's attention, k' = [p_k; k] and v' = [p_v; v] along the tokens, after the projections, and split
             into heads like k and v; queries, and so the number of tokens, stay as they are
    tokens   [class token; p; patches], inserted after the position embeddings, so that p has none
    query q  the feature of the image by the untouched model, by which prompts are selected: it is computed once, and
             the user's feature store has it

The tower and the text tower are frozen, and every image selects its own prompts: one image has the same feature alone
and in any batch. The head is one of two:

    head=text     the names of the classes: softmax of tau z . e_c
    head=linear   a linear map of sqrt(d) z with one row for each class, trained together with the prompts

Both are trained with a cross-entropy over the classes of the task, and predict among all classes. The classifier
`linear_head` keeps the rows of the linear head.

Prompts and keys start uniform between 0 and `start`. The authors' JAX code has 0.01, L2P++ has 1, and ports to PyTorch
draw between -1 and 1. Large prompts change the features before anything is trained.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.encoders.encoding import Encoding, vision_modules
from dulbe_peft.encoders.loading import embed_dim, unit_image_embeds
from dulbe_peft.papers.linear_head import head_start, linear_head
from dulbe_peft.strategies.base import Memory, NewTask, Step, Strategy
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.processes import used_by_all
from dulbe_peft.utils.settings import Positive

NAME = "dulbe_prefix"  # transformers' name of the attention with prefixes
Pairs = dict[int, tuple[Tensor, Tensor]]  # number of a block -> p_k and p_v, each (n, length, width)
Prefixes = Mapping[nn.Module, tuple[Tensor, Tensor]]  # attention -> p_k and p_v, each (n, length, width)
_prefixes: ContextVar[Prefixes] = ContextVar("prefixes", default=MappingProxyType({}))
_lock = threading.Lock()
# id of a configuration -> number of blocks that changed it, and its attention before.
_changed: dict[int, tuple[int, str]] = {}


def blocks_of(clip: nn.Module) -> list[Any]:
    """Return the attention of every block of the vision tower, in order."""
    return [module for _, module in vision_modules(clip) if hasattr(module, "is_causal") and hasattr(module, "config")]


def width_of(clip: nn.Module) -> int:
    """Return the width of the vision tower's tokens."""
    return int(blocks_of(clip)[0].config.hidden_size)


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object) -> Any:
    """Call the attention that the model has otherwise, with the prefix of this module, if it has one now."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    usual = sys.modules[type(module).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(_changed[id(module.config)][1], usual)
    if module in (prefixes := _prefixes.get()):
        heads = (each.unflatten(2, (key.shape[1], -1)).transpose(1, 2).to(key.dtype) for each in prefixes[module])
        key, value = (torch.cat(pair, dim=2) for pair in zip(heads, (key, value), strict=True))
        if mask is not None:
            mask = F.pad(mask, (key.shape[2] - mask.shape[-1], 0), value=float(mask.dtype == torch.bool))
    return attend(module, query, key, value, mask, **options)


@contextmanager
def prefixed(clip: nn.Module, prefixes: Pairs) -> Iterator[None]:
    """Put p_k and p_v, each (n, length, width), before keys and values of these blocks while the block runs.

    Other threads and asyncio tasks that use the model are not affected.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    blocks = blocks_of(clip)
    configs = {id(block.config): block.config for block in blocks}.values()
    token = _prefixes.set({blocks[number]: pair for number, pair in prefixes.items()})
    with ExitStack() as stack:
        stack.callback(_prefixes.reset, token)
        for config in configs:
            stack.enter_context(_with_attention(config))
        yield


@contextmanager
def _with_attention(config: Any) -> Iterator[None]:
    with _lock:
        count, before = _changed.get(id(config), (0, config._attn_implementation))
        _changed[id(config)] = count + 1, before
        config._attn_implementation = NAME
    try:
        yield
    finally:
        with _lock:
            count, before = _changed.pop(id(config))
            if count > 1:
                _changed[id(config)] = count - 1, before
            else:
                config._attn_implementation = before


def cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the cosines, (n, m), of queries, (n, d), and keys, (m, d)."""
    return F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T


class Prompted(Encoding):
    """Encode images with the prefixes that a strategy selects for each of them."""

    queries = True

    def __init__(self, strategy: "PromptStrategy", tensors: Mapping[str, Tensor], task: int | None = None) -> None:
        super().__init__(f"{strategy} {task}", tensors)
        self.strategy, self.task = strategy, task  # the number of the task in training, or None

    def image_embeds(self, clip: Any, pixels: Tensor, queries: Tensor | None) -> Tensor:
        assert queries is not None
        with prefixed(clip, self.strategy.prefixes(self.tensors, queries, self.task)):
            return unit_image_embeds(clip, pixels)


@dataclass(frozen=True)
class PromptStrategy(Strategy):
    """Base of the strategies with prompts: they define the tensors of a new task, and which prompts an image gets."""

    head: Literal["text", "linear"] = "text"
    start: Positive = 0.01

    trains_adapter = False
    memory_kind = dict
    classifiers = ("text", "bayes")
    encoder_class: ClassVar[type[Prompted]] = Prompted

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head == "linear":  # the default of a learner
            object.__setattr__(self, "classifiers", ("linear_head", "bayes"))

    @property
    def needs_names(self) -> bool:
        return self.head == "text"

    def begin(self, task: NewTask, old: Mapping[str, Tensor], draw: "Draw") -> dict[str, Tensor]:
        """Return the tensors to train, by name, from those of the tasks before."""
        raise NotImplementedError

    def joined(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all prompts and keys: those of the tasks before and those of `begin`."""
        return {**old, **new}

    def prefixes(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int | None) -> Pairs:
        """Return the prefixes for queries, (n, d); `task` is set in training."""
        raise NotImplementedError

    def term(self, tensors: Mapping[str, Tensor], queries: Tensor, task: int) -> Tensor:
        """Return a scalar that is added to the cross-entropy; `queries`, (n, d), are those of the batch."""
        raise NotImplementedError

    def encoding(self, memory: Memory | None) -> Encoding | None:
        if not isinstance(memory, dict):
            return None
        return self.encoder_class(self, memory)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[Tensor]]:
        assert task.encoder is not None and task.images is not None
        clip, old = task.encoder.clip, task.memory or {}
        assert isinstance(old, dict)
        draw = Draw(task.generator(salt=2), task.encoder.device, self.start)
        new = {name: tensor.requires_grad_() for name, tensor in self.begin(task, old, draw).items()}
        if self.head == "linear":
            rows = head_start(draw.generator, len(task.images.images.class_names), embed_dim(clip))
            new["head"] = rows.to(task.encoder.device).requires_grad_()
        task.notes["new"] = new
        with task.encoder.encoding_by(_Training(self, task)):
            yield list(new.values())

    def loss(self, task: NewTask, step: Step) -> Tensor:
        new, queries = task.notes["new"], step.queries
        assert queries is not None
        if self.head == "linear":
            step.task_loss = F.cross_entropy(linear_head(step.features, used_by_all(new["head"])), step.labels)
        tensors = {name: used_by_all(tensor) for name, tensor in self._all(task).items()}
        return step.task_loss + self.term(tensors, queries, task.index)

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        return {name: tensor.detach().contiguous() for name, tensor in self._all(task).items()}

    def linear_head(self, task: NewTask) -> Tensor | None:
        head = task.notes["new"].get("head")
        return None if head is None else head.detach()

    def _all(self, task: NewTask) -> dict[str, Tensor]:
        assert task.memory is None or isinstance(task.memory, dict)
        new = {name: tensor for name, tensor in task.notes["new"].items() if name != "head"}
        return self.joined(task.memory or {}, new)


class _Training(Prompted):
    """The encoding of a task in training, whose tensors change with every step."""

    def __init__(self, strategy: PromptStrategy, task: NewTask) -> None:
        self.new_task = task
        super().__init__(strategy, {}, task.index)

    def image_embeds(self, clip: object, pixels: Tensor, queries: Tensor | None) -> Tensor:
        now = self.strategy.encoder_class(self.strategy, self.strategy._all(self.new_task), self.task)
        return now.image_embeds(clip, pixels, queries)


@dataclass(frozen=True)
class Draw:
    """Draw the start of prompts and keys."""

    generator: torch.Generator
    device: torch.device
    start: float

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers between 0 and `start`."""
        return self.start * torch.rand(shape, generator=self.generator).to(self.device)
