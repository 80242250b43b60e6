"""Handwritten digits and random clusters as features, and classifiers trained on them task by task."""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from dulbe_peft.classifiers import make_classifier

DIM, CLASSES, SCALE = 64, 10, 20.0

KEPT = {}  # trained classifiers by their parameters

SPECS = {
    "text": "text",
    "bridge": "bridge",
    "pooled_bridge": "pooled_bridge",
    "prototype": "prototype",
    "lda": "lda",
    "lda fixed": "lda:shrinkage=0.1",
    "gda": "gda",
    "gda fixed": "gda:alpha=0.5",
    "ridge": "ridge",
    "ridge fixed": "ridge:ridge=0.5",
    "ranpac": "ranpac:features=200",
    "ranpac fixed": "ranpac:features=200,ridge=20",
    "bayes": "bayes:features=50",
    "bayes fixed": "bayes:kappa=4,rho=10,features=0",
    "visual_agent": "visual_agent",
    "rapf": "rapf:epochs=5,batch_size=24,learning_rate=0.02",
    "bofa": "bofa",
    "slca": "slca:draws=32",
    "engine": "engine",
    "proof": "proof:learning_rate=0.006",
    "clap4clip": "clap4clip:epochs=1,samples=4,batch_size=64,learning_rate=0.003",
    "clg_cbm": "clg_cbm:epochs=8,learning_rate=0.1",
    "linear_head": "linear_head:epochs=5,batch_size=16,learning_rate=0.003",
}

NAMED = [name for name in SPECS if " " not in name]
KINDS = ("text", "bridge", "lda", "ridge", "bayes", "engine", "linear_head")  # one for each kind of rule


class Digits:
    """Digits as features of 64 grey values: 60 training images per class, test images, and noisy means as texts."""

    def __init__(self):
        data = load_digits()
        images, labels = torch.tensor(data.data).float(), torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
        rank = torch.stack([(labels[:i] == labels[i]).sum() for i in range(len(labels))])
        self.images, self.labels = images[rank < 60], labels[rank < 60]
        self.tests, self.truth = images[rank >= 100], labels[rank >= 100]
        means = torch.stack([images[(rank >= 60) & (rank < 100) & (labels == c)].mean(dim=0) for c in range(CLASSES)])
        self.texts = means + 3 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))


def clusters(counts, dim, seed=0, spread=0.7):
    """Return unit features of overlapping classes, of which `counts` gives the sizes, with labels and texts."""
    generator, labels = torch.Generator().manual_seed(seed), torch.arange(len(counts))
    labels, centres = (
        labels.repeat_interleave(torch.tensor(counts)),
        torch.randn(len(counts), dim, generator=generator),
    )
    images = centres[labels] + spread * torch.randn(len(labels), dim, generator=generator)
    texts = centres + 0.5 * torch.randn(len(counts), dim, generator=generator)
    return F.normalize(images, dim=1), labels, F.normalize(texts, dim=1)


def in_tasks(classifier, images, labels, texts=None, order=None, increment=CLASSES, scale=SCALE):
    """Teach a classifier, given as an object or by name, the classes in an order, `increment` at a time."""
    if isinstance(classifier, str):
        classifier = make_classifier(SPECS.get(classifier, classifier), images.shape[1], scale)
    order = list(range(int(labels.max()) + 1) if order is None else order)
    for start in range(0, len(order), increment):
        new = order[start : start + increment]
        rows = torch.isin(labels, torch.tensor(new))
        new_labels = torch.tensor([new.index(c) for c in labels[rows].tolist()])
        known_texts = None if texts is None else texts[order[: start + len(new)]]
        classifier.add_classes([f"class {c}" for c in new], images[rows], new_labels, known_texts)
    return classifier


def learned(name, order=range(CLASSES), increment=2, per_class=60, shuffle=0, text=True, scale=SCALE):
    """Return a classifier that has learned the classes in `order`, task by task.

    `shuffle` is the seed for the order of the images; 0 does not shuffle them.
    """
    key = (name, tuple(order), increment, per_class, shuffle, text, scale)
    if key not in KEPT:
        images, labels = task(range(CLASSES), per_class)
        if shuffle:
            permutation = torch.randperm(len(labels), generator=torch.Generator().manual_seed(shuffle))
            images, labels = images[permutation], labels[permutation]
        KEPT[key] = in_tasks(name, images, labels, digits.texts if text else None, order, increment, scale)
    return KEPT[key].fork()


def task(classes, per_class=60):
    images = torch.cat([digits.images[digits.labels == c][:per_class] for c in classes])
    return images, torch.arange(len(classes)).repeat_interleave(per_class)


def snapshot(classifier):
    return {key: value.clone() for key, value in classifier.state_dict().items()}


def assert_equal_states(actual, expected):
    assert set(actual) == set(expected)
    for key in expected:
        assert actual[key].dtype == expected[key].dtype and torch.equal(actual[key], expected[key]), key


digits = Digits()
