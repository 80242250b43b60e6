"""onnxruntime and OpenVINO encode images as torch does; otherwise they are refused, or torch encodes and says so."""

import hashlib
import json

import pytest
import torch
from lives import images_of, stream, tiny_learner
from tiny_encoders import make_model, make_processor

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, Task, run_stream
from dulbe_peft.data.store import FeatureStore, store_path
from dulbe_peft.encoders import backends

pytest.importorskip("onnxruntime")
PIXELS = torch.stack([image for image, _ in images_of(0, 1, 2, 3, 0, 1, 2, 3, 0, 1)])
BACKENDS = ["onnx", "openvino"]
GRAPHS, WRITE = {}, backends.onnx_graphs.write_graph  # an export takes seconds, so each model is exported once


@pytest.fixture(autouse=True)
def _graphs_written_once(monkeypatch):
    def write(file, module, *given):
        key = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())).digest()
        if key not in GRAPHS:
            WRITE(file, module, *given)
            GRAPHS[key] = file.read_bytes()
        file.write_bytes(GRAPHS[key])

    monkeypatch.setattr(backends.onnx_graphs, "write_graph", write)


def using(backend, strategy="frozen", **fields):
    pytest.importorskip(backends.PACKAGES[backend])
    return tiny_learner(strategy, backend=backend, **fields)


def load(folder, **machine):
    return ClassIncrementalLearner.from_pretrained(folder, make_model("clip"), machine=machine)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_tower_equals_torch_and_is_exported_once(backend, monkeypatch, capsys):
    learner, torch_learner = using(backend), tiny_learner("frozen")
    expected = torch_learner.image_embeds(PIXELS)
    torch.testing.assert_close(learner.image_embeds(PIXELS), expected, atol=2e-6, rtol=0)
    printed = capsys.readouterr().err
    assert printed.count("exported once") == 1
    assert "lowest cosine 1.00000, equal predictions on 100.0 % of 10 images" in printed
    key, other = learner.encoder.key, torch_learner.encoder.key
    assert (key.backend, other.backend) == (backend, "torch") and key.fingerprint != other.fingerprint
    # A second process finds the graph and the recorded comparison.
    with monkeypatch.context() as patch:
        patch.setattr(backends.onnx_graphs, "write_graph", None)
        patch.setattr(backends.Tower, "check", None)
        again = using(backend)
        assert torch.equal(again.image_embeds(PIXELS), learner.image_embeds(PIXELS)) and again.encoder.key == key
    (graph,) = store_path().with_suffix(".encoders").glob("*.onnx")
    graph.write_bytes(graph.read_bytes()[:-100])  # a damaged graph is exported and compared again
    assert torch.equal(using(backend).image_embeds(PIXELS), learner.image_embeds(PIXELS))
    assert "exported once" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_trained_learner_is_exported_with_its_adapter_and_torch_encodes_inside_scaled(backend, tmp_path):
    trained = using(backend, "dulbe")
    for task in stream(2):
        trained.learn_task(task.train, task.class_names)
    assert trained.encoder.tower is None, "a tower that changes at every task is not exported"
    trained.save_pretrained(tmp_path / "saved")
    fast, plain = load(tmp_path / "saved", backend=backend), load(tmp_path / "saved")
    assert fast.encoder.tower is not None
    torch.testing.assert_close(fast.image_embeds(PIXELS), plain.image_embeds(PIXELS), atol=2e-6, rtol=0)
    with fast.scaled(0.5), plain.scaled(0.5):
        assert torch.equal(fast.image_embeds(PIXELS), plain.image_embeds(PIXELS))
    tests = [(task.test, task.class_names) for task in stream(2)]
    assert fast.zero_shot(tests) == plain.zero_shot(tests)
    assert fast.predict(PIXELS) == plain.predict(PIXELS)


