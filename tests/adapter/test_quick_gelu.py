"""Test that the activation of CLIP has the bits of transformers' one, and the gradient of its formula."""

import copy
import math

import pytest
import torch
from transformers.activations import QuickGELUActivation

from dulbe_peft.adapter.quick_gelu import PART, fast_quick_gelu


def drawn(*shape, dtype=torch.float32):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, PART + 17), (3 * PART,)])
def test_bits_are_those_of_transformers(shape, dtype):
    """The outputs and both of two gradients are equal, also if the gradient that comes in is not contiguous."""
    module, x, results = QuickGELUActivation(), drawn(*shape, dtype=dtype), {}
    outer = [drawn(*shape, dtype=dtype), drawn(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))]
    for fast in (False, True):
        given = x.clone().requires_grad_()
        with fast_quick_gelu(module) if fast else torch.enable_grad():
            out = module(given)
        grads = [torch.autograd.grad(out, given, each, retain_graph=True)[0] for each in outer]
        results[fast] = [out.detach(), *grads]
        assert (out.grad_fn.name() == "_QuickGeluBackward") == fast
    assert all(torch.equal(*pair) for pair in zip(*results.values(), strict=True))


def test_gradient_is_that_of_the_formula():
    """Literal: s + 1.702 x s (1 - s) for s = 1 / (1 + exp(-1.702 x)), in float64."""
    module, x = QuickGELUActivation(), drawn(50, dtype=torch.float64).requires_grad_()
    with fast_quick_gelu(module):
        module(x).sum().backward()
    for value, found in zip(x.tolist(), x.grad.tolist(), strict=True):
        gate = 1 / (1 + math.exp(-1.702 * value))
        assert found == pytest.approx(gate + 1.702 * value * gate * (1 - gate), rel=1e-12)


def test_block_restores_the_module():
    """After an error, too; a module whose forward was replaced by others keeps theirs, and copies still answer."""
    model = torch.nn.Sequential(QuickGELUActivation(), QuickGELUActivation())
    model[1].forward = lambda input: input + 1
    with pytest.raises(KeyError), fast_quick_gelu(model):
        twin = copy.deepcopy(model)
        assert "forward" in vars(model[0])
        raise KeyError
    assert "forward" not in vars(model[0]) and "forward" in vars(model[1])
    assert torch.equal(twin(torch.ones(2)), model(torch.ones(2)))


def test_second_gradient_is_refused():
    module, x = QuickGELUActivation(), drawn(4).requires_grad_()
    with fast_quick_gelu(module):
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
