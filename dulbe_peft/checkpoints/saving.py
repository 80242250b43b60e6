"""A learner as one folder, here or on the Hub: adapter, head, statistics, processor, settings, model card.

Written whole. Read strictly: every file against the manifest, every tensor's name and shape against what the
configuration and the base model make, before memory is taken for one; safetensors and JSON only, nothing is executed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from torch import nn

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.registration import DULBE
from dulbe_peft.adapter.saved import check_file
from dulbe_peft.arguments import MACHINE_SETTINGS, LearnerArguments
from dulbe_peft.checkpoints import base_models, learner_file
from dulbe_peft.checkpoints.card import model_card
from dulbe_peft.classifiers import CLASSIFIERS, Classifier
from dulbe_peft.encoders.loading import IMAGE_PROCESSOR_FILES, check_encoder, embed_dim, has_text, load_processor
from dulbe_peft.strategies import Memory, make_strategy
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils import folders, hub
from dulbe_peft.utils.files import read_json, write_json
from dulbe_peft.utils.folders import LEARNER_FILE, MANIFEST, MODEL_CARD, PROGRESS_FILE, RESULTS_FILE, CheckpointError
from dulbe_peft.utils.processes import on_main_process, world
from dulbe_peft.utils.tensors import read_tensors, tensor_shapes, write_tensors

ADAPTER_FILE = SAFETENSORS_WEIGHTS_NAME
ADAPTER_CONFIG_FILE = CONFIG_NAME
_NAME_ONE = "name a run's folder, one of its tasks, or a Hub id"
STATISTICS_FILE = "statistics.safetensors"
MEMORY_FILE = "memory.safetensors"
MEMORY_FORMAT = "dulbe-memory-1"
PROCESSOR_FOLDER = "processor"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
# Read by transformers alone. Without it, `pipeline` would take a learner's folder for one of PEFT's and build a new,
# random classifier on the base model. With it, `pipeline` and `AutoModel` end in an error that names this package.
TRANSFORMERS_FILE = "config.json"
TRANSFORMERS_CONFIG = {
    "model_type": "dulbe_peft",
    "transformers_weights": "pip install dulbe_peft; dulbe_peft.ClassIncrementalLearner.from_pretrained(this folder)",
}
READABLE = {".safetensors", ".json", ".txt", ".jinja", ".model", ".csv"}


# ---------------------------------------------------------------------- writing


def save(state: LearnerState, folder: Path) -> None:
    """Write a learner into a folder of its own, put in place whole.

    Raises:
        FileExistsError: the folder is a task of a run, lies in a saved learner, or was not written by this library.
    """
    if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(
            f"{str(folder)!r} is the current folder, or above it: saving puts a new folder in its place, and programs "
            "in it would stay in the old one; choose another folder"
        )
    folders.check_outside_learners(folder.resolve().parent, "save")
    if (folder / PROGRESS_FILE).is_file():
        raise FileExistsError(f"{folder} is a task of a run: save to a folder outside of it")
    fields = {"tasks": [list(task) for task in state.tasks]}
    on_main_process(partial(folders.commit_alone, folder, partial(write, state), fields))


def write(
    state: LearnerState, folder: Path, statistics: bool = True, card: str | None = None, local: bool = True
) -> None:
    """Write a learner's files into an existing folder, without a manifest.

    Args:
        state: what to write.
        folder: where the files go.
        statistics: write also what is needed to go on learning.
        card: text of the model card; None makes one without results.
        local: note where the base model lies on this machine.
    """
    if state.adapter is not None:
        state.model.save_pretrained(str(folder), save_embedding_layers=False)  # type: ignore[operator]
    (folder / MODEL_CARD).write_text(card or model_card(state, None), encoding="utf-8")
    for classifier in state.classifiers.values():
        classifier.save_pretrained(folder)
    if statistics:
        _write_memory(state, folder)
    state.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    write_json(folder / LEARNER_FILE, learner_file.content(state, local))
    write_json(folder / TRANSFORMERS_FILE, TRANSFORMERS_CONFIG)


def _write_memory(state: LearnerState, folder: Path) -> None:
    if isinstance(state.memory, OccupationStatistics):
        state.memory.save(folder / STATISTICS_FILE)
    elif state.memory:
        write_tensors(folder / MEMORY_FILE, state.memory, {MEMORY_FORMAT: state.strategy.name})


def push(
    state: LearnerState,
    repo_id: str,
    statistics: bool,
    results: dict[str, Any] | str | Path | None,
    dataset_name: str | None,
    private: bool | None,
    token: str | None,
    commit: dict[str, Any],
) -> Any:
    """See `ClassIncrementalLearner.push_to_hub`."""
    if isinstance(results, (str, Path)):
        results = read_json(results)
    tasks = [list(task) for task in state.tasks]
    if results is not None and (not isinstance(results, dict) or results.get("class_names") != tasks):
        raise ValueError(f"results are not of this learner: their class_names are not its tasks, {tasks!r:.200}")
    repo_id = hub.create(repo_id, private, token)

    def fill(folder: Path) -> None:
        write(state, folder, statistics, model_card(state, repo_id, statistics, results, dataset_name), local=False)
        if results is not None:
            write_json(folder / RESULTS_FILE, results)

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "learner"
        folders.commit_folder(folder, fill, {"tasks": tasks})
        replaces = (STATISTICS_FILE, MEMORY_FILE, RESULTS_FILE)
        return hub.upload(folder, repo_id, replaces=replaces, token=token, **commit)


# ---------------------------------------------------------------------- reading


def locate(
    source: str | Path, revision: str | None, token: str | None, cache_dir: str | Path | None
) -> tuple[Path, dict[str, str] | None]:
    """A learner's folder, downloaded where `source` is none, and the repository and commit it came from.

    Of a run's folder it is the newest task folder that is whole; damaged ones are named on standard error. Of a
    repository only what the manifest lists is downloaded, and nothing at all where it lists a file of another kind.

    Raises:
        CheckpointError: `source` is a file, or a folder without a learner, or none of a run's task folders is whole.
        FileNotFoundError: `source` is neither a folder nor a repository.
    """
    if not str(source):
        raise ValueError("the folder or repository to load is '', expected its path or id")
    if Path(source).is_dir():
        folder = Path(source)
        return folder if (folder / MANIFEST).exists() else _newest_task(folder), None
    if Path(source).exists():
        raise CheckpointError(f"{source} is a file and no saved learner: {_NAME_ONE}")
    folder, commit = hub.fetch(source, [MANIFEST], revision, token, cache_dir)
    files = _listed(folder)
    hub.fetch(source, sorted(files), commit, token, cache_dir)
    return folder, {"repo_id": str(source), "commit": commit}


def _newest_task(folder: Path) -> Path:
    """The newest whole task folder of a run."""
    steps: list[str] = []
    if not folders.task_folders(folder):
        raise CheckpointError(f"{folder} is no saved learner, for it holds no {MANIFEST}: {_NAME_ONE}")
    found = folders.newest_task(folder, steps.append)
    if found is None:
        raise CheckpointError(f"{folder} is a run's folder, and none of its tasks is whole: {'; '.join(steps)}")
    if world()[0] == 0:
        for step in steps:
            print(step, file=sys.stderr)
    return found[0]


def _listed(folder: Path) -> set[str]:
    """File names in the manifest; opens none of them."""
    with folders.strictly(folder):
        files = set(read_json(folder / MANIFEST)["files"])
    strange = sorted(name for name in files if Path(name).suffix not in READABLE or ".." in Path(name).parts)
    if strange or LEARNER_FILE not in files:
        kinds = ", ".join(sorted(READABLE))
        raise CheckpointError(
            f"{folder / MANIFEST} lists {strange[:3]} and misses {sorted({LEARNER_FILE} - files)}: a learner consists "
            f"of {kinds} files, and {LEARNER_FILE} is needed"
        )
    return files


def restore(state: LearnerState, folder: Path) -> LearnerState:
    """The state that a folder holds, for a learner of the same settings; its adapter is loaded into the model.

    Raises:
        CheckpointError: the folder is damaged, of another format, or does not fit the learner.
    """
    folders.read_manifest(folder)
    saved = learner_file.read(folder)
    base_models.check(state.base, saved["base_model"] or {}, folder)
    adapter = None
    if state.adapter is not None:
        with folders.strictly(folder):
            adapter, _ = read_tensors(folder / ADAPTER_FILE)
        _check_fits(adapter, get_peft_model_state_dict(state.model, save_embedding_layers=False), folder)
    restored = _around(state, folder, saved)
    if adapter is not None:
        with folders.strictly(folder):
            set_adapter_state(state.model, adapter)
    return restored


def _around(state: LearnerState, folder: Path, saved: dict[str, Any]) -> LearnerState:
    """The state with the classifiers, memory, tasks and step count of a folder that was checked."""
    with folders.strictly(folder):
        classifiers = {
            name: _classifier_type(name).from_pretrained(folder).to(state.device) for name in saved["classifiers"]
        }
        memory = _read_memory(state, folder)
    # A run that goes on has its own order; a folder that is loaded has the saved one.
    classifiers = {name: classifiers[name] for name in state.classifiers or classifiers if name in classifiers}
    names = [name for task in saved["tasks"] for name in task]
    width = embed_dim(state.base)
    for name, classifier in classifiers.items():
        if classifier.class_names != names or classifier.embed_dim != width:
            raise CheckpointError(
                f"{folder} does not fit together: its tasks have {len(names)} classes, its classifier {name!r} has "
                f"{len(classifier.class_names)} (or others) for features of {classifier.embed_dim} dimensions, the "
                f"base model gives {width}"
            )
    return replace(
        state,
        classifiers=classifiers,
        memory=memory,
        tasks=[tuple(task) for task in saved["tasks"]],
        step=saved["step"],
        source=saved["source"],
        incomplete=bool(saved["tasks"] and saved["memory"] and not memory),
        updates=saved["updates"],
    )


def _classifier_type(name: str) -> type[Classifier]:
    if name not in CLASSIFIERS:
        known = ", ".join(sorted(CLASSIFIERS))
        raise ValueError(f"the learner has a classifier {name!r}, known are {known}: import the module that makes it")
    return CLASSIFIERS[name]


def _read_memory(state: LearnerState, folder: Path) -> Memory | None:
    """What the strategy kept, checked against the model's layers; None where the folder was written without it."""
    files = _listed(folder)
    memory: Memory | None = None
    widths = {name: layer.in_features for name, layer in state.layers.items()}
    if STATISTICS_FILE in files:
        _check_widths(tensor_shapes(folder / STATISTICS_FILE), widths)
        memory = OccupationStatistics.load(folder / STATISTICS_FILE, state.device)
        if memory and (memory.sketch_rows is None) != (state.args.statistics == "exact"):
            kept = "exact" if memory.sketch_rows is None else "sketch"
            raise ValueError(f"statistics are of the kind {kept!r}, the learner's settings: {state.args.statistics!r}")
    elif MEMORY_FILE in files:
        memory, metadata = read_tensors(folder / MEMORY_FILE)
        if metadata != {MEMORY_FORMAT: state.strategy.name}:
            raise ValueError(
                f"{MEMORY_FILE} is of {metadata}, expected {{{MEMORY_FORMAT!r}: {state.strategy.name!r}}}"
            )
    state.strategy.check_memory(memory, widths)
    return memory


