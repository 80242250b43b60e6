"""Compare variants of the bridge ensemble on features of published networks, which have a modality gap.

`--features` is a folder in the format of `research.benchmarks.real`. `--stand-in` is a file of features that
`frozen.encoded` has returned and `torch.save` has written. Besides the classifiers, there are rows for these variants,
computed from the state of `pooled_bridge`:

    best depth      the single depth for all classes that is best on the test images, which no rule can know in advance
    even            equal weights for all depths
    by class 1      weights for each class from the reliability of its left-out images, shrunk towards the reliability
    by class 16     of all classes with the weight of 1 or 16 images; scores are log-softmax values at each depth
    centred 16      as "by class 16", with scores minus their mean over the classes at each depth
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
    options.add_argument("--features", type=Path, help="a folder of .npz files")
    options.add_argument("--stand-in", type=Path, help="a file with features of a stand-in model")
    options.add_argument("--streams", nargs="*", default=STREAMS)
    options.add_argument("--names", nargs="*", default=NAMES)
    options.add_argument("--counts", nargs="+", default=COUNTS)
    options.add_argument("--held-back", type=int, default=0, help="held-out training images per class to test on")
    values = common.parse(options, argv)
    rows: list[dict[str, Any]] = []
    for name in values.streams if values.features else ():
        rows += stream_rows(name, partial(real.stream, values.features, name), values)
    if values.stand_in:
        rows += stream_rows(values.stand_in.stem, partial(stand_in, values.stand_in), values)
    common.write("bridges", values, argv, rows)


def stand_in(path: Path, names: str, seed: int) -> dict[str, Any]:
    """Load the features of a stand-in model, with text embeddings of the strength `names`."""
    features: dict[str, Any] = torch.load(path)
    features["text"] = real.named(features["text"], names, torch.Generator().manual_seed(seed))
    return features


def stream_rows(
    stream: str, load: Callable[[str, int], dict[str, Any] | None], values: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each strength of names, number of images, variant and figure: means over draws, in percent."""
    rows = []
    for names in values.names[:1] if values.quick else values.names:
        draws = [load(names, seed) for seed in range(values.repeats)]
        if draws[0] is None:
            continue
        most = int(draws[0]["y"].bincount().min()) - values.held_back
        for counts in values.counts:
            if counts.isdigit() and int(counts) > most:
                continue
            percents: dict[tuple[str, str], list[float]] = {}
            for seed, features in enumerate(draws):
                tasks = frozen.draw(features, counts, real.increment(features), seed, values.held_back)
                for key, value in figures(features, tasks).items():
                    percents.setdefault(key, []).append(common.rounded(100 * value))
            for (form, figure), each in percents.items():
                what = f"{stream}, {names} names, {counts} images a class, {form}: {figure}"
                value = common.value_row(what, common.rounded(statistics.fmean(each)), "%")
                key = {"stream": stream, "names": names, "counts": counts, "form": form, "figure": figure}
                rows.append(value | key | {"each": each})
    return rows


@torch.no_grad()
def figures(features: dict[str, Any], tasks: list[frozen.Task]) -> dict[tuple[str, str], float]:
    """Return A_last of every variant and the calibration error of the classifiers, as fractions."""
    tests, truth = (
        torch.cat([task.test for task in tasks]),
        torch.tensor([row for task in tasks for row in task.truth]),
    )
    results = {}
    for spec in SPECS:
        classifier = frozen.learned(spec, features, tasks)
        confidence, predicted = classifier.probabilities(tests).max(dim=1)
        results[spec, "A_last"] = (predicted == truth).double().mean().item()
        results[spec, "ECE"] = calibration_error(confidence, predicted == truth)
    assert isinstance(classifier, PooledBridgeHead)
    for form, scores in forms(classifier, tests, truth).items():
        results[form, "A_last"] = (scores.argmax(dim=1) == truth).double().mean().item()
    return results


def forms(head: PooledBridgeHead, tests: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Return variant -> scores of the test images, (n, C)."""
    depths = head.logit_scale * (tests @ head.bridge_prototypes().permute(1, 2, 0))  # (K, n, C)
    right = [(scores.argmax(dim=1) == truth).sum() for scores in depths]
    variants = {"best depth": depths[int(torch.stack(right).argmax())], "even": depths.mean(dim=0)}
    logs, centred = depths.log_softmax(dim=2), depths - depths.mean(dim=2, keepdim=True)
    for scores, name, images in ((logs, "by class", 1), (logs, "by class", 16), (centred, "centred", 16)):
        variants[f"{name} {images}"] = torch.einsum("knc,ck->nc", scores, weights_by_class(head, images))
    return variants


def weights_by_class(head: PooledBridgeHead, images: int) -> Tensor:
    """Return pi_c, (C, K), float32, from class reliabilities shrunk towards their mean with the weight of `images`."""
    counts = head.left_out_counts[:, None].double()
    usual = head.rule.usual_reliability(head.state)
    common_reliability = ((head.confidence + usual) / (counts + 1)).mean(dim=0)
    by_class = (head.confidence + images * common_reliability) / (counts + images)
    return (by_class / (head.reliability_temperature * by_class.amax(dim=1, keepdim=True))).softmax(dim=1).float()


if __name__ == "__main__":
    main()
