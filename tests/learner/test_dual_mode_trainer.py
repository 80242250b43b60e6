"""Test DualModeTrainer: it learns what the learner learns, resumes a task, and refuses unsupported arguments."""

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import write_saved
from lives import differences, everything, images_of, tiny_base, tiny_learner
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from small_runs import learner_of
from transformers import TrainerCallback, TrainingArguments

from dulbe_peft import (
    CheckpointError,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    DualModeTrainer,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
    paper_arguments,
)
from dulbe_peft.checkpoints import unfinished
from dulbe_peft.strategies import Strategy
from dulbe_peft.strategies.dulbe import Dulbe
from dulbe_peft.trainer import accuracy

PROMPT = {"prompt_template": "the digit {}."}
ADAPTER = {"residual_rank": 2, "support_rank": 8, "target_modules": ["k_proj", "fc1"]}
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


@pytest.fixture(scope="module")
def tasks():
    """Make tasks of two digits with nine training images each, so that the last batch of eight has two images."""
    return class_incremental_tasks(write_saved.digits(0, 9), write_saved.digits(9, 12), increment=2)[:3]


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module", autouse=True)
def _one_classifier():
    """Let learners without named classifiers have a bridge ensemble only, because `bayes` takes longer than a task."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Dulbe, "classifiers", ("pooled_bridge",))
        yield


def adapted(base, adapter_name="default"):
    clip, processor = copy.deepcopy(base[0]), base[1]
    torch.manual_seed(0)
    return get_peft_model(clip, DualModeLoraConfig(**ADAPTER), adapter_name), processor


def arguments(folder, **fields):
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 64}
    given |= {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.0, "optim": "adamw_torch"}
    given |= {"use_cpu": True, "seed": 0, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(folder), **given | fields)


def trainer_of(base, folder, settings=PROMPT, **fields):
    model, processor = adapted(base)
    return DualModeTrainer(model, arguments(folder, **fields), processing_class=processor, **settings)


def learn(trainer, tasks):
    for task in tasks:
        trainer.train_dataset = task.train
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def whole(base, tasks, tmp_path_factory):
    """Return the tensors of an uninterrupted trainer after each of the tasks."""
    trainer, states = trainer_of(base, tmp_path_factory.mktemp("whole")), []
    for task in tasks:
        learn(trainer, [task])
        states.append({name: value.clone() for name, value in tensors(trainer.learner).items()})
    return states


def tensors(learner):
    """Return all tensors of a learner: adapter, head and statistics."""
    if isinstance(learner, dict):
        return learner
    state = {name: value for name, value in learner.model.state_dict().items() if "dulbe_" in name}
    state |= {f"head.{name}": value for name, value in learner.head.tensors().items()}
    return state | {f"statistics.{name}": value for name, value in learner.memory.items()}


def assert_equal(left, right):
    left, right = tensors(left), tensors(right)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_alike(actual, expected):
    """Check that two learners are equal up to rounding.

    Where a gradient is nearly zero, rounding decides the sign of Adam's full step. If one of 1,000 steps has the other
    sign, the norm of the difference is 2 / sqrt(1000) = 6 % of the norm of the update.
    """
    actual, expected = tensors(actual), tensors(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        trained = name.endswith(("_A", "_B")) or "_A." in name or "_B." in name
        left, right = actual[name].double(), value.double()
        assert (left - right).norm() <= (0.06 if trained else 1e-3) * right.norm(), name


def test_trainer_equals_the_learner_bit_for_bit(base, tasks, whole, tmp_path):
    """Each of three tasks has a new trainer, which continues with the learner of the previous one.

    A single trainer for all tasks, with the cosine schedule of transformers, gives the same up to rounding.
    """
    expected = learner_of(base, classifiers=None, adapter=ADAPTER, epochs=2, batch_size=8, **PROMPT)
    model, processor = adapted(base)
    for task, ours in zip(tasks, whole, strict=True):
        expected.learn_task(task.train)
        assert_alike(ours, expected)
        trained = (model.model if isinstance(model, ClassIncrementalLearner) else model).parameters()
        optimizer = torch.optim.Adam([p for p in trained if p.requires_grad], lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * 3)
        trainer = DualModeTrainer(
            model, arguments(tmp_path), task.train, task.test, processor, optimizers=(optimizer, schedule), **PROMPT
        )
        assert trainer.train().global_step == 6
        model = trainer.learner
    assert_equal(trainer.learner, expected)
    assert trainer.head is trainer.learner.head and trainer.statistics is trainer.learner.memory
    assert trainer.learner.tasks == expected.tasks and trainer.learner.state.step == expected.state.step
    assert trainer.evaluate()["eval_accuracy"] == expected.evaluate(tasks[-1].test)["accuracy"]
    scores = trainer.predict(tasks[0].test).predictions
    assert scores.argmax(1).tolist() == [expected.class_names.index(name) for name in expected.predict(tasks[0].test)]


def test_paper_arguments_equal_the_learners_defaults(base, tasks, tmp_path, monkeypatch):
    """A trainer without arguments uses them too. Only the share of each update differs: the paper keeps all of it."""
    monkeypatch.setattr(Dulbe, "classifiers", Strategy.classifiers)
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    model, processor = adapted(base)
    paper = paper_arguments(str(tmp_path), **quiet)
    trainer = DualModeTrainer(model, paper, tasks[0].train, processing_class=processor)
    trainer.train()
    the_papers = {"learning_rate": 1e-3, "update_share": 1, "planning_images": "all"}
    defaults = LearnerArguments(precision=trainer.learner.args.precision, **the_papers)
    assert trainer.learner.args.portable() == defaults.portable()
    assert list(trainer.learner.classifiers) == ["bayes", "pooled_bridge"]
    expected = learner_of(
        base, classifiers=None, adapter=ADAPTER, epochs=defaults.epochs, batch_size=defaults.batch_size
    )
    expected.learn_task(tasks[0].train)
    assert_alike(trainer.learner, expected)
    scores = torch.tensor(trainer.predict(tasks[0].test).predictions)  # of the first classifier
    predicted = trainer.learner.classifiers["bayes"](trainer.learner.image_embeds(tasks[0].test))
    torch.testing.assert_close(scores, predicted, rtol=1e-3, atol=1e-3)
    bare = DualModeTrainer(adapted(base)[0], processing_class=processor).args
    assert (bare.learning_rate, bare.max_grad_norm, bare.lr_scheduler_type) == (1e-3, 0, "cosine")
    changed = paper_arguments("out", num_train_epochs=4, seed=7)
    assert (changed.num_train_epochs, changed.seed, changed.per_device_train_batch_size) == (4, 7, 32)


@pytest.mark.rare
def test_share_of_the_update_is_that_of_the_learner(base, tasks, tmp_path):
    """A number and "auto" act after the trainer's loop. A checkpoint does not hold how its task began."""
    for share in (0.25, "auto"):
        trainer = learn(trainer_of(base, tmp_path, PROMPT | {"update_share": share}), tasks[:1])
        learner = learner_of(
            base, classifiers=None, adapter=ADAPTER, epochs=2, batch_size=8, update_share=share, **PROMPT
        )
        learner.learn_task(tasks[0].train)
        assert trainer.learner.record.update_share == learner.record.update_share
        assert_alike(trainer.learner, learner)
        with pytest.raises(
            ValueError, match=f"update_share is {share!r}, but a checkpoint does not hold how its task"
        ):
            trainer.train(resume_from_checkpoint=True)


