"""Test the report of runs: every figure on the page, class names with HTML, and every kind of run folder."""

import csv
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from pages import NAMES, Page, check_self_contained, drawn, learn
from PIL import Image
from tiny_encoders import save_encoder

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.checkpoints.layout import LEARNER_FILE
from dulbe_peft.classifiers import CLASSIFIERS
from dulbe_peft.metrics.accuracy import TITLES
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.commands.run import print_results
from dulbe_peft.photos.report import advice, read_run, write_report
from dulbe_peft.photos.report.advice import leaderboard, summary
from dulbe_peft.photos.report.html import percent
from dulbe_peft.training.state import Estimates
from research.diagnostics.training_effects import read_effects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return three finished runs: one that trains, and two that do not and differ in their seed."""
    root = tmp_path_factory.mktemp("runs")
    return {
        "one": learn(root / "one"),
        "two": learn(root / "two", strategy="frozen", seed=1),
        "frozen": learn(root / "frozen", strategy="frozen"),
    }


@pytest.fixture(scope="module")
def untested(tmp_path_factory):
    """Return a finished run that does not train and has no test images."""
    return learn(tmp_path_factory.mktemp("untested") / "run", strategy="frozen", tests=False)


def rows_of(path):
    """Return the rows of a CSV file, without the apostrophes that make texts safe for spreadsheets."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{k: v.removeprefix("'") for k, v in row.items()} for row in csv.DictReader(file)]


def json_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_finished_run_folder_has_predictions_charts_and_records(runs):
    run, results = runs["one"], json_of(runs["one"] / "results.json")
    assert (run / "predictions.csv").read_bytes() == (run / "task-003" / "predictions.csv").read_bytes()
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in ("accuracy.png", "tasks.png"))
    assert [len(rows_of(run / f"task-00{t}" / "predictions.csv")) for t in (1, 2, 3)] == [20, 40, 60]
    assert all(task["peak_memory"] > 2**20 for task in json_of(run / "timings.json")["tasks"])
    assert [task["images"] for task in results["tasks"]] == [dict.fromkeys(NAMES[t : t + 2], 6) for t in (0, 2, 4)]
    for task in results["tasks"]:
        assert len(task["loss"]) == 1 and 0 < task["shared_capture"] < 1 and 0 < task["residual_capture"] < 1
    head = ClassIncrementalLearner.from_pretrained(run / "task-003").head
    depths = (head.reliability * head.depths).sum(dim=1).reshape(3, 2).mean(dim=1)
    assert [task["expected_depth"] for task in results["tasks"]] == pytest.approx(depths.tolist())
    frozen = json_of(runs["frozen"] / "results.json")["tasks"][0]
    assert frozen["loss"] == [] and frozen["shared_capture"] is None and frozen["residual_capture"] is None


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    with drawn():
        return Page(write_report(runs["one"], tmp_path_factory.mktemp("page") / "page.html"))


def shown(right, images):
    """Return the text of a cell with an accuracy, with Wilson's interval written out."""
    p, z2 = right / images, 1.959963984540054**2
    middle, half = p + z2 / (2 * images), (z2 * (p * (1 - p) / images + z2 / (4 * images**2))) ** 0.5
    low, high = ((middle + sign * half) / (1 + z2 / images) for sign in (-1, 1))
    return f"{100 * p:.1f} % {right} of {images}; {100 * low:.1f} to {100 * high:.1f}"


