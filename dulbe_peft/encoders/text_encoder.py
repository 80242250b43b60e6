"""Encode class names with the text tower: choose the prompts, the process and the precision."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.nn import functional as F
from transformers import PreTrainedModel

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.names import format_prompts
from dulbe_peft.encoders import loading
from dulbe_peft.utils import processes

Texts = Mapping[str, Sequence[str]]
NO_TEXTS: Texts = MappingProxyType({})


class TextEncoder:
    """Encode class names with a dual encoder's text tower, in the prompts and precision that `args` ask for."""

    def __init__(self, clip: PreTrainedModel, processor: Any, args: LearnerArguments, device: torch.device) -> None:
        self.clip = clip
        self.processor = processor
        self.args = args
        self.device = device
        self._checked_tokens: dict[str, tuple[int, ...]] = {}  # tokens of each prompt that was checked

    @property
    def embed_dim(self) -> int:
        """Width d of the features."""
        return loading.embed_dim(self.clip)

    def autocast(self) -> torch.autocast:
        """Return a context in the requested precision. accelerate's setting would hold for the whole process."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.args.precision == "bfloat16")

    def prompts(self, name: str, texts: Texts = NO_TEXTS, training: bool = False) -> list[str]:
        """Return the prompts of a class: those in `texts`, or else its name in every template.

        In training there is one: `training_template` with the class name, or else the first of the prompts.
        """
        args, templates = self.args, self.args.templates
        if training and args.training_template is not None:
            texts, templates = NO_TEXTS, (args.training_template,)
        prompts = [*texts.get(name, ())] or format_prompts(name, templates, args.class_name_style)
        return prompts[:1] if training else prompts

    def tokens(self, names: Sequence[str], texts: Texts = NO_TEXTS) -> dict[str, torch.Tensor]:
        """Return the text tower's inputs for each class in training."""
        return self._tokenized([self.prompts(name, texts, training=True)[0] for name in names])

    def _tokenized(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        return send_to_device(loading.tokenize(self.processor, prompts, self.clip), self.device)

    def check_prompts(self, names: Sequence[str], texts: Texts = NO_TEXTS) -> None:
        """Raise a `ValueError` if the text tower cannot encode a prompt, or two classes have the same prompts."""
        distinct: dict[str, None] = {}
        for training in (False, True):
            owners: dict[frozenset[str], str] = {}
            for name in names:
                prompts = self.prompts(name, texts, training)
                other = owners.setdefault(frozenset(prompts), name)
                if other != name:
                    raise ValueError(f"classes {other!r} and {name!r} give the same prompt {prompts[0]!r}: rename one")
                distinct |= dict.fromkeys(prompts)
        new = [prompt for prompt in distinct if prompt not in self._checked_tokens]
        self._checked_tokens |= zip(new, loading.prompt_tokens(self.processor, new, self.clip), strict=True)
        loading.check_distinct(distinct, (self._checked_tokens[prompt] for prompt in distinct))

    def token_embeds(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the unit text embeddings of tokenized prompts, (prompts, d). Each process encodes a share."""
        total = len(tokens["input_ids"])
        rows = processes.padded_shard(range(total))
        if len(rows) < total:
            tokens = {name: tensor[rows] for name, tensor in tokens.items()}
        with self.autocast():
            return processes.gather_rows(self.unit_text_embeds(tokens), total)

    def unit_text_embeds(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the unit text embeddings of this process's prompts, (prompts, d)."""
        return loading.unit_text_embeds(self.clip, tokens)

    def text_embeds(self, names: Sequence[str], texts: Texts = NO_TEXTS, training: bool = False) -> torch.Tensor:
        """Return one unit text embedding for each class, (classes, d): the normalised mean over its prompts."""
        return mean_texts(len(names), *self.each_text_embeds(names, texts, training))

    @torch.no_grad()
    def each_text_embeds(
        self, names: Sequence[str], texts: Texts = NO_TEXTS, training: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unit embeddings of all prompts, (T, d), class by class, and the class of each prompt, (T,)."""
        prompts = [self.prompts(name, texts, training) for name in names]
        place = {prompt: row for row, prompt in enumerate(dict.fromkeys(p for group in prompts for p in group))}
        each, distinct = [], list(place)
        for start in range(0, len(distinct), 256):
            each.append(self.token_embeds(self._tokenized(distinct[start : start + 256])))
        embeds = torch.cat(each)
        owners = torch.tensor([row for row, group in enumerate(prompts) for _ in group], device=embeds.device)
        return embeds[[place[prompt] for group in prompts for prompt in group]], owners


@torch.no_grad()
def mean_texts(classes: int, rows: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Return the normalised mean of each class's text embeddings, (classes, d).

    Args:
        classes: Number of classes.
        rows: Unit text embeddings, (T, d), from `each_text_embeds`.
        owners: The class of each row, (T,).
    """
    if len(rows) == classes:
        return rows
    return F.normalize(torch.zeros(classes, rows.shape[1]).to(rows).index_add(0, owners, rows), dim=1)
