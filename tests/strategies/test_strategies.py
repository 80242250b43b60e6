"""Test that a learner with each strategy learns, saves, loads, continues and exports."""

import copy
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from documents import text_of
from lives import QUICK, content, images_of, learned, stream, tiny_base, tiny_learner
from peft import PeftModel, get_peft_model
from stepping import adapted, features, new_task, step_of, texts
from tiny_encoders import make_config, save_encoder
from torch.nn import functional as F
from transformers import CLIPModel

from dulbe_peft import (
    STRATEGIES,
    CheckpointError,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    Strategy,
    export_lora,
    register_strategy,
    run_stream,
)
from dulbe_peft.photos.deployment.formats import export_learner
from dulbe_peft.photos.runs.run_settings import pick, read_yaml, setting_values
from dulbe_peft.strategies import NewTask, make_strategy
from dulbe_peft.strategies.lora import kaiming_bases
from research.comparison.plan import read_plan

IMAGES = images_of(0, 1, 2, 3, seed=9)


# The tiny tower has two blocks.
SPECS = {"zscl": "zscl:reference_images=$REFERENCES", "dualprompt": "dualprompt:general_blocks=1"}
MATRICES = ("bofa", "cl_lora", "dulbe", "inflora", "keeplora", "loda", "lora_sub", "magmax", "merged_lora", "spu")
FACTORS = ("o_lora", "sd_lora")
# A plain run takes one strategy of each kind: no training, matrices, factors, and all weights.
FEW = ("dulbe", "frozen", "o_lora", "slca")
# The other strategies take cheaper classifiers of the same kind than the default of most of them.
CHEAPER = {"bayes": "lda", "pooled_bridge": "bridge"}


@pytest.fixture(scope="module", autouse=True)
def _named_base(tmp_path_factory, digit_folders):
    """Save the base model, which saved learners load, and the images that a strategy refers to."""
    os.environ["REFERENCES"] = str(digit_folders(2, 2, 0))
    model, folder = tiny_base()[0], str(save_encoder("clip", tmp_path_factory.mktemp("base")))
    model.name_or_path = model.config.name_or_path = folder
    yield
    model.name_or_path = model.config.name_or_path = ""
    del os.environ["REFERENCES"]


def make_learner(name, **adapter):
    quick = {"ranpac": ":features=50", "bayes": ":features=50", "clap4clip": ":epochs=1", "clg_cbm": ":epochs=2"}
    chosen = [key if name in FEW else CHEAPER.get(key, key) for key in make_strategy(name).classifiers]
    few = tuple(key + quick.get(key, "") for key in chosen)
    return tiny_learner(SPECS.get(name, name), few, adapter, drift="linear", epochs=2)


@pytest.mark.plain("dulbe")
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in sorted(STRATEGIES)]
)
def test_loaded_learner_continues_and_exports_like_the_original(name, tmp_path):
    """Layers have different ranks, and histories become dense after two tasks unless a strategy reads the factors."""
    learner = learned(make_learner(name, residual_rank=9, rank_pattern={"layers.1.mlp.fc1": 12}), 2)
    memory = learner.memory
    assert (None if memory is None else type(memory)) is learner.strategy.memory_kind
    learner.save_pretrained(tmp_path / "saved")
    assert set(learner.evaluate(stream(1)[0].test)["classifiers"]) == set(learner.classifiers)
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    assert loaded.strategy == learner.strategy and list(loaded.classifiers) == list(learner.classifiers)
    z, features = loaded.image_embeds(IMAGES), learner.image_embeds(IMAGES)
    assert torch.equal(z, features)
    for key, classifier in loaded.classifiers.items():
        torch.testing.assert_close(classifier(z), learner.classifiers[key](features), rtol=1e-4, atol=1e-4)
    for each in (learner, loaded):
        learned(each, 1, 2)
    assert torch.equal(loaded.image_embeds(IMAGES), learner.image_embeds(IMAGES))

    if learner.state.encoding is not None:
        with pytest.raises(ValueError, match="cannot be exported: the strategy"):
            export_learner(learner, tmp_path / "lora")
    elif learner.strategy.adapts:
        ranks = [layer.history_rank("default") for layer in loaded.model.dual_mode_layers().values()]
        assert ranks == ([30, 39] if name in FACTORS else [-1 if name in MATRICES else 0] * len(ranks))
        export_lora(learner.model, tmp_path / "lora")
        stock = PeftModel.from_pretrained(copy.deepcopy(tiny_base()[0]), tmp_path / "lora").eval()
        with torch.no_grad():
            features = stock.get_image_features(torch.stack([pixels for pixels, _ in IMAGES])).pooler_output
        z = torch.nn.functional.normalize(features, dim=-1)
        torch.testing.assert_close(z, learner.image_embeds(IMAGES), rtol=1e-4, atol=1e-5)


