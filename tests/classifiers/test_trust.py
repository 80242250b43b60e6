"""What a classifier says about its own answers: wrong labels, few classes that speak for all, and wrong names."""

from types import SimpleNamespace

import pytest
import torch
from taught import clusters
from torch.nn import functional as F

from dulbe_peft.classifiers import BayesClassifier, make_classifier
from dulbe_peft.classifiers.groups import MANY_ALIKE, share_alike
from dulbe_peft.training.estimating import corrected, doubted, estimates_of, scores_left_out, surely_wrong
from dulbe_peft.training.state import AGREEMENT, CORRECTED, Estimates, about_labels


def world(each, classes=12, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, 40, generator=generator)
    labels = torch.arange(classes).repeat_interleave(torch.tensor(each))
    images = F.normalize(centres[labels] + spread * torch.randn(len(labels), 40, generator=generator), dim=1)
    return images, labels, F.normalize(centres, dim=1)


def taught(spec, images, labels, texts=None):
    classifier = make_classifier(spec, images.shape[1], 30.0)
    classifier.add_classes([f"class {n}" for n in range(int(labels.max()) + 1)], images, labels, texts)
    return classifier


@pytest.mark.parametrize("spec", ["bayes", "lda"])
def test_swapped_labels_are_counted_and_do_not_make_answers_unsure(spec):
    images, labels, _ = world(12 * [10])
    wrong = labels.clone()
    wrong[::10] = labels[::10].roll(5)
    right, swapped = taught(spec, images, labels), taught(spec, images, wrong)
    assert right.wrong_labels[1] == 0 and right.wrong_labels[0] < 0.02
    share, low, high = swapped.wrong_labels
    assert low <= 0.1 <= high and low > 0.02 and abs(share - 0.1) < 0.05
    largest = [float(each.probabilities(images).amax(dim=1).mean()) for each in (right, swapped)]
    assert largest[1] > largest[0] - 0.1
    said = surely_wrong([swapped])
    assert said == (swapped.wrong_labels if spec == "bayes" else None)


def test_only_bayes_claims_wrong_labels_and_no_few_ones():
    few, many, none = (BayesClassifier(4, 1.0) for _ in range(3))
    assert none.wrong_labels is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BayesClassifier, "wrong_labels", property(lambda self: shares[id(self)]))
        shares = {id(few): (0.004, 0.001, 0.016), id(many): (0.1, 0.02, 0.2), id(none): None}
        lda = SimpleNamespace(wrong_labels=(0.12, 0.07, 0.2))
        for own, expected in ((few, None), (many, (0.1, 0.02, 0.2)), (none, None), (lda, None)):
            assert surely_wrong([lda, own]) == expected


@pytest.mark.parametrize("spec", ["bayes", "lda"])
def test_few_classes_with_several_images_do_not_speak_for_all(spec):
    images, labels, _ = world([20, 20, *(10 * [1])])
    few, many = taught(spec, images, labels), taught(spec, *world(12 * [5])[:2])
    assert not few.calibrated and "only 2 of 12 classes" in few.doubt
    with pytest.raises(ValueError, match="only 2 of 12 classes"):
        few.prediction_sets(images, 0.9)
    for ask in (lambda: few.refused(images, 0.2), lambda: few.rejection_threshold(0.2)):
        with pytest.raises(ValueError, match="no image can be rejected: only 2 of 12 classes"):
            ask()
    assert few.roc_area is None and few.roc_interval is None and many.roc_area > 0.5
    assert many.refused(images, 0.2).any() and many.rejection_threshold(0.2) > 0
    assert many.calibrated and many.doubt == "" and many.prediction_sets(images, 0.9).any()


def test_photographs_of_one_item_say_no_more_about_a_name_than_one_of_them():
    images, labels, texts = world(12 * [2])
    frames, of = images.repeat(3, 1), torch.arange(len(images)).repeat(3)
    classifier = make_classifier("bayes", 40, 30.0)
    classifier.add_classes([f"class {n}" for n in range(12)], frames, labels.repeat(3), texts, groups=of)
    assert classifier.shown.tolist() == 12 * [2] and taught("bayes", images, labels, texts).shown.tolist() == 12 * [2]


def test_names_that_do_not_describe_their_images_are_found():
    images, labels, texts = world(12 * [6])
    assert taught("bayes", images, labels, texts).misnamed == []
    changed = texts.clone()
    changed[[2, 7]] = texts[[7, 2]]
    classifier = taught("bayes", images, labels, changed)
    assert classifier.misnamed == ["class 2", "class 7"] and classifier.exchanged == [("class 2", "class 7")]
    fixed = taught("bayes:kappa=4,rho=0.3", images, labels, changed)
    assert fixed.misnamed == [] and not torch.equal(fixed(images), classifier(images))
    trained = SimpleNamespace(tasks=[0], updates=[], trained=True, classifiers={"bayes": classifier})
    assert estimates_of(trained, None, {}).misnamed == ("class 2", "class 7"), "also where there is no estimate"
    classifier.rename_class("class 2", "right", texts[2])
    assert classifier.misnamed == ["class 7"]
    assert taught("bayes", images, labels, texts[torch.randperm(12)]).misnamed == [], "no name is an exception"


def test_a_class_may_have_no_text():
    images, labels, texts = world(12 * [6])
    without = texts.clone()
    without[3] = 0
    zeros, nothing = (
        taught("bayes", images, labels, without),
        taught("bayes", images, labels, [*without[:3], None, *texts[4:]]),
    )
    assert torch.equal(zeros.text_embeds[3], torch.zeros(40)) and torch.equal(zeros(images), nothing(images))
    with pytest.raises(ValueError, match="row 3 is zero"):
        taught("gda", images, labels, without)


