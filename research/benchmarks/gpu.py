"""What a GPU takes, in one script of ten minutes: steps beside stock LoRA's, encoding, planning, memory.

Each figure is printed as it comes. When `--minutes` are over, nothing more is begun, and what was left out is named.
The vision tower alone, in its second task, as in `step`. Without a GPU it measures the processor.
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
    values = common.parse(options, argv)
    if values.quick:
        values.models, values.batch = ["tiny"], [4]
    end, rows = time.monotonic() + 60 * values.minutes, []
    for what, measure in figures(values, torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        if time.monotonic() > end:
            print(f"left out: {what}", flush=True)
            continue
        try:
            found = measure()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            found = {"it does not fit (1 = yes)": 1.0}
        for name, value in found.items():
            unit = "MiB" if "memory" in name else "images/s" if "images" in name else "ms" if "time" in name else ""
            rows.append(common.value_row(f"{what}: {name}", common.rounded(value), unit))
            print(rows[-1], flush=True)
    common.write("gpu", values, argv, rows)


def figures(values: Any, device: torch.device) -> Figures:
    """All that is measured, the most wanted first: its name, and what measures it."""
    shapes = list(product(values.models, values.batch, PRECISIONS))
    for compiled in (False,) if values.quick else (False, True):
        for model, batch, precision in shapes:
            where = f"{common.model_name(model)}, batch {batch}, {precision}{', compiled' * compiled}"
            yield f"step, {where}", partial(steps, values, device, model, batch, precision, compiled)
            yield f"encoding, {where}", partial(encoding, values, device, model, batch, precision, compiled)
    for model in values.models:
        yield (
            f"planning a task, {common.model_name(model)}",
            partial(planning, model, device, 8 if values.quick else 128),
        )


def steps(
    values: Any, device: torch.device, model: str, batch_size: int, precision: str, compiled: bool
) -> dict[str, float]:
    """Medians of a step of both sides, their ratio, and the peak of the memory of each."""
    tower, found = models.vision_tower(model, "sdpa"), dict[str, float]()
    classes, dim = min(10, batch_size), tower.config.projection_dim
    pixels = models.pixels(batch_size, tower.config.image_size).to(device)
    batch = pixels, (torch.arange(batch_size) % classes).to(device)
    text, old_text = (models.unit(10, dim, seed=seed).to(device) for seed in (2, 3))
    for side in ("DualModeLora", "LoRA"):
        if side == "LoRA":
            made = stock.lora(copy.deepcopy(tower)).to(device)
            step = partial(stock.step, made, stock.adam(made), batch, text)
        else:
            made = ours.adapted(copy.deepcopy(tower), tasks=1).to(device)
            teacher = ours.teacher_embeds(made, batch[0])
            step = partial(ours.step, made, stock.adam(made), batch, text, old_text, teacher)
        if compiled:
            made.forward = torch.compile(made.forward)
        found[f"{side}, time"], memory = timed(step, values.repeats, device, precision)
        if device.type == "cuda":
            found[f"{side}, memory"] = memory
        del made, step
    return found | {"ratio": found["DualModeLora, time"] / found["LoRA, time"]}


@torch.no_grad()
def encoding(
    values: Any, device: torch.device, model: str, batch_size: int, precision: str, compiled: bool
) -> dict[str, float]:
    """Images a second of the pristine tower, and of timm's of the same shape where timm is there."""
    tower = models.vision_tower(model, "sdpa").to(device)
    pixels = models.pixels(batch_size, tower.config.image_size).to(device)
    sides: dict[str, Any] = {"images": tower}
    if model in TIMM and find_spec("timm"):
        import timm

        sides["timm's images"] = timm.create_model(TIMM[model], pretrained=False).to(device).eval()
    found = {}
    for name, side in sides.items():
        run = torch.compile(side) if compiled else side
        milliseconds, _ = timed(partial(run, pixels), values.repeats, device, precision)
        found[name] = 1000 * batch_size / milliseconds
    return found


def planning(model: str, device: torch.device, support: int) -> dict[str, float]:
    """Milliseconds of the plan of all layers, whose gradients and statistics lie on the device."""
    given = SimpleNamespace(model=model, num_images=16, images=None)
    probe, statistics = allocation.measured(given)
    probe = {name: gradient.to(device) for name, gradient in probe.items()}
    plan = partial(allocate_modes, probe, statistics, shared_rank=1, residual_rank=8, support_rank=support)
    return {"time": timed(plan, 1, device, "float32")[0]}


def timed(run: Callable[[], Any], repeats: int, device: torch.device, precision: str) -> tuple[float, float]:
    """The median of the milliseconds of a call, and the peak of the device's memory in MiB; three calls warm up."""
    cuda, taken = device.type == "cuda", []
    cast: AbstractContextManager[Any] = nullcontext()
    if precision == "bfloat16":
        cast = torch.autocast(device.type, torch.bfloat16)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with cast:
        for number in range(-min(3, repeats), repeats):
            started = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            if number >= 0:
                taken.append(1000 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    return common.spread(taken)["median"], peak


if __name__ == "__main__":
    main()
