"""Test features before the projection, and VIS, against literal float64 versions."""

import copy
import json
import math

import pytest
import torch
from literal_tower import literal_tower, normal
from lives import images_of, learned, stream, tiny_base, tiny_learner
from processes import run
from tiny_encoders import make_model, make_processor, save_encoder
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder, run_stream
from dulbe_peft.classifiers import TextClassifier
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.encoding import Unprojected
from dulbe_peft.encoders.loading import ImageOnlyProcessor, unit_image_embeds
from dulbe_peft.metrics.task_features import learn_from_features, read_features
from dulbe_peft.papers.vis import levels_of, mixed
from dulbe_peft.photos.deployment.formats import export_learner

IMAGES = images_of(0, 1, 2, 3, seed=9)
PIXELS = [pixels for pixels, _ in IMAGES]


def test_vis_features_equal_a_literal_version():
    learner = learned(tiny_learner("vis:hidden=5", ("lda",), learning_rate=1e-2, epochs=3), 2)
    kept = {name: tensor.double() for name, tensor in learner.memory.items()}
    actual, unchanged = learner.image_embeds(PIXELS).double(), []
    for row, pixels in enumerate(PIXELS):
        h, after = literal_tower(tiny_base()[0], pixels, {}, whole=False)
        tokens = torch.cat(after)  # the tiny tower has two blocks, which are all the levels
        hidden = [
            float(tokens @ weights + bias) for weights, bias in zip(kept["down"], kept["down_bias"], strict=True)
        ]
        hidden = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in hidden]
        u = h + kept["up"] @ torch.tensor(hidden, dtype=torch.float64) + kept["up_bias"]
        torch.testing.assert_close(actual[row], u / u.norm(), rtol=0, atol=1e-5)
        unchanged.append(h / h.norm())
    assert (actual - torch.stack(unchanged)).abs().max() > 1e-3 and actual.shape[1] == 32


def test_levels_are_those_of_the_paper_in_a_tower_of_12_blocks():
    class Tower(torch.nn.Module):
        config = tiny_base()[0].config

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(12))

    tower = Tower()
    assert [list(tower.layers).index(block) + 1 for block in levels_of(tower)] == [6, 8, 10, 12]


def test_mixer_starts_at_the_unprojected_features():
    tensors = {
        "down": normal(3, 8),
        "down_bias": normal(3),
        "up": torch.zeros(4, 3).double(),
        "up_bias": torch.zeros(4).double(),
    }
    h = normal(2, 4, seed=1)
    assert torch.equal(mixed(h, normal(2, 8), tensors), h)


def test_only_the_first_task_trains_and_one_epoch_works():
    learner = learned(tiny_learner("vis:hidden=4", ("lda",), epochs=1, batch_size=64), 1)
    first = {name: tensor.clone() for name, tensor in learner.memory.items()}
    assert len(learner.record.loss) == 1 and first["up"].abs().max() > 0 and "head" not in first
    learned(learner, 1, 1)
    assert learner.record.loss == [] and all(torch.equal(learner.memory[name], t) for name, t in first.items())


def frozen(classifiers=None, **fields):
    args = LearnerArguments(device="cpu", progress=False, prompt_template="a {}.", **fields)
    clip, processor = copy.deepcopy(tiny_base()[0]), tiny_base()[1]
    return ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers=classifiers)


def test_unprojected_features_are_what_the_projection_reads():
    learner = frozen(features="unprojected")
    assert list(learner.classifiers) == ["bayes", "lda"]
    actual = learner.image_embeds(PIXELS)
    for row, pixels in enumerate(PIXELS):
        h, _ = literal_tower(tiny_base()[0], pixels, {}, whole=False)
        torch.testing.assert_close(actual[row].double(), h / h.norm(), rtol=0, atol=1e-5)
    weight = tiny_base()[0].visual_projection.weight.detach()
    projected = frozen().image_embeds(PIXELS)
    torch.testing.assert_close(F.normalize(actual @ weight.T, dim=1), projected, rtol=0, atol=1e-5)


def test_store_never_returns_features_of_the_other_kind(tmp_path):
    store, (task,) = FeatureStore(tmp_path / "store"), stream(1)
    kinds = {}
    for kind in ("projected", "unprojected", "projected", "unprojected"):
        learner = frozen(("lda",), features=kind)
        learner.use_store(store)
        learner.learn_task(task.train)
        z = learner.image_embeds([task.train[0]["image"]])
        assert z.shape[1] == (16 if kind == "projected" else 32)
        assert torch.equal(kinds.setdefault(kind, z), z)


