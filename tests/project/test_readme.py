"""The README and the docs: their Python runs, their commands parse, and their options, messages and links exist."""

import ast
import json
import re
import runpy
import shlex
from inspect import signature
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from documents import blocks, blocks_of, split_numbers, text_of
from small_runs import parse, some

from dulbe_peft import ClassIncrementalLearner, paper_arguments
from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.classifiers import CLASSIFIERS
from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.runs.run_settings import GROUPS, ModelSettings
from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.utils.settings import field_types
from research.comparison.plan import read_plan

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
# A block of Python with one of these titles is compiled but not run.
NOT_RUN = ("needs the Hub", "signature")
# Pages whose Python another test runs, which also checks the results.
ELSEWHERE = {
    "docs/classifiers.md": "classifiers/test_classifier_calls.py",
    "docs/deploying.md": "photos/deployment/test_deployment.py",
    "docs/from-lora.md": "project/test_programs.py",
}
# Pages that are parts of the README, whose Python is run there.
COPIES = ("docs/index.md", "docs/adapter.md")
# Pages whose Python takes seconds.
LONG = ("docs/by-hand.md",)
# Pages whose commands run too, block by block together with their Python.
WALKED = ("docs/data.md", "docs/next-month.md")
OUTPUTS = runpy.run_path(str(ROOT / "docs" / "generate.py"))  # the script that writes the output shown on pages
MODEL = "openai/clip-vit-base-patch16"  # the model on the pages, replaced here by the demo model
WIDTH = 108  # the characters of code that a page shows at 1280 pixels without scrolling
SETTINGS = {name: hint for kind in GROUPS.values() for name, hint in field_types(kind).items()}


def commands(page):
    """Return every dulbe-peft command of a page as a list of arguments. A backslash continues a line."""
    lines = [line for _, _, code in blocks(page, "bash") for line in code.replace("\\\n", " ").splitlines()]
    calls = [re.split(r"dulbe-peft |-m dulbe_peft ", line, maxsplit=1) for line in lines]
    return [shlex.split(parts[1].split("#")[0]) for parts in calls if len(parts) == 2]


@pytest.mark.plain("docs/predicting.md", "docs/strategies.md", "docs/reference/adapter.md")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in LONG))
        for page in PAGES
        if blocks(page, "python") and page not in (*WALKED, *ELSEWHERE, *COPIES, *OUTPUTS["PAGES"])
    ],
)
def test_python_of_pages_runs(page, elsewhere):
    run_python(text_of(page), page)


def run_python(text, page):
    """Run the Python of a page's text, block after block in one namespace."""
    namespace: dict = {"__name__": "__main__"}
    for number, (_, title, code) in enumerate(blocks_of(text, "python"), 1):
        compiled = compile(code, f"{page} block {number}", "exec")
        if title not in NOT_RUN and not title.startswith("examples/"):  # other tests run the examples
            exec(compiled, namespace)


def test_only_a_few_code_blocks_are_not_run():
    titles = [
        title
        for page in PAGES
        for _, title, _ in blocks(page, "python")
        if title and title != "signature" and not title.startswith("examples/")
    ]
    assert set(titles) <= set(NOT_RUN) and len(titles) <= 4
    assert all(Path(page).name in text_of(f"tests/{test}") for page, test in ELSEWHERE.items())


@pytest.fixture
def photos(elsewhere, digit_folders):
    """Photographs of two months, in the folders that the pages use."""
    some(digit_folders(6, 5, 3), elsewhere / "photos", DIGITS[:4])
    some(digit_folders(6, 5, 3), elsewhere / "july-photos", ["five", "four", "one", "two"])
    return elsewhere


@pytest.mark.rare("docs/next-month.md")
@pytest.mark.slow
@pytest.mark.parametrize("page", WALKED)
def test_commands_of_a_page_run(page, photos, capsys):
    """Run a page from top to bottom, as a person would type it."""
    namespace: dict = {"__name__": "__main__"}
    commands_run = 0
    for number, (language, _, code) in enumerate(blocks(page, "python", "bash"), 1):
        code = code.replace(MODEL, str(demo_model_folder()))
        if language == "python":
            exec(compile(code, f"{page} block {number}", "exec"), namespace)
            continue
        for line in code.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "dulbe-peft", line
            if "--engine" not in arguments:  # data/test_features.py tests the engines
                assert main(arguments) == 0, f"{line}\n{capsys.readouterr().err}"
                commands_run += 1
    assert commands_run >= 5
    if page == "docs/next-month.md":
        june = [["one", "three"], ["two", "zero"]]
        for folder, known in (("july", [june[0] + june[1]]), ("july-too", june)):
            results = json.loads((photos / folder / "results.json").read_text())
            assert results["class_names"] == [*known, ["five", "four"]] and results["known_tasks"] == len(known)
            assert None not in results["classifiers"]["bayes"]["matrix"][-1]
        forgotten = {"july-without": "two", "july-too-without": "two", "july-3": "one", "july-4": "zero"}
        for folder, name in forgotten.items():
            assert name not in ClassIncrementalLearner.from_pretrained(photos / folder).class_names
        assert ClassIncrementalLearner.from_pretrained(photos / "june-too").tasks == [tuple(names) for names in june]


