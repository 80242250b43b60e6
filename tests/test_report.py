"""The report of runs: every figure on the page against the runs' files, any class name, any kind of run."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import get_peft_model

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
)
from dulbe_peft.classifiers import CLASSIFIERS
from dulbe_peft.commands.main import main
from dulbe_peft.demo import DigitImages, demo_model_folder
from dulbe_peft.metrics.accuracy import METHODS
from dulbe_peft.metrics.evaluation import ImageResult
from dulbe_peft.report import format_summary, plot_matrix, plot_results, read_effects, read_run, write_report
from dulbe_peft.report.confusion_matrix import data_name
from dulbe_peft.report.html import percent, points
from dulbe_peft.report.pictures import write_pictures
from dulbe_peft.report.plots import SERIES, accuracy_figure, inline_svg, matrix_figure
from dulbe_peft.report.run_groups import best_results, group_results, group_runs, setting_differences
from dulbe_peft.report.table import Column, format_markdown, format_text, write_table_csv, write_table_latex
from dulbe_peft.streams.tasks import Task

NAMES = ("zero", "<script>alert(1)</script>", "=SUM(A1)", '50% of a_b & "c"', "four", "five")


def digits(start, stop):
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = np.concatenate([np.flatnonzero(data.target == label)[start:stop] for label in range(6)])
    images = DigitImages(data.images[rows], data.target[rows])
    images.class_names = NAMES
    return images


def learn(output, strategy="dulbe", seed=0, order=range(6), tests=True, tasks=3):
    clip, processor = load_clip(demo_model_folder())
    torch.manual_seed(seed)
    model = get_peft_model(clip, DualModeLoraConfig(residual_rank=2, support_rank=8)) if strategy == "dulbe" else clip
    args = LearnerArguments(epochs=1, batch_size=8, device="cpu", progress=False, seed=seed)
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=("bridge", "lda"))
    stream = class_incremental_tasks(digits(0, 6), digits(6, 16), increment=2, class_order=list(order))
    stream = stream if tests else [Task(task.train, None, task.class_names) for task in stream]
    results = learner.run(stream[:tasks], output, keep_features=strategy == "frozen")
    write_pictures(output, [task.test for task in stream[:tasks]], results)
    return output


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four finished runs: two that differ in their seed, one in another order of classes, one that trains nothing."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("runs")
    return {
        "one": learn(root / "one"),
        "two": learn(root / "two", seed=1),
        "other-order": learn(root / "other-order", order=(5, 4, 3, 2, 1, 0)),
        "frozen": learn(root / "frozen", strategy="frozen"),
    }


class Page(HTMLParser):
    """What a test asks of a page: tags with attributes, the text of its cells, and its headings."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.tables, self.headings, self.text, self._open = [], [], [], "", None
        self.source = Path(path).read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._open = tag
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append([int(tag[1]), ""])
            self._open = tag

    def handle_endtag(self, tag):
        if tag == self._open:
            self._open = None

    def handle_data(self, data):
        self.text += data
        if self._open in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self._open:
            self.headings[-1][1] += data

    def table(self, *heads):
        """The rows of the tables whose header has these cells, after the header."""
        found = [t for t in self.tables if set(heads) <= {cell.strip() for cell in t[0]}]
        assert found, f"no table has the columns {heads}"
        return [[cell.strip() for cell in row] for row in found[0][1:]]


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plain(text):
    """A cell as it was before it was made safe for spreadsheets."""
    return text.removeprefix("'") if text.startswith("'=") else text


# ---------------------------------------------------------------------- what a run writes


