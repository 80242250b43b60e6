import io
import os
import subprocess
import sys

import pytest
import reference
import torch
from safetensors.torch import load_file, save_file

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
    assert torch.equal(head.depths, torch.linspace(0, 1, 10)) and head.class_names == [] and head.state_size == 0
    head.add_classes(["a", "b"], features(6, 2), labels(6, 2), randn(2, DIM))
    assert head.state_size == 2 * (DIM + 10) and (head.ensemble_prototypes.norm(dim=1) < 1 - 1e-3).all()
    assert head.bridge_prototypes().shape == (2, 10, DIM) and head(randn(0, DIM)).shape == (0, 2)
    assert "embed_dim=8, num_depths=10, reliability_temperature=0.05, metric=cosine, classes=2" in repr(head)


def test_features_are_normalised_here(head):
    images, scales = randn(6, DIM, seed=9), torch.logspace(-30, 30, 6)[:, None]
    torch.testing.assert_close(head(images * scales), head(images), rtol=0, atol=1e-4)
    other = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=20.0)
    factors = 1 + torch.arange(12)[:, None]
    other.add_classes(["ant", "bee", "cat"], features(12, 3) * factors, labels(12, 3), 7 * randn(3, DIM, seed=1))
    torch.testing.assert_close(other.visual_prototypes, head.visual_prototypes[:3], rtol=0, atol=1e-6)
    torch.testing.assert_close(other.reliability, head.reliability[:3], rtol=0, atol=1e-5)


def test_depths_can_be_chosen():
    head = BridgeEnsembleHead(DIM, depths=[0.5])
    head.add_classes(["a", "b"], features(6, 2), labels(6, 2), randn(2, DIM))
    assert head.num_depths == 1 and torch.equal(head.reliability, torch.ones(2, 1))
    torch.testing.assert_close(head.expected_depth(), torch.full((2,), 0.5))
    expected = slerp(head.visual_prototypes, head.text_embeds, 0.5)
    torch.testing.assert_close(head.ensemble_prototypes, expected)


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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"embed_dim": 1}, "embed_dim"),
        ({"num_depths": 1}, "num_depths must be at least 2"),
        ({"depths": []}, "depths"),
        ({"depths": [0.5, 1.5]}, "depths"),
        ({"depths": [float("nan")]}, "depths"),
        ({"depths": [[0.5]]}, "depths"),
        ({"reliability_temperature": 0.0}, "reliability_temperature"),
        ({"logit_scale": float("inf")}, "logit_scale"),
    ],
)
def test_constructor_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        BridgeEnsembleHead(**{"embed_dim": DIM, **kwargs})


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
