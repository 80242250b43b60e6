"""Streams of features of published networks, from a folder of `.npz` files; nothing is encoded.

A file has `x` (n, d), `y`, and where they are known `split` (0 train, 1 test), `t` (C, d), embeddings of the classes'
names, and `names`. Features of `cars`, `imagenet-even`, `dtd`, `flowers`, `aircraft` and `sun397` are CLIP's
(ViT-B/32), those of `cifar10-laion` OpenCLIP's and those of `clothing-deit` a supervised network's, without texts.

A stream is a file, or some of its classes: `imagenet-even:20` has 20, drawn with the seed.

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

# Settings are chosen on held-back training images of the first half, and confirmed on the other one.
CHOSEN = ("cars", "imagenet-even:9", "imagenet-even:100", "dtd", "aircraft", "cifar10-laion")
CONFIRMED = ("imagenet-even:20", "imagenet-even:24", "imagenet-even:500", "flowers", "sun397", "clothing-deit")
STREAMS = (*CHOSEN, *CONFIRMED)
# How strong names are: own ones, with noise of so many spreads, another class's, or none.
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
TESTED = 0.4  # the share of a class's images that are test images where the file has no split


def stream(folder: str | Path, name: str, names: str = "own", seed: int = 0) -> dict[str, Any] | None:
    """The features of a stream as `research.benchmarks.frozen.encoded` has them; `text` is None without names.

    None: the folder has no such file. Which images are test images does not depend on the seed.
    """
    file, _, classes = name.partition(":")
    path = Path(folder) / f"{file}.npz"
    if not path.is_file():
        return None
    with np.load(path) as kept:
        found = {key: kept[key] for key in kept.files}
    images = normalize(torch.from_numpy(found["x"]).float(), dim=1)
    labels = torch.from_numpy(found["y"]).long()
    tested = torch.from_numpy(found["split"]) == 1 if "split" in found else parted(labels)
    number = int(labels.max()) + 1
    texts = normalize(torch.from_numpy(found["t"]).float(), dim=1) if "t" in found else None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(number, generator=generator)[: int(classes)] if classes else torch.arange(number)
    places = torch.full((number,), -1)
    places[order] = torch.arange(len(order))
    labels = places[labels]
    given = [str(each) for each in found["names"]] if "names" in found else [f"class {each}" for each in range(number)]
    train, test = (~tested & (labels >= 0)), (tested & (labels >= 0))
    return {
        "train": images[train],
        "y": labels[train],
        "test": images[test],
        "truth": labels[test],
        "text": None if texts is None else named(texts[order], names, generator),
        "names": [given[label] for label in order.tolist()],
        "scale": SCALE,
    }


def parted(labels: Tensor) -> Tensor:
    """Which images are test images where the file does not say: of each class as many, drawn with a fixed seed."""
    generator, tested = torch.Generator().manual_seed(0), torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        tested[rows[: math.floor(TESTED * len(rows))]] = True
    return tested


def named(texts: Tensor, names: str, generator: torch.Generator) -> Tensor | None:
    """Texts, (C, d), as strong as `NAMES` says; a spread is the mean length of a text less the mean of all."""
    if names == "none":
        return None
    if names == "shuffled":
        return texts[torch.randperm(len(texts), generator=generator)]
    noise = float(names.removeprefix("noise ")) if names != "own" else 0.0
    spread = (texts - texts.mean(dim=0)).norm(dim=1).mean()
    drawn = torch.randn(texts.shape, generator=generator) / math.sqrt(texts.shape[1])
    return normalize(texts + noise * spread * drawn, dim=1)


def increment(features: dict[str, Any]) -> int:
    """Classes per task, so that there are `TASKS` of them, or one of two classes each."""
    return max(2, -(-len(features["names"]) // TASKS))


def kinds(features: dict[str, Any] | None) -> tuple[str, ...]:
    """Which of `NAMES` a stream can have."""
    return () if features is None else NAMES if features["text"] is not None else ("none",)


def lines(
    folder: Path, streams: Sequence[str], names: Sequence[str], counts: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Stream, names and numbers of images of each line that the folder has images for."""
    for name in streams:
        features = stream(folder, name)
        for kind in (each for each in names if each in kinds(features)):
            yield from ((name, kind, count) for count in counts if features is not None and enough(features, count))


def enough(features: dict[str, Any], count: str, spare: int = 0) -> bool:
    """Whether a stream's usual class has so many images besides `spare` ones; a long tail's largest may have fewer."""
    first = count.removeprefix("lone").removesuffix("/rank").partition("+")[0]
    most, usual = max(int(part) for part in first.split("/")), int(features["y"].bincount().median()) - spare
    return most <= (4 * usual if count.endswith("/rank") else usual)
