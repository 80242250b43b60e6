"""The classifier that users know: a rule, the names of the classes, the tensors, their calibration, and files.

It works on the image and text features of any model, and needs neither peft nor transformers. `rule` says how to write
a classifier of your own.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.classifiers.checks import SAME_TEXT, check_directions, check_labels, check_share, unit_features
from dulbe_peft.classifiers.rule import ABILITIES, LeftOut, Rule, added_views, check_can, setting_defaults
from dulbe_peft.classifiers.state import Fitted, State, check_shapes
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.settings import check_value, field_types
from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import float32_by_default, one_thread, without_autocast

if TYPE_CHECKING:
    from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature
    from dulbe_peft.classifiers.saved import ExtraState

# Embeddings of single texts, (T, d), and the class of each, (T,).
EachText = tuple[Tensor | np.ndarray, Tensor | np.ndarray | Sequence[int]]
Groups = Tensor | np.ndarray | Sequence[int] | Sequence[str]
EXTRA_STATE = "_extra_state"
MOST_SCORES = 2**24  # scores that a temperature is fitted to; of more held-out images, an even selection is used
# Share of the classes that must have left-out images. With 1 to 3 of 100 classes, sets of 90 % held 40 to 61 %.
LEAST_JUDGED = 1 / 3
OF_RULES = {"__init__", "register", "logits", *(each for each in vars(Rule) if each[0] != "_")}
_CLASSES: "dict[type[Rule], type[Classifier]]" = {}  # rule -> the class of its classifiers


class Classifier(nn.Module):
    """A classifier over given features that learns class by class and stores no images.

    A call that raises an error changes nothing. The settings of the rule and the tensors are attributes, too. float64
    tensors stay float64 if the module is converted to another type, and stay on the CPU if a device has no float64.

    Args:
        settings: Those of the rule, of which only `embed_dim` has no default.

    Attributes:
        rule_type: The class of the rule.
        rule: The rule, with its settings.
        name: That of the rule, the key of the classifier in the registry.
        needs_text: That of the rule: whether learning needs text embeddings.
        source: `repo_id` and `commit` on the Hub that it was loaded from, or None.
        calibration: The records of the tasks from which the temperature and thresholds follow.
        novelty_tasks: The records of the tasks from which the novelty follows.
    """

    rule_type: ClassVar[type[Rule]]
    name: ClassVar[str] = ""
    needs_text: ClassVar[bool] = False

    def __init_subclass__(cls, rule: type[Rule] | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if wrong := OF_RULES & vars(cls).keys():
            raise TypeError(
                f"{cls.__name__} defines {', '.join(sorted(wrong))}: define this in a class derived from Rule"
            )
        if rule is None:
            return
        check_rule(rule)
        cls.rule_type, cls.name, cls.needs_text = rule, rule.name, rule.needs_text
        cls.__doc__ = vars(cls).get("__doc__") or rule.__doc__
        cls.__signature__ = inspect.signature(rule)  # type: ignore[attr-defined]
        _CLASSES[rule] = cls

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__()
        if not hasattr(type(self), "rule_type"):
            raise TypeError(f"{type(self).__name__} has no rule: write classifier_of(rule)")
        if isinstance(named.get("logit_scale"), nn.Parameter):
            raise TypeError("logit_scale must be a number, got a Parameter: pass clip.logit_scale.exp().item()")
        self.rule = self.rule_type(*settings, **named)
        if 1 < self.rule.logit_scale < 5:  # a model without a scale has 1
            warnings.warn(
                f"logit_scale={self.rule.logit_scale} is small: CLIP stores the logarithm of its scale, so pass "
                "clip.logit_scale.exp().item()",
                stacklevel=2,
            )
        self.source: dict[str, str] | None = None
        self.calibration: tuple[TaskTemperature, ...] = ()
        self.novelty_tasks: tuple[TaskNovelty, ...] = ()
        with float32_by_default():
            self._layouts = self.rule.layouts()
        if taken := self._layouts.keys() & {*dir(type(self)), *dir(State({}, {}, []))}:
            raise TypeError(f"the {self.name!r} classifier: {min(taken)!r} cannot be the name of a tensor")
        self._class_names: list[str] = []
        self._fitted: dict[type[Fitted], Fitted] = {}
        self._warned = False
        self._take(State(self._layouts, {name: layout.empty() for name, layout in self._layouts.items()}, []))

    def __getattr__(self, name: str) -> Any:
        """Return a tensor or a setting."""
        if (buffers := self.__dict__.get("_buffers")) and name in buffers:
            return buffers[name]
        rule = self.__dict__.get("rule")
        if rule is not None and name in vars(rule):
            return getattr(rule, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Rows of unit vectors are normalised; other values of the state are checked as in files."""
        if "_layouts" in self.__dict__ and has_values():  # not in the constructor, which checks everything itself
            if name in self._layouts and isinstance(value, Tensor):
                if self._layouts[name].unit and value.is_floating_point():
                    value = F.normalize(value.float(), dim=-1).to(value.dtype)
                self._check(self.tensors() | {name: value}, self._class_names)
            elif name in (types := field_types(cast(Any, self.rule_type))):
                value = check_value(f"the {self.name!r} classifier: {name}", types[name], value)
                rule = replace(self.rule, **{name: value})
                if str(rule.layouts()) != str(self._layouts):
                    raise ValueError(f"{name} of a {self.name!r} classifier determines its tensors: make a new one")
                name, value = "rule", rule
        super().__setattr__(name, value)

    @property
    def state(self) -> State:
        """The tensors and the class names, as the functions of the rule take them."""
        return State(self._layouts, self._buffers, self._class_names, self._fitted)  # type: ignore[arg-type]

    def install(self, changes: Mapping[str, Tensor], class_names: Sequence[str] | None = None) -> None:
        """Replace tensors, and the class names if they are given, in one step."""
        self._take(self.state.replaced(changes, class_names))

    def _take(self, state: State) -> None:
        self._buffers = dict(state)
        self._class_names, self._fitted = list(state.class_names), state.fitted

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return dict(self.state)

    @property
    def class_names(self) -> list[str]:
        """All seen classes, in the order in which they were learned."""
        return list(self._class_names)

    @property
    def reads_text(self) -> bool:
        """Whether it uses text embeddings, required or optional."""
        return "text_embeds" in self._layouts

    def settings(self) -> dict[str, object]:
        """Return the settings, without `embed_dim` and `logit_scale`, and their values as plain data."""
        return {name: getattr(self.rule, name) for name in setting_defaults(self.rule_type)}

    @classmethod
    def file_names(cls) -> tuple[str, str]:
        """Return the names of the configuration file and of the tensor file."""
        stem = cls.rule_type.file_stem or cls.name
        return f"{stem}_config.json", f"{stem}.safetensors"

    def extra_repr(self) -> str:
        settings = "".join(f"{name}={value}, " for name, value in self.settings().items())
        return f"embed_dim={self.embed_dim}, {settings}classes={len(self._class_names)}"

    @property
    def device(self) -> torch.device:
        """The device on which features are classified. float64 tensors may be on the CPU instead."""
        return self.state.device

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return self.nbytes_with(len(self._class_names))

    def nbytes_with(self, classes: int) -> int:
        """Return the size of the tensors in bytes for a number of classes, each with as many rows as at present."""
        return self.state.nbytes(classes)

    def fork(self) -> Self:
        """Return a copy that shares the tensors, and can learn without changing this module."""
        twin = copy.copy(self)
        buffers = self.tensors().items()
        twin._buffers = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in buffers}
        return twin

    def __reduce__(self) -> tuple[object, ...]:
        """Name the rule when pickled, because a class made by `classifier_of` is in no module."""
        kind = self.rule_type if _CLASSES[self.rule_type] is type(self) else type(self)
        return _unfilled, (kind,), self.__getstate__()

    def __getstate__(self) -> dict[str, object]:
        """Leave out cached values, which can be computed again."""
        return {**vars(self), "_fitted": {}}

    # Learning

    @torch.inference_mode(False)  # inference tensors could not be used in training later
    @torch.no_grad()
    @one_thread()
    @float32_by_default()
    def add_classes(
        self,
        class_names: Sequence[str],
        image_embeds: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | Sequence[int],
        text_embeds: Tensor | np.ndarray | Sequence[Tensor | None] | None = None,
        each_text: EachText | None = None,
        views: Tensor | None = None,
        head: Tensor | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Learn the classes of one task. After an error, the classifier is as it was before.

        Args:
            class_names: The new classes.
            image_embeds: (n, d), features of the task's images, which are normalised here.
            labels: (n,), integers that index `class_names`. Every class needs at least one image.
            text_embeds: (C_seen, d), text embeddings of all seen classes in the order of learning, new ones included.
                Required if `needs_text` is set; otherwise a class without a text has zeros, or None in a list of rows.
            each_text: (T, d) and (T,), embeddings of single texts and the new class of each, used if `needs_each_text`
                is set. None uses the row of `text_embeds` as the only text of a class.
            views: (n, V, d), unit features of each image and its augmented views. A classifier that keeps sums adds
                each view with the weight 1/V. Settings are chosen on, and other classifiers learn, the images without
                augmentation.
            head: (C_new, d + 1), rows of a linear head that a strategy trained for the new classes, with the bias
                last. Rules that keep a `head` use them.
            groups: (n,), texts or integers; images with the same entry show the same item, burst, site or day. They
                are left out together wherever images are left out: for the temperature, settings, rejection,
                prediction sets and novelty. Images of the same group in other calls are not left out with them.

        Raises:
            ValueError: If names, features or labels are invalid, or a class has no image or no text.
            TypeError: If an argument has a wrong type, or required text embeddings are missing.
        """
        names = list(check_class_names(class_names, self._class_names))
        images = self._unit(image_embeds, "image_embeds")
        texts = self._texts_of(names, text_embeds, each_text)
        indices = check_labels(labels, len(images), len(names)).to(images.device)
        absent = (torch.bincount(indices, minlength=len(names)) == 0).nonzero()
        if len(absent):
            raise ValueError(f"class {names[int(absent[0])]!r} has no image")
        indices = indices + len(self._class_names)  # into all seen classes
        groups = self._groups(groups, indices)
        start = self.fork().state
        start = start.replaced({name: rows for name, rows in texts.items() if name in start})
        if head is not None and "head" in start:
            start = start.replaced(start.with_rows(head=head.to(start.head)))
        with without_autocast(images):
            # The copy without held-out images is freed first, because memory may not suffice for two copies.
            choices, scores = self._held_out_choices(start, images, indices, names, groups)
            state = self._with_images(start, images, indices, names, views).replaced(choices)
            if scores is None:
                state, scores = self.rule.judged(state, images, indices, groups)
        self._adopt(state, scores, images, indices, groups)

    @torch.no_grad()
    @one_thread()
    @float32_by_default()
    def update_classes(
        self,
        image_embeds: Tensor | np.ndarray,
        labels: Tensor | np.ndarray | Sequence[int],
        views: Tensor | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Learn further images of known classes, as if they had been learned together with the others.

        The temperature of the probabilities does not change, except for rules that leave each image out (`judged`).

        Args:
            image_embeds: (n, d), features, which are normalised here.
            labels: (n,), integers that index `class_names`.
            views: See `add_classes`.
            groups: See `add_classes`.

        Raises:
            ValueError: If the classifier cannot learn further images of known classes, or an argument is invalid.
        """
        check_can(self.rule, "update")
        images = self._unit(image_embeds, "image_embeds")
        indices = check_labels(labels, len(images), len(self._class_names)).to(images.device)
        if len(images):
            with without_autocast(images):
                state = self._with_images(self.fork().state, images, indices, [], views)
                groups = self._groups(groups, indices)
                state, scores = self.rule.judged(state, images, indices, groups)
            self._adopt(state, scores, images, indices, groups)

    @torch.no_grad()
    def set_text_embeds(self, text_embeds: Tensor | np.ndarray) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), after the text tower has changed."""
        if not self.reads_text:
            raise ValueError(f"the {self.name!r} classifier has no text embeddings")
        texts = self._unit_texts(text_embeds, len(self._class_names))
        self.install({"text_embeds": texts} | self.rule.retold(self.state, texts))

    @torch.no_grad()
    def move(self, matrix: Tensor) -> None:
        """Map the stored features of old images by M, (d, d), since an old feature z is now about z M.

        `linear_map` computes M.
        """
        if matrix.shape != (self.embed_dim, self.embed_dim) or not torch.isfinite(matrix).all():
            raise ValueError(f"the map must be finite and {(self.embed_dim,) * 2}, got shape {tuple(matrix.shape)}")
        self.install(self.rule.moved(self.state, matrix.cpu().double()))

    @torch.no_grad()
    def follow(self, before: Tensor, after: Tensor, labels: Tensor) -> None:
        """Correct the stored features of old images for the drift of a task, as far as that helps held-out classes.

        The drift is estimated from the task's images, by comparing their x of `Rule.lifted` before and after training.

        Args:
            before: (n, d), unit features of the task's images before the task.
            after: (n, d), their unit features after the task.
            labels: (n,), the images' classes.
        """
        from dulbe_peft.classifiers.drift import chosen_map

        if "follow" in self.rule.can:
            old, new = (self.rule.lifted(self.state, each.detach().cpu().double()) for each in (before, after))
            matrix = chosen_map(old, new, labels)
            if matrix is not None:
                self.install(self.rule.moved(self.state, matrix, lifted=True))

    def _groups(self, groups: Groups | None, labels: Tensor) -> Tensor | None:
        """Check the groups of the images, and put their numbers on the device of the labels."""
        from dulbe_peft.classifiers.groups import check_groups

        numbers = check_groups(groups, len(labels))
        return None if numbers is None else numbers.to(labels.device)

    def _unit(self, features: object, name: str, rows: int | None = None, width: int = 0) -> Tensor:
        return unit_features(features, name, width or self.embed_dim, rows, self.device)

    def _texts_of(self, names: list[str], text_embeds: object, each_text: EachText | None) -> dict[str, Tensor]:
        """Check the text embeddings of seen and new classes, and return them; zeros replace missing optional ones."""
        texts: dict[str, Tensor] = {}
        if self.rule.text_dim and not self.projection.any():
            raise ValueError(
                f"the {self.name!r} classifier has text_dim={self.rule.text_dim} and no projection: set `projection`, "
                f"{(self.rule.text_dim, self.embed_dim)}, the weight of the layer that projects the features"
            )
        if text_embeds is None and self.needs_text:
            raise TypeError(
                f"the {self.name!r} classifier needs text_embeds of all seen classes; bayes, lda and ranpac do not"
            )
        if text_embeds is not None:
            texts["text_embeds"] = self._unit_texts(text_embeds, len(self._class_names) + len(names))
        elif self.reads_text:
            texts["text_embeds"] = F.pad(self.text_embeds, (0, 0, 0, len(names)))
        if self.rule.needs_each_text:
            single = (texts["text_embeds"][-len(names) :], range(len(names))) if each_text is None else each_text
            texts |= self._with_each_text(names, single)
        return texts

    def _unit_texts(self, given: object, rows: int) -> Tensor:
        """Return the texts with unit norm; if the rule allows it, a class without a text, None or zeros, has zeros."""
        if isinstance(given, (list, tuple)):
            nothing = torch.zeros(self.rule.text_dim or self.embed_dim)
            given = torch.stack([nothing if row is None else torch.as_tensor(row) for row in given])
        layout = self._layouts.get("text_embeds")
        if layout is None or not layout.may_be_zero or getattr(given, "ndim", 0) != 2:
            return self._unit(given, "text_embeds", rows, self.rule.text_dim)
        given = torch.as_tensor(given)
        there = (given != 0).any(dim=1, keepdim=True)
        unit = self._unit(given.where(there, torch.ones_like(given)), "text_embeds", rows, self.rule.text_dim)
        return unit * there.to(self.device)

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
        return self.state.with_rows(each_text=rows[owners.argsort(stable=True)], num_texts=counts)

    def _with_images(
        self, state: State, images: Tensor, labels: Tensor, new: list[str], views: Tensor | None = None
    ) -> State:
        """Return the state after learning images of `new` or known classes, whose texts are already there.

        With `views`, sums are taken over the views instead.
        """
        changes = self.rule.added(state, images, labels, new)
        if views is not None and "update" in self.rule.can:
            number = views.shape[1]
            each = self._unit(views.flatten(0, 1), "views", len(labels) * number)
            changes = {**changes, **added_views(self.rule, state, each, labels, new, number)}
        state = state.replaced(changes, [*self._class_names, *new])
        try:
            check_shapes(self._layouts, {name: tuple(tensor.shape) for name, tensor in state.items()}, state.classes)
        except ValueError as error:
            raise ValueError(f"{self.rule_type.__name__} returns tensors that it does not lay out: {error}") from None
        return state

    def _held_out_choices(
        self, start: State, images: Tensor, labels: Tensor, new: list[str], groups: Tensor | None
    ) -> tuple[dict[str, Tensor], LeftOut | None]:
        """Hold out images of the new task; return what the rule chooses on them, and their scores and labels."""
        from dulbe_peft.classifiers.calibration import hold_back
        from dulbe_peft.classifiers.groups import ranking

        held, classes = hold_back(images, labels, groups), len(self._class_names) + len(new)
        if type(self.rule).judged is not Rule.judged or not held.any() or classes < 2:
            return {}, None
        try:
            state = self._with_images(start, images[~held], labels[~held], new)
            choices = self.rule.fitted(state).chosen(images[held], labels[held])
        except ValueError:  # too few images without the held-out ones, or their features cancel out
            return {}, None
        rows = held.nonzero()[:, 0]
        if (step := len(rows) * classes // MOST_SCORES + 1) > 1:
            rows = rows[ranking(images[rows]).argsort()][::step]
        scores = self._scores(state.replaced(choices), images[rows])
        return choices, LeftOut(scores, labels[rows], None if groups is None else groups[rows])

    def _adopt(
        self, state: State, scores: LeftOut | None, images: Tensor, labels: Tensor, groups: Tensor | None
    ) -> None:
        """Take over a state that has learned `images`, and update calibration and novelty.

        `scores` are those of some of the images by a classifier that had not learned them.
        """
        from dulbe_peft.classifiers import calibration, novelty

        rule, records = self.rule, self.calibration
        if scores is not None:
            logits, own, parts, _ = scores
            at = lambda tasks: temperature(self.rule, state, tasks)  # noqa: E731
            records = calibration.calibrated(records, logits, own, labels, at, parts)
        known, heat = self.novelty_tasks, temperature(rule, state, records)
        measured = novelty.judged(rule, state, known, images, labels, heat, groups, scores)
        warning = "" if self._warned else rule.fitted(state).warning
        if warning:
            warnings.warn(warning, stacklevel=3)
            self._warned = True
        self._take(state)
        self.calibration, self.novelty_tasks = records, measured

    # Answering

    def forward(self, image_embeds: Tensor | np.ndarray, sizes: Sequence[int] | None = None) -> Tensor:
        """Normalise features, (n, d), and return the logits of all seen classes, (n, C) in float32.

        With `sizes`, the logits are those that separate calls with parts of so many rows would compute. A matrix
        product rounds differently for another batch size, so the parts are not multiplied together.
        """
        if not self._class_names:
            raise ValueError(f"the {self.name!r} classifier has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            logits = self.logits(images) if sizes is None else torch.cat([*map(self.logits, images.split([*sizes]))])
        if has_values() and not torch.isfinite(logits).all():
            raise ValueError(f"the scores of the {self.name!r} classifier are not finite: it is damaged")
        return logits

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits, (n, C) in float32, of unit features, (n, d) in float32, without checks."""
        return self._scores(self.state, images)

    def _scores(self, state: State, images: Tensor) -> Tensor:
        scores = self.rule.scores(state, images)
        if has_values() and scores.shape != (expected := (len(images), state.classes)):
            raise ValueError(f"the scores of {self.rule_type.__name__} must be {expected}, got {tuple(scores.shape)}")
        return scores

    def left_out(self, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor | None:
        """Return the logits of learned images without their groups, or None; see `Rule.left_out`."""
        return self.rule.left_out(self.state, images, labels, groups)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """Return the logits as a function in plain PyTorch and its tensors; see `Rule.formula`."""
        return self.rule.formula(self.state)

    def probabilities(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Return the probabilities of all seen classes, softmax(logits / `temperature`), (n, C) in float32.

        They can be far off if `calibrated` is False.
        """
        return (self(image_embeds) / self.temperature).softmax(dim=1)

    @property
    def temperature(self) -> float:
        """T of `probabilities`; 1 if no image could be held out to fit it."""
        return temperature(self.rule, self.state, self.calibration)

    @property
    def calibrated(self) -> bool:
        """Whether images that the scores had not learned determined `temperature`; True for a single class.

        `bayes` is calibrated, too, if its texts explain some of the labels.
        """
        known = bool(self.calibration) or len(self._class_names) < 2 or self.rule.fitted(self.state).calibrated
        return known and not self._few()

    def _few(self) -> str:
        """Return "3 of 100 classes" if fewer than a third of the classes have images that were left out, or ""."""
        classes, judged = len(self._class_names), len(self._class_names)
        if not self.calibration or classes < 2:
            return ""
        from dulbe_peft.classifiers.calibration import KEPT

        if "counts" in self.state:
            judged = int((self.counts > 1).sum())
        if len(self.calibration) < KEPT and all(task.judged for task in self.calibration):
            judged = min(judged, sum(task.judged for task in self.calibration))
        return f"{judged} of {classes} classes" if judged < LEAST_JUDGED * classes else ""

    def _check_many(self, what: str) -> None:
        """Raise a `ValueError` that says `what` is not possible if few classes would speak for all."""
        if self._few():
            raise ValueError(f"{what}: {self.doubt}")

    @property
    def wrong_labels(self) -> tuple[float, float, float] | None:
        """The share of the learned labels that look wrong and the ends of its 95 % interval, from 0 to 1.

        It is estimated from images that were left out: a label is wrong with this probability, and then each other
        class is equally likely. Labels that are confused with a similar class cannot be told from classes that are
        alike. None if no image could be left out.
        """
        from dulbe_peft.classifiers.calibration import share_of_wrong_labels

        return share_of_wrong_labels(self.calibration)

    @property
    def doubt(self) -> str:
        """A sentence that says why the probabilities can be far off, or "" if they are calibrated."""
        if self.calibrated:
            return ""
        if few := self._few():
            return (
                f"only {few} have images that could be left out to calibrate the probabilities of the {self.name!r} "
                "classifier, so they can be far off for the others: learn at least two images of more classes"
            )
        return (
            f"no image could be left out to calibrate the probabilities of the {self.name!r} classifier, so they can "
            "be far off: learn a class with two images or more beside another class"
        )

    @torch.no_grad()
    def novelty(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Return the novelty of each image, (n,) in float64: the larger, the less it resembles the known classes.

        Classifiers that keep means, counts and scatter, such as `lda`, `gda` and `bayes`, compute it as described in
        `classifiers.novelty`. For others it is 1 minus the largest probability.
        """
        from dulbe_peft.classifiers.novelty import novelty, sums_of

        if sums_of(self.rule, self.state) is None:
            return 1 - self.probabilities(image_embeds).amax(dim=1).double()
        images = self._unit(image_embeds, "image_embeds")
        return novelty(self.rule, self.state, self.novelty_tasks, images, self(image_embeds) / self.temperature)

    def refused(self, image_embeds: Tensor | np.ndarray, share: float) -> Tensor:
        """Return which images are rejected because their novelty is too large, (n,) in bool.

        An image of a known class, drawn like those of the newest tasks, is rejected with a probability of about
        `share` or less, see `calibration.threshold`.

        Raises:
            ValueError: If the newest tasks have too few images for this, or few classes would speak for all, see
                `doubt`. The message says what is needed.
        """
        from dulbe_peft.classifiers.novelty import novelty_threshold, sums_of

        share = check_share("reject", share, 0.05)
        self._check_many("no image can be rejected")
        if sums_of(self.rule, self.state) is None or not any(task.novelties for task in self.novelty_tasks):
            return self.probabilities(image_embeds).amax(dim=1) < self.rejection_threshold(share)
        return self.novelty(image_embeds) > novelty_threshold(self.novelty_tasks, share)

    @property
    def roc_area(self) -> float | None:
        """Area under the ROC curve: how often an image of an unknown class is more novel than one of a known class.

        It is estimated by leaving out each class in turn. 1/2 means that novelty does not separate them. None if it
        is not known, or if few classes would speak for all, see `doubt`.
        """
        from dulbe_peft.classifiers.novelty import roc_area

        return None if self._few() else roc_area(self.novelty_tasks)

    def rejection_threshold(self, share: float) -> float:
        """Return the threshold of the largest probability for rejecting at most a fraction `share` of known images.

        An image of a known class, drawn like those of the newest tasks, is below it with a probability of about
        `share` or less, see `calibration.threshold`.

        Reference:
            Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
            Networks", 2017: the largest softmax probability as the score.
        """
        from dulbe_peft.classifiers.calibration import threshold

        share = check_share("reject", share, 0.05)
        self._check_many("no image can be rejected")
        return threshold(self.calibration, "largest", share)

    def prediction_sets(self, image_embeds: Tensor | np.ndarray, coverage: float) -> Tensor:
        """Return the prediction set of each image, (n, C) in bool, by conformal prediction.

        For images of known classes, drawn like those of the newest tasks, it contains the true class with a
        probability of about `coverage` or more, see `calibration.threshold`. It always contains the most likely class.

        Raises:
            ValueError: If the newest tasks have too few images for this, or few classes would speak for all, see
                `doubt`. The message says what is needed.
        """
        from dulbe_peft.classifiers.calibration import threshold

        missed = 1 - check_share("coverage", coverage, 0.95)
        self._check_many("no prediction sets are possible")
        least = threshold(self.calibration, "own", missed)
        probabilities = self.probabilities(image_embeds)
        return (probabilities >= least) | (probabilities == probabilities.amax(dim=1, keepdim=True))

    # Corrections

    @torch.no_grad()
    def merge(self, other: Self) -> Self:
        """Merge another classifier into this one, as if this one had learned all images, and return this one.

        The two must have the same class, settings and texts, and keep sums over images.
        """
        check_can(self.rule, "merge")
        check_alike(self, other)
        self._take(self._merged(self.state, other.state))
        # Scores and novelties measured for each classifier alone guarantee nothing for the merged one. Temperatures
        # and their weights are kept.
        tasks, measured = (*self.calibration, *other.calibration), (*self.novelty_tasks, *other.novelty_tasks)
        self.calibration = tuple(task.model_copy(update={"own": (), "largest": ()}) for task in tasks)
        self.novelty_tasks = tuple(task.model_copy(update={"novelties": (), "area": None}) for task in measured)
        return self

    def _merged(self, state: State, other: State) -> State:
        names = list(dict.fromkeys([*state.class_names, *other.class_names]))
        place = {name: index for index, name in enumerate(names)}
        places = torch.tensor([place[name] for name in other.class_names], dtype=torch.int64)
        changes = self.rule.merged(state, other, places)
        if self.reads_text:
            new = other.text_embeds[places >= state.classes]
            changes["text_embeds"] = torch.cat([state.text_embeds, new.to(state.text_embeds)])
        return state.replaced(changes, names)

    @torch.no_grad()
    def forget_class(self, name: str) -> None:
        """Remove a class and its rows of every tensor that has rows for classes.

        The contribution of its images to sums over all classes remains, unless the rule overrides `forgotten`. What
        was measured on held-out images, such as temperatures, stays. Without its last class, a classifier is like a
        new one.
        """
        self._place(name, "forgotten")
        kept = torch.tensor([known != name for known in self._class_names])
        changes = self.rule.forgotten(self.state, kept)
        names = [known for known in self._class_names if known != name]
        if not names:
            changes = type(self)(embed_dim=self.embed_dim, logit_scale=self.logit_scale, **self.settings()).tensors()
            self.calibration, self.novelty_tasks = (), ()
        self.install(changes, names)

    @torch.no_grad()
    def forget_image(self, image_embed: Tensor, name: str) -> None:
        """Remove one learned image from its class: up to rounding, the result is as if it had not been learned.

        What was measured on held-out images, such as temperatures, stays.

        Args:
            image_embed: (d,), the unit feature of the image.
            name: The class of the image.
        """
        check_can(self.rule, "forget images")
        place, state = self._place(name, "forgotten"), self.state
        if "counts" in state and int(state.counts[place]) < 2:
            raise ValueError(f"class {name!r:.100} has only one image: forget the class instead")
        image = self._unit(image_embed[None], "image_embed", 1)
        changes = self.rule.without(state, image, torch.tensor([place], device=image.device))
        if "sums" in changes:
            check_directions(changes["sums"][[place], : self.embed_dim], [name])
        self.install(changes)

    @torch.no_grad()
    def rename_class(self, old: str, new: str, text_embed: Tensor | None = None) -> None:
        """Rename a class, and replace its text embedding if the classifier has one.

        A rule that is computed from sums and current texts is then as if it had been learned with the new name.
        Anything else that was trained or chosen with the old text does not change.

        Args:
            old: The present name.
            new: The new name.
            text_embed: (d,), unit text embedding of the new name. Required if the classifier has those of others.
        """
        place, changes = self._place(old, "renamed"), {}
        if self.rule.needs_each_text:
            raise ValueError(
                f"the {self.name!r} classifier was trained with the texts of its classes and cannot rename one: "
                "learn again"
            )
        if self.reads_text and (self.needs_text or text_embed is not None or self.text_embeds.any()):
            if text_embed is None:
                raise TypeError(f"the {self.name!r} classifier needs the text embedding of {new!r:.100}")
            changes["text_embeds"] = self.text_embeds.clone()
            changes["text_embeds"][place] = self._unit(text_embed[None], "text_embed", 1, self.rule.text_dim)[0]
            changes |= self.rule.retold(self.state, changes["text_embeds"])
        self.install(changes, [new if known == old else known for known in self._class_names])

    @torch.no_grad()
    def join_classes(self, old: str, new: str) -> None:
        """Add the images of class `old` to class `new`: split off the state of `old`, and merge it again."""
        check_can(self.rule, "merge")
        kept = torch.arange(len(self._class_names)) == self._place(old, "joined")
        text, state = self._place(new, "joined"), self.state
        # Tensors that do not belong to single classes stay in `rest` and are zero in `part`, so they count once.
        rows = self.rule.forgotten(state, kept)
        rows = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name not in rows} | rows
        part = state.replaced(rows, [new])
        if self.reads_text:
            own = self.text_embeds[[text]]
            part = part.replaced({"text_embeds": own} | self.rule.retold(part, own))
        rest = state.replaced(self.rule.forgotten(state, ~kept), [n for n in self._class_names if n != old])
        self._take(self._merged(rest, part))

    def _place(self, name: str, what: str) -> int:
        if name not in self._class_names:
            raise ValueError(f"class {name!r:.100} is not known, so it cannot be {what}")
        return self._class_names.index(name)

    # State dict and files

    def _extra(self) -> "ExtraState":
        from dulbe_peft.classifiers.saved import ExtraState

        facts: Any = {name: getattr(self, name) for name in ExtraState.model_fields}
        return ExtraState(**facts)

    def get_extra_state(self) -> Tensor:
        return self._extra().to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        from dulbe_peft.classifiers.saved import ExtraState

        extra = ExtraState.from_tensor(state)
        self._class_names = extra.class_names
        self.calibration, self.novelty_tasks = extra.calibration, extra.novelty_tasks

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        device, solved = (
            fn(torch.zeros(1, device=self.device)).device,
            vars(self.rule.fitted(self.state)).get("solved", {}),
        )
        moved = {name: tensor.to(device) for name, tensor in solved.items()}
        self._fitted = {}

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dtype != torch.float64 or tensor.is_meta:
                return fn(tensor)
            device = fn(torch.zeros(1, device=tensor.device)).device
            return tensor if device.type == "mps" else tensor.to(device)

        super()._apply(convert, recurse)
        if moved:
            self.rule.fitted(self.state).keep(solved=moved)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize to the number of classes in the state. An incomplete or inconsistent state changes nothing."""
        from dulbe_peft.classifiers.saved import ExtraState

        _, _, missing_keys, _, error_msgs = rest
        missing = [prefix + key for key in (*self._layouts, EXTRA_STATE) if prefix + key not in state_dict]
        if missing:
            missing_keys += missing
            return
        state = {key: state_dict[prefix + key] for key in self._layouts}
        try:
            extra = ExtraState.from_tensor(state_dict[prefix + EXTRA_STATE])
            self._check(state, extra.class_names)
        except (ValueError, TypeError) as error:
            error_msgs.append(f"state is inconsistent: {error}")
            return
        for key, buffer in self.tensors().items():
            device = state[key].device if buffer.is_meta else buffer.device
            self._buffers[key] = buffer.new_empty(state[key].shape, device=device)
        self._fitted = {}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check(self, tensors: Mapping[str, Tensor], class_names: list[str]) -> None:
        state = State(self._layouts, tensors, class_names)
        state.check()
        self.rule.check(state)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `<stem>_config.json` and `<stem>.safetensors`, which can be in the same folder as an adapter.

        Raises:
            ValueError: If a tensor is not valid, because it was written to in place. Nothing is written.
        """
        from dulbe_peft.classifiers import saved

        self._check(self.tensors(), self._class_names)
        self._fitted = {}  # values written through .data, which torch does not count, are saved, too
        facts = {name: getattr(self, name) for name in ("name", "embed_dim", "logit_scale", "source")}
        config = saved.SavedClassifier(**dict(self._extra()), **facts, settings=self.settings())
        saved.write(folder, self.file_names(), config, self.tensors(), self.rule.fitted(self.state).solved)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, cache_dir: str | None = None
    ) -> Self:
        """Load a saved classifier onto the CPU.

        Args:
            source: Folder of `save_pretrained`, or repository on the Hub.
            revision: Revision on the Hub.
            token: Access token for the Hub.
            cache_dir: Folder for downloads.

        Raises:
            FileNotFoundError: If the folder, the repository, its revision or a file does not exist.
            ValueError: If a file is damaged or has another format, or the two files do not belong together.
        """
        from dulbe_peft.classifiers import saved

        loaded = saved.read(cls.__name__, cls.rule_type, cls.file_names(), source, (revision, token, cache_dir))
        with torch.device("meta"):
            classifier = cls(**loaded.arguments)
        tensors = {name: loaded.state[name].to(layout.dtype) for name, layout in classifier._layouts.items()}
        classifier._take(State(classifier._layouts, tensors, loaded.config.class_names))
        for name in ("calibration", "novelty_tasks", "source"):
            setattr(classifier, name, getattr(loaded.config, name))
        if loaded.solved:
            solved = {name: tensor.float() for name, tensor in loaded.solved.items()}
            classifier.rule.fitted(classifier.state).keep(solved=solved)
        return classifier.eval()

    def push_to_hub(self, repo_id: str, *, commit_message: str | None = None, **options: Any) -> Any:
        """Upload the files of `save_pretrained` to a repository on the Hub, which is created if it does not exist.

        `options` are the arguments `private`, `token`, `revision` and `create_pr` of huggingface_hub.
        """
        from dulbe_peft.utils import hub

        message = commit_message or f"Upload {self.name} classifier"
        return hub.push(lambda folder, _: self.save_pretrained(folder), repo_id, commit_message=message, **options)


