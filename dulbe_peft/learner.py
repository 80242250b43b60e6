"""The class-incremental learner: a model, a strategy that trains it, and classifiers of its features."""

import copy
import warnings
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

from dulbe_peft.arguments import LearnerArguments, Query
from dulbe_peft.checkpoints import locating, restoring, saving
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.registry import Recipe
from dulbe_peft.classifiers.teaching import ClosingPass
from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.data.unlabelled import is_one_image, unlabelled_images
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.encoders.loading import has_text, logit_scale
from dulbe_peft.metrics.answers import typed_predict
from dulbe_peft.metrics.evaluation import EncodedTest, Evaluation, Figures, evaluate_features, seen_accuracies
from dulbe_peft.metrics.prediction import Prediction, predict_images
from dulbe_peft.metrics.results import Results
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.training import preparing, updating
from dulbe_peft.training.estimating import estimates_of
from dulbe_peft.training.locking import TakesTurns, Turns, takes_turn
from dulbe_peft.training.state import Estimate, LearnerState
from dulbe_peft.training.task_trainer import Log, MakeTrainer, TaskRecord, TaskTrainer, train_task
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.profiling import Profile
from dulbe_peft.utils.settings import check_number
from dulbe_peft.utils.torch_settings import default_torch_settings, seeded_randomness


