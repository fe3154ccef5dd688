"""Claims about utilisation, precision and decoding: figures that a bound or an experiment decides."""

from __future__ import annotations

from claims_types import DAO23, FOLKLORE, SHAH24, Claim, Reading, Section

COMPUTE = Section(
    "Compute and utilisation",
    """
def ceiling(on, flops, traffic):
    "Percent of peak that products reach at most while every transfer goes to HBM, none to L2."
    return round(100 * min(1, forms.intensity(flops, traffic.total) / on.balance(fp16)))

forward_128 = forms.matmul_flops(1 << 20, 128)
""",
    [
        Claim(
            "Recomputation is 25 % more compute",
            FOLKLORE,
            "25",
            "percent(three_kernels[1].flops.matmul, v1[1].flops.matmul)",
            "of the backward's products, 10N²d instead of 8N²d; «percent(12, 14)» % of both passes, and of training "
            "a layer of GPT-2 medium (24h² + 4Nh FLOPs a token forward, three times that in all) "
            "«round(100 * 2 * 1024 * 1024 / (3 * (24 * 1024**2 + 4 * 1024 * 1024)), 1)» %",
            " %",
        ),
        Claim(
            "FlashAttention on the A100, lowest: 25 % of peak",
            DAO23,
            "25",
            "ceiling(a100_80, forward_128, forms.flash_v1_forward(1 << 20, 128, 64))",
            "measured; the number is what HBM traffic allows the forward at B_c = 64, d 128",
            " %",
            rule="ceiling",
        ),
        Claim(
            "FlashAttention on the A100, highest: 40 % of peak",
            DAO23,
            "40",
            "ceiling(a100_80, forward_128, forms.flash_v1_forward(1 << 20, 128, 128))",
            "measured; as above at B_c = 128. Version 1 moves 3Nd for each tile of keys, so that even a perfect "
            "kernel of such tiles stays below this",
            " %",
            rule="ceiling",
        ),
        Claim(
            "FlashAttention-2 on the A100: 73 % of peak",
            DAO23,
            "73",
            "round(100 * 230 / a100_80.tflops_16bit, 1)",
            "forward, best shape, whole chip: its 230 TFLOP/s over 312, cut off. HBM alone allows 128-row tiles "
            "«ceiling(a100_80, forward_128, forms.flash_v2_forward(1 << 20, 128, 128))» %: K and V come from L2. "
            "Both passes reach 203 TFLOP/s, «round(100 * 203 / 312)» %",
            " %",
            rule="about",
            says="≈ 73 %",
        ),
        Claim(
            "FlashAttention-3 on the H100: 75 % of peak",
            SHAH24,
            "75",
            "round(100 * 740 / h100.tflops_16bit, 1)",
            "fp16 forward, best shape: 740 TFLOP/s over 989.4. HBM alone allows 128-row tiles "
            "«ceiling(h100, forward_128, forms.flash_v2_forward(1 << 20, 128, 128))» %",
            " %",
        ),
    ],
)

