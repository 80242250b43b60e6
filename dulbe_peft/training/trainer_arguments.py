"""Translate transformers' `TrainingArguments` into a learner's settings, and refuse those that have no effect."""

import math
from typing import Any

from transformers import TrainingArguments

from dulbe_peft.arguments import PAPER_RATE, LearnerArguments

# Setting of a learner -> its name in TrainingArguments.
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
# Options of TrainingArguments that this loop does not support. They raise an error instead of being silently ignored.
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


def paper_arguments(output_dir: str, **changes: object) -> TrainingArguments:
    """Return the `TrainingArguments` with which [`DualModeTrainer`] trains as in the paper.

    They are Adam with a learning rate of 1e-3, a cosine schedule to 0 at every step, batches of 32, two epochs, and no
    clipping. transformers' defaults are 5e-5, a linear schedule, batches of 8, three epochs and clipping, with which
    the weights change far less.

    Args:
        output_dir: Folder for checkpoints.
        changes: Further fields of `TrainingArguments`, or other values of these fields.

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


def check_arguments(args: TrainingArguments, settings: dict[str, object]) -> None:
    """Raise an error if `args` ask for an unsupported option, or if one of the `settings` belongs in `args`."""
    for name in UNSUPPORTED.keys() & settings.keys():
        raise TypeError(f"DualModeTrainer does not support {name}: {UNSUPPORTED[name]}")
    misplaced = [name for name in settings if name in _NAMES]
    if misplaced:
        raise TypeError(f"{misplaced[0]} cannot be passed here: set {_NAMES[misplaced[0]]} of TrainingArguments")
    refused = [name for name in _REFUSED if getattr(args, name, None)]
    if refused:
        name, value = refused[0], getattr(args, refused[0])
        raise ValueError(f"DualModeTrainer does not support {name}={value!r}: leave it out")
    if getattr(args, "train_sampling_strategy", "random") != "random":
        raise ValueError(f"train_sampling_strategy must be 'random', got {args.train_sampling_strategy!r}")
    if args.include_for_metrics and "inputs" in args.include_for_metrics:
        raise ValueError("DualModeTrainer does not support include_for_metrics=['inputs']: its inputs are pixels")
    if not args.eval_do_concat_batches:
        raise ValueError("DualModeTrainer does not support eval_do_concat_batches=False: leave it out")
    best = args.metric_for_best_model
    if best is not None and "text_" not in best:
        raise ValueError(
            f"metric_for_best_model={best!r} does not exist: during training, images are compared with the names of "
            f"all classes, and the figures of that head are named text_loss and text_accuracy: use 'text_{best}'"
        )
    if args.n_gpu > 1:  # one GPU, because transformers would wrap the model in DataParallel for more
        args._n_gpu = 1
    if args.device.type == "cpu":  # pinned memory is for GPUs, and torch would warn
        args.dataloader_pin_memory = False


def check_dataset(name: str, dataset: object) -> None:
    """Raise a `TypeError` if images would have to be read in order: the method passes over them several times."""
    for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if part is not None and not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise TypeError(
                f"{name} must have a length and items, because its images are read several times in another order, "
                f"got a {type(part).__name__}: put its items into a list"
            )


# Arguments of transformers' Trainer that this loop does not support -> what to do instead.
UNSUPPORTED = {
    "data_collator": "batches are made of the learner's pixels; change images in the data set",
    "model_init": "pass a model; make a new trainer for each trial",
    "compute_loss_func": "write a strategy, or a loop of your own (docs/by-hand.md)",
    "preprocess_logits_for_metrics": "change the predictions in compute_metrics",
}


def learner_settings(args: TrainingArguments, settings: dict[str, object]) -> dict[str, Any]:
    """Return the fields of `LearnerArguments` that correspond to fields of `args`, and those in `settings`."""
    return {
        "epochs": max(1, math.ceil(args.num_train_epochs)),
        "batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size),
        "eval_batch_size": args.per_device_eval_batch_size,
        "learning_rate": args.learning_rate,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "num_workers": args.dataloader_num_workers or "auto",  # 0 is the default of transformers
        "device": args.device.type,
        "progress": not args.disable_tqdm,
        **settings,
    }
