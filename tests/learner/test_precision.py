"""In which precision a learner encodes: chosen by the hardware, kept in its file, and never changed unsaid."""

import json
from types import SimpleNamespace

import pytest
import torch
from lives import images_of, stream, tiny_learner

from dulbe_peft import ClassIncrementalLearner, LearnerArguments
from dulbe_peft.utils import devices


@pytest.fixture
def hardware(monkeypatch):
    """A processor whose capabilities a test sets; its autocast works on every processor."""
    has = SimpleNamespace(bfloat16=True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has.bfloat16}, raising=False)
    return has


def test_auto_is_bfloat16_where_the_hardware_has_it_and_nothing_is_trained(hardware, monkeypatch):
    frozen = tiny_learner("frozen")
    assert frozen.args.precision == "bfloat16" == frozen.encoder.key.precision
    assert tiny_learner("dulbe").args.precision == "float32"
    assert tiny_learner("dulbe", precision="bfloat16").args.precision == "bfloat16"
    assert tiny_learner("frozen", precision="float32").args.precision == "float32"
    hardware.bfloat16 = False
    assert tiny_learner("frozen").args.precision == "float32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not devices.has_bfloat16(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert devices.has_bfloat16(torch.device("cuda"))


def test_a_loaded_learner_keeps_its_precision_and_says_where_it_cannot(hardware, tmp_path, capsys):
    learner = tiny_learner("frozen")
    learner.learn_task(images_of(0, 1, 0, 1), ["a", "b"])
    learner.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "learner.json").read_text())["arguments"]["precision"] == "bfloat16"
    pixels = torch.stack([image for image, _ in images_of(0, 1)])
    low, full = learner.image_embeds(pixels), tiny_learner("frozen", precision="float32").image_embeds(pixels)
    assert not torch.equal(low, full)

    def load(**options):
        base = tiny_learner("frozen").clip
        return ClassIncrementalLearner.from_pretrained(tmp_path / "saved", base, **options)

    for options in ({}, {"args": LearnerArguments()}, {"machine": {"precision": "auto"}}):
        assert torch.equal(load(**options).image_embeds(pixels), low)
    assert capsys.readouterr().err == ""
    assert torch.equal(load(machine={"precision": "float32"}).image_embeds(pixels), full)
    assert "learned in bfloat16, but float32 was requested" in capsys.readouterr().err
    hardware.bfloat16 = False
    assert torch.equal(load().image_embeds(pixels), full)
    assert "learned in bfloat16, but this machine uses float32" in capsys.readouterr().err
    assert torch.equal(load(machine={"precision": "bfloat16"}).image_embeds(pixels), low)
    assert capsys.readouterr().err == ""


def test_a_run_goes_on_in_its_own_precision(hardware, tmp_path):
    tiny_learner("frozen", precision="float32").run(stream(1), tmp_path / "run")
    again = tiny_learner("frozen")
    found = again.run(stream(2), tmp_path / "run")
    assert found["configuration"]["arguments"]["precision"] == again.args.precision == "float32"
    assert again.encoder.key.precision == "float32"
    tiny_learner("frozen").run(stream(1), tmp_path / "low")
    hardware.bfloat16 = False
    with pytest.raises(ValueError, match="precision was 'bfloat16' and is now 'float32'"):
        tiny_learner("frozen").run(stream(2), tmp_path / "low")
    tiny_learner("frozen", precision="bfloat16").run(stream(2), tmp_path / "low")
