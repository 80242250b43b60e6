"""transformers' `TrainingArguments` as a learner's settings: which are the same, and which are refused."""

import math
from typing import Any

from transformers import TrainingArguments

from dulbe_peft.arguments import PAPER_RATE, LearnerArguments

# Settings of a learner that TrainingArguments has under names of its own.
_NAMES = {
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "learning_rate": "learning_rate",
    "lr_schedule": "lr_scheduler_type",
    "seed": "seed",
    "num_workers": "dataloader_num_workers",
    "device": "use_cpu",
    "log_with": "report_to",
    "progress": "disable_tqdm",
}
# What TrainingArguments offers and this loop does not do; nothing is left out in silence.
_REFUSED = (
    "auto_find_batch_size",
    "bf16_full_eval",
    "dataloader_drop_last",
    "deepspeed",
    "fp16_full_eval",
    "fsdp",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "push_to_hub",
    "torch_compile",
    "use_liger_kernel",
)


def paper_arguments(output_dir: str, **changes: Any) -> TrainingArguments:
    """transformers' `TrainingArguments` with which [`DualModeTrainer`] trains as the paper does.

    They are Adam with 1e-3, a cosine to 0 at every step, batches of 32, two epochs, and no clipping. The defaults of
    transformers are 5e-5, a line, batches of 8 and clipping: weights then move far less.

    Args:
        output_dir: where checkpoints go.
        changes: further fields of `TrainingArguments`, or other values of these.

    Example:
        >>> paper_arguments("out", num_train_epochs=4, report_to="none").learning_rate
        0.001
    """
    fields: dict[str, Any] = {
        "num_train_epochs": LearnerArguments.epochs,
        "per_device_train_batch_size": LearnerArguments.batch_size,
        "learning_rate": PAPER_RATE,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
        "seed": LearnerArguments.seed,
    }
    return TrainingArguments(output_dir, **fields | changes)


def check_arguments(args: TrainingArguments, settings: dict[str, Any]) -> None:
    """Raise where `args` ask for what the loop does not do, or a setting belongs into them."""
    misplaced = [name for name in settings if name in _NAMES]
    if misplaced:
        raise TypeError(f"{misplaced[0]} is {_NAMES[misplaced[0]]} of TrainingArguments here: set it there")
    refused = [name for name in _REFUSED if getattr(args, name, None)]
    if refused:
        raise ValueError(f"{refused[0]}={getattr(args, refused[0])!r}: DualModeTrainer does not do this, leave it out")
    if getattr(args, "train_sampling_strategy", "random") != "random":
        raise ValueError(f"train_sampling_strategy={args.train_sampling_strategy!r}: images come in random order here")
    if args.n_gpu > 1:  # one process on several GPUs would be wrapped in DataParallel: one of them works
        args._n_gpu = 1
    if args.device.type == "cpu":  # torch would warn that there is no other memory
        args.dataloader_pin_memory = False


def learner_settings(args: TrainingArguments, settings: dict[str, Any]) -> dict[str, Any]:
    """Fields of `LearnerArguments`: those that `args` have under names of their own, and `settings`."""
    return {
        "epochs": max(1, math.ceil(args.num_train_epochs)),
        "batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size),
        "eval_batch_size": args.per_device_eval_batch_size,
        "learning_rate": args.learning_rate,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "num_workers": args.dataloader_num_workers,
        "device": args.device.type,
        "progress": not args.disable_tqdm,
        **settings,
    }
