"""The tiny CLIP in `dulbe_peft/assets/demo_clip` and the script that pretrained it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from dulbe_peft.data.digits import DIGITS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dulbe_peft" / "assets" / "demo_clip"


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_zero_shot_accuracy_on_handwritten_digits_exceeds_80_percent(base) -> None:
    (model, processor), digits = base, load_digits()
    assert folder_size(FOLDER) < 2_000_000 and {p.dtype for p in model.parameters()} == {torch.float32}
    images = [Image.fromarray((image / 16 * 255).astype(np.uint8)).convert("RGB") for image in digits.images]
    captions = [f"a photo of the digit {word}" for word in DIGITS]
    inputs = processor(text=captions, images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        predicted = model(**inputs).logits_per_image.argmax(dim=-1).numpy()
    assert (predicted == digits.target).mean() > 0.8  # a little below the figure on the model card; chance is 0.1


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return pytest.importorskip("pretrain_demo_clip")


@pytest.mark.rare
def test_script_writes_a_loadable_folder(script, tmp_path, capsys, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    fonts = tmp_path / "fonts"
    fonts.mkdir()
    for name in ("DejaVuSans.ttf", "DejaVuSerif.ttf", "cmr10.ttf"):
        shutil.copy(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, fonts)
    out = tmp_path / "clip"
    script.main(["--steps", "2", "--batch-size", "32", "--fonts", str(fonts), "--out", str(out)])
    assert "handwritten digits: zero-shot" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {path.name for path in FOLDER.iterdir()}
    assert folder_size(out) < 2_000_000
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "--steps 2 --seed 0" in card and "cmr10" in card
    # These files depend only on captions and constants, so the script must write exactly the packaged ones.
    for name in ("tokenizer.json", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (FOLDER / name).read_bytes()
