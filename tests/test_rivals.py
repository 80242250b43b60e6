"""The rules of other papers beside literal versions of them, and in the benchmark that compares."""

import math

import pytest
import torch
from reference import randn
from torch.nn import functional as F

from benchmarks import rivals
from dulbe_peft.classifiers.calibration import hold_back

LABELS = torch.arange(30) % 3
Z = F.normalize(randn(3, 8, seed=1)[LABELS] + randn(30, 8, seed=2), dim=1)
TEXTS, TESTS = F.normalize(randn(3, 8, seed=3), dim=1), F.normalize(randn(5, 8, seed=4), dim=1)


def test_tip_adapter_and_proker_are_the_literal_ones():
    tip = rivals.tip_adapter(Z, LABELS, TEXTS, 20.0, TESTS, 2.0, 5.0)
    found = rivals.proker(Z, LABELS, TEXTS, 20.0, TESTS, 3.0, 0.5)
    z, e, tests = Z.double(), TEXTS.double(), TESTS.double()
    kernel = torch.tensor([[math.exp(-3 * float((a - b).square().sum()) / 2) for b in z] for a in z]).double()
    weights = torch.linalg.inv(kernel + 0.5 * torch.eye(30).double()) @ (F.one_hot(LABELS, 3).double() - z @ e.T)
    for row, test in enumerate(tests):
        for c in range(3):
            cache = sum(math.exp(-5 * (1 - float(test @ s))) for s, label in zip(z, LABELS, strict=True) if label == c)
            assert float(tip[row, c]) == pytest.approx(20 * float(test @ e[c]) + 2 * cache, abs=1e-3)
            near = sum(math.exp(-3 * float((test - z[i]).square().sum()) / 2) * weights[i, c] for i in range(30))
            assert float(found[row, c]) == pytest.approx(float(test @ e[c] + near), abs=1e-5)


def test_held_back_images_choose_the_setting(monkeypatch):
    seen = []

    def rule(z, y, e, tau, tests, good):
        seen.append((len(z), len(tests), good))
        return F.one_hot(LABELS[hold_back(Z, LABELS)] if good else torch.zeros(len(tests)).long(), 3)[: len(tests)]

    monkeypatch.setitem(rivals.RIVALS, "rule", (rule, [{"good": False}, {"good": True}]))
    rivals.scores("rule", Z, LABELS, TEXTS, 20.0, TESTS)
    assert seen == [(24, 6, False), (24, 6, True), (30, 5, True)]
    seen.clear()
    rivals.scores("rule", Z[:3], LABELS[:3], TEXTS, 20.0, TESTS)
    assert seen == [(3, 5, False)]
