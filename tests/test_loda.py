"""LoDA: its two pairs of directions against literal solutions, its recalibration against least squares."""

import pytest
import scipy.linalg
import torch
from stepping import adapted, begin, end, new_task, train, update

from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.loda import general_pair, isolated_pair, recalibration
from dulbe_peft.strategies.occupation_memory import old_statistic
from dulbe_peft.subspaces.occupation import OccupationStatistics

WIDTH = 10


def inputs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(WIDTH, dtype=torch.float64, generator=generator) ** 2
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator) * scales


def projector(basis):
    return basis @ basis.T


def test_the_general_pair_is_the_top_of_the_sum_and_is_completed_where_that_is_empty():
    moment = inputs(40, 0).T @ inputs(40, 0)
    _, vectors = torch.linalg.eigh(moment)
    torch.testing.assert_close(projector(general_pair(moment, 3)), projector(vectors[:, -3:]), rtol=0, atol=1e-8)
    few = torch.zeros(WIDTH, WIDTH).double()
    few[4, 4] = 2.0
    basis = general_pair(few, 3)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3).double(), rtol=0, atol=1e-10)
    assert basis[4].abs().max() == 1


def test_statistics_with_rounding_below_zero_are_taken_and_others_refused():
    old = inputs(3, 0).T @ inputs(3, 0)  # of rank 3
    new = inputs(30, 1).T @ inputs(30, 1)
    slightly = old - 1e-6 * float(old.trace()) * torch.eye(WIDTH).double()
    assert torch.isfinite(isolated_pair(slightly, new, 3, ridge=1e-9)).all()
    with pytest.raises(ValueError, match="positive semi-definite"):
        isolated_pair(-old, new, 3, ridge=1e-3)


def test_recalibration_solves_the_least_squares_problem_of_old_and_new_inputs():
    old, new, up = inputs(40, 0), inputs(25, 1), torch.randn(6, 3).double()
    basis = general_pair(old.T @ old + new.T @ new, 3)
    # min over C of |C P' X_old'|^2 + |(C - B) P' X_t'|^2, row by row: stacked inputs and the outputs wanted of them.
    stacked = torch.cat([old @ basis, new @ basis])
    wanted = torch.cat([torch.zeros(40, 6).double(), new @ basis @ up.T])
    literal = torch.linalg.lstsq(stacked, wanted).solution.T
    ours = up @ recalibration(basis, old.T @ old, new.T @ new)
    torch.testing.assert_close(ours, literal, rtol=1e-8, atol=1e-10)
    shares = torch.linalg.eigvals(recalibration(basis, old.T @ old, new.T @ new)).real
    assert ((shares > 0) & (shares < 1)).all()
    nothing_old = recalibration(basis, torch.zeros(WIDTH, WIDTH).double(), new.T @ new)
    torch.testing.assert_close(nothing_old, torch.eye(3).double(), rtol=0, atol=1e-8)


def test_three_tasks_plan_recalibrate_and_sum_up_what_they_measured(tiny_clip):
    strategy, adapter, memory = make_strategy("loda:ridge=0.01"), adapted(tiny_clip()), None
    name = "vision_model.encoder.layers.1.mlp.fc1"
    layer, old = adapter.dual_mode_layers()[name], torch.zeros(32, 32).double()
    for index in range(3):
        task = new_task(adapter, index, memory)
        begin(strategy, task)
        new = task.inputs[name].double()
        basis = layer.dulbe_P["default"].double()
        if index == 0:
            _, vectors = torch.linalg.eigh(new)
            literal = vectors.flip(1)[:, :1], vectors.flip(1)[:, 1:3]
        else:
            _, vectors = torch.linalg.eigh(old + new)
            ridge = 0.01 * old.trace() / 32 * torch.eye(32).double()
            _, general = scipy.linalg.eigh(new.numpy(), (old + ridge).numpy())
            isolated = torch.from_numpy(general[:, ::-1][:, :2].copy())
            literal = vectors[:, -1:], torch.linalg.qr(isolated).Q
        torch.testing.assert_close(projector(basis[:, :1]), projector(literal[0]), rtol=0, atol=1e-4)
        torch.testing.assert_close(projector(basis[:, 1:]), projector(literal[1]), rtol=0, atol=1e-3)
        train(strategy, task)
        before, up = update(layer), layer.current_up("default").double()
        memory = end(strategy, task)
        assert up.norm() > 1e-3
        share = 1.0
        if index:  # one general direction p: it keeps p'S_t p / p'(S_old + S_t)p of its update
            p = basis[:, 0]
            share = float(p @ new @ p / (p @ (old + new) @ p))
            assert 0.01 < share < 0.99
        expected = before - (1 - share) * torch.outer(up[:, 0], basis[:, 0])
        torch.testing.assert_close(update(layer), expected, rtol=1e-5, atol=1e-6)
        old = old + new
        torch.testing.assert_close(memory[name].double(), old, rtol=1e-5, atol=1e-3)


def test_a_sketch_is_read_as_the_matrix_it_stands_for():
    tokens = inputs(50, 0).float()
    tokens[:, :2] *= 30
    sketch = OccupationStatistics(sketch_rows=4)
    sketch.update("k", tokens)
    assert sketch["k"].shape == (4, WIDTH)
    exact = tokens.double().T @ tokens.double()
    assert (old_statistic(new_task(None, 1, sketch), "k") - exact).norm() < 0.1 * exact.norm()
    assert old_statistic(new_task(None), "k") is None
