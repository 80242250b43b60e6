"""Test the page of a comparison: its statements about differences, its figures, and names with special characters."""

import re
from pathlib import Path

import pytest
from compared import CLEAR, REFERENCE, UNCLEAR, WORSE, entry, made_comparison, write_into
from failing_files import edited
from pages import Page, check_self_contained, drawn

from dulbe_peft.photos.commands.main import main as dulbe_peft_main
from dulbe_peft.utils.files import read_csv
from research.__main__ import run as main
from research.comparison.comparison_file import Comparison, read_comparison
from research.comparison.comparison_page import advice, lead, write_comparison_page
from research.comparison.comparison_plots import (
    MOST_DRAWN,
    cost_figure,
    curves_figure,
    forest_figure,
    image_counts,
    important_rows,
    streams_figure,
    with_difference,
)
from research.comparison.plan import Row
from research.comparison.summary import COLUMNS, COSTS, write_summary_csv

TITLES = [column.title for column in COLUMNS if column.show and column.title != "seeds"][1:]  # with three seeds


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "compared"
    path.mkdir()
    write_into(made_comparison(), path)
    write_summary_csv(path / "comparison.csv", made_comparison().entries)
    return path


def changed(record, **fields):
    return record.model_copy(update=fields)


def beside(*others, seeds=(0, 1, 2)):
    """Return the lead for the reference, which has 80 %, and rows with these accuracies and differences."""
    rows = [entry(Row("DuLBE", str(n)), *other) for n, other in enumerate(others)]
    return lead([entry(REFERENCE, 0.8, seeds=seeds), *rows], REFERENCE)


def test_lead_states_the_best_row_and_whether_the_difference_is_clear():
    clear = beside((0.85, CLEAR), (0.7, WORSE))
    assert clear.startswith("DuLBE with 0 has the highest accuracy after the last task: 85.0 %. It is clearly")
    assert "frozen with bridge, which has 80.0 %" in clear and "+2.0 to +8.0, excludes zero." in clear
    unclear = beside((0.81, UNCLEAR), (0.81, UNCLEAR))
    assert "not distinguishable from the reference" in unclear and "-2.0 to +4.0, includes zero" in unclear
    assert "clearly" not in unclear and "One other has the same accuracy." in unclear
    first = beside((0.8, UNCLEAR), (0.7, WORSE))
    assert first.startswith("No row is better than the reference, frozen with bridge. It classifies 80.0 % of")
    assert first.endswith("One of the 2 others is clearly worse.")
    for unknown in (beside((0.9,), seeds=(1,)), lead([entry(Row("DuLBE", "lda"), 0.9)], REFERENCE)):
        assert "No seed is finished for both" in unknown and "better than" not in unknown


def test_first_sentence_says_whether_to_train():
    best = entry(Row("DuLBE", "lda"), 0.85), entry(Row("frozen", "ranpac"), 0.81)
    assert advice(best, CLEAR) == (
        "Train: the best row with training is DuLBE with lda (85.0 %), and the best without is frozen with ranpac "
        "(81.0 %). The difference over their common seeds is +5.0 points, with a 95 % interval of +2.0 to +8.0."
    )
    assert advice(best, WORSE).startswith("Do not train: the best row with training is DuLBE with lda (85.0 %)")
    assert advice(best, UNCLEAR).startswith("Training makes no clear difference")
    assert "not known" in advice(best, None) and advice(None, None) == ""


