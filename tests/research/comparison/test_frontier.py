"""Test the frontier: which cells are measured, the upper hull of a method's points, and what the figure says."""

import itertools
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import yaml
from compared import forget_fingerprints, with_other_weights
from hub_stub import on_this_process
from pages import drawn

from dulbe_peft.encoders.registry import demo_model_folder
from research.__main__ import run as main
from research.benchmarks.common import RESULTS
from research.benchmarks.curves import FIGURES, REFERENCE, found, with_equal_shares
from research.comparison.cells import arguments_of, as_json, model_fingerprint, read_answers, read_cell
from research.comparison.compare import ComparisonError
from research.comparison.frontier import Curve, Place, curves, difference, frontier, hull, not_measured, point_of
from research.comparison.frontier_page import frontier_figure, frontier_svg, frontier_text, loss_table, sentence
from research.comparison.measured import PLACES, Measured, Point, read_all, title_of
from research.comparison.plan import Row, as_text, read_plan

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "frontiers"
SVG = "{http://www.w3.org/2000/svg}"


def quiet(_):
    """Discard a message."""


def write(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def content(digit_folders, tiny_model):
    """Return a plan of six digits in three tasks, of which the last one is never learned."""
    quick = {"increment": 2, "epochs": 1, "batch_size": 4, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
    data = {"data": str(digit_folders(6, 6, 3)), "retention": "last task", "retention_scales": [0.5]}
    return {
        "streams": {"digits": {"model": str(tiny_model), **data, **quick}},
        "methods": {
            "frozen": {"strategy": "frozen"},
            "DuLBE": {"strategy": "dulbe", "choose": {"learning_rate": ["1e-2", 0.1]}},
        },
        "classifiers": ["text", "lda"],
        "seeds": [0, 1],
        "reference": {"method": "DuLBE", "classifier": "text"},
    }


@pytest.fixture(scope="module")
def finished(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frontier")
    plan = read_plan(write(folder / "plan.yaml", content))
    return folder, plan, frontier(plan, folder / "out", jobs=1, log=quiet)


@pytest.fixture
def copied(finished, tmp_path):
    """Return a copy of the cells' files alone, as they are kept with the project."""
    shutil.copytree(finished[0] / "out" / "cells", tmp_path / "cells")
    return tmp_path / "cells", *finished[1:]


def test_every_setting_is_measured_with_every_seed_and_share(finished):
    folder, plan, records = finished
    assert [(one.method, one.point, one.seed) for one in records] == [
        *(("frozen", {}, seed) for seed in (0, 1)),
        *(("DuLBE", {"learning_rate": rate}, seed) for rate in (1e-2, 0.1) for seed in (0, 1)),
    ]
    assert all([point.share for point in one.points] == [0, 0.5, 1] for one in records)
    assert all(set(one.points[-1].learned) == {"text", "lda"} for one in records)
    assert all(set(point.learned) == {"text"} for one in records for point in one.points[:-1])
    for one in records[2:]:  # the accuracies are those of the runs
        run = folder / "out" / "runs" / "digits" / "DuLBE" / f"learning_rate={one.point['learning_rate']}"
        cell = read_cell(run / f"seed-{one.seed}")
        answers, _ = read_answers(run / f"seed-{one.seed}", Row("DuLBE", "lda", "auto"), cell)
        assert one.points[-1].learned["lda"] == pytest.approx(float(answers[-1].right.double().mean()))
        assert [(p.share, p.unlearned, p.learned["text"]) for p in one.points] == [
            (p.scale, p.unlearned, p.learned) for p in cell.retention.scales
        ]
        assert len(cell.class_names) == 2, "the last task is not learned"
    assert not_measured(plan, records) == []
    assert str(folder) not in (text := "".join(path.read_text() for path in (folder / "out").rglob("seed-*.json")))
    assert text, "the files name no folder of this machine"


def test_classes_of_the_last_task_are_told_apart_from_all_others(finished):
    """By chance alone, one of six names is right; among their own two names it would be one of two."""
    _, _, records = finished
    before = [one.points[0].unlearned for one in records if one.method == "frozen"]
    assert np.mean(before) < 0.45


def test_kept_cells_are_enough_and_nothing_is_run_again(copied, monkeypatch, tmp_path):
    cells, plan, records = copied
    monkeypatch.setattr("research.comparison.compare.finish_cell", None)
    assert frontier(plan, tmp_path / "out", cells, jobs=1, log=quiet) == records
    assert sorted(map(repr, read_all(cells))) == sorted(map(repr, records))


def test_only_the_missing_cell_is_run(copied, tmp_path):
    cells, plan, records = copied
    gone = next(cells.glob("digits/DuLBE/*0.1/seed-1.json"))
    gone.unlink()
    assert not_measured(plan, read_all(cells)) == ["digits: DuLBE: learning_rate=0.1: seeds 1"]
    drawn_only = frontier(plan, tmp_path / "out", cells, jobs=1, log=quiet, draw=True)
    assert len(drawn_only) == len(records) - 1 and not (tmp_path / "out").exists()
    again = frontier(plan, tmp_path / "out", cells, jobs=1, log=quiet)
    assert [one.points for one in again] == [one.points for one in records]
    assert len(list((tmp_path / "out").rglob("cell.json"))) == 1
    assert (tmp_path / "out" / "cells" / gone.relative_to(cells)).is_file() and not gone.exists(), (
        "cells are only read"
    )
    assert frontier(plan, tmp_path / "out", cells, jobs=1, log=quiet) == again


def test_a_cell_without_a_classifier_is_measured_again(copied, content, tmp_path):
    cells, _, _ = copied
    methods = {"frozen": content["methods"]["frozen"]}
    reference = {"method": "frozen", "classifier": "text"}
    more = content | {"methods": methods, "classifiers": ["text", "lda", "bayes"], "reference": reference}
    records = frontier(read_plan(write(tmp_path / "more.yaml", more)), tmp_path / "out", cells, jobs=1, log=quiet)
    assert all(set(one.points[-1].learned) == {"text", "lda", "bayes"} for one in records)


@pytest.mark.parametrize("changed", ["settings", "images", "model", "seed"])
def test_cells_of_something_else_are_refused_before_anything_is_run(copied, changed, tmp_path):
    cells, plan, _ = copied
    path = next(cells.glob("digits/frozen/seed-1.json"))
    record = json.loads(path.read_text())
    other = {
        "settings": record["settings"] | {"increment": 3},
        "images": [*record["images"][:2], "others"],
        "model": "another",
        "seed": 0,
    }
    path.write_text(json.dumps(record | {changed: other[changed]}))
    with pytest.raises(ValueError, match=rf"seed-1.json was measured with {changed} = .*remove the file"):
        frontier(plan, tmp_path / "out", cells, jobs=1, log=quiet)
    assert not (tmp_path / "out" / "runs").exists()


def test_stream_without_classes_that_are_never_learned_is_refused(content, tmp_path):
    bare = {name: value for name, value in content["streams"]["digits"].items() if "retention" not in name}
    path = write(tmp_path / "plan.yaml", content | {"streams": {"digits": bare}})
    with pytest.raises(ValueError, match="stream 'digits' has no retention"):
        frontier(read_plan(path), tmp_path / "out", jobs=1, log=quiet)


def test_last_task_of_a_single_one_cannot_be_left_out(content, tmp_path):
    single = {"digits": content["streams"]["digits"] | {"increment": 6}}
    path = write(tmp_path / "plan.yaml", content | {"streams": single, "seeds": [0]})
    with pytest.raises(ComparisonError, match="retention is 'last task', but the stream has a single task"):
        frontier(read_plan(path), tmp_path / "out", jobs=1, log=quiet)


def test_command_prints_tables_and_writes_figures(copied, finished, tmp_path, capsys):
    cells, plan, records = copied
    arguments = ["--output", str(tmp_path / "out"), "--cells", str(cells), "--overwrite"]
    assert main(["frontier", str(finished[0] / "plan.yaml"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert frontier_text(plan, records) in printed and "not measured" not in printed
    assert {path.name for path in (tmp_path / "out").glob("*.svg")} == {"digits, text.svg", "digits, lda.svg"}


def test_draw_and_overwrite_are_refused_because_nothing_would_be_left_to_draw(finished, capsys):
    folder = finished[0]
    assert main(["frontier", str(folder / "plan.yaml"), "--output", str(folder / "out"), "--draw", "--overwrite"]) != 0
    assert "--overwrite would move away the measured cells" in capsys.readouterr().err
    assert (folder / "out" / "cells").is_dir() and not (folder / "out.old").exists()


@pytest.mark.parametrize("changed", ["model", "never learned images"])
def test_finished_run_without_its_file_keeps_its_model_and_images(content, changed, tmp_path):
    """A run that was killed before its file was written is not told as one of what stands in its places later."""
    model, never = tmp_path / "model", tmp_path / "never"
    shutil.copytree(content["streams"]["digits"]["model"], model)
    shutil.copytree(content["streams"]["digits"]["data"], never)
    stream = content["streams"]["digits"] | {"model": str(model), "retention": str(never)}
    methods = {"frozen": content["methods"]["frozen"]}
    one = {"streams": {"digits": stream}, "methods": methods, "classifiers": ["text"], "seeds": [0]}
    plan = read_plan(write(tmp_path / "plan.yaml", one))
    for _ in range(2):  # unchanged, the run is enough
        assert len(frontier(plan, tmp_path / "out", jobs=1, log=quiet)) == 1
        shutil.rmtree(tmp_path / "out" / "cells")
    if changed == "model":
        with_other_weights(model)
    else:
        first, *_, last = sorted((never / "test").rglob("*.png"))
        first.write_bytes(last.read_bytes())
        forget_fingerprints()
    said = "run with another model than is in .*model" if changed == "model" else "on other images than are in .*never"
    with pytest.raises(ValueError, match=said):
        frontier(plan, tmp_path / "out", jobs=1, log=quiet)
    assert not (tmp_path / "out" / "cells").exists()


def test_model_of_a_cell_is_its_files_also_for_the_demo():
    assert model_fingerprint("demo") == model_fingerprint(str(demo_model_folder())) != "demo"
    assert {one.model for one in read_all(RESULTS / "frontiers" / "cameras")} == {model_fingerprint("demo")}
    assert model_fingerprint("openai/clip-vit-base-patch16") == "openai/clip-vit-base-patch16"


def test_model_of_a_cell_is_another_after_a_commit_on_the_hub(monkeypatch, tmp_path):
    with on_this_process(monkeypatch, tmp_path) as hub:
        for text in (b"{}", b"{ }"):
            commit = hub.commit("someone/clip", {"config.json": text})
            assert model_fingerprint("someone/clip") == f"someone/clip@{commit}"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert model_fingerprint("someone/clip") == f"someone/clip@{commit}"


@pytest.mark.parametrize("changed", [{"model": "another"}, {"images": ["others", None, None]}])
def test_curves_of_different_models_or_images_are_refused(changed):
    records = made_records(DuLBE=(55, 60), LoRA=(54, 58))
    records[-1] = records[-1].model_copy(update=changed)
    with pytest.raises(ValueError, match=f"stream 's' was measured with {next(iter(changed))} = .* by LoRA"):
        curves(records, "s")
    elsewhere = records[-1].model_copy(update={"stream": "t"})
    assert set(curves([*records[:-1], elsewhere], "s")) == {"DuLBE", "LoRA"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_stored_cells_are_those_that_the_example_file_lists(path, monkeypatch):
    for name in ("MODEL", "DATA", "TWIN", "CAMERAS"):
        monkeypatch.setenv(name, "demo")
    plan = read_plan(path)
    planned = {
        (cell.stream, cell.method, as_text(point_of(plan, cell)), cell.seed): cell
        for cell, _ in plan.every_combination()
    }
    for record in read_all(RESULTS / "frontiers" / path.stem):
        cell = planned[record.stream, record.method, as_text(record.point), record.seed]
        shown = {name: value for name, value in as_json(cell.settings).items() if name not in PLACES}
        assert record.settings == shown | {"retention_scales": list(cell.retention[1:])}, path
        assert record.arguments == {n: value for n, value in arguments_of(cell).items() if n not in PLACES}
        assert {title_of(row) for row in plan.rows_of(record.method)} == set(record.points[-1].learned)
    assert f"frontier examples/frontiers/{path.name} --output" in path.read_text(encoding="utf-8")


def test_figure_of_the_docs_says_what_the_stored_cells_show():
    for name, (file, stream, methods) in FIGURES.items():
        root = ElementTree.parse(ROOT / "docs" / "images" / f"{name}.svg").getroot()
        shown = found(RESULTS, file, stream, methods=methods)
        assert root.find(f"{SVG}desc").text == sentence(shown, REFERENCE), "run python docs/generate.py frontier"


# ---------------------------------------------------------------------- curves


def place(x, y, share=0.5, settings="rate=1"):
    """Return a place with the accuracies `x` and `y` in percent, by seed."""
    each = [dict(enumerate(np.atleast_1d(values) / 100)) for values in (x, y)]
    return Place(settings, share, *each)


def mixture(places, x):
    """Return the most learned at `x` by a mixture of two places, by trying all pairs."""
    ends = [one.y for one in places if one.x >= x]
    for a, b in itertools.permutations(places, 2):
        if a.x >= x > b.x:
            ends.append(b.y + (a.y - b.y) * (x - b.x) / (a.x - b.x))
    return max(ends, default=None)


def test_hull_is_what_lines_between_two_places_do_not_surpass():
    draws = np.random.default_rng(0)
    for count in (1, 2, 3, 20):
        places = [place(*draws.integers(0, 40, 2)) for _ in range(count)]
        best_places = hull(places)
        assert all(a.x > b.x and a.y < b.y for a, b in itertools.pairwise(best_places))
        curve = Curve("a", places, best_places)
        for x in np.linspace(0, 0.4, 17):
            at, best = curve.learned_at(x), mixture(places, x)
            assert (None if at is None else at[0]) == (None if best is None else pytest.approx(best))


def test_difference_is_taken_seed_by_seed_at_equal_loss():
    start = place([70, 72], [50, 52], 0.0, "")
    one, two = place([60, 64], [60, 64]), place([66, 66], [55, 56])
    curve, other = (Curve(name, [start, each], [start, each]) for name, each in (("a", one), ("b", two)))
    # At 66.5, the first curve is halfway from (71, 51) to (62, 62), and the second one 0.9 of the way to (66, 55.5).
    found = difference(curve, other, 0.665)
    expected = [50 + 0.5 * 10 - (50 + 0.9 * 5), 52 + 0.5 * 12 - (52 + 0.9 * 4)]
    assert found.mean == pytest.approx(np.mean(expected) / 100)
    assert found.high - found.low == pytest.approx(2 * 12.706 * abs(np.diff(expected))[0] / 2 / 100, rel=1e-3)
    assert difference(curve, other, 0.72) is None, "neither knows as much"


def made_records(**learned):
    """Return records of two seeds: every method loses 4 points of 70 at the whole update and 1 point at a half."""
    records = []
    for method, (half, whole) in learned.items():
        for seed in (0, 1):
            rows = [(0, 70, 50), (0.5, 69, half), (1, 66, whole)]
            points = [
                Point(share=share, unlearned=x / 100, learned={"text": (y + 0.01 * seed * share) / 100})
                for share, x, y in rows
            ]
            fields = {"stream": "s", "method": method, "point": {"learning_rate": 0.1}, "seed": seed, "model": "m"}
            settings = {"strategy": "lora"}
            other = {"arguments": {}, "images": [], "cpu_seconds": 1.0, "finished": "2026-01-01", "points": points}
            records.append(Measured(**fields, settings=settings, **other))
    return records


def test_curves_are_compared_with_the_shares_that_all_their_methods_have():
    """A share of one method alone is left out, so is a method; a method that chooses no share takes no share away."""
    records = []
    for method, shares in {"DuLBE": (1, 0.5, "auto"), "LoRA": (1, "auto"), "merged LoRA": (1,)}.items():
        for share in shares:
            made = made_records(**{method: (55, 60)})
            records += [each.model_copy(update={"point": {"update_share": share}}) for each in made]
    records += made_records(SPU=(50, 50))

    def kept(*methods):
        return {(each.method, each.point.get("update_share")) for each in with_equal_shares(records, methods)}

    both = {(method, share) for method in ("DuLBE", "LoRA") for share in (1, "auto")}
    assert kept("DuLBE", "LoRA", "SPU") == both | {("SPU", None)}
    assert kept("DuLBE", "LoRA", "merged LoRA") == {(method, 1) for method in ("DuLBE", "LoRA", "merged LoRA")}
    assert kept("DuLBE") == {("DuLBE", share) for share in (1, 0.5, "auto")}


def test_sentence_says_who_is_above_whom_and_where():
    found = curves(made_records(DuLBE=(55, 60), LoRA=(54, 58), weak=(56, 57), strong=(58, 62)), "s")
    said = sentence(found, "DuLBE")
    assert said == (
        "Where classes that are never learned may lose 0.5, 1, 2, 4 or 8 points, the curve of DuLBE is above (+0.5 to "
        "+2.0, clear) that of LoRA; above at 2, 4 and 8 (+0.3 to +3.0, clear) and below at 0.5 and 1 (-1.0 to -0.5, "
        "clear) that of weak; below (-3.0 to -1.5, clear) that of strong (2 seeds)."
    )
    assert "is level with that of same (2 seeds)" in sentence(
        curves(made_records(DuLBE=(49, 48), same=(49, 48)), "s"), "DuLBE"
    )
    lines = loss_table(found, "DuLBE")
    assert lines[1][:3] == ["DuLBE", "52.5", "55.0"] and lines[2][:3] == ["LoRA", "52.0 (-0.5)", "54.0 (-1.0)"]


def test_places_that_lack_seeds_are_left_out_and_named():
    records = made_records(DuLBE=(55, 60))
    other = [one.model_copy(update={"point": {"learning_rate": 0.2}}) for one in records[:1]]
    assert len(curves([*records, *other], "s")["DuLBE"].places) == len(curves(records, "s")["DuLBE"].places) == 3


def test_each_method_has_a_colour_of_its_own():
    names = ("DuLBE", "LoRA", "merged LoRA", "A", "B", "C", "D", "E")
    found = curves(made_records(**dict.fromkeys(names, (55, 60))), "s")
    with drawn():
        bars = frontier_figure(found, "").axes[0].containers
    assert [bar.get_label() for bar in bars] == list(names)
    assert len({bar.lines[0].get_color() for bar in bars}) == len(names)


def test_figure_is_a_picture_with_a_title_and_the_sentence():
    records = made_records(DuLBE=(55, 60), LoRA=(54, 58))
    with drawn():
        root = ElementTree.fromstring(frontier_svg(records, "s", "DuLBE"))
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text.startswith("s: accuracy on learned classes")
    assert root.find(f"{SVG}desc").text == sentence(curves(records, "s"), "DuLBE")
    texts = {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}
    assert {"DuLBE", "LoRA", "nothing trained"} <= texts
    assert (
        "var(--series-3)" in ElementTree.tostring(root).decode()
        and "prefers-color-scheme" in root.find(f"{SVG}style").text
    )
