"""Test feature tables: the command `features` writes them, and learning from them equals learning from images."""

import csv
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from small_runs import QUICK, learner_of, tasks_of

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, run_stream
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.store import FeatureStore, store_path
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.metrics.task_features import learn_from_features, read_features
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.runs import encoding
from dulbe_peft.streams.progress import known_tasks
from dulbe_peft.utils.workers import side_by_side

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
FROZEN = ["--model", "demo", "--strategy", "frozen", "--classifiers", "lda,prototype", "--device", "cpu"]


def call(*arguments, expected=0):
    assert main([str(argument) for argument in arguments]) == expected


@pytest.fixture(scope="module")
def root(digit_folders):
    """Make folders of five digits; one class in the middle of the list has no test image."""
    root = digit_folders(5, 8, 3)
    shutil.rmtree(root / "test" / "three")
    return root


@pytest.fixture(scope="module")
def table(root, tmp_path_factory):
    file = tmp_path_factory.mktemp("features") / "digits.parquet"
    call("features", "--model", "demo", "--data", root, "--output", file, "--device", "cpu")
    return file


def probabilities(run):
    """Return the prediction of each test image by its file name: class, predicted class and probability."""
    with (run / "predictions.csv").open(newline="") as file:
        return {row["image"].split("test/")[-1]: row for row in csv.DictReader(file)}


def test_table_contains_the_features_of_the_model(root, table, base):
    rows = parquet.read_table(table).to_pydict()
    assert list(rows) == ["content", "path", "split", "label", "embedding"] and len(rows["path"]) == 40 + 12
    learner = ClassIncrementalLearner(*base, args=LearnerArguments(**QUICK), strategy="frozen")
    parts = [ImageFolder(root, split) for split in ("train", "test")]
    assert rows["path"] == [part.item_name(index) for part in parts for index in range(len(part))]
    assert rows["content"] == [content.hex() for part in parts for content in part.contents()]
    assert rows["label"] == [part.class_names[label] for part in parts for label in part.labels]
    features = torch.cat([learner.image_embeds(part) for part in parts]).numpy()
    assert np.array_equal(np.array(rows["embedding"], dtype=np.float32), features)


@pytest.mark.slow
def test_learning_from_a_table_equals_learning_from_images(root, table, tmp_path):
    for data, run, model in ((root, "images", FROZEN), (table, "table", FROZEN[2:])):
        folder, learned = tmp_path / run, tmp_path / f"{run} learned"
        call("run", *model, "--data", data, "--increment", 3, "--output", folder)
        call("learn", folder / "task-001", "--data", data, "--output", learned, "--no-update")
    for end in ("", " learned"):
        assert probabilities(tmp_path / f"images{end}") == probabilities(tmp_path / f"table{end}")
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "images", machine={"progress": False})
    images, features = load_data(root, "test"), load_data(table, "test")
    left, right = (
        data.select([n for n in learner.class_names if n in data.class_names]) for data in (images, features)
    )
    assert learner.evaluate(left) == learner.evaluate(right) and learner.predict(left) == learner.predict(right)


def test_table_written_by_another_program_is_read(root, table, tmp_path, capsys):
    """Ray and Spark write a folder of parts, here without splits, not normalised, and with numbers as labels."""
    rows = parquet.read_table(table)
    train = rows.filter(pyarrow.compute.equal(rows["split"], "train")).to_pydict()
    names = sorted(set(train["label"]))
    embeddings = [[3 * float(value) for value in row] for row in train["embedding"]]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "_SUCCESS").touch()
    for number, part in enumerate((slice(0, 13), slice(13, 40))):
        content = {"embedding": embeddings[part], "label": [names.index(name) for name in train["label"][part]]}
        parquet.write_table(pyarrow.table(content), tmp_path / "parts" / f"part-{number}.snappy.parquet")
    (tmp_path / "names.txt").write_text("\n".join(names))
    call("run", *FROZEN, "--data", tmp_path / "parts", "--test-fraction", 0.3, "--class-names", tmp_path / "names.txt",
         "--output", tmp_path / "run")  # fmt: skip
    assert "does not say which model its features are from" in capsys.readouterr().out
    data = load_data(tmp_path / "parts")
    np.testing.assert_allclose(np.linalg.norm(data.features.rows, axis=1), 1, atol=1e-5)
    assert data.class_names == ("0", "1", "2", "3", "4") and len(set(data.contents())) == 40


def write_table(file, **columns):
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), file)
    return file


