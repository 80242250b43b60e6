"""How an adapter describes itself: its card, its trainable parameters and the base model it belongs to."""

import copy
import re
import subprocess
import sys

import pytest
import torch
import transformers
from adapted_clip import CONFIG, forget_digest, learned
from copies import copies
from hub_stub import on_this_process
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from processes import run
from transformers import CLIPModel, CLIPVisionModelWithProjection, ResNetConfig, ResNetModel

from dulbe_peft import (
    DualModeLoraConfig,
    OccupationStatistics,
    collect_statistics,
    probe_gradients,
    route_gradients,
    routed_loss,
)
from dulbe_peft.adapter.peft_model import MARK, adapter_card
from dulbe_peft.encoders.registry import demo_model_folder

# PEFT asks the Hub for the base model by its name.
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file")


@pytest.fixture(scope="module")
def demo(base):
    """A function that returns the demo CLIP."""
    return copies(base[0])


@pytest.fixture(scope="module")
def many_adapted(demo):
    torch.manual_seed(1)
    clip = demo()
    clip.name_or_path = "someone/tiny-clip"
    return copies(learned(get_peft_model(clip, DualModeLoraConfig(**CONFIG)), 3))


@pytest.fixture
def adapted(many_adapted):
    """The demo CLIP under a Hub name, after two folded tasks and in the middle of a third."""
    return many_adapted()


def test_card_is_generated_until_somebody_edits_it(adapted, tmp_path):
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
LOOKED_FOR = IMPORT + ", importlib.util; importlib.util.find_spec('peft')"  # peft must not be imported yet
# For every method, PEFT reads an attribute that transformers has renamed.
STRICT = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
"""
MORE = """
from dulbe_peft.encoders.registry import demo_model_folder
from peft import get_peft_model
model.add_adapter("u", dulbe_peft.DualModeLoraConfig())
clip, _ = dulbe_peft.load_clip(demo_model_folder())
get_peft_model(clip, dulbe_peft.DualModeLoraConfig(), adapter_name="b")
print("rank", model.history_rank)
"""


@pytest.mark.rare
def test_code_on_the_card_runs_without_warnings_and_needs_the_import(demo, tmp_path):
    model = learned(get_peft_model(demo(), DualModeLoraConfig(**CONFIG)))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    header, _, body = text.removeprefix("---").partition("---")
    assert f"base_model: {demo_model_folder()}" in header, "as in PEFT's cards"
    assert str(demo_model_folder()) not in body
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    for placeholder, folder in (("path/to/the/base/model", demo_model_folder()), ("path/to/this/folder", tmp_path)):
        code = code.replace(placeholder, str(folder))
    whole = STRICT + code.replace(IMPORT, LOOKED_FOR) + MORE
    for lines, expected in ((whole, "rank 3"), (code.replace(IMPORT, "#"), "KeyError: 'DULBE'")):
        done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
        assert expected in (done.stdout or done.stderr), done.stderr[-2000:]


def test_published_card_names_its_repository(adapted, demo, tmp_path, monkeypatch):
    with on_this_process(monkeypatch, tmp_path) as hub:
        adapted.push_to_hub("adapter", private=True)
        text = hub.files("someone/adapter")["README.md"].decode()
        assert "base_model: someone/tiny-clip" in text
        assert "PeftModel.from_pretrained(model, 'someone/adapter')" in text and MARK in text
        downloaded = PeftModel.from_pretrained(demo(), "someone/adapter")
        adapted.push_to_hub("adapter", tags=["birds"], commit_description="three birds", max_shard_size="1GB")
        assert "- dulbe\n" in (text := hub.files("someone/adapter")["README.md"].decode()) and "- birds\n" in text
    assert downloaded.history_rank == adapted.history_rank


def test_repository_with_pickled_tensors_alone_is_loaded(adapted, demo, tmp_path, monkeypatch):
    adapted.save_pretrained(tmp_path / "folder", safe_serialization=False)
    assert not list((tmp_path / "folder").glob("*.safetensors"))
    with on_this_process(monkeypatch, tmp_path):
        HfApi().create_repo("someone/pickled")
        HfApi().upload_folder(repo_id="someone/pickled", folder_path=tmp_path / "folder")
        loaded = PeftModel.from_pretrained(demo(), "someone/pickled")
    assert loaded.history_rank == adapted.history_rank


def test_card_lists_every_adapter_and_no_task_count_for_dense_history(demo, tmp_path):
    model = get_peft_model(demo(), DualModeLoraConfig(**CONFIG | {"residual_rank": 40}, text_rank=0))
    learned(model, 3).fold_task()
    model.add_adapter("birds", DualModeLoraConfig(**CONFIG))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "subfolder='birds', adapter_name='birds'" in text and "**birds**" in text
    assert "| tasks learned | not known: the history is one matrix for each layer |" in text
    assert "| text tower | as it was |" in text


def test_trainable_parameters_are_printed_by_tower_for_this_method_only(adapted, demo, tmp_path, capsys):
    adapted.print_trainable_parameters()
    first, second = capsys.readouterr().out.splitlines()
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", second)]
    assert second.startswith("vision tower: ") and "|| text tower's LoRA: " in second
    assert f"trainable params: {sum(numbers):,d} " in first and all(numbers)
    other = get_peft_model(demo(), LoraConfig(target_modules=["fc1"], r=2))
    other.print_trainable_parameters()
    assert len(capsys.readouterr().out.splitlines()) == 1
    other.save_pretrained(tmp_path)
    assert "Model ID" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_error_for_unfit_model_names_models_that_fit(adapted, tiny_clip, tmp_path):
    small = ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    message = "a ResNetModel are not known.*CLIPModel, SiglipModel.*DualModeLoraConfig\\(target_modules="
    with pytest.raises(ValueError, match=message):
        get_peft_model(ResNetModel(small), DualModeLoraConfig())
    adapted.save_pretrained(tmp_path)
    message = "the adapter does not fit this model: it was made on 'someone/tiny-clip'.*and this model is a CLIPModel"
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny_clip(), tmp_path)


def test_published_card_names_no_local_folder(demo):
    model = get_peft_model(demo(), DualModeLoraConfig(**CONFIG))
    assert ModelCard(adapter_card(model, "someone/adapter")).data.base_model is None
    assert ModelCard(adapter_card(model)).data.base_model == str(demo_model_folder())


@pytest.mark.slow
def test_import_hides_no_warning_of_other_methods():
    """Import the package in a separate process, because the effects on other packages cannot be undone."""
    code = """
