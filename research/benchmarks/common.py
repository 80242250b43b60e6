"""Functions that all benchmarks share: timing sides in turns, pairwise ratios, options, and writing results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images
from threadpoolctl import threadpool_limits

import dulbe_peft
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.utils.folders import json_sha256
from research.benchmarks.models import SIZES
from research.comparison.cells import model_fingerprint

RESULTS = Path(__file__).parent / "results"
Times = dict[str, dict[str, list[float]]]


def compare(sides: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> Times:
    """Time each side in each round. The order is reversed from one round to the next (A B, B A, A B, ...).

    Args:
        sides: name -> function to time.
        repeats: rounds to measure.
        warmup: rounds to run before them without measuring.

    Returns:
        Side -> "wall" and "cpu" -> seconds of every round. CPU time is summed over all threads of this process. It is
        steadier than wall-clock time on a machine with other users.
    """
    times: Times = {name: {"wall": [], "cpu": []} for name in sides}
    for number in range(-warmup, repeats):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            wall, cpu = time.perf_counter(), time.process_time()
            sides[name]()
            if number >= 0:
                times[name]["wall"].append(time.perf_counter() - wall)
                times[name]["cpu"].append(time.process_time() - cpu)
    return times


def child(*argv: str) -> dict[str, float]:
    """Run Python with some arguments in a new process; return its "wall" and "cpu" seconds."""
    before = os.times()
    subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": after.elapsed - before.elapsed, "cpu": cpu}


def ratio(times: Times, ours: str, other: str) -> dict[str, Any]:
    """Return the ratios `ours / other` over all rounds, by wall-clock and CPU time, and the median seconds of both."""
    ratios: dict[str, Any] = {
        clock: spread([a / b for a, b in zip(times[ours][clock], times[other][clock], strict=True)])
        for clock in ("wall", "cpu")
    }
    ratios["seconds"] = {name: rounded(statistics.median(times[name]["wall"])) for name in (ours, other)}
    return ratios


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, quartiles, minimum, maximum and number of the values."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    figures = {"median": statistics.median(values), "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {name: rounded(value) for name, value in figures.items()} | {"rounds": len(values)}


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def row(what: str, times: Times, ours: str, other: str, goal: float | None = None) -> dict[str, Any]:
    """Return a row of the results: a ratio of times."""
    return {"what": what, "goal": goal, "ratio": ratio(times, ours, other)}


def value_row(what: str, value: float | None, unit: str, goal: str | None = None) -> dict[str, Any]:
    """Return a row of the results: a figure that is not a ratio of times."""
    return {"what": what, "goal": goal, "value": value, "unit": unit}


INSTRUCTIONS = ("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def parser(description: str | None, repeats: int, model: str | None = "vit-b-16") -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    if model is not None:
        names = ", ".join(SIZES)
        options.add_argument("--model", default=model, help=f"{names} (random weights), or a folder with a CLIP model")
    options.add_argument("--repeats", type=int, default=repeats, help="rounds to measure")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--quick", action="store_true", help="a test run: one round of the smallest case")
    options.add_argument("--out", type=Path, help="JSON file; default: research/benchmarks/results/<benchmark>.json")
    return options


def stream_parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark that learns a stream."""
    options = parser(description, repeats, model=None)
    options.add_argument("--clip", default="demo", help="a model, as for `dulbe-peft run --model`")
    options.add_argument("--data", default="demo-digits", help="a data set, as for `dulbe-peft run --data`")
    options.add_argument("--stream", help="the stream's name in the tables; default: the name of the data")
    return options


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and set the number of threads and the seed."""
    values = options.parse_args(argv)
    if values.quick:
        values.repeats = 1
        if hasattr(values, "model"):
            values.model = "tiny"
        if hasattr(values, "counts"):
            values.counts = values.counts[:1]
    torch.set_num_threads(values.threads)
    threadpool_limits(values.threads)  # SciPy's linear algebra has a separate thread pool
    torch.manual_seed(0)
    return values


def some(images: LabelledImages, values: argparse.Namespace, most: int = 120) -> LabelledImages:
    """Return the images; in a quick run, only the first ones."""
    return images.at(np.arange(min(most, len(images)))) if values.quick else images


def write(name: str, values: argparse.Namespace, argv: Sequence[str] | None, rows: list[dict[str, Any]]) -> None:
    """Write the rows with the command, its settings and the machine to a file, and print the rows."""
    given = sys.argv[1:] if argv is None else argv
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(values).items()}
    for key in ("out", "quick"):
        del settings[key]
    hidden = [os.path.basename(item) if os.path.exists(item) else item for item in _without(given, "--out")]
    report = {
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"research.benchmarks.{name}", *hidden]),
        "settings": {key: _basename(value) for key, value in settings.items()},
        "machine": machine(),
        "rows": rows,
    }
    path = values.out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for line in rows:
        print(json.dumps(line, ensure_ascii=False))


def measured_before(path: Path, origin: Callable[[dict[str, Any]], str | None]) -> list[dict[str, Any]]:
    """Return the rows of a file that is continued, or none if there is no file.

    `origin` returns the digest of the model and images with which a row would be measured now; None if they are not
    here.

    Raises:
        ValueError: If a row was measured with others.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    for row in rows:
        if (now := origin(row)) not in (None, row.get("origin")):
            raise ValueError(
                f"{path} has the row {row['what']!r} of another model or other images (origin {row.get('origin')!r}, "
                f"now {now!r}): give their folders, or another --out"
            )
    return list(rows)


