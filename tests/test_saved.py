"""Files that a release wrote go on loading, and give the answers that they gave."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAVED = Path(__file__).with_name("saved")
READ = "import json, sys, pathlib, write_saved; print(json.dumps(write_saved.read(pathlib.Path(sys.argv[1]))))"


@pytest.mark.parametrize("version", sorted(path.name for path in SAVED.iterdir()))
def test_files_of_a_release_load_in_a_fresh_process(version, tmp_path):
    folder = shutil.copytree(SAVED / version, tmp_path / version)
    command = [sys.executable, "-c", READ, str(folder)]
    done = subprocess.run(command, cwd=SAVED.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found, expected = json.loads(done.stdout.splitlines()[-1]), json.loads((folder / "answers.json").read_text())
    for learner in ("frozen", "run"):
        assert [[name for name, _ in row] for row in found[learner]] == [
            [name for name, _ in row] for row in expected[learner]
        ]
        for row, saved in zip(found[learner], expected[learner], strict=True):
            assert [score for _, score in row] == pytest.approx([score for _, score in saved], abs=1e-5)
    assert found["scores"].keys() == expected["scores"].keys()
    for name, row in found["scores"].items():
        # What all classes have in common changes no answer.
        ours, theirs = (
            [score - sum(scores) / len(scores) for score in scores] for scores in (row, expected["scores"][name])
        )
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-3), name
