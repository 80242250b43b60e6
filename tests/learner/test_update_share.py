"""Test which share of a task's update is kept: a given one, and the one that "auto" chooses after the training."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from small_runs import learner_of, tasks_of

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_clip, run_stream
from dulbe_peft.adapter.linear import dense
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.strategies import make_strategy
from dulbe_peft.training.task_trainer import TaskTrainer, drawn_evenly
from dulbe_peft.training.update_share import MOST, MOVED, facts, share_of

FOLDING = ("dulbe", "merged_lora", "o_lora", "inflora", "keeplora", "loda", "spu")


@pytest.fixture(scope="module")
def base(tiny_model):
    """The tiny CLIP, with half as many blocks as the demo model."""
    return load_clip(tiny_model)


@pytest.fixture(scope="module")
def tasks(digit_folders):
    return tasks_of(digit_folders(4, 6, 3))


def make(base, share="auto", strategy="dulbe", **fields):
    targets = make_strategy(strategy).target_modules or ("k_proj", "fc1")
    adapter = {"target_modules": list(targets)} | fields.pop("adapter", {})
    quick = {"learning_rate": 1e-2, "pixel_cache_mb": 1024}
    return learner_of(base, strategy, update_share=share, adapter=adapter, **quick | fields)


@pytest.fixture(scope="module")
def first(base, tasks):
    """Return a function that returns a learner of the first task; the same arguments train once."""

    @cache
    def once(share, strategy):
        learner = make(base, share, strategy)
        learner.learn_task(tasks[0].train)
        return learner

    return lambda share, strategy="dulbe": copy.deepcopy(once(share, strategy))


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.state.adapter_tensors().items()}


def updates(learner):
    """Return each layer's whole update in float64."""
    adapter = learner.state.adapter
    layers = {name: module for name, module in adapter.named_modules() if hasattr(module, "get_delta_weight")}
    with torch.no_grad():
        return {n: layer.get_delta_weight(adapter.adapter_name, torch.float64) for n, layer in layers.items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


class Started(TaskTrainer):
    """Keeps copies of the learner before and after the training of a task, when all of the update is still there."""

    def kept_share(self):
        Started.whole = {n: t.clone() for n, t in self.state.adapter_tensors().items()}
        return super().kept_share()


@pytest.mark.plain("dulbe")
@pytest.mark.parametrize("strategy", FOLDING)
def test_first_task_leaves_the_share_of_its_update(first, strategy):
    """The vision tower has that share of what the same training changes, up to rounding; the text tower has all."""
    kept, whole = first(0.25, strategy), first(1.0, strategy)
    assert kept.record.update_share == 0.25 and whole.record.update_share == 1
    for name, update in updates(whole).items():
        scale = 1.0 if "text" in name else 0.25
        assert torch.allclose(updates(kept)[name], scale * update, rtol=1e-5, atol=1e-9), name


@pytest.mark.plain("dulbe")
@pytest.mark.parametrize("strategy", FOLDING)
def test_later_task_moves_the_share_of_the_way(first, tasks, strategy):
    """From the same first task, the vision tower's change by the second one is the share of the whole change."""
    before, results = updates(first(0.25, strategy)), {}
    for share in (0.25, 1.0):
        learner = first(0.25, strategy)
        learner.change_settings(LearnerArguments(**vars(learner.args) | {"update_share": share}))
        learner.learn_task(tasks[1].train)
        results[share] = updates(learner)
    vision = [name for name in before if "vision" in name]
    assert vision
    for name in vision:
        whole = results[1.0][name] - before[name]
        assert whole.any()
        atol = 1e-6 * float(results[1.0][name].abs().max())
        assert torch.allclose(results[0.25][name] - before[name], 0.25 * whole, atol=atol), name


@pytest.mark.plain("lora")
@pytest.mark.parametrize("strategy", ["lora", "zscl"])
def test_pair_of_all_tasks_moves_the_share_of_the_way(base, tasks, strategy, digit_folders):
    """A and B of the vision tower end at A_0 + s (A - A_0) and B_0 + s (B - B_0); in the first task A stays."""
    if strategy == "zscl":
        strategy = f"zscl:reference_images={digit_folders(4, 6, 3)}"
    learner = make(base, 0.25, strategy)
    learner.learn_task(tasks[0].train, trainer=Started)
    after, whole = weights(learner), Started.whole
    for name in whole:
        scale = 0.25 if "_B" in name and "text" not in name else 1.0
        assert torch.equal(after[name], scale * whole[name]), name
    learner.learn_task(tasks[1].train, trainer=Started)
    for name, tensor in weights(learner).items():
        share = 1.0 if "text" in name else 0.25
        expected = after[name].double() + share * (Started.whole[name].double() - after[name].double())
        assert torch.allclose(tensor.double(), expected, rtol=1e-5, atol=1e-7), name
    assert any(not torch.equal(Started.whole[name], after[name]) for name in after if "_P" in name)


@pytest.mark.plain("dulbe")
@pytest.mark.parametrize("strategy", ["dulbe", "lora"])
def test_text_lora_is_kept_whole(base, tasks, tmp_path, strategy):
    """Whatever the share of the vision tower, the text LoRA is as trained, and its names are those of a saved copy."""
    learner = make(base, 0.25, strategy, classifiers=("text",), adapter={"text_rank": 2})
    for task in tasks[:2]:
        before = weights(learner)
        learner.learn_task(task.train, trainer=Started)
        after = weights(learner)
        texts = [name for name in after if "dulbe_text" in name]
        assert texts and all(torch.equal(after[name], Started.whole[name]) for name in texts)
        assert not any(torch.equal(after[name], before[name]) for name in texts)
        assert any(not torch.equal(after[name], Started.whole[name]) for name in after if "dulbe_text" not in name)
    learner.save_pretrained(tmp_path / "kept")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "kept")
    assert torch.equal(loaded.text_embeds(learner.class_names), learner.text_embeds(learner.class_names))
    assert torch.equal(loaded.classifiers["text"].text_embeds, learner.classifiers["text"].text_embeds)


