import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from sklearn.datasets import load_digits

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
)
from dulbe_peft.checkpoints import loading
from dulbe_peft.demo import DigitImages, demo_model_folder
from dulbe_peft.subspaces.allocation import allocate_modes
from dulbe_peft.subspaces.decompositions import cut
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.subspaces.support import historical_support
from dulbe_peft.utils.folders import CheckpointError

WIDTH, ROWS = 60, 16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TASKS = {
    "noise": randn(400, WIDTH),
    "of low rank": randn(400, 9) @ randn(9, WIDTH, seed=1),
    "decaying": randn(400, WIDTH) * torch.logspace(0, -4, WIDTH),
    "around a mean": randn(400, WIDTH) + 10 * randn(1, WIDTH, seed=1),
    "every axis once": torch.eye(WIDTH),
    "zeros": torch.zeros(40, WIDTH),
    "fewer than rows": randn(5, WIDTH),
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


# ---------------------------------------------------------------------- the cut and its bound


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


@pytest.mark.parametrize("name", TASKS)
def test_one_task_is_cut_to_its_best_approximation(name):
    total = reference.occupation(TASKS[name])
    factor, lost = cut(total, ROWS, "S")
    _, values = reference.support(total, 1)
    rest = torch.cat([values[ROWS:], torch.zeros(ROWS).double()])  # no rank-16 matrix leaves a smaller rest
    left = torch.linalg.eigvalsh(total - factor.T @ factor).flip(0)
    torch.testing.assert_close(left, rest, rtol=0, atol=1e-9 * (1 + float(values[0])))
    assert lost == pytest.approx(max(0.0, float(values[ROWS])), abs=1e-9 * (1 + float(values[0])))


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


# ---------------------------------------------------------------------- as occupation statistics


def test_only_wide_matrices_are_cut():
    tokens = TASKS["around a mean"]
    stats = sketched(tokens)
    assert stats["k"] is stats["v"] and stats["k"].shape == (ROWS, WIDTH)
    assert stats.nbytes == 4 * (ROWS * WIDTH + ROWS * ROWS)
    assert stats.errors == {"k": stats.errors["v"], "v": stats.errors["k"], "small": 0.0} and stats.errors["k"] > 0
    assert torch.equal(stats["small"], exact(tokens)["small"])


def test_an_update_is_cut_as_a_merge_is():
    stats, tasks = OccupationStatistics(sketch_rows=ROWS), (TASKS["around a mean"], TASKS["noise"])
    for tokens in tasks:
        stats.update(("k", "v"), tokens)
    expected = sketched(*tasks)
    assert torch.equal(stats["v"], expected["v"]) and stats.errors["v"] == expected.errors["v"]


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


def test_a_merge_that_fails_changes_nothing():
    stats, other = sketched(TASKS["noise"]), exact(TASKS["noise"])
    other.update("w", randn(3, WIDTH))
    other._matrices["w"].fill_(float("inf"))
    before, errors = stats["k"].clone(), stats.errors
    with pytest.raises(ValueError, match="'w' holds NaN or infinity"):
        stats.merge(other)
    assert torch.equal(stats["k"], before) and stats.errors == errors and "w" not in stats


def test_a_sketch_is_not_summed_over_processes():
    with pytest.raises(ValueError, match="sketch_rows 16 cannot be summed over processes"):
        sketched(TASKS["noise"]).sum_over_processes(torch.device("cpu"))


def test_a_loaded_sketch_goes_on_bit_for_bit(tmp_path):
    first, second = TASKS["around a mean"], TASKS["noise"]
    whole, stats, path = sketched(first, second), sketched(first), tmp_path / "s.safetensors"
    stats.save(path)
    loaded = OccupationStatistics.load(path)
    assert loaded.sketch_rows == ROWS and loaded.groups == stats.groups and loaded.errors == stats.errors
    assert all(torch.equal(loaded[name], stats[name]) for name in stats) and loaded["k"] is loaded["v"]
    loaded.merge(exact(second))
    assert all(torch.equal(loaded[name], whole[name]) for name in whole) and loaded.errors == whole.errors
    loaded.save(path)
    content = path.read_bytes()
    whole.save(path)
    assert path.read_bytes() == content


def test_allocation_from_a_sketch_that_lost_nothing_is_the_exact_one():
    tokens, probe = TASKS["of low rank"], {"k": randn(12, WIDTH, seed=2)}
    expected = allocate_modes(probe, exact(tokens), 1, 4, 12)["k"]
    found = allocate_modes(probe, sketched(tokens), 1, 4, 12)["k"]
    assert found.support_rank == expected.support_rank == 9
    torch.testing.assert_close(found.shared, expected.shared, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.residual, expected.residual, rtol=0, atol=1e-4)
    assert allocate_modes(probe, sketched(TASKS["noise"]), 1, 4, 40)["k"].support_rank == ROWS


def test_vit_b16_takes_less_than_64_mebibytes():
    stats = OccupationStatistics(sketch_rows=256)
    for block in range(12):
        for name, width in {"k": 768, "fc1": 768, "fc2": 3072}.items():
            stats._matrices[f"{block}.{name}"] = torch.empty(256, width, device="meta")
    assert stats.nbytes / 2**20 == 54.0
    with pytest.raises(ValueError, match="sketch_rows must be at least 1 or None, got 0"):
        OccupationStatistics(0)


# ---------------------------------------------------------------------- in a learner


def make_learner(statistics):
    torch.manual_seed(0)
    clip, processor = load_clip(demo_model_folder())
    model = get_peft_model(clip, DualModeLoraConfig(residual_rank=2, support_rank=8))
    fields = {"epochs": 1, "batch_size": 8, "eval_batch_size": 16, "device": "cpu", "progress": False}
    return ClassIncrementalLearner(model, processor, args=LearnerArguments(**fields, statistics=statistics))


def test_a_learner_keeps_sketches_saves_them_and_goes_on_bit_for_bit(tmp_path):
    data = load_digits()
    rows = [row for digit in range(10) for row in (data.target == digit).nonzero()[0][:6]]
    digits = DigitImages(data.images[rows], data.target[rows])
    tasks = class_incremental_tasks(digits, digits, increment=2)[:2]
    whole, other = make_learner("sketch"), make_learner("exact")
    whole.learn_task(tasks[0].train, tasks[0].class_names)
    whole.save_pretrained(tmp_path / "one")
    with pytest.raises(CheckpointError, match="of the kind 'sketch', the learner's settings: 'exact'"):
        loading.restore(other.state, tmp_path / "one")
    assert other.memory is None and not other.tasks
    other.learn_task(tasks[0].train, tasks[0].class_names)
    for name, matrix in other.statistics.items():
        factor, _ = cut(matrix.double(), 16, name)
        torch.testing.assert_close(whole.statistics[name], factor.float(), rtol=0, atol=1e-6 * float(matrix.max()))
    resumed = make_learner("sketch")
    resumed.state = loading.restore(resumed.state, tmp_path / "one")
    for learner in (whole, resumed):
        assert learner.statistics.sketch_rows == 16
        assert all(matrix.shape == (16, matrix.shape[1]) for matrix in learner.statistics.values())
        learner.learn_task(tasks[1].train, tasks[1].class_names)
    assert all(torch.equal(whole.statistics[name], resumed.statistics[name]) for name in whole.statistics)
    assert whole.statistics.errors == resumed.statistics.errors
    assert torch.equal(whole.head.state_dict()["visual_prototypes"], resumed.head.state_dict()["visual_prototypes"])
