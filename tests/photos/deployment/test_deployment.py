"""Test exports of learners: the code of their cards runs without this package and gives the same probabilities."""

import copy
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_encoders as tiny
import torch
from documents import blocks
from peft import get_peft_model
from PIL import ExifTags, Image
from tiny_encoders import CONFIG, QUICK
from transformers import pipeline

from dulbe_peft import CLASSIFIERS, ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, load_dual_encoder
from dulbe_peft.classifiers import Classifier
from dulbe_peft.classifiers.checks import random_features
from dulbe_peft.classifiers.prototype import PrototypeRule
from dulbe_peft.encoders import onnx_graphs
from dulbe_peft.photos.deployment import graph
from dulbe_peft.photos.deployment.formats import export_learner
from dulbe_peft.photos.deployment.parts import checked_formula

SHAPES = ((20, 26), (64, 48), (16, 16), (7, 90), (33, 31))
WIDE = ("ranpac:features=50", "bayes:features=50")
WITH_TEXT = ("bridge", "text", "pooled_bridge", "lda", *WIDE, "visual_agent", "bofa", "ridge", "gda")
WITH_TEXT += ("rapf", "slca:epochs=1", "engine", "proof:epochs=1", "clap4clip:epochs=1")
WITH_TEXT += ("clg_cbm:epochs=30,learning_rate=0.03", "linear_head:epochs=5,batch_size=2")
IMAGES_ALONE = ("ranpac:features=50", "lda", "prototype")
# model type -> pairs of a format and the classifier that is exported
CASES = {
    "clip": [("lora", name.partition(":")[0]) for name in WITH_TEXT]
    + [("transformers", "bridge"), ("onnx", "ranpac")],
    "siglip": [("lora", "bridge"), ("transformers", "lda"), ("onnx", "bridge")],
    "siglip2": [("lora", "bridge"), ("transformers", "lda")],
    "dinov2": [("transformers", "lda"), ("onnx", "lda")],
    "vit": [("transformers", "prototype")],
}
TORCH_READER = """
    import json, re, sys
    from pathlib import Path
    sys.modules["dulbe_peft"] = None  # makes any import of it fail
    blocked = sys.argv[2:]
    for name in blocked:
        sys.modules[name] = None
    root = Path(sys.argv[1])
    found = {}
    for folder in json.loads((root / "cases.json").read_text()):
        text = (root / folder / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"```python\\n(.*?)```", text, flags=re.DOTALL)
        code = code.replace("path/to/this/folder", str(root / folder))
        found[folder] = []
        for photo in sorted((root / "photos").iterdir()):
            space = {"__name__": "lines"}
            exec(code.replace("photo.jpg", str(photo)), space)
            if "classify" in space:
                scores = {row["label"]: row["score"] for row in space["classify"](str(photo), top_k=None)}
                names = space["classify"].model.config.id2label
                found[folder].append([scores[names[place]] for place in range(len(names))])
            else:
                found[folder].append([float(p) for p in space["probabilities"][0]])
    (root / "found.json").write_text(json.dumps(found))
    assert not any(name.startswith("dulbe") and module for name, module in sys.modules.items())
"""


def photos():
    noise = np.random.default_rng(3)
    return [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in SHAPES]