@pytest.mark.slow
@pytest.mark.parametrize("page", OUTPUTS["PAGES"])
def test_outputs_on_pages_match_what_their_code_prints_and_the_other_code_runs(page, tmp_path, request):
    """Check that words and counts are equal. Percentages may differ by 5 points, as processors round differently."""
    text = text_of(page)
    words, numbers = split_numbers(text)
    words_now, numbers_now = split_numbers(OUTPUTS["with_outputs"](text, tmp_path))
    assert words_now == words  # if this fails, run: python docs/generate.py outputs
    assert numbers_now == pytest.approx(numbers, abs=5)
    request.getfixturevalue("elsewhere")  # what stands below the last output needs only few images
    run_python(text.rpartition("<!-- end of output -->")[2], page)
    if page == "README.md":
        assert (tmp_path / "my-learner" / "manifest.json").is_file()
        assert (tmp_path / "digits" / "adapter_model.safetensors").is_file()


def test_tables_of_settings_match_the_code():
    page = text_of("docs/settings.md")
    assert "| `data` |" in page
    assert OUTPUTS["with_settings"](page) == page  # if this fails, run: python docs/generate.py settings


def test_programs_on_pages_match_the_examples():
    pages = {page: text_of(page) for page in PAGES}
    assert sum('```python title="examples/' in text for text in pages.values()) >= 3
    assert {
        page: OUTPUTS["with_programs"](text) for page, text in pages.items()
    } == pages  # python docs/generate.py programs


def test_parts_of_the_readme_on_pages_match_it():
    pages = {page: text_of(page) for page in PAGES}
    assert sum("<!-- readme: " in text for text in pages.values()) == len(COPIES)
    assert {page: OUTPUTS["with_readme"](text) for page, text in pages.items()} == pages  # docs/generate.py readme


@pytest.mark.slow
def test_reference_pages_match_the_code():
    with_reference = runpy.run_path(str(ROOT / "docs" / "describe.py"))["with_reference"]
    pages = {page: text_of(page) for page in PAGES if "/reference/" in page}
    assert sum(text.count("<!-- reference: ") for text in pages.values()) > 60
    assert not [page for page, text in pages.items() if re.search(r"^ +>>> ", text, flags=re.MULTILINE)]
    assert {page: with_reference(text) for page, text in pages.items()} == pages  # docs/generate.py reference


def test_no_page_needs_a_build_to_be_read():
    assert not [page for page in PAGES if re.search(r"^\s*(\{\{|:::)", text_of(page), flags=re.MULTILINE)]


def test_pages_have_at_most_17000_words_that_are_written_by_hand():
    generated = re.compile(r"<!-- (table|output|settings|readme|reference)\b.*?<!-- end of \1 -->", re.DOTALL)
    texts = {page: OUTPUTS["PROGRAM"].sub("", generated.sub("", text_of(page))) for page in PAGES}
    words = {page: len(re.findall(r"\S*\w\S*", text)) for page, text in texts.items()}  # not the bars of tables
    assert words["docs/reference/learner.md"] < 100  # what is generated is not counted
    assert sum(words.values()) <= 17_000, words


def test_data_page_names_every_image_suffix():
    assert not [suffix for suffix in image_suffixes() if f"`{suffix}`" not in text_of("docs/data.md")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_of_pages_parse(page):
    for command in commands(page):
        parse(command)


def test_ci_runs_the_commands_in_contributing():
    script, documented = text_of(".ci/run"), []
    for page, word in (("CONTRIBUTING.md", "ruff"), ("README.md", "pytest")):
        lines = [line for _, _, code in blocks(page, "bash") for line in code.splitlines() if word in line]
        documented += [part.strip() for line in lines[:1] for part in line.split("&&") if "install" not in part]
    assert {"python -m pytest", "python -m pytest -m slow"} < {*documented}
    assert 'python -m pytest -m "not left_out"' in script  # plain and slow tests at once
    assert len(documented) >= 5 and all(command.removesuffix(" -m slow") in script for command in documented)


def test_tests_named_on_the_trust_page_exist():
    named = re.findall(r"`(test_\w+)`", text_of("docs/trust.md"))
    files = re.findall(r"`(tests/[\w/]+\.py)`", text_of("docs/trust.md"))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 25 and not [name for name in named if f"def {name}(" not in tests]
    assert all((ROOT / name).is_file() for name in files)


def parts():
    """Return the three parts of the docs by title, each with its pages, of which the start page is the first."""
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


@pytest.mark.parametrize("page", [page for page in PAGES if "/reference/" not in page])
def test_options_named_on_pages_exist(page, tmp_path):
    text = text_of(page)
    for _, _, block in blocks(page, "yaml"):
        if "streams" in yaml.safe_load(block):
            (tmp_path / "plan.yaml").write_text(block, encoding="utf-8")
            read_plan(tmp_path / "plan.yaml")
        else:
            assert set(yaml.safe_load(block)) <= set(SETTINGS)
    for name, value in re.findall(r'`(\w+)="(\w+)"', text):
        hint = SETTINGS[name]
        assert get_origin(hint) is not Literal or value in get_args(hint), f"{name}={value!r}"
    for name in re.findall(r"`([a-z_]+)=[\d\[]", text):
        assert name in SETTINGS, name


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and MkDocs name them where both agree."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in words}


@pytest.mark.parametrize(
    "page",
    [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "llms.txt", *(f"hub/{p}README.md" for p in ("", "model/", "space/"))],
)
def test_links_between_pages_are_valid(page):
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]+))?\)", text):
        linked = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.relative_to(ROOT)), f"{target}#{anchor}"


