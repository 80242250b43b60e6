"""Compare `bayes` with a literal float64 version in NumPy, which computes every formula image by image."""

import functools
import json

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from taught import in_tasks
from torch.nn import functional as F

from dulbe_peft.classifiers import BayesClassifier, bayes
from dulbe_peft.classifiers.checks import unit_features
from dulbe_peft.classifiers.groups import ranking
from dulbe_peft.classifiers.teaching import ClosingPass, learn_task
from dulbe_peft.utils.tensors import tensors_digest, write_tensors

DIM, CLASSES, SCALE, DOUBLE = 6, 5, 20.0, torch.float64
NAMES = [f"class {number}" for number in range(CLASSES)]
KAPPAS, RHOS = [1, 2, 4, 8, 16, 32, 64], [0.01, 0.03, 0.1, 0.3, 1]
TEMPERATURES = [2.0 ** (half / 2) for half in range(12, -1, -1)]
OMEGAS, SCALES = [0, 1 / 4, 1 / 2, 3 / 4, 1], [0, *(2.0 ** (half / 2) for half in range(-8, 8))]
WRONG = [0.9 * (step / 10) ** 2 for step in range(11)]
SINGLE = 1e-4  # tolerance for float32 results
once = functools.cache  # of a method; twins live as long as the tests
FIXED = {"kappa": 3.0, "rho": 0.2}


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CENTRES = draw(0, CLASSES, DIM)
TEXTS = F.normalize(CENTRES + draw(1, CLASSES, DIM), dim=1)


def photos(each=4, seed=3, noise=0.7):
    """Return unit features and labels; `each` is the number of images per class, or a list with one for each class."""
    counts = torch.tensor([each] * CLASSES if isinstance(each, int) else each)
    labels = torch.arange(CLASSES).repeat_interleave(counts)
    return F.normalize(CENTRES[labels] + noise * draw(seed, len(labels), DIM), dim=1), labels


def taught(images, labels, increment=CLASSES, order=None, texts=TEXTS, **settings):
    return in_tasks(BayesClassifier(DIM, SCALE, **settings), images, labels, texts, order, increment)


def lifted(images, layer):
    """Return [z, relu(z R) / sqrt(M)]."""
    return np.concatenate([images, np.maximum(images @ layer, 0) / np.sqrt(layer.shape[1])], axis=1)


