"""`bayes` against a literal float64 reading in NumPy: every formula of its file, image by image."""

from __future__ import annotations

import functools
import subprocess
import sys

import numpy as np
import pytest
import reference
import torch
from torch.nn import functional as F

from dulbe_peft import BayesClassifier
from dulbe_peft.classifiers import bayes
from dulbe_peft.classifiers.checks import unit_features

DIM, CLASSES, SCALE, DOUBLE = 6, 5, 20.0, torch.float64
NAMES = [f"class {number}" for number in range(CLASSES)]
KAPPAS, RHOS, TEMPERATURES = [1, 2, 4, 8, 16, 32, 64], [0.3, 1, 3, 10, 30], [1, 1 / 2, 1 / 4, 1 / 8]
FIXED = {"kappa": 3.0, "rho": 2.0}


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CENTRES = draw(0, CLASSES, DIM)
TEXTS = F.normalize(CENTRES + draw(1, CLASSES, DIM), dim=1)


def photos(each=4, seed=3, noise=0.7):
    """Unit features and labels; `each` is a number or one a class."""
    counts = torch.tensor([each] * CLASSES if isinstance(each, int) else each)
    labels = torch.arange(CLASSES).repeat_interleave(counts)
    return F.normalize(CENTRES[labels] + noise * draw(seed, len(labels), DIM), dim=1), labels


def taught(images, labels, increment=CLASSES, order=range(CLASSES), texts=TEXTS, **settings):
    classifier, order = BayesClassifier(DIM, SCALE, **settings), list(order)
    for start in range(0, len(order), increment):
        new = order[start : start + increment]
        rows = torch.cat([(labels == c).nonzero()[:, 0] for c in new])
        own = torch.tensor([new.index(c) for c in labels[rows].tolist()])
        classifier.add_classes([NAMES[c] for c in new], images[rows], own, texts[order[: start + len(new)]])
    return classifier


