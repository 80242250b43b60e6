"""Test the files of the paper's protocols: their settings, class orders and class names."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from small_runs import parse

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers import parse_classifiers
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.encoders.loading import pixel_values
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.photos.runs.run_settings import RunSettings, given_settings
from dulbe_peft.photos.runs.setup import open_source, stream_tasks
from dulbe_peft.strategies import make_strategy
from dulbe_peft.streams.tasks import ICARL_CIFAR100_ORDER
from research.verification.checks import OWN_CHECKS, read_checks

FOLDER = Path(__file__).parents[2] / "examples" / "protocols"
FILES = sorted(path.stem for path in FOLDER.glob("[ab]-*.yaml"))
FROZEN = ["--strategy", "frozen", "--classifiers", "text", "--device", "cpu", "--no-progress"]


def test_mtil_file_matches_the_published_benchmark():
    protocol = yaml.safe_load((FOLDER / "mtil.yaml").read_text(encoding="utf-8"))
    domains = list(protocol["domains"].values())
    assert [len(domains), sum(domain["classes"] for domain in domains)] == [11, 1201]
    # According to the benchmark's paper, zero-shot CLIP has an average of 65.3 and, without the first data set, 69.4.
    zero_shot = [domain["zero_shot"] for domain in domains]
    assert [round(np.mean(zero_shot), 1), round(np.mean(zero_shot[1:]), 1)] == [65.3, 69.4]
    assert LearnerArguments(**protocol["learner"]).epochs == 2 and make_strategy(protocol["strategy"]).adapts
    assert DualModeLoraConfig(**protocol["adapter"]).residual_rank == 8


def settings_from(name, *flags):
    command = ["run", "--config", str(FOLDER / f"{name}.yaml"), *map(str, flags)]
    options = parse(command)
    return given_settings(options.pop("config"), options)


def tasks_of(settings):
    source, _, stream, *_ = RunSettings.of(settings)
    return stream_tasks(open_source(source), stream)


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    """Make 100 classes with two training images and one test image; sorted by name, they are in order of labels."""
    root = tmp_path_factory.mktemp("data") / "hundred"
    rng = np.random.default_rng(0)
    for label in range(100):
        for split, count in (("train", 2), ("test", 1)):
            (root / split / f"class_{label:02d}").mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / f"class_{label:02d}" / f"{number}.png")
    return root


@pytest.mark.parametrize("name", FILES)
def test_protocol_file_matches_the_checks_of_its_data(name):
    """Image counts and zero-shot accuracy are checked by the command `verify`."""
    settings = settings_from(name)
    _, model, stream, _, args = RunSettings.of(settings)
    checks = read_checks(OWN_CHECKS)
    (check,) = (check for check in checks.checks if check.name == f"paper-{name.replace('half-', '')}")
    assert (check.model, check.templates) == (model.model, (args.prompt_template,))
    assert (check.class_name_style, check.image_resize) == (args.class_name_style, args.image_resize)
    first, tasks = stream.initial_increment or stream.increment, 6 if "half" in name else 10
    assert first + (tasks - 1) * stream.increment == checks.data[check.data].classes
    assert make_strategy(model.strategy).name == "dulbe"
    assert [classifier.kind.name for classifier in parse_classifiers(model.classifiers).values()] == [
        "bridge",
        "pooled_bridge",
        "text",
    ]


def classes_of(tasks):
    return [int(name.removeprefix("class_")) for task in tasks for name in task.class_names]


@pytest.mark.parametrize("name", ["a-cifar100", "b-cars", "b-half-cars"])
def test_protocol_has_the_published_class_order(name, hundred):
    """One protocol with 100 classes is tested for each kind of order."""
    tasks = tasks_of(settings_from(name, "--data", hundred))
    expected = np.random.RandomState(1993).permutation(100)
    if name.startswith("a-cifar"):
        expected = np.array(ICARL_CIFAR100_ORDER)
    assert classes_of(tasks) == expected.tolist()
    assert [len(task.class_names) for task in tasks] == ([50] + [10] * 5 if "half" in name else [10] * 10)


def test_imagenet_100_orders_synsets_and_reads_names_from_a_file(hundred, tmp_path):
    names = [f"kind {99 - label}" for label in range(100)]  # their sorted order differs from that of the synsets
    lines = [f"class_{label:02d}\t{name}\n" for label, name in enumerate(names)]
    (tmp_path / "names.txt").write_text("".join(["absent\tan absent class\n", *reversed(lines)]), encoding="utf-8")
    flags = ("--data", hundred, "--class-names")
    tasks = tasks_of(settings_from("a-imagenet100", *flags, tmp_path / "names.txt"))
    order = np.random.RandomState(1993).permutation(100)
    assert [name for task in tasks for name in task.class_names] == [names[label] for label in order]
    assert tasks[0].train.item_name(0).endswith(f"class_{min(order[:10]):02d}/0.png")
    with pytest.raises(FileNotFoundError, match="imagenet100_class_names.txt', does not exist"):
        tasks_of(settings_from("a-imagenet100", *flags[:-1]))


def run_digits(folder, output, *more):
    command = ["run", "--model", str(demo_model_folder()), "--data", str(folder), "--output", str(output)]
    return main([*command, "--increment", "2", "--prompt-template", "a photo of the digit {}.", *FROZEN, *more])


def test_names_without_tabs_rename_classes_in_order(digit_folders, tmp_path):
    data, file = ImageFolder(digit_folders(3, 2, 1), "train"), tmp_path / "names.txt"
    file.write_text("b\na\nc\n", encoding="utf-8")
    renamed = data.renamed(file)
    assert data.class_names == tuple(sorted(DIGITS[:3])) and renamed.class_names == ("b", "a", "c")
    assert renamed.labels.tolist() == data.labels.tolist() and renamed[2]["label"] == data[2]["label"]
    for text, message in (
        ("a\nb\n", "2 names, but the data has 3 classes"),
        ("one\tb\n", "no line for the class"),
        ("a\na\nb\n", "must differ"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            data.renamed(file)


def test_numbered_folders_are_renamed_in_numeric_order(tmp_path, capsys):
    for number in (0, 1, 2, 10):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / "data" / str(number) / "a.png")
    (tmp_path / "names.txt").write_text("panda\npizza\nairplanes\nface\n")
    renamed = ImageFolder(tmp_path / "data").renamed(tmp_path / "names.txt")
    names = {Path(renamed.item_name(row)).parts[-2]: renamed.class_names[renamed.labels[row]] for row in range(4)}
    assert names == {"0": "panda", "1": "pizza", "2": "airplanes", "10": "face"}
    open_source(DataSource(tmp_path / "data"))
    assert "--class-names FILE gives the classes names" in capsys.readouterr().out
    open_source(DataSource(tmp_path / "data", class_names=str(tmp_path / "names.txt")))
    assert "names.txt: '0' is 'panda', '1' is 'pizza', '10' is 'face', ..." in capsys.readouterr().out


@pytest.mark.slow
def test_run_records_image_resize_and_class_names(digit_folders, tmp_path, capsys, monkeypatch):
    folder = digit_folders(4, 2, 1)
    monkeypatch.chdir(tmp_path)
    Path("names.txt").write_text("".join(f"{name}\tdigit {name}\n" for name in DIGITS), encoding="utf-8")
    wide = Image.linear_gradient("L").rotate(90).convert("RGB").resize((32, 16))
    expected = {"squash": wide.resize((16, 16), Image.Resampling.BICUBIC), "crop": wide.crop((8, 0, 24, 16))}
    more, pixels = {"squash": ["--class-names", "names.txt"], "crop": []}, {}
    for resize, image in expected.items():
        assert run_digits(folder, tmp_path / resize, "--image-resize", resize, *more[resize]) == 0
        processor = ClassIncrementalLearner.from_pretrained(tmp_path / resize / "task-002").processor
        pixels[resize] = pixel_values(processor, wide)
        assert torch.allclose(pixels[resize], pixel_values(processor, image), atol=1e-6)
    assert not torch.allclose(pixels["squash"], pixels["crop"], atol=0.1)
    assert run_digits(folder, tmp_path / "crop", "--image-resize", "squash") == 2
    assert "image_resize was 'crop' and is now 'squash'" in capsys.readouterr().err
    monkeypatch.chdir(folder)  # the run recorded the full path of the file of names
    (source, _) = json.loads((tmp_path / "squash" / "sources.json").read_text(encoding="utf-8"))["tasks"]
    assert DataSource.of(source).open()[1].class_names == tuple(f"digit {name}" for name in sorted(DIGITS[:4]))
    command = ["evaluate", str(tmp_path / "squash" / "task-002"), "--data", str(folder)]
    assert main([*command, "--class-names", str(tmp_path / "names.txt")]) == 0
    assert '"num_classes": 4' in capsys.readouterr().out
    assert main(command) == 2
