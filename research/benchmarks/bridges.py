"""The forms of the bridge ensemble on features of published networks, where images and texts lie apart.

`--features` is a folder as `real` reads it, `--stand-in` a file of `frozen.encoded` features, saved with `torch.save`.
Beside classifiers, these rows are made of what `pooled_bridge` keeps:

    best depth      the one depth, the same for all classes, that is best on the test images: what no rule can know
    even            all depths weigh alike
    by class 1      weights class by class, by left-out images, scores by log-softmax at each depth; the reliability of
    by class 16     a class goes to that of all classes as if that were of 1 or 16 images
    centred 16      the same with scores less their mean over the classes at each depth
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.classifiers.pooled_bridge import PooledBridgeHead
from dulbe_peft.metrics.accuracy import calibration_error
from research.benchmarks import common, frozen, real

SPECS = ("text", "prototype", "bridge", "pooled_bridge")
NAMES = ("own", "noise 1", "noise 3", "shuffled")
STREAMS = ("cars", *(f"imagenet-even:{classes}" for classes in (20, 24, 100, 500)), "cifar10-laion")
COUNTS = ("1", "2", "4", "8", "16", "1/16", "16/rank")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--features", type=Path, help="a folder of .npz files; without it nothing is measured")
    options.add_argument("--stand-in", type=Path, help="a file of features of a stand-in")
    options.add_argument("--streams", nargs="*", default=STREAMS)
    options.add_argument("--names", nargs="*", default=NAMES)
    options.add_argument("--counts", nargs="+", default=COUNTS)
    options.add_argument("--held-back", type=int, default=0, help="test on so many training images of each class")
    values = common.parse(options, argv)
    rows: list[dict[str, Any]] = []
    for name in values.streams if values.features else ():
        rows += stream_rows(name, partial(real.stream, values.features, name), values)
    if values.stand_in:
        rows += stream_rows(values.stand_in.stem, partial(stand_in, values.stand_in), values)
    common.write("bridges", values, argv, rows)


def stand_in(path: Path, names: str, seed: int) -> dict[str, Any]:
    """Kept features of a stand-in, with names as strong as asked for."""
    features: dict[str, Any] = torch.load(path)
    features["text"] = real.named(features["text"], names, torch.Generator().manual_seed(seed))
    return features


def stream_rows(
    stream: str, load: Callable[[str, int], dict[str, Any] | None], values: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row a strength of names, number of images, form and figure: the mean over the draws, and each, in percent."""
    rows = []
    for names in values.names[:1] if values.quick else values.names:
        draws = [load(names, seed) for seed in range(values.repeats)]
        if draws[0] is None:
            continue
        most = int(draws[0]["y"].bincount().min()) - values.held_back
        for counts in values.counts[:1] if values.quick else values.counts:
            if counts.isdigit() and int(counts) > most:
                continue
            found: dict[tuple[str, str], list[float]] = {}
            for seed, features in enumerate(draws):
                tasks = frozen.draw(features, counts, real.increment(features), seed, values.held_back)
                for key, value in figures(features, tasks).items():
                    found.setdefault(key, []).append(common.rounded(100 * value))
            for (form, figure), each in found.items():
                said = f"{stream}, {names} names, {counts} images a class, {form}: {figure}"
                value = common.value_row(said, common.rounded(statistics.fmean(each)), "%")
                key = {"stream": stream, "names": names, "counts": counts, "form": form, "figure": figure}
                rows.append(value | key | {"each": each})
    return rows


@torch.no_grad()
def figures(features: dict[str, Any], tasks: list[frozen.Task]) -> dict[tuple[str, str], float]:
    """The accuracy of every form after the last task, and the calibration error of the classifiers, as fractions."""
    tests, truth = (
        torch.cat([task.test for task in tasks]),
        torch.tensor([row for task in tasks for row in task.truth]),
    )
    found = {}
    for spec in SPECS:
        classifier = frozen.learned(spec, features, tasks)
        sure, said = classifier.probabilities(tests).max(dim=1)
        found[spec, "A_last"] = (said == truth).double().mean().item()
        found[spec, "ECE"] = calibration_error(sure, said == truth)
    assert isinstance(classifier, PooledBridgeHead)
    for form, scores in forms(classifier, tests, truth).items():
        found[form, "A_last"] = (scores.argmax(dim=1) == truth).double().mean().item()
    return found


def forms(head: PooledBridgeHead, tests: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """The scores of the test images, (n, C), by form."""
    depths = head.logit_scale * (tests @ head.bridge_prototypes().permute(1, 2, 0))  # (K, n, C)
    right = [(scores.argmax(dim=1) == truth).sum() for scores in depths]
    found = {"best depth": depths[int(torch.stack(right).argmax())], "even": depths.mean(dim=0)}
    logs, centred = depths.log_softmax(dim=2), depths - depths.mean(dim=2, keepdim=True)
    for scores, name, images in ((logs, "by class", 1), (logs, "by class", 16), (centred, "centred", 16)):
        found[f"{name} {images}"] = torch.einsum("knc,ck->nc", scores, weights_by_class(head, images))
    return found


def weights_by_class(head: PooledBridgeHead, images: int) -> Tensor:
    """pi_c, (C, K), float32: the reliability of left-out images, with so many images' worth of that of all classes."""
    counts = head.left_out_counts[:, None].double()
    usual = head.usual_reliability()
    common_one = ((head.confidence + usual) / (counts + 1)).mean(dim=0)
    each = (head.confidence + images * common_one) / (counts + images)
    return (each / (head.reliability_temperature * each.amax(dim=1, keepdim=True))).softmax(dim=1).float()


if __name__ == "__main__":
    main()
