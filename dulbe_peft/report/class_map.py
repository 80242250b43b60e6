"""A map of the classes in two dimensions, from what a learner keeps of each class."""

from pathlib import Path
from typing import Any

import torch

from dulbe_peft.checkpoints import learner_file
from dulbe_peft.classifiers.registry import CLASSIFIERS

WIDTH, HEIGHT = 860, 560  # of the picture, whose letters are about 6 wide and 12 high
_KEPT = {"visual_prototypes": "mean images", "means": "mean images", "text_embeds": "names"}


def class_map(learner: Path) -> dict[str, Any] | None:
    """Places of all classes, what they are made of, and the part of their differences shown; None for less than 3."""
    for name in learner_file.read(learner).classifiers:
        if name not in CLASSIFIERS:  # somebody's own class, which is not registered here
            continue
        classifier = CLASSIFIERS[name].from_pretrained(learner)
        for attribute, made_of in _KEPT.items():
            rows = getattr(classifier, attribute, None)
            if rows is not None and len(rows) > 2:
                found, shown = plane(rows.detach())
                places = _placed(classifier.class_names, found)
                return {"places": places, "made_of": made_of, "shown": shown, "size": (WIDTH, HEIGHT)}
    return None


def plane(rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The two main components of unit rows, (C, d) -> (C, 2), and the part of their variance that they hold."""
    centred = torch.nn.functional.normalize(rows.double(), dim=1)
    centred = centred - centred.mean(dim=0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    return left[:, :2] * values[:2], float(values[:2].square().sum() / values.square().sum().clamp(min=1e-30))


def _placed(names: list[str], plane: torch.Tensor) -> list[dict[str, Any]]:
    """Where each class stands in the picture; its name is written where it lies on no other one."""
    low, high = plane.amin(dim=0), plane.amax(dim=0)
    scaled = (plane - low) / (high - low).clamp(min=1e-12) * torch.tensor([WIDTH - 160, HEIGHT - 40]) + 20
    places: list[dict[str, Any]] = []
    taken: list[tuple[float, float, float]] = []  # the height of each written name, and its two ends
    for name, (x, y) in zip(names, scaled.tolist(), strict=True):
        reach = x + 6 * max(len(name), 4)
        written = all(abs(height - y) > 12 or x > end or reach < start for height, start, end in taken)
        if written:
            taken.append((y, x, x + 12 + 6 * len(name)))
        places.append({"name": name, "x": x, "y": y, "written": written})
    return places
