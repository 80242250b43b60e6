"""Test the files of the settings that authors publish: one batch with them against the formulas in float64."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from lives import learned, tiny_learner
from stepping import SCALE, adapted, begin, end, images, new_task, step_of, texts, train, update
from torch.nn import functional as F

from dulbe_peft import STRATEGIES
from dulbe_peft.adapter import linear
from dulbe_peft.classifiers.rule import setting_defaults
from dulbe_peft.encoders.loading import logit_scale
from dulbe_peft.photos.runs.run_settings import given_settings, validated
from dulbe_peft.strategies import NewTask, Step, make_strategy

FOLDER = Path(__file__).parents[2] / "examples" / "papers"
ADAPTER = ("target_modules", "shared_rank", "residual_rank")


def settings_of(name):
    return given_settings(str(FOLDER / f"{name}.yaml"), {})


def unit_pairs(layer, rank):
    """Return the sum of B_i A_i / (|B_i| |A_i|) over the pairs of the history, in float64."""
    down, up = (getattr(layer, f"dulbe_history_{kind}")["default"].double() for kind in "PB")
    pairs = zip(down.split(rank, dim=1), up.split(rank, dim=1), strict=True)
    return sum(b @ a.T / (a.norm() * b.norm()) for a, b in pairs)


DENSE = ["inflora", "sd_lora", "o_lora", "slca", "spu", "first_session", "keeplora", "loda", "lora_sub", "bofa"]


@pytest.mark.parametrize("name", DENSE)
def test_first_batch_of_the_second_task_has_the_loss_of_the_formula(tiny_clip, name):
    """The update of the first task is computed from its factors, and the loss by a dense model in float64."""
    settings = settings_of(name)
    strategy = make_strategy(settings["strategy"])
    chosen = {key: settings[key] for key in ADAPTER if key in settings}
    if name == "bofa":
        chosen["residual_rank"] = 16  # of the tiny model's 32
    adapter = adapted(tiny_clip(), **chosen)
    gradients = {n: torch.randn(m.out_features, m.in_features) for n, m in adapter.dual_mode_layers().items()}
    memory = None
    for index in (0, 1):
        task = new_task(adapter, index, memory)
        task.gradients = gradients
        begin(strategy, task)
        if index == 0:
            train(strategy, task)
            memory = end(strategy, task)
    rank, penalty, dense = sum(task.ranks), 0.0, tiny_clip().double()
    with strategy.training(task), torch.no_grad():
        loss = float(strategy.loss(task, step_of(task)))
        for place, layer in task.layers.items():
            if name == "spu":
                change = linear.dense(layer.history("default")).double()
            elif name == "bofa":  # each task starts from the base weight, and its B from 0
                assert layer.dulbe_history_B["default"].abs().max() > 1e-3
                change = torch.zeros(layer.out_features, layer.in_features).double()
            else:
                change = 0.8 * unit_pairs(layer, rank) if name == "sd_lora" else update(layer)
            assert name == "bofa" or change.abs().max() > 1e-3
            dense.get_submodule(place).weight += change
            current = layer.dulbe_P["default"].double().T  # A_t, a row for each direction
            if name == "o_lora":
                old = layer.dulbe_history_P["default"].double()
                penalty += 0.5 * float((current @ old).abs().sum())
            elif name == "inflora":
                torch.testing.assert_close(3 * current @ current.T, torch.eye(rank).double(), rtol=0, atol=1e-4)
            elif name == "keeplora":
                _, scales, right = torch.linalg.svd(layer.base_layer.weight.double())
                share = scales.square().cumsum(0) / scales.square().sum()
                principal = right[: int((share < 0.85).sum()) + 1]
                assert (current @ principal.T).abs().max() < 1e-5
            elif name == "spu":
                assert int((change != 0).sum()) == int(0.1 * change.numel())
        pixels, labels = images(1)
        features = F.normalize(dense.get_image_features(pixel_values=pixels.double()).pooler_output, dim=1)
        scores = SCALE * features @ texts(1).double().T
        expected = float(F.cross_entropy(scores, torch.tensor(labels))) + penalty
    assert loss == pytest.approx(expected, rel=1e-5)


def unit(count, seed):
    return F.normalize(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)), dim=1)


def divergence(p, q):
    return (p * (p.log() - q.log())).sum()


def test_first_batch_of_sgcl_has_the_loss_of_the_formula():
    z, before, text, old, labels = unit(5, 0), unit(5, 1), unit(3, 2), unit(4, 3), torch.tensor([0, 2, 1, 2, 0])
    step = Step(torch.tensor(0.25), z, labels, text, old, lambda: z, lambda: before, SCALE)
    loss = float(make_strategy(settings_of("sgcl")["strategy"]).loss(new_task(None, 1), step))
    z, before, text, old = (tensor.double() for tensor in (z, before, text, old))
    expected = 0.25
    for feature, teacher, label in zip(z, before, labels.tolist(), strict=True):
        near = old @ text[label]
        soft = (13 * torch.cat([old, text]) @ text[label]).softmax(dim=0)
        expected += 0.015 / 5 * divergence(soft, (SCALE * torch.cat([old, text]) @ feature).softmax(dim=0))
        pushed = SCALE * old @ teacher + torch.where(near == near.max(), near.max(), -near.max())
        seen = (SCALE * old @ feature / 4).softmax(dim=0)
        expected += 0.5 * 16 / 5 * divergence((pushed / 4).softmax(dim=0), seen)
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_first_batch_of_zscl_has_the_penalty_of_the_formula(digit_folders, monkeypatch):
    monkeypatch.setenv("REFERENCES", str(digit_folders(3, 2, 1)))
    learner = learned(tiny_learner(settings_of("zscl")["strategy"], batch_size=16, learning_rate=0.1), 1)
    task = NewTask(1, learner.state.adapter, learner.args, learner.state.memory, encoder=learner.encoder)
    with learner.strategy.training(task), torch.no_grad():
        penalty = float(learner.strategy.penalty(task))
        references = task.notes["references"]
        now = learner.encoder.image_embeds(torch.stack([references.images[i][0] for i in range(6)])).double()
    scale, texts = logit_scale(learner.encoder.clip), references.text.double()
    before, after = (scale * z.double() @ texts.T / 2 for z in (references.features, now))
    by_image = sum(divergence(p, q) for p, q in zip(before.softmax(1), after.softmax(1), strict=True)) / 6
    by_text = sum(divergence(p, q) for p, q in zip(before.T.softmax(1), after.T.softmax(1), strict=True)) / len(texts)
    # Scores of at most half the scale are sums of 16 products in float32, and KL is half the square of their change.
    rounding, moved = 16 * scale / 2 * 2**-24, (2 * min(float(by_image), float(by_text))) ** 0.5
    assert penalty == pytest.approx(5 * 4 * float(by_image + by_text), rel=2 * rounding / moved) and penalty > 1e-3


# The formulas of strategies are tested with their defaults, from which a file differs in these settings.
OTHER = {
    "aper": {"head": "cosine"},
    "coda_prompt": {"head": "linear"},
    "dualprompt": {"head": "linear"},
    "inflora": {"tasks": 10},
    "l2p": {"head": "linear", "start": 1.0, "pool": 30, "length": 20},
    "lfi": {"captions": 3},
    "lora_sub": {"normalize": True},
    "sgcl": {"soft_weight": 0.015},
    "zscl": {"reference_images": "$REFERENCES", "distillation": 5.0},
}


def test_published_settings_of_strategies_are_the_defaults_but_for_those_of_the_table():
    found = {}
    for path in FOLDER.glob("*.yaml"):
        settings, defaults = (asdict(make_strategy(s)) for s in (settings_of(path.stem)["strategy"], path.stem))
        found[path.stem] = {key: value for key, value in settings.items() if value != defaults[key]}
    assert {name: settings for name, settings in found.items() if settings} == OTHER
    without = {"dulbe", "frozen", "lora", "merged_lora", "lwf"}  # their papers have no stream of classes
    assert set(found) == set(STRATEGIES) - without


@pytest.mark.parametrize("name", ["rapf", "slca", "engine", "proof", "clap4clip", "clg_cbm", "mg_clip"])
def test_published_settings_of_classifiers_are_the_defaults(name):
    """Their formulas are tested with the defaults. Those of RAPF that depend on the stream have a rule."""
    recipe = validated(settings_of(name)).model.methods[1][0]
    by_stream = {"batch_size": 100, "replayed": 2} if name == "rapf" else {}
    defaults = setting_defaults(recipe.kind.rule_type)
    assert {key: value for key, value in recipe.settings.items() if value != defaults[key]} == by_stream


# The order of classes in the authors' code or configurations, where it is not iCaRL's.
ORDERS = {"dualprompt": "natural", "inflora": "natural", "lora_sub": "natural", "magmax": "magmax"}
ORDERS |= dict.fromkeys(("aper", "bofa", "cl_lora", "clg_cbm", "engine", "proof", "sd_lora", "slca"), "pilot")
ORDERS |= dict.fromkeys(("coda_prompt", "l2p"), 0)  # a random order for each seed


def test_every_file_has_the_order_of_its_authors():
    found = {path.stem: settings_of(path.stem) for path in FOLDER.glob("*.yaml")}
    assert all(("order_seed" in settings) + ("class_order" in settings) == 1 for settings in found.values())
    orders = {name: settings.get("class_order", settings.get("order_seed")) for name, settings in found.items()}
    assert {name: order for name, order in orders.items() if order != "icarl"} == ORDERS


def test_every_file_is_a_valid_run_and_names_its_paper():
    for path in FOLDER.glob("*.yaml"):
        given = validated(settings_of(path.stem))
        assert given.model.methods[0].name == path.stem and given.stream.increment in (5, 10)
        text = path.read_text(encoding="utf-8")
        assert (
            "(arXiv " in text or "(CVPR 2026" in text
        ) and f"--config examples/papers/{path.name} --data cifar100" in text
