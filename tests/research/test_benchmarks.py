"""Test that every benchmark runs, and that the sides that it compares give equal results."""

import argparse
import copy
import importlib
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from failing_files import edited
from PIL import Image
from reference import randn
from torch.nn import functional as F

from dulbe_peft.classifiers import text_prior
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_clip
from research.benchmarks import (
    cameras,
    common,
    edges,
    evidence,
    frozen,
    gap,
    literal,
    models,
    ours,
    real,
    rivals,
    sentences,
    stock,
    table,
    transplant,
    untidy,
)

ROOT = Path(__file__).parents[2]
TOOLS = {
    "cameras",
    "curves",
    "__init__",
    "common",
    "evidence",
    "literal",
    "models",
    "ours",
    "real",
    "rivals",
    "sentences",
    "stock",
}
TOOLS |= {"table", "untidy"}
BENCHMARKS = sorted({path.stem for path in (ROOT / "research" / "benchmarks").glob("*.py")} - TOOLS)
MODULES = {name: importlib.import_module(f"research.benchmarks.{name}") for name in BENCHMARKS}  # slow ones, too
SLOW = {"accuracy", "deployment", "edges", "encode", "family", "frozen", "loop", "memory", "rejection"}
SLOW |= {"store", "stream", "tasks", "estimates", "gap", "head", "order", "suggest", "layer", "task", "updating"}
SLOW |= {"camera", "gpu", "planning", "shares"}
# "memory" reads figures that only Linux provides.
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
MARKS = {name: [pytest.mark.slow] * (name in SLOW) + [LINUX] * (name == "memory") for name in BENCHMARKS}
DEPRECATED = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def up_projections(routed, twin):
    """Yield a name and the same parameter of both models."""
    simple = literal.layers(twin)
    for name, layer in routed.dual_mode_layers().items():
        yield f"{name} shared", layer.dulbe_shared_B["default"], simple[name].shared_up.weight
        yield f"{name} residual", layer.dulbe_residual_B["default"], simple[name].residual_up.weight


