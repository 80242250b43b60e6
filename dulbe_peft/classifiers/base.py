"""What all classifiers share: checks, growth, calibrated probabilities, forgetting, drift. A classifier is its rule.

    class MyClassifier(Classifier):      name = "mine"
        __init__                         register_rows (one row a class), register_buffer (shared)
        learn                            the buffers' new values for a task of new classes
        logits                           unit features to scores
        formula                          the scores as a function of PyTorch, where they are not linear in the features

Works on any model's image and text features, and needs neither peft nor transformers.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import calibrated, check_share, hold_back, temperature, threshold
from dulbe_peft.classifiers.checks import check_alike, check_labels, needing_no_text, unit_features
from dulbe_peft.classifiers.files import load_classifier, save_classifier
from dulbe_peft.classifiers.formula import affine, linear
from dulbe_peft.classifiers.state import GrowingState
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils import hub
from dulbe_peft.utils.checks import check_int, check_number
from dulbe_peft.utils.precision import without_autocast

MOST_LOGIT_SCALE = 1e30  # logits stay finite in float32


class Classifier(GrowingState):
    """A classifier over given features that learns class by class and keeps no image.

    A call that raises changes nothing.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau itself, 100 for CLIP, never its logarithm.

    Attributes:
        name: key of the classifier in the registry.
        needs_text: whether `add_classes` needs text embeddings.
        file_stem: how the names of its files begin; the name where a class does not set it.
        source: `repo_id` and `commit` on the Hub that it was loaded from, or None; kept when it is saved.
    """

    name: ClassVar[str] = ""
    needs_text: ClassVar[bool] = False
    file_stem: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            cls.file_stem = vars(cls).get("file_stem", cls.name)

    def __init__(self, embed_dim: int, logit_scale: float = 100.0) -> None:
        super().__init__()
        check_number("logit_scale", logit_scale, positive=True, most=MOST_LOGIT_SCALE)
        self.embed_dim = check_int("embed_dim", embed_dim, 2)
        self.logit_scale = float(logit_scale)
        self.source: dict[str, str] | None = None

    @abstractmethod
    def learn(self, names: Sequence[str], images: Tensor, labels: Tensor, texts: Tensor | None) -> dict[str, Tensor]:
        """The buffers' new values for a task of new classes; changes nothing itself.

        Args:
            names: the new classes.
            images: (n, d), float32, unit features, on the classifier's device.
            labels: (n,), integers that index `names`; every class has at least one image.
            texts: (C_seen, d), float32, unit embeddings of all seen classes, the old ones' first, or None.
        """
        raise NotImplementedError

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Scores of unit features, (n, d) in float32 to (n, C) in float32."""
        raise NotImplementedError

    def learn_more(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The buffers' new values for further images of known classes; `labels` index all seen classes."""
        raise NotImplementedError

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        """The buffers' new values with what another classifier of the same settings has learned.

        The classes are this one's, then those that only the other one knows. `places`, (C_other,), says where among
        them the other one's classes stand, so `with_new_rows(new)["sums"].index_add(0, places, other.sums)` adds
        sums. The caller checks that the two fit, and merges `text_embeds`.
        """
        raise NotImplementedError

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Buffers whose values are chosen on held-back images; called on a copy that learned without these images.

        `images` are (n, d) unit features of new classes, and `labels` index all seen classes.

        Raises:
            ValueError: the copy has learned too little; the task is then left out of the temperature.
        """
        return {}

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scores of images that this copy has just learned as if each had not been, and their labels.

        Where there is no closed form, as here, a copy learns without some images, see `choose`. The buffers may
        change. None: no image can be left out.
        """
        return None

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        """The buffers' new values without the classes for which `kept`, (C,), is False."""
        tensors = self.tensors()
        return {name: tensors[name][kept.to(tensors[name].device)] for name in self._rows}

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """The buffers' new values where a feature z has become z M, by a `matrix` M, (d, d), float64, on the CPU."""
        return {}

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """The logits as a function of plain PyTorch, with its tensors: how an export keeps the classifier.

        The function stands in a module and uses `torch` alone. It takes z, unit features (n, d), and the tensors by
        name. Here it is `z @ weight.T + bias`; a classifier with other logits gives its own.

        Raises:
            ValueError: the logits are no such map.
        """
        return linear, affine(self)

    @classmethod
    def setting_defaults(cls) -> dict[str, Any]:
        """The constructor's own parameters, those beside `embed_dim` and `logit_scale`, with their defaults."""
        parameters = list(inspect.signature(cls).parameters.values())
        return {p.name: p.default for p in parameters if p.name not in ("embed_dim", "logit_scale")}

    @classmethod
    def follows_drift(cls, settings: Mapping[str, Any]) -> bool:
        """Whether `move` changes what a classifier with these settings stores."""
        return cls.moved is not Classifier.moved

    @classmethod
    def check_update(cls) -> None:
        """Raise a ValueError where `update_classes` cannot take further images of known classes."""
        if cls.learn_more is Classifier.learn_more:
            raise ValueError(f"the {cls.name!r} classifier cannot learn more images of a known class")

    @classmethod
    def file_names(cls) -> tuple[str, str]:
        """Names of the configuration and of the tensors."""
        return f"{cls.file_stem}_config.json", f"{cls.file_stem}.safetensors"

    def settings(self) -> dict[str, Any]:
        """The constructor's own arguments as plain values; an attribute of the same name holds each of them."""
        return {name: getattr(self, name) for name in self.setting_defaults()}

    @torch.no_grad()
    def add_classes(
        self,
        class_names: Sequence[str],
        image_embeds: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | Sequence[int],
        text_embeds: Tensor | np.ndarray | None = None,
    ) -> None:
        """Take in the classes of one task; on any error the classifier is as it was.

        Args:
            class_names: the new classes.
            image_embeds: (n, d), features of the task's images, a tensor or a NumPy array; normalised here.
            labels: (n,), integers that index `class_names`; every class needs at least one image.
            text_embeds: (C_seen, d), of all seen classes, the old ones' rows first, in the order they came;
                normalised here. None will do where `needs_text` is False.

        Raises:
            ValueError: a name is known, a class has no image, a row is zero or not finite, or shapes do not fit.
            TypeError: a name is not a string, or labels are not integers.
        """
        names = list(check_class_names(class_names, self._class_names))
        images = self._unit(image_embeds, "image_embeds")
        texts = None
        if text_embeds is None and self.needs_text:
            raise TypeError(f"the {self.name!r} classifier needs text_embeds of all seen classes; {needing_no_text()}")
        if text_embeds is not None:
            texts = self._unit(text_embeds, "text_embeds", len(self._class_names) + len(names))
        indices = check_labels(labels, len(images), len(names)).to(images.device)
        absent = (torch.bincount(indices, minlength=len(names)) == 0).nonzero()
        if len(absent):
            raise ValueError(f"class {names[int(absent[0])]!r} has no image")
        known, twin = len(self._class_names), self.fork()
        with without_autocast(images):
            twin.install(twin.learn(names, images, indices, texts))
            twin._class_names = self._class_names + names
            scores = twin.judge(images, indices + known)
            if scores is None and type(self).judge is Classifier.judge:
                choices, scores = self._held_back(names, images, indices, texts)
                twin.install(choices)
        twin._calibrate(scores)
        self._adopt(twin)

    @torch.no_grad()
    def update_classes(self, image_embeds: Tensor | np.ndarray, labels: Tensor | np.ndarray | Sequence[int]) -> None:
        """Take in further images, (n, d), of known classes, which `labels` index.

        The result is that of having seen them with the others, up to what the classifier's own documentation says.
        The temperature of the probabilities stays as it is, but for rules that leave each image out (`judge`).

        Raises:
            ValueError: this classifier does not keep what is needed, or the images or labels do not fit.
        """
        self.check_update()
        images = self._unit(image_embeds, "image_embeds")
        indices = check_labels(labels, len(images), len(self._class_names)).to(images.device)
        if len(images):
            twin = self.fork()
            with without_autocast(images):
                twin.install(twin.learn_more(images, indices))
                twin._calibrate(twin.judge(images, indices))
            self._adopt(twin)

    @torch.no_grad()
    def merge(self, other: Classifier) -> Self:
        """Take in what another classifier has learned: its classes and its images, of this one's classes as well.

        The result is that of having seen all images at once, up to what the classifier's own documentation says.
        `other` stays as it is.

        Returns:
            This classifier.

        Raises:
            ValueError: this classifier does not keep what is needed, or the settings or the texts of a class differ.
            TypeError: `other` is no classifier of the same kind.
        """
        if type(self).merged is Classifier.merged:
            raise ValueError(f"the {self.name!r} classifier cannot be merged: what it keeps does not add up")
        check_alike(self, other)
        names = self._class_names + [name for name in other._class_names if name not in set(self._class_names)]
        place = {name: index for index, name in enumerate(names)}
        places = torch.tensor([place[name] for name in other._class_names], dtype=torch.int64)
        changes = self.merged(cast(Self, other), places)
        if "text_embeds" in self._rows:
            new = [name not in self._class_names for name in other._class_names]
            changes["text_embeds"] = torch.cat([self.text_embeds, other.text_embeds[new].to(self.text_embeds)])
        self.install(changes)
        self._class_names = names
        self.calibration += other.calibration
        return self

    @torch.no_grad()
    def forget_class(self, name: str) -> None:
        """Drop a class: its row of every buffer that has one row a class.

        What its images added to a sum over all classes stays there, and so does the temperature.

        Raises:
            ValueError: there is no such class.
        """
        if name not in self._class_names:
            raise ValueError(f"class {name!r:.100} is not known, so it cannot be forgotten")
        self.install(self.forgotten(torch.tensor([known != name for known in self._class_names])))
        self._class_names = [known for known in self._class_names if known != name]

    @torch.no_grad()
    def set_text_embeds(self, text_embeds: Tensor | np.ndarray) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), after the text tower has moved."""
        if "text_embeds" not in self._rows:
            raise ValueError(f"the {self.name!r} classifier keeps no text embeddings")
        self.install({"text_embeds": self._unit(text_embeds, "text_embeds", len(self._class_names))})

    @torch.no_grad()
    def move(self, matrix: Tensor) -> None:
        """Move what is stored of old images by M, (d, d), see `linear_map`: an old feature z is now about z M."""
        if matrix.shape != (self.embed_dim, self.embed_dim) or not torch.isfinite(matrix).all():
            raise ValueError(f"the map must be finite and {(self.embed_dim,) * 2}, got shape {tuple(matrix.shape)}")
        self.install(self.moved(matrix.cpu().double()))

    def _held_back(
        self, names: list[str], images: Tensor, labels: Tensor, texts: Tensor | None
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
        """The choices of `choose` on held-back images of the new task, and their scores and labels."""
        held = hold_back(images, labels)
        known, twin = len(self._class_names), self.fork()
        if not held.any() or known + len(names) < 2:
            return {}, None
        try:
            twin.install(twin.learn(names, images[~held], labels[~held], texts))
            choices = twin.choose(images[held], labels[held] + known)
        except ValueError:  # the images that are left are too few, or cancel out; all of them do not
            return {}, None
        if choices:
            twin.install(choices)
        return choices, (twin.logits(images[held]), labels[held] + known)

    def _calibrate(self, scores: tuple[Tensor, Tensor] | None) -> None:
        """Fit a temperature to the scores and labels of images that they have not learned."""
        if scores is not None:
            self.calibration = calibrated(self.calibration, *scores)

    def _adopt(self, twin: Self) -> None:
        """Become what a fork of this one has become."""
        self._buffers, self._class_names = twin._buffers, twin._class_names
        self._derived, self.calibration = twin._derived, twin.calibration

    def forward(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Logits of all seen classes, (n, C), float32, of features, (n, d), which are normalised here.

        Raises:
            ValueError: there is no class yet, the features do not fit, or a score is not finite.
        """
        if not self._class_names:
            raise ValueError(f"the {self.name!r} classifier has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            logits = self.logits(images)
        if not torch.isfinite(logits).all():
            raise ValueError(f"the {self.name!r} classifier gives scores that are not finite: it is damaged")
        return logits

    def probabilities(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Calibrated probabilities of all seen classes, softmax(logits / `temperature`), (n, C), float32."""
        return (self(image_embeds) / self.temperature).softmax(dim=1)

    @property
    def temperature(self) -> float:
        """T of `probabilities`; 1 where no image could be held back to fit it."""
        return temperature(self.calibration, len(self._class_names))

    def rejection_threshold(self, share: float) -> float:
        """The probability below which an image is taken for none of the classes.

        Args:
            share: false alarms that are accepted, in (0, 1): an image of the known classes, like those of the newest
                tasks, is refused with at most this chance.

        Raises:
            ValueError: the newest tasks have too few images to promise it; the message says how many it takes.

        Reference:
            Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
            Networks", 2017: the largest softmax probability as the score.
        """
        return threshold(self.calibration, "largest", check_share("reject", share, 0.05))

    def prediction_sets(self, image_embeds: Tensor | np.ndarray, coverage: float) -> Tensor:
        """The classes that each image may be of, (n, C) booleans, by split-conformal prediction.

        With a chance of `coverage`, the right one is among them, for images of known classes like those of the newest
        tasks. The most likely one always is.

        Raises:
            ValueError: the newest tasks have too few images to promise it; the message says how many it takes.
        """
        least = threshold(self.calibration, "own", 1 - check_share("coverage", coverage, 0.95))
        found = self.probabilities(image_embeds)
        return (found >= least) | (found == found.amax(dim=1, keepdim=True))

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order they came."""
        return list(self._class_names)

    def extra_repr(self) -> str:
        settings = "".join(f"{name}={value}, " for name, value in self.settings().items())
        return f"embed_dim={self.embed_dim}, {settings}classes={len(self._class_names)}"

    def _unit(self, features: Any, name: str, rows: int | None = None) -> Tensor:
        return unit_features(features, name, self.embed_dim, rows, self.device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `<stem>_config.json` and `<stem>.safetensors`, names that do not collide with an adapter's files."""
        save_classifier(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
    ) -> Self:
        """Load what `save_pretrained` wrote, onto the CPU, from a folder or from a repository on the Hub.

        Raises:
            FileNotFoundError: there is no such folder, repository or revision, or a file is missing from it.
            ValueError: a file is damaged, of another format, or the two do not fit each other.
        """
        return load_classifier(cls, source, revision, token, cache_dir)

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, **options: Any) -> Any:
        """Upload what `save_pretrained` writes to a repository on the Hub; it is made where it does not exist.

        `options` are `private`, `token`, `revision` and `create_pr` of huggingface_hub.
        """
        message = commit_message or f"Upload {self.name} classifier"
        return hub.push(lambda folder, _: self.save_pretrained(folder), repo_id, commit_message=message, **options)
