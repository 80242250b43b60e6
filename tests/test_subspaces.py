"""The gradient-projection memories against literal loops with projectors and singular values."""

import torch
from safetensors.torch import load_file, save_file

from dulbe_peft.strategies import make_strategy
from dulbe_peft.strategies.projection_memory import (
    FREE,
    OCCUPIED,
    Subspace,
    directions_to_take,
    top_directions,
)

WIDTH = 12


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
    assert top_directions(Subspace(torch.zeros(WIDTH, 0)), line @ line.T, 4, "K").any(dim=0).sum() == 1


def test_a_memory_is_written_and_read(tmp_path):
    both = {
        ("a.k", "a.v"): Subspace(torch.linalg.qr(torch.randn(8, 3)).Q.double()),
        ("b",): Subspace(torch.zeros(6, 0), FREE),
    }
    strategy = make_strategy("inflora")
    save_file(strategy.to_memory(both), tmp_path / "memory.safetensors")
    loaded = load_file(tmp_path / "memory.safetensors")
    found = strategy.from_memory(loaded)
    assert {name: one.side for name, one in found.items()} == {"a.k": OCCUPIED, "a.v": OCCUPIED, "b": FREE}
    assert found["a.k"].basis is found["a.v"].basis
    torch.testing.assert_close(found["a.v"].basis.double(), both["a.k", "a.v"].basis, rtol=0, atol=1e-7)
