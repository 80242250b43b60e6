"""InfLoRA's bases and memory over three tasks against its formulas, written out with singular value decompositions."""

import math

import pytest
import torch
from peft import get_peft_model
from test_subspaces import literal_dual_gpm, projector

from dulbe_peft import DualModeLoraConfig, LearnerArguments, OccupationStatistics
from dulbe_peft.strategies import NewTask, make_strategy
from dulbe_peft.strategies.projection_memory import FREE, OCCUPIED

RANK = 4


def collected(adapter, task, decay=0.95):
    """Statistics of random inputs: k and v read one tensor; a spectrum that decays, other directions every task."""
    statistics, inputs = OccupationStatistics(), {}
    generator = torch.Generator().manual_seed(task)
    for name, layer in adapter.dual_mode_layers().items():
        if name.endswith("v_proj"):
            continue
        width = layer.in_features
        turn = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
        tokens = torch.randn(300, width, generator=generator) * decay ** torch.arange(width) @ turn
        names = (name, name.replace("k_proj", "v_proj")) if name.endswith("k_proj") else (name,)
        statistics.update(names, tokens)
        inputs[names] = tokens.double()
    return statistics, inputs


def test_three_tasks_are_those_of_the_formulas(tiny_clip):
    adapter = get_peft_model(tiny_clip(), DualModeLoraConfig(shared_rank=1, residual_rank=RANK - 1)).base_model
    strategy = make_strategy("inflora:energy=0.9,final_energy=0.99,tasks=2")
    literal: dict = {}
    memory, sides = None, set()
    for index, threshold in enumerate([0.9, 0.945, 0.99]):
        statistics, inputs = collected(adapter, index)
        task = NewTask(index, adapter, LearnerArguments(), memory, inputs=statistics)
        modes = strategy.plan(task)
        assert set(modes) == set(adapter.dual_mode_layers())
        for names, tokens in inputs.items():
            moment = tokens.T @ tokens / len(tokens)
            basis, side = literal.get(names, (torch.zeros(len(moment), 0).double(), OCCUPIED))
            inside = basis @ basis.T @ moment
            left, _, _ = torch.linalg.svd(moment - inside if side == OCCUPIED else inside)
            for name in names:
                found = torch.cat([modes[name].shared, modes[name].residual], dim=1)
                assert modes[name].shared.shape[1] == 1
                torch.testing.assert_close(found.T @ found, torch.eye(RANK) / 3, rtol=0, atol=1e-5)
                torch.testing.assert_close(3 * projector(found), projector(left[:, :RANK]), rtol=0, atol=1e-4)
                first = math.sqrt(3) * modes[name].shared[:, 0].double() @ left[:, 0]
                assert abs(float(first)) == pytest.approx(1, abs=1e-5)  # in descending order
            literal[names] = literal_dual_gpm(basis, side, moment, threshold)
        memory = strategy.remember(task, statistics)
        assert len(memory) == len(inputs)  # k and v share one entry
        kept = strategy.from_memory(memory)
        for names, (basis, side) in literal.items():
            assert kept[names[0]].side == kept[names[-1]].side == side
            torch.testing.assert_close(projector(kept[names[-1]].basis), projector(basis), rtol=0, atol=1e-4)
            sides.add(side)
    assert sides == {OCCUPIED, FREE}


def test_the_threshold_moves_to_lame_and_stays():
    strategy = make_strategy("inflora:energy=0.9,final_energy=1,tasks=4")
    assert [strategy.threshold(i) for i in (0, 1, 3, 4, 9)] == pytest.approx([0.9, 0.925, 0.975, 1, 1])


@pytest.mark.parametrize("spec", ["inflora:energy=1", "keeplora:eps_f=1"])
def test_a_full_memory_trains_nothing(spec, tiny_clip):
    adapter, strategy = get_peft_model(tiny_clip(), DualModeLoraConfig()).base_model, make_strategy(spec)
    memory = strategy.remember(NewTask(0, adapter, LearnerArguments()), collected(adapter, 0)[0])
    gradients = {n: torch.randn(m.out_features, m.in_features) for n, m in adapter.dual_mode_layers().items()}
    modes = strategy.plan(NewTask(1, adapter, LearnerArguments(), memory, gradients, collected(adapter, 1)[0]))
    assert not any(one.shared.any() or one.residual.any() for one in modes.values())
    adapter.begin_task(modes, orthonormal=strategy.orthonormal)
