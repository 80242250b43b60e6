"""PEFT's common tests, run on this method. PEFT_CHECKOUT names a folder with PEFT's sources of the installed version.

PEFT's helpers load a model by its name. Here the name is a local folder, so that nothing is downloaded.
"""

import importlib
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import CLIPModel, CLIPVisionModel

from dulbe_peft import DualModeLoraConfig

CHECKOUT = os.environ.get("PEFT_CHECKOUT")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="PEFT_CHECKOUT is not set"),
    pytest.mark.filterwarnings("ignore"),  # PEFT's tests expect PEFT's own filters
]
KINDS = {"CLIPModel": CLIPModel, "CLIPVisionModel": CLIPVisionModel}
# The common tester's tests for every method, without those that generate or embed text.
TESTS = [
    "model_attr",
    "adapter_name",
    "load_model_low_cpu_mem_usage",
    "save_pretrained",
    "save_pretrained_selected_adapters",
    "save_pretrained_adapter_name_substring",
    "from_pretrained_config_construction",
    "load_multiple_adapters",
    "add_adapter_no_autocast_adapter_dtype",
    "merge_layers_fp16",
    "merge_layers_nan",
    "merge_layers",
    "merge_layers_multi",
    "merge_layers_is_idempotent",
    "safe_merge",
    "training",
    "training_gradient_checkpointing",
    "inference_safetensors",
    "training_layer_indexing",
    "delete_adapter",
    "delete_inactive_adapter",
    "delete_unknown_adapter_raises",
    "unload_adapter",
    "lora_conversion",
    "get_base_model_state_dict",
]
# Tests that would compare nothing if the update were zero.
WITH_UPDATE = {"merge_layers", "merge_layers_multi", "merge_layers_is_idempotent", "safe_merge", "unload_adapter"}


@pytest.fixture(scope="module")
def common():
    """PEFT's module with the common tests."""
    folder = Path(str(CHECKOUT)) / "tests"
    sys.path.insert(0, str(folder.parent))
    try:
        importlib.import_module("diffusers")
    except ImportError:  # only tests of generated images need it
        sys.modules["diffusers"] = types.SimpleNamespace(StableDiffusionPipeline=None)
    package = sys.modules["tests_of_peft"] = types.ModuleType("tests_of_peft")
    package.__path__ = [str(folder)]
    try:
        yield importlib.import_module("tests_of_peft.testing_common")
    finally:
        sys.path.remove(str(folder.parent))


@pytest.fixture(params=KINDS)
def tester(request, common, tiny_clip, tmp_path):
    """PEFT's tester for a class of models, and the folder of a tiny model of this class."""
    kind = KINDS[request.param]
    clip = tiny_clip()
    clip.logit_scale.data.zero_()  # makes the logits cosines, whose rounding errors are below the tests' 1e-6
    clip.save_pretrained(tmp_path / "clip")
    model = kind.from_pretrained(tmp_path / "clip")
    model.save_pretrained(tmp_path / "model")

    class Tester(common.PeftCommonTester):
        transformers_class = kind

        def prepare_inputs_for_testing(self):
            pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
            inputs = {"pixel_values": pixels.to(self.torch_device)}
            if kind is CLIPModel:
                inputs |= {"input_ids": torch.tensor([[97, 1, 2, 98], [97, 3, 98, 98]]).to(self.torch_device)}
            return inputs

    return Tester(), str(tmp_path / "model")


@pytest.mark.parametrize("test", TESTS)
def test_common_test_of_peft_passes(tester, test):
    case, folder = tester
    if test == "lora_conversion" and case.transformers_class is CLIPModel:
        pytest.skip("the test reads hidden states, which the output of a CLIPModel lacks")
    settings = {"residual_rank": 2, "support_rank": 4, "init_weights": test not in WITH_UPDATE}
    more = (torch.bfloat16,) if test == "add_adapter_no_autocast_adapter_dtype" else ()
    getattr(case, f"_test_{test}")(folder, DualModeLoraConfig, settings, *more)
