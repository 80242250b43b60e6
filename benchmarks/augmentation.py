"""What augmented views bring: A_last of frozen classifiers on held-back training images, for each kind of view.

Each seed draws the order of the classes and which images are learned.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import common
from benchmarks.frozen import draw, figures
from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_data, load_dual_encoder
from dulbe_peft.data.splits import draw_per_class


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--clip", default="demo", help="as --model of `dulbe-peft run`")
    options.add_argument("--data", default="demo-digits", help="as for `dulbe-peft run`")
    options.add_argument("--increment", type=int, default=5, help="classes per task")
    options.add_argument("--images", type=int, nargs="+", default=[4, 16], help="images of each class")
    options.add_argument("--held-back", type=int, default=8, help="training images of each class to test on")
    options.add_argument("--classifiers", nargs="+", default=["lda", "bayes"])
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
    features = {
        "train": learner.image_embeds(images),
        "y": torch.as_tensor(images.labels),
        "text": learner.text_embeds(images.class_names),
        "names": images.class_names,
        "scale": learner.logit_scale,
    }
    rows = []
    for augment in values.augment:
        encoder.args = replace(args, augment=augment)
        learned = features | {"train": encoder.mean_of_views(features["train"], pixels, 0, augment)}
        for count in values.images:
            draws = []
            for seed in range(values.repeats):
                parts = [
                    draw(each, str(count), values.increment, seed, values.held_back) for each in (learned, features)
                ]
                draws.append([replace(task, test=plain.test) for task, plain in zip(*parts, strict=True)])
            for spec in values.classifiers:
                each = [common.rounded(100 * figures(spec, features, tasks)["A_last"]) for tasks in draws]
                what = f"{spec}, {count} images a class, {common.model_name(values.data)}, augment {augment}: A_last"
                mean = common.rounded(statistics.fmean(each))
                rows.append(common.value_row(what, mean, "%") | {"each": each})
    common.write("augmentation", values, argv, rows)


if __name__ == "__main__":
    main()