def test_parameters_after_ten_steps_of_adam_equal_the_literal_ones():
    """Both models start from the same small B, so that the gradients are those of a partly trained model."""
    tower = models.vision_tower("tiny", "eager")
    routed = ours.adapted(copy.deepcopy(tower), tasks=1)
    twin = ours.literal_twin(routed, tower)
    batch, text, old_text = (models.pixels(6, 16), torch.arange(6) % 3), models.unit(3, 16, 2), models.unit(5, 16, 3)
    teacher, reference = copy.deepcopy(twin), ours.teacher_embeds(routed, batch[0])
    with torch.no_grad():
        for _, fast, simple in up_projections(routed, twin):
            simple.copy_(fast.copy_(1e-2 * torch.randn(fast.shape)))
    before = [fast.detach().clone() for _, fast, _ in up_projections(routed, twin)]
    optimizers = [stock.adam(model) for model in (routed, twin)]
    for _ in range(10):
        ours.step(routed, optimizers[0], batch, text, old_text, reference)
        literal.step(twin, teacher, optimizers[1], models.encode, batch, text, old_text, 100.0)
    for (name, fast, slow), start in zip(up_projections(routed, twin), before, strict=True):
        assert (fast - start).abs().max() > 5e-3, name
        # The tolerance is a hundredth of one step of 1e-3.
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.plain("accuracy", "layer")
@pytest.mark.rare("deployment", "encode", "family", "memory", "store", "tasks")
@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS[n]) for n in BENCHMARKS])
def test_every_benchmark_runs_and_writes_its_figures(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / f"{name}.json"
    argv = ["--quick", "--out", str(out)]
    MODULES[name].main(argv)
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["benchmark"] == name and report["command"] == f"python -m research.benchmarks.{name} --quick"
    assert all(row["what"] in table.line(row) for row in report["rows"])
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


def test_sides_alternate_and_ratios_are_computed_round_by_round():
    calls = []
    times = common.compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert "".join(calls) in ("abbaab", "baabba")
    assert all(len(seconds) == 2 for side in times.values() for seconds in side.values())
    known = {"a": {"wall": [1.0, 6.0, 3.0], "cpu": [1.0] * 3}, "b": {"wall": [2.0, 3.0, 3.0], "cpu": [2.0] * 3}}
    ratios = common.ratio(known, "a", "b")
    assert ratios["wall"] | {"q1": 0, "q3": 0} == {
        "median": 1.0,
        "min": 0.5,
        "max": 2.0,
        "q1": 0,
        "q3": 0,
        "rounds": 3,
    }
    assert ratios["cpu"]["median"] == 0.5 and ratios["seconds"] == {"a": 3.0, "b": 3.0}


@pytest.mark.parametrize("path", table.PAGES, ids=lambda path: path.name)
def test_tables_in_the_docs_match_the_result_files(path):
    text = path.read_text(encoding="utf-8")
    assert table.page(text, common.RESULTS) == text, "run python docs/generate.py tables"


def test_tables_of_training_have_all_columns():
    """Default classifier, best other one and what is still known, in each; no table of training is made by hand."""
    found = 0
    for path in table.PAGES:
        for marker in re.findall(r"<!-- table: (.+?) -->", path.read_text(encoding="utf-8")):
            name, *arguments = shlex.split(marker)
            if evidence.TABLES.get(name) in evidence.COMPARISONS:
                settings = dict(argument.split("=", 1) for argument in arguments)
                columns = evidence.TABLES[name](common.RESULTS, **settings)[0][1:]
                places = [columns.index(column) for column in ("bayes", "the best other", "still known")]
                assert places == sorted(places) and places[0] == 0, marker
                found += 1
    text = table.MARKED.sub("", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    for heading in ("Does the method pay?", "All methods side by side"):
        assert "|---" not in text.partition(f"## {heading}")[2].partition("\n## ")[0], heading
    assert "|---" not in table.MARKED.sub("", table.EVERY_LINE.read_text(encoding="utf-8"))
    assert found > 3


def test_what_is_still_known_is_a_range_if_the_classifiers_have_other_runs(tmp_path):
    """A gain of one classifier must not stand beside what the run of another one still knows."""
    (tmp_path / "comparisons").mkdir()
    head = "stream,method,classifier,drift,chosen,seeds,last,gain,gain_low,gain_high,retention\n"
    same, other = (
        "s,A,bayes,auto,,3,0.8,0,0,0,0.7\ns,A,text,auto,,3,0.7,0,0,0,0.7\n",
        "s,A,lda,auto,r,3,0.9,0,0,0,0.4\n",
    )
    for rows, known in ((same, "70.0"), (same + other, "40.0 to 70.0")):
        (tmp_path / "comparisons/a.csv").write_text(head + rows)
        assert evidence.trained(tmp_path, "a", "text")[1][-1] == known


def test_extremes_and_errors_name_the_worst_lines(tmp_path):
    (tmp_path / "frozen").mkdir()
    figures = {"A_last": (70, 75, 60, 20), "ECE": (3, 9, 8, 4)}
    rows = [
        {"stream": stream, "counts": count, "figure": figure, "classifier": name, "value": value}
        for figure, values in figures.items()
        for (stream, count, name), value in zip(
            [("a", "1", "text"), ("a", "1", "lda"), ("b", "2", "text"), ("b", "2", "lda")], values, strict=True
        )
    ]
    rows.append(rows[0] | {"stream": "c"})  # without lda, so not a line
    (tmp_path / "frozen/x.json").write_text(json.dumps({"rows": rows}))
    _, *lines = evidence.extremes(tmp_path, "text,lda", "A_last;ECE")
    text, lda = (
        ["`text`", "65.0", "5.0 (a, 1)", "5.5", "8.0 (b, 2)"],
        ["`lda`", "47.5", "40.0 (b, 2)", "6.5", "9.0 (a, 1)"],
    )
    assert lines == [text, lda]
    (tmp_path / "estimates").mkdir()
    pairs = {"a": (50, 53), "b": (50, 49)}
    rows = [
        {"what": f"bayes, 2 images a class, {data}: {figure}", "value": value, "each": []}
        for data, pair in pairs.items()
        for figure, value in zip(("test", "estimate"), pair, strict=True)
    ]
    (tmp_path / "estimates/real-x.json").write_text(json.dumps({"rows": rows}))
    assert evidence.errors(tmp_path, "bayes", "real-*")[1:] == [["2", "2", "2.0", "−1.0 (b)", "+3.0 (a)"]]


def measured_file(path, rows):
    """Write a result file of `frozen`, with one line for each (stream, counts, figure, classifier, value)."""
    path.parent.mkdir(exist_ok=True)
    names = ("stream", "counts", "figure", "classifier", "value")
    path.write_text(json.dumps({"rows": [dict(zip(names, row, strict=True)) for row in rows]}))


def test_sentences_on_published_features_follow_from_the_result_files(tmp_path):
    ranpac = "ranpac:features=1000"
    values = {  # classifier -> accuracy on (a, own names, 1), (a, no names, 1), (b, no names, 1), (a, no names, 2)
        "bayes": (80, 40, 50, 60),
        "lda": (60, 40, 50, 61.5),
        ranpac: (70, 41, 48, 59),
        "ridge": (50, 45, 52, 50),
        "linear_probe": (50, 39, 53, 50),
    }
    keys = [("a, own names", "1"), ("a, no names", "1"), ("b, no names", "1"), ("a, no names", "2")]
    rows = [(*key, "A_last", name, v) for name, each in values.items() for key, v in zip(keys, each, strict=True)]
    rows += [("a, own names", "1", "A_last", name, value) for name, value in (("text", 82), ("mixed_prototypes", 79))]
    for name, error in (("bayes", 2), ("lda", 9), (ranpac, 4)):
        rows += [("a, no names", "2", "ECE", name, error), ("b, no names", "1", "ECE", name, 2 * error)]
        rows += [("a, no names", "2", "covered", name, 90 + error)]
    measured_file(tmp_path / "real/x.json", rows)
    said = sentences.published(tmp_path, "1,2")
    assert "best of all in 0 of 1 lines, and at most 1.5 points behind (`lda`; a, no names, 2 images)" in said
    assert "Of these lines, 0 are of streams on which its settings were chosen." in said
    assert "names alone by −2.0 (lines: −2.0 to −2.0), of `mixed_prototypes` by +1.0" in said
    assert "of `lda` by 0.0 (lines: 0.0 to 0.0), of `ridge` by −3.5 (lines: −5.0 to −2.0), of `ranpac` by +0.5" in said
    assert "of logistic regression by −1.0 (lines: −3.0 to +1.0)" in said
    assert "over all 4 lines is 52.9, 54.5 and 57.5 %" in said
    assert "error is 13.5, 6.0 and 3.0 points, at worst 18.0, 8.0 and 4.0" in said
    assert "for 99.0, 94.0 and 92.0 % of the images, at worst for 99.0, 94.0 and 92.0" in said
    rows = {line[0]: line[1:] for line in sentences.leads(tmp_path, "1,2")}
    assert rows["`ridge`"] == ["+30.0 (+30.0 to +30.0)", "", "", "−3.5 (−5.0 to −2.0)", "+10.0 (+10.0 to +10.0)"]


def test_sentences_on_training_name_only_clear_differences_with_their_intervals(tmp_path):
    (tmp_path / "comparisons").mkdir()
    head = "stream,method,classifier,drift,chosen,last,gain,gain_low,gain_high,retention_before,retention\n"
    rows = (
        "s,frozen,text,none,,0.5,,,,0.7,0.7\ns,frozen,lda,none,,0.5,,,,0.7,0.7\n"
        "s,A,text,auto,,0.55,0.05,0.01,0.09,0.7,0.65\ns,A,lda,auto,,0.5,-0.015,-0.054,0.023,0.7,0.6\n"
        "s,B,text,auto,,0.5,0.001,-0.01,0.012,0.7,0.7\n"
    )
    (tmp_path / "comparisons/a.csv").write_text(head + rows)
    first, second = sentences.changes(tmp_path, "a=data").splitlines()
    assert first == "- data, A: `text` +5.0 (+1.0 to +9.0); known 70.0 → 65.0."
    assert second == "- data, B: no clear difference; known 70.0 → 70.0."
    assert sentences.changes(tmp_path, "a", methods="B") == "- no clear difference; known 70.0 → 70.0."
    rows = (
        "s,DuLBE,text,auto,learning_rate=0.0001,0.6,,,,,\n"
        "s,less,text,auto,learning_rate=0.001,0.64,0.04,0.024,0.055,,\n"
    )
    (tmp_path / "comparisons/b.csv").write_text(head + rows)
    line = "- `text` +4.0 (+2.4 to +5.5) with the rate 0.001 instead of 0.0001."
    assert sentences.changes(tmp_path, "b") == line


def test_sentences_on_estimates_rejection_and_suggestions(tmp_path):
    def stored(path, figures):
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"what": what, "value": sum(each) / len(each), "each": each} for what, each in figures.items()]
        path.write_text(json.dumps({"rows": rows}))

    def of(stream, **figures):
        return {f"bayes, 4 images a class, {stream}: {name.replace('_', ' ')}": each for name, each in figures.items()}

    stored(
        tmp_path / "estimates/real-a.json",
        of("a", test=[50, 50], estimate=[52, 54], low=[40, 51], high=[60, 61])
        | of("b", test=[50, 50], estimate=[49, 49], low=[40, 40], high=[60, 60]),
    )
    stored(tmp_path / "estimates/small.json", of("c", test=[50], estimate=[51], low=[40], high=[60]))
    said = sentences.estimated(tmp_path, "bayes")
    assert "its error is 2.0 points on average over 2 lines (−1.0 on b, 4 images and +3.0 on a, 4 images" in said
    assert "in 3 of 4 draws, but it is 18 (draws: 10 to 20) points wide" in said
    known = {"covered": [95, 97], "known_refused": [1, 24], "near_found": [50, 60]}
    stored(tmp_path / "rejection/small.json", of("c", **known))
    areas = {"near, novelty": [80], "near, probability": [70], "near, energy": [81], "near, said": [84]}
    areas |= {"near, novelty": [80, 70, 90], "near, low": [75, 71, 70], "near, high": [90, 88, 95]}
    stored(tmp_path / "rejection/real/a.json", of("a", **areas, known_refused=[9]))
    said = sentences.refused(tmp_path)
    assert "in single draws 1.0 to 24.0 %" in said and "largest probability by +10.0" in said
    assert "than that of the energy by −1.0 (lines: −1.0 to −1.0); it is smaller in 0 and 1 of 1 lines" in said
    assert "too high by +4.0 (lines: +4.0 to +4.0) points. " in said and "contains the area in 2 of 3 draws" in said
    rows = [
        {"stream": stream, "labels": 2, "way": way, "value": value}
        for stream, pair in {"a, no names": (84, 70), "c": (50, 45)}.items()
        for way, value in zip(("suggest", "at random"), pair, strict=True)
    ]
    (tmp_path / "suggest").mkdir()
    (tmp_path / "suggest/x.json").write_text(json.dumps({"rows": rows}))
    measured_file(tmp_path / "real/x.json", [("a, no names", "2", "A_last", "bayes", 81.5)])
    said = sentences.suggested(tmp_path)
    assert "random photographs by +14.0 (streams: +14.0 to +14.0) points on 1 streams" in said
    assert "by +5.0 (streams: +5.0 to +5.0) on small models" in said and said.endswith(
        "the difference is a, no names +2.5."
    )