class Twin:
    """All images at once, without care for speed."""

    def __init__(self, images, labels, texts=TEXTS):
        # The classifier, too, normalises in float32.
        images, texts = (unit_features(rows, "", DIM, None, "cpu").double().numpy() for rows in (images, texts))
        self.x, self.y = images, labels.numpy()
        self.classes = len(texts)
        self.n = np.array([np.sum(self.y == c) for c in range(self.classes)])
        self.m = self.means(range(len(self.x)))
        self.b, self.e = self.m.mean(axis=0), texts - texts.mean(axis=0)
        self.w = 1 / (1 / 4 + 1 / self.n)
        scatter, freedom = self.scatter(range(len(self.x))), len(self.x) - self.classes
        self.total = freedom + 10
        s = scatter / freedom if freedom else np.eye(DIM)
        for _ in range(3):
            r = self.residual(self.prior(s))
            between = sum(w * np.outer(row, row) for w, row in zip(self.w, r, strict=True)) / self.classes
            s = (scatter + 10 * between) / self.total
        self.s = s
        share = min(0.99, reference.oas(torch.from_numpy(s), freedom + self.classes))
        self.base = share / (1 - share) * np.trace(s) / DIM

    def means(self, rows):
        return np.stack([np.mean([self.x[i] for i in rows if self.y[i] == c], axis=0) for c in range(self.classes)])

    def scatter(self, rows):
        means = self.means(rows)
        return sum(np.outer(self.x[i] - means[self.y[i]], self.x[i] - means[self.y[i]]) for i in rows)

    @functools.cache  # noqa: B019
    def sums(self, without):
        """n_c, m_c and W of all images, or of all but one."""
        rows = [i for i in range(len(self.x)) if i != without]
        n = np.array([sum(self.y[i] == c for i in rows) for c in range(self.classes)])[:, None]
        return n, self.means(rows), self.scatter(rows)

    def prior(self, s):
        """a tau S e~_c, with the least-squares a, not below 0."""
        over = SCALE * sum(w * e @ s @ e for w, e in zip(self.w, self.e, strict=True))
        a = sum(w * e @ (m - self.b) for w, e, m in zip(self.w, self.e, self.m, strict=True)) / over
        return max(0.0, a) * SCALE * self.e @ s

    def residual(self, prior):
        return self.m - self.b - prior

    def noise(self, rho):
        return self.s + rho * self.base * np.eye(DIM)

    def scores(self, tests, kappa, rho, without=None):
        """Scores of tests, by all images or by all but one of those that were learned."""
        n, means, scatter = self.sums(without)
        noise = self.noise(rho) - (self.sums(None)[2] - scatter) / self.total
        inverse, prior = np.linalg.inv(noise), self.prior(self.noise(rho))
        q = (n * (means - self.b) + kappa * prior) / (n + kappa)
        return np.stack([[(x - self.b) @ inverse @ one - one @ inverse @ one / 2 for one in q] for x in tests])

    def kappa_by_moments(self):
        inverse, r = np.linalg.inv(self.noise(10)), self.residual(self.prior(self.noise(10)))
        each = [row @ inverse @ row - np.trace(inverse @ self.s) / n for row, n in zip(r, self.n, strict=True)]
        value = 1 / 4
        for _ in range(4):
            weights = 1 / (value + 1 / self.n) ** 2
            value = min(1.0, max(1 / 64, weights @ each / weights.sum() / DIM))
        explained = np.mean([row @ inverse @ row for row in self.prior(self.noise(10))]) / DIM
        if explained / (explained + value) < 0.02:
            return 1.0
        return np.exp((self.classes * np.log(1 / value) + 10 * np.log(4)) / (self.classes + 10))

    def losses(self, rows):
        """1 - p(own) of the images, each left out, at every kappa, rho and temperature; and what each weighs."""
        found = np.zeros((len(rows), 7, 5, 4))
        for number, i in enumerate(rows):
            for k, kappa in enumerate(KAPPAS):
                for r, rho in enumerate(RHOS):
                    scores = self.scores(self.x[[i]], kappa, rho, without=i)[0]
                    for t, temperature in enumerate(TEMPERATURES):
                        p = np.exp((scores - scores.max()) / temperature)
                        found[number, k, r, t] = 1 - p[self.y[i]] / p.sum()
        counts = self.n[self.y[rows]]
        alone, fewest = np.sum(self.n == 1), len(set(self.y[rows][counts == counts.min()]))
        return found, np.where(counts == counts.min(), 1 + alone / fewest, 1) / counts * self.classes

    def choice(self, losses, weights):
        means = np.tensordot(weights, losses, 1) / weights.sum()
        k, r, t = np.unravel_index(means.argmin(), means.shape)
        variance = weights @ (losses[:, k, r, t] - means[k, r, t]) ** 2 / weights.sum()
        deviation = np.sqrt(variance * (weights**2).sum()) / weights.sum()
        near = [
            (np.log(kappa / self.kappa_by_moments()) ** 2 + np.log(rho / 10) ** 2, kappa, rho)
            for k, kappa in enumerate(KAPPAS)
            for r, rho in enumerate(RHOS)
            if means[k, r].min() <= means.min() + deviation / 2
        ]
        return min(near)[1:]


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=DOUBLE), torch.as_tensor(expected, dtype=DOUBLE), rtol=tolerance, atol=tolerance
    )