def write_photos(folder):
    """Write the photos, and a JPEG that the learner decodes at half its size; return the paths in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, photo in enumerate(photos()):
        photo.save(folder / f"{number}.png")
    noise = np.random.default_rng(4).integers(0, 256, (1280, 1600, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(noise).resize((80, 64)).resize((1600, 1280)).save(folder / "large.jpg", quality=50, exif=exif)
    return sorted(folder.iterdir())


def learned(model_type, root):
    """Return a learner of two tasks with three images per class; an adapter, if any, changes the model's features."""
    torch.manual_seed(0)
    folder = tiny.save_encoder(model_type, root / "bases" / model_type)
    model, processor = load_dual_encoder(folder)
    args = LearnerArguments(**{**QUICK, "learning_rate": 0.01})
    text = model_type not in tiny.IMAGE_ONLY
    if text:
        model = get_peft_model(model, DualModeLoraConfig(**CONFIG))
    strategy, classifiers = ("dulbe", WITH_TEXT) if text else ("frozen", IMAGES_ALONE)
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)
    noise = np.random.default_rng(1)
    for first, names in ((0, ["cat", "dog"]), (2, ["bird", "cod"])):
        images = [noise.integers(30 * (first + label), 255, (16, 16, 3), np.uint8) for label in (0, 0, 0, 1, 1, 1)]
        learner.learn_task(list(zip(map(Image.fromarray, images), (0, 0, 0, 1, 1, 1), strict=True)), names)
    return learner


@pytest.fixture(scope="module")
def learners(tmp_path_factory):
    """Return a function that makes, once, a learner of the given model type."""
    root = tmp_path_factory.mktemp("learners")
    return cache(lambda model_type: learned(model_type, root))


@pytest.fixture(scope="module")
def clip(learners):
    return learners("clip")


def expected(learner, name, images=None):
    with torch.no_grad():
        return learner.classifiers[name].probabilities(learner.image_embeds(photos() if images is None else images))


def run_lines(root, folders, *blocked):
    """Run the code of the folders' cards on the photos in a process that cannot import this package.

    Returns folder -> probabilities, (photos, classes).
    """
    write_photos(root / "photos")
    (root / "cases.json").write_text(json.dumps(folders))
    command = [sys.executable, "-c", textwrap.dedent(TORCH_READER), str(root), *blocked]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {folder: torch.tensor(rows) for folder, rows in json.loads((root / "found.json").read_text()).items()}


@pytest.mark.rare
@pytest.mark.parametrize(
    ("formats", "blocked"), [(("lora", "transformers"), ()), (("onnx",), ("torch", "transformers", "peft"))]
)
def test_code_of_the_cards_gives_the_classifiers_probabilities(learners, tmp_path, formats, blocked):
    """The code of ONNX exports needs neither torch nor transformers."""
    cases, temperatures, files = {}, {}, write_photos(tmp_path / "photos")
    for model_type, rows in CASES.items():
        for kind, name in rows:
            if kind in formats:
                folder = f"{model_type}-{kind}-{name}"
                export_learner(learners(model_type), tmp_path / folder, kind, name)
                cases[folder] = expected(learners(model_type), name, files)
                temperatures[folder] = learners(model_type).classifiers[name].temperature
    for folder, found in run_lines(tmp_path, list(cases), *blocked).items():
        torch.testing.assert_close(found, cases[folder], atol=1e-4, rtol=0, msg=lambda said, name=folder: name + said)
        assert torch.equal(found.argmax(dim=1), cases[folder].argmax(dim=1)), folder
        # The scores must differ between photos. They are compared before the temperature, which is chosen on two
        # held-out images and may be 1,000.
        assert (temperatures[folder] * found.log()).std(dim=0).max() > 1e-3, folder


def facts(root, folder="plain", file="classifier.json"):
    return json.loads((root / folder / file).read_text(encoding="utf-8"))


def test_export_writes_facts_and_a_card(clip, learners, tmp_path):
    export_learner(clip, tmp_path / "lora")
    written = facts(tmp_path, "lora")
    assert written["class_names"] == list(clip.class_names) and written["classifier"] == "bridge"
    assert written["prompts"][0] == f"the digit {clip.class_names[0]}."
    assert "reject_below" not in written  # there are too few images for a threshold
    export_learner(learners("vit"), tmp_path / "plain", "transformers")
    assert "prompts" not in facts(tmp_path)
    for folder, library, kind in (
        ("lora", "peft", "zero-shot-image-classification"),
        ("plain", "transformers", "image-classification"),
    ):
        card = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        assert ("also trained the model" in card) == (folder == "lora"), "the other learner's model is not trained"
        assert f"library_name: {library}\n" in card and f"pipeline_tag: {kind}\n" in card
        assert all(json.dumps(name) in card for name in clip.class_names)


