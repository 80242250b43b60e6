"""A frozen linear map and trained low-rank updates beside it, as one step of automatic differentiation.

    y = x W' + bias + sum_i (x P_i) B_i'

Written with separate operations, every update costs two more passes over the output and, backwards, over the input:
once to write its product, once to add it. Here the products are added where they are made, and backward skips tokens
whose gradient is zero. That is most of them in the last block of a tower that is read at its class token alone.
Gradients of gradients are refused on this path.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dulbe_peft.utils.devices import without_autocast

# Pairs P, (d_in, r), and B, (d_out, r), of updates B P'; with None for P, B is (d_out, d_in) and the whole update.
Update = tuple[torch.Tensor | None, torch.Tensor]
Updates = list[Update]


def is_consistent(down: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether P and B are a history: they have as many columns, or P has none and B is (d_out, d_in)."""
    return up.shape[1] in (down.shape[1], down.shape[1] or len(down))


def dense(update: Update, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """B P', (d_out, d_in), in at least this type."""
    down, up = update
    dtype = torch.promote_types(up.dtype, dtype)
    with without_autocast(up):
        return up.to(dtype) if down is None else up.to(dtype) @ down.to(dtype).T


def add_updates(result: torch.Tensor, x: torch.Tensor, updates: Updates) -> torch.Tensor:
    """The result, (..., d_out), + sum_i (x P_i) B_i'; the products run in P's dtype."""
    for down, up in updates:
        hidden = x.to(up.dtype) if down is None else x.to(down.dtype) @ down
        result = result + F.linear(hidden, up).to(result.dtype)
    return result


def joined(updates: Updates) -> Updates:
    """The same sum as one pair of P and B, unless one of them has the whole update in B."""
    downs = [down for down, _ in updates if down is not None]
    if len(downs) < max(2, len(updates)):
        return updates
    return [(torch.cat(downs, dim=1), torch.cat([up for _, up in updates], dim=1))]


def updated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, updates: Updates) -> torch.Tensor:
    """x W' + bias + sum_i (x P_i) B_i', (..., d_out), for x, (..., d_in); products with W run in x's dtype."""
    down, up = updates[0] if len(updates) == 1 else (None, None)
    if (
        down is not None
        and up is not None
        and not weight.requires_grad
        and (bias is None or not bias.requires_grad)
        and not down.requires_grad
        and x.dtype == weight.dtype == down.dtype == up.dtype
        and not (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
        and not torch.compiler.is_compiling()
    ):
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
