import copy

import lives
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import randn

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.checkpoints import loading
from dulbe_peft.subspaces.allocation import historical_support
from dulbe_peft.subspaces.decompositions import cut
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.folders import CheckpointError

WIDTH, ROWS = 60, 16


TASKS = {
    "noise": randn(400, WIDTH),
    "of low rank": randn(400, 9) @ randn(9, WIDTH, seed=1),
    "decaying": randn(400, WIDTH) * torch.logspace(0, -4, WIDTH),
    "around a mean": randn(400, WIDTH) + 10 * randn(1, WIDTH, seed=1),
}


def exact(tokens):
    """The exact statistics of one task."""
    stats = OccupationStatistics()
    stats.update(("k", "v"), tokens)
    stats.update("small", tokens[:, :ROWS])
    return stats


def sketched(*tasks):
    stats = OccupationStatistics(sketch_rows=ROWS)
    for tokens in tasks:
        stats.merge(exact(tokens))
    return stats


def check_bound(stats, *tasks):
    """0 <= x'(S - F'F)x <= error for every unit x, against a literal sum in float64, up to rounding in float32."""
    total, factor = reference.occupation(torch.cat(tasks)), stats["k"].double()
    slack = 2e-6 * float(total.trace()) + 1e-12
    lost = torch.linalg.eigvalsh(total - factor.T @ factor)
    assert -slack <= lost[0] and lost[-1] <= stats.errors["k"] + slack
    return slack


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=5),
    rows=st.integers(1, 19),
    power=st.floats(0.0, 3.0),
    scale=st.floats(-2.0, 2.0),
)
def test_the_bound_holds_for_any_stream_of_tasks(seed, sizes, rows, power, scale):
    width = 20
    spectrum = torch.arange(1, width + 1) ** -power
    tasks = [
        10 ** (scale * number) * randn(size, width, seed=seed + number) * spectrum.roll(number)
        for number, size in enumerate(sizes)
    ]
    stats = OccupationStatistics(sketch_rows=rows)
    for tokens in tasks:
        added = OccupationStatistics()
        added.update("k", tokens)
        stats.merge(added)
    assert stats["k"].shape == (rows, width) and stats["k"].dtype == torch.float32
    slack = check_bound(stats, *tasks)
    kept, error = reference.cut_sum(tasks, rows)
    assert stats.errors["k"] == pytest.approx(error, rel=1e-4, abs=slack)
    assert float(stats["k"].double().square().sum()) == pytest.approx(float(kept.trace()), rel=1e-5, abs=slack)
    # No factor of so many rows can lack less.
    _, values = reference.support(reference.occupation(torch.cat(tasks)), 1)
    assert stats.errors["k"] >= values[rows] - slack


def test_the_support_of_a_factor_is_that_of_its_product():
    factor = cut(reference.occupation(TASKS["decaying"]), ROWS, "S")[0].float()
    for rows in (factor, torch.linalg.qr(randn(ROWS, ROWS)).Q @ factor):  # earlier sketches are not always orthogonal
        expected, _ = reference.support(rows.double().T @ rows.double(), 6)
        found = historical_support(rows, 6, 4)
        assert found.shape == (WIDTH, 6) and found.dtype == torch.float32
        torch.testing.assert_close((found @ found.T).double(), expected @ expected.T, rtol=0, atol=1e-6)
    assert historical_support(factor, 50, 4).shape[1] <= ROWS
    assert historical_support(factor, 6, WIDTH - 2).shape == (WIDTH, 2)
    assert historical_support(torch.zeros(ROWS, WIDTH), 6, 4).shape == (WIDTH, 0)


def test_only_wide_matrices_are_cut_and_an_update_is_cut_as_a_merge_is():
    tokens = TASKS["around a mean"]
    stats = sketched(tokens)
    assert stats["k"] is stats["v"] and stats["k"].shape == (ROWS, WIDTH)
    assert stats.nbytes == 4 * (ROWS * WIDTH + ROWS * ROWS)
    assert stats.errors == {"k": stats.errors["v"], "v": stats.errors["k"], "small": 0.0} and stats.errors["k"] > 0
    assert torch.equal(stats["small"], exact(tokens)["small"])
    updated = OccupationStatistics(sketch_rows=ROWS)
    updated.update(("k", "v"), tokens)
    assert torch.equal(stats["v"], updated["v"]) and stats.errors["v"] == updated.errors["v"]


def test_merged_sketches_keep_the_bound():
    first, second = TASKS["around a mean"], TASKS["decaying"]
    stats, other = sketched(first), OccupationStatistics(ROWS)
    other.update(("v", "k"), second)  # the other order: errors are kept by the first name
    before, stacked = other["k"].clone(), torch.cat([stats["k"], other["k"]]).double()
    stats.merge(other)
    assert torch.equal(other["k"], before) and stats["k"] is stats["v"]
    check_bound(stats, first, second)
    errors = sketched(first).errors["k"], other.errors["k"], float(torch.linalg.svdvals(stacked)[ROWS] ** 2)
    assert min(errors) > 0 and stats.errors["v"] == pytest.approx(sum(errors), rel=1e-6)
    empty = OccupationStatistics(ROWS)
    empty.merge(other)
    assert torch.equal(empty["k"], before) and empty["k"] is not other["k"] and empty.errors == other.errors
    with pytest.raises(ValueError, match="sketch_rows differ: 17 cannot be added to 16"):
        stats.merge(OccupationStatistics(ROWS + 1))
    with pytest.raises(ValueError, match="sketch_rows differ: 16 cannot be added to None"):
        exact(first).merge(stats)


def test_a_learner_keeps_sketches_saves_them_and_goes_on_bit_for_bit(tmp_path):
    whole, other = (lives.tiny_learner(statistics=kind) for kind in ("sketch", "exact"))
    for learner in (whole, other):
        learner.state.model.active_peft_config.support_rank = 3
    lives.learn(0)(whole)
    whole.save_pretrained(tmp_path / "one")
    with pytest.raises(CheckpointError, match="of the kind 'sketch', the learner's settings: 'exact'"):
        loading.restore(other.state, tmp_path / "one")
    assert other.memory is None and not other.tasks
    lives.learn(0)(other)
    for name, matrix in other.memory.items():
        factor, _ = cut(matrix.double(), len(whole.memory[name]), name)
        torch.testing.assert_close(whole.memory[name], factor.float(), rtol=0, atol=1e-6 * float(matrix.max()))
    resumed = ClassIncrementalLearner.from_pretrained(tmp_path / "one", base_model=copy.deepcopy(lives.tiny_base()[0]))
    for learner in (whole, resumed):
        assert all(len(matrix) == learner.memory.sketch_rows for matrix in learner.memory.values())
        lives.learn(1)(learner)
    assert all(torch.equal(whole.memory[name], resumed.memory[name]) for name in whole.memory)
    assert whole.memory.errors == resumed.memory.errors
