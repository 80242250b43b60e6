"""Change a learner without training: add images, merge learners, forget classes or images, and rename classes."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.rule import check_can
from dulbe_peft.data.names import check_rename, learned_name
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.training.preparing import check_learned
from dulbe_peft.training.state import Estimates, LearnerState, Update
from dulbe_peft.training.task_trainer import features_and_inputs
from dulbe_peft.training.update_share import check_share
from dulbe_peft.utils.processes import check_same_in_all, raise_in_all


@torch.no_grad()
def update_classes(
    state: LearnerState, encoder: Encoder, dataset: object, class_names: Sequence[str] | None
) -> LearnerState:
    """Add further images of known classes to every classifier, and to the strategy's memory if that is a sum."""
    check_learned(state)
    strategy, adapter = state.strategy, state.adapter
    with raise_in_all():
        if adapter is not None:
            adapter.check_state("update_classes")
        given = state.known_images(dataset, class_names)
        for classifier in state.classifiers.values():
            check_can(classifier.rule, "update")
    check_same_in_all(given.labels.tolist(), "labels")
    encoder.profile.clear()
    with encoder.profile.phase("update"):
        images = encoder.images(given)
        # A learner that was published without its memory has no sum to which the images could be added.
        collect = strategy.remembers_more and not state.incomplete
        features, inputs = features_and_inputs(state, encoder, images, "update", collect)
        labels, memory = torch.tensor(given.labels, device=features.device), state.memory
        views = encoder.views(features, images, "update")
        if collect and adapter is not None:
            task = NewTask(len(state.tasks), adapter, state.args, memory, inputs=inputs)
            memory = strategy.remember(task, inputs)
        return _changed(
            state,
            lambda classifier: classifier.update_classes(features, labels, views, given.groups),
            Update(after=len(state.tasks), images=Counter(given.class_names[label] for label in given.labels)),
            memory=memory,
            known=state.known.add_learned(given, encoder.way),
        )


@torch.no_grad()
def keep(state: LearnerState, encoder: Encoder, share: float) -> LearnerState:
    """Keep a share of all that training has changed in the model, and encode the seen names again."""
    check_learned(state)
    if state.adapter is None:
        raise ValueError(f"the strategy {state.strategy.name!r} trains nothing, so there is no update to keep")
    state.check_plain("this learner cannot be scaled")
    check_share(replace(state, args=replace(state.args, update_share=share)))
    state.adapter.keep(share)
    images = [name for name in state.classifiers if name != "text"]
    if share != 1 and images:
        warnings.warn(
            f"the classifiers {images} keep statistics of images, whose features were those of the whole update: "
            "compare their accuracy with that before, or learn with update_share",
            stacklevel=4,
        )
    texts = encoder.text_embeds(state.class_names, state.class_texts) if encoder.has_names else None

    def retell(classifier: Classifier) -> None:
        if texts is not None and classifier.reads_text and state.args.text_embeds == "current":
            classifier.move_texts(texts)

    return _changed(state, retell, Update(after=len(state.tasks), kept=share))


def forget_class(state: LearnerState, name: str) -> LearnerState:
    """Remove a class from every classifier. The model and sums over all classes stay as they are."""
    name = learned_name(name, state.class_names, "forgotten")
    if len(state.class_names) == 1:
        raise ValueError(f"class {name!r:.100} is the only class: a learner needs at least one")
    updates = []
    for update in state.updates:  # the name of a forgotten class is kept nowhere
        images = {other: count for other, count in update.images.items() if other != name}
        renamed = {} if name in update.renamed.values() else update.renamed
        updates.append(update.model_copy(update={"images": images, "renamed": renamed}))
    return _changed(
        _renamed(replace(state, updates=updates, known=state.known.without_class(name)), name),
        lambda classifier: classifier.forget_class(name),
        Update(after=len(state.tasks), forgotten=_task_of(state, name)),
    )


@torch.no_grad()
def forget_images(state: LearnerState, encoder: Encoder, given: object) -> LearnerState:
    """Remove single learned images, which are identified by their content, from every classifier."""
    images = unlabelled_images(given)
    if not len(images):
        return state
    if state.trained:
        raise ValueError(
            f"the strategy {state.strategy.name!r} trains the model, which cannot be undone: single images can be "
            "forgotten only if nothing is trained"
        )
    for how, views in sorted(state.known.ways):
        if views > 1:
            raise ValueError(f"images were learned as {views} views each, which cannot be removed again")
        if how != encoder.way[0]:
            raise ValueError(
                f"images were learned in {how}, and {encoder.way[0]} would remove different features: "
                f"load the learner in {how}"
            )
    for classifier in state.classifiers.values():
        check_can(classifier.rule, "forget images")
    learned: dict[bytes, list[str]] = {}
    for name, contents in state.known.learned.items():
        for each in contents:
            learned.setdefault(each, []).append(name)
    rows: dict[bytes, int] = {}  # content -> row; an image that is given twice is removed once
    for row, content in enumerate(images.contents()):
        if content is None:
            images[row]  # raises the reason why it cannot be read
        if content is None or content not in learned:
            unsure = "" if state.known.complete else ", as far as is known: this learner has no record of its images"
            raise ValueError(f"{images.item_name(row)} has not been learned{unsure}, so it cannot be forgotten")
        rows.setdefault(content, row)
    data = encoder.images(images.at(list(rows.values())))
    features = encoder.dataset_embeds(data, "forget")
    # An image has several names if it was learned again on request.
    pairs = [(feature, name) for feature, content in zip(features, rows, strict=True) for name in learned[content]]
    removed = Counter(name for _, name in pairs)
    return _changed(
        state,
        lambda classifier: [classifier.forget_image(*pair) for pair in pairs],
        Update(after=len(state.tasks), images={name: -count for name, count in removed.items()}),
        known=state.known.without_contents(rows),
    )