def test_a_run_leaves_what_people_look_at(runs):
    names = {path.name for path in runs["one"].iterdir()}
    assert {"predictions.csv", "accuracy.png", "tasks.png", "pictures", "results.json", "timings.json"} <= names
    newest = runs["one"] / "task-003" / "predictions.csv"
    assert (runs["one"] / "predictions.csv").read_bytes() == newest.read_bytes()
    for name in ("accuracy.png", "tasks.png"):
        assert (runs["one"] / name).read_bytes().startswith(b"\x89PNG")
    assert [len(rows_of(runs["one"] / f"task-00{t}" / "predictions.csv")) for t in (1, 2, 3)] == [20, 40, 60]
    for task in json.loads((runs["one"] / "timings.json").read_text())["tasks"]:
        assert task["peak_memory"] > 2**20


def test_the_results_equal_loops_over_the_predictions(runs):
    results = json.loads((runs["one"] / "results.json").read_text())
    tables = [rows_of(runs["one"] / f"task-00{t}" / "predictions.csv") for t in (1, 2, 3)]
    columns = {"bridge": "predicted", **{name: f"predicted_{name}" for name in ("lda", "text", "class_means")}}
    for name, column in columns.items():
        block = results["classifiers"].get(name) or results[name]
        for t, table in enumerate(tables):
            right = [row[column] == row["class"] for row in table]
            assert block["overall"][t] == pytest.approx(sum(right) / len(right)), name
            for i in range(t + 1):
                part = [r for r, row in zip(right, table, strict=True) if row["task"] == str(i + 1)]
                assert block["matrix"][t][i] == pytest.approx(sum(part) / len(part))
    for name in ("bridge", "lda"):
        accuracies = []
        for table in tables:
            images, right = Counter(), Counter()
            for row in table:
                images[plain(row["class"])] += 1
                right[plain(row["class"])] += row[columns[name]] == row["class"]
            accuracies.append({label: right[label] / images[label] for label in images})
        figures = results["classes"][name]
        assert figures["accuracy"] == pytest.approx(accuracies[-1])
        earlier = {label: [a[label] for a in accuracies[:-1] if label in a] for label in NAMES[:4]}
        assert figures["forgetting"] == pytest.approx({n: max(v) - accuracies[-1][n] for n, v in earlier.items()})


def test_the_results_say_what_each_task_showed(runs):
    results = json.loads((runs["one"] / "results.json").read_text())
    assert [task["images"] for task in results["tasks"]] == [dict.fromkeys(NAMES[t : t + 2], 6) for t in (0, 2, 4)]
    for task in results["tasks"]:
        assert len(task["loss"]) == 1 and task["loss"][0] > 0
        assert 0 < task["shared_capture"] < 1 and 0 < task["residual_capture"] < 1 and 0 < task["expected_depth"] < 1
    head = ClassIncrementalLearner.from_pretrained(runs["one"] / "task-003").head
    depths = (head.reliability * head.depths).sum(dim=1).reshape(3, 2).mean(dim=1)
    assert [task["expected_depth"] for task in results["tasks"]] == pytest.approx(depths.tolist())
    frozen = json.loads((runs["frozen"] / "results.json").read_text())["tasks"][0]
    assert frozen["loss"] == [] and frozen["shared_capture"] is None and frozen["residual_capture"] is None


# ---------------------------------------------------------------------- the page


def test_every_figure_of_the_page_is_the_run_s(runs, tmp_path):
    page = Page(write_report(runs["one"], tmp_path / "page.html"))
    results = json.loads((runs["one"] / "results.json").read_text())
    blocks = [results[name] for name in ("zero_shot", "text", "class_means", "head")]
    blocks.append(results["classifiers"]["lda"])
    labels = ["zero_shot", "text", "class_means", "bridge", "lda"]
    rows = page.table("method", "task 1", "task 3")
    assert rows == [[label, *map(percent, block["overall"])] for label, block in zip(labels, blocks, strict=True)]
    summary = page.table("method", "forgetting")
    for label, block, row in zip(labels, blocks, summary, strict=True):
        measures = ("average_accuracy", "last_accuracy", "forgetting", "backward_transfer")
        assert row == [label, *(percent(block.get(name)) for name in measures)]
    matrix = page.table("after", "task 3")
    assert matrix[1] == ["task 2", *map(percent, results["head"]["matrix"][1]), ""]
    gain = results["head"]["last_accuracy"] - results["zero_shot"]["last_accuracy"]
    lead = " ".join(page.text.split())
    assert "demo_clip learned 6 classes in 3 tasks" in lead and "Of 60 test images" in lead
    more = "more" if gain > 0 else "less"
    assert f"{percent(abs(gain))} percentage points {more} than zero_shot" in lead
    images = page.table("training images", "shared capture", "expected depth")
    record = results["tasks"][1]
    assert images[1][:8] == [
        "2", "2", "12", "6", f"{record['loss'][0]:.3f}", f"{record['loss'][-1]:.3f}",
        percent(record["shared_capture"]), percent(record["residual_capture"]),
    ]  # fmt: skip