def test_figures_on_the_page_equal_those_of_the_run(page, runs):
    results = json_of(runs["one"] / "results.json")
    methods = {name: results[name] for name in ("zero_shot", "text", "class_means")} | results["classifiers"]
    titled = {TITLES.get(name, name): block for name, block in methods.items()}
    once = {json.dumps(block["overall"]): name for name, block in reversed(titled.items())}  # equal rows appear once
    blocks = {name: block for name, block in titled.items() if name != "names after learning" or name in once.values()}
    board = {name: row for row in page.table("classifier", "description") for name in row[0].split(", ")}
    assert set(board) == set(blocks) and all(summary(name) in page.words for name in methods)
    assert all(summary(name) for name in (*CLASSIFIERS, *methods)) and summary("of somebody else") == ""
    for name, block in blocks.items():
        assert board[name][1] == shown(round(60 * block["last_accuracy"]), 60)
        assert name not in ("bridge", "lda") or (float(board[name][2]) >= 0 and float(board[name][3]) >= 0)
    lasts = [float(row[1].split()[0]) for row in page.table("classifier", "description")]
    assert lasts == sorted(lasts, reverse=True)
    steps = {name: [percent(value, 1) for value in block["overall"]] for name, block in blocks.items()}
    assert steps_of(page) == steps
    for label, *row in page.table("method", "forgetting"):
        measures = ("average_accuracy", "last_accuracy", "forgetting", "backward_transfer")
        assert row == [percent(titled[label].get(name)) for name in measures]
    assert page.table("after", "task 3")[1] == ["task 2", *map(percent, results["head"]["matrix"][1]), ""]
    share, _, counts = shown(round(60 * results["head"]["last_accuracy"]), 60).partition(" % ")
    counts = counts.replace(";", "; 95 % interval")
    assert f"{share} % of 60 test images classified correctly ({counts})" in page.words
    assert (
        f"{percent(results['zero_shot']['last_accuracy'], 1)} % with the class names alone, before learning"
        in page.words
    )
    assert "16.7 % by guessing" in page.words
    assert "demo_clip learned 6 classes in 3 tasks" in page.words and "Next step" in page.words
    record = results["tasks"][1]
    assert page.table("loss in the first epoch", "shared capture")[1][:5] == [
        "2", f"{record['loss'][0]:.3f}", f"{record['loss'][-1]:.3f}",
        percent(record["shared_capture"]), percent(record["residual_capture"]),
    ]  # fmt: skip
    assert "Task 2, 20" in page.words and "2 classes from 12 training images, 6 per class" in page.words
    assert "2 files are no <images>" in page.words


def test_class_table_and_confusion_matrix_equal_a_loop_over_the_predictions(page, runs):
    results = json_of(runs["one"] / "results.json")
    rows = rows_of(runs["one"] / "predictions.csv")
    pairs = Counter((row["class"], row["predicted"]) for row in rows)
    table = page.table("class", "of its images, classified correctly", "forgotten (points)")
    assert {row[0] for row in table} == set(NAMES)
    predicted = Counter(row["predicted"] for row in rows)
    for name, recall, precision, pictures, mistaken, learned, forgotten in table:
        assert precision == (shown(pairs[name, name], predicted[name]) if predicted[name] else "never predicted")
        assert (recall, pictures, learned) == (shown(pairs[name, name], 10), "", "6")
        assert forgotten == percent(results["classes"]["bridge"]["forgetting"].get(name), 1)
        wrong = Counter({other: n for (true, other), n in pairs.items() if true == name != other})
        assert all(f"{other} ({count})" in mistaken for other, count in wrong.most_common(1))
        assert bool(mistaken) == bool(wrong)
    assert [float(row[1].split()[0]) for row in table] == sorted(float(row[1].split()[0]) for row in table)
    mistakes = {(true, other): (int(n), int(of)) for true, other, n, of in page.table("class", "mistakes")}
    assert mistakes == {pair: (count, 10) for pair, count in pairs.items() if pair[0] != pair[1]}
    fields = re.findall(r"<title>([^<]*), predicted as ([^<]*): (\d+) ", page.source)
    assert {(unescape(a), unescape(b)): int(n) for a, b, n in fields} == pairs


