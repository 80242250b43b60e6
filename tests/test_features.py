"""Folders of features: written by shards, never twice, by this process or an engine, and as good as the images."""

import csv
import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import QUICK, learner_of, tasks_of

from dulbe_peft import ClassIncrementalLearner, ImageFolder, LearnerArguments, load_data
from dulbe_peft.commands.main import main
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.metrics.features import learn_from_features, read_features
from dulbe_peft.runs import encoding
from dulbe_peft.runs.progress import known_tasks
from dulbe_peft.utils.engines import on_engine

parquet = pytest.importorskip("pyarrow.parquet")
FROZEN = ["--model", "demo", "--strategy", "frozen", "--classifiers", "bayes,prototype", "--device", "cpu"]


def call(*arguments, expected=0):
    assert main([str(argument) for argument in arguments]) == expected


@pytest.fixture(scope="module")
def root(digit_folders):
    """Five digits; one of them has no test image, and is in the middle of the list of classes."""
    root = digit_folders(5, 8, 3)
    shutil.rmtree(root / "test" / "three")
    return root


@pytest.fixture(scope="module")
def folder(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features") / "digits"
    call("features", "--model", "demo", "--data", root, "--output", folder, "--device", "cpu")
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """How many images each call of the image tower encoded."""
    counts, encode = [], Encoder.image_embeds
    monkeypatch.setattr(Encoder, "image_embeds", lambda self, x: (counts.append(len(x)), encode(self, x))[1])
    return counts


def probabilities(run):
    """Of each test image, by its file's name: the class, the answer and its probability."""
    with (run / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["image"].split("[")[-1].strip("]").split("test/")[-1]: row for row in rows}


def same_answers(run, other, within=1e-6):
    first, second = probabilities(run), probabilities(other)
    assert first.keys() == second.keys() and first
    for image, row in first.items():
        assert (row["class"], row["predicted"]) == (second[image]["class"], second[image]["predicted"])
        assert float(row["probability"]) == pytest.approx(float(second[image]["probability"]), abs=within)


def test_any_program_reads_what_the_model_sees(root, folder, base):
    facts = json.loads((folder / "features.json").read_text())
    learner = ClassIncrementalLearner(*base, args=LearnerArguments(**QUICK), strategy="frozen")
    classes = parquet.read_table(folder / "classes.parquet").to_pydict()
    assert classes["class"] == facts["class_names"] == list(ImageFolder(root, "train").class_names)
    np.testing.assert_allclose(classes["embedding"], learner.text_embeds(classes["class"]), atol=1e-6)
    assert facts["logit_scale"] == pytest.approx(learner.logit_scale)
    for split in ("train", "test"):
        images = ImageFolder(root, split)
        table = parquet.read_table(folder / f"{split}-00000.parquet").to_pydict()
        assert table["image"] == [images.relative_name(index) for index in range(len(images))]
        names = [images.class_names[label] for label in images.labels]
        assert [facts["class_names"][label] for label in table["label"]] == names
        np.testing.assert_allclose(table["embedding"], learner.image_embeds(images), atol=1e-6)


def test_a_split_alone_has_the_classes_of_all(root, tmp_path, base):
    call("features", "--model", "demo", "--data", root, "--split", "test", "--output", tmp_path / "f")
    names = ImageFolder(root, "train").class_names
    data = load_data(tmp_path / "f", "test")
    assert data.class_names == names and len(data) == 12
    assert {names[label] for label in data.labels} == set(names) - {"three"}
    assert data.features.of(data).shape == (12, 64)


def test_learning_from_features_is_learning_from_images(root, folder, tmp_path, encoded):
    for data, run in ((root, "images"), (folder, "features")):
        encoded.clear()
        call("run", *FROZEN, "--data", data, "--increment", 3, "--max-tasks", 1, "--output", tmp_path / run)
        call("learn", tmp_path / run, "--data", data, "--output", tmp_path / f"{run} learned", "--no-update")
        assert bool(encoded) is (run == "images")
    # The batches were others, so the last bits are, and the files have six digits.
    same_answers(tmp_path / "features", tmp_path / "images", within=5e-6)
    same_answers(tmp_path / "features learned", tmp_path / "images learned", within=5e-6)
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "images", machine={"progress": False})
    images, features = load_data(root, "test"), load_data(folder, "test")
    chosen = learner.class_names
    left, right = (data.select([n for n in chosen if n in data.class_names]) for data in (images, features))
    assert learner.evaluate(left) == learner.evaluate(right)
    assert learner.predict(left) == learner.predict(right)
    learner.update_classes(right)


