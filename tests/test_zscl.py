"""ZSCL: the distillation beside its formula, the pristine teacher, the mean over steps, and what it needs."""

import copy

import pytest
import torch
from lives import learned, tiny_base, tiny_learner

from dulbe_peft.encoders.loading import logit_scale, unit_image_embeds
from dulbe_peft.strategies import NewTask
from dulbe_peft.strategies.zscl import Zscl


@pytest.fixture(scope="module")
def references(digit_folders):
    return digit_folders(3, 2, 1)


def task_of(learner):
    state, index = learner.state, len(learner.tasks)
    return NewTask(index, state.adapter, learner.args, state.memory, encoder=learner.encoder)


def kl(p, q):
    return float(sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True)))


def test_the_distillation_is_the_formula_s_with_the_pristine_model_as_its_teacher(references, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("a cab\n\nfade\nabc\nbead\n")
    spec = f"zscl:reference_images={references},reference_texts={texts},temperature=3"
    learner = learned(tiny_learner(spec, batch_size=16, learning_rate=0.1), 1)
    found = learner.strategy.references(task_of(learner))
    assert len(found.images) == 6 and len(found.text) == 4  # the training images alone

    base, processor = copy.deepcopy(tiny_base()[0]), tiny_base()[1]
    pixels = torch.stack([found.images[i][0] for i in range(6)])
    tokens = processor.tokenizer(["a cab", "fade", "abc", "bead"], padding=True, return_tensors="pt")
    with torch.no_grad():
        before = unit_image_embeds(base, pixels)
        text = base.get_text_features(**tokens).pooler_output
        now = learner.encoder.image_embeds(pixels).double()
        loss = float(found.loss(3.0))
    torch.testing.assert_close(found.features, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.text, text / text.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)
    assert (now - before).abs().max() > 1e-3
    tau = logit_scale(base)
    p, q = (tau * z.double() @ found.text.double().T / 3 for z in (before, now))
    by_image = sum(kl(p[i].softmax(0), q[i].softmax(0)) for i in range(6)) / 6
    by_text = sum(kl(p[:, j].softmax(0), q[:, j].softmax(0)) for j in range(4)) / 4
    assert loss == pytest.approx(9 * (by_image + by_text), rel=5e-3)


def test_a_heavy_distillation_keeps_the_similarities(references):
    moved = {}
    for weight in (0, 300):
        spec = f"zscl:reference_images={references},distillation={weight},average=false"
        learner = learned(tiny_learner(spec, learning_rate=3e-3, epochs=10), 1)
        moved[weight] = float(learner.strategy.references(task_of(learner)).loss(2.0).detach())
    assert 0 < moved[300] < 0.2 * moved[0]


def test_the_adapter_becomes_the_mean_over_its_steps(references, monkeypatch):
    steps, after_step = [], Zscl.after_step

    def watched(self, task):
        after_step(self, task)
        if not steps:
            assert any("lora" in name or "dulbe" in name for name, _ in task.adapter.named_parameters())
        steps.append([tensor.detach().clone() for tensor, _ in task.notes["means"]])

    starts, training = [], Zscl.training

    def noted(self, task):
        starts.append(task)
        return training(self, task)

    monkeypatch.setattr(Zscl, "after_step", watched)
    monkeypatch.setattr(Zscl, "training", noted)
    learner = learned(tiny_learner(f"zscl:reference_images={references}", epochs=3), 1)
    ended = [tensor.detach() for tensor, _ in starts[0].notes["means"]]
    assert len(steps) == 3 and len(ended) == len({id(tensor) for tensor in ended})
    ups = [parameter for name, parameter in learner.model.named_parameters() if parameter.requires_grad]
    places = {tensor.data_ptr(): place for place, tensor in enumerate(ended)}
    assert {parameter.data_ptr() for parameter in ups} <= set(places)  # both towers' own, and the bases beside them
    for layer in learner.state.layers.values():
        place = places[layer.dulbe_shared_B["default"].data_ptr()]
        mean = sum(step[place].double() for step in steps) / 4  # it starts at 0
        assert mean.norm() > 1e-4
        torch.testing.assert_close(layer.dulbe_shared_B["default"].detach().double(), mean, rtol=1e-4, atol=1e-8)
        assert layer.dulbe_P["default"].data_ptr() in places