def test_table_of_parts_says_with_how_many_seeds_each_is_worse(tmp_path):
    figures = {"nothing trained": [30, 40], "DuLBE": [60, 70], "without routing": [59, 71]}
    groups = ("new", "old", "never learned", "all")
    accuracies = {
        name: {group: [float(value + place) for value in values] for place, group in enumerate(groups, -3)}
        for name, values in figures.items()
    }
    (tmp_path / "parts.json").write_text(json.dumps({"accuracies": accuracies}))
    head, *rows = sentences.parts(tmp_path)
    assert head[1:] == [*groups, "worse than DuLBE on all, of 2 seeds"]
    assert rows == [
        ["nothing trained", "32.0", "33.0", "34.0", "35.0", "2"],
        ["DuLBE", "62.0", "63.0", "64.0", "65.0", ""],
        ["without routing", "62.0", "63.0", "64.0", "65.0", "1"],
    ]


def test_examples_say_of_the_parts_what_the_stored_seeds_show():
    rows = {name: (float(accuracy), worse) for name, *_, accuracy, worse in sentences.parts(common.RESULTS)[1:]}
    best = max(rows, key=lambda name: rows[name][0])
    every = {name for name, (_, worse) in rows.items() if name.startswith("without") and worse == "5"}
    assert best == "LoRA, three times the rate"
    shared = "without the shared mode"
    assert every == {shared, f"{shared}, at equal rank", "without the residual modes"}


