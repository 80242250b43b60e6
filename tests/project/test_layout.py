"""Who may import whom: library <- papers, application <- research, and floor by floor inside them; never back."""

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
# A floor imports from those above its own in this list: the library; papers and the application on it; research.
FLOORS = [
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
    {"papers", "photos.data", "photos.cost", "photos.tables", "photos.doubtful_labels"},
    {"photos.suggesting", "photos.deployment", "photos.runs"},
    {"photos.report"},
    {"photos.demo", "photos.serving"},
    {"photos.commands"},
    {"photos.__main__"},
    {"research.verification", "research.diagnostics"},
    {"research.comparison"},
    {"research.benchmarks"},
    {"research.commands"},
    {"research.__main__"},
]
RANK = {floor: rank for rank, floors in enumerate(FLOORS) for floor in floors}
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("dulbe_peft", "research")
    for path in (ROOT / folder).rglob("*.py")
)
PACKAGES = {"dulbe_peft", "dulbe_peft.photos", "research"}  # whose `__init__` names what lies in them


def floor_of(name: str) -> str:
    """The floor of a module, by its dotted name; a public name of the package is the whole library's."""
    parts = name.removeprefix("dulbe_peft.").split(".")
    if parts[0] in dulbe_peft.__all__:
        return "trainer"
    return ".".join(parts[:2]) if parts[0] in ("photos", "research") else parts[0]


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported_names(file: str) -> set[str]:
    """What a file imports of the project, also inside functions and for types alone: dotted names."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name for name in names if name.split(".")[0] in ("dulbe_peft", "research")}
    return found


def test_modules_import_only_from_lower_layers():
    wrong = []
    for file in FILES:
        own = floor_of(module_of(file))
        if module_of(file) in PACKAGES or file == "dulbe_peft/__main__.py":
            # They name the application, which they start; only what every part stands on is imported.
            assert {floor_of(name) for name in imported_names(file)} <= {"utils"}, file
            continue
        for name in imported_names(file):
            if name in ("dulbe_peft", "dulbe_peft.__version__") or floor_of(name) == own:
                continue
            beside = floor_of(name) == "papers" and own.startswith("photos")  # neither stands on the other
            if beside or RANK[floor_of(name)] >= RANK[own]:
                wrong.append(f"{file} imports {name}")
    assert wrong == []


def test_imports_have_no_cycles():
    modules = {module_of(file): file for file in FILES}

    def module(name):
        return name if name in modules else module(name.rpartition(".")[0])

    graph = {name: {module(other) for other in imported_names(file)} - {name} for name, file in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_version_and_citation_agree_everywhere():
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


def test_public_names_have_docstrings():
    for name in dulbe_peft.__all__:
        assert getattr(dulbe_peft, name).__doc__ and name in dir(dulbe_peft), name
    with pytest.raises(AttributeError, match="No dulbe_peft attribute laod_clip"):
        dulbe_peft.laod_clip  # noqa: B018


def test_no_file_has_unfinished_work_markers():
    marks = re.compile("TO" + "DO|FIX" + "ME|XX" + "X")
    for folder in ("dulbe_peft", "tests", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                assert not marks.search(path.read_text(encoding="utf-8")), path


def test_api_references_in_docs_resolve():
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert pkgutil.resolve_name(name), (page.name, name)
