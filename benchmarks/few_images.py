"""Every classifier on a stream with 1, 2, 4, ... images a class: A_last, A_bar and the expected calibration error.

Nothing is trained, so every image is encoded once. Each seed draws the order of the classes and the images.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import common, rivals
from benchmarks.rejection import encoded
from dulbe_peft.classifiers import make_classifier
from dulbe_peft.metrics.accuracy import calibration_error

SPECS = ("text", "bridge", "bridge:metric=whitened", "prototype", "lda", "ranpac:features=1000", "bayes")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--clip", default="demo", help="as --model of `dulbe-peft run`")
    options.add_argument("--data", default="demo-digits", help="as for `dulbe-peft run`")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--images", type=int, nargs="+", default=[1, 2, 4, 8, 16, 100], help="images of each class")
    options.add_argument("--classifiers", nargs="+", default=list(SPECS))
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    options.add_argument(
        "--held-back", type=int, default=0, help="test on so many training images of each class, to choose settings"
    )
    options.add_argument("--shuffled-texts", action="store_true", help="give every class another one's text")
    values = common.parse(options, argv)
    features = encoded(values)
    if values.shuffled_texts:
        order = torch.randperm(len(features["text"]), generator=torch.Generator().manual_seed(0))
        features["text"] = features["text"][order]
    rows = []
    for images in values.images[:1] if values.quick else values.images:
        draws = [draw(features, images, values.increment, seed, values.held_back) for seed in range(values.repeats)]
        for spec in values.classifiers:
            measured = rivals.figures if spec in rivals.RIVALS else figures
            found = [measured(spec, features, tasks[:2] if values.quick else tasks) for tasks in draws]
            for name in found[0]:
                each = [common.rounded(100 * one[name]) for one in found]
                what = f"{spec}, {images} images a class, {common.model_name(values.data)}: {name}"
                mean = common.rounded(statistics.fmean(each))
                rows.append(common.value_row(what, mean, "%") | {"each": each})
    common.write("few_images", values, argv, rows)


def draw(features: dict[str, Any], images: int, increment: int, seed: int, held_back: int) -> list[dict[str, Any]]:
    """The tasks of a stream, each with its `classes`, features `train` and `test`, and their labels `y` and `truth`.

    `y` indexes the task's own classes, `truth` all seen ones.
    """
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for classes in torch.randperm(len(features["names"]), generator=generator).split(increment):
        task: dict[str, Any] = {"classes": classes.tolist(), "train": [], "y": [], "test": [], "truth": []}
        for number, label in enumerate(classes.tolist()):
            rows = (features["y"] == label).nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=generator)]
            own = features["train"][rows[len(rows) - held_back :]] if held_back else None
            tests = features["test"][features["truth"] == label] if own is None else own
            learned = features["train"][rows[: len(rows) - held_back][:images]]
            place = number + sum(len(other["classes"]) for other in tasks)
            for key, value in (("train", learned), ("test", tests)):
                task[key].append(value)
            task["y"] += [number] * len(learned)
            task["truth"] += [place] * len(tests)
        tasks.append(task | {key: torch.cat(task[key]) for key in ("train", "test")})
    return tasks


@torch.no_grad()
def figures(spec: str, features: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, float]:
    """A_last, A_bar and the expected calibration error after the last task, as fractions."""
    classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
    seen: list[int] = []
    tests, truth, overall = [], [], []
    for task in tasks:
        seen += task["classes"]
        names = [features["names"][label] for label in task["classes"]]
        classifier.add_classes(names, task["train"], task["y"], features["text"][seen])
        tests.append(task["test"])
        truth += task["truth"]
        probabilities = classifier.probabilities(torch.cat(tests))
        sure, said = probabilities.max(dim=1)
        right = said == torch.tensor(truth)
        overall.append(right.double().mean().item())
    error = calibration_error(sure, right)
    return {"A_last": overall[-1], "A_bar": statistics.fmean(overall), "expected calibration error": error}


if __name__ == "__main__":
    main()