class Twin:
    """The literal version, which learns all images at once. What follows from them alone is computed once."""

    def __init__(self, images, labels, texts=TEXTS, layer=None, nameless=()):
        # The classifier also normalises in float32.
        images, texts = (unit_features(rows, "", DIM, None, "cpu").double().numpy() for rows in (images, texts))
        texts[list(nameless)] = 0
        if layer is not None:
            images, texts = lifted(images, layer), np.pad(texts, ((0, 0), (0, layer.shape[1])))
        self.learn(images, labels.numpy(), texts)

    def learn(self, x, y, texts):
        self.x, self.y, self.texts, (number, self.dim), self.classes = x, y, texts, x.shape, len(texts)
        self.n = np.bincount(y, minlength=self.classes)
        self.m = np.stack([x[y == c].mean(axis=0) for c in range(self.classes)])
        self.scatter = (x - self.m[y]).T @ (x - self.m[y])
        given = texts.any(axis=1)
        self.b, self.t = self.m.mean(axis=0), SCALE * (texts - texts[given].mean(axis=0) if given.any() else texts)
        self.t[~given] = 0
        self.v = np.mean([(row - self.b) @ (row - self.b) for row in x])
        self.freedom = number - self.classes
        self.w, self.lone = self.n / (self.n + 2), self.freedom == 0
        self.whole = self.named = self

    @once
    def without(self, *left_out):
        """Return a version that has not learned some images."""
        twin, rows = object.__new__(Twin), ~np.isin(np.arange(len(self.x)), left_out)
        twin.learn(self.x[rows], self.y[rows], self.texts)
        twin.whole = self
        return twin

    @once
    def noise(self, rho):
        if self.lone:
            scatter = (self.m - self.b).T @ (self.m - self.b)
            return (scatter + 3 * self.v * np.eye(self.dim)) / (self.classes + 3 * self.dim)
        return (self.scatter + rho * self.v * np.eye(self.dim)) / (self.freedom + rho * self.dim)

    @once
    def inverse(self, rho):
        return np.linalg.inv(self.noise(rho))

    @once
    def slope(self, rho):
        """Return the least-squares a, or 0 if it is negative."""
        parts = list(zip(self.w, self.t, self.m - self.b, strict=True))
        return max(0.0, sum(w * t @ m for w, t, m in parts) / sum(w * t @ self.noise(rho) @ t for w, t, _ in parts))

    def by_image(self, x, c, rho):
        """Return L_c; without some images of class c, its weight and offset have the expectation of the whole."""
        inverse, m, w = self.inverse(rho), self.m[c] - self.b, self.whole.w[c]
        lost = 1 - self.n[c] / self.whole.n[c]
        weight, offset = w - lost * w**2 / 2, (1 - lost) * w**2 / 2
        return (weight * m @ inverse @ (x - self.b) - offset * m @ inverse @ m) / self.whole.w.max()

    def pairs(self, classes, rho, omega):
        """Return image and text scores of the wrong classes, at the mean of each class."""
        found = []
        for k in classes:
            m, z, wrong = self.m[k], self.named.m[k], [c for c in classes if c != k]
            both = np.array([[self.by_image(m, c, rho), self.named.by_text(z, c, rho, omega)] for c in wrong])
            found.append(both - both.mean(axis=0))
        return np.concatenate(found).T

    @once
    def instead(self, rho, omega):
        """Return r: the slope of text scores on image scores of wrong classes, plus 0.15."""
        images, texts = self.pairs([c for c in range(self.classes) if self.named.t[c].any()], rho, omega)
        return min(1, 0.15 + max(0, images @ texts / (images @ images)))

    def by_text(self, x, c, rho, omega):
        a, t = self.slope(rho), self.t[c]
        gauss, clip = -(a**2) * t @ self.noise(rho) @ t / 2, a * t @ self.b
        return a * t @ (x - self.b) + (1 - omega) * gauss + omega * clip

    def scores(self, tests, kappa, rho, omega=0.0):
        classes = range(self.classes)
        images = np.array([[self.by_image(x, c, rho) for c in classes] for x in tests])
        texts = np.array([[self.by_text(x, c, rho, omega) for c in classes] for x in tests])
        return self.together(images, texts, kappa, rho, omega)

    def together(self, images, texts, kappa, rho, omega):
        usual, bare = self.classes / sum(1 / self.n), ~self.named.t.any(axis=1)
        if bare.any() and not bare.all():
            texts[:, bare] = self.whole.instead(rho, omega) * images[:, bare]
        return (usual * images + kappa * texts) / (usual + kappa)

    def text_losses(self, rows):
        return self.text_losses_of_classes(rows).sum(axis=0)

    def text_losses_of_classes(self, rows):
        """Return the log-losses of the images in `rows` by the texts alone, with equal weights for all classes."""
        a, classes = self.slope(0.3), range(self.classes)
        found = np.zeros((self.classes, 5, 17, len(WRONG)))
        for i in rows:
            for o, omega in enumerate(OMEGAS):
                scores = np.array([self.by_text(self.x[i], c, 0.3, omega) for c in classes]) / (a or 1)
                for k, scale in enumerate(SCALES):
                    own = softmax(scale * scores)[self.y[i]]
                    loss = -np.log(noisy(own, self.classes)) * self.classes / self.n[self.y[i]]
                    found[self.y[i], o, k] += loss
        return found

    def misnamed(self, losses):
        """Return the classes whose images, all of which were compared with names, are unlikely by their name."""
        found, robust = [], losses[..., 5]
        for _ in range(2):
            rest = sum(robust[c] for c in range(self.classes) if c not in found)
            if rest.min() > 0.9 * rest[0, 0]:
                return []
            best = np.unravel_index(rest.argmin(), rest.shape)
            beyond = [(table[best] / table[0, 0] - 1) * np.log(self.classes) for table in robust]
            found = [c for c in range(self.classes) if beyond[c] * self.n[c] > np.log(4)]
        return found

    def nats(self):
        return self.classes**2 / sum(1 / self.n) * np.log(self.classes)

    def in_nats(self, table):
        return table / table[0, 0, 0] * self.nats() + penalty(self.nats() / np.log(self.classes))

    def omega(self, table):
        return OMEGAS[int(self.in_nats(table).min(axis=(1, 2)).argmin())]

    def told(self, table):
        losses, wrong = self.in_nats(table), WRONG[int(self.in_nats(table).min(axis=(0, 1)).argmin())]
        entropy = sum(-p * np.log(p / k) for p, k in ((1 - wrong, 1), (wrong, self.classes - 1)) if p)
        return max(0, (self.nats() - losses.min() - 2) / (self.nats() * (1 - entropy / np.log(self.classes))))

    def scale(self, table):
        best = self.in_nats(table).min(axis=(0, 2))
        losses = {s: loss + np.log(s) ** 2 / 2 for s, loss in zip(SCALES, best) if s}
        return min(losses, key=losses.get)

    def usual_kappa(self, table):
        return max(1, 2 * self.told(table) * 27 * self.scale(table) / self.slope(0.3)) if self.slope(0.3) else 1

    def by_images_alone(self):
        """Return the usual T of the scores by the images alone."""
        if not self.lone:
            return 27
        squares = 0
        for k, m in enumerate(self.m):
            scores = np.array([self.by_image(m, c, 0.3) for c in range(self.classes) if c != k])
            squares += sum((scores - scores.mean()) ** 2) / 2
        pairs = self.classes * (self.classes - 3) / 2
        return np.sqrt((20**2 * squares / self.dim + 30 * 27**2) / (pairs + 30))

    def correlation(self, omega):
        """Return the correlation of image and text scores of the wrong classes, at the mean of each class."""
        images, texts = self.pairs(range(self.classes), 0.3, omega)
        return max(0, images @ texts / np.sqrt(images @ images * (texts @ texts)))

    def temperature(self, kappa, rho, table, common):
        """Return the usual T for the text losses `table` and the correlation `common` of the version without layer."""
        share = self.classes / sum(1 / self.n) / (self.classes / sum(1 / self.n) + kappa)
        images, texts = self.by_images_alone() * share, (1 - share) * self.slope(rho) / self.scale(table)
        return np.sqrt(images**2 + texts**2 + 2 * common * images * texts)

    def losses(self, rows, omega):
        """Return -log p(class) of each left-out image at every kappa, rho and temperature, and the images' weights."""
        found = np.zeros((len(rows), 7, 5, 13, len(WRONG)))
        for number, i in enumerate(rows):
            for k, kappa in enumerate(KAPPAS):
                for r, rho in enumerate(RHOS):
                    scores = self.without(i).scores(self.x[[i]], kappa, rho, omega)[0]
                    own = [np.exp(log_softmax(scores / t)[self.y[i]]) for t in TEMPERATURES]
                    found[number, k, r] = [-np.log(noisy(p, self.classes)) for p in own]
        return found, self.classes / self.n[self.y[rows]]

    def choice(self, losses, weights, usual, table, common):
        """Return the smallest objective, its kappa and rho, and T at the vertex of the parabola around the best T."""
        means, found = np.tensordot(weights, losses, 1) / weights.sum(), []
        count = weights.sum() ** 2 / (weights**2).sum()
        for k, kappa in enumerate(KAPPAS):
            for r, rho in enumerate(RHOS):
                away = np.log(np.array(TEMPERATURES) / self.temperature(kappa, rho, table, common))
                prior = np.log(kappa / usual) ** 2 / 2 + np.log(rho / 0.3) ** 2 / 2
                each = count * means[k, r] + away[:, None] ** 2 / 2 + penalty(count)
                each = each[:, int(each.min(axis=0).argmin())]
                found.append((each.min() + prior, kappa, rho, best_temperature(each)))
        return min(found)