import warnings
from peft import PeftModel
before = len(warnings.filters)
import dulbe_peft.adapter
added = [entry for entry in warnings.filters[: len(warnings.filters) - before]]
messages = [entry[1] for entry in added if entry[1] is not None]
assert all("dulbe_" in message.pattern for message in messages if "dapter" in message.pattern), messages
assert not any("gradient_checkpointing" in message.pattern for message in messages), messages
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def tower(kind, **fields):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **fields}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(kind.config_class(**sizes)).eval()


@pytest.mark.parametrize("names", [("CLIPVisionModel", "CLIPTextModel"), ("SiglipVisionModel", "SiglipTextModel")])
def test_adapter_of_one_tower_does_not_load_into_the_other(names, tmp_path):
    vision, text = (getattr(transformers, name) for name in names)
    small, targets = {"image_size": 16, "patch_size": 8}, {"target_modules": ["fc1", "fc2", "k_proj", "v_proj"]}
    model = learned(get_peft_model(tower(vision, **small), DualModeLoraConfig(**CONFIG, **targets)))
    model.save_pretrained(tmp_path / "vision")
    with pytest.raises(ValueError, match=f"for a vision tower, but it was made on .*this model is a {names[1]}"):
        PeftModel.from_pretrained(tower(text), tmp_path / "vision")
    with pytest.raises(ValueError, match="for a vision tower"):
        tower(text).load_adapter(str(tmp_path / "vision"))
    other = learned(get_peft_model(tower(text), DualModeLoraConfig(**CONFIG, **targets, text_rank=0)))
    other.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="for a text tower"):
        PeftModel.from_pretrained(tower(vision, **small), tmp_path / "text")
    again = PeftModel.from_pretrained(tower(text), tmp_path / "text")
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(input_ids=ids).last_hidden_state, other(input_ids=ids).last_hidden_state)


