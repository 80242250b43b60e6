"""The order of the modules: imports go down it, never up, and the lower ones stay free of heavy packages."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from pathlib import Path

import pytest

import dulbe_peft

ROOT = Path(__file__).parents[1]
ORDER = [
    "checks",
    "undoing",
    "files",
    "checkpoint",
    "hub",
    "devices",
    "distributed",
    "decompositions",
    "functional",
    "statistics",
    "collecting",
    "specs",
    "adapter.modes",
    "allocation",
    "encoders",
    "adapter.registration",
    "adapter.expressions",
    "adapter.config",
    "adapter.base",
    "adapter.linear",
    "adapter.layer",
    "adapter.text",
    "adapter.targets",
    "adapter.saved",
    "adapter.model",
    "adapter.gradients",
    "adapter.export",
    "streams.names",
    "streams.decoding",
    "streams.rows",
    "streams.samples",
    "streams.orders",
    "streams.listing",
    "streams.tasks",
    "streams.protocols",
    "classifiers.checks",
    "classifiers.calibration",
    "classifiers.state",
    "classifiers.files",
    "classifiers.formula",
    "classifiers.base",
    "classifiers.text",
    "classifiers.covariance",
    "classifiers.bridge",
    "classifiers.prototype",
    "classifiers.lda",
    "classifiers.ridge",
    "classifiers.ranpac",
    "classifiers.evidence",
    "classifiers.bayes",
    "classifiers.fitting",
    "classifiers.visual_agent",
    "classifiers.rapf",
    "classifiers.bofa",
    "classifiers.drift",
    "classifiers",
    "closing",
    "arguments",
    "strategies.base",
    "strategies.occupation",
    "strategies.dulbe",
    "strategies.frozen",
    "strategies.lora",
    "strategies.lora_sub",
    "strategies.loda",
    "strategies.sd_lora",
    "strategies.blocks",
    "strategies.cl_lora",
    "strategies.mg_clip",
    "strategies.rapf",
    "strategies.bofa",
    "strategies.o_lora",
    "strategies.subspaces",
    "strategies.inflora",
    "strategies.keeplora",
    "strategies",
    "state",
    "backbone",
    "streams.digits",
    "streams.folders",
    "streams.npz",
    "streams.hub_data",
    "streams.readers",
    "streams.inventory",
    "streams.splits",
    "streams.gallery",
    "streams.fingerprint",
    "images",
    "streams.metrics",
    "profiling",
    "encoder",
    "evaluation",
    "retention",
    "recording",
    "diagnostics",
    "feature_drift",
    "prediction",
    "training",
    "updating",
    "card",
    "openclip",
    "cost",
    "base_models",
    "learner_file",
    "saving",
    "progress",
    "resuming",
    "results",
    "report.collect",
    "report.figures",
    "report.change_figures",
    "report.changes",
    "report.tables",
    "report.page",
    "report",
    "views",
    "deployment.merged",
    "deployment.pixels",
    "deployment.classifier",
    "deployment.graph",
    "deployment.cards",
    "deployment.export",
    "run",
    "model_checks",
    "learner",
    "inspection",
    "demo",
    "commands.parser",
    "commands.settings",
    "commands.outputs",
    "commands.loading",
    "commands.data",
    "commands.dry_run",
    "commands.sources",
    "commands.demo",
    "commands.run",
    "comparison.plan",
    "comparison.cells",
    "comparison.statistics",
    "comparison.engine",
    "comparison.table",
    "comparison.figures",
    "comparison.page",
    "comparison.compare",
    "comparison.advice",
    "comparison",
    "commands.learn",
    "commands.forget",
    "commands.predict",
    "commands.evaluate",
    "commands.features",
    "commands.report",
    "commands.export",
    "commands.compare",
    "commands.advise",
    "commands.convert_openclip",
    "commands.cost",
    "commands.env",
    "cli",
]
ONLY = {
    "distributed": {"torch"},
    "decompositions": {"torch", "scipy"},
    "functional": {"torch"},
    "allocation": {"torch"},
    "adapter.linear": {"torch"},
    "files": {"torch", "safetensors"},
    "hub": {"huggingface_hub"},
    "card": {"huggingface_hub"},
    "statistics": {"torch"},
    "collecting": {"torch"},
    "adapter.gradients": {"torch"},
    "specs": set(),
    "classifiers.checks": {"torch"},
    "classifiers.calibration": {"torch"},
    "classifiers.state": {"torch"},
    "classifiers.files": {"torch"},
    "classifiers.formula": {"torch"},
    "classifiers.base": {"torch"},
    "classifiers.text": {"torch"},
    "classifiers.bridge": {"torch"},
    "classifiers.prototype": {"torch"},
    "classifiers.lda": {"torch"},
    "classifiers.ridge": {"torch"},
    "classifiers.ranpac": {"torch", "numpy"},
    "classifiers.drift": {"torch"},
    "classifiers.fitting": {"torch"},
    "classifiers.visual_agent": {"torch"},
    "classifiers.rapf": {"torch"},
    "classifiers.bofa": {"torch"},
    "classifiers": set(),
    "streams.listing": set(),
    "streams.tasks": {"numpy"},
    "streams.protocols": {"numpy"},
    "streams.decoding": {"numpy", "PIL"},
    "streams.rows": set(),
    "streams.folders": {"numpy"},
    "streams.npz": {"numpy"},
    "streams.hub_data": set(),
    "streams.readers": set(),
    "streams.inventory": {"numpy"},
    "streams.splits": {"numpy"},
    "streams.metrics": {"numpy"},
    "arguments": set(),
    "checks": set(),
    "undoing": set(),
    "checkpoint": {"filelock"},
    "encoders": set(),
}


def imports(module):
    path = ROOT / "dulbe_peft" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if name.removeprefix("dulbe_peft.") in ORDER else node.module


def test_every_module_has_its_place():
    found = {
        ".".join(path.relative_to(ROOT / "dulbe_peft").with_suffix("").parts)
        for path in (ROOT / "dulbe_peft").rglob("*.py")
        if not path.stem.startswith("__")
    }
    wings = {path.parent.name for path in (ROOT / "dulbe_peft").glob("*/__init__.py") if path.stat().st_size}
    assert found | wings == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_down(module):
    for name in imports(module):
        package, _, inner = name.partition(".")
        if package == "dulbe_peft":
            assert ORDER.index(inner) < ORDER.index(module), f"{module} imports {inner}, which stands above it"
        elif module in ONLY and package not in sys.stdlib_module_names:
            assert package in ONLY[module], f"{module} imports {package}"


def test_one_version():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    version = setup["metadata"]["version"]
    assert dulbe_peft.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_everything_public_is_documented():
    for name in dulbe_peft.__all__:
        assert getattr(dulbe_peft, name).__doc__, name


def test_nothing_is_left_for_later():
    marks = re.compile("TO" + "DO|FIX" + "ME|XX" + "X")
    for folder in ("dulbe_peft", "tests", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md"):
                assert not marks.search(path.read_text(encoding="utf-8")), path


def test_the_site_has_every_page():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.md"):
        assert f": {path.relative_to(ROOT / 'docs').as_posix()}\n" in nav, path
