"""Compare `text` and `bayes` on features before a projection with literal float64 versions, image by image."""

import numpy as np
import pytest
import torch
from taught import in_tasks
from test_bayes import CENTRES, CLASSES, DIM, SCALE, SINGLE, Twin, assert_least_loss, close, draw, lifted, once, photos
from torch.nn import functional as F

from dulbe_peft.classifiers import BayesClassifier, TextClassifier
from dulbe_peft.classifiers.checks import unit_features

TEXT_DIM = 4
W = draw(20, TEXT_DIM, DIM)
TEXTS = F.normalize(CENTRES @ W.T + 3 * draw(21, CLASSES, TEXT_DIM), dim=1)
NAMES = [f"class {number}" for number in range(CLASSES)]


def projected(rows):
    """Return z = W u / |W u| of each row u, in float64."""
    found = [[sum(w * x for w, x in zip(line, row, strict=True)) for line in W.double().tolist()] for row in rows]
    return np.array([np.array(row) / np.sqrt(sum(x * x for x in row)) for row in found])


class ProjectedTwin(Twin):
    """The literal version: L_c from u and random features, T_c from z."""

    def __init__(self, images, labels, layer=None, nameless=()):
        self.layer = layer
        texts = unit_features(TEXTS, "", TEXT_DIM, None, "cpu").double().numpy()
        texts[list(nameless)] = 0
        self.learn(unit_features(images, "", DIM, None, "cpu").double().numpy(), labels.numpy(), texts)

    def rows(self, u):
        return u if self.layer is None else lifted(u, self.layer)

    def learn(self, u, y, texts):
        super().learn(self.rows(u), y, np.zeros((len(texts), self.rows(u[:1]).shape[1])))
        self.x, self.named, self.texts = u, object.__new__(Twin), texts
        self.named.learn(projected(u), y, texts)

    @once
    def without(self, i):
        twin, rows = object.__new__(ProjectedTwin), np.arange(len(self.x)) != i
        twin.layer = self.layer
        twin.learn(self.x[rows], self.y[rows], self.texts)
        twin.whole = self
        return twin

    def slope(self, rho):
        return self.named.slope(rho)

    def scores(self, tests, kappa, rho, omega=0.0):
        classes = range(self.classes)
        images = np.array([[self.by_image(x, c, rho) for c in classes] for x in self.rows(tests)])
        texts = np.array([[self.named.by_text(z, c, rho, omega) for c in classes] for z in projected(tests)])
        return self.together(images, texts, kappa, rho, omega)

    def text_losses_of_classes(self, rows):
        return self.named.text_losses_of_classes(rows)


def taught(images, labels, kind=BayesClassifier, increment=CLASSES, **settings):
    classifier = kind(DIM, SCALE, text_dim=TEXT_DIM, **settings)
    classifier.projection = W
    return in_tasks(classifier, images, labels, TEXTS, increment=increment)


TESTS = F.normalize(draw(2, 9, DIM), dim=1)


def test_text_scores_equal_the_literal_version(tmp_path):
    classifier = taught(*photos(2), TextClassifier, increment=2)
    expected = SCALE * projected(TESTS.double().tolist()) @ TEXTS.double().numpy().T
    close(classifier(TESTS), expected, SINGLE)
    close(classifier(7 * TESTS), expected, SINGLE)
    function, tensors = classifier.formula()
    close(function(TESTS, **tensors), classifier(TESTS), 1e-6)
    classifier.save_pretrained(tmp_path)
    assert torch.equal(TextClassifier.from_pretrained(tmp_path)(TESTS), classifier(TESTS))


