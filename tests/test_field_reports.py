"""Faults that users of attention kernels met elsewhere, each as a test whose right value needs no other kernel.

A name ends in the report's id. Reports about compilation (S09), memory (S13) and second derivatives (S15) are tests of
test_compile.py, test_memory.py and test_autograd.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from conformance.calls import Call, Draw, Result, Shape, dense, offsets
from conformance.verify import assert_same, compute, verify
from targets import Target
from tilewise import BlockMask, Causal

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def backward_of_ones(target: Target, call: Call) -> Result:
    """Results with dO = 1."""
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    return compute(target, call, (torch.ones(shape, device=target.device), None))


def labels(target: Target, *shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Values [*shape, heads, Dv] that name their key/value head."""
    heads = torch.arange(shape[-2], dtype=dtype, device=target.device)
    return heads[:, None].expand(shape).contiguous()


def test_rows_without_keys_b01(target: Target) -> None:
    draw = Draw(target.device)
    q, k, v = (3 * draw.normal(n, 1, 32) for n in (256, 3, 3))
    cu = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    call = Call(q.half(), k.half(), v.half(), {"causal": True, "max_seqlen_q": 256, "max_seqlen_k": 3}, cu)
    got = backward_of_ones(target, call)
    live = [75, 109, 255]
    dead = [row for row in range(256) if row not in live]
    assert torch.equal(got.out[live], call.v) and not got.out[dead].any()
    logits = (call.q[live].float() * call.k.float()).sum(-1)[:, 0] / math.sqrt(32)
    torch.testing.assert_close(got.lse[0, live], logits)
    assert bool((got.lse[0, dead] == float("-inf")).all())
    # One key: P = 1 whatever the logit.
    assert torch.equal(got.grads["v"], torch.ones_like(call.v))
    assert not got.grads["q"][dead].any()
    assert float(got.grads["q"].abs().max()) <= 1e-2 and float(got.grads["k"].abs().max()) <= 1e-2


@pytest.mark.parametrize("window", [None, (100, 0)], ids=["causal", "window"])
def test_all_logits_strongly_negative_b03(target: Target, window: Any) -> None:
    a = math.sqrt(120 * math.sqrt(128) / 128)
    q = torch.full((1, 88, 14, 128), a, device=target.device)
    k = torch.full((1, 448, 2, 128), -a, device=target.device)
    v = Draw(target.device).normal(1, 448, 2, 128)
    got = backward_of_ones(target, Call(q, k, v, {"causal": True, "window": window}))
    last = torch.arange(361, 449, device=target.device)
    first = torch.zeros_like(last) if window is None else (last - 101).clamp(min=0)
    count = (last - first).float()
    torch.testing.assert_close(got.lse, (-120 + count.log()).expand(1, 14, 88), rtol=0, atol=1e-4)
    if window is None:
        assert float(got.lse[0, 0, 2]) == pytest.approx(-114.106, abs=1e-3)
    sums = torch.cat([torch.zeros_like(v[:, :1]), v.double().cumsum(1)], dim=1)
    mean = ((sums[:, last] - sums[:, first]) / count[:, None, None]).repeat_interleave(7, dim=2)
    torch.testing.assert_close(got.out.double(), mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        got.grads["v"].double().sum(1), torch.full_like(mean[:, 0, :2], 88 * 7), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype, value", [(BF16, 133120.0), (BF16, -133120.0), (F16, 240.0)], ids=str)
@pytest.mark.parametrize("seqlen", [1, 5])
def test_huge_finite_logits_b05(target: Target, seqlen: int, dtype: torch.dtype, value: float) -> None:
    q = torch.full((1, seqlen, 1, 64), abs(value), dtype=dtype, device=target.device)
    k = torch.full_like(q, value)
    got = backward_of_ones(target, Call(q, k, q))
    assert torch.equal(got.out, q)
    logit = 8 * value * abs(value)
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, logit + math.log(seqlen)), rtol=1e-6, atol=0)
    if dtype == BF16 and seqlen == 1:
        assert abs(logit) == 141767475200
    assert not got.grads["q"].any() and not got.grads["k"].any()
    # Backward, P comes from an fp32 LSE, which at 1e11 has no digit left for ln 5. Where it has some:
    step = torch.finfo(F32).eps * abs(logit) if seqlen > 1 else 0.0
    if step < 0.1:
        torch.testing.assert_close(got.grads["v"], torch.ones_like(q), rtol=math.expm1(step), atol=1e-3)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(3, 128), (1, 257)])
