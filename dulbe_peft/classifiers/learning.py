"""How a classifier learns classes and further images, and what it measures on the images that it leaves out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.answering import Answering, temperature
from dulbe_peft.classifiers.checks import check_labels
from dulbe_peft.classifiers.rule import Rule, added_views, check_can
from dulbe_peft.classifiers.state import State, check_shapes
from dulbe_peft.data.names import check_class_names
from dulbe_peft.utils.torch_settings import float32_by_default, one_thread, without_autocast

if TYPE_CHECKING:
    from dulbe_peft.classifiers.leaving import Left

# Embeddings of single texts, (T, d), and the class of each, (T,).
EachText = tuple[Tensor | np.ndarray, Tensor | np.ndarray | Sequence[int]]
Groups = Tensor | np.ndarray | Sequence[int] | Sequence[str]


class Learning(Answering):
    """What teaches a classifier."""

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
                Other texts of known classes replace theirs, as in `set_text_embeds`.
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
        if "text_embeds" in texts:  # of known classes, they may be other texts than before
            start = start.replaced(self.rule.retold(start, texts["text_embeds"][: -len(names)]))
        start = start.replaced({name: rows for name, rows in texts.items() if name in start})
        if head is not None and "head" in start:
            start = start.replaced(start.with_rows(head=head.to(start.head)))
        with without_autocast(images):
            # The copy without held-out images is freed first, because memory may not suffice for two copies.
            choices, left = self._held_out_choices(start, images, indices, names, groups)
            state = self._with_images(start, images, indices, names, views).replaced(choices)
            if left is None:
                state, left = self.rule.judged(state, images, indices, groups)
        self._adopt(state, left, images, indices, groups)

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
                state, left = self.rule.judged(state, images, indices, groups)
            self._adopt(state, left, images, indices, groups)

    @torch.no_grad()
    def set_text_embeds(self, text_embeds: Tensor | np.ndarray) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), by those of other texts; see `move_texts`."""
        if not self.reads_text:
            raise ValueError(f"the {self.name!r} classifier has no text embeddings")
        texts = self._unit_texts(text_embeds, len(self._class_names))
        self.install({"text_embeds": texts} | self.rule.retold(self.state, texts))

    @torch.no_grad()
    def move_texts(self, text_embeds: Tensor) -> None:
        """Replace the text embeddings of all seen classes, (C_seen, d), by those that the same texts have now.

        Training has moved them. What was measured with them, such as how well the names fit, still counts.
        """
        self.install({"text_embeds": F.normalize(text_embeds, dim=1).to(self.text_embeds)})

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
    ) -> tuple[dict[str, Tensor], Left | None]:
        """Hold out images of the new task; return what the rule chooses on them, and their scores and labels."""
        from dulbe_peft.classifiers.leaving import held_out

        held, left = held_out(images, labels, groups)
        if type(self.rule).judged is not Rule.judged or not held.any() or len(self._class_names) + len(new) < 2:
            return {}, None
        try:
            state = self._with_images(start, images[~held], labels[~held], new)
            choices = self.rule.fitted(state).chosen(images[held], labels[held])
        except ValueError:  # too few images without the held-out ones, or their features cancel out
            return {}, None
        return choices, replace(left, scores=self._scores(state.replaced(choices), images[left.rows]))

    def _adopt(self, state: State, left: Left | None, images: Tensor, labels: Tensor, groups: Tensor | None) -> None:
        """Take over a state that has learned `images`, and update calibration and novelty.

        `left` has the scores of some of the images by a classifier that had not learned them.
        """
        from dulbe_peft.classifiers import calibration, novelty
        from dulbe_peft.classifiers.groups import few_items

        rule, records = self.rule, self.calibration
        if left is not None and left.scores is not None:
            at = partial(temperature, rule, state)
            few = few_items(labels, groups)
            records = calibration.calibrated(records, left.scores, left.labels, labels, at, left.groups, few)
        known, heat = self.novelty_tasks, temperature(rule, state, records)
        measured = novelty.judged(rule, state, known, images, labels, heat, groups, left)
        warning = "" if self._warned else rule.fitted(state).warning
        if warning:
            warnings.warn(warning, stacklevel=3)
            self._warned = True
        self._take(state)
        self.calibration, self.novelty_tasks = records, measured
