"""Measure what Python does in a call of an adapted layer, and its share of a step of a large model.

The layer is so small that its products cost nothing: 16 features, 4 tokens. Other programs can only make a round
slower, so the fastest round counts. In every call the layer decides whether its base layer is plain (see
`DualModeLayer.plain`), which is also measured by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from dulbe_peft import DualModeLoraConfig
from research.benchmarks import common, models, ours, step

WIDTH, TOKENS = 16, 4


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=40)
    options.add_argument("--calls", type=int, default=1000, help="calls of a layer in each round")
    values = common.parse(options, argv)
    if values.quick:
        values.calls = 10
    layer = small_layer(DualModeLoraConfig(target_modules=["0"], text_rank=0))
    sides: dict[str, Callable[[], Any]] = {
        "DualModeLora": passes(layer),
        "LoRA": passes(small_layer(LoraConfig(r=9, target_modules=["0"]))),
        "decision": lambda: layer.plain,
    }
    times = common.compare({name: repeated(call, values.calls) for name, call in sides.items()}, values.repeats)
    micro = {name: 1e6 * min(clocks["cpu"]) / values.calls for name, clocks in times.items()}
    whole = step.make_sides(values.model, "sdpa", 1, literal_too=False)["ours"]
    seconds = min(common.compare({"step": whole}, min(values.repeats, 10))["step"]["cpu"])
    layers = len(ours.adapted(models.vision_tower(values.model, "sdpa"), tasks=0).dual_mode_layers())
    share = layers * micro["decision"] / (1e6 * seconds)
    decisions = f"the decisions of {layers} layers / a step of {common.model_name(values.model)}, one image"
    rows = [
        common.value_row("call of a DualModeLora layer, forward and backward", micro["DualModeLora"], "µs"),
        common.value_row("call of a LoRA layer, forward and backward", micro["LoRA"], "µs"),
        common.value_row("decision whether the base layer is plain", micro["decision"], "µs"),
        common.value_row(decisions, 100 * share, "%"),
    ]
    common.write("layer", values, argv, rows)


def small_layer(config: Any) -> Any:
    """Return an adapted layer; a dual-mode one has a history, as in the second task."""
    model: Any = get_peft_model(nn.Sequential(nn.Linear(WIDTH, WIDTH)), config).train()
    generator = torch.Generator().manual_seed(1)
    for _ in range(2 if isinstance(config, DualModeLoraConfig) else 0):
        model.begin_task(ours.random_bases(model, generator))
        for parameter in (*model.shared_parameters(), *model.residual_parameters()):
            parameter.data.normal_(std=1e-3, generator=generator)
    return model.get_base_model()[0]


def passes(layer: nn.Module) -> Callable[[], None]:
    """Return a function that makes a forward and a backward pass through a layer."""
    x, cotangent = torch.ones(1, TOKENS, WIDTH, requires_grad=True), torch.ones(1, TOKENS, WIDTH)

    def run() -> None:
        layer(x).backward(cotangent)
        x.grad = None

    return run


def repeated(call: Callable[[], Any], count: int) -> Callable[[], None]:
    """Return a function that makes `count` calls."""

    def run() -> None:
        for _ in range(count):
            call()

    return run


if __name__ == "__main__":
    main()
