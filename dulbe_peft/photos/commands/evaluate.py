"""example:
  dulbe-peft evaluate out --data photos
  dulbe-peft evaluate out --data photos --reject 0.05
  dulbe-peft evaluate out --data other-photos --zero-shot --scale 0.25 0.5 0.75

--zero-shot tests the model's text classifier on the classes that the learner has not learned: before
and after learning, and with the learned change scaled by each --scale.

The summary goes to standard error. If standard output is a file or a pipe, all figures are written
to it as JSON: dulbe-peft evaluate out --data photos > figures.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dulbe_peft.arguments import Query, Share
from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import DATA, LABELS
from dulbe_peft.photos.commands.options import Load, command, data_settings, learner_options
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted, printable

if TYPE_CHECKING:
    import numpy as np

    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.evaluation import Evaluation


@command(settings=data_settings())
@learner_options(choose=True)
def evaluate(
    learner: str,
    load: Load,
    data: str | None = DATA,
    labels: str | None = LABELS,
    split: str | None = setting(None, "split of the data (default: test, or all of a folder without splits)"),
    reject: Share | None = setting(None, 'measure "none of these", with this share of false alarms'),
    zero_shot: bool = setting(False, "measure the zero-shot accuracy on classes that were not learned"),
    scale: tuple[float, ...] = setting((), "for --zero-shot: factors of the learned change, 0 to 1"),
    with_learned: bool = setting(False, "test on images that were learned, too"),
    **reading: object,
) -> None:
    if scale and not zero_shot:
        raise ValueError("--scale needs --zero-shot: give both")
    if zero_shot and reject is not None:
        raise ValueError("--reject tests the learner's classifier, and --zero-shot the text classifier: give only one")
    from dulbe_peft.photos.runs.learned_images import without_learned
    from dulbe_peft.photos.runs.setup import data_or_labels, open_images, unreadable_finder

    data = data_or_labels(data, labels)
    source, loaded = DataSource.of({"data": data, **reading}), load()
    given = open_images(source, split, unreadable_finder(loaded))
    images = given if with_learned else without_learned(loaded, given)
    if not len(images):
        raise ValueError(f"{learner!r} has learned all images of {data!r}: give others, or --with-learned")
    present = [name for label, name in enumerate(images.class_names) if label in set(images.labels.tolist())]
    names = [name for name in present if name in set(loaded.class_names)]
    others = [name for name in present if name not in set(names)]
    known, unknown = images.select(names) if names else None, images.select(others) if others else None
    evaluation = None if known is None or zero_shot else loaded.evaluate_images(known)
    if zero_shot and unknown is None:
        raise ValueError(f"all classes in {data!r} have been learned: give images of other classes")
    if not zero_shot and evaluation is None and reject is None:
        advice = "--reject measures how many of their images are rejected"
        raise ValueError(f"none of the classes in {data!r} has been learned by {learner!r}; {advice}")
    figures = {} if evaluation is None else _accuracy(evaluation, len(names), unknown)
    if evaluation is not None and known is not None and known.groups is not None:
        figures["groups"] = _by_group(evaluation, known.groups)
    if zero_shot and unknown is not None:
        figures = _zero_shot(loaded, known, unknown, scale)
    if reject is not None:
        figures["rejection"] = _rejection(loaded, evaluation, unknown, reject)
    figures["learned_images_left_out"] = len(given) - len(images)
    if not sys.stdout.isatty():  # a person at a terminal reads the summary instead
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    if evaluation is not None:
        flags = {"format": "transformers", "classifier": loaded.classifier.name}
        print_next_command("export", learner, f"{Path(learner).name}-export", **flags, to=sys.stderr)


def _accuracy(evaluation: Evaluation, classes: int, unknown: LabelledImages | None) -> dict[str, object]:
    """Print and return the accuracy of every classifier on the learned classes; name the classes left out."""
    names, left_out = ([], 0) if unknown is None else (list(unknown.class_names), len(unknown))
    print(f"accuracy on {counted(len(evaluation.truth), 'image')} of {counted(classes, 'class')}:", file=sys.stderr)
    for name, predicted in (evaluation.classifiers | evaluation.baselines).items():
        print(f"  {name:<12} {100 * evaluation.accuracy(predicted):6.2f} %", file=sys.stderr)
    if names:
        listed = f"{', '.join(map(printable, names))} ({counted(left_out, 'image')})"
        print(f"left out, because they were not learned: {listed}", file=sys.stderr)
    not_learned = {"classes": names, "num_images": left_out}
    return {**evaluation.figures(), "num_classes": classes, "not_learned": not_learned}


def _by_group(evaluation: Evaluation, groups: np.ndarray) -> dict[str, object]:
    """Print and return the number of groups, and the mean of the groups' accuracies by classifier."""
    import numpy as np

    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    shares = {
        name: float((np.bincount(place, np.asarray(predicted == evaluation.truth, dtype=float)) / sizes).mean())
        for name, predicted in evaluation.classifiers.items()
    }
    listed = ", ".join(f"{name} {100 * share:.2f} %" for name, share in shares.items())
    print(f"where each of the {counted(len(sizes), 'group')} counts once: {listed}", file=sys.stderr)
    return {"num_groups": len(sizes), "accuracy": shares}


def _rejection(
    learner: ClassIncrementalLearner, evaluation: Evaluation | None, unknown: LabelledImages | None, reject: float
) -> dict[str, object]:
    """Print and return the share of images that is rejected, for known and for other classes."""
    refused = None
    if evaluation is not None:
        refused = learner.classifier.refused(evaluation.features, reject).double().mean().item()
    rows = learner.predictions(unknown, Query(reject=reject)) if unknown is not None else []
    detected = sum(not row.known for row in rows) / len(rows) if rows else None
    shares = {"the images of known classes": refused, "the images of other classes": detected}
    parts = [f"{100 * share:.2f} % of {images}" for images, share in shares.items() if share is not None]
    print(f"none of these: {', '.join(parts)}", file=sys.stderr)
    return {"asked_for": reject, "refused": refused, "found": detected}


def _zero_shot(
    learner: ClassIncrementalLearner, known: LabelledImages | None, unknown: LabelledImages, scales: tuple[float, ...]
) -> dict[str, object]:
    """Print and return the text classifier's accuracy on classes that were not learned, and on learned ones if any."""
    from dulbe_peft.streams.retention import zero_shot_retention

    learned = [] if known is None else [(known, known.class_names)]
    retention = zero_shot_retention(learner, unknown, scales=scales, learned=learned)
    images, classes = counted(len(unknown), "image"), counted(len(unknown.class_names), "class")
    print(f"zero-shot accuracy on {images} of {classes} not learned:", file=sys.stderr)
    for row in retention["scales"]:
        beside = "" if row["learned"] is None else f", {100 * row['learned']:6.2f} % on the learned classes"
        print(f"  scale {row['scale']:<5g} {100 * row['unlearned']:6.2f} %{beside}", file=sys.stderr)
    return retention | {"not_learned": unknown.class_names, "learned": known.class_names if known else []}
