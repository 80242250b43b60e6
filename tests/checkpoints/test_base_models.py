"""Test that the base model of a saved learner is found, and that other base models are refused."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from lives import images_of, randomness
from small_runs import learner_of

from dulbe_peft import CheckpointError, ClassIncrementalLearner, Task, load_clip, run_stream
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.deployment.formats import export_learner
from dulbe_peft.utils.folders import MANIFEST, commit_folder

IMAGES = images_of(0, 1, 0, 1)


class Noisy(list):
    """A list of images that adds noise from all three random generators to each image it returns."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + np.random.rand() + random.random() + torch.rand(1), label


def learner_with(base, strategy, **settings):
    return learner_of(base, strategy, adapter={"target_modules": ["fc1"]}, batch_size=2, **settings)


def save_learner(base, strategy="frozen"):
    """Return a learner of the classes a and b, which is saved in the folder `out`."""
    learner = learner_with(base, strategy)
    learner.learn_task(IMAGES, ["a", "b"])
    learner.save_pretrained("out")
    return learner


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a working directory with the demo model in `models/clip`; returns its parent."""
    shutil.copytree(demo_model_folder(), tmp_path / "work" / "models" / "clip")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_relative_model_folder_is_found_from_another_directory(here, monkeypatch):
    learner = save_learner(load_clip("models/clip"))
    expected = learner.image_embeds(IMAGES)
    monkeypatch.chdir(here)
    loaded = ClassIncrementalLearner.from_pretrained("work/out", machine={"device": "cpu"})
    assert torch.equal(loaded.image_embeds(IMAGES), expected)
    shutil.move(here / "work" / "models", here / "moved")
    with pytest.raises(FileNotFoundError, match=r"was in the folder '.*work/models/clip', which does not exist"):
        ClassIncrementalLearner.from_pretrained("work/out")
    shutil.move(here / "moved" / "clip", here / "work" / "clip")
    assert ClassIncrementalLearner.from_pretrained("work/out").class_names == ("a", "b"), "a model beside the learner"


def test_other_base_model_is_refused_with_the_expected_name(here):
    save_learner(load_clip("models/clip"), "dulbe")
    other = load_clip("models/clip")[0]
    with torch.no_grad():
        other.vision_model.encoder.layers[0].mlp.fc1.weight.mul_(1.01)
    before = {name: id(module) for name, module in other.named_modules()}
    with pytest.raises(CheckpointError, match="its weights are not those of 'models/clip'"):
        ClassIncrementalLearner.from_pretrained("out", base_model=other)
    assert {name: id(module) for name, module in other.named_modules()} == before
    with pytest.raises(CheckpointError, match="its dtype is 'bfloat16', but the learner needs 'float32'"):
        ClassIncrementalLearner.from_pretrained("out", base_model=load_clip("models/clip")[0].bfloat16())


@pytest.mark.parametrize("strategy", ["frozen", "dulbe"])
def test_base_model_with_another_activation_function_is_refused(here, strategy):
    save_learner(load_clip("models/clip"), strategy)
    file = Path("models/clip/config.json")
    config = json.loads(file.read_text())
    used = load_clip("models/clip")[0].config.vision_config.hidden_act
    config["vision_config"]["hidden_act"] = "relu"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"its vision hidden_act is 'relu', but the learner needs '{used}'"):
        ClassIncrementalLearner.from_pretrained("out")


def test_bfloat16_base_model_is_loaded_as_bfloat16(here):
    clip, processor = load_clip("models/clip")
    learner = save_learner((clip.bfloat16(), processor))
    loaded = ClassIncrementalLearner.from_pretrained("out", machine={"device": "cpu"})
    assert next(loaded.clip.parameters()).dtype == torch.bfloat16
    assert torch.equal(loaded.image_embeds(IMAGES), learner.image_embeds(IMAGES))


@pytest.mark.parametrize(("pattern", "kind"), [("*processor*", "image processor"), ("tokenizer.json", "tokenizer")])
def test_missing_processor_files_are_an_error(here, pattern, kind):
    save_learner(load_clip("models/clip"))

    def without(folder):
        shutil.copytree(here / "work" / "out", folder, dirs_exist_ok=True)
        (folder / MANIFEST).unlink()
        for path in (folder / "processor").glob(pattern):
            path.unlink()

    commit_folder(here / "less", "learner", without)
    with pytest.raises(CheckpointError, match=f"processor has no {kind}"):
        ClassIncrementalLearner.from_pretrained(here / "less")


class Grey(transformers.CLIPImageProcessorPil):
    """A user's own image processor."""

    def __call__(self, images, **options):
        return super().__call__(images.convert("L").convert("RGB"), **options)


class OwnTokenizer(transformers.CLIPTokenizer):
    """A user's own tokenizer."""


@pytest.mark.parametrize(("part", "kind"), [("image_processor", "Grey"), ("tokenizer", "OwnTokenizer")])
def test_learner_with_a_custom_processor_cannot_be_saved(here, part, kind):
    clip, processor = load_clip("models/clip")
    custom = Grey if part == "image_processor" else OwnTokenizer
    setattr(processor, part, custom.from_pretrained("models/clip"))
    with pytest.warns(UserWarning, match=f"{kind}, but a saved learner .* cannot be saved"):
        learner = learner_with((clip, processor), "frozen")
    with pytest.raises(ValueError, match=f"is a {kind}, but a saved learner is loaded with"):
        run_stream(learner, [Task(IMAGES, None, ["a", "b"])], "run")
    assert not Path("run").exists() and not learner.tasks, "a run must be refused before it learns"
    learner.learn_task(IMAGES, ["a", "b"])
    for write in (learner.save_pretrained, lambda folder: export_learner(learner, folder, "transformers")):
        with pytest.raises(ValueError, match=f"is a {kind}, but a saved learner is loaded with"):
            write("out")
        assert not Path("out").exists()


def test_model_folder_with_a_custom_image_processor_is_refused(here):
    file = here / "work" / "models" / "clip" / "preprocessor_config.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"image_processor_type": "Grey"}))
    with pytest.raises(ValueError, match="models/clip has the image processor 'Grey', but CLIP needs"):
        load_clip("models/clip")
    for older in ("CLIPFeatureExtractor", "CLIPImageProcessorFast"):
        file.write_text(json.dumps(plain | {"image_processor_type": older}))
        assert type(load_clip("models/clip")[1].image_processor) is transformers.CLIPImageProcessorPil


@pytest.mark.slow
def test_resumed_run_with_random_images_is_identical(here, monkeypatch):
    """The random numbers of Python, NumPy and torch in a task do not depend on what ran before in the process."""
    names = ["a", "b"], ["c", "d"]
    tasks = [Task(Noisy(images_of(0, 1, 0, 1, seed=index)), None, names[index]) for index in range(2)]

    def run(count, folder, seed):
        learner = learner_with(load_clip("models/clip"), "dulbe", teacher="online")
        torch.manual_seed(seed)
        before = randomness()
        run_stream(learner, tasks[:count], folder)
        assert randomness() == before

    run(2, "whole", seed=1)
    run(1, "parts", seed=2)
    run(2, "parts", seed=3)
    for name in ("adapter_model.safetensors", "head.safetensors", "statistics.safetensors"):
        assert Path("whole/task-002", name).read_bytes() == Path("parts/task-002", name).read_bytes(), name
