"""Claims about balance, sizes, traffic and operations: figures that a count decides."""

from __future__ import annotations

from claims_types import DAO22, FOLKLORE, Claim, Reading, Section

BALANCE = Section(
    "Balance points and bandwidths",
    """
from math import ceil, log10, sqrt
import torch
from tilewise import roofline
from tilewise.roofline import device, forms, tile_rules
fp16, fp8 = torch.float16, torch.float8_e4m3fn
a100, a100_80, h100 = device("a100-40gb"), device("a100-80gb"), device("h100")
def standard_intensity(n, d=64):
    return round(forms.intensity(forms.matmul_flops(n, d), forms.standard_forward(n, d).total), 1)
""",
    [
        Claim(
            "A100 balance point, 312 TFLOP/s over 1.5 TB/s",
            FOLKLORE,
            "208",
            "round(312 / 1.5, 1)",
            "whole chip, fp16 dense; with the datasheet's 1.555 TB/s it is «round(a100.balance(fp16))»",
            " FLOP/B",
        ),
        Claim(
            "A100 80 GB balance point, 312 TFLOP/s over 2.0 TB/s",
            FOLKLORE,
            "156",
            "round(312 / 2.0, 1)",
            "with the datasheet's 2.039 TB/s it is «round(a100_80.balance(fp16))»",
            " FLOP/B",
        ),
        Claim(
            "A100 balance point by its datasheet",
            FOLKLORE,
            "208",
            "round(a100.balance(fp16), 1)",
            "1.555 TB/s instead of 1.5: 3 % lower",
            " FLOP/B",
            rule="about",
            says="≈ 208 FLOP/B",
        ),
        Claim(
            "Intensity of standard attention ≈ d/2 = 32 at d 64",
            FOLKLORE,
            "32",
            "standard_intensity(1 << 20)",
            "forward, 4N²d FLOPs over 4N² fp16 elements; at N 1024 Q, K, V, O make it «standard_intensity(1024)», "
            "and in fp32 it is half",
            " FLOP/B",
        ),
        Claim(
            "SRAM is 12.7× as fast as HBM (A100)",
            DAO22,
            "12.7",
            "round(19 / 1.5, 1)",
            "whole chip; the next line's 19.5 TB/s over the datasheet's 1.555 gives "
            "«round(a100.sms * 128 * 1.41e9 / 1e12 / a100.hbm_tb_s, 1)»",
            "×",
        ),
        Claim(
            "SRAM bandwidth of the A100, 19 TB/s",
            DAO22,
            "19",
            "round(a100.sms * 128 * 1.41e9 / 1e12, 1)",
            "128 B per clock and SM at the boost clock of 1.41 GHz; published cut off, not rounded",
            " TB/s",
            rule="about",
            says="≈ 19 TB/s",
        ),
        Claim(
            "SRAM has 1/2000 of HBM's capacity (A100 40 GB)",
            DAO22,
            "2000",
            "round(a100.hbm_gb * 1e9 / (a100.sms * a100.sram_sm_kib * 1024))",
            "whole chip, 108 × 192 KiB = «round(108 * 192 * 1024 / 1e6, 1)» MB, published as 20 MB; twice that on "
            "the 80 GB card",
            "",
            rule="about",
            says="1/2000",
        ),
    ],
)

SIZES = Section(
    "Sizes of S and P",
    "MB, GB, TB, MiB, GiB = 1e6, 1e9, 1e12, 2**20, 2**30",
    [
        Claim("S at N 8192", FOLKLORE, "67", "round(8192**2 / 1e6, 1)", "elements, one head", " M elements"),
        Claim(
            "S at N 4096, fp16",
            FOLKLORE,
            "32",
            "4096**2 * 2 / MiB",
            "MiB; «round(4096**2 * 2 / MB, 1)» in units of 10⁶ bytes",
            " MiB",
        ),
        Claim("Q at N 4096, d 128, fp16", FOLKLORE, "1", "4096 * 128 * 2 / MiB", "one head", " MiB"),
        Claim(
            "S and P at N 128k, fp16",
            FOLKLORE,
            "64",
            "2 * 131_072**2 * 2 / GiB",
            "GiB, one head, both matrices; «round(2 * 131_072**2 * 2 / GB, 1)» GB in units of 10⁹ bytes",
            " GiB",
        ),
        Claim(
            "S and P of LLaMA-2-7B at 32k, 32 heads × 32 layers",
            FOLKLORE,
            "4.4",
            "round(2 * 32_768**2 * 2 * 32 * 32 / TB, 1)",
            "units of 10¹² bytes, fp16, all layers at once, as training keeps them, batch 1",
            " TB",
        ),
        Claim(
            "Memory 2N² + O(Nd) against 4Nd + O(N): ratio at N 8192, d 64",
            FOLKLORE,
            "64",
            "round(forms.standard_memory(8192, 64) / forms.flash_memory(8192, 64), 1)",
            "N/2d = 64 from the leading terms; Q, K, V, O, which both keep, add 1 and L takes 0.3",
            "×",
            rule="about",
            says="≈ N/2d = 64×",
        ),
    ],
)