@pytest.mark.rare
@pytest.mark.parametrize("teacher", ["cached", "online"])
def test_augmented_training_equals_the_learner(base, tasks, tmp_path, teacher):
    settings = PROMPT | {"augment": "crop", "copies": 1, "teacher": teacher}
    trainer = learn(trainer_of(base, tmp_path, settings, num_train_epochs=1), tasks[:2])
    expected = learner_of(base, classifiers=None, adapter=ADAPTER, batch_size=8, **settings)
    for task in tasks[:2]:
        expected.learn_task(task.train)
    assert_equal(trainer.learner, expected)


class Stop(TrainerCallback):
    """Stop training after a step by raising an error."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.plain("1-5")
@pytest.mark.parametrize(("index", "step"), [(0, 5), (1, 2), (1, 5)])
def test_stopped_task_resumes_from_a_checkpoint(base, tasks, whole, tmp_path, index, step):
    """The task is stopped in the first or second epoch. A new trainer of a pristine model loads the checkpoint."""
    first = trainer_of(base, tmp_path, save_strategy="steps", save_steps=step)
    learn(first, tasks[:index])
    before = everything(first.learner)
    first.add_callback(Stop(step + 1))
    first.train_dataset = tasks[index].train
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first._task is None and differences(everything(first.learner), before) == []
    (tmp_path / f"checkpoint-{step}").joinpath("note").touch()
    shutil.copytree(tmp_path / f"checkpoint-{step}", tmp_path / "checkpoint-1-backup")  # must be ignored
    (tmp_path / "checkpoint-1-backup" / "trainer_state.json").unlink()
    resumed = trainer_of(base, tmp_path, save_strategy="no")
    resumed.train_dataset = tasks[index].train
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_equal(resumed.learner, whole[index])


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


INCOMPLETE = {
    "no optimizer": (lambda folder: (folder / "optimizer.pt").unlink(), r"has no optimizer\.pt: it is incomplete"),
    "half an optimizer": (
        lambda folder: half(folder / "optimizer.pt"),
        r"optimizer\.pt is damaged: File is not",
    ),
    "half a schedule": (lambda folder: half(folder / "scheduler.pt"), r"scheduler\.pt is damaged"),
    "no random numbers": (lambda folder: (folder / "rng_state.pth").unlink(), r"has no rng_state\*\.pth"),
    "no state": (lambda folder: (folder / "trainer_state.json").unlink(), r"has no trainer_state\.json"),
    "half a state": (lambda folder: half(folder / "trainer_state.json"), r"trainer_state\.json is damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest\.json"),
    "half a task": (lambda folder: half(folder / "task.safetensors"), r"task\.safetensors .*damaged"),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir() if path.is_file()], r"has no manifest"),
}


@pytest.fixture(scope="module")
def checkpoints(base, tasks, tmp_path_factory):
    """Return a folder with checkpoints of the first task after two and after five steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (2, 5):
        trainer = trainer_of(base, folder, save_strategy="steps", save_steps=step)
        trainer.add_callback(Stop(step + 1))
        trainer.train_dataset = tasks[0].train
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        shutil.rmtree(folder / "checkpoint-4", ignore_errors=True)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "checkpoint-5"]
    return folder