def blobs(classes, images, seed=0, spread=0.1):
    """Return a stream of features without texts, in which all classes have equally many images."""
    labels = torch.arange(classes * images) % classes
    noise = spread * randn(len(labels), classes, seed=seed)
    rows = F.normalize(torch.eye(classes)[labels] + noise, dim=1)
    names = [f"c{number}" for number in range(classes)]
    return {"train": rows, "y": labels, "test": rows, "truth": labels, "text": None, "names": names, "scale": 100.0}


def test_refused_prediction_sets_are_no_figure(tmp_path):
    """They are refused where three of twenty classes have several images, and a table says so."""
    features, rows = blobs(20, 8), []
    values = argparse.Namespace(repeats=2, classifiers=["lda"], quick=False, real=None, increment=10)
    values.untidy = ["few:3", "none"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen, "lines", lambda _: [("s", "8", lambda seed: features)])
        rows += frozen.measured(values, lambda *given: frozen.figures(*given, coverage=0.9), "{figure}")
    found = {(row["stream"], row["figure"]): (row["value"], row["each"]) for row in rows}
    assert found["s, few:3", "covered"] == (None, [None, None]) and found["s", "covered"][0] > 80
    (tmp_path / "untidy").mkdir()
    (tmp_path / "untidy/x.json").write_text(json.dumps({"rows": rows}))
    _, refused, held = evidence.untidy(tmp_path, "lda")
    assert refused[0] == "s, few:3, 8" and refused[3] == "refused" and held[0] == "s, 8" and float(held[3]) > 80
    assert evidence.measured_lines(tmp_path, "lda", "covered", "", "", "untidy").keys() == {("s", "8")}