def _check_widths(shapes: dict[str, tuple[int, ...]], widths: dict[str, int]) -> None:
    """Compare a file's header with the model's layers, before memory is taken for a matrix."""
    for name, shape in shapes.items():
        if len(shape) != 2 or shape[1] != widths.get(name) or shape[0] > shape[1]:
            expected = widths.get(name, "no such layer")
            raise ValueError(f"statistics of {name!r} have shape {shape}, the model: {expected}")


@contextmanager
def opened(
    folder: Path,
    base_model: nn.Module | None,
    args: LearnerArguments | None,
    machine: Mapping[str, Any] | None = None,
) -> Iterator[LearnerState]:
    """The state in a folder, on a base model; where the block raises, a given base model is as it was.

    Args:
        folder: what `save` wrote.
        base_model: the pristine model; None loads the one that the folder names.
        args: settings; None takes the saved ones without the machine's.
        machine: settings of the machine, in place of the defaults.

    Raises:
        ValueError: `machine` holds a setting that is not of the machine.
    """
    other = sorted(set(machine or ()) - set(MACHINE_SETTINGS))
    if other:
        known = ", ".join(MACHINE_SETTINGS)
        raise ValueError(f"{other[0]!r} belongs to the learner, not to the machine; settings of the machine: {known}")
    folders.read_manifest(folder)
    saved = learner_file.read(folder)
    with folders.strictly(folder):
        strategy = make_strategy(saved["strategy"])
        settings = replace(args or learner_file.portable(saved["arguments"]), **machine or {})
        config = _read_config(folder) if ADAPTER_CONFIG_FILE in _listed(folder) else None
        if config is None and strategy.adapts:
            raise ValueError(f"there is no {ADAPTER_CONFIG_FILE}, which the strategy {strategy.name!r} needs")
    named = saved["base_model"] or {}
    if base_model is None:
        name = named.get("name") if config is None else config.base_model_name_or_path
        revision = named.get("revision") if config is None else config.revision
        base_model = base_models.find(folder, named, name, revision, saved["attn_implementation"])
    _check_base_model(base_model)
    base_models.check(base_model, named, folder)
    with folders.strictly(folder):
        if config is not None:
            check_file(folder / ADAPTER_FILE, config, base_model)
        _check_processor_files(folder / PROCESSOR_FOLDER, has_text(base_model))
        processor = load_processor(str(folder / PROCESSOR_FOLDER), base_model)
    with _undone_on_error(base_model):
        model: nn.Module = base_model
        if config is not None:
            with folders.strictly(folder):
                model = PeftModel.from_pretrained(base_model, str(folder), is_trainable=True)
        yield _around(LearnerState(model, processor, settings, strategy, {}), folder, saved)


