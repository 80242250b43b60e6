"""What is none of the learned classes: how well four scores tell it, what is refused at 5 %, and sets of 95 %.

Nothing is trained, so every image is encoded once. Each seed draws the known classes, 70 % of all, and their images.
Near unknowns are the test images of the other classes, far ones those of other data.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.data.readers import load_data
from research.benchmarks import common
from research.benchmarks.frozen import encoded

SHARE, COVERAGE, KNOWN = 0.05, 0.95, 0.7


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--far", help="data of other things; default: none")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--images", type=int, nargs="+", default=[2, 4, 8, 50], help="training images of each class")
    options.add_argument("--classifier", default="bayes", help="one that keeps means, counts and scatter")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    values = common.parse(options, argv)
    features, rows = encoded(values), []
    if values.far:
        features["far"] = others(values)
    for images in values.images[-1:] if values.quick else values.images:
        found = [measured(features, images, values, seed) for seed in range(values.repeats)]
        for figure in found[0]:
            each = [common.rounded(one[figure]) for one in found]
            stream = values.stream or common.model_name(values.data)
            what = f"{values.classifier}, {images} images a class, {stream}: {figure}"
            rows.append(common.value_row(what, common.rounded(statistics.fmean(each)), "%") | {"each": each})
    common.write("rejection", values, argv, rows)


def others(values: Any) -> torch.Tensor:
    """The features of the far unknowns."""
    args = LearnerArguments(progress=False, device="cpu")
    learner = ClassIncrementalLearner(*load_dual_encoder(values.clip), args, "frozen", "prototype")
    return learner.image_embeds(load_data(values.far, "test"))


@torch.no_grad()
def measured(features: dict[str, Any], images: int, values: Any, seed: int) -> dict[str, float]:
    """The figures of a draw, in percent, but for the size of the sets."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features["names"]), generator=generator)
    known = order[: int(len(order) * KNOWN)]
    classifier = make_classifier(values.classifier, features["train"].shape[1], features["scale"])
    seen, learned = list[int](), []
    for group in known.split(values.increment):
        rows = [(features["y"] == label).nonzero()[:, 0] for label in group]
        rows = [members[torch.randperm(len(members), generator=generator)[:images]] for members in rows]
        labels = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(members) for members in rows]))
        seen += group.tolist()
        names = [features["names"][label] for label in group.tolist()]
        learned.append(features["train"][torch.cat(rows)])
        classifier.add_classes(names, learned[-1], labels, features["text"][seen])
    places = torch.full((len(order),), -1)
    places[seen] = torch.arange(len(seen))
    truth = places[features["truth"]]
    own, near = features["test"][truth >= 0], features["test"][truth < 0]
    sets = classifier.prediction_sets(own, COVERAGE)
    covered = sets.gather(1, truth[truth >= 0, None]).double().mean().item()
    found = {"covered": 100 * covered, "classes in a set": sets.sum(dim=1).double().mean().item()}
    found |= {
        "known refused": share_refused(classifier, own),
        "near, said": 100 * (classifier.roc_area or 0.5),
    }
    scores = {"known": scored(classifier, torch.cat(learned), own)}
    for name, unknown in {"near": near, "far": features.get("far")}.items():
        if unknown is not None:
            found[f"{name} found"] = share_refused(classifier, unknown)
            theirs = scored(classifier, torch.cat(learned), unknown)
            found |= {f"{name}, {kind}": area(scores["known"][kind], theirs[kind]) for kind in theirs}
    return found


def share_refused(classifier: Classifier, images: torch.Tensor) -> float:
    return 100 * classifier.refused(images, SHARE).double().mean().item()


def scored(classifier: Classifier, learned: torch.Tensor, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each score of (n, d) images, larger for what is less known."""
    logits = classifier(images).double() / classifier.temperature
    return {
        "novelty": classifier.novelty(images),
        "probability": 1 - logits.softmax(dim=1).amax(dim=1),
        "energy": -logits.logsumexp(dim=1),
        "nearest image": 1 - (images @ learned.T).amax(dim=1),
    }


def area(known: torch.Tensor, unknown: torch.Tensor) -> float:
    """100 times the area under the ROC curve."""
    truth = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return 100 * float(roc_auc_score(truth.numpy(), torch.cat([known, unknown]).numpy()))


if __name__ == "__main__":
    main()