def test_pictures_are_described_contents_are_complete_and_no_code_names_are_shown(page, runs):
    check_escaped(page)
    for word in ("zero_shot", "class_means", "close (s)", "teach (s)"):
        assert word not in page.words, word
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    parts = [attributes["id"] for tag, attributes in page.tags if tag == "h2"]
    assert links == [f"#{part}" for part in parts] and len(parts) > 5
    index = json_of(runs["one"] / "pictures" / "index.json")
    alternatives = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert Counter(e["class"] for e in index["classes"]) == dict.fromkeys(NAMES, 3)
    classes, examples = alternatives[:18], alternatives[18:]
    assert Counter(classes) == {f"Test image of the class {name}": 3 for name in NAMES}
    beside = [
        words for e in index["mistakes"] for words in (f"{e['class']}, mistaken for {e['predicted']}", e["predicted"])
    ]
    assert index["mistakes"] and examples == [f"Test image of the class {words}" for words in beside]
    sure = [entry["probability"] for entry in index["mistakes"]]
    assert sure == sorted(sure, reverse=True)


def page_of(*given):
    """Write a report, check that it is self-contained, and return the page."""
    page = Page(write_report(*given))
    check_self_contained(page)
    return page


def steps_of(page):
    """Return the accuracies after each task, by the names of the methods."""
    return {name: row[1:] for row in page.table("accuracy (%) after") for name in row[0].split(", ")}


def check_escaped(page):
    """Check that a class name with HTML is escaped."""
    assert "<script>alert" not in page.source and "&lt;script&gt;alert(1)&lt;/script&gt;" in page.source


def test_headline_excludes_test_images_that_were_also_learned(digit_folders, tmp_path):
    """Two test images of zero are copies of training images, and one is a near copy."""
    photos = shutil.copytree(digit_folders(6, 3, 12), tmp_path / "photos")
    first, second, third = sorted((photos / "train" / "zero").iterdir())
    for number, file in enumerate((first, second)):
        shutil.copy(file, photos / "test" / "zero" / f"copy-{number}.png")
    Image.open(third).save(photos / "test" / "zero" / "near.jpg", quality=95)
    flags = ["--data", str(photos), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["run", "--model", "demo", "--classifiers", "text", *flags]) == 0
    index = json_of(tmp_path / "out" / "pictures" / "index.json")
    assert Counter(copy["how"] for copy in index["copies"]) == {"the same file": 2, "nearly the same picture": 1}
    rows = rows_of(tmp_path / "out" / "predictions.csv")
    copies = {copy["position"] for copy in index["copies"]}
    assert {Path(rows[place]["image"]).name for place in copies} == {"copy-0.png", "copy-1.png", "near.jpg"}
    left = [row for place, row in enumerate(rows) if place not in copies]
    right = sum(row["class"] == row["predicted"] for row in left)
    page = page_of(tmp_path / "out", tmp_path / "page.html")
    assert (
        f"{100 * right / 72:.1f} % of 72 test images classified correctly ({right} of 72; 95 % interval" in page.words
    )
    every = sum(row["class"] == row["predicted"] for row in rows)
    learned = every - right
    verb = "is" if learned == 1 else "are"
    expected = f"of which {learned} {verb} classified correctly. With them, the accuracy is {100 * every / 75:.1f} %"
    assert f"This accuracy does not count 3 test images that were also learned, {expected}" in page.words
    assert "Matches with training images: the same file (2), nearly the same picture (1). Remove them" in page.words
    shutil.copytree(tmp_path / "out" / "task-001", tmp_path / "alone" / "task-001")
    shutil.copy(tmp_path / "out" / "results.json", tmp_path / "alone")
    alone = Page(write_report(tmp_path / "alone", tmp_path / "alone.html"))  # pictures/ lists the copies
    assert "2 test images were also learned, so this accuracy is too optimistic" in alone.words
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "out")
    for example in index["mistakes"]:
        near = example["nearest"]
        train = sorted((photos / "train").rglob("*.png"))
        cosines = learner.image_embeds([example["image"]]) @ learner.image_embeds(train).T
        assert str(train[int(cosines.argmax())]) == near["image"] and Path(near["image"]).parent.name == near["class"]
    assert page.words.count("nearest:") == len(index["mistakes"]) > 0