@pytest.mark.plain("half a state")
@pytest.mark.parametrize("damage", INCOMPLETE)
def test_incomplete_checkpoint_is_skipped_and_reported(base, tasks, whole, checkpoints, tmp_path, capsys, damage):
    folder = shutil.copytree(checkpoints, tmp_path / "out")
    make, words = INCOMPLETE[damage]
    make(folder / "checkpoint-5")
    resumed = trainer_of(base, folder, save_strategy="no")
    resumed.train_dataset, before = tasks[0].train, everything(resumed.learner)
    with pytest.raises((CheckpointError, ValueError), match=rf"checkpoint-5.*({words}|is not a checkpoint)"):
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    assert differences(everything(resumed.learner), before) == []
    resumed.train(resume_from_checkpoint=True)
    printed = capsys.readouterr().out
    assert re.search(rf"skipping .*checkpoint-5: .*{words}", printed) and resumed.state.global_step == 6
    assert_equal(resumed.learner, whole[0])


def test_overwritten_checkpoint_is_incomplete_until_it_is_finished(base, tasks, checkpoints, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoints, tmp_path / "out")
    trainer = trainer_of(base, folder, save_strategy="steps", save_steps=2)
    trainer.train_dataset = tasks[0].train
    killed = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(CheckpointError, match=r"checkpoint-2 has no trainer_state\.json"):
        unfinished.check_whole(folder / "checkpoint-2")


