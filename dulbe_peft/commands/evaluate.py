"""`dulbe-peft evaluate`: test a saved learner on images."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dulbe_peft.commands.options import command, labelled_options, learner_options, option

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner

EXAMPLE = """example:
  dulbe-peft evaluate out --data photos
  dulbe-peft evaluate out --data photos --reject 0.05
  dulbe-peft evaluate out --data other-photos --zero-shot --scale 0.25 0.5 0.75

--zero-shot asks the model's own text classifier about the classes of the data that the learner has
not learned, before and after it learned, and with a share of what it learned for each --scale.

The lines for people go to standard error. Where standard output is a file or a pipe, all figures
go there as JSON: dulbe-peft evaluate out --data photos > figures.json
"""


@command(EXAMPLE)
@learner_options()
@labelled_options
@option("--reject", type=float, metavar="SHARE", help='measure "none of these" for these accepted false alarms')
@option("--zero-shot", is_flag=True, help="measure what is still known of unlearned classes")
@option(
    "--scale", type=float, multiple=True, metavar="S...", help="for --zero-shot: shares of what was learned, 0 to 1"
)
def evaluate(
    learner: str,
    load: Callable[[], ClassIncrementalLearner],
    data: str,
    open_images: Callable[[], LabelledImages],
    reject: float | None,
    zero_shot: bool,
    scale: Sequence[float],
) -> int:
    if scale and not zero_shot:
        raise ValueError("--scale is for --zero-shot: give both")
    if zero_shot and reject is not None:
        raise ValueError("--reject is of the learner's classifier, and --zero-shot of the text classifier: give one")
    loaded, images = load(), open_images()
    known = [name for name in images.class_names if name in set(loaded.class_names)]
    unknown = [name for name in images.class_names if name not in set(known)]
    if zero_shot:
        if not unknown:
            raise ValueError(f"all classes in {data!r} have been learned: name images of other classes")
        figures = _zero_shot(loaded, images, known, unknown, list(scale) or [1.0])
    else:
        if not known:
            raise ValueError(f"none of the classes in {data!r} has been learned by {learner!r}")
        figures = _accuracy(loaded, images, known, unknown, reject)
    if not sys.stdout.isatty():  # somebody at a terminal has read the lines for people
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    return 0


def _accuracy(
    learner: ClassIncrementalLearner,
    images: LabelledImages,
    known: list[str],
    unknown: list[str],
    reject: float | None,
) -> dict[str, Any]:
    """How right every classifier is about the classes that were learned."""
    from dulbe_peft.data.inventory import counted
    from dulbe_peft.metrics.evaluation import BASELINES

    chosen = images.select(known)
    found, left_out = learner.evaluate_images(chosen), len(images) - len(chosen)
    not_learned = {"classes": unknown, "num_images": left_out}
    figures = found.figures() | {"num_classes": len(known), "not_learned": not_learned}
    print(f"{counted(len(chosen), 'image')} of {counted(len(known), 'class')}:", file=sys.stderr)
    baselines = {name: figures[f"{name}_accuracy"] for name in BASELINES if f"{name}_accuracy" in figures}
    for name, accuracy in (figures["classifiers"] | baselines).items():
        print(f"  {name:<12} {100 * accuracy:6.2f} % right", file=sys.stderr)
    if unknown:
        listed = f"{', '.join(unknown)} ({counted(left_out, 'image')})"
        print(f"left out, because they were not learned: {listed}", file=sys.stderr)
    if reject is None:
        return figures
    threshold = learner.classifier.rejection_threshold(reject)
    refused = (found.probability < threshold).double().mean().item()
    rows = learner.predictions(images.select(unknown), reject=reject) if unknown else []
    share = sum(not row.known for row in rows) / len(rows) if rows else None
    others = "" if share is None else f", {100 * share:.2f} % of those of other classes"
    print(f"none of these: {100 * refused:.2f} % of the images of known classes{others}", file=sys.stderr)
    return figures | {"rejection": {"asked_for": reject, "refused": refused, "found": share}}


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
