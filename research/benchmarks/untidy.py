"""Folders as people have them: wrong labels, names that do not describe their images, and bursts of photographs.

    labels:0.1    a share of the images of each task exchange their labels; every class keeps its size
    similar:0.1   a share of the images of each class get the label of the class most like it in their task
    pair:0.4      a share of the images of the two most similar classes of each task get each other's label
    strangers:0.3  the last class is not learned, and its images are so large a share of the class most like it
    folders:2     two classes of each of so many tasks, the most similar ones, have each other's images
    names:0.2     a share of the classes exchange their names
    bare:0.1      a share of the classes have no name
    items:0.1     every image is an item of 6 to 24 frames, given as a group, and a share of the items are mislabelled
    bursts:4      every image comes with four further frames of the same thing, and nobody says so
    groups:4      the same, and each image with its frames is given as a group
    few:3         three classes, spread over the stream, keep their images, and the others keep one each
    none          as it is

A frame is z + `APART` (u - v), normalised, with u and v two images of a random class that are not learned: it differs
from z as images of a class differ, but less. If u were learned, the frames of other images would tell how u differs
from its class. On 100 photographs of clothes, DeiT's features of crops with another angle and brightness have
a mean cosine of 0.87 with the photograph, and images of a class 0.43; `APART` makes frames as close.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

Task = Any  # a `Task` of `research.benchmarks.frozen`, which imports this module

APART = 0.5


def untidy(kind: str, features: dict[str, Any], tasks: list[Task], seed: int) -> tuple[dict[str, Any], list[Task]]:
    """Return the features and the tasks of a stream after what `kind` says happened to them."""
    what, _, amount = kind.partition(":")
    generator = torch.Generator().manual_seed(1000 + seed)
    if what == "labels":
        return features, wrong_labels(tasks, float(amount), generator)
    if what in ("similar", "pair"):
        return features, [similar_labels(task, float(amount), what == "pair", generator) for task in tasks]
    if what == "folders":
        count = int(amount)
        return features, [similar_labels(task, 1.0, True, generator) for task in tasks[:count]] + tasks[count:]
    if what == "strangers":
        return features, strangers(tasks, float(amount), generator)
    if what == "items":
        mislabelled = [similar_labels(task, float(amount), False, generator) for task in tasks]
        return features, framed(features, mislabelled, 23, generator, 5)
    if what == "bare":
        return without_names(features, float(amount), generator), tasks
    if what == "names":
        return wrong_names(features, float(amount), generator), tasks
    if what in ("bursts", "groups"):
        frames = framed(features, tasks, int(amount), generator)
        return features, [replace(task, groups=task.groups if what == "groups" else []) for task in frames]
    if what == "few":
        return features, few_classes(tasks, int(amount))
    if kind != "none":
        raise ValueError(
            "--untidy must be none, labels:SHARE, similar:SHARE, pair:SHARE, strangers:SHARE, folders:N, names:SHARE, "
            f"bare:SHARE, items:SHARE, bursts:N, groups:N or few:N, got {kind!r}"
        )
    return features, tasks


def wrong_labels(tasks: list[Task], share: float, generator: torch.Generator) -> list[Task]:
    """Return the tasks in which a share of each task's images exchange their labels with images of other classes.

    Raises:
        ValueError: If these are fewer than two images of a task, so that no label would be wrong.
    """
    changed = []
    for task in tasks:
        images, labels = task.train.clone(), torch.tensor(task.y)
        if share > 0 and round(share * len(images)) < 2:
            raise ValueError(f"labels:{share:g} changes no label in a task of {len(images)} images: take more images")
        chosen = torch.randperm(len(images), generator=generator)[: round(share * len(images))]
        chosen = chosen[labels[chosen].argsort(stable=True)]  # by class, so that a shift by half reaches another class
        images[chosen] = task.train[chosen.roll(len(chosen) // 2)]
        changed.append(replace(task, train=images))
    return changed


def alike(task: Task) -> Tensor:
    """Return the cosines of the means of a task's classes, (C, C), less than all others with the class itself."""
    labels = torch.tensor(task.y)
    means = torch.stack([task.train[labels == label].mean(dim=0) for label in range(len(task.classes))])
    means = normalize(means - means.mean(dim=0), dim=1)
    return means @ means.T - 3 * torch.eye(len(means))


def similar_labels(task: Task, share: float, pair: bool, generator: torch.Generator) -> Task:
    """Return the task in which a share of each class's images, or of the two most similar classes, move.

    They move to the most similar class of the task; those of the two classes to each other.
    """
    labels, like = torch.tensor(task.y), alike(task)
    target = like.argmax(dim=1)
    moving = divmod(int(like.argmax()), len(like)) if pair else range(len(like))
    given = labels.clone()
    for label in moving:
        rows = (labels == label).nonzero()[:, 0]
        # At least one image of a class stays, unless all of them move.
        count = min(round(share * len(rows) + float(torch.rand(1, generator=generator)) - 0.5), len(rows))
        rows = rows[
            torch.randperm(len(rows), generator=generator)[: count if share == 1 else min(count, len(rows) - 1)]
        ]
        given[rows] = moving[1 - moving.index(label)] if pair else target[label]
    return replace(task, y=given.tolist())


