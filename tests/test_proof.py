"""PROOF's classifier: three whole tasks beside a literal version, one image and one token after the other."""

import math

import pytest
import torch
from test_rapf import DIM, features, normal

from dulbe_peft.classifiers.proof import ProofClassifier

SETTINGS = {"epochs": 2, "batch_size": 5, "learning_rate": 0.03, "contexts": 2, "exemplars": 2}
TASKS = [(2, 7), (2, 6), (1, 3)]  # classes and images
TAU = 10.0


def unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


def random_start(generator, first):
    """What a task trains, in the order in which it is drawn."""
    bound = 1 / math.sqrt(DIM)

    def uniform(*shape):
        return (bound * (2 * torch.rand(*shape, generator=generator) - 1)).double()

    found = {name: uniform(DIM, DIM) if name.endswith("map") else uniform(DIM) for name in SUMS}
    found["contexts"] = torch.randn(2, DIM, generator=generator).double()
    for name in ("query", "key", "value", "out") if first else ():
        found[name] = (bound * torch.randn(DIM, DIM, generator=generator)).double()
    return found | ({"out_shift": uniform(DIM)} if first else {})


SUMS = ("image_map", "image_shift", "text_map", "text_shift")


def three_scores(z, texts, means, finished, now):
    """The scores of one image, (3, C), by attention over a list of tokens; `finished` are the earlier tasks."""

    def projected(row, branch):
        return unit(sum(task[f"{branch}_map"] @ row + task[f"{branch}_shift"] for task in (*finished, now)))

    x, w, p = projected(z, "image"), [projected(e, "text") for e in texts], [projected(v, "image") for v in means]
    tokens = [x, *w, *p, *(row for task in (*finished, now) for row in task["contexts"])]

    def fused(token):
        asked = now["query"] @ token
        weights = torch.stack([asked @ (now["key"] @ other) for other in tokens]) / math.sqrt(DIM)
        taken = sum(a * (now["value"] @ other) for a, other in zip(weights.softmax(dim=0), tokens, strict=True))
        return torch.nn.functional.layer_norm(token + now["out"] @ taken + now["out_shift"], (DIM,))

    seen = unit(torch.stack([fused(token) for token in tokens]))
    c = len(texts)
    return TAU * torch.stack([torch.stack(w) @ x, seen[1 + c : 1 + 2 * c] @ seen[0], seen[1 : 1 + c] @ seen[0]])


def literal_task(x, y, texts, old, finished, attention, generator):
    """What the task has trained; `old` holds (mean, images) of the old classes."""
    now = random_start(generator, not attention) | attention
    speeds = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    means = [mean for mean, _ in old] + [x[y == c].mean(dim=0) for c in range(len(texts) - len(old))]
    rows = list(zip(x, (y + len(old)).tolist(), strict=True))
    rows += [(mean, c) for c, (mean, count) in enumerate(old) for _ in range(min(count, 2))]
    ranks = torch.tensor([float(row.float() @ torch.arange(1, DIM + 1).sin()) for row, _ in rows])
    rows = [rows[i] for i in ranks.argsort()]
    for epoch in range(2):
        rate = 0.03 * (1 + math.cos(math.pi * epoch / 2)) / 2
        for batch in torch.randperm(len(rows), generator=generator).split(5):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in now.items()}
            losses = []
            for z, label in (rows[i] for i in batch):
                losses += [-one.log_softmax(0)[label] for one in three_scores(z, texts, means, finished, leaves)]
            slopes = torch.autograd.grad(sum(losses) / len(batch), list(leaves.values()))
            for (name, tensor), slope in zip(now.items(), slopes, strict=True):
                speeds[name] = 0.9 * speeds[name] + slope + 0.05 * tensor
                now[name] = tensor - rate * speeds[name]
    return now, means


