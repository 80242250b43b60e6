"""Measure shares of each task's update on held-out training images, by names and by the classifiers of images.

Streams: 110 classes of handwriting in ten tasks, also with CLIP's gap between images and names; the demo's digits, of
which four tasks of five are learned, also as one poor camera takes them (`research.benchmarks.cameras`); and
photographs, 40 classes in eight tasks, or 15 others for each seed in three tasks, with more test images.
`never_learned` is the accuracy on other classes: printed characters and photographs among their own names, and the
last two digits among all ten.

The models are the demo's and the folders glyph-clip and small-clip in `--models`; the images are the folders
handwriting, printed and photographs in `--data`. A stream without its folder is left out. Measured rows of the output
are kept, so the command can be stopped and repeated; rows of another model or other images are refused. Delete the
rows that a changed rule makes wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, class_incremental_tasks
from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.photos.data.splits import draw_per_class
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training import update_share
from research.benchmarks import cameras, common
from research.benchmarks.gap import add_gap, learner_of

SHARES: dict[str, float | str | None] = {
    "nothing trained": None,
    "a quarter of each task": 0.25,
    "a half": 0.5,
    "all": 1.0,
    "`auto`": "auto",
    "`auto`, at most a quarter": "auto",
    "`auto`, no limit": "auto",
}
LIMITS = {"`auto`, at most a quarter": 0.25, "`auto`, no limit": 1.0}  # in place of `update_share.MOST`
CLASSIFIERS = ("text", "bayes", "pooled_bridge", "lda")
HANDWRITING, GAP = "handwriting", "handwriting with the gap"
DIGITS, CAMERA = "digits", "one poor camera for all tasks"
PHOTOGRAPHS, FEW = "photographs, eight tasks", "photographs, three tasks"
STREAMS = (HANDWRITING, GAP, PHOTOGRAPHS, FEW, DIGITS, CAMERA)


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--data", type=Path, default=Path("data"), help="folder with the images")
    options.add_argument("--models", type=Path, default=Path("models"), help="folder with the models")
    options.add_argument("--streams", nargs="+", default=STREAMS, choices=STREAMS)
    options.add_argument("--shares", nargs="+", default=list(SHARES), choices=SHARES)
    values = common.parse(options, argv)
    if values.quick:
        values.streams, values.shares = [DIGITS], ["a quarter of each task"]
    out = values.out or common.RESULTS / "shares.json"
    rows = common.measured_before(out, lambda row: origin(values.data, values.models, row["stream"]))
    done = {(row["stream"], row["share"], row["seed"]) for row in rows}
    for seed, stream, share in product(range(values.repeats), values.streams, values.shares):
        if (stream, share, seed) not in done and (here := origin(values.data, values.models, stream)) is not None:
            rows.append(measured(values, stream, share, seed) | {"origin": here})
            common.write("shares", values, argv, rows)


@cache
def origin(data: Path, models: Path, stream: str) -> str | None:
    """Return `common.origin_of` of a stream's model and images; None if its folder of images is not here."""
    if stream in (DIGITS, CAMERA):
        return common.origin_of("demo", load_digit_images("train"))
    photographs = stream.startswith("photographs")
    names = ("photographs",) if photographs else ("handwriting", "printed")
    if not (data / names[0]).exists():
        return None
    model = models / ("small-clip" if photographs else "glyph-clip")
    return common.origin_of(model, *(load_data(data / name, "train") for name in names))


def measured(values: Any, stream: str, share: str, seed: int) -> dict[str, Any]:
    """Learn the stream from the seed's images, in its order of classes, and return the accuracies in percent."""
    with tempfile.TemporaryDirectory() as folder:
        model, tasks, never, fields, adapter = parts(values, stream, seed, Path(folder))
        torch.manual_seed(seed)
        clip, processor = load_dual_encoder(model)
    how, kept = SHARES[share], {} if SHARES[share] is None else {"update_share": SHARES[share]}
    args = LearnerArguments(seed=seed, device="cpu", precision="float32", progress=False, **fields, **kept)
    network = clip if how is None else get_peft_model(clip, DualModeLoraConfig(**adapter))
    learner = ClassIncrementalLearner(network, processor, args, "frozen" if how is None else "dulbe", CLASSIFIERS)
    learned = tasks if never is not None else tasks[:-1]
    with patch.object(update_share, "MOST", LIMITS.get(share, update_share.MOST)):
        for task in learned:
            learner.learn_task(task.train, task.class_names)
    tests = learner.evaluations([(task.test, task.class_names) for task in learned])
    sizes = np.array([len(test.truth) for test in tests])
    figures = {
        name: float(np.average([test.accuracy(test.classifiers[name]) for test in tests], weights=sizes))
        for name in CLASSIFIERS
    }
    every = [name for task in tasks for name in task.class_names]
    if never is None:
        figures["text"] = float(np.mean([by_names(learner, task.test, every) for task in learned]))
        figures["never_learned"] = by_names(learner, tasks[-1].test, every)
    else:
        figures["never_learned"] = by_names(learner, never, list(never.class_names))
    rounded = {name: common.rounded(100 * value) for name, value in figures.items()}
    what = f"{stream}, {share}, seed {seed}: learned classes by names"
    where = {"stream": stream, "share": share, "seed": seed}
    return common.value_row(what, rounded.pop("text"), "%") | where | rounded


