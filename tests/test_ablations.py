"""The paper's ablations as files: every row names settings that exist, and does what its name says."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import yaml
from lives import QUICK, learned
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.comparison.plan import read_plan
from dulbe_peft.runs.settings import pick
from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.base import NewTask, Step

FOLDER = Path(__file__).parents[1] / "examples" / "ablations"
PLANS = {path.stem: read_plan(path) for path in sorted(FOLDER.glob("*.yaml"))}


def settings_of(file, row):
    """The settings of the row's first run."""
    return next(cell.settings for cell in PLANS[file].cells() if cell.method == row)


def test_there_is_a_comparison_on_the_demo_for_every_ablation():
    expected = {"modes", "bridge", "depths", "reliability", "temperatures", "structure-weight", "ranks", "support"}
    assert set(PLANS) == expected | {"places", "statistics"}
    for plan in PLANS.values():  # reading one has checked every name, setting, classifier and the reference
        assert plan.streams["digits"]["model"] == "demo" and len(plan.seeds) == 3 and plan.reference is not None
        rows = [yaml.safe_dump(row, sort_keys=True) for row in plan.methods.values()]
        assert len(set(rows)) == len(rows) and len(rows) * len(plan.classifiers) > 2


def test_rows_of_modes_train_what_the_paper_s_table_says():
    found = {}
    for row in PLANS["modes"].methods:
        settings = settings_of("modes", row)
        strategy, config = make_strategy(settings["strategy"]), pick(DualModeLoraConfig, settings)
        routing = getattr(strategy, "routing", None) if settings.get("structure_weight", 0.5) else "none"
        found[row] = (strategy.name, config.shared_rank, config.residual_rank, routing)
    assert list(found.values()) == [
        ("lora", 0, 32, None),
        ("dulbe", 1, 0, "shared"),
        ("dulbe", 0, 8, "shared"),  # there is no shared mode for the loss to reach
        ("dulbe", 1, 8, "none"),
        ("dulbe", 1, 8, "both"),
        ("dulbe", 1, 8, "shared"),
    ]


def test_routing_both_gives_the_structure_loss_to_both_modes(base):
    """Each part of the gradient by itself, against one backward pass of the strategy."""
    torch.manual_seed(0)
    config = DualModeLoraConfig(residual_rank=2, init_weights=False, text_rank=2)
    model = get_peft_model(copy.deepcopy(base[0]), config)
    args = LearnerArguments(structure_weight=0.7)
    task = NewTask(1, model.base_model, args)
    unit = torch.nn.functional.normalize
    pixels, teacher = torch.randn(6, 3, 16, 16), unit(torch.randn(6, 64), dim=1)
    old_text, text = unit(torch.randn(3, 64), dim=1), unit(torch.randn(2, 64), dim=1)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def step():
        features = unit(model.get_base_model().get_image_features(pixel_values=pixels).pooler_output, dim=1)
        loss = torch.nn.functional.cross_entropy(10 * features @ text.T, labels)
        return Step(loss, features, labels, text, old_text, lambda: features, lambda: teacher, 10.0)

    def gradients(spec):
        model.zero_grad(set_to_none=True)
        make_strategy(spec).backward(task, step())
        return {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}

    both, shared = gradients("dulbe:routing=both"), gradients("dulbe")
    task_only = torch.autograd.grad(step().task_loss, list(parameters.values()), allow_unused=True)
    structure = make_strategy("dulbe").structure_loss(task, step())
    structure_only = torch.autograd.grad(structure, list(parameters.values()), allow_unused=True)
    seen = set()
    for name, first, second in zip(parameters, task_only, structure_only, strict=True):
        if first is None:  # the text tower is not run here
            assert both[name] is None and second is None
            continue
        kind = "shared" if "shared_B" in name else "residual"
        seen.add(kind)
        assert torch.allclose(both[name], first + 0.7 * second, rtol=1e-4, atol=1e-6)
        expected = first + 0.7 * second if kind == "shared" else first
        assert torch.allclose(shared[name], expected, rtol=1e-4, atol=1e-6)
    assert seen == {"shared", "residual"}


# The rows of the other files differ in a number alone.
@pytest.mark.slow
@pytest.mark.parametrize("file", ["modes", "bridge", "places", "statistics"])
def test_rows_learn(file, base):
    """Two tasks of one epoch: not a result, rows that run."""
    for row in PLANS[file].methods:
        settings = settings_of(file, row)
        strategy, config = make_strategy(settings["strategy"]), pick(DualModeLoraConfig, settings)
        args = pick(LearnerArguments, settings | QUICK | {"drift": "none"})
        model = get_peft_model(copy.deepcopy(base[0]), config) if strategy.adapts else copy.deepcopy(base[0])
        learner = ClassIncrementalLearner(model, base[1], args=args, strategy=strategy)
        assert len(learned(learner, 2).class_names) == 4
