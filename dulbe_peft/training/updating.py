"""What changes a learner without training: further photographs, another learner, what goes, and what is renamed.

Each returns a new state and leaves the given one as it is, so an error changes nothing.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dulbe_peft.classifiers import Classifier
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_rename, learned_name
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.training.state import LearnerState, Update
from dulbe_peft.training.trainer import features_and_inputs
from dulbe_peft.utils.processes import check_same_in_all, raise_in_all


def check_update(state: LearnerState, names: Sequence[str]) -> None:
    """Raise a `ValueError` that names the classes that have not been learned, or who cannot update."""
    state.places(names)
    for classifier in state.classifiers.values():
        classifier.check_update()


@torch.no_grad()
def with_more_images(
    state: LearnerState, encoder: Encoder, dataset: Any, class_names: Sequence[str] | None
) -> LearnerState:
    """The state with further images of known classes, by the classes' names, or all seen ones where None are given."""
    strategy, adapter = state.strategy, state.adapter
    with raise_in_all():
        if adapter is not None:
            adapter.check_unscaled()
        given = state.known_images(dataset, class_names)
        check_update(state, given.class_names)
    check_same_in_all(given.labels.tolist(), "labels")
    encoder.profile.clear()
    with encoder.profile.phase("update"):
        images = encoder.images(given)
        # A learner that was published without its memory has no sum to add to.
        collect = strategy.remembers_more and not state.incomplete
        features, inputs = features_and_inputs(state, encoder, images, "update", collect)
        views, labels = encoder.views(features, images, "update"), torch.tensor(given.labels, device=features.device)
        memory = state.memory
        if collect and adapter is not None:
            memory = strategy.remember(NewTask(len(state.tasks), adapter, state.args, memory, inputs=inputs), inputs)
        return _changed(
            state,
            lambda classifier: classifier.update_classes(features, labels, views),
            Update(after=len(state.tasks), images=dict(Counter(given.class_names[label] for label in given.labels))),
            memory=memory,
            known=state.known.with_learned(given, encoder.way),
        )


def merged_states(
    state: LearnerState, other: LearnerState, own: Mapping[str, str], theirs: Mapping[str, str]
) -> LearnerState:
    """The state of a learner that trains nothing, with what another one has learned; their encoders' facts agree."""
    for one in (state, other):
        if one.strategy.adapts or one.adapter is not None:
            raise ValueError(f"learners merge where nothing is trained, not with the strategy {one.strategy.name!r}")
    for name in ("text_embeds", "templates", "class_name_style", "augment"):
        mine, others = getattr(state.args, name), getattr(other.args, name)
        if mine != others:
            raise ValueError(f"two learners merge where {name} is equal, got {mine!r:.200} and {others!r:.200}")
    if state.strategy != other.strategy or list(state.classifiers) != list(other.classifiers):
        raise ValueError(
            f"two learners merge where strategy and classifiers are equal, got {state.strategy.name!r} with "
            f"{list(state.classifiers)} and {other.strategy.name!r} with {list(other.classifiers)}"
        )
    seen, texts = set(state.class_names), state.class_texts
    for name in seen & set(other.class_names):
        mine, others = texts.get(name), other.class_texts.get(name)
        if mine != others:
            raise ValueError(f"the texts of class {name!r} differ: {mine} and {others}")
    if not (state.known.complete and other.known.complete):
        warnings.warn("a learner has no notes of its images: those that both have learned count twice", stacklevel=4)
    both = set(state.known.class_of()) & set(other.known.class_of())
    if both:
        raise ValueError(f"both learners have learned {len(both)} of the same images, which would count twice")
    wrong = ", ".join(name for name in own if own[name] != theirs[name])
    if wrong:
        raise ValueError(f"the learners encode images with other models or in other ways: {wrong} differ")
    tasks = [tuple(name for name in task if name not in seen) for task in other.tasks]
    tasks = [*state.tasks, *(task for task in tasks if task)]
    further = {name: count for name, count in other.image_counts().items() if name in seen and count}
    return _changed(
        state,
        lambda classifier: classifier.merge(other.classifiers[classifier.name]),
        Update(after=len(tasks), images=further),
        tasks=tasks,
        class_texts={**other.class_texts, **texts},
        known=state.known.merged(other.known),
    )


def without_class(state: LearnerState, name: str) -> LearnerState:
    """The state in which nothing knows a class any more; strategies count tasks, so an empty task stays."""
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
def without_images(state: LearnerState, encoder: Encoder, images: LabelledImages) -> LearnerState:
    """The state without learned images, which are known by their content; `images` have no labels of their own."""
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
            unsure = "" if state.known.complete else ", as far as is known: release 0.2.0 noted no images"
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
def with_renamed_class(state: LearnerState, encoder: Encoder, old: str, new: str) -> LearnerState:
    """The state in which a class has another name, with its text or the given ones; a known name joins the two."""
    old, new = check_rename(old, new, state.class_names)
    updates = []
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


def _changed(state: LearnerState, change: Callable[[Classifier], Any], update: Update, **parts: Any) -> LearnerState:
    """The state after a change of every classifier, with a note of it, and with other parts; the given one stays."""
    made = {name: classifier.fork() for name, classifier in state.classifiers.items()}
    for classifier in made.values():
        change(classifier)
    return replace(state, classifiers=made, updates=[*state.updates, update], **parts)


def _task_of(state: LearnerState, name: str) -> int:
    """The number, from 1, of the task that a class came with."""
    return next(number for number, task in enumerate(state.tasks, 1) if name in task)


def _renamed(state: LearnerState, old: str, *new: str) -> LearnerState:
    """The state whose tasks and texts have another name of a class, or none."""
    tasks = [tuple(n for name in task for n in (new if name == old else (name,))) for task in state.tasks]
    texts = {n: own for name, own in state.class_texts.items() for n in (new if name == old else (name,))}
    return replace(state, tasks=tasks, class_texts=texts)
