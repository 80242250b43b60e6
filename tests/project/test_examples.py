"""Every file in `examples/` runs, each in a separate process and folder."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dulbe_peft.encoders.registry import demo_model_folder

pytestmark = pytest.mark.rare
EXAMPLES = Path(__file__).parents[2] / "examples"
HELPERS = {"demo_glyphs.py"}  # imported by pretrain_demo_clip.py, which tests/project/test_demo_model.py runs
# Other tests run these, too: tests/strategies/test_strategies.py and tests/classifiers/test_classifier_calls.py.
ELSEWHERE = {"pretrain_demo_clip.py", "own_strategy.py", "own_classifier.py"}


def run(name, *arguments, cwd):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


def test_adapt_clip_example_runs(tmp_path):
    output = run("adapt_clip.py", "--steps", 2, cwd=tmp_path)
    assert "the loaded adapter gives the same features: True" in output
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file()


def test_training_loop_example_resumes(tmp_path):
    two = run("training_loop.py", cwd=tmp_path)
    three = run("training_loop.py", "--resume", cwd=tmp_path)
    accuracies = [float(accuracy) for accuracy in re.findall(r"([\d.]+)%", two + three)]
    assert len(accuracies) == 6 and min(accuracies) > 80


def test_head_alone_example_runs(tmp_path):
    output = run("head_alone.py", cwd=tmp_path)
    assert float(output.split("accuracy: ")[1].split()[0]) > 0.9 and output.count("mean depth") == 6


def test_image_folders_example_runs_and_resumes(tmp_path, digit_folders):
    arguments = (digit_folders(4, 3, 3), "--model", demo_model_folder(), "--increment", 2, "--epochs", 1)
    output = run("image_folders.py", *arguments, cwd=tmp_path)
    assert "task 2/2: 4 classes" in output and "after the last task" in output
    resumed = run("image_folders.py", *arguments, cwd=tmp_path)
    assert "resuming after task-002" in resumed and resumed.splitlines()[-1] == output.splitlines()[-1]


def test_domains_example_runs_resumes_and_checks_its_protocol(tmp_path, digit_folders):
    for name in ("first", "second"):
        shutil.copytree(digit_folders(2, 3, 2), tmp_path / name)
    (tmp_path / "second" / "class_names.txt").write_text("zero\tround\none\tstraight\n")
    protocol = {
        "model": str(demo_model_folder()),
        "strategy": "dulbe",
        "learner": {"epochs": 1},
        "zero_shot_tolerance": 100,
        "domains": {"first": {"classes": 2, "train": 6, "test": 4, "zero_shot": 50}, "second": {"classes": 2}},
    }
    (tmp_path / "two.yaml").write_text(json.dumps(protocol))
    arguments = ("two.yaml", "--data", ".", "--output", "out")
    output = run("domains.py", *arguments, cwd=tmp_path)
    assert "second: " in output and "task 2/2: 4 classes" in output
    measures = json.loads((tmp_path / "out" / "domains.json").read_text())
    (_, before), last = measures["matrix"]
    assert measures["transfer"] == before and measures["last"] == sum(last) / 2  # by definition, for two data sets
    # The accuracy among the two classes of a data set is at least the accuracy among all four classes.
    results = json.loads((tmp_path / "out" / "results.json").read_text())["head"]["matrix"]
    assert all(among_two >= among_four for among_two, among_four in zip(last, results[-1], strict=True))
    assert run("domains.py", *arguments, cwd=tmp_path).splitlines()[-1] == output.splitlines()[-1]

    protocol["domains"]["first"]["train"] = 7
    (tmp_path / "two.yaml").write_text(json.dumps(protocol))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run("domains.py", *arguments, cwd=tmp_path)
    assert "first: train is 6, the protocol has 7" in failed.value.stderr


def test_examples_of_predictions_and_of_estimators_run(tmp_path):
    predictions = run("predicting.py", cwd=tmp_path)
    assert predictions.startswith("two\n") and "'probability'" in predictions
    first, *_, best = run("estimators.py", cwd=tmp_path).splitlines()
    assert float(first) > 0.9 and "'classifier'" in best


def test_parts_example_measures_a_system_and_adds_it_to_the_file(tmp_path):
    stored = json.loads((EXAMPLES.parent / "research/benchmarks/results/parts.json").read_text())["accuracies"]
    (tmp_path / "parts.json").write_text(json.dumps({"accuracies": {"LoRA": stored["LoRA"]}}))
    output = run("parts.py", "--systems", "nothing trained", "--output", "parts.json", cwd=tmp_path)
    accuracies = json.loads((tmp_path / "parts.json").read_text())["accuracies"]
    untrained = accuracies["nothing trained"]
    assert f"all {untrained['all'][0]:.1f}" in output and accuracies["LoRA"] == stored["LoRA"]
    assert untrained["all"][0] == pytest.approx(stored["nothing trained"]["all"][0], abs=0.5)  # one image is 0.2


def test_names_of_the_parts_example_lose_without_either_mode(tmp_path):
    shown = ["DuLBE", "without the shared mode", "without the residual modes"]
    run("parts.py", "--systems", *shown, "--output", "parts.json", cwd=tmp_path)
    whole, *others = (
        json.loads((tmp_path / "parts.json").read_text())["accuracies"][name]["all"][0] for name in shown
    )
    assert max(others) < whole


def test_every_example_is_run_by_a_test():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    here = Path(__file__).read_text(encoding="utf-8")
    missing = [name for name in scripts - HELPERS - ELSEWHERE if f'run("{name}"' not in here]
    assert not missing
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(name in listed for name in (scripts - HELPERS) | {path.name for path in EXAMPLES.glob("*.ipynb")})