@pytest.mark.parametrize("name", ["shares", "planning"])
def test_continued_file_is_of_one_model_and_the_same_images(tmp_path, monkeypatch, name):
    """Rows are kept by their stream and seed, which say nothing of the folders that --models and --data name."""
    module, key, runs = MODULES[name], {"shares": "share", "planning": "planning_images"}[name], []

    def measured(values, stream, setting, seed):
        runs.append(stream)
        return {"what": "w", "value": 1.0, "stream": stream, key: setting, "seed": seed}

    monkeypatch.setattr(module, "measured", measured)
    command = ["--data", str(tmp_path), "--out", str(tmp_path / "out.json"), "--repeats", "1", "--streams", "digits"]
    for _ in range(2):  # the second time, all rows are there
        module.main(command)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(runs) == len(rows) > 3 and {row["origin"] for row in rows} == {shares_origin("digits")}
    edited(tmp_path / "out.json", "rows", [{**row, "origin": "another"} for row in rows])
    with pytest.raises(ValueError, match="of another model or other images .origin 'another', now"):
        module.main(command)
    stored = json.loads((common.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    origins = {(row["stream"], row["origin"]) for row in stored}
    assert len(origins) == len({stream for stream, _ in origins}), "one for each stream"
    assert ("digits", shares_origin("digits")) in origins


def shares_origin(stream):
    return MODULES["shares"].origin(Path("data"), Path("models"), stream)


def test_finished_runs_of_the_loop_are_of_its_settings(tmp_path, monkeypatch):
    loop, learned = MODULES["loop"], []
    monkeypatch.setattr(loop, "learn", lambda *given: learned.append(given[1]) or ({}, {}, 1))
    monkeypatch.setattr(loop, "HEADS", ())
    monkeypatch.setattr(common, "write", lambda *given: None)
    command = ["--cells", str(tmp_path), "--repeats", "1", "--rates", "0.001"]
    for _ in range(2):
        loop.main(command)
    assert len(learned) == 3, "each side once"
    for more in (["--epochs", "2"], ["--images", "30"]):
        with pytest.raises(ValueError, match="is of another run, .* use other --cells"):
            loop.main([*command, *more])


def test_held_back_images_must_leave_enough_to_learn():
    """A class with 4 images would otherwise learn 3 of them with 5 held back, and none with 8."""
    features = blobs(6, 4)
    for held_back in (4, 5, 8):
        with pytest.raises(ValueError, match=f"--held-back is {held_back}, but the class 'c0' has 4 .* at most 3"):
            frozen.draw(features, "1", 2, seed=0, held_back=held_back)
    with pytest.raises(ValueError, match="leaves 1 of the 4 training images of the median class.*--counts 2"):
        frozen.draw(features, "2", 2, seed=0, held_back=3)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        frozen.draw(features, "1", 2, seed=0, held_back=-1)
    tasks = frozen.draw(features, "1", 2, seed=0, held_back=3)
    assert [(len(task.train), len(task.test)) for task in tasks] == [(2, 6)] * 3


def test_few_classes_keep_their_images_and_the_others_one():
    tasks = frozen.draw(blobs(10, 8), "5", 2, seed=0)
    _, reduced = untidy.untidy("few:3", {}, tasks, seed=0)
    assert reduced[-1].counts == [1, 5, 1, 1, 1, 5, 1, 1, 5, 1] and reduced[0].y == [0, 1, 1, 1, 1, 1]
    for before, after in zip(tasks, reduced, strict=True):
        for label in set(after.y):
            first = [task.train[task.y.index(label)] for task in (before, after)]
            assert torch.equal(*first)
    with pytest.raises(ValueError, match="few:N"):
        untidy.untidy("some:3", {}, tasks, seed=0)
    with pytest.raises(ValueError, match="changes no name of 7 classes"):
        untidy.untidy("names:0.2", {"text": torch.eye(7)}, tasks, seed=0)


def test_frames_are_made_from_images_that_are_not_learned():
    features = blobs(4, 6)
    tasks = frozen.draw(features, "4", 2, seed=0)
    _, framed = untidy.untidy("groups:2", features, tasks, seed=0)
    assert [len(task.train) for task in framed] == [24, 24] and framed[0].groups == 3 * list(range(8))
    used = torch.cat([task.train for task in tasks])
    spare = features["train"][torch.cdist(features["train"], used).amin(dim=1) > 1e-6]
    for before, after in zip(tasks, framed, strict=True):
        for number, frame in enumerate(after.train[8:]):
            image = before.train[number % 8]
            made = [F.normalize(image + untidy.APART * (u - v), dim=0) for u in spare for v in spare]
            assert min(float((each - frame).norm()) for each in made) < 1e-5
    with pytest.raises(ValueError, match="no class has two images that are not learned"):
        untidy.untidy("groups:2", features, frozen.draw(features, "6", 2, seed=0), seed=0)


def test_labels_go_to_similar_classes_and_folders_are_exchanged():
    features = blobs(6, 20) | {"text": torch.eye(6)}
    features["train"] = F.normalize(
        features["train"] + 0.5 * torch.eye(6)[features["y"] ^ 1], dim=1
    )  # pairs look alike
    clean = frozen.draw(features, "12", 6, seed=0)
    partner = {place: clean[0].classes.index(label ^ 1) for place, label in enumerate(clean[0].classes)}
    (moved,) = untidy.untidy("similar:0.25", features, clean, seed=0)[1]
    wrong = [(right, given) for right, given in zip(clean[0].y, moved.y, strict=True) if right != given]
    assert 12 <= len(wrong) <= 24 and all(given == partner[right] for right, given in wrong)
    for kind, share in (("pair:0.4", 0.4), ("folders:1", 1.0)):
        (changed,) = untidy.untidy(kind, features, clean, seed=0)[1]
        wrong = [(right, given) for right, given in zip(clean[0].y, changed.y, strict=True) if right != given]
        assert len({frozenset(each) for each in wrong}) == 1 and abs(len(wrong) - 24 * share) <= 2
    (items,) = untidy.untidy("items:0.25", features, frozen.draw(features, "12", 6, seed=0), seed=0)[1]
    sizes = torch.tensor(items.groups).bincount()
    assert 6 <= int(sizes.min()) < int(sizes.max()) <= 24 and len(sizes) == 72
    assert all(len({y for y, of in zip(items.y, items.groups, strict=True) if of == item}) == 1 for item in range(72))
    (strange,) = untidy.untidy("strangers:0.5", features, clean, seed=0)[1]
    last = len(clean[0].classes) - 1
    own = [row.tobytes() for row, y in zip(clean[0].train.numpy(), clean[0].y, strict=True) if y == last]
    found = [y for row, y in zip(strange.train.numpy(), strange.y, strict=True) if row.tobytes() in own]
    assert found == 6 * [partner[last]] and last not in strange.y and last not in strange.truth
    two = frozen.draw(features, "12", 3, seed=0)
    first, second = untidy.untidy("strangers:0.5", features, two, seed=0)[1]
    assert first.truth == two[0].truth and {*two[1].truth} - {*second.truth} == {5}, "the last class of the stream"
    made = untidy.untidy("bare:0.3", features, clean, seed=0)[0]
    assert (~made["text"].any(dim=1)).nonzero()[:, 0].tolist() == sorted(made["bare"]) and len(made["bare"]) == 2
    nameless = untidy.untidy("bare:0.3", features | {"text": None}, clean, seed=0)[0]
    assert nameless["text"] is None and nameless["bare"] == made["bare"], "the same classes are compared"


def test_estimates_of_untidy_folders_speak_for_their_classes_and_leave_out_groups():
    others = blobs(6, 30, seed=1, spread=0.6)
    features = blobs(6, 8, spread=0.6) | {"test": others["test"], "truth": others["truth"]}
    tasks = frozen.draw(features, "6", 3, seed=0)
    found = {}
    for kind in ("none", "few:2", "bursts:4", "groups:4"):
        found[kind] = MODULES["estimates"].figures("lda", *untidy.untidy(kind, features, tasks, seed=0))
    assert found["none"]["test, classes of the estimate"] == found["none"]["test"]
    assert found["few:2"]["test, classes of the estimate"] > found["few:2"]["test"]
    too_high = {kind: each["estimate"] - each["test"] for kind, each in found.items()}
    assert too_high["bursts:4"] > too_high["groups:4"] + 0.05
    alone = MODULES["estimates"].figures("lda", *untidy.untidy("none", features, frozen.draw(features, "1", 3, 0), 0))
    assert alone.keys() == {"test"}


def test_wrong_labels_are_counted_beside_those_that_check_expects():
    features = blobs(4, 20)
    clean, exchanged = (MODULES["doubts"].figures(features, "20", kind, 0) for kind in ("none", "labels:0.15"))
    assert clean["wrong"] == clean["wrong of the first"] == clean["said of the first"] == 0
    assert exchanged["wrong"] == 15 and exchanged["low"] < exchanged["said"] < exchanged["high"]
    assert exchanged["wrong of the first"] == 10 and 8 < exchanged["said of the first"] <= 10


@pytest.mark.slow
def test_rejection_is_measured_on_untidy_folders():
    rejection, values = MODULES["rejection"], argparse.Namespace(known=0.5, classifier="bayes", increment=3, real=None)
    features, few = blobs(12, 30, spread=0.3) | {"far": None}, "few:1"
    kinds = ("none", "labels:0.1", few)
    found = {kind: rejection.measured(features, "25", kind, values, seed=0) for kind in kinds}
    for kind in kinds:
        assert 50 < found[kind]["near, novelty"] <= 100
    assert 0 < found["none"]["known refused"] < 30 and found["none"]["covered"] > 80
    assert not {"covered", "known refused", "near, said"} & found[few].keys()


@pytest.mark.slow
def test_poor_cameras_take_every_digit_and_two_have_the_same_one(tmp_path, monkeypatch):
    digits = cameras.load_digit_images  # every eighth image is enough of each digit
    monkeypatch.setattr(cameras, "load_digit_images", lambda split: digits(split).at(slice(None, None, 8)))
    cameras.main(["--save", str(tmp_path / "digits")])
    found = {}
    for kind in ("one", "each"):
        for path in sorted((tmp_path / "digits" / kind).glob("*/*/*.png")):
            ends = found.setdefault((kind, path.parent.name), set())
            ends.update(Image.open(path).getextrema())
    shades = {key: (min(ends), max(ends)) for key, ends in found.items()}
    assert len(shades) == 20 and {shades["one", name] for _, name in shades} == {cameras.ONE}
    names = sorted(name for kind, name in shades if kind == "each")
    assert [shades["each", name] for name in names[::2]] == [shades["each", name] for name in names[1::2]]
    assert {shades["each", name] for name in names} == {tuple(sorted(camera)) for camera in cameras.EACH}
    with pytest.raises(SystemExit):
        cameras.main(["--save", str(tmp_path / "digits")])


def test_every_benchmark_is_mentioned_in_the_docs():
    text = "".join(path.read_text(encoding="utf-8") for path in table.PAGES)
    assert not [name for name in BENCHMARKS if f"research.benchmarks.{name}" not in text]


def test_names_near_the_means_use_images_that_are_not_learned():
    rows, labels = F.normalize(randn(60, 8, seed=0), dim=1), torch.arange(60) % 3
    stream = {"train": rows, "y": labels, "test": rows, "truth": labels, "names": ["a", "b", "c"]}
    stream["text"] = F.normalize(randn(3, 8, seed=1), dim=1)
    made = edges.changed(stream, seed=0, names="means")
    spare = torch.cdist(rows, made["train"]).amin(dim=1) > 1e-3
    assert spare.sum() == 3 * edges.SPARE and len(made["train"]) == 30
    means = torch.stack([rows[spare & (labels == label)].mean(dim=0) for label in range(3)])
    torch.testing.assert_close(made["text"], F.normalize(means, dim=1))
    assert edges.changed(stream, seed=0, names="none")["text"] is None
    few = edges.changed(stream, seed=0, classes=2)
    places = [["a", "b", "c"].index(name) for name in few["names"]]
    for place, label in enumerate(places):
        torch.testing.assert_close(few["train"][few["y"] == place], rows[labels == label])


def test_real_stream_is_read_from_its_file(tmp_path):
    images, labels, texts = randn(40, 6, seed=0), torch.arange(40) % 4, F.normalize(randn(4, 6, seed=1), dim=1)
    split = torch.arange(40) >= 20
    kept = {"x": images.half().numpy(), "y": labels.short().numpy(), "t": texts.numpy()}
    np.savez(tmp_path / "a.npz", **kept, split=split.short().numpy(), names=np.array(list("abcd")))
    np.savez(tmp_path / "b.npz", x=kept["x"], y=kept["y"])
    whole, part = real.stream(tmp_path, "a"), real.stream(tmp_path, "a:2", seed=1)
    torch.testing.assert_close(whole["test"], F.normalize(images.half().float()[split], dim=1))
    assert torch.equal(whole["y"], labels[~split]) and whole["names"] == list("abcd")
    for place, name in enumerate(part["names"]):
        label = "abcd".index(name)
        torch.testing.assert_close(part["text"][place], texts[label])
        torch.testing.assert_close(part["train"][part["y"] == place], whole["train"][whole["y"] == label])
    spread = (texts - texts.mean(dim=0)).norm(dim=1).mean()
    assert 0.1 * spread < (real.stream(tmp_path, "a", "noise 1")["text"] - texts).norm(dim=1).mean() < 2 * spread
    shuffled = real.stream(tmp_path, "a", "shuffled")["text"]
    assert (shuffled @ texts.T).argmax(dim=1).sort().values.tolist() == [0, 1, 2, 3]
    assert real.stream(tmp_path, "a", "none")["text"] is None and real.stream(tmp_path, "c") is None
    # Without a split, 4 of 10 images per class are test images, the same for every seed.
    without_split, other_seed = real.stream(tmp_path, "b"), real.stream(tmp_path, "b", seed=1)
    assert torch.equal(without_split["test"], other_seed["test"])
    assert without_split["truth"].bincount().tolist() == [4] * 4
    assert real.kinds(without_split) == ("none",) and real.kinds(whole) == real.NAMES and real.increment(whole) == 2


def test_constants_of_bayes_are_measured_with_the_classes_without_a_name(tmp_path):
    """A class without a name is recognised more often, the more of its images' score takes the place of the text's."""
    labels, texts = torch.arange(240) % 8, F.normalize(randn(8, 12, seed=1), dim=1)
    rows = F.normalize(texts[labels] + 0.45 * randn(240, 12, seed=0), dim=1)
    np.savez(tmp_path / "a.npz", x=rows.numpy(), y=labels.short().numpy(), t=texts.numpy())
    options = ["--real", str(tmp_path), "--streams", "a", "--names", "own", "none", "--counts", "2", "--repeats", "2"]
    options += ["--classifiers", "bayes:features=0", "--untidy", "bare:0.3", "--held-back", "6"]
    before = text_prior.ADDED
    frozen.main([*options, "--constants", "ADDED=0", "ADDED=0.5", "--out", str(tmp_path / "out.json")])
    assert before == text_prior.ADDED
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    bare = {(row["constant"], row["stream"]): row["value"] for row in results if row["figure"] == "bare"}
    assert bare["ADDED=0.5", "a, own names, bare:0.3"] > bare["ADDED=0", "a, own names, bare:0.3"] + 5
    assert bare["ADDED=0.5", "a, no names, bare:0.3"] == bare["ADDED=0", "a, no names, bare:0.3"] > 0
    assert len({row["what"] for row in results}) == len(results)
    (tmp_path / "constants").mkdir()
    (tmp_path / "out.json").rename(tmp_path / "constants" / "a.json")
    head, *shown = evidence.constants(tmp_path, "bare;none")
    assert head == ["data", "images a class", "constant", "bare", "none"] and len(shown) == len(bare) == 4
    assert shown[0] == [*("a, own names, bare:0.3", "2", "ADDED=0"), f"{bare['ADDED=0', shown[0][0]]:.1f}", ""]
    for wrong in ("NONE=1", "added=1", "TEMPERATURES=1"):
        with pytest.raises(ValueError, match="must name a number of bayes or text_prior"):
            frozen.main([*options, "--constants", wrong, "--out", str(tmp_path / "out.json")])


def test_streams_of_a_folder_are_measured_with_and_without_names(tmp_path):
    labels, texts = torch.arange(120) % 4, F.normalize(randn(4, 6, seed=1), dim=1)
    rows = texts[labels] + 0.1 * randn(120, 6, seed=0)
    np.savez(tmp_path / "a.npz", x=rows.half().numpy(), y=labels.short().numpy(), t=texts.numpy())
    options = ["--real", str(tmp_path), "--streams", "a", "missing", "--names", "own", "none", "--repeats", "1"]
    options += ["--counts", "2", "2/16", "500", "--classifiers", "text", "bayes:features=0", "linear_probe"]
    frozen.main([*options, "--out", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    lines = {
        (row["stream"], row["counts"], row["classifier"]): row["value"] for row in results if row["figure"] == "A_last"
    }
    named = {
        ("a, own names", count, name)
        for count in ("2", "2/16")
        for name in ("text", "bayes:features=0", "linear_probe")
    }
    assert lines.keys() == named | {("a, no names", *key[1:]) for key in named if key[2] != "text"}
    assert min(lines.values()) > 90


@pytest.mark.rare
def test_edge_cases_are_skipped_if_a_stream_lacks_names_classes_or_images(tmp_path):
    labels, texts = torch.arange(120) % 4, F.normalize(randn(4, 6, seed=1), dim=1)
    rows = {"x": (texts[labels] + 0.1 * randn(120, 6, seed=0)).half().numpy(), "y": labels.short().numpy()}
    np.savez(tmp_path / "a.npz", **rows, t=texts.numpy())
    np.savez(tmp_path / "b.npz", **rows)
    wanted = ("no names", "3 classes", "12 classes", "mixed with own names", "near the means, noise 1")
    options = ["--real", str(tmp_path), "--streams", "a", "b", "missing", "--repeats", "1", "--edges", *wanted]
    edges.main([*options, "--out", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    lines = {stream: {row["edge"] for row in results if row["stream"] == stream} for stream in ("a", "b")}
    assert lines == {"a": set(wanted) - {"12 classes"}, "b": {"no names", "near the means, noise 1"}}
    # 18 of 30 images per class are for training, so 16 can be learned, but not 32.
    assert {row["counts"] for row in results if row["edge"] == "no names"} == {
        "1",
        "2",
        "4",
        "16",
        "lone4",
        "30/rank",
    }
    assert {row["classifier"] for row in results if row["edge"] == "near the means, noise 1"} == set(edges.SPECS)


def test_no_result_contains_a_path_of_the_machine():
    files = [path for path in common.RESULTS.rglob("*") if path.suffix in (".json", ".csv", ".txt")]
    assert len(files) > 30
    named = {path.name: paths for path in files if (paths := re.findall(r'["\s,](/\w+/\S+)', path.read_text()))}
    assert not named


LABELS = torch.arange(30) % 3
Z = F.normalize(randn(3, 8, seed=1)[LABELS] + randn(30, 8, seed=2), dim=1)
TEXTS, QUERIES = F.normalize(randn(3, 8, seed=3), dim=1), F.normalize(randn(5, 8, seed=4), dim=1)


def test_tip_adapter_and_proker_equal_literal_formulas():
    tip = rivals.tip_adapter(Z, LABELS, TEXTS, 20.0, QUERIES, 2.0, 5.0)
    proker = rivals.proker(Z, LABELS, TEXTS, 20.0, QUERIES, 3.0, 0.5)
    z, e, tests = Z.double(), TEXTS.double(), QUERIES.double()
    kernel = torch.tensor([[math.exp(-3 * float((a - b).square().sum()) / 2) for b in z] for a in z]).double()
    weights = torch.linalg.inv(kernel + 0.5 * torch.eye(30).double()) @ (F.one_hot(LABELS, 3).double() - z @ e.T)
    for row, test in enumerate(tests):
        for c in range(3):
            cache = sum(math.exp(-5 * (1 - float(test @ s))) for s, label in zip(z, LABELS, strict=True) if label == c)
            assert float(tip[row, c]) == pytest.approx(20 * float(test @ e[c]) + 2 * cache, abs=1e-3)
            near = sum(math.exp(-3 * float((test - z[i]).square().sum()) / 2) * weights[i, c] for i in range(30))
            assert float(proker[row, c]) == pytest.approx(float(test @ e[c] + near), abs=1e-5)


def test_mixed_prototypes_equal_a_literal_formula():
    scores = rivals.mixed_prototypes(Z, LABELS, TEXTS, 20.0, QUERIES, kept=0.5, share=0.3, alpha=0.1)
    values, vectors = torch.linalg.eigh(TEXTS.double().T @ TEXTS.double())
    shares = values.flip(0).cumsum(0) / values.sum()
    basis = vectors.flip(1)[:, : next(place for place, share in enumerate(shares.tolist(), 1) if share >= 0.5)]
    lda = reference.lda_logits(Z, LABELS.tolist(), QUERIES, None, 1.0)
    for c in range(3):
        mean = basis @ basis.T @ Z[c == LABELS].double().mean(dim=0)
        prototype = F.normalize(0.7 * TEXTS[c].double() + 0.3 * mean / mean.norm(), dim=0)
        expected = 20 * QUERIES.double() @ prototype + 0.1 * lda[:, c]
        torch.testing.assert_close(scores[:, c].double(), expected, rtol=1e-4, atol=1e-4)


def test_whitened_bridge_equals_a_literal_formula():
    z, e, tests, tau = Z.double(), TEXTS.double(), QUERIES.double(), 20.0
    means = torch.stack([z[c == LABELS].mean(dim=0) for c in range(3)])
    pooled = sum(torch.outer(x - means[c], x - means[c]) for x, c in zip(z, LABELS.tolist(), strict=True)) / 27
    share = reference.oas(pooled, 27)
    sigma = (1 - share) * pooled + share * pooled.trace() / 8 * torch.eye(8, dtype=torch.float64)
    variances, directions = torch.linalg.eigh(sigma)
    matrix = directions @ torch.diag(variances**-0.5) @ directions.T
    z, tests, visual = (reference.unit((rows - means.mean(dim=0)) @ matrix) for rows in (z, tests, means))
    depths = [k / 9 for k in range(10)]
    head = reference.Head(depths, logit_scale=tau)
    head.visual, head.text = visual, reference.unit((e - e.mean(dim=0)) @ matrix)
    scores = rivals.whitened_bridge(Z, LABELS, TEXTS, tau, QUERIES, beta=0.05)
    for c in range(3):
        weights = reference.softmax([rho / 0.05 for rho in head.rho(z[c == LABELS], c)])
        bridge = [reference.slerp(head.visual[c], head.text[c], depth) for depth in depths]
        expected = tau * tests @ sum(w * b for w, b in zip(weights, bridge, strict=True))
        torch.testing.assert_close(scores[:, c].double(), expected, rtol=0, atol=2e-3)


def test_tower_of_a_vit_in_a_clip_gives_the_same_features():
    vit = transplant.untrained_vit().eval()
    with torch.no_grad():
        for weight in vit.parameters():  # so that biases and the scales of layer norms count
            weight += 0.1 * torch.randn(weight.shape)
    tower = transplant.carried(vit)
    assert tower.config.hidden_size == 48 and tower.config.num_attention_heads == 3
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    expected = vit.double().vit(images).last_hidden_state[:, 0]
    found = tower.double()(images).pooler_output
    torch.testing.assert_close(found[:, :32], expected, rtol=0, atol=1e-5)
    assert not found[:, 32:].any()


@pytest.mark.slow
def test_known_images_of_a_transplant_are_saved_and_have_their_names(tmp_path):
    texts, names = F.normalize(randn(10, 48, seed=0), dim=1), ["seven", "a", "b", "two", *"cdefgh"]
    np.savez(tmp_path / "imagenet-even.npz", t=texts.numpy(), names=np.array(names))
    made = tmp_path / "made"
    argv = ["--quick", "--known", "demo-digits", "--real", str(tmp_path), "--save", str(made)]
    transplant.main([*argv, "--out", str(tmp_path / "found.json")])
    tests = load_data("demo-digits", "test")
    assert {path.name for path in (made / "known").iterdir()} == {"two", "seven"}
    assert len(list((made / "known" / "two").iterdir())) == (tests.labels == tests.class_names.index("two")).sum()
    learner = gap.learner_of(*load_clip(str(made)), "frozen", 0, 0.0)
    torch.testing.assert_close(learner.text_embeds(["two", "seven"]), texts[[3, 0]], rtol=0, atol=1e-3)
