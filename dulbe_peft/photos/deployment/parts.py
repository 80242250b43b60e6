"""What exports are made of: the model with its adapter folded in, and a classifier as function, tensors and facts."""

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

CARDS = Path(__file__).parents[1] / "assets" / "cards"  # templates of what lies beside an export
SHARES = (0.01, 0.05, 0.1)  # of false alarms


def merged_model(state: LearnerState) -> Any:
    """A copy of the model on the CPU with W_0 + dW in place of W_0, a plain model of transformers."""
    model: Any = copy.deepcopy(state.model)
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    return model.cpu().eval().requires_grad_(False)


class Head(nn.Module):
    """Unit features (batch, d) to calibrated probabilities (batch, C), or to their log-scores."""

    def __init__(self, classifier: Classifier, probabilities: bool = True) -> None:
        super().__init__()
        # A formula has the result of what a classifier computes once, so that it does not become a part of the graph.
        function: Callable[..., torch.Tensor]
        try:
            function, tensors = classifier.formula()
        except ValueError:  # scores that are not linear, of a class without a formula of its own
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
    """The classifier of this name; None: the first one, which `predict` uses."""
    if not state.tasks:
        raise ValueError("the learner has learned no class yet: there is nothing to export")
    if name is not None and name not in state.classifiers:
        raise ValueError(f"the learner has no classifier {name!r}; its classifiers are {', '.join(state.classifiers)}")
    return state.classifier if name is None else state.classifiers[name]


def class_facts(state: LearnerState, classifier: Classifier) -> dict[str, Any]:
    """What goes with the probabilities, as plain data: names, prompts, and the thresholds by share of false alarms."""
    facts: dict[str, Any] = {"class_names": classifier.class_names, "classifier": spec(classifier)}
    if has_text(state.base):
        args = state.args
        prompts = [
            [*state.class_texts.get(name, ())] or format_prompts(name, args.templates, args.class_name_style)
            for name in classifier.class_names
        ]
        facts["prompts"] = prompts if any(len(group) > 1 for group in prompts) else [text for (text,) in prompts]
    for share in SHARES:
        with suppress(ValueError):  # too few images for this share
            facts.setdefault("reject_below", {})[str(share)] = classifier.rejection_threshold(share)
    return facts


@torch.no_grad()
def checked_formula(classifier: Classifier) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Name and source of the classifier's `formula`, checked, and its tensors with the temperature of the scores."""
    function, tensors = classifier.formula()
    features = random_features(classifier.embed_dim, classifier.device)
    if not same_scores(function(features, **tensors), classifier.logits(features)):
        raise ValueError(f"formula() of the {classifier.name!r} classifier gives other scores than its logits()")
    with suppress(OSError, TypeError):
        source = inspect.getsource(function)
        if source.startswith("def "):
            found = {name: tensor.cpu() for name, tensor in tensors.items()}
            return function.__name__, source, found | {"temperature": torch.tensor(classifier.temperature)}
    raise ValueError(
        f"formula() of {classifier.name!r} must give a function that stands in a module, got {function!r}"
    )
