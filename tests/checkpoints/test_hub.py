"""Test adapter, head and learner on the Hub, with the real client and a local stub, and strict loading."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from hub_stub import on_this_process
from huggingface_hub import ModelCard
from peft import PeftModel
from small_runs import learner_of
from write_saved import digits

from dulbe_peft import (
    BridgeEnsembleHead,
    CheckpointError,
    ClassIncrementalLearner,
    class_incremental_tasks,
    run_stream,
)
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.utils.folders import json_sha256

ADAPTER, STATISTICS = "adapter_model.safetensors", "statistics.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Start an empty Hub for this process's client, with an empty cache."""
    with on_this_process(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture(scope="module")
def learned(base, tmp_path_factory):
    """Return a learner of two of three tasks, the folder of its run, and all tasks."""
    tasks = class_incremental_tasks(digits(0, 4), digits(4, 6), increment=2)[:3]
    learner = learner_of(base)
    output = tmp_path_factory.mktemp("run")
    run_stream(learner, tasks[:2], output)
    return learner, output, tasks


@pytest.fixture
def learner(learned):
    return learned[0]


@pytest.fixture
def uploaded(hub, learned):
    """Upload a saved learner to the repository someone/learner; returns its files, content by path."""
    folder = learned[1] / "task-002"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.commit("someone/learner", files)
    return files


def load_from(repo_id, base, **fields):
    return ClassIncrementalLearner.from_pretrained(repo_id, base_model=copy.deepcopy(base[0]), **fields)


FRESH = """
import sys, torch
import dulbe_peft
from peft import PeftModel
from transformers import CLIPModel

base, expected = sys.argv[1:]
pixels, features, logits = torch.load(expected)
clip = CLIPModel.from_pretrained(base, attn_implementation="eager").eval()
model = PeftModel.from_pretrained(clip, "someone/adapter").eval()
head = dulbe_peft.BridgeEnsembleHead.from_pretrained("someone/head")
learner = dulbe_peft.ClassIncrementalLearner.from_pretrained("someone/learner")
with torch.no_grad():
    for loaded in (model, learner.clip):
        assert torch.equal(loaded.get_image_features(pixel_values=pixels).pooler_output, features)
    assert torch.equal(head(features), logits) and torch.equal(learner.head(features), logits)
print(*learner.class_names, learner.source["commit"], len(learner.memory))
"""


@pytest.mark.rare
def test_adapter_head_and_learner_load_in_a_fresh_process(hub, learner, tmp_path):
    """The adapter is loaded by PEFT. The cache is empty, and the endpoint comes from the environment."""
    learner.model.push_to_hub("adapter")
    learner.head.push_to_hub("head")
    oid = learner.push_to_hub("learner", private=True).oid
    pixels = torch.rand(8, 3, 16, 16)
    with torch.no_grad():
        features = learner.clip.get_image_features(pixel_values=pixels).pooler_output
        torch.save((pixels, features, learner.head(features)), tmp_path / "expected.pt")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", FRESH, demo_model_folder(), tmp_path / "expected.pt"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [*learner.class_names, oid, str(len(learner.memory))]


@pytest.mark.slow
def test_requested_revision_is_loaded_and_its_commit_recorded(hub, learner, base, tmp_path):
    first = learner.push_to_hub("learner").oid
    learner.push_to_hub("learner", revision="no-statistics", statistics=False)
    branch = hub.repos["someone/learner"]["branches"]["no-statistics"]
    assert branch != first
    for revision, commit in ((None, first), ("no-statistics", branch), (first, first)):
        loaded = load_from("someone/learner", base, revision=revision)
        assert loaded.source == {"repo_id": "someone/learner", "commit": commit}
        assert bool(loaded.memory) == (commit == first)
    loaded.save_pretrained(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "learner.json").read_text())["source"]["commit"] == first
    assert load_from(tmp_path / "copy", base).source == loaded.source


def test_only_listed_files_are_downloaded_and_load_again_offline(hub, uploaded, base, monkeypatch):
    hub.commit("someone/learner", uploaded | {"pytorch_model.bin": b"x", "adapter_model.bin": b"x", "notes.txt": b"x"})
    online = load_from("someone/learner", base)
    files = {path.partition("/resolve/")[2].partition("/")[2] for method, path in hub.asked if method == "GET"}
    assert files - {""} == {*json.loads(uploaded["manifest.json"])["files"], "manifest.json"}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    requests = len(hub.asked)
    assert load_from("someone/learner", base).source == online.source and len(hub.asked) == requests


def test_error_names_the_missing_repository_revision_or_file(hub, uploaded, base, tmp_path):
    for load in (lambda *a, **k: load_from(a[0], base, **k), BridgeEnsembleHead.from_pretrained):
        for repo_id in ("someone/nothing", "nowhere"):
            with pytest.raises(FileNotFoundError, match=repo_id):
                load(repo_id)
        with pytest.raises(FileNotFoundError, match="at revision 'v9'"):
            load("someone/learner", revision="v9")
        with pytest.raises(FileNotFoundError, match="neither an existing folder nor a repository id"):
            load("../up")
        requests = len(hub.asked)
        with pytest.raises(FileNotFoundError, match="folder 'someone/learner' does not exist"):
            load(type(tmp_path)("someone/learner"))
        assert len(hub.asked) == requests
    hub.commit("someone/learner", {name: data for name, data in uploaded.items() if name != ADAPTER})
    with pytest.raises(FileNotFoundError, match=ADAPTER):
        load_from("someone/learner", base)


