"""Learn a stream of digits; test_distributed.py launches this script in one and in two processes.

Each process writes its final state. The arguments are the output folder, the expected number of processes, strategies
separated by commas, each of which learns the stream, and optionally "break" to raise errors in one process first.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
from peft import get_peft_model
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
    run_stream,
)
from dulbe_peft.data.digits import digit_images
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.subspaces.occupation import summed
from dulbe_peft.utils.processes import leave, shard, world


def world_from_launcher() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class OneUnreadable:
    """Digits, one of which cannot be read in the second process."""

    def __init__(self, digits: LabelledImages, rank: int, index: int) -> None:
        self.digits, self.labels, self.broken = digits, digits.labels, index if rank == 1 else -1

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == self.broken:
            raise OSError("disk on fire")
        return self.digits[index]


def fail_alone(learner: ClassIncrementalLearner, digits: LabelledImages, rank: int) -> None:
    """Raise an error in one process only: while images are read, and by class names in another order."""
    task = class_incremental_tasks(digits, increment=2)[0]
    expected = (ValueError, "disk on fire") if rank == 1 else (RuntimeError, "process 1 stopped: .*disk on fire")
    for index in (0, len(task.train) - 1):
        broken = OneUnreadable(task.train, rank, index)
        try:
            learner.learn_task(broken, task.class_names)
        except expected[0] as error:
            assert re.search(expected[1], str(error)), error
        else:
            raise SystemExit("a broken image was learned")
    names = task.class_names if rank == 0 else task.class_names[::-1]
    bare = [task.train[index] for index in range(len(task.train))]  # a list has no class names to contradict `names`
    try:
        learner.learn_task(bare, names)
    except ValueError as error:
        assert "differ" in str(error), error
    else:
        raise SystemExit("two tasks were learned as one")


def sum_few_tokens() -> None:
    """Check that all processes get the sum over all rows, even if the second process has no rows."""
    tokens = torch.randn(90, 40, generator=torch.Generator().manual_seed(0))
    for parts in (tokens, tokens[:1]):
        rows = shard(parts)
        total = summed({("k", "v"): rows.T @ rows} if len(rows) else {}, torch.device("cpu"))
        torch.testing.assert_close(total["k", "v"], parts.T @ parts, rtol=1e-5, atol=1e-3)


def make_learner(strategy: str, rank: int) -> ClassIncrementalLearner:
    clip, processor = load_clip(demo_model_folder())
    clip.set_attn_implementation("eager")
    args = LearnerArguments(
        epochs=2, batch_size=8, eval_batch_size=5, device="cpu", progress=False, prompt_template="the digit {}."
    )
    torch.manual_seed(rank)  # random values of the other processes must be replaced by those of the first
    config = DualModeLoraConfig(residual_rank=2, support_rank=8, modules_to_save=["visual_projection"])
    return ClassIncrementalLearner(get_peft_model(clip, config), processor, args=args, strategy=strategy)


def state_of(learner: ClassIncrementalLearner) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapter, the head and the strategy's memory."""
    state = {k: v for k, v in learner.model.state_dict().items() if "dulbe_" in k or "modules_to_save" in k}
    state |= dict(learner.head.named_buffers(prefix="head"))
    state |= {f"statistics.{name}": matrix for name, matrix in (learner.memory or {}).items()}
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


def main() -> None:
    output, processes = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    data = load_digits()
    # With 17 images per task and batches of 8, the last batch has one image for any number of processes.
    rows = np.concatenate([np.flatnonzero(data.target == c)[: 8 + c % 2] for c in range(10)])
    digits = digit_images(data.images[rows], data.target[rows])
    rank, size = world_from_launcher()
    for strategy in sys.argv[3].split(","):
        learner = make_learner(strategy, rank)
        if world() != (rank, processes):
            raise SystemExit(f"this is process {world()}, but the launcher expects {(rank, size)}")
        sum_few_tokens()
        if sys.argv[4:] and size > 1:
            fail_alone(learner, digits, rank)
        run_stream(learner, class_incremental_tasks(digits, digits, increment=2)[:3], output / strategy)
        save_file(state_of(learner), output / f"{strategy}-{rank}.safetensors")
    leave()


main()
