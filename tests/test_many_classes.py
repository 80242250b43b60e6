"""The recipe of the page on predicting: an index of all classes finds what comparing with all of them finds."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dulbe_peft import LdaClassifier, PrototypeClassifier

CLASSES, WIDTH = 1000, 32


class Index:
    """What faiss's IndexFlatIP does."""

    def __init__(self, width):
        self.rows = np.zeros((0, width), np.float32)

    def add(self, rows):
        self.rows = np.concatenate([self.rows, rows])

    def search(self, queries, count):
        scores = queries @ self.rows.T
        places = np.argsort(-scores, axis=1)[:, :count]
        return np.take_along_axis(scores, places, axis=1), places


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (PrototypeClassifier, lambda means: {"sums": means}),
        (LdaClassifier, lambda means: {"means": means, "scatter": torch.eye(WIDTH), "freedom": torch.tensor(WIDTH)}),
    ],
)
def test_the_five_best_of_many_classes(kind, state, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", SimpleNamespace(IndexFlatIP=Index))
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
