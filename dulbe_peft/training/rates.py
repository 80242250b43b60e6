"""The learning rate of "auto": the paper's for a model of the paper's size; for a smaller one a tenth of it, or less.

How much less, a trial tells: it trains the first task at a tenth of the paper's rate. X, (n, d), are the features of
the task's images before it, with mean m, and Y those after it. The square of a movement grows with that of the rate,
so this is the rate at which features move by the share `MOST_MOVED` of their spread:

    moved = |Y - X|^2 / |X - m|^2,    rate = TRIAL min(1, sqrt(MOST_MOVED / moved))

Old classes suffer from what features move, and gain nothing by it. A task that moves them less than this says little
of those that follow, so the rate is never raised. `docs/results.md` has what the rule was chosen by.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import PAPER_RATE
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.training.state import LearnerState
from dulbe_peft.training.trainer import Log, TaskTrainer
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.torch_settings import seeded_randomness

PAPER_WIDTH = 768  # of ViT-B
TRIAL = PAPER_RATE / 10
MOST_MOVED = 0.025

# Makes the training loop of a task.
MakeTrainer = Callable[[LearnerState, Encoder, PixelDataset, Log | None], TaskTrainer]


def with_rate(make: MakeTrainer, state: LearnerState, encoder: Encoder, images: PixelDataset) -> LearnerState:
    """The state whose learning rate is a number, which images of a task have settled where it was "auto"."""
    if state.args.learning_rate != "auto" or state.adapter is None or not state.strategy.adapts:
        return state
    rate = PAPER_RATE
    if width_of(state.adapter) < PAPER_WIDTH:
        with encoder.profile.phase("choose rate"):
            moved = movement(make, _at(state, TRIAL), encoder, images)
        rate = on_main_process(lambda: rate_of(moved))
    return _at(state, rate)


def _at(state: LearnerState, rate: float) -> LearnerState:
    return replace(state, args=replace(state.args, learning_rate=rate))


def width_of(adapter: DualModeLoraModel) -> int:
    """How many features the narrowest adapted layer reads, which is the width of a vision tower."""
    return min(layer.in_features for layer in adapter.dual_mode_layers().values())


def rate_of(moved: float) -> float:
    """The rate, in two digits, that a trial's movement allows.

    >>> rate_of(0.1), rate_of(0.0)
    (5e-05, 0.0001)
    """
    return TRIAL if moved <= MOST_MOVED else float(f"{TRIAL * math.sqrt(MOST_MOVED / moved):.1e}")


def movement(make: MakeTrainer, state: LearnerState, encoder: Encoder, images: PixelDataset) -> float:
    """The share of their spread by which a task's training moves the features of its images; the model stays."""
    with state.resting():
        before = encoder.dataset_embeds(images, "trial")
    with state.adapter_restored(), seeded_randomness(state.args.seed, len(state.tasks)):
        make(state, encoder, images, None).take_steps()
        after = encoder.dataset_embeds(images, "trial")
    spread = (before - before.mean(dim=0)).double().square().sum()
    return float((after - before).double().square().sum() / spread) if spread else 0.0