def test_run_that_learned_all_of_its_test_images_has_no_headline(digit_folders, tmp_path):
    photos = shutil.copytree(digit_folders(3, 6, 0), tmp_path / "photos")
    shutil.copytree(photos / "train", photos / "test")
    flags = ["--data", str(photos), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["run", "--model", "demo", "--classifiers", "lda", *flags]) == 0
    page = page_of(tmp_path / "out", tmp_path / "page.html")
    assert "All test images were also learned, so the learner's accuracy on other images is not known" in page.words
    assert 'class="headline"' not in page.source


def test_model_without_text_encoder_has_no_text_rows(digit_folders, tmp_path, capsys):
    model = save_encoder("vit", tmp_path / "vit")
    flags = ["--data", str(digit_folders(3, 6, 2)), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["run", "--model", str(model), *flags]) == 0
    assert " text " not in capsys.readouterr().out
    assert json_of(tmp_path / "out" / "results.json").keys().isdisjoint({"text", "zero_shot"})
    assert main(["evaluate", str(tmp_path / "out"), "--data", flags[1], "--device", "cpu"]) == 0
    assert "text_accuracy" not in json.loads(capsys.readouterr().out)


def test_sentence_about_several_best_classifiers_is_in_the_plural(runs, tmp_path, monkeypatch):
    best = replace(leaderboard(read_run(runs["frozen"]))[0], names=["class_means", "text"], overall=(1.0,))
    board = advice.leaderboard
    monkeypatch.setattr(advice, "leaderboard", lambda run: [best, *board(run)])
    assert (
        "“class means” and “names after learning” classify 100.0 % correctly"
        in page_of(runs["frozen"], tmp_path / "page.html").words
    )


def test_run_without_training_shows_no_measures_of_forgetting(runs, tmp_path):
    assert read_effects(read_run(runs["frozen"])).drift[0].old == pytest.approx(1)
    page = page_of(runs["frozen"], tmp_path / "page.html")
    for word in ("A_bar", "orgetting", "loss", "apture"):
        assert word not in page.text, word
    rows = [row[0] for row in page.table("classifier", "description")]
    assert "names alone" in rows and not [row for row in rows if "text" in row], "equal rows appear once"
    lda = next(row for row in leaderboard(read_run(runs["frozen"])) if "lda" in row.names)
    assert lda.size == (runs["frozen"] / "task-003" / "lda.safetensors").stat().st_size
    timings = json_of(runs["frozen"] / "timings.json")["tasks"]
    assert lda.seconds == pytest.approx(sum(task["phases"]["teach lda"] for task in timings))


def test_report_on_one_task_and_on_a_saved_learner(runs, tmp_path):
    learner = ClassIncrementalLearner.from_pretrained(runs["frozen"] / "task-002")
    task = page_of(runs["frozen"] / "task-002", tmp_path / "task.html")
    whole = json_of(runs["frozen"] / "results.json")
    assert steps_of(task)["lda"] == [percent(value, 1) for value in whole["classifiers"]["lda"]["overall"][:2]]
    learner.forget_class("four" if "four" in learner.class_names else learner.class_names[0])
    learner.save_pretrained(tmp_path / "saved")
    saved = page_of(tmp_path / "saved", tmp_path / "saved.html")
    assert "The learner's accuracy is therefore not known" in saved.words and "not finished" not in saved.words
    assert f"evaluate {tmp_path / 'saved'} --data" in saved.words and "learned 3 classes in 2 tasks" in saved.words
    assert "a class of task 1 was forgotten" in saved.words


def test_report_on_an_unfinished_run(runs, tmp_path):
    run = shutil.copytree(runs["one"], tmp_path / "run")
    for name in ("results.json", "predictions.csv", "task-003/manifest.json"):
        (run / name).unlink()
    shutil.rmtree(run / "pictures")
    page = page_of(run, tmp_path / "page.html")
    assert "not finished" in page.words and "the 2 tasks that it has" in page.words
    assert "learned 4 classes in 2 tasks" in page.words
    whole = json_of(runs["one"] / "results.json")
    rows = steps_of(page)
    for name, block in (("bridge", whole["head"]), ("names alone", whole["zero_shot"])):
        assert rows[name] == [percent(value, 1) for value in block["overall"][:2]]
    assert len(rows_of(runs["one"] / "task-002" / "predictions.csv")) == len(read_run(run).predictions)


