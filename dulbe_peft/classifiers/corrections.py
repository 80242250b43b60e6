"""Change a classifier after it has learned: merge another one, forget, join and rename classes, forget images."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dulbe_peft.classifiers.checks import check_alike, unit_features
from dulbe_peft.classifiers.state import CLASSES, GrowingState


class CorrectedState(GrowingState):
    """The part of a classifier that corrects what was learned. A call that raises an error changes nothing."""

    needs_each_text: ClassVar[bool] = False
    adds_up: ClassVar[tuple[str, ...] | None] = None  # buffers that `merged` adds; None if merging is not possible

    @property
    def reads_text(self) -> bool:
        """Whether it uses text embeddings, required or optional."""
        return "text_embeds" in self._axes

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        """Return the buffers' new values after merging another classifier with the same settings.

        The default adds the buffers in `adds_up`. The caller merges `text_embeds`.

        Args:
            other: The other classifier.
            places: (C_other,), index of each class of `other` among the merged classes. These are the classes of this
                classifier, then those that only the other one has.
        """
        sums = self.tensors() | self.with_new_rows(int((places >= len(self._class_names)).sum()))
        for name in (names := self.adds_up or ()):
            theirs, at = other.tensors()[name].to(sums[name]), places.to(sums[name].device)
            sums[name] = sums[name].index_add(0, at, theirs) if name in self._axes else sums[name] + theirs
        return {name: sums[name] for name in names}

    def sums_without(self, row: Tensor, label: int) -> dict[str, Tensor]:
        """Return `sums` and `counts` without the `row` of one image of a class; see `without_image`."""
        sums, counts = self.sums.clone(), self.counts.clone()
        sums[label] -= row.to(sums)
        counts[label] -= 1
        return {"sums": sums, "counts": counts}

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        """Return the buffers' new values without the classes for which `kept`, (C,), is False."""
        tensors, changes = self.tensors(), {}
        for name, axes in self._axes.items():
            changes[name] = tensors[name]
            for place, axis in enumerate(axes):
                if axis == CLASSES or axis in tensors:
                    rows = kept if axis == CLASSES else kept.repeat_interleave(tensors[axis].cpu())
                    changes[name] = changes[name][(slice(None),) * place + (rows.to(tensors[name].device),)]
        return changes

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        """Return the buffers' new values without one learned image, a unit feature (d,), of a class with others."""
        raise NotImplementedError

    @classmethod
    def check_merges(cls) -> None:
        """Raise a `ValueError` if the classifier cannot be merged with another one."""
        if cls.adds_up is None and cls.merged is CorrectedState.merged:
            raise ValueError(f"the {cls.name!r} classifier cannot be merged: it does not keep sums over images")

    @classmethod
    def check_forgets_images(cls) -> None:
        """Raise a `ValueError` if the classifier cannot forget a single image."""
        if cls.without_image is CorrectedState.without_image:
            raise ValueError(
                f"the {cls.name!r} classifier cannot forget a single image: it does not keep sums over images"
            )

    @torch.no_grad()
    def merge(self, other: Self) -> Self:
        """Merge another classifier into this one, as if this one had learned all images, and return this one.

        The two must have the same class, settings and texts, and keep sums over images.
        """
        self.check_merges()
        check_alike(self, other)
        names = list(dict.fromkeys(self._class_names + other._class_names))
        place = {name: index for index, name in enumerate(names)}
        places = torch.tensor([place[name] for name in other._class_names], dtype=torch.int64)
        changes = self.merged(other, places)
        if self.reads_text:
            new = other.text_embeds[places >= len(self._class_names)]
            changes["text_embeds"] = torch.cat([self.text_embeds, new.to(self.text_embeds)])
        self.install(changes)
        self._class_names = names
        # Scores and novelties measured for each classifier alone guarantee nothing for the merged one. Temperatures
        # and their weights are kept.
        tasks = (*self.calibration, *other.calibration)
        self.calibration = tuple(task.model_copy(update={"own": (), "largest": ()}) for task in tasks)
        measured = (*self.novelty_tasks, *other.novelty_tasks)
        self.novelty_tasks = tuple(task.model_copy(update={"novelties": (), "area": None}) for task in measured)
        return self

    @torch.no_grad()
    def forget_class(self, name: str) -> None:
        """Remove a class and its rows of every buffer that has rows for classes.

        The contribution of its images to sums over all classes remains, unless the classifier overrides `forgotten`.
        What was measured on held-out images, such as temperatures, stays. Without its last class, a classifier is
        like a new one.
        """
        self._place(name, "forgotten")
        self.install(self.forgotten(torch.tensor([known != name for known in self._class_names])))
        self._class_names = [known for known in self._class_names if known != name]
        if not self._class_names:
            new = type(self)(embed_dim=self.embed_dim, logit_scale=self.logit_scale, **self.settings())
            self.install(new.tensors())
            self.calibration, self.novelty_tasks = (), ()

    @torch.no_grad()
    def forget_image(self, image_embed: Tensor, name: str) -> None:
        """Remove one learned image from its class: up to rounding, the result is as if it had not been learned.

        What was measured on held-out images, such as temperatures, stays.

        Args:
            image_embed: (d,), the unit feature of the image.
            name: The class of the image.
        """
        self.check_forgets_images()
        place, tensors = self._place(name, "forgotten"), self.tensors()
        if "counts" in tensors and int(tensors["counts"][place]) < 2:
            raise ValueError(f"class {name!r:.100} has only one image: forget the class instead")
        self.install(self.without_image(self._unit(image_embed[None], "image_embed", 1)[0], place))

    @torch.no_grad()
    def rename_class(self, old: str, new: str, text_embed: Tensor | None = None) -> None:
        """Rename a class, and replace its text embedding if the classifier has one.

        A rule that is computed from sums and current texts is then as if it had been learned with the new name.
        Anything else that was trained or chosen with the old text does not change.

        Args:
            old: The present name.
            new: The new name.
            text_embed: (d,), unit text embedding of the new name. Required if `reads_text` is set.
        """
        place = self._place(old, "renamed")
        if self.needs_each_text:
            raise ValueError(
                f"the {self.name!r} classifier was trained with the texts of its classes and cannot rename one: "
                "learn again"
            )
        if self.reads_text:
            if text_embed is None:
                raise TypeError(f"the {self.name!r} classifier needs the text embedding of {new!r:.100}")
            texts = self.text_embeds.clone()
            texts[place] = self._unit(text_embed[None], "text_embed", 1)[0]
            self.install({"text_embeds": texts})
        self._class_names = [new if known == old else known for known in self._class_names]

    @torch.no_grad()
    def join_classes(self, old: str, new: str) -> None:
        """Add the images of class `old` to class `new`: split off a classifier for `old`, and merge it again."""
        self.check_merges()
        kept = torch.arange(len(self._class_names)) == self._place(old, "joined")
        text = self._place(new, "joined")
        part, rest = self.fork(), self.fork()
        # Buffers that do not belong to single classes stay in `rest` and are zero in `part`, so they count once.
        rows = part.forgotten(kept)
        part.install({name: torch.zeros_like(t) for name, t in self.tensors().items() if name not in rows} | rows)
        rest.install(rest.forgotten(~kept))
        if self.reads_text:
            part.install({"text_embeds": self.text_embeds[[text]]})
        rest._class_names, part._class_names = [n for n in self._class_names if n != old], [new]
        part.calibration, part.novelty_tasks = (), ()
        rest.merge(part)
        self._buffers, self._class_names, self._derived = rest._buffers, rest._class_names, rest._derived

    def _unit(self, features: Any, name: str, rows: int | None = None) -> Tensor:
        return unit_features(features, name, self.embed_dim, rows, self.device)

    def _place(self, name: str, what: str) -> int:
        if name not in self._class_names:
            raise ValueError(f"class {name!r:.100} is not known, so it cannot be {what}")
        return self._class_names.index(name)
