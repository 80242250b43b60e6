"""Test LfI: the loss of two heads against a literal float64 version, image by image."""

import math

import pytest
import torch
from lives import learned, tiny_learner
from torch.nn import functional as F

from dulbe_peft.papers.lfi import mutual_loss


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(scores):
    top = max(scores)
    total = sum(math.exp(score - top) for score in scores)
    return [math.exp(score - top) / total for score in scores]


def test_loss_equals_a_literal_version_in_float64():
    z, e, g = (F.normalize(drawn(*shape, seed=i), dim=1) for i, shape in enumerate([(5, 6), (3, 6), (3, 6)]))
    labels, tau, gamma = torch.tensor([0, 1, 2, 1, 0]), 7.0, 3.0
    cross, far = mutual_loss(z, e, 2 * g, labels, tau, gamma)  # means of another length
    expected_cross = expected_far = 0.0
    for i in range(5):
        p_clip = softmax([tau * float(z[i] @ e[c]) for c in range(3)])
        p_vis = softmax([tau * float(z[i] @ g[c]) for c in range(3)])
        l_clip, l_vis = -math.log(p_clip[labels[i]]), -math.log(p_vis[labels[i]])
        a = 1 / (1 + math.exp(-gamma * (l_vis - l_clip) / (l_vis + l_clip)))
        assert (a > 0.5) == (l_clip < l_vis)  # the better head has the larger weight
        q = [a * clip + (1 - a) * vis for clip, vis in zip(p_clip, p_vis, strict=True)]
        expected_cross += (l_clip + l_vis) / 5
        for p in (p_clip, p_vis):
            expected_far += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / 5
    assert float(cross) == pytest.approx(expected_cross, rel=1e-12) and float(far) == pytest.approx(expected_far)


def test_target_has_no_gradient_and_extreme_scores_stay_finite():
    z, e, g = (F.normalize(drawn(*shape, seed=i), dim=1) for i, shape in enumerate([(4, 6), (3, 6), (3, 6)]))
    labels = torch.tensor([0, 1, 2, 1])
    leaves = [each.requires_grad_() for each in (z, e, g)]
    _, far = mutual_loss(z, e, g, labels, 7.0, 3.0)
    actual = torch.autograd.grad(far, leaves)
    clip, vis = (7 * z @ e.T).log_softmax(1), (7 * z @ F.normalize(g, dim=1).T).log_softmax(1)
    losses = [F.nll_loss(each, labels, reduction="none").detach() for each in (clip, vis)]
    a = torch.sigmoid(3 * (losses[1] - losses[0]) / (losses[1] + losses[0]))[:, None]
    q = (a * clip.exp() + (1 - a) * vis.exp()).detach()
    literal = sum((p.exp() * (p - q.log())).sum() / 4 for p in (clip, vis))
    for one, other in zip(actual, torch.autograd.grad(literal, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    cross, far = mutual_loss(z.float(), e.float(), g.float(), labels, 1e4, 3.0)
    assert cross.isfinite() and far.isfinite()


def test_means_start_at_the_untouched_model_and_are_dropped():
    learner = tiny_learner("lfi", ("text",), epochs=1)
    learned(learner, 2)
    assert learner.memory is None and len(learner.record.loss) == 1
    plain = tiny_learner("lora", ("text",), epochs=1)
    learned(plain, 2)
    names = learner.model.state_dict()
    assert any(not torch.equal(tensor, names[name]) for name, tensor in plain.model.state_dict().items())
