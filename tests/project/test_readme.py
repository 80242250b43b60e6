"""The README and the pages: their Python runs, their commands parse, and their options, messages and links exist."""

import ast
import json
import re
import runpy
import shlex
import tempfile
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import write_saved
import yaml
from documents import blocks, text_of
from small_runs import parse, some

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.runs.settings import StreamArguments
from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.streams.tasks import class_incremental_tasks
from dulbe_peft.utils.settings import field_types
from research.benchmarks import evidence
from research.benchmarks.common import RESULTS
from research.comparison.plan import read_plan
from research.verification.checks import read_checks

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
# A block of Python with one of these titles is not run. It must compile.
NOT_RUN = ("needs the Hub",)
# Pages whose Python another test runs, and looks at what comes out.
ELSEWHERE = {
    "docs/classifiers.md": "classifiers/test_classifier_calls.py",
    "docs/deploying.md": "photos/deployment/test_deployment.py",
}
# Pages whose commands run, too, block after block together with their Python.
WALKED = ("docs/data.md", "docs/next-month.md")
OUTPUTS = runpy.run_path(str(ROOT / "docs" / "outputs.py"))  # writes what pages say that their code prints
MODEL = "openai/clip-vit-base-patch16"  # of pages; here it is the demo's
WIDTH = 108  # of code, in characters: what a page of the docs shows at 1280 pixels without scrolling
SETTINGS = field_types(StreamArguments) | field_types(AdapterSettings) | field_types(LearnerArguments)


def commands(page):
    """Every dulbe-peft command of a page, as a list of arguments; a line that ends in a backslash goes on."""
    lines = [line for _, _, code in blocks(page, "bash") for line in code.replace("\\\n", " ").splitlines()]
    called = [re.split(r"dulbe-peft |-m dulbe_peft ", line, maxsplit=1) for line in lines]
    return [shlex.split(parts[1].split("#")[0]) for parts in called if len(parts) == 2]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to work in, and 24 images of each digit; what a page registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    train, test = write_saved.digits(0, 24), write_saved.digits(24, 34)
    monkeypatch.setattr(
        "dulbe_peft.streams.digits.digit_tasks",
        lambda increment=2: class_incremental_tasks(train, test, increment=increment),
    )
    monkeypatch.setattr(STRATEGIES, "_classes", dict(STRATEGIES._classes))
    return tmp_path


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and p not in (*WALKED, *ELSEWHERE)])
def test_python_of_pages_runs(page, elsewhere, capsys):
    namespace: dict = {"__name__": "__main__"}
    for number, (_, title, code) in enumerate(blocks(page, "python"), 1):
        compiled = compile(code, f"{page} block {number}", "exec")
        if title not in NOT_RUN:
            exec(compiled, namespace)
    if page == "README.md":
        assert re.search(r"^old classes .*%, new classes .*%$", capsys.readouterr().out, flags=re.MULTILINE)
        assert (elsewhere / "my-learner" / "manifest.json").is_file()
        assert (elsewhere / "digits" / "adapter_model.safetensors").is_file()


