"""The script that `.ci/run` calls in an environment in which only the core is installed.

It runs the README's first snippet, and trains, saves, loads and merges a learner. It needs neither pytest nor image
files, and no package of an extra.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from transformers import TrainingArguments

import dulbe_peft
from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, DualModeTrainer, LearnerArguments, load_clip
from dulbe_peft.streams import digits
from dulbe_peft.utils.extras import PHOTOS, install_command

ABSENT = ("click", "joblib", "matplotlib", "sklearn")


def shades(*colours: tuple[int, int, int]) -> list[tuple[Image.Image, int]]:
    """Return four noisy images of each colour, with the colour's index as the label."""
    noise = np.random.default_rng(0)
    rows = [(colour, label) for label, colour in enumerate(colours) for _ in range(4)]
    pixels = [(np.clip(np.array(colour) + noise.normal(0, 9, (16, 16, 3)), 0, 255), label) for colour, label in rows]
    return [(Image.fromarray(values.astype(np.uint8)), label) for values, label in pixels]


def run_first_snippet_of_readme(folder: str) -> None:
    """Run the first block of Python in the README on few digits, and load and merge the adapter that it saved."""
    digits.load_digit_images = lambda split, load=digits.load_digit_images: load(split).at(slice(60))
    places = [Path(__file__).with_name("README.md"), Path(__file__).parents[1] / "README.md"]
    text = next(place for place in places if place.is_file()).read_text(encoding="utf-8")
    (code, *_) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    here = os.getcwd()
    os.chdir(folder)
    try:
        namespace: dict = {"__name__": "readme"}
        exec(compile(code, "README.md", "exec"), namespace)
        model = PeftModel.from_pretrained(load_clip("demo")[0], "digits")
        size = model.get_base_model().config.vision_config.image_size
        pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            unmerged = model.get_image_features(pixel_values=pixels).pooler_output
            merged = model.merge_and_unload().get_image_features(pixel_values=pixels).pooler_output
        torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-4)
    finally:
        os.chdir(here)


def main() -> None:
    torch.set_num_threads(1)  # a second thread only slows down a model this small
    present = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
    assert not present, f"the core installed {present}"
    clip, processor = load_clip("demo")
    model = get_peft_model(clip, DualModeLoraConfig(support_rank=16))
    model.print_trainable_parameters()
    args = LearnerArguments(epochs=1, device="cpu", progress=False)
    learner = ClassIncrementalLearner(model, processor, args=args, classifiers=["bridge", "lda", "bayes"])
    learner.learn_task(shades((200, 30, 30), (30, 200, 30)), ["red", "green"])
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(folder, num_train_epochs=1, use_cpu=True, report_to="none")
        trainer = DualModeTrainer(learner, training, shades((30, 30, 200)), class_names=["blue"])
        trainer.train()
        trainer.save_model(f"{folder}/learner")
        model.save_pretrained(f"{folder}/adapter")
        assert PeftModel.from_pretrained(load_clip("demo")[0], f"{folder}/adapter").history_rank == 18
        loaded = ClassIncrementalLearner.from_pretrained(f"{folder}/learner")
        pictures = [image for image, _ in shades((200, 30, 30), (30, 200, 30), (30, 30, 200))]
        assert loaded.predict(pictures) == learner.predict(pictures)
        print(loaded.predict(pictures))
        run_first_snippet_of_readme(folder)
    command = subprocess.run([sys.executable, "-m", "dulbe_peft", "--help"], capture_output=True, text=True)
    missing = [package for module, package in PHOTOS.items() if importlib.util.find_spec(module) is None]
    if missing:
        assert (command.returncode, command.stdout) == (2, "")
        message = f"dulbe-peft needs the package {missing[0]}: {install_command('photos')}\n"
        assert command.stderr == message, command.stderr
    print(f"dulbe_peft {dulbe_peft.__version__} in {Path(dulbe_peft.__file__).parent}")


if __name__ == "__main__":
    main()
