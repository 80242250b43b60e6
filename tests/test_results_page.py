"""The tables of docs/results.md, of the README and of docs/classifiers.md against the files that they cite."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def table(head: str, page: str = "docs/results.md") -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text[text.index(f"| {head} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def few_images(data: str, images: str, classifier: str) -> tuple[str, str]:
    """A_last and A_bar of the training-free benchmark, in percent."""
    rows = json.loads((RESULTS / "few_images" / f"{data}.json").read_text(encoding="utf-8"))["rows"]
    what = re.compile(rf"{classifier}(:features=\d+)?, {images} images? a class, .*: (\w+)$")
    found = {match[2]: row["value"] for row in rows if (match := what.match(row["what"]))}
    return f"{found['A_last']:.1f}", f"{found['A_bar']:.1f}"


def ablated(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """(method, classifier) -> the row of the ablation without drift compensation."""
    with (RESULTS / "ablations" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return {(row["method"], row["classifier"]): row for row in csv.DictReader(file) if row["drift"] == "none"}


def compared(row: dict[str, str]) -> str:
    """A_last and the interval of its difference to the reference; bold where that is clear."""
    gain = {f"gain{end}": row[f"last{by}"] for end, by in (("", "_difference"), ("_low", "_low"), ("_high", "_high"))}
    return written({**row, **gain, "method": "another"})


def measured(name: str, drift: str = "linear") -> dict[tuple[str, ...], dict[str, str]]:
    """(stream, method, classifier) -> the row of the comparison; the one with this drift, where there are two."""
    path = RESULTS / "comparisons" / f"{name}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["drift"] == drift)
    return {(row["stream"], row["method"], row["classifier"].removesuffix(":features=1000")): row for row in rows}


def written(row: dict[str, str]) -> str:
    """A_last and, of a trained row, the interval of what training adds; bold where that is clear."""
    figure = f"{100 * float(row['last']):.1f}"
    if row["method"] == "frozen" or not row["gain"]:
        return figure
    low, high = (
        f"{100 * float(row[name]):+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
        for name in ("gain_low", "gain_high")
    )
    text = f"{figure} ({low} to {high})".replace("-", "−")
    return f"**{text}**" if float(row["gain_low"]) > 0 or float(row["gain_high"]) < 0 else text


@pytest.mark.parametrize(
    "head", ["1 image a class", "4 images a class", "16 images a class", "50 images a class (all)"]
)
def test_does_training_pay(head):
    found, stream = measured("handwriting"), head.partition(" a class")[0]
    (_, *classifiers), _, *rows = table(head)
    assert len(rows) == 3 and len(classifiers) == 6
    for title, *cells in rows:
        method = {"frozen": "frozen", "dulbe": "DuLBE", "lora": "LoRA"}[re.search(r"\(`(\w+)", title)[1]]
        assert cells == [written(found[stream, method, name]) for name in classifiers]


@pytest.mark.parametrize("stream", ["4 images", "16 images"])
def test_training_on_photographs(stream):
    found = measured("photographs")
    (_, *classifiers), _, *rows = table(f"photographs, {stream} a class")
    assert [title for title, *_ in rows] == ["nothing trained (`frozen`)", "DuLBE (`dulbe`)"]
    for method, (_, *cells) in zip(("frozen", "DuLBE"), rows, strict=True):
        assert cells == [written(found[stream, method, name]) for name in classifiers]


def test_all_at_once():
    found = measured("all-at-once")
    (_, *classifiers, _), _, *rows = table("LoRA, all at once")
    for title, *cells, known in rows:
        stream = title.partition(" a class")[0]
        assert cells == [written(found[stream, "LoRA", name]) for name in classifiers]
        assert known == f"{100 * float(found[stream, 'LoRA', 'text']['retention']):.1f}"


def test_data_on_which_nothing_was_chosen():
    found = measured("unseen")
    (_, *classifiers), _, *rows = table("stream")
    assert [title for title, *_ in rows] == list(dict.fromkeys(stream for stream, _, _ in found))
    for title, *cells in rows:
        figures = [written(found[title, "frozen", name]) for name in classifiers]
        best = max(map(float, figures))
        assert cells == [f"**{figure}**" if float(figure) == best else figure for figure in figures], title


def test_what_to_choose():
    (_, *classifiers), _, *rows = table("images a class")
    for title, *cells in rows:
        data, _, images = title.partition(", ")
        found = [few_images(data, images, name)[0] for name in classifiers]
        best = max(map(float, found))
        assert cells == [f"**{figure}**" if float(figure) == best else figure for figure in found], title


def test_the_table_of_the_classifiers_page():
    (_, _, *classifiers), _, *rows = table("features", "docs/classifiers.md")
    names = [name.replace("`, whitened", ":metric=whitened") for name in classifiers]
    data = ""
    for features, images, *cells in rows:
        if features:
            data = features.partition(",")[0].replace("the demo's ", "")
        for name, cell in zip(names, cells, strict=True):
            figures = [float(figure) for figure in cell.replace("*", "").split(" / ")]
            # The files have four digits, so that a figure may be rounded twice.
            assert figures == pytest.approx([*map(float, few_images(data, images, name))], abs=0.11), (data, images)


def test_the_first_table_of_the_readme():
    found = measured("handwriting", drift="none") | {
        ("all", *key): row for key, row in measured("all-at-once", drift="none").items()
    }
    _, _, *rows = table("way", "README.md")
    methods = {"nothing trained": "frozen", "the paper's method": "DuLBE", "LoRA trained on": "LoRA"}
    for title, _, _, *cells in rows:
        names = [name for name in re.findall(r"`(\w+)", title) if name not in ("frozen", "dulbe", "lora")]
        begin = next((method for start, method in methods.items() if title.startswith(start)), None)
        for count, cell in zip(("1 image", "4 images", "50 images"), cells, strict=True):
            keys = [(count, begin, name) if begin else ("all", count, "LoRA", name) for name in names]
            assert cell == ", ".join(f"{100 * float(found[key]['last']):.1f}" for key in keys), title


def test_settings_of_dulbe():
    files = {
        "one depth": "bridge",
        "number": "depths",
        "$": "reliability",
        "$\\l": "structure-weight",
        "$K": "support",
    }
    _, _, *rows = table("setting of DuLBE")
    assert len(rows) == len(files)
    for title, cell in rows:
        name = max((start for start in files if title.startswith(start)), key=len)
        figures = {compared(row) for row in ablated(files[name]).values() if row["last_difference"]}
        given = [part.partition(": ")[2] for part in re.split(r", (?=[\d.e]+:|equal)", cell)]
        assert len(given) > 3 and set(given) <= figures, title


def test_all_methods_side_by_side():
    found = measured("family")
    (_, *classifiers, _, _), _, *rows = table("method")
    names = {"nothing trained": "frozen", "LoRA trained on": "LoRA", "LoRA merged": "merged LoRA"}
    assert len(rows) == 14
    for title, *cells, known, trained in rows:
        title = title.partition(" (")[0]
        method = names.get(title, title)
        for name, cell in zip(classifiers, cells, strict=True):
            row = found["4 images", method, name]
            figure = f"{100 * float(row['last']):.1f}"
            if row["gain"]:
                gain = f"{100 * float(row['gain']):+.1f}"
                figure += f" ({'0.0' if float(gain) == 0 else gain})".replace("-", "−")
                clear = float(row["gain_low"]) > 0 or float(row["gain_high"]) < 0
                figure = f"**{figure}**" if clear else figure
            assert cell == figure, (method, name)
        assert known == f"{100 * float(found['4 images', method, 'text']['retention']):.1f}"
        assert trained == f"{int(found['4 images', method, 'text']['trainable_parameters']):,}"
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    own = re.findall(r"`(\w+)` of ([\w-]+) has (\d+\.\d)", page)
    assert [rule for rule, _, _ in own] == ["visual_agent", "rapf", "bofa"]
    for rule, method, figure in own:
        assert figure == f"{100 * float(found['4 images', method, rule]['last']):.1f}"


def test_how_much_of_what_was_learned_to_use():
    content = json.loads((RESULTS / "comparisons" / "scales.json").read_text(encoding="utf-8"))
    (_, *scales), _, *rows = table("share of what was learned")
    for title, *cells in rows:
        method, stream, kind = re.split(", |: ", title)
        (entry,) = (
            entry for entry in content["entries"] if (entry["stream"], entry["row"]["method"]) == (stream, method)
        )
        measured = {f"{row['scale']:g}": row for row in entry["retention"]["scales"]}
        name = "learned" if kind.endswith("learned classes") else "unlearned"
        assert cells == [f"{100 * measured[scale][name]:.1f}" for scale in scales], title
    assert len(rows) == 2 * len(content["entries"])


def test_no_result_names_a_path_of_the_machine_that_measured_it():
    files = [path for path in RESULTS.rglob("*") if path.suffix in (".json", ".csv", ".txt")]
    assert len(files) > 40
    named = {path.name: found for path in files if (found := re.findall(r'["\s,](/\w+/\S+)', path.read_text()))}
    assert not named
