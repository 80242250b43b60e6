"""Classes by name: of this package, of other installed packages, and of a program."""

import pytest
from processes import run

from dulbe_peft.utils.specs import Registry

PLUGIN = """
from dataclasses import dataclass
from dulbe_peft.classifiers.prototype import PrototypeRule
from dulbe_peft.strategies.frozen import Frozen

@dataclass(frozen=True)
class CentroidRule(PrototypeRule):
    name = "centroid"

@dataclass(frozen=True)
class Still(Frozen):
    name = "still"
    classifiers = ("centroid", "lda")
"""
ENTRY_POINTS = """
[dulbe_peft.classifiers]
centroid = tiny_plugin:CentroidRule
lda = tiny_plugin:CentroidRule
gone = tiny_plugin:GoneRule
nowhere = tiny_plug:GoneRule
[dulbe_peft.strategies]
still = tiny_plugin:Still
"""
USE = """
import sys, warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    from dulbe_peft.classifiers import CLASSIFIERS, make_classifier
    from dulbe_peft.strategies import STRATEGIES, make_strategy
    assert "centroid" in CLASSIFIERS and "tiny_plugin" not in sys.modules
    assert make_classifier("centroid", 8).name == "centroid"
    assert make_strategy("still").classifiers == ("centroid", "lda") and {"still", "bofa"} < set(STRATEGIES)
    assert make_classifier("lda", 8).__class__.__module__ == "dulbe_peft.classifiers.lda"
    for name in ("gone", "nowhere"):
        try:
            make_classifier(name, 8)
        except ValueError as error:
            print(error)
    listed, before = "bofa" in CLASSIFIERS, "dulbe_peft.papers.bofa" in sys.modules
    after = CLASSIFIERS["bofa"] is not None and "dulbe_peft.papers.bofa" in sys.modules
    print(f"bofa is listed {listed}, imported before its lookup {before} and after it {after}")
print([str(warning.message) for warning in warned if "tiny" in str(warning.message)])
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a new process prints that runs `USE` beside an installed package with entry points."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "tiny_plugin.py").write_text(PLUGIN)
    info = folder / "tiny_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    done = run("-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{USE}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_entry_points_of_an_installed_package_are_registered(printed):
    assert "the classifier 'lda' of the package tiny-plugin is ignored, because the name is taken" in printed


@pytest.mark.slow
def test_entry_point_that_leads_nowhere_is_named(printed):
    for name, place in (("gone", "tiny_plugin"), ("nowhere", "tiny_plug")):
        start = f"the classifier '{name}' of the package tiny-plugin cannot be imported from '{place}:GoneRule': "
        assert start in printed


@pytest.mark.slow
def test_registered_class_is_imported_on_first_lookup(printed):
    assert "bofa is listed True, imported before its lookup False and after it True" in printed


def test_registering_a_second_class_under_a_name_is_refused():
    registry = Registry("animal", "nobody.uses", {"fraction": "fractions:Fraction"})
    first, second = (type("Dog", (), {"name": "dog", "__module__": module}) for module in ("a", "b"))
    registry.register(first)
    registry.register(first)
    assert registry["dog"] is first and list(registry) == ["fraction", "dog"] and len(registry) == 2
    with pytest.raises(ValueError, match="the animal 'dog' is already a:Dog: choose another name for b:Dog"):
        registry.register(second)
    with pytest.raises(ValueError, match="points to <class 'fractions.Fraction'>, whose name is None"):
        registry["fraction"]
    with pytest.raises(KeyError):
        registry["cat"]
