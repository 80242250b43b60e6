"""Handwritten digits as features, and classifiers of every kind that have learned them task by task."""

import torch
from sklearn.datasets import load_digits

from dulbe_peft.classifiers import make_classifier

DIM, CLASSES, SCALE = 64, 10, 20.0

KEPT = {}  # what has been learned

SPECS = {
    "text": "text",
    "bridge": "bridge",
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


def learned(name, order=range(CLASSES), increment=2, per_class=60, shuffle=0, text=True, scale=SCALE):
    """A classifier that has learned `order` task by task; `shuffle` is the seed of the images' order, 0 for none."""
    given = (name, tuple(order), increment, per_class, shuffle, text, scale)
    if given in KEPT:
        return KEPT[given].fork()
    classifier, order = make_classifier(SPECS[name], DIM, scale), list(order)
    for start in range(0, len(order), increment):
        new = order[start : start + increment]
        images, labels = task(new, per_class)
        if shuffle:
            mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(shuffle))
            images, labels = images[mixed], labels[mixed]
        texts = digits.texts[order[: start + len(new)]] if text else None
        classifier.add_classes([f"digit {c}" for c in new], images, labels, texts)
    KEPT[given] = classifier
    return classifier.fork()


def at_once(name, images, labels, texts=None):
    classifier = make_classifier(SPECS[name], DIM, SCALE)
    classifier.add_classes([f"digit {c}" for c in range(CLASSES)], images, labels, texts)
    return classifier


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