def test_notebook_runs_and_learns(elsewhere, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    cells = json.loads(text_of("examples/own_folder.ipynb"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)  # as nobody has run it
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(code, 1):
        exec(compile("".join(cell["source"]), f"own_folder.ipynb cell {number}", "exec"), namespace)
    learner, folder = namespace["again"], namespace["work"]
    assert learner.tasks == [("one", "two", "zero"), ("three",)] and folder.is_relative_to(elsewhere)
    best = [row[0][0] for row in namespace["answers"]]
    assert len(best) >= 5 and best.count("three") / len(best) > 0.8  # of images that all show the class learned later
    assert (folder / "exported" / "model.safetensors").is_file()


def test_only_a_few_code_blocks_are_not_run():
    titles = [title for page in PAGES for _, title, _ in blocks(page, "python") if title]
    assert set(titles) <= set(NOT_RUN) and len(titles) <= 4
    assert all(Path(page).name in text_of(f"tests/{test}") for page, test in ELSEWHERE.items())


@pytest.fixture
def photos(elsewhere, digit_folders):
    """Photographs of two months, in the folders that pages name."""
    some(digit_folders(6, 5, 3), elsewhere / "photos", DIGITS[:4])
    some(digit_folders(6, 5, 3), elsewhere / "july-photos", ["five", "four", "one", "two"])
    return elsewhere


@pytest.mark.parametrize("page", [WALKED[0], *(pytest.param(page, marks=pytest.mark.slow) for page in WALKED[1:])])
def test_commands_of_a_page_run(page, photos, capsys):
    """The page from top to bottom, as a person types it."""
    namespace: dict = {"__name__": "__main__"}
    called = 0
    for number, (language, _, code) in enumerate(blocks(page, "python", "bash"), 1):
        code = code.replace(MODEL, str(demo_model_folder()))
        if language == "python":
            exec(compile(code, f"{page} block {number}", "exec"), namespace)
            continue
        for line in code.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "dulbe-peft", line
            if "--engine" not in arguments:  # data/test_features.py has the engines
                assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
                called += 1
    assert called >= 5
    if page == "docs/next-month.md":
        june = [["one", "three"], ["two", "zero"]]
        for folder, known in (("july", [june[0] + june[1]]), ("july-too", june)):
            results = json.loads((photos / folder / "results.json").read_text())
            assert results["class_names"] == [*known, ["five", "four"]] and results["known_tasks"] == len(known)
            assert None not in results["classifiers"]["bayes"]["matrix"][-1]
        gone = {"july-without": "two", "july-too-without": "two", "july-3": "one", "july-4": "zero"}
        for folder, name in gone.items():
            assert name not in ClassIncrementalLearner.from_pretrained(photos / folder).class_names
        assert ClassIncrementalLearner.from_pretrained(photos / "june-too").tasks == [tuple(names) for names in june]


def split_numbers(text):
    """The text with `#` for every decimal number, and these numbers; seconds are left out."""
    text = re.sub(r"\d+\.\d+ s\b", "some s", text)
    return re.sub(r"\d+\.\d+", "#", text), [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.parametrize(
    "page", [OUTPUTS["PAGES"][0], *(pytest.param(page, marks=pytest.mark.slow) for page in OUTPUTS["PAGES"][1:])]
)
def test_outputs_on_a_page_are_what_its_code_prints(page, tmp_path):
    """Words and counts are equal; percentages are within 5 points, for another processor rounds otherwise."""
    words, numbers = split_numbers(text_of(page))
    words_now, numbers_now = split_numbers(OUTPUTS["with_outputs"](text_of(page), tmp_path))
    assert words_now == words  # else: python docs/outputs.py
    assert numbers_now == pytest.approx(numbers, abs=5)


def test_data_page_names_every_image_suffix():
    assert not [suffix for suffix in image_suffixes() if f"`{suffix}`" not in text_of("docs/data.md")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_of_pages_parse(page):
    for command in commands(page):
        parse(command)


def test_ci_runs_the_commands_in_contributing():
    script, told = text_of(".ci/run"), []
    for page, word in (("CONTRIBUTING.md", "ruff"), ("README.md", "pytest")):
        lines = [line for _, _, code in blocks(page, "bash") for line in code.splitlines() if word in line]
        told += [command.strip() for line in lines[:1] for command in line.split("&&") if "install" not in command]
    assert len(told) >= 5 and all(command in script for command in told)


def test_tests_named_on_the_trust_page_exist():
    named = re.findall(r"`(test_\w+)`", text_of("docs/trust.md"))
    files = re.findall(r"`(tests/[\w/]+\.py)`", text_of("docs/trust.md"))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 25 and not [name for name in named if f"def {name}(" not in tests]
    assert all((ROOT / name).is_file() for name in files)


def parts():
    """The three parts of the docs by their titles, each with its pages, the start page first."""
    nav = yaml.load(text_of("mkdocs.yml"), yaml.BaseLoader)["nav"][1:]
    return {title: re.findall(r"[\w/-]+\.md", str(pages)) for part in nav for title, pages in part.items()}


def test_start_pages_link_every_page_of_their_part():
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - {"index.md"}
    assert sorted(page for part in parts().values() for page in part) == sorted(pages)
    start = text_of("docs/index.md")
    for first, *others in parts().values():
        assert f"]({first})" in start
        linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", text_of(f"docs/{first}") + start))
        assert set(others) <= linked, first


def test_library_pages_do_not_use_the_application():
    for page in parts()["The adapter"]:
        code = "".join(code for *_, code in blocks(f"docs/{page}", "python", "bash"))
        assert "dulbe_peft.photos" not in code and "research" not in code, page


@pytest.mark.parametrize("page", PAGES)
def test_options_named_on_pages_exist(page, tmp_path):
    text = text_of(page)
    for _, _, block in blocks(page, "yaml"):
        if "streams" in yaml.safe_load(block):
            (tmp_path / "plan.yaml").write_text(block, encoding="utf-8")
            read_plan(tmp_path / "plan.yaml")
        elif "checks" in yaml.safe_load(block):
            (tmp_path / "checks.yaml").write_text(block, encoding="utf-8")
            read_checks(tmp_path / "checks.yaml")
        else:
            assert set(yaml.safe_load(block)) <= set(SETTINGS)
    for name, value in re.findall(r'`(\w+)="(\w+)"', text):
        hint = SETTINGS[name]
        assert get_origin(hint) is not Literal or value in get_args(hint), f"{name}={value!r}"
    for name in re.findall(r"`([a-z_]+)=[\d\[]", text):
        assert name in SETTINGS, name


@pytest.mark.parametrize("page", [*PAGES, "llms.txt", "hub/README.md", "hub/model/README.md", "hub/space/README.md"])
def test_links_between_pages_are_valid(page):
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).is_file(), target


def test_messages_in_troubleshooting_exist_in_the_code():
    """A text of the code holds the message, or its fixed parts make up a third of the message."""
    texts = []
    for path in (ROOT / "dulbe_peft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):  # its fixed parts together
                texts.append([part.value.strip() for part in node.values if isinstance(part, ast.Constant)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append([node.value.strip()])

    def known(message):
        found = (sum(len(part) for part in parts if part in message) for parts in texts)
        return any(message in "".join(parts) for parts in texts) or 3 * max(found) >= len(message)

    messages = re.findall(r"^\| `([^`]+)` \|", text_of("docs/troubleshooting.md"), flags=re.MULTILINE)
    assert len(messages) >= 8 and [message for message in messages if not known(message)] == []


@pytest.mark.parametrize("page", PAGES)
def test_code_on_pages_fits_without_scrolling(page):
    lines = [line for _, _, code in blocks(page, "python", "bash", "yaml", "text") for line in code.splitlines()]
    assert all(len(line) <= WIDTH for line in lines), max(lines, key=len)


def test_gains_stated_in_readme_match_the_tables():
    """The gains of the names, and the most that the default classifier loses; whatever the files say."""
    found = {}
    for file in ("handwriting", "photographs"):
        for (_, method, name), row in evidence.compared(RESULTS, file).items():
            if method == "DuLBE":
                found.setdefault(name, []).append(100 * float(row["gain"]))
    names, default = found["text"], found[evidence.DEFAULT]
    gains = f"improves the text classifier by {min(names):.1f} to {max(names):.1f} points"
    costs = f"costs `{evidence.DEFAULT}`, the default, up to {-min(default):.1f}"
    assert gains in " ".join(text_of("README.md").split()) and costs in " ".join(text_of("README.md").split())
    assert gains.removeprefix("improves the text classifier by ") in " ".join(text_of("docs/results.md").split())


def test_what_the_page_says_of_novelty_follows_from_the_results():
    figures = "near, novelty;near, probability;near, said"
    _, *rows = evidence.beside(RESULTS, folder="rejection/real", figures=figures)
    gains = [float(novelty) - float(probability) for *_, novelty, probability, _ in rows]
    with_four = [float(novelty) for _, count, novelty, *_ in rows if count == "4"]
    errors = [abs(float(said) - float(novelty)) for *_, novelty, _, said in rows if said]
    text = " ".join(text_of("docs/predicting.md").split())
    assert f"on average {sum(gains) / len(gains):.1f} points larger" in text
    assert f"it is {-min(gains):.1f} points smaller" in text
    assert f"it is {min(with_four)} % (aircraft) to {max(with_four)} %" in text
    assert f"errors of up to {max(errors):.0f} points" in text


def test_what_the_page_says_of_methods_that_keep_features_follows_from_the_results():
    names = "bayes,tip_adapter,proker,linear_probe"
    *_, (_, *means) = evidence.frozen(RESULTS, classifiers=names, counts="1,16")
    text = " ".join(text_of("docs/classifiers.md").split())
    assert re.findall(r"([\d.]+) %", text[text.index("On three small streams") :]) == [m.strip("*") for m in means]


def test_comparison_tables_include_unfavourable_columns():
    """Every such table has the default classifier, the best other one, and what is still known."""
    columns = ("bayes", "the best other", "still known")
    tables = re.findall(r"<!-- table: (?:trained|family) .*? -->\n\n(\|.*\|)\n", text_of("docs/results.md"))
    assert len(tables) >= 3 and all(set(columns) <= set(head.strip("| ").split(" | ")) for head in tables)
