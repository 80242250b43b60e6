"""Measure reading and encoding of photographs as large as a phone's, against the same parts done by hand.

`--megapixels` are 12 or 48, of which a few JPEG files are written. "By hand" reads each photograph whole with Pillow
and the model's processor, one after the other, and then encodes them. A CPU pads batches of fewer than eight images,
so `--photographs` is best a multiple of eight. `--models` are those of the other benchmarks: "small" stands for an
encoder that is much faster than reading, and "vit-b-16" for the usual one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.data import images as reading
from dulbe_peft.data.store import VARIABLE
from dulbe_peft.encoders.loading import pixel_values, unit_image_embeds
from dulbe_peft.photos.commands.main import main as command
from research.benchmarks import common
from research.benchmarks.encode import saved_model


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=5, model=None)
    options.add_argument("--models", nargs="+", default=["small", "vit-b-16"])
    options.add_argument("--megapixels", type=int, nargs="+", default=[12, 48], choices=common.CAMERAS)
    options.add_argument("--photographs", type=int, default=16)
    options.add_argument("--run", type=int, default=0, help="photographs of a whole run, in new processes")
    values = common.parse(options, argv)
    if values.quick:
        values.models, values.photographs, values.megapixels = ["tiny"], 4, [12]
    rows: list[dict[str, Any]] = []
    for megapixels in values.megapixels:
        size = (640, 480) if values.quick else common.CAMERAS[megapixels]
        with tempfile.TemporaryDirectory() as root, patch.dict(os.environ, {VARIABLE: str(Path(root, "f.sqlite"))}):
            data = Path(root, "photos")
            files = common.camera_folders(data, max(values.photographs, values.run), size, classes=2)
            where = [f"{common.model_name(model)}, {megapixels} megapixels" for model in values.models]
            for model, place in zip(values.models, where, strict=True):
                saved_model(model, Path(root, model))
                rows += encoding(values, Path(root, model), files[: values.photographs], place)
                if values.run:
                    rows += whole_run(values, Path(root, model), data, place)
            rows += decodings(Path(root, values.models[0]), data, where[0])
    common.write("camera", values, argv, rows)


@torch.no_grad()
def encoding(values: argparse.Namespace, model: Path, files: list[str], where: str) -> list[dict[str, Any]]:
    """Compare `image_embeds` with reading each photograph whole and then encoding all."""
    clip, processor = load_dual_encoder(str(model))

    def learner(whole: bool) -> ClassIncrementalLearner:
        args = LearnerArguments(device="cpu", progress=False, precision="float32", whole_images=whole)
        made = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen")
        made.use_store(None)
        return made

    scaled, whole, batch = learner(False), learner(True), 8

    def read() -> torch.Tensor:
        pixels = []
        for file in files:
            with Image.open(file) as image:
                pixels.append(pixel_values(processor, image.convert("RGB")))
        return torch.stack(pixels)

    def tower(pixels: torch.Tensor) -> None:
        for part in pixels.split(batch):
            unit_image_embeds(clip, part)

    sides: dict[str, Callable[[], object]] = {
        "ours": partial(scaled.image_embeds, files),
        "whole": partial(whole.image_embeds, files),
        "read": read,
        "tower": partial(tower, read()),
        "by hand": lambda: tower(read()),
    }
    times = common.compare(sides, values.repeats)
    rows = []
    for name, goal in (("ours", 0.55), ("whole", None)):
        cpu = zip(times[name]["cpu"], times["tower"]["cpu"], times["read"]["cpu"], strict=True)
        shares = [(all_of_it - encoder) / hand for all_of_it, encoder, hand in cpu]
        what = f"CPU of image_embeds without the tower's / decoding and resizing whole, {name}, {where}"
        rows.append({"what": what, "goal": goal, "ratio": {"cpu": common.spread(shares)}})
    rows.append(common.row(f"image_embeds / reading, then encoding, {where}", times, "ours", "by hand", 0.60))
    return rows


def decodings(model: Path, data: Path, where: str) -> list[dict[str, Any]]:
    """Return how often `run` decodes each photograph, also after `check` and with training, and how often `learn`."""
    count, real = 0, reading.decode_file
    number = len(list(data.rglob("*.jpg")))

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return real(*given)

    def call(*words: object) -> None:
        if command([*map(str, words)]):
            raise AssertionError("the command failed")

    rows, end = [], ("--no-progress", "--device", "cpu")
    new = ("--model", model, "--data", data, *end)
    for name in ("run", "run after check", "run --strategy dulbe", "learn"):
        out = data.parent / name
        with patch.object(reading, "decode_file", counted), patch.dict(os.environ, {VARIABLE: f"{out}.sqlite"}):
            if name == "run after check":
                call("check", data)
            count = 0
            if name == "learn":
                later = data.parent / "later"
                for file in data.rglob("*.jpg"):  # other bytes of the same pictures, as new classes
                    place = later / f"new {file.parent.name}" / file.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(file.read_bytes() + b"later")
                call("learn", data.parent / "run", "--data", later, "--output", out, *end)
            else:
                call("run", *new, "--output", out, *(["--strategy", "dulbe"] if "dulbe" in name else []))
        rows.append(common.value_row(f"decodings of a photograph by {name}, {where}", count / number, "", "1.0"))
    return rows


def whole_run(values: argparse.Namespace, model: Path, data: Path, where: str) -> list[dict[str, Any]]:
    """Compare the CPU and wall time of `run` in a new process with those of `run --whole-images --num-workers 0`."""
    times: common.Times = {name: {"wall": [], "cpu": []} for name in ("ours", "whole")}
    for number in range(values.repeats):
        for name, flags in (("ours", ()), ("whole", ("--whole-images", "--num-workers", "0"))):
            argv = ["--model", str(model), "--data", str(data), "--no-store", "--no-progress", "--device", "cpu"]
            argv += ["--output", str(data.parent / f"{model.name}-{name}{number}"), *flags]
            for clock, seconds in common.child("-m", "dulbe_peft", "run", *argv).items():
                times[name][clock].append(seconds)
    what = f"run / run with whole images and no threads, {values.run} photographs, {where}"
    return [common.row(what, times, "ours", "whole", 0.65)]


if __name__ == "__main__":
    main()