def test_the_table_of_classes_equals_a_loop_over_the_predictions(runs, tmp_path):
    page = Page(write_report(runs["one"], tmp_path / "page.html"))
    results = json.loads((runs["one"] / "results.json").read_text())
    rows = rows_of(runs["one"] / "predictions.csv")
    table = page.table("class", "right (%)", "taken for")
    assert {row[0] for row in table} == set(NAMES)
    for name, right, lost, images, taken in table:
        own = [row for row in rows if plain(row["class"]) == name]
        hits = sum(row["predicted"] == row["class"] for row in own)
        assert (right, images) == (percent(hits / len(own)), str(len(own)))
        assert lost == percent(results["classes"]["bridge"]["forgetting"].get(name))
        wrong = Counter(plain(row["predicted"]) for row in own if row["predicted"] != row["class"])
        assert all(f"{other} ({count})" in taken for other, count in wrong.most_common(1)) and bool(taken) == bool(
            wrong
        )
    assert [float(row[1]) for row in table] == sorted(float(row[1]) for row in table), "the worst comes first"
    columns, *body = next(
        t for t in page.tables if t[0][0] == "class" and "right (%)" not in t[0] and "lda" not in t[0]
    )
    assert len(columns) == len(set(columns)), "no class stands twice"
    for row in body:
        for other, count in zip(columns[1:], row[1:], strict=True):
            found = sum(plain(r["class"]) == row[0] and plain(r["predicted"]) == other for r in rows)
            assert (int(count) if count else 0) == found


def test_pictures_have_their_words(runs, tmp_path):
    page = Page(write_report(runs["one"], tmp_path / "page.html"))
    index = json.loads((runs["one"] / "pictures" / "index.json").read_text())
    alternatives = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    wanted = [f"Test image of the class {e['class']}, taken for {e['predicted']}" for e in index["mistakes"]]
    assert wanted and alternatives[: len(wanted)] == wanted and len(alternatives) == len(wanted) + len(index["hits"])
    sure = [entry["probability"] for entry in index["mistakes"]]
    assert sure == sorted(sure, reverse=True)


def self_contained(page):
    """The page asks for nothing, runs nothing, and says what its pictures show."""
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("data:", "#")), (tag, attributes)
        assert tag != "img" or attributes["alt"]
        assert tag != "svg" or "role" not in attributes
    assert "@import" not in page.source and "url(http" not in page.source
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_a_page_is_one_file_and_a_class_name_is_only_a_text(runs, tmp_path):
    for which in ([runs["one"]], list(runs.values())):
        page = Page(write_report(which, tmp_path / "page.html"))
        self_contained(page)
        assert "<script>alert" not in page.source and "&lt;script&gt;alert(1)&lt;/script&gt;" in page.source


# ---------------------------------------------------------------------- other kinds of runs


