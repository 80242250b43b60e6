"""Two learners that train nothing become one: equal to a learner that saw all images at once."""

import numpy as np
import pytest
from small_runs import QUICK

from dulbe_peft import ClassIncrementalLearner, ImageFolder, LearnerArguments

CLASSIFIERS = ("lda", "prototype", "ridge:ridge=1", "ranpac:features=40,ridge=1", "bayes:features=0")


@pytest.fixture(scope="module")
def images(digit_folders):
    root = digit_folders(5, 12, 4)
    return ImageFolder(root, "train"), ImageFolder(root, "test")


def learner_of(base, *parts, classifiers=CLASSIFIERS, **settings):
    args = LearnerArguments(**{**QUICK, **settings})
    learner = ClassIncrementalLearner(*base, args=args, strategy="frozen", classifiers=classifiers)
    for part in parts:
        learner.learn_task(part)
    return learner


def scores(learner, images):
    features = learner.image_embeds(images)
    return {
        name: classifier(features)[:, np.argsort(learner.class_names)].double()
        for name, classifier in learner.classifiers.items()
    }


def test_two_teams_are_one(base, images, tmp_path):
    """Classes of one team, classes of the other, and other photographs of a class that both know."""
    train, test = images
    names = list(train.class_names)
    shared = train.select(names[2:3])
    berlin = learner_of(base, train.select(names[:2]), shared.at(slice(0, 6)))
    paris = learner_of(base, shared.at(slice(6, None)), train.select(names[3:]))
    whole = learner_of(base, train.select(names[:2]), shared, train.select(names[3:]))
    before = paris.classifier.state_dict()
    found = berlin.merge(paris)
    assert found is berlin and found.tasks == whole.tasks
    assert found.state.updates[-1]["images"] == {names[2]: 6}
    assert all((before[key] == value).all() for key, value in paris.classifier.state_dict().items())
    expected = scores(whole, test)
    for name, given in scores(found, test).items():
        same = (given.argmax(1) == expected[name].argmax(1)).double().mean()
        if name == "bayes":  # its prior's weight is chosen on images that each task held back
            assert same >= 0.9
            continue
        np.testing.assert_allclose(given, expected[name], atol=2e-3 * float(expected[name].abs().max()), err_msg=name)
        assert same == 1
    found.save_pretrained(tmp_path / "both")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "both", machine={"device": "cpu", "progress": False})
    assert loaded.predict(test) == found.predict(test)
    loaded.learn_task(train.at(slice(0, 6), class_names=["new", *"bcdef"][: len(names)]).select(["new"]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_template": "a drawing of {}."}, "merge where templates is equal"),
        ({"classifiers": ("lda",)}, "merge where strategy and classifiers are equal"),
        ({"image_resize": "squash"}, "encode images with other models or in other ways: image_processor differ"),
    ],
)
def test_others_are_refused_and_change_nothing(base, images, settings, words):
    train, _ = images
    names = list(train.class_names)
    one, other = learner_of(base, train.select(names[:2])), learner_of(base, train.select(names[2:]), **settings)
    before = one.state
    with pytest.raises(ValueError, match=words):
        one.merge(other)
    assert one.state is before
