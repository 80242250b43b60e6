"""Choose how much of what a task changed in the vision tower is kept, update_share="auto".

X, (n, d), are the unit features of the task's images by the model before the task, and T, (C, d), the unit embeddings
of all seen names, with those of the task, by the same model (the names by the trained text LoRA, which is kept whole,
would suit these images too well). Before the training, the names are wrong for `wrong` of the images, whose features
have not been trained. Y are the features of m of the images, at most `IMAGES`, by the trained model, and X_m their
features before. All of the update moves the features by

    moved = (|Y - X_m|^2 / m) / (|T - mean T|^2 / C)

of the squared distance of names from their mean. The movement grows with the square of the share. What the names get
right already needs no change, so the movement that is allowed grows with the error of the names:

    share = min(MOST, sqrt(MOVED error / moved)),    error = (wrong + 1) / (n + 2)

More than MOST can make the names better still, but costs classifiers that learn from images. `docs/results.md` shows
the results by which the rule was chosen.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from dulbe_peft.training.state import LearnerState

MOST, MOVED = 0.3, 0.016
# m. By the delta method, the share has a relative standard deviation of v / (2 sqrt(m)) over draws of images, where v
# is that of |y - x|^2 over images: 6 % with v = 1.
IMAGES = 64


def can_share(state: LearnerState) -> bool:
    """Return whether a share of an update can be kept."""
    strategy, config = state.strategy, state.config
    return strategy.adapts and strategy.trains_adapter and strategy.shares and not (config and config.modules_to_save)


def check_share(state: LearnerState) -> None:
    """Raise a `ValueError` if the settings ask for a share, and there is none."""
    share, strategy = state.args.update_share, state.strategy
    if share in ("auto", 1) or not strategy.adapts or can_share(state):
        return
    if not (strategy.trains_adapter and strategy.shares):
        raise ValueError(
            f"update_share is {share}, but the strategy {strategy.name!r} does not go on from the weights that a task "
            "leaves, so no share of its update can be kept: use update_share=1"
        )
    raise ValueError(
        f"update_share is {share}, but the adapter has modules_to_save, and whole modules cannot be scaled: use "
        "update_share=1"
    )


def facts(before: Tensor, after: Tensor, labels: Tensor, text: Tensor, rows: Sequence[int]) -> tuple[float, float]:
    """Return the error of the names before the task and the movement by all of its update, as above.

    `after` are features of the images `rows` among those of `before`. `labels`, (n,), index `text`. Without a second
    name, the movement is relative to squared unit length.
    """
    wrong = int(((before @ text.T).argmax(dim=1) != labels).sum())
    between = float((text - text.mean(dim=0)).double().square().sum(dim=1).mean()) or 1.0
    moved = float((after - before[rows]).double().square().sum(dim=1).mean())
    return (wrong + 1) / (len(labels) + 2), moved / between


def share_of(error: float, moved: float) -> float:
    """Return the share, rounded to two digits; MOST if the features have not moved.

    >>> share_of(0.5, 0.128), share_of(0.9, 0.01)
    (0.25, 0.3)
    """
    return MOST if moved * MOST**2 <= MOVED * error else float(f"{math.sqrt(MOVED * error / moved):.2g}")
