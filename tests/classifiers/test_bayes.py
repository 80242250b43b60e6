"""`bayes` against a literal float64 reading in NumPy: every formula of its file, image by image."""

import functools

import numpy as np
import pytest
import reference
import torch
from scipy.special import softmax
from taught import in_tasks
from torch.nn import functional as F

from dulbe_peft.classifiers import BayesClassifier, bayes
from dulbe_peft.classifiers.checks import unit_features
from dulbe_peft.utils.tensors import write_tensors

DIM, CLASSES, SCALE, DOUBLE = 6, 5, 20.0, torch.float64
NAMES = [f"class {number}" for number in range(CLASSES)]
KAPPAS, RHOS, TEMPERATURES = [1, 2, 4, 8, 16, 32, 64], [0.3, 1, 3, 10, 30], [1, 1 / 2, 1 / 4, 1 / 8]
OMEGAS, SCALES = [0, 1 / 4, 1 / 2, 3 / 4, 1], [0, *(2.0**power for power in range(-4, 4))]
SINGLE = 1e-4  # tolerance of what is computed in float32
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


def taught(images, labels, increment=CLASSES, order=None, texts=TEXTS, **settings):
    return in_tasks(BayesClassifier(DIM, SCALE, **settings), images, labels, texts, order, increment)


def lifted(images, layer):
    """[z, relu(z R) / sqrt(M)]."""
    return np.concatenate([images, np.maximum(images @ layer, 0) / np.sqrt(layer.shape[1])], axis=1)


