"""Make the parts of an export: the model with merged adapter, and the classifier as function, tensors and facts."""

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import random_features, same_scores
from dulbe_peft.classifiers.registry import spec
from dulbe_peft.data.names import format_prompts
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.training.state import LearnerState

CARDS = Path(__file__).parents[1] / "assets" / "cards"  # templates of README.md and of the code of exports
SHARES = (0.01, 0.05, 0.1)  # shares of known images that a rejection threshold may reject


def merged_model(state: LearnerState) -> Any:
    """Return a copy of the model on the CPU, with W_0 + dW in place of W_0, as a plain transformers model."""
    model: Any = copy.deepcopy(state.model)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    return model.cpu().eval().requires_grad_(False)


class Head(nn.Module):
    """Map unit features (batch, d) to probabilities (batch, C), or to their log-scores."""

    def __init__(self, classifier: Classifier, probabilities: bool = True) -> None:
        super().__init__()
        # A formula contains the results of one-time computations, which therefore do not become part of the graph.
        function: Callable[..., torch.Tensor]
        try:
            function, tensors = classifier.formula()
        except ValueError:  # the scores are not linear, and the class defines no formula
            self.classifier = copy.deepcopy(classifier).cpu()
            function, tensors = self.classifier.logits, {}
        self.function, self.names = function, list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().float().cpu().clone())
        self.temperature, self.probabilities = classifier.temperature, probabilities

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        logits = self.function(embedding, **{name: getattr(self, name) for name in self.names}) / self.temperature
        return logits.softmax(dim=1) if self.probabilities else logits


def choose_classifier(state: LearnerState, name: str | None) -> Classifier:
    """Return the classifier of this name, or the first one, which `predict` uses, if `name` is None."""
    if not state.tasks:
        raise ValueError("the learner has learned no class yet: there is nothing to export")
    if name is not None and name not in state.classifiers:
        raise ValueError(f"the learner has no classifier {name!r}; its classifiers are {', '.join(state.classifiers)}")
    return state.classifier if name is None else state.classifiers[name]


def class_facts(state: LearnerState, classifier: Classifier) -> dict[str, object]:
    """Return class names, prompts, and rejection thresholds as plain data.

    The key of a threshold is the share of known images that it rejects.
    """
    facts: dict[str, Any] = {"class_names": classifier.class_names, "classifier": spec(classifier)}
    if has_text(state.base):
        args = state.args
        prompts = [
            [*state.class_texts.get(name, ())] or format_prompts(name, args.templates, args.class_name_style)
            for name in classifier.class_names
        ]
        facts["prompts"] = prompts if any(len(group) > 1 for group in prompts) else [text for (text,) in prompts]
    for share in SHARES:
        with suppress(ValueError):  # there are too few images for a threshold with this share
            facts.setdefault("reject_below", {})[str(share)] = classifier.rejection_threshold(share)
    return facts


@torch.no_grad()
def checked_formula(classifier: Classifier) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Return the name and source of the classifier's `formula`, and its tensors with the scores' temperature.

    Raises:
        ValueError: If the formula gives other scores than `logits`, or is not a function with a source.
    """
    function, tensors = classifier.formula()
    features = random_features(classifier.embed_dim, classifier.device)
    if not same_scores(function(features, **tensors), classifier.logits(features)):
        raise ValueError(f"formula() of the {classifier.name!r} classifier gives different scores from its logits()")
    with suppress(OSError, TypeError):
        source = inspect.getsource(function)
        if source.startswith("def "):
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
            return function.__name__, source, tensors | {"temperature": torch.tensor(classifier.temperature)}
    raise ValueError(
        f"formula() of {classifier.name!r} must return a function defined at the top of a module, got {function!r}"
    )
