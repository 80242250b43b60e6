"""Create the state of a new learner, and check model, images and settings before a task is learned."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate.tracking import filter_trackers
from peft import PeftModel
from torch import nn

from dulbe_peft.adapter.config import PREFIX
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import CLASSIFIERS, Recipe, can_project, make_classifiers, parse_classifiers
from dulbe_peft.data.images import named_images
from dulbe_peft.data.names import check_class_names, check_class_texts
from dulbe_peft.encoders import loading
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.pixels import PixelDataset, with_image_resize
from dulbe_peft.strategies.base import Strategy
from dulbe_peft.strategies.registry import make_strategy
from dulbe_peft.training.state import LearnerState
from dulbe_peft.training.update_share import check_share
from dulbe_peft.utils.processes import (
    check_same_in_all,
    choose_device,
    choose_precision,
    copy_from_main,
    has_bfloat16,
    raise_in_all,
    refuse_offloaded,
    refuse_sharded,
)
from dulbe_peft.utils.tensors import align_weights


def check_active_adapter(state: LearnerState) -> None:
    """Raise a `ValueError` unless the learner's adapter is active: predictions and saved files would be wrong."""
    tuner, name = state.adapter, state.adapter_name
    if tuner is None:
        return
    if tuner.active_adapters != [name]:
        raise ValueError(
            f"the model's active adapters are {tuner.active_adapters}, but the learner uses only the one named "
            f"{name!r}: call set_adapter({name!r}) on the model"
        )
    if not tuner.dual_mode_layers():
        raise ValueError(
            "the model's layers have no adapter any more, as after unload() or merge_and_unload(): load the saved "
            "learner again, and call these methods on a copy of the model (copy.deepcopy)"
        )


def check_learned(state: LearnerState) -> None:
    """Raise a `ValueError` if no task has been learned, or an adapter other than the learner's is active."""
    if not state.tasks:
        raise ValueError("no task has been learned yet: call learn_task first")
    check_active_adapter(state)


def warn_of_promises(state: LearnerState) -> None:
    """Warn that error rates are not guaranteed if the model was trained on the images that calibrate them."""
    if state.trained:
        warnings.warn(
            "the images that calibrate reject and coverage also trained the model, so the requested error rates are "
            "not guaranteed: measure them on test images, or train nothing (strategy 'frozen')",
            stacklevel=4,
        )


def checked_task(
    state: LearnerState,
    encoder: Encoder,
    dataset: object,
    names: Sequence[str] | None,
    texts: Mapping[str, Sequence[str]],
) -> tuple[LearnerState, PixelDataset]:
    """Check that a task can be learned; return the state with the texts of its classes, and its images."""
    if state.args.precision == "int8" and state.strategy.adapts:
        raise ValueError("precision is 'int8', in which no model can be trained: choose float32 or bfloat16")
    with raise_in_all():
        check_active_adapter(state)
        check_share(state)
        _check_trainable(state)
        images = named_images(dataset, names)
        names = check_class_names(images.class_names, seen=state.class_names)
        absent = np.setdiff1d(np.arange(len(names)), images.labels)
        if len(absent):
            more = f" and {len(absent) - 1} more have" if len(absent) > 1 else " has"
            raise ValueError(f"class {names[absent[0]]!r}{more} no image in the dataset")
        all_texts = state.class_texts | check_class_texts(texts, names)
        if loading.has_text(state.base):
            encoder.check_prompts((*state.class_names, *names), all_texts)
    check_same_in_all((names, images.labels.tolist(), all_texts), "class names, texts or labels")
    return replace(state, class_texts=all_texts), encoder.images(images, keep=state.strategy.adapts)


def _check_trainable(state: LearnerState) -> None:
    """Raise a `ValueError` if the strategy's memory is missing, or other parameters than the adapter's are trainable.

    Only the adapter may be trained, because only the adapter is restored if learning a task fails.
    """
    if state.incomplete:
        raise ValueError(
            f"this learner was published without the memory of the strategy {state.strategy.name!r}: it has no "
            "statistics of its finished tasks, so it can predict and evaluate, but not learn a further task"
        )
    if state.tasks:
        state.strategy.check_memory(state.memory)
    if state.adapter is None:
        return
    state.adapter.check_state("learn_task")
    parameters = list(state.model.named_parameters()) if state.strategy.adapts else []
    wrong = [n for n, p in parameters if p.requires_grad and PREFIX not in n and "modules_to_save" not in n]
    if wrong:
        name = wrong[0].removeprefix("base_model.model.")
        raise ValueError(
            f"{name!r} requires a gradient ({len(wrong)} such parameters of the base model), but a learner trains "
            f"only the adapter: call requires_grad_(False) on the base model, then set_adapter({state.adapter_name!r})"
        )
    frozen = [n for n, p in parameters if not p.requires_grad and PREFIX in n and n.endswith(f".{state.adapter_name}")]
    if frozen:
        raise ValueError(
            f"{frozen[0]!r} requires no gradient ({len(frozen)} such parameters of the adapter), so a task would not "
            f"train it: call set_adapter({state.adapter_name!r}) on the model"
        )


