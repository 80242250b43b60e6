"""Learn one task: measure, plan, train, fold, and make one closing pass. The strategy decides what each step does.

Reference: Appendix "Complete Procedure", Algorithm 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from dulbe_peft.adapter.gradients import summed_gradients
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.teaching import ClosingPass, learn_task
from dulbe_peft.encoders.encoder import CPU_BATCH, Batch, Encoder
from dulbe_peft.encoders.loading import has_text, logit_scale
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.encoders.text_encoder import mean_texts
from dulbe_peft.strategies.base import GRADIENTS, INPUTS, TEACHER, Memory, Modes, NewTask, Step
from dulbe_peft.strategies.losses import cross_modal_loss
from dulbe_peft.subspaces.inputs import add_inputs
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.training.estimating import estimates_of
from dulbe_peft.training.state import LearnerState
from dulbe_peft.training.update_share import IMAGES, can_share, facts, share_of
from dulbe_peft.utils.processes import (
    gather_rows,
    on_main_process,
    padded_shard,
    raise_in_all,
    shard,
    sum_over_processes,
)
from dulbe_peft.utils.torch_settings import evaluating

Log = Callable[[dict[str, float], int], None]
# A function that makes the training loop of a task.
MakeTrainer = Callable[[LearnerState, Encoder, PixelDataset, Log | None], "TaskTrainer"]


@dataclass
class TaskRecord:
    """Measurements of one task, without time and memory, so that the same task gives the same record."""

    images: dict[str, int]  # class -> number of its training images
    learning_rate: float | None = None  # None if nothing was trained
    update_share: float | None = None  # how much of what the task changed was kept; None if nothing was trained
    loss: list[float] = field(default_factory=list)  # mean of each epoch
    shared_capture: float | None = None  # mean of `ModeBases.shared_capture` over the layers; None if not measured
    residual_capture: float | None = None
    expected_depth: float | None = None  # mean over the task's classes; None without a bridge ensemble


def train_task(trainer: TaskTrainer) -> tuple[LearnerState, TaskRecord, ClosingPass]:
    """Learn one task; return the state after it, its record, and the closing pass.

    Of the state before, only the adapter is changed in place.
    """
    state, encoder, images, names = trainer.state, trainer.encoder, trainer.images, trainer.names
    features, memory = trainer.learn()
    with encoder.encoding_by(replace(state, memory=memory).encoding), encoder.profile.phase("close"):
        labels = torch.as_tensor(images.labels, device=features.device)
        # teacher="online" is for data sets that change their images at random. Features of two passes over them do
        # not belong to the same images, so drift must not be computed from them.
        before = trainer.teacher if state.args.teacher == "cached" else None
        views = encoder.views(features, images, trainer.title("close"))
        texts = each = None
        if encoder.has_names and any(each.reads_text for each in state.classifiers.values()):
            each = encoder.each_text_embeds(names, state.class_texts)
            texts = torch.cat([*_old_texts(state, encoder), mean_texts(len(names), *each)])
        head = state.strategy.linear_head(trainer.task)
        groups = None if images.images.groups is None else torch.from_numpy(images.images.groups)
        projection = encoder.projection if encoder.has_names else None
        closing = ClosingPass(names, features, labels, before, texts, each, views, head, groups, projection)
        how = (state.args.drift, state.args.text_embeds, encoder.profile.phase)
        classifiers = learn_task(state.classifiers, closing, *how)
    bridges = [classifier for classifier in classifiers.values() if isinstance(classifier, BridgeEnsembleHead)]
    if bridges:
        trainer.record.expected_depth = float(bridges[0].expected_depth()[-len(names) :].mean())
    after = replace(
        state,
        classifiers=classifiers,
        memory=memory,
        tasks=[*state.tasks, names],
        step=trainer.step,
        known=state.known.add_learned(images.images, encoder.way),
        graph=encoder.graph,
    )
    with encoder.profile.phase("estimate"):
        fresh = {content: row for content, row in zip(images.images.contents(), features, strict=True) if content}
        return replace(after, estimates=estimates_of(after, encoder, fresh)), trainer.record, closing


def _old_texts(state: LearnerState, encoder: Encoder) -> list[torch.Tensor]:
    """Return a list with the text embeddings of the seen classes, (C, d), which is empty before the first task.

    With a frozen text tower, the embeddings that a classifier stores are reused.
    """
    config = state.config
    changes = config and (config.text_rank or config.modules_to_save or isinstance(config.target_modules, str))
    changes = changes or encoder.encoding is not None
    stored = [c.text_embeds for c in state.classifiers.values() if "text_embeds" in c.tensors()]
    if not state.tasks:
        return []
    return stored[:1] if stored and not changes else [encoder.text_embeds(state.class_names, state.class_texts)]


class TaskTrainer:
    """Learn one task with a strategy, given the state before it and the task's images.

    `teacher`, (n, d), are the features of all images, and `old_text`, (C, d), the text embeddings of the old classes,
    both by the model before the task. Either is None if the strategy does not need it, as in the first task.
    `sample` are the images by which the task is planned and the share of its update is chosen.
    """

    def __init__(self, state: LearnerState, encoder: Encoder, images: PixelDataset, log: Log | None = None) -> None:
        self.state, self.model, self.strategy = state, state.model, state.strategy
        self.args = replace(state.args, learning_rate=self.strategy.rate(state.args))
        self.adapter = cast(DualModeLoraModel, state.adapter)  # None if nothing is trained
        self.encoder, self.logit_scale, self.log = encoder, logit_scale(encoder.clip), log
        self.images, self.names, self.index = images, images.images.class_names, len(state.tasks)
        self.task = NewTask(self.index, self.adapter, self.args, state.memory, encoder=encoder, images=images)
        self.task.planned, self.task.class_texts = state.planned, state.class_texts
        self.step = state.step
        counts = np.bincount(images.labels, minlength=len(self.names)).tolist()
        rate = self.strategy.rate(self.args) if self.strategy.adapts else None
        self.record = TaskRecord(dict(zip(self.names, counts, strict=True)), rate)
        self.sample = drawn_evenly(images.labels, self.args.planning_images, self.args.seed, self.index)
        self.sampled: torch.Tensor | None = None  # (sample, d), their features before the task; set to choose a share
        self.teacher: torch.Tensor | None = None
        self.old_text: torch.Tensor | None = None
        self.seen_text: torch.Tensor | None = None  # (C + classes, d), with the new classes; set to choose a share
        self.queries: torch.Tensor | None = None
        self._trained_text: torch.Tensor | None = None

    def learn(self) -> tuple[torch.Tensor, Memory | None]:
        """Learn the task; return the features of all images by the finished model, (n, d), and the new memory."""
        strategy, task = self.strategy, self.task
        if not strategy.adapts:
            with self.encoder.profile.phase("close"):
                return self.encoder.dataset_embeds(self.images, self.title("close")), self.state.memory
        self.take_steps()
        with torch.no_grad():
            strategy.finish(task)
        with self.encoder.profile.phase("share"):
            self.record.update_share = self.kept_share()
        self.adapter.keep_share(self.record.update_share)
        if strategy.folds:
            self.adapter.fold_if_trained(strategy.keeps_factors)
        with self.encoder.profile.phase("close"):
            if strategy.remembers_inputs:
                features, inputs = self.encode("close", True)
                memory = strategy.remember(task, inputs)
            else:
                memory = strategy.remember(task, OccupationStatistics())
                with self.encoder.encoding_by(replace(self.state, memory=memory).encoding):
                    features, _ = self.encode("close", False)
        task.gradients, task.inputs = {}, OccupationStatistics()  # frees as much memory as the adapted weights take
        return features, memory

    def kept_share(self) -> float:
        """Return how much of what the task changed is kept: that of the settings, or for "auto" a chosen one."""
        if self.args.update_share != "auto":
            return self.args.update_share
        if self.sampled is None or self.seen_text is None:
            return 1.0
        own = self.images.labels[self.sample]
        few = drawn_evenly(own, IMAGES, self.args.seed, self.index)
        after = self.encode_rows("share", [self.sample[place] for place in few])
        labels = torch.as_tensor(own, device=after.device) + len(self.state.class_names)
        before, projection = self.sampled, self.encoder.projection
        if projection is not None:
            before, after = (F.normalize(rows @ projection.T, dim=1) for rows in (before, after))
        given = before, after, labels, self.seen_text, few
        return on_main_process(lambda: share_of(*facts(*given)))

    def take_steps(self) -> None:
        """Measure, plan and train. The trained modes are not folded into the history yet."""
        self.begin()
        with self.encoder.profile.phase("train"):
            self.train()
        # A NaN from the last step is in no loss, because each loss is computed before its step.
        if not all(p.isfinite().all() for p in self.model.parameters() if p.requires_grad):
            raise ValueError("a weight is NaN or infinite after training: lower the learning_rate")

    def begin(self) -> None:
        """Measure the new task, and install its bases."""
        task, needs, altered = self.task, self.strategy.needs, self.strategy.measuring(self.task)
        chooses = self.args.update_share == "auto" and can_share(self.state)
        with self.encoder.profile.phase("probe"):
            with altered or nullcontext():
                if GRADIENTS in needs:
                    task.gradients, self.sampled = self.probe()
                if INPUTS in needs:
                    self.teacher, task.inputs = self.encode("probe", True)
            if altered:
                self.sampled = self.teacher = None
            if self.teacher is None and self.index and (self.args.drift != "none" or TEACHER in needs):
                self.teacher = self.encode_all("probe")
            if chooses and self.sampled is None:
                teacher, rows = self.teacher, self.sample
                self.sampled = self.encode_rows("probe", rows) if teacher is None else teacher[rows]
        seen = self.state.class_names
        if self.index and TEACHER in needs:
            self.old_text = self._text(seen)
        if chooses and self.encoder.has_names:
            old = [self._text(seen) if self.old_text is None else self.old_text] if self.index else []
            self.seen_text = torch.cat([*old, self._text(self.names)])

        def plan() -> tuple[Modes | None, dict[str, object]]:
            modes = self.strategy.plan(task)
            if modes is not None:  # moved to the CPU, because they are sent to other processes
                modes = {n: replace(m, shared=m.shared.cpu(), residual=m.residual.cpu()) for n, m in modes.items()}
            return modes, _moved(task.notes, "cpu")

        with self.encoder.profile.phase("allocate"):
            modes, notes = on_main_process(plan)
            task.notes = _moved(notes, self.encoder.device)
            if modes is not None:
                self.adapter.begin_task(modes, orthonormal=self.strategy.orthonormal)
                # All captures are 0 if the strategy chose the bases without a gradient, that is, measured none.
                if any(m.shared_capture or m.residual_capture for m in modes.values()):
                    self.record.shared_capture = sum(m.shared_capture for m in modes.values()) / len(modes)
                    self.record.residual_capture = sum(m.residual_capture for m in modes.values()) / len(modes)
            else:
                self.adapter.save_beginning()

    def title(self, phase: str) -> str:
        """Return the title of a progress bar."""
        return f"task {self.index + 1} {phase}"

    # ------------------------------------------------------------------ passes without a step

    def probe(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the gradient of every adapted layer's weight and the features, (sample, d), of the sampled images."""
        features = torch.zeros(len(self.images), self.encoder.embed_dim, device=self.encoder.device)
        text = self._text(self.names)

        def loss_fn(_: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
            pixels, labels, index = batch
            embeds = self.encoder.gathered_image_embeds(pixels, len(index))
            features[index] = embeds.detach()
            return cross_modal_loss(embeds, text, labels, self.logit_scale), len(index)

        batches = self.encoder.training_batches(self.images, self.title("probe"), self.sample)
        with self.adapter.skip_zero_modes(), raise_in_all():
            sums, size = summed_gradients(self.adapter, batches, loss_fn)
        # Each process has the loss of all rows, but the gradient of its own rows only.
        sum_over_processes(sums.values())
        return {name: gradient.div_(size) for name, gradient in sums.items()}, features[self.sample]

    @torch.no_grad()
    def encode_rows(self, phase: str, rows: list[int]) -> torch.Tensor:
        """Return the features of some images, (rows, d)."""
        features = torch.zeros(len(self.images), self.encoder.embed_dim, device=self.encoder.device)
        most = CPU_BATCH if features.device.type == "cpu" else None
        with self.state.resting(), raise_in_all():
            for pixels, _, index, *_ in self.encoder.batches(self.images, self.title(phase), rows, most):
                features[index] = self.encoder.image_embeds(pixels)
        sum_over_processes([features])
        return features[rows]

    def encode_all(self, phase: str) -> torch.Tensor:
        """Return the features of all images, (n, d); those of sampled images are reused."""
        if self.sampled is None:
            return self.encode(phase, False)[0]
        rest = sorted(set(range(len(self.images))) - set(self.sample))
        features = self.sampled.new_zeros(len(self.images), self.sampled.shape[1])
        features[self.sample] = self.sampled
        if rest:
            features[rest] = self.encode_rows(phase, rest)
        return features

    def encode(self, phase: str, collect: bool) -> tuple[torch.Tensor, OccupationStatistics]:
        """Return the features of all images, (n, d), and with `collect` also X'X of every adapted layer's inputs."""
        return features_and_inputs(self.state, self.encoder, self.images, self.title(phase), collect)

    def _text(self, names: Sequence[str]) -> torch.Tensor:
        """Return the text embeddings for training, (classes, d), by the current model."""
        return self.encoder.text_embeds(names, self.state.class_texts, training=True)

    # ------------------------------------------------------------------ training

    def train(self) -> None:
        """Make all training steps of the task, starting from the bases that `begin` installed."""
        task, args, encoder, size = self.task, self.args, self.encoder, len(self.images)
        with ExitStack() as stack:
            if not self.strategy.trains_adapter:
                stack.enter_context(_frozen(self.model))
            stack.enter_context(encoder.encoding_by(None))
            extra = stack.enter_context(self.strategy.training(task))
            self.queries = self.query_features()
            parameters = [p for p in self.model.parameters() if p.requires_grad] + extra
            if not parameters:  # the task trains nothing
                return
            rate = self.strategy.rate(args)
            optimizer = torch.optim.Adam(parameters, lr=rate)
            epoch, epochs = 0, self.strategy.epochs(task)
            per_step, steps = args.lr_schedule == "step", math.ceil(size / args.batch_size)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(  # per step to 0, or per epoch to 1 % of the rate
                optimizer, T_max=epochs * steps if per_step else epochs, eta_min=0.0 if per_step else 0.01 * rate
            )
            optimizer.zero_grad(set_to_none=True)
            stack.callback(self.model.eval)
            while not self.strategy.stop_early(task, epoch, self._wrong_logit) and epoch < epochs:
                self.model.train()
                losses = []
                order = epoch_order(size, args.seed, self.index, epoch)
                title = self.title(f"epoch {epoch + 1}/{epochs}")
                view = self.images.view(args.augment, args.seed, self.index, epoch + 1)
                for batch in encoder.training_batches(view, title, order):
                    step = self.step_of(batch)
                    self.strategy.backward(task, step)
                    sum_over_processes(p.grad for p in parameters if p.grad is not None)
                    optimizer.step()
                    with torch.no_grad():
                        self.strategy.after_step(task)
                    optimizer.zero_grad(set_to_none=True)
                    if per_step:
                        schedule.step()
                    losses.append(step.task_loss.detach())
                if not per_step:
                    schedule.step()
                self._log_epoch(torch.stack(losses), epoch)
                epoch += 1
            if not all(tensor.isfinite().all() for tensor in extra):
                raise ValueError("a tensor is NaN or infinite after training: lower the learning_rate")

    @cached_property
    def _tokens(self) -> dict[str, torch.Tensor]:
        return self.encoder.tokens(self.names, self.state.class_texts)

    def step_of(self, batch: Batch) -> Step:
        """Compute the task loss of a batch: the pixels of this process's rows, labels and indices of all rows."""
        pixels, labels, index = batch
        named = has_text(self.encoder.clip)
        if self._trained_text is None or self._trained_text.requires_grad:  # a frozen text tower runs only once
            nothing = torch.zeros(0, self.encoder.embed_dim, device=self.encoder.device)
            self._trained_text = self.encoder.token_embeds(self._tokens) if named else nothing
        text = self._trained_text

        encoding, queries, rows = self.encoder.encoding, None, None
        if encoding is not None and encoding.queries:
            if self.queries is None:
                rows = self.encoder.untouched_embeds(pixels)
                queries = gather_rows(rows, len(index))
            else:
                queries, rows = self.queries[index], self.queries[padded_shard(index.tolist())]

        def encode() -> torch.Tensor:
            return self.encoder.gathered_image_embeds(pixels, len(index), rows)

        def teacher_features() -> torch.Tensor:
            if self.teacher is not None and self.args.teacher == "cached" and self.args.augment == "none":
                return self.teacher[index]
            with torch.no_grad(), self.adapter.previous_task():
                return encode()

        features = encode()
        if named and (encoding is None or encoding.names):
            task_loss = cross_modal_loss(features, text, labels, self.logit_scale)
        else:
            task_loss = features.new_zeros(())  # the strategy has a loss of its own
        given = (task_loss, features, labels, text, self.old_text, encode, teacher_features, self.logit_scale)
        return Step(*given, queries, index)

    def query_features(self) -> torch.Tensor | None:
        """Return the features of all images by the untouched model, (n, d), if every step needs the same ones."""
        encoding = self.encoder.encoding
        same = self.args.augment == "none" and self.args.teacher == "cached"
        if encoding is None or not encoding.queries or not same:
            return None
        return self.encoder.query_embeds(self.images, self.title("queries"))

    @torch.no_grad()
    def _wrong_logit(self) -> float:
        """Return the mean logit of the wrong classes over the task's images, by the current model."""
        with evaluating(self.model):
            logits = self.logit_scale * self.encoder.dataset_embeds(self.images) @ self._text(self.names).T
        labels = torch.as_tensor(self.images.labels, device=logits.device)
        correct = logits.gather(1, labels[:, None]).sum()
        return ((logits.sum() - correct) / max(1, logits.numel() - len(logits))).item()

    def _log_epoch(self, losses: torch.Tensor, epoch: int) -> None:
        finite = torch.isfinite(losses)
        if not finite.all():
            step = int((~finite).nonzero()[0])
            raise ValueError(f"loss at step {step} of epoch {epoch} is {losses[step].item()}: lower the learning_rate")
        self.record.loss.append(losses.mean().item())
        self.step += len(losses)
        if self.log is not None:
            self.log({"loss": self.record.loss[-1], "epoch": epoch + 1, "task": self.index + 1}, self.step)


def features_and_inputs(
    state: LearnerState, encoder: Encoder, images: PixelDataset, title: str, collect: bool
) -> tuple[torch.Tensor, OccupationStatistics]:
    """Return the features of all images, (n, d), and with `collect` also X'X of every adapted layer's inputs."""
    inputs, adapter = OccupationStatistics(), state.adapter
    if collect and encoder.encoding is not None:  # the inputs are those of the adapted model alone
        with encoder.encoding_by(None):
            _, inputs = features_and_inputs(state, encoder, images, title, True)
        return features_and_inputs(state, encoder, images, title, False)[0], inputs
    if adapter is None or not collect:
        with state.resting():
            return encoder.dataset_embeds(images, title), inputs
    features = torch.zeros(len(images), encoder.embed_dim, device=encoder.device)

    def forward_fn(_: nn.Module, batch: Any) -> None:
        pixels, _, index, *_ = batch
        features[index] = encoder.image_embeds(pixels)

    with state.resting():
        batches = encoder.batches(images, title) if shard(range(len(images))) else ()
        how = (encoder.args.statistics_tokens, lambda batch: encoder.token_mask(batch[0]))
        add_inputs(adapter, batches, forward_fn, inputs, *how)
    sum_over_processes([features])
    return features, inputs


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Compute no gradients of the model's parameters while the block runs."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def drawn_evenly(labels: np.ndarray, most: int | Literal["all"], seed: int, task: int) -> list[int]:
    """Return at most `most` rows in ascending order, drawn from all classes alike; all rows if there are no more.

    >>> drawn_evenly(np.array([0, 0, 0, 0, 1, 2, 2]), 5, seed=0, task=0)
    [2, 3, 4, 5, 6]
    """
    if most == "all" or len(labels) <= most:
        return list(range(len(labels)))
    order = np.random.default_rng([seed, task]).permutation(len(labels))
    turn, seen = np.empty(len(labels), dtype=int), Counter[int]()
    for row in order:  # the first image of each class, then the second one, and so on
        turn[row] = seen[labels[row]]
        seen[labels[row]] += 1
    return sorted(order[np.argsort(turn[order], kind="stable")][:most].tolist())


def _moved(notes: dict[str, object], device: torch.device | str) -> dict[str, object]:
    """Return a strategy's notes with their tensors moved to a device. Other notes are returned as they are."""
    return {name: note.to(device) if isinstance(note, torch.Tensor) else note for name, note in notes.items()}


def epoch_order(size: int, seed: int, task: int, epoch: int) -> list[int]:
    """Return the order of a task's images in one epoch, which depends on seed, task and epoch only."""
    state = np.random.SeedSequence([seed, task, epoch]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]) % 2**63)
    return torch.randperm(size, generator=generator).tolist()
