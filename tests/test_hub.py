"""Adapter, head and learner on the Hub: the real client against a loopback stub; strict loading of what it gives."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap

import huggingface_hub
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from hub_stub import on_this_process
from huggingface_hub import ModelCard
from peft import PeftModel, get_peft_model
from safetensors.torch import load, save
from transformers import CLIPModel, pipeline

from dulbe_peft import (
    BridgeEnsembleHead,
    CheckpointError,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
)
from dulbe_peft.demo import DigitImages, demo_model_folder
from dulbe_peft.encoders.loading import pixel_values
from dulbe_peft.utils.folders import json_sha256

ADAPTER, STATISTICS = "adapter_model.safetensors", "statistics.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty Hub that this process's client talks to, with an empty cache."""
    with on_this_process(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture(scope="module")
def tasks():
    """Two tasks of two handwritten digits, six images of each to learn from and four to test on."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = np.concatenate([np.flatnonzero(data.target == c)[:10] for c in range(10)])
    train = np.concatenate([rows[start : start + 6] for start in range(0, 100, 10)])
    parts = [DigitImages(data.images[part], data.target[part]) for part in (train, np.setdiff1d(rows, train))]
    return class_incremental_tasks(*parts, increment=2)[:3]


@pytest.fixture(scope="module")
def learned(base, tasks, tmp_path_factory):
    """A learner of two tasks, and what its run wrote."""
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(base[0]), DualModeLoraConfig(residual_rank=2, support_rank=8))
    args = LearnerArguments(epochs=1, batch_size=8, device="cpu", progress=False, prompt_template="the digit {}.")
    learner = ClassIncrementalLearner(model, base[1], args=args)
    output = tmp_path_factory.mktemp("run")
    learner.run(tasks[:2], output)
    return learner, output / "results.json"


@pytest.fixture
def learner(learned):
    return learned[0]


@pytest.fixture(scope="module")
def saved(learned, tmp_path_factory):
    """A saved learner's files, path -> content."""
    folder = tmp_path_factory.mktemp("saved") / "learner"
    learned[0].save_pretrained(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def uploaded(hub, saved):
    """The same files, in the repository someone/learner."""
    hub.commit("someone/learner", saved)
    return saved


def logits(learner, tasks):
    with torch.no_grad():
        return learner.head(learner.image_embeds(tasks[0].test))


def load_from(repo_id, base, **fields):
    return ClassIncrementalLearner.from_pretrained(repo_id, base_model=copy.deepcopy(base[0]), **fields)


def forged(files, **changes):
    """`files` with some replaced, and a manifest that fits: what somebody with bad intentions uploads."""
    files = {**files, **changes}
    manifest = json.loads(files["manifest.json"])
    for name in changes:
        manifest["files"][name] = {"sha256": hashlib.sha256(files[name]).hexdigest(), "size": len(files[name])}
    del manifest["sha256"]
    return files | {"manifest.json": json.dumps({**manifest, "sha256": json_sha256(manifest)}).encode()}


# ---------------------------------------------------------------------- round trips


@pytest.mark.slow
def test_all_three_come_back_in_a_fresh_process(hub, learner, base, tasks, tmp_path):
    """PEFT's own calls for the adapter; every file whole, from an empty cache, by the environment's endpoint."""
    learner.model.push_to_hub("adapter")
    learner.head.push_to_hub("head")
    oid = learner.push_to_hub("learner", private=True).oid
    pixels = torch.stack([pixel_values(learner.processor, tasks[0].test[i]["image"]) for i in range(8)])
    with torch.no_grad():
        features = learner.clip.get_image_features(pixel_values=pixels).pooler_output
    torch.save((pixels, features, learner.head(features)), tmp_path / "expected.pt")
    script = f"""
        import sys, torch
        import dulbe_peft
        from peft import PeftModel
        from transformers import CLIPModel

        pixels, features, logits = torch.load({str(tmp_path / "expected.pt")!r})
        clip = CLIPModel.from_pretrained({str(demo_model_folder())!r}, attn_implementation="eager").eval()
        model = PeftModel.from_pretrained(clip, "someone/adapter").eval()
        head = dulbe_peft.BridgeEnsembleHead.from_pretrained("someone/head")
        learner = dulbe_peft.ClassIncrementalLearner.from_pretrained("someone/learner")
        with torch.no_grad():
            for found in (model, learner.clip):
                assert torch.equal(found.get_image_features(pixel_values=pixels).pooler_output, features)
            assert torch.equal(head(features), logits) and torch.equal(learner.head(features), logits)
        print(*learner.class_names, learner.source["commit"], len(learner.statistics))
    """
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [*learner.class_names, oid, str(len(learner.statistics))]


def test_the_revision_that_was_asked_for_is_loaded_and_its_commit_recorded(hub, learner, base, tmp_path):
    first = learner.push_to_hub("learner").oid
    learner.push_to_hub("learner", revision="no-statistics", statistics=False)
    branch = hub.repos["someone/learner"]["branches"]["no-statistics"]
    assert branch != first
    for revision, commit in ((None, first), ("no-statistics", branch), (first, first)):
        again = load_from("someone/learner", base, revision=revision)
        assert again.source == {"repo_id": "someone/learner", "commit": commit}
        assert bool(again.statistics) == (commit == first)
    again.save_pretrained(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "learner.json").read_text())["source"]["commit"] == first
    assert load_from(tmp_path / "copy", base).source == again.source


def test_what_was_downloaded_loads_again_offline(hub, uploaded, base, monkeypatch):
    online = load_from("someone/learner", base)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert load_from("someone/learner", base).source == online.source
    assert len(hub.asked) == asked


def test_only_what_the_manifest_lists_is_downloaded(hub, uploaded, base):
    hub.commit("someone/learner", uploaded | {"pytorch_model.bin": b"x", "adapter_model.bin": b"x", "notes.txt": b"x"})
    load_from("someone/learner", base)
    got = {path.partition("/resolve/")[2].partition("/")[2] for method, path in hub.asked if method == "GET"}
    assert got - {""} == {*json.loads(uploaded["manifest.json"])["files"], "manifest.json"}


def test_missing_repositories_revisions_and_files_are_named(hub, uploaded, base, tmp_path):
    for load_one in (lambda *a, **k: load_from(a[0], base, **k), BridgeEnsembleHead.from_pretrained):
        for repo_id in ("someone/nothing", "nowhere"):
            with pytest.raises(FileNotFoundError, match=repo_id):
                load_one(repo_id)
        with pytest.raises(FileNotFoundError, match="at revision 'v9'"):
            load_one("someone/learner", revision="v9")
        with pytest.raises(FileNotFoundError, match="neither an existing folder nor a repository id"):
            load_one("../up")
        asked = len(hub.asked)
        with pytest.raises(FileNotFoundError, match="folder 'someone/learner' does not exist"):
            load_one(type(tmp_path)("someone/learner"))
        assert len(hub.asked) == asked
    hub.commit("someone/learner", {name: data for name, data in uploaded.items() if name != ADAPTER})
    with pytest.raises(FileNotFoundError, match=ADAPTER):
        load_from("someone/learner", base)


# ---------------------------------------------------------------------- what is published


def test_card_is_written_from_the_data(hub, learned):
    learner, results = learned
    learner.push_to_hub("digits-learner", results=results, dataset_name="digits")
    files = hub.files("someone/digits-learner")
    assert files["results.json"] == results.read_bytes()
    card = ModelCard(files["README.md"].decode())
    figures = json.loads(results.read_text())["head"]
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert measured == {"A_bar": figures["average_accuracy"], "A_last": figures["last_accuracy"]}
    assert {result.dataset_name for result in card.data.eval_results} == {"digits"}
    assert card.data.model_name == "digits-learner" and card.data.library_name == "dulbe_peft"
    assert card.data.base_model is None and "pass `base_model=`" in card.text  # a folder of this machine
    for words in (
        "import dulbe_peft",
        '["zero", "one"]',
        '"epochs": 1',
        "docs/decisions.md",
        "@unpublished",
        "Fanman Meng",
    ):
        assert words in card.text
    assert f"| bridge | {100 * figures['average_accuracy']:.2f} |" in card.text


def test_the_card_s_snippets_run(hub, learner, tasks, tmp_path, monkeypatch, capsys):
    learner.push_to_hub("learner")
    monkeypatch.chdir(tmp_path)
    tasks[0].test[0]["image"].save("photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", hub.files("someone/learner")["README.md"].decode(), flags=re.DOTALL)
    assert len(blocks) == 3 and all("import dulbe_peft" in block or "from dulbe_peft" in block for block in blocks)
    spaces = [{}, {}, {}]
    for block, space in zip(blocks, spaces, strict=True):
        exec(block, space)
    assert spaces[0]["learner"].class_names == learner.class_names
    assert eval(capsys.readouterr().out.splitlines()[0])[0] in learner.class_names
    assert spaces[1]["model"].active_peft_config.history_rank == learner.model.history_rank
    assert spaces[2]["classifier"].class_names == list(learner.class_names)


def test_a_learner_without_statistics_predicts_and_says_why_it_cannot_go_on(hub, learned, base, tasks, tmp_path):
    learner, results = learned
    learner.push_to_hub("learner", results=results)
    assert {STATISTICS, "results.json"} <= set(hub.files("someone/learner"))
    learner.push_to_hub("learner", statistics=False)
    assert not {STATISTICS, "results.json"} & set(hub.files("someone/learner"))  # nothing stale is left either
    again = load_from("someone/learner", base)
    assert torch.equal(logits(again, tasks), logits(learner, tasks))
    assert again.evaluate(tasks[1].test, tasks[1].class_names) == learner.evaluate(tasks[1].test, tasks[1].class_names)
    with pytest.raises(ValueError, match="holds no statistics of its finished tasks"):
        again.learn_task(tasks[2].train, tasks[2].class_names)
    again.save_pretrained(tmp_path / "copy")
    assert not load_from(tmp_path / "copy", base).statistics


def test_results_of_another_learner_are_refused_before_anything_is_made(hub, learned):
    learner, results = learned
    other = json.loads(results.read_text()) | {"class_names": [["cat"]]}
    with pytest.raises(ValueError, match="results are not of this learner"):
        learner.push_to_hub("learner", results=other)
    assert not hub.repos


# ---------------------------------------------------------------------- what is refused


def _json(files, name, **fields):
    return {name: json.dumps(json.loads(files[name]) | fields).encode()}


def _tensors(files, name, change):
    tensors, length = load(files[name]), int.from_bytes(files[name][:8], "little")
    metadata = json.loads(files[name][8 : 8 + length]).get("__metadata__")
    change(tensors)
    return {name: save(tensors, metadata)}


FORGERIES = {
    "a history that would take gigabytes": (
        lambda f: _json(f, "adapter_config.json", history_rank=60_000),
        "history_rank is 60000",
    ),
    "another method": (lambda f: _json(f, "adapter_config.json", peft_type="LORA"), "adapter of type 'LORA'"),
    "a tensor too many": (
        lambda f: _tensors(f, ADAPTER, lambda t: t.update({"base_model.model.x.dulbe_P": torch.zeros(1)})),
        "unknown",
    ),
    "tasks that are no lists": (lambda f: _json(f, "learner.json", tasks=[1]), r"tasks\.0: .* array, got 1"),
    "settings that do not exist": (lambda f: _json(f, "learner.json", arguments={"colour": 1}), "colour"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_repository_is_refused_and_the_base_model_left_alone(hub, uploaded, base, case):
    """The manifest fits, so what refuses is the check of the content."""
    make, words = FORGERIES[case]
    hub.commit("someone/learner", forged(uploaded, **make(uploaded)))
    clip = copy.deepcopy(base[0])
    with pytest.raises(CheckpointError, match=words):
        ClassIncrementalLearner.from_pretrained("someone/learner", base_model=clip)
    before, after = base[0].state_dict(), clip.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    assert all(parameter.requires_grad for parameter in clip.parameters())


class _Trap:
    def __reduce__(self):
        return os.abort, ()


def test_a_learner_of_pickles_is_refused_and_they_are_not_even_downloaded(hub, uploaded, base):
    trap = {"adapter_model.bin": pickle.dumps(_Trap())}
    hub.commit("someone/learner", forged(uploaded, **trap))
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        load_from("someone/learner", base)
    hub.commit("someone/bare", trap)
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        load_from("someone/bare", base)
    hub.commit(
        "someone/head", {"head_config.json": uploaded["head_config.json"], "pytorch_model.bin": pickle.dumps(1)}
    )
    with pytest.raises(FileNotFoundError, match=r"head\.safetensors"):
        BridgeEnsembleHead.from_pretrained("someone/head")
    assert not any(path.endswith(".bin") for _, path in hub.asked)


@pytest.mark.parametrize("where", ["hub", "offline", "folder"])
def test_peft_does_not_get_to_open_a_pickle(hub, uploaded, base, tmp_path, where, monkeypatch):
    """PEFT itself would read `adapter_model.bin` where there is no safetensors file."""
    files = {"adapter_config.json": uploaded["adapter_config.json"], "adapter_model.bin": pickle.dumps(_Trap())}
    hub.commit("someone/pickled", files)
    source = "someone/pickled"
    if where == "offline":
        for name in files:
            huggingface_hub.hf_hub_download(source, name)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if where == "folder":
        source = str(tmp_path)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model\.bin, a pickle"):
        PeftModel.from_pretrained(copy.deepcopy(base[0]), source)


# ---------------------------------------------------------------------- transformers' pipeline


def test_the_merged_model_works_in_the_zero_shot_pipeline(learner, tasks, tmp_path):
    """The saved, merged CLIPModel gives the probabilities of the learner's text classifier."""
    model = copy.deepcopy(learner.model).merge_and_unload()
    assert type(model) is CLIPModel
    model.save_pretrained(tmp_path)
    merged = CLIPModel.from_pretrained(tmp_path).eval()
    processor = learner.processor
    classify = pipeline(
        "zero-shot-image-classification",
        model=merged,
        image_processor=processor.image_processor,
        tokenizer=processor.tokenizer,
        device="cpu",
    )
    names = list(learner.class_names)
    images = [tasks[0].test[i]["image"] for i in range(4)]
    found = classify(images, candidate_labels=names, hypothesis_template=learner.args.prompt_template)
    with torch.no_grad():
        expected = learner.logit_scale * learner.image_embeds([(i, -1) for i in images]) @ learner.head.text_embeds.T
    for answers, row in zip(found, expected.softmax(dim=1), strict=True):
        scores = {answer["label"]: answer["score"] for answer in answers}
        torch.testing.assert_close(torch.tensor([scores[name] for name in names]), row, atol=1e-5, rtol=1e-4)