@pytest.mark.slow
def test_unprojected_learner_is_saved_merged_and_renamed_but_not_exported(tmp_path):
    few = ("bayes:features=20", "lda")
    learner = learned(frozen(few, features="unprojected"), 1)
    learner.save_pretrained(tmp_path / "saved")
    base = copy.deepcopy(tiny_base()[0])
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", base)
    assert torch.equal(loaded.image_embeds(PIXELS), learner.image_embeds(PIXELS))
    assert loaded.args.features == "unprojected" and loaded.predict(PIXELS) == learner.predict(PIXELS)
    other = learned(frozen(few, features="unprojected"), 1, 1)
    names = [*learner.class_names, *other.class_names]
    assert list(learner.merge(other).class_names) == names
    learner.rename_class(names[0], "renamed")
    assert learner.class_names[0] == "renamed"
    with pytest.raises(
        ValueError, match="cannot be exported: features='unprojected' changes how each image is encoded"
    ):
        export_learner(learner, tmp_path / "out", "onnx")
    with pytest.raises(ValueError, match="has learned 'unprojected' features"):
        ClassIncrementalLearner.from_pretrained(
            tmp_path / "saved", copy.deepcopy(tiny_base()[0]), args=LearnerArguments(device="cpu", progress=False)
        )
    plain = learned(frozen(few), 1, 2)
    for one, two in ((plain, loaded), (loaded, plain)):
        with pytest.raises(ValueError, match="encode images with different models or settings: encoding differ"):
            one.merge(two)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: frozen(("bridge",), features="unprojected"),
            "'bridge' cannot compare names with features='unprojected'",
        ),
        (lambda: frozen(("text:text_dim=16",)), "the 'text' classifier has no setting 'text_dim'"),
        (
            lambda: frozen(TextClassifier(16, 100.0, text_dim=16)),
            "'text' has a text_dim, which only features='unprojected' gives it",
        ),
        (lambda: frozen(TextClassifier(32, 100.0), features="unprojected"), "'text' cannot compare names with"),
        (lambda: tiny_learner("vis", ("text",)), "names have no place among the features of the strategy 'vis'"),
        (lambda: tiny_learner("aper", ("lda",), features="unprojected"), "the strategy 'aper' defines the features"),
    ],
)
def test_what_does_not_fit_unprojected_features_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("model_type", ["siglip", "vit"])
def test_models_without_a_projection_are_refused_in_one_sentence(model_type):
    args = LearnerArguments(device="cpu", progress=False, features="unprojected")
    model, processor = make_model(model_type), make_processor(model_type)
    processor = processor if model_type == "siglip" else ImageOnlyProcessor(processor)
    with pytest.raises(ValueError, match="does not project its image features: leave features at 'projected'"):
        ClassIncrementalLearner(model, processor, args=args, strategy="frozen", classifiers=("lda",))


@pytest.mark.parametrize("model_type", ["metaclip_2", "chinese_clip", "altclip"])
def test_other_dual_encoders_project_what_unprojected_reads(model_type):
    model = make_model(model_type)
    pixels = torch.stack(PIXELS)
    with torch.no_grad():
        wide = Unprojected().image_embeds(model, pixels, None)
        expected = F.normalize(model.visual_projection(wide * 7), dim=1)
    if model.visual_projection.bias is None:
        torch.testing.assert_close(expected, unit_image_embeds(model, pixels), rtol=0, atol=1e-5)
    assert wide.shape[1] == Unprojected().width(model)


@pytest.mark.slow
def test_names_are_compared_with_the_projection_of_unprojected_features(tmp_path):
    """With them, `text` is what it is on projected features, and `bayes` reads names, also in a fresh process."""
    base = str(save_encoder("clip", tmp_path / "base"))
    learners, classifiers = {}, ("text", "bayes:features=20", "lda")
    for kind in ("projected", "unprojected"):
        args = LearnerArguments(device="cpu", progress=False, prompt_template="a {}.", features=kind)
        given = load_dual_encoder(base)
        learner = ClassIncrementalLearner(*given, args=args, strategy="frozen", classifiers=classifiers)
        learners[kind] = learned(learner, 2)
    plain, learner = learners.values()
    logits = {kind: each.classifiers["text"](each.image_embeds(PIXELS)) for kind, each in learners.items()}
    torch.testing.assert_close(logits["unprojected"], logits["projected"], rtol=1e-4, atol=1e-4)
    assert learner.predict(PIXELS) == plain.predict(PIXELS)
    bayes, weight = learner.classifiers["bayes"], learner.clip.visual_projection.weight
    assert bayes.text_embeds.any() and torch.equal(bayes.projection, weight)
    assert bayes.sums.shape[1] == 32 + 16 + 20 and learner.classifiers["lda"].sums.shape[1] == 32
    learner.rename_class("a0", "another")
    assert not torch.equal(bayes.text_embeds, learner.classifiers["bayes"].text_embeds)
    learner.save_pretrained(tmp_path / "saved")
    torch.save(torch.stack(PIXELS), tmp_path / "pixels.pt")
    code = (
        "import sys, json, torch; from dulbe_peft import ClassIncrementalLearner as L\n"
        "f = sys.argv[1]\n"
        "l = L.from_pretrained(f + '/saved'); x = l.image_embeds(list(torch.load(f + '/pixels.pt')))\n"
        "print(json.dumps({name: each(x).tolist() for name, each in l.classifiers.items()}))"
    )
    done = run("-c", code, tmp_path, check=True)
    for name, scores in json.loads(done.stdout.splitlines()[-1]).items():
        expected = learner.classifiers[name](learner.image_embeds(PIXELS))
        torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-5, atol=1e-5)


def test_stream_on_unprojected_features_is_learned_again_from_its_features(tmp_path):
    learner, tasks = frozen(("text", "bayes:features=0"), features="unprojected"), stream(2)
    results = run_stream(learner, tasks, tmp_path / "run", keep_features=True).contents()
    assert results["text"] == results["classifiers"]["text"]
    assert results["text"]["overall"] == results["zero_shot"]["overall"]  # which is computed from projected features
    stored = read_features(tmp_path / "run")
    for name, spec in {"text": "text", "bayes": "bayes:features=0"}.items():
        _, again = learn_from_features(stored, spec, learner.logit_scale)
        features = learner.image_embeds(PIXELS)
        torch.testing.assert_close(again(features), learner.classifiers[name](features))


def test_adapters_may_change_the_tower_but_not_the_projection():
    learner = learned(tiny_learner("lora", ("text", "bayes:features=20"), features="unprojected"), 2)
    assert learner.image_embeds(PIXELS).shape[1] == 32 and len(learner.predict(PIXELS)) == len(PIXELS)
    with pytest.raises(ValueError, match="but the projection that names need has a bias or an adapter"):
        tiny_learner("lora", ("text",), {"target_modules": ["visual_projection"]}, features="unprojected")