@torch.no_grad()
def rename_class(state: LearnerState, encoder: Encoder, old: str, new: str) -> LearnerState:
    """Rename a class and compute the text embedding of its new name. If `new` is a known class, the two are joined."""
    updates = []
    old, new = check_rename(old, new, state.class_names)
    for earlier in state.updates:
        counts = Counter[str]()
        for name, count in earlier.images.items():
            counts[new if name == old else name] += count
        updates.append(earlier.model_copy(update={"images": dict(counts)}))
    renamed = replace(state, updates=updates, known=state.known.renamed(old, new))
    update = Update(after=len(state.tasks), renamed={old: new})
    if new in state.class_names:
        learned = state.image_counts()
        joined = {new: learned[old]} if old in learned else {}
        update = update.model_copy(update={"images": joined, "forgotten": _task_of(state, old)})
        return _changed(_renamed(renamed, old), lambda classifier: classifier.join_classes(old, new), update)
    renamed, text = _renamed(renamed, old, new), None
    if encoder.has_names:
        encoder.check_prompts(renamed.class_names, renamed.class_texts)
        text = encoder.text_embeds([new], renamed.class_texts)[0]
    return _changed(renamed, lambda classifier: classifier.rename_class(old, new, text), update)


def merge(state: LearnerState, encoder: Encoder, theirs: LearnerState, their_encoder: Encoder) -> LearnerState:
    """Add what another learner of the same model has learned. Neither may train the model."""
    if theirs is state:
        raise ValueError("a learner cannot be merged with itself: all its images would count twice")
    check_learned(state)
    check_learned(theirs)
    _check_alike(state, theirs)
    if not (state.known.complete and theirs.known.complete):
        warnings.warn(
            "a learner has no record of its images: images that both learners have learned count twice", stacklevel=4
        )
    both = set(state.known.class_of()) & set(theirs.known.class_of())
    if both:
        raise ValueError(f"both learners have learned the same {len(both)} images, which would count twice")
    facts, others = encoder.facts, their_encoder.facts
    wrong = ", ".join(sorted(name for name in facts | others if facts.get(name) != others.get(name)))
    if wrong:
        raise ValueError(f"the learners encode images with different models or settings: {wrong} differ")
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
    """Raise a `ValueError` unless two learners train nothing and differ in their classes only."""
    for each in (state, theirs):
        if each.trained:
            raise ValueError(
                f"learners can be merged only if nothing is trained, got the strategy {each.strategy.name!r}"
            )
    for name in ("text_embeds", "templates", "class_name_style", "augment"):
        mine, others = getattr(state.args, name), getattr(theirs.args, name)
        if mine != others:
            raise ValueError(f"two learners to merge need the same {name}, got {mine!r:.200} and {others!r:.200}")
    if state.strategy != theirs.strategy or list(state.classifiers) != list(theirs.classifiers):
        raise ValueError(
            f"two learners to merge need the same strategy and classifiers, got {state.strategy.name!r} with "
            f"{list(state.classifiers)} and {theirs.strategy.name!r} with {list(theirs.classifiers)}"
        )
    for name in set(state.class_names) & set(theirs.class_names):
        mine, others = state.class_texts.get(name), theirs.class_texts.get(name)
        if mine != others:
            raise ValueError(f"the texts of class {name!r} differ: {mine} and {others}")


def _changed(
    state: LearnerState, change: Callable[[Classifier], object], update: Update, **parts: Any
) -> LearnerState:
    """Return a copy of the state in which `change` was applied to every classifier and `update` is recorded.

    `parts` are further fields to replace. The estimates are dropped, because they no longer hold.
    """
    classifiers = {name: classifier.fork() for name, classifier in state.classifiers.items()}
    for classifier in classifiers.values():
        change(classifier)
    return replace(state, classifiers=classifiers, updates=[*state.updates, update], estimates=Estimates(), **parts)


def _task_of(state: LearnerState, name: str) -> int:
    """Return the number, from 1, of the task in which a class was learned."""
    return next(number for number, task in enumerate(state.tasks, 1) if name in task)


def _renamed(state: LearnerState, old: str, *new: str) -> LearnerState:
    """Return a copy of the state with class `old` renamed to `new` in tasks and texts, or removed without `new`."""
    tasks = [tuple(n for name in task for n in (new if name == old else (name,))) for task in state.tasks]
    class_texts = {n: texts for name, texts in state.class_texts.items() for n in (new if name == old else (name,))}
    return replace(state, tasks=tasks, class_texts=class_texts)