def temperature(rule: Rule, state: State, tasks: Sequence["TaskTemperature"]) -> float:
    """Return T of the probabilities: that of the rule, or else that which follows from the records of the tasks."""
    from dulbe_peft.classifiers import calibration

    own = rule.fitted(state).temperature
    return calibration.temperature(tasks, state.classes) if own is None else own


def classifier_of(rule: type[Rule] | type[Classifier]) -> type[Classifier]:
    """Return the class of the classifiers with a rule. Its constructor takes the settings of the rule.

    A class that has a rule is returned as it is.

    Raises:
        TypeError: If `rule` is not a dataclass derived from `Rule`.
    """
    if isinstance(rule, type) and issubclass(rule, Classifier) and hasattr(rule, "rule_type"):
        return rule
    check_rule(rule)
    assert issubclass(rule, Rule)
    if rule not in _CLASSES:
        name = f"{rule.__name__.removesuffix('Rule')}Classifier"
        type(name, (Classifier,), {"__module__": rule.__module__}, rule=rule)  # puts itself there
    return _CLASSES[rule]


def check_rule(rule: object) -> None:
    """Raise a `TypeError` unless `rule` is a dataclass derived from `Rule`."""
    if not (isinstance(rule, type) and issubclass(rule, Rule)) or "__dataclass_fields__" not in vars(rule):
        raise TypeError(f"a rule must be a class derived from Rule with @dataclass(frozen=True), got {rule!r:.100}")
    if wrong := rule.can - ABILITIES.keys():
        raise TypeError(f"{rule.__name__}.can must be of {', '.join(ABILITIES)}, got {min(wrong)!r:.100}")


