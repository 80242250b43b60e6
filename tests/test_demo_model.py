"""The tiny CLIP in `dulbe_peft/assets/demo_clip` and the script that pretrained it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F
from transformers import AutoProcessor, CLIPModel

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "dulbe_peft" / "assets" / "demo_clip"
SCRIPT = ROOT / "examples" / "pretrain_demo_clip.py"
# Well below what the model card states, well above one in ten.
ZERO_SHOT_FLOOR = 0.8
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def model() -> CLIPModel:
    return CLIPModel.from_pretrained(FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(FOLDER, local_files_only=True)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_loads_as_float32_with_a_processor(model: CLIPModel, processor) -> None:
    assert folder_size(FOLDER) < 2_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    image = Image.new("RGB", (8, 8))
    inputs = processor(text=["a photo of the digit three"], images=[image], return_tensors="pt", padding=True)
    assert inputs["pixel_values"].shape == (1, 3, 16, 16)
    assert inputs["pixel_values"].unique().tolist() == [-1.0]
    with torch.no_grad():
        outputs = model(**inputs)
    assert outputs.image_embeds.shape == outputs.text_embeds.shape == (1, 64)


def test_text_is_pooled_at_the_first_end_token_and_unknown_words_fall_to_pieces(model: CLIPModel, processor) -> None:
    short, long = "a photo of the digit three", "a low resolution photo of a capital letter b."
    alone = processor.tokenizer([short], return_tensors="pt")
    padded = processor.tokenizer([short, long], return_tensors="pt", padding=True)
    assert padded["input_ids"].shape[1] > alone["input_ids"].shape[1]
    with torch.no_grad():
        expected = model.get_text_features(**alone).pooler_output[0]
        found = model.get_text_features(**padded).pooler_output[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    tokenizer = processor.tokenizer
    assert tokenizer.tokenize("digit three") == ["digit</w>", "three</w>"]
    assert tokenizer.unk_token_id not in tokenizer("xylophon Ärger 12", add_special_tokens=False)["input_ids"]


def test_zero_shot_on_handwritten_digits_is_far_above_chance(model: CLIPModel, processor) -> None:
    digits = load_digits()
    images = [Image.fromarray((image / 16 * 255).astype(np.uint8)).convert("RGB") for image in digits.images]
    captions = [f"a photo of the digit {word}" for word in WORDS]
    inputs = processor(text=captions, images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        predicted = model(**inputs).logits_per_image.argmax(dim=-1).numpy()
    assert (predicted == digits.target).mean() > ZERO_SHOT_FLOOR
    assert np.unique(predicted).size == 10


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return pytest.importorskip("pretrain_demo_clip"), pytest.importorskip("demo_glyphs")


@pytest.mark.slow
def test_script_writes_a_loadable_folder(
    examples, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, _ = examples
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
    assert "--steps 2 --seed 0" in card
    assert "cmr10" in card
    # These depend on the captions and constants alone, so the shipped ones are what the script writes.
    for name in ("tokenizer.json", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (FOLDER / name).read_bytes()


def test_contrastive_loss_is_clips_own_where_no_caption_repeats(examples) -> None:
    script, _ = examples
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(5, 8, generator=generator) for _ in range(2))
    scale, order = torch.tensor(1.5), torch.tensor([3, 0, 4, 1, 2])
    logits = scale.exp() * F.normalize(images) @ F.normalize(texts).T
    expected = (F.cross_entropy(logits, torch.arange(5)) + F.cross_entropy(logits.T, torch.arange(5))) / 2
    torch.testing.assert_close(script.contrastive_loss(images[order], texts, order, scale), expected)


def test_font_folders_are_checked(examples, tmp_path: Path) -> None:
    _, glyphs = examples
    with pytest.raises(FileNotFoundError, match="no such font folder"):
        glyphs.load_fonts([tmp_path / "absent"], "01")
    with pytest.raises(ValueError, match="found 0 usable font families"):
        glyphs.load_fonts([tmp_path], "01").split()