def same_solution(found, expected):
    for mine, theirs in zip(found.solution(), expected.solution(), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("each", [1, 4, [2, 6, 1, 3, 9]])
def test_scores_are_the_literal_ones(each):
    images, labels = photos(each)
    classifier, twin, tests = (
        taught(images, labels, **FIXED),
        Twin(images, labels),
        F.normalize(draw(2, 9, DIM), dim=1),
    )
    weights, offsets = classifier.solution()
    scores = twin.scores(tests.double().numpy(), 3, 2)
    close((tests.double() @ weights.T - offsets).diff(dim=1), np.diff(scores, axis=1))
    close(classifier(tests).diff(dim=1), np.diff(scores, axis=1), 1e-4)


@pytest.mark.parametrize("each, seed", [(4, 3), (2, 5), ([2, 6, 1, 3, 9], 3), (8, 4)])
def test_kappa_and_rho_are_those_by_which_left_out_images_are_right(each, seed):
    images, labels = photos(each, seed, noise=1.2)
    classifier, twin = taught(images, labels), Twin(images, labels)
    rows = [i for i in range(len(images)) if twin.n[labels[i]] > 1]
    losses, weights = twin.losses(rows)
    close(classifier.losses[..., 0], np.tensordot(weights, losses, 1))
    close(classifier.losses[..., 1], np.tensordot(weights, losses**2, 1))
    close(classifier.judged, [weights.sum(), (weights**2).sum()])
    assert classifier.choice == twin.choice(losses, weights)


def test_the_table_adds_up_over_tasks_and_further_images():
    images, labels = photos(6)
    first, late = labels < 3, torch.arange(len(labels)) % 6 == 5
    classifier = taught(images[~late], labels[~late], increment=3)
    classifier.update_classes(images[late], labels[late])
    total = 0.0
    for known, judged in ((first & ~late, first), (~late, ~first & ~late), (~late | late, late)):
        rows = torch.cat([known.nonzero()[:, 0][~judged[known]], (known & judged).nonzero()[:, 0]])
        twin = Twin(images[rows], labels[rows], TEXTS[: int(labels[rows].max()) + 1])
        losses, weights = twin.losses(range(int((~judged[known]).sum()), len(rows)))
        total = total + np.tensordot(weights, losses, 1)
    close(classifier.losses[..., 0], total)


def test_one_image_a_class_has_constants():
    images, labels = photos(1)
    classifier, twin = taught(images, labels), Twin(images, labels)
    prior, inverse = twin.prior(twin.noise(30)), np.linalg.inv(twin.noise(30))
    explained = np.mean([row @ inverse @ row for row in prior]) / DIM
    close(classifier.choice, (np.clip(0.2 / explained, 4, 64), 100.0))
    assert not classifier.losses.any()


@pytest.mark.parametrize("exact", [True, False])
def test_tasks_parts_and_orders_give_the_solution_of_all_images_at_once(exact):
    images, labels = photos([1, 3, 8, 20, 5])
    settings = FIXED | {"exact_forgetting": exact}
    expected = taught(images, labels, **settings)
    same_solution(taught(images, labels, increment=1, **settings), expected)
    half = torch.arange(len(labels)) % 2 == 0
    half |= labels == 0
    updated = taught(images[half], labels[half], **settings)
    updated.update_classes(images[~half], labels[~half])
    same_solution(updated, expected)
    one = taught(images[half & (labels < 4)], labels[half & (labels < 4)], order=[0, 1, 2, 3], **settings)
    rest = ~half | (labels == 4)
    order = [2, 4, 1, 3]
    other = taught(images[rest], labels[rest], order=order, **settings)
    same_solution(one.merge(other), expected)
    assert one.class_names == NAMES and other.class_names == [NAMES[c] for c in order]
    if exact:
        assert len(one.factors) == len(expected.factors) == sum((one.counts - 1).clamp(max=DIM))


@pytest.mark.parametrize("each", [[1, 3, 8, 20, 5], 1])
def test_a_forgotten_class_leaves_nothing(each):
    images, labels = photos(each)
    classifier, kept = taught(images, labels, increment=2, **FIXED), [0, 1, 2, 4]
    classifier.forget_class(NAMES[3])
    same_solution(classifier, taught(images, labels, order=kept, **FIXED))
    images, labels = photos(3, seed=9)
    classifier.add_classes([NAMES[3]], images[labels == 3], labels[labels == 3] - 3, TEXTS[[*kept, 3]])
    assert classifier.class_names[-1] == NAMES[3]


def test_a_share_that_is_not_kept_stays():
    classifier = taught(*photos(4), exact_forgetting=False, **FIXED)
    scatter, smaller = classifier.scatter.clone(), classifier.nbytes < taught(*photos(4)).nbytes
    classifier.forget_class(NAMES[3])
    assert smaller and torch.equal(classifier.scatter, scatter) and classifier.freedom == 15


def test_a_turn_of_images_and_texts_is_followed():
    images, labels = photos([1, 3, 8, 20, 5])
    turn = torch.linalg.qr(draw(5, DIM, DIM).double()).Q
    classifier = taught(images, labels, **FIXED)
    expected = classifier.solution()[0] @ turn
    classifier.move(turn)
    classifier.set_text_embeds(TEXTS.double() @ turn)
    close(classifier.solution()[0], expected, 1e-5)  # texts are kept in float32
    close(classifier.factors.T @ classifier.factors, classifier.scatter)


def test_names_without_meaning_count_for_little_and_few_images_are_not_lost():
    """Half of 40 classes have 2 images, half 32; texts are near the means, or of other classes."""
    generator, width = torch.Generator().manual_seed(0), 24
    centres = torch.randn(40, width, generator=generator)
    counts = torch.tensor([2, 32] * 20)
    labels = torch.arange(40).repeat_interleave(counts)
    images = centres[labels] + 1.2 * torch.randn(len(labels), width, generator=generator)
    truth = torch.arange(40).repeat_interleave(20)
    tests = centres[truth] + 1.2 * torch.randn(len(truth), width, generator=generator)
    near = centres + 1.2 * torch.randn(40, width, generator=generator)
    right, slopes = {}, {}
    for name, texts in (("near", near), ("foreign", near.roll(1, dims=0))):
        classifier = BayesClassifier(width, SCALE)
        classifier.add_classes([str(c) for c in range(40)], images, labels, texts)
        found = classifier(tests).argmax(dim=1) == truth
        right[name] = [found[counts[truth] == n].double().mean().item() for n in (2, 32)]
        slopes[name] = classifier.derived("fit", classifier._fit).prior(10.0).norm().item()
    text = (F.normalize(tests, dim=1) @ F.normalize(near, dim=1).T).argmax(dim=1) == truth
    few, many = right["near"]
    assert few > text[counts[truth] == 2].double().mean() + 0.05 and few > 0.7 * many
    assert slopes["foreign"] < 0.3 * slopes["near"] and min(right["foreign"]) > 0.4


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_one_class_equal_texts_and_equal_images_have_finite_scores(names):
    classifier = BayesClassifier(DIM, SCALE)
    labels = torch.arange(len(names)).repeat(2)
    classifier.add_classes(names, torch.ones(len(labels), DIM), labels, TEXTS[[0] * len(names)])
    assert classifier(draw(2, 7, DIM)).isfinite().all()


@pytest.mark.parametrize(
    "other, error, message",
    [
        (lambda: taught(*photos(), kappa=3.0), ValueError, "where rho is equal, got 2.0 and auto"),
        (
            lambda: taught(*photos(), texts=TEXTS.flip(0), **FIXED),
            ValueError,
            "text embeddings of class 'class 0' differ",
        ),
        (lambda: BayesClassifier(DIM + 1, SCALE, **FIXED), ValueError, "where embed_dim is equal, got 6 and 7"),
        (lambda: BayesClassifier(DIM, 9.0, **FIXED), ValueError, "where logit_scale is equal, got 20.0 and 9.0"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "merges with one of its kind, got Linear"),
    ],
)
def test_what_cannot_be_merged_is_refused_and_changes_nothing(other, error, message):
    classifier = taught(*photos(), **FIXED)
    before = classifier.solution()
    with pytest.raises(error, match=message):
        classifier.merge(other())
    assert classifier.solution() is before


def test_a_fresh_process_gives_the_same_scores(tmp_path):
    classifier = taught(*photos([1, 3, 8, 20, 5]), increment=2)
    classifier.save_pretrained(tmp_path)
    code = (
        "import sys; from dulbe_peft import BayesClassifier; import torch; torch.manual_seed(0);"
        "c = BayesClassifier.from_pretrained(sys.argv[1]); c.forget_class('class 3');"
        "print(c(torch.eye(6)).tolist(), c.choice)"
    )
    found = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout
    classifier.forget_class(NAMES[3])
    assert found.strip() == f"{classifier(torch.eye(DIM)).tolist()} {classifier.choice}"


def test_of_many_images_every_class_leaves_out_as_many(monkeypatch):
    monkeypatch.setattr(bayes, "MOST_JUDGED", 12)
    images, labels = photos([1, 2, 9, 4, 6])
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classifier, other = taught(images, labels), taught(images[mixed], labels[mixed])
    close(classifier.losses, other.losses)
    # 2, 4, 3 and 3 images of the classes stand for all of them; the two of a class also for the class with one.
    close(classifier.judged, [5 * 5, 25 * (2 + 4 / 16 + 3 / 9 + 3 / 9)], 1e-9)
