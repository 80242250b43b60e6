"""Compare the head's logits with K_b separate passes, and the cost of closing a task with `bayes` and with `lda`.

The passes use one classifier per depth; both sides get precomputed bridges. A task is closed when a classifier has
learned its images and can score further ones. Only `bayes:features=0` has a goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from dulbe_peft import BridgeEnsembleHead
from dulbe_peft.classifiers.registry import make_classifier
from research.benchmarks import common, literal, models

# All classes, classes of the last task, images per class, feature dimension.
QUICK = ((6, 3, 4, 32),)
CLOSINGS = (31, 31, 50, 512), (110, 11, 16, 256), (371, 53, 3, 256), (1000, 100, 16, 512)


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=51, model=None)
    options.add_argument("--classes", type=int, default=1000)
    options.add_argument("--batch", type=int, default=256, help="images per batch")
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--closings", type=int, default=15, help="rounds of closing a task to measure")
    values = common.parse(options, argv)
    if values.quick:
        values.classes, values.batch, values.dim = 20, 8, 32
    head = BridgeEnsembleHead(values.dim)
    text = models.unit(values.classes, values.dim, seed=1)
    per_class = text.repeat(2, 1) + 0.1 * models.unit(2 * values.classes, values.dim, seed=2)
    names = [f"class {number}" for number in range(values.classes)]
    head.add_classes(names, per_class, torch.arange(values.classes).repeat(2), text)
    features = models.unit(values.batch, values.dim, seed=3)
    bridges = list(head.bridge_prototypes().unbind(1))
    weights = head.reliability

    def ours() -> torch.Tensor:
        return head(features)

    def passes() -> torch.Tensor:
        return literal.ensemble_logits(features, bridges, weights, head.logit_scale)

    torch.testing.assert_close(ours(), passes(), rtol=1e-4, atol=1e-4)
    times = common.compare({"ours": ours, "passes": passes}, values.repeats, warmup=3)
    what = f"head on {values.classes:,} classes / {head.num_depths} passes, {values.batch} images, d = {values.dim}"
    rows = [common.row(what, times, "ours", "passes", 0.15)]
    rows += [row for case in (QUICK if values.quick else CLOSINGS) for row in closing_rows(*case, values)]
    common.write("head", values, argv, rows)


def closing_rows(classes: int, new: int, each: int, dim: int, values: Any) -> list[dict[str, Any]]:
    """Compare closing the last task of a stream, with `new` of `classes` classes and `each` images per class."""
    goals = {"bayes:features=0": 2.0, "bayes": None}
    sides = {spec: closing(spec, classes, new, each, dim) for spec in (*goals, "lda")}
    times = common.compare(sides, min(values.repeats, values.closings))
    where = f"{new} of {classes:,} classes, {each} images each, d = {dim}"
    return [common.row(f"{spec}: close a task / lda, {where}", times, spec, "lda", goals[spec]) for spec in goals]


def closing(spec: str, classes: int, new: int, each: int, dim: int) -> Callable[[], object]:
    """Return a function that learns the last task and scores an image, from the same state in each call."""
    labels, old, names = torch.arange(classes).repeat_interleave(each), classes - new, list(map(str, range(classes)))
    centres = models.unit(classes, dim, seed=1)
    text = F.normalize(centres + models.unit(classes, dim, seed=2), dim=1)
    images = F.normalize(centres[labels] + 1.2 * models.unit(len(labels), dim, seed=3), dim=1)
    classifier = make_classifier(spec, dim)
    if old:
        classifier.add_classes(names[:old], images[: old * each], labels[: old * each], text[:old])

    def close() -> torch.Tensor:
        twin = classifier.fork()
        twin.add_classes(names[old:], images[old * each :], labels[old * each :] - old, text)
        return twin(images[:1])

    return close


if __name__ == "__main__":
    main()
