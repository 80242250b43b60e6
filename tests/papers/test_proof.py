"""Test PROOF's and CLAP4CLIP's classifiers: three tasks against literal versions that loop over texts and images."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from drawn import DIM, features, normal, step

from dulbe_peft.classifiers import classifier_of
from dulbe_peft.papers.clap4clip import Clap4ClipRule
from dulbe_peft.papers.proof import ProofRule

CLAP = {"epochs": 2, "batch_size": 5, "learning_rate": 0.02, "samples": 3, "exemplars": 2}
CLAP_TASKS = [(2, 9), (2, 6), (1, 3)]  # classes and images
TAU, HIDDEN = 10.0, 2048
# G: the vector `guide` has its parameters in this order
LAYER = torch.nn.TransformerDecoderLayer(DIM, 1, HIDDEN, dropout=0.0, activation="gelu", batch_first=True).double()
SHAPES = {name: parameter.shape for name, parameter in LAYER.named_parameters()}


def random_guide(generator):
    parts = []
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            parts.append(torch.full(shape, float("norm" in name and "bias" not in name)))
        else:
            bound = math.sqrt(6 / (4 * DIM)) if "in_proj" in name else 1 / math.sqrt(shape[1])
            parts.append(bound * (2 * torch.rand(math.prod(shape), generator=generator) - 1))
    return torch.cat(parts).double()


def random_adapter(texts, generator):
    """Return M, m, S and s of a task; `texts` are those of all classes so far."""
    m, s = (2 * torch.rand(2 * DIM, 1, generator=generator).double() - 1).view(2, DIM) / math.sqrt(DIM)
    m_matrix = sum(torch.outer(e, e) for e in texts) / DIM
    return [m_matrix, m.clone(), torch.zeros(DIM, DIM, dtype=torch.float64), s.clone()]


def seen_texts(guide, texts, means, task):
    """Return t_c: each text plus the output of G, which attends to the texts of its task and to all means."""
    parts = zip(SHAPES.items(), guide.split([math.prod(shape) for shape in SHAPES.values()]), strict=True)
    parameters, task = {name: piece.view(shape) for (name, shape), piece in parts}, torch.tensor(task)
    inputs = texts[None], torch.stack([v / v.norm() for v in means])[None]
    return texts + torch.func.functional_call(LAYER, parameters, inputs, {"tgt_mask": task[:, None] != task})[0]


def text_gaussians(adapters, seen, task):
    """Yield the mean and standard deviation of q_c for each text."""
    for c, t in enumerate(seen):
        m_matrix, m, s_matrix, s = adapters[task[c]]
        yield m_matrix @ t + m, 0.001 + 0.999 * (1 + (s_matrix @ t + s).exp()).log()


def loss_of(batch, texts, means, task, guide, adapters, tasks, generator):
    seen = seen_texts(guide, texts, means, task)
    gaussians = list(text_gaussians(adapters, seen, task))
    noise = torch.randn(3, len(texts), DIM, generator=generator).double()
    draws = [[mean + deviation * n for (mean, deviation), n in zip(gaussians, rows, strict=True)] for rows in noise]
    loss = 0
    for draw in draws:
        for z, label in batch:
            scores = torch.stack([TAU * z @ (t + u) for t, u in zip(seen, draw, strict=True)])
            loss = loss - scores.log_softmax(dim=0)[label] / len(batch) / 3
    for number in tasks:
        classes = [c for c in range(len(texts)) if task[c] == number]
        middle = [sum(draw[c] for draw in draws) / 3 for c in classes]
        for place, c in enumerate(classes):
            near = torch.stack([texts[c] @ u for u in middle])
            loss = loss - 15 * near.log_softmax(dim=0)[place] / len(classes)
            q = torch.distributions.Normal(*gaussians[c])
            prior = torch.distributions.Normal(torch.zeros(DIM).double(), torch.ones(DIM).double())
            loss = loss + 0.001 * torch.distributions.kl_divergence(q, prior).sum() / len(classes)
    return loss


def descend(rows, leaves, epochs, rate, rising, loss, generator):
    """Train the tensors `leaves` with plain SGD; the rate warms up over a share `rising`, then decays on a cosine."""
    ranks = torch.tensor([float(row.float() @ torch.arange(1, DIM + 1).sin()) for row, _ in rows])
    rows = [rows[i] for i in ranks.argsort()]
    number, steps, sgd = (
        0,
        epochs * math.ceil(len(rows) / 5),
        torch.optim.SGD([leaf.requires_grad_() for leaf in leaves]),
    )
    warm = int(rising * steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(rows), generator=generator).split(5):
            now = rate * (number + 1) / (warm + 1)
            if number >= warm:
                now = rate * (0.001 + 0.999 * (1 + math.cos(math.pi * (number - warm) / (steps - warm))) / 2)
            number += 1
            step(sgd, now, loss([rows[i] for i in batch]))


def test_three_tasks_of_clap4clip_equal_the_literal_version():
    classifier, texts = classifier_of(Clap4ClipRule)(DIM, TAU, seed=2, **CLAP), normal(5, DIM, seed=8)
    guide, adapters, means, counts, task = None, [], [], [], []
    for number, (classes, count) in enumerate(CLAP_TASKS):
        x, y = features(classes, count, 5 * number)
        known, generator = len(task), torch.Generator().manual_seed(2 * 1_000_003 + len(task))
        e = torch.nn.functional.normalize(texts[: known + classes].double(), dim=1)
        z = torch.nn.functional.normalize(x.double(), dim=1)
        rows = [(row, int(label) + known) for row, label in zip(z, y, strict=True)]
        rows += [(v / v.norm(), c) for c, v in enumerate(means) for _ in range(min(2, counts[c]))]
        means += [z[y == c].mean(dim=0) for c in range(classes)]
        counts += [int((y == c).sum()) for c in range(classes)]
        task += [number] * classes
        guide = random_guide(generator) if guide is None else guide
        adapters.append(random_adapter(e, generator))

        def loss(batch, tasks):
            return loss_of(batch, e, means, task, guide, adapters, tasks, generator)  # noqa: B023

        started = guide.detach().clone()
        descend(rows, [guide, *adapters[-1]], 2, 0.02, 0.3, lambda batch: loss(batch, [number]), generator)  # noqa: B023
        assert (guide - started).abs().max() > 0.005
        if number:
            rows = [(v / v.norm(), c) for c, v in enumerate(means) for _ in range(min(2, counts[c]))]
            leaves, started = [part for adapter in adapters for part in adapter], adapters[0][1].detach().clone()
            descend(rows, leaves, 2, 0.002, 0, lambda batch: loss(batch, range(len(adapters))), generator)
            assert (adapters[0][1] - started).abs().max() > 0.001
        classifier.add_classes([f"{number}-{c}" for c in range(classes)], x, y, texts[: known + classes])
        torch.testing.assert_close(classifier.guide.double(), guide.detach(), rtol=0, atol=2e-5)
        for row, (m_matrix, m, s_matrix, s) in zip(classifier.adapters.double(), adapters, strict=True):
            matrix = row.view(2, DIM, DIM + 1)
            for actual, expected in zip(matrix, ((m_matrix, m), (s_matrix, s)), strict=True):
                torch.testing.assert_close(actual[:, :-1], expected[0].detach(), rtol=0, atol=2e-5)
                torch.testing.assert_close(actual[:, -1], expected[1].detach(), rtol=0, atol=2e-5)
        seen = seen_texts(guide, e, means, task)
        weight = [t + mean for t, (mean, _) in zip(seen, text_gaussians(adapters, seen, task), strict=True)]
        expected = TAU * z @ torch.stack(weight).T
        torch.testing.assert_close(classifier(x).double(), expected.detach(), rtol=0, atol=1e-3)


def test_classifiers_trained_in_parallel_threads_do_not_interfere():
    x, y = features(3, 13, 0)

    def trained(_=None):
        classifier = classifier_of(Clap4ClipRule)(DIM, **CLAP)
        classifier.add_classes(["a", "b", "c"], x, y, normal(3, DIM))
        return classifier

    expected = trained().guide
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(classifier.guide, expected) for classifier in pool.map(trained, range(3)))


PROOF = {"epochs": 2, "batch_size": 5, "learning_rate": 0.03, "contexts": 2, "exemplars": 2}
TASKS = [(2, 7), (2, 6), (1, 3)]  # classes and images


def unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


def random_start(generator, first):
    """Return the initial tensors that a task trains, drawn in the order of the classifier."""
    bound = 1 / math.sqrt(DIM)

    def uniform(*shape):
        return (bound * (2 * torch.rand(*shape, generator=generator) - 1)).double()

    start = {name: uniform(DIM, DIM) if name.endswith("map") else uniform(DIM) for name in SUMS}
    start["contexts"] = torch.randn(2, DIM, generator=generator).double()
    for name in ("query", "key", "value", "out") if first else ():
        start[name] = (bound * torch.randn(DIM, DIM, generator=generator)).double()
    return start | ({"out_shift": uniform(DIM)} if first else {})


SUMS = ("image_map", "image_shift", "text_map", "text_shift")


def three_scores(z, texts, means, finished, now):
    """Return the scores of one image, (3, C), by attention over a list of tokens; `finished` are the earlier tasks."""

    def projected(row, branch):
        return unit(sum(task[f"{branch}_map"] @ row + task[f"{branch}_shift"] for task in (*finished, now)))

    x, w, p = projected(z, "image"), [projected(e, "text") for e in texts], [projected(v, "image") for v in means]
    tokens = torch.stack([x, *w, *p, *(row for task in (*finished, now) for row in task["contexts"])])
    asked, keys, values = (tokens @ now[name].T for name in ("query", "key", "value"))
    taken = (asked @ keys.T / math.sqrt(DIM)).softmax(dim=1) @ values @ now["out"].T + now["out_shift"]
    seen = unit(torch.nn.functional.layer_norm(tokens + taken, (DIM,)))
    c = len(texts)
    return TAU * torch.stack([torch.stack(w) @ x, seen[1 + c : 1 + 2 * c] @ seen[0], seen[1 : 1 + c] @ seen[0]])


def literal_task(x, y, texts, old, finished, attention, generator):
    """Return the tensors that the task has trained, and all means; `old` has (mean, image count) of old classes."""
    now = random_start(generator, not attention) | attention
    sgd = torch.optim.SGD([tensor.requires_grad_() for tensor in now.values()], momentum=0.9, weight_decay=0.05)
    means = [mean for mean, _ in old] + [x[y == c].mean(dim=0) for c in range(len(texts) - len(old))]
    rows = list(zip(x, (y + len(old)).tolist(), strict=True))
    rows += [(mean, c) for c, (mean, count) in enumerate(old) for _ in range(min(count, 2))]
    ranks = torch.tensor([float(row.float() @ torch.arange(1, DIM + 1).sin()) for row, _ in rows])
    rows = [rows[i] for i in ranks.argsort()]
    for epoch in range(2):
        for batch in torch.randperm(len(rows), generator=generator).split(5):
            losses = []
            for z, label in (rows[i] for i in batch):
                losses += [-row.log_softmax(0)[label] for row in three_scores(z, texts, means, finished, now)]
            step(sgd, 0.03 * (1 + math.cos(math.pi * epoch / 2)) / 2, sum(losses) / len(batch))
    return {name: tensor.detach().clone() for name, tensor in now.items()}, means


def test_three_tasks_of_proof_equal_the_literal_version():
    classifier, texts = classifier_of(ProofRule)(DIM, TAU, seed=2, **PROOF), normal(7, DIM)
    old, finished, attention = [], [], {}
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
        finished.append(now)
        attention = {name: now[name] for name in ("query", "key", "value", "out", "out_shift")}
        old += [(mean, int((y == c).sum())) for c, mean in enumerate(means[known:])]
        trained = attention | {name: sum(task[name] for task in finished) for name in SUMS}
        for name, tensor in trained.items():
            torch.testing.assert_close(getattr(classifier, name).double(), tensor, rtol=0, atol=5e-5)
        torch.testing.assert_close(classifier.prompts[-1].double(), now["contexts"].flatten(), rtol=0, atol=5e-5)
    start = random_start(torch.Generator().manual_seed(2 * 1_000_003), True)["query"]
    assert (attention["query"] - start).abs().max() > 0.02


MADE = {
    "clap4clip": partial(classifier_of(Clap4ClipRule), DIM, **CLAP),
    "proof": partial(classifier_of(ProofRule), DIM, **PROOF),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_order_of_images_changes_no_bit_of_the_tensors(make):
    (x, y), classifier, other = features(3, 13, 0), make(), make()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    classifier.add_classes(["a", "b", "c"], x, y, normal(3, DIM))
    other.add_classes(["a", "b", "c"], x[order], y[order], normal(3, DIM))
    for name, tensor in classifier.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


@pytest.mark.parametrize(
    ("name", "buffer", "shared", "per_task"),
    [  # how many numbers all tasks share, and how many each task adds
        ("clap4clip", "adapters", sum(map(math.prod, SHAPES.values())), 2 * DIM * (DIM + 1)),
        ("proof", "prompts", 6 * DIM * DIM + 3 * DIM, 2 * DIM),
    ],
)
def test_forgetting_the_last_class_of_a_task_drops_its_row(name, buffer, shared, per_task):
    classifier, x = MADE[name](), normal(4, DIM)
    for number, letter in enumerate("abcd"):
        classifier.add_classes([letter], x[number : number + 1], [0], normal(4, DIM)[: number + 1])
    rows = getattr(classifier, buffer)
    classifier.forget_class("b")
    assert torch.equal(getattr(classifier, buffer), rows[[0, 2, 3]]) and classifier.task.tolist() == [0, 1, 2]
    row = 4 * 2 * DIM + 2 * 8  # two vectors and two integers per class
    assert classifier.state.nbytes(30) == 4 * shared + 30 * (row + 4 * per_task)  # each task has one class


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_state_with_inconsistent_task_numbers_is_refused(make):
    classifier, x = make(), normal(3, DIM)
    classifier.add_classes(["a", "b"], x[:2], [0, 1], x[:2])
    classifier.add_classes(["c"], x[2:], [0], x)
    state = classifier.state_dict()
    for task in ([1, 0, 0], [0, 0, 2], [0, 0, 0]):
        with pytest.raises(RuntimeError, match="task must count up from 0 to 1, got"):
            make().load_state_dict(state | {"task": torch.tensor(task)})
