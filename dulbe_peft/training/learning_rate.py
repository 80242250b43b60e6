"""Choose the learning rate of "auto": the paper's rate for a model of the paper's size, and a lower one otherwise.

For a smaller model, the rate is at most a tenth of the paper's. A trial trains the first task at that rate. Let X,
(n, d), be the features of the task's images before the trial, with mean m, and Y those after it. The squared movement
of the features grows with the square of the rate, so the features move by the share `MOST_MOVED` of their spread at

    moved = |Y - X|^2 / |X - m|^2,    rate = TRIAL min(1, sqrt(MOST_MOVED / moved))

Movement of the features only harms old classes. A first task that moves the features less does not mean that later
tasks will too, so the rate is never raised. `docs/results.md` shows the results by which the rule was chosen.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import PAPER_RATE
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.training.state import LearnerState
from dulbe_peft.training.task_trainer import Log, TaskTrainer
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.torch_settings import seeded_randomness

PAPER_WIDTH = 768  # of ViT-B
TRIAL = PAPER_RATE / 10
MOST_MOVED = 0.025

# A function that makes the training loop of a task.
MakeTrainer = Callable[[LearnerState, Encoder, PixelDataset, Log | None], TaskTrainer]


def with_rate(make: MakeTrainer, state: LearnerState, encoder: Encoder, images: PixelDataset) -> LearnerState:
    """Return the state with a number as its learning rate; choose it on the task's images if it is "auto"."""
    if state.args.learning_rate != "auto" or state.adapter is None or not state.strategy.adapts:
        return state
    if state.strategy.published_rate is not None:
        return _at(state, state.strategy.published_rate)
    rate = PAPER_RATE
    if width_of(state.adapter) < PAPER_WIDTH:
        with encoder.profile.phase("choose rate"):
            moved = movement(make, _at(state, TRIAL), encoder, images)
        rate = on_main_process(lambda: rate_of(moved))
    return _at(state, rate)


def _at(state: LearnerState, rate: float) -> LearnerState:
    return replace(state, args=replace(state.args, learning_rate=rate))


def width_of(adapter: DualModeLoraModel) -> int:
    """Return the input width of the narrowest adapted layer, which is the width of the vision tower."""
    return min(layer.in_features for layer in adapter.dual_mode_layers().values())


def rate_of(moved: float) -> float:
    """Return the learning rate, rounded to two digits, for the movement in a trial.

    >>> rate_of(0.1), rate_of(0.0)
    (5e-05, 0.0001)
    """
    return TRIAL if moved <= MOST_MOVED else float(f"{TRIAL * math.sqrt(MOST_MOVED / moved):.1e}")


def movement(make: MakeTrainer, state: LearnerState, encoder: Encoder, images: PixelDataset) -> float:
    """Return how far training moves the features of a task's images, as a share of their spread.

    The model is the same afterwards.
    """
    with state.resting():
        before = encoder.dataset_embeds(images, "trial")
    with state.adapter_restored(), seeded_randomness(state.args.seed, len(state.tasks)):
        make(state, encoder, images, None).take_steps()
        after = encoder.dataset_embeds(images, "trial")
    spread = (before - before.mean(dim=0)).double().square().sum()
    return float((after - before).double().square().sum() / spread) if spread else 0.0
