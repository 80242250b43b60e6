"""A learner as one folder, here or on the Hub: adapter, head, statistics, processor, settings, model card.

Written whole. Read strictly: every file against the manifest, every tensor's name and shape against what the
configuration and the base model make, before memory is taken for one; safetensors and JSON only, nothing is executed.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from torch import nn

from dulbe_peft import checkpoint, hub
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.registration import DULBE
from dulbe_peft.arguments import MACHINE_SETTINGS, LearnerArguments
from dulbe_peft.backbone import check_clip_like, load_clip, load_processor
from dulbe_peft.card import model_card
from dulbe_peft.checkpoint import MANIFEST, MODEL_CARD, CheckpointError
from dulbe_peft.classifiers.bridge import CONFIG_FILE as HEAD_CONFIG_FILE
from dulbe_peft.classifiers.bridge import TENSORS_FILE as HEAD_FILE
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.distributed import on_main_process
from dulbe_peft.files import read_tensors, tensor_shapes, write_json
from dulbe_peft.run import RESULTS_FILE
from dulbe_peft.statistics import OccupationStatistics
from dulbe_peft.streams.names import check_class_names

ADAPTER_FILE = SAFETENSORS_WEIGHTS_NAME
ADAPTER_CONFIG_FILE = CONFIG_NAME
STATISTICS_FILE = "statistics.safetensors"
LEARNER_FILE = "learner.json"
PROCESSOR_FOLDER = "processor"
NEEDED = {ADAPTER_FILE, ADAPTER_CONFIG_FILE, LEARNER_FILE, HEAD_CONFIG_FILE, HEAD_FILE}
READABLE = {".safetensors", ".json", ".txt", ".jinja", ".model"}
_STATE_FIELDS: dict[str, Any] = {
    "arguments": dict,
    "attn_implementation": (str, type(None)),
    "step": int,
    "tasks": list,
}


# ---------------------------------------------------------------------- writing


def save(learner: Any, folder: Path) -> None:
    """See `ClassIncrementalLearner.save_pretrained`."""
    on_main_process(partial(checkpoint.commit_alone, folder, learner.write, _manifest_fields(learner)))


def write(learner: Any, folder: Path, statistics: bool = True, card: str | None = None) -> None:
    """Write the learner's files into an existing folder, without a manifest.

    Args:
        learner: a `ClassIncrementalLearner`.
        folder: where the files go.
        statistics: write also what is needed to go on learning.
        card: text of the model card; None makes one without results.
    """
    learner.model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / MODEL_CARD).write_text(card or model_card(learner, None), encoding="utf-8")
    learner.head.save_pretrained(folder)
    if statistics and (learner.statistics or not learner.tasks):
        learner.statistics.save(folder / STATISTICS_FILE)
    learner.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    state = {
        "arguments": learner.args.portable(),
        "attn_implementation": learner.clip.config._attn_implementation,
        "source": learner.source,
        "step": learner._step,
        "tasks": [list(task) for task in learner.tasks],
    }
    write_json(folder / LEARNER_FILE, state)


def push(
    learner: Any,
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
        results = json.loads(Path(results).read_text(encoding="utf-8"))
    tasks = [list(task) for task in learner.tasks]
    if results is not None and (not isinstance(results, dict) or results.get("class_names") != tasks):
        raise ValueError(f"results are not of this learner: their class_names are not its tasks, {tasks!r:.200}")
    repo_id = hub.create(repo_id, private, token)

    def fill(folder: Path) -> None:
        write(learner, folder, statistics, model_card(learner, repo_id, statistics, results, dataset_name))
        if results is not None:
            write_json(folder / RESULTS_FILE, results)

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "learner"
        checkpoint.commit_folder(folder, fill, _manifest_fields(learner))
        return hub.upload(folder, repo_id, replaces=(STATISTICS_FILE, RESULTS_FILE), token=token, **commit)


def _manifest_fields(learner: Any) -> dict[str, Any]:
    return {"tasks": [list(task) for task in learner.tasks]}


# ---------------------------------------------------------------------- reading


def locate(
    source: str | Path, revision: str | None, token: str | None, cache_dir: str | Path | None
) -> tuple[Path, dict[str, str] | None]:
    """A learner's folder, downloaded where `source` is none, and the repository and commit it came from.

    Only what the manifest lists is downloaded, and nothing at all where it lists a file of another kind.
    """
    if not str(source):
        raise ValueError("the folder or repository to load is '', expected its path or id")
    if Path(source).is_dir():
        return Path(source), None
    folder, commit = hub.fetch(source, [MANIFEST], revision, token, cache_dir)
    files = _listed(folder)
    hub.fetch(source, sorted(files), commit, token, cache_dir)
    return folder, {"repo_id": str(source), "commit": commit}


def _listed(folder: Path) -> set[str]:
    """The files in a manifest, of which none has been opened yet."""
    with _strictly(folder):
        files = set(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    strange = sorted(name for name in files if Path(name).suffix not in READABLE or ".." in Path(name).parts)
    if strange or not files >= NEEDED:
        kinds = ", ".join(sorted(READABLE))
        raise CheckpointError(
            f"{folder / MANIFEST} lists {strange[:3]} and misses {sorted(NEEDED - files)}: a learner consists of "
            f"{kinds} files, and those are needed"
        )
    return files


@contextmanager
def _strictly(folder: Path) -> Iterator[None]:
    """What a file's content can make go wrong, as a `CheckpointError` that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers and PEFT raise almost anything over a strange file
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error


