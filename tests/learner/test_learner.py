"""Test the learner: Algorithm 1 against a literal version, its options, errors, trackers, and loading."""

import copy
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
import write_saved
from accelerate.utils import LoggerType
from lives import tiny_base
from small_runs import learner_of
from taught import assert_equal_states

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraModel,
    OccupationStatistics,
    class_incremental_tasks,
    load_clip,
    run_stream,
)
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.training.task_trainer import TaskTrainer, epoch_order
from research.benchmarks import literal

QUICK = {"batch_size": 8, "prompt_template": "the digit {}.", "pixel_cache_mb": 1024}


@pytest.fixture(scope="module")
def base(tiny_model):
    """The tiny CLIP, with half as many blocks as the demo model."""
    return load_clip(tiny_model)


@pytest.fixture(scope="module")
def digits():
    """Return handwritten digits, six training images and four test images per class."""
    return write_saved.digits(0, 6), write_saved.digits(6, 10)


def make_learner(base, seed=0, **fields):
    return learner_of(base, classifiers=("pooled_bridge",), seed=seed, **QUICK | fields)


def stream(digits, count=3, increment=2):
    return class_incremental_tasks(*digits, increment=increment)[:count]


def logits(learner, digits):
    with torch.no_grad():
        return learner.head(learner.image_embeds(digits[1]))


def outcome(digits, seen=None, **options):
    """Return the logits of a learner of two tasks; the pixels of all batches are appended to the list `seen`."""
    learner = make_learner(tiny_base(), learning_rate=1e-2, **options)
    if seen is not None:
        encode = learner.encoder.image_embeds
        learner.encoder.image_embeds = lambda pixels, *more: seen.append(pixels.clone()) or encode(pixels, *more)
    for task in stream(digits, 2):
        learner.learn_task(task.train, task.class_names)
    return logits(learner, digits)


@pytest.fixture(scope="module")
def read(digits):
    """Return the pixels of all batches with default options, and the logits."""
    pixels = list[torch.Tensor]()
    return pixels, outcome(digits, pixels)


@pytest.fixture(scope="module")
def plain(read):
    """Return the logits with default options."""
    return read[1]