def _unfilled(kind: type[Rule] | type[Classifier]) -> Classifier:
    """Return a classifier without attributes, which pickle sets."""
    cls = kind if issubclass(kind, Classifier) else classifier_of(kind)
    return cls.__new__(cls)


def check_alike(one: Classifier, other: Classifier) -> None:
    """Raise an error unless two classifiers have the same class, settings and texts, so that they can be merged."""
    if other is one:
        raise ValueError(f"a {one.name!r} classifier cannot be merged with itself: its images would count twice")
    if other.rule_type is not one.rule_type:
        raise TypeError(
            f"a {one.name!r} classifier can be merged only with a {type(one).__name__}, got {type(other).__name__}"
        )
    settings = [{"embed_dim": c.embed_dim, "logit_scale": c.logit_scale, **c.settings()} for c in (one, other)]
    for name in settings[0] | settings[1]:
        mine, theirs = (each.get(name) for each in settings)
        if mine != theirs:
            raise ValueError(f"two {one.name!r} classifiers to merge need the same {name}, got {mine} and {theirs}")
    if "text_embeds" in one.tensors():
        texts = dict(zip(other.class_names, other.text_embeds, strict=True))
        for name, text in zip(one.class_names, one.text_embeds, strict=True):
            if name in texts and not torch.allclose(text, texts[name].to(text), atol=SAME_TEXT):
                raise ValueError(f"the text embeddings of class {name!r} differ, so they cannot be merged")
    if "projection" in one.tensors() and not torch.allclose(one.projection, other.projection.to(one.projection)):
        raise ValueError(f"the projections of the two {one.name!r} classifiers differ, so they cannot be merged")