@pytest.mark.slow
def test_backend_that_disagrees_with_torch_is_refused_without_force(monkeypatch):
    real = backends.onnx_graphs.session

    def rotated(file):
        run = real(file)
        return lambda rows: run(rows).roll(1, dims=1)

    monkeypatch.setattr(backends.onnx_graphs, "session", rotated)
    learner = using("onnx")
    learner.use_store(FeatureStore())
    message = r"lowest cosine -?0\.\d+, equal predictions on \d+\.\d % of 10 images; --force"
    with pytest.raises(ValueError, match=message):
        learner.image_embeds(PIXELS)
    assert learner.encoder.store.facts()[0] == 0, "refused features are not stored"
    forced, checks, check = using("onnx", force=True, eval_batch_size=4), [], backends.Tower.check
    monkeypatch.setattr(backends.Tower, "check", lambda *args: (checks.append(1), check(*args)))
    actual = forced.image_embeds(PIXELS)
    torch.testing.assert_close(actual, tiny_learner("frozen").image_embeds(PIXELS).roll(1, dims=1), atol=2e-6, rtol=0)
    assert len(checks) == 1, "after --force, further batches are not compared"
    with pytest.raises(ValueError, match="--force"):  # a later process without --force compares again
        using("onnx").image_embeds(PIXELS)


def test_bfloat16_may_change_near_ties_but_not_clear_predictions(tmp_path):
    using("onnx").image_embeds(PIXELS)
    (file,) = store_path().with_suffix(".encoders").glob("*.onnx")
    tower = backends.Tower(file, "onnx", "float32")
    draw = torch.Generator().manual_seed(0)
    alike = torch.nn.functional.normalize(torch.ones(20, 16) + 0.01 * torch.randn(20, 16, generator=draw), dim=1)
    moved = torch.nn.functional.normalize(alike + 0.004 * torch.randn(20, 16, generator=draw), dim=1)
    assert backends.equal_answers(moved, alike, None) < 18
    with pytest.raises(ValueError, match="equal predictions"):
        tower.check(moved, alike, None, force=False)
    tower.precision = "bfloat16"
    tower.check(moved, alike, None, force=False)
    ends = torch.eye(16)[:2]  # two classes whose scores differ by more than rounding
    between = torch.nn.functional.normalize(ends[:1] + ends[1:] + 0.02 * torch.randn(20, 16, generator=draw), dim=1)
    other = torch.nn.functional.normalize(
        between - 0.02 * (between @ (ends[0] - ends[1])).sign()[:, None] * (ends[0] - ends[1]), dim=1
    )
    assert float((between * other).sum(dim=1).min()) > backends.LEAST_COSINE["bfloat16"]
    with pytest.raises(ValueError, match="equal predictions"):
        tower.check(other, between, lambda rows: rows @ ends.T, force=False)
    with pytest.raises(ValueError, match="lowest cosine"):
        tower.check(-alike, alike, None, force=False)


def test_int8_quantises_queries_keys_and_the_first_layer_of_each_mlp():
    onnx = pytest.importorskip("onnx")
    learner = using("onnx")
    learner.image_embeds(PIXELS)
    (file,) = store_path().with_suffix(".encoders").glob("*.onnx")
    nodes = onnx.load(file).graph.node
    in_float = backends._products_in_float(nodes)
    in_int8 = [node for node in nodes if node.op_type in ("MatMul", "Gemm") and node.name not in in_float]
    modules = [next(entry.value for entry in node.metadata_props if entry.key == "namespace") for node in in_int8]
    blocks = learner.model.config.vision_config.num_hidden_layers
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.fc1"):
        assert sum(f".{name}: " in module for module in modules) == blocks, name
    assert len(modules) == 3 * blocks < len(in_float)


def test_torch_encodes_a_model_that_cannot_be_exported_and_a_message_says_so(capsys):
    args = LearnerArguments(device="cpu", progress=False, backend="onnx")
    clip, processor = make_model("siglip2"), make_processor("siglip2")
    learner = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen")
    assert learner.encoder.key.backend == "torch"
    assert "torch encodes instead of onnx: SigLIP 2 NaFlex computes positions" in capsys.readouterr().err


def test_missing_package_and_unsupported_precision_are_named_in_the_error(monkeypatch):
    with pytest.raises(ValueError, match="precision 'bfloat16' is not supported by onnxruntime on a CPU"):
        LearnerArguments(precision="bfloat16", backend="onnx")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'ONNX needs the package onnxruntime: pip install "\.\[onnx\]"'):
        tiny_learner("frozen", backend="onnx").image_embeds(PIXELS)


def test_equal_answers_compares_classes_or_nearest_images():
    features = torch.nn.functional.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    others = features.roll(1, dims=0)
    assert backends.equal_answers(features, features, None) == 6
    assert backends.equal_answers(others, features, None) < 6
    assert backends.equal_answers(features[:1], features[:1], None) == 1
    weight = torch.eye(8)[:3]

    def scores(rows):
        return rows @ weight.T

    wrong = features.clone()
    wrong[0, int((features[0, :3]).argmin())] = 5.0
    assert backends.equal_answers(wrong, features, scores) == 5
    twins = torch.stack([features[0], features[0], features[1]])  # either of two equal images may be the nearest
    assert backends.equal_answers(twins + 1e-8, twins, None) == 3