def test_frozen_trains_nothing(monkeypatch, tmp_path):
    for name in (
        "torch.Tensor.backward",
        "torch.optim.Adam",
        "dulbe_peft.training.task_trainer.add_inputs",
    ):
        monkeypatch.setattr(name, None)
    learner = make_learner("frozen")
    run_stream(learner, stream(2), tmp_path / "run")
    assert not (tmp_path / "run" / "task-002" / "adapter_model.safetensors").exists()
    assert learner.memory is None
    assert any(p.requires_grad for p in learner.model.parameters()), "the parameters were not frozen"
    assert not learner.encoder.text_embeds(["a"]).requires_grad


def test_merged_lora_merges_but_lora_keeps_one_pair_and_first_session_trains_once():
    merged, lora, learner = (learned(make_learner(name), 1) for name in ("merged_lora", "lora", "first_session"))
    layer = next(iter(merged.model.dual_mode_layers().values()))
    initial = next(iter(kaiming_bases(NewTask(0, merged.state.adapter, merged.args)).values()))
    assert layer.history_rank("default") == 3 and not layer.is_trained("default")
    assert not torch.equal(layer.dulbe_history_P["default"][:, :3], initial)  # A is trained, too
    layers = lora.model.dual_mode_layers().values()
    assert all(layer.history_rank("default") == 0 and layer.is_trained("default") for layer in layers)
    first = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    assert all(torch.equal(tensor, first[name]) for name, tensor in lora.model.state_dict().items())
    for index in (1, 2):
        learned(learner, 1, index)
        assert all(torch.equal(tensor, first[name]) for name, tensor in learner.model.state_dict().items())
        counts = {len(classifier.class_names) for classifier in learner.classifiers.values()}
        assert learner.record.loss == [] and counts == {2 * index + 2}
    learned(lora, 1, 1)
    assert any(not torch.equal(tensor, first[name]) for name, tensor in lora.model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["zscl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slca", "first_session", "sgcl"))]
)
def test_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    run_stream(make_learner(name), stream(2), tmp_path / "whole")
    run_stream(make_learner(name), stream(1), tmp_path / "stopped")
    run_stream(make_learner(name), stream(2), tmp_path / "stopped")
    whole, stopped = (content(tmp_path / folder / "task-002") for folder in ("whole", "stopped"))
    assert [name for name in whole if whole[name] != stopped.get(name)] == [] and "adapter_model.safetensors" in whole


@pytest.mark.slow
def test_second_strategy_of_the_example_keeps_a_memory_that_restrains_the_next_task(tmp_path, monkeypatch):
    monkeypatch.setattr(STRATEGIES, "_classes", dict(STRATEGIES._classes))
    exec(text_of("examples/own_strategy.py"), {"__name__": "example"})
    moved = {}
    for weight in (0.0, 1e4):
        learner = learned(
            tiny_learner(f"stay_close:weight={weight}", ("prototype",), learning_rate=0.01, epochs=20), 1
        )
        learner.save_pretrained(tmp_path / str(weight))
        learner = ClassIncrementalLearner.from_pretrained(tmp_path / str(weight))  # the memory is saved, too
        before = learner.state.memory
        after = learned(learner, 1, first=1).state.memory
        moved[weight] = sum(float((after[name] - before[name]).square().sum()) for name in before)
    assert 0 < moved[1e4] < 0.2 * moved[0.0]


def test_strategy_of_the_example_can_be_registered_and_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(STRATEGIES, "_classes", dict(STRATEGIES._classes))
    exec(text_of("examples/own_strategy.py"), {"__name__": "example"})
    learner = make_learner("random_bases:salt=2")
    results = run_stream(learner, stream(2), tmp_path / "run").contents()
    assert results["strategy"] == {"name": "random_bases", "salt": 2}
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "run" / "task-002")
    assert loaded.strategy == learner.strategy and loaded.strategy.salt == 2
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="there is no strategy 'random_bases'"):
        ClassIncrementalLearner.from_pretrained(tmp_path / "run" / "task-002")


NAMESAKE = dataclass(frozen=True)(type("Other", (Strategy,), {"name": "dulbe"}))


@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        (make_strategy, "merge_lora", ValueError, "did you mean 'merged_lora'"),
        (make_strategy, {"name": "lora_sub", "rank": 3}, ValueError, "does not have the settings.*rank"),
        (make_strategy, "inflora:energy=0.9,final_energy=0.8", ValueError, "at most final_energy = 0.8, got 0.9"),
        (make_strategy, "cl_lora:shared_blocks=1", ValueError, "shared_blocks must be less than 1"),
        (make_strategy, 3, TypeError, "must be a name"),
        (register_strategy, type("Bare", (Strategy,), {"name": "bare"}), TypeError, "dataclass"),
        (register_strategy, NAMESAKE, ValueError, "is already dulbe_peft.strategies.dulbe:Dulbe"),
    ],
)
def test_invalid_strategy_is_refused(call, given, error, message):
    with pytest.raises(error, match=message):
        call(given)


