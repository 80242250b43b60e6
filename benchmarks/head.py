"""The head's logits beside K_b passes, one classifier a depth, with bridges made beforehand on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import common, literal, models
from dulbe_peft import BridgeEnsembleHead


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=51, model=None)
    options.add_argument("--classes", type=int, default=1000)
    options.add_argument("--batch", type=int, default=256, help="images")
    options.add_argument("--dim", type=int, default=512)
    values = common.parse(options, argv)
    head = BridgeEnsembleHead(values.dim)
    text = models.unit(values.classes, values.dim, seed=1)
    per_class = text.repeat(2, 1) + 0.1 * models.unit(2 * values.classes, values.dim, seed=2)
    names = [f"class {number}" for number in range(values.classes)]
    head.add_classes(names, per_class, torch.arange(values.classes).repeat(2), text)
    features = models.unit(values.batch, values.dim, seed=3)
    bridges = list(head.bridge_prototypes().unbind(1))
    weights = head.reliability

    def ours() -> torch.Tensor:
        return head(features)

    def passes() -> torch.Tensor:
        return literal.ensemble_logits(features, bridges, weights, head.logit_scale)

    torch.testing.assert_close(ours(), passes(), rtol=1e-4, atol=1e-4)
    times = common.compare({"ours": ours, "passes": passes}, values.repeats, warmup=3)
    what = f"head on {values.classes:,} classes / {head.num_depths} passes, {values.batch} images, d = {values.dim}"
    common.write("head", values, argv, [common.row(what, times, "ours", "passes", 0.15)])


if __name__ == "__main__":
    main()
