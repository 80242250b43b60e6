"""Algorithm 1 against a literal transcription, and a stream saved, loaded, resumed and refused."""

import copy
import sys
from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import write_saved
from accelerate.utils import LoggerType
from small_runs import learner_of
from torch.nn import functional as F

from dulbe_peft import (
    BridgeEnsembleHead,
    ClassIncrementalLearner,
    DualModeLoraModel,
    OccupationStatistics,
    allocate_modes,
    class_incremental_tasks,
)
from dulbe_peft.encoders.loading import unit_image_embeds, unit_text_embeds
from dulbe_peft.training.trainer import TaskTrainer, epoch_order

QUICK = {"batch_size": 8, "prompt_template": "the digit {}.", "pixel_cache_mb": 1024}


@pytest.fixture(scope="module")
def digits():
    """Handwritten digits, six of each class to learn from and four to test on."""
    return write_saved.digits(0, 6), write_saved.digits(6, 10)


def make_learner(base, seed=0, **fields):
    return learner_of(base, classifiers=None, seed=seed, **QUICK | fields)


def stream(digits, count=3, increment=2):
    return class_incremental_tasks(*digits, increment=increment)[:count]


def logits(learner, digits):
    with torch.no_grad():
        return learner.head(learner.image_embeds(digits[1]))


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def outcome(base, digits, **options):
    """What a learner of two tasks says."""
    learner = make_learner(base, learning_rate=1e-2, **options)
    for task in stream(digits, 2):
        learner.learn_task(task.train, task.class_names)
    return logits(learner, digits)


@pytest.fixture(scope="module")
def plain(base, digits):
    """What it says with no option set."""
    torch.set_num_threads(1)  # as every test has it, but this comes before them
    return outcome(base, digits)


def test_two_tasks_equal_a_literal_transcription(base, digits):
    """Algorithm 1 spelled out with a copied teacher on every batch, two gradient calls and a dense float32 weight."""
    tasks = stream(digits, 2)
    learner = make_learner(base)
    literal = Literal(make_learner(base))
    for task in tasks:
        learner.learn_task(task.train, task.class_names)
        literal.learn_task(task.train, task.class_names)
    ours = {name: layer.folded_weight("default") for name, layer in learner.model.dual_mode_layers().items()}
    for name, weight in literal.weights().items():
        torch.testing.assert_close(ours[name], weight, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(logits(learner, digits), literal.logits(digits[1]), atol=2e-2, rtol=1e-3)


class Literal:
    """The same schedule with nothing shared or cached; only `allocate_modes` and the layers are the library's."""

    def __init__(self, learner):
        self.learner, self.args = learner, learner.args
        self.model, self.clip = learner.model, learner.clip
        self.inputs, self.old, self.head = {}, [], None

    def weights(self):
        return {n: layer.folded_weight("default") for n, layer in self.model.dual_mode_layers().items()}

    def logits(self, dataset):
        with torch.no_grad():
            return self.head(unit_image_embeds(self.clip, self.pixels(dataset)))

    def pixels(self, dataset):
        images = [dataset[index]["image"] for index in range(len(dataset))]
        return self.learner.processor.image_processor(images=images, return_tensors="pt")["pixel_values"]

    def text(self, names):
        return unit_text_embeds(self.clip, self.learner.encoder.tokens(names))

    def learn_task(self, dataset, names):
        args, tau = self.args, self.learner.logit_scale
        pixels, labels = self.pixels(dataset), torch.as_tensor(dataset.labels)
        dense = copy.deepcopy(self.model).merge_and_unload().requires_grad_(True)
        with torch.no_grad():
            text = self.text(names)
        F.cross_entropy(tau * unit_image_embeds(dense, pixels) @ text.T, labels).backward()
        probe = {n: dense.get_submodule(n).weight.grad for n in self.model.dual_mode_layers()}
        stats = {n: sum(x.T @ x for x in rows) for n, rows in self.inputs.items()}
        self.model.begin_task(allocate_modes(probe, stats, shared_rank=1, residual_rank=2, support_rank=8))
        teacher = copy.deepcopy(self.model)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        shared = list(self.model.shared_parameters())
        optimizer = torch.optim.Adam(parameters, lr=args.learning_rate)
        order = epoch_order(len(labels), 0, len(self.learner.tasks), 0)
        self.learner.tasks.append(names)
        steps = [order[i : i + args.batch_size] for i in range(0, len(order), args.batch_size)]
        with torch.no_grad():
            old_text = self.text(self.old) if self.old else None
        for step, rows in enumerate(steps):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 + np.cos(np.pi * step / len(steps))) / 2
            z = unit_image_embeds(self.clip, pixels[rows])
            loss = F.cross_entropy(tau * z @ self.text(names).T, labels[rows])
            gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))
            if old_text is not None:
                with torch.no_grad():
                    z_bar = unit_image_embeds(teacher.get_base_model(), pixels[rows])
                kl = self.structure_loss(tau * z @ old_text.T, tau * z_bar @ old_text.T)
                for parameter, gradient in zip(shared, torch.autograd.grad(kl, shared), strict=True):
                    gradients[parameter] = gradients[parameter] + args.structure_weight * gradient
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            optimizer.step()
        self.model.fold_task()
        self.close(pixels, labels, names)

    def structure_loss(self, student, teacher):
        total = 0.0
        for axis, temperature in ((1, self.args.class_temperature), (0, self.args.instance_temperature)):
            p = (teacher.double() / temperature).softmax(axis)
            log_q = (student.double() / temperature).log_softmax(axis)
            total = total + temperature**2 * (p * (p.clamp(min=1e-300).log() - log_q)).sum(axis).mean()
        return total

    def close(self, pixels, labels, names):
        handles = [
            layer.register_forward_pre_hook(
                lambda _, args, name=name: self.inputs.setdefault(name, []).append(args[0].detach().flatten(0, 1))
            )
            for name, layer in self.model.dual_mode_layers().items()
        ]
        with torch.no_grad():
            z = unit_image_embeds(self.clip, pixels)
            self.old += names
            text = self.text(self.old)
        for handle in handles:
            handle.remove()
        self.head = self.head or BridgeEnsembleHead(text.shape[1], logit_scale=self.learner.logit_scale)
        self.head.add_classes(list(names), z, labels, text)