def test_causal_with_more_keys_than_queries_b07(target: Target, seqlen_q: int, seqlen_k: int) -> None:
    draw = Draw(target.device)
    call = dense(Shape(1, seqlen_q, seqlen_k, 1, 1, 128, 128), F32, draw, causal=True)
    got = compute(target, call.with_tensors(q=torch.zeros_like(call.q)), (None, None))
    counts = torch.arange(seqlen_k - seqlen_q + 1, seqlen_k + 1, device=target.device)
    torch.testing.assert_close(got.lse[0, 0], counts.float().log())
    means = torch.stack([call.v[0, :n, 0].mean(0) for n in counts.tolist()])
    torch.testing.assert_close(got.out[0, :, 0], means)
    if seqlen_q == 3:
        assert [round(x, 6) for x in got.lse[0, 0].tolist()] == [4.836282, 4.844187, 4.85203]


def test_window_bounds_are_inclusive_b09(target: Target) -> None:
    draw = Draw(target.device)
    zero = torch.zeros(1, 8, 1, 16, device=target.device)
    got = compute(target, Call(zero, zero, zero, {"causal": True, "window": (2, 0)}), (None, None))
    counts = torch.tensor([1.0, 2, 3, 3, 3, 3, 3, 3], device=target.device)
    torch.testing.assert_close(got.lse[0, 0], counts.log())

    call = dense(Shape(1, 70, 70, 2, 1, 16, 16), F32, draw)
    causal = backward_of_ones(target, Call(call.q, call.k, call.v, {"causal": True}))
    for window in ((69, 0), (70, 0), (None, 0)):
        same = backward_of_ones(target, Call(call.q, call.k, call.v, {"window": window}))
        for (_, x), (_, y) in zip(same.items(), causal.items(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    itself = backward_of_ones(target, Call(call.q, call.k, call.v, {"window": (0, 0)}))
    torch.testing.assert_close(itself.out, call.v.expand(-1, -1, 2, -1))
    assert float(itself.grads["q"].abs().max()) < 1e-5 and float(itself.grads["k"].abs().max()) < 1e-5


@pytest.mark.large
def test_a_models_window_of_w_tokens_b09(target: Target) -> None:
    zero = torch.zeros(1, 4096, 1, 16, device=target.device)
    got = compute(target, Call(zero, zero, zero, {"window": (2048 - 1, 0)}), (None, None))
    counts = torch.arange(1, 4097, device=target.device).clamp(max=2048)
    torch.testing.assert_close(got.lse[0, 0], counts.float().log())


def test_packed_decode_with_empty_members_b11(target: Target) -> None:
    draw = Draw(target.device)
    v = labels(target, 8, 3, 64, dtype=BF16)
    q = torch.zeros(2, 9, 64, dtype=BF16, device=target.device)
    options = {"causal": True, "softmax_scale": 1.0, "max_seqlen_q": 1, "max_seqlen_k": 5}
    cu = offsets((1, 0, 1), target.device), offsets((3, 0, 5), target.device)
    got = compute(target, Call(q, draw.normal(8, 3, 64, dtype=BF16), v, options, cu), (None, None))
    assert got.out.shape == (2, 9, 64)
    assert torch.equal(got.out, (torch.arange(9, device=target.device) // 3)[None, :, None].expand(2, 9, 64).to(BF16))
    torch.testing.assert_close(got.lse, torch.tensor([3.0, 5.0], device=target.device).log().expand(9, 2))

    q, k, v = (draw.normal(1, heads, 120, dtype=BF16) for heads in (21, 7, 7))
    cu = (offsets((0, 0, 0, 1), target.device),) * 2
    got = compute(target, Call(q, k, v, {"max_seqlen_q": 1, "max_seqlen_k": 1}, cu), (None, None))
    assert torch.equal(got.out, v.repeat_interleave(3, dim=1))


def test_more_rows_than_offsets_b13(target: Target) -> None:
    draw = Draw(target.device)
    cu = torch.tensor([0, 144, 432, 944], dtype=torch.int32)
    projection = draw.normal(946, 3 * 16 * 64)
    projection[944:] = float("nan")
    q, k, v = (x.unflatten(-1, (16, 64)) for x in projection.chunk(3, dim=-1))
    options = {"causal": True, "max_seqlen_q": 512, "max_seqlen_k": 512}
    got = backward_of_ones(target, Call(q, k, v, options, (cu, cu)))
    exact = backward_of_ones(target, Call(q[:944], k[:944], v[:944], options, (cu, cu)))
    for (name, x), (_, y) in zip(got.items(), exact.items(), strict=True):
        rows, slack = (x[:, :944], x[:, 944:]) if name == "lse" else (x[:944], x[944:])
        assert torch.equal(rows, y), name
        assert bool((slack == (float("-inf") if name == "lse" else 0.0)).all()), name
    weights = got.grads["q"].flatten(1).T @ draw.normal(946, 8)
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("strided", ["k", "v"])
@pytest.mark.parametrize("rows", [7, 300])
def test_k_and_v_of_unlike_strides_b17(target: Target, rows: int, strided: str) -> None:
    draw = Draw(target.device)
    plain = dense(Shape(2, 5, rows, 3, 3, 16, 16), F16, draw)
    x = plain.tensors()[strided]
    buffer = torch.full((2, 3, 2 * rows, 16), float("nan"), dtype=F16, device=target.device)
    buffer[:, :, ::2] = x.transpose(1, 2)
    view = buffer[:, :, ::2].transpose(1, 2)
    assert view.stride() != x.stride() and torch.equal(view, x)
    assert_same(backward_of_ones(target, plain.with_tensors(**{strided: view})), backward_of_ones(target, plain))


def test_gradients_of_any_layout_b19(target: Target) -> None:
    draw = Draw(target.device)
    call = dense(Shape(1, 5, 5, 2, 2, 8, 8), BF16, draw, causal=True)
    ones = torch.ones(1, 5, 2, 8, dtype=BF16, device=target.device)
    expected = compute(target, call, (ones, None))
    columns = expected.grads["v"].float().sum(1)
    torch.testing.assert_close(columns, torch.full_like(columns, 5.0), rtol=4e-3, atol=0)

    def summed(loss: Any) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
        loss(tilewise.attention(*leaves, causal=True, backend=target.name)).backward()
        return [x.grad for x in leaves if x.grad is not None]

    for scale, loss in ((1.0, lambda out: out.sum()), (1 / 80, lambda out: out.mean())):
        exact = compute(target, call, (ones * scale, None))
        assert all(torch.equal(x, y) for x, y in zip(summed(loss), exact.grads.values(), strict=True))
    part = torch.cat([ones[:, :, :1], 0 * ones[:, :, 1:]], dim=2)
    exact = compute(target, call, (part, None))
    for loss in (
        lambda out: out[:, :, :1].sum(),
        lambda out: torch.cat([out.narrow(2, 0, 1), out.narrow(2, 0, 1)]).sum() / 2,
    ):
        assert all(torch.equal(x, y) for x, y in zip(summed(loss), exact.grads.values(), strict=True))


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
def test_all_of_the_head_dim_counts_b21(target: Target, dim: int) -> None:
    half = dim // 2
    sharp = math.sqrt(100 * math.sqrt(dim))
    one_hot = torch.zeros(half, dim, device=target.device)
    one_hot[:, half:] = sharp * torch.eye(half, device=target.device)
    order = torch.randperm(half, generator=torch.Generator().manual_seed(0)).to(target.device)
    v = torch.zeros(1, half, 1, dim, device=target.device)
    v[..., half:] = Draw(target.device).normal(1, half, 1, half)
    call = Call(one_hot[order][None, :, None], one_hot[None, :, None], v)
    got = compute(target, call, (None, None))
    torch.testing.assert_close(got.out, v[:, order])
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, 100.0))
    ones = torch.ones(1, 3, 2, dim, device=target.device)
    got = compute(target, Call(ones, ones, ones), (None, None))
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, math.sqrt(dim) + math.log(3)))


