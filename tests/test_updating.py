"""Further photographs of known classes, and a class that is forgotten: the learner before and after."""

import copy

import pytest
import torch
import write_saved
from lives import differences, everything
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, class_incremental_tasks
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.streams.tasks import select_classes
from dulbe_peft.subspaces.inputs import collect_statistics
from dulbe_peft.subspaces.occupation import OccupationStatistics

QUICK = {"epochs": 1, "batch_size": 8, "device": "cpu", "progress": False, "prompt_template": "the digit {}."}


@pytest.fixture(scope="module")
def digits():
    """Handwritten digits: six images of each class to learn from, then six further ones, then four to test on."""
    return write_saved.digits(0, 6), write_saved.digits(6, 12), write_saved.digits(12, 16), write_saved.digits(0, 12)


def make_learner(base, strategy="frozen", classifiers=("bridge", "prototype", "lda"), **fields):
    clip, processor = base
    torch.manual_seed(0)
    model = copy.deepcopy(clip)
    if strategy != "frozen":
        targets = ["visual_projection"] if strategy == "bofa" else ["k_proj", "v_proj"]
        model = get_peft_model(model, DualModeLoraConfig(residual_rank=2, support_rank=8, target_modules=targets))
    args = LearnerArguments(**{**QUICK, **fields})
    return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)


def taught(base, data, count=2, **options):
    learner = make_learner(base, **options)
    for task in class_incremental_tasks(data, increment=2)[:count]:
        learner.learn_task(task.train)
    return learner


def test_half_and_half_is_as_all_at_once_where_nothing_is_trained(base, digits):
    first, more, test, both = digits
    parts, whole = taught(base, first), taught(base, both)
    parts.update_classes(select_classes(more, ("two", "zero", "three", "one")))
    features = whole.image_embeds(test)
    for name in ("prototype", "lda"):
        torch.testing.assert_close(
            parts.classifiers[name](features), whole.classifiers[name](features), rtol=1e-4, atol=2e-3
        )
    torch.testing.assert_close(parts.head.visual_prototypes, whole.head.visual_prototypes, rtol=0, atol=1e-6)
    assert parts.head.counts.tolist() == [12] * 4
    assert parts.tasks == whole.tasks and parts.state.step == 0


@pytest.mark.parametrize("strategy", ["dulbe", "loda", "bofa"])
def test_sums_of_inputs_take_the_further_images_and_the_model_stays(base, digits, strategy):
    first, more, *_ = digits
    learner = taught(base, first, strategy=strategy)
    model = {name: value.clone() for name, value in learner.model.state_dict().items()}
    before = {name: value.clone() for name, value in learner.memory.items()}
    old = learner.memory
    images = select_classes(more, ("one", "two"))
    learner.update_classes(images)
    pixels = learner.processor.image_processor(
        images=[images[i]["image"].convert("RGB") for i in range(len(images))], return_tensors="pt"
    )["pixel_values"]
    inputs = collect_statistics(
        learner.model, [pixels], lambda _, batch: unit_image_embeds(learner.clip, batch), into=OccupationStatistics()
    )
    assert set(learner.memory) == set(before) == set(inputs)
    for name, matrix in learner.memory.items():
        torch.testing.assert_close(matrix, before[name] + inputs[name], rtol=1e-4, atol=1e-3)
        assert torch.equal(old[name], before[name]), "the old sums stay as they were"
    assert all(torch.equal(value, model[name]) for name, value in learner.model.state_dict().items())
    learner.learn_task(class_incremental_tasks(first, increment=2)[2].train)
    assert len(learner.tasks) == 3


def test_labels_mean_the_names_that_the_dataset_carries(base, digits):
    learner = taught(base, digits[0], classifiers="prototype")
    learner.update_classes(digits[1].__class__(digits[1].source[18:24], digits[1].labels[18:24]))  # threes, label 3
    assert learner.classifier.counts.tolist() == [6, 6, 6, 12]
    pairs = [(digits[1][0]["image"], 1)] * 2
    learner.update_classes(pairs, ("three", "zero"))
    assert learner.classifier.counts.tolist() == [8, 6, 6, 12]
    learner.update_classes(pairs)  # nobody names them: all seen classes, in the order they came
    assert learner.classifier.counts.tolist() == [8, 8, 6, 12]


def test_what_cannot_be_taken_in_is_named_and_changes_nothing(base, digits):
    learner, able = taught(base, digits[0], classifiers=("lda", "rapf")), taught(base, digits[0])
    before = everything(learner), everything(able)
    for one, dataset, message in (
        (learner, select_classes(digits[1], ("one",)), "the 'rapf' classifier cannot learn more images of a known"),
        (able, select_classes(digits[1], ("one", "four", "nine")), r"2 classes have not been .*\['four', 'nine'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            one.update_classes(dataset)
    assert not differences(everything(learner), before[0]) and not differences(everything(able), before[1])


def test_a_learner_notes_what_it_took_in_and_lost(base, digits, tmp_path):
    learner = taught(base, digits[0])
    learner.update_classes(select_classes(digits[1], ("three", "one")))
    learner.learn_task(class_incremental_tasks(digits[0], increment=2)[2].train)
    learner.update_classes(select_classes(digits[1], ("one",)))
    expected = [
        {"after": 2, "images": {"one": 6, "three": 6}, "forgotten": None},
        {"after": 3, "images": {"one": 6}, "forgotten": None},
    ]
    learner.save_pretrained(tmp_path / "saved")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    assert loaded.state.updates == learner.state.updates == expected
    loaded.forget_class("one")
    assert loaded.state.updates == [
        {"after": 2, "images": {"three": 6}, "forgotten": None},
        {"after": 3, "images": {}, "forgotten": None},
        {"after": 3, "images": {}, "forgotten": 1},
    ]
    loaded.save_pretrained(tmp_path / "less")
    assert '"one"' not in (tmp_path / "less" / "learner.json").read_text(), "a forgotten class leaves no name"


def test_a_forgotten_class_is_never_the_answer_and_can_be_learned_again(base, digits):
    first, _, test, _ = digits
    learner = taught(base, first, strategy="dulbe")
    model = {name: value.clone() for name, value in learner.model.state_dict().items()}
    features = learner.image_embeds(test)
    scores = learner.head(features)
    learner.forget_class("one")
    assert learner.class_names == ("zero", "two", "three")
    torch.testing.assert_close(learner.head(features), scores[:, [0, 2, 3]])
    assert "one" not in learner.predict([test[i]["image"] for i in range(8)])
    assert all(torch.equal(value, model[name]) for name, value in learner.model.state_dict().items())
    learner.learn_task(select_classes(first, ("one",)))
    assert learner.tasks == [("zero",), ("two", "three"), ("one",)]


def test_a_task_may_lose_all_its_classes_and_is_still_counted(base, digits, tmp_path):
    learner = taught(base, digits[0], strategy="dulbe")
    for name in ("zero", "one"):
        learner.forget_class(name)
    learner.save_pretrained(tmp_path / "saved")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    for one in (loaded, learner):
        one.learn_task(class_incremental_tasks(digits[0], increment=2)[2].train)
    assert set(differences(everything(loaded), everything(learner))) <= {"learner"}
    assert loaded.tasks == [(), ("two", "three"), ("four", "five")]
