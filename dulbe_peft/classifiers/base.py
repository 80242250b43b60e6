"""The base class of all classifiers: checks, growth, calibrated probabilities, forgetting and drift.

A classifier defines only its rule:

    class MyClassifier(Classifier):      name = "mine"
        power: Positive = 2.0            settings, whose types say which values are allowed
        register                         register_rows (one row per class), register_buffer (shared)
        added                            new values of the buffers after learning further images
        logits                           unit features to scores
        formula                          the scores in plain PyTorch, if they are not linear in the features

It works on the image and text features of any model, and needs neither peft nor transformers.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from dulbe_peft import classifiers
from dulbe_peft.classifiers.checks import check_labels, check_share, random_features, same_scores
from dulbe_peft.classifiers.corrections import CorrectedState
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import one_thread, without_autocast

if TYPE_CHECKING:
    from dulbe_peft.classifiers.calibration import TaskTemperature

# Embeddings of single texts, (T, d), and the class of each, (T,).
EachText = tuple[Tensor | np.ndarray, Tensor | np.ndarray | Sequence[int]]
# Buffers that are sums over images -> the power of an image's weight by which a summand is multiplied. Other buffers
# are means or choices.
SUMS = {"counts": 1.0, "sums": 1.0, "lengths": 1.0, "scatter": 1.0, "gram": 1.0, "factors": 0.5}
MOST_SCORES = 2**24  # scores that a temperature is fitted to; of more held-out images, an even selection is used


def linear(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d), by a matrix and a bias."""
    return z @ weight.T + bias


