"""What a model, an adapter and classifiers cost, counted from their shapes: nothing is trained, and no weight is read.

The model may be on the meta device, where tensors have a shape and take no memory.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dulbe_peft.classifiers import Classifier
from dulbe_peft.encoders.loading import has_text, image_shape, longest_text, unit_image_embeds, unit_text_embeds
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.subspaces.inputs import observed_inputs
from dulbe_peft.subspaces.occupation import OccupationStatistics

FLOAT32 = 4  # bytes


def trainable_parameters(model: Any, strategy: Strategy) -> dict[str, int]:
    """How many parameters a task trains: B of shared and residual modes, trained bases P, all else, and the total."""
    layers = model.dual_mode_layers().values()
    shared, residual = (
        sum(p.numel() for p in modes()) for modes in (model.shared_parameters, model.residual_parameters)
    )
    other = sum(p.numel() for p in model.parameters() if p.requires_grad) - shared - residual
    bases = sum(layer.dulbe_P["default"].numel() for layer in layers) * strategy.trains_bases
    if weights := sum(map(strategy.trained_weights, layers)):
        shared, residual, other = 0, 0, other + weights
    counts = {"shared": shared, "residual": residual, "bases": bases, "other": other}
    return counts | {"total": sum(counts.values())}


def kept_parameters(model: Any, strategy: Strategy, tasks: int) -> dict[str, int]:
    """How many numbers an adapter keeps for use after so many tasks; one that is merged keeps none."""
    layers = model.dual_mode_layers().values()
    text = sum(p.numel() for name, p in model.named_parameters() if ".dulbe_text_" in name)
    history = 0
    for layer in layers:
        rank = layer.dulbe_P["default"].shape[1] * (tasks if strategy.folds else 1)
        factors, matrix = rank * (layer.in_features + layer.out_features), layer.in_features * layer.out_features
        if strategy.trained_weights(layer):
            factors = matrix
        history += factors if strategy.keeps_factors else min(factors, matrix)
    return {"history": history, "text": text, "total": history + text}


def multiply_adds(model: Any, adapted: bool = False) -> dict[str, int]:
    """Multiply-adds of one image and of one text of the longest length, found by a forward pass of each.

    With `adapted`, the adapter runs beside the weights; else it is merged.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    passes = {"image": partial(unit_image_embeds, base, _blank_image(base))}
    if has_text(base):
        ids = torch.zeros(1, longest_text(base), dtype=torch.int64, device=next(base.parameters()).device)
        passes["text"] = partial(unit_text_embeds, base, {"input_ids": ids})
    # torch's counter does not know the product in place, with which the adapter adds its update.
    products = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    counts = {}
    for name, forward in passes.items():
        without = nullcontext() if adapted or base is model else model.disable_adapter()
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=products) as counter, without:
            forward()
        counts[name] = counter.get_total_flops() // 2
    return counts


def _blank_image(base: Any) -> torch.Tensor:
    return torch.zeros(1, *image_shape(base), device=next(base.parameters()).device)


def shared_inputs(model: Any) -> dict[tuple[str, ...], int]:
    """The adapted layers by the tensor that they read, with its width d_in, found by one image."""
    read: dict[str, torch.Tensor] = {}
    base, layers = model.get_base_model(), model.dual_mode_layers()
    with observed_inputs(layers, read.__setitem__), torch.no_grad():
        unit_image_embeds(base, _blank_image(base))
    groups: dict[int, list[str]] = {}
    for name, tensor in read.items():
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(names): layers[names[0]].in_features for names in groups.values()}


def statistics_bytes(widths: Iterable[int], support_rank: int) -> dict[str, int]:
    """Bytes of the statistics of inputs of these widths d_in: S in full, and sketches of at most 2 K_h rows."""
    sizes = [(width * width, min(width, 2 * support_rank) * width) for width in widths]
    return {"exact": FLOAT32 * sum(full for full, _ in sizes), "sketch": FLOAT32 * sum(part for _, part in sizes)}