class Ordered(literal.LiteralLearner):
    """The literal learner of the benchmarks, with images in the library's order."""

    def adapted(self, clip):
        return literal.adapt(clip, residual_rank=2)

    def _batches(self, data, shuffle=False):
        order = epoch_order(len(data), 0, len(self.names) // 2, 0) if shuffle else range(len(data))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size, sampler=order)


def test_two_tasks_equal_a_literal_transcription(base, digits, monkeypatch):
    """The literal version has dense weights, a copied teacher for every batch, and two gradient calls per step."""
    monkeypatch.setattr(literal, "allocate", partial(literal.allocate, residual_rank=2, support_rank=8))
    paper = {"prompt_template": "a photo of a {}.", "drift": "none"}
    learner = learner_of(base, seed=0, **QUICK | paper)
    clip, processor = copy.deepcopy(base)
    twin = Ordered(clip, processor, batch_size=8, epochs=1)
    starts = [p for name, p in learner.clip.named_parameters() if "dulbe_text_A" in name]
    for lora, start in zip((m for m in clip.modules() if isinstance(m, literal.Lora)), starts, strict=True):
        lora.down.weight.data = start.detach().clone()
    for task in stream(digits, 2):
        learner.learn_task(task.train, task.class_names)
        images = [task.train[index]["image"] for index in range(len(task.train))]
        pixels = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
        twin.learn_task(pixels, torch.as_tensor(task.train.labels), list(task.class_names))
        for name, layer in learner.model.dual_mode_layers().items():
            expected = literal.layers(clip)[name].base.weight
            update, error = expected - layer.base_layer.weight, layer.folded_weight("default") - expected
            assert update.abs().max() > 5e-4
            # Where a gradient is nearly zero, rounding decides the sign of Adam's full step, so single entries may
            # differ. If one of 1,000 steps has the other sign, the error is 2 / sqrt(1000) = 6 % of the update.
            assert error.norm() < 0.06 * update.norm(), name
    head, tests = learner.head, learner.image_embeds(digits[1])
    bridges = [literal.bridge(twin.visual, twin.text, depth) for depth in twin.depths]
    torch.testing.assert_close(head.visual_prototypes, twin.visual, atol=1e-4, rtol=0)
    torch.testing.assert_close(head.reliability, twin.weights, atol=1e-4, rtol=0)
    expected = literal.ensemble_logits(tests, bridges, twin.weights, twin.scale)
    torch.testing.assert_close(head(tests), expected, atol=2e-2, rtol=1e-3)
    for name, matrix in twin.statistics.items():
        assert (learner.memory[name] - matrix).norm() < 1e-3 * matrix.norm(), name  # inputs of the trained model


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_gradients_of_a_step_equal_two_literal_calls(base, digits, weight):
    """The step is in the second task, and B is not zero, so that the structure loss has a gradient."""
    learner = make_learner(base, adapter={"structure_weight": weight})
    first, second = stream(digits, 2)
    learner.learn_task(first.train, first.class_names)
    trainer = TaskTrainer(learner.state, learner.encoder, learner.encoder.images(second.train))
    adapter = learner.state.adapter
    trainer.begin()
    for up in (*adapter.shared_parameters(), *adapter.residual_parameters()):
        up.data.normal_(std=0.02)
    batch = next(learner.encoder.training_batches(trainer.images, "", range(8)))
    learner.strategy.backward(trainer.task, trainer.step_of(batch))

    z, tau = unit_image_embeds(learner.clip, batch[0]), learner.logit_scale
    with torch.no_grad():
        teacher, old_text = trainer.teacher[batch[2]], learner.text_embeds(first.class_names)
    text = learner.encoder.token_embeds(learner.encoder.tokens(second.class_names))
    task_loss = torch.nn.functional.cross_entropy(tau * z @ text.T, batch[1])
    structure = literal.structure_loss(tau * z @ old_text.T, tau * teacher @ old_text.T)
    named = {name: p for name, p in learner.model.named_parameters() if p.requires_grad}
    expected = dict(zip(named, torch.autograd.grad(task_loss, list(named.values()), retain_graph=True), strict=True))
    shared = [name for name in named if "shared_B" in name]
    parts = torch.autograd.grad(structure, [named[name] for name in shared])
    for name, part in zip(shared, parts, strict=True):
        assert weight * part.abs().max() > 0.01 * expected[name].abs().max()
        expected[name] = expected[name] + weight * part
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_cached_and_online_teacher_agree(digits, plain, monkeypatch):
    previous, calls = DualModeLoraModel.previous_task, []

    def counted(model):
        if model.training:  # the passes before and after training call it too, but without effect
            calls.append(model)
        return previous(model)

    monkeypatch.setattr(DualModeLoraModel, "previous_task", counted)
    cached = outcome(digits, teacher="cached", drift="none")
    assert not calls
    # With an online teacher, images may change at random, so features before a task are not used for a drift map.
    assert torch.equal(outcome(digits, teacher="online"), outcome(digits, teacher="online", drift="none"))
    torch.testing.assert_close(outcome(digits, teacher="online"), cached, atol=2e-2, rtol=1e-3)
    assert len(calls) == 6  # three epochs of 12 images in batches of 8, only in the second task


@pytest.mark.plain("fields0", "fields3", "fields5")
@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": {"structure_weight": 0.0}},
        {"adapter": {"class_temperature": 1.0}},
        {"adapter": {"instance_temperature": 1.0}},
        {"text_embeds": "at_introduction"},
        {"kl_reduction": "batchmean"},
        {"lr_schedule": "epoch"},
        {"statistics_tokens": "patch"},
        {"precision": "bfloat16"},
    ],
)
def test_option_changes_the_result(digits, plain, fields):
    changed = outcome(digits, **fields)
    assert torch.isfinite(changed).all() and not torch.equal(changed, plain)


