"""Test the files of the settings that authors publish: one batch with them against the formulas in float64."""

from pathlib import Path

import pytest
import torch
from stepping import SCALE, adapted, begin, end, images, new_task, step_of, texts, train, update
from torch.nn import functional as F

from dulbe_peft.adapter import linear
from dulbe_peft.photos.runs.run_settings import given_settings, validated
from dulbe_peft.strategies import make_strategy

FOLDER = Path(__file__).parents[2] / "examples" / "papers"
ADAPTER = ("target_modules", "shared_rank", "residual_rank")


def settings_of(name):
    return given_settings(str(FOLDER / f"{name}.yaml"), {})


def unit_pairs(layer, rank):
    """Return the sum of B_i A_i / (|B_i| |A_i|) over the pairs of the history, in float64."""
    down, up = (getattr(layer, f"dulbe_history_{kind}")["default"].double() for kind in "PB")
    pairs = zip(down.split(rank, dim=1), up.split(rank, dim=1), strict=True)
    return sum(b @ a.T / (a.norm() * b.norm()) for a, b in pairs)


@pytest.mark.parametrize("name", ["inflora", "sd_lora", "o_lora", "slca", "spu"])
def test_first_batch_of_the_second_task_has_the_loss_of_the_formula(tiny_clip, name):
    """The update of the first task is computed from its factors, and the loss by a dense model in float64."""
    settings = settings_of(name)
    strategy = make_strategy(settings["strategy"])
    adapter = adapted(tiny_clip(), **{key: settings[key] for key in ADAPTER if key in settings})
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
            else:
                change = 0.8 * unit_pairs(layer, rank) if name == "sd_lora" else update(layer)
            assert change.abs().max() > 1e-3
            dense.get_submodule(place).weight += change
            current = layer.dulbe_P["default"].double().T  # A_t, a row for each direction
            if name == "o_lora":
                old = layer.dulbe_history_P["default"].double()
                penalty += 0.5 * float((current @ old).abs().sum())
            elif name == "inflora":
                torch.testing.assert_close(3 * current @ current.T, torch.eye(rank).double(), rtol=0, atol=1e-4)
            elif name == "spu":
                assert int((change != 0).sum()) == int(0.1 * change.numel())
        pixels, labels = images(1)
        features = F.normalize(dense.get_image_features(pixel_values=pixels.double()).pooler_output, dim=1)
        scores = SCALE * features @ texts(1).double().T
        expected = float(F.cross_entropy(scores, torch.tensor(labels))) + penalty
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["rapf", "slca", "engine", "proof", "clap4clip", "clg_cbm", "mg_clip"])
def test_published_settings_of_classifiers_are_the_defaults(name):
    """Their formulas are tested with the defaults. Those of RAPF that depend on the stream have a rule."""
    recipe = validated(settings_of(name))[0].methods[1][0]
    by_stream = {"batch_size": 100, "replayed": 2} if name == "rapf" else {}
    defaults = recipe.kind.rule_type.setting_defaults()
    assert {key: value for key, value in recipe.settings.items() if value != defaults[key]} == by_stream


def test_every_file_is_a_valid_run_and_names_its_paper():
    for path in FOLDER.glob("*.yaml"):
        stream, *_ = validated(settings_of(path.stem))
        assert stream.methods[0].name == path.stem and stream.increment in (5, 10)
        text = path.read_text(encoding="utf-8")
        assert (
            "(arXiv " in text or "(CVPR 2026" in text
        ) and f"--config examples/papers/{path.name} --data cifar100" in text