@pytest.mark.slow
def test_comparing_from_features_is_comparing_from_images(root, folder, tmp_path):
    found = []
    for data in (root, folder):
        plan = tmp_path / "plan.yaml"
        stream = {"model": "demo", "data": str(data), "increment": 3, "device": "cpu"}
        content = {"streams": {"digits": stream}, "methods": {"frozen": {"strategy": "frozen"}}}
        plan.write_text(json.dumps(content | {"classifiers": ["lda", "prototype"]}))
        call("compare", plan, "--output", tmp_path / data.name)
        with next((tmp_path / data.name).glob("*.csv")).open(newline="") as file:
            found.append([{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)])
    assert found[0] == found[1] and len(found[0]) >= 2


def test_no_image_is_encoded_twice(root, tmp_path, monkeypatch, encoded):
    data, out = tmp_path / "photos", tmp_path / "f"
    shutil.copytree(root, data)
    monkeypatch.setattr(encoding, "SHARD", 16)
    write, calls = encoding.stored.write_shard, []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(*arguments)

    command = ["features", "--model", "demo", "--data", data, "--output", out, "--eval-batch-size", 8]
    with monkeypatch.context() as patch:
        patch.setattr(encoding.stored, "write_shard", killed)
        assert main([str(argument) for argument in command]) != 0
    assert len(list(out.glob("train-*.parquet"))) == 2
    encoded.clear()
    call(*command)
    assert sum(encoded) == 52 - 32
    encoded.clear()
    call(*command)
    assert not encoded
    (data / "train" / "bear").mkdir()
    shutil.copy(data / "train" / "one" / "1.png", data / "train" / "bear" / "1.png")
    call(*command)
    assert sum(encoded) == 1
    found = load_data(out, "train")
    assert found.class_names[-1] == "bear" and found.class_names[found.labels[-1]] == "bear"
    assert [name.split("/")[0] for name in map(found.relative_name, range(len(found)))] == [
        found.class_names[label] for label in found.labels
    ]


def test_an_unreadable_image_is_left_out_and_named(root, tmp_path, capsys):
    data = tmp_path / "photos"
    shutil.copytree(root / "train", data)
    whole = (data / "one" / "1.png").read_bytes()
    (data / "one" / "1.png").write_bytes(whole[:50] + b"\0" * 10 + whole[60:])
    call("features", "--model", "demo", "--data", data, "--output", tmp_path / "f", expected=2)
    assert "one/1.png" in capsys.readouterr().err
    assert len(load_data(tmp_path / "f")) == 39