def check_model(state: LearnerState) -> None:
    """Raise an error unless the strategy can use the model and the processor."""
    model, strategy = state.model, state.strategy
    check_share(state)
    if isinstance(model, PeftModel) and isinstance(model.base_model, DualModeLoraModel):
        check_active_adapter(state)
        targets = strategy.target_modules
        other = [n for n in model.base_model.dual_mode_layers() if targets and n.rpartition(".")[2] not in targets]
        if other:
            raise ValueError(
                f"the strategy {strategy.name!r} adapts only {list(targets or ())}, but the model has an adapter in "
                f"{other[0]!r}: pass DualModeLoraConfig(target_modules={list(targets or ())})"
            )
    elif strategy.adapts or isinstance(model, PeftModel) or not isinstance(model, nn.Module):
        raise ValueError(
            f"model must come from get_peft_model(clip, DualModeLoraConfig(...)) for the strategy {strategy.name!r}, "
            f"got {type(model).__name__}"
        )
    loading.check_encoder(state.base, text=strategy.needs_names)
    loading.check_processor(state.processor, state.base)
    if strategy.adapts:
        loading.check_statistics_tokens(state.base, state.args.statistics_tokens)
    refuse_offloaded(state.base)
    refuse_sharded(state.base)


def new_state(
    model: nn.Module,
    processor: object,
    args: LearnerArguments,
    strategy: str | Strategy,
    classifiers: str | Classifier | Iterable[str | Recipe | Classifier] | None,
) -> LearnerState:
    """Return the state of a new learner after checking its parts. None chooses the strategy's default classifiers."""
    state = LearnerState(model, processor, args, make_strategy(strategy), {})
    if isinstance(state.adapter, DualModeLoraModel):
        state = replace(state, adapter_name=state.adapter.adapter_name)
    check_model(state)
    clip = state.base
    if lost := loading.unsaved_part(processor, clip):
        warnings.warn(f"{lost}: this learner can learn and predict, but cannot be saved", stacklevel=3)
    recipes = parse_classifiers(state.strategy.classifiers if classifiers is None else classifiers)
    if classifiers is None:
        fit = {name: state.has_names and (not state.text_dim or can_project(CLASSIFIERS[name])) for name in recipes}
        recipes = {name: recipe for name, recipe in recipes.items() if fit[name] or not CLASSIFIERS[name].needs_text}
    new = make_classifiers(recipes.values(), state.embed_dim, loading.logit_scale(clip), state.text_dim)
    needs_text = [name for name, classifier in new.items() if classifier.needs_text]
    if needs_text and not loading.has_text(clip):
        raise ValueError(f"the classifier {needs_text[0]!r} needs text, but {type(clip).__name__} has no text tower")
    if needs_text and not state.has_names:
        raise ValueError(
            f"the classifier {needs_text[0]!r} compares images with names, but names have no place among the features "
            f"of the strategy {state.strategy.name!r}: choose classifiers of images, such as bayes, lda and ranpac"
        )
    other = [name for name, each in new.items() if each.reads_text and each.rule.text_dim != state.text_dim]
    if other and not state.text_dim:
        raise ValueError(f"the classifier {other[0]!r} has a text_dim, which only features='unprojected' gives it")
    if other:
        raise ValueError(
            f"the classifier {other[0]!r} cannot compare names with features='unprojected': choose text, bayes, or "
            "classifiers of images, such as lda and ranpac"
        )
    return replace(state, classifiers=new)


def on_device(state: LearnerState) -> tuple[LearnerState, torch.device]:
    """Move model and classifiers to the device in the settings, and return the state and the device.

    The state's precision is then a concrete one, and its processor the final one. Raises an `ImportError` if the
    package of `log_with` is missing.
    """
    args, processor = state.args, state.processor
    if (name := args.log_with) and not filter_trackers(name, "runs"):
        package = "tensorboard" if name == "all" else name
        raise ImportError(f"log_with is {name!r}, whose package is missing: pip install {package}")
    device = choose_device(args.device)
    bfloat16 = args.backend != "onnx" and has_bfloat16(device)
    args = replace(args, precision=choose_precision(args.precision, None, state.strategy.adapts, bfloat16))
    model = state.model.to(device).eval()
    align_weights(model)  # a model that transformers loaded may be a mapped file
    copy_from_main(state.adapter_tensors().values())
    if args.image_resize != "processor":
        processor = with_image_resize(processor, state.base, args.image_resize)
    classifiers = {name: classifier.to(device) for name, classifier in state.classifiers.items()}
    memory = state.memory
    if isinstance(memory, dict):
        memory = {name: tensor.to(device) for name, tensor in memory.items()}
    state = replace(state, args=args, model=model, processor=processor, classifiers=classifiers, memory=memory)
    return state, device