def test_where_nothing_is_trained_nothing_changed(runs, tmp_path):
    assert read_effects(read_run(runs["frozen"])).drift[0].old == pytest.approx(1)
    page = write_report(runs["frozen"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "lean on their names" in page and "alone (%)" in page and "What training changed" not in page


def test_an_unfinished_run(runs, tmp_path):
    run = shutil.copytree(runs["one"], tmp_path / "run")
    for name in ("results.json", "predictions.csv", "task-003/manifest.json"):
        (run / name).unlink()
    for name in ("pictures",):
        shutil.rmtree(run / name)
    page = Page(write_report(run, tmp_path / "page.html"))
    self_contained(page)
    text = " ".join(page.text.split())
    assert "not finished" in text and "the 2 tasks that it has" in text and "learned 4 classes in 2 tasks" in text
    whole = json.loads((runs["one"] / "results.json").read_text())
    rows = page.table("method", "task 1", "task 2")
    assert rows[3] == ["bridge", *map(percent, whole["head"]["overall"][:2])]
    assert rows[0] == ["zero_shot", *map(percent, whole["zero_shot"]["overall"][:2])]
    assert len(rows_of(runs["one"] / "task-002" / "predictions.csv")) == len(read_run(run).predictions)


def test_a_run_without_tests(tmp_path):
    run = learn(tmp_path / "run", strategy="frozen", tests=False)
    assert {"predictions.csv", "pictures", "accuracy.png"}.isdisjoint(path.name for path in run.iterdir())
    page = Page(write_report(run, tmp_path / "page.html"))
    self_contained(page)
    assert "no test images, so nothing says how good it is" in page.text
    assert page.table("training images")[2][2] == "12"
    both = Page(write_report([run, run], tmp_path / "page.html", csv=tmp_path / "t.csv"))
    assert "None of the runs has test images" in both.text and rows_of(tmp_path / "t.csv") == []


def test_results_alone_are_enough(runs, tmp_path):
    """Somebody kept the small files and threw the task folders away."""
    run = tmp_path / "kept"
    run.mkdir()
    for name in ("results.json", "predictions.csv"):
        shutil.copy(runs["one"] / name, run / name)
    page = Page(write_report(run, tmp_path / "page.html"))
    self_contained(page)
    assert page.table("class", "taken for") and page.table("training images")[0][2] == "12"


def test_a_run_of_a_learner_that_had_learned_before(runs, tmp_path):
    """Its first two tasks were learned elsewhere: no test images of theirs are here."""
    learner = ClassIncrementalLearner.from_pretrained(runs["frozen"] / "task-002")
    learner.folder = None
    last = class_incremental_tasks(digits(0, 6), digits(6, 16), increment=2)[2]
    learner.run([last], tmp_path / "run")
    page = Page(write_report(tmp_path / "run", tmp_path / "page.html"))
    self_contained(page)
    assert [row["task"] for row in rows_of(tmp_path / "run" / "predictions.csv")] == ["3"] * 20
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    head = percent(results["head"]["overall"][2])
    bridge = next(row for row in page.table("method", "task 3") if row[0] == "bridge")
    assert bridge == ["bridge", "", "", head]
    assert page.table("after", "task 3")[2] == ["task 3", "", "", percent(results["head"]["matrix"][2][2])]
    assert [row[2] for row in page.table("training images")] == ["", "", "12"]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda folder: None, FileNotFoundError, "is no folder"),
        (lambda folder: folder.mkdir(), ValueError, "nothing to report"),
        (lambda folder: folder.mkdir() or (folder / "results.json").write_text("[]"), ValueError, "results.json is"),
        (
            lambda folder: folder.mkdir() or (folder / "results.json").write_text("{}"),
            ValueError,
            "class_names: Field",
        ),
    ],
)
def test_other_folders_are_refused_by_name(tmp_path, make, error, words):
    make(tmp_path / "x")
    with pytest.raises(error, match=words) as caught:
        write_report(tmp_path / "x", tmp_path / "page.html")
    assert str(tmp_path / "x") in str(caught.value) and not (tmp_path / "page.html").exists()
    with pytest.raises(ValueError, match="no run is given"):
        write_report([])


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("results.json", "classifiers", {"bridge": {}}),
        ("results.json", "configuration", "none"),
        ("timings.json", "tasks", [{"seconds": "long"}]),
        ("pictures/index.json", "hits", [{"file": "../../private.jpg"}]),
    ],
)
def test_a_damaged_run_is_named_with_its_file_and_field(runs, file, key, value, tmp_path):
    bad = shutil.copytree(runs["one"], tmp_path / "bad")
    (bad / file).write_text(json.dumps(json.loads((bad / file).read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"{re.escape(str(bad / file))} is damaged or foreign: {key}"):
        write_report([runs["two"], bad], tmp_path / "page.html", tmp_path / "a.csv", tmp_path / "a.tex")
    assert not list(tmp_path.glob("*.*"))


# ---------------------------------------------------------------------- several runs


def test_runs_that_differ_in_seed_or_order_are_one_row(runs, tmp_path):
    copies = [shutil.copytree(folder, tmp_path / name) for name, folder in runs.items()]
    for copy, value in zip(copies, (0.5, 0.6, 0.9, 0.7), strict=True):  # their own figures are almost the same
        results = json.loads((copy / "results.json").read_text())
        results["classifiers"]["lda"]["last_accuracy"] = value
        (copy / "results.json").write_text(json.dumps(results))
    read = [read_run(folder) for folder in copies]
    assert [[run.name for run in group] for group in group_runs(read)] == [["one", "two", "other-order"], ["frozen"]]
    rows = {(row.runs[0], row.method): row for row in group_results(group_runs(read))}
    lasts = [run.results["classifiers"]["lda"]["last_accuracy"] for run in read[:3]]
    figure = rows["one", "lda"].measures["last_accuracy"]
    mean = sum(lasts) / 3
    assert figure.mean == pytest.approx(mean)
    assert figure.spread == pytest.approx((sum((value - mean) ** 2 for value in lasts) / 2) ** 0.5)
    assert rows["frozen", "lda"].measures["last_accuracy"].spread is None
    page = Page(write_report(copies, tmp_path / "page.html"))
    table = {(row[0], row[3]): row for row in page.table("runs", "n", "method")}
    assert table["one, two, other-order", "lda"][1] == "3"
    assert table["one, two, other-order", "lda"][4] == f"{100 * mean:.2f} ± {100 * figure.spread:.2f}"
    settings = {row[0]: row[1:] for row in page.table("setting", "one", "two")}
    assert settings["arguments.seed"] == ["0", "1", "0", "0"]
    assert settings["strategy.name"] == ["dulbe", "dulbe", "dulbe", "frozen"] and "arguments.epochs" not in settings
    assert settings["adapter"] == ["yes", "yes", "yes", "none"], "what is not there at all is one row"
    assert not [name for name in settings if name.startswith("adapter.")]


def test_settings_of_an_adapter_are_compared_among_the_runs_that_have_one(runs):
    one, two, frozen = (read_run(runs[name]) for name in ("one", "two", "frozen"))
    two.settings["adapter"]["support_rank"] = 4
    del frozen.settings["classifiers"]  # nobody noted them
    found = dict(setting_differences([one, two, frozen]))
    assert found["adapter"] == ["yes", "yes", "none"] and found["adapter.support_rank"] == ["8", "4", "–"]
    assert found["classifiers.lda"] == ["yes", "yes", "–"] and "classifiers.lda.shrinkage" not in found


def with_last(folder, target, **lasts):
    """A copy of a run whose classifiers have other accuracies after the last task."""
    copy = shutil.copytree(folder, target)
    results = json.loads((copy / "results.json").read_text())
    for name, value in lasts.items():
        (results if name in results else results["classifiers"])[name]["last_accuracy"] = value
    (copy / "results.json").write_text(json.dumps(results))
    return copy


def test_a_tie_is_said(runs, tmp_path):
    lower = dict.fromkeys(("zero_shot", "text", "class_means"), 0.1)
    one = with_last(runs["one"], tmp_path / "one", bridge=0.5, lda=0.91234, **lower)
    frozen = with_last(runs["frozen"], tmp_path / "frozen", bridge=0.91231, lda=0.4, **lower)
    text = " ".join(Page(write_report([one, frozen], tmp_path / "page.html")).text.split())
    assert "“lda” in one and “bridge” in frozen name most test images right, and equally many: 91.23 %." in text
    frozen = with_last(runs["frozen"], tmp_path / "worse", bridge=0.9, lda=0.4, **lower)
    rows = best_results(group_results(group_runs([read_run(one), read_run(frozen)])))
    assert [(row.runs, row.method) for row in rows] == [(("one",), "lda")]


def test_what_is_no_difference_is_no_less(runs, tmp_path):
    run = with_last(runs["one"], tmp_path / "run", bridge=0.5, class_means=0.500001, zero_shot=0.6)
    text = " ".join(Page(write_report(run, tmp_path / "page.html")).text.split())
    assert "That is as many as class_means, " in text and " 0.00 percentage points" not in text
    assert "That is 10.00 percentage points less than zero_shot, " in text


def test_runs_on_other_data_are_not_one_row(runs):
    one, two = read_run(runs["one"]), read_run(runs["two"])
    two.fingerprints["data"][0] = ["other images", "the same"]
    assert len(group_runs([one, two])) == 2


def test_the_table_as_csv_and_latex(runs, tmp_path):
    copy = shutil.copytree(runs["frozen"], tmp_path / "=50%_of & {all}")
    folders = [runs["one"], runs["two"], copy]
    write_report(folders, tmp_path / "page.html", csv=tmp_path / "t.csv", latex=tmp_path / "t.tex")
    rows = rows_of(tmp_path / "t.csv")
    lda = json.loads((runs["frozen"] / "results.json").read_text())["classifiers"]["lda"]
    found = next(row for row in rows if row["method"] == "lda" and row["strategy"] == "frozen")
    assert found["runs"] == "'=50%_of & {all}" and found["n"] == "1" and found["last_accuracy_std"] == ""
    assert float(found["last_accuracy"]) == lda["last_accuracy"], "in full"
    assert [row["n"] for row in rows[:5]] == ["2"] * 5 and rows[0]["runs"] == "one; two"
    latex = (tmp_path / "t.tex").read_text()
    assert r"=50\%\_of \& \{all\} & 1 & frozen & lda & " + percent(lda["last_accuracy"]) in latex
    assert all(line.count("&") - line.count(r"\&") == 7 for line in latex.splitlines() if line.endswith(r"\\"))


def test_the_command(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs["one"]), "--output", "a.html", "--csv", "a.csv", "--latex", "a.tex"]) == 0
    assert capsys.readouterr().out.split() == ["written:", "a.html", "written:", "a.csv", "written:", "a.tex"]
    assert len(rows_of("a.csv")) == 5
    shutil.copytree(runs["one"], "run")
    assert main(["report", "run"]) == 0 and Path("run/report.html").is_file()
    assert main(["report", "run", str(runs["two"])]) == 0 and Path("report.html").is_file()
    assert main(["report", "gone"]) == 2
    assert "gone is no folder" in capsys.readouterr().err


