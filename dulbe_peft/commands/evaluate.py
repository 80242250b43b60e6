"""`dulbe-peft evaluate`: test a saved learner on images."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dulbe_peft.commands.loading import add_learner, load_learner

EXAMPLE = """example:
  dulbe-peft evaluate out --data photos
  dulbe-peft evaluate out --data photos --reject 0.05

The figures go to standard output as JSON, in full. The lines for people go to standard error.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("evaluate", help="test a saved learner on images", epilog=EXAMPLE)
    add_learner(parser)
    parser.add_argument("--data", required=True, help="images: a folder, an .npz file, or hf:NAME for datasets")
    parser.add_argument("--split", default="test", help="split of the data (%(default)s); '' for a folder of classes")
    parser.add_argument("--class-names", metavar="FILE", help="text file with the names of the classes, as for run")
    parser.add_argument(
        "--reject", type=float, metavar="SHARE", help='measure "none of these" for these accepted false alarms'
    )
    parser.set_defaults(call=evaluate)


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the figures."""
    from dulbe_peft.streams.inventory import counted
    from dulbe_peft.streams.protocols import rename_classes
    from dulbe_peft.streams.readers import load_data
    from dulbe_peft.streams.samples import dataset_class_names, dataset_labels
    from dulbe_peft.streams.tasks import select_classes

    learner = load_learner(arguments)
    data: Any = load_data(arguments.data, split=arguments.split or None)
    if arguments.class_names:
        data = rename_classes(data, arguments.class_names)
    carried = dataset_class_names(data) or ()
    known = [name for name in carried if name in set(learner.class_names)]
    if not known:
        raise ValueError(f"none of the classes in {arguments.data!r} has been learned by {arguments.learner!r}")
    unknown = [name for name in carried if name not in set(known)]
    chosen = select_classes(data, known)
    found = learner.evaluate_images(chosen)
    figures = found.figures() | {
        "num_classes": len(known),
        "not_learned": {"classes": unknown, "num_images": len(dataset_labels(data)) - len(chosen)},
    }
    print(f"{counted(len(chosen), 'image')} of {counted(len(known), 'class')}:", file=sys.stderr)
    for name, accuracy in figures["classifiers"].items():
        print(f"  {name:<12} {100 * accuracy:6.2f} % right", file=sys.stderr)
    if unknown:
        left_out = figures["not_learned"]["num_images"]
        print(
            f"left out, because they were not learned: {', '.join(unknown)} ({counted(left_out, 'image')})",
            file=sys.stderr,
        )
    if arguments.reject is not None:
        others: Any = select_classes(data, unknown) if unknown else []
        figures["rejection"] = _rejection(learner, arguments.reject, found, others)
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    return 0


def _rejection(learner: Any, share: float, known: Any, unknown: Any) -> dict[str, Any]:
    """How many images are answered "none of these", of classes that were learned and of those that were not."""
    threshold = learner.classifier.rejection_threshold(share)
    refused = (known.probability < threshold).double().mean().item()
    rows = learner.predictions(unknown, reject=share)
    found = sum(not row.known for row in rows) / len(rows) if rows else None
    others = "" if found is None else f", {100 * found:.2f} % of those of other classes"
    print(f"none of these: {100 * refused:.2f} % of the images of known classes{others}", file=sys.stderr)
    return {"asked_for": share, "refused": refused, "found": found}
