"""What two processes compute on sharded tensors, each case beside the same call on whole ones."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import tilewise
from tilewise import Document, PrefixLM
from tilewise.errors import UnsupportedError
from tilewise.nn import MultiHeadAttention, RoPE

WORLD = 2
BATCH, HEADS, ROWS, WHOLE = Shard(0), Shard(2), Shard(1), Replicate()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def agrees(
    mesh: DeviceMesh,
    placements: dict[str, Placement],
    expected: Placement,
    *,
    attend: Callable[..., Any] = tilewise.attention,
    tensors: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> None:
    """Output, LSE and gradients are those of the whole tensors, and the output is placed as expected."""
    whole = {"q": randn(3, 5, 4, 8), "k": randn(3, 7, 2, 8), "v": randn(3, 7, 2, 6), **(tensors or {})}
    results = []
    for sharded in (True, False):
        given = {name: x.clone() for name, x in whole.items()}
        if sharded:
            given = {name: distribute_tensor(x, mesh, [placements.get(name, WHOLE)]) for name, x in given.items()}
        learned = [x.requires_grad_() for x in given.values()]
        q, k, v = (given.pop(name) for name in "qkv")
        out, lse = attend(q, k, v, **given, **options, return_lse=True)
        if sharded:
            assert out.placements == (expected,), out.placements
        (out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
        results.append([out, lse, *(x.grad for x in learned)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(got.full_tensor(), want)


def everywhere(placement: Placement) -> dict[str, Placement]:
    return dict.fromkeys("qkv", placement)


def by_batch(mesh: DeviceMesh) -> None:
    for options in ({"causal": True, "window": (3, 0)}, {"mask": PrefixLM(torch.tensor([1, 0, 2]))}):
        agrees(mesh, everywhere(BATCH), BATCH, **options)


def by_heads(mesh: DeviceMesh) -> None:
    agrees(mesh, everywhere(HEADS), HEADS, causal="top_left", softcap=4.0)


def tensors_of_masks_are_cut_along(mesh: DeviceMesh) -> None:
    ids = torch.arange(7).repeat(3, 1) // torch.tensor([[2], [3], [4]])
    dense = randn(3, 4, 5, 7) > 0
    blocks = tilewise.BlockMask(randn(1, 4, 3, 4) > 0, 2, 2)
    for mask in (Document(ids[:, :5], ids), dense, dense[:, :1], dense[0], blocks, blocks & Document(ids[:, :5], ids)):
        agrees(mesh, everywhere(BATCH), BATCH, mask=mask)
        agrees(mesh, everywhere(HEADS), HEADS, mask=mask)


def modifiers_and_their_gradients(mesh: DeviceMesh) -> None:
    for bias in ((3, 4, 5, 7), (1, 4, 5, 7), (4, 5, 7), (1, 5, 7), (3, 1, 5, 7), (5, 7)):
        tensors = {"bias": randn(*bias), "alibi_slopes": randn(4).float(), "sinks": randn(4)}
        agrees(mesh, everywhere(BATCH), BATCH, tensors=tensors)
        agrees(mesh, everywhere(HEADS), HEADS, tensors=tensors)
    agrees(mesh, everywhere(BATCH), BATCH, tensors={"alibi_slopes": randn(3, 4)})
    agrees(mesh, everywhere(HEADS) | {"sinks": Shard(0)}, HEADS, tensors={"sinks": randn(4)})


def sequences_are_gathered(mesh: DeviceMesh) -> None:
    agrees(mesh, everywhere(ROWS), WHOLE, causal=True)


def unlike_placements_are_brought_together(mesh: DeviceMesh) -> None:
    for placement in (BATCH, HEADS, ROWS):
        for other in (BATCH, HEADS, WHOLE):
            whole = {"q": randn(4, 6, 4, 8), "k": randn(4, 6, 2, 8)}
            q = distribute_tensor(whole["q"], mesh, [placement])
            k = distribute_tensor(whole["k"], mesh, [other])
            got = tilewise.attention(q, k, k, causal=True)
            torch.testing.assert_close(got.full_tensor(), tilewise.attention(*whole.values(), whole["k"], causal=True))


def heads_that_do_not_divide_are_gathered(mesh: DeviceMesh) -> None:
    tensors = {"q": randn(2, 5, 6, 8), "k": randn(2, 7, 3, 8), "v": randn(2, 7, 3, 8)}
    agrees(mesh, everywhere(HEADS), WHOLE, tensors=tensors)


def what_counts_batches_and_heads_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    mod = tilewise.ScoreMod(lambda s, b, h, q, k: s * (1 + h) + b, lambda ds, s, b, h, q, k: ds * (1 + h))
    for options in ({"mask": lambda b, h, q, k: (q + b + h) % 3 > 0}, {"score_mod": mod}):
        agrees(mesh, everywhere(BATCH), WHOLE, **options)
    for seed in (7, torch.tensor(7)):
        agrees(mesh, everywhere(HEADS), WHOLE, dropout_p=0.4, dropout_seed=seed)


def drawn_seeds_are_one(mesh: DeviceMesh) -> None:
    torch.manual_seed(distributed.get_rank())
    x = distribute_tensor(randn(2, 4, 2, 8), mesh, [BATCH]).requires_grad_()
    out = tilewise.attention(x, x, x, dropout_p=0.5)
    out.sum().backward()
    for result in (out.redistribute(placements=[WHOLE]), x.grad.redistribute(placements=[WHOLE])):
        mine = result.to_local().detach().clone()
        distributed.broadcast(mine, 0)
        assert torch.equal(mine, result.to_local())


def packed_by_heads(mesh: DeviceMesh) -> None:
    tensors = {"q": randn(9, 4, 8), "k": randn(11, 2, 8), "v": randn(11, 2, 6)}
    offsets = torch.tensor([0, 4, 9]), torch.tensor([0, 4, 11])

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return tilewise.attention_varlen(q, k, v, *offsets, max_seqlen_q=5, max_seqlen_k=7, **options)

    agrees(mesh, everywhere(Shard(1)), Shard(1), attend=attend, tensors=tensors, causal=True)
    agrees(mesh, everywhere(Shard(0)), WHOLE, attend=attend, tensors=tensors, causal=True)


def plain_tensors_beside_sharded_ones_are_refused(mesh: DeviceMesh) -> None:
    x = randn(2, 4, 2, 8)
    for arguments, name in (((distribute_tensor(x, mesh, [BATCH]), x, x), "k"), ((x, x, x), "sinks")):
        sinks = distribute_tensor(randn(2), mesh, [WHOLE]) if name == "sinks" else None
        with pytest.raises(UnsupportedError, match=r"(q|k): got a plain tensor beside a DTensor.*distribute_tensor"):
            tilewise.attention(*arguments, sinks=sinks)


def compiled(mesh: DeviceMesh) -> None:
    whole = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")
    agrees(mesh, everywhere(BATCH), BATCH, attend=whole, causal=True)
    agrees(mesh, everywhere(HEADS), HEADS, attend=whole, causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48, dtype=torch.float64)
        self.outer = nn.Linear(16, 16, dtype=torch.float64)
        self.sinks = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.outer(tilewise.attention(q, k, v, causal=True, sinks=self.sinks).flatten(-2))


def fsdp2(mesh: DeviceMesh) -> None:
    """Parameters are sharded, batches differ: gradients are those of both batches in one process."""
    torch.manual_seed(0)
    plain = Block()
    sharded = Block()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=mesh)
    x = randn(4, 6, 16)
    mine = x.chunk(WORLD)[distributed.get_rank()]
    for _ in range(2):
        F.mse_loss(sharded(mine), mine).backward()
        F.mse_loss(plain(x), x).backward()
    for (name, got), want in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(got.grad, DTensor) and want.grad is not None
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=lambda text, name=name: f"{name}: {text}")


def tensor_parallel_layer(mesh: DeviceMesh) -> None:
    """Heads of a layer are spread over the processes, decoding included."""
    torch.manual_seed(0)
    plain = MultiHeadAttention(32, 4, heads_kv=2, rope=RoPE(16), causal=True).double().eval()
    spread = copy.deepcopy(plain)
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    parallelize_module(spread, mesh, {**columns, "out_proj": RowwiseParallel()})
    x = randn(2, 6, 32).requires_grad_()
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    (got,) = torch.autograd.grad(spread(x).square().sum(), x)
    torch.testing.assert_close(got, expected)
    with torch.no_grad():
        cache = spread.new_cache(batch=2, capacity=8)
        assert cache.k.shape[2] == 1
        parts = [spread(part, cache=cache) for part in x.split([4, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), plain(x))


CASES: list[Callable[[DeviceMesh], None]] = [
    by_batch,
    by_heads,
    tensors_of_masks_are_cut_along,
    modifiers_and_their_gradients,
    sequences_are_gathered,
    unlike_placements_are_brought_together,
    heads_that_do_not_divide_are_gathered,
    what_counts_batches_and_heads_is_that_of_the_whole,
    drawn_seeds_are_one,
    packed_by_heads,
    plain_tensors_beside_sharded_ones_are_refused,
    compiled,
    fsdp2,
    tensor_parallel_layer,
]


def run(rank: int, folder: str) -> None:
    """Every case in one of two processes; what goes wrong is written to a file of the case's name."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    for case in CASES:
        error = ""
        try:
            case(mesh)
        except Exception:
            error = traceback.format_exc()
        Path(folder, f"{case.__name__}.{rank}").write_text(error)
    distributed.destroy_process_group()
