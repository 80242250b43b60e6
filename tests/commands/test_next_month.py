"""docs/next-month.md as a reader follows it: its commands one after the other, then its Python."""

import json
import shlex
import shutil

import pytest
from documents import blocks

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.commands.main import main
from dulbe_peft.demo import DIGITS, demo_model_folder

MODEL = "openai/clip-vit-base-patch16"


def code_of(language):
    return [code.replace(MODEL, str(demo_model_folder())) for *_, code in blocks("docs/next-month.md", language)]


@pytest.mark.slow
def test_commands_and_code_do_what_the_page_says(digit_folders, tmp_path, monkeypatch):
    everything = digit_folders(6, 5, 2)
    for split in ("train", "test"):
        for folder, names in (("photos", DIGITS[:4]), ("july-photos", ["five", "four", "one", "two"])):
            for name in names:
                shutil.copytree(everything / split / name, tmp_path / folder / split / name)
    monkeypatch.chdir(tmp_path)
    commands = [line for block in code_of("bash") for line in block.replace("\\\n", "").splitlines()]
    assert [shlex.split(line)[1] for line in commands] == ["run", "learn", *["forget"] * 2, *["rename"] * 2]
    for line in commands:
        assert main([*shlex.split(line)[1:], "--device", "cpu", "--no-progress"]) == 0, line
    (code,) = code_of("python")
    exec(compile(code, "docs/next-month.md", "exec"), {"__name__": "page"})

    june = [["one", "three"], ["two", "zero"]]
    for folder, known in (("july", [june[0] + june[1]]), ("july-too", june)):
        results = json.loads((tmp_path / folder / "results.json").read_text())
        assert results["class_names"] == [*known, ["five", "four"]] and results["known_tasks"] == len(known)
        assert None not in results["classifiers"]["bridge"]["matrix"][-1]
    for folder in ("july-without", "july-too-without"):
        assert "two" not in ClassIncrementalLearner.from_pretrained(tmp_path / folder).class_names
    assert "digit one" in ClassIncrementalLearner.from_pretrained(tmp_path / "july-3").class_names
    assert "zero" not in ClassIncrementalLearner.from_pretrained(tmp_path / "july-4").class_names
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "june-too").tasks == [tuple(names) for names in june]
