"""PEFT's own class stays as it is, and a model with this adapter is a `PeftModel` in every way that can be asked."""

import copy
import pickle

import pytest
import torch
from adapted_clip import CONFIG, learned, outputs
from peft import LoraConfig, PeftModel, PeftModelForCausalLM, get_peft_model, inject_adapter_in_model
from processes import run
from safetensors import safe_open
from torch import nn
from torch.nn.modules import module as torch_module

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.config import FORMAT
from dulbe_peft.adapter.peft_model import DualModePeftModel, extended


class OwnModel(PeftModel):
    """A user's own subclass of PEFT's class."""

    def save_pretrained(self, *args, **kwargs):
        self.saved = True
        super().save_pretrained(*args, **kwargs)


@pytest.fixture
def model(tiny_clip):
    torch.manual_seed(0)
    return learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)))


def same(one, other):
    return all(map(torch.equal, outputs(one), outputs(other)))


def metadata(folder):
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return file.metadata()


@pytest.mark.slow
def test_importing_the_package_changes_no_class_of_peft():
    code = """
import sys, peft
from peft import peft_model
from peft.tuners import tuners_utils
kinds = {k for m in (peft_model, tuners_utils) for k in vars(m).values() if isinstance(k, type)} - {peft.PeftType}
before = {kind: dict(vars(kind)) for kind in kinds}
mapping = dict(peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING)
import dulbe_peft.adapter
assert "dulbe_peft.adapter.peft_model" in sys.modules and len(kinds) > 5
assert before == {kind: dict(vars(kind)) for kind in kinds}, [k for k in kinds if before[k] != dict(vars(k))]
assert mapping == peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_other_methods_and_other_modules_are_left_alone(model, tiny_clip, tmp_path):
    lora = get_peft_model(tiny_clip(), LoraConfig(target_modules=["fc1"], r=2))
    assert type(lora) is PeftModel and isinstance(model, DualModePeftModel)
    lora.save_pretrained(tmp_path)
    assert metadata(tmp_path) == {"format": "pt"}
    assert "Model ID" in (tmp_path / "README.md").read_text(encoding="utf-8")
    # From the class of a model of ours, PEFT's class is made again, which may have any tuner.
    assert type(type(model).from_pretrained(tiny_clip(), tmp_path)) is PeftModel


def test_no_hook_is_left(tiny_clip):
    def hooks():
        return len(torch_module._global_module_registration_hooks)

    assert hooks() == 0
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG))
    inject_adapter_in_model(DualModeLoraConfig(**CONFIG), tiny_clip())
    assert hooks() == 0
    with pytest.raises(ValueError, match="not found in the base model"):
        get_peft_model(tiny_clip(), DualModeLoraConfig(target_modules=["nope"]))
    assert hooks() == 0
    tuner = type(model.base_model)(tiny_clip(), {"default": DualModeLoraConfig(**CONFIG)}, "default")
    outer = nn.Module()
    outer.part = tuner  # some other module takes it
    assert type(outer) is nn.Module and hooks() == 1
    del tuner, outer
    import gc

    gc.collect()
    assert hooks() == 0


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "copy", "torch.save", "from_pretrained"])
def test_every_kind_of_copy_is_such_a_model(model, tiny_clip, tmp_path, how):
    model.save_pretrained(tmp_path)
    if how == "torch.save":
        torch.save(model, tmp_path / "whole.pt")
    copied = {
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "deepcopy": lambda: copy.deepcopy(model),
        "copy": lambda: copy.copy(model),
        "torch.save": lambda: torch.load(tmp_path / "whole.pt", weights_only=False),
        "from_pretrained": lambda: PeftModel.from_pretrained(tiny_clip(), tmp_path),
    }[how]()
    assert type(copied) is type(model) is DualModePeftModel and isinstance(copied, PeftModel)
    assert same(copied, model) and copied.training == model.training
    copied.save_pretrained(tmp_path / "again")
    assert metadata(tmp_path / "again") == metadata(tmp_path) and FORMAT in metadata(tmp_path)


def test_subclasses_of_peft_model_keep_what_they_have(tiny_clip, tmp_path):
    model = learned(OwnModel(tiny_clip(), DualModeLoraConfig(**CONFIG)))
    assert isinstance(model, OwnModel) and isinstance(model, DualModePeftModel)
    model.save_pretrained(tmp_path)
    assert model.saved and FORMAT in metadata(tmp_path)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(copied) is type(model) and same(copied, model)
    loaded = OwnModel.from_pretrained(tiny_clip(), tmp_path)
    assert type(loaded) is type(model) and same(loaded, model)
    kind = extended(PeftModelForCausalLM)
    assert issubclass(kind, PeftModelForCausalLM) and kind.forward is PeftModelForCausalLM.forward
    assert kind.save_pretrained is DualModePeftModel.save_pretrained


def test_two_threads_make_models_of_their_own_classes(tiny_clip):
    from concurrent.futures import ThreadPoolExecutor

    def made(index):
        config = LoraConfig(target_modules=["fc1"], r=2) if index % 2 else DualModeLoraConfig(**CONFIG)
        return type(get_peft_model(bases[index], config))

    bases = [tiny_clip() for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(made, range(8))) == [DualModePeftModel, PeftModel] * 4