# ---------------------------------------------------------------------- parts


def test_one_list_of_columns_makes_every_table(tmp_path):
    columns = [
        Column("name", lambda row: row[0], number=False, values={"name": lambda row: row[0]}),
        Column("hidden", None, values={"full": lambda row: row[1]}),
        Column("share (%)", lambda row: "" if row[1] is None else f"{row[1]:.1f} ± 2 → -1", short="share"),
    ]
    rows = [("a_b", 0.123456), ("\\~^<>|#$&", None)]
    assert format_text(columns, rows).splitlines() == [
        "name              share",
        "a_b        0.1 ± 2 → -1",
        r"\~^<>|#$&",
    ]
    assert format_markdown(columns, rows).splitlines()[:3] == [
        "| name | share (%) |",
        "| --- | ---: |",
        "| a_b | 0.1 ± 2 → -1 |",
    ]
    write_table_csv(columns, rows, tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines()[:2] == ["name,full", "a_b,0.123456"]
    write_table_latex(columns, rows, tmp_path / "t.tex")
    assert (tmp_path / "t.tex").read_text().splitlines()[2:6] == [
        r"name & share (\%) \\",
        r"\hline",
        r"a\_b & 0.1 $\pm$ 2 $\to$ $-$1 \\",
        r"\textbackslash{}\textasciitilde{}\textasciicircum{}{<}{>}{|}\#\$\& &  \\",
    ]


def test_names_of_data_and_numbers():
    def images(*names):
        return [ImageResult(name, Path(name).parent.name, "x", 1.0, 1, 0, {}) for name in names]

    june = images("/a/b/photos/test/x/1.png", "/a/b/photos/test/y/1.png")
    assert data_name(june) == "photos/test"
    july = images("/a/b/july/test/z/1.png")
    assert data_name(june + july) == "photos/test and july/test", "not the folder around both"
    assert data_name(images("/a/photos/x/1.png", "/a/photos/y/1.png")) == "/a/photos"
    nested = [ImageResult("/a/b/photos/x/deep/1.png", "x", "x", 1.0, 1, 0, {})]
    assert data_name(nested) == "b/photos"
    renamed = [ImageResult(f"/a/b/photos/n0{i}/1.png", f"class {i}", "x", 1.0, 1, 0, {}) for i in range(4)]
    assert data_name(renamed) == "b/photos"
    assert data_name([r for i in range(4) for r in images(f"/{i}/data/test/x/1.png")]) is None, "too many to name"
    assert data_name(images(*(f"/a/b/c.npz[{i}]" for i in range(3)))) == "b/c.npz"
    assert data_name(images(*(f"item {i}" for i in range(3)))) is None and data_name([]) is None
    assert (percent(0.63237), percent(None), percent(-0.00001), percent(0.5, 1)) == ("63.24", "", "0.00", "50.0")
    assert (points(0.1), points(-0.1), points(0.000001), points(None)) == ("+10.00", "-10.00", "0.00", "")


def test_every_classifier_is_called_by_its_name_and_explained_once(runs, tmp_path):
    own = {name for name, cls in CLASSIFIERS.items() if cls.__module__.startswith("dulbe_peft.")}
    assert own <= set(METHODS)
    page = Page(write_report(runs["one"], tmp_path / "page.html"))
    for name in ("zero_shot", "text", "class_means", "bridge", "lda"):
        assert page.text.count(METHODS[name].split(":")[0] + ":") == 1


def test_the_terminal_s_table_explains_itself(runs):
    results = json.loads((runs["one"] / "results.json").read_text())
    head, *rows = format_summary(results).splitlines()
    assert [row.split()[0] for row in rows[:5]] == ["zero_shot", "text", "class_means", "bridge", "lda"]
    bridge = results["classifiers"]["bridge"]
    assert rows[3].split()[1:3] == [percent(bridge["average_accuracy"]), percent(bridge["last_accuracy"])]
    assert max(map(len, [head, *rows])) <= 80 and len(rows) == 7
    for word in (*head.split()[1:4], "backward transfer"):
        assert word.lower() in " ".join(rows[5:]).lower()


def test_pictures_of_a_page_take_its_colours(runs):
    results = json.loads((runs["one"] / "results.json").read_text())
    svg = inline_svg(accuracy_figure(results), "x")
    assert svg.startswith("<svg") and "var(--series-3)" in svg and "currentColor" in svg
    assert not [colour for colour in SERIES if colour in svg] and "<script" not in svg
    assert svg == inline_svg(accuracy_figure(results), "x"), "the same results give the same picture"
    assert accuracy_figure(results).axes[0].get_ylim() == (0, 100), "no axis is cut"
    assert matrix_figure(results).axes[0].images[0].get_clim() == (0, 100)
    for plot in (plot_results, plot_matrix):
        with pytest.raises(ValueError, match="no test data"):
            plot({"class_names": [["a"]]}, "x.png")