TRAFFIC = Section(
    "Traffic and tiles",
    """
from tilewise.textbook import flash_v1, flash_v2, standard
from tilewise.textbook.memory import Machine
from tilewise.textbook.tiling import Blocks

m = a100.sram_elements(fp16)                                   # 192 KB of one SM in fp16: 98,304 elements
def ratio(n, d, m):
    "Traffic of standard attention over that of version 2 at B_r = M/4d."
    return forms.standard_forward(n, d).total / forms.flash_v2_forward(n, d, m // (4 * d)).total

def counted(algorithm, n=1024, d=64, **arguments):
    "The textbook's algorithm on one random head, and what its memory counted."
    q, k, v = torch.randn(3, n, d, dtype=torch.float64)
    machine = Machine()
    algorithm(machine, q, k, v, **arguments)
    return machine.counts

def grows(exact):
    "How traffic at N = 2^20 grows when d doubles from 64 to 128."
    return round(exact(128) / exact(64), 1)
""",
    [
        Claim(
            "d²/M = 0.02 at d 64",
            FOLKLORE,
            "0.02",
            "round(64**2 / m, 3)",
            "M has to be counted in elements like d: 192 KB hold 98,304 fp16 numbers",
            readings=(Reading("round(64**2 / 192_000, 3)", "with bytes taken for elements", False),),
        ),
        Claim(
            "“50× fewer HBM accesses” at d 64",
            FOLKLORE,
            "50",
            "round(ratio(1 << 20, 64, m), 1)",
            "1/(d²/M) ≈ 50 leaves out the constants (4N² against 8N²d²/M) and takes bytes for elements; long "
            "sequences gain 12×, at N 1024 it is «round(ratio(1024, 64, m), 1)»×",
            "×",
            says="50×",
            rule="about",
            readings=(
                Reading("round(m / 64**2, 1)", "as M/d² without constants", False),
                Reading("round(192_000 / 64**2, 1)", "as M/d² with bytes for elements", False),
            ),
        ),
        Claim(
            "M/2d² at M 96,000, d 64",
            FOLKLORE,
            "11.7",
            "round(forms.speedup_leading(64, 96_000), 1)",
            "4N² over 8N²d²/M, elements, forward, leading terms of long sequences",
            "×",
        ),
        Claim(
            "M/2d² at M 100,000, d 100",
            FOLKLORE,
            "5",
            "forms.speedup_leading(100, 100_000)",
            "the exact forms at N 2²⁰ give «round(ratio(1 << 20, 100, 100_000), 2)»",
            "×",
        ),
        Claim(
            "B_c ≈ 384 at d 64",
            FOLKLORE,
            "384",
            "tile_rules.quarter_tile(m, 64).block_k",
            "⌊M/4d⌋ with 192 KB of one SM in fp16",
        ),
        Claim(
            "T_c ≈ 3 at N 1024, d 64",
            FOLKLORE,
            "3",
            "ceil(1024 / tile_rules.quarter_tile(m, 64).block_k)",
            "1024/384 = «round(1024 / 384, 2)», rounded up: the last tile is shorter",
        ),
        Claim(
            "B_c = ⌈M/4d⌉ fits into SRAM",
            DAO22,
            "yes",
            "tile_rules.Tile(*[tile_rules.quarter_tile_rounded_up(100_000, 64).block_k] * 2).tensors(64) <= 100_000",
            "four tiles of ⌈M/4d⌉ = 391 rows need 100,096 of M = 100,000 elements; only where 4d divides M does it fit",
            rule="true",
            says="⌈M/4d⌉",
        ),
        Claim(
            "“O(N²/d)” accesses: fewer with larger d",
            FOLKLORE,
            "0.5",
            "grows(lambda d: forms.flash_v2_forward(1 << 20, d, m // (4 * d)).total)",
            "Θ(N²d²/M): doubling d means four times the traffic. N²/d is N²d²/M at M = d³, which no device has for "
            "every d",
            "×",
            says="½ per doubling of d",
        ),
        Claim(
            "Standard attention moves 4N² + 4Nd elements",
            FOLKLORE,
            "4456448",
            "counted(standard.forward).traffic",
            "forward, N 1024, d 64, every operand of a kernel read once: unlimited SRAM. With products in tiles of "
            "64 rows it is «counted(standard.forward, blocks=Blocks(64, 64)).traffic»: K and V are read again for "
            "each",
            " elements",
            says="4·1024² + 4·1024·64",
        ),
        Claim(
            "FlashAttention moves 8N²d²/M + 2Nd elements",
            FOLKLORE,
            "480597",
            "counted(flash_v2.forward, blocks=Blocks(384, 384)).traffic",
            "version 2, N 1024, d 64, M 98,304: exactly 2Nd·⌈N/B⌉ + 2Nd + N, and N/B = 2.7 is rounded up. At N 1536 "
            "the form gives «round(forms.flash_v2_leading(1536, 64, m))» and the count is N more, "
            "«counted(flash_v2.forward, 1536, blocks=Blocks(384, 384)).traffic»",
            " elements",
            rule="about",
            says="≈ 480,597",
        ),
        Claim(
            "FlashAttention moves 2Nd·(N/B) elements of K and V",
            FOLKLORE,
            "524288",
            "sum(counted(flash_v2.forward, blocks=Blocks(256, 128)).of(name) for name in ('k', 'v'))",
            "version 2, N 1024, d 64, B = B_r = 256 (rows of Q, not of K)",
            " elements",
            says="2Nd·N/B = 524,288",
        ),
        Claim(
            "Version 1 moves the same",
            FOLKLORE,
            "525312",
            "counted(flash_v1.forward, blocks=Blocks(384, 384)).traffic",
            "the same order N²d²/M, another constant: O travels with Q in every step, read and written, so that it "
            "is 3Nd and 4N for each tile of keys instead of 2Nd for each tile of queries",
            " elements",
            says="525,312 (line 23)",
        ),
    ],
)