@pytest.mark.slow
def test_checkpoint_of_another_task_is_refused(base, tasks, tmp_path):
    trainer = learn(trainer_of(base, tmp_path, save_strategy="steps", save_steps=2), tasks[:1])
    folder = tmp_path / "checkpoint-2"
    with pytest.raises(CheckpointError, match="checkpoint of an unfinished task.*resume_from_checkpoint"):
        ClassIncrementalLearner.from_pretrained(folder)
    before = everything(trainer.learner)
    mirrored = [(row["image"].transpose(0), row["label"]) for row in tasks[0].train]  # other images, same labels
    for images, names, checkpoint, words in (
        (mirrored, tasks[0].class_names, str(folder), "has no checkpoint of this task, with 18 images of .*'zero'"),
        (tasks[1].train, None, str(folder), "has no checkpoint of this task, with 18 images of .*'two', 'three'"),
        (tasks[1].train, None, True, "has no checkpoint of this task"),
        (
            tasks[1].train,
            None,
            str(tmp_path),
            r"is not a checkpoint of a DualModeTrainer: it has no task\.safetensors",
        ),
    ):
        trainer.train_dataset, trainer.class_names = images, names
        with pytest.raises(ValueError, match=words):
            trainer.train(resume_from_checkpoint=checkpoint)
    assert differences(everything(trainer.learner), before) == []
    trainer.train()  # overwrites checkpoint-2 of the first task
    assert trainer.learner.tasks == [tasks[0].class_names, tasks[1].class_names]
    other = learn(trainer_of(base, tmp_path / "other"), tasks[2:])
    other.train_dataset, before = tasks[1].train, everything(other.learner)
    with pytest.raises(ValueError, match=r"continues after the tasks .*'zero', 'one'.*has learned .*'four', 'five'"):
        other.train(resume_from_checkpoint=str(folder))
    assert differences(everything(other.learner), before) == []


@pytest.mark.slow
def test_save_model_saves_a_learner_beside_checkpoints(base, tasks, whole, tmp_path):
    trainer = learn(trainer_of(base, tmp_path, save_strategy="epoch"), tasks[:2])
    trainer.save_model()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint-3", "checkpoint-6"} <= names and not list(tmp_path.glob("*.bin")), "no pickle"
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path, copy.deepcopy(base[0]))
    third = learn(DualModeTrainer(loaded, arguments(tmp_path / "next"), **PROMPT), tasks[2:])
    assert_equal(third.learner, whole[2])


@pytest.mark.rare
def test_adapter_of_any_name_is_trained_saved_resumed_and_loaded(base, tasks, whole, tmp_path):
    model, processor = adapted(base, "month")
    model.add_adapter("other", DualModeLoraConfig(residual_rank=1))
    trainer = DualModeTrainer(model, arguments(tmp_path, save_strategy="epoch"), processing_class=processor, **PROMPT)
    learn(trainer, tasks[:2])
    trainer.save_model()
    assert not (tmp_path / "month").exists() and not (tmp_path / "other").exists()
    for folder in (tmp_path, tmp_path / "checkpoint-3"):  # the latter has one of the second task's two epochs
        if folder == tmp_path:
            loaded = ClassIncrementalLearner.from_pretrained(folder, copy.deepcopy(base[0]))
            assert list(loaded.model.peft_config) == ["month"]
            again = DualModeTrainer(loaded, arguments(tmp_path / "next"), **PROMPT)
        else:
            new, processor = adapted(base, "month")
            again = DualModeTrainer(new, arguments(tmp_path / "next"), processing_class=processor, **PROMPT)
            again.train_dataset = tasks[1].train
            again.train(resume_from_checkpoint=str(folder))
        third = tensors(learn(again, tasks[2:]).learner)
        assert_equal({name.replace(".month", ".default"): value for name, value in third.items()}, whole[2])
    plain = PeftModel.from_pretrained(copy.deepcopy(base[0]), str(tmp_path))
    assert list(plain.peft_config) == ["default"], "PEFT gives the name of its own choice"
    with pytest.raises(ValueError, match=r"active adapters are \['other'\].*named 'month'.*set_adapter\('month'\)"):
        model.set_adapter("other")
        trainer.learner.predict(images_of(0)[0][0])


