"""Test the measures of the paper's diagnostic figures against float64 loops that follow their definitions."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from scipy.stats import spearmanr
from small_runs import learner_of, tasks_of
from tiny_encoders import IMAGE_SIZE, OF_ONE_SIZE, make_model
from torch.nn import functional as F

from dulbe_peft import BridgeEnsembleHead, ClassIncrementalLearner, run_stream
from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.classifiers.teaching import ClosingPass
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.metrics.task_features import TaskFeatures
from dulbe_peft.photos.report import read_run
from dulbe_peft.streams.progress import known_tasks
from research.__main__ import run
from research.diagnostics.inspection import inspect_task, token_relevance
from research.diagnostics.measures import (
    coordinate_drift,
    coordinate_plane,
    depth_accuracy,
    drift_by_task,
    layer_demands,
    rank_similarity,
    reliability_profile,
)
from research.diagnostics.training_effects import read_effects


def unit(*shape):
    return F.normalize(torch.randn(*shape), dim=-1)


def test_layer_demands_equal_explicit_projections():
    gradient, tokens = torch.randn(6, 10), torch.randn(40, 10) * torch.linspace(3, 0.1, 10)
    history = tokens.T @ tokens
    demand = layer_demands({"a": gradient}, {"a": history}, 1, 2, support_rank=4)["a"]
    grad, (_, vectors) = gradient.double().numpy(), np.linalg.eigh(history.double().numpy())
    occupied = vectors[:, ::-1][:, :4]
    energy = (grad**2).sum()
    inside = np.linalg.svd(grad @ occupied)[1] ** 2 / energy
    outside = np.linalg.svd(grad @ (np.eye(10) - occupied @ occupied.T))[1] ** 2 / energy
    assert demand.energy == pytest.approx(energy) and demand.chance == 0.4
    shares = (demand.occupied, demand.shared, demand.residual, demand.neither)
    neither = inside[1:].sum() + outside[2:].sum()
    assert shares == pytest.approx((inside.sum(), inside[0], outside[:2].sum(), neither), abs=1e-6)
    demand = layer_demands({"a": torch.zeros(3, 4)}, None, 1, 1)["a"]
    assert (demand.occupied, demand.chance, demand.energy, demand.shared, demand.residual) == (None, None, 0, 0, 0)


@pytest.fixture
def head():
    head = BridgeEnsembleHead(8, num_depths=4, reliability_temperature=0.05, logit_scale=10.0)
    labels = torch.arange(5).repeat(6)
    centres = unit(5, 8)
    head.add_classes(list("abcde"), F.normalize(centres[labels] + 0.4 * torch.randn(30, 8), dim=1), labels, unit(5, 8))
    return head, F.normalize(centres[labels] + 0.6 * torch.randn(30, 8), dim=1), labels


def test_depth_accuracy_equals_loops_over_images(head):
    head, features, labels = head
    accuracy = depth_accuracy(head, features, labels)
    visual, texts = head.visual_prototypes.double(), head.text_embeds.double()
    bridges = [[reference.slerp(visual[c], texts[c], float(a)) for a in head.depths.double()] for c in range(5)]
    hits = {"uniform": 0, "weighted": 0}
    alone = torch.zeros(5, 4, dtype=torch.float64)
    for feature, label in zip(features.double(), labels.tolist(), strict=True):
        scores = torch.tensor([[float(feature @ b) for b in row] for row in bridges], dtype=torch.float64)
        alone[label] += scores.argmax(dim=0) == label
        hits["uniform"] += int(scores.sum(dim=1).argmax()) == label
        hits["weighted"] += int((scores * head.reliability.double()).sum(dim=1).argmax()) == label
    assert torch.allclose(accuracy.classes, alone / 6)
    assert torch.allclose(accuracy.alone, alone.sum(dim=0) / 30)
    assert accuracy.uniform == pytest.approx(hits["uniform"] / 30)
    assert accuracy.weighted == pytest.approx(hits["weighted"] / 30)
    assert len(set(accuracy.alone.tolist())) > 1, "with equal depths, the test would not detect swapped ones"
    profile, weights = reliability_profile(head), head.reliability.double().numpy()
    assert np.allclose(profile.mean, weights.mean(axis=0)) and np.allclose(profile.spread, weights.std(axis=0))
    assert np.allclose(profile.expected, weights @ np.linspace(0, 1, 4), atol=1e-6)


def test_coordinate_plane_contains_the_two_principal_components():
    before, after, texts = unit(20, 6), unit(20, 6), unit(5, 6)
    start, end = coordinate_plane(before, after, texts[:2])
    assert torch.allclose((end - start).norm(dim=1), coordinate_drift(before, after, texts[:2]))
    start, end = coordinate_plane(before, after, texts)
    points = (torch.cat([before, after]).double() @ texts.double().T).numpy()
    values = np.linalg.svd(points - points.mean(axis=0))[1]
    assert np.allclose(np.linalg.norm(torch.cat([start, end]).numpy(), axis=0), values[:2])


def test_rank_similarity_equals_spearman_for_every_row():
    before, after = torch.randn(4, 6), torch.randn(4, 6)
    before[0, :3] = 1.0  # ties
    expected = [spearmanr(a, b).statistic for a, b in zip(before, after, strict=True)]
    assert rank_similarity(before, after).tolist() == pytest.approx(expected)


def stream(*moves):
    """Return tasks of two classes each in 6 dimensions; each later task multiplies all features by a matrix."""
    count, labels, turn = len(moves) + 1, torch.arange(2).repeat(4), torch.eye(6)
    centres, texts, tasks = unit(2 * count, 6), unit(2 * count, 6), []

    def images(task):
        return F.normalize(centres[2 * task + labels] + 0.3 * unit(8, 6), dim=1)

    tests = [images(task) for task in range(count)]
    for t, move in enumerate([torch.eye(6), *moves]):
        training = images(t)
        before, turn = training @ turn, turn @ move
        closing = ClosingPass((f"{t}a", f"{t}b"), training @ turn, labels, before, texts[: 2 * (t + 1)])
        tasks.append(TaskFeatures(closing, {s + 1: (tests[s] @ turn, labels + 2 * s) for s in range(t + 1)}))
    return tasks


def rotation():
    return torch.linalg.qr(torch.eye(6) + 0.3 * torch.randn(6, 6)).Q


def test_drift_by_task_equals_loops_over_classes():
    tasks = stream(rotation(), rotation())
    rows = drift_by_task(tasks)
    assert [row.task for row in rows] == [2, 3]
    last, earlier, task = rows[1], tasks[1], tasks[2]
    assert last.own == pytest.approx(float((task.closing.before * task.closing.features).sum(1).mean()), abs=1e-6)
    before, after = (torch.cat([t.tests[n][0] for n in (1, 2)]).double() for t in (earlier, task))
    truth = torch.cat([task.tests[n][1] for n in (1, 2)])
    assert last.old == pytest.approx(float((before * after).sum(dim=1).mean()), abs=1e-6)
    first = earlier.closing.texts[:2].double()
    assert last.coordinates == pytest.approx(float(((after - before) @ first.T).norm(dim=1).mean()), abs=1e-6)
    matrix = linear_map(task.closing.before, task.closing.features)
    means, mapped, ranks, foretold = [], [], [], []
    for c in range(4):
        old, new = (F.normalize(part[truth == c].mean(dim=0), dim=0) for part in (before, after))
        means.append(float(old @ new))
        mapped.append(float(new @ F.normalize(old @ matrix, dim=0)))
        texts = earlier.closing.texts.double()
        ranks.append(spearmanr(texts @ old, texts @ new).statistic)
        closing = tasks[c // 2].closing
        stored = F.normalize(closing.features[closing.labels == c % 2].double().mean(dim=0), dim=0)
        foretold.append(float(stored @ F.normalize(stored @ matrix, dim=0)))
    for name, values in (("means", means), ("mapped", mapped), ("ranks", ranks), ("foretold", foretold)):
        assert getattr(last, name) == pytest.approx(np.mean(values), abs=1e-5), name
    still = drift_by_task(stream(torch.eye(6)))[0]
    assert still.old == pytest.approx(1) and still.ranks == pytest.approx(1) and still.coordinates < 1e-6


def test_drift_by_task_is_none_without_the_features():
    first, second = stream(rotation())
    bare = TaskFeatures(ClosingPass(second.closing.class_names, second.closing.features, second.closing.labels), {})
    row = drift_by_task([first, bare])[0]
    assert row.task == 2 and {value for name, value in vars(row).items() if name != "task"} == {None}
    textless = drift_by_task([TaskFeatures(replace(first.closing, texts=None), first.tests), second])[0]
    assert textless.ranks is None and textless.old is not None


@pytest.fixture(scope="module")
def trained(base, digit_folders, tmp_path_factory):
    """Return a learner of two tasks, its folder, and the stream of three tasks."""
    learner = learner_of(base, classifiers=None, drift="linear")
    tasks, folder = tasks_of(digit_folders(6, 6, 3)), tmp_path_factory.mktemp("run")
    run_stream(learner, tasks[:2], folder, keep_features=True)
    return learner, folder, tasks


@pytest.mark.slow
def test_inspect_task_foretells_the_captures_of_learning_it(trained):
    learner, folder, tasks = trained
    before = copy.deepcopy(learner.model.state_dict())
    demands = inspect_task(learner, tasks[2].train, tasks[2].class_names)
    assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())
    assert list(demands) == list(learner.state.adapter.dual_mode_layers())
    assert all(0 < row.chance < 1 and row.shared <= row.occupied + 1e-6 for row in demands.values())
    again = ClassIncrementalLearner.from_pretrained(folder / "task-002")
    again.learn_task(tasks[2].train, tasks[2].class_names)
    for kind in ("shared", "residual"):
        mean = np.mean([getattr(row, kind) for row in demands.values()])
        assert getattr(again.record, f"{kind}_capture") == pytest.approx(mean, abs=1e-5)


def relevance_by_differences(model, pixels, prototype):
    """Compute gradient times activation from central differences, without autograd or hooks."""
    tower = model.vision_model
    block = tower.encoder.layers[1]
    residual = tower.encoder.layers[0](tower.pre_layrnorm(tower.embeddings(pixels)), attention_mask=None)
    normed = block.layer_norm1(residual)

    def similarity(tokens):
        hidden = residual + block.self_attn(hidden_states=tokens, attention_mask=None)[0]
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
        pooled = tower.post_layernorm(hidden[:, 0])
        return (F.normalize(model.visual_projection(pooled), dim=1) @ prototype)[0]

    relevance = torch.zeros(normed.shape[1], dtype=torch.float64)
    for token in range(normed.shape[1]):
        for channel in range(normed.shape[2]):
            step = torch.zeros_like(normed)
            step[0, token, channel] = 1e-5
            slope = (similarity(normed + step) - similarity(normed - step)) / 2e-5
            relevance[token] += slope * normed[0, token, channel]
    return relevance[1:].reshape(2, 2)


def test_token_relevance_equals_finite_differences(tiny_clip, monkeypatch):
    model = tiny_clip().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    monkeypatch.setattr(
        "dulbe_peft.encoders.loading._unit", lambda out: F.normalize(getattr(out, "pooler_output", out), dim=1)
    )
    pixels, prototypes = torch.randn(2, 3, 16, 16, dtype=torch.float64), unit(3, 16).double()
    maps = token_relevance(model, pixels, prototypes)
    assert maps.shape == (2, 3, 2, 2) and not maps.requires_grad
    with torch.no_grad():
        expected = relevance_by_differences(model, pixels[1:], prototypes[2])
    assert torch.allclose(maps[1, 2], expected, rtol=1e-5, atol=1e-8)
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("model_type", OF_ONE_SIZE)
def test_every_supported_encoder_has_relevance_maps(model_type):
    model = make_model(model_type).eval()
    pixels = torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    width = unit_image_embeds(model, pixels).shape[1]
    maps = token_relevance(model, pixels, unit(2, width))
    assert maps.shape == (1, 2, 2, 2) and maps.abs().amax() > 1e-3


@pytest.mark.slow
def test_figures_command_writes_all_figures_and_their_numbers(trained, tmp_path, capsys):
    learner, folder, _ = trained
    out = tmp_path / "pictures"
    assert run(["figures", str(folder), "--output", str(out)]) == 0
    names = {"diagnostics.json", "captures.png", "depths.png", "drift-task-002.png"}
    printed, effects = capsys.readouterr().out, read_effects(read_run(folder))
    assert {path.name for path in out.iterdir()} == names and all(str(out / name) in printed for name in names)
    numbers = json.loads((out / "diagnostics.json").read_text())
    assert numbers["drift"] == [vars(row) for row in effects.drift]
    assert numbers["depths"]["alone"] == effects.accuracy.alone.tolist()
    assert numbers["reliability"]["spread"] == effects.profile.spread.tolist()
    recorded = known_tasks(learner)[-1].row.classifiers["pooled_bridge"].accuracy
    assert effects.accuracy.weighted == pytest.approx(recorded)
    assert None not in vars(effects.drift[0]).values() and effects.drift[0].old < 1 and effects.drift[0].own < 1
    weights = learner.head.reliability.double().cpu()
    torch.testing.assert_close(effects.profile.mean, weights.mean(dim=0))
    torch.testing.assert_close(effects.profile.spread, weights.std(dim=0, correction=0))