def test_page_contains_all_figures(folder):
    assert read_comparison(folder) == made_comparison()
    page = Page(write_comparison_page(folder))
    check_self_contained(page)
    text = page.words
    assert re.search("4 images: Train: .* DuLBE with lda has the highest accuracy", text)
    assert "frozen with ranpac:features=9 has the highest accuracy" in text
    assert "4 rows on 2 streams, planned with 3 seeds (0, 1, 2)" in text and "With one seed" not in text
    cells = [[[cell.replace("(", " (").replace("  ", " ") for cell in row] for row in table] for table in page.tables]
    first, costs, second, _ = (table for table in cells if table[0][:2] == ["method", "classifier"])
    titles, each = [title for title in TITLES if title not in COSTS], [title for title in TITLES if title in COSTS]

    def row(method, classifier, drift, last, *rest):
        figures = [f"{value:.1f} ({value - 1:.1f} to {value + 1:.1f})" for value in (last, last + 3)]
        chosen = "learning_rate = 0.001" if method == "DuLBE" else ""
        return [method, classifier, drift, chosen, *figures, "2.0 (+1.0 to +3.0)", *rest[:3], "7.9", *rest[3:]]

    assert first == [
        titles,
        row("DuLBE", "lda", "", 85, gain := "+5.0 (+2.0 to +8.0)", "+1.0 to +9.0", gain, "90.0 → 85.0"),
        row("frozen", "ranpac:features=9", "", 81, "+1.0 (-2.0 to +4.0)", "-3.0 to +5.0", "", ""),
        row("frozen (reference)", "bridge", "", 80, "", "", "", "90.0 → 90.0"),
        row("DuLBE", "lda", "linear", 70, loss := "-10.0 (-15.0 to -5.0)", "-16.0 to -4.0", loss, "90.0 → 85.0"),
    ]
    assert costs[0] == [*TITLES[:3], *each]
    assert [line[:3] for line in costs[1:]] == [line[:3] for line in first[1:]]
    figures = ["epochs 2, batch 32, rate 0.001", "10", "28,800", "3.0", "1", "700"]
    assert all(line[3:] == figures for line in costs[1:])
    assert page.source.count("<strong>85.0</strong><br><small>(84.0 to 86.0)</small>") == 1
    assert page.source.count("<strong>") == 6, "four of them are in the lead: names and advice"
    assert second[0] == ["method", "classifier", "seeds", *titles[4:-1]] and "2 to 3 seeds" in text
    assert [line[2] for line in second[1:]] == ["", "", "2, few"]
    meant = re.findall("<dt>(.+)</dt><dd>.+</dd>", page.source)
    assert meant == [column.title for column in COLUMNS][1:], "the page explains each column"
    assert page.table("method", "tried") == [["DuLBE", "learning_rate = 0.0001, 0.001"]]
    missing = [["16 images", "DuLBE", "lda", "2"], ["16 images", "DuLBE", "lda (drift linear)", "0, 1, 2"]]
    assert page.table("stream", "classifiers", "seeds") == missing
    settings = dict(page.table("stream or method"))
    assert settings["16 images"] == "data = demo-digits; images_per_class = 16; model = demo"
    assert page.source.count("<svg") == 7, "one chart of the streams, and differences, curves and costs of each"


def test_page_of_one_seed_and_page_of_an_unfinished_comparison(tmp_path):
    table = made_comparison()
    scope = changed(table.scope, streams={"4 images": table.scope.streams["4 images"]}, seeds=(0,))
    entries = [changed(item, seeds=(0,)) for item in table.entries[:4]]
    write_into(Comparison(entries=entries, scope=scope, gains={}), tmp_path)
    page = Page(write_comparison_page(tmp_path, tmp_path / "page.html"))
    check_self_contained(page)
    assert "With one seed, the intervals cover only the variation between test images." in page.words
    assert "not finished" not in page.words and "Settings to choose from" in page.words
    assert page.source.count("<svg") == 3 and "4 images: DuLBE" not in page.words
    write_into(changed(table, entries=[]), tmp_path)
    page = Page(write_comparison_page(tmp_path))
    check_self_contained(page)
    assert page.table("stream", "classifiers")[0] == ["4 images", "frozen", "all", "0, 1, 2"]
    assert "Nothing is finished yet." in page.text and "<svg" not in page.source


def test_names_are_escaped(tmp_path):
    names = ("<script>alert(1)</script>", '50% $x_{1}$ & "c" 数')
    write_into(made_comparison(names, method="_<b>$\\frac$", classifier="<i>&amp;"), tmp_path)
    with drawn():
        page = Page(write_comparison_page(tmp_path, latex=tmp_path / "t.tex"))
    check_self_contained(page)
    assert not {"b", "i"} & {tag for tag, _ in page.tags}
    for name in names:
        assert [1 for level, text in page.headings if (level, text) == (2, name)], name
    assert page.text.count("_<b>$\\frac$ with <i>&amp;") >= 4, "in the lead, the legend and the pictures"
    assert r"\_{<}b{>}\$\textbackslash{}frac\$" in (tmp_path / "t.tex").read_text(encoding="utf-8")


def test_streams_chart_shows_accuracy_by_number_of_images():
    table = made_comparison()
    assert image_counts(table.scope.streams) == {"4 images": 4, "16 images": 16}
    for change in ({"epochs": 2}, {"images_per_class": None}, {"images_per_class": 16}):
        first = {**table.scope.streams["4 images"], **change}
        assert image_counts({**table.scope.streams, "4 images": first}) == {}, change
    rows = important_rows(table)
    assert rows == [REFERENCE, Row("DuLBE", "lda"), Row("frozen", "ranpac:features=9")]
    figure = streams_figure(table, rows)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "16"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [row.title for row in rows]
    lines = [container.lines[0] for container in axes.containers]
    assert [list(line.get_xdata()) for line in lines] == [[4, 16]] * 3
    assert [list(line.get_ydata()) for line in lines] == [pytest.approx(y) for y in ([80, 90], [85, 90], [81, 91])]


