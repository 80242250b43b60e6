"""Train with DualModeTrainer; test_dual_mode_trainer.py launches this script in one and in two processes.

The argument is the output folder.
"""

import os
import sys
from pathlib import Path

import torch
import write_saved
from peft import get_peft_model
from safetensors.torch import save_file
from test_dual_mode_trainer import PROMPT, Stop, arguments, tensors

from dulbe_peft import DualModeLoraConfig, DualModeTrainer, class_incremental_tasks, load_clip
from dulbe_peft.utils.processes import leave, world


def learn(output: Path) -> dict[str, torch.Tensor]:
    """Learn two tasks, stopping and resuming the second; returns the process's final state."""
    clip, processor = load_clip("demo")
    torch.manual_seed(world()[0])  # random values of the other process must be replaced by those of the first
    model = get_peft_model(clip, DualModeLoraConfig(residual_rank=2, support_rank=8))
    size = 4 // int(os.environ.get("WORLD_SIZE", 1))
    steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
    # SGD is used because Adam would hide a gradient that is twice as large.
    args = arguments(output, **steps, max_grad_norm=0.5, optim="sgd", save_strategy="steps", save_steps=1)
    trainer, stop = DualModeTrainer(model, args, processing_class=processor, **PROMPT), Stop(3)
    # With nine images per class, the last batch of an epoch has too few images to fill the batches of both processes.
    first, second = class_incremental_tasks(write_saved.digits(0, 9), increment=2)[:2]
    trainer.train_dataset = first.train
    trainer.train()
    trainer.train_dataset = second.train
    trainer.add_callback(stop)
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.remove_callback(stop)
        trainer.train(resume_from_checkpoint=True)
    figures = trainer.evaluate(class_incremental_tasks(write_saved.digits(9, 12), increment=4)[0].train)
    state = tensors(trainer.learner) | {"accuracy": torch.tensor([figures["eval_accuracy"]])}
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    save_file(learn(Path(sys.argv[1])), Path(sys.argv[1]) / f"state-{world()[0]}")
    leave()
