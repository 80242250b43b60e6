"""`dulbe-peft export`: write a saved learner in a form that works without this package."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dulbe_peft.commands.loading import add_learner, load_learner

FORMATS = {
    "lora": "stock LoRA beside the base model (the default)",
    "transformers": "a plain model, the adapter in its weights",
    "onnx": "one graph from pixels to probabilities",
}


def add(commands: Any) -> None:
    parser = commands.add_parser("export", help="write a saved learner for use without this package")
    add_learner(parser)
    parser.add_argument("output", help="folder for the export; its README.md has the lines that use it")
    listed = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    parser.add_argument("--format", choices=list(FORMATS), default="lora", help=listed)
    parser.add_argument("--classifier", metavar="NAME", help="which of the learner's classifiers; none: the first")
    parser.add_argument(
        "--compress-to",
        type=int,
        metavar="RANK",
        help="with lora: best approximation of this rank; prints its relative error",
    )
    parser.set_defaults(call=export)


def export(arguments: argparse.Namespace) -> int:
    if arguments.compress_to is not None and arguments.format != "lora":
        raise ValueError(f"--compress-to is for --format lora, got --format {arguments.format}")
    from dulbe_peft.adapter.export import COMPRESSION_FILE
    from dulbe_peft.deployment.export import export_learner
    from dulbe_peft.deployment.graph import GRAPH_FACTS_FILE

    learner = load_learner(arguments)
    folder = export_learner(learner, arguments.output, arguments.format, arguments.classifier, arguments.compress_to)
    if arguments.compress_to is not None:
        report = json.loads((folder / COMPRESSION_FILE).read_text(encoding="utf-8"))
        errors = {name: row["relative_error"] for name, row in report["layers"].items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"relative error {report['relative_error']:.2e} over all layers, most in {worst}: {errors[worst]:.2e}")
    if arguments.format == "onnx":
        facts = json.loads((folder / GRAPH_FACTS_FILE).read_text(encoding="utf-8"))
        print(
            f"largest difference of a probability from PyTorch's, on random pixels: {facts['largest_difference']:.1e}"
        )
    print(f"written: {folder}")
    print(f"how to use it: {folder / 'README.md'}")
    return 0