@pytest.mark.parametrize("format", ["lora", "transformers"])
def test_zero_shot_pipeline_predicts_as_the_text_classifier(clip, tmp_path, format):
    rows = clip.image_embeds(photos())
    export_learner(clip, tmp_path / "plain", format)
    assert torch.equal(clip.image_embeds(photos()), rows), "the learner is unchanged"
    classify = pipeline("zero-shot-image-classification", model=str(tmp_path / "plain"), device="cpu")
    names = list(clip.class_names)
    answers = classify(photos(), candidate_labels=names, hypothesis_template=clip.args.prompt_template)
    for row, answer in zip(expected(clip, "text"), answers, strict=True):
        assert max(answer, key=lambda entry: entry["score"])["label"] == names[int(row.argmax())]


@pytest.mark.rare
def test_code_of_the_page_and_of_the_cards_agrees(tmp_path, monkeypatch, capsys):
    learn, plain = (code for *_, code in blocks("docs/deploying.md", "python"))
    monkeypatch.chdir(tmp_path)
    exec(learn, {"__name__": "page"})
    said = [capsys.readouterr().out]
    for folder in ("exported", "exported-onnx"):
        card = (tmp_path / folder / "README.md").read_text(encoding="utf-8").replace("path/to/this/folder", folder)
        (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
        assert folder != "exported" or code == plain
        exec(code, {"__name__": "card"})
        said.append(capsys.readouterr().out)
    assert said[1].split()[0] == said[2].split()[0] == said[0].strip("[']\n")
    assert float(said[1].split()[1]) == pytest.approx(float(said[2].split()[1]), abs=1e-4)


class Scores(torch.nn.Module):
    def __init__(self, function, tensors):
        super().__init__()
        self.function, self.given = function, tensors

    def forward(self, z):
        return self.function(z, **self.given)


@pytest.mark.slow
def test_formula_of_every_classifier_gives_its_scores_and_is_exportable(clip):
    z = random_features(16)
    rows, linear = torch.export.Dim("rows"), set()
    for name, classifier in clip.classifiers.items():
        tensors = checked_formula(classifier)[2]
        linear |= {name} if "bias" in tensors else set()
        del tensors["temperature"]
        module = Scores(classifier.formula()[0], tensors)
        program = torch.export.export(module, (z[:7],), dynamic_shapes={"z": {0: rows}})
        largest = float(classifier.logits(z).abs().max())
        torch.testing.assert_close(program.module()(z), classifier.logits(z), atol=1e-5 * largest, rtol=0, msg=name)
    assert linear == {
        "bridge",
        "pooled_bridge",
        "text",
        "lda",
        "gda",
        "bofa",
        "ridge",
        "bayes",
        "slca",
        "clap4clip",
        "clg_cbm",
    }
    assert {*clip.classifiers, "prototype"} == set(CLASSIFIERS)  # `prototype` is tested in CASES


@dataclass(frozen=True)
class SquaresRule(PrototypeRule):
    """A rule whose scores are not linear in the features."""

    name = "squares_of_the_test"

    def scores(self, state, images):
        return super().scores(state, images) ** 2


class Squares(Classifier, rule=SquaresRule):
    pass


@dataclass(frozen=True)
class NamelessRule(SquaresRule):
    name = "nameless_of_the_test"

    def formula(self, state):
        weight = self.fitted(state).visual_prototypes
        return lambda z, weight: (self.logit_scale * z @ weight.T) ** 2, {"weight": weight}


class Nameless(Classifier, rule=NamelessRule):
    pass


def with_classifier(learner, cls):
    """Return a copy of the learner with one more classifier."""
    names, classifier = list(learner.class_names), cls(embed_dim=learner.encoder.embed_dim)
    rows = random_features(classifier.embed_dim)[: 3 * len(names)]
    classifier.add_classes(names, rows, torch.arange(len(rows)) % len(names))
    twin = copy.copy(learner)
    twin.use_state(replace(learner.state, classifiers=learner.classifiers | {classifier.name: classifier}))
    return twin


def test_classifier_without_an_exportable_formula_is_refused_by_name(clip, tmp_path):
    for cls, words in (
        (Squares, "'squares_of_the_test' classifier is not linear"),
        (Nameless, "must return a function defined at the top of a module"),
    ):
        with pytest.raises(ValueError, match=words):
            export_learner(with_classifier(clip, cls), tmp_path / "out", "transformers", cls.name)
    assert not list(tmp_path.iterdir())


@pytest.mark.rare
def test_graphs_give_the_probabilities_of_torch_for_every_batch_size(learners, tmp_path, recwarn, capfd):
    """The images are not square, and the classifier is a user's class without a formula."""
    import onnx
    import onnxruntime

    learner = with_classifier(copy.deepcopy(learners("dinov2")), Squares)
    image_processor = learner.processor.image_processor
    image_processor.crop_size, image_processor.size = {"height": 16, "width": 24}, {"shortest_edge": 24}
    capfd.readouterr()
    export_learner(learner, tmp_path / "plain", "onnx", Squares.name)
    assert not recwarn.list and capfd.readouterr().err == ""
    written = facts(tmp_path, file="model.json")
    sessions = []
    for name in ("encoder", "head"):
        path = tmp_path / f"plain/{name}.onnx"
        onnx.checker.check_model(onnx.load(path), full_check=True)
        sessions.append(onnxruntime.InferenceSession(path))
    inside = {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}
    assert inside == {key: value for key, value in written.items() if key != "largest_difference"}
    assert 0 <= written["largest_difference"] < 1e-4 and written["image_size"] == [16, 24]
    pixels = torch.as_tensor(image_processor(images=photos(), return_tensors="pt")["pixel_values"])
    for batch in (pixels[:1], pixels[1:4], torch.cat([pixels, -pixels, pixels])):
        with torch.no_grad():
            z = learner.encoder.image_embeds(batch)
        (features,) = sessions[0].run(None, {"pixel_values": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(features), z, atol=1e-5, rtol=0)
        (probabilities,) = sessions[1].run(None, {"image_embeds": features})
        expected = learner.classifiers[Squares.name].probabilities(z)
        torch.testing.assert_close(torch.from_numpy(probabilities), expected, atol=1e-4, rtol=0)


@pytest.mark.rare
def test_new_class_keeps_the_encoder_and_large_weights_get_a_file(learners, tmp_path, monkeypatch):
    learner = copy.deepcopy(learners("vit"))
    before = export_learner(learner, tmp_path / "before", "onnx", "prototype")
    learner.learn_task([{"image": photo, "label": 0} for photo in photos()], ["hen"])
    after = export_learner(learner, tmp_path / "after", "onnx", "prototype")
    assert (before / "encoder.onnx").read_bytes() == (after / "encoder.onnx").read_bytes()
    assert (before / "head.onnx").read_bytes() != (after / "head.onnx").read_bytes()
    monkeypatch.setattr(onnx_graphs, "LARGEST_FILE", 0)
    folder = export_learner(learner, tmp_path / "plain", "onnx", "prototype")
    assert (folder / "encoder.onnx.data").stat().st_size > (folder / "encoder.onnx").stat().st_size / 10
    assert "encoder.onnx.data" in facts(tmp_path, file="manifest.json")["files"]
    with pytest.raises(ValueError, match="int8 is only available for graphs below"):
        export_learner(learner, tmp_path / "small", "onnx", "prototype", precision="int8")


@pytest.mark.rare
@pytest.mark.parametrize(("precision", "size", "error"), [("float16", 0.9, 0.02), ("int8", 0.9, 0.2)])
def test_reduced_precision_graphs_give_nearly_the_same_probabilities(clip, tmp_path, precision, size, error):
    whole = export_learner(clip, tmp_path / "whole", "onnx", "bridge")
    folder = export_learner(clip, tmp_path / "small", "onnx", "bridge", precision=precision)
    assert (folder / "encoder.onnx").stat().st_size < size * (whole / "encoder.onnx").stat().st_size
    written = facts(tmp_path, "small", "model.json")
    assert written["precision"] == precision and 0 < written["largest_difference"] < error
    rows = run_lines(tmp_path, ["small"], "torch", "transformers")["small"]
    torch.testing.assert_close(rows, expected(clip, "bridge", write_photos(tmp_path / "photos")), atol=error, rtol=0)


@pytest.mark.rare
def test_transformers_js_loads_the_export(clip, tmp_path):
    """Run node in the folder TRANSFORMERS_JS, in which `npm install @huggingface/transformers` was run."""
    if not (root := os.environ.get("TRANSFORMERS_JS")):
        pytest.skip("TRANSFORMERS_JS does not name a folder with node_modules")
    photos()[2].save(
        tmp_path / "photo.png"
    )  # has the model's size, because JavaScript resizes differently from Pillow
    for precision, error in (("float32", 1e-3), ("float16", 0.02), ("int8", 0.2)):
        folder = export_learner(clip, tmp_path / precision, "transformers.js", "bridge", precision=precision)
        text = (folder / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"```javascript\n(.*?)```", text, flags=re.DOTALL)
        code = code.replace("path/to/the/folder/above", str(tmp_path))
        code = code.replace("photo.jpg", str(tmp_path / "photo.png"))
        script = Path(root, f"{tmp_path.name}.mjs")
        script.write_text(code.replace("console.log(", "console.log(JSON.stringify(").replace("));", ")));"))
        done = subprocess.run(["node", str(script)], capture_output=True, text=True)
        script.unlink()
        assert done.returncode == 0, done.stderr
        scores = {row["label"]: row["score"] for row in json.loads(done.stdout)}
        row = torch.tensor([scores[name] for name in clip.class_names])
        torch.testing.assert_close(row, expected(clip, "bridge")[2], atol=error, rtol=0)


@pytest.mark.rare
def test_graph_with_different_probabilities_is_refused(clip, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="differ by .* from PyTorch's"):
        export_learner(clip, tmp_path / "onnx", "onnx")
    assert not (tmp_path / "onnx").exists()


def test_error_names_the_missing_package(clip, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r'onnxscript: pip install "\.\[onnx\]"'):
        export_learner(clip, tmp_path / "onnx", "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.slow
def test_wrong_arguments_raise_and_write_nothing(clip, learners, tmp_path):
    fresh = ClassIncrementalLearner(
        tiny.make_model("vit"), learners("vit").processor, args=LearnerArguments(**QUICK), strategy="frozen"
    )
    for learner, options, error, words in (
        (clip, {"format": "tflite"}, ValueError, "'tflite'; it must be one of lora, transformers, onnx"),
        (clip, {"format": "onnx", "compress_to": 3}, ValueError, "compress_to=3 is only for the format 'lora'"),
        (clip, {"precision": "int4"}, ValueError, "'int4'; it must be one of float32, float16, int8"),
        (clip, {"precision": "int8"}, ValueError, "is only for 'onnx' and 'transformers.js', got 'lora'"),
        (clip, {"classifier": "lad"}, ValueError, "no classifier 'lad'; its classifiers are bridge, text"),
        (
            learners("siglip2"),
            {"format": "onnx"},
            ValueError,
            "SigLIP 2 NaFlex computes positions for the size of each",
        ),
        (
            learners("vit"),
            {"format": "lora"},
            ValueError,
            "no adapter to export: its strategy 'frozen' trains nothing",
        ),
        (fresh, {"format": "transformers"}, ValueError, "has learned no class yet"),
        (clip.model, {}, TypeError, "must be a ClassIncrementalLearner or its state, got DualModePeftModel"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            export_learner(learner, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
