import copy
import io
import json
import os
import pickle
import stat
import subprocess
import sys

import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import dulbe_peft
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.geodesics import slerp

DIM = 8


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count, classes):
    return torch.arange(count) % classes


def features(count, classes, seed=0):
    """Images around one direction per class, so that reliabilities differ between depths."""
    return randn(classes, DIM, seed=seed + 100)[labels(count, classes)] + 0.7 * randn(count, DIM, seed=seed)


@pytest.fixture
def head():
    head = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=20.0)
    head.add_classes(["ant", "bee", "cat"], features(12, 3), labels(12, 3), randn(3, DIM, seed=1))
    head.add_classes(["dog", "eel"], features(9, 2, seed=2), labels(9, 2), randn(5, DIM, seed=3))
    return head


def snapshot(head):
    return head.class_names, {name: tensor.clone() for name, tensor in head.state_dict().items()}


def assert_unchanged(head, before):
    names, state = before
    assert head.class_names == names
    assert set(state) == set(head.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in head.state_dict().items())


# ---------------------------------------------------------------------- the method


def test_head_equals_the_reference_over_two_tasks(head):
    literal = reference.Head([0.0, 1 / 3, 2 / 3, 1.0], logit_scale=20.0)
    literal.add_classes(features(12, 3), labels(12, 3).tolist(), randn(3, DIM, seed=1))
    literal.add_classes(features(9, 2, seed=2), labels(9, 2).tolist(), randn(5, DIM, seed=3))
    torch.testing.assert_close(head.visual_prototypes.double(), torch.stack(literal.visual), rtol=0, atol=1e-5)
    torch.testing.assert_close(head.reliability.double(), torch.tensor(literal.weights).double(), rtol=0, atol=1e-4)
    images = randn(6, DIM, seed=9)
    torch.testing.assert_close(head(images).double(), literal.logits(images), rtol=0, atol=5e-3)
    expected = [sum(w * a for w, a in zip(row, literal.depths, strict=True)) for row in literal.weights]
    torch.testing.assert_close(head.expected_depth().tolist(), expected, rtol=0, atol=1e-4)


def test_shapes_and_defaults():
    head = BridgeEnsembleHead(DIM)
    assert (head.num_depths, head.reliability_temperature, head.logit_scale) == (10, 0.05, 100.0)
    assert torch.equal(head.depths, torch.linspace(0, 1, 10))
    assert head.class_names == [] and head.state_size == 0
    head.add_classes(["a", "b"], features(6, 2), labels(6, 2), randn(2, DIM))
    assert head.visual_prototypes.shape == head.text_embeds.shape == head.ensemble_prototypes.shape == (2, DIM)
    assert head.reliability.shape == (2, 10) and head.bridge_prototypes().shape == (2, 10, DIM)
    assert head.expected_depth().shape == (2,) and head(randn(3, DIM)).shape == (3, 2)
    assert head(randn(0, DIM)).shape == (0, 2)
    assert "embed_dim=8, num_depths=10, reliability_temperature=0.05, classes=2" in repr(head)
    assert not list(head.parameters())


def test_state_of_100_classes_is_52200_numbers():
    head = BridgeEnsembleHead(512)
    head.add_classes([str(i) for i in range(100)], randn(200, 512), labels(200, 100), randn(100, 512, seed=1))
    assert head.state_size == 52_200
    assert round(head.state_size * 4 / 2**20, 3) == 0.199


def test_weights_sum_to_one_and_the_folded_vectors_stay_shorter_than_one(head):
    torch.testing.assert_close(head.reliability.sum(dim=1), torch.ones(5))
    torch.testing.assert_close(head.bridge_prototypes().norm(dim=2), torch.ones(5, 4))
    assert (head.ensemble_prototypes.norm(dim=1) < 1 - 1e-3).all()


def test_folded_logits_equal_the_sum_over_depths(head):
    images = F.normalize(randn(6, DIM, seed=9), dim=1)
    total = torch.zeros(6, 5)
    for k, depth in enumerate(head.depths.tolist()):
        bridges = slerp(head.visual_prototypes, head.text_embeds, depth)
        total += head.reliability[:, k] * (20.0 * images @ bridges.T)
    torch.testing.assert_close(head(images), total, rtol=0, atol=1e-4)


