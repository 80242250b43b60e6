"""Test that files written by earlier releases still load and give the same predictions."""

import json
import shutil
from pathlib import Path

import pytest
import write_saved

SAVED = Path(__file__).parents[1] / "saved"


@pytest.mark.filterwarnings("ignore:the images that calibrate the probabilities")
@pytest.mark.parametrize("version", sorted(path.name for path in SAVED.iterdir()))
def test_files_of_a_release_give_the_same_predictions(version, tmp_path):
    folder = shutil.copytree(SAVED / version, tmp_path / version)
    actual, expected = write_saved.read(folder), json.loads((folder / "answers.json").read_text())
    for learner in ("frozen", "run"):
        assert [[name for name, _ in row] for row in actual[learner]] == [
            [name for name, _ in row] for row in expected[learner]
        ]
        for row, saved in zip(actual[learner], expected[learner], strict=True):
            assert [score for _, score in row] == pytest.approx([score for _, score in saved], abs=1e-5)
    assert actual["scores"].keys() == expected["scores"].keys()
    for name, row in actual["scores"].items():
        assert row == pytest.approx(expected["scores"][name], rel=1e-4, abs=1e-3), name
