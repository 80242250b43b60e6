"""Class names on their way through the text tower: in which prompts, process and precision."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.nn import functional as F

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.names import format_prompts
from dulbe_peft.encoders import loading
from dulbe_peft.utils import processes

Texts = Mapping[str, Sequence[str]]
NO_TEXTS: Texts = MappingProxyType({})


class TextEncoder:
    """The text tower of a dual encoder over class names, in the prompts and precision of `args`."""

    def __init__(self, clip: Any, processor: Any, args: LearnerArguments, device: torch.device) -> None:
        self.clip = clip
        self.processor = processor
        self.args = args
        self.device = device
        self._known: dict[str, tuple[int, ...]] = {}  # tokens of prompts

    @property
    def embed_dim(self) -> int:
        """d, width of the features."""
        return loading.embed_dim(self.clip)

    def autocast(self) -> torch.autocast:
        """Half precision where it was asked for; accelerate's own setting is one for the whole Python process."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.args.precision == "bfloat16")

    def prompts(self, name: str, texts: Texts = NO_TEXTS, training: bool = False) -> list[str]:
        """The texts of a class: those of `texts`, or else its name in every template; in training one text alone."""
        args, templates = self.args, self.args.templates
        if training and args.training_template is not None:
            texts, templates = NO_TEXTS, (args.training_template,)
        found = [*texts.get(name, ())] or format_prompts(name, templates, args.class_name_style)
        return found[:1] if training else found

    def tokens(self, names: Sequence[str], texts: Texts = NO_TEXTS) -> dict[str, torch.Tensor]:
        """What the text tower takes of each class in training."""
        return self._tokenized([self.prompts(name, texts, training=True)[0] for name in names])

    def _tokenized(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        return send_to_device(loading.tokenize(self.processor, prompts, self.clip), self.device)

    def check_prompts(self, names: Sequence[str], texts: Texts = NO_TEXTS) -> None:
        """Raise a `ValueError` where a text is of no use to the text tower, or two classes have the same texts."""
        distinct: dict[str, None] = {}
        for training in (False, True):
            owners: dict[frozenset[str], str] = {}
            for name in names:
                prompts = self.prompts(name, texts, training)
                other = owners.setdefault(frozenset(prompts), name)
                if other != name:
                    raise ValueError(f"classes {other!r} and {name!r} give the same prompt {prompts[0]!r}: rename one")
                distinct |= dict.fromkeys(prompts)
        new = [prompt for prompt in distinct if prompt not in self._known]  # those of old classes are known
        self._known |= zip(new, loading.prompt_tokens(self.processor, new, self.clip), strict=True)
        loading.check_distinct(distinct, (self._known[prompt] for prompt in distinct))

    def token_embeds(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """Unit text embeddings of tokenized prompts, (prompts, d); each process encodes its rows."""
        total = len(tokens["input_ids"])
        rows = processes.padded_shard(range(total))
        if len(rows) < total:
            tokens = {name: tensor[rows] for name, tensor in tokens.items()}
        with self.autocast():
            return processes.gather_rows(loading.unit_text_embeds(self.clip, tokens), total)

    def text_embeds(self, names: Sequence[str], texts: Texts = NO_TEXTS, training: bool = False) -> torch.Tensor:
        """Unit text embeddings of classes, (classes, d): the mean over the texts of each, or that of training."""
        return mean_texts(len(names), *self.each_text_embeds(names, texts, training))

    @torch.no_grad()
    def each_text_embeds(
        self, names: Sequence[str], texts: Texts = NO_TEXTS, training: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit embeddings of all texts of classes, (T, d), class by class, and the class of each, (T,)."""
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
    """The direction of the mean over the texts of each class, (classes, d), from what `each_text_embeds` gives."""
    if len(rows) == classes:
        return rows
    return F.normalize(torch.zeros(classes, rows.shape[1]).to(rows).index_add(0, owners, rows), dim=1)