def test_features_are_normalised_here(head):
    images, scales = randn(6, DIM, seed=9), torch.logspace(-30, 30, 6)[:, None]
    torch.testing.assert_close(head(images * scales), head(images), rtol=0, atol=1e-4)
    other = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=20.0)
    factors = 1 + torch.arange(12)[:, None]
    other.add_classes(["ant", "bee", "cat"], features(12, 3) * factors, labels(12, 3), 7 * randn(3, DIM, seed=1))
    torch.testing.assert_close(other.visual_prototypes, head.visual_prototypes[:3], rtol=0, atol=1e-6)
    torch.testing.assert_close(other.reliability, head.reliability[:3], rtol=0, atol=1e-5)


def test_old_classes_keep_prototypes_and_weights_and_get_new_texts(head):
    visual, weights = head.visual_prototypes.clone(), head.reliability.clone()
    assert head(randn(2, DIM)).shape == (2, 5)
    texts = randn(6, DIM, seed=7)
    head.add_classes(["fox"], features(3, 1, seed=5), [0, 0, 0], texts)
    assert torch.equal(head.visual_prototypes[:5], visual) and torch.equal(head.reliability[:5], weights)
    torch.testing.assert_close(head.text_embeds, F.normalize(texts, dim=1))
    assert head.class_names == ["ant", "bee", "cat", "dog", "eel", "fox"]
    assert head(randn(2, DIM)).shape == (2, 6)


def test_set_text_embeds_moves_the_text_end_alone(head):
    images = randn(4, DIM, seed=9)
    before, visual, weights = head(images), head.visual_prototypes.clone(), head.reliability.clone()
    texts = randn(5, DIM, seed=8)
    head.set_text_embeds(texts)
    assert torch.equal(head.visual_prototypes, visual) and torch.equal(head.reliability, weights)
    assert not torch.allclose(head(images), before)
    torch.testing.assert_close(head.bridge_prototypes()[:, -1], F.normalize(texts, dim=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_text_equal_or_opposite_to_the_prototype(sign):
    head, images = BridgeEnsembleHead(DIM), randn(1, DIM).repeat(3, 1)
    head.add_classes(["a"], images, [0, 0, 0], sign * images[:1])
    assert head(randn(4, DIM, seed=2)).isfinite().all()
    torch.testing.assert_close(head.bridge_prototypes().norm(dim=2), torch.ones(1, 10))


def test_depths_can_be_chosen():
    head = BridgeEnsembleHead(DIM, depths=[0.5])
    head.add_classes(["a", "b"], features(6, 2), labels(6, 2), randn(2, DIM))
    assert head.num_depths == 1 and torch.equal(head.reliability, torch.ones(2, 1))
    torch.testing.assert_close(head.expected_depth(), torch.full((2,), 0.5))
    expected = slerp(head.visual_prototypes, head.text_embeds, 0.5)
    torch.testing.assert_close(head.ensemble_prototypes, expected)


def test_half_precision_and_autocast_are_computed_in_float32(head):
    images = randn(6, DIM, seed=9)
    exact = head(images)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        found = head(images.to(dtype))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, rtol=0, atol=0.2)
    head._derived.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(images), exact)
        other = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=20.0)
        other.add_classes(["ant", "bee", "cat"], features(12, 3), labels(12, 3), randn(3, DIM, seed=1))
    torch.testing.assert_close(other.reliability, head.reliability[:3], rtol=0, atol=1e-6)


def test_gradients_reach_the_features(head):
    images = randn(3, DIM).requires_grad_()
    with torch.inference_mode():
        head(images)
    head(images)[:, 0].sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().sum() > 0


def test_folded_vectors_follow_every_change_of_the_state(head):
    first = head.ensemble_prototypes
    assert head.ensemble_prototypes is first
    other = BridgeEnsembleHead(DIM, num_depths=4)
    other.add_classes(["x"], features(3, 1), [0, 0, 0], randn(1, DIM))
    stale = other.ensemble_prototypes
    other.load_state_dict(head.state_dict())
    assert stale.shape == (1, DIM) and torch.equal(other.ensemble_prototypes, first)
    head.half()
    assert head.visual_prototypes.dtype == torch.float16 and head.ensemble_prototypes is not first
    torch.testing.assert_close(head.ensemble_prototypes, first, rtol=0, atol=5e-3)
    head.to("meta")
    assert not head._derived


# ---------------------------------------------------------------------- what is refused

NAN, INF = float("nan"), float("inf")


