"""Test the precision of a learner: it is chosen by the hardware, saved, and never changed silently."""

import json
from types import SimpleNamespace

import pytest
import torch
from lives import images_of, stream, tiny_learner

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, run_stream
from dulbe_peft.utils import processes


@pytest.fixture
def hardware(monkeypatch):
    """Return the simulated capabilities of the processor, which a test may change."""
    capabilities = SimpleNamespace(bfloat16=True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": capabilities.bfloat16}, raising=False)
    return capabilities


def test_auto_precision_is_bfloat16_for_frozen_models_on_capable_hardware(hardware, monkeypatch):
    frozen = tiny_learner("frozen")
    assert frozen.args.precision == "bfloat16" == frozen.encoder.key.precision
    assert tiny_learner("dulbe").args.precision == "float32"
    assert tiny_learner("dulbe", precision="bfloat16").args.precision == "bfloat16"
    assert tiny_learner("frozen", precision="float32").args.precision == "float32"
    hardware.bfloat16 = False
    assert tiny_learner("frozen").args.precision == "float32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not processes.has_bfloat16(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert processes.has_bfloat16(torch.device("cuda"))


def test_loaded_learner_keeps_its_precision_or_warns(hardware, tmp_path, capsys):
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


def test_resumed_run_keeps_the_precision_it_began_with(hardware, tmp_path):
    run_stream(tiny_learner("frozen", precision="float32"), stream(1), tmp_path / "run")
    resumed = tiny_learner("frozen")
    results = run_stream(resumed, stream(2), tmp_path / "run").contents()
    assert results["configuration"]["arguments"]["precision"] == resumed.args.precision == "float32"
    assert resumed.encoder.key.precision == "float32"
    run_stream(tiny_learner("frozen"), stream(1), tmp_path / "low")
    hardware.bfloat16 = False
    with pytest.raises(ValueError, match="precision was 'bfloat16' and is now 'float32'"):
        run_stream(tiny_learner("frozen"), stream(2), tmp_path / "low")
    run_stream(tiny_learner("frozen", precision="bfloat16"), stream(2), tmp_path / "low")