def restore(learner: Any, folder: Path) -> None:
    """See `ClassIncrementalLearner.restore`."""
    checkpoint.read_manifest(folder)
    with _strictly(folder):
        saved, _ = read_tensors(folder / ADAPTER_FILE)
    _check_fits(saved, get_peft_model_state_dict(learner.model, save_embedding_layers=False), folder)
    _restore_around(learner, folder, saved)


def _restore_around(learner: Any, folder: Path, adapter: dict[str, torch.Tensor] | None = None) -> None:
    """Head, statistics, tasks and step count of a folder that was checked; `adapter` too, where it is not in yet."""
    state = _read_state(folder)
    with _strictly(folder):
        head = BridgeEnsembleHead.from_pretrained(folder).to(learner.device)
        statistics = _read_statistics(learner, folder)
    names = [name for task in state["tasks"] for name in task]
    if head.class_names != names or head.embed_dim != learner.clip.config.projection_dim:
        raise CheckpointError(
            f"{folder} does not fit together: its tasks have {len(names)} classes, its head has "
            f"{len(head.class_names)} (or others) for features of {head.embed_dim} dimensions, the base model gives "
            f"{learner.clip.config.projection_dim}"
        )
    if adapter is not None:
        with _strictly(folder):
            set_adapter_state(learner.model, adapter)
    learner.statistics = statistics
    learner.head = head
    learner.tasks = [tuple(task) for task in state["tasks"]]
    learner._step = state["step"]
    learner.source = state.get("source")


def _read_statistics(learner: Any, folder: Path) -> OccupationStatistics:
    """The statistics, of this model's layers and sizes; none where the folder was written without them."""
    path = folder / STATISTICS_FILE
    if STATISTICS_FILE not in _listed(folder):
        return learner.new_statistics()
    layers = learner.model.dual_mode_layers()
    rows = learner.new_statistics().sketch_rows
    widths = {name: layer.in_features for name, layer in layers.items()}
    shapes = {name: (min(width, rows or width), width) for name, width in widths.items()}
    for name, shape in tensor_shapes(path).items():
        if shape != shapes.get(name):
            expected = shapes.get(name, "no such layer")
            raise ValueError(f"statistics of {name!r} have shape {shape}, the model: {expected}")
    statistics = OccupationStatistics.load(path, learner.device)
    if statistics.sketch_rows != rows:
        raise ValueError(f"statistics are sketches of {statistics.sketch_rows} rows, the learner's settings: {rows}")
    wrong = [n for n in statistics if shapes.get(n) != tuple(statistics[n].shape)]
    if wrong or (statistics and len(statistics) != len(layers)):
        raise ValueError(f"statistics are of {len(statistics)} layers, the model has {len(layers)}: {wrong[:3]}")
    return statistics


