"""Measure the detection of images of unknown classes by five scores, rejection at 5 %, and prediction sets at 95 %.

Nothing is trained, so each image is encoded once. Each seed draws the known classes and their images. Near unknowns
are the test images of the other classes, and far unknowns are those of another data set. With `--real`, they are from
another stream of the same network. Figures that need more images than there are, such as coverage, are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.novelty import found
from dulbe_peft.data.readers import load_data
from research.benchmarks import common, frozen, real
from research.benchmarks.untidy import untidy

SHARE, COVERAGE, KNOWN = 0.05, 0.95, 0.7
CLIPS = ("cars", "imagenet-even", "dtd", "flowers", "aircraft", "sun397")  # streams of one network


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--far", help="data set of far unknowns; default: none")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--known", type=float, default=KNOWN, help="share of the classes that are learned")
    options.add_argument(
        "--counts", nargs="+", default=["2", "4", "8", "50"], help="as for research.benchmarks.frozen"
    )
    options.add_argument("--classifier", default="bayes", help="a classifier that keeps means, counts and scatter")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    frozen.untidy_option(options)
    frozen.real_options(options)
    values = common.parse(options, argv)
    rows = []
    for (stream, counts, drawn), kind in product(frozen.lines(values), values.untidy):
        draws = [(made := drawn(seed)) | {"far": far(made, stream, values, seed)} for seed in range(values.repeats)]
        if kind.startswith("names") and draws[0]["text"] is None:
            continue
        results = [measured(made, counts, kind, values, seed) for seed, made in enumerate(draws)]
        line = stream if kind == "none" else f"{stream}, {kind}"
        for figure in dict.fromkeys(name for result in results for name in result):
            each = [common.rounded(result[figure]) for result in results if figure in result]
            what = f"{values.classifier}, {counts} images a class, {line}: {figure}"
            rows.append(common.value_row(what, common.rounded(statistics.fmean(each)), "%") | {"each": each})
    common.write("rejection", values, argv, rows)


def far(features: dict[str, Any], stream: str, values: Any, seed: int) -> torch.Tensor | None:
    """Return the features of the far unknowns, or None."""
    if values.real is None:
        return others(values.clip, values.far) if values.far else None
    network = features["train"].shape[1]
    name = stream.partition(",")[0].partition(":")[0]
    other = real.stream(values.real, "flowers" if name == "dtd" else "dtd", "none", seed)
    return other["test"] if other and name in CLIPS and network == other["test"].shape[1] else None


@cache
def others(clip: str, data: str) -> torch.Tensor:
    """Return the features of the test images of another data set."""
    args = LearnerArguments(progress=False, device="cpu")
    learner = ClassIncrementalLearner(*load_dual_encoder(clip), args, "frozen", "prototype")
    return learner.image_embeds(load_data(data, "test"))


@torch.no_grad()
def measured(features: dict[str, Any], counts: str, kind: str, values: Any, seed: int) -> dict[str, float]:
    """Return the figures of a draw, in percent, except for the size of the prediction sets."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features["names"]), generator=generator)
    known = order[: int(len(order) * values.known)]
    texts = None if features["text"] is None else features["text"][known]
    of_known = features | {"names": [features["names"][label] for label in known.tolist()], "text": texts}
    tasks = drawn_tasks(features, known, counts, frozen.step(features, values), generator)
    of_known, tasks = untidy(kind, of_known, tasks, seed)
    classifier, texts = frozen.learned(values.classifier, of_known, tasks), of_known["text"]
    places = torch.full((len(order),), -1)
    places[known] = torch.arange(len(known))
    truth = places[features["truth"]]
    images, near = features["test"][truth >= 0], features["test"][truth < 0]
    learned = torch.cat([task.train for task in tasks])
    figures = promised(classifier, images, truth[truth >= 0])
    scores = scored(classifier, learned, texts, images)
    for name, unknown in {"near": near, "far": features.get("far")}.items():
        if unknown is not None:
            if "known refused" in figures:
                figures[f"{name} found"] = share_refused(classifier, unknown)
                if name == "near" and (said := found(classifier.novelty_tasks, SHARE)) is not None:
                    figures["near found, said"] = 100 * said
            theirs = scored(classifier, learned, texts, unknown)
            figures |= {f"{name}, {score}": area(scores[score], theirs[score]) for score in theirs}
    return figures


def drawn_tasks(
    features: dict[str, Any], known: torch.Tensor, counts: str, increment: int, generator: torch.Generator
) -> list[frozen.Task]:
    """Draw tasks with the known classes, in this order; their numbers are places in `known`."""
    wanted, _ = frozen.images_of(counts, len(known), generator)
    numbered, tasks = torch.arange(len(known)), []
    nothing = features["train"][:0]
    for group in numbered.split(increment):
        rows = []
        for place in group.tolist():
            members = (features["y"] == known[place]).nonzero()[:, 0]
            rows.append(members[torch.randperm(len(members), generator=generator)[: wanted[place]]])
        labels = [label for label, members in enumerate(rows) for _ in members]
        train = features["train"][torch.cat(rows)]
        tasks.append(frozen.Task(group.tolist(), train, labels, nothing, [], nothing, []))
    return tasks


def promised(classifier: Classifier, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return coverage and rejection on images of known classes, and the estimated ROC area, if they are available."""
    figures = {} if classifier.roc_area is None else {"near, said": 100 * classifier.roc_area}
    if classifier.roc_interval is not None:
        figures |= dict(zip(("near, low", "near, high"), (100 * end for end in classifier.roc_interval), strict=True))
    with suppress(ValueError):  # too few left-out images for a guarantee
        sets = classifier.prediction_sets(images, COVERAGE)
        covered = sets.gather(1, labels[:, None]).double().mean().item()
        figures |= {"covered": 100 * covered, "classes in a set": sets.sum(dim=1).double().mean().item()}
    with suppress(ValueError):
        figures |= {"known refused": share_refused(classifier, images)}
    return figures


def share_refused(classifier: Classifier, images: torch.Tensor) -> float:
    return 100 * classifier.refused(images, SHARE).double().mean().item()


def scored(
    classifier: Classifier, learned: torch.Tensor, texts: torch.Tensor | None, images: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return name -> score of each image of (n, d) features. A larger score means that the image is less known."""
    logits = classifier(images).double() / classifier.temperature
    by_name = {} if texts is None else {"nearest name": 1 - (images @ texts.T).amax(dim=1)}
    return by_name | {
        "novelty": classifier.novelty(images),
        "probability": 1 - logits.softmax(dim=1).amax(dim=1),
        "energy": -logits.logsumexp(dim=1),
        "nearest image": 1 - (images @ learned.T).amax(dim=1),
    }


def area(known: torch.Tensor, unknown: torch.Tensor) -> float:
    """Return the area under the ROC curve, in percent."""
    truth = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return 100 * float(roc_auc_score(truth.numpy(), torch.cat([known, unknown]).numpy()))


if __name__ == "__main__":
    main()