def test_model_card_shows_the_learner_and_its_results(hub, learned):
    learner, output, _ = learned
    results = output / "results.json"
    other = json.loads(results.read_text()) | {"class_names": [["cat"]]}
    with pytest.raises(ValueError, match="results belong to another learner"):
        learner.push_to_hub("digits-learner", results=other)
    assert not hub.repos
    learner.push_to_hub("digits-learner", results=results, dataset_name="digits")
    files = hub.files("someone/digits-learner")
    assert files["results.json"] == results.read_bytes()
    card = ModelCard(files["README.md"].decode())
    figures = json.loads(results.read_text())["head"]
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert measured == {"A_bar": figures["average_accuracy"], "A_last": figures["last_accuracy"]}
    assert {result.dataset_name for result in card.data.eval_results} == {"digits"}
    assert card.data.model_name == "digits-learner" and card.data.library_name == "dulbe_peft"
    assert card.data.base_model is None and "pass `base_model=`" in card.text  # the base is a local folder
    expected = ["docs/decisions.md", "@unpublished", "Fanman Meng", '["zero", "one"]', '"epochs": 1']
    expected.append(f"**Probabilities**: {learner.state.doubt}.")
    expected.append(f"| bridge | {100 * figures['average_accuracy']:.2f} |")
    assert [words for words in expected if words not in card.text] == []


def test_code_examples_of_the_model_card_run(hub, learned, tmp_path, monkeypatch, capsys):
    learner, _, tasks = learned
    learner.push_to_hub("learner")
    monkeypatch.chdir(tmp_path)
    tasks[0].test[0]["image"].save("photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", hub.files("someone/learner")["README.md"].decode(), flags=re.DOTALL)
    namespaces = [{}, {}, {}]
    for block, namespace in zip(blocks, namespaces, strict=True):
        assert "import dulbe_peft" in block or "from dulbe_peft" in block
        exec(block, namespace)
    assert namespaces[0]["learner"].class_names == learner.class_names
    assert capsys.readouterr().out.splitlines()[0] in learner.class_names
    assert namespaces[1]["model"].history_rank == learner.model.history_rank
    assert namespaces[2]["classifier"].class_names == list(learner.class_names)


def test_learner_without_statistics_predicts_but_cannot_learn_tasks(hub, learned, base, tmp_path):
    learner, output, tasks = learned
    learner.push_to_hub("learner", results=output / "results.json")
    assert {STATISTICS, "results.json"} <= set(hub.files("someone/learner"))
    learner.push_to_hub("learner", statistics=False)
    assert not {STATISTICS, "results.json"} & set(hub.files("someone/learner"))  # stale files are removed
    loaded = load_from("someone/learner", base)
    expected = learner.evaluate(tasks[1].test, tasks[1].class_names)
    assert loaded.evaluate(tasks[1].test, tasks[1].class_names) == expected
    loaded.update_classes(tasks[1].test)
    with pytest.raises(ValueError, match="has no statistics of its finished tasks"):
        loaded.learn_task(tasks[2].train, tasks[2].class_names)
    loaded.save_pretrained(tmp_path / "copy")
    assert not load_from(tmp_path / "copy", base).memory


class _Trap:
    def __reduce__(self):
        return os.abort, ()


def test_pickles_of_a_learner_are_refused_and_never_downloaded(hub, uploaded, base):
    trap = {"adapter_model.bin": pickle.dumps(_Trap())}
    manifest = json.loads(uploaded["manifest.json"])
    manifest["files"]["adapter_model.bin"] = {"sha256": "0", "size": 1}
    manifest["sha256"] = json_sha256({key: value for key, value in manifest.items() if key != "sha256"})
    hub.commit("someone/learner", {**uploaded, **trap, "manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        load_from("someone/learner", base)
    hub.commit("someone/bare", trap)
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        load_from("someone/bare", base)
    hub.commit("someone/head", {"head_config.json": uploaded["head_config.json"], "pytorch_model.bin": b"x"})
    with pytest.raises(FileNotFoundError, match=r"head\.safetensors"):
        BridgeEnsembleHead.from_pretrained("someone/head")
    assert not any(path.endswith(".bin") for _, path in hub.asked)


def test_adapter_in_a_pickle_is_refused_before_peft_opens_it(hub, uploaded, base, monkeypatch):
    """PEFT itself would read `adapter_model.bin` if there is no safetensors file."""
    files = {"adapter_config.json": uploaded["adapter_config.json"], "adapter_model.bin": pickle.dumps(_Trap())}
    hub.commit("someone/pickled", files)
    for offline in (False, True):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(ValueError, match=r"adapter_model\.bin, a pickle"):
            PeftModel.from_pretrained(copy.deepcopy(base[0]), "someone/pickled")
        huggingface_hub.hf_hub_download("someone/pickled", "adapter_model.bin")