def _check_processor_files(folder: Path, text: bool) -> None:
    """Raise where the processor's files are missing, for which transformers or `load_processor` would take others."""
    kinds = {"image processor": IMAGE_PROCESSOR_FILES} | ({"tokenizer": TOKENIZER_FILES} if text else {})
    for kind, names in kinds.items():
        if not any((folder / name).is_file() for name in names):
            raise FileNotFoundError(f"{folder} has no {kind}: one of {', '.join(names)} is needed")


def _read_config(folder: Path) -> DualModeLoraConfig:
    found = read_json(folder / ADAPTER_CONFIG_FILE)["peft_type"]
    if found != DULBE:
        raise ValueError(f"{ADAPTER_CONFIG_FILE} is of an adapter of type {found!r}, expected {DULBE.value!r}")
    config: DualModeLoraConfig = DualModeLoraConfig.from_pretrained(str(folder))
    return config


@contextmanager
def _undone_on_error(base_model: nn.Module) -> Iterator[None]:
    """Take an adapter out of the model again where the block raises."""
    trainable = [(parameter, parameter.requires_grad) for parameter in base_model.parameters()]
    modules = dict(base_model.named_modules())
    attributes = set(vars(base_model))
    try:
        yield
    except BaseException:
        for attribute in set(vars(base_model)) - attributes:  # PEFT's `peft_config`, for one
            delattr(base_model, attribute)
        for name, module in list(base_model.named_modules()):
            if name and name in modules and modules[name] is not module:
                base_model.set_submodule(name, modules[name])
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
        raise


