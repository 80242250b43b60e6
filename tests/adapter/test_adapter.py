"""The adapter layer: its fused sum, and batches in which each row names its adapter."""

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
    """Return x, W, bias, P and B, and a gradient with respect to the result."""
    sizes = ((*shape, 12), (20, 12), (20,), (12, 3), (20, 3), (*shape, 20))
    x, weight, offset, down, up, cotangent = (randn(*size, seed=seed) for seed, size in enumerate(sizes))
    return [x.requires_grad_(), weight, offset if bias else None, down, up.requires_grad_()], cotangent


def gradients(function, arguments, cotangent):
    result = function(*arguments)
    return [result.detach(), *torch.autograd.grad(result, [arguments[0], arguments[-1]], cotangent)]


@pytest.mark.parametrize(
    ("shape", "bias"), [((7,), True), ((2, 5), False), ((2, 3, 4), True), ((), False), ((0, 4), True)]
)
def test_fused_sum_equals_separate_operations_in_value_and_gradient(shape, bias):
    arguments, dense = problem(shape, bias)
    exact = [a if a is None else a.detach().double().requires_grad_(a.requires_grad) for a in arguments]
    sparse = dense.clone()
    sparse.view(math.prod(shape), 20)[1:] = 0  # only the first token has a gradient
    for cotangent in (dense, sparse):
        got, expected = gradients(fused, arguments, cotangent), gradients(written_out, exact, cotangent.double())
        torch.testing.assert_close([tensor.double() for tensor in got], expected, rtol=1e-5, atol=2e-5)
    assert not got[1].view(math.prod(shape), 12)[1:].any()


def test_fused_sum_runs_in_autocast_as_accurately_as_separate_operations():
    arguments, cotangent = problem((2, 5))
    exact = [a.detach().double().requires_grad_(a.requires_grad) for a in arguments]
    expected = gradients(written_out, exact, cotangent.double())
    with torch.autocast("cpu", torch.bfloat16):
        result = fused(*arguments)
        assert "UpdatedLinear" in result.grad_fn.name()
        fast, separate = (gradients(f, arguments, cotangent.bfloat16()) for f in (fused, written_out))
        doubles = gradients(fused, exact, cotangent.double())
    assert [tensor.dtype for tensor in fast] == [torch.bfloat16, torch.float32, torch.float32]
    for got, other, right in zip(fast, separate, expected, strict=True):
        error = (got.double() - right).norm()
        assert 0 < error < 1.5 * (other.double() - right).norm()
    for got, right in zip(doubles, expected, strict=True):  # autocast leaves float64 alone
        torch.testing.assert_close(got, right)


def test_backward_ignores_autocast_keeps_nan_and_refuses_second_order():
    arguments, cotangent = problem((2, 5))
    expected = gradients(fused, arguments, cotangent)[1:]
    result = fused(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(result, [arguments[0], arguments[-1]], cotangent)
    assert all(torch.equal(left, right) for left, right in zip(within, expected, strict=True))
    one_nan = torch.zeros_like(cotangent)
    one_nan[0, 0] = float("nan")
    assert gradients(fused, arguments, one_nan)[1][0, 0].isnan().all()
    (first,) = torch.autograd.grad(fused(*arguments).square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


ROWS = ["other", "__base__", "default", "other"]
PIXELS = randn(4, 3, 16, 16, seed=5)
IDS = torch.tensor([[97, row, row + 1, 98] for row in range(4)])


@pytest.fixture
def model(tiny_clip):
    """A model with two adapters whose histories have different lengths; "default" is active."""
    modules_to_save = ["visual_projection"]
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, modules_to_save=modules_to_save))
    model.add_adapter("other", DualModeLoraConfig(**CONFIG, modules_to_save=modules_to_save))
    for name, tasks in (("other", 3), ("default", 2)):
        model.set_adapter(name)
        learned(model, tasks)
    return model.eval()


@torch.no_grad()
def embeds(model, pixels=PIXELS, ids=IDS, **names):
    output = model(input_ids=ids, pixel_values=pixels, **names)
    return output.image_embeds, output.text_embeds


def test_mixed_batch_equals_each_adapter_run_alone(model):
    alone = {}
    for name in ("other", "default"):
        model.set_adapter(name)
        alone[name] = embeds(model)
    with model.disable_adapter():
        alone["__base__"] = embeds(model)
    assert not torch.allclose(alone["other"][0], alone["default"][0], atol=1e-3)
    assert not torch.allclose(alone["other"][1], alone["__base__"][1], atol=1e-4)

    def check(embeddings, tower, names):
        expected = torch.stack([alone[name][tower][row] for row, name in enumerate(names)])
        torch.testing.assert_close(embeddings, expected, atol=2e-6, rtol=1e-5)

    for tower, features in enumerate((model.get_image_features, model.get_text_features)):
        check(embeds(model, adapter_names=ROWS)[tower], tower, ROWS)
        with torch.no_grad(), model.rows_with_adapters(ROWS):
            pooled = features((PIXELS, IDS)[tower]).pooler_output
        check(F.normalize(pooled, dim=1), tower, ROWS)
    names = {"pixel_values": ROWS, "input_ids": ["other", "default"]}
    images, texts = embeds(model, ids=IDS[:2], adapter_names=names)
    check(images, 0, ROWS)
    check(texts, 1, names["input_ids"])
    assert torch.equal(embeds(model)[0], alone["default"][0])  # afterwards the active adapter is used again


def test_invalid_adapter_names_are_refused(model):
    expected = embeds(model)[0]
    for names, words in (
        (["other"] * 3, "3 names, but the input of a layer has 4 rows|same as the number of inputs"),
        (["other", "c", "default", "d"], r"has \['c', 'd'\], but .* are \['default', 'other', '__base__'\]"),
        ({"pixel_values": ROWS}, "mapping with the keys"),
    ):
        with pytest.raises(ValueError, match=words):
            embeds(model, adapter_names=names)
    for block in (model.previous_task, lambda: model.held_weights()):
        with block(), pytest.raises(ValueError, match="a block is running"):
            embeds(model, adapter_names=ROWS)
    with pytest.raises(ValueError, match="call eval"):
        embeds(model.train(), adapter_names=ROWS)
    model.eval().merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"):
        embeds(model, adapter_names=ROWS)
    model.unmerge_adapter()
    assert torch.equal(embeds(model)[0], expected)
