"""Measure time and memory on a GPU in ten minutes: training steps relative to stock LoRA, encoding, and planning.

Each figure is printed at once. After `--minutes`, no further measurement starts, and the skipped ones are printed.
With `--compile`, the models are compiled, which takes several minutes more, and nothing is planned.
Steps train only the vision tower, in its second task, as in `research.benchmarks.step`. Without a GPU, the benchmark
runs on the CPU.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from dulbe_peft import allocate_modes
from research.benchmarks import allocation, common, models, ours, stock

PRECISIONS = ("float32", "bfloat16")
TIMM = {"vit-b-16": "vit_base_patch16_clip_224", "vit-l-14": "vit_large_patch14_clip_224"}
Figures = Iterator[tuple[str, Callable[[], dict[str, float]]]]


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=10, model=None)
    options.add_argument("--models", nargs="+", default=["vit-b-16", "vit-l-14"])
    options.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    options.add_argument("--minutes", type=float, default=9.0)
    options.add_argument("--compile", action="store_true")
    values = common.parse(options, argv)
    if values.quick:
        values.models, values.batch = ["tiny"], [4]
    if values.compile and values.out is None:
        values.out = common.RESULTS / "gpu-compiled.json"
    end, rows = time.monotonic() + 60 * values.minutes, []
    try:
        for what, measure in figures(values, torch.device("cuda" if torch.cuda.is_available() else "cpu")):
            if time.monotonic() > end:
                print(f"skipped, because the time is over: {what}", flush=True)
                continue
            rows += measured(what, measure)
    finally:  # figures measured before an error are kept
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