ESTIMATES = {
    "none": {},
    "few": {"images": 3, "shares": {"bridge": (0.5, 0.1, 0.9)}, "classes": ["a"], "alike": True},
    "alike": {"images": 40, "shares": {"bridge": (0.9, 0.8, 1.0), "lda": (0.5, 0.4, 0.6)}, "alike": True},
    "items": {"images": 40, "items": 9, "few_items": True, "shares": {"lda": (0.9, 0.8, 1.0)}},
    "wrong": {"images": 40, "items": 30, "wrong": (0.1, 0.05, 0.2), "misnamed": ["a", "b"]},
}


@pytest.mark.parametrize("tests", [True, False], ids=["tested", "untested"])
@pytest.mark.parametrize("kind", ESTIMATES)
def test_page_says_all_that_the_console_says_about_the_data_and_the_estimates(
    runs, untested, tmp_path, capsys, kind, tests
):
    """What stands on the console only is read once and then lost."""
    out = shutil.copytree(runs["frozen"] if tests else untested, tmp_path / "run")
    file = max(out.glob("task-*")) / LEARNER_FILE
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"estimates": {"classes": ["a", "b", "c"], **ESTIMATES[kind]}}))
    capsys.readouterr()
    print_results(str(out))
    said = capsys.readouterr().out.partition("written: ")[2].splitlines()[1:]
    said = [line for line in said if not line.startswith(("next: ", "to predict with it: "))]
    assert len(said) >= {"none": 0, "few": 3, "alike": 3, "items": 3, "wrong": 2}[kind]
    words = page_of(out, tmp_path / "page.html").words.lower().translate(str.maketrans("", "", "“”"))
    assert [line for line in said if line.lower() not in words] == []


def test_report_on_a_run_without_test_images(untested, tmp_path, monkeypatch):
    run = shutil.copytree(untested, tmp_path / "run")
    assert {"predictions.csv", "pictures", "accuracy.png"}.isdisjoint(path.name for path in run.iterdir())
    page = page_of(run, tmp_path / "page.html")
    assert (
        "no test images. Accuracy estimated from 12 training images of 2 of the 6 classes, each left out in turn"
        in page.words
    )
    assert page.words.count("from 12 training images") == 4
    both = Page(write_report([run, run], tmp_path / "page.html", csv=tmp_path / "t.csv"))
    assert "None of the runs has test images" in both.words and rows_of(tmp_path / "t.csv") == []
    monkeypatch.setattr(Estimates, "remarks", lambda *_: ("these names do not fit: 'Red Fox'",))
    assert "These names do not fit: 'Red Fox'." in page_of(run, tmp_path / "page.html").words


def test_report_needs_only_the_results_and_predictions(runs, tmp_path):
    """The folders of the tasks may have been deleted."""
    for name in ("results.json", "predictions.csv"):
        shutil.copy(runs["one"] / name, tmp_path / name)
    page = page_of(tmp_path)
    assert page.table("class", "mistaken for") and "from 12 training images" in page.words
    (tmp_path / "predictions.csv").unlink()
    page = Page(write_report(tmp_path))
    assert "of the test images classified correctly" in page.words and page.table("classifier", "accuracy")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (None, None, "is not a folder"),
        ("results.json", [], "results.json is damaged or foreign"),
        ("results.json", {"classifiers": {"lda": {}}}, "foreign: classifiers.lda.average_accuracy: Field required"),
        ("results.json", {"classes": {"lda": {"accuracy": {"a": 7}}}}, "foreign: classes.lda.accuracy.a"),
        ("timings.json", {"tasks": [{"phases": {"train": "x"}}]}, "foreign: tasks.0.seconds: Field required"),
        ("pictures/index.json", {"hits": [{"file": "../x.jpg"}]}, "index.json is damaged or foreign: hits"),
    ],
)
def test_missing_or_damaged_run_is_refused_with_its_path(runs, file, content, words, tmp_path):
    bad = tmp_path / "bad"
    if file:
        shutil.copytree(runs["one"], bad)
        (bad / file).write_text(json.dumps(json_of(bad / file) | content if content else []))
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(str(bad))) as caught:
        write_report([runs["two"], bad], tmp_path / "page.html", tmp_path / "a.csv", tmp_path / "a.tex")
    assert words in str(caught.value) and not list(tmp_path.glob("*.*"))
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "page.html")


