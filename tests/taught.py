"""Handwritten digits and random classes as features, and classifiers that have learned them task by task."""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from dulbe_peft.classifiers import make_classifier

DIM, CLASSES, SCALE = 64, 10, 20.0

KEPT = {}  # what has been learned

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
    "rapf": "rapf:epochs=6,batch_size=32,learning_rate=0.01",
    "bofa": "bofa",
    "slca": "slca:draws=32",
    "engine": "engine",
    "proof": "proof:epochs=5,batch_size=32,learning_rate=0.006",
    "clap4clip": "clap4clip:epochs=1,samples=4",
    "clg_cbm": "clg_cbm:epochs=8,learning_rate=0.1",
}

NAMED = [name for name in SPECS if " " not in name]


class Digits:
    """64 grey values: 60 of each class to learn from, others to test; texts are noisy means."""

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
    """Unit features of overlapping classes with so many images each, their labels, and texts."""
    generator, labels = torch.Generator().manual_seed(seed), torch.arange(len(counts))
    labels, centres = (
        labels.repeat_interleave(torch.tensor(counts)),
        torch.randn(len(counts), dim, generator=generator),
    )
    images = centres[labels] + spread * torch.randn(len(labels), dim, generator=generator)
    texts = centres + 0.5 * torch.randn(len(counts), dim, generator=generator)
    return F.normalize(images, dim=1), labels, F.normalize(texts, dim=1)


def in_tasks(classifier, images, labels, texts=None, order=None, increment=CLASSES, scale=SCALE):
    """A classifier, or one of this name, with the classes of these labels in an order, so many at a time."""
    if isinstance(classifier, str):
        classifier = make_classifier(SPECS.get(classifier, classifier), images.shape[1], scale)
    order = list(range(int(labels.max()) + 1) if order is None else order)
    for start in range(0, len(order), increment):
        new = order[start : start + increment]
        rows = torch.isin(labels, torch.tensor(new))
        own = torch.tensor([new.index(c) for c in labels[rows].tolist()])
        known = None if texts is None else texts[order[: start + len(new)]]
        classifier.add_classes([f"class {c}" for c in new], images[rows], own, known)
    return classifier


def learned(name, order=range(CLASSES), increment=2, per_class=60, shuffle=0, text=True, scale=SCALE):
    """A classifier that has learned `order` task by task; `shuffle` is the seed of the images' order, 0 for none."""
    given = (name, tuple(order), increment, per_class, shuffle, text, scale)
    if given not in KEPT:
        images, labels = task(range(CLASSES), per_class)
        if shuffle:
            mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(shuffle))
            images, labels = images[mixed], labels[mixed]
        KEPT[given] = in_tasks(name, images, labels, digits.texts if text else None, order, increment, scale)
    return KEPT[given].fork()


def task(classes, per_class=60):
    images = torch.cat([digits.images[digits.labels == c][:per_class] for c in classes])
    return images, torch.arange(len(classes)).repeat_interleave(per_class)


def snapshot(classifier):
    return {key: value.clone() for key, value in classifier.state_dict().items()}


def assert_equal_states(found, expected):
    assert set(found) == set(expected)
    for key in expected:
        assert found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]), key


digits = Digits()