def test_cached_and_online_teacher_agree(base, digits, monkeypatch):
    previous, calls = DualModeLoraModel.previous_task, []

    def counted(model):
        if model.training:  # the passes before and after use it too, where it changes nothing
            calls.append(model)
        return previous(model)

    monkeypatch.setattr(DualModeLoraModel, "previous_task", counted)
    results = []
    for teacher in ("cached", "online"):
        learner = make_learner(base, teacher=teacher)
        for task in stream(digits, 2):
            learner.learn_task(task.train, task.class_names)
        results.append(logits(learner, digits))
        assert len(calls) == (0 if teacher == "cached" else 2)  # 12 images in batches of 8, at the second task alone
    torch.testing.assert_close(*results, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"structure_weight": 0.0},
        {"text_embeds": "at_introduction"},
        {"kl_reduction": "batchmean"},
        {"lr_schedule": "epoch"},
        {"statistics_tokens": "patch"},
        {"mixed_precision": "bf16"},
    ],
)
def test_options_change_the_result(base, digits, plain, fields):
    found = outcome(base, digits, **fields)
    assert torch.isfinite(found).all() and not torch.equal(found, plain)


@pytest.mark.parametrize("fields", [{"num_workers": 2}, {"pixel_cache_mb": 0}, {"progress": True}])
def test_how_images_are_read_does_not_matter(base, digits, plain, fields):
    assert torch.equal(outcome(base, digits, **fields), plain)


@pytest.mark.parametrize(("schedule", "last"), [("step", 0.0), ("epoch", 1e-5)])
def test_the_learning_rate_falls_to_its_floor(base, digits, monkeypatch, schedule, last):
    schedules = []
    real = torch.optim.lr_scheduler.CosineAnnealingLR
    monkeypatch.setattr(
        torch.optim.lr_scheduler, "CosineAnnealingLR", lambda *a, **k: schedules.append(real(*a, **k)) or schedules[-1]
    )
    task = stream(digits, 1)[0]
    make_learner(base, epochs=2, learning_rate=1e-3, lr_schedule=schedule).learn_task(task.train, task.class_names)
    assert schedules[0].get_last_lr() == pytest.approx([last], abs=1e-12)


def test_zero_shot_is_the_pristine_model_s(base, digits):
    learner = make_learner(base)
    tasks = stream(digits, 2)
    before = learner.zero_shot([(task.test, task.class_names) for task in tasks])
    learner.learn_task(tasks[0].train, tasks[0].class_names)
    assert learner.zero_shot([(task.test, task.class_names) for task in tasks]) == before


def test_trackers_of_accelerate(base, digits, tmp_path):
    make_learner(base, log_with="tensorboard", epochs=2).run(stream(digits, 1), tmp_path)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_with_a_client(name, base, digits, tmp_path, monkeypatch):
    client = MagicMock()  # in place of the package, which sends what it gets to a server
    monkeypatch.setitem(sys.modules, name, client)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType(name)])
    make_learner(base, log_with=name, epochs=2).run(stream(digits, 1), tmp_path)
    client.init.assert_called_once_with(project="dulbe_peft")
    run = client.init.return_value
    assert run.log.call_count == 2 and all("loss" in str(call.args[0]) for call in run.log.call_args_list)
    run.finish.assert_called_once_with()


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("all", "tensorboard")])
def test_a_tracker_whose_package_is_missing_is_named(name, package, base, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ImportError, match=f"log_with is '{name}'.*pip install {package}"):
        make_learner(base, log_with=name)