@pytest.mark.slow
def test_messages_in_troubleshooting_exist_in_the_code():
    """Check that a string in the code contains the message, or that fixed parts of an f-string are a third of it."""
    texts = []
    for path in (ROOT / "dulbe_peft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):  # keep the fixed parts together
                texts.append([part.value.strip() for part in node.values if isinstance(part, ast.Constant)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append([node.value.strip()])

    def known(message):
        matching = (sum(len(part) for part in parts if part in message) for parts in texts)
        return any(message in "".join(parts) for parts in texts) or 3 * max(matching) >= len(message)

    messages = re.findall(r"^\| `([^`]+)` \|", text_of("docs/troubleshooting.md"), flags=re.MULTILINE)
    assert len(messages) >= 8 and [message for message in messages if not known(message)] == []


@pytest.mark.parametrize("page", PAGES)
def test_code_on_pages_fits_without_scrolling(page):
    lines = [line for _, _, code in blocks(page, "python", "bash", "yaml", "text") for line in code.splitlines()]
    assert all(len(line) <= WIDTH for line in lines), max(lines, key=len)


def names_in_rows(text, head):
    """Return the names in code that the first cells of a table have, whose head row begins with `head`."""
    table = text.partition(head)[2].partition("\n\n")[0]
    return re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)))


def test_pages_list_each_strategy_and_each_classifier():
    listed = re.findall(
        r"^- `(\w+)`", text_of("docs/strategies.md").partition("## All strategies")[2].partition("\n## ")[0], re.M
    )
    assert sorted([*listed, "frozen"]) == sorted(STRATEGIES)  # `frozen` stands above, among those to begin with
    page = text_of("docs/classifiers.md")
    assert sorted(names_in_rows(page, "| name | keeps |")) == sorted(CLASSIFIERS)
    said = names_in_rows(page, "| classifier | result of learning more images")
    assert set(said) == CLASSIFIERS.keys() - {"text"}  # `text` learns nothing from images
    refused = set(re.findall(r"`(\w+)`", re.search(r"^\|(.+)\| an error;", page, re.M)[1]))
    assert refused == {name for name, kind in CLASSIFIERS.items() if "update" not in kind.rule_type.can}


@pytest.mark.parametrize(("word", "registry"), [("strategies", STRATEGIES), ("classifiers", CLASSIFIERS)])
def test_counts_in_prose_match_the_registries(word, registry):
    pages = {
        page: re.findall(rf"(\d\d+) \[?{word}\b", text_of(page))
        for page in (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md")
    }
    assert pages["CHANGELOG.md"] == pages["CONTRIBUTING.md"] == [str(len(registry))]
    assert {count for counts in pages.values() for count in counts} == {str(len(registry))}
    assert f"DuLBE, LoRA, {len(STRATEGIES) - 3} others, or `frozen`" in text_of("docs/adapter.md")


def test_table_of_defaults_matches_the_code():
    python = signature(ClassIncrementalLearner).parameters["strategy"].default
    trainer = paper_arguments("unused")
    args, (dulbe, frozen) = LearnerArguments(), (STRATEGIES[name].classifiers for name in ("dulbe", "frozen"))
    rows = {
        "strategy": [python, "dulbe", ModelSettings.strategy],
        "learning rate": [args.learning_rate, f"{trainer.learning_rate:.0e}".replace("e-0", "e-"), args.learning_rate],
        "drift": [args.drift] * 3,
        "epochs, batch size": [
            f"{args.epochs}, {args.batch_size}",
            f"{trainer.num_train_epochs}, {trainer.per_device_train_batch_size}",
            f"{args.epochs}, {args.batch_size}",
        ],
        "classifiers; the first one predicts": [
            ", ".join(dulbe),
            ", ".join(dulbe),
            f"{', '.join(frozen)}; for dulbe as in Python",
        ],
    }
    page = text_of("docs/decisions.md").replace("`", "")
    for name, cells in rows.items():
        assert "| " + " | ".join([name, *cells]) + " |" in page
    ranks = (
        f"Ranks are {AdapterSettings.shared_rank}, {AdapterSettings.residual_rank} and {AdapterSettings.support_rank}"
    )
    assert ranks in page and python == "dulbe" and ModelSettings.strategy == "frozen"