def strangers(tasks: list[Task], share: float, generator: torch.Generator) -> list[Task]:
    """Return the tasks without the last class, whose images replace a share of those of the class most like it."""
    last, task = len(tasks[-1].classes) - 1, tasks[-1]
    place = sum(len(each.classes) for each in tasks) - 1  # of the class in the stream, as in `truth`
    labels, truth = torch.tensor(task.y), torch.tensor(task.truth)
    found = (labels == int(alike(task)[last].argmax())).nonzero()[:, 0]
    images, strange = task.train.clone(), task.train[labels == last]
    count = min(round(share * len(found)), len(strange))
    images[found[torch.randperm(len(found), generator=generator)[:count]]] = strange[:count]
    kept, tested = labels != last, truth != place
    fewer = replace(
        task,
        classes=task.classes[:-1],
        train=images[kept],
        y=labels[kept].tolist(),
        test=task.test[tested],
        truth=truth[tested].tolist(),
        counts=task.counts[:-1],
    )
    return [*tasks[:-1], fewer]


def without_names(features: dict[str, Any], share: float, generator: torch.Generator) -> dict[str, Any]:
    """Return the features in which a share of the classes, at least one, have no text; also if no class has one."""
    number, texts = len(features["names"]), features["text"]
    bare = torch.randperm(number, generator=generator)[: max(1, round(share * number))]
    return features | {"text": None if texts is None else texts.index_fill(0, bare, 0), "bare": bare.tolist()}


def wrong_names(features: dict[str, Any], share: float, generator: torch.Generator) -> dict[str, Any]:
    """Return the features in which a share of the classes pass their texts on in a circle.

    Raises:
        ValueError: If this is fewer than two classes, so that no name would be wrong.
    """
    if features["text"] is None:
        return features
    texts = features["text"].clone()
    if share > 0 and round(share * len(texts)) < 2:
        raise ValueError(f"names:{share:g} changes no name of {len(texts)} classes: take more classes")
    chosen = torch.randperm(len(texts), generator=generator)[: round(share * len(texts))]
    texts[chosen] = texts[chosen.roll(1)]
    return features | {"text": texts, "misnamed": chosen.tolist()}


def few_classes(tasks: list[Task], number: int) -> list[Task]:
    """Return the tasks in which all but `number` classes keep one image only. These are spread over the stream."""
    classes, start, counts, reduced = sum(len(task.classes) for task in tasks), 0, list[int](), []
    whole = {classes * (2 * place + 1) // (2 * number) for place in range(number)}
    for task in tasks:
        kept = [row for row, label in enumerate(task.y) if start + label in whole or label not in task.y[:row]]
        labels = [task.y[row] for row in kept]
        counts += [labels.count(label) for label in range(len(task.classes))]
        reduced.append(replace(task, train=task.train[kept], y=labels))
        start += len(task.classes)
    reduced[-1].counts = counts
    return reduced


def framed(
    features: dict[str, Any], tasks: list[Task], frames: int, generator: torch.Generator, least: int | None = None
) -> list[Task]:
    """Return the tasks with further frames, as of `with_frames`, from images that no task has learned."""
    learned = {row.numpy().tobytes() for task in tasks for row in task.train}
    free = torch.tensor([row.numpy().tobytes() not in learned for row in features["train"]])
    pool, owners = features["train"][free], features["y"][free]
    return [with_frames(task, frames, pool, owners, generator, least) for task in tasks]


def with_frames(
    task: Task, frames: int, pool: Tensor, owners: Tensor, generator: torch.Generator, least: int | None = None
) -> Task:
    """Return the task with further frames of each image, which form a group with it: `least` to `frames`, or all.

    `pool`, (n, d), are images of the stream that are not learned, and `owners` their classes.

    Raises:
        ValueError: If no class has two of them.
    """
    order = owners.argsort(stable=True)
    pairs = torch.stack([order[:-1], order[1:]])[:, owners[order[:-1]] == owners[order[1:]]]
    if not pairs.shape[1]:
        raise ValueError("no class has two images that are not learned, from which frames are made: take fewer images")
    made = [task.train]
    for _ in range(frames):
        first, second = pairs[:, torch.randint(pairs.shape[1], (len(task.train),), generator=generator)]
        made.append(normalize(task.train + APART * (pool[first] - pool[second]), dim=1))
    numbers = torch.full((len(task.train),), frames)
    if least is not None:
        numbers = torch.randint(least, frames + 1, (len(task.train),), generator=generator)
    kept = (torch.arange(frames + 1)[:, None] <= numbers).flatten()  # the frames of a number lie one after another
    groups = torch.arange(len(task.train)).repeat(frames + 1)[kept]
    labels = torch.tensor(task.y).repeat(frames + 1)[kept]
    return replace(task, train=torch.cat(made)[kept], y=labels.tolist(), groups=groups.tolist())
