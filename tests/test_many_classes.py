"""The recipe of the page on predicting: an index of 100,000 classes finds what comparing with all of them finds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dulbe_peft import LdaClassifier, PrototypeClassifier

CLASSES, WIDTH = 100_000, 32


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (PrototypeClassifier, lambda means: {"sums": means}),
        (LdaClassifier, lambda means: {"means": means, "scatter": torch.eye(WIDTH), "freedom": torch.tensor(WIDTH)}),
    ],
)
def test_the_five_best_of_many_classes(kind, state):
    pytest.importorskip("faiss")
    page = (Path(__file__).parents[1] / "docs" / "predicting.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "faiss" in block)
    namespace: dict = {}
    exec(code, namespace)
    classifier = kind(WIDTH)
    means, counts = F.normalize(torch.randn(CLASSES, WIDTH), dim=1), torch.ones(CLASSES, dtype=torch.int64)
    classifier.install({"counts": counts} | state(means))
    classifier._class_names = [str(number) for number in range(CLASSES)]
    features = F.normalize(torch.randn(20, WIDTH), dim=1)
    scores, places = namespace["best_classes"](classifier, features)
    expected = classifier(features).topk(5)
    np.testing.assert_array_equal(places, expected.indices)
    np.testing.assert_allclose(scores, expected.values, rtol=1e-4, atol=1e-4)
