"""KeepLoRA's bases and memory over three tasks against its formulas, written out with projectors."""

import pytest
import torch
from peft import get_peft_model
from test_inflora import collected
from test_subspaces import projector

from dulbe_peft import DualModeLoraConfig, LearnerArguments
from dulbe_peft.strategies import NewTask, make_strategy

RANK = 4


def literal_principal(weight, share):
    """The first right singular vectors of W (d_out x d_in), until their squares reach `share` of all."""
    _, scales, right = torch.linalg.svd(weight.double())
    count, held = 0, 0.0
    while held < share * float(scales.square().sum()):
        held += float(scales[count] ** 2)
        count += 1
    return right[:count].T


def test_three_tasks_are_those_of_the_formulas(tiny_clip):
    adapter = get_peft_model(tiny_clip(), DualModeLoraConfig(shared_rank=1, residual_rank=RANK - 1)).base_model
    layers = adapter.dual_mode_layers()
    strategy = make_strategy("keeplora:eps_w=0.3,eps_f=0.85")
    occupied = {name: literal_principal(layer.base_layer.weight.detach(), 0.3) for name, layer in layers.items()}
    memory = None
    for index in range(3):
        statistics, by_names = collected(adapter, index, decay=0.85)
        inputs = {name: tokens for names, tokens in by_names.items() for name in names}
        gradients = {name: torch.randn(layer.out_features, layer.in_features) for name, layer in layers.items()}
        task = NewTask(index, adapter, LearnerArguments(), memory, gradients)
        modes = strategy.plan(task)
        memory = strategy.remember(task, statistics)
        kept = strategy.from_memory(memory)
        assert set(kept) == set(modes) == set(layers)
        for name in layers:
            outside = torch.eye(len(occupied[name])).double() - projector(occupied[name])
            _, _, right = torch.linalg.svd(gradients[name].double() @ outside)
            found = torch.cat([modes[name].shared, modes[name].residual], dim=1)
            torch.testing.assert_close(found.T @ found, torch.eye(RANK), rtol=0, atol=1e-5)
            torch.testing.assert_close(projector(found), projector(right[:RANK].T), rtol=0, atol=1e-4)
            assert abs(float(found[:, 0].double() @ right[0])) == pytest.approx(1, abs=1e-5)  # in descending order

            total, rest = inputs[name].square().sum(), inputs[name] @ outside
            _, scales, right = torch.linalg.svd(rest)
            held, count = (total - rest.square().sum()) / total, 0
            while held < 0.85:
                held = held + scales[count] ** 2 / total
                count += 1
            occupied[name] = torch.cat([occupied[name], right[:count].T], dim=1)
            assert kept[name].basis.shape == occupied[name].shape
            torch.testing.assert_close(projector(kept[name].basis), projector(occupied[name]), rtol=0, atol=1e-4)
