"""What an adapter says of itself: its card, its parameters and whose it is."""

import copy
import re
import subprocess
import sys

import pytest
from adapted_clip import CONFIG, learned
from hub_stub import on_this_process
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import ResNetConfig, ResNetModel

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.peft_model import MARK
from dulbe_peft.encoders.registry import demo_model_folder

# PEFT asks the Hub for a base model of this name.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file")


@pytest.fixture
def adapted(base):
    """The demo's CLIP, as if from the Hub, after two folded tasks and with a third one under way."""
    clip = copy.deepcopy(base[0])
    clip.name_or_path = "someone/tiny-clip"
    return learned(get_peft_model(clip, DualModeLoraConfig(**CONFIG)), 3)


def test_the_card_is_of_the_adapter_until_somebody_writes_one(adapted, tmp_path):
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "README.md"
    card = ModelCard.load(file)
    assert (card.data.library_name, card.data.base_model) == ("peft", "someone/tiny-clip")
    assert {"dulbe", "clip"} <= set(card.data.tags)
    for words in (
        "| base model | `someone/tiny-clip`, a `CLIPModel` |",
        "| tasks learned | 2, and one that is not finished |",
        "| adapted layers | 16: fc1, fc2, k_proj, v_proj |",
        "| ranks | shared 1, residual 2, support 4 |",
        "| text tower | LoRA of rank 8 in 8 layers |",
        "KeyError: 'DULBE'",
    ):
        assert words in card.text
    file.write_text("# Birds of my garden\n", encoding="utf-8")
    adapted.fold_task()
    adapted.save_pretrained(tmp_path)
    assert "# Birds of my garden" in file.read_text(encoding="utf-8")
    file.write_text(f"{MARK}\nold\n", encoding="utf-8")
    adapted.save_pretrained(tmp_path)
    assert "| tasks learned | 3 |" in file.read_text(encoding="utf-8")


IMPORT = "import dulbe_peft"
LOOKED_FOR = IMPORT + ", importlib.util; importlib.util.find_spec('peft')"  # which is not imported yet
STRICT = "import warnings; warnings.simplefilter('error')\n"
MORE = """
from dulbe_peft.encoders.registry import demo_model_folder
from peft import get_peft_model
model.add_adapter("u", dulbe_peft.DualModeLoraConfig())
clip, _ = dulbe_peft.load_clip(demo_model_folder())
get_peft_model(clip, dulbe_peft.DualModeLoraConfig(), adapter_name="b")
print("rank", model.history_rank)
"""


@pytest.mark.slow
def test_the_card_s_lines_run_without_a_warning_and_need_the_import(base, tmp_path):
    model = learned(get_peft_model(copy.deepcopy(base[0]), DualModeLoraConfig(**CONFIG)))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert str(demo_model_folder()) not in text, "where it lies on this machine is nobody's business"
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    for placeholder, folder in (("path/to/the/base/model", demo_model_folder()), ("path/to/this/folder", tmp_path)):
        code = code.replace(placeholder, str(folder))
    whole = STRICT + code.replace(IMPORT, LOOKED_FOR) + MORE
    for lines, expected in ((whole, "rank 3"), (code.replace(IMPORT, "#"), "KeyError: 'DULBE'")):
        done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
        assert expected in (done.stdout or done.stderr), done.stderr[-2000:]


def test_a_published_card_names_its_repository(adapted, base, tmp_path, monkeypatch):
    with on_this_process(monkeypatch, tmp_path) as hub:
        adapted.push_to_hub("adapter", private=True)
        text = hub.files("someone/adapter")["README.md"].decode()
        assert "PeftModel.from_pretrained(model, 'someone/adapter')" in text and MARK in text
        found = PeftModel.from_pretrained(copy.deepcopy(base[0]), "someone/adapter")
        with pytest.raises(TypeError, match="max_shard"):
            adapted.push_to_hub("adapter", max_shard_size="1GB")
    assert found.history_rank == adapted.history_rank


def test_every_adapter_of_a_model_is_on_the_card_and_a_dense_history_counts_no_tasks(base, tmp_path):
    model = get_peft_model(copy.deepcopy(base[0]), DualModeLoraConfig(**CONFIG | {"residual_rank": 40}, text_rank=0))
    learned(model, 3).fold_task()
    model.add_adapter("birds", DualModeLoraConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "subfolder='birds', adapter_name='birds'" in text and "**birds**" in text
    assert "| tasks learned | not known: the history is one matrix a layer |" in text
    assert "| text tower | as it was |" in text


def test_parameters_are_told_by_tower_and_other_adapters_left_to_peft(adapted, base, tmp_path, capsys):
    adapted.print_trainable_parameters()
    first, second = capsys.readouterr().out.splitlines()
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", second)]
    assert second.startswith("vision tower: ") and "|| text tower's LoRA: " in second
    assert f"trainable params: {sum(numbers):,d} " in first and all(numbers)
    other = get_peft_model(copy.deepcopy(base[0]), LoraConfig(target_modules=["fc1"], r=2))
    other.print_trainable_parameters()
    assert len(capsys.readouterr().out.splitlines()) == 1
    other.save_pretrained(tmp_path)
    assert "Model ID" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_model_that_does_not_fit_is_told_what_would(adapted, tiny_clip, tmp_path):
    small = ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    message = "ResNetModel is no encoder.*CLIPModel, SiglipModel.*DualModeLoraConfig\\(target_modules="
    with pytest.raises(ValueError, match=message):
        get_peft_model(ResNetModel(small), DualModeLoraConfig())
    adapted.save_pretrained(tmp_path)
    message = "the adapter does not fit this model: it was made on 'someone/tiny-clip'.*and this model is a CLIPModel"
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_clip(), tmp_path)