def test_three_tasks_equal_the_literal_version():
    classifier, texts, old, finished, attention = (
        ProofClassifier(DIM, TAU, seed=2, **SETTINGS),
        normal(7, DIM),
        [],
        [],
        {},
    )
    for number, (classes, count) in enumerate(TASKS):
        x, y = features(classes, count, 5 * number)
        known = len(old)
        seen = texts[: known + classes]
        generator = torch.Generator().manual_seed(2 * 1_000_003 + known)
        z, e = unit(x.double()), unit(seen.double())
        now, means = literal_task(z, y, e, old, finished, attention, generator)
        classifier.add_classes([f"{number}-{c}" for c in range(classes)], x, y, seen)
        expected = torch.stack([three_scores(row, e, means, finished, now).sum(dim=0) for row in z])
        torch.testing.assert_close(classifier(x).double(), expected, rtol=0, atol=5e-4)
        for name in SUMS:
            total = sum(task[name] for task in (*finished, now))
            torch.testing.assert_close(getattr(classifier, name).double(), total, rtol=0, atol=5e-5)
        for name in ("query", "key", "value", "out", "out_shift"):
            torch.testing.assert_close(getattr(classifier, name).double(), now[name], rtol=0, atol=5e-5)
        torch.testing.assert_close(classifier.prompts[-1].double(), now["contexts"].flatten(), rtol=0, atol=5e-5)
        finished.append(now)
        attention = {name: now[name] for name in ("query", "key", "value", "out", "out_shift")}
        old += [(mean, int((y == c).sum())) for c, mean in enumerate(means[known:])]
    assert (
        attention["query"] - random_start(torch.Generator().manual_seed(2 * 1_000_003), True)["query"]
    ).abs().max() > 0.02


def test_an_answer_does_not_depend_on_the_other_images():
    classifier = ProofClassifier(DIM, **SETTINGS)
    x, y = features(3, 13, 0)
    classifier.add_classes(["a", "b", "c"], x, y, normal(3, DIM))
    torch.testing.assert_close(torch.cat([classifier(row[None]) for row in x]), classifier(x), rtol=0, atol=1e-4)


def test_images_in_any_order_give_the_same_bits():
    x, y = features(3, 13, 0)
    one, other = ProofClassifier(DIM, **SETTINGS), ProofClassifier(DIM, **SETTINGS)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    one.add_classes(["a", "b", "c"], x, y, normal(3, DIM))
    other.add_classes(["a", "b", "c"], x[order], y[order], normal(3, DIM))
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


def test_means_move_with_the_features_and_a_task_s_contexts_leave_with_its_last_class():
    classifier, x = ProofClassifier(DIM, **SETTINGS), normal(4, DIM)
    for number, name in enumerate("abcd"):
        classifier.add_classes([name], x[number : number + 1], [0], normal(4, DIM)[: number + 1])
    matrix = torch.eye(DIM).double() + 0.1 * normal(DIM, DIM, seed=11).double()
    means, map_ = classifier.means.double(), classifier.image_map.clone()
    classifier.move(matrix)
    torch.testing.assert_close(classifier.means.double(), means @ matrix, rtol=0, atol=1e-6)
    assert torch.equal(classifier.image_map, map_)
    contexts = classifier.prompts
    classifier.forget_class("b")
    assert torch.equal(classifier.prompts, contexts[[0, 2, 3]]) and classifier.task.tolist() == [0, 1, 2]
    shared, row = 6 * DIM * DIM + 3 * DIM, 4 * 2 * DIM + 2 * 8  # two vectors and two integers
    assert classifier.nbytes_with(30) == 4 * shared + 30 * (row + 4 * 2 * DIM)  # one class a task
    with pytest.raises(ValueError, match="'proof' classifier cannot learn more images of a known class"):
        classifier.update_classes(x[:1], [0])


@pytest.mark.parametrize("task", [[1, 0, 0], [0, 0, 2], [0, 0, 0]])
def test_a_state_whose_tasks_do_not_fit_is_refused(task):
    classifier, x = ProofClassifier(DIM, **SETTINGS), normal(3, DIM)
    classifier.add_classes(["a", "b"], x[:2], [0, 1], x[:2])
    classifier.add_classes(["c"], x[2:], [0], x)
    state = classifier.state_dict()
    ProofClassifier(DIM, **SETTINGS).load_state_dict(state)
    with pytest.raises(RuntimeError, match="task must count up from 0 to 1, got"):
        ProofClassifier(DIM, **SETTINGS).load_state_dict(state | {"task": torch.tensor(task)})
