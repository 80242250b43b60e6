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

from dulbe_peft.commands.options import CLASS_NAMES, DATA, STRICT, Load, Share, command, learner_options
from dulbe_peft.commands.outputs import say_next
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import printable

if TYPE_CHECKING:
    import torch

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
) -> int:
    if scale and not zero_shot:
        raise ValueError("--scale is for --zero-shot: give both")
    if zero_shot and reject is not None:
        raise ValueError("--reject is of the learner's classifier, and --zero-shot of the text classifier: give one")
    from dulbe_peft.runs.setup import look_by
    from dulbe_peft.runs.sources import open_images

    loaded = load()
    images = open_images(data, split, class_names, strict, look_by(loaded))
    known = [name for name in images.class_names if name in set(loaded.class_names)]
    unknown = [name for name in images.class_names if name not in set(known)]
    figures: dict[str, Any] = {}
    found = loaded.evaluate_images(images.select(known)) if known and not zero_shot else None
    if zero_shot:
        if not unknown:
            raise ValueError(f"all classes in {data!r} have been learned: name images of other classes")
        figures = _zero_shot(loaded, images, known, unknown, list(scale) or [1.0])
    elif found is not None:
        figures = _accuracy(found, len(images), known, unknown)
    elif reject is None:
        what = "--reject measures how many of their images it refuses"
        raise ValueError(f"none of the classes in {data!r} has been learned by {learner!r}; {what}")
    if reject is not None:
        others = images.select(unknown) if unknown else None
        figures["rejection"] = _rejection(loaded, None if found is None else found.features, others, reject)
    if not sys.stdout.isatty():  # somebody at a terminal has read the lines for people
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    if found is not None:
        which = ["--classifier", loaded.classifier.name]
        say_next("export", learner, f"{Path(learner).name}-export", "--format", "transformers", *which, to=sys.stderr)
    return 0


def _accuracy(found: Evaluation, images: int, known: list[str], unknown: list[str]) -> dict[str, Any]:
    """How right every classifier is about the classes that were learned; `images` counts those of all classes."""
    from dulbe_peft.data.inventory import counted
    from dulbe_peft.metrics.evaluation import BASELINES

    figures, left_out = found.figures(), images - len(found.truth)
    print(f"{counted(len(found.truth), 'image')} of {counted(len(known), 'class')}:", file=sys.stderr)
    baselines = {name: figures[f"{name}_accuracy"] for name in BASELINES if f"{name}_accuracy" in figures}
    for name, accuracy in (figures["classifiers"] | baselines).items():
        print(f"  {name:<12} {100 * accuracy:6.2f} % right", file=sys.stderr)
    if unknown:
        listed = f"{', '.join(map(printable, unknown))} ({counted(left_out, 'image')})"
        print(f"left out, because they were not learned: {listed}", file=sys.stderr)
    return figures | {"num_classes": len(known), "not_learned": {"classes": unknown, "num_images": left_out}}


def _rejection(
    learner: ClassIncrementalLearner, of_known: torch.Tensor | None, others: LabelledImages | None, reject: float
) -> dict[str, Any]:
    """The shares of the images of known and of other classes that are "none of these"; None where there are none."""
    refused = None if of_known is None else learner.classifier.refused(of_known, reject).double().mean().item()
    rows = learner.predictions(others, reject=reject) if others is not None else []
    found = sum(not row.known for row in rows) / len(rows) if rows else None
    shares = {"the images of known classes": refused, "those of other classes": found}
    said = [f"{100 * share:.2f} % of {whose}" for whose, share in shares.items() if share is not None]
    print(f"none of these: {', '.join(said)}", file=sys.stderr)
    return {"asked_for": reject, "refused": refused, "found": found}


def _zero_shot(
    learner: ClassIncrementalLearner, images: LabelledImages, known: list[str], unknown: list[str], scales: list[float]
) -> dict[str, Any]:
    """What the text classifier says of the classes that were not learned, and of the learned ones beside them."""
    from dulbe_peft.data.inventory import counted
    from dulbe_peft.metrics.retention import zero_shot_retention

    others = images.select(unknown)
    learned = [(images.select(known), known)] if known else []
    found = zero_shot_retention(learner, others, scales=scales, learned=learned)
    print(f"{counted(len(others), 'image')} of {counted(len(unknown), 'class')} not learned:", file=sys.stderr)
    for row in found["scales"]:
        beside = "" if row["learned"] is None else f", {100 * row['learned']:6.2f} % of the learned classes"
        print(f"  scale {row['scale']:<5g} {100 * row['unlearned']:6.2f} % right{beside}", file=sys.stderr)
    return found | {"not_learned": unknown, "learned": known}