def test_comparison_with_torch_uses_the_learned_classifier(monkeypatch):
    used_scores = []
    real = backends.equal_answers
    monkeypatch.setattr(
        backends, "equal_answers", lambda a, b, scores, *tie: used_scores.append(scores) or real(a, b, scores, *tie)
    )
    learner = using("onnx")
    learner.image_embeds(PIXELS)
    assert used_scores[0] is None, "without class names, nearest images are compared"
    records = next(store_path().with_suffix(".encoders").glob("*.json"))
    records.unlink()
    learner = using("onnx")
    learner.learn_task(images_of(0, 1, 0, 1), ["a", "b"])
    # Before anything is learned, the class names give the scores.
    assert used_scores[1](PIXELS.new_zeros(1, learner.encoder.embed_dim)).shape == (1, 2)
    records.unlink()
    features = learner.image_embeds(PIXELS)
    assert torch.equal(used_scores[2](features), learner.classifier.logits(features))
    (record,) = (record for name, record in json.loads(records.read_text()).items() if name != "graph")
    assert record["images"] == 10 and record["equal"] == 10


@pytest.fixture
def photographs():
    pytest.importorskip("nncf")
    return images_of(*[0, 1, 2] * 20)


def test_int8_is_calibrated_on_training_images_and_reports_its_agreement(photographs, tmp_path, capsys):
    learner = using("openvino", precision="int8", force=True)
    with pytest.raises(ValueError, match="int8 must be calibrated on images first"):
        _ = learner.encoder.key
    learner.learn_task(photographs, ["a", "b", "c"])
    printed = capsys.readouterr()
    assert "int8 is calibrated on 30 images" in printed.err and "% of 30 images" in printed.err and not printed.out
    key = learner.encoder.key
    assert (key.precision, key.backend) == ("int8", "openvino") and learner.state.graph == learner.encoder.graph
    actual = learner.image_embeds(PIXELS)
    assert 0.9 < float((actual * tiny_learner("frozen").image_embeds(PIXELS)).sum(dim=1).min()) < 1
    learner.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.args.precision == "int8" and again.encoder.key == key
    assert torch.equal(again.image_embeds(PIXELS), actual)
    assert "openvino in int8, compared with torch in float32" in capsys.readouterr().err
    for graph in store_path().with_suffix(".encoders").glob("*.onnx"):
        graph.unlink()
    assert load(tmp_path / "saved").args.precision == "float32"
    assert "learned in int8, but this machine uses float32" in capsys.readouterr().err


def test_int8_below_99_percent_needs_force(photographs, monkeypatch):
    monkeypatch.setattr(backends, "equal_answers", lambda actual, *_: len(actual) - 1)
    with pytest.raises(ValueError, match=r"equal predictions on 96.7 % of 30 images; --force uses it"):
        using("openvino", precision="int8").learn_task(photographs, ["a", "b", "c"])
    assert using("openvino", precision="int8", force=True).image_embeds(PIXELS.repeat(3, 1, 1, 1)).isfinite().all()


def test_int8_refuses_other_backends_few_images_and_training(photographs):
    with pytest.raises(ValueError, match="precision 'int8' needs the backend 'openvino', got the backend 'torch'"):
        LearnerArguments(precision="int8")
    with pytest.raises(ValueError, match="int8 needs at least 16 images for its calibration .* got 10 images"):
        using("openvino", precision="int8").image_embeds(PIXELS)
    with pytest.raises(ValueError, match="precision is 'int8', in which no model can be trained"):
        using("openvino", "dulbe", precision="int8").learn_task(photographs, ["a", "b", "c"])


def test_int8_run_is_calibrated_once_and_resumes_with_its_graph(photographs, tmp_path, capsys):
    first, second = [Task(photographs, photographs[:6], names) for names in (("a", "b", "c"), ("d", "e", "f"))]
    run_stream(using("openvino", precision="int8", force=True), [first], tmp_path)
    again = using("openvino", precision="int8", force=True)
    capsys.readouterr()
    run_stream(again, [first, second], tmp_path)
    assert "calibrated" not in capsys.readouterr().err and again.state.graph == again.encoder.graph