@pytest.mark.parametrize("omega", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("each", [1, [2, 6, 1, 3, 9]])
def test_scores_of_bayes_equal_the_literal_version(each, omega):
    images, labels = photos(each)
    fixed = {"kappa": 3.0, "rho": 0.2, "omega": omega}
    classifier, twin = taught(images, labels, increment=2, **fixed), ProjectedTwin(images, labels)
    expected = twin.scores(TESTS.double().numpy(), 3, 0.2, omega)
    close(classifier(TESTS), expected, SINGLE)
    rows = [i for i in range(len(images)) if twin.n[labels[i]] > 1]
    left_out = [twin.without(i).scores(twin.x[[i]], 3, 0.2, omega)[0] for i in rows]
    close(classifier.left_out(images[rows], labels[rows]), np.reshape(left_out, (-1, CLASSES)), SINGLE)
    each_alone = torch.arange(len(rows))  # groups of one image, by the formulas for groups
    close(classifier.left_out(images[rows], labels[rows], each_alone), np.reshape(left_out, (-1, CLASSES)), SINGLE)
    plain = in_tasks(BayesClassifier(DIM, SCALE, **fixed), images, labels)  # without names
    assert (classifier(TESTS) - plain(TESTS)).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("each, features", [(3, 0), ([2, 6, 1, 3, 9], 7)])
def test_choice_of_bayes_minimises_the_loss_of_left_out_images(each, features, tmp_path):
    images, labels = photos(each, noise=1.2)
    classifier = taught(images, labels, features=features)
    assert_least_loss(classifier, images, labels, features, ProjectedTwin)
    assert classifier.choice[2] == features
    classifier.save_pretrained(tmp_path)
    loaded = BayesClassifier.from_pretrained(tmp_path)
    assert torch.equal(loaded(TESTS), classifier(TESTS)) and torch.equal(loaded.projection, W)


def test_tasks_merging_forgetting_and_renaming_are_as_if_learned_at_once():
    images, labels = photos(6)
    fixed = {"kappa": 3.0, "rho": 0.2}
    whole, first = taught(images, labels, **fixed), torch.arange(len(labels)) % 2 == 0
    parts = [taught(images[rows], labels[rows], increment=3, **fixed) for rows in (first, ~first)]
    close(parts[0].merge(parts[1])(TESTS), whole(TESTS), SINGLE)
    whole.forget_image(images[0], NAMES[0])
    close(whole(TESTS), taught(images[1:], labels[1:], **fixed)(TESTS), SINGLE)
    renamed = taught(images, labels, **fixed)
    renamed.rename_class(NAMES[0], "other", TEXTS[1])
    assert torch.equal(renamed.text_embeds[0], renamed.text_embeds[1])
    whole.forget_class(NAMES[CLASSES - 1])
    rows = labels[1:] < CLASSES - 1
    close(whole(TESTS), taught(images[1:][rows], labels[1:][rows], **fixed)(TESTS), SINGLE)
    assert whole.novelty(TESTS).isfinite().all() and whole.probabilities(TESTS).sum() == pytest.approx(len(TESTS))


@pytest.mark.parametrize("kind", [TextClassifier, BayesClassifier])
def test_missing_or_other_projections_are_refused(kind):
    images, labels = photos(2)
    with pytest.raises(ValueError, match=rf"has text_dim={TEXT_DIM} and no projection: set `projection`, \(4, 6\)"):
        kind(DIM, SCALE, text_dim=TEXT_DIM).add_classes(NAMES, images, labels, TEXTS)
    with pytest.raises(ValueError, match=r"text_embeds must be \(rows, 4\), got shape \(5, 6\)"):
        taught(images, labels, kind).set_text_embeds(draw(0, CLASSES, DIM))
    one, other = (taught(images, labels, kind) for _ in range(2))
    other.projection = W.flip(0)
    with pytest.raises(ValueError, match="the projections of the two .* classifiers differ"):
        one.merge(other)


def test_bayes_refuses_a_linear_map_of_unprojected_features():
    with pytest.raises(ValueError, match="which bayes compares with names: set drift to 'auto' or 'none'"):
        taught(*photos(2)).move(torch.eye(DIM))
