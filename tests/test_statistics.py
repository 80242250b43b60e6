"""Sums of inputs by layer, whole and as sketches of bounded size."""

import copy

import lives
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import randn
from safetensors.torch import load_file
from torch import nn

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.checkpoints import loading
from dulbe_peft.subspaces.allocation import historical_support
from dulbe_peft.subspaces.decompositions import cut
from dulbe_peft.subspaces.inputs import collect_statistics
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.folders import CheckpointError


class Block(nn.Module):
    """k, v and a two-layer MLP, as in a vision transformer's block."""

    def __init__(self, width=6):
        super().__init__()
        self.k, self.v = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden):
        inside = self.dropout(hidden)
        hidden = hidden + self.k(inside) * self.v(inside)
        return hidden + self.fc2(self.fc1(hidden).relu())


class Tower(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def dual_mode_layers(self):
        return {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def batches(count=3):
    return [randn(4, 5, 6, seed=seed) for seed in range(count)]


def run(model, batch):
    return model(batch)


@torch.no_grad()
def inputs_of(model, data):
    """What every layer reads, by a second, independent recording."""
    seen = {name: [] for name in model.dual_mode_layers()}
    twin = copy.deepcopy(model).eval()
    for name, layer in twin.dual_mode_layers().items():
        layer.register_forward_hook(lambda _m, args, _o, name=name: seen[name].append(args[0].clone()))
    for batch in data:
        twin(batch)
    return {name: torch.cat(tensors) for name, tensors in seen.items()}


@pytest.mark.parametrize("width", [4, 65, 600])
def test_layers_updated_together_share_one_matrix(width):
    stats, first, second = OccupationStatistics(), randn(50, width), randn(2, 30, width, seed=1).half()
    stats.update(("k", "v"), first)
    other = OccupationStatistics()
    other.update(["v", "k"], second)
    other.update("fc1", first)
    stats.merge(other)
    stats["fc1"].zero_()  # merged sums are copies
    assert torch.equal(other["fc1"], other["fc1"].T) and other["fc1"].any()
    assert stats["k"] is stats["v"] and stats["k"] is not stats["fc1"]
    assert stats.groups == (("k", "v"), ("fc1",)) and list(stats) == ["k", "v", "fc1"] and "b" not in stats
    assert "3 layers, 2 matrices" in repr(stats) and stats.nbytes == 2 * 4 * width**2
    assert torch.equal(stats["k"], stats["k"].T)
    expected = reference.occupation(first) + reference.occupation(second)
    torch.testing.assert_close(stats["v"].double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("names", "tokens", "message"),
    [
        ("fc1", randn(3, 4), "share one matrix"),
        (("k", "v"), randn(3, 5), "reads 5 features, but 4 so far"),
        (("k", "v"), torch.full((3, 4), float("nan")), "'k' holds NaN or infinity"),
        ("q", torch.full((3, 4), 1e30), "'q' holds NaN or infinity, or its squares overflow"),
        ("q", randn(0, 4), "not empty"),
    ],
)
def test_update_and_merge_refuse_and_change_nothing(names, tokens, message):
    stats, other = OccupationStatistics(), OccupationStatistics()
    stats.update(("k", "v"), randn(7, 4))
    stats.update(("fc1", "w"), randn(7, 4))
    before = {name: matrix.clone() for name, matrix in stats.items()}
    acts = [lambda: stats.update(names, tokens)]
    if message == "share one matrix":
        other.update("new", randn(7, 4))
        other.update(names, tokens)
        acts.append(lambda: stats.merge(other))
    for act in acts:
        with pytest.raises(ValueError) as raised:
            act()
        assert message in str(raised.value)
    assert list(stats) == list(before) and all(torch.equal(stats[name], before[name]) for name in before)


def test_collect_equals_what_the_layers_read():
    model, stats, modes = Tower(), OccupationStatistics(), []
    model.train()
    model.blocks[1].eval()

    def forward(model, batch):
        modes.append((model.training, torch.is_grad_enabled()))
        model(batch)

    assert collect_statistics(model, iter(batches()), forward, into=stats) is stats
    assert set(modes) == {(False, False)}
    assert model.training and model.blocks[0].dropout.training and not model.blocks[1].training
    assert not any(module._forward_pre_hooks for module in model.modules())
    for name, tokens in inputs_of(model, batches()).items():
        torch.testing.assert_close(stats[name].double(), reference.occupation(tokens), rtol=1e-4, atol=1e-4)
    assert list(stats) == list(model.dual_mode_layers()) and len(stats.groups) == 6
    assert all(stats[f"blocks.{block}.k"] is stats[f"blocks.{block}.v"] for block in (0, 1))
    once = {name: matrix.clone() for name, matrix in stats.items()}
    collect_statistics(model, batches(), run, into=stats)
    for name, matrix in stats.items():
        assert torch.equal(matrix, matrix.T)
        torch.testing.assert_close(matrix, 2 * once[name], rtol=1e-5, atol=1e-5)


class Separate(Tower):
    """Every layer reads a tensor of its own, often at the address of one that is gone."""

    def forward(self, hidden):
        for layer in self.dual_mode_layers().values():
            layer(hidden[..., :1].expand(*hidden.shape[:-1], layer.in_features).clone())


def test_sharing_is_by_identity_and_not_by_a_recycled_address():
    stats = collect_statistics(Separate(), batches(), run, into=OccupationStatistics())
    assert len(stats.groups) == 8


@pytest.mark.parametrize(("tokens", "rows"), [("cls", slice(0, 1)), ("patch", slice(1, None))])
def test_tokens_can_be_chosen(tokens, rows):
    model, flat = Tower(), [randn(5, 6)]
    stats = collect_statistics(model, batches(), run, into=OccupationStatistics(), tokens=tokens)
    for name, read in inputs_of(model, batches()).items():
        torch.testing.assert_close(stats[name].double(), reference.occupation(read[:, rows]), rtol=1e-4, atol=1e-4)
    if tokens == "patch":
        with pytest.raises(ValueError, match="'blocks.0.k' reads one token"):
            collect_statistics(model, flat, run, into=OccupationStatistics(), tokens=tokens)
    else:  # a layer of one token an image has only that one
        stats = collect_statistics(model, flat, run, into=OccupationStatistics(), tokens=tokens)
        torch.testing.assert_close(stats["blocks.0.k"].double(), reference.occupation(flat[0]), rtol=1e-5, atol=1e-5)


def failing(model, batch):
    model(batch)
    if batch[0, 0, 0] == batches()[2][0, 0, 0]:
        raise RuntimeError("the loader failed")


def no_second_block(model, batch):
    model.blocks[0](batch)


def loses_sharing(model, batch):
    block = model.blocks[0]
    shared = batch[0, 0, 0] == batches()[0][0, 0, 0]
    block.k(batch)
    block.v(batch if shared else batch.clone())


@pytest.mark.parametrize(
    ("data", "forward", "kwargs", "error", "message"),
    [
        (batches(), failing, {}, RuntimeError, "the loader failed"),
        ([], run, {}, ValueError, "batches is empty"),
        ([*batches(1), batches(1)[0] * float("nan")], run, {}, ValueError, "'blocks.0.k' holds NaN or infinity"),
        (batches(), no_second_block, {}, ValueError, "never reached layer 'blocks.1.k'"),
        (batches(), loses_sharing, {}, ValueError, "shared their input tensor before"),
        (batches(), run, {"tokens": "some"}, ValueError, "'some'"),
    ],
)
def test_an_error_leaves_statistics_and_model_as_they_were(data, forward, kwargs, error, message):
    model, stats = Tower(), OccupationStatistics()
    collect_statistics(model, batches(), run, into=stats)
    before = {name: matrix.clone() for name, matrix in stats.items()}
    model.train()
    with pytest.raises(error, match=message):
        collect_statistics(model, data, forward, into=stats, **kwargs)
    assert all(torch.equal(stats[name], before[name]) for name in before)
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())


def test_save_and_load_keep_values_and_sharing(tmp_path):
    stats, path = OccupationStatistics(), tmp_path / "statistics.safetensors"
    stats.update(("k", "v"), randn(7, 4))
    stats.update("fc", randn(7, 3))
    stats.save(path)
    loaded = OccupationStatistics.load(path)
    assert loaded.groups == stats.groups and loaded["k"] is loaded["v"] and loaded.nbytes == stats.nbytes
    assert all(torch.equal(loaded[name], stats[name]) for name in stats)
    assert len(load_file(path)) == 2 and OccupationStatistics.load(path, "meta")["fc"].is_meta
    loaded.update(("k", "v"), randn(7, 4))
    assert torch.equal(loaded["v"], 2 * stats["k"])
    OccupationStatistics().save(path)
    assert len(OccupationStatistics.load(path)) == 0


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
