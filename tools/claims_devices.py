"""Claims about utilisation, precision, FP8 and decoding: figures that a bound or an experiment decides."""

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
    ],
)

FP8 = Section(
    "FP8",
    """
from tilewise.textbook import fp8

q, k, v = torch.randn(3, 2, 256, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
raw = q @ k.mT                                                 # scores before the scale 1/√d
scores = raw / sqrt(128)

def loud(x):
    "Two of the 128 channels ten times as large, in every row."
    return fp8.outlier_channels(x, channels=2, gain=10.0)

def error(q, k, rotate=None, granularity="block"):
    "Root mean square error of attention in e4m3."
    return fp8.rmse(fp8.attention(q, k, v, granularity, rotate=rotate), fp8.attention_exact(q, k, v))

def paper_inputs(n, d):
    "Error with one scale for the tensor over error with block scales and rotation, on the paper's inputs."
    x = fp8.outliers(3, 1, n, d, seed=0)
    exact = fp8.attention_exact(*x)
    plain, both = fp8.attention(*x, "tensor"), fp8.attention(*x, "block", rotate=0)
    return round(fp8.rmse(plain, exact) / fp8.rmse(both, exact), 1)

def lowers(q, k, granularity="block"):
    "Error without rotation over the error with it."
    return round(error(q, k, None, granularity) / error(q, k, 0, granularity), 1)
""",
    [
        Claim(
            "Range of FP8 E4M3",
            SHAH24,
            "448",
            "torch.finfo(torch.float8_e4m3fn).max",
            "largest finite value; the smallest is «2**-9», so that of the weights of these scores "
            "«round(100 * fp8.flushed(scores.softmax(-1), fp8.E4M3))» % would become 0 unscaled, and scaled by 2⁸ "
            "«round(100 * fp8.flushed(256 * scores.softmax(-1), fp8.E4M3))» %",
            says="±448",
        ),
        Claim(
            "S ~ N(0, 1) at d 128 for q, k ~ N(0, 1) and scale 1/√d",
            FOLKLORE,
            "1.0",
            "round(scores.std().item(), 1)",
            "before the scale the deviation is √128 = 11.3 («round(raw.std().item(), 1)») and the largest of "
            "«raw.numel()» scores «round(raw.abs().max().item())»: neither leaves ±448. After it the largest is "
            "«round(scores.abs().max().item(), 1)», and a scale of 448 over that makes use of the range",
            says="deviation 1",
        ),
        Claim(
            "A Hadamard rotation lowers the quantisation error",
            SHAH24,
            "yes",
            "lowers(loud(q), loud(k)) > 2 and lowers(loud(q), loud(k), 'tensor') > 2",
            "two outlier channels in q and k: «lowers(loud(q), loud(k))»× less error of the output with a scale for "
            "each block, «lowers(loud(q), loud(k), 'tensor')»× with one for the tensor. Without outliers it changes "
            "nothing («lowers(q, k)»×), with outliers in k alone little («lowers(q, loud(k))»×)",
            rule="true",
            says="lowers it",
        ),
        Claim(
            "Block scales and rotation have 2.6× less error than one scale for the tensor",
            SHAH24,
            "2.6",
            "paper_inputs(1024, 64)",
            "inputs as published, N(0, 1) with 0.1 % of entries ten times as wide; shapes and seed are not. The "
            "direction is certain, the size is a matter of which entries are drawn: d 128 gives "
            "«paper_inputs(512, 128)»×",
            "×",
        ),
    ],
)

DECODE = Section(
    "Decoding",
    """
from tilewise.textbook.decode import Load, published_rule, threshold

def load(batch, keys, heads=32):
    "One query a head on an A100, key tiles of 128; time in key tiles of one SM."
    return Load(tasks=batch * heads, blocks=ceil(keys / 128), processors=a100.sms)

def gain(batch, keys):
    "How many times faster the best number of splits is than none."
    return round(load(batch, keys).time(1) / load(batch, keys).time(load(batch, keys).best()), 2)

h200 = device("h200")

def seconds(keys, sms, d=128, heads=8):
    "K and V of one sequence in fp16, read by so many of the SMs, each with its share of the bandwidth."
    return 4 * d * heads * keys / (h200.hbm_tb_s * 1e12 * sms / h200.sms)

def pays(keys, overhead=5e-6, heads=8):
    "Whether reading on all SMs instead of one for each head saves more than a second kernel costs (seconds)."
    return seconds(keys, h200.sms) + overhead < seconds(keys, heads)
""",
    [
        Claim(
            "Splitting K pays for one sequence of 8192 keys, 32 heads, on an A100",
            "Flash-Decoding, 2023",
            "yes",
            "load(batch=1, keys=8192).pays()",
            "32 tasks leave 76 of 108 SMs idle: «gain(batch=1, keys=8192)»× in time with "
            "«load(batch=1, keys=8192).best()» splits; the rule of flash-attention 2 takes "
            "«published_rule(load(batch=1, keys=8192))»",
            rule="true",
            says="pays",
        ),
        Claim(
            "It does not where batch × heads fill the device",
            "Flash-Decoding, 2023",
            "yes",
            "published_rule(load(batch=64, keys=8192)) == 1 and gain(batch=64, keys=8192) < 1.02",
            "batch 64: at most «gain(batch=64, keys=8192)»×. In between the last wave decides: batch 4 is 128 tasks "
            "on 108 SMs and could gain «gain(batch=4, keys=8192)»×, which the published rule (no split from 80 % on) "
            "leaves",
            rule="true",
            says="does not pay",
        ),
        Claim(
            "It pays above a threshold of keys only",
            FOLKLORE,
            "yes",
            "1 < threshold(8, h200.sms) and not pays(128) and pays(4096)",
            "H200, batch 1, 8 KV heads, d 128: with a second kernel of two tile times from «threshold(8, h200.sms)» "
            "key tiles on; with one of 5 µs from «next(keys for keys in range(1, 4096) if pays(keys))» keys on. It "
            "is a property of batch × heads and of that kernel, not one number; for «h200.sms» tasks it is "
            "«threshold(h200.sms, h200.sms)»",
            rule="true",
            says="pays above a threshold",
        ),
    ],
)

DEVICES = [COMPUTE, PRECISION, FP8, DECODE]
