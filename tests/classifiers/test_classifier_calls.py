"""Errors, copies, files and specs of every classifier, and a classifier from outside the package."""

from __future__ import annotations

import copy
import doctest
import inspect
import json
import math
import pickle
import pydoc
import re
from dataclasses import dataclass, fields

import pytest
import torch
from documents import blocks
from hub_stub import on_this_process
from taught import CLASSES, DIM, KINDS, NAMED, SCALE, SPECS, assert_equal_states, digits, learned, snapshot, task
from torch.nn import functional as F

from dulbe_peft import CLASSIFIERS, classifiers, register_classifier
from dulbe_peft.classifiers import (
    Classifier,
    LdaClassifier,
    classifier_of,
    make_classifier,
    make_classifiers,
    parse_classifiers,
    spec,
)
from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.classifiers.prototype import PrototypeRule
from dulbe_peft.classifiers.state import shared
from dulbe_peft.utils.tensors import read_tensors, write_tensors


def test_invalid_calls_are_refused_and_change_nothing(tmp_path):
    (images, labels), rows = task([0, 1]), torch.ones(120, DIM)
    lda, bridge, trained, text, clg = (learned(name) for name in ("lda", "bridge", "rapf", "text", "clg_cbm"))
    states = [snapshot(lda), snapshot(bridge)]
    text.install({"text_embeds": 1e38 * text.text_embeds})
    good = {"class_names": ["x", "y"], "image_embeds": images, "labels": labels}
    good["text_embeds"] = torch.cat([digits.texts, digits.texts[:2] + 1])
    cancelling = torch.eye(DIM)[:1] * torch.tensor([[1.0], [-1.0]])

    def add(to=bridge, **change):
        return lambda: to.add_classes(**good | change)

    for call, message in (
        (add(class_names=["class 0", "x"]), "'class 0', a class that was already seen"),
        (add(image_embeds=math.nan * rows), "image_embeds row 0 contains NaN or infinity"),
        (add(image_embeds=0 * rows), "image_embeds row 0 is zero"),
        (add(image_embeds=rows[:, :3]), r"must be \(rows, 64\), got shape \(120, 3\)"),
        (add(image_embeds=rows.long()), "must be a floating-point tensor"),
        (add(labels=[True, False] * 60), "labels must be integers, got torch.bool"),
        (add(labels=labels + 1), "label 2 is out of range for 2 classes"),
        (add(labels=labels[:5]), r"labels must be \(120,\), one per image"),
        (add(labels=0 * labels), "class 'y' has no image"),
        (add(text_embeds=rows[:3]), "text_embeds must have 12 rows"),
        (add(clg, each_text=(rows[:2], [0, 0])), "must have 1 to 64 texts per class, got 0 for 'y'"),
        (add(clg, each_text=(rows[:66], [0] + 65 * [1])), "must have 1 to 64 texts per class, got 65 for 'y'"),
        (add(clg, each_text=(rows[:2], [0, 2])), "label 2 is out of range"),
        (add(clg, each_text=rows[:3]), "each_text must be a tuple of embeddings and their classes, got tensor"),
        (lambda: make_classifier("bayes", DIM).add_classes(["x"], cancelling, [0, 0]), "class 'x' cancel out"),
        (lambda: make_classifier("bridge", DIM).add_classes(["x"], cancelling, [0, 0], rows[:1]), "'x' cancel out"),
        (lambda: lda.move(math.nan * rows[:DIM]), "the map"),
        (lambda: lda.load_state_dict(states[0] | {"sums": lda.sums[:4]}), r"sums must be .*\(10, 64\)"),
        (lambda: lda.load_state_dict(states[0] | {"_extra_state": torch.tensor([9]).byte()}), "are damaged"),
        (lambda: make_classifier("lda", DIM)(images), "no class yet"),
        (lambda: trained.update_classes(images, labels), "'rapf' classifier cannot learn more images"),
        (lambda: text(digits.tests), "scores of the 'text' classifier are not finite"),
        (lambda: LdaClassifier.from_pretrained(tmp_path), "lda_config.json does not exist"),
        (lambda: linear_map(images, images[:3]), r"\(120, 64\) and \(3, 64\)"),
        (lambda: make_classifier(lda, DIM), "already has 10 classes"),
        (lambda: make_classifier(make_classifier("lda", 8), 9), "takes 8 dimensions, but the model has 9"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError, FileNotFoundError), match=message):
            call()
    for classifier, state in zip((lda, bridge), states, strict=True):
        assert_equal_states(snapshot(classifier), state)


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_missing_text_embeddings_are_refused_where_needed(name):
    if CLASSIFIERS[name].needs_text:
        with pytest.raises(TypeError, match="text_embeds"):
            learned(name, text=False)
        classifier = learned(name)
        classifier.set_text_embeds(digits.texts.flip(0))
        torch.testing.assert_close(classifier.text_embeds, F.normalize(digits.texts.flip(0), dim=1))
    else:
        classifier, told = (learned(name, range(4), per_class=6, text=given) for given in (False, True))
        if classifier.reads_text:  # texts are optional
            assert not classifier.text_embeds.any() and told.text_embeds.any()
            return
        assert torch.equal(classifier(digits.tests), told(digits.tests))
        with pytest.raises(ValueError, match=f"'{name}' classifier has no text"):
            classifier.set_text_embeds(digits.texts[:4])


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_gradients_reach_the_features_and_copies_are_independent(name):
    classifier = learned(name)
    images = digits.tests[:5].clone().requires_grad_()
    with torch.inference_mode():
        expected = classifier(digits.tests)
    classifier(images)[:, 0].sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().sum() > 0
    for twin in (copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier)), classifier.fork()):
        assert not twin._fitted  # otherwise a pickle would be twice as large
        assert torch.equal(twin(digits.tests), expected) and twin.temperature == classifier.temperature
        twin.forget_class("class 0")
        assert torch.equal(classifier(digits.tests), expected)


