"""Read from a run's folder what training changed: captures, the bridge's depths, and the drift of kept features."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic_core import from_json, to_json

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.pooled_bridge import PooledBridgeHead
from dulbe_peft.metrics.task_features import FEATURES_FOLDER, TaskFeatures, read_features
from dulbe_peft.photos.report.run_folder import RunFolder, read_run
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.folders import check_outside_saved, check_replaceable
from research.diagnostics import measures as diagnostics
from research.diagnostics.plots import arrow_figure, capture_figure, depth_figure

_MOST_ARROWS = 400  # more arrows in a figure could not be told apart
_NUMBERS_FILE = "diagnostics.json"


@dataclass(frozen=True)
class TrainingEffects:
    """What training changed: the bridge's depths, and the drift. Fields are None or empty if nothing was kept."""

    profile: diagnostics.ReliabilityProfile | None
    accuracy: diagnostics.DepthAccuracy | None
    drift: list[diagnostics.TaskDrift]
    features: list[TaskFeatures]


def read_effects(run: RunFolder) -> TrainingEffects:
    """Compute the effects of training from a run's saved bridge ensemble and kept features, without images."""
    head: BridgeEnsembleHead | None = None
    saved = run.learner
    for kind in (PooledBridgeHead, BridgeEnsembleHead):
        if head is None and saved is not None and (saved / kind.file_names()[1]).is_file():
            head = kind.from_pretrained(saved)
    features: list[TaskFeatures] = []
    if (run.folder / FEATURES_FOLDER).is_dir():
        stored = read_features(run.folder)[: len(run.learned)]
        if [list(task.closing.class_names) for task in stored] == run.learned:  # features of every task of this run
            features = stored
    accuracy = None
    if head is not None and features and features[-1].tests:
        embeds, truth = (torch.cat(parts) for parts in zip(*features[-1].tests.values(), strict=True))
        accuracy = diagnostics.depth_accuracy(head, embeds, truth)
    profile = None if head is None else diagnostics.reliability_profile(head)
    return TrainingEffects(profile, accuracy, diagnostics.drift_by_task(features), features)


def write_figures(run: str | Path, folder: str | Path) -> list[Path]:
    """Write the diagnostic figures of a run as PNG, and their numbers as `diagnostics.json`; return the files.

    A figure is left out if the run did not keep its data. No figure needs images.
    """
    run_folder, target = read_run(run), Path(folder)
    effects, captures = read_effects(run_folder), ("shared_capture", "residual_capture")
    figures: dict[str, Any] = {}
    if run_folder.captured:
        figures["captures"] = capture_figure(run_folder.records)
    if effects.profile is not None:
        figures["depths"] = depth_figure(effects.profile, effects.accuracy)
    figures |= _arrow_figures(effects.features)
    check_outside_saved(target, "write figures")
    files = [target / _NUMBERS_FILE, *(target / f"{name}.png" for name in figures)]
    check_replaceable(files)
    target.mkdir(parents=True, exist_ok=True)
    numbers = {
        "captures": [{name: getattr(record, name) for name in captures} for record in run_folder.records],
        "reliability": effects.profile,
        "depths": effects.accuracy,
        "drift": effects.drift,
    }
    write_json(files[0], from_json(to_json(numbers, fallback=torch.Tensor.tolist, inf_nan_mode="null")))
    for path, figure in zip(files[1:], figures.values(), strict=True):
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    return files


def _arrow_figures(tasks: Sequence[TaskFeatures]) -> dict[str, Any]:
    """Draw, for each later task, how it moved the first task's test images in the coordinates of their class names."""
    figures = {}
    for number, (earlier, task) in enumerate(itertools.pairwise(tasks), 2):
        first = len(tasks[0].closing.class_names)
        old, texts = diagnostics.old_test_features(earlier, task), earlier.closing.texts
        if old is None or texts is None or first < 2:
            continue
        before, after, truth = old
        start, end = diagnostics.coordinate_plane(before[truth < first], after[truth < first], texts[:first])
        if len(start):
            shown = slice(None, None, -(-len(start) // _MOST_ARROWS))
            figures[f"drift-task-{number:03d}"] = arrow_figure(start[shown], end[shown])
    return figures
