"""Test the files that `predict` writes for other programs: Timelapse and Label Studio."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from urllib.parse import unquote

import pytest
from served import photo, two_colours

from dulbe_peft.data.readers import load_data
from dulbe_peft.photos.commands.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return two_colours(tmp_path_factory.mktemp("exchange"))


@pytest.fixture
def study(tmp_path):
    """Write photographs in folders of cameras, with names that addresses encode."""
    for number, name in enumerate(("Cam A/1 ä.png", "Cam A/night/2.png", "3#%.png")):
        path = tmp_path / "my study" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number % 2, 50 + number).save(path)
    (tmp_path / "my study" / "broken.png").write_bytes(b"no photograph")
    return tmp_path / "my study"


COLOURS = {"1 ä.png": "red", "2.png": "green", "3#%.png": "red"}


def predict(folder, photos, *flags):
    return main(["predict", str(folder), str(photos), *map(str, flags)])


def rows_of(file):
    with Path(file).open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def test_table_for_timelapse_has_its_columns_and_goes_back_in(folder, study, tmp_path, capsys):
    table = tmp_path / "species.csv"
    assert predict(folder, study, "--timelapse", table) == 0
    assert "rename the column Species to your data label" in capsys.readouterr().err
    rows = rows_of(table)
    assert {(row["RelativePath"], row["File"]) for row in rows} == {
        ("Cam A", "1 ä.png"),
        ("Cam A\\night", "2.png"),
        ("", "3#%.png"),
    }
    assert {row["File"]: row["Species"] for row in rows} == COLOURS and all(len(row) == 3 for row in rows)
    images = load_data(Path(table).rename(study / "TimelapseData.csv"), None)
    names = [images.class_names[label] for label in images.labels]
    assert dict(zip((Path(images.item_name(n)).name for n in range(3)), names, strict=True)) == COLOURS


def test_timelapse_sees_photographs_from_the_folder_with_its_template(folder, study, tmp_path):
    (study / "TimelapseTemplate.tdb").touch()
    table = tmp_path / "species.csv"
    assert predict(folder, study / "Cam A", "--timelapse", table) == 0
    assert {row["RelativePath"] for row in rows_of(table)} == {"Cam A", "Cam A\\night"}
    assert predict(folder, study, "--timelapse", table, "--overwrite") == 0
    assert {row["RelativePath"] for row in rows_of(table)} == {"Cam A", "Cam A\\night", ""}


def test_tasks_for_label_studio_are_as_it_imports_them_and_go_back_in(folder, study, tmp_path, capsys):
    file = tmp_path / "tasks.json"
    assert predict(folder, study, "--label-studio", file) == 0
    said = capsys.readouterr().err
    assert f"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={tmp_path}, and add {study} as local storage" in said
    tasks = json.loads(file.read_text(encoding="utf-8"))
    for task in tasks:
        assert set(task) == {"data", "predictions"}
        address, (answer,) = task["data"]["image"], task["predictions"]
        start = "/data/local-files/?d="
        path = tmp_path / unquote(address.removeprefix(start))
        assert address.startswith(start) and path.is_file() and "#" not in address and " " not in address
        (result,) = answer["result"]
        assert result["value"] == {"choices": [COLOURS[path.name]]} and 0.5 < answer["score"] <= 1
        assert (result["type"], result["from_name"], result["to_name"]) == ("choices", "choice", "image")
    assert len(tasks) == 3
    with pytest.raises(ValueError, match="no choice of a person: annotate them there"):
        load_data(file, None)
    accepted = [task | {"annotations": task["predictions"]} for task in tasks]  # a person has submitted all of them
    (study / "export.json").write_text(json.dumps(accepted), encoding="utf-8")
    images = load_data(study / "export.json", None)
    names = [images.class_names[label] for label in images.labels]
    assert dict(zip((Path(images.item_name(n)).name for n in range(3)), names, strict=True)) == COLOURS


def test_unknown_photograph_has_no_row_and_no_prediction(folder, study, tmp_path, monkeypatch):
    from dulbe_peft.metrics.prediction import Prediction
    from dulbe_peft.photos.output_files import write_tasks, write_timelapse

    rows = [
        Prediction(image=str(study / "3#%.png"), classes=("red",), probabilities=(0.6,), known=known, novelty=0.0)
        for known in (True, False)
    ]
    write_timelapse(rows, str(tmp_path / "a.csv"), str(study))
    assert [row["Species"] for row in rows_of(tmp_path / "a.csv")] == ["red"]
    write_tasks(rows, str(tmp_path / "a.json"), str(study), "bayes")
    assert [len(task["predictions"]) for task in json.loads((tmp_path / "a.json").read_text())] == [1, 0]


@pytest.mark.parametrize("flag", ["--timelapse", "--label-studio"])
def test_one_folder_is_needed(folder, study, tmp_path, capsys, flag):
    for paths in ((study / "3#%.png",), (study / "Cam A", study)):
        assert main(["predict", str(folder), *map(str, paths), flag, str(tmp_path / "out.csv")]) == 2
        assert "need one folder of photographs, got" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
