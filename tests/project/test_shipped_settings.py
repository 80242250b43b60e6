"""Every settings file in `examples/`, and every strategy of docs/strategies.md, learns two small tasks."""

import json
import math
import re
from itertools import zip_longest
from pathlib import Path

import pytest

from dulbe_peft.photos.runs.run_settings import given_settings, validated
from dulbe_peft.photos.runs.setup import set_up
from dulbe_peft.strategies import STRATEGIES, make_strategy
from research.comparison.plan import read_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
VARIABLES = ("MODEL", "OTHER_MODEL", "DATA", "MODELS", "TWIN", "REFERENCES")
# What a tiny model and four classes cannot have. Everything else is as in the file.
SMALL = {"increment": 2, "epochs": 1, "batch_size": 4, "device": "cpu", "progress": False, "store": False}
DATA = ("class_names", "class_texts", "class_order", "order_seed", "initial_increment", "images_per_class")
DATA += ("test_images_per_class",)
LEARNED: set[str] = set()  # settings of the comparisons' runs that were made
# examples/domains.py reads it; tests/project/test_examples.py runs that.
OF_DOMAINS = EXAMPLES / "protocols" / "mtil.yaml"


@pytest.fixture(autouse=True)
def _variables(digit_folders, monkeypatch, tmp_path):
    """Each variable names a folder of images; `$DATA/printed` is one, too."""
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "printed").symlink_to(digit_folders(2, 2, 1))
    for name in VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / "all" if name == "DATA" else digit_folders(2, 2, 1)))


def files(*folders):
    return sorted(path for folder in folders for path in (EXAMPLES / folder).glob("*.yaml") if path != OF_DOMAINS)


def small(settings, **places):
    """Return settings for two tasks of two classes, with a model of two blocks whose tokens have 32 numbers."""
    changed = {name: value for name, value in settings.items() if name not in DATA} | SMALL | places
    for name in ("residual_rank", "shared_rank"):
        if changed.get(name, 0) > 8:
            changed[name] = 8
    if "classifiers" in changed:
        changed["classifiers"] = re.sub(r"features=\d{4,}", "features=100", changed["classifiers"])
    if len(changed.get("prompt_template", "")) > 20:  # the text tower reads at most 24 tokens, here letters
        changed["prompt_template"] = "a {}."
    if "layers_to_transform" in changed:
        changed["layers_to_transform"] = [1]
    if changed["strategy"].startswith("dualprompt"):  # its prompts are in five blocks
        changed["strategy"] = re.sub(r"general_blocks=\d+|$", "general_blocks=1", changed["strategy"], count=1)
        if "," not in changed["strategy"] and ":" not in changed["strategy"]:
            changed["strategy"] = changed["strategy"].replace("general", ":general", 1)
    return changed


def check_run(settings, folder, images, model):
    settings = small(settings, data=str(images), model=str(model), output=str(folder))
    setup = set_up(*validated(settings))
    setup.run()
    learner = setup.learner
    assert [len(task) for task in learner.tasks] == [2, 2]
    assert all(math.isfinite(value) for value in learner.record.loss)
    assert len(learner.predict(setup.tasks[1].test)) == 6 and len(learner.classifiers) >= 1


@pytest.mark.rare
@pytest.mark.parametrize("path", files("papers", "protocols"), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_file_of_a_run_learns_two_tasks(path, tmp_path, digit_folders, tiny_model):
    check_run(given_settings(str(path), {}), tmp_path / "out", digit_folders(4, 6, 3), tiny_model)


@pytest.mark.rare
@pytest.mark.parametrize("path", files("comparisons", "ablations"), ids=lambda path: path.stem)
def test_every_run_of_a_comparison_learns_two_tasks(path, tmp_path, digit_folders, tiny_model):
    """A run whose settings are the same on the small tasks is made once for all files."""
    plan, images = read_plan(path), digit_folders(4, 6, 3)
    runs = [(cell.settings, names) for cell, rows in plan.cells() for names in one_of_each(rows)]
    for number, (given, names) in enumerate(runs):
        settings = small(given | {"classifiers": ",".join(names)}, data="", model="", output="")
        for name in ("seed", "draw_seed", "learning_rate"):
            settings.pop(name, None)
        key = json.dumps(settings, sort_keys=True)
        if key not in LEARNED:
            check_run(settings, tmp_path / f"out {number}", images, tiny_model)
            LEARNED.add(key)


def one_of_each(rows):
    """Return the classifiers of rows in lists that have each kind of classifier at most once, as a learner does."""
    kinds = {}
    for spec in dict.fromkeys(row.classifier for row in rows):
        kinds.setdefault(spec.partition(":")[0], []).append(spec)
    return [[spec for spec in specs if spec] for specs in zip_longest(*kinds.values())]


def rows():
    """Return the settings of each strategy on the page, and of each of the paper's systems."""
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    specs = dict.fromkeys(re.findall(r"`(\w+(?::\w+=[\w.]+(?:,\w+=[\w.]+)*)?)`", text))
    return [spec for spec in specs if spec.partition(":")[0] in STRATEGIES]


def test_the_page_has_every_strategy_of_the_library():
    built_in = {name for name, cls in STRATEGIES.items() if cls.__module__.startswith("dulbe_peft.")}
    assert {spec.partition(":")[0] for spec in rows()} == built_in and "spu:share=1" in rows()


@pytest.mark.rare
@pytest.mark.parametrize("spec", rows())
def test_strategy_of_the_page_learns_two_tasks(spec, tmp_path, digit_folders, tiny_model):
    settings = {"strategy": spec}
    if spec == "spu:share=1":  # full fine-tuning
        settings["target_modules"] = "all-linear"
    if spec == "zscl":
        settings["strategy"] = "zscl:reference_images=$REFERENCES"
    settings["classifiers"] = ",".join(make_strategy(settings["strategy"]).classifiers)
    check_run(settings, tmp_path / "out", digit_folders(4, 6, 3), tiny_model)