def noisy(own, classes):
    """Return the probability of a label for every share of wrong labels; `own` is that without wrong labels."""
    shares = [min(w, (classes - 1) / classes) for w in WRONG]
    return np.array([(1 - w) * own + w * (1 - own) / (classes - 1) for w in shares])


def penalty(images):
    return np.array([(np.log(images) / 2 if w else 0) - np.log(1 - w) for w in WRONG])


def best_temperature(losses):
    """Return T at the vertex of the parabola through the smallest loss at `TEMPERATURES` and its two neighbours."""
    place = int(losses.argmin())
    if place in (0, len(losses) - 1):
        return TEMPERATURES[place]
    near = slice(place - 1, place + 2)
    a, b, _ = np.polyfit(np.log(TEMPERATURES[near]), losses[near], 2)
    return np.exp(-b / (2 * a))


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=DOUBLE), torch.as_tensor(expected, dtype=DOUBLE), rtol=tolerance, atol=tolerance
    )


def same_solution(found, expected):
    for mine, theirs in zip(found.solution(), expected.solution(), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("omega", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("each", [1, 4, [2, 6, 1, 3, 9]])
def test_scores_equal_the_literal_version(each, omega):
    images, labels = photos(each)
    classifier, twin = taught(images, labels, omega=omega, **FIXED), Twin(images, labels)
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    weights, offsets = classifier.solution()
    scores = twin.scores(tests.double().numpy(), 3, 0.2, omega)
    close(tests.double() @ weights.T + offsets, scores)
    close(classifier(tests), scores, SINGLE)
    rows = [i for i in range(len(images)) if twin.n[labels[i]] > 1]
    left_out = [twin.without(i).scores(twin.x[[i]], 3, 0.2, omega)[0] for i in rows]
    close(classifier.left_out(images[rows], labels[rows]), np.reshape(left_out, (-1, CLASSES)), SINGLE)


def without_wrong_names(images, labels, texts=TEXTS):
    """Return the version without the texts of misnamed classes, and the losses of the other classes by all texts."""
    named = Twin(images, labels, texts)
    losses = named.text_losses_of_classes(range(len(images)))
    found = named.misnamed(losses)
    return Twin(images, labels, texts, nameless=found), np.delete(losses, found, axis=0).sum(axis=0)


def assert_least_loss(classifier, images, labels, features, kind=Twin):
    """Compare the tables, the choice and the scores of a classifier with those of a twin without and with features."""
    layer, tests = np.random.RandomState(0).standard_normal((DIM, features)), F.normalize(draw(2, 9, DIM), dim=1)
    named = kind(images, labels)
    by_text = named.text_losses_of_classes(range(len(images)))
    close(classifier.by_text, by_text)
    found = named.misnamed(by_text)
    assert classifier.misnamed == [classifier.class_names[c] for c in found]
    twins = [kind(images, labels, layer=each, nameless=found) for each in ((None, layer) if features else (None,))]
    by_text = np.delete(by_text, found, axis=0).sum(axis=0)
    omega, usual = twins[0].omega(by_text), twins[0].usual_kappa(by_text)
    rows = [i for i in range(len(images)) if twins[0].n[labels[i]] > 1]
    common, found = twins[0].correlation(omega), []
    for number, twin in enumerate(twins):
        losses, weights = twin.losses(rows, omega)
        close(classifier.losses[number], np.tensordot(weights, losses, 1), SINGLE)
        close(classifier.judged, [weights.sum(), (weights**2).sum()])
        found.append((*twin.choice(losses, weights, usual, by_text, common), number * features))
    kappa, rho, unit, chosen = min(found)[1:]
    assert classifier.choice == (kappa, rho, chosen, omega)
    rows = tests.double().numpy()
    rows = lifted(rows, layer) if chosen and kind is Twin else rows  # others compute random features themselves
    close(classifier(tests), twins[chosen > 0].scores(rows, kappa, rho, omega) / unit, SINGLE)
    function, tensors = classifier.formula()
    close(function(tests, **tensors), classifier(tests), 1e-6)


@pytest.mark.plain("2-5-0-0")
@pytest.mark.parametrize(
    "each, seed, features, used",
    [pytest.param(4, 3, 7, 0, marks=pytest.mark.slow), (2, 5, 0, 0), ([2, 6, 1, 3, 9], 3, 7, 7)],
)
def test_choice_minimises_the_loss_of_left_out_images(each, seed, features, used):
    images, labels = photos(each, seed, noise=1.2)
    classifier = taught(images, labels, features=features)
    assert_least_loss(classifier, images, labels, features)
    assert classifier.choice[2] == used


def test_fixed_settings_have_the_temperature_of_left_out_images():
    images, labels = photos(4, noise=1.2)
    classifier, twin = taught(images, labels, omega=0.25, **FIXED), Twin(images, labels)
    left_out = [(twin.without(i).scores(twin.x[[i]], 3, 0.2, 0.25)[0], label) for i, label in enumerate(labels)]
    own = [[softmax(scores / t)[label] for scores, label in left_out] for t in TEMPERATURES]
    losses = np.array([sum(-np.log(noisy(p, CLASSES)) for p in each) for each in own]) + penalty(len(left_out))
    losses = losses[:, int(losses.min(axis=0).argmin())]
    usual = twin.temperature(3, 0.2, twin.text_losses(range(len(images))), twin.correlation(0.25))
    close(classifier.temperature, best_temperature(losses + np.log(np.array(TEMPERATURES) / usual) ** 2 / 2), SINGLE)
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    close(classifier.probabilities(tests), softmax(classifier(tests).numpy() / classifier.temperature, axis=1), 1e-6)


@pytest.mark.slow
def test_tables_add_up_over_tasks_and_updates():
    images, labels = photos(6)
    first, late = labels < 3, torch.arange(len(labels)) % 6 == 5
    classifier = taught(images[~late], labels[~late], increment=3)
    classifier.update_classes(images[late], labels[late])
    total = by_text = 0.0
    for known, judged in ((first & ~late, first), (~late, ~first & ~late), (~late | late, late)):
        rows = torch.cat([known.nonzero()[:, 0][~judged[known]], (known & judged).nonzero()[:, 0]])
        twin = Twin(images[rows], labels[rows], TEXTS[: int(labels[rows].max()) + 1])
        new = range(int((~judged[known]).sum()), len(rows))
        by_text = by_text + twin.text_losses(new)
        losses, weights = twin.losses(new, twin.omega(by_text))
        total = total + np.tensordot(weights, losses, 1)
    close(classifier.by_text.sum(dim=0), by_text)
    close(classifier.losses[0], total, SINGLE)


@pytest.mark.parametrize("nameless", [(), (1,), (0, 3)])
@pytest.mark.parametrize("groups", [torch.arange(27) // 2, torch.arange(27) % 5])
def test_classes_without_a_text_and_left_out_groups_equal_the_literal_version(nameless, groups):
    """Groups of two images are left out by a correction of low rank, and those of five or six by another inverse."""
    images, labels = photos([4, 6, 3, 5, 9])
    texts = TEXTS.clone()
    texts[list(nameless)] = 0
    classifier, twin = taught(images, labels, texts=texts, **FIXED), Twin(images, labels, nameless=nameless)
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    close(classifier(tests), twin.scores(tests.double().numpy(), 3, 0.2), SINGLE)
    each = [twin.without(i).scores(twin.x[[i]], 3, 0.2)[0] for i in range(27)]
    close(classifier.left_out(images, labels), np.stack(each), SINGLE)
    found = classifier.left_out(images, labels, groups)
    for rows in (np.flatnonzero(groups.numpy() == group) for group in groups.unique().tolist()):
        close(found[rows], twin.without(*rows.tolist()).scores(twin.x[rows], 3, 0.2), SINGLE)


@pytest.mark.parametrize("groups", [None, torch.arange(CLASSES + 1)])
def test_left_out_image_after_which_no_class_has_two_images(groups):
    """The fit without it is that of one image of each class, which the closed form does not contain."""
    images, labels = photos([2, 1, 1, 1, 1])
    classifier, (twin, _) = taught(images, labels, features=0, kappa=4.0), without_wrong_names(images, labels)
    unit, of = classifier.rule.fitted(classifier.state).unit, (labels == 0).nonzero()[:, 0]
    found = classifier.left_out(images[of], labels[of], None if groups is None else groups[of])
    kappa, rho, _, omega = classifier.choice
    for row, i in zip(found, of.tolist(), strict=True):
        close(row, twin.without(i).scores(twin.x[[i]], kappa, rho, omega)[0] / unit, SINGLE)


# The last texts predict the labels slightly better than chance.
@pytest.mark.parametrize("texts", [TEXTS, TEXTS.roll(1, dims=0), TEXTS[[0, 1, 3, 4, 2]]])
def test_one_image_per_class_gives_the_usual_kappa(texts):
    images, labels = photos(1)
    classifier, (twin, by_text) = taught(images, labels, texts=texts), without_wrong_names(images, labels, texts)
    usual, omega = twin.usual_kappa(by_text), twin.omega(by_text)
    close(classifier.choice, (usual, 0.3, 0, omega))
    assert not classifier.losses.any()
    tests, unit = (
        F.normalize(draw(2, 9, DIM), dim=1),
        twin.temperature(usual, 0.3, by_text, twin.correlation(omega)),
    )
    close(classifier.temperature, 1)
    close(classifier(tests), twin.scores(tests.double().numpy(), usual, 0.3, omega) / unit, SINGLE)


def test_without_texts_it_is_lda_with_a_ridge_and_shrunken_means(tmp_path):
    images, labels = photos([1, 3, 8, 20, 5])
    classifier, named = (BayesClassifier(DIM, SCALE, **FIXED) for _ in range(2))
    classifier.add_classes(NAMES, images, labels)
    tests = F.normalize(draw(2, 9, DIM), dim=1)
    twin, (weights, offsets) = Twin(images, labels, torch.ones(CLASSES, DIM)), classifier.solution()
    usual = CLASSES / sum(1 / twin.n)
    found = [[twin.by_image(x, c, 0.2) for c in range(CLASSES)] for x in tests.double().numpy()]
    close(tests.double() @ weights.T + offsets, np.array(found) * usual / (usual + 3))
    classifier.save_pretrained(tmp_path)
    assert torch.equal(BayesClassifier.from_pretrained(tmp_path)(tests), classifier(tests))
    # Texts that are set later have the same effect as texts that are given with the classes.
    named.add_classes(NAMES[:3], images[labels < 3], labels[labels < 3])
    named.add_classes(NAMES[3:], images[labels >= 3], labels[labels >= 3] - 3)
    same_solution(named, classifier)
    named.set_text_embeds(TEXTS)
    same_solution(named, taught(images, labels, **FIXED))


@pytest.mark.parametrize("each", [[1, 3, 8, 20, 5], 1])
def test_forgetting_a_class_removes_all_of_it(each):
    images, labels = photos(each)
    classifier, kept = taught(images, labels, increment=2, **FIXED), [0, 1, 2, 4]
    assert len(classifier.factors) <= sum(classifier.counts.clamp(max=DIM))
    classifier.forget_class(NAMES[3])
    same_solution(classifier, taught(images, labels, order=kept, **FIXED))


def test_random_features_are_not_used_after_features_move():
    images, labels = photos(6, noise=1.2)
    classifier, plain = taught(images, labels, features=40), taught(images, labels, features=0)
    assert classifier.choice[2] == 40, "they would be used otherwise"
    turn = torch.linalg.qr(draw(5, DIM, DIM).double()).Q
    more, known = photos(3, seed=8)
    for each in (classifier, plain):
        each.move(turn)
        each.update_classes(F.normalize(more @ turn.float(), dim=1), known)
    assert classifier.choice == plain.choice and classifier.choice[2] == 0
    same_solution(classifier, plain)


def test_equal_and_nearly_equal_images_have_finite_scores():
    """S is small and far from full rank. In float32, its eigenvalues are NaN or the solver fails."""
    for names in (["a"], ["a", "b"]):
        classifier, labels = BayesClassifier(DIM, SCALE), torch.arange(len(names)).repeat(2)
        classifier.add_classes(names, torch.ones(len(labels), DIM), labels, TEXTS[[0] * len(names)])
        assert classifier(draw(2, 7, DIM)).isfinite().all()
    for seed in range(4):  # W is a rounding error, 1e-33, for which the solver of eigenvalues can fail
        classifier, labels = BayesClassifier(8), torch.arange(5).repeat_interleave(3)
        classifier.add_classes(NAMES, draw(seed, 1, 8).expand(15, 8), labels)
        assert classifier(draw(2, 7, 8)).isfinite().all()
    classifier, labels = BayesClassifier(64), torch.arange(2).repeat_interleave(6)
    images = (draw(0, 1, 64) + 0.03 * draw(10, 2, 64))[labels]
    classifier.add_classes(names, images + 0.01 * draw(20, 12, 64), labels, draw(30, 2, 64))
    assert (classifier(images).argmax(dim=1) == labels).all()


def test_probabilities_are_calibrated_by_left_out_images_or_useful_texts():
    images, labels = photos(1)
    useless = F.normalize(torch.ones(CLASSES, DIM), dim=1)
    for texts, expected in ((CENTRES, True), (None, False), (useless, False)):
        texts = None if texts is None else F.normalize(texts, dim=1)
        classifier = taught(images, labels, texts=texts)
        assert classifier.calibrated == expected
        assert taught(*photos(2), texts=texts).calibrated
    assert taught(images[:1], labels[:1], texts=None).calibrated, "a single class always has the probability 1"


def test_other_classes_cut_to_one_image_stand_in_for_classes_with_one():
    images, labels = photos([1, 4, 1, 3, 5])
    classifier, (twin, table) = taught(images, labels, features=0), without_wrong_names(images, labels)
    # Two of five classes have a single image, so one of the three others stands in for them: the first.
    order = ranking(unit_features(images, "", DIM, None, "cpu").double()).argsort()
    first, *further = [i for i in order.tolist() if labels[i] == 1]
    reduced = Twin(
        *(rows[[i for i in range(len(labels)) if labels[i] != 1 or i == first]] for rows in (images, labels)),
        nameless=(twin.texts == 0).all(axis=1).nonzero()[0],
    )
    others = [i for i in range(len(labels)) if labels[i] > 2]
    omega = twin.omega(table)
    losses, weights = twin.losses(others, omega)
    total = np.tensordot(weights, losses, 1)
    for i in further:
        for k, kappa in enumerate(KAPPAS):
            for r, rho in enumerate(RHOS):
                scores = reduced.scores(twin.x[[i]], kappa, rho, omega)[0]
                total[k, r] += (
                    CLASSES / 4 * np.array([-np.log(noisy(softmax(scores / t)[1], CLASSES)) for t in TEMPERATURES])
                )
    close(classifier.losses[0], total, SINGLE)


def test_each_class_leaves_out_equally_many_of_its_images(monkeypatch):
    monkeypatch.setattr(bayes, "MOST_JUDGED", 12)
    images, labels = photos([1, 2, 9, 4, 6])
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classifier, other = taught(images, labels), taught(images[mixed], labels[mixed])
    close(classifier.losses, other.losses, SINGLE)
    # 1, 2, 3, 3 and 3 images of the classes are used. The image of the class with a single image cannot be left out.
    close(classifier.judged, [4 * 5, 25 * (2 / 4 + 3 / 9 + 3 / 9 + 3 / 9)], 1e-9)


@pytest.mark.parametrize(("each", "settings"), [(4, {"features": 7}), (4, {"features": 0}), (1, {}), (4, FIXED)])
def test_saved_classifier_predicts_without_solving_again(each, settings, tmp_path, monkeypatch):
    classifier, tests = taught(*photos(each), increment=2, **settings), draw(2, 7, DIM)
    expected = classifier.probabilities(tests)
    classifier.save_pretrained(tmp_path / "new")
    classifier.save_pretrained(tmp_path / "old")
    state = classifier.tensors()
    write_tensors(tmp_path / "old" / "bayes.safetensors", state, {})  # without the solution
    config = tmp_path / "old" / "bayes_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sha256": tensors_digest(state)}))
    assert torch.equal(BayesClassifier.from_pretrained(tmp_path / "old").probabilities(tests), expected)
    monkeypatch.setattr(bayes.Fit, "of", None)
    loaded = BayesClassifier.from_pretrained(tmp_path / "new").to("cpu")
    assert torch.equal(loaded.probabilities(tests), expected)
    function, tensors = loaded.formula()
    close(function(F.normalize(tests, dim=1), **tensors), loaded(tests), SINGLE)
    with pytest.raises(TypeError, match="not callable"):  # a changed classifier solves again
        loaded.forget_class(NAMES[0])
        loaded(tests)
    write_tensors(tmp_path / "new" / "bayes.safetensors", state | {"solved.weight": torch.zeros(CLASSES, 2)}, {})
    with pytest.raises(ValueError, match=r"the tensors 'solved.' must have one of the shapes .* got .*\(5, 2\)"):
        BayesClassifier.from_pretrained(tmp_path / "new")


def test_how_well_old_texts_described_the_images_counts_again_when_they_come_back():
    named = taught(*photos(noise=0.3), features=0)
    tables, before, scores = named.tensors(), named.choice, named(photos()[0])
    named.set_text_embeds(TEXTS.roll(1, dims=0))
    assert named.choice != before and named.rule.fitted(named.state).told == 0, "nothing is known of the new texts"
    assert all(
        torch.equal(named.tensors()[name], tables[name]) for name in tables.keys() - {"text_embeds", "set_aside"}
    )
    named.set_text_embeds(TEXTS)
    assert named.choice == before and torch.equal(named(photos()[0]), scores)
    named.rename_class("class 0", "other", TEXTS[1])
    assert not torch.equal(named(photos()[0]), scores)
    named.rename_class("other", "third", TEXTS[2])
    named.rename_class("third", "class 0", TEXTS[0])
    assert all(torch.equal(named.tensors()[name], tables[name]) for name in tables)
    assert torch.equal(named(photos()[0]), scores)


def test_other_texts_of_known_classes_set_aside_what_was_measured_however_they_come():
    images, labels = photos(noise=0.3)
    set_before, given, same = (taught(images, labels, features=0) for _ in range(3))
    other = TEXTS.roll(1, dims=0)
    set_before.set_text_embeds(other)
    extra = images[labels == 0] + images[labels == 1], torch.zeros(int((labels == 0).sum()), dtype=torch.int64)
    for classifier, texts in ((set_before, other), (given, other), (same, TEXTS)):
        classifier.add_classes(["new"], *extra, torch.cat([texts, texts[:1]]))
    assert given.set_aside[:CLASSES].any(dim=1).all() and not same.set_aside.any()
    assert all(torch.equal(given.tensors()[name], tensor) for name, tensor in set_before.tensors().items())
    assert given.choice == set_before.choice != same.choice
    trained = ClosingPass(("new",), *extra, texts=torch.cat([other, other[:1]]))  # training has moved the same names
    (moved,) = learn_task({"bayes": taught(images, labels, features=0)}, trained).values()
    assert torch.equal(moved.text_embeds, given.text_embeds) and not moved.set_aside.any()


def test_images_that_are_learned_under_a_new_name_replace_what_was_set_aside():
    images, labels = photos(noise=0.3)
    named, fresh = (taught(images, labels, features=0) for _ in range(2))
    named.rename_class("class 0", "other", TEXTS[1])
    named.update_classes(images[labels == 0], labels[labels == 0])
    assert not named.set_aside.any() and not torch.equal(named.by_text[0], fresh.by_text[0])
    assert int(named.shown[0]) == int((labels == 0).sum()) and torch.equal(named.by_text[1:], fresh.by_text[1:])
    named.rename_class("other", "class 0", TEXTS[0])
    assert named.set_aside[0].any() and not named.set_aside[1:].any()
