"""The paper's ablations as files: every row names settings that exist, and does what its name says."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from lives import QUICK, learned
from peft import get_peft_model
from stepping import adapted, features, new_task, step_of, texts

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.comparison.plan import read_plan
from dulbe_peft.runs.settings import pick
from dulbe_peft.strategies import make_strategy

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


def test_routing_both_gives_the_structure_loss_to_both_modes(tiny_clip):
    """Each part of the gradient by itself, against one backward pass of the strategy."""
    torch.manual_seed(0)
    adapter, kinds = adapted(tiny_clip(), init_weights=False), ("shared_parameters", "residual_parameters")
    task = replace(new_task(adapter, 1), args=LearnerArguments(structure_weight=0.7))
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
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        torch.testing.assert_close(both[index], one + 0.7 * other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shared[index], one + 0.7 * other * (index < half), rtol=1e-4, atol=1e-6)


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