class ClassIncrementalLearner(TakesTurns):
    """Learn tasks of new classes one after the other, without storing images.

    Under `accelerate launch`, every process must call every method with the same data; all processes then have the
    same state.

    Args:
        model: The model `get_peft_model(clip, DualModeLoraConfig(...))`, with `clip` as `load_dual_encoder` returns
            it. A strategy that trains nothing, such as "frozen", also accepts `clip` itself.
        processor: The model's processor, or any object with the same `image_processor` and `tokenizer`.
        args: Settings of the training and of this machine; None takes the defaults.
        strategy: How the model is trained: "name", "name:key=value,key=value" or a [`Strategy`].
        classifiers: "name,name:key=value", or a sequence of such texts and [`Classifier`] objects; `predict` uses the
            first one. None takes the default of the strategy, mostly `bayes` and, beside it, the bridge
            ensemble `pooled_bridge` or, for "frozen", `lda`.

    Attributes:
        state: Everything that is saved, see [`LearnerState`]; `tasks`, `classifiers`, `memory` and `source` read it.
        encoder: Encodes images and class names with the model, with the batch size and precision in `args`.
        device: Device of the model.
        precision_chosen: Whether the precision was "auto", so that a resumed run may keep the precision it began with.
        logit_scale: Factor before cosines, which the model has learned.
        record: Details of the last training, see `TaskRecord`; None before the first task and after loading.
        closing: Features of the last task's training images, see `ClosingPass`; None whenever `record` is None.
        folder: Folder from which the learner was loaded, or the last task folder that `run_stream` wrote.
        log: Function that is called with the figures of each epoch and the number of steps so far, or None.

    Raises:
        ValueError: If the model does not fit the strategy, or a classifier does not fit the model.

    Example:
        >>> learner = ClassIncrementalLearner(model, processor, strategy="frozen", classifiers=("ranpac", "bridge"))
        >>> learner.learn_task(photos, ["cat", "dog"])
        >>> learner.predict(image)
        'dog'

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
        """Initialise the learner from a state, on the device in its settings."""
        self._turns = Turns()
        self.precision_chosen = state.args.precision == "auto"
        self.state, self.device = preparing.on_device(state)
        self.encoder = self._encoder(None)
        self.logit_scale = logit_scale(self.state.base)
        self.record = self.closing = self.folder = self.log = None

    def _encoder(self, store: FeatureStore | None) -> Encoder:
        encoder = Encoder(self.state.base, self.state.processor, self.state.args, self.device)
        encoder.graph, encoder.store, encoder.scores = self.state.graph, store, self._scores
        encoder.encodings = self._encoding
        return encoder

    def _encoding(self) -> Encoding | None:
        return self.state.encoding

    def _scores(self, features: torch.Tensor) -> torch.Tensor | None:
        """Return the scores by which the features of another backend are checked, in addition to their cosines."""
        return self.classifier.logits(features) if self.tasks else None

    # ------------------------------------------------------------------ learning

    @takes_turn
    def learn_task(
        self,
        dataset: object,
        class_names: Sequence[str] | None = None,
        class_texts: Mapping[str, Sequence[str]] | None = None,
        groups: Sequence[object] | None = None,
        trainer: MakeTrainer = TaskTrainer,
    ) -> None:
        """Learn the classes of one more task. After any error, the learner is as it was before.

        Args:
            dataset: Data set with `len`, whose items are {"image", "label"} dicts or (image, label) pairs. Images are
                PIL images or preprocessed float tensors, (3, height, width).
            class_names: Names of the new classes, which the labels index. None takes the names in the data set.
            class_texts: Texts for a class, used instead of its name in the prompt templates, such as
                {"owl": ["an owl", "a night bird"]}. Classifiers use the mean of their unit embeddings, except that
                `clg_cbm` uses each of them. Training uses the first text.
            groups: Texts or whole numbers, one for each image. Images with the same entry show the same item, burst,
                site or day, and are left out together wherever the classifiers and `estimate` leave images out. None
                takes the groups in the data set, if it has any.
            trainer: Function that makes the training loop; [`DualModeTrainer`] passes its own.

        Raises:
            ValueError: If a class, label, text or image is invalid, or a loss, gradient or feature is not finite.
        """
        dataset = dataset if groups is None else labelled_images(dataset).grouped(groups)
        state, images = preparing.checked_task(self.state, self.encoder, dataset, class_names, class_texts or {})
        self.profile.clear()
        with self.transaction(), seeded_randomness(self.args.seed, len(state.tasks)):
            self.state, self.record, self.closing = train_task(trainer(state, self.encoder, images, self.log))

    # ------------------------------------------------------------------ changing without training

    @takes_turn
    def update_classes(
        self, dataset: object, class_names: Sequence[str] | None = None, groups: Sequence[object] | None = None
    ) -> None:
        """Learn further images of known classes, without training. After any error, the learner is as it was before.

        Every classifier is updated, and so is the strategy's memory if it is a sum over images. If `class_names` is
        None, the names in the data set are used, or else all seen classes. `groups` are as in `learn_task`.

        Raises:
            ValueError: If a class has not been learned, a classifier cannot learn further images of a known class, or
                an image is invalid.
        """
        dataset = dataset if groups is None else labelled_images(dataset).grouped(groups)
        self.state = updating.update_classes(self.state, self.encoder, dataset, class_names)

    @takes_turn
    def keep(self, share: float) -> None:
        """Make `scaled(share)` permanent: the model becomes W_0 + share * dW in both towers, also when it is saved.

        The names of all classes are encoded again. Classifiers that keep statistics of images keep them, and so does
        the strategy, because no image is stored; there is a warning. `update_share` keeps a share of each task
        instead, before the classifiers learn it.

        Raises:
            ValueError: If `share` is not in [0, 1], nothing was trained, the adapter has `modules_to_save`, or a share
                of the strategy's update is not defined. Nothing is changed then.

        Example:
            >>> learner.keep(0.5)  # doctest: +SKIP
        """
        check_number("share", share, least=0, most=1)
        with self.transaction():
            self.state = updating.keep(self.state, self.encoder, float(share))

    @takes_turn
    def forget_class(self, name: str) -> None:
        """Remove a class from every classifier, so that it is never predicted again.

        The model stays as it is, and so do the parts of its images in sums over all classes, such as LDA's scatter.
        The last remaining class cannot be forgotten.
        """
        self.state = updating.forget_class(self.state, name)

    @takes_turn
    def forget_images(self, images: object) -> None:
        """Remove single learned images from every classifier, as if they had never been learned, up to rounding.

        Args:
            images: Images as for `predict`. They are identified by their content, so their paths may have changed.

        Raises:
            ValueError: If an image has not been learned or is the only one of its class, the strategy trains the
                model, or a classifier keeps no sums. Nothing is changed then.

        Example:
            >>> learner.forget_images("photos/train/owl/IMG_0417.jpg")  # doctest: +SKIP
        """
        self.state = updating.forget_images(self.state, self.encoder, images)

    @takes_turn
    def rename_class(self, old: str, new: str) -> None:
        """Rename a class; if `new` is already a class, the two are merged.

        Text embeddings are computed from the new name, or from the texts that were given for the class. Classifiers
        that keep sums are then the same as if the class had been learned under the new name, except for settings that
        were selected using images with the old name, such as `kappa` of `bayes`. Trained weights stay.

        Raises:
            ValueError: If `old` has not been learned, or a classifier cannot rename it. Nothing is changed then.
        """
        self.state = updating.rename_class(self.state, self.encoder, old, new)

    @takes_turn
    def merge(self, other: Self) -> Self:
        """Add what another learner of the same model has learned, if no model is trained; returns this learner.

        New classes become further tasks, and images of classes that both know count as further images. The result is
        the same as that of one learner that saw all images, up to the exceptions in the classifiers' documentation.

        Raises:
            ValueError: If one of them trains the model, they differ in more than their classes, or a classifier cannot
                be merged. Nothing is changed then.

        Example:
            >>> berlin.merge(paris).save_pretrained("both")
        """
        self.state = updating.merge(self.state, self.encoder, other.state, other.encoder)
        return self

    @takes_turn
    def use_state(self, state: LearnerState) -> None:
        """Replace the state by another one of the same model.

        The adapter's weights stay, and so does an int8 graph if `state` has none.
        """
        self.state = state
        self.encoder.graph = state.graph or self.encoder.graph

    def keep_classifiers(self, names: Iterable[str]) -> None:
        """Keep only these classifiers, in this order; `predict` uses the first one."""
        self.use_state(replace(self.state, classifiers={name: self.classifiers[name] for name in names}))

    def use_store(self, store: FeatureStore | None) -> None:
        """Set the store that caches the features of images while no strategy trains the model; None removes it."""
        self.encoder.store = store

    def change_settings(self, args: LearnerArguments) -> None:
        """Change the settings. The device and what was learned stay.

        The precision stays if it is "auto", and `image_resize` if it is "processor".

        Raises:
            ValueError: If images would be read differently from those that were learned, or `image_resize` differs.
        """
        if self.tasks and args.whole_images != self.args.whole_images:
            raise ValueError(
                f"whole_images is {args.whole_images}, but this learner has learned with "
                f"whole_images={self.args.whole_images}: make a new learner"
            )
        if args.image_resize not in ("processor", self.args.image_resize):
            raise ValueError(
                f"image_resize is {args.image_resize!r}, but this learner was made with {self.args.image_resize!r}: "
                "make a new learner"
            )
        args = replace(args, image_resize=self.args.image_resize)
        args = replace(args, precision=self.args.precision) if args.precision == "auto" else args
        self.use_state(replace(self.state, args=args))
        self.encoder = self._encoder(self.encoder.store)

    # ------------------------------------------------------------------ using

    @takes_turn
    def image_embeds(self, images: object) -> torch.Tensor:
        """Return the unit features, (n, d) float32, of images as for `predict`."""
        with self.state.resting():
            return self.encoder.dataset_embeds(self.encoder.images(unlabelled_images(images)))

    @takes_turn
    def readable_embeds(self, images: object) -> tuple[torch.Tensor, dict[int, str]]:
        """Return unit features, with zeros for images that cannot be read, and the reasons by image number."""
        with self.state.resting():
            return self.encoder.readable_embeds(self.encoder.images(unlabelled_images(images)), "encode")

    @takes_turn
    def text_embeds(self, class_names: Sequence[str]) -> torch.Tensor:
        """Return the present model's unit text embeddings, (classes, d) float32, of class names, learned or not."""
        if not has_text(self.clip):
            raise ValueError(f"{type(self.clip).__name__} has no text tower, so class names have no embeddings")
        return self.encoder.text_embeds(check_class_names(class_names), self.state.class_texts)

    @typed_predict
    def predict(
        self,
        images: object,
        top_k: int | None = None,
        return_scores: bool = False,
        reject: float | None = None,
        coverage: float | None = None,
        return_novelty: bool = False,
        only: Sequence[str] | None = None,
        sum_up: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the most likely seen class of an image, or a list with that of each image if several are given.

        Args:
            images: One image: the path of a file, a PIL image, or a preprocessed float tensor, (3, height, width).
                Or several, even if there is only one in them: the path of a folder of any depth, a batch of tensors,
                a data set, or a list of any of these.
            top_k: Number of classes to return for each image, best first, as a list; None returns only the best one.
            return_scores: Whether to return each class as (name, probability). A warning says if the probabilities
                are not calibrated, or if the model was trained on the images that calibrate them.
            reject: Accepted rate of false alarms, such as 0.05. An image is predicted to be of no class if its novelty
                exceeds that of all but this share of held-out training images; the prediction is then None, or an
                empty list with `top_k`. The rate is approximate, and does not hold if the model was trained.
            coverage: Probability, such as 0.95, with which the returned set of classes contains the right one, see
                `Classifier.prediction_sets`. It holds under the same conditions as `reject`, and cannot be
                combined with `top_k`.
            return_novelty: Whether to return a pair: what is returned otherwise, and for each image a float that says
                how unlike all learned images it is, see `Classifier.novelty`.
            only: The classes that are possible, such as the species of a site. The probabilities of the others are 0.
            sum_up: A group for each of some classes, such as {"red fox": "carnivore"}: groups are predicted, with the
                sum of the probabilities of their classes. A class without a group is a group of its own.

        Returns:
            For one image, the name of its class. For several, a list with the name for each. With `top_k` or
            `coverage`, a list of names takes the place of each name. With `return_scores`, a pair of a name and its
            probability, in [0, 1], takes the place of each name. With `return_novelty`, a pair of all this and the
            novelty: a float for one image, and a list for several.

        Raises:
            ValueError: If no task has been learned yet, an image cannot be read, a class of `only` or `sum_up` has not
                been learned, or too few images were held out for `reject` or `coverage`; the message says how many
                are needed.

        Example:
            >>> learner.predict("photo.jpg", top_k=2, return_scores=True)  # doctest: +SKIP
            [('dog', 0.93), ('cat', 0.05)]
        """
        if top_k is not None and coverage is not None:
            raise ValueError(f"top_k is {top_k} and coverage is {coverage}: pass only one of them")
        only = None if only is None else tuple(only)
        query = Query(1 if top_k is None else top_k, reject, coverage, return_novelty, only, sum_up)
        rows = self.predictions(images, query)
        if return_scores and (doubt := self.state.doubt):
            warnings.warn(doubt, stacklevel=2)
        several = top_k is not None or coverage is not None
        answers = [row.answer(number, return_scores, several) for number, row in enumerate(rows)]
        novelties = [row.novelty for row in rows]
        if is_one_image(images):
            return (answers[0], novelties[0]) if return_novelty else answers[0]
        return (answers, novelties) if return_novelty else answers

    @takes_turn
    def predictions(self, images: object, query: Query | None = None) -> list[Prediction]:
        """Return the predictions of `predict` with the names of the images; of one that cannot be read, the reason."""
        preparing.check_learned(self.state)
        query = query or Query()
        if query.reject is not None or query.coverage is not None:
            preparing.warn_of_promises(self.state)
        with self.state.resting():
            data = unlabelled_images(images)
            return predict_images(self.encoder, self.classifier, data, query)

    def evaluate(self, dataset: object, class_names: Sequence[str] | None = None) -> Figures:
        """Return the top-1 accuracy among all seen classes. Arguments and errors are those of `update_classes`.

        Returns:
            A dict with `accuracy`, of the first classifier; `classifiers`, the accuracy of each classifier by name;
            and `num_images`. It also has `text_accuracy`, with the text embeddings alone, and `class_means_accuracy`,
            with the class means alone, if a classifier stores them and none already predicts in this way. All
            accuracies are in [0, 1].
        """
        return self.evaluate_images(dataset, class_names).figures()

    def evaluate_images(self, dataset: object, class_names: Sequence[str] | None = None) -> Evaluation:
        """Return every classifier's prediction for each image of a data set. Arguments are those of `evaluate`."""
        return self.evaluations([(dataset, class_names)])[0]

    @takes_turn
    def evaluations(self, tests: Sequence[tuple[object, Sequence[str] | None]]) -> list[Evaluation]:
        """Return the results of `evaluate_images` for several pairs of a data set and class names, in one pass."""
        preparing.check_learned(self.state)
        parts = [self.state.known_images(dataset, class_names) for dataset, class_names in tests]
        with self.state.resting():
            embeds = self.encoder.each_embeds(parts)
        encoded = [
            EncodedTest(
                features,
                torch.tensor(part.labels),
                [part.item_name(index) for index in range(len(part))],
                () if part.groups is None else tuple(part.groups.tolist()),
            )
            for features, part in zip(embeds, parts, strict=True)
        ]
        return evaluate_features(self.classifiers, encoded, self.class_names)

    @takes_turn
    def estimate(self) -> dict[str, Estimate]:
        """Estimate the accuracy of each classifier without test images, by leave-one-out on training images.

        The estimate is computed and saved at the end of a task, and recomputed if the learner has changed since.
        Images of earlier tasks are included if the user's feature store has their features. `Estimate.classes` lists
        the classes included; those with a single image are not. With two images per class, the estimate is less exact.

        Returns:
            An `Estimate` by the name of each classifier: `share`, `low` and `high` in [0, 1], where all classes have
            equal weight. Classifiers without a closed form of leave-one-out are missing. The dict is empty if the
            model itself is trained, because it has seen the images.

        Example:
            >>> learner.estimate()["bayes"].share  # doctest: +SKIP
            0.84
        """
        preparing.check_learned(self.state)
        if self.state.estimates.tasks != len(self.tasks):
            self.state = replace(self.state, estimates=estimates_of(self.state, self.encoder, {}))
        estimates = self.state.estimates
        return {
            name: Estimate(*share, estimates.classes, estimates.remarks(len(self.class_names)))
            for name, share in estimates.shares.items()
        }

    def scaled(self, scale: float) -> AbstractContextManager[None]:
        """Use the weights W_0 + scale * dW within a `with` block, where dW is the whole update, in both towers.

        Scale 0 is the pristine model and scale 1 the trained model, both bit for bit. The classifiers are not changed.
        Calls of other threads and asyncio tasks are not affected, and the learner cannot learn inside the block.

        Raises:
            ValueError: If the scale is not in [0, 1], an adapter is merged, or the adapter has `modules_to_save`.

        Example:
            >>> with learner.scaled(0.5):
            ...     scores = learner.image_embeds(photos) @ learner.text_embeds(["fox", "wolf"]).T

        Reference:
            Wortsman et al., "Robust fine-tuning of zero-shot models", 2022.
        """
        return self._turns.scaled(scale, self.state)

    @takes_turn
    def zero_shot(self, tests: Sequence[tuple[object, Sequence[str]]]) -> list[float | None]:
        """Return A_t, t = 1, 2, ..., of the pristine model with its text embeddings of the classes seen up to task t.

        `tests` has the test data of each task, or None, and its class names. A_t is None if no task up to t has data.
        """
        disabled = self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext()
        with disabled, self.encoder.encoding_by(None):
            return self.text_accuracies(tests)

    @takes_turn
    def text_accuracies(self, tests: Sequence[tuple[object, Sequence[str]]]) -> list[float | None]:
        """Return A_t as `zero_shot` does, but of the present model instead of the pristine one."""
        alike = self.encoder.has_names and self.encoder.projection is None
        with nullcontext() if alike else self.encoder.encoding_by(None):
            return seen_accuracies(self.text_embeds, self.image_embeds, tests)

    # ------------------------------------------------------------------ saving

    @takes_turn
    def save_pretrained(self, folder: str | Path) -> None:
        """Write everything that is needed to predict and to continue learning to one folder, atomically."""
        preparing.check_active_adapter(self.state)
        saving.save(self.state, Path(folder))

    @takes_turn
    def push_to_hub(
        self,
        repo_id: str,
        *,
        statistics: bool = True,
        results: Results | Mapping[str, object] | str | Path | None = None,
        dataset_name: str | None = None,
        **commit: object,
    ) -> CommitInfo:
        """Upload what `save_pretrained` writes to a repository on the Hub, which is created if it does not exist.

        Args:
            repo_id: Repository, such as "user/name".
            statistics: Whether to also upload what is needed to continue learning. Without it, the learner can predict
                and evaluate.
            results: Return value of `run_stream`, or its `results.json`; it is uploaded and shown in the model card.
            dataset_name: Name of the data set of the results, for the model card.
            commit: `private`, `token`, `revision` (a branch), `commit_message` and `create_pr`, as in huggingface_hub.

        Returns:
            The CommitInfo of huggingface_hub.

        Raises:
            ValueError: If the results belong to another learner.
        """
        preparing.check_active_adapter(self.state)
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
        """Load what `save_pretrained` or `run_stream` wrote, or `push_to_hub` uploaded, onto a pristine base model.

        Args:
            source: A saved folder, a run's folder, whose newest valid task is loaded, or the id of a repository.
            base_model: The pristine model; None loads the model that the saved learner names.
            args: Settings; None takes the saved ones, with defaults for this machine's (device, workers, cache,
                tracker, progress bars).
            revision: Branch, tag or commit on the Hub; the commit is recorded in the attribute `source`.
            token: Access token of the Hub.
            cache_dir: Folder for downloads in place of the Hub's default.
            machine: Settings of this machine that replace the defaults, such as {"device": "cpu", "num_workers": 4}.

        Raises:
            FileNotFoundError: If the folder, repository or revision does not exist.
            CheckpointError: If a file is damaged, has another format or kind, or does not fit the base model.
        """
        folder, manifest, origin = locating.locate(source, revision, token, cache_dir)
        with default_torch_settings(), restoring.loaded_state(folder, manifest, base_model, args, machine) as state:
            preparing.check_model(state)
            learner = object.__new__(cls)
            learner._adopt(replace(state, source=origin or state.source))
        learner.folder = None if origin else folder.resolve()
        return learner

    # ------------------------------------------------------------------ parts of the state

    @property
    def model(self) -> nn.Module:
        """The adapted model from `get_peft_model`, or the pristine model if the strategy trains nothing."""
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
        """The strategy that trains the model."""
        return self.state.strategy

    @property
    def memory(self) -> Memory | None:
        """What the strategy remembers of finished tasks."""
        return self.state.memory

    @property
    def classifiers(self) -> dict[str, Classifier]:
        """The classifiers by name; `predict` uses the first one."""
        return self.state.classifiers

    @property
    def classifier(self) -> Classifier:
        """The classifier that `predict` uses."""
        return self.state.classifier

    @property
    def head(self) -> BridgeEnsembleHead:
        """The first bridge ensemble, `bridge` or `pooled_bridge`; raises an `AttributeError` if there is none."""
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
        """All seen classes, in the order in which they were learned."""
        return self.state.class_names

    @property
    def source(self) -> dict[str, str] | None:
        """The `repo_id` and `commit` from which the learner was loaded, or None."""
        return self.state.source

    @property
    def profile(self) -> Profile:
        """The time that each phase of the last task took."""
        return self.encoder.profile

    # ------------------------------------------------------------------ turns, errors and copies

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block as a transaction: if it raises, the learner is restored to what it was before."""
        before = self.state, self.record, self.closing
        try:
            with self.state.adapter_kept():
                yield
        except BaseException:
            self.state, self.record, self.closing = before
            raise

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"log": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.encoder.scores, self.encoder.encodings = self._scores, self._encoding

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        with self.turn("__deepcopy__"):
            twin = object.__new__(type(self))
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
            return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy, which waits until no other thread is learning."""
        return object.__reduce_ex__(copy.deepcopy(self), protocol)