def with_row(row, value):
    images = features(6, 2)
    images[row] = value
    return images


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"class_names": ["ant", "fox"]}, ValueError, "'ant', a class that was seen already"),
        ({"class_names": ["fox", "fox"]}, ValueError, "are both 'fox'"),
        ({"class_names": ["fox", " "]}, ValueError, "is ' '; a class name must not be blank"),
        ({"class_names": []}, ValueError, "class_names is empty"),
        ({"class_names": "fg"}, TypeError, "got the single string 'fg'"),
        ({"class_names": ["fox", 3]}, TypeError, "must be a string, got 3"),
        ({"class_names": ["fox", "gnu", "hen"], "text_embeds": randn(8, DIM)}, ValueError, "'hen' has no image"),
        ({"image_embeds": with_row(4, NAN)}, ValueError, "image_embeds row 4 holds NaN or infinity"),
        ({"image_embeds": with_row(3, -INF)}, ValueError, "image_embeds row 3 holds NaN or infinity"),
        ({"image_embeds": with_row(2, 0.0)}, ValueError, "image_embeds row 2 is zero"),
        ({"image_embeds": randn(6, 7)}, ValueError, "image_embeds must be (rows, 8), got shape (6, 7)"),
        ({"image_embeds": torch.ones(6, DIM).long()}, TypeError, "must be a floating-point tensor"),
        (
            {"image_embeds": torch.cat([randn(3, DIM), -randn(3, DIM)]), "labels": [0, 0, 1, 0, 0, 1]},
            ValueError,
            "'fox'",
        ),
        ({"labels": labels(6, 2).float()}, TypeError, "labels must be integers, got torch.float32"),
        ({"labels": labels(6, 2).bool()}, TypeError, "labels must be integers, got torch.bool"),
        ({"labels": [True, False] * 3}, TypeError, "labels must be integers, got torch.bool"),
        ({"labels": labels(6, 2) + 1}, ValueError, "label 2 is out of range for 2 classes"),
        ({"labels": labels(6, 2) - 1}, ValueError, "label -1 is out of range for 2 classes"),
        ({"labels": labels(5, 2)}, ValueError, "labels must be (6,), one per image"),
        ({"labels": torch.zeros(6).long()}, ValueError, "class 'gnu' has no image"),
        ({"text_embeds": randn(2, DIM)}, ValueError, "text_embeds must have 7 rows"),
        ({"text_embeds": randn(8, DIM)}, ValueError, "text_embeds must have 7 rows"),
        ({"text_embeds": torch.zeros(7, DIM)}, ValueError, "text_embeds row 0 is zero"),
    ],
)
def test_add_classes_refuses_and_changes_nothing(head, change, error, message):
    good = {
        "class_names": ["fox", "gnu"],
        "image_embeds": features(6, 2),
        "labels": labels(6, 2),
        "text_embeds": randn(7, DIM),
    }
    before = snapshot(head)
    with pytest.raises(error) as raised:
        head.add_classes(**{**good, **change})
    assert message in str(raised.value)
    assert_unchanged(head, before)
    head.add_classes(**good)


def test_forward_and_set_text_embeds_refuse(head):
    before = snapshot(head)
    for texts, message in ((randn(4, DIM), "5 rows"), (randn(5, 7), r"\(rows, 8\)"), (NAN * randn(5, DIM), "row 0")):
        with pytest.raises(ValueError, match=message):
            head.set_text_embeds(texts)
    assert_unchanged(head, before)
    for images, message in ((randn(DIM), r"\(rows, 8\)"), (with_row(5, NAN), "row 5"), (with_row(1, 0.0), "row 1 is")):
        with pytest.raises(ValueError, match=message):
            head(images)
    with pytest.raises(ValueError, match="no class yet"):
        BridgeEnsembleHead(DIM)(randn(2, DIM))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"embed_dim": 1}, "embed_dim"),
        ({"num_depths": 1}, "num_depths must be at least 2"),
        ({"depths": []}, "depths"),
        ({"depths": [0.5, 1.5]}, "depths"),
        ({"depths": [NAN]}, "depths"),
        ({"depths": [[0.5]]}, "depths"),
        ({"reliability_temperature": 0.0}, "reliability_temperature"),
        ({"logit_scale": INF}, "logit_scale"),
        ({"logit_scale": -1.0}, "logit_scale"),
    ],
)
def test_constructor_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        BridgeEnsembleHead(**{"embed_dim": DIM, **kwargs})


# ---------------------------------------------------------------------- state dicts


