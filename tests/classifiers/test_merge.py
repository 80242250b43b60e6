"""Merged and corrected classifiers equal one that learned the same images at once."""

from dataclasses import replace

import pytest
import torch
from reference import randn
from small_runs import learner_of
from taught import assert_equal_states, in_tasks, snapshot

from dulbe_peft.classifiers import CLASSIFIERS, make_classifier
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.known import KnownImages

DIM, CLASSES = 8, 6
NAMES = [f"class {c}" for c in range(CLASSES)]
# Settings that would be chosen on held-out images are fixed, because the choice depends on the known classes.
SPECS = ("text", "prototype", "lda", "gda:alpha=0.5", "ridge:ridge=0.5", "ranpac:features=20,ridge=5")
CORRECTED = (*SPECS, "bayes:kappa=4,rho=10", "bayes:kappa=4,rho=10,exact_forgetting=false")
KEEPING_SUMS = {"pooled_bridge", *(spec.partition(":")[0] for spec in CORRECTED)}  # its own tests merge pooled_bridge
CANNOT = [name for name in CLASSIFIERS if name not in KEEPING_SUMS]


TEXTS = randn(CLASSES, DIM, seed=1)
LABELS = torch.arange(90) % CLASSES
IMAGES = randn(CLASSES, DIM, seed=2)[LABELS] + randn(90, DIM, seed=3)
TESTS = randn(40, DIM, seed=4)


def learned(spec, classes, rows=slice(None)):
    """Return a classifier that has learned `classes`, in this order, from some rows of the images."""
    return in_tasks(spec, IMAGES[rows], LABELS[rows], TEXTS, classes)


def relearned(spec, names, labels, rows=slice(None)):
    """Return a classifier that has learned the images with other `labels`, which index the class `names`."""
    classifier = make_classifier(spec, DIM, 20.0)
    texts = TEXTS[[NAMES.index(name) if name in NAMES else -1 for name in names]]
    classifier.add_classes(names, IMAGES[rows], labels[rows], texts)
    return classifier


def assert_same(actual, expected):
    assert actual.class_names == expected.class_names
    for key, value in expected.tensors().items():
        # The tables are measured among the classes that were known, and F is unique up to a rotation.
        if key in (*TABLES, "factors", "factor_rows"):
            continue
        # G of ranpac is rounded to float32 after every task.
        rtol, atol = (1e-9, 1e-9) if value.dtype == torch.float64 else (1e-6, 1e-4)
        torch.testing.assert_close(actual.tensors()[key], value, rtol=rtol, atol=atol)
    if "factors" in expected.tensors():
        parts = [each.factors.split(each.factor_rows.tolist()) for each in (actual, expected)]
        for factor, reference in zip(*parts, strict=True):
            torch.testing.assert_close(factor.T @ factor, reference.T @ reference, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual(TESTS), expected(TESTS), rtol=1e-4, atol=1e-4)


TABLES = ("losses", "by_text", "shown", "errors", "judged", "set_aside")
ALL, HALF, REST = slice(None), slice(0, 60), slice(60, 90)
PARTS = {
    "disjoint": [([4, 1], ALL), ([0, 2, 5], ALL), ([3], ALL)],
    "shared": [([5, 0, 1, 2, 3, 4], HALF), ([2, 1, 0, 5, 4, 3], REST)],
    "both": [([0, 1, 2, 3], HALF), ([3, 2, 5, 4], REST), ([1, 0], REST), ([4, 5], HALF)],
}


@pytest.mark.plain("text", "lda", "bayes:kappa=4,rho=10")
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("spec", CORRECTED)
def test_merged_classifiers_equal_one_that_learned_all_images(spec, parts):
    first, *others = [learned(spec, *part) for part in PARTS[parts]]
    states = [snapshot(other) for other in others]
    for other in others:
        assert first.merge(other) is first
    classes = [NAMES.index(name) for name in first.class_names]
    assert_same(first, learned(spec, classes))
    for other, state in zip(others, states, strict=True):
        assert_equal_states(snapshot(other), state)


