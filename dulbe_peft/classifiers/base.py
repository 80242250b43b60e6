"""What all classifiers share: checks, growth, calibrated probabilities, forgetting, drift. A classifier is its rule.

    class MyClassifier(Classifier):      name = "mine"
        power: Positive = 2.0            its settings, whose types say what is allowed
        register                         register_rows (one row a class), register_buffer (shared)
        added                            the buffers' new values with further images
        logits                           unit features to scores
        formula                          the scores as a function of PyTorch, where they are not linear in the features

Works on any model's image and text features, and needs neither peft nor transformers.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from dulbe_peft import classifiers
from dulbe_peft.classifiers.checks import check_labels, check_share, random_features, same_scores
from dulbe_peft.classifiers.corrections import CorrectedState
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import one_thread, without_autocast

# The power of an image's weight with which it goes into a sum; what has another name is a mean or a choice.
SUMS = {"counts": 1.0, "sums": 1.0, "lengths": 1.0, "scatter": 1.0, "gram": 1.0, "factors": 0.5}
MOST_SCORES = 2**24  # for a temperature; of more held-back images, some are taken, spread evenly over their ranks


def linear(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): a matrix and a bias."""
    return z @ weight.T + bias


class Classifier(CorrectedState):
    """A classifier over given features that learns class by class and keeps no image.

    A call that raises changes nothing.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau itself, 100 for CLIP, never its logarithm.

    Attributes:
        name: key of the classifier in the registry.
        needs_text: whether `add_classes` needs text embeddings; the rows `text_embeds` then hold them.
        needs_each_text: whether the rows `each_text` hold each text of each class, of which a class has `num_texts`.
        updates: whether `added` takes further images of known classes.
        file_stem: how the names of its files begin; usually the name.
        summary: what it is, in one line for somebody who has not read the paper; a report shows it.
        belongs_to: the strategy whose own rule it is, or "".
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
        """Register the buffers, which are empty at first; texts are registered already, and settings are checked.

        Only buffers are read back from a file: no other attribute may be a tensor.
        """

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """The buffers' new values with images of `new` classes, or with further ones of known classes.

        `images` are (n, d) unit features in float32. `labels` index all seen classes, of which the new ones are the
        last, and each of these has an image. The buffers of texts hold those of the new classes already;
        `with_new_rows` gives rows to the others. It is called without new classes where `updates` is set. It changes
        nothing itself.
        """
        raise NotImplementedError

    def logits(self, images: Tensor) -> Tensor:
        """Scores of unit features, (n, d) in float32 to (n, C) in float32; here those of `formula`."""
        function, tensors = self.formula()
        return function(images, **tensors)

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Buffers whose values are chosen on held-back images of new classes; called on a copy without these images.

        A `ValueError` says that the copy has learned too little; the task is then left out of the temperature.
        """
        return {}

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scores of images that this copy has just learned as if each had not been, and their labels.

        Where there is no closed form, as here, a copy learns without some images, see `choose`. The buffers may
        change. None: no image can be left out.
        """
        return None

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor | None:
        """The scores of learned images, (n, d), each as if it had not been learned, (n, C).

        `labels` index all classes, and each of these has a second image. None: there is no closed form.
        """
        return None

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """The buffers' new values where a feature z has become z M, by a `matrix` M, (d, d), float64, on the CPU.

        Here of `moves`: rows of classes become z M, and sums S of z' z M' S M.
        """
        changes = {name: tensor for name, tensor in self.tensors().items() if name in self.moves}
        for name, kept in changes.items():
            kept = kept if kept.dtype == torch.float64 else kept.cpu().double()  # some devices have no float64
            by = matrix.to(kept.device)
            changes[name] = kept @ by if name in self._axes else by.T @ kept @ by
        return changes

    def lifted(self, images: Tensor) -> Tensor:
        """x of unit features, (n, embed_dim) to (n, w), in the type of `images`: what sums are of. Here z itself."""
        return images

    def followed(self, matrix: Tensor) -> dict[str, Tensor]:
        """As `moved`, where x of `lifted` has become x M; M is (w, w)."""
        return self.moved(matrix)

    @torch.no_grad()
    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """The logits as a function of plain PyTorch, with its tensors: how an export keeps the classifier.

        The function stands in a module, uses `torch` alone, and takes unit features z, (n, d), and the tensors by
        name. Here it is `z @ weight.T + bias`; a classifier with other logits gives its own.
        """
        if type(self).logits is Classifier.logits:
            raise NotImplementedError(f"{type(self).__name__} has neither logits() nor formula()")
        bias = self.logits(torch.zeros(1, self.embed_dim, device=self.device))[0]
        weight = (self.logits(torch.eye(self.embed_dim, device=self.device)) - bias).T
        features = random_features(self.embed_dim, self.device)
        if not same_scores(linear(features, weight, bias), self.logits(features)):
            raise ValueError(
                f"the {self.name!r} classifier is not linear in the features, and {type(self).__name__} has "
                "no formula() of its own: write one, or export as onnx, which needs none"
            )
        return linear, {"weight": weight, "bias": bias}

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what `torch.jit.script` takes in this classifier's place, where its scores are linear."""
        function, tensors = self.formula()
        return classifiers.scripted.LinearScores(**tensors) if function is linear else self

    @classmethod
    def follows_drift(cls, drift: str = "auto") -> bool:
        """Whether what is stored changes where `LearnerArguments.drift` is so."""
        return drift != "none" and (bool(cls.moves) or cls.moved is not Classifier.moved)

    @classmethod
    def check_update(cls) -> None:
        """Raise a ValueError where `update_classes` cannot take further images of known classes."""
        if not cls.updates:
            raise ValueError(f"the {cls.name!r} classifier cannot learn more images of a known class")

    @torch.inference_mode(False)  # a tensor that was made in it cannot be trained on
    @torch.no_grad()
    @one_thread()
    def add_classes(
        self,
        class_names: Sequence[str],
        image_embeds: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | Sequence[int],
        text_embeds: Tensor | np.ndarray | None = None,
        each_text: tuple[Tensor | np.ndarray, Tensor | np.ndarray | Sequence[int]] | None = None,
        views: Tensor | None = None,
    ) -> None:
        """Take in the classes of one task; on any error the classifier is as it was.

        Args:
            class_names: the new classes.
            image_embeds: (n, d), features of the task's images, normalised here.
            labels: (n,), integers that index `class_names`; every class needs at least one image.
            text_embeds: (C_seen, d), of all seen classes in the order they came, where `needs_text` is set.
            each_text: (T, d) and (T,), embeddings of texts and the new class of each, where `needs_each_text` is set;
                None takes a class's row of `text_embeds` as its only text.
            views: (n, V, d), unit features of each image and its augmented views. A classifier that keeps sums takes
                in each with the weight 1/V; what it chooses, it chooses by the images as they are, which others learn.

        Raises:
            ValueError, TypeError: names, features or labels do not fit, or a class has no image or no text.
        """
        names = list(check_class_names(class_names, self._class_names))
        images = self._unit(image_embeds, "image_embeds")
        texts = self._texts_of(names, text_embeds, each_text)
        indices = check_labels(labels, len(images), len(names)).to(images.device)
        absent = (torch.bincount(indices, minlength=len(names)) == 0).nonzero()
        if len(absent):
            raise ValueError(f"class {names[int(absent[0])]!r} has no image")
        indices, start = indices + len(self._class_names), self.fork()  # of all seen classes
        start.install({name: rows for name, rows in texts.items() if name in self.tensors()})
        with without_autocast(images):
            # The copy without held-back images goes before the other one comes: two of them may not fit.
            choices, scores = start._held_back(images, indices, names)
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
        """Take in further images, (n, d), of known classes, which `labels` index, as if seen with the others.

        The temperature of the probabilities stays as it is, but for rules that leave each image out (`judge`).
        `views` are as in `add_classes`. A classifier that does not keep what is needed raises a `ValueError`.
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
        """Replace the text embeddings of all seen classes, (C_seen, d), after the text tower has moved."""
        if not self.reads_text:
            raise ValueError(f"the {self.name!r} classifier keeps no text embeddings")
        self.install({"text_embeds": self._unit(text_embeds, "text_embeds", len(self._class_names))})

    @torch.no_grad()
    def move(self, matrix: Tensor) -> None:
        """Move what is stored of old images by M, (d, d), see `linear_map`: an old feature z is now about z M."""
        if matrix.shape != (self.embed_dim, self.embed_dim) or not torch.isfinite(matrix).all():
            raise ValueError(f"the map must be finite and {(self.embed_dim,) * 2}, got shape {tuple(matrix.shape)}")
        self.install(self.moved(matrix.cpu().double()))

    @torch.no_grad()
    def follow(self, before: Tensor, after: Tensor, labels: Tensor) -> None:
        """Move what is stored of old images by what a task did to its own, as far as left-out classes say it helps.

        Args:
            before, after: (n, d), unit features of the task's images before and after it; x of both is compared.
            labels: (n,), the images' classes.
        """
        if self.follows_drift():
            old, new = (self.lifted(each.detach().cpu().double()) for each in (before, after))
            matrix = classifiers.drift.chosen_map(old, new, labels)
            if matrix is not None:
                self.install(self.followed(matrix))

    def _with_each_text(self, names: list[str], given: Any) -> dict[str, Tensor]:
        """`each_text` and `num_texts` with those of new classes."""
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError(f"each_text must be a tuple of embeddings and of the class of each, got {given!r:.100}")
        rows = self._unit(given[0], "each_text")
        owners = check_labels(given[1], len(rows), len(names), "the classes of each_text", "text").to(rows.device)
        counts = owners.bincount(minlength=len(names))
        for name, count in zip(names, counts.tolist(), strict=True):
            if not 1 <= count <= self.embed_dim:
                raise ValueError(f"each_text must have 1 to {self.embed_dim} texts a class, got {count} of {name!r}")
        return self.with_rows(each_text=rows[owners.argsort(stable=True)], num_texts=counts)

    def _texts_of(self, names: list[str], text_embeds: Any, each_text: Any) -> dict[str, Tensor]:
        """The checked texts of all seen classes and of new ones; zeros stand for those that a rule can do without."""
        texts: dict[str, Tensor] = {}
        if text_embeds is None and self.needs_text:
            raise TypeError(
                f"the {self.name!r} classifier needs text_embeds of all seen classes; bayes, lda and ranpac need none"
            )
        if text_embeds is not None:
            texts["text_embeds"] = self._unit(text_embeds, "text_embeds", len(self._class_names) + len(names))
        elif self.reads_text:
            texts["text_embeds"] = nn.functional.pad(self.text_embeds, (0, 0, 0, len(names)))
        if self.needs_each_text:
            own = (texts["text_embeds"][-len(names) :], range(len(names))) if each_text is None else each_text
            texts |= self._with_each_text(names, own)
        return texts

    def _with_images(self, images: Tensor, labels: Tensor, new: list[str], views: Tensor | None = None) -> Self:
        """A fork that has learned images, and of sums those of their views; the texts of `new` classes are there."""
        twin = self.fork()
        twin.install(self.added(images, labels, new))
        if views is not None and self.updates:
            twin.install(self._sums_of_views(views, labels, new))
        twin._class_names = [*self._class_names, *new]
        return twin

    def _sums_of_views(self, views: Tensor, labels: Tensor, new: list[str]) -> dict[str, Tensor]:
        """What `added` gives if each of V views counts 1 / V: the known counts V times, then all is divided by V."""
        number, start = views.shape[1], self.fork()
        rows = self._unit(views.flatten(0, 1), "views", len(labels) * number)
        times = {name: number if power == 1 else number**power for name, power in SUMS.items()}
        start.install({name: tensor * times[name] for name, tensor in self.tensors().items() if name in SUMS})
        changes = start.added(rows, labels.repeat_interleave(number), new)
        for name in changes.keys() & SUMS.keys():
            whole = not changes[name].is_floating_point()
            changes[name] = changes[name] // number if whole else changes[name] / times[name]
        if "freedom" in changes:
            changes["freedom"] = self.freedom + len(views) - len(new)
        return changes

    def _held_back(
        self, images: Tensor, labels: Tensor, new: list[str]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
        """The choices of `choose` on held-back images of the new task, and their scores and labels."""
        held, classes = classifiers.calibration.hold_back(images, labels), len(self._class_names) + len(new)
        if type(self).judge is not Classifier.judge or not held.any() or classes < 2:
            return {}, None
        try:
            twin = self._with_images(images[~held], labels[~held], new)
            choices = twin.choose(images[held], labels[held])
        except ValueError:  # the images that are left are too few, or cancel out; all of them do not
            return {}, None
        twin.install(choices)
        rows = held.nonzero()[:, 0]
        if (step := len(rows) * classes // MOST_SCORES + 1) > 1:
            rows = rows[classifiers.calibration.ranking(images[rows]).argsort()][::step]
        return choices, (twin.logits(images[rows]), labels[rows])

    def _adopt(self, twin: Self, scores: tuple[Tensor, Tensor] | None, images: Tensor, labels: Tensor) -> None:
        """Become what a fork has become, which has learned images; `scores` are of some as if it had not."""
        if scores is not None:
            twin.calibration = classifiers.calibration.calibrated(self.calibration, *scores, labels)
        twin.novelty_tasks = classifiers.novelty.judged(twin, images, labels, twin.left_out, twin.temperature)
        self.calibration, self.novelty_tasks = twin.calibration, twin.novelty_tasks
        self._buffers, self._class_names, self._derived = twin._buffers, twin._class_names, twin._derived

    def forward(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Logits of all seen classes, (n, C), float32, of features, (n, d), which are normalised here."""
        return self.part_by_part(image_embeds)

    def part_by_part(self, image_embeds: Tensor | np.ndarray, sizes: Sequence[int] | None = None) -> Tensor:
        """As a call of the classifier gives it for each part of the features alone, which have so many rows each.

        In batches of another size a product of matrices is not rounded alike, so parts are not multiplied together.
        """
        if not self._class_names:
            raise ValueError(f"the {self.name!r} classifier has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            logits = self.logits(images) if sizes is None else torch.cat([*map(self.logits, images.split([*sizes]))])
        if has_values() and not torch.isfinite(logits).all():
            raise ValueError(f"the {self.name!r} classifier gives scores that are not finite: it is damaged")
        return logits

    def probabilities(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Calibrated probabilities of all seen classes, softmax(logits / `temperature`), (n, C), float32."""
        return (self(image_embeds) / self.temperature).softmax(dim=1)

    @property
    def temperature(self) -> float:
        """T of `probabilities`; 1 where no image could be held back to fit it."""
        return classifiers.calibration.temperature(self.calibration, len(self._class_names))

    @torch.no_grad()
    def novelty(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """How unlike all that was learned each image is, (n,), float64; a larger number is less like it.

        See `classifiers.novelty` where means, counts and scatter are kept, as `lda`, `gda` and `bayes` do; else 1 less
        the largest probability.
        """
        if classifiers.novelty.sums_of(self) is None:
            return 1 - self.probabilities(image_embeds).amax(dim=1).double()
        images = self._unit(image_embeds, "image_embeds")
        return classifiers.novelty.novelty(self, images, self(image_embeds) / self.temperature)

    def refused(self, image_embeds: Tensor | np.ndarray, share: float) -> Tensor:
        """Which images are taken for none of the classes, (n,) booleans, because their novelty is too large.

        An image of known classes like those of the newest tasks is refused with at most the chance `share`.

        Raises:
            ValueError: the newest tasks have too few images to promise it; the message says how many it takes.
        """
        share = check_share("reject", share, 0.05)
        if classifiers.novelty.sums_of(self) is None or not any(task.novelties for task in self.novelty_tasks):
            return self.probabilities(image_embeds).amax(dim=1) < self.rejection_threshold(share)
        return self.novelty(image_embeds) > classifiers.novelty.novelty_threshold(self.novelty_tasks, share)

    @property
    def roc_area(self) -> float | None:
        """The chance that an image of an unknown class like the known ones is more novel than one of these.

        It is measured by leaving out each class in turn; 1/2 says that they cannot be told. None: it is not known.
        """
        return classifiers.novelty.roc_area(self.novelty_tasks)

    def rejection_threshold(self, share: float) -> float:
        """The probability below which the best one of an image of known classes is with at most the chance `share`.

        Reference:
            Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
            Networks", 2017: the largest softmax probability as the score.
        """
        return classifiers.calibration.threshold(self.calibration, "largest", check_share("reject", share, 0.05))

    def prediction_sets(self, image_embeds: Tensor | np.ndarray, coverage: float) -> Tensor:
        """The classes that each image may be of, (n, C) booleans, by split-conformal prediction.

        With a chance of `coverage`, the right one is among them, for images of known classes like those of the newest
        tasks. The most likely one always is. Too few images to promise it are a `ValueError`, as above.
        """
        least = classifiers.calibration.threshold(self.calibration, "own", 1 - check_share("coverage", coverage, 0.95))
        found = self.probabilities(image_embeds)
        return (found >= least) | (found == found.amax(dim=1, keepdim=True))