def test_order_of_a_tasks_images_depends_on_seed_task_and_epoch():
    orders = [epoch_order(9, *numbers) for numbers in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert all(sorted(order) == list(range(9)) for order in orders) and len(set(map(tuple, orders))) == 4
    assert epoch_order(9, 0, 0, 0) == orders[0]


@pytest.mark.plain("fields1")
@pytest.mark.parametrize("fields", [{"num_workers": 2}, {"pixel_cache_mb": 0}, {"progress": True}])
def test_reading_options_do_not_change_the_result(digits, read, fields):
    """The model gets the same pixels in the same order. Only their place in memory may change the rounding."""
    pixels, (expected, plain) = list[torch.Tensor](), read
    actual = outcome(digits, pixels, **fields)
    assert len(pixels) == len(expected) > 10 and all(map(torch.equal, pixels, expected))
    torch.testing.assert_close(actual, plain, atol=2e-2, rtol=1e-3)  # the bounds of the two teachers above


@pytest.mark.parametrize(("schedule", "last"), [("step", 0.0), ("epoch", 1e-5)])
def test_learning_rate_decays_to_its_minimum(digits, monkeypatch, schedule, last):
    schedules = []
    real = torch.optim.lr_scheduler.CosineAnnealingLR
    monkeypatch.setattr(
        torch.optim.lr_scheduler, "CosineAnnealingLR", lambda *a, **k: schedules.append(real(*a, **k)) or schedules[-1]
    )
    task = stream(digits, 1)[0]
    learner = make_learner(tiny_base(), epochs=2, learning_rate=1e-3, lr_schedule=schedule)
    learner.learn_task(task.train, task.class_names)
    assert schedules[0].get_last_lr() == pytest.approx([last], abs=1e-12)


def test_gradients_and_notes_are_freed_before_classifiers_learn(base, digits, monkeypatch):
    learner, (task,), held = make_learner(base), stream(digits, 1), []
    kind, plan, finish = type(learner.strategy), type(learner.strategy).plan, TaskTrainer.learn
    notes = {"counts": defaultdict(int), "sums": OccupationStatistics()}

    def watched(trainer):
        result = finish(trainer)
        held.extend([trainer.task.gradients, trainer.task.notes["counts"]])
        return result

    monkeypatch.setattr(kind, "plan", lambda strategy, new: new.notes.update(notes) or plan(strategy, new))
    monkeypatch.setattr(TaskTrainer, "learn", watched)
    learner.learn_task(task.train, task.class_names)
    assert held == [{}, {}]


def test_refused_update_does_not_change_the_profile(base, digits):
    learner, (task,) = make_learner(base), stream(digits, 1)
    learner.learn_task(task.train, task.class_names)
    before = dict(learner.profile.seconds)
    with pytest.raises(ValueError, match="have not been learned"):
        learner.update_classes([(task.train[0]["image"], 0)], ["owl"])
    assert learner.profile.seconds == before


class Short:
    """A data set with fewer items than its length."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise IndexError("gone")
        return torch.zeros(3, 16, 16)


def test_error_names_the_missing_item_of_a_data_set(base):
    with pytest.raises(ValueError, match=r"image 2 \(item 2\).*gives no item 2, though its length is 3"):
        make_learner(base).image_embeds(Short())


def test_tensorboard_writes_an_event_file(digits, tmp_path):
    run_stream(make_learner(tiny_base(), log_with="tensorboard", epochs=2), stream(digits, 1), tmp_path)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_wandb_gets_the_loss_of_every_epoch_and_the_accuracy_of_the_task(digits, tmp_path, monkeypatch):
    name = "wandb"
    client = MagicMock()  # replaces the package, which would send data to a server
    monkeypatch.setitem(sys.modules, name, client)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType(name)])
    run_stream(make_learner(tiny_base(), log_with=name, epochs=2), stream(digits, 1), tmp_path)
    client.init.assert_called_once_with(project="dulbe_peft")
    run = client.init.return_value
    logged = [str(call.args[0]) for call in run.log.call_args_list]
    assert len(logged) == 3 and all("loss" in values for values in logged[:2]) and "accuracy/" in logged[2]
    run.finish.assert_called_once_with()


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("all", "tensorboard")])
def test_error_names_the_missing_package_of_a_tracker(name, package, base, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ImportError, match=f"log_with is '{name}'.*pip install {package}"):
        make_learner(base, log_with=name)


def test_error_at_the_end_of_a_task_is_rolled_back(digits, monkeypatch):
    """Gradients of an interrupted step have no effect either: learning the task again equals learning it once."""
    learner, undisturbed = make_learner(tiny_base()), make_learner(tiny_base())
    first, second = stream(digits, 2)
    for each in (learner, undisturbed):
        each.learn_task(first.train, first.class_names)
    with monkeypatch.context() as patch:
        patch.setattr(OccupationStatistics, "merge", lambda *_: (_ for _ in ()).throw(ValueError("no room")))
        with pytest.raises(ValueError, match="no room"):
            learner.learn_task(second.train, second.class_names)
    assert learner.head.class_names == list(first.class_names) and learner.model.history_rank == 3
    assert learner.state.step == 2
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for each in (learner, undisturbed):
        each.learn_task(second.train, second.class_names)
    assert torch.equal(logits(learner, digits), logits(undisturbed, digits))


def test_machine_settings_are_not_saved(digits, base, tmp_path):
    learner = make_learner(base, num_workers=2, pixel_cache_mb=7, batch_size=5)
    learner.save_pretrained(tmp_path / "learner")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "learner", base_model=copy.deepcopy(base[0]))
    assert (loaded.args.num_workers, loaded.args.pixel_cache_mb, loaded.args.device) == ("auto", 1024, "auto")
    assert loaded.args.batch_size == 5


@pytest.mark.plain("eager")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_steps_never_wait_for_the_device(digits, monkeypatch, attention):
    """Tensors on the meta device have no values, so reading one, copying it to the CPU or branching on it raises."""
    clip, processor = copy.deepcopy(tiny_base()[0]), tiny_base()[1]
    clip.set_attn_implementation(attention)
    learner = make_learner((clip, processor))
    first, second = stream(digits, 2)
    learner.learn_task(first.train, first.class_names)
    images = learner.encoder.images(second.train, keep=True)
    losses = []
    trainer = TaskTrainer(learner.state, learner.encoder, images)
    trainer.begin()
    monkeypatch.setattr(trainer, "_log_epoch", lambda values, epoch: losses.append(values))
    monkeypatch.setattr(learner.encoder, "autocast", nullcontext)  # autocast does not support the meta device
    learner.device = learner.encoder.device = torch.device("meta")
    learner.model.to("meta")
    learner.head.to("meta")
    trainer.teacher, trainer.old_text = trainer.teacher.to("meta"), trainer.old_text.to("meta")
    trainer.train()
    assert [(values.device.type, len(values)) for values in losses] == [("meta", 2)]
    with pytest.raises(RuntimeError, match="meta"):
        losses[0][0].item()


@pytest.mark.rare
def test_compiled_image_tower_learns_the_same_without_recompiling(base, digits, monkeypatch):
    real = torch.compile
    compiled, ran = [], []

    def backend(graph, inputs):
        # This backend makes the real forward and backward graphs, but does not need a C++ compiler.
        compiled.append(torch._dynamo.lookup_backend("aot_eager")(graph, inputs))
        function = compiled[-1]
        return lambda *args: ran.append(1) or function(*args)

    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=backend))
    plain, fast = make_learner(base), make_learner(base, torch_compile=True)
    for number, task in enumerate(stream(digits, 4), 1):
        for learner in (plain, fast):
            learner.learn_task(task.train, task.class_names)
            learner.evaluate(task.test, task.class_names)
        assert len(ran) == 2 * number, "each of the task's two steps runs a compiled graph"
        assert len(compiled) == 2, "one graph per batch size, for every rank of the history"
    torch.testing.assert_close(logits(fast, digits), logits(plain, digits), atol=2e-2, rtol=1e-3)


def test_failed_load_restores_modules_to_save(base, tmp_path):
    learner_of(base, adapter={"modules_to_save": ["visual_projection"]}).save_pretrained(tmp_path / "learner")
    pristine = copy.deepcopy(base[0])
    with pytest.raises(ValueError, match="xpu|asked for"):
        ClassIncrementalLearner.from_pretrained(tmp_path / "learner", pristine, machine={"device": "xpu"})
    assert_equal_states(pristine.state_dict(), base[0].state_dict())


def test_invalid_base_model_is_refused(base, finished_run):
    for wrong, error in (
        ("a/path", TypeError),
        (make_learner(base).model, ValueError),
        (base[0].vision_model, ValueError),
    ):
        with pytest.raises(error, match="base_model|the supported types are"):
            ClassIncrementalLearner.from_pretrained(finished_run, wrong)


def test_trained_learner_records_every_image(base):
    """Images are recorded although the pixel values of preprocessed images are cached during training."""
    learner = learner_of(base, strategy="lora", epochs=1, pixel_cache_mb=64)
    images = [(torch.rand(3, *[learner.clip.config.vision_config.image_size] * 2), label) for label in (0, 1, 0)]
    learner.learn_task(images, ["a", "b"])
    assert {name: len(contents) for name, contents in learner.state.known.learned.items()} == {"a": 2, "b": 1}
