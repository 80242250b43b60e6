"""SGCL's loss and its gradients against the formulas, image by image in float64."""

import pytest
import torch
from torch.nn import functional as F

from dulbe_peft import LearnerArguments
from dulbe_peft.strategies import NewTask, Step, make_strategy

TAU = 6.0
LABELS = torch.tensor([0, 2, 1, 2, 0])


def unit(*shape, seed):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def softmax(values):
    weights = [torch.exp(value) for value in values]
    return [weight / sum(weights) for weight in weights]


def literal_loss(z, text, start, old, before, soft_weight, softness, distillation, temperature):
    """The mean over images of both divergences, as sums over classes; `start` is the text when the task began."""
    total = 0.0
    for image, label in enumerate(LABELS):
        own = start[label]
        s = softmax([softness * own @ e for e in [*old, *start]])
        q = softmax([TAU * z[image] @ e for e in [*old, *text]])
        total = total + soft_weight * sum(a * (a.log() - b.log()) for a, b in zip(s, q, strict=True))
        if len(old):
            near = [float(own @ e) for e in old]
            signs = [1 if value == max(near) else -1 for value in near]
            t = [TAU * before[image] @ e + sign * max(near) for e, sign in zip(old, signs, strict=True)]
            p = softmax([value / temperature for value in t])
            q = softmax([TAU * z[image] @ e / temperature for e in old])
            divergence = sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True))
            total = total + distillation * temperature**2 * divergence
    return total / len(LABELS)


@pytest.mark.parametrize("known", [0, 4])
def test_the_gradients_are_those_of_the_formula(known):
    strategy = make_strategy("sgcl:soft_weight=0.7,softness=5,distillation=0.3,temperature=2")
    task, start, before = NewTask(int(known > 0), None, LearnerArguments()), unit(3, 8, seed=1), unit(5, 8, seed=2)
    old = unit(known, 8, seed=3)
    for seed in (10, 20):  # the second step's texts have moved, the targets stay those of the first
        z = unit(5, 8, seed=seed).requires_grad_()
        text = (start if seed == 10 else unit(3, 8, seed=seed + 1)).clone().requires_grad_()
        own_loss = (z.square() * 0.5).sum()
        step = Step(own_loss, z, LABELS, text, old if known else None, z.detach, lambda: before, TAU)
        strategy.backward(task, step)
        twins = [tensor.detach().double().requires_grad_() for tensor in (z, text)]
        more = literal_loss(*twins, start.double(), old.double(), before.double(), 0.7, 5.0, 0.3, 2.0)
        (more + (twins[0].square() * 0.5).sum()).backward()
        for found, twin in zip((z, text), twins, strict=True):
            torch.testing.assert_close(found.grad.double(), twin.grad, rtol=1e-4, atol=1e-5)
        assert all(twin.grad.norm() > 1e-3 for twin in twins)
