"""Print what `run --dry-run` shows: tasks, layers, parameters, and the memory of statistics and classifiers."""

from collections import Counter
from typing import Any

from dulbe_peft.photos.runs.setup import Setup
from dulbe_peft.utils.terminal import counted, printable


def describe(setup: Setup) -> None:
    """Print what a run would do and keep, without running it."""
    for number, task in enumerate(setup.tasks, 1):
        tests = "no test images" if task.test is None else counted(len(task.test), "test image")
        names = ", ".join(task.class_names[:5]) + (", ..." if len(task.class_names) > 5 else "")
        classes, images = counted(len(task.class_names), "class"), counted(len(task.train), "training image")
        print(f"task {number}: {classes}, {images}, {tests}: {printable(names)}")
    if setup.learner.strategy.adapts:
        _describe_model(setup.learner.model, setup.learner.strategy)
    else:
        print("nothing is trained, and no layer is adapted")
    if not setup.tasks:
        return
    total = sum(len(task.class_names) for task in setup.tasks)
    for name, classifier in setup.learner.classifiers.items():
        print(f"classifier {name}: {classifier.nbytes_with(total) / 2**20:.2f} MiB with {counted(total, 'class')}")


def _describe_model(model: Any, strategy: Any) -> None:
    """Print a line per kind of adapted layer, the trainable parameters, and the memory of the input statistics."""
    from dulbe_peft.photos.cost import statistics_bytes, trainable_parameters

    config, layers = model.active_peft_config, model.dual_mode_layers()
    # This encodes an image, and raises an error if a layer is not used: better now than after the first task.
    statistics = statistics_bytes(model)
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
        print(f"statistics: {statistics / 2**20:.2f} MiB")
