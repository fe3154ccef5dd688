"""A training step of a plain decoder: which are timed, the model and its batch, and what a step is.

The decoder is the demo's, whose attention function is an argument: contestants differ in that function alone. Weights
and batch are the same for all, and stay so: the optimiser does all of its work, with a learning rate of 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import roofline
from ..demo.attend import AttentionCall
from ..demo.config import ModelConfig, Recipe
from ..demo.model import VOCABULARY, Attention, Decoder
from ..demo.train import optimiser
from . import check
from .cases import DTYPES, Case
from .peers import Attend

# Products of a linear layer in a step: forward, and the gradients of its input and of its weights.
LINEAR_PASSES = 3


@dataclass(frozen=True)
class StepCase:
    """Forward, backward and update of one batch; causal attention in every layer.

    Args:
        batch: sequences.
        seqlen: tokens of each.
        layers: blocks of attention and SwiGLU.
        width: of the residual stream.
        heads: query heads.
        heads_kv: key/value heads.
        head_dim: of q, k and v.
        hidden: width inside a SwiGLU.
        dtype: a name of `cases.DTYPES`, of weights and activations.
    """

    batch: int
    seqlen: int
    layers: int = 12
    width: int = 2048
    heads: int = 16
    heads_kv: int = 4
    head_dim: int = 128
    hidden: int = 5632
    dtype: str = "bf16"

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def attention(self) -> Case:
        """The attention call of one layer."""
        shape = (self.head_dim, self.seqlen, True, self.dtype, self.heads, self.heads_kv, self.batch)
        return Case(roofline.BACKWARD, *shape)

    @property
    def config(self) -> ModelConfig:
        """The decoder; a window as long as the sequence hides nothing."""
        return ModelConfig(
            self.layers,
            self.width,
            self.heads,
            self.heads_kv,
            self.head_dim,
            self.hidden,
            self.seqlen,
            self.seqlen,
            0.0,
        )

    @property
    def name(self) -> str:
        """The case in words, short.

        >>> StepCase(4, 4096).name
        'step 12 layers D128 16/4 heads 4 x 4096 tokens'
        """
        heads = f"{self.heads}/{self.heads_kv}"
        return f"step {self.layers} layers D{self.head_dim} {heads} heads {self.batch} x {self.seqlen} tokens"

    def to_json(self) -> dict[str, Any]:
        return {"pass": "step", **asdict(self)}


SETS: dict[str, tuple[StepCase, ...]] = {"step": (StepCase(1, 16384), StepCase(4, 4096))}


class Outcome(NamedTuple):
    """What a step computes: the loss and some of the weights' gradients, by name."""

    loss: Tensor
    gradients: dict[str, Tensor]


class Training:
    """Model, batch and optimiser of one case."""

    def __init__(self, case: StepCase, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        # The token after the last one is what the last one is to predict.
        batch = torch.randint(VOCABULARY, (case.batch, case.seqlen + 1), generator=generator)
        self.case, self.batch = case, batch.to(device)
        self.model = Decoder(case.config, without_attention, seed=0).to(device, DTYPES[case.dtype])
        self.adamw = optimiser(self.model, Recipe(learning_rate=0.0))

    def wider(self) -> Training:
        """The same weights and batch in a dtype with twice as many digits and more."""
        other = copy.copy(self)
        wide = torch.float32 if self.model.embedding.weight.element_size() == 2 else torch.float64
        other.model = copy.deepcopy(self.model).to(wide)
        return other

    def attend_by(self, attend: Attend) -> None:
        """Let every layer attend by this function of q, k and v, whatever else it asks for: nothing, see `config`."""

        def of_tensors(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
            return attend(q, k, v)

        for module in self.model.modules():
            if isinstance(module, Attention):
                module.attend = of_tensors

    def backward(self) -> Tensor:
        """Loss and gradients anew."""
        self.model.zero_grad(set_to_none=True)
        loss = self.model.loss(self.batch)
        loss.backward()
        return loss.detach()

    def outcome(self, attend: Attend) -> Outcome:
        """A step without its update."""
        self.attend_by(attend)
        loss, last = self.backward(), self.case.layers - 1
        names = ("embedding", "blocks.0.attention.qkv", f"blocks.{last}.attention.qkv", f"blocks.{last // 2}.mlp.down")
        weights = {name: self.model.get_parameter(f"{name}.weight") for name in names}
        found = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return Outcome(loss, found)

    def step(self, attend: Attend) -> Callable[[], None]:
        """A whole step: forward, backward, update."""

        def call() -> None:
            self.attend_by(attend)
            self.backward()
            self.adamw.step()

        return call

    @property
    def flops(self) -> int:
        """Products of linear layers, and of attention's visible pairs: 2 in the forward pass, 5 in the backward."""
        case = self.case
        weights = sum(weight.numel() for weight in self.model.parameters() if weight.ndim == 2)
        pairs = case.batch * case.heads * case.seqlen * (case.seqlen + 1) // 2
        return 2 * LINEAR_PASSES * weights * case.tokens + case.layers * (2 + 5) * 2 * case.head_dim * pairs

    @property
    def hbm_bytes(self) -> int:
        """Weights, gradients and both moments, read and written once."""
        return sum(2 * 4 * weight.numel() * weight.element_size() for weight in self.model.parameters())


class _Nothing(torch.autograd.Function):
    """q comes out, its gradient goes back to q, and zeros to k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return q.clone()

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        k, v = ctx.saved_tensors
        return do.clone(), torch.zeros_like(k), torch.zeros_like(v)


def without_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall | None = None) -> Tensor:
    """In attention's place next to nothing, so that what attention takes of a step can be told."""
    out: Tensor = _Nothing.apply(q, k, v)
    return out


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's kernels that also take fp32 and fp64; they have no grouped heads."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(group, dim=2) for x in (k, v))))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Expected(NamedTuple):
    """What a step computes with more digits, and the errors that are allowed."""

    truth: Outcome
    limits: dict[str, float]


def expected(training: Training) -> Expected:
    """The truth of the very weights and batch; limits are those of `check`: twice plain code's error, and a floor."""
    truth = training.wider().outcome(plain_attention)
    plain = errors(training.outcome(plain_attention), truth)
    floor = check.FLOORS[DTYPES[training.case.dtype]]
    return Expected(truth, {name: 2 * error + floor for name, error in plain.items()})


def errors(got: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative error of the loss, and of each gradient over blocks of rows."""
    found = {"loss": check.relative_error(got.loss.view(1, 1, 1), truth.loss.view(1, 1, 1))}
    for name, gradient in truth.gradients.items():
        found[name] = check.relative_error(got.gradients[name][:, None], gradient[:, None])
    return found
