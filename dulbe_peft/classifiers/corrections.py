"""What changes a classifier after it has learned: another one merged in, classes that go or become one, new names."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dulbe_peft.classifiers.checks import check_alike, unit_features
from dulbe_peft.classifiers.state import CLASSES, GrowingState


class CorrectedState(GrowingState):
    """The part of a classifier that corrects what was learned. A call that raises changes nothing."""

    needs_each_text: ClassVar[bool] = False
    adds_up: ClassVar[tuple[str, ...] | None] = None  # buffers that `merged` adds; None: nothing can be merged

    @property
    def reads_text(self) -> bool:
        """Whether it takes text embeddings, which it may not need."""
        return "text_embeds" in self._axes

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        """The buffers' new values with what another classifier of the same settings has learned; here of `adds_up`.

        The classes are this one's, then those that only the other one knows; `places`, (C_other,), says where among
        them the other one's stand. `text_embeds` are merged by the caller.
        """
        sums = self.tensors() | self.with_new_rows(int((places >= len(self._class_names)).sum()))
        for name in (names := self.adds_up or ()):
            theirs, at = other.tensors()[name].to(sums[name]), places.to(sums[name].device)
            sums[name] = sums[name].index_add(0, at, theirs) if name in self._axes else sums[name] + theirs
        return {name: sums[name] for name in names}

    def sums_without(self, row: Tensor, label: int) -> dict[str, Tensor]:
        """`sums` and `counts` without the row that one image of a class added; see `without_image`."""
        sums, counts = self.sums.clone(), self.counts.clone()
        sums[label] -= row.to(sums)
        counts[label] -= 1
        return {"sums": sums, "counts": counts}

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        """The buffers' new values without the classes for which `kept`, (C,), is False."""
        tensors, changes = self.tensors(), {}
        for name, axes in self._axes.items():
            changes[name] = tensors[name]
            for place, axis in enumerate(axes):
                if axis == CLASSES or axis in tensors:
                    left = kept if axis == CLASSES else kept.repeat_interleave(tensors[axis].cpu())
                    changes[name] = changes[name][(slice(None),) * place + (left.to(tensors[name].device),)]
        return changes

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        """The buffers' new values without one learned image, a unit feature (d,), of a class that has others."""
        raise NotImplementedError

    @classmethod
    def check_merges(cls) -> None:
        """Raise a ValueError where nothing can be merged into what the classifier keeps."""
        if cls.adds_up is None and cls.merged is CorrectedState.merged:
            raise ValueError(f"the {cls.name!r} classifier cannot be merged: what it keeps does not add up")

    @classmethod
    def check_forgets_images(cls) -> None:
        """Raise a ValueError where a single image cannot be taken out."""
        if cls.without_image is CorrectedState.without_image:
            raise ValueError(
                f"the {cls.name!r} classifier cannot forget a single image: what it keeps does not add up"
            )

    @torch.no_grad()
    def merge(self, other: Self) -> Self:
        """Take in what another classifier has learned, as if this one had seen all images; returns this classifier.

        The two must be of one kind, which keeps what is needed, with equal settings and texts.
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
        # What was measured of each alone promises nothing of both together; temperatures and weights stay.
        tasks = (*self.calibration, *other.calibration)
        self.calibration = tuple(task.model_copy(update={"own": (), "largest": ()}) for task in tasks)
        measured = (*self.novelty_tasks, *other.novelty_tasks)
        self.novelty_tasks = tuple(task.model_copy(update={"novelties": (), "area": None}) for task in measured)
        return self

    @torch.no_grad()
    def forget_class(self, name: str) -> None:
        """Drop a class: its row of every buffer that has one row a class.

        What its images added to a sum over all classes stays there, and so does the temperature. Without its last
        class a classifier is a new one.
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
        """Take one learned image, a unit feature (d,), out of its class, up to rounding as if it had not been learned.

        The temperature, and what was chosen on images that were left out, stay.
        """
        self.check_forgets_images()
        place, tensors = self._place(name, "forgotten"), self.tensors()
        if "counts" in tensors and int(tensors["counts"][place]) < 2:
            raise ValueError(f"class {name!r:.100} has one image alone: forget the class")
        self.install(self.without_image(self._unit(image_embed[None], "image_embed", 1)[0], place))

    @torch.no_grad()
    def rename_class(self, old: str, new: str, text_embed: Tensor | None = None) -> None:
        """Give a class a new name, and its text's unit embedding, (d,), where the classifier keeps one.

        A rule that is a function of the sums and of the texts of today is then the one taught under the new name. What
        else was trained or chosen with the old text stays.
        """
        place = self._place(old, "renamed")
        if self.needs_each_text:
            raise ValueError(f"the {self.name!r} classifier was trained with each text of its classes: learn anew")
        if self.reads_text:
            if text_embed is None:
                raise TypeError(f"the {self.name!r} classifier needs the text embedding of {new!r:.100}")
            texts = self.text_embeds.clone()
            texts[place] = self._unit(text_embed[None], "text_embed", 1)[0]
            self.install({"text_embeds": texts})
        self._class_names = [new if known == old else known for known in self._class_names]

    @torch.no_grad()
    def join_classes(self, old: str, new: str) -> None:
        """Make the images of `old` further images of `new`, as `merge` does with those of another classifier."""
        self.check_merges()
        kept = torch.arange(len(self._class_names)) == self._place(old, "joined")
        text = self._place(new, "joined")
        one, rest = self.fork(), self.fork()
        # What is no class's own stays in the rest, and is nothing in the part.
        own = one.forgotten(kept)
        one.install({name: torch.zeros_like(t) for name, t in self.tensors().items() if name not in own} | own)
        rest.install(rest.forgotten(~kept))
        if self.reads_text:
            one.install({"text_embeds": self.text_embeds[[text]]})
        rest._class_names, one._class_names = [n for n in self._class_names if n != old], [new]
        one.calibration, one.novelty_tasks = (), ()
        rest.merge(one)
        self._buffers, self._class_names, self._derived = rest._buffers, rest._class_names, rest._derived

    def _unit(self, features: Any, name: str, rows: int | None = None) -> Tensor:
        return unit_features(features, name, self.embed_dim, rows, self.device)

    def _place(self, name: str, what: str) -> int:
        if name not in self._class_names:
            raise ValueError(f"class {name!r:.100} is not known, so it cannot be {what}")
        return self._class_names.index(name)