def memory_bytes(memory: Memory | None) -> int:
    """Bytes of what a strategy keeps between tasks."""
    if isinstance(memory, OccupationStatistics):
        return memory.nbytes
    return sum(tensor.nbytes for tensor in (memory or {}).values())


def classifier_bytes(classifier: Classifier, classes: int) -> dict[str, int]:
    """Bytes that a classifier keeps with so many classes: in `total`, and `without_texts`, which a run keeps once.

    `learning`: multiply-adds of the task that brings the last classes, where they grow with the square of all; else 0.
    """
    total = classifier.nbytes_with(classes)
    texts = classifier.tensors().get("text_embeds")
    shared = 0 if texts is None else classes * texts.shape[1] * texts.element_size()
    return {"total": total, "without_texts": total - shared, "learning": classifier.products_with(classes)}


def cost(
    model: Any, strategy: Strategy, classifiers: Mapping[str, Classifier], classes: int = 100, tasks: int = 10
) -> dict[str, Any]:
    """What a model, a strategy and classifiers cost, as plain data.

    >>> from dulbe_peft.encoders.loading import empty_encoder
    >>> from dulbe_peft.demo import demo_model_folder
    >>> from dulbe_peft.strategies import make_strategy
    >>> cost(empty_encoder(demo_model_folder()), make_strategy("frozen"), {}).get("multiply_adds")
    {'image': 6150912, 'text': 4689600}
    """
    base = model.get_base_model() if strategy.adapts else model
    found: dict[str, Any] = {
        "strategy": strategy.name,
        "classes": classes,
        "tasks": tasks,
        "model": sum(p.numel() for name, p in base.named_parameters() if "dulbe" not in name),
        "multiply_adds": multiply_adds(model),
        "classifiers": {name: classifier_bytes(one, classes) for name, one in classifiers.items()},
    }
    if strategy.adapts:
        found |= {
            "layers": len(model.dual_mode_layers()),
            "trainable": trainable_parameters(model, strategy),
            "kept": kept_parameters(model, strategy, tasks),
            "multiply_adds_unmerged": multiply_adds(model, adapted=True),
            "statistics": statistics_bytes(shared_inputs(model).values(), model.active_peft_config.support_rank),
        }
    return found


def format_cost(found: Mapping[str, Any]) -> str:
    """`cost`'s figures as lines for a person."""

    def mib(size: int) -> str:
        return f"{size / 2**20:.2f} MiB"

    def giga(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count / 1e9:.4f} for one {what}" for what, count in counts.items())

    lines = [f"parameters of the model: {found['model']:,}", f"strategy {found['strategy']}"]
    if "trainable" in found:
        trained, kept, statistics = found["trainable"], found["kept"], found["statistics"]
        listed = ", ".join(f"{count:,} {name}" for name, count in trained.items() if count and name != "total")
        lines += [
            f"  adapted layers: {found['layers']}",
            f"  trainable parameters in a task: {trained['total']:,} ({listed})",
            f"  kept for use, merged into the weights: 0; not merged, after {found['tasks']} tasks: "
            f"{kept['total']:,} ({kept['history']:,} history, {kept['text']:,} text)",
            f"  occupation statistics: {mib(statistics['exact'])}, as sketches {mib(statistics['sketch'])}",
        ]
    lines += [
        "billions of multiply-adds (GMACs; many papers write GFLOPs for them, others for twice as many)",
        f"  the model, or with the adapter merged: {giga(found['multiply_adds'])}",
    ]
    if "multiply_adds_unmerged" in found:
        lines.append(f"  with the adapter not merged: {giga(found['multiply_adds_unmerged'])}")
    if found["classifiers"]:
        what = f"classifiers with {found['classes']} classes, with and without the text embeddings"
        lines.append(f"{what}; learning takes two to three times as much")
        width = max(map(len, found["classifiers"]))
        for name, size in found["classifiers"].items():
            lines.append(f"  {name:<{width}}  {mib(size['total']):>12}  {mib(size['without_texts']):>12}")
        for name, size in found["classifiers"].items():
            if size["learning"]:
                lines.append(
                    f"{name} trains on all classes in every task: {size['learning'] / 1e9:,.0f} billions here"
                )
    return "\n".join(lines)
