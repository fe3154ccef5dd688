"""PyTorch's context parallelism over the functions that `torch_sdpa` registers: its ring on two processes, on the CPU.

Its dispatcher sends CUDA tensors alone to flash-attention operators, so the ring is called with the functions directly.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import guards

WORLD = 2

RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from tilewise.integrations import torch_sdpa

rank, world, store, causal = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "causal"
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
cp._cp_options.enable_load_balance = causal
ours = torch_sdpa.operators()

torch.manual_seed(0)
q, k, v, do = torch.randn(4, 2, 3, 16, 8)
# Balanced, a rank has one chunk from the front and its mirror image from the back.
chunks = [rank, 2 * world - 1 - rank] if causal else [2 * rank, 2 * rank + 1]
rows = torch.cat([torch.arange(16).chunk(2 * world)[i] for i in chunks])
mine = [x[:, :, rows].contiguous() for x in (q, k, v)]

forward = ours["_scaled_dot_product_flash_attention"]
out, lse, *rest = cp._templated_ring_attention(
    dist.group.WORLD, 2, forward, *mine, is_causal=causal, dropout_p=0.0, scale=0.4
)
grads = cp._templated_ring_attention_backward(
    dist.group.WORLD, 2, ours["_scaled_dot_product_flash_attention_backward"], do[:, :, rows].contiguous(), "grad_out",
    *mine, out, lse, causal, cum_seq_q=None, cum_seq_k=None, max_q=len(rows), max_k=len(rows), dropout_p=0.0,
    philox_seed=rest[4], philox_offset=rest[5], scale=0.4,
)

leaves = [x.double().requires_grad_() for x in (q, k, v)]
whole = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.4)
expected = [whole, *torch.autograd.grad(whole, leaves, do.double())]
for name, x, ref in zip(("out", "dq", "dk", "dv"), (out, *grads), expected):
    error = (x.double() - ref[:, :, rows]).abs().max()
    assert error < 1e-5, (name, float(error))
scores = 0.4 * leaves[0] @ leaves[1].transpose(-1, -2)
if causal:
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
assert (lse - scores.logsumexp(-1)[:, :, rows]).abs().max() < 1e-5
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_two_ranks_get_what_one_would(kind: str, tmp_path: Path) -> None:
    commands = [
        [sys.executable, "-c", RANK, str(rank), str(WORLD), str(tmp_path / "store"), kind] for rank in range(WORLD)
    ]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [rank.communicate(timeout=guards.SECONDS)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