@pytest.mark.parametrize("name", ["prototype", "lda", "ridge", "ranpac", "bayes"])
def test_statistics_stay_float64_after_conversion(name):
    classifier = learned(name)
    expected = classifier(digits.tests)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(classifier(digits.tests), expected)
        assert torch.equal(learned(name)(digits.tests), expected)
    double = {key for key, value in classifier.state_dict().items() if value.dtype == torch.float64}
    classifier.to(torch.bfloat16)
    assert double and double == {k for k, v in classifier.state_dict().items() if v.dtype == torch.float64}
    if name in ("prototype", "lda", "ridge"):  # G of ranpac and the texts of bayes are float32 and get rounded
        assert torch.equal(classifier(digits.tests), expected)
    assert {value.device.type for value in classifier.to("meta").tensors().values()} == {"meta"}


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_state_dicts_and_files_restore_classifiers_bit_for_bit(name, tmp_path):
    classifier = learned(name)
    other = make_classifier(SPECS[name], DIM, SCALE)
    other.load_state_dict(classifier.state_dict())
    classifier.save_pretrained(tmp_path / "a")
    loaded = type(classifier).from_pretrained(tmp_path / "a")
    for actual in (other, loaded):
        assert_equal_states(snapshot(actual), snapshot(classifier))
        assert torch.equal(actual(digits.tests), classifier(digits.tests))
        assert torch.equal(actual.probabilities(digits.tests), classifier.probabilities(digits.tests))
        assert spec(actual) == spec(classifier)
        assert actual.temperature == classifier.temperature and actual.calibration == classifier.calibration != ()
    loaded.save_pretrained(tmp_path / "b")
    stem = classifier.rule.file_stem or classifier.name
    assert {path.name for path in (tmp_path / "a").iterdir()} == {f"{stem}_config.json", f"{stem}.safetensors"}
    assert all(path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() for path in (tmp_path / "a").iterdir())
    for further in (classifier, loaded):
        further.add_classes(["x", "y"], *task([0, 1], 9), torch.cat([digits.texts, digits.texts[:2] + 1]))
    assert_equal_states(snapshot(loaded), snapshot(classifier))


