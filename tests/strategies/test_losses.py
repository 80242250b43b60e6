"""Test the losses of DuLBE, SGCL and ZSCL against explicit sums in float64."""

import copy

import pytest
import reference
import torch
from lives import learned, tiny_base, tiny_learner
from reference import randn
from torch.nn import functional as F

from dulbe_peft import LearnerArguments
from dulbe_peft.encoders.loading import logit_scale, unit_image_embeds
from dulbe_peft.papers.zscl import Zscl
from dulbe_peft.strategies import NewTask, Step, make_strategy
from dulbe_peft.strategies.losses import bidirectional_kl, cross_modal_loss


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


@pytest.mark.parametrize("temperatures", [(5.0, 0.1), (1.0, 1.0), (2.0, 4.0)])
def test_bidirectional_kl_equals_explicit_sums(temperatures):
    student, teacher = randn(6, 4), randn(6, 4, seed=1)
    by_class, by_instance = reference.bidirectional_kl(student, teacher, *temperatures)
    mean = bidirectional_kl(student, teacher, *temperatures).item()
    assert mean == pytest.approx(by_class / 6 + by_instance / 4, rel=1e-4)
    batchmean = bidirectional_kl(student, teacher, *temperatures, reduction="batchmean").item()
    assert batchmean == pytest.approx((by_class + by_instance) / 6, rel=1e-4)


def test_kl_is_finite_for_sharp_logits_and_has_gradients_only_for_the_student():
    teacher = (100 * unit(32, 16) @ unit(8, 16, seed=1).T).requires_grad_()
    student = (100 * unit(32, 16, seed=2) @ unit(8, 16, seed=1).T).requires_grad_()
    loss = bidirectional_kl(student, teacher)
    loss.backward()
    assert loss.isfinite() and loss > 0 and student.grad.isfinite().all() and student.grad.abs().sum() > 0
    assert teacher.grad is None
    assert bidirectional_kl(teacher, teacher).item() == pytest.approx(0, abs=1e-6)
    half = bidirectional_kl(student.half(), teacher.half())
    assert half.dtype == torch.float32 and half.isfinite()