def test_state_dict_round_trip_with_another_number_of_classes(head):
    images = randn(4, DIM, seed=9)
    for names in ([], ["x"]):
        other = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=20.0)
        if names:
            other.add_classes(names, features(3, 1), [0, 0, 0], randn(1, DIM))
        other.load_state_dict(head.state_dict())
        assert other.class_names == head.class_names and torch.equal(other(images), head(images))
    head.load_state_dict(BridgeEnsembleHead(DIM, num_depths=4).state_dict())
    assert head.class_names == [] and head.visual_prototypes.shape == (0, DIM)


def test_state_dict_survives_as_a_submodule_in_torch_and_safetensors_files(head, tmp_path):
    model, other = (torch.nn.ModuleDict({"head": h}) for h in (head, BridgeEnsembleHead(DIM, num_depths=4)))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other["head"].class_names == head.class_names
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    third = torch.nn.ModuleDict({"head": BridgeEnsembleHead(DIM, num_depths=4)})
    third.load_state_dict(load_file(tmp_path / "m.safetensors"), assign=True)
    assert torch.equal(third["head"].ensemble_prototypes, head.ensemble_prototypes)


def test_copies_are_independent(head):
    images = randn(4, DIM, seed=9)
    expected = head(images)
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(twin(images), expected)
        twin.add_classes(["fox"], features(3, 1), [0, 0, 0], randn(6, DIM))
    assert len(head.class_names) == 5 and torch.equal(head(images), expected)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("visual_prototypes", None, "Missing key"),
        ("_extra_state", None, "Missing key"),
        ("surplus", torch.zeros(1), "Unexpected key"),
        ("visual_prototypes", torch.zeros(4, DIM), r"visual_prototypes must be floating-point \(5, 8\)"),
        ("visual_prototypes", torch.zeros(5, DIM), "unit vectors"),
        ("text_embeds", torch.full((5, DIM), NAN), "text_embeds holds NaN"),
        ("text_embeds", torch.ones(5, DIM).long(), "text_embeds must be floating-point"),
        ("reliability", torch.full((5, 3), 1 / 3), r"reliability must be floating-point \(5, 4\)"),
        ("reliability", torch.ones(5, 4), "sum to 1"),
        ("depths", torch.tensor([0.0, 0.5, 1.0, 2.0]), "depths must lie"),
        ("_extra_state", torch.tensor(list(b'["a"]'), dtype=torch.uint8), "for 1 classes"),
        ("_extra_state", torch.tensor(list(b"{}"), dtype=torch.uint8), "must be a list"),
        ("_extra_state", torch.tensor([255], dtype=torch.uint8), "damaged"),
        ("_extra_state", torch.tensor(list(b'["a","b","a","c","d"]'), dtype=torch.uint8), "are both 'a'"),
    ],
)
def test_load_state_dict_refuses_and_changes_nothing(head, key, value, message):
    state = head.state_dict()
    state.pop(key, None)
    if value is not None:
        state[key] = value
    other = BridgeEnsembleHead(DIM, num_depths=4)
    other.add_classes(["x"], features(3, 1), [0, 0, 0], randn(1, DIM))
    before = snapshot(other)
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(state)
    if key != "surplus":
        assert_unchanged(other, before)


# ---------------------------------------------------------------------- files


@pytest.mark.slow
def test_a_saved_head_gives_the_same_logits_in_a_fresh_process(head, tmp_path):
    images = randn(4, DIM, seed=9)
    head.save_pretrained(tmp_path / "head")
    torch.save((images, head(images)), tmp_path / "expected.pt")
    script = (
        "import sys, types, torch, importlib.util\n"
        "package = types.ModuleType('dulbe_peft'); package.__path__ = [sys.argv[2]]\n"
        "sys.modules['dulbe_peft'] = package\n"
        "from dulbe_peft.classifiers.bridge import BridgeEnsembleHead\n"
        "head = BridgeEnsembleHead.from_pretrained(sys.argv[1] + '/head')\n"
        "images, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "assert torch.equal(head(images), expected)\n"
        "assert 'peft' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(','.join(head.class_names))\n"
    )
    package = os.path.dirname(dulbe_peft.__file__)
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path), package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ant,bee,cat,dog,eel"