@pytest.mark.parametrize("error", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("movement", [0.0, 1e-9, MOVED, 0.3, 0.7, 40.0])
def test_chosen_share_moves_the_features_by_at_most_the_limit(movement, error):
    share = share_of(error, movement)
    # Two digits: 0.295 and more become MOST, which is 0.3.
    assert 0 < share <= MOST and (share < MOST or movement * 0.295**2 <= MOVED * error * (1 + 1e-12))
    assert movement * share**2 <= MOVED * error * 1.11  # the share has two digits


@pytest.mark.plain("lora")
@pytest.mark.parametrize("strategy, most", [("dulbe", 64), ("lora", 5)])
def test_choice_sees_all_names_before_the_task_and_the_whole_movement(base, tasks, monkeypatch, strategy, most):
    """Literal: the error among the names of both tasks, and the movement relative to the spread of these names.

    The error is that of all 12 images, and the movement that of 5 drawn ones, if no more may be encoded again.
    """
    seen = []
    monkeypatch.setattr("dulbe_peft.training.task_trainer.IMAGES", most)
    monkeypatch.setattr("dulbe_peft.training.task_trainer.share_of", lambda *values: seen.append(values) or 1.0)
    learner = make(base, strategy=strategy)
    learner.learn_task(tasks[0].train)
    names = [*tasks[0].class_names, *tasks[1].class_names]
    images, text = (each.double() for each in (learner.image_embeds(tasks[1].train), learner.text_embeds(names)))
    labels = [item["label"] + 2 for item in tasks[1].train]
    wrong = sum(int((text @ row).argmax()) != label for row, label in zip(images, labels, strict=True))
    learner.learn_task(tasks[1].train)
    after = learner.image_embeds(tasks[1].train).double()
    drawn = drawn_evenly(np.array(labels), most, seed=0, task=1)
    assert len(drawn) == min(12, most)
    moved = sum((after[row] - images[row]).norm() ** 2 for row in drawn) / len(drawn)
    between = sum((name - text.mean(dim=0)).norm() ** 2 for name in text) / len(text)
    assert len(seen) == 2 and seen[1][0] == (wrong + 1) / (len(images) + 2)
    assert seen[1][1] == pytest.approx(float(moved / between), rel=1e-3) and seen[1][1] > 0


def test_single_name_gives_a_share():
    images = torch.eye(3, 2)
    assert facts(images, images[[0, 2]], torch.zeros(3, dtype=torch.long), images[:1], [0, 2]) == (0.2, 0.0)


@pytest.mark.slow
def test_auto_learns_the_same_as_its_chosen_share(base, tasks):
    """One training serves both: the choice has no effect on the learner but the share."""
    chosen = make(base)
    for task in tasks[:2]:
        given = copy.deepcopy(chosen)
        chosen.learn_task(task.train)
        share = chosen.record.update_share
        assert 0 < share < 1
        given.change_settings(LearnerArguments(**vars(given.args) | {"update_share": share}))
        given.learn_task(task.train)
        assert_equal(weights(chosen), weights(given))
        assert_equal(chosen.head.tensors(), given.head.tensors())


def test_closing_pass_sees_the_model_that_remains(first, tasks):
    learner = first(0.25)
    features = learner.image_embeds(tasks[0].train)
    assert torch.allclose(learner.closing.features, features, atol=1e-6)


@pytest.mark.slow
def test_share_is_saved_and_continued(base, tasks, tmp_path, capsys):
    whole = make(base)
    results = run_stream(whole, tasks[:2], tmp_path / "whole").contents()
    shares = [task["update_share"] for task in results["tasks"]]
    assert all(0 < share <= 1 for share in shares)
    assert "of what this task changed; --update-share sets another share" in capsys.readouterr().out
    run_stream(make(base), tasks[:1], tmp_path / "parts")
    resumed = make(base)
    assert run_stream(resumed, tasks[:2], tmp_path / "parts").contents()["tasks"] == results["tasks"]
    assert_equal(weights(resumed), weights(whole))
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "whole")
    assert loaded.args.update_share == "auto"
    assert torch.equal(loaded.image_embeds(tasks[0].test), whole.image_embeds(tasks[0].test))


