"""A learner of growing classes: a model, a strategy that trains it, and the classifiers that read its features."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import CommitInfo
from peft import PeftModel
from torch import nn

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.checkpoints import loading, locating, saving
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.closing import ClosingPass
from dulbe_peft.classifiers.registry import Recipe
from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import has_text, logit_scale
from dulbe_peft.metrics.evaluation import EncodedTest, Evaluation, evaluate_features
from dulbe_peft.metrics.prediction import Prediction, predict_images
from dulbe_peft.metrics.retention import seen_accuracies
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.streams.run import RunOptions, run_stream
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training import preparing, updating
from dulbe_peft.training.estimating import estimates_of
from dulbe_peft.training.rates import MakeTrainer, with_rate
from dulbe_peft.training.state import Estimate, LearnerState
from dulbe_peft.training.trainer import Log, TaskRecord, TaskTrainer, train_task
from dulbe_peft.training.turns import Turns, in_turn
from dulbe_peft.utils.devices import choose_device, own_randomness, usual_torch
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.profiling import Profile


class ClassIncrementalLearner:
    """Learns tasks of new classes, one after the other, without keeping images.

    Under `accelerate launch` every process calls every method with the same data; all end with the same state.

    Args:
        model: `get_peft_model(clip, DualModeLoraConfig(...))`, with `clip` as `load_dual_encoder` returns it. A
            strategy that trains nothing, such as "frozen", also takes `clip` itself.
        processor: the model's own, or anything with `image_processor` and `tokenizer` as it has them.
        strategy: what is trained, and how: "name", "name:key=value,key=value" or a [`Strategy`].
        classifiers: "name,name:key=value", or several of such texts and of [`Classifier`] objects; the first one is
            what `predict` uses. None takes the strategy's own, for DuLBE the bridge ensemble `pooled_bridge`.

    Attributes:
        state: all that is saved, see [`LearnerState`]; `tasks`, `classifiers`, `memory` and `source` are read from it.
        encoder: reads images and class names with the model, in the batches and the precision of `args`.
        device: where the model is.
        precision_chosen: the precision was "auto", so that a run may go on in the one that it began with.
        logit_scale: the factor before cosines, which the model has learned.
        record: what learning the last task showed, see `TaskRecord`; None before the first one, and after loading.
        closing: the features of the last task's training images, see `ClosingPass`; None as `record` is.
        folder: where it was loaded from, or the last task folder that its run wrote.
        log: called with the figures of each epoch and the number of steps so far, where it is not None.

    Raises:
        ValueError: the model does not fit the strategy, or a classifier does not fit the model.

    Example:
        >>> learner = ClassIncrementalLearner(model, processor, strategy="frozen", classifiers=("ranpac", "bridge"))
        >>> learner.learn_task(photos, ["cat", "dog"])
        >>> learner.predict(image)
        ['dog']

    Reference:
        Appendix "Complete Procedure", Algorithm 1.
    """

    state: LearnerState
    encoder: Encoder
    device: torch.device
    precision_chosen: bool
    logit_scale: float
    record: TaskRecord | None
    closing: ClosingPass | None
    folder: Path | None
    log: Log | None

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        args: LearnerArguments | None = None,
        strategy: str | Strategy = "dulbe",
        classifiers: str | Classifier | Iterable[str | Recipe | Classifier] | None = None,
    ) -> None:
        if args is not None and not isinstance(args, LearnerArguments):
            raise TypeError(f"args must be LearnerArguments, got {type(args).__name__}")
        self._adopt(preparing.new_state(model, processor, args or LearnerArguments(), strategy, classifiers))

    def _adopt(self, state: LearnerState) -> None:
        """Become the learner of a state, on the device that its settings name."""
        preparing.check_tracker(state.args.log_with)
        self._turns = Turns()
        self.device = choose_device(state.args.device)
        self.precision_chosen = state.args.precision == "auto"
        self.state = preparing.on_device(state, self.device)
        self.encoder = self._encoder(None)
        self.logit_scale = logit_scale(self.state.base)
        self.record = self.closing = self.folder = self.log = None

    def _encoder(self, store: FeatureStore | None) -> Encoder:
        encoder = Encoder(self.state.base, self.state.processor, self.state.args, self.device)
        encoder.graph, encoder.store, encoder.scores = self.state.graph, store, self._scores
        return encoder

    def _scores(self, features: torch.Tensor) -> torch.Tensor | None:
        """What another backend's features are compared by, beside their cosines."""
        return self.classifier.logits(features) if self.tasks else None

    # ------------------------------------------------------------------ learning

    @in_turn
    def learn_task(
        self,
        dataset: Any,
        class_names: Sequence[str] | None = None,
        class_texts: Mapping[str, Sequence[str]] | None = None,
        trainer: MakeTrainer = TaskTrainer,
    ) -> None:
        """Learn the classes of one more task; on any error the learner is as it was before.

        Args:
            dataset: len and getitem of {"image", "label"} dicts or (image, label) pairs; images as PIL images or as
                preprocessed float tensors (3, height, width).
            class_names: the new classes, which the labels index. None takes the names that the dataset carries.
            class_texts: class -> texts that stand for it in place of its name in the prompt templates, such as
                {"owl": ["an owl", "a night bird"]}. Classifiers take the mean of their unit embeddings, `clg_cbm` each
                of them, and training the first one.
            trainer: makes the training loop; [`DualModeTrainer`] has one of its own.

        Raises:
            ValueError: a class, label, text or image is of no use, or a loss, gradient or feature is not finite.
        """
        state, images = preparing.checked_task(self.state, self.encoder, dataset, class_names, class_texts or {})
        self.profile.clear()
        with self.transaction(), own_randomness(self.args.seed, len(state.tasks)):
            state = with_rate(trainer, state, self.encoder, images)
            self.state, self.record, self.closing = train_task(trainer(state, self.encoder, images, self.log))

    # ------------------------------------------------------------------ changing without training

    @in_turn
    def update_classes(self, dataset: Any, class_names: Sequence[str] | None = None) -> None:
        """Take in further images of known classes, without training; on any error the learner is as it was before.

        Every classifier takes them in, and so does the strategy's memory where it is a sum over images. `class_names`
        of None are those that the dataset carries, or else all seen classes.

        Raises:
            ValueError: a class has not been learned, a classifier cannot take further images of a known class, or an
                image is of no use.
        """
        self.state = updating.update_classes(self.state, self.encoder, dataset, class_names)

    @in_turn
    def forget_class(self, name: str) -> None:
        """Take a class out of every classifier, so that no image is called so any more.

        The model stays as it is, and so does what the class's images added to sums over all classes, such as LDA's
        scatter. The only class that is left cannot be forgotten.
        """
        self.state = updating.forget_class(self.state, name)

    @in_turn
    def forget_images(self, images: Any) -> None:
        """Take single learned images out of every classifier, up to rounding as if they had not been learned.

        Args:
            images: what `predict` takes; each is known by its content, wherever it lies now.

        Raises:
            ValueError: an image has not been learned, is the only one of its class, the strategy trains the model, or
                a classifier keeps no sums. Nothing is changed then.

        Example:
            >>> learner.forget_images("photos/train/owl/IMG_0417.jpg")  # doctest: +SKIP
        """
        self.state = updating.forget_images(self.state, self.encoder, images)

    @in_turn
    def rename_class(self, old: str, new: str) -> None:
        """Give a class a new name; where `new` is known, the two become one class.

        Text embeddings are those of the new name, or of texts that were given for the class. Classifiers of sums are
        then those that were taught under it, up to what was chosen on images with the old name, such as `kappa` of
        `bayes`; what was trained with it stays.

        Raises:
            ValueError: `old` has not been learned, or a classifier cannot do it. Nothing is changed then.
        """
        self.state = updating.rename_class(self.state, self.encoder, old, new)

    @in_turn
    def merge(self, other: Self) -> Self:
        """Take in what another learner of the same model has learned, where nothing is trained; returns this learner.

        New classes become further tasks, and images of classes that both know count as further images: the
        classifiers are those of one learner that saw all images, up to what their own documentation says.

        Raises:
            ValueError: one of them trains the model, they differ in more than their classes, or a classifier cannot
                be merged. Nothing is changed then.

        Example:
            >>> berlin.merge(paris).save_pretrained("both")
        """
        self.state = updating.merge(self.state, self.encoder, other.state, other.encoder)
        return self

    @in_turn
    def use_state(self, state: LearnerState) -> None:
        """Go on with another state of the same model; the adapter's weights stay, and an int8 graph if it has none."""
        self.state = state
        self.encoder.graph = state.graph or self.encoder.graph

    def keep_classifiers(self, names: Iterable[str]) -> None:
        """Keep these classifiers alone, in this order: the first one answers."""
        self.use_state(replace(self.state, classifiers={name: self.classifiers[name] for name in names}))

    def use_store(self, store: FeatureStore | None) -> None:
        """Look up features of images in a store, while nothing trains the model; None: nowhere."""
        self.encoder.store = store

    def change_settings(self, args: LearnerArguments) -> None:
        """Go on with other settings on the same device; what was learned stays, and with "auto" the precision."""
        args = replace(args, precision=self.args.precision) if args.precision == "auto" else args
        self.use_state(replace(self.state, args=args))
        self.encoder = self._encoder(self.encoder.store)

    # ------------------------------------------------------------------ using

    @in_turn
    def image_embeds(self, images: Any) -> torch.Tensor:
        """Unit features, (n, d) float32, of whatever `predict` takes."""
        with self.state.resting():
            return self.encoder.dataset_embeds(self.encoder.images(unlabelled_images(images)))

    @in_turn
    def readable_embeds(self, images: Any) -> tuple[torch.Tensor, dict[int, str]]:
        """Unit features, with zeros for an image that cannot be read; and its number -> why it cannot be."""
        with self.state.resting():
            return self.encoder.readable_embeds(self.encoder.images(unlabelled_images(images)), "encode")

    @in_turn
    def text_embeds(self, class_names: Sequence[str]) -> torch.Tensor:
        """Unit text embeddings of class names, learned or not, (classes, d) float32, by the model as it is."""
        if not has_text(self.clip):
            raise ValueError(f"{type(self.clip).__name__} has no text tower, so class names have no embeddings")
        return self.encoder.text_embeds(check_class_names(class_names), self.state.class_texts)

    def predict(
        self,
        images: Any,
        top_k: int | None = None,
        return_scores: bool = False,
        reject: float | None = None,
        coverage: float | None = None,
        return_novelty: bool = False,
    ) -> Any:
        """The most likely seen class of each image, as a list.

        Args:
            images: a path of a file, or of a folder of any depth; a PIL image; a preprocessed float tensor
                (3, height, width) or a batch of them; a data set; or a list of all of these.
            top_k: how many classes to give for each image, the best first; None gives the best one alone.
            return_scores: give each class as (name, calibrated probability).
            reject: accepted share of false alarms, such as 0.05. An image whose novelty is larger than that of all but
                this share of training images that were left out is taken for none of the classes: its answer is
                None, or an empty list with `top_k`. No share is promised where the model itself was trained.
            coverage: such as 0.95: give all classes that an image may be of, so that the right one is among them with
                this chance, see `Classifier.prediction_sets`; promised where `reject` is. Not with `top_k`.
            return_novelty: return a pair: these answers, and how unlike all that was learned each image is, floats,
                see `Classifier.novelty`.

        Raises:
            ValueError: no task has been learned yet, an image cannot be read, or too few images were held back for
                `reject` or `coverage`; the message says how many it takes.

        Example:
            >>> learner.predict("photo.jpg", top_k=2, return_scores=True)  # doctest: +SKIP
            [[('dog', 0.93), ('cat', 0.05)]]
        """
        if top_k is not None and coverage is not None:
            raise ValueError(f"top_k is {top_k} and coverage {coverage}: give one of them")
        rows = self.predictions(images, 1 if top_k is None else top_k, reject, coverage, return_novelty)
        answers = [row.answer(number, return_scores, top_k or coverage) for number, row in enumerate(rows)]
        return (answers, [row.novelty for row in rows]) if return_novelty else answers

    @in_turn
    def predictions(
        self,
        images: Any,
        top_k: int = 1,
        reject: float | None = None,
        coverage: float | None = None,
        novelty: bool = False,
    ) -> list[Prediction]:
        """What `predict` finds, with every image's name; an image that cannot be read is stepped over."""
        preparing.check_learned(self.state)
        if reject is not None or coverage is not None:
            preparing.warn_of_promises(self.state)
        with self.state.resting():
            data = unlabelled_images(images)
            return predict_images(self.encoder, self.classifier, data, top_k, reject, coverage, novelty)

    def evaluate(self, dataset: Any, class_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Top-1 accuracy among all seen classes; `dataset`, `class_names` and errors are as in `update_classes`.

        Returns:
            `accuracy` with the first classifier; `classifiers`, name -> accuracy; `text_accuracy` with the text
            embeddings alone and `class_means_accuracy` with the class means, where a classifier keeps them and none
            does the same; all in [0, 1]; and `num_images`.
        """
        return self.evaluate_images(dataset, class_names).figures()

    def evaluate_images(self, dataset: Any, class_names: Sequence[str] | None = None) -> Evaluation:
        """The answers of every classifier to each image of a data set, arguments and errors as in `evaluate`."""
        return self.evaluations([(dataset, class_names)])[0]

    @in_turn
    def evaluations(self, tests: Sequence[tuple[Any, Sequence[str] | None]]) -> list[Evaluation]:
        """What `evaluate_images` finds of each of several data sets with their class names, read in one pass."""
        preparing.check_learned(self.state)
        parts = [self.state.known_images(dataset, class_names) for dataset, class_names in tests]
        with self.state.resting():
            embeds = self.encoder.each_embeds(parts)
        given = [
            EncodedTest(features, torch.tensor(part.labels), [part.item_name(index) for index in range(len(part))])
            for features, part in zip(embeds, parts, strict=True)
        ]
        return evaluate_features(self.classifiers, given, self.class_names)

    @in_turn
    def estimate(self) -> dict[str, Estimate]:
        """How many images each classifier names right, without test images: by training images that are left out.

        It is computed when a task closes, and saved; where the learner has changed since, it is computed anew. Images
        of earlier tasks take part where the user's feature store has their features. `Estimate.classes` says of which
        classes it is, and has none with one image. A class of two images is judged by one, which says too little.

        Returns:
            Classifier -> `Estimate`: `share`, `low` and `high` in [0, 1], each class alike. A classifier that has no
            closed form of leaving an image out is not among them, and none is where the model itself is trained: it
            has seen the images.

        Example:
            >>> learner.estimate()["bayes"].share  # doctest: +SKIP
            0.84
        """
        preparing.check_learned(self.state)
        if self.state.estimates.tasks != len(self.tasks):
            self.state = replace(self.state, estimates=estimates_of(self.state, self.encoder, {}))
        found = self.state.estimates
        return {name: Estimate(*share, found.classes) for name, share in found.shares.items()}

    def scaled(self, scale: float) -> AbstractContextManager[None]:
        """Use the model with W_0 + scale * dW in the block's calls, dW being all it has learned, in both towers.

        Scale 0 is the pristine model and 1 the model as it has learned, both bit for bit. What the classifiers keep
        stays as it is. Calls of other threads and asyncio tasks have none of it, and nothing is learned inside.

        Raises:
            ValueError: the scale is not in [0, 1], an adapter is merged, or the adapter has `modules_to_save`.

        Example:
            >>> with learner.scaled(0.5):
            ...     scores = learner.image_embeds(photos) @ learner.text_embeds(["fox", "wolf"]).T

        Reference:
            Wortsman et al., "Robust fine-tuning of zero-shot models", 2022.
        """
        return self._turns.scaled(scale, self.state)

    @in_turn
    def zero_shot(self, tests: Sequence[tuple[Any, Sequence[str]]]) -> list[float | None]:
        """A_t, t = 1, 2, ..., of the pristine model with its text embeddings of the classes seen by task t.

        `tests` has the test data of each task, or None, and its class names. A_t of None: there is no data up to t.
        """
        with self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext():
            return seen_accuracies(self, tests)

    def run(
        self, tasks: Iterable[Task], output_dir: str | Path, resume: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Learn a stream, test after every task, and commit one folder `task-001`, `task-002`, ... for each.

        Tasks that were learned before come first in the results, and the folders' numbers go on after theirs. Without
        a new task the learner is committed as it is.

        Args:
            tasks: the stream; tasks without test data are learned and not tested.
            output_dir: folder for the committed folders, `results.json`, `timings.json` and `predictions.csv`.
            resume: go on after the newest valid folder. Its finished tasks must be the first ones of `tasks`, with the
                same data; the tasks that follow may be others than before.
            options: fields of `dulbe_peft.streams.run.RunOptions`, such as `keep_features=True`.

        Returns:
            What `results.json` holds: accuracies, settings, seed and versions.

        Raises:
            ValueError: the folder belongs to a run with other settings, another beginning or other finished tasks,
                or holds tasks and `resume` is off.
        """
        return run_stream(self, tasks, output_dir, RunOptions(resume, **options))

    # ------------------------------------------------------------------ saving

    @in_turn
    def save_pretrained(self, folder: str | Path) -> None:
        """Write everything needed to predict or to go on learning: one folder, put in place whole or not at all."""
        preparing.check_adapter_name(self.model)
        saving.save(self.state, Path(folder))

    @in_turn
    def push_to_hub(
        self,
        repo_id: str,
        *,
        statistics: bool = True,
        results: dict[str, Any] | str | Path | None = None,
        dataset_name: str | None = None,
        **commit: Any,
    ) -> CommitInfo:
        """Upload what `save_pretrained` writes to a repository on the Hub, which is made where it does not exist.

        Args:
            statistics: upload also what is needed to go on learning; without it the learner predicts and evaluates.
            results: what `run` returned, or its `results.json`: uploaded, and put into the model card.
            dataset_name: of the images that the results are about, for the model card.
            commit: `private`, `token`, `revision` (a branch), `commit_message` and `create_pr`, as huggingface_hub
                takes them.

        Returns:
            huggingface_hub's CommitInfo.

        Raises:
            ValueError: the results are of another learner.
        """
        preparing.check_adapter_name(self.model)
        return on_main_process(partial(saving.push, self.state, repo_id, statistics, results, dataset_name, **commit))

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
        machine: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load what `save_pretrained` or `run` wrote, or `push_to_hub` uploaded, onto a pristine base model.

        Args:
            source: a saved folder, a run's folder, of which the newest whole task is taken, or a repository's id.
            base_model: the pristine model; None loads the one that the saved learner names.
            args: settings; None takes the saved ones, but for the machine's (device, workers, cache, tracker, bars).
            revision: branch, tag or commit on the Hub; the commit is kept in `source`.
            machine: settings of this machine, such as {"device": "cpu", "num_workers": 4}, in place of the defaults.

        Raises:
            FileNotFoundError: there is no such folder, repository or revision.
            CheckpointError: a file is damaged, of another format or kind, or does not fit the base model.
        """
        folder, manifest, origin = locating.locate(source, revision, token, cache_dir)
        with usual_torch(), loading.loaded_state(folder, manifest, base_model, args, machine) as state:
            preparing.check_model(state)
            learner = object.__new__(cls)
            learner._adopt(replace(state, source=origin or state.source))
        learner.folder = None if origin else folder.resolve()
        return learner

    # ------------------------------------------------------------------ what the state says

    @property
    def model(self) -> nn.Module:
        """The adapted model from `get_peft_model`, or the pristine model where nothing is trained."""
        return self.state.model

    @property
    def clip(self) -> Any:
        """The model under the adapter."""
        return self.state.base

    @property
    def processor(self) -> Any:
        """The model's processor."""
        return self.state.processor

    @property
    def args(self) -> LearnerArguments:
        """The settings."""
        return self.state.args

    @property
    def strategy(self) -> Strategy:
        """What is trained, and how."""
        return self.state.strategy

    @property
    def memory(self) -> Memory | None:
        """What the strategy keeps of the finished tasks."""
        return self.state.memory

    @property
    def classifiers(self) -> dict[str, Classifier]:
        """Name -> classifier; the first one is what `predict` uses."""
        return self.state.classifiers

    @property
    def classifier(self) -> Classifier:
        """The classifier that answers."""
        return self.state.classifier

    @property
    def head(self) -> BridgeEnsembleHead:
        """The first bridge ensemble, of either form; an `AttributeError` where the learner has none."""
        for head in self.classifiers.values():
            if isinstance(head, BridgeEnsembleHead):
                return head
        raise AttributeError(f"the learner has no bridge ensemble; its classifiers are {list(self.classifiers)}")

    @property
    def tasks(self) -> list[tuple[str, ...]]:
        """The class names of every finished task, in order."""
        return self.state.tasks

    @property
    def class_names(self) -> tuple[str, ...]:
        """All seen classes, in the order they came."""
        return self.state.class_names

    @property
    def source(self) -> dict[str, str] | None:
        """`repo_id` and `commit` on the Hub that the learner was loaded from, or None."""
        return self.state.source

    @property
    def profile(self) -> Profile:
        """Where the time of the last task went."""
        return self.encoder.profile

    # ------------------------------------------------------------------ turns, errors and copies

    def turn(self, name: str) -> AbstractContextManager[None]:
        """A block in which no other thread's call changes the learner; messages call the block `name`."""
        return self._turns.take(name, self.state)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A block that is done whole or not at all: where it raises, the learner becomes what it was before."""
        before = self.state, self.record, self.closing
        try:
            with self.state.adapter_kept():
                yield
        except BaseException:
            self.state, self.record, self.closing = before
            raise

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"log": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.encoder.scores = self._scores

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with self.turn("__deepcopy__"):
            twin = object.__new__(type(self))
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
            return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle is one of a copy, which is made while nothing is learned."""
        return object.__reduce_ex__(copy.deepcopy(self), protocol)
