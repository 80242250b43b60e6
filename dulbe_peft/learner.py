"""Algorithm 1: probe, allocate, train, fold, close; one task after the other over any dataset of (image, label)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import filter_trackers
from peft import PeftModel, get_peft_model_state_dict
from torch import nn

from dulbe_peft import saving
from dulbe_peft.adapter.gradients import probe_gradients, route_gradients
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.adapter.modes import ModeBases
from dulbe_peft.allocation import allocate_modes
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.backbone import (
    check_dual_encoder,
    check_processor,
    check_statistics_tokens,
    embed_dim,
    logit_scale,
)
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.distributed import (
    agree,
    copy_from_main,
    on_main_process,
    own_part,
    refuse_sharded,
    sum_over_processes,
    together,
)
from dulbe_peft.encoder import Batch, Encoder
from dulbe_peft.functional import bidirectional_kl, cross_modal_loss
from dulbe_peft.images import PixelDataset
from dulbe_peft.profiling import Profile
from dulbe_peft.run import run_stream
from dulbe_peft.statistics import OccupationStatistics, collect_statistics
from dulbe_peft.streams.names import check_class_names
from dulbe_peft.streams.samples import checked_labels
from dulbe_peft.streams.tasks import Task


class ClassIncrementalLearner:
    """Learns tasks of new classes with a dual encoder, its dual-mode adapter and a bridge-prototype head.

    Under `accelerate launch` every process calls every method with the same data; each works on its share of every
    batch, all end with the same state, and one writes.

    Args:
        model: `get_peft_model(clip, DualModeLoraConfig(...))`; `clip` as [`load_dual_encoder`] returns it.
        processor: the model's own, or anything with `image_processor` and `tokenizer` as it has them.
        head: a head without classes; None makes one from `args`.
        args: settings; None takes the defaults.

    Attributes:
        tasks: the class names of every finished task, in order.
        head: the [`BridgeEnsembleHead`] over all seen classes.
        statistics: the [`OccupationStatistics`] of all finished tasks.
        source: `repo_id` and `commit` on the Hub that the learner was loaded from, or None; kept when it is saved.

    Raises:
        ValueError: the model is of a type that is not served or has no dual-mode adapter, or the head does not fit.

    Reference:
        Appendix "Complete Procedure", Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        head: BridgeEnsembleHead | None = None,
        args: LearnerArguments | None = None,
    ) -> None:
        if not isinstance(model, PeftModel) or not isinstance(model.base_model, DualModeLoraModel):
            raise ValueError(
                f"model must come from get_peft_model(clip, DualModeLoraConfig(...)), got {type(model).__name__}"
            )
        check_adapter_name(model)
        clip: Any = model.get_base_model()
        check_dual_encoder(clip)
        check_processor(processor, clip)
        if args is not None and not isinstance(args, LearnerArguments):
            raise TypeError(f"args must be LearnerArguments, got {type(args).__name__}")
        self.args = args or LearnerArguments()
        check_statistics_tokens(clip, self.args.statistics_tokens)
        filter_trackers(self.args.log_with, "runs")  # raises where accelerate does not know the tracker
        self.device = _device(self.args)
        refuse_sharded(model)
        self.model = model.to(self.device).eval()
        copy_from_main(get_peft_model_state_dict(model, save_embedding_layers=False).values())
        self.clip = clip
        self.processor = processor
        self.encoder = Encoder(clip, processor, self.args, self.device)
        self.logit_scale = logit_scale(clip)
        dim = embed_dim(clip)
        if head is None:
            head = BridgeEnsembleHead(
                dim,
                num_depths=self.args.num_depths,
                reliability_temperature=self.args.reliability_temperature,
                logit_scale=self.logit_scale,
            )
        self.head = head
        if self.head.class_names:
            raise ValueError(
                f"head already has {len(self.head.class_names)} classes: give an empty one, or load a learner"
            )
        if self.head.embed_dim != dim:
            raise ValueError(f"head takes features of {self.head.embed_dim} dimensions, the model gives {dim}")
        self.head.to(self.device)
        self.statistics = self.new_statistics()
        self.tasks: list[tuple[str, ...]] = []
        self.source: dict[str, str] | None = None
        self._step = 0
        self._accelerator: Accelerator | None = None

    def new_statistics(self) -> OccupationStatistics:
        """Empty ones of the kind that `args` asks for; a sketch leaves the K_h directions of a support unshrunk."""
        support_rank = self.model.active_peft_config.support_rank
        return OccupationStatistics(max(1, 2 * support_rank) if self.args.statistics == "sketch" else None)

    @property
    def class_names(self) -> tuple[str, ...]:
        """All seen classes, in the order they came."""
        return tuple(name for task in self.tasks for name in task)

    @property
    def profile(self) -> Profile:
        """Where the time of the last task went."""
        return self.encoder.profile

    def _title(self, phase: str) -> str:
        return f"task {len(self.tasks) + 1} {phase}"

    # ------------------------------------------------------------------ learning

    def learn_task(self, dataset: Any, class_names: Sequence[str]) -> None:
        """Learn the classes of one more task; on any error the learner is as it was before.

        Args:
            dataset: len and getitem of {"image", "label"} dicts or (image, label) pairs; images as PIL images or as
                preprocessed float tensors (3, height, width); labels index `class_names`.
            class_names: the new classes, each with at least one image.

        Raises:
            ValueError: an unknown, repeated or empty class, a label out of range, an unreadable image, a loss,
                gradient or feature that is not finite.
            TypeError: a class name is not a string.
        """
        if self.tasks and not self.statistics:
            raise ValueError(
                "this learner holds no statistics of its finished tasks (it was published without them): it can "
                "predict and evaluate, but not tell which directions a new task may use"
            )
        with together():
            check_adapter_name(self.model)
            names = check_class_names(class_names, seen=self.class_names)
            labels = checked_labels(dataset, names)
            present = set(labels.tolist())
            absent = [name for index, name in enumerate(names) if index not in present]
            if absent:
                raise ValueError(f"class {absent[0]!r} has no image in the dataset ({len(absent)} such classes)")
            self.encoder.tokens((*self.class_names, *names))
        agree((names, labels.tolist()), "class names or labels")
        self.profile.clear()
        images = self.encoder.images(dataset, labels, keep=True)
        before = _clone(get_peft_model_state_dict(self.model, save_embedding_layers=False))
        head_before, step = _clone(self.head.state_dict()), self._step
        try:
            teacher = self._plan(images, names)
            with self.profile.phase("train"), self.model.held_weights(), self.encoder.keep_graphs():
                self._train(images, names, teacher)
            self.model.fold_task()
            with self.profile.phase("close"):
                self._close(images, names)
        except BaseException:
            saving.set_adapter_state(self.model, before)
            self.head.load_state_dict(head_before)
            self.model.zero_grad(set_to_none=True)
            self._step = step
            raise
        self.tasks.append(names)

    def _plan(self, images: PixelDataset, names: Sequence[str]) -> torch.Tensor:
        """Probe the new task, install its modes, and return the teacher's features, (n, d)."""
        teacher = torch.zeros(len(images), self.head.embed_dim, device=self.device)
        with torch.no_grad():
            text = self.encoder.text_embeds(names)

        def loss_fn(_: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
            pixels, labels, index = batch
            features = self.encoder.gathered_image_embeds(pixels, len(index))
            teacher[index] = features.detach()
            return cross_modal_loss(features, text, labels, self.logit_scale), len(index)

        with self.profile.phase("probe"):
            batches = self.encoder.training_batches(images, self._title("probe"), range(len(images)))
            with self._without_idle_modes(), together():
                probe = probe_gradients(self.model, batches, loss_fn)
            sum_over_processes(probe.values())
        config = self.model.active_peft_config

        def allocate() -> dict[str, ModeBases]:
            ranks = {name: getattr(config, name) for name in ("shared_rank", "residual_rank", "support_rank")}
            modes = allocate_modes(probe, self.statistics, **ranks)
            return {n: replace(m, shared=m.shared.cpu(), residual=m.residual.cpu()) for n, m in modes.items()}

        with self.profile.phase("allocate"):
            self.model.begin_task(on_main_process(allocate))
        return teacher

    def _train(self, images: PixelDataset, names: Sequence[str], teacher: torch.Tensor) -> None:
        args = self.args
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        steps = math.ceil(len(images) / args.batch_size)
        optimizer = torch.optim.Adam(parameters, lr=args.learning_rate)
        per_step = args.lr_schedule == "step"
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer,
            T_max=args.epochs * steps if per_step else args.epochs,
            eta_min=0.0 if per_step else 0.01 * args.learning_rate,
        )
        tokens = self.encoder.tokens(names)
        text, old_text = None, self._old_text()
        optimizer.zero_grad(set_to_none=True)
        self.model.train()
        try:
            for epoch in range(args.epochs):
                losses = []
                order = self._order(len(images), epoch)
                title = self._title(f"epoch {epoch + 1}/{args.epochs}")
                for batch in self.encoder.training_batches(images, title, order):
                    if text is None or text.requires_grad:
                        text = self.encoder.token_embeds(tokens)
                    task_loss, structure_loss = self._losses(batch, text, old_text, teacher)
                    route_gradients(self.model, task_loss, structure_loss, args.structure_weight)
                    sum_over_processes(p.grad for p in parameters if p.grad is not None)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if per_step:
                        schedule.step()
                    losses.append(task_loss.detach())
                if not per_step:
                    schedule.step()
                self._log_epoch(torch.stack(losses), epoch)
        finally:
            self.model.eval()

    def _old_text(self) -> torch.Tensor | None:
        """The old classes' text embeddings by the model as it is when this task begins, E_<t.

        The head may hold others: a loaded one those of other prompts or of when each class came.
        """
        if not self.tasks or self.args.structure_weight == 0:
            return None
        with torch.no_grad():
            return self.encoder.text_embeds(self.class_names)

    def _losses(
        self, batch: Batch, text: torch.Tensor, old_text: torch.Tensor | None, teacher: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cross-entropy over the current classes and the structure loss over the old ones, from one forward pass."""
        pixels, labels, index = batch
        features = self.encoder.gathered_image_embeds(pixels, len(index))
        task_loss = cross_modal_loss(features, text, labels, self.logit_scale)
        if old_text is None:
            return task_loss, None
        reference = teacher[index]
        if self.args.teacher == "online":
            with torch.no_grad(), self.model.previous_task():
                reference = self.encoder.gathered_image_embeds(pixels, len(index))
        structure_loss = bidirectional_kl(
            self.logit_scale * features @ old_text.T,
            self.logit_scale * reference @ old_text.T,
            self.args.class_temperature,
            self.args.instance_temperature,
            reduction=self.args.kl_reduction,
        )
        return task_loss, structure_loss

    def _order(self, size: int, epoch: int) -> list[int]:
        """The order of one epoch, a function of the seed, the task and the epoch alone."""
        state = np.random.SeedSequence([self.args.seed, len(self.tasks), epoch]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]) % 2**63)
        return torch.randperm(size, generator=generator).tolist()

    def _log_epoch(self, losses: torch.Tensor, epoch: int) -> None:
        finite = torch.isfinite(losses)
        if not finite.all():
            step = int((~finite).nonzero()[0])
            raise ValueError(f"loss at step {step} of epoch {epoch} is {losses[step].item()}: lower the learning_rate")
        self._step += len(losses)
        if self._accelerator:
            values = {"loss": losses.mean().item(), "epoch": epoch + 1, "task": len(self.tasks) + 1}
            self._accelerator.log(values, step=self._step)

    def _close(self, images: PixelDataset, names: Sequence[str]) -> None:
        """One pass with the finished model: features for the head and, on the way, the layers' input statistics."""
        features = torch.zeros(len(images), self.head.embed_dim, device=self.device)

        def forward_fn(_: nn.Module, batch: Batch) -> None:
            pixels, _labels, index = batch
            features[index] = self.encoder.image_embeds(pixels)

        statistics = self.new_statistics()
        with self._without_idle_modes(), together():
            if own_part(range(len(images))):
                batches = self.encoder.batches(images, self._title("close"))
                collect_statistics(
                    self.model, batches, forward_fn, into=statistics, tokens=self.args.statistics_tokens
                )
        statistics.sum_over_processes(features.device)
        sum_over_processes([features])
        with torch.no_grad():
            new_text = self.encoder.text_embeds(names)
            if not self.tasks:
                text = new_text
            elif self.args.text_embeds == "current":
                text = torch.cat([self.encoder.text_embeds(self.class_names), new_text])
            else:
                text = torch.cat([self.head.text_embeds.to(new_text), new_text])
        labels = torch.as_tensor(images.labels, device=features.device)
        self.head.add_classes(list(names), features, labels, text)
        if self.statistics:
            self.statistics.merge(statistics)
        else:
            self.statistics = statistics

    # ------------------------------------------------------------------ using

    def image_embeds(self, dataset: Any, labels: Any = None) -> torch.Tensor:
        """Unit features of a dataset's images, or of a sequence of bare images, (n, d)."""
        with self._without_idle_modes():
            return self.encoder.dataset_embeds(self.encoder.images(dataset, labels))

    def predict(self, images: Any) -> list[str]:
        """The most likely seen class of each image.

        Args:
            images: one PIL image, or a sequence of PIL images or preprocessed float tensors (3, height, width).

        Raises:
            ValueError: no task has been learned yet.
        """
        self._check_learned()
        rows = list(images) if isinstance(images, (list, tuple)) else [images]
        chosen = self.head(self.image_embeds([(image, -1) for image in rows])).argmax(dim=1)
        return [self.class_names[int(index)] for index in chosen]

    def evaluate(self, dataset: Any, class_names: Sequence[str] | None = None) -> dict[str, float]:
        """Top-1 accuracy among all seen classes, without a task's identity.

        Args:
            dataset: as in `learn_task`.
            class_names: what the labels index; None: all seen classes.

        Returns:
            `accuracy` with the head and `text_accuracy` with the text embeddings alone, both in [0, 1], and
            `num_images`.

        Raises:
            ValueError: nothing has been learned, the dataset is empty, or a class has not been seen.
        """
        self._check_learned()
        names = self.class_names if class_names is None else check_class_names(class_names)
        position = {name: index for index, name in enumerate(self.class_names)}
        unknown = [name for name in names if name not in position]
        if unknown:
            raise ValueError(f"class {unknown[0]!r} has not been learned; seen are {list(self.class_names)[:5]} ...")
        labels = checked_labels(dataset, names)
        features = self.image_embeds(dataset, labels)
        truth = torch.tensor([position[names[int(label)]] for label in labels], device=features.device)
        with torch.no_grad():
            by_head = (self.head(features).argmax(dim=1) == truth).float().mean().item()
            by_text = ((features @ self.head.text_embeds.to(features).T).argmax(dim=1) == truth).float().mean().item()
        return {"accuracy": by_head, "text_accuracy": by_text, "num_images": float(len(labels))}

    def _without_idle_modes(self) -> AbstractContextManager[None]:
        """Between tasks B = 0: the same outputs, without the products that give nothing."""
        layers = self.model.dual_mode_layers().values()
        if any(layer.merged or layer.is_trained("default") for layer in layers):
            return nullcontext()
        return self.model.previous_task()

    def _check_learned(self) -> None:
        if not self.tasks:
            raise ValueError("no task has been learned yet: call learn_task first")

    @torch.no_grad()
    def zero_shot(self, tests: Sequence[tuple[Any, Sequence[str]]]) -> list[float]:
        """A_t, t = 1, 2, ..., of the pristine model with its text embeddings of the classes seen by task t.

        Args:
            tests: per task its test data and the class names its labels index.
        """
        names = [name for _, group in tests for name in group]
        right, total, seen, rows = 0, 0, 0, []
        with self.model.disable_adapter():
            text = self.encoder.text_embeds(names)
            encoded = []
            for dataset, group in tests:
                labels = torch.as_tensor(checked_labels(dataset, group)) + seen
                encoded.append((self.image_embeds(dataset), labels.to(text.device)))
                seen += len(group)
                known = text[:seen]
                right = sum(int(((z @ known.T).argmax(dim=1) == y).sum()) for z, y in encoded)
                total += len(labels)
                rows.append(right / total)
        return rows

    def run(self, tasks: Iterable[Task], output_dir: str | Path, resume: bool = True) -> dict[str, Any]:
        """Learn a stream, test after every task, and commit one folder `task-001`, `task-002`, ... for each.

        Args:
            tasks: the stream; tasks without test data are learned and not tested.
            output_dir: folder for the committed folders, `results.json` and `timings.json`.
            resume: go on after the newest valid folder, if it belongs to the same run.

        Returns:
            What `results.json` holds: for the head and the text classifier the accuracy matrix, A_bar, A_last,
            forgetting and backward transfer; zero-shot accuracy; configuration, seed and versions.

        Raises:
            ValueError: the folder belongs to a run with other settings, classes or data (the message names what
                differs), or holds tasks and `resume` is off.
        """
        if not self.args.log_with:
            return run_stream(self, tasks, output_dir, resume)
        self._accelerator = Accelerator(
            cpu=self.device.type == "cpu", log_with=self.args.log_with, project_dir=str(output_dir)
        )
        self._accelerator.init_trackers("dulbe_peft")
        try:
            return run_stream(self, tasks, output_dir, resume)
        finally:
            self._accelerator.end_training()
            self._accelerator = None

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, folder: str | Path) -> None:
        """Write everything needed to predict or to go on learning: one folder, put in place whole.

        Raises:
            OSError: the folder cannot be written; a folder that was there is as it was.
        """
        saving.save(self, Path(folder))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        statistics: bool = True,
        results: dict[str, Any] | str | Path | None = None,
        dataset_name: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload class-incremental learner",
        create_pr: bool = False,
    ) -> Any:
        """Upload what `save_pretrained` writes to a repository on the Hub, which is made where it does not exist.

        Args:
            repo_id: name, or owner/name.
            statistics: upload also what is needed to go on learning; without it the learner predicts and evaluates.
            results: what `run` returned, or its `results.json`: uploaded, and put into the model card.
            dataset_name: of the images that the results are about, for the model card.
            private: visibility of a new repository; None: the owner's default.
            token: of the Hub; None takes the one that is stored on the machine.
            revision: branch, made where it does not exist; None: the main branch.
            commit_message: first line of the commit.
            create_pr: open a pull request instead of writing to the branch.

        Returns:
            huggingface_hub's CommitInfo.

        Raises:
            ValueError: the results are of another learner.
        """
        commit = {"revision": revision, "commit_message": commit_message, "create_pr": create_pr}
        return on_main_process(
            lambda: saving.push(self, repo_id, statistics, results, dataset_name, private, token, commit)
        )

    def write(self, folder: Path) -> None:
        """Write the learner's files into an existing folder, without a manifest."""
        saving.write(self, folder)

    def restore(self, folder: Path) -> None:
        """Take over the state that `save_pretrained` or `run` wrote, in place of this learner's.

        Raises:
            CheckpointError: the folder is damaged or of another format.
        """
        saving.restore(self, folder)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        base_model: nn.Module | None = None,
        args: LearnerArguments | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
    ) -> ClassIncrementalLearner:
        """Load what `save_pretrained` wrote or `push_to_hub` uploaded, onto a pristine base model.

        Args:
            source: the saved folder, or the id of a repository on the Hub.
            base_model: the pristine model; None loads the one the adapter's configuration names.
            args: settings; None takes the saved ones, but for the machine's (device, workers, cache, tracker, bars).
            revision: branch, tag or commit on the Hub; the commit that it stands for is kept in `source`.
            token: of the Hub; None takes the one that is stored on the machine.
            cache_dir: where downloads are kept; None: the Hub client's cache.

        Raises:
            FileNotFoundError: there is no such folder, repository or revision.
            CheckpointError: a file is damaged, of another format or kind, or does not fit the base model.
        """
        folder, origin = saving.locate(source, revision, token, cache_dir)
        learner = saving.load(cls, folder, base_model, args)
        learner.source = origin or learner.source
        return learner


def check_adapter_name(model: Any) -> None:
    """A learner trains, saves and loads the adapter that PEFT calls "default"; another one beside it is left alone."""
    active = list(model.base_model.active_adapters)
    if active != ["default"]:
        raise ValueError(f"the model's active adapters are {active}: a learner works on the one named 'default' alone")


def _clone(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _device(args: LearnerArguments) -> torch.device:
    """The device that was asked for, in whichever processes the launcher started; accelerate joins them."""
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true":
            raise ValueError(f"the launch shards the model ({kind}): dual-mode adapters need whole weights")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if args.device not in ("auto", "cpu") and (found is None or found.type != args.device):
        name = "none" if found is None else found.type
        raise ValueError(f"device {args.device!r} was asked for, the accelerator of this machine is: {name}")
    state = PartialState(cpu=args.device == "cpu")
    if state.num_processes > 1:
        return state.device
    # accelerate's own device is that of the first learner in this Python process.
    return torch.device("cpu") if args.device == "cpu" or found is None else found
