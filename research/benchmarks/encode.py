"""Measure image encoding: each backend and precision, and the whole way from photographs on disk to a feature table.

Each backend and precision is compared with torch in float32, on towers with random weights. `--answers MODEL DATA`
counts equal answers of a real model, where the answer is the class with the nearest name. `--photographs` compares
writing a feature table with the feature pipeline of transformers and, if it is installed, with CLIP in
sentence-transformers, each with its best batch size. `--run` compares the CPU time of a whole `dulbe-peft run`,
without its imports, with the time of its encoder. On a GPU, only torch is measured: --device cuda --batch 256
--compile.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import CLIPImageProcessorPil, pipeline

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.store import VARIABLE
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders import backends
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.photos.commands.main import main as command
from dulbe_peft.utils.processes import has_bfloat16
from research.benchmarks import common, models

SIZE = (500, 375)
ZERO_SHOT = """
import sys
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
model, processor = (kind.from_pretrained(sys.argv[1]) for kind in (CLIPModel, CLIPProcessor))
texts = [f"a photo of a {name}." for name in "abcd"]
given = processor(text=texts, images=Image.open(sys.argv[2]), return_tensors="pt", padding=True)
with torch.no_grad():
    print(model(**given).logits_per_image.softmax(dim=1))
"""
GOALS = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25}


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=5)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--device", default="cpu")
    options.add_argument(
        "--compile", action="store_true", help="also measure torch.compile, which needs a C++ compiler"
    )
    options.add_argument("--answers", nargs=2, action="append", default=[], metavar=("MODEL", "DATA"))
    options.add_argument("--images", type=int, default=250, help="images per data set whose answers are compared")
    options.add_argument("--photographs", type=int, default=0, help="photographs for the feature table")
    options.add_argument("--run", type=int, default=0, help="photographs for a whole run")
    values = common.parse(options, argv)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {VARIABLE: str(Path(folder, "f.sqlite"))}):
        rows = speed(values)
        for model, data in values.answers:
            rows += answers(model, data, values.images)
        if values.photographs or values.quick:
            rows += table(values)
        if values.run or values.quick:
            rows += whole(values)
    values.answers = [[Path(name).name for name in pair] for pair in values.answers]
    common.write("encode", values, argv, rows)


def ways(
    clip: Any, processor: Any, training: LabelledImages, device: str = "cpu"
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return, for each backend and precision on this machine, a function from pixel values to unit features."""

    def cast(pixels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return unit_image_embeds(clip, pixels)

    bfloat16 = has_bfloat16(torch.device(device))
    encoders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"torch float32": partial(unit_image_embeds, clip)}
    encoders |= {"torch bfloat16": cast} if bfloat16 else {}
    installed = [name for name, package in backends.PACKAGES.items() if find_spec(package) and device == "cpu"]
    for backend in installed:
        more = ["bfloat16"] * bfloat16 + ["int8"] * bool(find_spec("nncf")) if backend == "openvino" else []
        for precision in ("float32", *more):
            args = LearnerArguments(device="cpu", progress=False, backend=backend, precision=precision, force=True)
            learner = ClassIncrementalLearner(copy.deepcopy(clip), processor, args=args, strategy="frozen")
            learner.encoder.calibrate(learner.encoder.images(training))
            if learner.encoder.tower is not None:
                encoders[f"{backend} {precision}"] = learner.encoder.tower
    return encoders