def test_changed_tensors_are_refused(tmp_path):
    for name, tensor in (("lda", "sums"), ("bridge", "reliability")):
        classifier = learned(name)
        classifier.save_pretrained(tmp_path)
        config, file = (tmp_path / each for each in classifier.file_names())
        tensors, metadata = read_tensors(file)
        tensors[tensor][[0, 1]] = tensors[tensor][[1, 0]]  # nothing but the digest can tell
        write_tensors(file, tensors, metadata)
        with pytest.raises(ValueError, match=f"{file.name} is damaged, or it was not saved with {config.name}"):
            type(classifier).from_pretrained(tmp_path)
        config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "sha256"}))
        with pytest.raises(ValueError, match="is damaged, or it was not saved with"):
            type(classifier).from_pretrained(tmp_path)


def test_tensor_that_does_not_grow_is_saved_and_loaded(tmp_path):
    @dataclass(frozen=True)
    class MarkedRule(PrototypeRule):
        def tensors(self):
            return super().tensors() | {"marks": shared(start=torch.ones(3))}

    class Marked(Classifier, rule=MarkedRule):
        pass

    classifier = Marked(embed_dim=DIM)
    classifier.add_classes(["x", "y"], *task([0, 1]))
    classifier.forget_class("x")
    classifier.save_pretrained(tmp_path)
    assert_equal_states(snapshot(Marked.from_pretrained(tmp_path)), snapshot(classifier))
    assert torch.equal(classifier.marks, torch.ones(3))


@pytest.fixture
def page(monkeypatch, capsys):
    """Run the code of the page; return its names and what it printed. `median` is a classifier that it registers."""
    monkeypatch.setattr(CLASSIFIERS, "_classes", dict(CLASSIFIERS._classes))
    names = {"__name__": "page"}
    for *_, code in blocks("docs/classifiers.md", "python"):
        exec(compile(code, "docs/classifiers.md", "exec", dont_inherit=True), names)
    return names | {"printed": capsys.readouterr().out}


def test_registered_classifier_works_with_files_and_the_hub(page, tmp_path, monkeypatch):
    assert page["printed"] == "tensor([0, 1, 2])\n"
    cls = classifier_of(page["MedianRule"])
    classifier = make_classifier("median:power=2", DIM, SCALE)
    assert type(classifier) is cls and classifier.power == 2 and spec(classifier) == "median:power=2.0"
    images, labels = task(range(CLASSES))
    classifier.add_classes([f"class {c}" for c in range(CLASSES)], images, labels)
    assert (classifier(digits.tests).argmax(dim=1) == digits.truth).double().mean() > 0.7
    classifier.forget_class("class 9")
    classifier.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"median_config.json", "median.safetensors"}
    with on_this_process(monkeypatch, tmp_path) as hub:
        classifier.push_to_hub("median")
        online = cls.from_pretrained("someone/median")
        commit = hub.repos["someone/median"]["branches"]["main"]
    assert online.source == {"repo_id": "someone/median", "commit": commit}
    for loaded in (online, cls.from_pretrained(tmp_path / "saved")):
        assert loaded.power == 2 and torch.equal(loaded(digits.tests), classifier(digits.tests))


def test_invalid_classifier_classes_are_not_registered(page):
    base = page["MedianRule"]

    def rule(**facts):
        return dataclass(frozen=True)(type("R", (base,), facts))

    assert register_classifier(base) is base
    assert register_classifier(classifier_of(base)) is classifier_of(base) is CLASSIFIERS["median"]
    for wrong, error, message in (
        (dict, TypeError, "derived from Rule"),
        (Classifier, TypeError, "derived from Rule"),
        (type("R", (base,), {}), TypeError, "derived from Rule with @dataclass"),
        (rule(name="Two words"), ValueError, "characters a-z"),
        (rule(name="lda"), ValueError, "the classifier 'lda' is already .*LdaRule"),
        (rule(name="mine", file_stem="head"), ValueError, "'head', which another"),
    ):
        with pytest.raises(error, match=message):
            register_classifier(wrong)
    for wrong in ("__init__", "name", "added", "logits"):  # in a class that holds no rule, nothing would use them
        with pytest.raises(TypeError, match=f"D defines {wrong}: define this in a class derived from Rule"):
            type("D", (classifier_of(base),), {wrong: None})
    with pytest.raises(TypeError, match=r"D has no rule: write classifier_of\(rule\)"):
        type("D", (Classifier,), {})(8)
    assert {*NAMED, "median"} == set(CLASSIFIERS)