OF_A_METHOD = ("strategy", "classifiers", "drift")
ABLATIONS = Path(__file__).parents[2] / "examples" / "ablations"


def test_every_ablation_file_is_valid_and_the_one_of_cifar100_has_the_settings_of_the_paper(monkeypatch):
    monkeypatch.setenv("DATA", "cifar100")
    plans = {path.stem: read_plan(path) for path in ABLATIONS.glob("*.yaml")}  # reading checks every entry
    for plan in plans.values():
        assert len(plan.rows) > 1 and {row.drift for row in plan.rows} == {"none"}
    stream = plans.pop("cifar100").streams["CIFAR-100"]
    protocol = setting_values(read_yaml(ABLATIONS.parent / "protocols" / "a-cifar100.yaml", "protocol"), "it")
    assert stream | {"data": "x"} == {k: v for k, v in protocol.items() if k not in OF_A_METHOD} | {"data": "x"}
    assert all(plan.streams["digits"]["model"] == "demo" for plan in plans.values())


def test_structure_loss_uses_each_temperature_in_its_place(tiny_clip):
    adapter = adapted(tiny_clip(), class_temperature=3.0, instance_temperature=0.2)
    teacher, text = features(adapter, 1).flip(0), texts(0)
    task = new_task(adapter, 1)
    step = replace(step_of(task), old_text=text, teacher=lambda: teacher)
    student, target = (step.logit_scale * z @ text.T for z in (step.features, teacher))

    def divergence(temperature, dim):
        expected, given = (target / temperature).softmax(dim), (student / temperature).log_softmax(dim)
        return temperature**2 * F.kl_div(given, expected, reduction="sum") / student.shape[1 - dim]

    expected = divergence(3.0, 1) + divergence(0.2, 0)
    torch.testing.assert_close(make_strategy("dulbe").structure_loss(task, step), expected)


def test_routing_both_trains_both_modes_with_the_structure_loss(tiny_clip):
    """Compare the two parts of the gradient, computed separately, with one backward pass of the strategy."""
    torch.manual_seed(0)
    adapter, kinds = adapted(tiny_clip(), init_weights=False), ("shared_parameters", "residual_parameters")
    adapter.active_config.structure_weight = 0.7
    task = new_task(adapter, 1)
    teacher = features(adapter, 1).flip(0)
    parameters = [p for kind in kinds for p in getattr(adapter, kind)()]

    def step():
        return replace(step_of(task), old_text=texts(0), teacher=lambda: teacher)

    def routed(spec):
        adapter.zero_grad(set_to_none=True)
        make_strategy(spec).backward(task, step())
        return [p.grad.clone() for p in parameters]

    first = torch.autograd.grad(step().task_loss, parameters)
    second = torch.autograd.grad(make_strategy("dulbe").structure_loss(task, step()), parameters)
    both, shared, half = routed("dulbe:routing=both"), routed("dulbe"), len(parameters) // 2
    assert all(gradient.norm() > 1e-6 for gradient in second)
    for index, (task_part, structure) in enumerate(zip(first, second, strict=True)):
        torch.testing.assert_close(both[index], task_part + 0.7 * structure, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shared[index], task_part + 0.7 * structure * (index < half), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def four_blocks():
    """A tiny CLIP whose vision tower has four blocks, as the files of ablations need, and its processor."""
    config = make_config("clip")
    config.vision_config.num_hidden_layers = 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CLIPModel(config).eval(), tiny_base()[1]


# The rows of the other files differ only in a number.
@pytest.mark.slow
@pytest.mark.parametrize("file", ["modes", "bridge", "places", "statistics"])
def test_all_rows_of_an_ablation_learn_two_tasks(file, four_blocks):
    plan = read_plan(ABLATIONS / f"{file}.yaml")
    for row in plan.methods:
        settings, rows = next((cell.settings, rows) for cell, rows in plan.cells() if cell.method == row)
        strategy, config = make_strategy(settings["strategy"]), pick(DualModeLoraConfig, settings)
        args = pick(LearnerArguments, settings | QUICK | {"drift": "none"})
        model = copy.deepcopy(four_blocks[0])
        model = get_peft_model(model, config) if strategy.adapts else model
        classifiers = [row.classifier for row in rows if ":" not in row.classifier]
        learner = ClassIncrementalLearner(model, four_blocks[1], args, strategy, classifiers)
        assert len(learned(learner, 2).class_names) == 4
