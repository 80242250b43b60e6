"""Load a learner from a folder. Only safetensors, JSON and text files are read, and nothing is executed.

Every file is checked against the manifest, and every tensor against the configuration and the base model.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from dulbe_peft.adapter.config import DULBE, DualModeLoraConfig
from dulbe_peft.arguments import MACHINE_SETTINGS, LearnerArguments
from dulbe_peft.checkpoints import base_models, layout, learner_file, saving
from dulbe_peft.checkpoints.learner_file import LearnerFile
from dulbe_peft.checkpoints.locating import listed
from dulbe_peft.classifiers.registry import CLASSIFIERS
from dulbe_peft.data.known import KnownImages
from dulbe_peft.encoders.backends import has_graph
from dulbe_peft.encoders.loading import IMAGE_PROCESSOR_FILES, check_encoder, has_text, load_processor
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.strategies.registry import make_strategy
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils import folders
from dulbe_peft.utils.folders import CheckpointError, load_errors
from dulbe_peft.utils.processes import choose_device, choose_precision, has_bfloat16
from dulbe_peft.utils.tensors import read_tensors

# Settings that a learner keeps.
_LEARNED_WITH = ("features", "whole_images", "image_resize", "learning_rate")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


@contextmanager
def loaded_state(
    folder: Path,
    manifest: folders.Manifest,
    base_model: nn.Module | None,
    args: LearnerArguments | None,
    machine: Mapping[str, object] | None = None,
) -> Iterator[LearnerState]:
    """Yield the state in a folder, loaded onto a base model; if the block raises, a given base model is restored."""
    free = (*MACHINE_SETTINGS, "precision")
    other = sorted(set(machine or ()) - set(free))
    if other:
        raise ValueError(f"{other[0]!r} is not a machine setting; the machine settings are {', '.join(free)}")
    files = listed(folder, manifest)
    if layout.TASK_FILE in files:
        raise CheckpointError(
            f"{folder} is a checkpoint of an unfinished task: resume it with "
            "DualModeTrainer.train(resume_from_checkpoint=...)"
        )
    with load_errors(folder):
        saved = learner_file.read(folder)
        strategy = make_strategy(saved.strategy)
        settings = args or LearnerArguments(**saved.arguments | {"precision": "auto"})
        config = None
        if saving.ADAPTER_CONFIG_FILE in files:
            config = DualModeLoraConfig.from_pretrained(str(folder))
            if not isinstance(config, DualModeLoraConfig):
                raise ValueError(f"this is an adapter of type {config.peft_type.value!r}, expected {DULBE.value!r}")
        elif strategy.adapts:
            raise ValueError(f"there is no {saving.ADAPTER_CONFIG_FILE}, which the strategy {strategy.name!r} needs")
    settings = _machine_settings(settings, machine or {}, saved, strategy.adapts)
    if base_model is None:
        base_model = base_models.find(folder, saved.base_model, saved.attn_implementation)
    if not isinstance(base_model, nn.Module):
        raise TypeError(f"base_model must be a model or None, got {base_model!r:.100}")
    if any(isinstance(module, (PeftModel, BaseTunerLayer)) for module in base_model.modules()):
        raise ValueError("base_model already has adapters: pass the pristine model, as unload() returns it")
    check_encoder(base_model)
    base_models.check(base_model, saved.base_model, folder)
    with _restored_on_error(base_model):
        with load_errors(folder):
            processor, model = _read_processor(folder / saving.PROCESSOR_FOLDER, base_model), base_model
            if config is not None:
                name = saved.adapter_name
                model = PeftModel.from_pretrained(base_model, str(folder), name, is_trainable=True, config=config)
            state = LearnerState(model, processor, settings, strategy, {}, adapter_name=saved.adapter_name)
            state, learned = _read_parts(state, folder, saved, files)
        yield _checked(state, folder, saved, learned)


def _read_processor(folder: Path, base_model: nn.Module) -> Any:
    """Load the processor in a folder, after a check of its files: transformers would replace missing ones."""
    kinds: dict[str, tuple[str, ...]] = {"image processor": IMAGE_PROCESSOR_FILES}
    kinds |= {"tokenizer": TOKENIZER_FILES} if has_text(base_model) else {}
    for kind, names in kinds.items():
        if not any((folder / name).is_file() for name in names):
            raise FileNotFoundError(f"the processor has no {kind}: one of {', '.join(names)} is needed")
    return load_processor(str(folder), cast(PreTrainedModel, base_model))


def _machine_settings(
    args: LearnerArguments, machine: Mapping[str, Any], saved: learner_file.LearnerFile, adapts: bool
) -> LearnerArguments:
    """Return the settings with those of the machine; without a given precision, the learner's is kept if possible."""
    settings = replace(args, **machine)
    learned = saved.arguments["precision"]
    able = settings.backend != "onnx" and has_bfloat16(choose_device(settings.device))
    if learned == "int8":
        able = has_graph(saved.graph)
    precision = choose_precision(settings.precision, learned, adapts, able)
    backend: Any = "openvino" if precision == learned == "int8" else settings.backend
    return replace(settings, precision=precision, backend=backend)