def test_merging_adds_the_losses_and_errors_of_held_out_images():
    for spec, *tables in (("gda", "losses"), ("ridge", "errors"), ("bayes:features=0", "losses", "judged")):
        one, two = learned(spec, [0, 1, 2]), learned(spec, [3, 4, 5])
        expected = {table: one.tensors()[table] + two.tensors()[table] for table in tables}
        for table in {"by_text", "shown"} & one.tensors().keys():  # these have a row for each class
            expected[table] = torch.cat([one.tensors()[table], two.tensors()[table]])
        merged = one.merge(two).tensors()
        for table, value in expected.items():
            torch.testing.assert_close(merged[table], value)
            assert value.any()


def test_merging_discards_measured_scores_until_new_classes_are_learned():
    one, merged = learned("lda", [0, 1]), learned("lda", [0, 1]).merge(learned("lda", [2, 3]))
    assert one.roc_area is not None and one.refused(TESTS, 0.2).any() and merged.roc_area is None
    for ask in (lambda: merged.refused(TESTS, 0.2), lambda: merged.prediction_sets(TESTS, 0.8)):
        with pytest.raises(ValueError, match="there are 0.*merging discards scores"):
            ask()
    rows = torch.isin(LABELS, torch.tensor([4, 5]))
    merged.add_classes(NAMES[4:], IMAGES[rows], LABELS[rows] - 4)
    merged.refused(TESTS, 0.2)
    torch.testing.assert_close(merged(TESTS), learned("lda", [0, 1, 2, 3, 4, 5])(TESTS), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    other_texts = learned("text", [1, 2])
    other_texts.set_text_embeds(TEXTS[[2, 1]])
    for mine, theirs, message in (
        ("lda", None, "cannot be merged with itself: its images would count twice"),
        ("lda", "prototype", "can be merged only with a LdaClassifier, got PrototypeClassifier"),
        ("lda:shrinkage=0.1", "lda", "to merge need the same shrinkage, got 0.1 and oas"),
        ("text", other_texts, "text embeddings of class 'class 1' differ"),
        ("bayes", make_classifier("bayes", DIM, 9.0), "to merge need the same logit_scale, got 20.0 and 9.0"),
    ):
        one = learned(mine, [0, 1, 2])
        two = learned(theirs, [2, 3, 4]) if isinstance(theirs, str) else theirs or one
        state = snapshot(one)
        with pytest.raises((ValueError, TypeError), match=message):
            one.merge(two)
        assert_equal_states(snapshot(one), state)


@pytest.fixture(scope="module")
def images(digit_folders):
    return ImageFolder(digit_folders(5, 3, 1), "train")


def learner_that_has(base, *parts, classifiers=("lda", "prototype"), **settings):
    learner = learner_of(base, "frozen", classifiers, **settings)
    for part in parts:
        learner.learn_task(part)
    return learner


def test_merging_a_known_class_adds_no_task(base, images):
    names = images.class_names
    shared = images.select(names[1:2])
    one = learner_that_has(base, images.select(names[:1]), shared.at(slice(0, 1)))
    one.merge(learner_that_has(base, shared.at(slice(1, None)), images.select(names[2:])))
    assert one.tasks == [names[:1], names[1:2], names[2:]] and one.state.updates[-1].images == {names[1]: 2}


def test_unsuitable_learners_are_not_merged_and_nothing_changes(base, images):
    names = list(images.class_names)
    one = learner_that_has(base, images.select(names[:2]))
    for settings, words in (
        ({"prompt_template": "a drawing of {}."}, "to merge need the same templates"),
        ({"classifiers": ("lda",)}, "to merge need the same strategy and classifiers"),
        ({"image_resize": "squash"}, "encode images with different models or settings: image_processor differ"),
    ):
        other, before = learner_that_has(base, images.select(names[2:]), **settings), one.state
        with pytest.raises(ValueError, match=words):
            one.merge(other)
        assert one.state is before
    for state in (before, replace(before, known=KnownImages(complete=False))):  # also without a record of images
        one.use_state(state)
        with pytest.raises(ValueError, match="cannot be merged with itself"):
            one.merge(one)
        assert one.state is state


def test_merging_learners_without_image_records_warns(base, images):
    names = list(images.class_names)
    one, other = (learner_that_has(base, images.select(part)) for part in (names[:2], names[2:]))
    other.use_state(replace(other.state, known=KnownImages(complete=False)))
    with pytest.warns(
        UserWarning, match="no record of its images: images that both learners have learned count twice"
    ):
        one.merge(other)
    assert not one.state.known.complete and one.state.known.learned.keys() == set(names[:2])


@pytest.mark.parametrize("spec", CORRECTED)
def test_renamed_class_equals_one_learned_with_the_new_name(spec):
    classifier = learned(spec, list(range(CLASSES)))
    classifier.rename_class(NAMES[2], "owl", TEXTS[-1])
    names = ["owl" if place == 2 else name for place, name in enumerate(NAMES)]
    assert_same(classifier, relearned(spec, names, LABELS))


@pytest.mark.parametrize(("old", "new"), [(1, 4), (5, 0)])
@pytest.mark.parametrize("spec", CORRECTED)
def test_joined_class_equals_one_learned_with_the_images_of_both(spec, old, new):
    classifier = learned(spec, list(range(CLASSES)))
    classifier.join_classes(NAMES[old], NAMES[new])
    names = [name for name in NAMES if name != NAMES[old]]
    place = [names.index(NAMES[new if c == old else c]) for c in range(CLASSES)]
    assert_same(classifier, relearned(spec, names, torch.tensor(place)[LABELS]))


@pytest.mark.parametrize("spec", CORRECTED)
def test_forgetting_images_equals_never_having_learned_them(spec):
    forgotten = [7, 80, 13, 1]
    kept = torch.tensor([row for row in range(len(LABELS)) if row not in forgotten])
    classifier = learned(spec, list(range(CLASSES)))
    for row in forgotten:
        classifier.forget_image(IMAGES[row], NAMES[int(LABELS[row])])
    expected = relearned(spec, NAMES, LABELS, kept)
    assert_same(classifier, expected)
    if "factors" in expected.tensors():
        assert classifier.factor_rows.tolist() == expected.factor_rows.tolist()


def test_all_images_of_a_class_except_the_last_can_be_forgotten():
    spec = "bayes:kappa=4,rho=10"
    rows = [*(LABELS == 0).nonzero()[:3, 0].tolist(), *(LABELS == 1).nonzero()[:, 0].tolist()]
    classifier = learned(spec, [0, 1], rows)
    for row in rows[:2]:
        classifier.forget_image(IMAGES[row], NAMES[0])
    assert_same(classifier, learned(spec, [0, 1], rows[2:]))
    before = snapshot(classifier)
    with pytest.raises(ValueError, match="class 'class 0' has only one image: forget the class"):
        classifier.forget_image(IMAGES[rows[2]], NAMES[0])
    with pytest.raises(ValueError, match="class 'x' is not known, so it cannot be joined"):
        classifier.join_classes(NAMES[0], "x")
    assert_equal_states(snapshot(classifier), before)


@pytest.mark.parametrize("name", CANNOT)
def test_classifiers_without_sums_refuse_merging_joining_and_forgetting_images(name):
    classifier = make_classifier(name, DIM)
    for call in (lambda: classifier.merge(make_classifier(name, DIM)), lambda: classifier.join_classes("a", "b")):
        with pytest.raises(ValueError, match=f"the '{name}' classifier cannot be merged: it does not keep sums"):
            call()
    if name != "bofa":  # it can forget images, because its means are sums and its weight is chosen once
        with pytest.raises(ValueError, match=f"the '{name}' classifier cannot forget a single image"):
            classifier.forget_image(TESTS[0], "a")
