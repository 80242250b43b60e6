"""Augmented views of an image as rows of their own: of V views, each counts 1 / V in all sums."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# The power of an image's weight with which it goes into a sum; what has another name is a mean or a choice.
SUMS = {"counts": 1.0, "sums": 1.0, "lengths": 1.0, "scatter": 1.0, "gram": 1.0, "factors": 0.5}


def sums_of_views(before: Any, views: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
    """The buffers' new values with images of which each has V unit features, (n, V, d), and one label, (n,).

    Sums grow as the images' weights do: what is known counts V times, each view once, and then all is divided by V.
    """
    number, start = views.shape[1], before.fork()
    times = {name: number if power == 1 else number**power for name, power in SUMS.items()}
    start.install({name: tensor * times[name] for name, tensor in before.tensors().items() if name in SUMS})
    changes: dict[str, Tensor] = start.added(views.flatten(0, 1), labels.repeat_interleave(number), new)
    for name in changes.keys() & SUMS.keys():
        whole = not changes[name].is_floating_point()
        changes[name] = changes[name] // number if whole else changes[name] / times[name]
    if "freedom" in changes:
        changes["freedom"] = before.freedom + len(views) - len(new)
    return changes
