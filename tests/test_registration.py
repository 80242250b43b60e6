"""PEFT knows the method as soon as both packages are imported, in either order; each case is a process of its own."""

import copy
import subprocess
import sys

import pytest
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.encoders.loading import load_clip

LOAD = "PeftModel.from_pretrained(CLIPModel.from_pretrained(sys.argv[1]), sys.argv[2])"


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(copy.deepcopy(base[0]), DualModeLoraConfig(support_rank=8)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "code",
    [
        f"from peft import PeftModel; import dulbe_peft; from transformers import CLIPModel; {LOAD}",
        "import dulbe_peft, importlib.util; importlib.util.find_spec('peft'); "
        f"from transformers import CLIPModel; from peft import PeftModel; {LOAD}",
    ],
)
def test_a_saved_adapter_loads(code, adapter):
    command = [sys.executable, "-c", f"import sys; {code}", str(demo_model_folder()), str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed_and_found():
    import dulbe_peft

    assert set(dulbe_peft.__all__) <= set(dir(dulbe_peft)) and len(dulbe_peft.__all__) > 40
    assert all(getattr(dulbe_peft, name) is not None for name in dulbe_peft.__all__)
    assert dulbe_peft.load_clip is load_clip
    with pytest.raises(AttributeError, match="has no attribute 'laod_clip'"):
        dulbe_peft.laod_clip  # noqa: B018
