"""`dulbe-peft evaluate`: test a saved learner on images."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dulbe_peft.commands.data import add_labelled, load_labelled
from dulbe_peft.commands.loading import add_learner, load_learner

EXAMPLE = """example:
  dulbe-peft evaluate out --data photos
  dulbe-peft evaluate out --data photos --reject 0.05
  dulbe-peft evaluate out --data other-photos --zero-shot --scale 0.25 0.5 0.75

--zero-shot asks the model's own text classifier about the classes of the data that the learner has
not learned, before and after it learned, and with a share of what it learned for each --scale.

The lines for people go to standard error. Where standard output is a file or a pipe, all figures
go there as JSON: dulbe-peft evaluate out --data photos > figures.json
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("evaluate", help="test a saved learner on images", epilog=EXAMPLE)
    add_learner(parser)
    add_labelled(parser)
    parser.add_argument(
        "--reject", type=float, metavar="SHARE", help='measure "none of these" for these accepted false alarms'
    )
    parser.add_argument("--zero-shot", action="store_true", help="measure what is still known of unlearned classes")
    parser.add_argument(
        "--scale", type=float, nargs="+", metavar="S", help="for --zero-shot: shares of what was learned, in [0, 1]"
    )
    parser.set_defaults(call=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    from dulbe_peft.data.inventory import counted
    from dulbe_peft.metrics.evaluation import BASELINES

    if arguments.scale and not arguments.zero_shot:
        raise ValueError("--scale is for --zero-shot: give both")
    if arguments.zero_shot and arguments.reject is not None:
        raise ValueError("--reject is of the learner's classifier, and --zero-shot of the text classifier: give one")
    learner = load_learner(arguments)
    data = load_labelled(arguments)
    known = [name for name in data.class_names if name in set(learner.class_names)]
    unknown = [name for name in data.class_names if name not in set(known)]
    if arguments.zero_shot:
        _print_in_full(_zero_shot(arguments, learner, data, known, unknown))
        return 0
    if not known:
        raise ValueError(f"none of the classes in {arguments.data!r} has been learned by {arguments.learner!r}")
    chosen = data.select(known)
    found = learner.evaluate_images(chosen)
    figures = found.figures() | {
        "num_classes": len(known),
        "not_learned": {"classes": unknown, "num_images": len(data) - len(chosen)},
    }
    print(f"{counted(len(chosen), 'image')} of {counted(len(known), 'class')}:", file=sys.stderr)
    baselines = {name: figures[f"{name}_accuracy"] for name in BASELINES if f"{name}_accuracy" in figures}
    for name, accuracy in (figures["classifiers"] | baselines).items():
        print(f"  {name:<12} {100 * accuracy:6.2f} % right", file=sys.stderr)
    if unknown:
        left_out = figures["not_learned"]["num_images"]
        print(
            f"left out, because they were not learned: {', '.join(unknown)} ({counted(left_out, 'image')})",
            file=sys.stderr,
        )
    if arguments.reject is not None:
        others: Any = data.select(unknown) if unknown else []
        figures["rejection"] = _rejection(learner, arguments.reject, found, others)
    _print_in_full(figures)
    return 0


def _print_in_full(figures: dict[str, Any]) -> None:
    """As JSON, where a program or a file reads it; somebody at a terminal has read the lines for people."""
    if not sys.stdout.isatty():
        print(json.dumps(figures, indent=2, ensure_ascii=False))


def _zero_shot(
    arguments: argparse.Namespace, learner: Any, data: Any, known: list[str], unknown: list[str]
) -> dict[str, Any]:
    """What the text classifier says of the classes that were not learned, and of the learned ones beside them."""
    from dulbe_peft.data.inventory import counted
    from dulbe_peft.metrics.retention import zero_shot_retention

    if not unknown:
        raise ValueError(f"all classes in {arguments.data!r} have been learned: name images of other classes")
    others = data.select(unknown)
    learned = [(data.select(known), known)] if known else []
    found = zero_shot_retention(learner, others, scales=arguments.scale or [1.0], learned=learned)
    print(f"{counted(len(others), 'image')} of {counted(len(unknown), 'class')} not learned:", file=sys.stderr)
    for row in found["scales"]:
        beside = "" if row["learned"] is None else f", {100 * row['learned']:6.2f} % of the learned classes"
        print(f"  scale {row['scale']:<5g} {100 * row['unlearned']:6.2f} % right{beside}", file=sys.stderr)
    return found | {"not_learned": unknown, "learned": known}


def _rejection(learner: Any, share: float, known: Any, unknown: Any) -> dict[str, Any]:
    """How many images are answered "none of these", of classes that were learned and of those that were not."""
    threshold = learner.classifier.rejection_threshold(share)
    refused = (known.probability < threshold).double().mean().item()
    rows = learner.predictions(unknown, reject=share)
    found = sum(not row.known for row in rows) / len(rows) if rows else None
    others = "" if found is None else f", {100 * found:.2f} % of those of other classes"
    print(f"none of these: {100 * refused:.2f} % of the images of known classes{others}", file=sys.stderr)
    return {"asked_for": share, "refused": refused, "found": found}