def load(kind: Any, folder: Path, base_model: nn.Module | None, args: LearnerArguments | None) -> Any:
    """A learner of class `kind` from a folder; a base model that was given is as it was after any error."""
    checkpoint.read_manifest(folder)
    _listed(folder)
    state = _read_state(folder)
    with _strictly(folder):
        found = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))["peft_type"]
        if found != DULBE:
            raise ValueError(f"{ADAPTER_CONFIG_FILE} is of an adapter of type {found!r}, expected {DULBE.value!r}")
        config = DualModeLoraConfig.from_pretrained(str(folder))
    if base_model is None:
        name = config.base_model_name_or_path
        if not name:
            raise ValueError(f"{folder} names no base model: pass base_model")
        base_model, _ = load_clip(name, config.revision, attn_implementation=state["attn_implementation"])
    _check_base_model(base_model)
    with _strictly(folder):
        _check_adapter(folder / ADAPTER_FILE, config, base_model)
        processor = load_processor(str(folder / PROCESSOR_FOLDER), base_model)
    trainable = [(parameter, parameter.requires_grad) for parameter in base_model.parameters()]
    modules = dict(base_model.named_modules())
    with _strictly(folder):
        model = PeftModel.from_pretrained(base_model, str(folder), is_trainable=True)
    try:
        learner = kind(model, processor, args=args or portable(state["arguments"]))
        _restore_around(learner, folder)
    except BaseException:
        model.unload()
        for name, module in base_model.named_modules():
            if name and modules[name] is not module:  # PEFT leaves the trained copy of a module that was to be saved
                base_model.set_submodule(name, modules[name])
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
        raise
    return learner


def _check_base_model(base_model: Any) -> None:
    if not isinstance(base_model, nn.Module):
        raise TypeError(f"base_model must be a CLIPModel or None, got {base_model!r:.100}")
    if isinstance(base_model, PeftModel) or any(isinstance(m, BaseTunerLayer) for m in base_model.modules()):
        raise ValueError("base_model already carries adapters: give the pristine model, as unload() leaves it")
    check_clip_like(base_model)


def _check_adapter(path: Path, config: DualModeLoraConfig, base_model: nn.Module) -> None:
    """Compare the file's header with the adapter that the configuration makes on the base model, without memory."""
    stand_ins: dict[int, Any] = {id(b): b.to("meta") for b in base_model.buffers()}
    stand_ins |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in base_model.parameters()}
    with torch.device("meta"):
        model = PeftModel(copy.deepcopy(base_model, stand_ins), copy.deepcopy(config))
    made = get_peft_model_state_dict(model, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in made.items()}
    found = tensor_shapes(path)
    strange = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if strange:
        raise ValueError(
            f"{len(strange)} tensors are not what {ADAPTER_CONFIG_FILE} makes on this base model, the first is "
            f"{strange[0]!r}: in the file {found.get(strange[0])}, expected {expected.get(strange[0])}"
        )
    for name, tensor in read_tensors(path)[0].items():
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name!r} has type {tensor.dtype}, expected floating point")


def set_adapter_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put saved tensors into the active adapter, whose history takes their length."""
    set_peft_model_state_dict(model, state)
    model.active_peft_config.history_rank = model.history_rank


def portable(saved: dict[str, Any]) -> LearnerArguments:
    """Saved settings without those of the machine."""
    return LearnerArguments(**{name: value for name, value in saved.items() if name not in MACHINE_SETTINGS})


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


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / LEARNER_FILE
    with _strictly(folder):
        state = json.loads(path.read_text(encoding="utf-8"))
        missing = sorted(set(_STATE_FIELDS) - set(state))
        wrong = [name for name, kind in _STATE_FIELDS.items() if name in state and not isinstance(state[name], kind)]
        if missing or wrong:
            raise ValueError(f"{LEARNER_FILE} misses {missing}, and {wrong} are of a wrong type")
        seen: list[str] = []
        for task in state["tasks"]:
            seen += check_class_names(task, seen)
        portable(state["arguments"])
    return state
