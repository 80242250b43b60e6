import pytest
import reference
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
)
from dulbe_peft.allocation import allocate_modes
from dulbe_peft.checkpoint import CheckpointError
from dulbe_peft.demo import DigitImages, demo_model_folder
from dulbe_peft.sketch import extend, shrink, sketched_support
from dulbe_peft.statistics import FORMAT, SKETCH_FORMAT, OccupationStatistics

WIDTH, ROWS = 60, 16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def axes(count):
    return torch.eye(WIDTH)[torch.arange(count) % WIDTH]


STREAMS = {
    "noise": randn(400, WIDTH),
    "of low rank": randn(400, 9) @ randn(9, WIDTH, seed=1),
    "decaying": randn(400, WIDTH) * torch.logspace(0, -4, WIDTH),
    "around a mean": randn(400, WIDTH) + 10 * randn(1, WIDTH, seed=1),
    "every axis in turn": axes(400),
    # A truncated decomposition loses the rare direction of every chunk that is alone in it.
    "one rare direction": torch.cat([torch.cat([5 * axes(ROWS), axes(ROWS + 1)[-1:]]) for _ in range(24)]),
    "growing": randn(400, WIDTH) * torch.logspace(-2, 2, 400)[:, None],
    "zeros": torch.zeros(40, WIDTH),
    "fewer than rows": randn(5, WIDTH),
}


