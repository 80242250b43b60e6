"""What a learner asks of a model before it works with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers import Classifier, make_classifiers, without_text
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names, check_class_texts
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import check_encoder, embed_dim, has_text, logit_scale
from dulbe_peft.strategies import Strategy
from dulbe_peft.training.state import LearnerState


def check_adapter_name(model: Any) -> None:
    """A learner trains, saves and loads the adapter that PEFT calls "default"; another one beside it is left alone."""
    active = list(model.base_model.active_adapters)
    if active != ["default"]:
        raise ValueError(
            f"the model's active adapters are {active}: a learner works on the one named 'default' alone; call "
            "set_adapter('default') on the model"
        )
    if not model.base_model.dual_mode_layers():
        raise ValueError(
            "the model's layers have no adapter any more, as unload() and merge_and_unload() leave it: load the saved "
            "learner again, and take the adapter out of a copy of the model (copy.deepcopy)"
        )


def check_trainable(state: LearnerState) -> None:
    """Raise where an adapter is merged or scaled, or a strategy lacks its memory or would train another part."""
    if state.incomplete:
        raise ValueError(
            f"this learner was published without what the strategy {state.strategy.name!r} keeps: it holds no "
            "statistics of its finished tasks, so it can predict and evaluate, but not learn a further task"
        )
    if state.adapter is not None:
        state.adapter.check_unmerged()
        state.adapter.check_unscaled()
        if state.strategy.adapts:
            _check_trained(state.model)


def _check_trained(model: Any) -> None:
    """Raise where somebody has chosen other parameters for training than the adapter's.

    A task that fails is taken back, and a learner is saved, by its adapter alone.
    """
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    names = [name for name, p in model.get_base_model().named_parameters() if id(p) in own and PREFIX not in name]
    wrong = [name for name in names if "modules_to_save" not in name]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} requires a gradient ({len(wrong)} such parameters of the base model): a learner trains the "
            "adapter alone; call requires_grad_(False) on the base model, then set_adapter('default')"
        )
    adapter = [(name, p) for name, p in model.named_parameters() if PREFIX in name and name.endswith(".default")]
    frozen = [name for name, p in adapter if not p.requires_grad]
    if frozen:
        raise ValueError(
            f"{frozen[0]!r} requires no gradient ({len(frozen)} such parameters of the adapter), so a task would not "
            "train it: call set_adapter('default') on the model"
        )


def check_model(model: Any, strategy: Strategy) -> Any:
    """The model under the adapter, after a check that the strategy can work with it."""
    if isinstance(model, PeftModel) and isinstance(model.base_model, DualModeLoraModel):
        check_adapter_name(model)
        targets = strategy.target_modules
        other = [n for n in model.base_model.dual_mode_layers() if targets and n.rpartition(".")[2] not in targets]
        if other:
            raise ValueError(
                f"the strategy {strategy.name!r} adapts {list(targets or ())} alone, the model has an adapter in "
                f"{other[0]!r}: pass DualModeLoraConfig(target_modules={list(targets or ())})"
            )
        model = model.get_base_model()
    elif strategy.adapts or isinstance(model, PeftModel) or not isinstance(model, nn.Module):
        raise ValueError(
            f"model must come from get_peft_model(clip, DualModeLoraConfig(...)) for the strategy {strategy.name!r}, "
            f"got {type(model).__name__}"
        )
    check_encoder(model, text=strategy.adapts)
    return model


def learner_classifiers(
    clip: Any,
    strategy: Strategy,
    args: LearnerArguments,
    classifiers: str | Classifier | Sequence[str | Classifier] | None,
    head: BridgeEnsembleHead | None,
    device: torch.device,
) -> dict[str, Classifier]:
    """A learner's classifiers by name, the strategy's own where None are given; `head` is the one called "bridge"."""
    if classifiers is None:
        classifiers = strategy.classifiers if has_text(clip) else without_text(strategy.classifiers)
    rows = [classifiers] if isinstance(classifiers, (str, Classifier)) else list(classifiers)
    if head is not None and "bridge" not in rows:
        raise ValueError(f"head is given, but 'bridge' is not among the classifiers {rows}")
    made = make_classifiers(
        [head if head is not None and row == "bridge" else row for row in rows],
        embed_dim(clip),
        logit_scale(clip),
        {"num_depths": args.num_depths, "reliability_temperature": args.reliability_temperature},
    )
    reads_text = [name for name, classifier in made.items() if classifier.needs_text]
    if reads_text and not has_text(clip):
        raise ValueError(f"the classifier {reads_text[0]!r} needs text, {type(clip).__name__} has no text tower")
    return {name: classifier.to(device) for name, classifier in made.items()}


def checked_texts(
    state: LearnerState, encoder: Encoder, images: LabelledImages, class_texts: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """All classes' own texts with those of a new task, after a check that its classes can be learned."""
    names = check_class_names(images.class_names, seen=state.class_names)
    absent = np.setdiff1d(np.arange(len(names)), images.labels)
    if len(absent):
        raise ValueError(f"class {names[absent[0]]!r} has no image in the dataset ({len(absent)} such)")
    texts = state.class_texts | check_class_texts(class_texts, names)
    if has_text(state.base):
        encoder.check_prompts((*state.class_names, *names), texts)
    return texts
