"""The adapter's layer: its fused sum, and rows of a batch with adapters of their own."""

import math

import pytest
import torch
from adapted_clip import CONFIG, learned
from peft import get_peft_model
from reference import randn
from torch.nn import functional as F

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.linear import updated_linear


def written_out(x, weight, bias, down, up):
    return F.linear(x, weight, bias) + x @ down @ up.T


def fused(x, weight, bias, down, up):
    return updated_linear(x, weight, bias, [(down, up)])


def problem(shape, bias=True):
    """x, W, bias, P and B, and a gradient of the result."""
    sizes = ((*shape, 12), (20, 12), (20,), (12, 3), (20, 3), (*shape, 20))
    x, weight, own_bias, down, up, cotangent = (randn(*size, seed=seed) for seed, size in enumerate(sizes))
    return [x.requires_grad_(), weight, own_bias if bias else None, down, up.requires_grad_()], cotangent


def gradients(function, arguments, cotangent):
    result = function(*arguments)
    return [result.detach(), *torch.autograd.grad(result, [arguments[0], arguments[-1]], cotangent)]


@pytest.mark.parametrize(
    ("shape", "bias"), [((7,), True), ((2, 5), False), ((2, 3, 4), True), ((), False), ((0, 4), True)]
)
def test_value_and_gradients_equal_the_written_sum_also_where_few_tokens_have_a_gradient(shape, bias):
    arguments, every = problem(shape, bias)
    exact = [a if a is None else a.detach().double().requires_grad_(a.requires_grad) for a in arguments]
    few = every.clone()
    few.view(math.prod(shape), 20)[1:] = 0
    for cotangent in (every, few):
        got, expected = gradients(fused, arguments, cotangent), gradients(written_out, exact, cotangent.double())
        torch.testing.assert_close([tensor.double() for tensor in got], expected, rtol=1e-5, atol=2e-5)
    assert not got[1].view(math.prod(shape), 12)[1:].any()


def test_backward_within_autocast_is_that_without_nan_is_not_skipped_and_a_second_one_is_an_error():
    arguments, cotangent = problem((2, 5))
    expected = gradients(fused, arguments, cotangent)[1:]
    result = fused(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(result, [arguments[0], arguments[-1]], cotangent)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
    one = torch.zeros_like(cotangent)
    one[0, 0] = float("nan")
    assert gradients(fused, arguments, one)[1][0, 0].isnan().all()
    (first,) = torch.autograd.grad(fused(*arguments).square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


ROWS = ["other", "__base__", "default", "other"]
PIXELS = randn(4, 3, 16, 16, seed=5)
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


def test_each_row_is_what_its_adapter_alone_says_and_texts_may_have_rows_of_their_own(model):
    alone = {}
    for name in ("other", "default"):
        model.set_adapter(name)
        alone[name] = embeds(model)
    with model.disable_adapter():
        alone["__base__"] = embeds(model)
    assert not torch.allclose(alone["other"][0], alone["default"][0], atol=1e-3)
    assert not torch.allclose(alone["other"][1], alone["__base__"][1], atol=1e-4)

    def check(found, tower, names):
        expected = torch.stack([alone[name][tower][row] for row, name in enumerate(names)])
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)

    for tower, features in enumerate((model.get_image_features, model.get_text_features)):
        check(embeds(model, adapter_names=ROWS)[tower], tower, ROWS)
        with torch.no_grad():
            found = features((PIXELS, IDS)[tower], adapter_names=ROWS).pooler_output
        check(F.normalize(found, dim=1), tower, ROWS)
    names = {"pixel_values": ROWS, "input_ids": ["other", "default"]}
    images, texts = embeds(model, ids=IDS[:2], adapter_names=names)
    check(images, 0, ROWS)
    check(texts, 1, names["input_ids"])
    assert torch.equal(embeds(model)[0], alone["default"][0])  # and afterwards the active one again


def test_what_cannot_be_served_is_refused_by_name(model):
    expected = embeds(model)[0]
    for names, words in (
        (["other"] * 3, "3 names, but a layer reads 4 rows|same as the number of inputs"),
        (["other", "c", "default", "d"], r"has \['c', 'd'\], the model \['default', 'other', '__base__'\]"),
        ({"pixel_values": ROWS}, "mapping with the keys"),
    ):
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
