"""Compare a routed training step with a step of stock LoRA and with a step of the literal implementation.

Only the vision tower is measured, with given text embeddings, so that a text tower does not hide the difference. The
step is one of the second task, with a history of rank 9, ten old classes and ten new ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import torch

from research.benchmarks import common, literal, models, ours, stock


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=15)
    options.add_argument("--batch", type=int, nargs="+", default=[4], help="images per step; each number is measured")
    options.add_argument("--attention", nargs="+", default=["sdpa"], help="sdpa, eager, or both")
    options.add_argument("--precision", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    options.add_argument("--without-literal", action="store_true")
    values = common.parse(options, argv)
    rows = []
    for batch in values.batch:
        routed = {}
        for attention in values.attention:
            sides = make_sides(values.model, attention, batch, literal_too=not values.without_literal)
            if values.precision == "bfloat16":
                sides = {name: partial(in_bfloat16, step) for name, step in sides.items()}
            times = common.compare(sides, values.repeats)
            where = f"{common.model_name(values.model)}, {attention}, batch {batch}"
            where += "" if values.precision == "float32" else f", {values.precision}"
            rows.append(common.row(f"routed step / stock LoRA step, {where}", times, "ours", "stock", 1.40))
            if not values.without_literal:
                rows.append(common.row(f"routed step / literal step, {where}", times, "ours", "literal"))
                rows.append(common.row(f"literal step / stock LoRA step, {where}", times, "literal", "stock"))
            routed[attention] = sides["ours"]
        for first, other in combinations(routed, 2):
            times = common.compare({first: routed[first], other: routed[other]}, values.repeats)
            where = f"{common.model_name(values.model)}, batch {batch}"
            rows.append(common.row(f"routed step with {first} / with {other}, {where}", times, first, other))
    common.write("step", values, argv, rows)


def make_sides(model: str, attention: str, batch_size: int, literal_too: bool) -> dict[str, partial[None]]:
    """Return the steps to compare, all on the same images, labels and embeddings."""
    tower = models.vision_tower(model, attention)
    settings = tower.config
    classes = min(10, batch_size)
    batch = (models.pixels(batch_size, settings.image_size), torch.arange(batch_size) % classes)
    text = models.unit(10, settings.projection_dim, seed=2)
    old_text = models.unit(10, settings.projection_dim, seed=3)
    lora = stock.lora(copy.deepcopy(tower))
    routed = ours.adapted(copy.deepcopy(tower), tasks=1)
    teacher = ours.teacher_embeds(routed, batch[0])
    sides = {
        "ours": partial(ours.step, routed, stock.adam(routed), batch, text, old_text, teacher),
        "stock": partial(stock.step, lora, stock.adam(lora), batch, text),
    }
    if literal_too:
        student = ours.literal_twin(routed, tower)
        arguments = (models.encode, batch, text, old_text, models.LOGIT_SCALE)
        adam = stock.adam(student)
        sides["literal"] = partial(literal.step, student, copy.deepcopy(student), adam, *arguments)
    return sides


def in_bfloat16(step: Callable[[], None]) -> None:
    """Make a step in an autocast of its own, which keeps its copies of the trained weights until it is left."""
    with torch.autocast("cpu", torch.bfloat16):
        step()


if __name__ == "__main__":
    main()