@pytest.mark.parametrize("heads_kv", [2, 6, 1, 12])
def test_query_heads_read_their_group_b23(target: Target, heads_kv: int) -> None:
    draw = Draw(target.device)
    group = 12 // heads_kv
    lengths = (17, 0, 5)
    cu = (offsets(lengths, target.device),) * 2
    v = labels(target, 22, heads_kv, 16)
    options = {"causal": True, "max_seqlen_q": 17, "max_seqlen_k": 17}
    call = Call(draw.normal(22, 12, 16), draw.normal(22, heads_kv, 16), v, options, cu)
    got = backward_of_ones(target, call)
    expected = torch.arange(12, device=target.device) // group
    torch.testing.assert_close(got.out, expected[None, :, None].expand(22, 12, 16).float())
    torch.testing.assert_close(got.grads["v"].sum(0), torch.full((heads_kv, 16), 22.0 * group, device=target.device))
    verify(target, call.with_tensors(v=draw.normal(22, heads_kv, 16)))


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_anchors_at_the_length_in_use_b25(target: Target, causal: bool) -> None:
    draw = Draw(target.device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=target.device)
    options = {"causal": causal, "alibi_slopes": slopes}
    call = dense(Shape(1, 37, 37, 4, 4, 64, 64), F32, draw, **options)
    full = compute(target, call, (None, None))
    # Row t of the causal pass is a call of its own over t + 1 keys; of a full pass, only the last row is.
    for t in (0, 1, 20, 36) if causal else (36,):
        alone = compute(
            target, Call(call.q[:, t : t + 1], call.k[:, : t + 1], call.v[:, : t + 1], options), (None, None)
        )
        torch.testing.assert_close(alone.out[:, 0], full.out[:, t], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone.lse[..., 0], full.lse[..., t], rtol=1e-5, atol=1e-5)

    # q = 0 and one-hot values: the output is the weights.
    rows, keys = 5, 23
    eye = torch.eye(keys, device=target.device)[None, :, None].expand(1, keys, 4, keys).contiguous()
    zero_q, zero_k = (torch.zeros(1, n, 4, 8, device=target.device) for n in (rows, keys))
    read = compute(target, Call(zero_q, zero_k, eye, options), (None, None))
    i = torch.arange(rows, device=target.device)[:, None]
    j = torch.arange(keys, device=target.device)
    bias = -slopes[:, None, None] * (i + keys - rows - j).abs()
    if causal:
        bias = bias.masked_fill(j > i + keys - rows, float("-inf"))
    torch.testing.assert_close(read.out.transpose(1, 2)[0], bias.softmax(-1))
    torch.testing.assert_close(read.lse[0], bias.logsumexp(-1))


