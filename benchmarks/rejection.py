"""The answer "none of these" at 5 % false alarms, and sets of classes that cover the right one in 95 % of images.

Nothing is trained, so every image is encoded once. Each seed draws the known classes, 70 % of all, and their images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from benchmarks import common
from benchmarks.frozen import encoded
from dulbe_peft.classifiers import Classifier, make_classifiers

SPECS = ("bridge", "lda", "ranpac", "bayes")
SHARE, COVERAGE, KNOWN = 0.05, 0.95, 0.7


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=2, model=None)
    options.add_argument("--clip", default="demo", help="as --model of `dulbe-peft run`")
    options.add_argument("--data", default="demo-digits", help="as for `dulbe-peft run`")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--images", type=int, nargs="+", default=[2, 4, 8, 50], help="training images of each class")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    values = common.parse(options, argv)
    features = encoded(values)
    rows = []
    for images in values.images[-1:] if values.quick else values.images:
        found = [refused(features, images, values.increment, seed) for seed in range(values.repeats)]
        for name in found[0]:
            for figure in found[0][name]:
                drawn = [common.rounded(draw[name][figure]) for draw in found]
                what = f"{name}, {images} images a class, {common.model_name(values.data)}: {figure}"
                rows.append(common.value_row(what, common.rounded(sum(drawn) / len(drawn)), "%") | {"each": drawn})
    common.write("rejection", values, argv, rows)


def refused(features: dict[str, Any], images: int, increment: int, seed: int) -> dict[str, dict[str, float]]:
    """Classifier -> percent of the test images that are refused, of known and of unknown classes, and the AUROC."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features["names"]), generator=generator)
    known = order[: int(len(order) * KNOWN)]
    classifiers = make_classifiers(SPECS, features["train"].shape[1], features["scale"])
    seen: list[int] = []
    for group in known.split(increment):
        rows = [(features["y"] == label).nonzero()[:, 0] for label in group]
        rows = [members[torch.randperm(len(members), generator=generator)[:images]] for members in rows]
        labels = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(members) for members in rows]))
        seen += group.tolist()
        for classifier in classifiers.values():
            names = [features["names"][label] for label in group.tolist()]
            classifier.add_classes(names, features["train"][torch.cat(rows)], labels, features["text"][seen])
    places = torch.full((len(order),), -1)
    places[seen] = torch.arange(len(seen))
    truth = places[features["truth"]]
    return {name: figures(classifier, features["test"], truth) for name, classifier in classifiers.items()}


@torch.no_grad()
def figures(classifier: Classifier, test: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """In percent, but for the size of the sets; the truth of an unknown class is -1."""
    is_known = truth >= 0
    sure = classifier.probabilities(test).amax(dim=1)
    below = (sure < classifier.rejection_threshold(SHARE)).double()
    sets = classifier.prediction_sets(test[is_known], COVERAGE)
    return {
        "known refused": 100 * below[is_known].mean().item(),
        "unknown found": 100 * below[~is_known].mean().item(),
        "area under the ROC curve": 100 * float(roc_auc_score(is_known.numpy(), sure.numpy())),
        "covered": 100 * sets.gather(1, truth[is_known, None]).double().mean().item(),
        "classes in a set": sets.sum(dim=1).double().mean().item(),
    }


if __name__ == "__main__":
    main()
