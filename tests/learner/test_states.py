"""Test the states of a learner: corrections make a new state, and a learner can continue from any state."""

import pytest
from lives import differences, everything, images_of, learned, tiny_learner
from test_locking import Calling

from dulbe_peft.data.store import FeatureStore
from dulbe_peft.training import updating

MAKERS = {
    "update": lambda learner: updating.update_classes(
        learner.state, learner.encoder, images_of(0, 1, 1, seed=5), ["a0", "b1"]
    ),
    "forget": lambda learner: updating.forget_class(learner.state, "a0"),
    "rename": lambda learner: updating.rename_class(learner.state, learner.encoder, "a0", "zebra"),
    "join": lambda learner: updating.rename_class(learner.state, learner.encoder, "a0", "b1"),
}


@pytest.fixture(scope="module")
def two_tasks():
    """Return a learner of two tasks, which no correction changes."""
    return learned(tiny_learner("frozen", ("lda", "bayes:features=20")), 2)


@pytest.mark.plain("forget")
@pytest.mark.parametrize("name", MAKERS)
def test_correction_returns_a_new_state_and_keeps_the_old(name, two_tasks):
    learner = two_tasks
    before, old = everything(learner), learner.state
    new = MAKERS[name](learner)
    assert not differences(everything(learner), before) and learner.state is old
    assert len(new.updates) == 1 and not old.updates
    assert (new.class_names, new.image_counts()) != (old.class_names, old.image_counts())


def test_learner_continues_from_an_earlier_state():
    learner, image = learned(tiny_learner("frozen", ("lda",)), 1), images_of(0, seed=7)[0][0]
    state, scores = learner.state, learner.predict(image, top_k=2, return_scores=True)
    learned(learner, 1, first=1)
    learner.use_state(state)
    assert learner.tasks == [("a0", "b0")] and learner.predict(image, top_k=2, return_scores=True) == scores
    assert learned(learner, 1, first=2).tasks == [("a0", "b0"), ("a2", "b2")]


def test_state_cannot_be_replaced_while_a_task_is_learned():
    learner = learned(tiny_learner("frozen", ("lda",)), 1)
    images = Calling(images_of(0, 1, seed=1), lambda: learner.use_state(learner.state))
    with pytest.raises(RuntimeError, match="use_state is called inside learn_task"):
        learner.learn_task(images, ["x", "y"])


def test_first_kept_classifier_makes_the_predictions():
    learner = learned(tiny_learner("frozen", ("lda", "ridge", "prototype")), 1)
    learner.keep_classifiers(["prototype", "lda"])
    assert list(learner.classifiers) == ["prototype", "lda"] and learner.classifier.name == "prototype"
    assert list(learner.evaluate(images_of(0, 1), ["a0", "b0"])["classifiers"]) == ["prototype", "lda"]


def test_store_is_kept_when_settings_change():
    learner, store = tiny_learner("frozen", ("lda",)), FeatureStore()
    learner.use_store(store)
    learner.change_settings(learner.args)
    assert learner.encoder.store is store
