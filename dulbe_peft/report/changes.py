"""What training changed, from a run's folder: captures, the bridge's depths, and drift where features were kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.metrics.diagnostics import DepthAccuracy, ReliabilityProfile, depth_accuracy, reliability_profile
from dulbe_peft.metrics.drift import TaskDrift, coordinate_plane, drift_by_task, old_test_features
from dulbe_peft.metrics.features import FEATURES_FOLDER, TaskFeatures, read_features
from dulbe_peft.report.change_figures import arrow_figure, capture_figure, depth_figure
from dulbe_peft.report.collect import Run, as_written, read_run
from dulbe_peft.report.figures import inline_svg
from dulbe_peft.utils import folders
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.folders import newest_task

_MOST_ARROWS = 400  # that a picture still shows one by one


@dataclass(frozen=True)
class Changes:
    """What training changed; what the run did not keep is None or empty.

    Attributes:
        profile: reliability of the bridge's depths after the last task.
        accuracy: test accuracy of each depth after the last task.
        drift: how far each task from the second on moved features.
        tasks: the features that were kept.
    """

    profile: ReliabilityProfile | None
    accuracy: DepthAccuracy | None
    drift: list[TaskDrift]
    tasks: list[TaskFeatures]


def read_changes(run: Run) -> Changes:
    """What a run's saved bridge ensemble and kept features tell, without images.

    Raises:
        ValueError: a file is not as a run writes it.

    >>> read_changes(read_run("out")).accuracy.weighted  # doctest: +SKIP
    0.8125
    """
    with as_written(run.folder):
        head, tasks = _bridge(run), _features(run)
        profile = None if head is None else reliability_profile(head)
        accuracy = None
        tests = tasks[-1].tests if tasks else {}
        if head is not None and tests:
            features, truth = (torch.cat(parts) for parts in zip(*tests.values(), strict=True))
            accuracy = depth_accuracy(head, features, truth)
        return Changes(profile, accuracy, drift_by_task(tasks), tasks)


def _bridge(run: Run) -> BridgeEnsembleHead | None:
    """The bridge ensemble after the last finished task; None where the run has none, or its task folders are gone."""
    newest = newest_task(run.folder, lambda _: None)
    if newest is None or not (newest[0] / BridgeEnsembleHead.file_names()[1]).is_file():
        return None
    return BridgeEnsembleHead.from_pretrained(newest[0])


def _features(run: Run) -> list[TaskFeatures]:
    """The features of all tasks; empty where not every task's were kept."""
    if not (run.folder / FEATURES_FOLDER).is_dir():
        return []
    tasks = read_features(run.folder)[: len(run.learned)]
    kept = [list(task.closing.class_names) for task in tasks]
    return tasks if kept == [list(names) for names in run.learned] else []


def changes_view(run: Run, key: str) -> dict[str, Any]:
    """What the page shows of it; `key` is a word that no other run of the page has."""
    changes = read_changes(run)
    profile, accuracy = changes.profile, changes.accuracy
    view: dict[str, Any] = {"changes": changes, "depths": "", "depth_rows": [], "drift": drift_rows(changes.drift)}
    if profile is not None:
        view["depths"] = inline_svg(depth_figure(profile, accuracy), f"{key}-depths")
        alone = [None] * len(profile.depths) if accuracy is None else accuracy.alone.tolist()
        columns = (profile.depths.tolist(), profile.mean.tolist(), profile.spread.tolist(), alone)
        view["depth_rows"] = list(zip(*columns, strict=True))
    return view


def drift_rows(drift: Sequence[TaskDrift]) -> list[TaskDrift]:
    """The tasks of which at least one figure is known."""
    return [row for row in drift if any(value is not None for name, value in vars(row).items() if name != "task")]


def write_figures(run: str | Path, folder: str | Path) -> list[Path]:
    """Write the diagnostic figures of a run that need no images, as PNG, and their numbers as `diagnostics.json`.

    Args:
        run: the folder that a run has written.
        folder: where to write; made where it is not there.

    Returns:
        The files. A figure whose facts the run did not keep is left out.

    Raises:
        FileNotFoundError: there is no such run.
        FileExistsError: `folder` lies in a saved learner, or holds a picture of such a name without the numbers.
        ValueError: the folder holds no finished task, or a file in it is not as a run writes it.
        OSError: a file cannot be written.

    >>> write_figures("out", "figures")  # doctest: +SKIP
    [PosixPath('figures/diagnostics.json'), PosixPath('figures/captures.png'), PosixPath('figures/depths.png')]
    """
    read, target = read_run(run), Path(folder)
    changes = read_changes(read)
    figures: dict[str, Any] = {}
    if any(record.get("shared_capture") is not None for record in read.records):
        figures["captures"] = capture_figure(read.records)
    if changes.profile is not None:
        figures["depths"] = depth_figure(changes.profile, changes.accuracy)
    figures |= _arrows(changes.tasks)
    folders.check_outside_learners(target, "write figures")
    files = [target / "diagnostics.json", *(target / f"{name}.png" for name in figures)]
    taken = [path for path in files if path.exists()]
    if taken and not files[0].exists():
        raise FileExistsError(f"{taken[0]} is not of an earlier report: choose another folder, nothing is replaced")
    target.mkdir(parents=True, exist_ok=True)
    numbers = {
        "captures": [
            {name: record.get(name) for name in ("shared_capture", "residual_capture")} for record in read.records
        ],
        "reliability": _plain(changes.profile),
        "depths": _plain(changes.accuracy),
        "drift": [asdict(row) for row in changes.drift],
    }
    write_json(files[0], numbers)
    for path, figure in zip(files[1:], figures.values(), strict=True):
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    return files


def _arrows(tasks: Sequence[TaskFeatures]) -> dict[str, Any]:
    """A picture of the first task's test images for each later task, by the first task's class names."""
    found = {}
    for number, (earlier, task) in enumerate(itertools.pairwise(tasks), 2):
        first = len(tasks[0].closing.class_names)
        old = old_test_features(earlier, task)
        if old is None or earlier.texts is None or first < 2:
            continue
        before, after, truth = old
        places = coordinate_plane(before[truth < first], after[truth < first], earlier.texts[:first])
        if len(places[0]):
            chosen = slice(None, None, -(-len(places[0]) // _MOST_ARROWS))
            found[f"drift-task-{number:03d}"] = arrow_figure(places[0][chosen], places[1][chosen])
    return found


def _plain(figures: Any) -> dict[str, Any] | None:
    """A dataclass of tensors and floats as JSON takes it; NaN is null there."""
    if figures is None:
        return None
    return {n: _without_nan(v.tolist()) if isinstance(v, torch.Tensor) else v for n, v in asdict(figures).items()}


def _without_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_without_nan(value) for value in values]
    return values if values == values else None
