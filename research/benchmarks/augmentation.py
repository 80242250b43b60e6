"""Measure the gain from augmented views: A_last of frozen classifiers on held-out training images, by kind of view.

A classifier learns either the mean of an image and its views or, as with `augment`, each of them as a row with the
weight 1 / (1 + copies) in its sums. kappa and rho of `bayes` are fixed, so that nothing else differs.
Each seed draws the order of the classes and the images that are learned.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.data.readers import load_data
from dulbe_peft.photos.data.splits import draw_per_class
from research.benchmarks import common
from research.benchmarks.frozen import Task, draw


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--images", type=int, nargs="+", default=[4, 16], help="training images per class")
    options.add_argument("--held-back", type=int, default=8, help="held-out training images per class to test on")
    options.add_argument("--classifiers", nargs="+", default=["lda", "bayes:kappa=4,rho=10"])
    options.add_argument("--augment", nargs="+", default=["none", "crop", "flip", "affine"])
    options.add_argument("--copies", type=int, default=3)
    options.add_argument("--prompt-template", default="a photo of a {}.")
    values = common.parse(options, argv)
    if values.quick:
        values.images, values.held_back, values.augment, values.copies = [2], 1, ["none", "affine"], 1
    images = draw_per_class(load_data(values.data, "train"), max(values.images) + values.held_back)
    args = LearnerArguments(prompt_template=values.prompt_template, progress=False, device="cpu", copies=values.copies)
    model, processor = load_dual_encoder(values.clip)
    learner = ClassIncrementalLearner(model, processor, args=args, strategy="frozen", classifiers="prototype")
    encoder, pixels = learner.encoder, learner.encoder.images(images)
    features: dict[str, Any] = {
        "train": learner.image_embeds(images),
        "y": torch.as_tensor(images.labels),
        "text": learner.text_embeds(images.class_names),
        "names": images.class_names,
        "scale": learner.logit_scale,
    }
    rows = []
    for augment in values.augment:
        views = [features["train"]]
        for number in range(1, values.copies + 1) if augment != "none" else ():
            views.append(encoder.dataset_embeds(pixels.view(augment, args.seed, 0, number), augment))
        stacked = torch.stack(views, dim=1)  # (n, 1 + copies, d)
        forms = {"mean": F.normalize(stacked.mean(dim=1, keepdim=True), dim=2), "rows": stacked}
        for form, learned in forms.items() if augment != "none" else [("as they are", stacked)]:
            for count in values.images:
                seeds = range(values.repeats)
                draws = [draw(features | {"train": learned}, str(count), 10**6, s, values.held_back)[0] for s in seeds]
                for spec in values.classifiers:
                    each = [common.rounded(100 * accuracy(spec, features, task)) for task in draws]
                    stream = values.stream or common.model_name(values.data)
                    what = f"{spec}, {count} images a class, {stream}, augment {augment}, {form}: A_last"
                    mean = common.rounded(statistics.fmean(each))
                    rows.append(common.value_row(what, mean, "%") | {"each": each})
    common.write("augmentation", values, argv, rows)


@torch.no_grad()
def accuracy(spec: str, features: dict[str, Any], task: Task) -> float:
    """Return the accuracy on held-out images, which are tested without augmentation."""
    _, views, width = task.train.shape
    classifier = make_classifier(spec, width, features["scale"])
    names = [features["names"][label] for label in task.classes]
    rows = task.train if views > 1 else None
    classifier.add_classes(names, task.train[:, 0], task.y, features["text"][task.classes], views=rows)
    return float((classifier(task.test[:, 0]).argmax(dim=1) == torch.tensor(task.truth)).double().mean())


if __name__ == "__main__":
    main()
