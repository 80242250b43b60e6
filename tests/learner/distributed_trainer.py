"""What test_dual_mode_trainer.py launches in one and in two processes; the argument is the output folder."""

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
    """Two tasks of which the second is stopped and resumed; what the process ends with."""
    clip, processor = load_clip("demo")
    torch.manual_seed(world()[0])  # what a process draws of its own is replaced by what the first one drew
    model = get_peft_model(clip, DualModeLoraConfig(residual_rank=2, support_rank=8))
    size = 4 // int(os.environ.get("WORLD_SIZE", 1))
    steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
    # Adam would hide a gradient that is twice as large.
    args = arguments(output, **steps, max_grad_norm=0.5, optim="sgd", save_strategy="steps", save_steps=1)
    trainer, stop = DualModeTrainer(model, args, processing_class=processor, **PROMPT), Stop(3)
    # Nine images a class: the last batch of an epoch has fewer images than there are places in the processes.
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
    found = trainer.evaluate(class_incremental_tasks(write_saved.digits(9, 12), increment=4)[0].train)
    state = tensors(trainer.learner) | {"accuracy": torch.tensor([found["eval_accuracy"]])}
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    save_file(learn(Path(sys.argv[1])), Path(sys.argv[1]) / f"state-{world()[0]}")
    leave()