def test_alibi_of_packed_members_b25(target: Target) -> None:
    draw = Draw(target.device)
    slopes = torch.tensor([0.5, 0.25], device=target.device)
    lengths_q, lengths_k = (3, 5, 1), (9, 5, 30)
    cu = offsets(lengths_q, target.device), offsets(lengths_k, target.device)
    q, k, v = draw.normal(9, 2, 16), draw.normal(44, 2, 16), draw.normal(44, 2, 16)
    options = {"alibi_slopes": slopes, "max_seqlen_q": 5, "max_seqlen_k": 30}
    got = compute(target, Call(q, k, v, options, cu), (None, None))
    for b in range(3):
        rows, keys = (slice(int(x[b]), int(x[b + 1])) for x in cu)
        alone = compute(
            target, Call(q[None, rows], k[None, keys], v[None, keys], {"alibi_slopes": slopes}), (None, None)
        )
        torch.testing.assert_close(got.out[rows], alone.out[0])
        torch.testing.assert_close(got.lse[:, rows], alone.lse[0])


def by_hand(call: Call, weights: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> list[torch.Tensor]:
    """dq, dk, dv in fp64 from the formulas; `weights` [B, H, Sq, Sk]: dropout's factors, NaN where not visible."""
    q, k, v, do = (x.double().transpose(1, 2) for x in (call.q, call.k, call.v, do))
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    hidden = weights.isnan()
    z = weights.double().masked_fill(hidden, 0.0)
    p = (scale * q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num()
    dp = (do @ v.mT) * z
    delta = (do * ((p * z) @ v)).sum(-1, keepdim=True)
    ds = p * (dp - (delta if dlse is None else delta - dlse.double()[..., None]))
    return [x.transpose(1, 2) for x in (scale * ds @ k, scale * ds.mT @ q, (p * z).mT @ do)]


@pytest.mark.large
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_replayed_b27(target: Target, causal: bool) -> None:
    draw = Draw(target.device)
    options = {"causal": causal, "dropout_p": 0.2, "dropout_seed": 11}
    call = dense(Shape(2, 130, 197, 3, 1, 64, 64), F32, draw, **options)
    eye = torch.eye(197, device=target.device)[None, :, None].expand(2, 197, 1, 197).contiguous()

    def read(**changes: Any) -> torch.Tensor:
        """The weights [B, H, Sq, Sk], from one-hot values: another head dim of v, so other tiles on a GPU."""
        out = compute(target, Call(call.q, call.k, eye, {**options, **changes}), (None, None)).out
        return out.transpose(1, 2).double()

    dropped, whole = read(), read(dropout_p=0.0)
    seen = whole > 0
    z = torch.where(seen, dropped / whole, float("nan"))
    keep = z[seen] > 0
    torch.testing.assert_close(z[seen][keep], torch.full_like(z[seen][keep], 1.25), rtol=1e-4, atol=0)
    assert abs(float(keep.double().mean()) - 0.8) < 5 * math.sqrt(0.16 / keep.numel())
    both = seen[:, 0] & seen[:, 1]
    agree = ((z[:, 0] > 0) == (z[:, 1] > 0))[both].double().mean()
    assert float(agree) == pytest.approx(0.68, abs=0.02)
    assert not torch.equal(z[0].nan_to_num() > 0, z[1].nan_to_num() > 0)
    assert torch.equal(read(), dropped) and not torch.equal(read(dropout_seed=12), dropped)

    do = draw.normal(2, 130, 3, 64)
    dq, dk, dv = by_hand(call, torch.where(z > 0, 65536 / 52429, z), do, None)
    got = compute(target, call, (do, None)).grads
    for x, y in ((got["q"], dq), (got["k"], dk.sum(2, keepdim=True)), (got["v"], dv.sum(2, keepdim=True))):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seqlen_q", [5, 9], ids=["all_rows_see", "some_rows_blind"])
def test_lse_has_a_gradient_b29(target: Target, seqlen_q: int) -> None:
    draw = Draw(target.device)
    call = dense(Shape(1, seqlen_q, 7, 2, 2, 4, 4), F32, draw, causal=True)
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(7)
    visible = (j <= i + 7 - seqlen_q).to(target.device)
    weights = torch.where(visible, 1.0, float("nan")).expand(1, 2, seqlen_q, 7)
    do, c = draw.normal(1, seqlen_q, 2, 4), draw.normal(1, 2, seqlen_q)
    for scale in (0.0, 1.0):
        got = compute(target, call, (do if scale else None, c))
        for x, y in zip(got.grads.values(), by_hand(call, weights, scale * do, c), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
        assert bool(scale) == bool(got.grads["v"].any())


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("block", [64, 128])
def test_blocks_are_the_same_backward_b39(target: Target, block: int, dim: int) -> None:
    draw = Draw(target.device)
    call = dense(Shape(1, 256, 256, 2, 1, dim, dim), BF16, draw)
    n = 256 // block
    lower = BlockMask(torch.ones(n, n, dtype=torch.bool, device=target.device).tril()[None, None], block, block)
    random = BlockMask(draw.bools(1, 2, n, n), block, block)
    elements = random.tiles.repeat_interleave(block, 2).repeat_interleave(block, 3)
    for mask, same in ((lower & Causal(), Causal()), (random, elements)):
        results = [backward_of_ones(target, Call(call.q, call.k, call.v, {"mask": m})) for m in (mask, same)]
        for (_, x), (_, y) in zip(results[0].items(), results[1].items(), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        verify(target, Call(call.q, call.k, call.v, {"mask": mask}))
    rows = elements.any(-1).sum().item()
    torch.testing.assert_close(
        results[0].grads["v"].float().sum(1)[0, 0],
        torch.full((dim,), float(rows), device=target.device),
        rtol=1e-2,
        atol=0,
    )


def test_empty_batch_s01(target: Target) -> None:
    q = torch.zeros(0, 3952, 10, 64, dtype=F16, device=target.device)
    k = torch.zeros(0, 16, 10, 64, dtype=F16, device=target.device)
    got = backward_of_ones(target, Call(q, k, k))
    assert got.out.shape == q.shape and got.out.dtype == F16
    assert got.lse.shape == (0, 10, 3952) and got.lse.dtype == F32
    assert [x.shape for x in got.grads.values()] == [q.shape, k.shape, k.shape]


@pytest.mark.large
@pytest.mark.parametrize("batch, seqlen, heads, dim", [(65536, 4, 2, 8), (1, 10, 65536, 16)], ids=["batch", "heads"])
def test_more_than_65535_of_them_s03(target: Target, batch: int, seqlen: int, heads: int, dim: int) -> None:
    call = dense(Shape(batch, seqlen, seqlen, heads, heads, dim, dim), F16, Draw(target.device), causal=True)
    got = backward_of_ones(target, call)
    last = call.with_tensors(**{name: x[-1:, :, -1:] for name, x in call.tensors().items()})
    for (name, x), (_, y) in zip(got.items(), backward_of_ones(target, last).items(), strict=True):
        assert torch.equal(x[-1:, -1:] if name == "lse" else x[-1:, :, -1:], y), name


@pytest.mark.parametrize("dim", [40, 64])
def test_thirty_runs_are_one_s07(target: Target, dim: int) -> None:
    draw = Draw(target.device)
    options = {"causal": True, "deterministic": True, "window": (40, None)}
    call = dense(Shape(1, 90, 90, 4, 2, dim, dim), F16, draw, **options)
    first = backward_of_ones(target, call)
    for _ in range(29):
        assert_same(backward_of_ones(target, call), first)


def test_softcap_of_large_scores_s17(target: Target) -> None:
    scores = [1000.0, 3000.0, 4400.0, 5000.0, 10000.0, -10000.0, 30.0]
    q = torch.tensor(scores, device=target.device)[None, :, None, None]
    one = torch.ones(1, 1, 1, 1, device=target.device)
    call = Call(q, one, one, {"softcap": 50.0, "softmax_scale": 1.0})
    got = compute(target, call, (None, torch.ones(1, 1, 7, device=target.device)))
    # A single key: the LSE is its score.
    expected = [50 * math.tanh(s / 50) for s in scores]
    torch.testing.assert_close(got.lse[0, 0], torch.tensor(expected, device=target.device), rtol=0, atol=1e-3)
    slope = torch.tensor([1 - math.tanh(s / 50) ** 2 for s in scores], device=target.device)
    torch.testing.assert_close(got.grads["q"].flatten(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seqlen_k", [127, 129, 255, 257])
def test_nothing_is_read_past_the_last_key_s19(target: Target, seqlen_k: int) -> None:
    draw = Draw(target.device)
    buffers = [torch.full((1, seqlen_k + 64, 2, 32), float("nan"), dtype=BF16, device=target.device) for _ in range(2)]
    for x in buffers:
        x[:, :seqlen_k] = draw.normal(1, seqlen_k, 2, 32, dtype=BF16)
    q = draw.normal(1, 1, 4, 32, dtype=BF16)
    views = [x[:, :seqlen_k] for x in buffers]
    got = backward_of_ones(target, Call(q, views[0], views[1]))
    assert_same(got, backward_of_ones(target, Call(q, views[0].clone(), views[1].clone())))
    assert all(bool(x.isfinite().all()) for _, x in got.items())
    probe = compute(target, Call(torch.zeros_like(q), views[0], views[1]), (None, None))
    torch.testing.assert_close(probe.lse, torch.full_like(probe.lse, math.log(seqlen_k)), rtol=0, atol=1e-4)
