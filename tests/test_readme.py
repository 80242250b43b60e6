"""The README's Python, block after block in one namespace, and its commands' spelling."""

from __future__ import annotations

import re
from pathlib import Path

from dulbe_peft.cli import _parser

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    assert len(blocks("python")) >= 4
    for number, code in enumerate(blocks("python"), 1):
        exec(compile(code, f"README block {number}", "exec"), namespace)
    assert "trainable params" in capsys.readouterr().out
    assert (tmp_path / "my-learner" / "manifest.json").is_file()


def test_commands_parse():
    commands = [
        line.split("dulbe-peft ")[1]
        for block in blocks("bash")
        for line in block.splitlines()
        if "dulbe-peft " in line
    ]
    assert len(commands) >= 5
    for command in commands:
        _parser().parse_args(command.split())


def test_ci_runs_the_readme_s_test_command():
    script = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    command = next(line for block in blocks("bash") for line in block.splitlines() if "pytest" in line)
    assert command.split("&&")[1].strip() in script
