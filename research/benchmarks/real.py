"""Streams of precomputed features of published networks, from a folder of `.npz` files.

A file contains the features `x`, (n, d), and the labels `y`. If they are known, it also contains `split` (0 train,
1 test), the text embeddings `t` of the class names, (C, d), and the class names `names`. The features of `cars`,
`imagenet-even`, `dtd`, `flowers`, `aircraft` and `sun397` are from CLIP (ViT-B/32), those of `cifar10-laion` from
OpenCLIP, and those of `clothing-deit` from a supervised network without texts.

A stream is a file or some of its classes: `imagenet-even:20` has 20 classes that are drawn with the seed.

    streams = {name: stream(folder, name, "own", seed) for name in STREAMS}
    tasks = frozen.draw(streams["cars"], "2/16", increment(streams["cars"]), seed)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

# Settings were chosen on held-out training images of the first group of streams, and confirmed on the second group.
CHOSEN = ("cars", "imagenet-even:9", "imagenet-even:100", "dtd", "aircraft", "cifar10-laion")
CONFIRMED = ("imagenet-even:20", "imagenet-even:24", "imagenet-even:500", "flowers", "sun397", "clothing-deit")
STREAMS = (*CHOSEN, *CONFIRMED)
# The strength of the names: unchanged, with noise as a multiple of their spread, shuffled between classes, or none.
SAID = {
    "own": "own names",
    "noise 1": "names with noise 1",
    "noise 3": "names with noise 3",
    "shuffled": "names shuffled",
    "none": "no names",
}
NAMES = tuple(SAID)
COUNTS = ("1", "2", "4", "8", "16", "1/16", "2/16", "40/rank")
SCALE, TASKS = 100.0, 5
TESTED = 0.4  # share of test images per class for a file without a split


def stream(folder: str | Path, name: str, names: str = "own", seed: int = 0) -> dict[str, Any] | None:
    """Return the features of a stream in the format of `research.benchmarks.frozen.encoded`; None without a file.

    `text` is None without names. The test images do not depend on the seed.
    """
    file, _, classes = name.partition(":")
    path = Path(folder) / f"{file}.npz"
    if not path.is_file():
        return None
    with np.load(path) as file_arrays:
        arrays = {key: file_arrays[key] for key in file_arrays.files}
    images = normalize(torch.from_numpy(arrays["x"]).float(), dim=1)
    labels = torch.from_numpy(arrays["y"]).long()
    tested = torch.from_numpy(arrays["split"]) == 1 if "split" in arrays else parted(labels)
    number = int(labels.max()) + 1
    texts = normalize(torch.from_numpy(arrays["t"]).float(), dim=1) if "t" in arrays else None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(number, generator=generator)[: int(classes)] if classes else torch.arange(number)
    places = torch.full((number,), -1)
    places[order] = torch.arange(len(order))
    labels = places[labels]
    class_names = (
        [str(name) for name in arrays["names"]] if "names" in arrays else [f"class {n}" for n in range(number)]
    )
    train, test = (~tested & (labels >= 0)), (tested & (labels >= 0))
    return {
        "train": images[train],
        "y": labels[train],
        "test": images[test],
        "truth": labels[test],
        "text": None if texts is None else named(texts[order], names, generator),
        "names": [class_names[label] for label in order.tolist()],
        "scale": SCALE,
    }


def parted(labels: Tensor) -> Tensor:
    """Return which images are test images for a file without a split: the same share per class, with a fixed seed."""
    generator, tested = torch.Generator().manual_seed(0), torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        tested[rows[: math.floor(TESTED * len(rows))]] = True
    return tested


def named(texts: Tensor, names: str, generator: torch.Generator) -> Tensor | None:
    """Change texts, (C, d), to a strength of `NAMES`. Their spread is the mean distance of a text from their mean."""
    if names == "none":
        return None
    if names == "shuffled":
        return texts[torch.randperm(len(texts), generator=generator)]
    noise = float(names.removeprefix("noise ")) if names != "own" else 0.0
    spread = (texts - texts.mean(dim=0)).norm(dim=1).mean()
    drawn = torch.randn(texts.shape, generator=generator) / math.sqrt(texts.shape[1])
    return normalize(texts + noise * spread * drawn, dim=1)


def increment(features: dict[str, Any]) -> int:
    """Return the number of classes per task: at least two, and enough for at most `TASKS` tasks."""
    return max(2, -(-len(features["names"]) // TASKS))


def kinds(features: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the strengths of `NAMES` that a stream can have."""
    return () if features is None else NAMES if features["text"] is not None else ("none",)


def lines(
    folder: Path, streams: Sequence[str], names: Sequence[str], counts: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield stream, strength of names and number of images for all that the folder has enough images for."""
    for name in streams:
        features = stream(folder, name)
        for kind in (each for each in names if each in kinds(features)):
            yield from ((name, kind, count) for count in counts if features is not None and enough(features, count))


def enough(features: dict[str, Any], count: str, spare: int = 0) -> bool:
    """Return whether the median class has enough images besides `spare` ones. For a long tail, a quarter is enough."""
    first = count.removeprefix("lone").removesuffix("/rank").partition("+")[0]
    most, usual = max(int(part) for part in first.split("/")), int(features["y"].bincount().median()) - spare
    return most <= (4 * usual if count.endswith("/rank") else usual)
