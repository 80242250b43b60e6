"""Weights and inputs lie at multiples of 64 bytes, so that a loaded model rounds as the saved one did."""

import shutil
import sys

import numpy as np
import pytest
import tiny_encoders as tiny
import torch
from processes import run
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel

from dulbe_peft import ClassIncrementalLearner, load_dual_encoder
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.utils.tensors import aligned, from_array, read_tensors


def addresses(model):
    return {tensor.data_ptr() % 64 for tensor in [*model.parameters(), *model.buffers()]}


def shifted(tensor, by):
    """Return a copy of a float32 tensor whose address is a multiple of 64 bytes plus `by`."""
    memory = np.empty(tensor.numel() + 32, np.float32)
    start = (-memory.ctypes.data % 64 + by) // 4
    copy = torch.from_numpy(memory[start : start + tensor.numel()]).view(tensor.shape).copy_(tensor)
    assert copy.data_ptr() % 64 == by
    return copy


def lengthen_header(file, by):
    """Write a file of tensors again, with a header that is longer by a number of bytes, a multiple of eight."""
    tensors = load_file(file)
    before = file.read_bytes()[:8]
    save_file(tensors, file, {"format": "pt", "note": "x" * by})
    assert file.read_bytes()[:8] != before or not by


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_encoder("clip", tmp_path_factory.mktemp("aligned") / "model")


def test_weights_are_aligned_and_features_equal_with_eight_lengths_of_the_header(folder, tmp_path):
    model = tiny.make_model("clip")
    model.set_attn_implementation("eager")  # as load_dual_encoder does on a CPU
    pixels = torch.rand(3, 3, tiny.IMAGE_SIZE, tiny.IMAGE_SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = unit_image_embeds(model, pixels)
    starts = set()
    for length in range(0, 64, 8):
        copy = shutil.copytree(folder, tmp_path / str(length))
        lengthen_header(copy / "model.safetensors", length)
        starts.add((8 + int.from_bytes((copy / "model.safetensors").read_bytes()[:8], "little")) % 64)
        loaded, _ = load_dual_encoder(copy)
        assert addresses(loaded) == {0}
        file = copy / "model.safetensors"
        with file.open("r+b") as opened:  # also a weight that lies at a multiple of 64 in the file is copied
            opened.write(bytes(file.stat().st_size))
        assert all(map(torch.equal, loaded.parameters(), model.parameters())), length
        with torch.no_grad():
            assert torch.equal(unit_image_embeds(loaded, pixels), expected), length
    assert starts == set(range(0, 64, 8))  # otherwise the test would not test what it says


def test_overwriting_the_file_of_a_loaded_model_changes_no_feature(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    model, _ = load_dual_encoder(copy)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = copy / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_learner_aligns_a_model_that_was_loaded_by_hand(tmp_path):
    clip, processor = tiny.make_model("clip"), tiny.make_processor("clip")
    values = {name: tensor.clone() for name, tensor in clip.state_dict().items()}
    for parameter in clip.parameters():
        parameter.data = shifted(parameter.data, 20)
    learner = ClassIncrementalLearner(clip, processor, strategy="frozen", classifiers="lda")
    assert addresses(learner.clip) == {0}
    assert all(torch.equal(tensor, values[name]) for name, tensor in learner.clip.state_dict().items())


def test_encoder_aligns_pixels_and_arrays():
    rows = torch.rand(3, 5)
    assert aligned(rows) is rows and aligned(shifted(rows, 4)).data_ptr() % 64 == 0
    assert aligned(rows[1:]).data_ptr() % 64 == 0 and torch.equal(aligned(rows[1:]), rows[1:])
    array = shifted(rows, 16).numpy()
    assert from_array(array).data_ptr() % 64 == 0 and np.array_equal(from_array(array), array)


def test_saved_tensors_are_read_at_aligned_addresses(tmp_path):
    file = tmp_path / "some.safetensors"
    tensors = {str(size): torch.rand(size) for size in (1, 3, 7, 100)}
    save_file(tensors, file, {"a": "b"})
    read, metadata = read_tensors(file)
    assert metadata == {"a": "b"} and {tensor.data_ptr() % 64 for tensor in read.values()} == {0}
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


MEASURE = """
import sys, torch
from transformers import CLIPModel
from dulbe_peft.encoders.loading import load_encoder
from dulbe_peft.encoders.registry import find_model

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
model = load_encoder(*find_model(sys.argv[1], None), None, None)
sum(float(parameter.sum()) for parameter in model.parameters())
print((peak() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_memory_for_one_copy_of_the_weights(tmp_path):
    tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 16, "hidden_size": 512}
    text = {**tower, "vocab_size": 100_000, "intermediate_size": 32}
    vision = {**tower, "image_size": 16, "patch_size": 8, "intermediate_size": 32}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 200e6
    needed = int(run("-c", MEASURE, tmp_path, check=True).stdout)
    assert 0.9 * size < needed < 2**26 + 1.2 * size  # 64 MiB for the modules that are imported meanwhile
