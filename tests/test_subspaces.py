"""The gradient-projection memories against literal loops with projectors and singular values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from dulbe_peft import OccupationStatistics
from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.projection_memory import (
    FREE,
    OCCUPIED,
    Subspace,
    directions_to_take,
    gpm,
    top_directions,
)

WIDTH = 12
dual_gpm = partial(gpm, dual=True)


def tokens(task, decay=0.75):
    """Inputs whose spectrum decays, in somewhat other directions for every task."""
    generator = torch.Generator().manual_seed(task)
    noise = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.eye(WIDTH, dtype=torch.float64) + 0.1 * noise).Q
    scales = decay ** torch.arange(WIDTH, dtype=torch.float64)
    return torch.randn(200, WIDTH, generator=generator, dtype=torch.float64) * scales @ turn


def projector(basis):
    basis = basis.double()
    return basis @ basis.T


def occupied_projector(subspace):
    inside = projector(subspace.basis)
    return inside if subspace.side == OCCUPIED else torch.eye(len(inside), dtype=torch.float64) - inside


def literal_dual_gpm(basis, side, moment, threshold):
    """InfLoRA's memory as it is published, but started in the mode "remove"; `moment` is C."""
    width = len(moment)
    total = torch.linalg.svdvals(moment).square().sum()
    if side == OCCUPIED:
        rest = moment - basis @ basis.T @ moment
        left, scales, _ = torch.linalg.svd(rest)
        kept = (total - scales.square().sum()) / total
        count = 0
        while kept < threshold:
            kept = kept + scales[count] ** 2 / total
            count += 1
        basis = torch.cat([basis, left[:, :count]], dim=1)
    else:
        rest = basis @ basis.T @ moment
        left, scales, _ = torch.linalg.svd(rest)
        free = scales.square().sum() / total
        count = 0
        while free >= 1 - threshold:
            free = free - scales[count] ** 2 / total
            count += 1
        taken = left[:, :count]
        shrunk, _, _ = torch.linalg.svd(basis - taken @ taken.T @ basis, full_matrices=False)
        basis = shrunk[:, : basis.shape[1] - count]
    if side == OCCUPIED and basis.shape[1] > width / 2:
        every, _, _ = torch.linalg.svd(basis)
        return every[:, basis.shape[1] :], FREE
    return basis, side


def test_dual_gpm_is_the_literal_loop_and_flips():
    literal, side = torch.zeros(WIDTH, 0, dtype=torch.float64), OCCUPIED
    memory, sides = Subspace.unoccupied(WIDTH), []
    for task, share in enumerate([0.95, 0.97, 0.98, 0.99, 0.995]):
        inputs = tokens(task)
        moment = inputs.T @ inputs / len(inputs)
        literal, side = literal_dual_gpm(literal, side, moment, share)
        # The sum of x'x instead of its mean must not matter.
        memory = dual_gpm(memory, (inputs.T @ inputs) @ (inputs.T @ inputs), share, "C")
        assert memory.side == side and memory.basis.shape == literal.shape
        torch.testing.assert_close(projector(memory.basis), projector(literal))
        assert memory.basis.shape[1] <= WIDTH / 2
        sides.append(side)
    assert sides[0] == OCCUPIED and sides[-1] == FREE  # both branches ran
    assert 0 < memory.basis.shape[1] < WIDTH / 2 - 1  # and the second one shrank the free directions


def test_gpm_is_the_literal_loop_and_dual_gpm_keeps_the_same_directions():
    literal = torch.zeros(WIDTH, 0, dtype=torch.float64)
    memory = dual = Subspace.unoccupied(WIDTH)
    for task in range(3):
        inputs = tokens(task)
        outside = torch.eye(WIDTH, dtype=torch.float64) - literal @ literal.T
        _, scales, right = torch.linalg.svd(inputs @ outside, full_matrices=False)
        total = inputs.square().sum()
        kept, count = (total - scales.square().sum()) / total, 0
        while kept < 0.97:
            kept = kept + scales[count] ** 2 / total
            count += 1
        literal = torch.cat([literal, right[:count].T], dim=1)
        memory = gpm(memory, inputs.T @ inputs, 0.97, "X'X")
        dual = dual_gpm(dual, inputs.T @ inputs, 0.97, "X'X")
        assert memory.side == OCCUPIED and memory.basis.shape == literal.shape
        torch.testing.assert_close(projector(memory.basis), projector(literal))
        torch.testing.assert_close(occupied_projector(dual), projector(literal))
        torch.testing.assert_close(projector(memory.free_basis()), torch.eye(WIDTH).double() - projector(literal))
    assert dual.side == FREE


def test_the_crossing_direction_is_taken():
    # Half of the total is occupied; 0.3 + 0.15 + 0.05 of it is free.
    energies = torch.tensor([6.0, 3.0, 1.0, 0.0, -1e-9], dtype=torch.float64)
    shares = [0.0, 0.5, 0.51, 0.8, 0.81, 0.95, 0.96, 1.0]
    assert [directions_to_take(energies, 20.0, share) for share in shares] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert directions_to_take(torch.zeros(3), 0.0, 1.0) == 0


def test_top_directions_stay_in_the_free_space_and_zeros_stand_for_the_rest():
    occupied = torch.linalg.qr(torch.randn(WIDTH, WIDTH - 2, dtype=torch.float64)).Q
    basis = top_directions(Subspace(occupied), tokens(0).T @ tokens(0), 4, "K")
    assert basis.shape == (WIDTH, 4) and (occupied.T @ basis).abs().max() < 1e-12
    torch.testing.assert_close(basis.T @ basis, torch.diag(torch.tensor([1.0, 1, 0, 0]).double()))
    line = torch.randn(WIDTH, 1, dtype=torch.float64)  # a task that uses one direction determines one column
    assert top_directions(Subspace.unoccupied(WIDTH), line @ line.T, 4, "K").any(dim=0).sum() == 1


def test_a_memory_is_written_and_read_and_another_one_is_refused(tmp_path):
    both = {
        ("a.k", "a.v"): Subspace(torch.linalg.qr(torch.randn(8, 3)).Q.double()),
        ("b",): Subspace(torch.zeros(6, 0), FREE),
    }
    strategy, widths = make_strategy("inflora"), {"a.k": 8, "a.v": 8, "b": 6}
    save_file(strategy.to_memory(both), tmp_path / "memory.safetensors")
    loaded = load_file(tmp_path / "memory.safetensors")
    strategy.check_memory(loaded, widths)
    found = strategy.from_memory(loaded)
    assert {name: one.side for name, one in found.items()} == {"a.k": OCCUPIED, "a.v": OCCUPIED, "b": FREE}
    assert found["a.k"].basis is found["a.v"].basis
    torch.testing.assert_close(found["a.v"].basis.double(), both["a.k", "a.v"].basis, rtol=0, atol=1e-7)
    good, strategy, statistics = torch.eye(8)[:, :3].contiguous(), make_strategy("keeplora"), OccupationStatistics()
    for memory in (None, statistics, {"occupied:a": good}):
        strategy.check_memory(memory, {"a": 8})
    for memory in ({"a": good}, {"occupied:c": good}, {"occupied:a,b": good}):
        with pytest.raises(ValueError, match="keeps occupied:LAYER,LAYER or free:LAYER,LAYER for all 1 layers"):
            strategy.check_memory(memory, {"a": 8})
    for wrong in (good[:7], torch.ones(8, 9), good.double(), good[0]):
        with pytest.raises(ValueError, match=r"expected \(8, at most 8\), float32"):
            strategy.check_memory({"occupied:a": wrong}, {"a": 8})
