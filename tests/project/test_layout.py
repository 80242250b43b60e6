"""Which modules may import which: library <- papers, application <- research, and layer by layer inside them."""

import ast
import graphlib
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from documents import setup_cfg, text_of
from processes import run

import dulbe_peft
from dulbe_peft.photos.commands.main import commands

ROOT = Path(__file__).parents[2]
# A layer may import from the layers above it in this list: library, then papers and the application, then research.
LAYERS = [
    {"utils"},
    {"arguments", "data", "subspaces"},
    {"encoders", "classifiers"},
    {"adapter", "sklearn"},
    {"strategies"},
    {"training"},
    {"metrics"},
    {"checkpoints"},
    {"learner"},
    {"streams"},
    {"trainer"},
    {"papers", "photos.data", "photos.cost", "photos.output_files", "photos.doubtful_labels"},
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
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("dulbe_peft", "research")
    for path in (ROOT / folder).rglob("*.py")
)
MODULES = {file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in FILES}
PACKAGES = {"dulbe_peft", "dulbe_peft.photos", "research"}  # their `__init__` refers to modules inside them


def layer_of(name: str) -> str:
    """Return the layer of a module, by its dotted name. Public names of the package count as the whole library."""
    parts = name.removeprefix("dulbe_peft.").split(".")
    if parts[0] in dulbe_peft.__all__:
        return "trainer"
    return ".".join(parts[:2]) if parts[0] in ("photos", "research") else parts[0]


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def imported_names(file: str) -> set[str]:
    """Return the dotted names that a file imports from the project, also in functions or only for type checking."""
    return names_in((ROOT / file).read_text(encoding="utf-8"), file)


def names_in(code: str, file: str) -> set[str]:
    """Return the imported names of a file's code, and what it reaches as attributes of an imported package."""
    imported, bound, nodes = set(), {}, list(ast.walk(ast.parse(code)))
    for node in nodes:
        pairs = [(alias, alias.name) for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            pairs = [(alias, f"{node.module}.{alias.name}") for alias in node.names]
        for alias, name in pairs:
            if name.split(".")[0] in ("dulbe_peft", "research"):
                imported.add(name)
                whole = isinstance(node, ast.ImportFrom) or alias.asname
                bound[alias.asname or alias.name.partition(".")[0]] = name if whole else name.partition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Attribute) and (path := dotted(node)) and path[0] in bound:
            reached = ".".join([bound[path[0]], *path[1:]])
            imported |= {name for name in (reached, reached.rpartition(".")[0]) if name in MODULES - PACKAGES}
    return imported


def dotted(node: ast.expr) -> list[str]:
    """Return the parts of `a.b.c`, or nothing if it is no such name."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def test_modules_import_only_from_layers_above_theirs():
    wrong = []
    for file in FILES:
        layer = layer_of(module_of(file))
        if module_of(file) in PACKAGES or file == "dulbe_peft/__main__.py":
            # They import other modules lazily, and at the top only what all layers may use.
            assert {layer_of(name) for name in imported_names(file)} <= {"utils"}, file
            continue
        for name in imported_names(file):
            if name in ("dulbe_peft", "dulbe_peft.__version__") or layer_of(name) == layer:
                continue
            beside = layer_of(name) == "papers" and layer.startswith("photos")  # neither may import the other
            if beside or RANK[layer_of(name)] >= RANK[layer]:
                wrong.append(f"{file} imports {name}")
    assert wrong == []


def test_library_names_the_application_nowhere():
    """A text that is resolved to a module, and a name in a stub, are imports too."""
    wrong = []
    for path in (ROOT / "dulbe_peft").rglob("*.py*"):
        file = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".pyi") or file.startswith("dulbe_peft/photos/"):
            continue
        if file == "dulbe_peft/__main__.py":  # starts the command line
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        wrong += [f"{file}: {text}" for text in texts if re.match(r"dulbe_peft\.photos\b|research[.:]\w", text)]
        if path.suffix == ".pyi":
            homes = [f"{node.module}." for node in nodes if isinstance(node, ast.ImportFrom)]
            wrong += [f"{file}: {home}" for home in homes if home.startswith(("photos.", "papers."))]
    assert wrong == []


def test_imports_have_no_cycles():
    modules = {module_of(file): file for file in FILES}

    def module(name):
        return name if name in modules else module(name.rpartition(".")[0])

    graph = {name: {module(other) for other in imported_names(file)} - {name} for name, file in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the modules in the cycle


@pytest.mark.parametrize(
    "code",
    [
        "from dulbe_peft import classifiers\ndef f(): return classifiers.novelty.sums_of",
        "import dulbe_peft.classifiers as c\nc.novelty.sums_of",
        "import dulbe_peft\nclass C:\n    x = dulbe_peft.classifiers.novelty",
        "def f():\n    from dulbe_peft.classifiers import novelty",
    ],
)
def test_modules_reached_as_attributes_of_a_package_count_as_imports(code):
    assert "dulbe_peft.classifiers.novelty" in names_in(code, "planted.py")


def test_version_and_citation_agree_everywhere():
    metadata, readme = setup_cfg()["metadata"], text_of("README.md")
    assert dulbe_peft.__version__ == metadata["version"]
    assert f"## {metadata['version'].partition('.dev')[0]}" in text_of("CHANGELOG.md")
    cited = yaml.safe_load(text_of("CITATION.cff"))
    keys = {"title": "name", "version": "version", "license": "license", "abstract": "description"}
    assert all(cited[key] == metadata[name] for key, name in keys.items())
    assert yaml.load(text_of("mkdocs.yml"), yaml.BaseLoader)["site_description"] == metadata["description"]
    assert commands.help == f"{metadata['description']}." and f"\n{commands.help}\n" in readme
    assert cited["authors"] == [{"name": metadata["author"]}]
    (paper,) = cited["references"]
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    bibtex = " ".join(readme.partition("```bibtex")[2].split())
    assert all(f"{{{value}}}" in bibtex for value in (paper["title"], authors, paper["identifiers"][0]["value"][6:]))


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
        for name in re.findall(r"^<!-- reference: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert pkgutil.resolve_name(name), (page.name, name)


def ours_after(statement):
    """Return the names of our modules that a statement imports."""
    names = run("-c", f"{statement}\nimport sys; print(*sys.modules)", check=True).stdout.split()
    return [name for name in names if name.partition(".")[0] == "dulbe_peft"]


@pytest.mark.slow
def test_import_loads_few_of_our_modules():
    head = ours_after("from dulbe_peft import BridgeEnsembleHead")
    adapter = ours_after(
        "from peft import get_peft_model; from dulbe_peft import DualModeLoraConfig, DualModeLoraModel"
    )
    # A classifier has a file for each of its parts, and needs no other folder except for the names of classes.
    folders = ("dulbe_peft.classifiers", "dulbe_peft.utils")
    others = [name for name in head if not name.startswith(folders)]
    assert sorted(others) == ["dulbe_peft", "dulbe_peft.data", "dulbe_peft.data.names"] and len(head) <= 18
    assert "dulbe_peft.adapter.model" in adapter and len(adapter) <= 35
    others = ("dulbe_peft.photos", "dulbe_peft.papers")
    assert not [name for name in (*head, *adapter) if name.startswith(others)]


def test_test_files_have_different_names():
    """Two files of one name cannot be collected in one process."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), [name for name in set(names) if names.count(name) > 1]
