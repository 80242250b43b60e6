"""Train a task in the loop of transformers' `Trainer`, after probe and allocation and before the closing pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub import CommitInfo
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.checkpoints import restoring, saving, unfinished
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.data.images import named_images
from dulbe_peft.encoders.pixels import PixelDataset, PixelRow, loader_settings
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.strategies.dulbe import Dulbe
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.batches import EpochLoader, Order, WholeBatches, collated
from dulbe_peft.training.state import LearnerState
from dulbe_peft.training.task_trainer import TaskTrainer
from dulbe_peft.training.trainer_arguments import check_arguments, check_dataset, learner_settings, paper_arguments
from dulbe_peft.utils.folders import CheckpointError, fill_folder
from dulbe_peft.utils.processes import raise_in_all, sum_over_processes, world
from dulbe_peft.utils.tensors import read_tensors
from dulbe_peft.utils.terminal import print_once


class DualModeTrainer(Trainer):
    """A `transformers.Trainer` whose `train()` learns one task: probe, allocate, train with routed gradients, close.

    transformers does the rest as usual: epochs, optimizer, schedule, clipping, gradient accumulation, mixed
    precision, callbacks, logs, evaluation and checkpoints. Under `torchrun`, the loss is computed over the batches of
    all processes together. A checkpoint contains everything that is needed to resume the task, even in a new process.

    Args:
        model: `get_peft_model(clip, DualModeLoraConfig(...))`, or a learner that has already learned tasks, such as
            one from `ClassIncrementalLearner.from_pretrained(folder)`. Its active adapter is trained, and saved under
            its name.
        args: Transformers' training arguments. None uses `paper_arguments`, because transformers' defaults are not the
            paper's settings.
        train_dataset: Images of the new task. Items are {"image", "label"} or (image, label). Set this attribute again
            before the `train()` of the next task.
        eval_dataset: Images of any seen classes, for `evaluate` and for evaluation during training.
        processing_class: The model's processor. Not needed if `model` is a learner.
        class_names: The class name of each label of `train_dataset`. None uses the names that the data set has. This
            is an attribute, too.
        compute_metrics: As in transformers. None computes the accuracy.
        callbacks: As in transformers.
        optimizers: As in transformers.
        settings: Fields of [`LearnerArguments`] that TrainingArguments lacks, such as `prompt_template`,
            `statistics_tokens` or `teacher`.

    Attributes:
        learner: The [`ClassIncrementalLearner`] that is trained. Use it to predict, evaluate and export.

    Raises:
        ValueError: If the model is unsuitable, or `args` ask for something that this loop does not support.
        TypeError: If a setting belongs in `args`.

    Example:
        >>> args = paper_arguments("out")
        >>> trainer = DualModeTrainer(model, args, train_dataset=june, processing_class=processor)
        >>> trainer.train()
        >>> trainer.save_model("out-june")

    Reference:
        Appendix "Complete Procedure", Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module | ClassIncrementalLearner,
        args: TrainingArguments | None = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        class_names: Sequence[str] | None = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **settings: Any,
    ) -> None:
        args = args or paper_arguments("tmp_trainer")
        check_arguments(args, settings)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            check_dataset(name, dataset)
        self._settings = settings
        self.learner = _learner_of(model, processing_class, args, settings)
        self.class_names = class_names
        self._task: _LoopTask | None = None
        self._output: TrainOutput
        self._eval_head: Callable[[torch.Tensor], torch.Tensor]
        super().__init__(
            self.learner.model,
            args,
            data_collator=collated,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.learner.processor,
            compute_metrics=compute_metrics or accuracy,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.learner.encoder.autocast = self.accelerator.autocast  # type: ignore[method-assign]
        # The loss is a mean over a batch, so transformers must divide it by the number of batches in a step.
        self.model_accepts_loss_kwargs, self.loss_is_scaled_for_ga = False, False
        self._given_optimizers = tuple(optimizers) != (None, None)

    @property
    def head(self) -> BridgeEnsembleHead:
        """The bridge ensemble over all seen classes."""
        return self.learner.head

    @property
    def statistics(self) -> OccupationStatistics:
        """Occupation statistics S of the finished tasks; empty before the first task."""
        memory = self.learner.memory
        return memory if isinstance(memory, OccupationStatistics) else OccupationStatistics()

    # ------------------------------------------------------------------ training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Learn the classes of `train_dataset` as one more task. After an error, the learner is as it was before.

        Args:
            resume_from_checkpoint: A checkpoint of the same task, or True for the newest complete checkpoint in
                `args.output_dir`. Newer incomplete ones are skipped and reported. The checkpoint replaces the model's
                adapter, classifiers and statistics.
            trial: As in transformers.
            ignore_keys_for_eval: As in transformers.

        Returns:
            transformers' TrainOutput.

        Raises:
            ValueError: If `ClassIncrementalLearner.learn_task` would raise one, the checkpoint is of another task, or
                `update_share` is not 1 and the training resumes.
            CheckpointError: If the given checkpoint is damaged or incomplete.
        """
        check_dataset("train_dataset", self.train_dataset)
        if self.train_dataset is None:
            raise ValueError("train_dataset is missing: set trainer.train_dataset to the images of the new task")
        if self.data_collator is not collated:
            raise ValueError("data_collator cannot be changed: batches are made of the learner's pixels, not of items")
        check_arguments(self.args, {})
        # What was set in `args` since then is used by the loop, and saved with the learner.
        changed = replace(self.learner.args, **learner_settings(self.args, self._settings))
        if changed != self.learner.args:
            self.learner.change_settings(changed)
            self.learner.encoder.autocast = self.accelerator.autocast  # type: ignore[method-assign]
        if self._given_optimizers and self.optimizer is None:
            raise ValueError("the given optimizers belong to an earlier task: set .optimizer and .lr_scheduler again")
        if resume_from_checkpoint and (share := self.learner.args.update_share) != 1:
            raise ValueError(
                f"update_share is {share!r}, but a checkpoint does not hold how its task began, so no share of its "
                "update can be kept: resume with update_share=1, or train the task again without resuming"
            )
        with self.learner.transaction():
            checkpoint = self._resume(resume_from_checkpoint) if resume_from_checkpoint else None
            folder = None if checkpoint is None else str(checkpoint)
            loop = partial(super().train, folder, trial, ignore_keys_for_eval)
            trainer = partial(_LoopTask, self, checkpoint, loop)
            self.learner.learn_task(self.train_dataset, self.class_names, trainer=trainer)
        return self._output

    def _resume(self, given: str | Literal[True]) -> Path:
        """Give the learner the state of a checkpoint of the task in `train_dataset`, and return the checkpoint."""
        wanted = unfinished.record_of(named_images(self.train_dataset, self.class_names), self._compares_pixels)
        folder = Path(self.args.output_dir or ".") if given is True else Path(given)
        if given is True:
            checkpoint = self._newest(folder, wanted)
        else:
            checkpoint = folder if unfinished.read(folder)[1] == wanted else None
        if checkpoint is None:
            raise ValueError(
                f"{folder} has no checkpoint of this task, with {wanted['images']} images of the classes "
                f"{wanted['class_names']!r:.200}: call train() without resuming"
            )
        if given is not True:
            unfinished.check_whole(checkpoint)
        learned, state = self.learner.tasks, restoring.restore(self.learner.state, checkpoint)
        if learned and learned != state.tasks:
            raise ValueError(
                f"{checkpoint} continues after the tasks {state.tasks!r:.200}, but this learner has learned "
                f"{learned!r:.200}: start with a model that has learned nothing"
            )
        self.learner.use_state(state)
        return checkpoint

    @staticmethod
    def _newest(folder: Path, wanted: dict[str, object]) -> Path | None:
        """Return the newest complete checkpoint of a task in a folder, and report newer incomplete ones."""
        numbered = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
        for path in sorted(numbered, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
            try:
                unfinished.check_whole(path)
                if unfinished.read(path)[1] == wanted:
                    return path
            except (CheckpointError, ValueError) as error:
                print_once(f"skipping {path}: {error}")
        return None

    @property
    def _compares_pixels(self) -> bool:
        """Whether images that are not files have the same pixels in every pass, so that the pixels identify them."""
        return self.learner.args.teacher == "cached"

    def _load_from_checkpoint(self, *_: object) -> None:
        """Do nothing, because `train` has already loaded the adapter."""

    def _load_best_model(self) -> None:
        tensors, _ = read_tensors(Path(str(self.state.best_model_checkpoint)) / saving.ADAPTER_FILE)
        self.learner.state.set_adapter_tensors(tensors)

    def get_train_dataloader(self) -> DataLoader[PixelRow]:
        """Return a loader of the task's batches in a learner's order, with the pixels of this process's rows only."""
        task = self._current
        order = Order(len(task.images), self._train_batch_size * world()[1], task.args.seed, task.index)
        settings = loader_settings(task.encoder.args, task.encoder.device, len(order))
        return EpochLoader(WholeBatches(task), order, settings | {"collate_fn": itemgetter(0)})

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        with raise_in_all():  # an image that one process cannot read stops all processes
            return super().get_batch_samples(*args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Return the routed loss of a batch: its `backward()` sends the structure loss to the shared modes only."""
        task, scaler = self._current, self.accelerator.scaler
        step = task.step_of((inputs["pixel_values"], inputs["labels"], inputs["index"]))
        step.gradient_scale = 1.0 if scaler is None else scaler.get_scale()
        return task.strategy.loss(task.task, step)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)
        if self.accelerator.sync_gradients:
            # Each process has the gradient of its rows. DistributedDataParallel does not average here, since its
            # forward is never called.
            sum_over_processes(p.grad for p in model.parameters() if p.grad is not None)
        return loss

    @property
    def _current(self) -> "_LoopTask":
        if self._task is None:
            raise ValueError("no task is being trained: call train()")
        return self._task

    # ------------------------------------------------------------------ evaluation

    def get_eval_dataloader(self, eval_dataset: object = None) -> DataLoader[PixelRow]:
        data: Any = self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset
        return super().get_eval_dataloader(self._tests(data[eval_dataset] if isinstance(eval_dataset, str) else data))

    def get_test_dataloader(self, test_dataset: object) -> DataLoader[PixelRow]:
        return super().get_test_dataloader(self._tests(test_dataset))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate with the first classifier, or during training with the text embeddings of old and new classes.

        During training, the names of the figures therefore begin with "eval_text_", as in `eval_text_accuracy`.
        """
        if self._task is None:
            self._eval_head = self.learner.classifier
            with self.learner.state.resting():
                return super().evaluation_loop(*args, **kwargs)
        text = self.learner.encoder.text_embeds(self._seen.class_names, self._task.state.class_texts)
        self._eval_head = partial(torch.matmul, other=self.learner.logit_scale * text.T)
        # Figures of another head have another name, such as eval_text_accuracy.
        kwargs["metric_key_prefix"] = f"{kwargs.get('metric_key_prefix', 'eval')}_text"
        return super().evaluation_loop(*args, **kwargs)

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: object = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        logits = self._eval_head(self.learner.encoder.image_embeds(inputs["pixel_values"]))
        loss = F.cross_entropy(logits, inputs["labels"])
        return (loss, None, None) if prediction_loss_only else (loss, logits, inputs["labels"])

    @property
    def _seen(self) -> LearnerState:
        """The learner's state, including the classes of the task that is being trained."""
        state = self.learner.state
        return state if self._task is None else replace(state, tasks=[*state.tasks, self._task.names])

    def _tests(self, dataset: object) -> PixelDataset:
        seen = self._seen
        if not seen.tasks:
            raise ValueError("no task has been learned yet: call train first")
        return self.learner.encoder.images(seen.known_images(dataset))

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `ClassIncrementalLearner.from_pretrained`: adapter, classifiers, statistics, processor.

        During training it is also a checkpoint from which `train(resume_from_checkpoint=...)` continues.
        """
        if self.args.should_save:
            if output_dir is not None and _internal_call:
                unfinished.begin(Path(output_dir))
            fill_folder(Path(output_dir or self.args.output_dir or "."), "learner", self._write_learner)

    def _write_learner(self, folder: Path) -> None:
        saving.write(self.learner.state, folder)
        if self._task is not None:
            tensors = {"teacher": self._task.teacher, "old_text": self._task.old_text}
            unfinished.write(folder, self._task.images.images, self._compares_pixels, tensors)

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Do nothing, because `save_model` writes the learner's model card."""

    def push_to_hub(self, *args: object, **kwargs: object) -> CommitInfo:
        """Raise a `ValueError`, because transformers would upload every file in the output folder."""
        raise ValueError("a DualModeTrainer cannot be pushed: call trainer.learner.push_to_hub(repo_id)")


class _LoopTask(TaskTrainer):
    """One task that is trained by the loop of a `DualModeTrainer`, from the beginning or from a checkpoint."""

    def __init__(
        self, owner: DualModeTrainer, checkpoint: Path | None, loop: Callable[[], TrainOutput], *args: Any
    ) -> None:
        super().__init__(*args)
        self.owner, self.checkpoint, self.loop = owner, checkpoint, loop

    def begin(self) -> None:
        if self.checkpoint is None:
            return super().begin()
        tensors = unfinished.read(self.checkpoint)[0]
        for name in tensors.keys() & {"teacher", "old_text"}:
            setattr(self, name, tensors[name].to(self.encoder.device))

    def train(self) -> None:
        with self.strategy.training(self.task):
            try:
                self.owner._task = self
                output = self.owner._output = self.loop()
            finally:
                self.model.eval()
                # The next task gets a new optimizer and schedule.
                self.owner._task = self.owner.optimizer = self.owner.lr_scheduler = None
        self.record.loss = [output.training_loss]
        self.step += output.global_step


def accuracy(evaluation: Any) -> dict[str, float]:
    """Return the accuracy of transformers' `EvalPrediction`; the default of `compute_metrics`."""
    return {"accuracy": float((evaluation.predictions.argmax(axis=1) == evaluation.label_ids).mean())}


def _learner_of(
    model: nn.Module | ClassIncrementalLearner, processor: object, args: TrainingArguments, settings: dict[str, object]
) -> ClassIncrementalLearner:
    """Return a learner with the settings of `args`: a new one for a model, or else the given one."""
    given = learner_settings(args, settings)
    if not isinstance(model, ClassIncrementalLearner):
        own: dict[str, Any] = {"update_share": 1.0, "planning_images": "all"} | given  # the paper's
        learner = ClassIncrementalLearner(model, processor, args=LearnerArguments(**own))
        adapter, name = cast(DualModeLoraModel, learner.state.adapter), learner.state.adapter_name
        if adapter.history_rank or any(layer.is_trained(name) for layer in adapter.dual_mode_layers().values()):
            raise ValueError(
                "the adapter has already learned tasks, but a model contains no statistics and no classes: pass "
                "ClassIncrementalLearner.from_pretrained(folder) instead of the model"
            )
        return learner
    if not isinstance(model.strategy, Dulbe):
        raise ValueError(f"the learner has the strategy {model.strategy.name!r}, expected 'dulbe'")
    if model.device.type != args.device.type:
        raise ValueError(f"the learner is on {model.device.type!r}, but args ask for {args.device.type!r}")
    model.change_settings(replace(model.args, **given))
    return model
