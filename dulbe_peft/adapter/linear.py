"""A frozen linear map with trained low-rank updates beside it, as one autograd function.

    y = x W' + bias + sum_i (x P_i) B_i'

With separate operations, every update would cost two more passes over the output and, in the backward pass, over the
input: one to write the product and one to add it. Here each product is added in place. The backward pass also skips
tokens whose gradient is zero: most tokens, in the last block of a tower of which only the class token is used.
Second-order gradients raise an error on this path.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dulbe_peft.utils.torch_settings import without_autocast

# Pairs of P, (d_in, r), and B, (d_out, r), for the update B P'. If P is None, B, (d_out, d_in), is the whole update.
Update = tuple[torch.Tensor | None, torch.Tensor]
Updates = list[Update]


def is_consistent(down: torch.Tensor, up: torch.Tensor) -> bool:
    """Return whether P and B form a history: their columns are equally many, or P has none and B is (d_out, d_in)."""
    return up.shape[1] in (down.shape[1], down.shape[1] or len(down))


def dense(update: Update, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return B P', (d_out, d_in), in `dtype` or a wider type."""
    down, up = update
    dtype = torch.promote_types(up.dtype, dtype)
    with without_autocast(up):
        return up.to(dtype) if down is None else up.to(dtype) @ down.to(dtype).T


def add_updates(result: torch.Tensor, x: torch.Tensor, updates: Updates) -> torch.Tensor:
    """Return `result` + sum_i (x P_i) B_i', (..., d_out). The products are computed in P's dtype."""
    for down, up in updates:
        hidden = x.to(up.dtype) if down is None else x.to(down.dtype) @ down
        result = result + F.linear(hidden, up).to(result.dtype)
    return result


def joined(updates: Updates) -> Updates:
    """Join the updates into one pair of P and B with the same sum, unless one of them is a whole matrix."""
    downs = [down for down, _ in updates if down is not None]
    if len(downs) < max(2, len(updates)):
        return updates
    return [(torch.cat(downs, dim=1), torch.cat([up for _, up in updates], dim=1))]


def updated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, updates: Updates) -> torch.Tensor:
    """Return x W' + bias + sum_i (x P_i) B_i', (..., d_out), for x, (..., d_in).

    Products with W run in x's dtype, and all products in autocast's where it is enabled.
    """
    down, up = updates[0] if len(updates) == 1 else (None, None)
    if (
        down is None
        or up is None
        or weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or down.requires_grad
        or torch.compiler.is_compiling()
    ):
        return add_updates(F.linear(x, weight, bias), x, updates)
    kind, dtypes = x.device.type, {operand.dtype for operand in (x, weight, bias, down, up) if operand is not None}
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        # Cast as autocast would, which does not reach into a function of one's own. It leaves float64 alone.
        dtype = torch.get_autocast_dtype(kind)
        bias = None if bias is None else bias.to(dtype)
        return _UpdatedLinear.apply(x.to(dtype), weight.to(dtype), bias, down.to(dtype), up.to(dtype))
    if len(dtypes) == 1:
        return _UpdatedLinear.apply(x, weight, bias, down, up)
    return add_updates(F.linear(x, weight, bias), x, updates)


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
        # A product with few columns is several times faster if each column is contiguous in memory.
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
            # DistributedDataParallel warns if a gradient's strides are not those of its parameter.
            grad_up = (hidden.T @ rows).T.contiguous() if ctx.needs_input_grad[4] else None
            if not ctx.needs_input_grad[0]:
                return None, None, None, None, grad_up
            grad_x = (rows @ weight).addmm_(rows @ up.T, down)
        if live is not None:
            grad_x = grad_x.new_zeros(grad.numel() // grad.shape[-1], grad_x.shape[1]).index_copy_(0, live, grad_x)
        return grad_x.view(*grad.shape[:-1], weight.shape[1]), None, None, None, grad_up


def _live_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """Return the indices of nonzero rows if they are fewer than half, otherwise None, which stands for all rows.

    On an accelerator the result is always None, because looking at values would wait for the device.
    """
    if rows.device.type != "cpu" or not len(rows) or rows[-1].any():
        return None
    live = rows.any(dim=1).nonzero().squeeze(1)
    return live if 2 * len(live) < len(rows) else None