class Twin:
    """All images at once, without care for speed."""

    def __init__(self, images, labels, texts=TEXTS, layer=None):
        # The classifier, too, normalises in float32.
        images, texts = (unit_features(rows, "", DIM, None, "cpu").double().numpy() for rows in (images, texts))
        if layer is not None:
            images, texts = lifted(images, layer), np.pad(texts, ((0, 0), (0, layer.shape[1])))
        self.x, self.y = images, labels.numpy()
        self.dim = self.x.shape[1]
        self.classes = len(texts)
        self.n, self.m, scatter = self.sums(None)
        self.b, self.e = self.m.mean(axis=0), texts - texts.mean(axis=0)
        self.w = 1 / (1 / 4 + 1 / self.n)
        freedom = len(self.x) - self.classes
        self.total = freedom + 10
        s = scatter / freedom if freedom else np.eye(self.dim)
        for _ in range(3):
            r = self.m - self.b - self.prior(s)
            between = sum(w * np.outer(row, row) for w, row in zip(self.w, r, strict=True)) / self.classes
            s = (scatter + 10 * between) / self.total
        self.s = s
        share = min(0.99, reference.oas(torch.from_numpy(s), freedom + self.classes))
        self.base = share / (1 - share) * np.trace(s) / self.dim

    @functools.cache  # noqa: B019
    def sums(self, without):
        """n_c, m_c and W of all images, or of all but one."""
        rows = np.arange(len(self.x)) != without
        x, y = self.x[rows], self.y[rows]
        means = np.stack([x[y == c].mean(axis=0) for c in range(self.classes)])
        return np.bincount(y, minlength=self.classes), means, (x - means[y]).T @ (x - means[y])

    def prior(self, s):
        """a tau S e~_c."""
        return self.slope(s) * SCALE * self.e @ s

    def noise(self, rho):
        return self.s + rho * self.base * np.eye(self.dim)

    def slope(self, s):
        """The least-squares a, not below 0."""
        over = SCALE * sum(w * e @ s @ e for w, e in zip(self.w, self.e, strict=True))
        return max(0.0, sum(w * e @ (m - self.b) for w, e, m in zip(self.w, self.e, self.m, strict=True)) / over)

    def scores(self, tests, kappa, rho, omega=0.0, without=None):
        """Scores of tests, by all images or by all but one of those that were learned."""
        n, means, scatter = self.sums(without)
        noise = self.noise(rho) - (self.sums(None)[2] - scatter) / self.total
        inverse, a, found = np.linalg.inv(noise), self.slope(self.noise(rho)), []
        for x in tests:
            row = []
            for c in range(self.classes):
                m, t, s = means[c] - self.b, SCALE * self.e[c], n[c] / (n[c] + kappa)
                gauss = s**2 * m @ inverse @ m + 2 * s * (1 - s) * a * m @ t
                gauss += (1 - s) ** 2 * a**2 * t @ self.noise(rho) @ t
                beside = -s * m @ inverse @ m / 2 + (1 - s) * a * t @ self.b
                by = s * m @ inverse @ (x - self.b) + (1 - s) * a * t @ (x - self.b)
                row.append(by - (1 - omega) * gauss / 2 + omega * beside)
            found.append(row)
        return np.array(found)

    def by_text(self, rows):
        """Log-losses by the texts alone, of the images of so many rows, each class alike."""
        found, a = np.zeros((5, 9)), self.slope(self.noise(100))
        for i in rows:
            for o, omega in enumerate(OMEGAS):
                scores = self.scores(self.x[[i]], 1e18, 100, omega)[0] / (a or 1)
                for k, scale in enumerate(SCALES):
                    found[o, k] -= np.log(softmax(scale * scores)[self.y[i]]) * self.classes / self.n[self.y[i]]
        return found

    def usual_kappa(self, by_text):
        told = 1 - by_text.min() / by_text[0, 0]
        prior, inverse, m = self.prior(self.noise(100)), np.linalg.inv(self.noise(100)), self.m - self.b
        share = sum(row @ inverse @ row for row in prior) / sum(row @ inverse @ row for row in m)
        least = max(0.02, min(0.5, 3 / (self.n.sum() * np.log(len(self.n)))))
        return np.clip(1.5 * told / max(share, 1e-9), 4, 16) if told >= least else 1.0

    def losses(self, rows, omega):
        """1 - p(own) of the images, each left out, at every kappa, rho and temperature; and what each weighs."""
        found = np.zeros((len(rows), 7, 5, 4))
        for number, i in enumerate(rows):
            for k, kappa in enumerate(KAPPAS):
                for r, rho in enumerate(RHOS):
                    scores = self.scores(self.x[[i]], kappa, rho, omega, without=i)[0]
                    found[number, k, r] = [1 - softmax(scores / t)[self.y[i]] for t in TEMPERATURES]
        return found, self.classes / self.n[self.y[rows]]

    def choice(self, losses, weights, usual):
        means = np.tensordot(weights, losses, 1) / weights.sum()
        count = weights.sum() ** 2 / (weights**2).sum()
        return min(
            (count * means[k, r].min() + np.log(kappa / usual) ** 2 + np.log(rho / 3) ** 2, kappa, rho)
            for k, kappa in enumerate(KAPPAS)
            for r, rho in enumerate(RHOS)
        )


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=DOUBLE), torch.as_tensor(expected, dtype=DOUBLE), rtol=tolerance, atol=tolerance
    )


