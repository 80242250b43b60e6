"""The loss of every epoch of a run, sent to the trackers that accelerate knows, such as TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from dulbe_peft.learner import ClassIncrementalLearner


@contextmanager
def tracked(learner: ClassIncrementalLearner, output: Path) -> Iterator[None]:
    """While the block runs, what the learner logs goes to the trackers that its settings name."""
    trackers = learner.args.log_with
    if not trackers:
        yield
        return
    accelerator = Accelerator(cpu=learner.device.type == "cpu", log_with=trackers, project_dir=str(output))
    accelerator.init_trackers("dulbe_peft")
    learner.log = accelerator.log
    try:
        yield
    finally:
        accelerator.end_training()
        learner.log = None
