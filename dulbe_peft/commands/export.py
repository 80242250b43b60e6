"""`dulbe-peft export`: write a saved learner in a form that works without this package."""

from __future__ import annotations

import argparse
from typing import Any

from dulbe_peft.commands.loading import add_learner, load_learner

EXAMPLE = """example:
  dulbe-peft export out exported --format onnx

lora:          stock LoRA, for a base model that is served anyway
transformers:  a plain model, the adapter folded into its weights
onnx:          one graph from pixels to probabilities; first: pip install 'dulbe_peft[onnx]'

Each format holds the learner's classifier, and a README.md with the lines of code that use it.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "export", help="write a learner in a form that works without this package", epilog=EXAMPLE
    )
    add_learner(parser)
    parser.add_argument("output", help="folder for the export; only an earlier export is replaced")
    parser.add_argument(
        "--format", choices=("lora", "transformers", "onnx"), default="lora", help="what to write (%(default)s)"
    )
    parser.add_argument("--classifier", metavar="NAME", help="which of the learner's classifiers; none: the first")
    parser.add_argument(
        "--compress-to", type=int, metavar="RANK", help="lora: best approximation of this rank; prints its error"
    )
    parser.set_defaults(call=export)


def export(arguments: argparse.Namespace) -> int:
    """Write the export."""
    if arguments.compress_to is not None and arguments.format != "lora":
        raise ValueError(f"--compress-to is for --format lora, got --format {arguments.format}")
    from dulbe_peft.adapter.export import COMPRESSION_FILE
    from dulbe_peft.deployment.export import export_learner
    from dulbe_peft.deployment.graph import GRAPH_FACTS_FILE
    from dulbe_peft.utils.files import read_json

    learner = load_learner(arguments)
    folder = export_learner(learner, arguments.output, arguments.format, arguments.classifier, arguments.compress_to)
    if arguments.compress_to is not None:
        report = read_json(folder / COMPRESSION_FILE)
        errors = {name: row["relative_error"] for name, row in report["layers"].items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"relative error {report['relative_error']:.2e} over all layers, most in {worst}: {errors[worst]:.2e}")
    if arguments.format == "onnx":
        facts = read_json(folder / GRAPH_FACTS_FILE)
        print(
            f"largest difference of a probability from PyTorch's, on random pixels: {facts['largest_difference']:.1e}"
        )
    print(f"written: {folder}")
    print(f"how to use it: {folder / 'README.md'}")
    return 0
