"""A frozen linear map and trained low-rank updates beside it, as one step of automatic differentiation.

    y = x W' + bias + sum_i (x P_i) B_i'

Written with separate operations, every update costs two more passes over the output and, backwards, over the input:
once to write its product, once to add it. Here the products are added where they are made, and backward skips tokens
whose gradient is zero. That is most of them in the last block of a tower that is read at its class token alone.
Gradients of gradients are refused on this path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dulbe_peft.utils.precision import without_autocast

Updates = list[tuple[torch.Tensor, torch.Tensor]]


def updated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, updates: Updates) -> torch.Tensor:
    """x W' + bias + sum_i (x P_i) B_i', (..., d_out), for x, (..., d_in), and pairs P, (d_in, r), B, (d_out, r).

    Products with an update run in P's dtype, the others in x's.
    """
    fused = (
        len(updates) == 1
        and not weight.requires_grad
        and (bias is None or not bias.requires_grad)
        and not updates[0][0].requires_grad
        and x.dtype == weight.dtype == updates[0][0].dtype == updates[0][1].dtype
        and not (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
        and not torch.compiler.is_compiling()
    )
    if fused:
        return _UpdatedLinear.apply(x, weight, bias, *updates[0])
    result = F.linear(x, weight, bias)
    for down, up in updates:
        result = result + F.linear(x.to(down.dtype) @ down, up).to(result.dtype)
    return result


class _UpdatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
    ) -> torch.Tensor:
        # Products with a few columns are several times faster where these lie side by side in memory.
        down, up = down.T.contiguous(), up.T.contiguous()
        hidden = x.reshape(-1, x.shape[-1]) @ down.T
        ctx.save_for_backward(weight, down, up, hidden)
        result = F.linear(x, weight, bias)
        result.view(-1, result.shape[-1]).addmm_(hidden, up)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, down, up, hidden = ctx.saved_tensors
        rows = grad.reshape(-1, weight.shape[0])
        live = _live_rows(rows)
        if live is not None:
            rows, hidden = rows[live], hidden[live]
        with without_autocast(grad):
            grad_up = (hidden.T @ rows).T if ctx.needs_input_grad[4] else None
            if not ctx.needs_input_grad[0]:
                return None, None, None, None, grad_up
            grad_x = (rows @ weight).addmm_(rows @ up.T, down)
        if live is not None:
            grad_x = grad_x.new_zeros(grad.numel() // grad.shape[-1], grad_x.shape[1]).index_copy_(0, live, grad_x)
        return grad_x.view(*grad.shape[:-1], weight.shape[1]), None, None, None, grad_up


def _live_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """Indices of the rows that are not zero where those are few; None: take all. Only a CPU can look for free."""
    if rows.device.type != "cpu" or not len(rows) or rows[-1].any():
        return None
    live = rows.any(dim=1).nonzero().squeeze(1)
    return live if 2 * len(live) < len(rows) else None
