"""Test CLG-CBM's classifier: three tasks against a literal version, the texts of the classes, and the concepts."""

import copy
import math

import pytest
import torch
from drawn import DIM, features, normal, step
from lives import stream, tiny_base, tiny_learner
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, run_stream
from dulbe_peft.metrics.task_features import learn_from_features, read_features
from dulbe_peft.papers import clg_cbm
from dulbe_peft.papers.clg_cbm import ClgCbmClassifier

SETTINGS = {"epochs": 4, "batch_size": 5, "learning_rate": 0.05, "alignment": 0.7, "draws": 3, "seed": 2}
# For each task: number of classes, class names, class of each text, and the order in which the texts are passed.
TASKS = [(3, "abc", [0, 1, 1, 2], [3, 1, 0, 2]), (2, "de", [0, 0, 1], [2, 0, 1]), (1, "f", [0, 0], [0, 1])]


def literal_loss(x, classes, concepts, e, w):
    """Return the loss of a batch, computed feature by feature."""
    active = [e @ (row / row.norm()) for row in x]
    loss = sum((w @ a).logsumexp(dim=0) - (w @ a)[c] for a, c in zip(active, classes, strict=True)) / len(x)
    for k, text in enumerate(concepts):
        p, q = torch.stack([a[k] ** 3 for a in active]), torch.stack([(row @ text) ** 3 for row in x])
        loss = loss - 0.7 * (p @ q) / (p.norm() * q.norm()) / len(concepts)
    return loss + 0.001 * (0.99 * w.abs().sum() + 0.005 * (w**2).sum())


def literal_task(x, y, texts, concepts, old, e, w):
    """Return E and W after a task in float64; `old` has each class's (mean, covariance) and gets the new ones."""
    known, generator, leaves = len(old), torch.Generator().manual_seed(2 * 1_000_003 + len(old)), []
    old += [(x[y == c].mean(dim=0), torch.cov(x[y == c].T) + 1e-4 * torch.eye(DIM)) for c in range(int(y.max()) + 1)]
    shown = [(row, known + int(c)) for row, c in zip(x, y, strict=True)]
    for c in range(known):
        near = [float(texts[c] @ mean / mean.norm()) for mean, _ in old[known:]]
        new = near.index(max(near))
        shown += [(row - old[known + new][0] + old[c][0], c) for row in x[y == new]]
    shown.sort(key=lambda pair: float(pair[0] @ torch.arange(1, DIM + 1).sin().double()))
    for before, shape in ((e, (len(concepts), DIM)), (w, (len(old), len(concepts)))):
        start = ((2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])).double()
        start[: before.shape[0], : before.shape[1]] = before
        leaves.append(start.requires_grad_())
    adam, order = torch.optim.Adam(leaves), torch.randperm(known, generator=generator).tolist()
    for epoch in range(4):
        for number, batch in enumerate(torch.randperm(len(shown), generator=generator).split(5)):
            pairs = [shown[i] for i in batch]
            if known:
                replayed = [order[(2 * number + n) % known] for n in (0, 0, 0, 1, 1, 1)]
                noise = torch.randn(6, DIM, generator=generator).double()
                roots = [torch.linalg.cholesky(old[c][1]) for c in replayed]
                pairs += [(old[c][0] + root @ n, c) for c, root, n in zip(replayed, roots, noise, strict=True)]
            step(adam, 0.005 if epoch == 3 else 0.05, literal_loss(*zip(*pairs, strict=True), concepts, *leaves))
    return [tensor.detach() for tensor in leaves]


@pytest.mark.slow
def test_three_tasks_equal_literal_version_and_forgotten_class_loses_texts(monkeypatch):
    monkeypatch.setattr(clg_cbm, "MILESTONES", (3,))
    classifier, texts, each = ClgCbmClassifier(DIM, **SETTINGS), normal(6, DIM, seed=8), normal(9, DIM, seed=9)
    unit, concepts, old = F.normalize(texts, dim=1).double(), F.normalize(each, dim=1).double(), []
    e, w, seen = torch.zeros(0, DIM), torch.zeros(0, 0), 0
    for number, (count, names, owners, given) in enumerate(TASKS):
        x, y = features(count, 13, 5 * number)
        new, seen, total = each[seen : seen + len(owners)], seen + len(owners), len(old) + count
        e, w = literal_task(F.normalize(x, dim=1).double(), y, unit, concepts[:seen], old, e, w)
        shuffled, new_texts = normal(len(x), seed=number).argsort(), (new[given], torch.tensor(owners)[given])
        # The order of the images must not matter.
        classifier.add_classes(list(names), x[shuffled], y[shuffled], texts[:total], new_texts)
    sums, kept, x = w[1] * (e @ old[1][0]), [0, 3, 4, 5, 6, 7, 8], F.normalize(normal(4, DIM, seed=3).double(), dim=1)
    named = [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("d", 0), ("d", 1), ("e", 0), ("f", 0), ("f", 1)]
    for (name, index, value), k in zip(classifier.concepts("b", 3), sums.argsort(descending=True)[:3], strict=True):
        assert (name, index) == named[k] and value == pytest.approx(float(sums[k]), abs=1e-3)
    torch.testing.assert_close(classifier(x).double(), x @ e.T @ w.T, rtol=0, atol=1e-3)
    state = classifier.state_dict()
    for change in ({"num_texts": state["num_texts"] + 1}, {"weight": state["weight"][:, 1:]}):
        with pytest.raises(
            RuntimeError, match=r"num_texts adds up to 15, but each_text has 9|weight must be \(6, 9\) for 6"
        ):
            ClgCbmClassifier(DIM).load_state_dict(state | change)
    classifier.forget_class("b")
    torch.testing.assert_close(classifier.bottleneck.double(), e[kept], rtol=0, atol=1e-3)
    torch.testing.assert_close(classifier.weight.double(), w[[0, 2, 3, 4, 5]][:, kept], rtol=0, atol=1e-3)
    torch.testing.assert_close(classifier.each_text.double(), concepts[kept])
    with pytest.raises(ValueError, match="class 'b' is not known: known are"):
        classifier.concepts("b")


def test_concept_texts_agree_for_learner_loaded_learner_and_run_features(tmp_path):
    """A class without texts in `class_texts` gets those of the prompt templates."""
    texts = {"a0": ["six legs", "an ant"], "b1": ["a mane", "four legs", "a tail"]}
    spec = "clg_cbm:epochs=3"
    (first, second), original = stream(2), tiny_learner("clg_cbm", (spec,))
    original.learn_task(first.train, first.class_names, class_texts={"a0": texts["a0"]})
    original.save_pretrained(tmp_path / "saved")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", copy.deepcopy(tiny_base()[0]))
    for learner in (original, loaded):
        learner.learn_task(second.train, second.class_names, class_texts={"b1": texts["b1"]})
    classifier = original.classifiers["clg_cbm"]
    concepts = ("six legs", "an ant", "a b0.", "a a1.", "a mane", "four legs", "a tail")
    expected = torch.cat([original.encoder.text_embeds(["x"], {"x": (text,)}) for text in concepts])
    torch.testing.assert_close(classifier.each_text, expected, rtol=0, atol=1e-5)
    run, learner = tmp_path / "run", tiny_learner("frozen", ("prototype",))
    run_stream(learner, [first, second], run, keep_features=True, class_texts=texts)
    from_features = learn_from_features(read_features(run), spec, original.logit_scale)[1]
    for other, atol in ((loaded.classifiers["clg_cbm"], 0), (from_features, 1e-4)):
        torch.testing.assert_close(other.tensors(), classifier.tensors(), rtol=0, atol=atol)
