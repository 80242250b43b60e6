"""A wrong name, path or flag is refused before anything that takes time is imported."""

import subprocess
import sys

import pytest
from PIL import Image

CALL = (
    "import sys; from dulbe_peft.commands.main import main; print(main(sys.argv[1:]), *sys.modules, file=sys.stderr)"
)
HEAVY = {"torch", "transformers", "scipy", "matplotlib", "peft", "sklearn", "accelerate"}


def called(*argv):
    """Standard error of a command in a process of its own, and the modules that it imported."""
    done = subprocess.run([sys.executable, "-c", CALL, *argv], capture_output=True, text=True)
    *said, last = done.stderr.strip().splitlines()
    status, *modules = last.split()
    assert status == "2", done.stderr
    return "\n".join(said), set(modules)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("predict gone {data}", "'gone' is no folder here"),
        ("predict {saved} gone.jpg", "gone.jpg does not exist"),
        ("predict {saved} x.jpg --precison float32", "No such option"),
        ("predict {saved} x.jpg --backend tensorrt", "'tensorrt' is not one of"),
        ("run --model gone --data {data} --output o", "'gone' is no folder here"),
        ("run --model demo --data gone --output o", "gone does not exist"),
        ("run --model demo --data {data} --output o --class-order gone", "--class-order 'gone' is no file"),
        ("run --model demo --data {data} --output o --class-names gone", "--class-names 'gone' is no file"),
        ("run --model demo --data {data} --output o --epochs 0", "epochs must be at least 1"),
        ("run --model demo --data {data} --output {data}/o", "lies in"),
        ("learn gone --data {data} --output o", "'gone' is no folder here"),
        ("learn {saved} --data gone --output o", "gone does not exist"),
        ("evaluate gone --data {data}", "'gone' is no folder here"),
        ("evaluate {saved} --data gone", "gone does not exist"),
        ("features --model gone --data {data}", "'gone' is no folder here"),
        ("features --model demo --data gone", "gone does not exist"),
        ("serve gone", "'gone' is no folder here"),
        ("export gone o", "'gone' is no folder here"),
        ("forget gone cat --output o", "'gone' is no folder here"),
        ("report gone", "gone is no folder"),
        ("report gone --csv t.csv", "gone is no folder"),
        ("check gone", "gone does not exist"),
        ("convert-openclip gone o --tokenizer t", "gone"),
    ],
)
def test_what_is_not_there_is_refused_before_torch_is_imported(argv, words, finished_run, tmp_path, monkeypatch):
    data = tmp_path / "photos"
    (data / "train" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(data / "train" / "cat" / "1.png")
    monkeypatch.chdir(tmp_path)
    said, modules = called(*argv.format(saved=finished_run, data=data).split())
    assert words in said and not HEAVY & modules
