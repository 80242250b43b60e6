"""Write a learner to one folder or to the Hub: adapter, classifiers, memory, processor, settings and model card."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from dulbe_peft.checkpoints import learner_file
from dulbe_peft.checkpoints.card import model_card
from dulbe_peft.checkpoints.layout import LEARNER_FILE, RESULTS_FILE
from dulbe_peft.encoders.loading import check_saved
from dulbe_peft.metrics.results import Results
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils import hub
from dulbe_peft.utils.files import read_json, write_json
from dulbe_peft.utils.folders import MODEL_CARD, commit_folder
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.records import write_record
from dulbe_peft.utils.tensors import write_tensors

ADAPTER_FILE = SAFETENSORS_WEIGHTS_NAME
ADAPTER_CONFIG_FILE = CONFIG_NAME
STATISTICS_FILE = "statistics.safetensors"
MEMORY_FILE = "memory.safetensors"
KNOWN_FILE = "images.safetensors"  # contents of the images that were learned and tested on
MEMORY_FORMAT = "dulbe-memory-1"
PROCESSOR_FOLDER = "processor"
# Only transformers reads this file. Without it, `pipeline` would treat a learner's folder as one of PEFT's and build a
# new, random classifier on the base model. With it, `pipeline` and `AutoModel` raise an error that names this package.
TRANSFORMERS_FILE = "config.json"
TRANSFORMERS_CONFIG = {
    "model_type": "dulbe_peft",
    "transformers_weights": "install dulbe_peft; dulbe_peft.ClassIncrementalLearner.from_pretrained(this folder)",
}


def save(state: LearnerState, folder: Path) -> None:
    """Write a learner atomically to a new folder, or replace a saved learner."""
    if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(f"{str(folder)!r} is or contains the current folder: choose a folder inside it to save")
    on_main_process(partial(commit_folder, folder, "learner", partial(write, state)))


def write(
    state: LearnerState, folder: Path, statistics: bool = True, card: str | None = None, local: bool = True
) -> None:
    """Write a learner's files into a folder.

    With `statistics`, this includes the strategy's memory and the record of images, and with `local`, the path of the
    base model on this machine.
    """
    check_saved(state.processor, state.base)
    if state.adapter is not None:
        _write_adapter(state.model, folder, state.adapter_name)
    (folder / MODEL_CARD).write_text(card or model_card(state, None), encoding="utf-8")
    for classifier in state.classifiers.values():
        classifier.save_pretrained(folder)
    if statistics and isinstance(state.memory, OccupationStatistics):
        state.memory.save(folder / STATISTICS_FILE, state.strategy.name)
    elif isinstance(state.memory, dict) and state.memory and (statistics or state.encoding is not None):
        # an encoding is needed to predict
        write_tensors(folder / MEMORY_FILE, state.memory, {MEMORY_FORMAT: state.strategy.name})
    if statistics:
        arrays, metadata = state.known.arrays(state.class_names)
        write_tensors(folder / KNOWN_FILE, {name: torch.from_numpy(a) for name, a in arrays.items()}, metadata)
    state.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    write_record(folder / LEARNER_FILE, learner_file.describe(state, local))
    write_json(folder / TRANSFORMERS_FILE, TRANSFORMERS_CONFIG)


def _write_adapter(model: Any, folder: Path, name: str) -> None:
    """Write one adapter of a model into a folder, where PEFT would write it into a folder of the adapter's name."""
    model.save_pretrained(str(folder), selected_adapters=[name], save_embedding_layers=False)
    if name != "default":
        for path in (folder / name).iterdir():
            path.replace(folder / path.name)
        (folder / name).rmdir()


def push(
    state: LearnerState,
    repo_id: str,
    statistics: bool,
    results: Results | Mapping[str, object] | str | Path | None,
    dataset_name: str | None,
    **commit: Any,
) -> CommitInfo:
    """See `ClassIncrementalLearner.push_to_hub`."""
    commit = {"commit_message": "Upload class-incremental learner", **commit}
    if isinstance(results, (str, Path)):
        results = read_json(results)
    elif isinstance(results, Results):
        results = results.contents()
    tasks = [list(task) for task in state.tasks]
    if results is not None and (not isinstance(results, Mapping) or results.get("class_names") != tasks):
        raise ValueError(f"results belong to another learner: their class_names are not its tasks, {tasks!r:.200}")
    measured = None if results is None else Results.of(results)

    def write_upload(folder: Path, repo_id: str) -> None:
        def fill(temporary: Path) -> None:
            card = model_card(state, repo_id, statistics, measured, dataset_name)
            write(state, temporary, statistics, card, local=False)
            if results is not None:
                write_json(temporary / RESULTS_FILE, results)

        commit_folder(folder, "learner", fill)

    return hub.push(write_upload, repo_id, replaces=(STATISTICS_FILE, MEMORY_FILE, KNOWN_FILE, RESULTS_FILE), **commit)
