"""`dulbe-peft export`: write a saved learner in a form that works without this package."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dulbe_peft.commands.loading import add_learner, load_learner


def add(commands: Any) -> None:
    parser = commands.add_parser("export", help="write a saved learner's adapter as stock LoRA")
    add_learner(parser)
    parser.add_argument("output", help="folder for the LoRA adapter")
    parser.add_argument(
        "--compress-to", type=int, metavar="RANK", help="best approximation of this rank; prints its relative error"
    )
    parser.set_defaults(call=export)


def export(arguments: argparse.Namespace) -> int:
    from dulbe_peft.adapter.export import COMPRESSION_FILE, export_lora

    learner = load_learner(arguments)
    if learner.state.adapter is None:
        raise ValueError(
            f"{arguments.learner!r} has no adapter to export: its strategy {learner.strategy.name!r} trains nothing"
        )
    folder = export_lora(learner.model, arguments.output, arguments.compress_to)
    if arguments.compress_to is not None:
        report = json.loads((folder / COMPRESSION_FILE).read_text(encoding="utf-8"))
        errors = {name: row["relative_error"] for name, row in report["layers"].items()}
        worst = max(errors, key=errors.__getitem__)
        print(f"relative error {report['relative_error']:.2e} over all layers, most in {worst}: {errors[worst]:.2e}")
    print(f"written: {folder}")
    return 0
