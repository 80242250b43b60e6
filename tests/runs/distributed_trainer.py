"""What test_dual_mode_trainer.py launches in one and in two processes; the argument is the output folder."""

import os
import sys
from pathlib import Path

import torch
import write_saved
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainingArguments

from dulbe_peft import DualModeLoraConfig, DualModeTrainer, class_incremental_tasks, load_clip
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.utils.processes import leave, world


class Stop(TrainerCallback):
    """An error after the third step, as long as it is asked for."""

    wanted = False

    def on_step_end(self, args, state, control, **kwargs):
        if self.wanted and state.global_step == 3:
            raise InterruptedError


def learn(output: Path) -> dict[str, torch.Tensor]:
    """Two tasks of which the second is stopped and resumed; what the process ends with."""
    clip, processor = load_clip(demo_model_folder())
    torch.manual_seed(world()[0])  # what a process draws of its own is replaced by what the first one drew
    model = get_peft_model(clip, DualModeLoraConfig(residual_rank=2, support_rank=8))
    size = 4 // int(os.environ.get("WORLD_SIZE", 1))
    args = TrainingArguments(
        str(output),
        num_train_epochs=2,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=2,
        learning_rate=0.5,
        max_grad_norm=0.5,
        optim="sgd",  # Adam would hide a gradient that is twice as large
        save_strategy="steps",
        save_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    stop = Stop()
    trainer = DualModeTrainer(
        model, args, processing_class=processor, callbacks=[stop], prompt_template="the digit {}."
    )
    # Nine images a class: the last batch of an epoch has fewer images than there are places in the processes.
    for index, task in enumerate(class_incremental_tasks(write_saved.digits(0, 9), increment=2)[:2]):
        trainer.train_dataset = task.train
        stop.wanted = index == 1
        try:
            trainer.train()
        except InterruptedError:
            stop.wanted = False
            trainer.train(resume_from_checkpoint=True)
    tests = class_incremental_tasks(write_saved.digits(9, 12), increment=4)[0].train
    found = trainer.evaluate(tests)
    state = {name: tensor for name, tensor in model.state_dict().items() if "dulbe_" in name}
    state |= {f"head.{name}": tensor for name, tensor in trainer.head.tensors().items()}
    state |= {f"statistics.{name}": tensor for name, tensor in trainer.statistics.items()}
    state["accuracy"] = torch.tensor([found["eval_accuracy"]])
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


def main() -> None:
    output = Path(sys.argv[1])
    torch.set_num_threads(1)
    save_file(learn(output), output / f"state-{world()[0]}")
    leave()


main()
