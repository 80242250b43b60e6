"""What changes a learner without training: further photographs of known classes, and a class that goes.

Both return a new state and leave the given one as it is, so an error changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from dulbe_peft.data.names import normalized
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.strategies import Memory
from dulbe_peft.strategies.base import NewTask
from dulbe_peft.training.state import LearnerState
from dulbe_peft.training.trainer import features_and_inputs
from dulbe_peft.utils.specs import closest


def check_update(state: LearnerState, names: Sequence[str]) -> None:
    """Raise a `ValueError` that names classes which have not been learned, or a classifier that cannot update."""
    state.places(names)
    for classifier in state.classifiers.values():
        classifier.check_update()


@torch.no_grad()
def with_more_images(
    state: LearnerState, encoder: Encoder, images: PixelDataset, labels: torch.Tensor
) -> LearnerState:
    """The state with further images of known classes, whose `labels`, (n,), index `state.class_names`."""
    strategy, adapter = state.strategy, state.adapter
    # A learner that was published without its memory has no sum to add to.
    collect = strategy.remembers_more and adapter is not None and not state.incomplete
    features, inputs = features_and_inputs(adapter, encoder, images, "update", collect)
    counts = Counter(state.class_names[label] for label in labels.tolist())
    features = encoder.mean_of_views(features, images, len(state.tasks) + len(state.updates), "update")
    labels = labels.to(features.device)
    classifiers = {name: classifier.fork() for name, classifier in state.classifiers.items()}
    for classifier in classifiers.values():
        classifier.update_classes(features, labels)
    memory: Memory | None = state.memory
    if collect and adapter is not None:
        task = NewTask(len(state.tasks), adapter, state.args, state.memory, inputs=inputs)
        memory = strategy.remember(task, inputs)
    updates = [*state.updates, {"after": len(state.tasks), "images": dict(counts), "forgotten": None}]
    return replace(state, classifiers=classifiers, memory=memory, updates=updates)


def without_class(state: LearnerState, name: str) -> LearnerState:
    """The state in which no classifier, task or note of an update knows a class any more.

    A task that loses its last class stays, empty, because strategies count tasks.
    """
    name = normalized(name)
    if name not in state.class_names:
        hint = closest(name, state.class_names)
        raise ValueError(f"class {name!r:.100} has not been learned, so it cannot be forgotten{hint:.300}")
    if len(state.class_names) == 1:
        raise ValueError(f"class {name!r:.100} is the only one that is left: a learner needs at least one class")
    classifiers = {key: classifier.fork() for key, classifier in state.classifiers.items()}
    for classifier in classifiers.values():
        classifier.forget_class(name)
    tasks = [tuple(other for other in task if other != name) for task in state.tasks]
    number = next(number for number, task in enumerate(state.tasks, 1) if name in task)
    updates = [
        {**update, "images": {other: count for other, count in update["images"].items() if other != name}}
        for update in state.updates
    ]
    updates.append({"after": len(tasks), "images": {}, "forgotten": number})
    texts = {other: texts for other, texts in state.class_texts.items() if other != name}
    return replace(state, classifiers=classifiers, tasks=tasks, updates=updates, class_texts=texts)