def test_cross_modal_loss_takes_tau_not_its_logarithm():
    images, texts, labels = unit(5, 8), unit(3, 8, seed=1), torch.tensor([0, 1, 2, 1, 0])
    expected = F.cross_entropy(100.0 * images.double() @ texts.double().T, labels).item()
    assert cross_modal_loss(images, texts, labels, 100.0).item() == pytest.approx(expected, rel=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = cross_modal_loss(images, texts, labels.int(), torch.tensor(100.0))
    assert inside.item() == pytest.approx(expected, rel=1e-4)
    assert cross_modal_loss(images.half(), texts.half(), labels, 100.0).dtype == torch.float32


def test_invalid_arguments_of_losses_are_refused():
    images, texts, labels, ones = unit(5, 8), unit(3, 8, seed=1), torch.tensor([0, 1, 2, 1, 0]), torch.ones(3, 4)
    for call, message in (
        (lambda: cross_modal_loss(images, texts[:, :4], labels, 100.0), "image_embeds and text_embeds"),
        (lambda: cross_modal_loss(images, texts, labels[:4], 100.0), "labels must be"),
        (lambda: bidirectional_kl(ones, ones, class_temperature=0.0), "class_temperature"),
        (lambda: cross_modal_loss(images, texts, labels + 1, 100.0), "label 3 is out of range for 3 classes"),
        (lambda: bidirectional_kl(ones, torch.ones(3, 5)), r"\(3, 4\) and \(3, 5\)"),
        (lambda: bidirectional_kl(ones, ones, reduction="sum"), "'sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


TAU = 6.0
LABELS = torch.tensor([0, 2, 1, 2, 0])


def literal_loss(z, text, start, old, before, soft_weight, softness, distillation, temperature):
    """Compute both divergences of SGCL, averaged over images; `start` are the texts at the start of the task."""

    def divergence(p, q):
        return (p * (p.log() - q.log())).sum() / len(LABELS)

    true_text = start[LABELS]
    target = (softness * true_text @ torch.cat([old, start]).T).softmax(dim=1)
    total = soft_weight * divergence(target, (TAU * z @ torch.cat([old, text]).T).softmax(dim=1))
    if len(old):
        similarity = true_text @ old.T
        largest = similarity.max(dim=1, keepdim=True).values
        teacher = TAU * before @ old.T + torch.where(similarity == largest, largest, -largest)
        p, q = ((logits / temperature).softmax(dim=1) for logits in (teacher, TAU * z @ old.T))
        total = total + distillation * temperature**2 * divergence(p, q)
    return total


@pytest.mark.parametrize("known", [0, 4])
def test_lwf_loss_and_gradient_equal_the_formula(known):
    z, teacher, text, old = unit(5, 8), unit(5, 8, seed=1), unit(3, 8, seed=2), unit(4, 8, seed=3) if known else None
    labels, features = torch.tensor([0, 1, 2, 0, 1]), z.clone().requires_grad_()
    task_loss = cross_modal_loss(features, text, labels, 10.0)
    step = Step(task_loss, features, labels, text, old, lambda: features, lambda: teacher, 10.0)
    loss = make_strategy("lwf:weight=0.7,temperature=3").loss(None, step)
    loss.backward()
    row = z.double().requires_grad_()
    literal = 0.0
    for x, before, label in zip(row, teacher.double(), labels.tolist(), strict=True):
        literal -= torch.log_softmax(10 * text.double() @ x, dim=0)[label] / 5
        if known:
            q = torch.softmax(10 * old.double() @ before / 3, dim=0)
            literal -= 0.7 * (q * torch.log_softmax(10 * old.double() @ x / 3, dim=0)).sum() / 5
    literal.backward()
    assert loss.item() == pytest.approx(literal.item(), rel=1e-5)
    torch.testing.assert_close(features.grad.double(), row.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [0, 4])
def test_sgcl_gradients_equal_the_formula(known):
    strategy = make_strategy("sgcl:soft_weight=0.7,softness=5,distillation=0.3,temperature=2")
    task, start, before = NewTask(int(known > 0), None, LearnerArguments()), unit(3, 8, seed=1), unit(5, 8, seed=2)
    old = unit(known, 8, seed=3)
    for seed in (10, 20):  # in the second step the texts have changed, but the targets must not
        z = unit(5, 8, seed=seed).requires_grad_()
        text = (start if seed == 10 else unit(3, 8, seed=seed + 1)).clone().requires_grad_()
        task_loss = (z.square() * 0.5).sum()
        step = Step(task_loss, z, LABELS, text, old if known else None, z.detach, lambda: before, TAU)
        strategy.backward(task, step)
        twins = [tensor.detach().double().requires_grad_() for tensor in (z, text)]
        extra_loss = literal_loss(*twins, start.double(), old.double(), before.double(), 0.7, 5.0, 0.3, 2.0)
        (extra_loss + (twins[0].square() * 0.5).sum()).backward()
        gradients = [tensor.grad.double() for tensor in (z, text)]
        torch.testing.assert_close(gradients, [twin.grad for twin in twins], rtol=1e-4, atol=1e-5)
        assert all(twin.grad.norm() > 1e-3 for twin in twins)


@pytest.fixture(scope="module")
def references(digit_folders):
    return digit_folders(3, 2, 1)


def task_of(learner):
    state, index = learner.state, len(learner.tasks)
    return NewTask(index, state.adapter, learner.args, state.memory, encoder=learner.encoder)


def test_zscl_distillation_equals_the_formula_with_the_original_model_as_teacher(references, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("a cab\n\nfade\nabc\nbead\n")
    spec = f"zscl:reference_images={references},reference_texts={texts},temperature=3"
    learner = learned(tiny_learner(spec, batch_size=16, learning_rate=0.1), 1)
    reference_data = learner.strategy.references(task_of(learner))
    assert len(reference_data.images) == 6 and len(reference_data.text) == 4  # only the training images

    base, processor = copy.deepcopy(tiny_base()[0]), tiny_base()[1]
    pixels = torch.stack([reference_data.images[i][0] for i in range(6)])
    tokens = processor.tokenizer(["a cab", "fade", "abc", "bead"], padding=True, return_tensors="pt")
    with torch.no_grad():
        before = unit_image_embeds(base, pixels)
        text = base.get_text_features(**tokens).pooler_output
        now = learner.encoder.image_embeds(pixels)
        loss = float(reference_data.loss(3.0))
    torch.testing.assert_close(reference_data.features, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reference_data.text, text / text.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)
    assert (now - before).abs().max() > 1e-3
    student, teacher = (logit_scale(base) * z.double() @ reference_data.text.double().T for z in (now, before))
    by_image, by_text = reference.bidirectional_kl(student, teacher, 3.0, 3.0)
    assert loss == pytest.approx(by_image / 6 + by_text / 4, rel=5e-3)


def test_strong_zscl_distillation_preserves_similarities(references):
    moved = {}
    for weight in (0, 300):
        spec = f"zscl:reference_images={references},distillation={weight},average=false"
        learner = learned(tiny_learner(spec, learning_rate=3e-3, epochs=10, update_share=1), 1)
        moved[weight] = float(learner.strategy.references(task_of(learner)).loss(2.0).detach())
    assert 0 < moved[300] < 0.2 * moved[0]


def test_missing_variable_of_references_is_named(monkeypatch):
    monkeypatch.delenv("REFERENCES", raising=False)
    for path in ("$REFERENCES", "${REFERENCES}/images"):
        with pytest.raises(
            ValueError, match="variable REFERENCES is not set: it stands for a folder or file of your own"
        ):
            learned(tiny_learner(f"zscl:reference_images={path}"), 1)


def test_zscl_averages_the_adapter_over_its_steps(references, monkeypatch):
    steps, notes, after_step = [], {}, Zscl.after_step

    def watched(self, task):
        after_step(self, task)
        notes.update(task.notes)
        steps.append([tensor.detach().clone() for tensor, _ in task.notes["means"]])

    monkeypatch.setattr(Zscl, "after_step", watched)
    learner = learned(tiny_learner(f"zscl:reference_images={references}", epochs=3, update_share=1), 1)
    ended = [tensor.detach() for tensor, _ in notes["means"]]
    assert len(steps) == 3
    ups = [parameter for name, parameter in learner.model.named_parameters() if parameter.requires_grad]
    places = {tensor.data_ptr(): place for place, tensor in enumerate(ended)}
    assert {parameter.data_ptr() for parameter in ups} <= set(places)  # the means also hold the bases
    for layer in learner.model.dual_mode_layers().values():
        place = places[layer.dulbe_shared_B["default"].data_ptr()]
        mean = sum(step[place].double() for step in steps) / 4  # the initial value, 0, also counts
        assert mean.norm() > 1e-4
        torch.testing.assert_close(layer.dulbe_shared_B["default"].detach().double(), mean, rtol=1e-4, atol=1e-8)
        assert layer.dulbe_P["default"].data_ptr() in places
