"""Test MG-CLIP: the scaled pair against PEFT's LoRA, the rule for the number of epochs, and the visual agents."""

import copy
import math

import pytest
import torch
from drawn import DIM, features, normal
from peft import LoraConfig, get_peft_model
from small_runs import learner_of
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments
from dulbe_peft.classifiers import classifier_of
from dulbe_peft.data.images import labelled_images, named_images
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.papers.mg_clip import MgClip, VisualAgentRule
from dulbe_peft.strategies import NewTask
from dulbe_peft.streams.digits import digit_tasks
from dulbe_peft.training.task_trainer import TaskTrainer, epoch_order


@pytest.fixture(scope="module")
def tasks():
    return [([task.train[i] for i in range(12)], task.class_names) for task in digit_tasks()[:2]]


def make_learner(base, classifiers=None, text_rank=0, **fields):
    config = {"residual_rank": 3, "text_rank": text_rank, "target_modules": ["k_proj", "v_proj"]}
    quick = {"epochs": 2, "batch_size": 8, "prompt_template": "a photo of the digit {}."}
    return learner_of(base, "mg_clip", classifiers, config, **quick | fields)


def test_two_tasks_train_like_peft_s_lora_with_alpha_1(base, tasks):
    learner = make_learner(base)
    layers, args = learner.model.dual_mode_layers(), learner.args
    bases = learner.strategy.plan(NewTask(0, learner.state.adapter, args))
    for name, modes in bases.items():  # check that A is Xavier-uniform
        width, down = layers[name].in_features, 4 * torch.cat([modes.shared, modes.residual], dim=1)
        bound = math.sqrt(6 / (width + 4))
        assert 0.95 * bound < down.abs().max() <= bound and abs(down.mean()) < 0.1 * bound
    stock = get_peft_model(copy.deepcopy(base[0]), LoraConfig(r=4, lora_alpha=1, target_modules=list(layers)))
    for name, module in stock.base_model.model.named_modules():
        if name in layers:
            down = torch.cat([bases[name].shared, bases[name].residual], dim=1)
            module.lora_A["default"].weight.data = 4 * down.T.clone()
    for index, (images, names) in enumerate(tasks):
        text = learner.encoder.text_embeds(names).detach()
        data = learner.encoder.images(labelled_images(images))
        optimizer = torch.optim.Adam([p for p in stock.parameters() if p.requires_grad], lr=args.learning_rate)
        steps = 2 * math.ceil(len(images) / 8)
        orders = [torch.tensor(epoch_order(len(images), args.seed, index, epoch)) for epoch in range(2)]
        rows = [batch for order in orders for batch in order.split(8)]
        for step, batch in enumerate(rows):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
            pixels = torch.stack([data[int(i)][0] for i in batch])
            labels = torch.tensor([images[int(i)]["label"] for i in batch])
            z = unit_image_embeds(stock.get_base_model().train(), pixels)
            loss = F.cross_entropy(learner.logit_scale * z @ text.T, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        learner.learn_task(images, names)
    for name, layer in layers.items():
        module = stock.base_model.model.get_submodule(name)
        expected = module.lora_B["default"].weight @ module.lora_A["default"].weight / 4
        actual = layer.get_delta_weight("default")
        assert expected.abs().max() > 1e-4
        # Where a gradient is nearly zero, rounding decides the sign of Adam's full step. If that happens to one weight
        # in 1,000, the relative error is 2 / sqrt(1000).
        assert (actual - expected).norm() < 0.06 * expected.norm()
        assert layer.history_rank("default") == 0


@pytest.mark.parametrize(
    ("logits", "limit", "chosen", "trained"),
    [
        ([10, 10.9, 11.1], 5, 1, 2),  # beyond 10 % after the second epoch
        ([10, 9.5, 9.1, 8.9], 5, 2, 3),  # a fall counts like a rise
        ([10, 12], 5, 1, 1),  # at least one epoch
        ([10, 10.5, 10.9], 2, 2, 2),  # never crossed
        ([10, 10.5, 10.9, 12], 3, 2, 3),  # crossed in the last epoch
        ([-10, 5, 20], 2, 2, 2),  # the ratio has no meaning if the first logit is negative
    ],
)
def test_first_task_chooses_the_number_of_epochs(logits, limit, chosen, trained):
    strategy, values = MgClip(), iter(logits)
    task = NewTask(0, None, LearnerArguments(epochs=limit))
    assert strategy.epochs(task) == limit
    epoch = 0
    while not strategy.stop_early(task, epoch, lambda: next(values)) and epoch < limit:
        epoch += 1
    memory = strategy.remember(task, None)
    assert epoch == trained and memory["epochs"] == chosen
    later = NewTask(1, None, task.args, memory)
    assert strategy.epochs(later) == chosen and strategy.remember(later, None) is memory
    assert not strategy.stop_early(later, 0, None)


def test_later_tasks_train_the_chosen_number_of_epochs(base, tasks, monkeypatch, tmp_path):
    trained, log = [], TaskTrainer._log_epoch
    monkeypatch.setattr(TaskTrainer, "_log_epoch", lambda self, *a: trained.append(self.index) or log(self, *a))
    values = iter([10.0, 10.5, 10.6, 20.0])
    monkeypatch.setattr(TaskTrainer, "_wrong_logit", lambda self: next(values))
    learner = make_learner(base, "bridge", text_rank=2, epochs=4, lr_schedule="epoch")
    learner.learn_task(*tasks[0])
    learner.save_pretrained(tmp_path / "saved")
    learner.learn_task(*tasks[1])
    assert trained == [0, 0, 0, 1, 1]
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    assert loaded.memory == {"epochs": torch.tensor(2)}


def test_wrong_logit_is_the_mean_over_all_wrong_classes(base, tasks):
    learner = make_learner(base)
    images, names = tasks[0]
    labels = [image["label"] for image in images]
    z = learner.image_embeds([(image["image"], 0) for image in images]).double()
    text = learner.encoder.text_embeds(names).double()
    wrong = [float(z[i] @ text[c]) for i, label in enumerate(labels) for c in range(len(names)) if c != label]
    given = learner.encoder.images(named_images(images, names))
    actual = TaskTrainer(learner.state, learner.encoder, given)._wrong_logit()
    assert actual == pytest.approx(learner.logit_scale * sum(wrong) / len(wrong), rel=1e-5)


def literal_agents(images, labels, classes, epochs, size, rate, generator):
    """Start at the means of unit features, then train in float64 with Adam on the cross-entropy of cosines."""
    z = F.normalize(images.double(), dim=1)
    agents = torch.stack([z[labels == c].mean(dim=0) for c in range(classes)]).requires_grad_()
    optimizer, step, total = torch.optim.Adam([agents]), 0, epochs * math.ceil(len(z) / size)
    for _ in range(epochs):
        for rows in torch.randperm(len(z), generator=generator).split(size):
            now = rate * (0.01 + 0.99 * (1 + math.cos(math.pi * step / total)) / 2)
            optimizer.param_groups[0]["lr"], step = now, step + 1
            optimizer.zero_grad()
            F.cross_entropy(z[rows] @ F.normalize(agents, dim=1).T, labels[rows]).backward()
            optimizer.step()
    return agents.detach()


def test_agents_equal_literal_version_and_old_agents_stay():
    classifier = classifier_of(VisualAgentRule)(
        DIM, logit_scale=20.0, epochs=3, batch_size=4, learning_rate=0.05, seed=3
    )
    texts = normal(5, DIM, seed=9)
    x, y = features(3, 10, 0)
    with torch.inference_mode():
        classifier.add_classes(["a", "b", "c"], x + 0, y + 0, texts[:3] + 0)
    old = classifier.agents.clone()
    expected = literal_agents(x, y, 3, 3, 4, 0.05, torch.Generator().manual_seed(3 * 1_000_003))
    torch.testing.assert_close(old.double(), expected, rtol=0, atol=1e-5)
    start = literal_agents(x, y, 3, 0, 4, 0.05, None)
    assert (old - start).abs().max() > 0.05 and start.norm(dim=1).max() < 0.97

    x2, y2 = features(2, 9, 1)
    classifier.add_classes(["d", "e"], x2, y2, texts)
    assert torch.equal(classifier.agents[:3], old)
    expected = literal_agents(x2, y2, 2, 3, 4, 0.05, torch.Generator().manual_seed(3 * 1_000_003 + 3))
    torch.testing.assert_close(classifier.agents[3:].double(), expected, rtol=0, atol=1e-5)

    z, e = F.normalize(x.double(), dim=1), F.normalize(texts.double(), dim=1)
    cosines = z @ F.normalize(classifier.agents.double(), dim=1).T
    mixed = ((20 * z @ e.T).softmax(dim=1) + 4 * cosines.softmax(dim=1)) / 5
    torch.testing.assert_close(classifier(x).double().exp(), mixed, rtol=1e-4, atol=1e-6)
    classifier.forget_class("b")
    kept = [0, 2, 3, 4]
    mixed = ((20 * z @ e[kept].T).softmax(dim=1) + 4 * cosines[:, kept].softmax(dim=1)) / 5
    torch.testing.assert_close(classifier(x).double().exp(), mixed, rtol=1e-4, atol=1e-6)
