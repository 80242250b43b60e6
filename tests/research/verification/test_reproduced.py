"""Test that a finished run fills in the table of the papers' settings, and a run with other settings does not."""

import json

import pytest
import yaml

from dulbe_peft.photos.runs.run_settings import validated
from dulbe_peft.photos.runs.setup import set_up
from research.__main__ import run as main
from research.verification import reproduced
from research.verification.reproduced import FILES, Reproduced, add_run, reproduced_table

SETTINGS = {"strategy": "spu:share=0.2", "classifiers": "text,lda", "increment": 2, "epochs": 1, "batch_size": 4}
SETTINGS |= {"learning_rate": 1e-3, "drift": "none"}


@pytest.fixture(scope="module")
def folder(digit_folders, tiny_model, tmp_path_factory):
    """Return the folder of a run of four digits."""
    out = tmp_path_factory.mktemp("run") / "out"
    more = {"model": str(tiny_model), "data": str(digit_folders(4, 6, 3)), "output": str(out), "device": "cpu"}
    set_up(*validated(SETTINGS | more | {"progress": False})).run()
    return out


@pytest.fixture
def papers(tmp_path, monkeypatch):
    """Return the only settings file, and let the module read and write in a temporary folder."""
    (tmp_path / "papers").mkdir()
    monkeypatch.setattr(reproduced, "FILES", tmp_path / "papers")
    monkeypatch.setattr(reproduced, "REPRODUCED", tmp_path / "reproduced.json")
    (tmp_path / "papers" / "spu.yaml").write_text(yaml.safe_dump({"model": "published"} | SETTINGS))
    return tmp_path


@pytest.mark.slow
def test_run_with_the_settings_of_the_file_becomes_a_row(folder, papers, capsys):
    results = json.loads((folder / "results.json").read_text())["classifiers"]["text"]
    assert main(["verify", "--run", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"A_last {100 * results['last_accuracy']:.2f} with text" in out and "generate.py tables" in out
    path = papers / "reproduced.json"
    (ours,) = Reproduced.model_validate_json(path.read_text()).runs.values()
    assert ours.last == pytest.approx(100 * results["last_accuracy"], abs=0.005)
    assert ours.average == pytest.approx(100 * results["average_accuracy"], abs=0.005)
    assert ours.model == "model" and ours.versions["dulbe_peft"]
    add_run(folder, path)  # the same row again
    assert reproduced_table(path)[1] == (
        "`spu`",
        "84.9 / 76.4",
        "OpenAI B/16",
        f"{ours.average:.1f} / {ours.last:.1f}",
        "model",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 2}, "epochs is 1, and 2 in the file"),
        ({"strategy": "spu:share=0.1"}, "'share': 0.2"),
        ({"text_rank": 0}, "text_rank is 8, and 0 in the file"),
        ({"initial_increment": 3}, "classes of the first task is 2, and 3 in the file"),
        ({"increment": 3, "initial_increment": 2}, "classes of the second task is 2, and 3 in the file"),
    ],
)
def test_run_with_other_settings_is_refused(folder, papers, change, words):
    (papers / "papers" / "spu.yaml").write_text(yaml.safe_dump({"model": "published"} | SETTINGS | change))
    with pytest.raises(ValueError, match=f"is not a run of examples/papers/spu.yaml: .*{words}"):
        add_run(folder, papers / "reproduced.json")
    assert not (papers / "reproduced.json").exists()


def test_run_without_a_file_is_refused(folder, papers):
    (papers / "papers" / "spu.yaml").unlink()
    with pytest.raises(ValueError, match="strategy 'spu', which has no file in examples/papers"):
        add_run(folder, papers / "reproduced.json")


def test_table_has_a_row_for_every_file_and_empty_cells():
    head, *rows = reproduced_table()
    assert [row[0] for row in rows] == [f"`{path.stem}`" for path in sorted(FILES.glob("*.yaml"))]
    assert all(len(row) == len(head) for row in rows) and ("`vis`", "", "") in [row[:3] for row in rows]
