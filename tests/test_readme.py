"""The README's Python, block after block in one namespace, and the spelling of commands and options in all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.cli import make_parser
from dulbe_peft.commands.settings import StreamArguments, fields_of
from dulbe_peft.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
SETTINGS = {
    field.name: field for cls in (StreamArguments, DualModeLoraConfig, LearnerArguments) for field in fields_of(cls)
}


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_python_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    assert len(blocks("python")) >= 4
    for number, code in enumerate(blocks("python"), 1):
        exec(compile(code, f"README block {number}", "exec"), namespace)
    assert "trainable params" in capsys.readouterr().out
    assert (tmp_path / "my-learner" / "manifest.json").is_file()


@pytest.mark.parametrize("page", ["docs/classifiers.md", "docs/report.md", "docs/strategies.md"])
def test_python_blocks_of_pages_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dulbe_peft.strategies.STRATEGIES", dict(STRATEGIES))
    text = (ROOT / page).read_text(encoding="utf-8")
    assert blocks("python", text)
    for number, code in enumerate(blocks("python", text), 1):
        exec(compile(code, f"{page} block {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "least"), [("README.md", 5), ("docs/report.md", 2)])
def test_commands_parse(page, least):
    commands = [
        line.split("dulbe-peft ")[1]
        for block in blocks("bash", (ROOT / page).read_text(encoding="utf-8"))
        for line in block.splitlines()
        if "dulbe-peft " in line
    ]
    assert len(commands) >= least
    for command in commands:
        make_parser().parse_args(command.split())


def test_ci_runs_the_readme_s_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    command = next(line for block in blocks("bash") for line in block.splitlines() if "pytest" in line)
    assert command.split("&&")[1].strip() in script


@pytest.mark.parametrize("page", PAGES)
def test_options_that_pages_name_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in blocks("yaml", text):
        assert set(yaml.safe_load(block)) <= set(SETTINGS)
    for name, value in re.findall(r'`(\w+)="(\w+)"', text):
        assert value in SETTINGS[name].metadata.get("choices", (value,)), f"{name}={value!r}"
    for name in re.findall(r"`(\w+)=[\d\[]", text):
        assert name in SETTINGS, name


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).is_file(), target
