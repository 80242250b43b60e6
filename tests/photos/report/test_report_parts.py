"""Test the parts of a report: tables, accuracies with intervals, the next step, charts, and pictures of examples."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pages import drawn
from PIL import Image
from scipy.stats import binomtest
from small_runs import results_with

from dulbe_peft.data.decoding import to_rgb
from dulbe_peft.data.glance import PICTURE_SIDE, thumbnail
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.metrics.evaluation import ImageResult
from dulbe_peft.metrics.results import Estimates, Measures, Results
from dulbe_peft.photos.report import format_summary, plot_matrix, plot_results, read_run
from dulbe_peft.photos.report.advice import clearly_better, counted_share, leaderboard, next_steps
from dulbe_peft.photos.report.html import percent
from dulbe_peft.photos.report.pictures import EXAMPLES, choose_examples, write_examples
from dulbe_peft.photos.report.plots import SERIES, accuracy_figure, inline_svg, reliability_figure
from dulbe_peft.photos.report.run_folder import Copy, Pictures, _pictures
from dulbe_peft.photos.report.shares import (
    ClassRow,
    Share,
    above_thresholds,
    class_rows,
    confusion_matrix,
    lowest_threshold,
    more_images,
    reliability,
)
from dulbe_peft.photos.report.side_by_side import RunRow, best_rows
from dulbe_peft.photos.report.table import Column, format_markdown, format_text, write_table_latex
from dulbe_peft.utils.folders import read_manifest
from research.diagnostics.training_effects import write_figures


def answers(*rows, task=1):
    """Make the results of one task from rows (class, predicted class, probability)."""
    return [ImageResult(f"{i}.png", *row, task, i, {}) for i, row in enumerate(rows)]


@pytest.mark.parametrize("images", [1, 2, 3, 7, 20, 450, 12345])
def test_interval_of_a_share_is_that_of_scipy(images):
    """Both are a few roundings of float64 away from the formula."""
    for right in {0, 1, images // 3, images // 2, images - 1, images}:
        expected = binomtest(right, images).proportion_ci(method="wilson")
        assert Share(right, images).interval == pytest.approx((expected.low, expected.high), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16"])
@pytest.mark.parametrize("size", [(8, 8), (640, 100), (3, 96), (97, 97)])
def test_thumbnails_are_small_and_keep_their_proportions(mode, size):
    image = Image.fromarray(np.full(size[::-1], 9, np.uint8)).convert("L")
    image = Image.new("I;16", size) if mode == "I;16" else image.convert(mode)
    small = thumbnail(to_rgb(image))
    assert small.mode == "RGB" and max(small.size) <= PICTURE_SIDE and max(small.size) > PICTURE_SIDE / 2
    assert small.size[0] / small.size[1] == pytest.approx(size[0] / size[1], rel=0.1)
    assert image.size == size  # the caller's image is unchanged


def test_pictures_show_the_most_confident_mistakes_and_some_of_each_class(tmp_path):
    """Each image has its own grey, so that its picture can be recognised; one image is deleted after the test."""
    for i in range(60):
        Image.new("L", (96, 96), 4 * i).save(tmp_path / f"{i}.png")

    class Files(list):
        labels = np.zeros(60, dtype=np.int64)

        def __getitem__(self, i):
            return {"image": Image.open(tmp_path / f"{i}.png").convert("RGB"), "label": 0}

    chosen = choose_examples(answers(*[("cat", "dog" if i % 2 else "cat", i / 60) for i in range(60)], task=2))
    data = Files([{"image": Image.new("L", (96, 96)), "label": 0}] * 60)
    (tmp_path / "55.png").unlink()
    write_examples(tmp_path / "pictures", chosen, [None, data], ["1 file is no image"])
    index = json.loads((tmp_path / "pictures" / "index.json").read_text())
    assert [entry["image"] for entry in index["mistakes"]] == [f"{i}.png" for i in range(59, 35, -2) if i != 55]
    assert index["left_out"] == ["1 file is no image"]
    assert [entry["image"] for entry in index["classes"]] == ["0.png", "20.png", "40.png"]
    for entry in index["mistakes"] + index["classes"]:
        with Image.open(tmp_path / "pictures" / entry["file"]) as picture:
            assert abs(int(np.asarray(picture).mean()) - 4 * int(entry["image"][:-4])) <= 1
    assert read_manifest(tmp_path / "pictures")


def test_mistake_shows_other_photographs_of_its_item(tmp_path):
    rows = [(n, "a" if n < 6 else "b" if n < 8 else "") for n in range(9)]
    results = [
        ImageResult(f"{n}.png", "cat", "cat" if n == 2 else "dog", n / 10, 1, n, {}, group=item) for n, item in rows
    ]
    data = [{"image": Image.new("L", (96, 96), 20 * n), "label": 0} for n in range(9)]
    write_examples(tmp_path / "pictures", choose_examples(results), [data], predictions=results)
    found = _pictures(tmp_path / "pictures").mistakes
    facts = [(e.image, e.mistaken, e.photographs, [view.image for view in e.views]) for e in found]
    views = ["0.png", "1.png", "2.png"]
    assert facts == [("8.png", 1, 1, []), ("7.png", 2, 2, ["6.png"]), ("5.png", 5, 6, views)]
    for view in found[2].views:
        with Image.open(tmp_path / "pictures" / view.file) as picture:
            assert abs(int(np.asarray(picture).mean()) - 20 * int(view.image[:-4])) <= 1
    (tmp_path / "pictures" / found[1].views[0].file).unlink()
    assert _pictures(tmp_path / "pictures").mistakes[1].views == []


def test_data_without_images_has_no_pictures_and_files_of_the_user_stay(tmp_path, capsys):
    chosen, mine = choose_examples(answers(("cat", "dog", 0.5))), tmp_path / "pictures" / "mine.jpg"
    for tests in ([None], [[{"image": np.zeros(3), "label": 0}]]):
        write_examples(mine.parent, chosen, tests)
        assert not list(tmp_path.iterdir())
    mine.parent.mkdir()
    mine.write_bytes(b"x")
    write_examples(mine.parent, chosen, [[{"image": Image.new("L", (9, 9)), "label": 0}]])
    assert list(mine.parent.iterdir()) == [mine]
    assert "no pictures of examples" in capsys.readouterr().out


def test_shares_are_counts_of_the_test_images(finished_run):
    run = read_run(finished_run)
    for method in leaderboard(run):
        name = method.names[0]
        answers = [row.predicted if name == run.first else row.others.get(name) for row in run.predictions]
        right = sum(answer == row.true for answer, row in zip(answers, run.predictions, strict=True))
        expected = round(method.last * len(answers)) if name == "zero_shot" else right
        assert method.share == Share(expected, len(run.predictions)), name
    fewer = dataclasses.replace(run, predictions=run.predictions[:-1])
    assert counted_share(fewer, ["zero_shot"], 0.5) is None, "no count of 19 images is a half"
    assert counted_share(fewer, ["lda"], 0.5).images == len(fewer.predictions)


def test_rows_with_equal_rounded_accuracy_are_all_the_best():
    measures = (Measures(average_accuracy=n, last_accuracy=n, overall=[n]) for n in (0.91234, 0.91231, 0.9))
    rows = [RunRow(f"{row.last_accuracy}", "", "", row) for row in measures]
    assert best_rows(rows) == rows[:2] and best_rows(rows[1:]) == rows[1:2]


def test_same_columns_make_text_markdown_and_latex_tables(tmp_path):
    columns = [
        Column("name", lambda row: row[0], number=False),
        Column("share (%)", lambda row: "" if row[1] is None else f"{row[1]:.1f} ± 2 → -1", short="share"),
    ]
    good = replace(columns[1], bold=lambda row: row[1] is not None)
    rows = [("a_b", 0.123456), ("\\~^<>|#$&", None)]
    lines = format_text(columns, rows).splitlines()
    assert lines == ["name              share", "a_b        0.1 ± 2 → -1", r"\~^<>|#$&"]
    assert format_markdown(columns, rows).splitlines()[1:3] == ["| --- | ---: |", "| a_b | 0.1 ± 2 → -1 |"]
    assert format_markdown([good], rows).splitlines()[2:] == ["| **0.1 ± 2 → -1** |", "|  |"]
    write_table_latex(columns, rows, tmp_path / "t.tex")
    hard = r"\textbackslash{}\textasciitilde{}\textasciicircum{}{<}{>}{|}\#\$\& &  \\"
    assert (tmp_path / "t.tex").read_text().splitlines()[4:6] == [r"a\_b & 0.1 $\pm$ 2 $\to$ $-$1 \\", hard]


def test_reliability_and_accuracy_above_thresholds():
    rows = answers(("a", "a", 0.85), ("a", "b", 0.83), ("b", "b", 0.97), ("b", "a", 0.41), ("b", "b", 1.0))
    assert [(round(mean, 3), share) for mean, share in reliability(rows)] == [
        (0.41, Share(0, 1)),
        (0.84, Share(1, 2)),
        (0.985, Share(2, 2)),
    ]
    assert [(t, part, share) for t, part, share in above_thresholds(rows) if t in (0.8, 0.9)] == [
        (0.8, 0.8, Share(3, 4)),
        (0.9, 0.4, Share(2, 2)),
    ]
    line, marks = reliability_figure(reliability(rows)).axes[0].lines[:2]
    assert list(line.get_xdata()) == list(line.get_ydata()) and marks.get_ydata() == pytest.approx([0, 50, 100])


def test_lowest_threshold_equals_a_search_over_printed_numbers():
    rows = [ImageResult("", "a", "a" if i != 35 else "b", 1 - i / 100, 1, i, {}) for i in range(60)]
    rows += [ImageResult("", "a", "b", 0.2, 1, 60, {})] * 20
    for wanted in (0.9, 0.97, 1.0):
        expected = None
        for limit in (float(f"{n / 1000:.2f}") for n in range(0, 990, 10)):  # with the printed digits
            above = [row for row in rows if row.probability > limit]
            if len(above) >= 20 and sum(row.right for row in above) >= wanted * len(above) and expected is None:
                expected = (limit, Share.of(above))
        assert lowest_threshold(rows, wanted) == expected and expected is not None
    sure = [ImageResult("", "a", "a" if i < 60 else "b", p, 1, i, {}) for i, p in enumerate([0.9] * 60 + [0.784] * 5)]
    assert lowest_threshold(sure, 0.95) == (0.79, Share(60, 60)), "0.784 would be printed as 0.78"
    high = [replace(row, probability=0.9996 if row.right else 0.9985) for row in sure]
    assert lowest_threshold(high, 0.95) == (0.999, Share(60, 60))
    assert lowest_threshold(rows[60:], 0.5) is None
    assert lowest_threshold(rows[:60], 0.95) == (0.0, Share(59, 60))


def test_more_images_compares_classes_with_few_and_many():
    def table(*shares):
        return [ClassRow(str(i), Share(*share), None, None, [], count) for i, (share, count) in enumerate(shares)]

    few, many = [((i % 3, 10), 5) for i in range(8)], [((7 + i % 3, 10), 50) for i in range(8)]
    assert more_images(table(*few, *many)) == (True, Share(7, 80), Share(63, 80), 5)
    reversed_counts = [(share, 55 - count) for share, count in few + many]
    assert more_images(table(*reversed_counts))[0] is False
    assert more_images(table(((5, 10), 3), ((6, 10), 9)))[0] is None, "two classes are too few"
    assert more_images(table(*few)) is None, "equally many"
    assert more_images(table(((5, 10), 3), ((6, 10), 9), ((6, 10), 9)))[1:] == (Share(5, 10), Share(12, 20), 3)


def test_terminal_table_explains_its_columns(finished_run):
    results = json.loads((finished_run / "results.json").read_text())
    head, *rows = format_summary(results).splitlines()
    titles = ["names alone", "names after learning", "class means", "bridge", "lda"]
    assert all(row.startswith(title) for row, title in zip(rows, titles))
    bridge = results["classifiers"]["bridge"]
    assert rows[3].split()[1:3] == [percent(bridge["average_accuracy"]), percent(bridge["last_accuracy"])]
    assert max(map(len, [head, *rows])) <= 80
    for title in ("accuracy", "mean over tasks", "forgetting", "backward transfer"):
        assert title in head and any(row.startswith(f"{title}: ") for row in rows[5:])
    untrained = results | {"tasks": [record | {"loss": []} for record in results["tasks"]]}
    assert "forgetting" not in format_summary(untrained) and "mean over tasks" in format_summary(untrained)
    assert "mean over tasks" not in format_summary(untrained | {"class_names": [["all"]]})


def test_summary_without_training_has_one_row_for_the_names(finished_run):
    results = json.loads((finished_run / "results.json").read_text())
    frozen = format_summary(results | {"tasks": [record | {"loss": []} for record in results["tasks"]]})
    assert "names alone" in frozen and "names after learning" not in frozen


def test_next_steps_are_sorted_by_usefulness(finished_run):
    run = dataclasses.replace(read_run(finished_run), folder=Path("my run"))

    def steps(rows, learned=None):
        changed = dataclasses.replace(run, predictions=rows)
        return next_steps(changed, class_rows(rows, {}, learned or {}), confusion_matrix(rows) if rows else None)

    assert steps([])[0][1] == "dulbe-peft evaluate 'my run' --data PHOTOS"
    demo = dataclasses.replace(run, predictions=[], base_model=str(demo_model_folder()), source=None)
    assert next_steps(demo, [], None)[-1][1] == "dulbe-peft check YOUR-FOLDER", "the demo's learner knows only digits"
    learned = dataclasses.replace(demo, source={"data": "photos", "test_split": "test"})
    assert next_steps(learned, [], None)[-1][1] == "dulbe-peft predict 'my run' PHOTOS"
    good = [ImageResult(f"{i}", "a", "a", 0.9, 1, i, {"lda": "a"}) for i in range(400)]
    assert steps(good) == [("Classify new photographs.", "dulbe-peft predict 'my run' PHOTOS")]
    better = [ImageResult(f"{i}", "a", "b", 0.9, 1, i, {"lda": "a"}) for i in range(400)]
    use, *_, last = steps(better)
    assert use[0].startswith("Recommended classifier: lda, which classifies") and "significantly more" in use[0]
    assert use[1] == last[1] == "dulbe-peft predict 'my run' PHOTOS --classifier lda"
    copies = [Copy(task=1, position=i, how="identical", of="a") for i in range(400)]
    learned = dataclasses.replace(run, predictions=better, pictures=Pictures(copies=copies))
    assert next_steps(learned, [], None)[-1][1].endswith("PHOTOS"), "these test images were also learned"
    assert "more than 20 images" in steps(good[:19] + answers(("b", "a", 0.5)))[-2][0]
    crabs = good + answers(*[("crab", "lobster", 0.5)] * 8)
    add, look, *_ = steps(crabs, {"crab": 3, "a": 50})
    assert "accuracy is clearly below average: crab (0 of 8 correct, 3 training images)." in add[0]
    assert "Look at crab and lobster: 8 of 8" in look[0]


def test_classifiers_are_compared_as_by_scipy(finished_run):
    """A sign test with two sides. The level of 5 % is divided by the number of other classifiers."""
    run = dataclasses.replace(read_run(finished_run), pictures=Pictures())
    others = [name for name in run.results.classifiers if name != run.first]
    for gained, lost in itertools.product(range(16), range(4)):
        rows = []
        for i in range(gained + lost):
            answer, other = "ba" if i < gained else "ab"
            rows.append(ImageResult(f"{i}", "a", answer, 0.9, 1, i, dict.fromkeys(others, answer) | {"lda": other}))
        clear = gained > lost and binomtest(gained, gained + lost).pvalue < 0.05 / len(others)
        found = clearly_better(dataclasses.replace(run, predictions=rows))
        assert found == ("lda" if clear else ""), (gained, lost)


def test_next_steps_count_items(finished_run):
    """Three crabs with eight photographs each are three observations, of which one looks like a wrong label."""
    run = dataclasses.replace(read_run(finished_run), folder=Path("my run"))
    rows = [ImageResult(f"{i}", "a", "a", 0.9, 1, i, {"lda": "a"}, f"a{i // 8}") for i in range(80)]
    for item, wrong in enumerate((8, 7, 2)):
        for view in range(8):
            predicted = "lobster" if view < wrong else "crab"
            others = {"lda": "crab"} if item < 2 else {"lda": predicted}
            rows.append(ImageResult(f"c{item}/{view}", "crab", predicted, 0.8, 1, len(rows), others, f"c{item}"))
    changed = dataclasses.replace(run, predictions=rows, pictures=Pictures())
    steps = [words for words, _ in next_steps(changed, class_rows(rows, {}, {}), confusion_matrix(rows))]
    asked = "Is the item of c0/0 labelled correctly? 8 of 8 photographs look like lobster, and none like crab."
    assert asked in steps and any(words.startswith("Look at crab and lobster") for words in steps)
    assert any(words.startswith("Test on more than 13 items: four times as many items") for words in steps)
    assert not any("clearly below average" in words for words in steps), "three items say little"
    assert clearly_better(changed) == "", "lda gains 15 images, but of two items"
    alone = dataclasses.replace(changed, predictions=[dataclasses.replace(row, group="") for row in rows])
    assert clearly_better(alone) == "lda"
    two = [row for row in rows if row.group != "c2"]
    steps = next_steps(dataclasses.replace(changed, predictions=two), class_rows(two, {}, {}), confusion_matrix(two))
    assert not any(words.startswith("Look at") for words, _ in steps), "two items are not often"


@pytest.mark.parametrize(("zero_shot", "high", "proposed"), [(0.2, 0.5, True), (0.9, 0.5, False), (0.2, 0.9, False)])
def test_larger_model_is_proposed_where_names_and_estimates_are_poor(finished_run, zero_shot, high, proposed):
    run = read_run(finished_run)
    names = [name for task in run.results.class_names for name in task]
    beside = Measures(overall=[zero_shot], average_accuracy=zero_shot, last_accuracy=zero_shot)
    estimates = Estimates(images=40, classes=tuple(names), shares={"lda": (0.45, 0.4, high)})
    poor = run.results.model_copy(update={"zero_shot": beside, "estimates": estimates})
    assert len(names) > 2
    steps = next_steps(dataclasses.replace(run, results=poor, predictions=[]), [], None)
    assert any("try a larger model" in words for words, _ in steps) == proposed


def test_names_that_are_left_out_are_in_the_report_once(finished_run):
    run = read_run(finished_run)
    shares = {"lda": (0.45, 0.4, 0.5)}
    names = tuple(name for task in run.results.class_names for name in task)
    for given, tested, said in (({}, True, True), (shares, True, True), ({}, False, True), (shares, False, False)):
        estimates = Estimates(images=40, classes=names, shares=given, misnamed=names[:1])
        untested = {} if tested else {"classifiers": {}}
        results = run.results.model_copy(update={"estimates": estimates, **untested})
        changed = dataclasses.replace(run, results=results, predictions=[])
        steps = " ".join(words for words, _ in next_steps(changed, [], None))
        assert (
            f"These names do not describe their images, and 'bayes' does not use them: {names[0]!r}" in steps
        ) == said


def test_charts_on_a_page_use_its_colours(finished_run):
    results = json.loads((finished_run / "results.json").read_text())
    with drawn():
        svg, again = (inline_svg(accuracy_figure(Results.of(results)), "x") for _ in range(2))
    assert svg.startswith("<svg") and "var(--series-3)" in svg and "currentColor" in svg
    assert not [colour for colour in SERIES if colour in svg] and "<script" not in svg
    assert svg == again, "the same results give the same picture"
    assert accuracy_figure(Results.of(results)).axes[0].get_ylim() == (0, 100), "the axis is not cut off"


@pytest.mark.slow
def test_charts_in_files_are_not_empty(finished_run, tmp_path):
    results = json.loads((finished_run / "results.json").read_text())
    with drawn():
        for number, plot in enumerate((plot_results, plot_matrix)):
            plot(results, tmp_path / f"{number}.png")
            with Image.open(tmp_path / f"{number}.png") as picture:
                assert min(picture.size) > 400 and len(picture.getcolors(10**6)) > 100
            with pytest.raises(ValueError, match="no test data"):
                plot(results_with(), tmp_path / "x.png")
        files = write_figures(finished_run, tmp_path)
        assert write_figures(finished_run, tmp_path) == files, "existing charts are replaced"
    drawings = [Image.open(path) for path in files if path.suffix == ".png"]
    assert drawings and all(len(drawing.getcolors(10**6)) > 20 for drawing in drawings)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "depths.png").write_text("mine")
    with pytest.raises(FileExistsError, match=r"depths\.png"):
        write_figures(finished_run, tmp_path / "others")


def test_interval_by_item_is_that_of_a_bootstrap_over_items():
    """18 items with 11 photographs each, of which most are all right or all wrong."""
    generator = np.random.default_rng(0)
    hits = generator.random((18, 11)) < np.repeat([0.95, 0.1], 9)[:, None]
    rows = [
        ImageResult("", "a", "a" if hit else "b", 0.9, 1, i, {}, f"{i // 11}") for i, hit in enumerate(hits.ravel())
    ]
    share = Share.of(rows)
    drawn = hits.mean(axis=1)[generator.integers(0, 18, (20000, 18))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (share.right, share.images, share.items) == (hits.sum(), 198, 18)
    assert share.interval == pytest.approx((low, high), abs=0.05), "the bootstrap knows nothing of few items"
    alone = Share(share.right, 198)
    assert share.interval[1] - share.interval[0] > 2.5 * (alone.interval[1] - alone.interval[0])
    assert str(share).startswith(f"{100 * share.value:.1f} % ({share.right} of 198, 18 items; 95 % interval ")
    sure = [ImageResult("", "a", "a", 0.9, 1, i, {}, f"{i // 11}") for i in range(198)]
    assert Share.of(sure).interval == pytest.approx(Share(18, 18).interval, abs=1e-6)
    single = [ImageResult("", "a", "a" if i % 3 else "b", 0.9, 1, i, {}, f"{i}") for i in range(300)]
    assert Share.of(single).interval == pytest.approx(Share(200, 300).interval, abs=0.005)
    (row,) = class_rows(rows, {}, {})
    assert row.recall == share and row.precision.items == len({r.group for r in rows if r.right})
    mistakes = choose_examples(rows)["mistakes"]
    assert len(mistakes) == len({row.group for row in mistakes}) == EXAMPLES < (~hits).any(axis=1).sum()