GPT2 = Section(
    "GPT-2 medium, attention forward and backward",
    """
q, k, v, do = torch.randn(4, 1024, 64, dtype=torch.float64)
heads, GFLOP = 64 * 16, 1e9                                    # batch 64, 16 heads; one layer

def standard_counts():
    forward, backward = Machine(), Machine()
    saved = standard.forward(forward, q, k, v)
    standard.backward(backward, (q, k, v), saved, do)
    return forward.counts, backward.counts

def v1_counts(block_k, backward_block_k, backward_sram=m):
    forward, backward = Machine(m), Machine(backward_sram)
    out = flash_v1.forward(forward, q, k, v, Blocks(64, block_k))
    flash_v1.backward(backward, (q, k, v), out, do, Blocks(64, backward_block_k))
    return forward.counts, backward.counts

three_kernels = standard_counts()
v1 = v1_counts(384, 256)                                       # what fits into M in each pass
v1_printed = v1_counts(384, 384, None)                         # as printed: ⌊M/4d⌋ in the backward too

def gigabytes(counts):
    return round(sum(each.traffic for each in counts) * heads * 2 / GB, 1)

def gflop(counts, weight=1.0, others=0):
    "Products, at a weight, and so many other operations for each score."
    return round((weight * sum(each.flops.matmul for each in counts) + others * 1024**2) * heads / GFLOP, 1)

def others(counts):
    "Operations outside products for each score."
    return round(sum(each.flops.elementwise + each.flops.exp for each in counts) / 1024**2, 1)

def floor_ms(gigabytes, counts):
    "The longer of the bytes at full bandwidth and the products at peak, on the A100 40 GB."
    return round(forms.floor(gflop(counts) * GFLOP, gigabytes * GB / 2, a100).ms, 1)

def percent(before, after):
    return round(100 * (after / before - 1), 1)
""",
    [
        Claim(
            "FLOPs of standard attention",
            DAO22,
            "66.6",
            "gflop(three_kernels)",
            "both passes, N 1024, d 64, 16 heads, batch 64: 12N²d in products alone. What fits both published "
            "numbers to three digits has no reason that we know. We count «others(three_kernels)» other operations a "
            "score",
            " GFLOP",
            readings=(
                Reading(
                    "gflop(three_kernels, 1 / 16, 14)",
                    "fitted with products at 1/16 and 14 other operations a score",
                    False,
                ),
            ),
        ),
        Claim(
            "FLOPs of FlashAttention",
            DAO22,
            "75.2",
            "gflop(v1)",
            "as above; 14N²d in products, as S is computed again; «others(v1)» other operations a score",
            " GFLOP",
            readings=(
                Reading("gflop(v1, 1 / 16, 14)", "fitted with products at 1/16 and 14 other operations a score", False),
            ),
        ),
        Claim(
            "More FLOPs for recomputation",
            DAO22,
            "13",
            "percent(gflop(three_kernels), gflop(v1))",
            "one product more to twelve N²d; 13 % needs operations beside the products that are the same for both",
            " %",
            says="+13 %",
            readings=(
                Reading(
                    "round(percent(gflop(three_kernels, 1 / 16, 14), gflop(v1, 1 / 16, 14)))",
                    "of the two fits above",
                    False,
                ),
            ),
        ),
        Claim(
            "HBM traffic of standard attention",
            DAO22,
            "40.3",
            "gigabytes(three_kernels)",
            "fp16, both passes, 11N² + 12Nd elements with nothing between the products but the softmax. 18N² is what "
            "mask and dropout add as kernels of their own: S written; masked, softmax, dropout each read and written "
            "(a byte mask beside); P read, 8.5N²; likewise 9.5N² backward. Which kernels were measured is not "
            "published",
            " GB",
            readings=(
                Reading("round((18 * 1024**2 + 12 * 1024 * 64) * heads * 2 / GB, 1)", "as 18N² + 12Nd elements"),
            ),
        ),
        Claim(
            "HBM traffic of FlashAttention",
            DAO22,
            "4.4",
            "gigabytes(v1)",
            "fp16, both passes, counted. The paper takes ⌊M/4d⌋ = 384 for both, but eight tiles of the backward then "
            "need «v1_printed[1].peak_sram» of «m» elements: it fits only with dK and dV («2 * 384 * 64» of them) in "
            "registers. All in SRAM, 256 is the largest power of two. The nearest count is 2 % below the published "
            "figure",
            " GB",
            readings=(Reading("gigabytes(v1_printed)", "with B_c = 384 in the backward too"),),
        ),
        Claim(
            "Less traffic",
            DAO22,
            "-89",
            "percent(gigabytes(three_kernels), gigabytes(v1))",
            "the published ratio needs 40.3 GB, of kernels that are not fused",
            " %",
            says="−89 %",
            readings=(Reading("round(percent(40.3, gigabytes(v1_printed)))", "from 40.3 GB to the smaller count"),),
        ),
        Claim(
            "Time of standard attention (A100 40 GB)",
            DAO22,
            "41.7",
            "floor_ms(40.3, three_kernels)",
            "measured: no count gives it. Its own 40.3 GB take this long at full bandwidth: "
            "«round(100 * 25.9 / 41.7)» % of it was reached",
            " ms",
            rule="floor",
        ),
        Claim(
            "Time of FlashAttention (A100 40 GB)",
            DAO22,
            "7.3",
            "floor_ms(4.4, v1)",
            "measured. Its products at 312 TFLOP/s take longer than its bytes («round(4.4 / 1.555, 1)» ms): "
            "«round(100 * 3.1 / 7.3)» % of peak",
            " ms",
            rule="floor",
        ),
    ],
)

COUNTS = [BALANCE, SIZES, TRAFFIC, GPT2]
