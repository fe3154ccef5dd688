"""The algorithms of the attention family as their papers print them, on a memory that counts every element moved.

Nothing here is fast. Each module holds one idea, for one head in fp64, with its source and its exact traffic in the
docstring; tests hold the results to the oracle and the counts to the formulas.

================= ====================================================================================================
`memory`          the machine: HBM, SRAM of M elements, counters
`tiling`          tiles of the score matrix, and which of them are visited
`standard`        three kernels with S and P in HBM between them; the backward
`softmax_passes`  softmax in three passes, in two, and fused in one
`monoid`          the merge of states: associative, commutative, with an identity
`flash_v1`        outer loop over keys, output normalised in every step; the backward
`flash_v2`        outer loop over queries, one division; row tiles as independent tasks
`backward`        version 2's backward, in both loop orders and as two kernels
`block_sparse`    tiles that are off cost nothing
`dropout`         a stored mask against a replayed one
`decode`          split-K, and when it pays
`paged`           keys and values through a page table
`fp8`             version 3 in 8 bits: formats, scales, rotations, gradients
`pipeline`        version 3's producer and consumers on a timeline
================= ====================================================================================================

>>> import torch
>>> from tilewise.textbook import flash_v2, standard
>>> from tilewise.textbook.memory import Machine
>>> from tilewise.textbook.tiling import Blocks
>>> q, k, v = torch.randn(3, 256, 16, dtype=torch.float64)
>>> plain, flash = Machine(), Machine(sram=4 * 64 * 16)
>>> o = standard.forward(plain, q, k, v).o
>>> bool(torch.allclose(o, flash_v2.forward(flash, q, k, v, Blocks(64, 64)).o))
True
>>> plain.counts.traffic, flash.counts.traffic
(278528, 41216)
"""