def same_solution(found, expected):
    for mine, theirs in zip(found.solution(), expected.solution(), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("omega", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("each", [1, 4, [2, 6, 1, 3, 9]])
def test_scores_are_the_literal_ones(each, omega):
    images, labels = photos(each)
    classifier, twin = taught(images, labels, omega=omega, **FIXED), Twin(images, labels)
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    weights, offsets = classifier.solution()
    scores = twin.scores(tests.double().numpy(), 3, 2, omega)
    close(tests.double() @ weights.T + offsets, scores)
    close(classifier(tests), scores, SINGLE)
    rows = [i for i in range(len(images)) if twin.n[labels[i]] > 1]
    left_out = [twin.scores(twin.x[[i]], 3, 2, omega, without=i)[0] for i in rows]
    close(classifier.left_out(images[rows], labels[rows]), np.reshape(left_out, (-1, CLASSES)), SINGLE)


@pytest.mark.parametrize("each, seed, features", [(4, 3, 7), (2, 5, 0), ([2, 6, 1, 3, 9], 3, 7)])
def test_the_choice_is_that_by_which_left_out_images_are_right(each, seed, features):
    images, labels = photos(each, seed, noise=1.2)
    classifier = taught(images, labels, features=features)
    layer = np.random.RandomState(0).standard_normal((DIM, features))
    twins = [Twin(images, labels), *([Twin(images, labels, layer=layer)] if features else [])]
    by_text = twins[0].by_text(range(len(images)))
    close(classifier.by_text, by_text)
    omega, usual = OMEGAS[int(by_text.min(axis=1).argmin())], twins[0].usual_kappa(by_text)
    rows = [i for i in range(len(images)) if twins[0].n[labels[i]] > 1]
    found = []
    for number, twin in enumerate(twins):
        losses, weights = twin.losses(rows, omega)
        close(classifier.losses[number], np.tensordot(weights, losses, 1), SINGLE)
        close(classifier.judged, [weights.sum(), (weights**2).sum()])
        found.append((*twin.choice(losses, weights, usual), number * features))
    assert classifier.choice == (*min(found)[1:], omega)  # random features in the last case
    kappa, rho, chosen, omega = classifier.choice
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    rows = lifted(tests.double().numpy(), layer) if chosen else tests.double().numpy()
    close(classifier(tests), twins[chosen > 0].scores(rows, kappa, rho, omega), SINGLE)
    function, tensors = classifier.formula()
    close(function(tests, **tensors), classifier(tests), 1e-6)


def test_the_tables_add_up_over_tasks_and_further_images():
    images, labels = photos(6)
    first, late = labels < 3, torch.arange(len(labels)) % 6 == 5
    classifier = taught(images[~late], labels[~late], increment=3)
    classifier.update_classes(images[late], labels[late])
    total = by_text = 0.0
    for known, judged in ((first & ~late, first), (~late, ~first & ~late), (~late | late, late)):
        rows = torch.cat([known.nonzero()[:, 0][~judged[known]], (known & judged).nonzero()[:, 0]])
        twin = Twin(images[rows], labels[rows], TEXTS[: int(labels[rows].max()) + 1])
        new = range(int((~judged[known]).sum()), len(rows))
        by_text = by_text + twin.by_text(new)
        losses, weights = twin.losses(new, OMEGAS[int(by_text.min(axis=1).argmin())])
        total = total + np.tensordot(weights, losses, 1)
    close(classifier.by_text, by_text)
    close(classifier.losses[0], total, SINGLE)


# The last texts tell a little, by chance.
@pytest.mark.parametrize("texts", [TEXTS, TEXTS.roll(1, dims=0), TEXTS[[0, 1, 3, 4, 2]]])
def test_one_image_a_class_has_the_usual_kappa(texts):
    images, labels = photos(1)
    classifier, twin = taught(images, labels, texts=texts), Twin(images, labels, texts)
    by_text = twin.by_text(range(len(images)))
    close(classifier.choice, (twin.usual_kappa(by_text), 100.0, 0, OMEGAS[int(by_text.min(axis=1).argmin())]))
    assert not classifier.losses.any()


def test_without_texts_it_is_lda_whose_means_are_drawn_to_their_middle(tmp_path):
    images, labels = photos([1, 3, 8, 20, 5])
    classifier, named = (BayesClassifier(DIM, SCALE, **FIXED) for _ in range(2))
    classifier.add_classes(NAMES, images, labels)
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    b, (weights, offsets) = Twin(images, labels), classifier.solution()
    left = sum(w * np.outer(row, row) for w, row in zip(b.w, b.m - b.b, strict=True)) / CLASSES
    noise = (b.sums(None)[2] + 10 * left) / b.total
    share = min(0.99, reference.oas(torch.from_numpy(noise), int(b.n.sum())))
    inverse = np.linalg.inv(noise + 2 * share / (1 - share) * np.trace(noise) / DIM * np.eye(DIM))
    drawn = (b.n / (b.n + 3))[:, None] * (b.m - b.b)
    y = tests.double().numpy() - b.b
    close(tests.double() @ weights.T + offsets, y @ inverse @ drawn.T - np.sum(drawn @ inverse * drawn, axis=1) / 2)
    classifier.save_pretrained(tmp_path)
    assert torch.equal(BayesClassifier.from_pretrained(tmp_path)(tests), classifier(tests))
    # A text that comes later counts, and a class without one has none.
    named.add_classes(NAMES[:3], images[labels < 3], labels[labels < 3])
    named.add_classes(NAMES[3:], images[labels >= 3], labels[labels >= 3] - 3)
    same_solution(named, classifier)
    named.set_text_embeds(TEXTS)
    same_solution(named, taught(images, labels, **FIXED))


@pytest.mark.parametrize("each", [[1, 3, 8, 20, 5], 1])
def test_a_forgotten_class_leaves_nothing(each):
    images, labels = photos(each)
    classifier, kept = taught(images, labels, increment=2, **FIXED), [0, 1, 2, 4]
    assert len(classifier.factors) <= sum(classifier.counts.clamp(max=DIM))
    classifier.forget_class(NAMES[3])
    same_solution(classifier, taught(images, labels, order=kept, **FIXED))


def test_random_features_end_where_features_move():
    images, labels = photos(6, noise=1.2)
    classifier, plain = taught(images, labels, features=7), taught(images, labels, features=0)
    turn = torch.linalg.qr(draw(5, DIM, DIM).double()).Q
    more, known = photos(3, seed=8)
    for each in (classifier, plain):
        each.move(turn)
        each.update_classes(F.normalize(more @ turn.float(), dim=1), known)
    assert classifier.choice == plain.choice and classifier.choice[2] == 0
    same_solution(classifier, plain)


def test_images_that_are_equal_or_nearly_so_have_finite_scores():
    """S is small and far from full rank: in float32, its eigenvalues are NaN or are not found."""
    for names in (["a"], ["a", "b"]):
        classifier, labels = BayesClassifier(DIM, SCALE), torch.arange(len(names)).repeat(2)
        classifier.add_classes(names, torch.ones(len(labels), DIM), labels, TEXTS[[0] * len(names)])
        assert classifier(draw(2, 7, DIM)).isfinite().all()
    classifier, labels = BayesClassifier(64), torch.arange(2).repeat_interleave(6)
    images = (draw(0, 1, 64) + 0.03 * draw(10, 2, 64))[labels]
    classifier.add_classes(names, images + 0.01 * draw(20, 12, 64), labels, draw(30, 2, 64))
    assert (classifier(images).argmax(dim=1) == labels).all()


def test_of_many_images_every_class_leaves_out_as_many(monkeypatch):
    monkeypatch.setattr(bayes, "MOST_JUDGED", 12)
    images, labels = photos([1, 2, 9, 4, 6])
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classifier, other = taught(images, labels), taught(images[mixed], labels[mixed])
    close(classifier.losses, other.losses, SINGLE)
    # 1, 2, 3, 3 and 3 images of the classes stand for all of them; of a class with one, none can be left out.
    close(classifier.judged, [4 * 5, 25 * (2 / 4 + 3 / 9 + 3 / 9 + 3 / 9)], 1e-9)


@pytest.mark.parametrize(("each", "settings"), [(4, {"features": 7}), (4, {"features": 0}), (1, {}), (4, FIXED)])
def test_a_saved_one_answers_without_solving_anew(each, settings, tmp_path, monkeypatch):
    classifier, tests = taught(*photos(each), increment=2, **settings), draw(2, 7, DIM)
    expected = classifier.probabilities(tests)
    classifier.save_pretrained(tmp_path / "new")
    classifier.save_pretrained(tmp_path / "old")
    state = classifier.tensors()
    write_tensors(tmp_path / "old" / "bayes.safetensors", state, {})  # without what is solved
    assert torch.equal(BayesClassifier.from_pretrained(tmp_path / "old").probabilities(tests), expected)
    monkeypatch.setattr(bayes.Fit, "of", None)
    loaded = BayesClassifier.from_pretrained(tmp_path / "new").to("cpu")
    assert torch.equal(loaded.probabilities(tests), expected)
    function, tensors = loaded.formula()
    close(function(F.normalize(tests, dim=1), **tensors), loaded(tests), 1e-6)
    with pytest.raises(TypeError, match="not callable"):  # what changes is solved anew
        loaded.forget_class(NAMES[0])
        loaded(tests)
    write_tensors(tmp_path / "new" / "bayes.safetensors", state | {"solved.weight": torch.zeros(CLASSES, 2)}, {})
    with pytest.raises(ValueError, match=r"what begins with 'solved.' must be of the shapes .* got .*\(5, 2\)"):
        BayesClassifier.from_pretrained(tmp_path / "new")