def test_frozen_strategy_chooses_no_share(first):
    learner = first("auto", "frozen")
    assert learner.record.update_share is None


@pytest.mark.plain("bofa")
@pytest.mark.parametrize("strategy", ["magmax", "sd_lora", "bofa", "l2p"])
def test_strategies_without_a_share_keep_all_and_refuse_another(base, tasks, strategy):
    with pytest.raises(ValueError, match=rf"update_share is 0.5, but the strategy '{strategy}' does not go on"):
        make(base, 0.5, strategy, classifiers=("lda",))
    learner = make(base, "auto", strategy, classifiers=("lda",))
    learner.learn_task(tasks[0].train)
    assert learner.record.update_share == 1


def test_whole_modules_refuse_a_share(base, tasks):
    adapter = {"modules_to_save": ["visual_projection"]}
    with pytest.raises(ValueError, match="modules_to_save, and whole modules cannot be scaled: use update_share=1"):
        make(base, 0.5, adapter=adapter)
    learner = make(base, adapter=adapter)
    learner.learn_task(tasks[0].train)
    assert learner.record.update_share == 1


def test_changed_settings_are_checked_before_a_task(base, tasks):
    learner = make(base, strategy="sd_lora")
    learner.change_settings(LearnerArguments(**vars(learner.args) | {"update_share": 0.5}))
    with pytest.raises(ValueError, match="update_share is 0.5"):
        learner.learn_task(tasks[0].train)


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", float("nan")])
def test_invalid_shares_are_refused(share):
    with pytest.raises(ValueError, match="update_share"):
        LearnerArguments(update_share=share)


