"""The bridge-prototype head on features of any model: no PEFT, no transformers.

    python examples/head_alone.py

Here the features are random clusters; yours come from any encoder with an image side and a text side.
"""

from __future__ import annotations

import torch

from dulbe_peft import BridgeEnsembleHead


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 32, generator=generator)
    texts = centres + 1.5 * torch.randn(6, 32, generator=generator)
    labels = torch.arange(6).repeat(20)
    features = centres[labels] + torch.randn(120, 32, generator=generator)

    head = BridgeEnsembleHead(embed_dim=32, logit_scale=20.0)
    old = labels < 3
    head.add_classes(["ant", "bee", "cat"], features[old], labels[old], texts[:3])
    head.add_classes(["dog", "elk", "fox"], features[~old], labels[~old] - 3, texts)

    with torch.no_grad():
        accuracy = (head(features).argmax(dim=1) == labels).float().mean().item()
    print(f"accuracy: {accuracy:.3f}")
    for name, depth in zip(head.class_names, head.expected_depth().tolist(), strict=True):
        print(f"{name}: mean depth {depth:.2f} (0 is the visual prototype, 1 the text embedding)")


if __name__ == "__main__":
    main()
