"""Who may import whom: a wing imports from the wings that stand in lines above its own, and nothing from below."""

import ast
import graphlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml
from documents import setup_cfg, text_of

import dulbe_peft
from dulbe_peft.photos.commands.main import commands

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dulbe_peft"
WINGS = [
    {"utils"},
    {"arguments", "data", "subspaces"},
    {"encoders", "classifiers"},
    {"adapter", "sklearn"},
    {"strategies"},
    {"training", "metrics"},
    {"checkpoints"},
    {"streams"},
    {"learner"},
    {"trainer"},
    {"deployment"},
    {"runs"},
    {"report", "verification"},
    {"comparison"},
    {"demo", "serving"},
    {"commands"},
    {"__init__", "__main__"},
]
RANK = {wing: rank for rank, wings in enumerate(WINGS) for wing in wings}
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def wing_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imported_names(file: str) -> set[str]:
    """What a file imports of the package, also inside functions and for types alone: dotted names."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name for name in names if name.split(".")[0] == "dulbe_peft"}
    return found


def imported(file: str) -> set[str]:
    """The wings that a file imports."""
    parts = [name.split(".") for name in imported_names(file)]
    return {part[1] if len(part) > 1 and part[1] in RANK else "__init__" for part in parts}


def test_imports_go_up_this_list():
    arrows = [(file, wing) for file in FILES for wing in imported(file) - {wing_of(file)}]
    assert [f"{file} imports {wing}" for file, wing in arrows if RANK[wing] >= RANK[wing_of(file)]] == []


def test_no_two_modules_import_each_other_by_whatever_way_round():
    modules = {"dulbe_peft." + file.removesuffix(".py").replace("/", "."): file for file in FILES}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}

    def module(name):
        return name if name in modules else module(name.rpartition(".")[0])

    graph = {name: {module(other) for other in imported_names(file)} - {name} for name, file in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_one_version_and_what_to_cite():
    metadata, readme = setup_cfg()["metadata"], text_of("README.md")
    assert dulbe_peft.__version__ == metadata["version"]
    assert f"## {metadata['version'].partition('.dev')[0]}" in text_of("CHANGELOG.md")
    cited = yaml.safe_load(text_of("CITATION.cff"))
    for key, own in {"title": "name", "version": "version", "license": "license", "abstract": "description"}.items():
        assert cited[key] == metadata[own]
    assert yaml.load(text_of("mkdocs.yml"), yaml.BaseLoader)["site_description"] == metadata["description"]
    assert commands.help == f"{metadata['description']}." and f"\n{commands.help}\n" in readme
    assert cited["authors"] == [{"name": metadata["author"]}]
    (paper,) = cited["references"]
    authors = ", ".join(f"{author['given-names']} {author['family-names']}" for author in paper["authors"])
    assert f"{authors},\n*{paper['title']}*" in readme


def test_everything_public_is_documented():
    for name in dulbe_peft.__all__:
        assert getattr(dulbe_peft, name).__doc__ and name in dir(dulbe_peft), name
    with pytest.raises(AttributeError, match="has no attribute 'laod_clip'"):
        dulbe_peft.laod_clip  # noqa: B018


def test_nothing_is_left_for_later():
    marks = re.compile("TO" + "DO|FIX" + "ME|XX" + "X")
    for folder in ("dulbe_peft", "tests", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                assert not marks.search(path.read_text(encoding="utf-8")), path


def test_every_reference_of_a_page_is_a_name_of_the_package():
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert pkgutil.resolve_name(name), (page.name, name)