@torch.no_grad()
def speed(values: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the milliseconds per image of each backend and precision, and their ratio to torch in float32."""
    clip, processor = models.clip(values.model, "eager" if values.device == "cpu" else "sdpa")
    clip = clip.to(values.device)
    size = clip.config.vision_config.image_size
    sides = ways(clip, processor, unlabelled_images(list(models.pixels(64, size))), values.device)
    if values.compile:
        sides["torch float32 compiled"] = torch.compile(partial(unit_image_embeds, clip))
    pixels = models.pixels(values.batch, size).to(values.device)

    def run(encode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        encode(pixels)
        if values.device != "cpu":
            torch.accelerator.synchronize()

    plain = "torch float32"
    times = common.compare({name: partial(run, encode) for name, encode in sides.items()}, values.repeats)
    clock = "cpu" if values.device == "cpu" else "wall"
    rows = []
    for name in sides:
        where = f"{name}, {common.model_name(values.model)}, batch {values.batch}"
        middle = 1000 * float(np.median(times[name][clock])) / values.batch
        rows.append(common.value_row(f"encode: {where}", common.rounded(middle), f"ms of {clock} an image"))
        if name != plain:
            goal = GOALS.get(name.split()[1])
            rows.append(common.row(f"encode: {where} / {plain}", times, name, plain, goal))
    return rows


@torch.no_grad()
def answers(model: str, data: str, count: int) -> list[dict[str, Any]]:
    """Return the percentage of images that get the same zero-shot answer as with torch in float32."""
    clip, processor = load_dual_encoder(model)
    learner = ClassIncrementalLearner(clip, processor, args=LearnerArguments(progress=False), strategy="frozen")
    images = load_data(data, "test")
    chosen = np.random.default_rng(0).permutation(len(images))[:count]
    pixels = learner.encoder.images(images.at(chosen))
    texts = learner.encoder.text_embeds(images.class_names)
    batches = torch.stack([pixels[index][0] for index in range(len(chosen))]).split(8)
    sides = ways(clip, processor, load_data(data, "train"))
    embeds = {name: torch.cat([encode(batch) for batch in batches]) for name, encode in sides.items()}
    expected, rows = embeds.pop("torch float32"), []
    for name, features in embeds.items():
        equal = backends.equal_answers(features, expected, lambda rows: rows @ texts.T) / len(chosen)
        cosine = float((features * expected).sum(dim=1).min())
        what = f"answers equal: {name}, {Path(model).name}, {Path(data).name}, {len(chosen)} images"
        rows.append(common.value_row(what, round(100 * equal, 1), f"%, least cosine {cosine:.5f}", "at least 99"))
    return rows


def table(values: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the time from JPEG photographs on disk to a feature table with that of other libraries."""
    count = 4 if values.quick else values.photographs
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "photos", "all")
        folder.mkdir(parents=True)
        files = common.photographs(folder, count, SIZE)
        _, processor = saved_model(values.model, Path(root, "model"))

        def ours(backend: str) -> None:
            argv = ["features", "--model", str(Path(root, "model")), "--data", str(folder.parent), "--split", ""]
            argv += ["--output", str(Path(root, "photos.parquet")), "--no-store", "--no-progress", "--overwrite"]
            if command([*argv, "--backend", backend]):
                raise AssertionError("the command failed")

        tower = models.vision_tower(values.model, "sdpa")
        extract: Any = pipeline(
            "image-feature-extraction", model=tower, image_processor=processor.image_processor, device="cpu"
        )

        def stock(batch: int) -> None:
            np.save(Path(root, "stock.npy"), np.array(extract(files, batch_size=batch), dtype=np.float32))

        def sentence(batch: int) -> None:
            embeds = sentences.encode(files, batch_size=batch, show_progress_bar=False)
            np.save(Path(root, "stock.npy"), embeds)

        installed = ["torch", *(name for name, package in backends.PACKAGES.items() if find_spec(package))]
        sides: dict[str, Callable[[], None]] = {name: partial(ours, name) for name in installed}
        peers = {"pipeline": stock}
        if find_spec("sentence_transformers"):
            from sentence_transformers import SentenceTransformer

            sentences = SentenceTransformer(str(Path(root, "model")), device="cpu")
            peers["sentence-transformers"] = sentence
        for name, encode in peers.items():
            sides |= {f"{name} in batches of {batch}": partial(encode, batch) for batch in (1, 8, 32)}
        times = common.compare(sides, 1 if values.quick else max(1, values.repeats // 2), warmup=1)
    where = f"{common.model_name(values.model)}, {count} photographs of {SIZE[0]} x {SIZE[1]}"
    rows = []
    for peer in peers:
        best = min((name for name in sides if peer in name), key=lambda name: float(np.median(times[name]["cpu"])))
        rows += [common.row(f"disk to table: {name} / {best}, {where}", times, name, best, 1.0) for name in installed]
    return rows


def saved_model(name: str, folder: Path) -> tuple[Any, Any]:
    """Return a model with random weights and a processor for images of its size, and save both in a folder."""
    clip, processor = models.clip(name, "sdpa")
    side = clip.config.vision_config.image_size
    processor.image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    clip.save_pretrained(folder)
    processor.save_pretrained(folder)
    return clip, processor


@torch.no_grad()
def whole(values: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the CPU time of `run` with that of its encoder, and of `predict` with that of CLIP in transformers.

    `run` gets photographs of four classes, a fifth of them for testing. `predict` classifies one photograph, and
    transformers' CLIP does the same in a separate process.
    """
    count = 20 if values.quick else values.run
    drawn = "matplotlib.figure, matplotlib.backends.backend_agg"
    named = f"dulbe_peft.photos.commands.run, dulbe_peft.learner, {drawn}, transformers"
    imports = (
        "from dulbe_peft.utils.extras import garbage_collection_off\n"
        f"with garbage_collection_off(): import {named}; transformers.CLIPModel"
    )
    with tempfile.TemporaryDirectory() as root:
        clip, _ = saved_model(values.model, Path(root, "model"))
        for number, file in enumerate(common.photographs(Path(root), count, SIZE)):
            folder = Path(root, "photos", "train" if number % 5 else "test", "abcd"[number % 4])
            folder.mkdir(parents=True, exist_ok=True)
            Path(file).rename(folder / f"{number}.jpg")
        pixels = models.pixels(8, clip.config.vision_config.image_size)

        def run(number: int) -> float:
            argv = ["--model", str(Path(root, "model")), "--data", str(Path(root, "photos")), "--no-progress"]
            argv += ["--no-store", "--output", str(Path(root, f"run{number}"))]
            return common.child("-m", "dulbe_peft", "run", *argv)["cpu"]

        def encode() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16(torch.device("cpu"))):
                for _ in range(0, count, len(pixels)):
                    unit_image_embeds(clip, pixels)

        shares, ones, seconds = [], [], []
        image = str(next(Path(root, "photos", "test").rglob("*.jpg")))
        for number in range(values.repeats):
            alone = common.compare({"": encode}, 1)[""]["cpu"][0]
            shares.append((run(number) - common.child("-c", imports)["cpu"]) / alone)
        for _ in range(2 * values.repeats + 1):
            stock = common.child("-c", ZERO_SHOT, str(Path(root, "model")), image)["cpu"]
            predicted = ["-m", "dulbe_peft", "predict", str(Path(root, "run0")), image, "--no-store"]
            seconds.append(common.child(*predicted)["cpu"])
            ones.append(seconds[-1] / stock)
    name = common.model_name(values.model)
    what = f"run without imports / its encoder, {name}, {count} photographs: CPU time"
    predicting = f"CPU of `dulbe-peft predict`, one photograph, {name}"
    return [
        {"what": what, "goal": 1.15, "ratio": {"cpu": common.spread(shares)}},
        common.value_row(predicting, common.rounded(float(np.median(seconds))), "s"),
        {"what": f"{predicting} / transformers' zero-shot", "goal": 1.07, "ratio": {"cpu": common.spread(ones)}},
    ]


if __name__ == "__main__":
    main()