def test_near_copies_are_noticed():
    images, labels, _ = clusters(6 * [10], 40)
    frames = F.normalize(images.repeat(2, 1) + 0.02 * torch.randn(120, images.shape[1]), dim=1)
    assert share_alike(images, labels) < MANY_ALIKE < 0.9 < share_alike(frames, labels.repeat(2))


def test_estimate_is_corrected_for_wrong_labels():
    accuracy, wrong, classes = 0.9, 0.1, 5
    agreement = (1 - wrong) * accuracy + wrong * (1 - accuracy) / (classes - 1)
    share, low, high = corrected((agreement, agreement - 0.05, agreement + 0.05), (wrong, 0.05, 0.15), classes)
    assert share == pytest.approx(accuracy) and low < share < high <= 1
    said = Estimates(
        shares={"lda": (0.9, 0.8, 1.0)}, classes=("a",), wrong=(0.03, 0.01, 0.05), alike=True, misnamed=("b",)
    )
    text = " ".join(said.remarks(3))
    for words in (
        "1 of 3 classes: 'a'",
        "about 3.0 % of the labels look wrong (1.0 to 5.0 %)",
        "the estimate is corrected as if 3.0 % of the labels",
        "--group",
        "does not use them: 'b'",
    ):
        assert words in text


def test_share_of_wrong_labels_is_told_with_its_interval_and_accuracies_are_agreement():
    sure, wide, clean = (0.1, 0.02, 0.28), (0.0, 0.0, 0.26), (0.0, 0.0, 0.006)
    assert about_labels(sure, items=True) == [
        "about 10.0 % of the items' labels look wrong (2.0 to 28.0 %)",
        AGREEMENT,
    ]
    assert about_labels(sure, corrected=0.08)[1] == CORRECTED.format(8)
    assert about_labels(wide) == ["at most 26.0 % of the labels are wrong: there are too few images to say more"]
    assert about_labels(clean) == ["about 0.0 % of the labels look wrong (0.0 to 0.6 %)"]
    with_items = {"shares": {"bayes": (0.9, 0.8, 1.0)}, "classes": ("a",), "items": 9}
    assert Estimates(**with_items, doubted=sure).remarks(1) == tuple(about_labels(sure, items=True))
    assert Estimates(**with_items, doubted=wide).remarks(1) == tuple(about_labels(wide, items=True))
    assert Estimates(doubted=clean).remarks(1) == (), "photographs with right labels need no sentence"
    both = Estimates(doubted=sure, wrong=(0.08, 0.02, 0.2)).remarks(1)
    assert both[0].startswith("about 10.0 %") and "corrected as if 8.0 % of the labels" in both[1]
    more = (0.3, 0.2, 0.4)  # the larger share is told, so a corrected estimate is never without its sentence
    for doubts in (clean, sure):
        assert Estimates(doubted=doubts, wrong=more).remarks(1) == tuple(about_labels(more, corrected=0.3))


@pytest.mark.plain("lda")
def test_items_with_wrong_labels_are_told_beside_the_estimate():
    """Six of 60 items of four frames have the label of another class."""
    images, labels, _ = clusters(6 * [10], 40)
    given = labels.clone()
    given[::10] = (labels[::10] + 1) % 6
    frames = F.normalize(images.repeat(4, 1) + 0.02 * torch.randn(240, images.shape[1]), dim=1)
    groups, told = torch.arange(60).repeat(4), []
    for own in (given, labels):
        classifier = make_classifier("bayes", images.shape[1], 30.0)
        classifier.add_classes([f"class {n}" for n in range(6)], frames, own.repeat(4), groups=groups)
        left = scores_left_out(classifier, frames, own.repeat(4), groups)
        told.append(doubted({"lda": None, "bayes": classifier}, {"lda": None, "bayes": left}))
        assert doubted({}, {}) is doubted({"bayes": classifier}, {"bayes": None}) is None
    wrong, clean = told
    assert wrong[0] > 0.05 and wrong[1] < 0.1 < wrong[2] and clean[:2] == (0, 0), told


@pytest.mark.plain("lda")
@pytest.mark.parametrize("spec", ["bayes", "lda"])
def test_few_items_of_a_class_say_nothing_about_wrong_labels(spec):
    """Items differ more than their frames, so answers on left-out items are sure and often wrong."""
    shares = []
    for items in (2, 8):
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(12, 40, generator=generator)
        owners = torch.arange(12 * items) % 12
        shown = centres[owners] + 2 * torch.randn(len(owners), 40, generator=generator)
        frames = shown.repeat(6, 1) + 0.2 * torch.randn(6 * len(owners), 40, generator=generator)
        labels, groups = owners.repeat(6), torch.arange(len(owners)).repeat(6)
        classifier = make_classifier(spec, 40, 30.0)
        classifier.add_classes([f"class {n}" for n in range(12)], F.normalize(frames, dim=1), labels, groups=groups)
        shares.append(classifier.wrong_labels)
    assert shares[0][:2] == (0, 0) and shares[0][2] > 0.5, "nothing is known"
    assert shares[1][2] < 0.9


def test_photographs_that_look_alike_cast_doubt_on_probabilities():
    assert Estimates(alike=True).doubt.endswith("learn with --group") and Estimates().doubt == ""
