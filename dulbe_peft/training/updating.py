"""What changes a learner without training: further photographs, another learner, what goes, and what is renamed."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.data.names import check_rename, learned_name
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.training.holding import StateHolder
from dulbe_peft.training.locking import in_turn
from dulbe_peft.training.state import Estimates, LearnerState, Update
from dulbe_peft.training.trainer import features_and_inputs
from dulbe_peft.utils.processes import check_same_in_all, raise_in_all


class WithoutTraining(StateHolder):
    """A learner that takes in further images, loses some, or is renamed; an error leaves its state as it is."""

    @in_turn
    @torch.no_grad()
    def update_classes(self, dataset: Any, class_names: Sequence[str] | None = None) -> None:
        """Take in further images of known classes, without training; on any error the learner is as it was before.

        Every classifier takes them in, and so does the strategy's memory where it is a sum over images. `class_names`
        of None are those that the dataset carries, or else all seen classes.

        Raises:
            ValueError: a class has not been learned, a classifier cannot take further images of a known class, or an
                image is of no use.
        """
        self._check_learned()
        state, encoder, strategy, adapter = self.state, self.encoder, self.strategy, self.state.adapter
        with raise_in_all():
            if adapter is not None:
                adapter.check_unscaled()
            given = state.known_images(dataset, class_names)
            for classifier in state.classifiers.values():
                classifier.check_update()
        check_same_in_all(given.labels.tolist(), "labels")
        encoder.profile.clear()
        with encoder.profile.phase("update"):
            images = encoder.images(given)
            # A learner that was published without its memory has no sum to add to.
            collect = strategy.remembers_more and not state.incomplete
            features, inputs = features_and_inputs(state, encoder, images, "update", collect)
            labels, memory = torch.tensor(given.labels, device=features.device), state.memory
            views = encoder.views(features, images, "update")
            if collect and adapter is not None:
                task = NewTask(len(state.tasks), adapter, state.args, memory, inputs=inputs)
                memory = strategy.remember(task, inputs)
            self.state = _changed(
                state,
                lambda classifier: classifier.update_classes(features, labels, views),
                Update(after=len(state.tasks), images=Counter(given.class_names[label] for label in given.labels)),
                memory=memory,
                known=state.known.with_learned(given, encoder.way),
            )

    @in_turn
    def forget_class(self, name: str) -> None:
        """Take a class out of every classifier, so that no image is called so any more.

        The model stays as it is, and so does what the class's images added to sums over all classes, such as LDA's
        scatter. The only class that is left cannot be forgotten.
        """
        state, name = self.state, learned_name(name, self.class_names, "forgotten")
        if len(state.class_names) == 1:
            raise ValueError(f"class {name!r:.100} is the only one that is left: a learner needs at least one class")
        updates = []
        for update in state.updates:  # a forgotten class leaves no name
            left = {other: count for other, count in update.images.items() if other != name}
            renamed = {} if name in update.renamed.values() else update.renamed
            updates.append(update.model_copy(update={"images": left, "renamed": renamed}))
        self.state = _changed(
            _renamed(replace(state, updates=updates, known=state.known.without_class(name)), name),
            lambda classifier: classifier.forget_class(name),
            Update(after=len(state.tasks), forgotten=_task_of(state, name)),
        )

    @in_turn
    @torch.no_grad()
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
        state, encoder, images = self.state, self.encoder, unlabelled_images(images)
        if not len(images):
            return
        if state.strategy.adapts or state.adapter is not None:
            raise ValueError(
                f"the strategy {state.strategy.name!r} trains the model, which nothing takes back: a learner forgets "
                "single images where nothing is trained"
            )
        for how, views in sorted(state.known.ways):
            if views > 1:
                raise ValueError(f"images were learned as {views} views of each, which cannot be taken out again")
            if how != encoder.way[0]:
                others = f"{encoder.way[0]} would take out other numbers: load the learner as it learned"
                raise ValueError(f"images were learned in {how}, and {others}")
        for classifier in state.classifiers.values():
            classifier.check_forgets_images()
        learned: dict[bytes, list[str]] = {}
        for name, contents in state.known.learned.items():
            for content in contents:
                learned.setdefault(content, []).append(name)
        rows: dict[bytes, int] = {}  # an image that is named twice goes once
        for row, named in enumerate(images.contents()):
            if named is None:
                images[row]  # which says why it cannot be read
            if named is None or named not in learned:
                unsure = "" if state.known.complete else ", as far as is known: this learner has no notes of images"
                raise ValueError(f"{images.item_name(row)} has not been learned{unsure}, so it cannot be forgotten")
            rows.setdefault(named, row)
        data = encoder.images(images.at(list(rows.values())))
        features = encoder.dataset_embeds(data, "forget")
        # More than one name where somebody counted an image again.
        pairs = [(feature, name) for feature, content in zip(features, rows, strict=True) for name in learned[content]]
        gone = Counter(name for _, name in pairs)
        self.state = _changed(
            state,
            lambda classifier: [classifier.forget_image(*pair) for pair in pairs],
            Update(after=len(state.tasks), images={name: -count for name, count in gone.items()}),
            known=state.known.without_contents(rows),
        )

    @in_turn
    @torch.no_grad()
    def rename_class(self, old: str, new: str) -> None:
        """Give a class a new name; where `new` is known, the two become one class.

        Text embeddings are those of the new name, or of texts that were given for the class. Classifiers of sums are
        then those that were taught under it, up to what was chosen on images with the old name, such as `kappa` of
        `bayes`; what was trained with it stays.

        Raises:
            ValueError: `old` has not been learned, or a classifier cannot do it. Nothing is changed then.
        """
        state, updates = self.state, []
        old, new = check_rename(old, new, state.class_names)
        for one in state.updates:
            counts = Counter[str]()
            for name, count in one.images.items():
                counts[new if name == old else name] += count
            updates.append(one.model_copy(update={"images": dict(counts)}))
        renamed = replace(state, updates=updates, known=state.known.renamed(old, new))
        update = Update(after=len(state.tasks), renamed={old: new})
        if new in state.class_names:
            learned = state.image_counts()
            joined = {new: learned[old]} if old in learned else {}
            update = update.model_copy(update={"images": joined, "forgotten": _task_of(state, old)})
            self.state = _changed(_renamed(renamed, old), lambda classifier: classifier.join_classes(old, new), update)
            return
        renamed, text = _renamed(renamed, old, new), None
        if has_text(state.base):
            self.encoder.check_prompts(renamed.class_names, renamed.class_texts)
            text = self.encoder.text_embeds([new], renamed.class_texts)[0]
        self.state = _changed(renamed, lambda classifier: classifier.rename_class(old, new, text), update)

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
        if other is self:
            raise ValueError("a learner cannot be merged with itself: all that it has learned would count twice")
        self._check_learned()
        other._check_learned()
        state, theirs = self.state, other.state
        for one in (state, theirs):
            if one.strategy.adapts or one.adapter is not None:
                raise ValueError(
                    f"learners merge where nothing is trained, not with the strategy {one.strategy.name!r}"
                )
        for name in ("text_embeds", "templates", "class_name_style", "augment"):
            mine, others = getattr(state.args, name), getattr(theirs.args, name)
            if mine != others:
                raise ValueError(f"two learners merge where {name} is equal, got {mine!r:.200} and {others!r:.200}")
        if state.strategy != theirs.strategy or list(state.classifiers) != list(theirs.classifiers):
            raise ValueError(
                f"two learners merge where strategy and classifiers are equal, got {state.strategy.name!r} with "
                f"{list(state.classifiers)} and {theirs.strategy.name!r} with {list(theirs.classifiers)}"
            )
        seen, texts = set(state.class_names), state.class_texts
        for name in seen & set(theirs.class_names):
            mine, others = texts.get(name), theirs.class_texts.get(name)
            if mine != others:
                raise ValueError(f"the texts of class {name!r} differ: {mine} and {others}")
        if not (state.known.complete and theirs.known.complete):
            warnings.warn(
                "a learner has no notes of its images: those that both have learned count twice", stacklevel=3
            )
        both = set(state.known.class_of()) & set(theirs.known.class_of())
        if both:
            raise ValueError(f"both learners have learned {len(both)} of the same images, which would count twice")
        facts, others = self.encoder.facts, other.encoder.facts
        wrong = ", ".join(name for name in facts if facts[name] != others[name])
        if wrong:
            raise ValueError(f"the learners encode images with other models or in other ways: {wrong} differ")
        tasks = [tuple(name for name in task if name not in seen) for task in theirs.tasks]
        tasks = [*state.tasks, *(task for task in tasks if task)]
        further = {name: count for name, count in theirs.image_counts().items() if name in seen and count}
        self.state = _changed(
            state,
            lambda classifier: classifier.merge(theirs.classifiers[classifier.name]),
            Update(after=len(tasks), images=further),
            tasks=tasks,
            class_texts={**theirs.class_texts, **texts},
            known=state.known.merged(theirs.known),
        )
        return self


def _changed(state: LearnerState, change: Callable[[Classifier], Any], update: Update, **parts: Any) -> LearnerState:
    """The state after a change of every classifier, with a note of it, and with other parts; the given one stays."""
    made = {name: classifier.fork() for name, classifier in state.classifiers.items()}
    for classifier in made.values():
        change(classifier)
    return replace(state, classifiers=made, updates=[*state.updates, update], estimates=Estimates(), **parts)


def _task_of(state: LearnerState, name: str) -> int:
    """The number, from 1, of the task that a class came with."""
    return next(number for number, task in enumerate(state.tasks, 1) if name in task)


def _renamed(state: LearnerState, old: str, *new: str) -> LearnerState:
    """The state whose tasks and texts have another name of a class, or none."""
    tasks = [tuple(n for name in task for n in (new if name == old else (name,))) for task in state.tasks]
    texts = {n: own for name, own in state.class_texts.items() for n in (new if name == old else (name,))}
    return replace(state, tasks=tasks, class_texts=texts)