def test_features_of_others_are_refused(root, folder, tmp_path, base, capsys):
    copied = shutil.copytree(folder, tmp_path / "f")
    features, (clip, processor) = load_data(folder, "train"), base
    learner = ClassIncrementalLearner(clip, processor, args=LearnerArguments(**QUICK), strategy="frozen")
    learner.learn_task(features)
    args = LearnerArguments(**QUICK, image_resize="squash")
    with pytest.raises(ValueError, match="made with another model or in another way: image_processor differ"):
        ClassIncrementalLearner(clip, processor, args=args, strategy="frozen").learn_task(features)
    dulbe = ["run", "--model", "demo", "--strategy", "dulbe", "--data"]
    call(*dulbe, folder, "--output", tmp_path / "run", expected=2)
    assert "this one has an adapter" in capsys.readouterr().err
    (copied / "train-00000.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=r"train-00000.parquet is damaged or foreign: .*; remove it"):
        load_data(copied, "train")
    with pytest.raises(FileNotFoundError, match=r"no split 'val'; its splits are \['test', 'train'\]"):
        load_data(folder, "val")
    (copied / "features.json").unlink()
    command = ["features", "--model", "demo", "--data", root, "--output", copied]
    call(*command, expected=2)
    assert "holds something that is no folder of features" in capsys.readouterr().err


def test_an_engine_finds_the_same(root, tmp_path, capsys):
    command = ["run", *FROZEN, "--data", root, "--increment", 3]
    call(*command, "--output", tmp_path / "plain")
    call(*command, "--output", tmp_path / "engine", "--engine", "local", "--jobs", 2)
    same_answers(tmp_path / "engine", tmp_path / "plain")
    dulbe = ["run", "--model", "demo", "--strategy", "dulbe", "--data", root]
    call(*dulbe, "--output", tmp_path / "no", "--engine", "local", expected=2)
    assert "--engine is for strategies that train nothing, not for 'dulbe'" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_asked_for_once(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    call("run", *FROZEN, "--data", root, "--output", tmp_path / "out", "--engine", "ray", expected=2)
    found = capsys.readouterr().err
    assert "pip install 'dulbe_peft[ray]'" in found and "again" not in found


@contextmanager
def two_workers(engine):
    """The options that name a cluster, where it does not start with the command, and what finds its workers."""
    if engine == "ray":
        psutil = pytest.importorskip("psutil")
        started = psutil.Process()
        yield [], lambda: [p.pid for p in started.children(recursive=True) if "ray::_numbered" in "".join(p.cmdline())]
    else:
        distributed = pytest.importorskip("distributed")
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            yield ["--address", cluster.scheduler_address], lambda: [nanny.pid for nanny in cluster.workers.values()]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_the_shard_of_a_killed_worker_is_done_again(root, tmp_path, monkeypatch, engine):
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    command = ["run", *FROZEN, "--data", root, "--increment", 3, "--eval-batch-size", 4]
    call(*command, "--output", tmp_path / "plain")
    shards, done, killed = tmp_path / "engine" / "embeddings", dict[Path, int](), list[int]()
    monkeypatch.setattr(encoding, "SHARD", 2)
    with two_workers(engine) as (address, workers):

        def note_what_arrived(function, calls, *rest):
            calls = list(calls)
            for place, answer in on_engine(function, calls, *rest):
                file = shards / f"{calls[place][0].split}-{calls[place][0].number:05d}.parquet"
                if not killed:
                    done[file] = file.stat().st_mtime_ns
                yield place, answer

        def kill_one_that_works():
            while len(done) < 2 or not (working := workers()):
                time.sleep(0.01)
            killed.append(working[0])
            os.kill(working[0], signal.SIGKILL)

        monkeypatch.setattr(encoding, "on_engine", note_what_arrived)
        threading.Thread(target=kill_one_that_works, daemon=True).start()
        call(*command, "--output", tmp_path / "engine", "--engine", engine, *address, "--jobs", 2)
    assert killed and len(done) >= 2 and all(file.stat().st_mtime_ns == written for file, written in done.items())
    same_answers(tmp_path / "engine", tmp_path / "plain")
    found = load_data(shards, "train")
    assert len(found) == len(set(map(found.relative_name, range(len(found))))) == 40
    assert torch.isfinite(torch.from_numpy(found.features.rows)).all()


CLASSIFIERS = ("bridge", "text", "prototype", "lda", "ridge", "ranpac:features=50")


@pytest.fixture(scope="module", params=["none", "linear"])
def run(request, base, digit_folders, tmp_path_factory):
    """A stream of two tasks that DuLBE has trained with all classifiers and kept the features of."""
    torch.set_num_threads(1)
    learner = learner_of(base, classifiers=CLASSIFIERS, drift=request.param)
    folder = tmp_path_factory.mktemp("run")
    learner.run(tasks_of(digit_folders(4, 6, 3)), folder, keep_features=True)
    return learner, folder


@pytest.mark.parametrize("spec", CLASSIFIERS)
def test_a_classifier_learns_from_features_what_it_learned_in_the_run(run, spec):
    learner, folder = run
    answers, replayed = learn_from_features(read_features(folder), spec, learner.logit_scale, learner.args.drift)
    taught = learner.classifiers[spec.partition(":")[0]]
    assert replayed.class_names == taught.class_names
    for name, tensor in taught.tensors().items():
        assert torch.equal(replayed.tensors()[name], tensor), name
    scores = [task.row.classifiers[taught.name] for task in known_tasks(learner)]
    assert [float(found.right.float().mean()) for found in answers] == pytest.approx(
        [score.accuracy for score in scores]
    )
    assert answers[-1].task.tolist() == [1] * 6 + [2] * 6