def test_base_model_with_other_weights_of_same_shapes_warns(tiny_clip, tmp_path):
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)))
    model.merge_adapter()  # makes no difference, because the digest uses the pristine weights
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        PeftModel.from_pretrained(tiny_clip().to(dtype), tmp_path)
    PeftModel.from_pretrained(PeftModel.from_pretrained(tiny_clip(), tmp_path).unload(), tmp_path)
    for load in (lambda model: PeftModel.from_pretrained(model, tmp_path), lambda m: m.load_adapter(str(tmp_path))):
        other = tiny_clip()
        other.vision_model.encoder.layers[1].mlp.fc2.weight.data[0, 0] += 0.5
        with pytest.warns(UserWarning, match="other weights in the vision tower: it was made on .*will be wrong"):
            load(other)
    other = tiny_clip()
    other.text_model.encoder.layers[0].mlp.fc1.weight.data.mul_(2)
    with pytest.warns(UserWarning, match="other weights in the text tower"):
        PeftModel.from_pretrained(other, tmp_path)
    other = tiny_clip()
    other.vision_model.embeddings.patch_embedding.weight.data.mul_(2)
    with pytest.warns(UserWarning, match="other weights in the vision tower"):
        PeftModel.from_pretrained(other, tmp_path)


@pytest.mark.parametrize(
    ("tower", "setting", "value"),
    [("vision", "hidden_act", "gelu"), ("vision", "num_attention_heads", 4), ("text", "layer_norm_eps", 1e-3)],
)
def test_base_model_with_same_weights_that_computes_otherwise_warns(tiny_clip, tmp_path, tower, setting, value):
    """No weight tells which activation function a tower has, or how many attention heads share its weights."""

    def other(kind):
        config = copy.deepcopy(tiny_clip().config)
        setattr(getattr(config, f"{tower}_config"), setting, value)
        model = kind(config if kind is CLIPModel else config.vision_config)
        model.load_state_dict(tiny_clip().state_dict(), strict=kind is CLIPModel)
        return model.eval()

    learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG))).save_pretrained(tmp_path)
    before = getattr(getattr(tiny_clip().config, f"{tower}_config"), setting)
    words = f"made on a base model with {tower} {setting}={before}, and this one has {tower} {setting}={value}: "
    with pytest.warns(UserWarning, match=words):
        PeftModel.from_pretrained(other(CLIPModel), tmp_path)
    PeftModel.from_pretrained(tiny_clip(), tmp_path)
    if tower == "vision":
        with pytest.warns(UserWarning, match=words):
            PeftModel.from_pretrained(other(CLIPVisionModelWithProjection), tmp_path)
    forget_digest(tmp_path)
    PeftModel.from_pretrained(other(CLIPModel), tmp_path)  # a file that does not tell is not compared


@pytest.mark.parametrize("name", ["r", "lora_alpha", "lora_dropout", "bias"])
def test_settings_of_lora_are_refused(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        DualModeLoraConfig(**{name: 1})


def test_injected_adapters_and_plain_models_are_refused_for_training(tiny_clip):
    native, injected, plain = tiny_clip(), tiny_clip(), tiny_clip()
    native.add_adapter(DualModeLoraConfig(**CONFIG))
    inject_adapter_in_model(DualModeLoraConfig(**CONFIG), injected)
    loss = torch.ones((), requires_grad=True)
    calls = (
        lambda model: probe_gradients(model, [0], None),
        lambda model: route_gradients(model, loss, None),
        lambda model: routed_loss(model, loss, None),
    )
    for call in calls:
        for model in (native, injected):
            with pytest.raises(
                TypeError, match="adapter of this CLIPModel was injected by add_adapter.*get_peft_model"
            ):
                call(model)
        with pytest.raises(TypeError, match="must come from get_peft_model.*got CLIPModel"):
            call(plain)
    for model in (native, plain):
        with pytest.raises(TypeError, match="must come from get_peft_model or have dual_mode_layers"):
            collect_statistics(model, [0], None, OccupationStatistics())
