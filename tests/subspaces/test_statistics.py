"""Sums of X'X over the inputs of each layer."""

import copy

import pytest
import reference
import torch
from reference import randn
from safetensors.torch import load_file
from torch import nn

from dulbe_peft.subspaces.inputs import add_inputs, collect_statistics
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.tensors import read_tensors, write_tensors


class Block(nn.Module):
    """k, v and a two-layer MLP, as in a vision transformer's block."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.k, self.v = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.norm = nn.Dropout(0.5), nn.LayerNorm(width)

    def dual_mode_layers(self):
        return {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}

    def forward(self, hidden):
        inside = self.dropout(hidden)
        hidden = hidden + self.k(inside) * self.v(inside)
        return self.norm(hidden + self.fc2(self.fc1(hidden).relu()))


def batches(count=3):
    return [randn(4, 5, 6, seed=seed) for seed in range(count)]


def run(model, batch):
    return model(batch)


@torch.no_grad()
def inputs_of(model, data):
    """Record the inputs of every layer independently of the library."""
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
        (("k", "v"), randn(3, 5), "reads 5 features, but has read 4 so far"),
        (("k", "v"), torch.full((3, 4), float("nan")), "'k' holds NaN or infinity"),
        ("q", torch.full((3, 4), 1e30), "'q' holds NaN or infinity, or its squares overflow"),
        ("q", randn(0, 4), "not empty"),
    ],
)
def test_refused_update_or_merge_changes_nothing(names, tokens, message):
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


def test_collected_statistics_equal_sums_over_recorded_inputs():
    model, stats, modes = Block(), OccupationStatistics(), []
    model.train()
    model.norm.eval()

    def forward(model, batch):
        modes.append((model.training, torch.is_grad_enabled()))
        model(batch)

    add_inputs(model, batches(), forward, OccupationStatistics(), "all", None)
    assert collect_statistics(model, iter(batches()), forward, into=stats) is stats
    assert set(modes) == {(False, False)}
    assert model.training and model.dropout.training and not model.norm.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    for name, tokens in inputs_of(model, batches()).items():
        torch.testing.assert_close(stats[name].double(), reference.occupation(tokens), rtol=1e-4, atol=1e-4)
    assert list(stats) == list(model.dual_mode_layers()) and stats.groups == (("k", "v"), ("fc1",), ("fc2",))
    once = {name: matrix.clone() for name, matrix in stats.items()}
    collect_statistics(model, batches(), run, into=stats)
    for name, matrix in stats.items():
        assert torch.equal(matrix, matrix.T)
        torch.testing.assert_close(matrix, 2 * once[name], rtol=1e-5, atol=1e-5)


def separate(model, batch):
    """Give every layer a separate tensor, often at the address of a tensor that was freed."""
    for layer in model.dual_mode_layers().values():
        layer(batch[..., :1].expand(*batch.shape[:-1], layer.in_features).clone())


def test_matrices_are_shared_by_identity_not_by_recycled_address():
    stats = collect_statistics(Block(), batches(), separate, into=OccupationStatistics())
    assert len(stats.groups) == 4


@pytest.mark.parametrize(("tokens", "rows"), [("cls", slice(0, 1)), ("patch", slice(1, None))])
def test_cls_or_patch_tokens_can_be_selected(tokens, rows):
    model, flat = Block(), [randn(5, 6)]
    stats = collect_statistics(model, batches(), run, into=OccupationStatistics(), tokens=tokens)
    for name, read in inputs_of(model, batches()).items():
        torch.testing.assert_close(stats[name].double(), reference.occupation(read[:, rows]), rtol=1e-4, atol=1e-4)
    if tokens == "patch":
        with pytest.raises(ValueError, match="'k' reads one token"):
            collect_statistics(model, flat, run, into=OccupationStatistics(), tokens=tokens)
    else:  # a layer that reads one token per image has only the CLS token
        stats = collect_statistics(model, flat, run, into=OccupationStatistics(), tokens=tokens)
        torch.testing.assert_close(stats["k"].double(), reference.occupation(flat[0]), rtol=1e-5, atol=1e-5)


def failing(model, batch):
    model(batch)
    if batch[0, 0, 0] == batches()[2][0, 0, 0]:
        raise RuntimeError("the loader failed")


def no_mlp(model, batch):
    model.v(model.k(batch))


def loses_sharing(model, batch):
    shared = batch[0, 0, 0] == batches()[0][0, 0, 0]
    model.k(batch)
    model.v(batch if shared else batch.clone())


@pytest.mark.parametrize(
    ("data", "forward", "kwargs", "error", "message"),
    [
        (batches(), failing, {}, RuntimeError, "the loader failed"),
        ([], run, {}, ValueError, "batches is empty"),
        ([*batches(1), batches(1)[0] * float("nan")], run, {}, ValueError, "'k' holds NaN or infinity"),
        (batches(), no_mlp, {}, ValueError, "never reached layer 'fc1'"),
        (batches(), loses_sharing, {}, ValueError, "shared their input tensor before"),
        (batches(), run, {"tokens": "some"}, ValueError, "'some'"),
    ],
)
def test_error_leaves_statistics_and_model_unchanged(data, forward, kwargs, error, message):
    model, stats = Block(), OccupationStatistics()
    collect_statistics(model, batches(), run, into=stats)
    before = {name: matrix.clone() for name, matrix in stats.items()}
    model.train()
    with pytest.raises(error, match=message):
        collect_statistics(model, data, forward, into=stats, **kwargs)
    assert all(torch.equal(stats[name], before[name]) for name in before)
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())


def test_saved_statistics_keep_values_and_sharing_and_damage_is_refused(tmp_path):
    stats, path = OccupationStatistics(), tmp_path / "statistics.safetensors"
    OccupationStatistics().save(path)
    assert len(OccupationStatistics.load(path)) == 0
    stats.update(("k", "v"), randn(7, 4))
    stats.update("fc", randn(7, 3))
    stats.save(path)
    loaded = OccupationStatistics.load(path)
    assert loaded.groups == stats.groups and loaded["k"] is loaded["v"] and loaded.nbytes == stats.nbytes
    assert all(torch.equal(loaded[name], stats[name]) for name in stats)
    assert len(load_file(path)) == 2 and OccupationStatistics.load(path, "meta")["fc"].is_meta
    loaded.update(("k", "v"), randn(7, 4))
    assert torch.equal(loaded["v"], 2 * stats["k"])
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors | {"fc": tensors["fc"].triu()}, metadata)
    with pytest.raises(ValueError, match="statistics.safetensors: matrix of 'fc' is not symmetric"):
        OccupationStatistics.load(path)


def test_change_of_any_byte_of_saved_statistics_is_refused(tmp_path):
    stats, path = OccupationStatistics(), tmp_path / "statistics.safetensors"
    stats.update(("k", "v"), randn(7, 2))
    stats.update("fc", randn(7, 3))
    stats.save(path)
    content = path.read_bytes()
    begin = content.index(b'"__metadata__"')
    for index in range(begin, len(content)):
        changed = bytearray(content)
        changed[index] ^= 1
        path.write_bytes(changed)
        try:
            loaded = OccupationStatistics.load(path)
        except (ValueError, FileNotFoundError):
            continue
        same = loaded.groups == stats.groups and all(torch.equal(loaded[name], stats[name]) for name in stats)
        assert same, f"byte {index} changed, and the statistics were loaded with other values"