def origin_of(model: str | Path, *images: LabelledImages) -> str:
    """Return a digest of a model's files and of images, to be kept in rows."""
    facts = {"model": model_fingerprint(str(model)), "images": [each.fingerprint() for each in images]}
    return json_sha256(facts)[:12]


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the arguments without a flag and its value."""
    kept = list(arguments)
    while flag in kept:
        position = kept.index(flag)
        del kept[position : position + 2]
    return kept


def _basename(value: Any) -> Any:
    """Return the last part of a path, so that results do not reveal the folders of the machine."""
    return os.path.basename(value) if isinstance(value, str) and os.sep in value else value


def machine() -> dict[str, Any]:
    """Return the versions, the processor, and the load average of the last minute."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: str(m.__version__) for m in (dulbe_peft, torch, transformers, peft)},
        },
        "cpu": _cpu_name(),
        "instructions": [name for name in INSTRUCTIONS if torch.cpu.get_capabilities().get(name)],
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def model_name(name: str) -> str:
    """Return the name of a model in the table."""
    return {"vit-b-16": "ViT-B/16", "vit-b-32": "ViT-B/32", "vit-l-14": "ViT-L/14"}.get(name, os.path.basename(name))


def photographs(folder: Path, count: int, size: tuple[int, int]) -> list[str]:
    """Write JPEG files of smooth random colours, all of one size, and return their paths."""
    generator, files = np.random.default_rng(0), []
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        path = folder / f"{number:05d}.jpg"
        coarse.resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
        files.append(str(path))
    return files


CAMERAS = {12: (4032, 3024), 48: (8064, 6048)}  # megapixels -> width and height of a phone's photographs


def camera_photographs(folder: Path, count: int, size: tuple[int, int]) -> list[str]:
    """Write JPEG files of the size of a camera's, quality 90, and return their paths.

    Each is a part of one of scikit-learn's two photographs, enlarged, with noise like that of a sensor.
    """
    generator, files = np.random.default_rng(0), []
    originals = load_sample_images().images
    for number in range(count):
        image = Image.fromarray(originals[number % 2])
        left, top = generator.integers(0, 100, 2)
        image = image.crop((left, top, left + 436, top + 327)).resize(size, Image.Resampling.BICUBIC)
        noise = generator.normal(0, 4, (size[1] // 8 + 1, size[0] // 8 + 1, 3))
        grain = np.tile(noise, (8, 8, 1))[: size[1], : size[0]]
        pixels = np.clip(np.asarray(image) + grain.astype(np.float32), 0, 255).astype(np.uint8)
        path = folder / f"{number:05d}.jpg"
        Image.fromarray(pixels).save(path, quality=90)
        files.append(str(path))
    return files


def camera_folders(folder: Path, count: int, size: tuple[int, int], classes: int) -> list[str]:
    """Write such files into `folder`/train, a folder for each class, and return their paths.

    Their bytes all differ; up to 64 pictures repeat.
    """
    made = folder.with_name("originals")
    made.mkdir()
    originals = [Path(file).read_bytes() for file in camera_photographs(made, min(64, count), size)]
    for number in range(count):
        place = folder / "train" / f"class {number % classes:02d}"
        place.mkdir(parents=True, exist_ok=True)
        # A decoder ignores what follows the end of a picture.
        (place / f"{number:05d}.jpg").write_bytes(originals[number % len(originals)] + number.to_bytes(4, "big"))
    return sorted(map(str, folder.rglob("*.jpg")))