def check_bounds(factor, error, tokens):
    """0 <= S - F'F <= error, and error <= tail_k / (rows/2 - k) for every k, in exact arithmetic."""
    exact = reference.occupation(tokens)
    slack = 1e-5 * float(exact.trace()) + 1e-12
    gaps = torch.linalg.eigvalsh(exact - factor.double().T @ factor.double())
    assert gaps[0] >= -slack and gaps[-1] <= error + slack
    _, values = reference.support(exact, 1)
    for k in range(len(factor) // 2):
        assert error <= values[k:].sum() / (len(factor) // 2 - k) + slack


@pytest.mark.parametrize("size", [1, 2, ROWS])
@pytest.mark.parametrize("batch", [7, 40, 400])
@pytest.mark.parametrize("stream", STREAMS)
def test_the_bounds_hold(stream, batch, size):
    factor, error, tokens = None, 0.0, STREAMS[stream]
    for part in tokens.split(batch):
        factor, error = extend(factor, error, part, size, "X")
    assert factor.shape == (size, WIDTH) and factor.dtype == torch.float32
    check_bounds(factor, error, tokens)


def test_a_rare_direction_is_not_lost():
    tokens, factor, error = STREAMS["one rare direction"].clone(), None, 0.0
    tokens[ROWS :: ROWS + 1] *= 3
    for part in tokens.split(ROWS + 1):
        factor, error = extend(factor, error, part, ROWS, "X")
    direction = tokens[ROWS].double() / 3
    assert (factor.double() @ direction).square().sum() >= (tokens.double() @ direction).square().sum() - error - 1e-2


def test_what_fits_is_exact():
    tokens = STREAMS["of low rank"]
    factor, error = extend(None, 0.0, tokens, ROWS, "X")
    torch.testing.assert_close(factor.double().T @ factor.double(), reference.occupation(tokens), rtol=1e-4, atol=1e-2)
    assert error <= 1e-5 * float(tokens.square().sum())


def test_the_upper_half_is_not_shrunk():
    tokens = STREAMS["decaying"]
    factor, _ = shrink(tokens, ROWS, "X")
    _, values = reference.support(reference.occupation(tokens), 1)
    found = torch.linalg.svdvals(factor.double()).square()
    torch.testing.assert_close(found[: ROWS // 2], values[: ROWS // 2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[ROWS // 2 :], values[ROWS // 2 : ROWS] - values[ROWS], rtol=1e-2, atol=1e-3)


def test_the_support_of_a_sketch_is_that_of_its_product():
    factor, _ = shrink(STREAMS["decaying"], ROWS, "X")
    expected, _ = reference.support(factor.double().T @ factor.double(), 6)
    found = sketched_support(factor, 6, 4)
    assert found.shape == (WIDTH, 6) and found.dtype == torch.float32
    torch.testing.assert_close(found @ found.T, (expected @ expected.T).float(), rtol=0, atol=1e-5)
    assert sketched_support(factor, 50, 4).shape[1] <= ROWS
    assert sketched_support(factor, 6, WIDTH - 2).shape == (WIDTH, 2)
    assert sketched_support(torch.zeros(ROWS, WIDTH), 6, 4).shape == (WIDTH, 0)


# ---------------------------------------------------------------------- as occupation statistics


def sketched(*streams, rows=ROWS, batch=50):
    stats = OccupationStatistics(sketch_rows=rows)
    for tokens in streams:
        for part in tokens.split(batch):
            stats.update(("k", "v"), part)
            stats.update("small", part[:, :ROWS])
    return stats


def test_statistics_sketch_wide_matrices_alone():
    tokens = STREAMS["around a mean"]
    stats = sketched(tokens)
    assert stats["k"] is stats["v"] and stats["k"].shape == (ROWS, WIDTH)
    assert stats.nbytes == 4 * (ROWS * WIDTH + ROWS * ROWS)
    assert stats.errors == {"k": stats.errors["v"], "v": stats.errors["k"], "small": 0.0} and stats.errors["k"] > 0
    check_bounds(stats["k"], stats.errors["k"], tokens)
    torch.testing.assert_close(stats["small"].double(), reference.occupation(tokens[:, :ROWS]), rtol=1e-5, atol=1e-3)


def test_merged_sketches_keep_the_bounds():
    first, second = STREAMS["around a mean"], STREAMS["decaying"]
    stats, other = sketched(first), sketched(second)
    before = other["k"].clone()
    stats.merge(other)
    assert torch.equal(other["k"], before) and stats["k"] is stats["v"]
    check_bounds(stats["v"], stats.errors["v"], torch.cat([first, second]))
    assert stats.errors["k"] >= sketched(first).errors["k"] + other.errors["k"]
    for wrong in (OccupationStatistics(), OccupationStatistics(ROWS + 1)):
        with pytest.raises(ValueError, match="sketch_rows differ"):
            stats.merge(wrong)


def test_a_merge_that_fails_changes_nothing():
    stats, other = sketched(STREAMS["noise"]), sketched(STREAMS["noise"])
    other.update("w", randn(3, WIDTH))
    other._matrices["w"].fill_(float("inf"))
    before, errors = stats["k"].clone(), stats.errors
    with pytest.raises(ValueError, match="'w' holds NaN or infinity"):
        stats.merge(other)
    assert torch.equal(stats["k"], before) and stats.errors == errors and "w" not in stats


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_tokens_that_are_not_finite_are_refused(value):
    stats = sketched(STREAMS["noise"])
    before = stats["k"].clone()
    with pytest.raises(ValueError, match="'k' holds NaN or infinity"):
        stats.update(("k", "v"), torch.full((3, WIDTH), value))
    assert torch.equal(stats["k"], before)


def test_a_loaded_sketch_goes_on_bit_for_bit(tmp_path):
    first, second = STREAMS["around a mean"], STREAMS["noise"]
    whole, stats, path = sketched(first, second), sketched(first), tmp_path / "s.safetensors"
    stats.save(path)
    loaded = OccupationStatistics.load(path)
    assert loaded.sketch_rows == ROWS and loaded.groups == stats.groups and loaded.errors == stats.errors
    assert all(torch.equal(loaded[name], stats[name]) for name in stats) and loaded["k"] is loaded["v"]
    for part in second.split(50):
        loaded.update(("v", "k"), part)
        loaded.update("small", part[:, :ROWS])
    assert all(torch.equal(loaded[name], whole[name]) for name in whole) and loaded.errors == whole.errors
    loaded.save(path)
    content = path.read_bytes()
    whole.save(path)
    assert path.read_bytes() == content


def layout(errors='{"k": 0.5}', rows=ROWS, groups='[["k", "v"]]'):
    return {SKETCH_FORMAT: f'{{"groups": {groups}, "sketch_rows": {rows}, "errors": {errors}}}'}


@pytest.mark.parametrize(
    ("matrix", "metadata", "message"),
    [
        (randn(ROWS, WIDTH), {FORMAT: '[["k", "v"]]'}, "must be square"),
        (randn(ROWS, WIDTH), layout() | {FORMAT: '[["k", "v"]]'}, "format"),
        (randn(ROWS - 1, WIDTH), layout(), "must be square or of 16 rows"),
        (randn(WIDTH, ROWS), layout(), "must be square or of 16 rows"),
        (torch.eye(WIDTH), layout("{}"), "must be square or of 16 rows"),
        (randn(ROWS, WIDTH).double(), layout(), "float32"),
        (randn(ROWS, WIDTH), layout("{}"), "an error each"),
        (torch.eye(4), layout(), "an error each"),
        (-torch.eye(4), layout("{}"), "no sum of X'X"),
        (randn(ROWS, WIDTH), layout('{"k": -1.0}'), "numbers from 0 on"),
        (randn(ROWS, WIDTH), layout('{"k": NaN}'), "numbers from 0 on"),
        (randn(ROWS, WIDTH), layout('{"k": Infinity}'), "numbers from 0 on"),
        (randn(ROWS, WIDTH), layout('{"k": "0"}'), "numbers from 0 on"),
        (randn(ROWS, WIDTH), layout('{"k": 0.5, "q": 0.5}'), "errors of other layers"),
        (randn(ROWS, WIDTH), layout(rows="true"), "must have rows"),
        (randn(ROWS, WIDTH), layout(rows=0), "must have rows"),
        (randn(ROWS, WIDTH), layout("[]"), "damaged"),
        (randn(ROWS, WIDTH), layout(groups="[7]"), "damaged"),
        (randn(ROWS, WIDTH), {SKETCH_FORMAT: "[]"}, "damaged"),
        (randn(ROWS, WIDTH) * float("nan"), layout(), "NaN or infinity"),
    ],
)
def test_load_refuses_what_is_no_sketch(matrix, metadata, message, tmp_path):
    path = tmp_path / "s.safetensors"
    save_file({"k": matrix.contiguous()}, path, metadata)
    with pytest.raises(ValueError, match=message):
        OccupationStatistics.load(path)
    save_file({"k": randn(ROWS, WIDTH)}, path, layout())
    assert OccupationStatistics.load(path).errors["v"] == 0.5 and len(load_file(path)) == 1


def test_allocation_from_a_sketch_that_lost_nothing_is_the_exact_one():
    tokens, probe = STREAMS["of low rank"], {"k": randn(12, WIDTH, seed=2)}
    exact = OccupationStatistics()
    exact.update(("k", "v"), tokens)
    expected = allocate_modes(probe, exact, 1, 4, 12)["k"]
    found = allocate_modes(probe, sketched(tokens), 1, 4, 12)["k"]
    assert found.support_rank == expected.support_rank == 9
    torch.testing.assert_close(found.shared, expected.shared, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.residual, expected.residual, rtol=0, atol=1e-4)
    assert allocate_modes(probe, sketched(STREAMS["noise"]), 1, 4, 40)["k"].support_rank == ROWS


def test_vit_b16_takes_less_than_64_mebibytes():
    stats = OccupationStatistics(sketch_rows=256)
    for block in range(12):
        for name, width in {"k": 768, "fc1": 768, "fc2": 3072}.items():
            stats._matrices[f"{block}.{name}"] = torch.empty(256, width, device="meta")
    assert stats.nbytes / 2**20 == 54.0


def test_rows_of_a_sketch_are_positive():
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
    other_statistics = other.statistics
    with pytest.raises(CheckpointError, match="statistics of .* have shape"):
        other.restore(tmp_path / "one")
    assert other.statistics is other_statistics and not other.tasks
    resumed = make_learner("sketch")
    resumed.restore(tmp_path / "one")
    for learner in (whole, resumed):
        assert learner.statistics.sketch_rows == 16
        assert all(matrix.shape == (16, matrix.shape[1]) for matrix in learner.statistics.values())
        learner.learn_task(tasks[1].train, tasks[1].class_names)
    assert all(torch.equal(whole.statistics[name], resumed.statistics[name]) for name in whole.statistics)
    assert whole.statistics.errors == resumed.statistics.errors
    assert torch.equal(whole.head.state_dict()["visual_prototypes"], resumed.head.state_dict()["visual_prototypes"])