UNIT, LABELS = [[1.0, 0.0], [0.0, 1.0]], ["a", "b"]


def test_features_of_another_model_are_refused(root, table, tmp_path, base, capsys):
    args = LearnerArguments(**QUICK, image_resize="squash")
    with pytest.raises(ValueError, match="not by this model as it is: image_processor differ"):
        ClassIncrementalLearner(*base, args=args, strategy="frozen").learn_task(load_data(table, "train"))
    with pytest.raises(ValueError, match="has embeddings of width 2, the model's have 64"):
        learner_of(base, "frozen").learn_task(
            load_data(write_table(tmp_path / "2.parquet", label=LABELS, embedding=UNIT))
        )
    call("run", "--model", "demo", "--strategy", "dulbe", "--data", table, "--output", tmp_path / "run", expected=2)
    assert "this model has an adapter" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"no split 'val'; its splits are \['train', 'test'\]"):
        load_data(table, "val")
    command = ["features", "--model", "demo", "--device", "cpu", "--data", table, "--engine", "local", "--jobs", 1]
    call(*command, expected=2)
    assert "is already a table of features" in capsys.readouterr().err
    call("check", table, "--page", tmp_path / "page.html", expected=2)
    assert "has no pictures for --page" in capsys.readouterr().err
    assert FeatureStore(store_path()).facts()[0] == 0, "features of another model must not be stored"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([{"embedding": [[1.0, 0.0], [0.0, 0.0]]}], "the embedding of row 1 of .* is zero, NaN or infinite"),
        ([{"embedding": [[1.0, 2.0, 3.0], [4.0]]}], "has embeddings of different widths"),
        ([{"label": [0.5, 1.0]}], "has the label 0.5: labels must be all texts or all whole numbers"),
        ([{"label": ["a", None]}], "the label None"),
        ([{"content": ["caption", None]}], "the content 'caption'"),
        ([{"content": ["0000", "0001"]}], "the content '0000'"),
        ([{"content": [b"0", b"1"]}], "the content b'"),
        (
            [{}, {"label": [0, 0]}],
            "label has the type int64 in .*b.parquet and string in .*a.parquet: use one",
        ),
        ([{}, {"class": LABELS}], "b.parquet has the columns .*class.*a.parquet has"),
        ([{"names": ["cat", "dog"]}, {"names": ["dog", "cat"]}], "give their classes different names"),
        ([{}, None], "b.parquet is damaged or not a parquet file"),
    ],
)
def test_inconsistent_or_damaged_table_is_refused(tmp_path, files, words):
    for name, columns in zip("ab", files):
        if columns is None:
            (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:200])
            continue
        names = columns.get("names")
        changed = {name: values for name, values in columns.items() if name != "names"}
        rows = pyarrow.table({"label": [0, 1] if names else LABELS, "embedding": UNIT} | changed)
        hints = {"huggingface": json.dumps({"info": {"features": {"label": {"names": names}}}})}
        parquet.write_table(rows.replace_schema_metadata(hints), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=words):
        load_data(tmp_path)


def test_content_of_a_row_does_not_depend_on_other_rows(tmp_path):
    rows, known = [[0.6001, 0.8], [0.0, 1.0], [0.0, 5.0]], "0f" * 32
    few = load_data(write_table(tmp_path / "few.parquet", label=["a", "b"], embedding=rows[:2]))
    more = load_data(write_table(tmp_path / "more.parquet", label=["a", "b", "b"], embedding=rows))
    assert more.contents()[:2] == few.contents()
    given = [known, None, ""]
    mixed = load_data(write_table(tmp_path / "mixed.parquet", label=["a", "b", "b"], embedding=rows, content=given))
    assert mixed.contents() == [bytes.fromhex(known), *more.contents()[1:]]


@pytest.mark.rare
def test_engine_fills_the_store_only_with_an_untrained_model(root, table, tmp_path, capsys):
    file = tmp_path / "f.parquet"
    command = ["features", "--model", "demo", "--device", "cpu", "--precision", "float32", "--data", root]
    call(*command, "--engine", "local", "--jobs", 2, "--output", file)
    assert FeatureStore(store_path()).facts()[0] == 52
    assert parquet.read_table(file).equals(parquet.read_table(table))
    dulbe = ["run", "--model", "demo", "--strategy", "dulbe", "--epochs", 1, "--residual-rank", 1, "--support-rank", 8]
    call(*dulbe, "--data", root, "--output", tmp_path / "trained")
    call("features", tmp_path / "trained", "--data", root, "--engine", "local", "--output", file, expected=2)
    assert "are not stored" in capsys.readouterr().err
    call("features", tmp_path / "trained", "--data", root, "--output", tmp_path / "trained.parquet")
    trained = ClassIncrementalLearner.from_pretrained(tmp_path / "trained")
    expected = trained.image_embeds(load_data(root, "train")).numpy()
    assert np.array_equal(load_data(tmp_path / "trained.parquet").features.rows, expected)
    assert FeatureStore(store_path()).facts()[0] == 52