PRECISION = Section(
    "Precision",
    """
from tilewise import softmax

def tiled(q, k, v, block=128):
    "Attention by the online softmax, in the dtype of its inputs throughout."
    state = softmax.init((len(q),), v.shape[1], q)
    for j in range(0, len(k), block):
        state = softmax.update(state, q @ k[j:j + block].T / sqrt(q.shape[1]), v[j:j + block])
    return softmax.finalize(state)[0]

def order(x):
    "The nearest power of ten."
    return float(f"1e{round(log10(x))}")

def output_error(dtype):
    return (tiled(q.to(dtype), k.to(dtype), v.to(dtype)).double() - tiled(q, k, v)).abs().max().item()

def weight_error(dtype):
    "Largest relative error of a softmax weight, of scores that the dtype holds exactly."
    x = q[:128].to(dtype) * 4                                  # scores ~ N(0, 16), 64 keys
    identity, scores = torch.eye(64, dtype=dtype), x.clone()
    state = softmax.init((128,), 64, x)
    for j in range(0, 64, 16):
        state = softmax.update(state, scores[:, j:j + 16].clone(), identity[j:j + 16])
    exact = x.double().softmax(dim=1)
    error = (softmax.finalize(state)[0].double() - exact).abs() / exact
    return error[exact > 1e-3].max().item()

q, k, v = torch.randn(3, 1024, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
scores = (lambda g: torch.randn(2048, 128, generator=g) @ torch.randn(2048, 128, generator=g).T)(
    torch.Generator().manual_seed(1)
) / sqrt(128)
""",
    [
        Claim(
            "Error of the online softmax in fp32",
            FOLKLORE,
            "1e-6",
            "order(output_error(torch.float32))",
            "largest error of the output, N 1024, d 64, N(0, 1) inputs, everything in fp32: a few 1e-7, below the "
            "claim; weights have it in relative terms",
            says="~1e-6",
            rule="order",
            readings=(Reading("order(weight_error(torch.float32))", "as the relative error of a weight"),),
        ),
        Claim(
            "Error of the online softmax in fp16",
            FOLKLORE,
            "1e-3",
            "order(output_error(torch.float16))",
            "as above, everything in fp16, accumulators too. Kernels keep m, ℓ and O in fp32",
            says="~1e-3",
            rule="order",
        ),
        Claim(
            "Range of FP8 E4M3",
            SHAH24,
            "448",
            "torch.finfo(torch.float8_e4m3fn).max",
            "largest finite value; the smallest is 2⁻⁹ = «2**-9», so that weights below 2⁻¹⁰ vanish unless P is scaled",
            says="±448",
        ),
        Claim(
            "S ~ N(0, 1) at d 128 with q, k ~ N(0, 1) and scale 1/√d",
            FOLKLORE,
            "1.0",
            "round(scores.std().item(), 1)",
            "unscaled the deviation is √128 = «round((scores * sqrt(128)).std().item(), 1)», and the largest of "
            "«scores.numel()» scores stays below 448 either way (yes = True: "
            "«bool(scores.abs().max() * sqrt(128) < 448)»)",
            says="deviation 1",
        ),
    ],
)

DECODE = Section(
    "Decoding",
    """
def chain(tasks, tiles, splits, sms=108):
    "Key tiles that the busiest SM goes through, one task to an SM at a time."
    return ceil(tasks * splits / sms) * ceil(tiles / splits)

def gain(batch, keys, heads=32, block=128):
    "How much shorter the chain gets with the best number of splits (A100)."
    tiles = ceil(keys / block)
    best = min(chain(batch * heads, tiles, splits) for splits in range(1, min(128, tiles) + 1))
    return round(chain(batch * heads, tiles, 1) / best, 2)

h200 = device("h200")

def seconds(keys, sms, d=128, heads=8):
    "K and V of one sequence in fp16, read by so many of the SMs, each with its share of the bandwidth."
    return 4 * d * heads * keys / (h200.hbm_tb_s * 1e12 * sms / h200.sms)

def pays(keys, overhead, heads=8):
    "Whether reading on all SMs instead of one for each head saves more than the second kernel costs (seconds)."
    return seconds(keys, h200.sms) + overhead < seconds(keys, heads)

def least_keys(overhead):
    return next(keys for keys in range(1, 1 << 20) if pays(keys, overhead))
""",
    [
        Claim(
            "Splitting K pays for one sequence of 8192 keys, 32 heads",
            "Flash-Decoding, 2023",
            "yes",
            "gain(batch=1, keys=8192) > 2",
            "chain of key tiles on the busiest of 108 SMs, «gain(batch=1, keys=8192)»× shorter; one key tile cannot "
            "be split: «gain(batch=1, keys=128)»×",
            rule="true",
            says="pays",
        ),
        Claim(
            "and does not where batch × heads fill the device",
            "Flash-Decoding, 2023",
            "yes",
            "gain(batch=64, keys=8192) < 1.1",
            "batch 64: «gain(batch=64, keys=8192)»×. In between it is quantisation: batch 4 (128 tasks on 108 SMs) "
            "gains «gain(batch=4, keys=8192)»×",
            rule="true",
            says="does not pay",
        ),
        Claim(
            "It pays above a threshold of keys",
            FOLKLORE,
            "yes",
            "not pays(256, overhead=5e-6) and pays(4096, overhead=5e-6)",
            "H200, batch 1, 8 KV heads, d 128: a second kernel of 5 µs is paid for from «least_keys(5e-6)» keys on, "
            "one of 55 µs from «least_keys(55e-6)». The threshold is a property of the kernel and of batch × heads, "
            "not one number",
            rule="true",
            says="pays above a threshold",
        ),
    ],
)

DEVICES = [COMPUTE, PRECISION, DECODE]