def _check_base_model(base_model: Any) -> None:
    if not isinstance(base_model, nn.Module):
        raise TypeError(f"base_model must be a model or None, got {base_model!r:.100}")
    if isinstance(base_model, PeftModel) or any(isinstance(m, BaseTunerLayer) for m in base_model.modules()):
        raise ValueError("base_model already carries adapters: give the pristine model, as unload() leaves it")
    check_encoder(base_model)


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """A copy of the adapter's tensors; None without an adapter."""
    if not isinstance(model, PeftModel):
        return None
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.clone() for name, tensor in state.items()}


def set_adapter_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put saved tensors into the active adapter, whose history takes their length."""
    set_peft_model_state_dict(model, state)
    model.active_peft_config.history_rank = model.history_rank


def _check_fits(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor], folder: Path) -> None:
    """The adapter in a folder must be this learner's but for the length of its history."""
    strange = sorted(saved.keys() ^ own.keys())
    for name in sorted(saved.keys() & own.keys()):
        compared = slice(1) if "dulbe_history_" in name else slice(None)
        if saved[name].ndim != own[name].ndim or saved[name].shape[compared] != own[name].shape[compared]:
            strange.append(name)
    if strange:
        raise CheckpointError(
            f"the adapter in {folder} does not fit this learner's: {len(strange)} tensors differ in name or shape, "
            f"the first is {strange[0]!r}"
        )
