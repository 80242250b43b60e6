"""What changes a learner without training: further photographs, another learner, what goes, and what is renamed."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.data.names import check_rename, learned_name
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.training.preparing import check_learned
from dulbe_peft.training.state import Estimates, LearnerState, Update
from dulbe_peft.training.trainer import features_and_inputs
from dulbe_peft.utils.processes import check_same_in_all, raise_in_all


@torch.no_grad()
def update_classes(
    state: LearnerState, encoder: Encoder, dataset: Any, class_names: Sequence[str] | None
) -> LearnerState:
    """Take further images of known classes into every classifier, and into the strategy's memory where it is a sum."""
    check_learned(state)
    strategy, adapter = state.strategy, state.adapter
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
        return _changed(
            state,
            lambda classifier: classifier.update_classes(features, labels, views),
            Update(after=len(state.tasks), images=Counter(given.class_names[label] for label in given.labels)),
            memory=memory,
            known=state.known.with_learned(given, encoder.way),
        )


def forget_class(state: LearnerState, name: str) -> LearnerState:
    """Take a class out of every classifier; the model, and sums over all classes, stay as they are."""
    name = learned_name(name, state.class_names, "forgotten")
    if len(state.class_names) == 1:
        raise ValueError(f"class {name!r:.100} is the only one that is left: a learner needs at least one class")
    updates = []
    for update in state.updates:  # a forgotten class leaves no name
        left = {other: count for other, count in update.images.items() if other != name}
        renamed = {} if name in update.renamed.values() else update.renamed
        updates.append(update.model_copy(update={"images": left, "renamed": renamed}))
    return _changed(
        _renamed(replace(state, updates=updates, known=state.known.without_class(name)), name),
        lambda classifier: classifier.forget_class(name),
        Update(after=len(state.tasks), forgotten=_task_of(state, name)),
    )


@torch.no_grad()
def forget_images(state: LearnerState, encoder: Encoder, images: Any) -> LearnerState:
    """Take single learned images, which are known by their content, out of every classifier."""
    images = unlabelled_images(images)
    if not len(images):
        return state
    if state.trained:
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
    return _changed(
        state,
        lambda classifier: [classifier.forget_image(*pair) for pair in pairs],
        Update(after=len(state.tasks), images={name: -count for name, count in gone.items()}),
        known=state.known.without_contents(rows),
    )


@torch.no_grad()
def rename_class(state: LearnerState, encoder: Encoder, old: str, new: str) -> LearnerState:
    """Give a class a new name, and the text embedding of it; where `new` is known, the two become one class."""
    updates = []
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
        return _changed(_renamed(renamed, old), lambda classifier: classifier.join_classes(old, new), update)
    renamed, text = _renamed(renamed, old, new), None
    if has_text(state.base):
        encoder.check_prompts(renamed.class_names, renamed.class_texts)
        text = encoder.text_embeds([new], renamed.class_texts)[0]
    return _changed(renamed, lambda classifier: classifier.rename_class(old, new, text), update)


def merge(state: LearnerState, encoder: Encoder, theirs: LearnerState, their_encoder: Encoder) -> LearnerState:
    """Take in what another learner of the same model has learned, where nothing is trained."""
    if theirs is state:
        raise ValueError("a learner cannot be merged with itself: all that it has learned would count twice")
    check_learned(state)
    check_learned(theirs)
    _check_alike(state, theirs)
    if not (state.known.complete and theirs.known.complete):
        warnings.warn("a learner has no notes of its images: those that both have learned count twice", stacklevel=4)
    both = set(state.known.class_of()) & set(theirs.known.class_of())
    if both:
        raise ValueError(f"both learners have learned {len(both)} of the same images, which would count twice")
    facts, others = encoder.facts, their_encoder.facts
    wrong = ", ".join(name for name in facts if facts[name] != others[name])
    if wrong:
        raise ValueError(f"the learners encode images with other models or in other ways: {wrong} differ")
    seen = set(state.class_names)
    tasks = [tuple(name for name in task if name not in seen) for task in theirs.tasks]
    tasks = [*state.tasks, *(task for task in tasks if task)]
    further = {name: count for name, count in theirs.image_counts().items() if name in seen and count}
    return _changed(
        state,
        lambda classifier: classifier.merge(theirs.classifiers[classifier.name]),
        Update(after=len(tasks), images=further),
        tasks=tasks,
        class_texts={**theirs.class_texts, **state.class_texts},
        known=state.known.merged(theirs.known),
    )


def _check_alike(state: LearnerState, theirs: LearnerState) -> None:
    """Raise unless two learners train nothing and differ in their classes alone."""
    for each in (state, theirs):
        if each.trained:
            raise ValueError(f"learners merge where nothing is trained, not with the strategy {each.strategy.name!r}")
    for name in ("text_embeds", "templates", "class_name_style", "augment"):
        mine, others = getattr(state.args, name), getattr(theirs.args, name)
        if mine != others:
            raise ValueError(f"two learners merge where {name} is equal, got {mine!r:.200} and {others!r:.200}")
    if state.strategy != theirs.strategy or list(state.classifiers) != list(theirs.classifiers):
        raise ValueError(
            f"two learners merge where strategy and classifiers are equal, got {state.strategy.name!r} with "
            f"{list(state.classifiers)} and {theirs.strategy.name!r} with {list(theirs.classifiers)}"
        )
    for name in set(state.class_names) & set(theirs.class_names):
        mine, others = state.class_texts.get(name), theirs.class_texts.get(name)
        if mine != others:
            raise ValueError(f"the texts of class {name!r} differ: {mine} and {others}")


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
