"""example:
  dulbe-peft evaluate out --data photos
  dulbe-peft evaluate out --data photos --reject 0.05
  dulbe-peft evaluate out --data other-photos --zero-shot --scale 0.25 0.5 0.75

--zero-shot asks the model's own text classifier about the classes of the data that the learner has
not learned, before and after it learned, and with a share of what it learned for each --scale.

The lines for people go to standard error. Where standard output is a file or a pipe, all figures
go there as JSON: dulbe-peft evaluate out --data photos > figures.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.photos.commands.named import say_next
from dulbe_peft.photos.commands.options import CLASS_NAMES, DATA, STRICT, Load, Share, command, learner_options
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted, printable

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.evaluation import Evaluation


@command()
@learner_options(choose=True)
def evaluate(
    learner: str,
    load: Load,
    data: str = DATA,
    split: str | None = setting(None, "split of the data (test, or the classes of a folder without splits)"),
    class_names: str | None = CLASS_NAMES,
    strict: bool = STRICT,
    reject: Share | None = setting(None, 'measure "none of these" for these accepted false alarms'),
    zero_shot: bool = setting(False, "measure what is still known of unlearned classes"),
    scale: tuple[float, ...] = setting((), "for --zero-shot: shares of what was learned, 0 to 1"),
) -> None:
    if scale and not zero_shot:
        raise ValueError("--scale is for --zero-shot: give both")
    if zero_shot and reject is not None:
        raise ValueError("--reject is of the learner's classifier, and --zero-shot of the text classifier: give one")
    from dulbe_peft.photos.runs.setup import look_by
    from dulbe_peft.photos.runs.sources import open_images

    loaded = load()
    images = open_images(data, split, class_names, strict, look_by(loaded))
    names = [name for name in images.class_names if name in set(loaded.class_names)]
    others = [name for name in images.class_names if name not in set(names)]
    known, unknown = images.select(names) if names else None, images.select(others) if others else None
    found = None if known is None or zero_shot else loaded.evaluate_images(known)
    if zero_shot and unknown is None:
        raise ValueError(f"all classes in {data!r} have been learned: name images of other classes")
    if not zero_shot and found is None and reject is None:
        what = "--reject measures how many of their images it refuses"
        raise ValueError(f"none of the classes in {data!r} has been learned by {learner!r}; {what}")
    figures = {} if found is None else _accuracy(found, len(names), unknown)
    if zero_shot and unknown is not None:
        figures = _zero_shot(loaded, known, unknown, scale)
    if reject is not None:
        figures["rejection"] = _rejection(loaded, found, unknown, reject)
    if not sys.stdout.isatty():  # somebody at a terminal has read the lines for people
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    if found is not None:
        how = {"format": "transformers", "classifier": loaded.classifier.name}
        say_next("export", learner, f"{Path(learner).name}-export", **how, to=sys.stderr)


def _accuracy(found: Evaluation, classes: int, unknown: LabelledImages | None) -> dict[str, Any]:
    """How right every classifier is about the classes that were learned; others are left out."""
    names, left_out = ([], 0) if unknown is None else (list(unknown.class_names), len(unknown))
    print(f"{counted(len(found.truth), 'image')} of {counted(classes, 'class')}:", file=sys.stderr)
    for name, predicted in (found.classifiers | found.baselines).items():
        print(f"  {name:<12} {100 * found.accuracy(predicted):6.2f} % right", file=sys.stderr)
    if names:
        listed = f"{', '.join(map(printable, names))} ({counted(left_out, 'image')})"
        print(f"left out, because they were not learned: {listed}", file=sys.stderr)
    return found.figures() | {"num_classes": classes, "not_learned": {"classes": names, "num_images": left_out}}


def _rejection(
    learner: ClassIncrementalLearner, found: Evaluation | None, unknown: LabelledImages | None, reject: float
) -> dict[str, Any]:
    """The shares of the images of known and of other classes that are "none of these"; None where there are none."""
    refused = None if found is None else learner.classifier.refused(found.features, reject).double().mean().item()
    rows = learner.predictions(unknown, reject=reject) if unknown is not None else []
    right = sum(not row.known for row in rows) / len(rows) if rows else None
    shares = {"the images of known classes": refused, "those of other classes": right}
    said = [f"{100 * share:.2f} % of {whose}" for whose, share in shares.items() if share is not None]
    print(f"none of these: {', '.join(said)}", file=sys.stderr)
    return {"asked_for": reject, "refused": refused, "found": right}


def _zero_shot(
    learner: ClassIncrementalLearner, known: LabelledImages | None, unknown: LabelledImages, scales: tuple[float, ...]
) -> dict[str, Any]:
    """What the text classifier says of the classes that were not learned, and of the learned ones beside them."""
    from dulbe_peft.metrics.retention import zero_shot_retention

    learned = [] if known is None else [(known, known.class_names)]
    found = zero_shot_retention(learner, unknown, scales=scales, learned=learned)
    print(
        f"{counted(len(unknown), 'image')} of {counted(len(unknown.class_names), 'class')} not learned:",
        file=sys.stderr,
    )
    for row in found["scales"]:
        beside = "" if row["learned"] is None else f", {100 * row['learned']:6.2f} % of the learned classes"
        print(f"  scale {row['scale']:<5g} {100 * row['unlearned']:6.2f} % right{beside}", file=sys.stderr)
    return found | {"not_learned": unknown.class_names, "learned": known.class_names if known else []}
