"""Measure time and memory on a GPU in ten minutes: training steps relative to stock LoRA, encoding, and planning.

Each figure is printed at once. After `--minutes`, no further measurement starts, and the skipped ones are printed.
With `--compile`, the models are compiled, which takes several minutes more, and nothing is planned.
Steps train only the vision tower, in its second task, as in `research.benchmarks.step`. Without a GPU, the benchmark
runs on the CPU.

With `--photographs`, it measures the way from so many JPEG files of `--size` to stored features instead, against
timm's tower behind a `DataLoader` with torchvision's transforms if both are installed, and the phases of a whole task
of `--task` of these files with each of `STRATEGIES`. Then come the steps in bfloat16.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from PIL import Image

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    allocate_modes,
    load_dual_encoder,
)
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.store import FeatureStore
from research.benchmarks import allocation, common, models, ours, stock
from research.benchmarks.encode import saved_model

PRECISIONS = ("float32", "bfloat16")
STRATEGIES = ("frozen", "lora", "dulbe")
TIMM = {"vit-b-16": "vit_base_patch16_clip_224", "vit-l-14": "vit_large_patch14_clip_224"}
Figures = Iterator[tuple[str, Callable[[], dict[str, float]]]]


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=10, model=None)
    options.add_argument("--models", nargs="+", default=["vit-b-16", "vit-l-14"])
    options.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    options.add_argument("--minutes", type=float, default=9.0)
    options.add_argument("--photographs", type=int, default=0, help="JPEG files, such as 4000")
    options.add_argument("--task", type=int, default=2500, help="of them, the images of a task, in 25 classes")
    options.add_argument("--size", type=int, nargs=2, default=(1600, 1200), help="width and height of the files")
    options.add_argument("--compile", action="store_true")
    values = common.parse(options, argv)
    if values.quick:
        values.models, values.batch = ["tiny"], [4]
        values.photographs, values.task, values.size = 8, 8, (160, 120)
    if values.compile and values.out is None:
        values.out = common.RESULTS / "gpu-compiled.json"
    end, rows = time.monotonic() + 60 * values.minutes, []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for what, measure in chain(
                photograph_figures(values, device, Path(folder)) if values.photographs else (),
                figures(values, device) if values.quick or not values.photographs else (),
            ):
                if time.monotonic() > end:
                    print(f"skipped, because the time is over: {what}", flush=True)
                    continue
                rows += measured(what, measure)
        finally:  # figures measured before an error are kept
            values.size = list(values.size)
            common.write("gpu", values, argv, rows)


def measured(what: str, measure: Callable[[], dict[str, float]]) -> list[dict[str, Any]]:
    """Measure something, print its figures, and return their rows."""
    try:
        results = measure()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        results = {"it does not fit (1 = yes)": 1.0}
    rows = []
    for name, value in results.items():
        unit = "MiB" if "memory" in name else "images/s" if "images" in name else "ms" if "time" in name else ""
        rows.append(common.value_row(f"{what}: {name}", common.rounded(value), unit))
        print(rows[-1], flush=True)
    return rows


def figures(values: Any, device: torch.device) -> Figures:
    """Yield the name and the function of every measurement, the most important first."""
    shapes = list(product(values.models, values.batch, PRECISIONS))
    compiled = values.compile
    for model, batch, precision in shapes:
        where = f"{common.model_name(model)}, batch {batch}, {precision}{', compiled' * compiled}"
        yield f"step, {where}", partial(steps, values, device, model, batch, precision, compiled)
        yield f"encoding, {where}", partial(encoding, values, device, model, batch, precision, compiled)
    for model in values.models if not compiled else ():
        yield (
            f"planning a task, {common.model_name(model)}",
            partial(planning, model, device, 8 if values.quick else 128),
        )


def photograph_figures(values: Any, device: torch.device, folder: Path) -> Figures:
    """Yield the measurements of `--photographs`; the files are written into `folder`."""
    classes = 2 if values.quick else 25
    files = common.camera_folders(folder / "photos", values.photographs, tuple(values.size), classes)
    model = values.models[0]
    saved_model(model, folder / "model")
    for batch in values.batch:
        where = f"{common.model_name(model)}, {len(files)} files of {values.size[0]} x {values.size[1]}, batch {batch}"
        yield f"files to stored features, {where}", partial(stored, files, device, folder, batch)
        if model in TIMM and find_spec("timm") and find_spec("torchvision"):
            yield f"files to timm's features, {where}", partial(by_timm, files, device, model, batch)
        else:
            print("timm is not compared: it needs timm, torchvision, and a model that timm has", flush=True)
    for strategy in STRATEGIES:
        where = f"{common.model_name(model)}, {values.task} files"
        yield f"a task of {strategy}, {where}", partial(task, values, device, folder, strategy)
    if not values.quick:
        for batch in values.batch:
            where = f"{common.model_name(model)}, batch {batch}, bfloat16"
            yield f"step, {where}", partial(steps, values, device, model, batch, "bfloat16", False)


def learner_of(device: torch.device, folder: Path, strategy: str, **settings: Any) -> ClassIncrementalLearner:
    """Return a learner with the model in `folder`."""
    model, processor = load_dual_encoder(str(folder / "model"))
    if strategy != "frozen":
        model = get_peft_model(model, DualModeLoraConfig())
    args = LearnerArguments(device=device.type, precision="bfloat16", progress=False, **settings)
    return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers="bayes")


def stored(files: list[str], device: torch.device, folder: Path, batch: int) -> dict[str, float]:
    """Return the images per second from files to features in a store, and the share of the time spent waiting."""
    learner = learner_of(device, folder, "frozen", eval_batch_size=batch)
    learner.image_embeds(files[:batch])  # loads kernels
    with tempfile.TemporaryDirectory() as store:
        learner.use_store(FeatureStore(Path(store, "features.sqlite")))
        learner.profile.clear()
        started = time.perf_counter()
        with learner.profile.phase("encode"):
            learner.image_embeds(files)
        seconds = time.perf_counter() - started
    return {"images": len(files) / seconds, "share of waiting": learner.profile.waiting["encode"] / seconds}


def by_timm(files: list[str], device: torch.device, model: str, batch: int) -> dict[str, float]:
    """Return the images per second of timm's tower behind a DataLoader with up to 16 worker processes."""
    import timm
    from torchvision import transforms

    tower = timm.create_model(TIMM[model], pretrained=False).to(device).eval()
    size = tower.pretrained_cfg["input_size"][-1]
    resize = transforms.Resize(size, transforms.InterpolationMode.BICUBIC)
    change = transforms.Compose([resize, transforms.CenterCrop(size), transforms.ToTensor()])

    class Files(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> torch.Tensor:
            with Image.open(files[index]) as image:
                return change(image.convert("RGB"))

    loader = torch.utils.data.DataLoader(Files(), batch, num_workers=min(16, os.cpu_count() or 1), pin_memory=True)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
        tower(torch.zeros(batch, 3, size, size, device=device))
        started = time.perf_counter()
        features = [tower(pixels.to(device, non_blocking=True)).float().cpu() for pixels in loader]
        seconds = time.perf_counter() - started
    return {"timm's images": sum(map(len, features)) / seconds}


def task(values: Any, device: torch.device, folder: Path, strategy: str) -> dict[str, float]:
    """Return the milliseconds of each phase of a task, with a store that is empty at its start."""
    learner = learner_of(device, folder, strategy, learning_rate=1e-4)
    images = load_data(folder / "photos")
    images = images.at(np.random.default_rng(0).permutation(len(images))[: values.task])
    learner.use_store(FeatureStore())
    started = time.perf_counter()
    learner.learn_task(images, images.class_names)
    whole = time.perf_counter() - started
    phases = {f"{name}, time": 1000 * seconds for name, seconds in learner.profile.seconds.items()}
    return {"whole, time": 1000 * whole} | phases


def steps(
    values: Any, device: torch.device, model: str, batch_size: int, precision: str, compiled: bool
) -> dict[str, float]:
    """Return the median time of a step and the peak memory of both sides, and the ratio of the times."""
    tower, results = models.vision_tower(model, "sdpa"), dict[str, float]()
    classes, dim = min(10, batch_size), tower.config.projection_dim
    pixels = models.pixels(batch_size, tower.config.image_size).to(device)
    batch = pixels, (torch.arange(batch_size) % classes).to(device)
    text, old_text = (models.unit(10, dim, seed=seed).to(device) for seed in (2, 3))
    for side in ("DualModeLora", "LoRA"):
        if side == "LoRA":
            model_of_side = stock.lora(copy.deepcopy(tower)).to(device)
            step = partial(stock.step, model_of_side, stock.adam(model_of_side), batch, text)
        else:
            model_of_side = ours.adapted(copy.deepcopy(tower), tasks=1).to(device)
            teacher = ours.teacher_embeds(model_of_side, batch[0])
            step = partial(ours.step, model_of_side, stock.adam(model_of_side), batch, text, old_text, teacher)
        if compiled:
            model_of_side.forward = torch.compile(model_of_side.forward)
        results[f"{side}, time"], memory = timed(step, values.repeats, device, precision)
        if device.type == "cuda":
            results[f"{side}, memory"] = memory
        del model_of_side, step
    return results | {"ratio": results["DualModeLora, time"] / results["LoRA, time"]}


@torch.no_grad()
def encoding(
    values: Any, device: torch.device, model: str, batch_size: int, precision: str, compiled: bool
) -> dict[str, float]:
    """Return the images per second of the tower without an adapter and, if timm is installed, of timm's same tower."""
    tower = models.vision_tower(model, "sdpa").to(device)
    pixels = models.pixels(batch_size, tower.config.image_size).to(device)
    sides: dict[str, Any] = {"images": tower}
    if model in TIMM and find_spec("timm"):
        import timm

        sides["timm's images"] = timm.create_model(TIMM[model], pretrained=False).to(device).eval()
    speeds = {}
    for name, side in sides.items():
        run = torch.compile(side) if compiled else side
        milliseconds, _ = timed(partial(run, pixels), values.repeats, device, precision)
        speeds[name] = 1000 * batch_size / milliseconds
    return speeds


def planning(model: str, device: torch.device, support: int) -> dict[str, float]:
    """Return the milliseconds to plan all layers. Their gradients and statistics are on the device."""
    given = SimpleNamespace(model=model, num_images=16, images=None)
    probe, statistics = allocation.measured(given)
    probe = {name: gradient.to(device) for name, gradient in probe.items()}
    plan = partial(allocate_modes, probe, statistics, shared_rank=1, residual_rank=8, support_rank=support)
    return {"time": timed(plan, 1, device, "float32")[0]}


def timed(run: Callable[[], Any], repeats: int, device: torch.device, precision: str) -> tuple[float, float]:
    """Return the median milliseconds of a call, after up to three warm-up calls, and the peak device memory in MiB."""
    cuda, taken = device.type == "cuda", []
    cast: AbstractContextManager[Any] = nullcontext()
    if precision == "bfloat16":
        cast = torch.autocast(device.type, torch.bfloat16)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for number in range(-min(3, repeats), repeats):
        started = time.perf_counter()
        with cast:  # once per step, because autocast keeps its copies of the trained weights until it is left
            run()
        if cuda:
            torch.cuda.synchronize()
        if number >= 0:
            taken.append(1000 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    return common.spread(taken)["median"], peak


if __name__ == "__main__":
    main()
