"""Measure classifiers in edge cases: strong, weak or missing class names, few images, few classes. Nothing is trained.

Each entry of `EDGES` changes the streams of `research.benchmarks.frozen`:

    names     "means" replaces the text embeddings by unit vectors near the mean features of `SPARE` training images
              per class, which no classifier learns; "inverse" multiplies these means by S^-1, where S is the scatter
              within the classes; "mixed" adds the model's own text embeddings
    noise     noise of the new text embeddings, as a multiple of their spread
    common    length of a direction that is added to all features, because real networks have one
    gap       length of a direction that is added to all text embeddings
    power     exponent that makes the features heavy-tailed
    counts    images per class, as for `frozen`; "lone4" gives 4 images to four of five classes and 1 to the fifth

With `--real`, the features come from a folder in the format of `research.benchmarks.real`. Cases for which a stream
has too few images, classes or names are skipped.

    python -m research.benchmarks.edges --clip glyph-clip --data handwriting --stream handwriting --increment 11
    python -m research.benchmarks.edges --real FOLDER --streams cars dtd
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from research.benchmarks import common, real
from research.benchmarks.frozen import draw, encoded, figures, folder_options, step

SPECS = ("text", "bridge", "lda", "gda", "ranpac:features=1000", "bayes")
SPARE = 10
COUNTS = ("1", "2", "4")
UNEVEN = ("lone4", "2/32", "30/rank")
EDGES: dict[str, dict[str, Any]] = {
    "own names": {"counts": (*COUNTS, *UNEVEN)},
    "no names": {"names": "none", "counts": (*COUNTS, "16", *UNEVEN)},
    "names shuffled": {"names": "shuffled", "counts": (*COUNTS, *UNEVEN)},
    **{
        f"near the means, noise {noise:g}": {
            "names": "means",
            "noise": noise,
            "common": 2.0,
            "counts": ("1", "2"),
        }
        for noise in (0.5, 1.0, 2.0, 4.0)
    },
    "near S^-1 of the means": {"names": "inverse", "noise": 1.0, "gap": 2.0, "counts": ("1", "2")},
    "mixed with own names": {"names": "mixed", "noise": 1.0, "common": 2.0, "gap": 2.0, "counts": ("1", "2")},
    "heavy tails, near the means": {
        "names": "means",
        "noise": 1.0,
        "common": 2.0,
        "power": 3.0,
        "counts": COUNTS,
    },
    **{f"{number} classes": {"classes": number, "counts": COUNTS} for number in (3, 6, 12)},
}


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=10)
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--edges", nargs="+", default=list(EDGES), choices=EDGES)
    options.add_argument("--prompt-template", default="a photo of a {}.")
    options.add_argument(
        "--held-back",
        type=int,
        default=0,
        help="held-out training images per class to test on, to choose settings",
    )
    folder_options(options)
    values = common.parse(options, argv)
    rows = []
    for stream, drawn in streams(values):
        for edge in values.edges[:1] if values.quick else values.edges:
            counts = [count for count in EDGES[edge]["counts"] if can_have(drawn(0), edge, count)]
            for count in counts[:1] if values.quick else counts:
                draws = [measured(drawn(seed), edge, count, values, seed) for seed in range(values.repeats)]
                for spec in draws[0]:
                    each = [common.rounded(100 * draw[spec]) for draw in draws]
                    what = f"{stream}, {edge}, {count} images a class, {spec}"
                    row = common.value_row(what, common.rounded(statistics.fmean(each)), "%")
                    key = {"stream": stream, "edge": edge, "counts": count, "classifier": spec}
                    rows.append(row | key | {"each": each})
    common.write("edges", values, argv, rows)


def streams(values: Any) -> Iterator[tuple[str, Callable[[int], dict[str, Any]]]]:
    """Yield the name of each stream and a function that returns its features for a seed. Skip missing files."""
    if values.real is None:
        features = encoded(values)
        yield values.stream or common.model_name(values.data), lambda seed: features
        return
    for name in values.streams:
        if real.stream(values.real, name) is not None:
            yield name, partial(real.stream, values.real, name, "own")


def can_have(features: dict[str, Any], edge: str, count: str) -> bool:
    """Return whether a stream has enough names, classes and images for an edge case."""
    names, classes = EDGES[edge].get("names", "own"), EDGES[edge].get("classes", 0)
    named = features["text"] is not None or names in ("none", "means", "inverse")
    spare = SPARE if names in ("means", "inverse", "mixed") else 0
    whole = int(features["y"].bincount().min()) >= spare
    return named and whole and len(features["names"]) > classes and real.enough(features, count, spare)


def measured(features: dict[str, Any], edge: str, counts: str, values: Any, seed: int) -> dict[str, float]:
    """Return A_last of each classifier in one draw, as a fraction."""
    settings = {key: value for key, value in EDGES[edge].items() if key != "counts"}
    features_of_case = changed(features, seed, **settings)
    tasks = draw(features_of_case, counts, step(features_of_case, values), seed, values.held_back)
    specs = (
        SPECS
        if features_of_case["text"] is not None
        else [spec for spec in SPECS if spec.startswith(("lda", "ranpac", "bayes"))]
    )
    return {spec: figures(spec, features_of_case, tasks)["A_last"] for spec in specs}


def changed(
    features: dict[str, Any],
    seed: int,
    names: str = "own",
    noise: float = 0.0,
    common: float = 0.0,
    gap: float = 0.0,
    power: float = 1.0,
    classes: int | None = None,
) -> dict[str, Any]:
    """Return the features and texts of an edge case."""
    generator = torch.Generator().manual_seed(seed)
    width = features["train"].shape[1]

    def direction() -> Tensor:
        return normalize(torch.randn(width, generator=generator), dim=0)

    result = dict(features)
    if classes:
        chosen = torch.randperm(len(result["names"]), generator=generator)[:classes]
        result["names"] = [result["names"][label] for label in chosen.tolist()]
        result["text"] = result["text"][chosen]
        for images, labels in (("train", "y"), ("test", "truth")):
            rows = torch.isin(result[labels], chosen)
            result[images], old_labels = result[images][rows], result[labels][rows]
            result[labels] = (old_labels[:, None] == chosen).int().argmax(dim=1)
    if power != 1:
        middle = result["train"].mean(dim=0)
        rotation = torch.linalg.svd(result["train"] - middle, full_matrices=False).Vh.T
        for key in ("train", "test"):
            rotated = (result[key] - middle) @ rotation
            result[key] = normalize(rotated.sign() * rotated.abs() ** power, dim=1)
    if common:
        shift = common * direction()
        for key in ("train", "test"):
            result[key] = normalize(result[key] + shift, dim=1)
    if names == "none":
        result["text"] = None
    elif names == "shuffled":
        result["text"] = result["text"][torch.randperm(len(result["text"]), generator=generator)]
    elif names != "own":
        result |= renamed(result, names, noise, gap * direction(), generator)
    return result


def renamed(
    features: dict[str, Any], names: str, noise: float, gap: Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """Return texts near the means of spare images, or near S^-1 of these means, and the remaining images."""
    order = torch.randperm(len(features["y"]), generator=generator)
    spare = torch.cat([order[features["y"][order] == label][:SPARE] for label in range(len(features["names"]))])
    remaining = torch.ones(len(features["y"]), dtype=torch.bool)
    remaining[spare] = False
    images = features["train"][spare].view(len(features["names"]), -1, features["train"].shape[1])
    means = images.mean(dim=1)
    middle, near = means.mean(dim=0), means - means.mean(dim=0)
    if names == "inverse":
        rows = (images - means[:, None]).flatten(0, 1)
        noises = rows.T @ rows / len(rows)
        near = torch.linalg.solve(noises + 0.3 * noises.trace() / len(noises) * torch.eye(len(noises)), near.T).T
    size = near.norm(dim=1).mean()
    near = near / size + noise * torch.randn(near.shape, generator=generator) / math.sqrt(near.shape[1])
    if names == "mixed":
        own_names = features["text"] - features["text"].mean(dim=0)
        near = near / near.norm(dim=1).mean() + own_names / own_names.norm(dim=1).mean()
    common = gap if gap.any() else middle / size if names != "inverse" else 0 * middle
    return {
        "text": normalize(near + common, dim=1),
        "train": features["train"][remaining],
        "y": features["y"][remaining],
    }


if __name__ == "__main__":
    main()