def test_report_on_several_runs_lists_results_and_differing_settings(runs, tmp_path):
    page = page_of(list(runs.values()), tmp_path / "page.html")
    check_escaped(page)
    table = {(row[0], row[2]): row for row in page.table("run", "strategy", "method")}
    for name, folder in runs.items():
        results = json_of(folder / "results.json")
        last = results["classifiers"]["lda"]["last_accuracy"]
        assert table[name, "lda"][1] == results["strategy"]["name"] and table[name, "lda"][3] == f"{100 * last:.2f}"
    settings = {row[0]: row[1:] for row in page.table("setting", "one", "two")}
    assert settings["arguments.seed"] == ["0", "1", "0"]
    assert settings["strategy.name"] == ["dulbe", "frozen", "frozen"] and "arguments.epochs" not in settings
    assert settings["adapter"] == ["yes", "–", "–"], "a missing group of settings is one row"
    assert not [name for name in settings if name.startswith("adapter.")]


def test_command_writes_the_page_csv_and_latex(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(runs["frozen"], tmp_path / "=50%_of & {all}")
    once_more = runs["one"] / ".." / "one"
    Path("report.html").symlink_to("page.html")
    command = ["report", *map(str, (runs["one"], once_more, runs["two"], copy)), "--csv", "t.csv", "--latex", "t.tex"]
    assert main(command) == 0 and Path("report.html").is_symlink() and Path("page.html").stat().st_size
    assert capsys.readouterr().out.split()[:6] == ["written:", "report.html", "written:", "t.csv", "written:", "t.tex"]
    assert main(["report", "gone"]) == 2 and "gone is not a folder" in capsys.readouterr().err
    rows = rows_of(tmp_path / "t.csv")
    lda = json_of(runs["frozen"] / "results.json")["classifiers"]["lda"]
    row = next(row for row in rows if row["method"] == "lda" and row["run"] == "=50%_of & {all}")
    assert row["strategy"] == "frozen"
    assert float(row["last_accuracy"]) == lda["last_accuracy"], "with all digits"
    assert [row["run"] for row in rows if row["method"] == "lda"] == ["one", "two", "=50%_of & {all}"]
    latex = (tmp_path / "t.tex").read_text()
    assert r"=50\%\_of \& \{all\} & frozen & lda & " + percent(lda["last_accuracy"]) in latex
    assert all(line.count("&") - line.count(r"\&") == 6 for line in latex.splitlines() if line.endswith(r"\\"))


def test_page_lists_files_that_run_and_learn_left_out(digit_folders, tmp_path):
    photos = shutil.copytree(digit_folders(4, 4, 2), tmp_path / "photos")
    (photos / "train" / "zero" / "notes.txt").write_text("mine")
    flags = ["--data", str(photos), "--device", "cpu", "--output", str(tmp_path / "june")]
    assert main(["run", "--model", "demo", "--classifiers", "lda", "--increment=2", *flags]) == 0
    (photos / "train" / "two" / "broken.png").write_bytes(b"no image")
    flags[-1] = str(tmp_path / "july")
    assert main(["learn", str(tmp_path / "june" / "task-001"), *flags, "--no-update"]) == 0
    for folder, name in (("june", "notes.txt"), ("july", "broken.png")):
        page = Page(write_report(tmp_path / folder))
        assert "What was left out" in page.words and name in page.words
