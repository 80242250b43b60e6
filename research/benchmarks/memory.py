"""Compare the peak memory of training steps with that of stock LoRA, or measure that of encoding large photographs.

Each measurement runs in a new process. With `--photographs`, it is the peak of `image_embeds` above what the model
needs for one small image, for JPEG files of `--megapixels`, decoded at a fraction of their size and whole.

The figure is the peak resident set size of Linux, VmHWM, so the benchmark runs only on Linux. It is reported with and
without the memory that Python and the imported libraries use before a model is loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from dulbe_peft import ClassIncrementalLearner, LearnerArguments
from research.benchmarks import common, models, ours, stock

STATUS = Path("/proc/self/status")
RESET_PEAK = Path("/proc/self/clear_refs")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--attention", default="sdpa")
    options.add_argument("--photographs", type=int, default=0, help="photographs to encode, instead of steps")
    options.add_argument("--megapixels", type=int, default=48, choices=common.CAMERAS)
    options.add_argument("--side", choices=("ours", "stock", "scaled", "whole"), help=argparse.SUPPRESS)
    options.add_argument("--files", help=argparse.SUPPRESS)
    values = common.parse(options, argv)
    if values.side:
        print(json.dumps(measure(values) if values.side in ("ours", "stock") else encoding(values)))
        return
    rows = photograph_rows(values) if values.photographs else step_rows(values)
    del values.side, values.files
    common.write("memory", values, argv, rows)


def photograph_rows(values: Any) -> list[dict[str, Any]]:
    """Return the rows of encoding photographs."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        common.camera_photographs(Path(folder), values.photographs, common.CAMERAS[values.megapixels])
        for side, goal in (("scaled", "≤ 600"), ("whole", None)):
            peaks = [in_process(side, values, "--files", folder)["peak"] for _ in range(values.repeats)]
            where = f"{values.photographs} photographs of {values.megapixels} megapixels, {side}"
            what = f"memory of image_embeds beyond the model, {common.model_name(values.model)}, {where}"
            rows.append(common.value_row(what, common.rounded(max(peaks)), "MiB", goal))
    return rows


def step_rows(values: Any) -> list[dict[str, Any]]:
    """Return the rows of training steps."""
    results: dict[str, list[dict[str, float]]] = {"ours": [], "stock": []}
    for number in range(values.repeats):
        for side in ("ours", "stock") if number % 2 == 0 else ("stock", "ours"):
            results[side].append(in_process(side, values))
    where = f"{common.model_name(values.model)}, {values.attention}, batch {values.batch}"
    rows = []
    for key, what, goal in (
        ("peak", "peak memory, routed / stock LoRA step", 1.35),
        ("model", "the same without Python and libraries", None),
        ("step", "of it above what was there before the first step", None),
    ):
        pairs = zip(results["ours"], results["stock"], strict=True)
        ratio: dict[str, Any] = {"bytes": common.spread([a[key] / b[key] for a, b in pairs])}
        ratio["MiB"] = {side: common.rounded(median(run[key] for run in runs)) for side, runs in results.items()}
        rows.append({"what": f"{what}, {where}", "goal": goal, "ratio": ratio})
    return rows


def in_process(side: str, values: Any, *more: str) -> dict[str, float]:
    """Measure one side in a new process; return its figures in MiB."""
    options = {"--model": values.model, "--batch": values.batch, "--attention": values.attention, "--side": side}
    flags = [str(item) for pair in options.items() for item in pair]
    command = [sys.executable, "-m", "research.benchmarks.memory", *flags, *more, "--threads", str(values.threads)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure(values: Any) -> dict[str, float]:
    """Return the peak memory of three steps: in total, without the libraries, and above the level before the steps."""
    libraries = resident("VmRSS")
    tower = models.vision_tower(values.model, values.attention)
    batch = (models.pixels(values.batch, tower.config.image_size), torch.arange(values.batch) % 10)
    text, old_text = (models.unit(10, tower.config.projection_dim, seed) for seed in (2, 3))
    if values.side == "ours":
        model = ours.adapted(tower, tasks=1)
        arguments: tuple[Any, ...] = (batch, text, old_text, ours.teacher_embeds(model, batch[0]))
        step: Any = ours.step
    else:
        model, arguments, step = stock.lora(tower), (batch, text), stock.step
    optimizer = stock.adam(model)
    RESET_PEAK.write_text("5")
    before = resident("VmRSS")
    for _ in range(3):
        step(model, optimizer, *arguments)
    peak = resident("VmHWM")
    return {"peak": peak, "model": peak - libraries, "step": peak - before}


def encoding(values: Any) -> dict[str, float]:
    """Return the peak memory of encoding photographs, above that of encoding one small image."""
    clip, processor = models.clip(values.model, values.attention)
    args = LearnerArguments(device="cpu", progress=False, whole_images=values.side == "whole")
    learner = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen")
    learner.use_store(None)
    learner.image_embeds(Image.new("RGB", (64, 64)))
    RESET_PEAK.write_text("5")
    before = resident("VmRSS")
    learner.image_embeds(values.files)
    return {"peak": resident("VmHWM") - before}


def resident(field: str) -> float:
    """Return a memory figure of this process from /proc, in MiB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