@pytest.mark.slow
def test_gradient_accumulation_equals_larger_batches(base, tasks, tmp_path):
    """The structure loss is switched off, because its softmax over the images of a batch depends on the batch size."""
    parts = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    trainers = [trainer_of(base, tmp_path, **fields) for fields in (parts, {"per_device_train_batch_size": 6})]
    for trainer in trainers:
        trainer.learner.model.active_peft_config.structure_weight = 0.0
    accumulated, plain = (learn(trainer, tasks[:2]) for trainer in trainers)
    assert accumulated.state.global_step == plain.state.global_step == 6
    assert_alike(accumulated.learner, plain.learner)


@pytest.mark.slow
def test_half_precision_trains_float32_weights(tasks, tmp_path):
    """The demo model is used, because half precision changes a random model more."""
    half, full = (learn(trainer_of(load_clip("demo"), tmp_path, bf16=on), tasks[:1]) for on in (True, False))
    left, right = tensors(half.learner), tensors(full.learner)
    assert all(left[name].dtype == value.dtype for name, value in right.items())
    trained = [name for name in right if "history_B" in name]
    assert all(0 < (left[name] - right[name]).norm() < 0.5 * right[name].norm() for name in trained)


@pytest.mark.slow
def test_trainer_evaluates_every_epoch_and_loads_the_best(base, tasks, tmp_path):
    """Evaluation uses the texts of old and new classes, because the head does not know the new classes yet."""
    every_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch", "lr_scheduler_type": "constant"}
    every_epoch |= {"load_best_model_at_end": True, "metric_for_best_model": "text_first"}
    trainer = trainer_of(base, tmp_path, {**PROMPT, "eval_dataset": tasks[0].test}, **every_epoch)
    trainer.compute_metrics = lambda prediction: accuracy(prediction) | {"first": -trainer.state.global_step}
    with pytest.raises(ValueError, match="no task has been learned yet"):
        trainer.evaluate()
    learn(trainer, tasks[:1])
    accuracies = [entry["eval_text_accuracy"] for entry in trainer.state.log_history if "eval_text_accuracy" in entry]
    assert len(accuracies) == 2 and all(0.5 <= value <= 1 for value in accuracies)
    once = trainer_of(base, tmp_path / "once", max_steps=3, lr_scheduler_type="constant")
    assert_equal(trainer.learner, learn(once, tasks[:1]).learner)  # the state after the first epoch was the best
    figures = learn(once, tasks[1:2]).evaluate({"old": tasks[0].test, "new": tasks[1].test})
    for name, task in zip(("old", "new"), tasks, strict=False):
        assert figures[f"eval_{name}_accuracy"] == once.learner.evaluate(task.test)["accuracy"]
    with pytest.raises(ValueError, match=r"classes have not been learned, such as \['five', 'four'\]"):
        once.evaluate(tasks[2].test)