class Classifier(CorrectedState):
    """A classifier over given features that learns class by class and stores no images.

    A call that raises an error changes nothing.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau, the factor of the cosines (not its logarithm); 100 for CLIP.

    Attributes:
        name: Key of the classifier in the registry.
        needs_text: Whether `add_classes` needs text embeddings, which are stored in the rows `text_embeds`.
        needs_each_text: Whether every single text is stored, in the rows `each_text`, `num_texts` per class.
        updates: Whether `added` accepts further images of known classes.
        file_stem: The beginning of its file names; usually the name.
        summary: One line for readers who have not read the paper. Reports show it.
        belongs_to: The strategy that this rule belongs to, or "".
        source: `repo_id` and `commit` on the Hub that it was loaded from, or None.
    """

    needs_text: ClassVar[bool] = False
    updates: ClassVar[bool] = False
    summary: ClassVar[str] = ""
    belongs_to: ClassVar[str] = ""
    moves: ClassVar[tuple[str, ...]] = ()  # buffers that `moved` maps: rows z, and sums over images of z' z

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needs_text:
            self.register_rows("text_embeds", self.embed_dim)
        if self.needs_each_text:
            self.register_rows("each_text", self.embed_dim, of="num_texts")
            self.register_rows("num_texts", dtype=torch.int64)
        self.register()

    def register(self) -> None:
        """Register the buffers, which are empty at first. Texts are already registered, and settings checked.

        Tensors must be buffers, because a file contains nothing else.
        """

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """Return the buffers' new values after learning images of `new` or known classes, without changing anything.

        Args:
            images: (n, d), unit features in float32.
            labels: (n,), indices into all seen classes. The new classes come last, and each has at least one image.
            new: Names of the new classes; empty only if `updates` is set. The text buffers already contain their
                texts; `with_new_rows` adds rows for them to the other buffers.
        """
        raise NotImplementedError

    def logits(self, images: Tensor) -> Tensor:
        """Return the scores, (n, C) in float32, of unit features, (n, d) in float32. The default uses `formula`."""
        function, tensors = self.formula()
        return function(images, **tensors)

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Choose values of buffers on held-out images of new classes, and return them.

        This is called on a copy that has not learned these images. A `ValueError` means that the copy has learned too
        little; the task then does not contribute to the temperature.
        """
        return {}

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return scores of images that this copy has just learned, each as if it had not learned it, and their labels.

        A rule without a closed form does not override this; some images are then held out, see `choose`. The method
        may change the buffers. It returns None if no image can be left out.
        """
        return None

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor | None:
        """Return the leave-one-out scores, (n, C), of learned images, (n, d), or None if there is no closed form.

        `labels`, (n,), index all classes. Each of these classes has at least two images.
        """
        return None

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the buffers' new values after features z have drifted to z M.

        The buffers in `moves` change: rows of classes, z, to z M, and sums S of z' z to M' S M.

        Args:
            matrix: M, (d, d), float64, on the CPU.
        """
        changes = {name: tensor for name, tensor in self.tensors().items() if name in self.moves}
        for name, tensor in changes.items():
            tensor = tensor if tensor.dtype == torch.float64 else tensor.cpu().double()  # some devices lack float64
            by = matrix.to(tensor.device)
            changes[name] = tensor @ by if name in self._axes else by.T @ tensor @ by
        return changes

    def lifted(self, images: Tensor) -> Tensor:
        """Map unit features, (n, embed_dim), to the x, (n, w), that is summed up, in the same type. Here x = z."""
        return images

    def followed(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the buffers' new values after x of `lifted` has drifted to x M; M is (w, w). See `moved`."""
        return self.moved(matrix)

    @torch.no_grad()
    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """Return the logits as a function in plain PyTorch and its tensors, which exports contain.

        The function is defined at the top of a module, uses only `torch`, and takes unit features z, (n, d), and the
        tensors by name. The default is `z @ weight.T + bias`; classifiers with other logits override it.
        """
        if type(self).logits is Classifier.logits:
            raise NotImplementedError(f"{type(self).__name__} has neither logits() nor formula()")
        bias = self.logits(torch.zeros(1, self.embed_dim, device=self.device))[0]
        weight = (self.logits(torch.eye(self.embed_dim, device=self.device)) - bias).T
        features = random_features(self.embed_dim, self.device)
        if not same_scores(linear(features, weight, bias), self.logits(features)):
            raise ValueError(
                f"the {self.name!r} classifier is not linear in the features, but {type(self).__name__} does not "
                "override formula(): write it, or export as onnx, which does not need it"
            )
        return linear, {"weight": weight, "bias": bias}

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that `torch.jit.script` compiles instead of this classifier, if its scores are linear."""
        function, tensors = self.formula()
        return classifiers.scripted.LinearScores(**tensors) if function is linear else self

    @classmethod
    def follows_drift(cls, drift: str = "auto") -> bool:
        """Return whether the buffers follow drift under this value of `LearnerArguments.drift`."""
        return drift != "none" and (bool(cls.moves) or cls.moved is not Classifier.moved)

    @classmethod
    def check_update(cls) -> None:
        """Raise a `ValueError` if the classifier cannot learn further images of known classes."""
        if not cls.updates:
            raise ValueError(f"the {cls.name!r} classifier cannot learn more images of a known class")

    @torch.inference_mode(False)  # inference tensors could not be used in training later
    @torch.no_grad()
    @one_thread()
    def add_classes(
        self,
        class_names: Sequence[str],
        image_embeds: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | Sequence[int],
        text_embeds: Tensor | np.ndarray | None = None,
        each_text: EachText | None = None,
        views: Tensor | None = None,
    ) -> None:
        """Learn the classes of one task. After an error, the classifier is as it was before.

        Args:
            class_names: The new classes.
            image_embeds: (n, d), features of the task's images, which are normalised here.
            labels: (n,), integers that index `class_names`. Every class needs at least one image.
            text_embeds: (C_seen, d), text embeddings of all seen classes in the order of learning, new ones included.
                Required if `needs_text` is set.
            each_text: (T, d) and (T,), embeddings of single texts and the new class of each, used if `needs_each_text`
                is set. None uses the row of `text_embeds` as the only text of a class.
            views: (n, V, d), unit features of each image and its augmented views. A classifier that keeps sums adds
                each view with the weight 1/V. Settings are chosen on, and other classifiers learn, the images without
                augmentation.

        Raises:
            ValueError: Names, features or labels are invalid, or a class has no image or no text.
            TypeError: An argument has a wrong type, or required text embeddings are missing.
        """
        names = list(check_class_names(class_names, self._class_names))
        images = self._unit(image_embeds, "image_embeds")
        texts = self._texts_of(names, text_embeds, each_text)
        indices = check_labels(labels, len(images), len(names)).to(images.device)
        absent = (torch.bincount(indices, minlength=len(names)) == 0).nonzero()
        if len(absent):
            raise ValueError(f"class {names[int(absent[0])]!r} has no image")
        indices, start = indices + len(self._class_names), self.fork()  # indices into all seen classes
        start.install({name: rows for name, rows in texts.items() if name in self.tensors()})
        with without_autocast(images):
            # The copy without held-out images is freed first, because memory may not suffice for two copies.
            choices, scores = start._held_out_choices(images, indices, names)
            twin = start._with_images(images, indices, names, views)
            twin.install(choices)
            scores = scores or twin.judge(images, indices)
        self._adopt(twin, scores, images, indices)

    @torch.no_grad()
    @one_thread()
    def update_classes(
        self,
        image_embeds: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | Sequence[int],
        views: Tensor | None = None,
    ) -> None:
        """Learn further images of known classes, as if they had been learned together with the others.

        The temperature of the probabilities does not change, except for rules that leave each image out (`judge`).

        Args:
            image_embeds: (n, d), features, which are normalised here.
            labels: (n,), integers that index `class_names`.
            views: See `add_classes`.

        Raises:
            ValueError: The classifier cannot learn further images of known classes, or an argument is invalid.
        """
        self.check_update()
        images = self._unit(image_embeds, "image_embeds")
        indices = check_labels(labels, len(images), len(self._class_names)).to(images.device)
        if len(images):
            with without_autocast(images):
                twin = self._with_images(images, indices, [], views)
                scores = twin.judge(images, indices)
            self._adopt(twin, scores, images, indices)

    @torch.no_grad()
    def set_text_embeds(self, text_embeds: Tensor | np.ndarray) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), after the text tower has changed."""
        if not self.reads_text:
            raise ValueError(f"the {self.name!r} classifier has no text embeddings")
        self.install({"text_embeds": self._unit(text_embeds, "text_embeds", len(self._class_names))})

    @torch.no_grad()
    def move(self, matrix: Tensor) -> None:
        """Map the stored features of old images by M, (d, d), since an old feature z is now about z M.

        `linear_map` computes M.
        """
        if matrix.shape != (self.embed_dim, self.embed_dim) or not torch.isfinite(matrix).all():
            raise ValueError(f"the map must be finite and {(self.embed_dim,) * 2}, got shape {tuple(matrix.shape)}")
        self.install(self.moved(matrix.cpu().double()))

    @torch.no_grad()
    def follow(self, before: Tensor, after: Tensor, labels: Tensor) -> None:
        """Correct the stored features of old images for the drift of a task, as far as that helps held-out classes.

        The drift is estimated from the task's images, by comparing their x of `lifted` before and after training.

        Args:
            before: (n, d), unit features of the task's images before the task.
            after: (n, d), their unit features after the task.
            labels: (n,), the images' classes.
        """
        if self.follows_drift():
            old, new = (self.lifted(each.detach().cpu().double()) for each in (before, after))
            matrix = classifiers.drift.chosen_map(old, new, labels)
            if matrix is not None:
                self.install(self.followed(matrix))

    def _with_each_text(self, names: list[str], given: EachText) -> dict[str, Tensor]:
        """Return `each_text` and `num_texts` with the texts of new classes added."""
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError(f"each_text must be a tuple of embeddings and their classes, got {given!r:.100}")
        rows = self._unit(given[0], "each_text")
        owners = check_labels(given[1], len(rows), len(names), "the classes of each_text", "text").to(rows.device)
        counts = owners.bincount(minlength=len(names))
        for name, count in zip(names, counts.tolist(), strict=True):
            if not 1 <= count <= self.embed_dim:
                raise ValueError(
                    f"each_text must have 1 to {self.embed_dim} texts per class, got {count} for {name!r}"
                )
        return self.with_rows(each_text=rows[owners.argsort(stable=True)], num_texts=counts)

    def _texts_of(
        self, names: list[str], text_embeds: Tensor | np.ndarray | None, each_text: EachText | None
    ) -> dict[str, Tensor]:
        """Check the text embeddings of seen and new classes, and return them; zeros replace missing optional ones."""
        texts: dict[str, Tensor] = {}
        if text_embeds is None and self.needs_text:
            raise TypeError(
                f"the {self.name!r} classifier needs text_embeds of all seen classes; bayes, lda and ranpac do not"
            )
        if text_embeds is not None:
            texts["text_embeds"] = self._unit(text_embeds, "text_embeds", len(self._class_names) + len(names))
        elif self.reads_text:
            texts["text_embeds"] = nn.functional.pad(self.text_embeds, (0, 0, 0, len(names)))
        if self.needs_each_text:
            single = (texts["text_embeds"][-len(names) :], range(len(names))) if each_text is None else each_text
            texts |= self._with_each_text(names, single)
        return texts

    def _with_images(self, images: Tensor, labels: Tensor, new: list[str], views: Tensor | None = None) -> Self:
        """Return a copy of the classifier that has also learned `images`.

        With `views`, sums are taken over the views instead. The text embeddings of `new` classes must already be set.
        """
        twin = self.fork()
        twin.install(self.added(images, labels, new))
        if views is not None and self.updates:
            twin.install(self._sums_of_views(views, labels, new))
        twin._class_names = [*self._class_names, *new]
        return twin

    def _sums_of_views(self, views: Tensor, labels: Tensor, new: list[str]) -> dict[str, Tensor]:
        """Return the sums of `added` with the weight 1 / V for each of V views.

        `added` knows no weights, so the known images count V times, and the result is divided by V.
        """
        number, start = views.shape[1], self.fork()
        rows = self._unit(views.flatten(0, 1), "views", len(labels) * number)
        times = {name: number if power == 1 else number**power for name, power in SUMS.items()}
        start.install({name: tensor * times[name] for name, tensor in self.tensors().items() if name in SUMS})
        changes = start.added(rows, labels.repeat_interleave(number), new)
        for name in changes.keys() & SUMS.keys():
            integer = not changes[name].is_floating_point()
            changes[name] = changes[name] // number if integer else changes[name] / times[name]
        if "freedom" in changes:
            changes["freedom"] = self.freedom + len(views) - len(new)
        return changes

    def _held_out_choices(
        self, images: Tensor, labels: Tensor, new: list[str]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
        """Hold out images of the new task; return what `choose` chooses on them, and their scores and labels."""
        held, classes = classifiers.calibration.hold_back(images, labels), len(self._class_names) + len(new)
        if type(self).judge is not Classifier.judge or not held.any() or classes < 2:
            return {}, None
        try:
            twin = self._with_images(images[~held], labels[~held], new)
            choices = twin.choose(images[held], labels[held])
        except ValueError:  # too few images without the held-out ones, or their features cancel out
            return {}, None
        twin.install(choices)
        rows = held.nonzero()[:, 0]
        if (step := len(rows) * classes // MOST_SCORES + 1) > 1:
            rows = rows[classifiers.calibration.ranking(images[rows]).argsort()][::step]
        return choices, (twin.logits(images[rows]), labels[rows])

    def _adopt(self, twin: Self, scores: tuple[Tensor, Tensor] | None, images: Tensor, labels: Tensor) -> None:
        """Take over the state of the copy `twin`, which has learned `images`, and update calibration and novelty.

        `scores` are scores and labels of some of the images by a classifier that had not learned them.
        """
        if scores is not None:
            twin.calibration = classifiers.calibration.calibrated(
                self.calibration, *scores, labels, twin.temperature_of
            )
        twin.novelty_tasks = classifiers.novelty.judged(twin, images, labels, twin.left_out, twin.temperature)
        self.calibration, self.novelty_tasks = twin.calibration, twin.novelty_tasks
        self._buffers, self._class_names, self._derived = twin._buffers, twin._class_names, twin._derived

    def forward(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Normalise features, (n, d), and return the logits of all seen classes, (n, C) in float32."""
        return self.part_by_part(image_embeds)

    def part_by_part(self, image_embeds: Tensor | np.ndarray, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the logits of parts of the features, with `sizes` rows each, as separate calls would compute them.

        A matrix product rounds differently for another batch size, so the parts are not multiplied together.
        """
        if not self._class_names:
            raise ValueError(f"the {self.name!r} classifier has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            logits = self.logits(images) if sizes is None else torch.cat([*map(self.logits, images.split([*sizes]))])
        if has_values() and not torch.isfinite(logits).all():
            raise ValueError(f"the scores of the {self.name!r} classifier are not finite: it is damaged")
        return logits

    def probabilities(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Return the probabilities of all seen classes, softmax(logits / `temperature`), (n, C) in float32.

        They can be far off if `calibrated` is False.
        """
        return (self(image_embeds) / self.temperature).softmax(dim=1)

    @property
    def calibrated(self) -> bool:
        """Whether images that the scores had not learned determined `temperature`; True for a single class."""
        return bool(self.calibration) or len(self._class_names) < 2

    @property
    def doubt(self) -> str:
        """A sentence that says why the probabilities can be far off, or "" if they are calibrated."""
        if self.calibrated:
            return ""
        return (
            f"no image could be left out to calibrate the probabilities of the {self.name!r} classifier, so they can "
            "be far off: learn a class with two images or more beside another class"
        )

    def warn_if_uncalibrated(self) -> None:
        """Warn with `doubt`, if any, in the name of the caller's caller."""
        if self.doubt:
            warnings.warn(self.doubt, stacklevel=3)

    @property
    def temperature(self) -> float:
        """T of `probabilities`; 1 if no image could be held out to fit it."""
        return self.temperature_of(self.calibration)

    def temperature_of(self, tasks: "Sequence[TaskTemperature]") -> float:
        """Return T from the records of the tasks."""
        return classifiers.calibration.temperature(tasks, len(self._class_names))

    @torch.no_grad()
    def novelty(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Return the novelty of each image, (n,) in float64: the larger, the less it resembles the known classes.

        Classifiers that keep means, counts and scatter, such as `lda`, `gda` and `bayes`, compute it as described in
        `classifiers.novelty`. For others it is 1 minus the largest probability.
        """
        if classifiers.novelty.sums_of(self) is None:
            return 1 - self.probabilities(image_embeds).amax(dim=1).double()
        images = self._unit(image_embeds, "image_embeds")
        return classifiers.novelty.novelty(self, images, self(image_embeds) / self.temperature)

    def refused(self, image_embeds: Tensor | np.ndarray, share: float) -> Tensor:
        """Return which images are rejected because their novelty is too large, (n,) in bool.

        An image of a known class, drawn like those of the newest tasks, is rejected with a probability of about
        `share` or less, see `calibration.threshold`.

        Raises:
            ValueError: The newest tasks have too few images for this. The message says how many are needed.
        """
        share = check_share("reject", share, 0.05)
        if classifiers.novelty.sums_of(self) is None or not any(task.novelties for task in self.novelty_tasks):
            return self.probabilities(image_embeds).amax(dim=1) < self.rejection_threshold(share)
        return self.novelty(image_embeds) > classifiers.novelty.novelty_threshold(self.novelty_tasks, share)

    @property
    def roc_area(self) -> float | None:
        """Area under the ROC curve: how often an image of an unknown class is more novel than one of a known class.

        It is estimated by leaving out each class in turn. 1/2 means that novelty does not separate them. None if it
        is not known.
        """
        return classifiers.novelty.roc_area(self.novelty_tasks)

    def rejection_threshold(self, share: float) -> float:
        """Return the threshold of the largest probability for rejecting at most a fraction `share` of known images.

        An image of a known class, drawn like those of the newest tasks, is below it with a probability of about
        `share` or less, see `calibration.threshold`.

        Reference:
            Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
            Networks", 2017: the largest softmax probability as the score.
        """
        return classifiers.calibration.threshold(self.calibration, "largest", check_share("reject", share, 0.05))

    def prediction_sets(self, image_embeds: Tensor | np.ndarray, coverage: float) -> Tensor:
        """Return the prediction set of each image, (n, C) in bool, by conformal prediction.

        For images of known classes, drawn like those of the newest tasks, it contains the true class with a
        probability of about `coverage` or more, see `calibration.threshold`. It always contains the most likely class.

        Raises:
            ValueError: The newest tasks have too few images for this. The message says how many are needed.
        """
        least = classifiers.calibration.threshold(self.calibration, "own", 1 - check_share("coverage", coverage, 0.95))
        probabilities = self.probabilities(image_embeds)
        return (probabilities >= least) | (probabilities == probabilities.amax(dim=1, keepdim=True))