def test_charts_of_curves_costs_and_differences_have_the_right_values():
    entries = made_comparison().entries[:4]
    lines = curves_figure(entries, [REFERENCE, Row("DuLBE", "lda")]).axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [pytest.approx([86, 80]), pytest.approx([91, 85])]
    frozen, dulbe = cost_figure(entries).axes[0].lines
    assert list(frozen.get_ydata()) == [80, 81] and list(dulbe.get_ydata()) == [85, 70]
    assert set(dulbe.get_xdata()) == {9.6}, "CPU seconds"
    rows = with_difference(entries)
    assert [row.differences["last"] for row in rows] == [CLEAR, UNCLEAR, WORSE]
    axes = forest_figure(rows).axes[0]
    zero, *lines = axes.lines
    assert list(zero.get_xdata()) == [0, 0]
    assert [list(line.get_xdata()) for line in lines[::2]] == [[2, 8], [-2, 4], [-15, -5]]
    assert [line.get_xdata()[0] for line in lines[1::2]] == [5, 1, -10]
    assert [line.get_markerfacecolor() == "none" for line in lines[1::2]] == [False, True, False]
    many = [entry(Row("a", str(place)), 0.5, CLEAR) for place in range(MOST_DRAWN + 5)]
    assert len(forest_figure(many).axes[0].texts) == MOST_DRAWN


def test_report_command_writes_page_csv_and_latex(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), "--csv", "a.csv", "--latex", "a.tex"]) == 0
    assert capsys.readouterr().out.split()[1:6:2] == [str(folder / "report.html"), "a.csv", "a.tex"]
    assert (tmp_path / "a.csv").read_bytes() == (folder / "comparison.csv").read_bytes()
    header, *rows = read_csv(tmp_path / "a.csv")
    row = dict(zip(header, rows[2], strict=True))
    assert (row["classifier"], row["last"], row["last_low"], row["seeds"]) == ("lda", "0.85", "0.02", "3")
    written = (tmp_path / "a.tex").read_text(encoding="utf-8").splitlines()
    lines = [line for line in written if not line.startswith("%")]
    title = (
        r"Method & Classifier & Drift & Seeds & $A_\mathrm{last}$ & $\bar{A}$ & Forgetting & Vs. reference (95 \%) \\"
    )
    assert lines[:5] == [
        r"\begin{tabular}{lllrrrrr}",
        r"\toprule",
        title,
        r"\midrule",
        r"\multicolumn{8}{l}{\emph{4 images}} \\",
    ]
    figures = r"\textbf{85.0 $\pm$ 1.2} & \textbf{88.0 $\pm$ 1.2} & \textbf{2.0} & +5.0 (+2.0 to +8.0) \\"
    assert lines[5] == rf"DuLBE & lda &  & 3 & {figures}"
    assert r"& 81.0 $\pm$ 1.2$^\dagger$ &" in lines[6], "not clearly worse than the best row"
    assert r"& 80.0 $\pm$ 1.2 &" in lines[7] and r"& 70.0 $\pm$ 1.2 &" in lines[8] and "$-$10.0 ($-$15.0" in lines[8]
    assert lines[9] == r"\midrule" and lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    note = "".join(line for line in written if line.startswith("%"))
    assert "dagger" in note and "booktabs" in note and "chosen on the same images" in note
    assert main(["report", str(folder), "--latex", "b.tex", "--columns", "method,A_last,corrected (Holm),seeds"]) == 0
    chosen = (tmp_path / "b.tex").read_text(encoding="utf-8")
    assert r"Method & $A_\mathrm{last}$ & Corrected (Holm) & Seeds \\" in chosen
    assert r"frozen & 81.0 $\pm$ 1.2$^\dagger$ & $-$3.0 to +5.0 & 3 \\" in chosen
    for options, words in (
        (["--latex", "b.tex", "--columns", "A_lst"], "'A_lst'; did you mean 'A_last'?"),
        (
            ["--columns", "A_last"],
            "no effect without --latex",
        ),
    ):
        before = {
            path.name: path.read_bytes() for path in (*Path.cwd().iterdir(), *folder.iterdir()) if path.is_file()
        }
        assert main(["report", str(folder), *options, "--overwrite"]) == 2
        assert words in capsys.readouterr().err
        after = {path.name: path.read_bytes() for path in (*Path.cwd().iterdir(), *folder.iterdir()) if path.is_file()}
        assert after == before, "the columns are checked before a page is written or an older one is renamed"
    (tmp_path / "run").mkdir()
    assert main(["report", "run", "--output", "b.html"]) == 2
    assert "run has no comparison.json, which `python -m research compare` writes" in capsys.readouterr().err
    assert dulbe_peft_main(["report", str(folder)]) == 2
    assert "is a comparison: use `python -m research report` in a clone of the project" in capsys.readouterr().err
    edited(folder / "comparison.json", "entries", 0, "means", "last", 99)
    assert main(["report", str(folder), "--output", "b.html"]) == 2
    assert "comparison.json is damaged or foreign: entries.0.means.last: " in capsys.readouterr().err
    assert not (tmp_path / "b.html").exists()