def test_unsupported_training_arguments_are_refused(base, tmp_path):
    for name, value, words in (
        ("label_smoothing_factor", 0.1, "DualModeTrainer does not support label_smoothing_factor=0.1"),
        ("push_to_hub", True, "DualModeTrainer does not support push_to_hub=True: leave it out"),
        ("train_sampling_strategy", "sequential", "train_sampling_strategy must be 'random', got 'sequential'"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer_of(base, tmp_path, **{name: value})
    with pytest.raises(TypeError, match="epochs cannot be passed here: set num_train_epochs of TrainingArguments"):
        trainer_of(base, tmp_path, {"epochs": 3})
    several = arguments(tmp_path)
    several._n_gpu = 2
    assert DualModeTrainer(adapted(base)[0], several, processing_class=base[1]).args.n_gpu == 1


def test_what_cannot_act_is_refused_by_name_and_later_changes_are_used(base, tasks, tmp_path):
    for name, value in (("data_collator", list), ("model_init", list), ("compute_loss_func", len)):
        with pytest.raises(TypeError, match=f"does not support {name}: "):
            trainer_of(base, tmp_path, {name: value})
    with pytest.raises(TypeError, match="does not support preprocess_logits_for_metrics: change the predictions"):
        trainer_of(base, tmp_path, {"preprocess_logits_for_metrics": max})
    for name in ("train_dataset", "eval_dataset"):
        with pytest.raises(TypeError, match=f"{name} must have a length and items.*got a generator"):
            trainer_of(base, tmp_path, {name: (row for row in [])})
    for fields, words in (
        ({"include_for_metrics": ["inputs"]}, "include_for_metrics"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches=False"),
        ({"metric_for_best_model": "accuracy"}, "use 'text_accuracy'"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer_of(base, tmp_path, **fields)
    trainer = trainer_of(base, tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="train_dataset is missing"):
        trainer.train()
    assert trainer.callback_handler.processing_class is trainer.learner.processor
    trainer.args.learning_rate = 2e-4
    learn(trainer, tasks[:1])
    assert trainer.learner.args.learning_rate == 2e-4
    trainer.save_model(tmp_path / "saved")
    assert (
        ClassIncrementalLearner.from_pretrained(tmp_path / "saved", copy.deepcopy(base[0])).args.learning_rate == 2e-4
    )
    trainer.data_collator = list
    with pytest.raises(ValueError, match="data_collator cannot be changed"):
        trainer.train()


def test_trained_adapter_is_refused_without_its_learner(tmp_path):
    learner = tiny_learner(classifiers=("bridge",))
    learner.learn_task(images_of(0, 1, 0, 1), ["a", "b"])
    with pytest.raises(ValueError, match="contains no statistics and no classes: pass ClassIncrementalLearner"):
        DualModeTrainer(learner.model, arguments(tmp_path), processing_class=learner.processor)
    with pytest.raises(ValueError, match="the strategy 'lora', expected 'dulbe'"):
        DualModeTrainer(tiny_learner("lora"), arguments(tmp_path))
    optimizers = torch.optim.Adam(learner.model.base_model.shared_parameters()), None
    trainer = DualModeTrainer(learner, arguments(tmp_path, num_train_epochs=1), optimizers=optimizers)
    trainer.train_dataset, trainer.class_names = images_of(0, 1, 0, 1, seed=1), ["c", "d"]
    trainer.train()
    assert learner.class_names == ("a", "b", "c", "d"), "the given learner itself must learn"
    with pytest.raises(ValueError, match="given optimizers belong to an earlier task"):
        trainer.train()


SCRIPT = Path(__file__).with_name("distributed_trainer.py")


@pytest.mark.rare
def test_two_processes_learn_the_same_as_one(tmp_path):
    """Each step has two batches of four images; two processes take half of each. The second task is resumed."""
    for folder, processes in (("one", 1), ("two", 2)):
        launch = [*LAUNCH, str(processes)] if processes > 1 else [sys.executable]
        path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([*launch, str(SCRIPT), str(tmp_path / folder)], capture_output=True, text=True, env=path)
        assert done.returncode == 0, done.stderr[-4000:]
    first, second, alone = (load_file(tmp_path / name) for name in ("two/state-0", "two/state-1", "one/state-0"))
    assert first.keys() == second.keys() == alone.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    for key, value in alone.items():
        error = (first[key] - value).abs().max() / value.abs().max() if value.any() else first[key].abs().sum()
        assert error < 1e-3, key


@pytest.mark.rare
def test_loss_scaling_does_not_change_a_bit(base, tasks, tmp_path):
    """The scale is a power of two, as for float16 on a GPU. A large one overflows, so the first steps are skipped."""
    expected, small, large = (trainer_of(base, tmp_path, num_train_epochs=1) for _ in range(3))
    small.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    large.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    for trainer in (expected, small, large):
        learn(trainer, tasks[:2])
    assert_equal(small.learner, expected.learner)
    assert small.accelerator.scaler.get_scale() == 2**10 and large.accelerator.scaler.get_scale() < 2**126
    assert all(value.isfinite().all() for value in tensors(large.learner).values())