def restore(state: LearnerState, folder: Path) -> LearnerState:
    """Return the state in a folder for a learner with the same settings, and load its adapter into the model."""
    files = listed(folder, folders.read_manifest(folder))
    with load_errors(folder):
        saved = learner_file.read(folder)
        base_models.check(state.base, saved.base_model, folder)
        state, learned = _read_parts(state, folder, saved, files)
    restored = _checked(state, folder, saved, learned)
    if state.adapter is not None:
        with load_errors(folder):
            state.set_adapter_tensors(read_tensors(folder / saving.ADAPTER_FILE)[0])
    return restored


def _read_parts(
    state: LearnerState, folder: Path, saved: LearnerFile, files: set[str]
) -> tuple[LearnerState, dict[str, Any]]:
    """Return the state with what a folder holds besides the model, and the settings with which images were learned."""
    unknown = [name for name in saved.classifiers if name not in CLASSIFIERS]
    if unknown:
        known = ", ".join(sorted(CLASSIFIERS))
        raise CheckpointError(
            f"{folder} has an unknown classifier {unknown[0]!r}, known are {known}: import its module first"
        )
    # A resumed run keeps the order of its learner; otherwise the saved order is used.
    order = [name for name in state.classifiers or saved.classifiers if name in saved.classifiers]
    classifiers = {name: CLASSIFIERS[name].from_pretrained(folder).to(state.device) for name in order}
    memory = _read_memory(state, folder, files)
    # A published learner may lack its memory, unless the encoding needs it.
    if saved.tasks and (memory is not None or not saved.memory or _encodes_by_memory(state.strategy)):
        state.strategy.check_memory(memory)
    images = read_known(folder, [name for task in saved.tasks for name in task], files)
    learned = {name: saved.arguments[name] for name in _LEARNED_WITH}
    return replace(state, classifiers=classifiers, memory=memory, known=images), learned


def _checked(state: LearnerState, folder: Path, saved: LearnerFile, learned: dict[str, Any]) -> LearnerState:
    """Return the state of a folder, after a check that its settings and those of the state read images alike."""
    args, width, names = state.args, state.embed_dim, [name for task in saved.tasks for name in task]
    if saved.tasks and args.features != learned["features"]:
        raise ValueError(
            f"features is {args.features!r}, but the learner in {folder} has learned {learned['features']!r} features"
        )
    if saved.tasks and args.whole_images != learned["whole_images"]:
        raise ValueError(
            f"whole_images is {args.whole_images}, but the learner in {folder} has learned with "
            f"whole_images={not args.whole_images}: pass the same, or learn again"
        )
    resize = learned["image_resize"]
    if saved.tasks and args.image_resize not in ("processor", resize):  # the saved processor resizes as it did
        raise ValueError(
            f"image_resize is {args.image_resize!r}, but the learner in {folder} has learned with {resize!r}: pass "
            "the same, or learn again"
        )
    if args.image_resize == "processor":
        args = replace(args, image_resize=resize)
    if args.learning_rate == "auto":  # keep the rate that was chosen on the first task
        args = replace(args, learning_rate=learned["learning_rate"])
    for name, classifier in state.classifiers.items():
        if classifier.class_names != names or classifier.embed_dim != width:
            raise CheckpointError(f"{folder} is inconsistent: {name!r} has other classes or another feature width")
    return replace(
        state,
        args=args,
        tasks=[tuple(task) for task in saved.tasks],
        step=saved.step,
        source=saved.source,
        incomplete=bool(saved.tasks and saved.memory and not state.memory),
        updates=saved.updates,
        class_texts={name: tuple(texts) for name, texts in saved.class_texts.items()},
        graph=saved.graph,
        estimates=saved.estimates,
    )


def read_known(folder: Path, names: Sequence[str], files: Container[str]) -> KnownImages:
    """Read which images a saved learner with the classes `names` has learned and was tested on."""
    if saving.KNOWN_FILE not in files:  # uploads without statistics do not have the file
        return KnownImages(complete=not names)
    return KnownImages.from_arrays(*read_tensors(folder / saving.KNOWN_FILE), names)


def _encodes_by_memory(strategy: Strategy) -> bool:
    return strategy.memory_kind is dict and type(strategy).encoding is not Strategy.encoding


def _read_memory(state: LearnerState, folder: Path, files: set[str]) -> Memory | None:
    """Read the strategy's memory; None if the folder was written without it."""
    if saving.STATISTICS_FILE in files:
        return OccupationStatistics.load(folder / saving.STATISTICS_FILE, state.device, state.strategy.name)
    if saving.MEMORY_FILE not in files:
        return None
    memory, metadata = read_tensors(folder / saving.MEMORY_FILE)
    if metadata != {saving.MEMORY_FORMAT: state.strategy.name}:
        raise ValueError(f"{saving.MEMORY_FILE} is for {metadata}, expected the strategy {state.strategy.name!r}")
    return {name: tensor.to(state.device) for name, tensor in memory.items()}


@contextmanager
def _restored_on_error(base_model: nn.Module) -> Iterator[None]:
    """Remove an adapter from the model again if the block raises."""
    trainable = [(parameter, parameter.requires_grad) for parameter in base_model.parameters()]
    modules = dict(base_model.named_modules())
    attributes = set(vars(base_model))
    try:
        yield
    except BaseException:
        for attribute in set(vars(base_model)) - attributes:  # such as PEFT's `peft_config`
            delattr(base_model, attribute)
        for name, module in list(base_model.named_modules()):
            if name and name in modules and modules[name] is not module:
                base_model.set_submodule(name, modules[name])
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
        raise
