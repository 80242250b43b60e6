"""Test that an accelerator, such as a GPU, computes what the CPU computes. Without one, these tests are skipped."""

import copy
import json

import pytest
import torch
from conftest import ACCELERATOR
from lives import content, images_of, learned, stream, tiny_base, tiny_learner
from peft import get_peft_model
from taught import SPECS, digits, task
from taught import learned as taught
from torch.nn import functional as F

from dulbe_peft import (
    STRATEGIES,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    OccupationStatistics,
    allocate_modes,
    collect_statistics,
    cross_modal_loss,
    probe_gradients,
    route_gradients,
    run_stream,
)
from dulbe_peft.strategies import make_strategy

pytestmark = pytest.mark.skipif(ACCELERATOR is None, reason="this machine has no accelerator")
PIXELS = torch.stack([image for image, _ in images_of(*range(8), seed=9)])
LABELS = torch.arange(8) % 4


@pytest.fixture(autouse=True)
def _accelerator_is_visible(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


def close(actual, expected, tolerance=1e-3):
    torch.testing.assert_close(actual.cpu().float(), expected.cpu().float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"zscl"}))  # zscl needs reference images
def test_learner_of_an_accelerator_continues_there_and_on_the_cpu(name, tmp_path):
    classifiers = tuple(key for key in make_strategy(name).classifiers if key not in ("clap4clip", "clg_cbm"))
    options = {"device": "auto", "precision": "float32", "learning_rate": 1e-4, "epochs": 2}
    spec = {"dualprompt": "dualprompt:general_blocks=1"}.get(name, name)  # the tiny tower has two blocks
    learner = learned(tiny_learner(spec, classifiers or ("lda",), **options), 2)
    assert learner.device.type == ACCELERATOR.type
    learner.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "learner.json").read_text())["arguments"]
    assert ACCELERATOR.type not in json.dumps(saved), "the device belongs to the machine, not to the learner"
    there = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", copy.deepcopy(tiny_base()[0]))
    here = ClassIncrementalLearner.from_pretrained(
        tmp_path / "saved", copy.deepcopy(tiny_base()[0]), machine={"device": "cpu"}
    )
    assert (there.device.type, here.device.type) == (ACCELERATOR.type, "cpu")
    for _ in range(2):
        z = learner.image_embeds(PIXELS)
        for other in (there, here):
            close(other.image_embeds(PIXELS), z)
            close(other.text_embeds(["a0", "b0"]), learner.text_embeds(["a0", "b0"]))
            for key, classifier in other.classifiers.items():
                close(classifier.probabilities(other.image_embeds(PIXELS)), learner.classifiers[key].probabilities(z))
        for each in (learner, there, here):
            if len(each.tasks) == 2:
                learned(each, 1, 2)
                each.forget_class("a1")


@pytest.mark.parametrize("spec", SPECS)
def test_classifier_of_an_accelerator_equals_that_of_the_cpu(spec, tmp_path):
    expected, other = taught(spec), taught(spec).to(ACCELERATOR)
    tests = F.normalize(digits.tests, dim=1)
    close(other.probabilities(tests.to(ACCELERATOR)), expected.probabilities(tests))
    other.save_pretrained(tmp_path)
    close(type(other).from_pretrained(tmp_path).probabilities(tests), expected.probabilities(tests))
    images, labels = task([0, 1])
    for classifier, device in ((expected, "cpu"), (other, ACCELERATOR)):
        if "update" in classifier.rule.can:
            classifier.update_classes(images.to(device), labels.to(device))
        classifier.forget_class(classifier.class_names[2])
    close(other.probabilities(tests.to(ACCELERATOR)), expected.probabilities(tests))


def test_adapter_by_hand_takes_the_same_steps_as_on_the_cpu():
    """Probe, plan and train a task. Adam turns rounding of tiny gradients into whole steps, so SGD is used."""
    names = F.normalize(torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    weights, plans = {}, {}
    for device in ("cpu", ACCELERATOR):
        torch.manual_seed(0)
        tower = copy.deepcopy(tiny_base()[0]).to(device)
        model = get_peft_model(tower, DualModeLoraConfig(residual_rank=2, support_rank=8, text_rank=0))
        batches = [(PIXELS.to(device), LABELS.to(device))]

        def encode(pixels, model=model):
            return F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

        def loss(_, batch, encode=encode):
            features = encode(batch[0])
            return cross_modal_loss(features, names.to(features.device), batch[1], 10.0), len(features)

        stats = OccupationStatistics()
        collect_statistics(model, batches, lambda _, batch, encode=encode: encode(batch[0]), into=stats)
        plan = allocate_modes(probe_gradients(model, batches, loss), stats, shared_rank=1, residual_rank=2)
        plans[str(device)] = {name: modes.shared.cpu() for name, modes in plan.items()}
        model.begin_task(plan)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            task_loss = loss(model, batches[0])[0]
            route_gradients(model, task_loss, task_loss.square())
            optimizer.step()
            optimizer.zero_grad()
        weights[str(device)] = {
            name: layer.folded_weight("default").cpu() for name, layer in model.dual_mode_layers().items()
        }
    for name, shared in plans["cpu"].items():
        close(plans[str(ACCELERATOR)][name] @ plans[str(ACCELERATOR)][name].T, shared @ shared.T)
        close(weights[str(ACCELERATOR)][name], weights["cpu"][name], 1e-4)


@pytest.mark.parametrize("strategy", ["frozen", "dulbe"])
def test_run_of_an_accelerator_is_resumed_there_with_the_same_files(strategy, tmp_path):
    def start():
        return tiny_learner(strategy, ("bridge", "lda", "bayes"), device="auto", precision="float32")

    run_stream(start(), stream(3), tmp_path / "whole")
    run_stream(start(), stream(2), tmp_path / "parts")
    run_stream(start(), stream(3), tmp_path / "parts")
    whole, parts = content(tmp_path / "whole"), content(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["classifiers"] == results[1]["classifiers"]


def test_bfloat16_is_chosen_and_answers_like_float32():
    learner = tiny_learner("frozen", ("lda",), device="auto")
    other = tiny_learner("frozen", ("lda",), device="auto", precision="float32")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        assert learner.args.precision == "bfloat16"
    assert F.cosine_similarity(learner.image_embeds(PIXELS), other.image_embeds(PIXELS)).min() > 0.999


def test_unknown_accelerator_is_refused_with_its_name():
    with pytest.raises(ValueError, match=f"only the accelerator '{ACCELERATOR.type}'"):
        tiny_learner("frozen", device="xpu" if ACCELERATOR.type != "xpu" else "cuda")