def test_missing_engine_is_reported_once_with_install_command(root, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    call("features", "--model", "demo", "--device", "cpu", "--data", root, "--engine", "ray", expected=2)
    error = capsys.readouterr().err
    assert 'pip install ".[ray]"' in error and "again" not in error


@contextmanager
def two_workers(engine):
    """Yield the options for a cluster that the command does not start, and a function that lists the workers."""
    if engine == "dask":
        distributed = pytest.importorskip("distributed")
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            yield ["--address", cluster.scheduler_address], lambda: [nanny.pid for nanny in cluster.workers.values()]
        return
    pytest.importorskip({"local": "joblib"}.get(engine, engine))
    psutil, mark = pytest.importorskip("psutil"), {"local": "loky", "ray": "ray::PoolActor"}[engine]
    started = psutil.Process()
    yield [], lambda: [p.pid for p in started.children(recursive=True) if mark in " ".join(p.cmdline())]


@pytest.mark.rare
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("engine", ["local", "dask", "ray"])
def test_killed_worker_loses_at_most_its_shard(root, table, tmp_path, monkeypatch, capsys, engine):
    """Dask encodes the shard again. Other engines make the command fail, and repeating it encodes only the rest."""
    command = ["features", "--model", "demo", "--device", "cpu", "--data", root, "--output", tmp_path / "f.parquet"]
    killed, arrived = list[int](), list[int]()
    monkeypatch.setattr(encoding, "SHARD", 2)
    monkeypatch.setattr(encoding, "number_of_jobs", lambda jobs, address: jobs)
    with two_workers(engine) as (address, workers):

        def kill_a_worker(*given):
            for result in side_by_side(*given):
                arrived.append(len(result[1]))
                yield result
                if len(arrived) == 2 and not killed:
                    killed.append(workers()[-1])
                    os.kill(killed[0], signal.SIGKILL)

        monkeypatch.setattr(encoding, "side_by_side", kill_a_worker)
        command += ["--engine", engine, *address, "--jobs", 2]
        call(*command, expected=0 if engine == "dask" else 2)
        if engine != "dask":
            assert "a worker died" in capsys.readouterr().err
            kept = FeatureStore(store_path()).facts()[0]  # workers on this machine also write to the store
            assert 4 <= sum(arrived) <= kept < 52
            arrived.clear()
            call(*command)
            assert sum(arrived) == 52 - kept, "stored features must not be computed again"
    assert killed and parquet.read_table(tmp_path / "f.parquet").equals(parquet.read_table(table))


CLASSIFIERS = ("bridge", "text", "prototype", "lda", "ridge", "ranpac:features=50")


@pytest.fixture(scope="module", params=["none", "linear", "auto"])
def run(request, tiny_model, digit_folders, tmp_path_factory):
    """Run a stream of two tasks with DuLBE and all classifiers, and keep its features."""
    learner = learner_of(load_dual_encoder(tiny_model), classifiers=CLASSIFIERS, drift=request.param)
    folder = tmp_path_factory.mktemp("run")
    run_stream(learner, tasks_of(digit_folders(4, 6, 3)), folder, keep_features=True)
    return learner, folder


@pytest.mark.plain("none", "auto-lda")
@pytest.mark.parametrize("spec", CLASSIFIERS)
def test_classifier_trained_on_kept_features_equals_that_of_the_run(run, spec):
    learner, folder = run
    answers, replayed = learn_from_features(read_features(folder), spec, learner.logit_scale, learner.args.drift)
    original = learner.classifiers[spec.partition(":")[0]]
    assert replayed.class_names == original.class_names
    for name, tensor in original.tensors().items():
        assert torch.equal(replayed.tensors()[name], tensor), name
    scores = [task.row.classifiers[original.name] for task in known_tasks(learner)]
    assert [float(answer.right.float().mean()) for answer in answers] == pytest.approx(
        [score.accuracy for score in scores]
    )
    assert answers[-1].task.tolist() == [1] * 6 + [2] * 6