def test_history_of_fold_task_is_the_share_of_the_modes(base, tasks):
    learner = make(base, 1.0, strategy="lora")  # trains without folding
    learner.learn_task(tasks[0].train)
    adapter, name = learner.state.adapter, learner.state.adapter_name
    layer = next(iter(adapter.dual_mode_layers().values()))
    modes = dense((layer.dulbe_P[name], layer.current_up(name)), torch.float64).detach()
    adapter._beginnings[name].layers = make(base).state.adapter._beginnings[name].layers  # B = 0
    adapter._beginnings[name].planned = True
    learner.model.fold_task(share=0.25)
    assert not layer.is_trained(name)
    assert torch.allclose(dense(layer.history(name), torch.float64), 0.25 * modes, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("share", [-0.1, 1.1, None, True])
def test_fold_task_refuses_invalid_shares(base, share):
    model = make(base).model
    with pytest.raises((ValueError, TypeError), match="share"):
        model.fold_task(share=share)


def test_kept_share_answers_as_the_block_and_after_loading(base, tasks, tmp_path):
    """Weights are rounded differently than in the block. What was measured is what a loaded learner answers."""
    learner = make(base, 1.0, classifiers=("text",), adapter={"text_rank": 2})
    for task in tasks[:2]:
        learner.learn_task(task.train)
    names, images, before = learner.class_names, tasks[0].test, updates(learner)
    old = learner.classifiers["text"].text_embeds
    with learner.scaled(0.25):
        features, text = learner.image_embeds(images), learner.text_embeds(names)
    learner.keep(0.25)
    assert not torch.allclose(old, text, atol=1e-4)
    assert torch.allclose(learner.image_embeds(images), features, atol=1e-5)
    assert torch.allclose(learner.text_embeds(names), text, atol=1e-5)
    assert torch.allclose(learner.classifiers["text"].text_embeds, learner.text_embeds(names), atol=1e-6)
    for name, update in updates(learner).items():
        assert torch.allclose(update, 0.25 * before[name], rtol=1e-5, atol=1e-9), name
    learner.save_pretrained(tmp_path / "kept")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "kept")
    assert torch.equal(loaded.image_embeds(images), learner.image_embeds(images))
    assert torch.equal(loaded.classifiers["text"].text_embeds, learner.classifiers["text"].text_embeds)
    assert loaded.state.updates[-1].kept == 0.25
    assert "After task 2, 25 % of the model's whole update was kept." in (tmp_path / "kept/README.md").read_text()
    merged = loaded.model.merge_and_unload()
    pixels = loaded.encoder.images(images)[0][0][None]
    assert torch.allclose(unit_image_embeds(merged, pixels)[0], learner.image_embeds(images)[0], atol=1e-5)


def test_kept_share_moves_the_names_whose_fit_still_counts(tasks):
    learner = make(load_clip("demo"), 1.0, classifiers=("bayes",), adapter={"text_rank": 2})
    learner.learn_task(tasks[0].train)
    bayes = learner.classifiers["bayes"]
    before, known = bayes.text_embeds, bayes.rule.fitted(bayes.state).told
    assert known > 0, "the training images tell how well the names fit"
    with pytest.warns(UserWarning, match=r"\['bayes'\] keep statistics of images"):
        learner.keep(0.25)
    kept = learner.classifiers["bayes"]
    assert not torch.allclose(kept.text_embeds, before, atol=1e-4), "another text would be set aside"
    assert torch.allclose(kept.text_embeds, learner.text_embeds(learner.class_names), atol=1e-6)
    assert not kept.set_aside.any() and kept.rule.fitted(kept.state).told == known


def test_kept_share_is_in_the_results(base, tasks, tmp_path):
    learner = make(base, 1.0, classifiers=("text",))
    run_stream(learner, tasks[:1], tmp_path / "run")
    learner.keep(0.5)
    results = run_stream(learner, tasks[1:2], tmp_path / "again").contents()
    assert results["kept"] == [{"after": 1, "share": 0.5}]


def test_keep_warns_of_statistics_and_refuses_what_has_no_share(base, first):
    with pytest.raises(ValueError, match="no task has been learned"):
        make(base, 1.0).keep(0.5)
    learner = first(1.0)
    before = weights(learner)
    with learner.scaled(0.5), pytest.raises(ValueError, match="a block is running"):
        learner.keep(0.5)
    with pytest.raises(ValueError, match="share must be"):
        learner.keep(2)
    assert_equal(weights(learner), before)
    with pytest.warns(UserWarning, match=r"\['bridge'\] keep statistics of images"):
        learner.keep(0.5)
    frozen = first("auto", "frozen")
    with pytest.raises(ValueError, match="trains nothing, so there is no update to keep"):
        frozen.keep(0.5)
