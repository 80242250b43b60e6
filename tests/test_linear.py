"""The fused update against the same sum written out in float64."""

import pytest
import torch
from torch.nn import functional as F

from dulbe_peft.adapter.linear import updated_linear


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


def test_backward_within_autocast_is_that_without():
    arguments, cotangent = problem((2, 5)), torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(4))
    expected = gradients(fused, arguments, cotangent)[1:]
    result = fused(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(result, [arguments[0], arguments[-1]], cotangent)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_differentiating_twice_is_an_error_not_a_wrong_number():
    arguments = problem((2, 5))
    (first,) = torch.autograd.grad(fused(*arguments).square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