def test_everything_is_restored(tmp_path):
    head = BridgeEnsembleHead(DIM, depths=[0.25, 0.5], reliability_temperature=0.1, logit_scale=33.0)
    head.save_pretrained(tmp_path)
    assert BridgeEnsembleHead.from_pretrained(str(tmp_path)).class_names == []
    head.add_classes(["Köter", "a/b"], features(6, 2), labels(6, 2), randn(2, DIM))
    head.save_pretrained(tmp_path)
    loaded = BridgeEnsembleHead.from_pretrained(tmp_path)
    assert (loaded.reliability_temperature, loaded.logit_scale, loaded.num_depths) == (0.1, 33.0, 2)
    assert loaded.class_names == ["Köter", "a/b"] and not loaded.training
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in loaded.state_dict().items())
    for h in (head, loaded):
        h.add_classes(["next"], features(3, 1), [0, 0, 0], randn(3, DIM, seed=4))
    assert torch.equal(loaded.reliability, head.reliability)


def test_files_have_their_own_names_and_the_umasks_mode(head, tmp_path):
    before = os.umask(0o027)
    try:
        head.save_pretrained(tmp_path)
    finally:
        os.umask(before)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert files == {"head_config.json": 0o640, "head.safetensors": 0o640}


def damage_config(folder, **changes):
    path = folder / "head_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def damage_tensors(folder, **changes):
    tensors = {**load_file(folder / "head.safetensors"), **changes}
    save_file({key: value for key, value in tensors.items() if value is not ...}, folder / "head.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "head_config.json").write_text("{"), "head_config.json is damaged"),
        (lambda d: (d / "head_config.json").write_bytes(b"\xff\xfe"), "head_config.json is damaged"),
        (lambda d: (d / "head_config.json").write_text("[" * 10**5), "head_config.json is damaged"),
        (lambda d: (d / "head_config.json").write_text("[]"), "has format"),
        (lambda d: damage_config(d, format="dulbe-bridge-ensemble-head-2"), "has format"),
        (lambda d: damage_config(d, extra=1), "has the fields"),
        (lambda d: damage_config(d, class_names=...), "has the fields"),
        (lambda d: damage_config(d, class_names=["a"]), "for 1 classes"),
        (lambda d: damage_config(d, class_names="abcde"), "must be a list"),
        (lambda d: damage_config(d, class_names=["a", "b", "c", "d", 5]), "must be a string"),
        (lambda d: damage_config(d, embed_dim=9), "visual_prototypes must be"),
        (lambda d: damage_config(d, embed_dim="8"), "embed_dim"),
        (lambda d: damage_config(d, logit_scale="100"), "cannot be loaded"),
        (lambda d: damage_tensors(d, depths=...), "Missing key"),
        (lambda d: damage_tensors(d, surplus=torch.zeros(1)), "Unexpected key"),
        (lambda d: damage_tensors(d, text_embeds=torch.full((5, DIM), NAN)), "NaN or infinity"),
        (lambda d: damage_tensors(d, text_embeds=torch.zeros(5, DIM)), "unit vectors"),
        (lambda d: damage_tensors(d, reliability=torch.zeros(5, 9)), "reliability must be"),
        (lambda d: (d / "head.safetensors").write_bytes(b"PK\x03\x04"), "damaged or no safetensors file"),
        (lambda d: (d / "head.safetensors").write_bytes((d / "head.safetensors").read_bytes()[:-9]), "damaged"),
    ],
)
def test_damaged_files_are_refused(head, damage, message, tmp_path):
    head.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        BridgeEnsembleHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["head_config.json", "head.safetensors"])
def test_missing_files_are_named_and_no_pickle_is_read_instead(head, name, tmp_path):
    head.save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    torch.save(head.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=name):
        BridgeEnsembleHead.from_pretrained(tmp_path)


def test_missing_folders_are_named(tmp_path):
    for missing in (tmp_path / "missing", str(tmp_path / "missing")):
        with pytest.raises(FileNotFoundError, match="missing"):
            BridgeEnsembleHead.from_pretrained(missing)


def test_a_failed_save_leaves_the_old_files(head, tmp_path, monkeypatch):
    head.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("dulbe_peft.utils.files.save_file", full)
    head.set_text_embeds(randn(5, DIM, seed=8))
    with pytest.raises(OSError, match="no space left"):
        head.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("beta", [1e-30, 2e-39, 5e-324])
def test_a_tiny_reliability_temperature_trusts_the_best_depth_alone(beta):
    head = BridgeEnsembleHead(4, reliability_temperature=beta)
    images, labels = torch.randn(6, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    head.add_classes(["a", "b"], images, labels, torch.randn(2, 4))
    assert torch.isfinite(head(images)).all() and (head.reliability.amax(dim=1) > 0.09).all()
    assert torch.equal(head.reliability.sum(dim=1), torch.ones(2))