def test_tensors_and_scores_of_a_wrong_shape_are_refused(page):
    base = page["MedianRule"]
    for name, function, message in (
        ("added", lambda *_: {}, r"R returns tensors that it does not lay out: medians must be \(2, 64\)"),
        ("added", lambda rule, state, images, *_: {"medians": images}, r"medians must be .* got \(120, 64\)"),
        ("scores", lambda rule, state, images: images[:, :1], r"the scores of R must be \(24, 2\), got \(24, 1\)"),
    ):
        classifier = classifier_of(dataclass(frozen=True)(type("R", (base,), {name: function})))(DIM)
        with pytest.raises(ValueError, match=message):
            classifier.add_classes(["a", "b"], *task([0, 1]))
        assert not classifier.class_names


@pytest.mark.parametrize("name", NAMED)
def test_help_of_a_classifier_names_every_setting_once(name):
    cls = CLASSIFIERS[name]
    for entry in fields(cls.rule_type):
        named = re.findall(rf"\n    [\w, ]*\b{entry.name}\b[\w, ]*: ", pydoc.getdoc(cls).split("\nAttributes:")[0])
        assert len(named) == 1, entry.name
        assert entry.name in inspect.signature(cls).parameters


def test_specs_make_classifiers_or_are_refused():
    assert set(NAMED) == set(CLASSIFIERS)
    specs = ["bridge:depths=0.3/0.5", "ranpac:features=50,seed=3", "lda"]
    made = make_classifiers(specs, 8, 15.0)
    assert list(map(spec, made.values())) == specs
    assert all(make_classifier(spec(one), 8).settings() == one.settings() for one in made.values())
    assert list(make_classifiers("bridge:depths=0/1,lda", 8)) == ["bridge", "lda"]
    assert ["follow" in CLASSIFIERS[name].rule_type.can for name in ("bayes", "ranpac", "text")] == [True, True, False]
    assert ["move" in CLASSIFIERS[name].rule_type.can for name in ("lda", "ranpac")] == [True, False]
    for text, message in (
        ("ranpack", r"no classifier 'ranpack'; did you mean 'ranpac'\? \(known: .*bridge"),
        ("ranpac:feature=3", r"no setting 'feature'; did you mean 'features'\?"),
        ("text:embed_dim=4", r"no setting 'embed_dim' \(known: none\)"),
        ("lda,text,lda:shrinkage=0.1", "'lda' is given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_classifiers(text)


@pytest.mark.parametrize("name", ["proof", "clap4clip", "clg_cbm", "slca", "rapf", "visual_agent", "bofa"])
def test_float64_classifier_learns_further_tasks(name):
    classifier = make_classifier(SPECS[name], DIM, SCALE).double()
    for number in range(2):
        classes = [2 * number, 2 * number + 1]
        names = ["abcd"[label] for label in classes]
        classifier.add_classes(names, *task(classes, 9), digits.texts[: 2 * number + 2])
    assert classifier(digits.tests).shape == (len(digits.tests), 4)


PUBLIC = [name for name in classifiers.__all__ if name.endswith(("Classifier", "Head")) and name != "Classifier"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_help_of_a_classifier_shows_its_settings_and_an_example_that_runs(name):
    kind = getattr(classifiers, name)
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    assert all(re.search(rf"\n \|  +[\w, ]*\b{field.name}\b[\w, ]*: \w", text) for field in fields(kind.rule_type))
    assert all(f"\n |  {part}:\n" in text for part in ("Example", "Args", "Raises"))
    (example,) = doctest.DocTestFinder(recurse=False).find(kind, name, globs={"torch": torch, name: kind})
    result = doctest.DocTestRunner().run(example)
    assert result.failed == 0 and result.attempted >= 4
