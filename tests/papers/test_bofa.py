"""Test BOFA: updates along the least-used directions, their mean, and the weight that mixes texts and images."""

import pytest
import torch
from drawn import DIM, features, normal
from small_runs import learner_of
from torch.nn import functional as F

from dulbe_peft.papers.bofa import Bofa, BofaClassifier
from dulbe_peft.streams.digits import digit_tasks


@pytest.fixture(scope="module")
def tasks():
    return [([task.train[i] for i in range(24)], task.class_names) for task in digit_tasks()[:3]]


def test_weight_after_three_tasks_is_base_plus_mean_update(base, tasks, monkeypatch):
    clip, processor = base
    weight, inputs = clip.visual_projection.weight.detach(), []
    for images, _ in tasks:
        pixels = processor.image_processor(images=[image["image"] for image in images], return_tensors="pt")
        with torch.no_grad():
            x = clip.vision_model(pixels["pixel_values"]).pooler_output.double()
        inputs.append(sum(torch.outer(row, row) for row in x))
    adapter = {"residual_rank": 4, "support_rank": 128, "target_modules": ["visual_projection"]}
    template = "a photo of the digit {}."
    learner = learner_of(base, "bofa", "bofa", adapter, batch_size=8, prompt_template=template)
    (layer,) = learner.model.dual_mode_layers().values()
    updates, bases = [], []
    finish = Bofa.finish

    def spy(self, task):
        assert layer._held is None
        updates.append((layer.current_up("default") @ layer.dulbe_P["default"].T).double())
        bases.append(layer.dulbe_P["default"].double())
        finish(self, task)

    def trained_on_the_base_weight(self, task):
        assert torch.equal(layer._held.weight, weight)

    monkeypatch.setattr(Bofa, "finish", spy)
    monkeypatch.setattr(Bofa, "after_step", trained_on_the_base_weight)
    for index, (images, names) in enumerate(tasks):
        learner.learn_task(images, names)
        assert updates[index].abs().max() > 1e-4
        mean = sum(updates) / len(updates)
        actual = layer.folded_weight("default").double()
        torch.testing.assert_close(actual, weight.double() + mean, rtol=0, atol=1e-6)
        assert layer.history_rank("default") == 5 * (index + 1)
    for index in (1, 2):
        seen = sum(inputs[:index])
        energy = (bases[index].T @ seen @ bases[index]).trace()
        assert energy <= torch.linalg.eigvalsh(seen)[:5].sum() * (1 + 1e-3) + 1e-6 * seen.trace()
    # Only task 1 also trains P, so only its P does not stay orthonormal.
    orthonormal = [float((b.T @ b - torch.eye(5)).abs().max()) for b in bases]
    assert orthonormal[0] > 1e-3 and max(orthonormal[1:]) < 1e-5


def test_first_task_chooses_the_mixing_weight():
    texts = normal(6, DIM, seed=9)
    x, y = features(4, 30, 0)
    classifier = BofaClassifier(DIM, logit_scale=10.0)
    classifier.add_classes(list("abcd"), x, y, texts[:4])

    z, e = F.normalize(x.double(), dim=1), F.normalize(texts.double(), dim=1)
    v = F.normalize(torch.stack([z[y == c].sum(dim=0) for c in range(4)]), dim=1)
    right = []
    for step in range(21):
        prototypes = (1 - step / 20) * e[:4] + step / 20 * v
        right.append(sum(int((prototypes @ row).argmax()) == label for row, label in zip(z, y.tolist(), strict=True)))
    best = [step for step in range(21) if right[step] == max(right)]
    assert len(best) < 15 and right[0] < max(right)
    chosen = best[len(best) // 2] / 20
    assert float(classifier.image_weight) == pytest.approx(chosen)

    expected = 10 * z @ ((1 - chosen) * e[:4] + chosen * v).T
    torch.testing.assert_close(classifier(x).double(), expected, rtol=1e-4, atol=1e-4)
    classifier.add_classes(["e", "f"], *features(2, 9, 5), texts)
    assert float(classifier.image_weight) == pytest.approx(chosen)
