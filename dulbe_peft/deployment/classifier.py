"""A learner's classifier as tensors, a function and plain facts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from dulbe_peft.classifiers import Classifier, spec
from dulbe_peft.classifiers.formula import random_features, same_scores
from dulbe_peft.data.names import format_prompts
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.training.state import LearnerState

FACTS_FILE = "classifier.json"
SHARES = (0.01, 0.05, 0.1)  # of false alarms


def choose_classifier(state: LearnerState, name: str | None) -> Classifier:
    """The classifier of this name; None: the first one, which `predict` uses."""
    if not state.tasks:
        raise ValueError("the learner has learned no class yet: there is nothing to export")
    if name is not None and name not in state.classifiers:
        raise ValueError(f"the learner has no classifier {name!r}; its classifiers are {', '.join(state.classifiers)}")
    return state.classifiers[name or next(iter(state.classifiers))]


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
def checked_formula(classifier: Classifier) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]:
    """The classifier's `formula`, after a check that it gives the classifier's scores and that a card can show it."""
    function, tensors = classifier.formula()
    features = random_features(classifier.embed_dim, classifier.device)
    if not same_scores(function(features, **tensors), classifier.logits(features)):
        raise ValueError(f"formula() of the {classifier.name!r} classifier gives other scores than its logits()")
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ""
    if not source.startswith("def "):
        raise ValueError(
            f"formula() of the {classifier.name!r} classifier must give a function that stands in a module, got "
            f"{function!r}"
        )
    return function, tensors


def head_tensors(classifier: Classifier, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the function of the scores needs, and the temperature that divides them."""
    return {name: row.cpu() for name, row in tensors.items()} | {"temperature": torch.tensor(classifier.temperature)}