def by_names(learner: ClassIncrementalLearner, images: LabelledImages, names: Sequence[str]) -> float:
    """Return the accuracy on some images among the given names."""
    best = (learner.image_embeds(images) @ learner.text_embeds(names).T).argmax(dim=1).tolist()
    truth = [images.class_names[label] for label in images.labels.tolist()]
    return float(np.mean([names[place] == name for place, name in zip(best, truth, strict=True)]))


def parts(
    values: Any, stream: str, seed: int, folder: Path
) -> tuple[str, list[Task], LabelledImages | None, dict[str, Any], dict[str, Any]]:
    """Return the model, the tasks, images of other classes, and settings of the learner and of the adapter."""
    if stream in (HANDWRITING, GAP):
        images, model = load_data(values.data / "handwriting", "train"), str(values.models / "glyph-clip")
        if stream == GAP:
            model = with_gap(model, images, folder)
        tasks = class_incremental_tasks(*split(images, 16, 20, seed), increment=11, seed=seed)
        return model, tasks, load_data(values.data / "printed", "train"), {}, {}
    if stream in (PHOTOGRAPHS, FEW):
        images, few = load_data(values.data / "photographs", "train"), stream == FEW
        numbers = np.random.default_rng(7 + seed * few).permutation(len(images.class_names))
        order = [images.class_names[place] for place in numbers]
        train, test = split(images, 16, 60 if few else 20, seed)
        some = (each.select(order[: 15 if few else 40], others=True) for each in (train, test))
        tasks = class_incremental_tasks(*some, increment=5, seed=seed)
        other = split(images, 1, 20, 0)[1].select(order[40 : 55 if few else None], others=True)
        return str(values.models / "small-clip"), tasks, other, {}, {}
    images, fields = load_digit_images("train"), {"prompt_template": "a photo of the digit {}."}
    train, test = split(images, 2 if values.quick else 16 if stream == DIGITS else 40, 2 if values.quick else 60, seed)
    names = list(images.class_names)
    if stream == CAMERA:
        fields["epochs"] = 5
        train, test = (taken(each) for each in (train, test))
    return (
        "demo",
        class_incremental_tasks(train, test, names, increment=4 if values.quick else 2, seed=seed),
        None,
        fields,
        {"support_rank": 16},
    )


def split(images: LabelledImages, learn: int, test: int, seed: int) -> tuple[LabelledImages, LabelledImages]:
    """Return some images of each class to learn, drawn by the seed, and others to test, the same for all seeds."""
    fixed, drawn = np.random.default_rng(99), np.random.default_rng(seed)
    learned, tested = [], []
    for label in range(len(images.class_names)):
        rows = fixed.permutation(np.flatnonzero(images.labels == label))
        tested.append(rows[:test])
        learned.append(drawn.permutation(rows[test:])[:learn])
    return images.at(np.concatenate(learned)), images.at(np.concatenate(tested))


def taken(images: LabelledImages) -> LabelledImages:
    """Return the images as the poor camera takes them."""
    black, white = cameras.ONE
    shades = [black + (white - black) * value // 255 for value in range(256)] * 3
    pictures = [(item["image"].point(shades), item["label"]) for item in images]
    return LabelledImages(pictures, images.labels, images.class_names)


def with_gap(model: str, images: LabelledImages, folder: Path) -> str:
    """Write the model with CLIP's gap between images and names, and return its folder."""
    clip, processor = load_dual_encoder(model)
    add_gap(learner_of(clip, processor, "frozen", 0, 0.0), draw_per_class(images, 4), 1.0)
    clip.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