@pytest.fixture(scope="module")
def learned_folder(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned") / "learner"
    make_learner(base).save_pretrained(folder)
    return folder


def test_an_error_at_the_very_end_is_taken_back_too(base, digits, monkeypatch):
    """Also what an interrupted step left in `.grad`: the task learned again equals one learned in peace."""
    learner, calm = make_learner(base), make_learner(base)
    first, second = stream(digits, 2)
    for one in (learner, calm):
        one.learn_task(first.train, first.class_names)
    with monkeypatch.context() as patch:
        patch.setattr(OccupationStatistics, "merge", lambda *_: (_ for _ in ()).throw(ValueError("no room")))
        with pytest.raises(ValueError, match="no room"):
            learner.learn_task(second.train, second.class_names)
    assert learner.head.class_names == list(first.class_names) and learner.model.active_peft_config.history_rank == 3
    assert learner.state.step == 2
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for one in (learner, calm):
        one.learn_task(second.train, second.class_names)
    assert torch.equal(logits(learner, digits), logits(calm, digits))


def test_the_machine_s_settings_do_not_travel(digits, base, tmp_path):
    learner = make_learner(base, num_workers=2, pixel_cache_mb=7, batch_size=5)
    learner.save_pretrained(tmp_path / "learner")
    again = ClassIncrementalLearner.from_pretrained(tmp_path / "learner", base_model=copy.deepcopy(base[0]))
    assert (again.args.num_workers, again.args.pixel_cache_mb, again.args.device) == (0, 1024, "auto")
    assert again.args.batch_size == 5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_step_reads_a_value_from_the_device(base, digits, monkeypatch, attention):
    """Tensors on the meta device have no values: to read one, copy one to the CPU or branch on one raises."""
    clip, processor = copy.deepcopy(base[0]), base[1]
    clip.set_attn_implementation(attention)
    learner = make_learner((clip, processor))
    first, second = stream(digits, 2)
    learner.learn_task(first.train, first.class_names)
    images = learner.encoder.images(second.train, keep=True)
    losses = []
    trainer = TaskTrainer(learner.state, learner.encoder, learner.logit_scale, images)
    task, teacher = trainer.begin(learner.state.adapter)
    monkeypatch.setattr(trainer, "_log_epoch", lambda found, epoch: losses.append(found))
    monkeypatch.setattr(learner.encoder, "autocast", nullcontext)  # knows no meta device
    learner.device = learner.encoder.device = torch.device("meta")
    learner.model.to("meta")
    learner.head.to("meta")
    trainer.train(task, teacher.to("meta"))
    assert [(found.device.type, len(found)) for found in losses] == [("meta", 2)]
    with pytest.raises(RuntimeError, match="meta"):
        losses[0][0].item()


@pytest.mark.slow
def test_a_compiled_image_tower_learns_the_same_in_every_task(base, digits, monkeypatch):
    real = torch.compile
    compiled, ran = [], []

    def backend(graph, inputs):
        # The real compiler up to the graphs of forward and backward, which run without a C++ compiler.
        compiled.append(torch._dynamo.lookup_backend("aot_eager")(graph, inputs))
        function = compiled[-1]
        return lambda *args: ran.append(1) or function(*args)

    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=backend))
    plain, fast = make_learner(base), make_learner(base, torch_compile=True)
    for number, task in enumerate(stream(digits, 4), 1):
        for learner in (plain, fast):
            learner.learn_task(task.train, task.class_names)
            learner.evaluate(task.test, task.class_names)
        assert len(ran) == 2 * number, "one graph for each of a task's two steps"
        assert len(compiled) == 2, "one for each size of batch, whatever the history's rank"
    torch.testing.assert_close(logits(fast, digits), logits(plain, digits), atol=2e-2, rtol=1e-3)


def test_a_failed_load_gives_back_also_modules_to_save(base, tmp_path):
    learner_of(base, adapter={"modules_to_save": ["visual_projection"]}).save_pretrained(tmp_path / "learner")
    pristine = copy.deepcopy(base[0])
    before = state(pristine)
    with pytest.raises(ValueError, match="xpu|asked for"):
        ClassIncrementalLearner.from_pretrained(tmp_path / "learner", pristine, machine={"device": "xpu"})
    assert same(state(pristine), before) and not any("modules_to_save" in name for name in before)


@pytest.mark.parametrize(("given", "error"), [("a/path", TypeError), ("wrapped", ValueError), ("vision", ValueError)])
def test_a_base_model_that_is_none_is_named(base, learned_folder, given, error):
    wrong = {"wrapped": make_learner(base).model, "vision": base[0].vision_model}.get(given, given)
    with pytest.raises(error, match="base_model|the served types are"):
        ClassIncrementalLearner.from_pretrained(learned_folder, wrong)
