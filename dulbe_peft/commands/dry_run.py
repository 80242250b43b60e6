"""What `run --dry-run` prints: tasks, layers, parameters, memory, and an estimate of the time."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dulbe_peft.data.inventory import counted
from dulbe_peft.runs.setup import Setup
from dulbe_peft.utils.terminal import printable


def describe(setup: Setup) -> None:
    """Print what a run would do, and what it would take."""
    for number, task in enumerate(setup.tasks, 1):
        tested = "none to test on" if task.test is None else f"{len(task.test)} to test on"
        names = ", ".join(task.class_names[:5]) + (", ..." if len(task.class_names) > 5 else "")
        classes, images = counted(len(task.class_names), "class"), counted(len(task.train), "image")
        print(f"task {number}: {classes}, {images} to learn from, {tested}: {printable(names)}")
    if setup.strategy.adapts:
        _describe_model(setup.model, setup.strategy)
    else:
        print("nothing is trained, no layer is adapted")
    if setup.tasks:
        _describe_stream(setup)


def _describe_model(model: Any, strategy: Any) -> None:
    """One line for each kind of adapted layer, then parameters and, found by one image, what is kept of inputs."""
    from dulbe_peft.metrics.cost import shared_inputs, statistics_bytes, trainable_parameters

    config, layers = model.active_peft_config, model.dual_mode_layers()
    # Raises where an image does not pass through a layer: better now than after the first task.
    statistics = statistics_bytes(shared_inputs(model).values(), config.support_rank)
    kinds = Counter((n.rpartition(".")[2], layer.in_features, layer.out_features) for n, layer in layers.items())
    for (kind, width, height), count in kinds.items():
        support = min(config.support_rank, width - config.residual_rank)
        ranks = f"shared {config.shared_rank}  residual {config.residual_rank}  support <= {support}"
        print(f"{kind}  {width} -> {height}  {counted(count, 'layer')}  {ranks}")
    trained = trainable_parameters(model, strategy)
    total, other = trained["total"], trained["other"]
    print(f"adapted visual layers: {len(layers)}")
    print(f"trainable parameters: {total:,} ({total - other:,} visual, {other:,} other)")
    if strategy.remembers_inputs:
        print(f"statistics: {statistics['exact'] / 2**20:.2f} MiB")


def _describe_stream(setup: Setup) -> None:
    """Memory and time of a whole run, from two small tasks of one batch each, or of 16 images."""
    from dulbe_peft.encoders.loading import image_shape
    from dulbe_peft.metrics.cost import memory_bytes

    args, tasks = setup.args, setup.tasks
    quick = dataclasses.replace(args, epochs=1, num_workers=0, progress=False, profile=False, log_with=None)
    learner = setup.make_learner(quick)
    pixels = max(len(task.train) for task in tasks) * 4 * math.prod(image_shape(learner.clip, learner.processor))
    reads_once = args.num_workers == 0 and args.teacher == "cached"
    cached = reads_once and pixels <= args.pixel_cache_mb * 2**20
    if not cached:
        learner = setup.make_learner(dataclasses.replace(quick, pixel_cache_mb=0))
    parts = _small_tasks(tasks, max(args.batch_size, 16))  # of fewer, what a pass costs by itself would count too much
    for part in parts:
        learner.learn_task(part)
    seconds = _estimate(learner, parts[-1], args, tasks)
    print(f"pixel cache: {pixels / 2**20:.1f} MiB" if cached else "pixel cache: none, images are read each time")
    kept = f"{memory_bytes(learner.memory) / 2**20:.2f} MiB after {counted(len(parts), 'task')}"
    print(f"kept from task to task beside the adapter: {kept}")
    classes = sum(len(task.class_names) for task in tasks)
    for name, classifier in learner.classifiers.items():
        size = classifier.nbytes_with(classes)
        print(f"classifier {name}: {size / 2**20:.2f} MiB with {counted(classes, 'class')}")
    workers = "; images were read in this process alone" if args.num_workers else ""
    print(f"the whole run: about {duration(seconds)} (an estimate, from one step on your images{workers})")


def _small_tasks(tasks: Sequence[Any], size: int) -> list[Any]:
    """`size` images of the first task and of the second, so that there are old classes; or twice of a single one."""
    groups = [(task.train, np.arange(len(task.class_names))) for task in tasks[:2]]
    if len(groups) == 1 and len(groups[0][1]) > 1:
        groups = [(groups[0][0], half) for half in np.array_split(groups[0][1], 2)]
    parts = []
    for images, classes in groups:
        inside = np.flatnonzero(np.isin(images.labels, classes))
        chosen = inside[np.linspace(0, len(inside) - 1, min(size, len(inside)), dtype=int)]
        present, places = np.unique(images.labels[chosen], return_inverse=True)
        parts.append(images.at(chosen, places, [images.class_names[label] for label in present]))
    return parts


def _estimate(learner: Any, part: Any, args: Any, tasks: Sequence[Any]) -> float:
    """Seconds of the whole run, from the phases of the task that was just learned."""
    from dulbe_peft.encoders.loading import has_text
    from dulbe_peft.training.trainer import TaskTrainer

    spent, size, adapts = learner.profile.seconds, len(part), learner.strategy.adapts
    images = learner.encoder.images(part, keep=True)
    trainer = TaskTrainer(learner.state, learner.encoder, learner.logit_scale, images)
    times = [time.perf_counter()]
    for collect in (False, learner.strategy.remembers_inputs):  # one that reads the images, one as it closes a task
        trainer.encode("close", collect)
        times.append(time.perf_counter())
    read, again = times[1] - times[0], times[2] - times[1]
    closing = (again if adapts else read) / size
    fixed = spent.get("allocate", 0.0) + max(0.0, spent["close"] - closing * size)
    step = spent.get("train", 0.0) / math.ceil(size / args.batch_size)
    total = tested = 0.0
    for task in tasks:
        count = len(task.train)
        steps = args.epochs * math.ceil(count / args.batch_size) if adapts else 0
        tested += 0 if task.test is None else len(task.test)  # after each task, all seen classes
        total += fixed + steps * step + count * (spent.get("probe", 0.0) / size + closing) + tested * read / size
    zero_shot = has_text(learner.clip) and all(task.test is not None for task in tasks)
    return total + (tested * read / size if zero_shot else 0.0)


def duration(seconds: float) -> str:
    """A time as people say it, such as 7 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
