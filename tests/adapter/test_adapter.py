"""The adapter's layer: its fused sum, rows of a batch with adapters of their own, and that PEFT knows it."""

import copy
import subprocess
import sys

import pytest
import torch
from adapted_clip import CONFIG, learned
from peft import get_peft_model
from torch.nn import functional as F

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.linear import updated_linear
from dulbe_peft.demo import demo_model_folder


def written_out(x, weight, bias, down, up):
    return F.linear(x, weight, bias) + x @ down @ up.T


def problem(shape, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(3)
    make = lambda *size: torch.randn(*size, generator=generator, dtype=dtype)  # noqa: E731
    x, weight, down, up = make(*shape, 12), make(20, 12), make(12, 3), make(20, 3)
    return [x.requires_grad_(), weight, make(20) if bias else None, down, up.requires_grad_()]


def gradients(function, arguments, cotangent):
    x, _, _, _, up = arguments
    result = function(*arguments)
    return [result.detach(), *torch.autograd.grad(result, [x, up], cotangent)]


def fused(x, weight, bias, down, up):
    return updated_linear(x, weight, bias, [(down, up)])


@pytest.mark.parametrize(
    ("shape", "bias"), [((7,), True), ((2, 5), False), ((2, 3, 4), True), ((), False), ((0, 4), True)]
)
def test_value_and_gradients_equal_the_written_sum(shape, bias):
    arguments = problem(shape, bias=bias)
    cotangent = torch.randn(*shape, 20, generator=torch.Generator().manual_seed(4))
    exact = [a if a is None else a.detach().double().requires_grad_(a.requires_grad) for a in arguments]
    for got, expected in zip(
        gradients(fused, arguments, cotangent), gradients(written_out, exact, cotangent.double()), strict=True
    ):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5)


def test_tokens_without_gradient_are_skipped_and_get_zero():
    arguments = problem((4, 9))
    cotangent = torch.zeros(4, 9, 20)
    cotangent[:, 0] = torch.randn(4, 20, generator=torch.Generator().manual_seed(4))
    got, expected = gradients(fused, arguments, cotangent), gradients(written_out, arguments, cotangent)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-5)
    assert not got[1][:, 1:].any()
    cotangent[0, 0] = float("nan")  # is not skipped
    assert gradients(fused, arguments, cotangent)[1][0, 0].isnan().all()


def test_backward_within_autocast_is_that_without_and_a_second_one_an_error():
    arguments, cotangent = problem((2, 5)), torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(4))
    expected = gradients(fused, arguments, cotangent)[1:]
    result = fused(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(result, [arguments[0], arguments[-1]], cotangent)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
    (first,) = torch.autograd.grad(fused(*arguments).square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


ROWS = ["other", "__base__", "default", "other"]
PIXELS = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([[97, row, row + 1, 98] for row in range(4)])


@pytest.fixture
def model(tiny_clip):
    """Two adapters with histories of different lengths, of which "default" is active."""
    whole = ["visual_projection"]
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, modules_to_save=whole))
    model.add_adapter("other", DualModeLoraConfig(**CONFIG, modules_to_save=whole))
    for name, tasks in (("other", 3), ("default", 2)):
        model.set_adapter(name)
        learned(model, tasks)
    return model.eval()


@torch.no_grad()
def embeds(model, pixels=PIXELS, ids=IDS, **names):
    found = model(input_ids=ids, pixel_values=pixels, **names)
    return found.image_embeds, found.text_embeds


def one_by_one(model):
    """What each adapter alone says of all rows."""
    alone = {}
    for name in ("other", "default"):
        model.set_adapter(name)
        alone[name] = embeds(model)
    with model.disable_adapter():
        alone["__base__"] = embeds(model)
    return alone


def test_each_row_is_what_its_adapter_alone_says(model):
    alone = one_by_one(model)
    assert not torch.allclose(alone["other"][0], alone["default"][0], atol=1e-3)
    assert not torch.allclose(alone["other"][1], alone["__base__"][1], atol=1e-4)
    for tower, found in enumerate(embeds(model, adapter_names=ROWS)):
        expected = torch.stack([alone[name][tower][row] for row, name in enumerate(ROWS)])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        tower = (model.get_image_features, PIXELS) if tower == 0 else (model.get_text_features, IDS)
        with torch.no_grad():
            features = tower[0](tower[1], adapter_names=ROWS).pooler_output
        torch.testing.assert_close(torch.nn.functional.normalize(features, dim=1), expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(embeds(model)[0], alone["default"][0])  # and afterwards the active one again


def test_images_and_texts_have_rows_of_their_own(model):
    alone, names = one_by_one(model), {"pixel_values": ROWS, "input_ids": ["other", "default"]}
    images, texts = embeds(model, ids=IDS[:2], adapter_names=names)
    for found, rows, tower in ((images, ROWS, 0), (texts, names["input_ids"], 1)):
        expected = torch.stack([alone[name][tower][row] for row, name in enumerate(rows)])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_what_cannot_be_served_is_refused_by_name(model):
    cases = [
        (["other"] * 3, "3 names, but a layer reads 4 rows|same as the number of inputs"),
        (
            ["other", "c", "default", "d"],
            r"adapter_names has \['c', 'd'\], the model \['default', 'other', '__base__'\]",
        ),
        ({"pixel_values": ROWS}, "mapping with the keys"),
    ]
    expected = embeds(model)[0]
    for names, words in cases:
        with pytest.raises(ValueError, match=words):
            embeds(model, adapter_names=names)
    for block in (model.previous_task, lambda: model.held_weights()):
        with block(), pytest.raises(ValueError, match="inside a block"):
            embeds(model, adapter_names=ROWS)
    with pytest.raises(ValueError, match="call eval"):
        embeds(model.train(), adapter_names=ROWS)
    model.eval().merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"):
        embeds(model, adapter_names=ROWS)
    model.unmerge_adapter()
    assert torch.equal(embeds(model)[0], expected)


IMPORTED_FIRST = """
import sys
import dulbe_peft, importlib.util
importlib.util.find_spec("peft")
from transformers import CLIPModel
from peft import PeftModel
PeftModel.from_pretrained(CLIPModel.from_pretrained(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_a_saved_adapter_loads_where_the_package_was_imported_before_peft(base, tmp_path):
    get_peft_model(copy.deepcopy(base[0]), DualModeLoraConfig(support_rank=8)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", IMPORTED_FIRST, str(demo_model_folder()), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
