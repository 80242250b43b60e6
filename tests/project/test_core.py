"""The core of the package: it needs no package of the extra `photos`, and importing it costs no more than PEFT."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import setup_cfg, text_of
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from processes import run

from dulbe_peft.utils.extras import PHOTOS, TESTED, installed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dulbe_peft"
# Modules that may import such a package at the top. All other modules import it inside a function that needs it.
AT_THE_TOP = ("photos/commands/", "sklearn.py")


def test_packages_of_the_photos_extra_are_imported_inside_functions():
    for path in PACKAGE.rglob("*.py"):
        exempt = path.relative_to(PACKAGE).as_posix().startswith(AT_THE_TOP)
        for node in [] if exempt else ast.parse(path.read_bytes()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & set(PHOTOS), f"{path}, line {node.lineno}"


def test_photos_extra_lists_the_packages_that_errors_name():
    setup = setup_cfg()

    def packages(text):
        return {re.split(r"[<>=]", line)[0] for line in text.split()}

    assert packages(setup["options.extras_require"]["photos"]) == set(PHOTOS.values())
    assert not packages(setup["options"]["install_requires"]) & set(PHOTOS.values())


def test_error_for_missing_package_names_the_extra():
    message = r'^a picture needs the package scikit-learn: pip install "\.\[photos\]" in a clone of dulbe_peft$'
    with pytest.raises(ImportError, match=message), installed("a picture"):
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn.base")
    with pytest.raises(ModuleNotFoundError, match="No module named 'other'"), installed("a picture"):
        raise ModuleNotFoundError("No module named 'other'", name="other")
    with (
        pytest.raises(ImportError, match=r'ONNX needs the package other: .*"\.\[onnx\]"'),
        installed("ONNX", "onnx"),
    ):
        raise ModuleNotFoundError("No module named 'other'", name="other")


def test_no_message_of_the_package_installs_it_from_an_index_where_others_could_register_its_name():
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md"), *PACKAGE.rglob("*.html")]:
        commands = re.findall(r"pip install[^\n`]*", path.read_text(encoding="utf-8"))
        assert not [command for command in commands if "dulbe_peft[" in command], path


def test_error_that_transformers_hides_is_explained():
    hidden = ModuleNotFoundError("Could not import module 'BloomPreTrainedModel'. Are this object's ...")
    for first, message in [
        (
            RuntimeError("operator torchvision::nms does not exist"),
            r"^torchvision.* does not fit torch 2.*: reinstall or",
        ),
        (RuntimeError("something else"), "^a picture cannot be imported: RuntimeError: something else$"),
        (
            ModuleNotFoundError("No module named 'sklearn'", name="sklearn"),
            "^a picture needs the package scikit-learn",
        ),
    ]:
        with pytest.raises(ImportError, match=message), installed("a picture"):
            try:
                raise ImportError("between") from first
            except ImportError as error:
                raise hidden from error


# Both processes import what does not read torchvision, which takes longest, once.
UNFIT = """
import os, runpy, sys
import scipy.stats, torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor

if os.fork() == 0:
    from dulbe_peft import DualModeLoraConfig
os.wait()
sys.argv[0] = ""
runpy.run_module("dulbe_peft", run_name="__main__")
"""


@pytest.mark.slow
def test_torchvision_that_does_not_fit_torch_is_named(tmp_path):
    facts = tmp_path / "torchvision-0.28.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    command = [sys.executable, "-c", UNFIT, "demo", "--output", str(tmp_path / "demo")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    *_, imported, commanded = done.stderr.splitlines()
    message = "torchvision 0.28.0 does not fit torch 2."
    assert done.returncode == 2 and imported.startswith(f"ImportError: {message}"), done.stderr
    assert commanded.startswith(f"dulbe-peft: {message}")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from dulbe_peft.photos.__main__ import start; start()"
    assert "torchvision: 0.28.0" in run("-c", code, tmp_path, "env", check=True).stdout.splitlines()


@pytest.mark.rare
@pytest.mark.parametrize(
    ("module", "take_out", "name", "public"),
    [
        ("peft.utils.other", "vars(module).pop", "get_pattern_key", "DualModeLoraConfig"),
        ("transformers", "module._class_to_module.pop", "Trainer", "DualModeTrainer"),
    ],
)
def test_error_for_unsupported_release_names_a_tested_one(module, take_out, name, public):
    code = f"import importlib\nmodule = importlib.import_module({module!r})\n{take_out}({name!r})"
    code += f"\nimport dulbe_peft\ndulbe_peft.{public}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    package = module.partition(".")[0]
    message = rf"\nImportError: dulbe_peft needs {module}\.{name}, which {package} [\d.]+ does not have: pip install '"
    match = re.search(f"{message}(.*)'\n$", done.stderr)
    assert match and match[1] == TESTED[package], done.stderr


def test_tested_versions_match_setup_and_constraints():
    allowed = setup_cfg()["options"]["install_requires"].split()
    pinned = text_of("constraints.txt").split()
    for package, versions in TESTED.items():
        assert versions.rpartition(",")[0] in allowed  # without the upper bound, because newer releases may work
        (version,) = (line.partition("==")[2] for line in pinned if line.startswith(f"{package}=="))
        assert Version(version) in SpecifierSet(versions.removeprefix(package))


WITHOUT_PACKAGE = """
import sys
sys.modules[sys.argv[1]] = None
from dulbe_peft.photos.__main__ import start
sys.argv[1] = "--help"
sys.exit(start())
"""


@pytest.mark.parametrize(("module", "package"), PHOTOS.items())
def test_command_line_without_a_package_prints_one_sentence_at_once(module, package):
    done = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE, module], capture_output=True, text=True)
    message = f'dulbe-peft needs the package {package}: pip install ".[photos]" in a clone of dulbe_peft\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.rare
def test_core_works_without_extras():
    """Run the script that `.ci/run` calls in an environment in which only the core is installed."""
    done = subprocess.run([sys.executable, str(ROOT / "tests/core_environment.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.rare
def test_import_beside_peft_loads_only_three_small_packages():
    code = """
import sys, peft
beside = {name.partition(".")[0] for name in sys.modules}
import dulbe_peft; dulbe_peft.DualModeLoraConfig
print(*{name.partition(".")[0] for name in sys.modules} - beside)
"""
    more = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert set(more) == {"dulbe_peft", "annotated_types", "lazy_loader", "wrapt"}
