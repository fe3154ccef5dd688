"""How far the trained model's attention is from the oracle, beside how far torch is in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise

from .. import reference
from .attend import AttentionCall, attend_sdpa, attend_tilewise
from .config import Plan
from .data import Corpus, even_batches
from .metrics import Errors, Exactness
from .model import Decoder
from .train import mixed_precision


class Layer(NamedTuple):
    """What one kind of layer computed with: its own q, k, v and call, and a random gradient of its output."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    call: AttentionCall

    def arguments(self) -> dict[str, Any]:
        """The keywords of `tilewise.attention` for this layer."""
        call = self.call
        dropout = {"dropout_p": call.dropout_p, "dropout_seed": call.dropout_seed}
        return {"causal": True, "window": call.window, **dropout, "return_lse": True}


class Results(NamedTuple):
    """Forward and backward of one implementation; SDPA gives no LSE."""

    out: Tensor
    lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Recorder:
    """An attention function that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, AttentionCall]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        self.calls.append((q, k, v, call))
        return attend_tilewise(q, k, v, call)


@torch.no_grad()
def layers(plan: Plan, model: Decoder, corpus: Corpus) -> list[Layer]:
    """The first causal and the first windowed layer on held-out text, and the causal one with dropout."""
    recorder = Recorder()
    copy = Decoder(plan.model, recorder, plan.config.seed).to(plan.device)
    copy.load_state_dict(model.state_dict())
    (text,) = even_batches(corpus.validation, batch=1, seqlen=plan.config.check_seqlen, count=1)
    with mixed_precision(plan.device, plan.autocast):
        copy(text[:, :-1].to(plan.device))
    (q, k, v, causal), windowed = recorder.calls[:2]
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(plan.config.seed)).to(q)
    dropout = replace(causal, dropout_p=plan.model.dropout_p, dropout_seed=plan.config.seed)
    return [
        Layer("causal", q, k, v, do, causal),
        Layer(f"window {plan.model.window}", *windowed[:3], do, windowed[3]),
        Layer(f"dropout {plan.model.dropout_p:g}", q, k, v, do, dropout),
    ]


def check(layer: Layer) -> Exactness:
    """Errors of tilewise, of SDPA where it can express the layer, and of plain torch code in the layer's dtype."""
    arguments = layer.arguments()
    exact = layer._replace(q=layer.q.double(), k=layer.k.double(), v=layer.v.double())
    truth = differentiate(exact, lambda q, k, v: reference.attention(q, k, v, **arguments))

    def error(function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> Errors:
        return errors(differentiate(layer, function), truth)

    return Exactness(
        layer=layer.name,
        backend=str(tilewise.explain(layer.q, layer.k, layer.v, **arguments).backend),
        tilewise=error(lambda q, k, v: tilewise.attention(q, k, v, **arguments)),
        sdpa=None if layer.call.dropout_p else error(lambda q, k, v: (attend_sdpa(q, k, v, layer.call), None)),
        plain=error(lambda q, k, v: reference.attention(q, k, v, dtype=layer.q.dtype, **arguments)),
    )


def differentiate(layer: Layer, function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> Results:
    """Results of `function` on the layer's tensors, and their gradients."""
    q, k, v = (t.detach().requires_grad_() for t in (layer.q, layer.k, layer.v))
    out, lse = function(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), layer.do.to(out.dtype))
    return Results(out.detach(), None if lse is None else lse.detach(), dq, dk, dv)


def errors(results: Results, truth: Results) -> Errors:
    """Largest absolute difference from the oracle, result by result."""
    pairs = zip(results, truth, strict=True)
    return Errors(*[None if a is None or b is None else float((a.double() - b).abs().max()) for a, b in pairs])
