"""Compare a text-tower step on the current classes with one on all seen classes, padded to 77 tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig, cross_modal_loss
from dulbe_peft.encoders.loading import tokenize, unit_text_embeds
from research.benchmarks import common, models, stock


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=9)
    options.add_argument("--seen", type=int, default=100, help="classes seen so far")
    options.add_argument(
        "--current", type=int, default=10, help="how many of the seen classes belong to the current task"
    )
    options.add_argument("--attention", default="sdpa")
    values = common.parse(options, argv)
    if values.quick:
        values.seen, values.current = 6, 2
    clip, processor = models.clip(values.model, values.attention)
    model = get_peft_model(clip, DualModeLoraConfig()).train()
    prompts = [f"a photo of a class {number}." for number in range(values.seen)]
    current = tokenize(processor, prompts[-values.current :], clip)
    everything = processor.tokenizer(prompts, padding="max_length", max_length=77, return_tensors="pt")
    padded = {name: everything[name] for name in current}
    features = models.unit(32, clip.config.projection_dim, seed=1)
    optimizer = stock.adam(model)

    def step(tokens: dict[str, torch.Tensor]) -> Callable[[], Any]:
        def run() -> None:
            text = unit_text_embeds(clip, tokens)
            labels = torch.arange(len(features)) % values.current
            cross_modal_loss(features, text, labels, models.LOGIT_SCALE).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    times = common.compare({"ours": step(current), "padded": step(padded)}, values.repeats)
    length = current["input_ids"].shape[1]
    sizes = f"{values.current} classes, {length} tokens / {values.seen} classes, 77 tokens"
    what = f"text-tower step, {sizes}, {common.model_name(values.model)}"
    common.write("text", values, argv, [common.row(what, times, "ours", "padded", 0.15)])


if __name__ == "__main__":
    main()
