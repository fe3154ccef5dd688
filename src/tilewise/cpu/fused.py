"""PyTorch's fused CPU attention for the calls that it computes exactly as the contract says.

It takes no softcap, score mod, ALiBi, dropout, sinks or window, anchors its causal mask top-left, multiplies masked
probabilities (0) by whatever value lies there, and knows no gradient of the LSE or the bias. What it cannot do runs
on tiles.
"""

from __future__ import annotations

import math

import torch

from ..masks import Causal, Dense, Full
from ..problem import Inputs, Problem


def _finite(x: torch.Tensor) -> bool:
    """True proves that all elements are finite (False may also be a sum that overflows)."""
    return math.isfinite(x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).item())


def _plain(problem: Problem) -> bool:
    """Nothing but scale, mask and bias; one head dim; something to compute."""
    options = problem.options
    extras = problem.packed or problem.has_alibi or problem.has_sinks or problem.has_dropout
    modified = options.softcap is not None or options.score_mod is not None or options.out_dtype is not None
    sizes = problem.batch and problem.seqlen_q and problem.seqlen_k
    return bool(sizes) and not extras and not modified and problem.head_dim == problem.head_dim_v


def _causal(problem: Problem) -> bool:
    """The mask is causal, with the diagonal where PyTorch puts it."""
    at_top_left = problem.offset(problem.seqlen_q, problem.seqlen_k) == 0
    return isinstance(problem.options.mask, Causal) and at_top_left


def _additive_mask(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """Mask and bias as the fused kernel takes them: additive, in q's dtype, [B|1, Hq|1, Sq, Sk] (expanded, no copy)."""
    mask, bias = problem.options.mask, inputs.bias
    if isinstance(mask, Dense):
        visible = mask.grid()
        additive = torch.zeros(visible.shape, dtype=problem.dtype).masked_fill_(~visible, float("-inf"))
    elif bias is not None:
        additive = bias[(None,) * (4 - bias.ndim)].detach()
    else:
        return None
    return additive.expand(*additive.shape[:2], problem.seqlen_q, problem.seqlen_k)


def _readable(problem: Problem, inputs: Inputs) -> Inputs:
    """`inputs` with zeros for the keys that a boolean mask hides from everyone: they may hold anything."""
    mask = problem.options.mask
    if not isinstance(mask, Dense):
        return inputs
    hidden = ~mask.grid().any(dim=2).any(dim=1)  # [B|1, Sk|1]
    if not bool(hidden.any()):
        return inputs
    k, v = (x.masked_fill(hidden[..., None, None], 0.0) for x in (inputs.k, inputs.v))
    return inputs._replace(k=k, v=v)


def usable(problem: Problem, inputs: Inputs) -> Inputs | None:
    """The inputs to call the fused kernels with, or None where they do not give what the contract says."""
    mask, bias = problem.options.mask, inputs.bias
    if not _plain(problem) or (bias is not None and bias.dtype != problem.dtype):
        return None
    if isinstance(mask, Full):
        # A bias of -inf hides keys, and a row that it leaves none has LSE -inf, not PyTorch's 0.
        return inputs if bias is None or _finite(bias) else None
    if bias is not None or not (_causal(problem) or isinstance(mask, Dense)):
        return None
    if isinstance(mask, Dense) and not bool(mask.grid().any(dim=-1).all()):
        return None
    # Beside a masked key, 0 * NaN would reach the rows that do not see it.
    inputs = _readable(problem, inputs)
    return inputs if _finite(inputs.k) and _finite(inputs.v) else None


def _bhsd(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Sq, Hq, D] and LSE [B, Hq, Sq], from `usable` inputs."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _bhsd(inputs.q),
        _bhsd(inputs.k),
        _bhsd(inputs.v),
        0.0,
        _causal(problem),
        attn_mask=_additive_mask(problem, inputs),
        scale=problem.softmax_scale,
    )
    return _bhsd(out).contiguous(), lse.contiguous()


def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    needs: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Gradients of q, k, v as far as `needs` names them, from `usable` inputs."""
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _bhsd(do),
        _bhsd(inputs.q),
        _bhsd(inputs.k),
        _bhsd(inputs.v),
        _bhsd(out),
        lse,
        0.0,
        _causal(problem),
        attn_mask=_additive_mask(problem, inputs),
        scale=problem.softmax_scale,
    )
    named = zip(("q", "k", "v"), grads, strict=True)
    return {name: _bhsd(grad).contiguous() for name, grad in named if name in needs}
