"""The attention layer: what it computes by hand, PyTorch's module converted, decoding with a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tilewise import reference
from tilewise.errors import ArgumentError, UnsupportedError
from tilewise.nn import KVCache, MultiHeadAttention, RoPE

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"causal": True},
    "grouped": {"heads_kv": 2, "causal": True, "bias": False},
    "rope": {"heads_kv": 1, "rope": RoPE(64), "causal": True},
    "rope_partial": {"rope": RoPE(64, theta=500.0, dims=4, interleaved=True), "causal": True},
    "everything": {
        "heads_kv": 2, "head_dim": 8, "rope": RoPE(32), "qk_norm": True, "sinks": True, "causal": True,
        "window": (5, 0), "softcap": 3.0, "softmax_scale": 0.2, "dropout_p": 0.3,
    },
}  # fmt: skip


def layer(name: str, dtype: torch.dtype = torch.float32) -> MultiHeadAttention:
    torch.manual_seed(0)
    made = MultiHeadAttention(48, 4, **OPTIONS[name], dtype=dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.eval()


def tokens(seqlen: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, seqlen, 48, generator=torch.Generator().manual_seed(seqlen)).to(dtype)


def turned(x: torch.Tensor, rope: RoPE) -> torch.Tensor:
    """RoPE with complex numbers."""
    dims = rope.dims or x.shape[-1]
    head = x[..., :dims].double()
    pairs = head.unflatten(-1, (-1, 2)) if rope.interleaved else head.unflatten(-1, (2, -1)).mT
    angle = torch.outer(torch.arange(x.shape[1]).double(), rope.theta ** -(torch.arange(0, dims, 2).double() / dims))
    moved = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    parts = torch.view_as_real(moved)
    return torch.cat([(parts if rope.interleaved else parts.mT).flatten(-2).to(x.dtype), x[..., dims:]], -1)


@pytest.mark.parametrize("name", OPTIONS)
def test_by_hand(name: str) -> None:
    module, x = layer(name, torch.float64), tokens(dtype=torch.float64)
    options = {key: value for key, value in OPTIONS[name].items() if key in module.options}
    q, k, v = (p(x).unflatten(-1, (-1, module.head_dim)) for p in (module.q_proj, module.k_proj, module.v_proj))
    if module.q_norm is not None:
        eps = torch.finfo(q.dtype).eps
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.weight
            for x, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    if module.rope is not None:
        q, k = turned(q, module.rope), turned(k, module.rope)
    out = reference.attention(q, k, v, **options, sinks=module.sinks)
    torch.testing.assert_close(module(x), module.out_proj(out.flatten(-2)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("steps", [[12], [1] * 12, [5, 4, 1, 2]], ids=str)
@torch.no_grad()
def test_decoding_is_the_whole(name: str, steps: list[int]) -> None:
    module, x = layer(name), tokens()
    cache = module.new_cache(batch=2, capacity=12)
    parts = [module(part, cache=cache) for part in x.split(steps, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x), atol=1e-5, rtol=1e-5)
    assert cache.used == 12
    assert cache.lengths.tolist() == [12, 12]
    cache.clear()
    torch.testing.assert_close(module(x[:, :3], cache=cache), parts[0][:, :3] if steps[0] >= 3 else module(x[:, :3]))


@torch.no_grad()
def test_prompts_of_different_lengths() -> None:
    module, x = layer("rope"), tokens()
    cache = module.new_cache(2, 20)
    module(x[:, :8], cache=cache)
    cache.lengths.copy_(torch.tensor([8, 5]))
    got = module(x[:, 8:9], cache=cache)
    for b, length in enumerate((8, 5)):
        alone = torch.cat([x[b : b + 1, :length], x[b : b + 1, 8:9]], dim=1)
        torch.testing.assert_close(got[b : b + 1], module(alone)[:, -1:], atol=1e-5, rtol=1e-5)


def test_training_has_dropout_and_gradients() -> None:
    module, x = layer("everything"), tokens()
    assert torch.equal(module(x), module(x))
    module.train()
    torch.manual_seed(1)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    first.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_conversions_keep_the_angles_exact(dtype: torch.dtype) -> None:
    module = layer("rope")
    cos = module.cos.clone()
    module.to(dtype)
    assert module.cos.dtype == torch.float32
    assert torch.equal(module.cos, cos)
    x = tokens(dtype=dtype)
    cache = module.new_cache(2, 12)
    assert module(x).dtype == module(x, cache=cache).dtype == cache.k.dtype == dtype


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
def test_autocast_and_compile() -> None:
    module, x = layer("everything"), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = module(x)
    assert lowered.dtype == torch.bfloat16
    torch.testing.assert_close(lowered.float(), module(x), atol=0.1, rtol=0.1)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for seqlen in (5, 9, 12):
        torch.testing.assert_close(compiled(tokens(seqlen)), module(tokens(seqlen)))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@torch.no_grad()
def test_compiled_decoding_compiles_nothing_for_each_token() -> None:
    torch._dynamo.reset()
    module, x = layer("everything"), tokens()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    cache = module.new_cache(2, 16)
    parts = [compiled(part, cache=cache) for part in x.split([4] + [1] * 8, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x), atol=1e-5, rtol=1e-5)
    # One for the prompt, one for tokens.
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_state_and_copies() -> None:
    module = layer("everything")
    assert {name.partition(".")[0] for name in module.state_dict()} == {
        "q_proj", "k_proj", "v_proj", "out_proj", "q_norm", "k_norm", "sinks",
    }  # fmt: skip
    other = MultiHeadAttention(48, 4, **OPTIONS["everything"]).eval()
    other.load_state_dict(module.state_dict())
    with torch.device("meta"):
        late = MultiHeadAttention(48, 4, **OPTIONS["everything"]).eval()
    late.to_empty(device="cpu").load_state_dict(module.state_dict())
    for same in (other, copy.deepcopy(module), late):
        torch.testing.assert_close(same(tokens()), module(tokens()))
    assert "heads=4, heads_kv=2, head_dim=8, rope=RoPE(max_positions=32" in repr(module)


MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "widths": {"kdim": 20, "vdim": 36},
    "zero_key": {"add_zero_attn": True},
    "sequence_first": {"batch_first": False, "dropout": 0.5},
}


@pytest.mark.parametrize("name", MODULES)
def test_pytorchs_module_converted(name: str) -> None:
    module = nn.MultiheadAttention(48, 4, **{"batch_first": True, **MODULES[name]}, dtype=torch.float64).eval()
    converted = MultiHeadAttention.from_torch(module)
    assert converted.training is module.training
    assert converted.dropout_p == module.dropout
    x = tokens(dtype=torch.float64)
    key, value = torch.randn(2, 9, module.kdim).double(), torch.randn(2, 9, module.vdim).double()
    hidden = torch.arange(9) >= torch.tensor([[9], [4]])
    given = (x, key, value) if module.batch_first else [t.transpose(0, 1) for t in (x, key, value)]
    expected = module(*given, key_padding_mask=hidden, need_weights=False)[0]
    expected = expected if module.batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(converted(x, (key, value), mask=~hidden[:, None, None]), expected)
    # A copy of the weights, of which the zero key's logit is none.
    assert sum(p.numel() for p in converted.parameters() if p.requires_grad) == sum(
        p.numel() for p in module.parameters()
    )


def test_a_converted_module_can_be_changed() -> None:
    module = nn.MultiheadAttention(48, 4, batch_first=True)
    causal = MultiHeadAttention.from_torch(module, causal=True, rope=RoPE(16))
    assert causal.options["causal"] is True
    assert causal(tokens()).shape == (2, 12, 48)
    with pytest.raises(UnsupportedError, match="add_bias_kv=True"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(48, 4, add_bias_kv=True))


@torch.no_grad()
def test_what_is_refused() -> None:
    for arguments, message in (
        ({"heads": 5}, "head_dim: got None with embed_dim 48 and 5 heads"),
        ({"heads": 4, "heads_kv": 3}, "heads_kv: got 4 query heads with 3 key/value heads"),
        ({"heads": 4, "rope": RoPE(8, dims=5)}, "RoPE.dims: got 5; supported: an even number, 2 to head_dim 12"),
        ({"heads": 4, "rope": RoPE(8, dims=14)}, "RoPE.dims: got 14"),
    ):
        with pytest.raises(ArgumentError, match=message):
            MultiHeadAttention(48, **arguments)
    module = layer("rope")
    with pytest.raises(ArgumentError, match=r"cache: got 9 tokens on top of 0; supported: up to its capacity of 8"):
        module(tokens(9), cache=module.new_cache(2, 8))
    with pytest.raises(ArgumentError, match=r"RoPE.max_positions: got a sequence of 65 tokens; supported: up to 64"):
        module(tokens(65))
    with pytest.raises(ArgumentError, match=r"RoPE.max_positions: got 65 tokens on top of 0"):
        module(tokens(65), cache=module.new_cache(2, 80))
    with pytest.raises(ArgumentError, match="a cache together with a context"):
        module(tokens(), tokens(), cache=module.new_cache(2, 20))
    dropping = layer("everything").train()
    with pytest.raises(ArgumentError, match=r"a cache while training with dropout_p=0.3.*Fix: call \.eval\(\)"):
        dropping(tokens(), cache=dropping.new_cache(2, 20))


def test_a_cache_is_plain_memory() -> None:
    cache = layer("grouped").new_cache(3, 7, dtype=torch.float16)
    assert isinstance(cache, KVCache)
    assert cache.k.shape == cache.v.shape == (3, 7, 2, 12)
    assert cache.capacity == 7
    assert cache.k.dtype == torch.float16
