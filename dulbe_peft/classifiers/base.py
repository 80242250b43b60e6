"""What all classifiers share: checks, growth, calibrated probabilities, forgetting, drift. A classifier is its rule.

    class MyClassifier(Classifier):      name = "mine"
        __init__                         register_rows (one row a class), register_buffer (shared)
        learn                            the buffers' new values for a task of new classes
        logits                           unit features to scores
        formula                          the scores as a line of PyTorch, where they are not linear in the features

Works on any model's image and text features, and needs neither peft nor transformers.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional as F

from dulbe_peft.classifiers.calibration import TaskTemperature, fit_task, hold_back, rejection_threshold, temperature
from dulbe_peft.classifiers.checks import check_labels, positive
from dulbe_peft.classifiers.files import SavedState
from dulbe_peft.classifiers.formula import AFFINE, affine
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.checks import check_int
from dulbe_peft.utils.precision import without_autocast

MOST_LOGIT_SCALE = 1e30  # logits stay finite in float32


class Classifier(SavedState):
    """A classifier over given features that learns class by class and keeps no image.

    A call that raises changes nothing.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau itself, 100 for CLIP, never its logarithm.

    Attributes:
        needs_text: whether `add_classes` needs text embeddings.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """

    needs_text: ClassVar[bool] = False

    def __init__(self, embed_dim: int, logit_scale: float = 100.0) -> None:
        super().__init__(check_int("embed_dim", embed_dim, 2), positive("logit_scale", logit_scale))
        if self.logit_scale > MOST_LOGIT_SCALE:
            raise ValueError(f"logit_scale must be at most {MOST_LOGIT_SCALE:g}, got {self.logit_scale:g}")

    # ------------------------------------------------------------------ what a subclass fills

    @abstractmethod
    def learn(
        self, names: Sequence[str], images: torch.Tensor, labels: torch.Tensor, texts: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The buffers' new values for a task of new classes; changes nothing itself.

        Args:
            names: the new classes.
            images: (n, d), float32, unit features, on the classifier's device.
            labels: (n,), integers that index `names`; every class has at least one image.
            texts: (C_seen, d), float32, unit embeddings of all seen classes, the old ones' first; None where no text
                was given.

        Returns:
            Values of the buffers that change, by name.
        """
        raise NotImplementedError

    @abstractmethod
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of unit features, (n, d) in float32 to (n, C) in float32."""
        raise NotImplementedError

    def learn_more(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffers' new values for further images of known classes; `labels` index all seen classes."""
        raise NotImplementedError

    def check_update(self, class_names: Sequence[str]) -> None:
        """Raise a ValueError where `update_classes` cannot take further images of these known classes."""
        if type(self).learn_more is Classifier.learn_more:
            raise ValueError(
                f"the {self.name!r} classifier cannot learn more images of a known class: it does not keep what that "
                "needs"
            )

    def choose(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Buffers whose values are chosen on held-back images; called on a copy that learned without these images.

        Of what is `derived` from the buffers, these may change "solution" alone.

        Args:
            images: (n, d), unit features of new classes.
            labels: (n,), integers that index all seen classes.

        Raises:
            ValueError: the copy has learned from too little to speak for the whole; the task is then left out of the
                temperature.
        """
        return {}

    @property
    def follows(self) -> bool:
        """Whether it can move what it stores along with the features, see `moved`."""
        return type(self).moved is not Classifier.moved

    def moved(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffers' new values where a feature z has become z M; none where nothing stored depends on it.

        Args:
            matrix: M, (d, d), float64, on the CPU or on the classifier's device.
        """
        return {}

    def formula(self) -> tuple[str, dict[str, torch.Tensor]]:
        """The logits as a line of PyTorch, with the tensors that it needs: how an export keeps the classifier.

        Returns:
            An expression in `z`, unit features (n, d), `t`, the tensors by name, and `torch`; and the tensors. Here it
            is `z @ t["weight"].T + t["bias"]`; a classifier whose logits are no such map gives its own.

        Raises:
            ValueError: the logits are no such map.
        """
        return AFFINE, affine(self)

    # ------------------------------------------------------------------ learning

    @torch.no_grad()
    def add_classes(
        self,
        class_names: Sequence[str],
        image_embeds: torch.Tensor,
        labels: torch.Tensor | Sequence[int],
        text_embeds: torch.Tensor | None = None,
    ) -> None:
        """Take in the classes of one task; on any error the classifier is as it was.

        Args:
            class_names: the new classes.
            image_embeds: (n, d), features of the task's images; normalised here.
            labels: (n,), integers that index `class_names`; every class needs at least one image.
            text_embeds: (C_seen, d), of all seen classes, the old ones' rows first, in the order they came, then the
                new ones'; normalised here. The old classes' embeddings are replaced by them. None will do where
                `needs_text` is False.

        Raises:
            ValueError: a name is empty, repeated or already known, a class has no image, a label is out of range, a
                row is zero or not finite, or the shapes do not fit.
            TypeError: a name is not a string, or labels are not integers.
        """
        names = list(check_class_names(class_names, self._class_names))
        images = self._unit(image_embeds, "image_embeds")
        texts = None
        if text_embeds is not None or self.needs_text:
            texts = self._unit(text_embeds, "text_embeds", len(self._class_names) + len(names))
        indices = check_labels(labels, len(images), names).to(images.device)
        absent = (torch.bincount(indices, minlength=len(names)) == 0).nonzero()
        if len(absent):
            raise ValueError(f"class {names[int(absent[0])]!r} has no image")
        with without_autocast(images):
            changes = self.learn(names, images, indices, texts)
            choices, temperatures = self._hold_back(names, images, indices, texts)
        self._install({**changes, **choices}, self._class_names + names, self._calibration + temperatures)

    @torch.no_grad()
    def update_classes(self, image_embeds: torch.Tensor, labels: torch.Tensor | Sequence[int]) -> None:
        """Take in further images of known classes; on any error the classifier is as it was.

        The result is that of having seen them with the others, up to what the classifier's own documentation says.
        The temperature of the probabilities stays as it is.

        Args:
            image_embeds: (n, d), features; normalised here.
            labels: (n,), integers that index `class_names`.

        Raises:
            ValueError: this classifier does not keep what is needed, or the images or labels do not fit.
        """
        images = self._unit(image_embeds, "image_embeds")
        indices = check_labels(labels, len(images), self._class_names).to(images.device)
        self.check_update([self._class_names[index] for index in indices.unique().tolist()])
        if len(images):
            with without_autocast(images):
                self._install(self.learn_more(images, indices))

    @torch.no_grad()
    def forget_class(self, name: str) -> None:
        """Drop a class: its row of every buffer that has one row a class.

        What the class's images added to a shared matrix stays there: LDA's covariance, the Gram matrix of ridge and
        RanPAC. Those matrices are sums over all classes, from which one class's part cannot be told. The temperature
        of the probabilities stays too.

        Raises:
            ValueError: there is no such class.
        """
        if name not in self._class_names:
            raise ValueError(f"class {name!r:.100} is not known, so it cannot be forgotten")
        kept = torch.tensor([known != name for known in self._class_names])
        rows = {key: self.tensors()[key][kept.to(self.tensors()[key].device)] for key in self._rows}
        self._install(rows, [known for known in self._class_names if known != name])

    @torch.no_grad()
    def set_text_embeds(self, text_embeds: torch.Tensor) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), after the text tower has moved.

        Raises:
            ValueError: this classifier keeps no texts, the shape does not fit, or a row is zero or not finite.
        """
        if "text_embeds" not in self._rows:
            raise ValueError(f"the {self.name!r} classifier keeps no text embeddings")
        self._install({"text_embeds": self._unit(text_embeds, "text_embeds", len(self._class_names))})

    @torch.no_grad()
    def move(self, matrix: torch.Tensor) -> None:
        """Move what is stored of old images along with the features, by the map that `linear_map` gives.

        Args:
            matrix: M, (d, d): an old feature z is now about z M.

        Raises:
            ValueError: the shape does not fit, or an entry is not finite.
        """
        size = (self.embed_dim, self.embed_dim)
        if not isinstance(matrix, torch.Tensor) or not matrix.is_floating_point() or matrix.shape != size:
            got = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
            raise ValueError(f"the map must be floating-point {size}, got {got}")
        if not torch.isfinite(matrix).all():
            raise ValueError("the map holds NaN or infinity")
        self._install(self.moved(matrix.cpu().double()))

    def _hold_back(
        self, names: list[str], images: torch.Tensor, labels: torch.Tensor, texts: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], tuple[TaskTemperature, ...]]:
        """What is fitted on held-back images of the new task: the choices of `choose`, and a temperature."""
        held = hold_back(images, labels)
        classes = len(self._class_names) + len(names)
        if not held.any() or classes < 2:
            return {}, ()
        twin = self.fork()
        try:
            twin._install(twin.learn(names, images[~held], labels[~held], texts))
            images, labels = images[held], labels[held] + len(self._class_names)
            choices = twin.choose(images, labels)
        except ValueError:  # the images that are left are too few, or cancel out; all of them do not
            return {}, ()
        derived = twin._derived
        twin._install(choices)
        twin._derived = {name: value for name, value in derived.items() if name != "solution"}
        return choices, (fit_task(twin.logits(images), labels),)

    def fork(self) -> Self:
        """A classifier with the same classes that can learn on without changing this one; tensors are shared."""
        twin = copy.copy(self)
        twin._buffers, twin._derived = dict(self._buffers), {}
        return twin

    def _install(
        self,
        changes: Mapping[str, torch.Tensor],
        names: list[str] | None = None,
        calibration: tuple[TaskTemperature, ...] | None = None,
    ) -> None:
        """Put new values of buffers, class names and calibration in, all at once; None leaves one as it is."""
        buffers = dict(self._buffers)
        for name, value in changes.items():
            buffer = buffers[name]
            assert buffer is not None
            buffers[name] = value.to(buffer.dtype).to(buffer.device)
        # One call, so that Ctrl-C comes before it or after it.
        self.__dict__.update(
            _buffers=buffers,
            _derived={},
            _class_names=self._class_names if names is None else names,
            _calibration=self._calibration if calibration is None else calibration,
        )

    # ------------------------------------------------------------------ using

    def forward(self, image_embeds: torch.Tensor) -> torch.Tensor:
        """Logits of all seen classes, without the calibration's temperature.

        Args:
            image_embeds: (n, d), features; normalised here.

        Returns:
            (n, C), float32.

        Raises:
            ValueError: there is no class yet, the shape does not fit, or a row is zero or not finite.
        """
        if not self._class_names:
            raise ValueError(f"the {self.name!r} classifier has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            return self.logits(images)

    def probabilities(self, image_embeds: torch.Tensor) -> torch.Tensor:
        """Calibrated probabilities of all seen classes, softmax(logits / `temperature`).

        Args:
            image_embeds: (n, d), features; normalised here.

        Returns:
            (n, C), float32; rows sum to 1.
        """
        return (self(image_embeds) / self.temperature).softmax(dim=1)

    @property
    def temperature(self) -> float:
        """T of `probabilities`; 1 where no image could be held back to fit it."""
        return temperature(self._calibration, len(self._class_names))

    def rejection_threshold(self, share: float) -> float:
        """The probability below which an image is taken for none of the classes.

        Args:
            share: false alarms that are accepted, in (0, 1): so many of the held-back training images of the known
                classes had a smaller largest probability when their task was learned.

        Raises:
            ValueError: no image could be held back, or the share is out of range.

        Reference:
            Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
            Networks", 2017: the largest softmax probability as the score.
        """
        return rejection_threshold(self._calibration, share, len(self._class_names))

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order they came."""
        return list(self._class_names)

    @property
    def state_size(self) -> int:
        """Numbers kept."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @property
    def nbytes(self) -> int:
        """Bytes that the kept numbers take."""
        return self.nbytes_with(len(self._class_names))

    def nbytes_with(self, classes: int) -> int:
        """Bytes that the kept numbers take with so many classes."""
        total = 0
        for name, tensor in self.tensors().items():
            numbers = classes * math.prod(tensor.shape[1:]) if name in self._rows else tensor.numel()
            total += numbers * tensor.element_size()
        return total

    @property
    def device(self) -> torch.device:
        """Where features are taken to; float64 buffers may have to stay on the CPU."""
        tensors = list(self.tensors().values())
        return next((tensor for tensor in tensors if tensor.dtype != torch.float64), tensors[0]).device

    def extra_repr(self) -> str:
        settings = "".join(f"{name}={value}, " for name, value in self.settings().items())
        return f"embed_dim={self.embed_dim}, {settings}classes={len(self._class_names)}"

    def _unit(self, features: Any, name: str, rows: int | None = None) -> torch.Tensor:
        """`features` at unit norm, in float32, on the classifier's device; raises for what cannot be normalised."""
        if not isinstance(features, torch.Tensor) or not features.is_floating_point():
            raise TypeError(
                f"{name} must be a floating-point tensor, got {getattr(features, 'dtype', type(features))}"
            )
        if features.ndim != 2 or features.shape[1] != self.embed_dim:
            raise ValueError(f"{name} must be (rows, {self.embed_dim}), got shape {tuple(features.shape)}")
        if rows is not None and len(features) != rows:
            raise ValueError(f"{name} must have {rows} rows, one per seen class in order, got {len(features)}")
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        largest = features.abs().amax(dim=1, keepdim=True)
        for problem, bad in (("holds NaN or infinity", ~torch.isfinite(largest)), ("is zero", largest == 0)):
            if bad.any():
                raise ValueError(f"{name} row {int(bad.nonzero()[0, 0])} {problem}")
        # Scaled first: the squares of large or tiny entries leave float32's range.
        scaled = (features / largest).to(self.device, torch.float32)
        return F.normalize(scaled, dim=1)
