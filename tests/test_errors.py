"""Bad input: which error, and that its message names the argument, what was passed, what is supported and the fix."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tilewise
from tilewise import (
    BlockMask,
    Causal,
    Document,
    Predicate,
    PrefixLM,
    ScoreMod,
    Window,
    cpu,
    dispatch,
    errors,
    reference,
)
from tilewise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError

# The package without its types, to be called wrongly.
loose: Any = tilewise
INT_TYPES = (torch.int32, torch.int16, torch.uint8)
Q, K, V = (torch.linspace(-1, 1, 2 * s * h * 8).view(2, s, h, 8) for s, h in ((6, 4), (7, 2), (7, 2)))
X = torch.linspace(-1, 1, 10 * 2 * 8).view(10, 2, 8)
META = functools.partial(torch.zeros, device="meta")


def dense(**changes: Any) -> Callable[[], Any]:
    arguments = {"q": Q, "k": K, "v": V, **changes}
    return lambda: tilewise.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def packed(**changes: Any) -> Callable[[], Any]:
    offsets = torch.tensor([0, 3, 10])
    arguments = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 7, "max_seqlen_k": 7, **changes}
    x = arguments.pop("x", X)
    return lambda: tilewise.attention_varlen(x, x, x, **arguments)


def merge(o_a: Any = Q, lse_a: Any = None, o_b: Any = Q, lse_b: Any = None) -> Callable[[], Any]:
    lse = torch.zeros(2, 4, 6)
    return lambda: tilewise.merge_states(o_a, lse if lse_a is None else lse_a, o_b, lse if lse_b is None else lse_b)


def i64(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def bools(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def captures(value: object) -> Callable[..., Any]:
    return lambda b, h, q, k: q >= value


def sees(b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
    return q >= k


def doubled(s: Any, b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
    return s * 2


class Bad(NamedTuple):
    """A call, the error that it must raise, the argument that the message names and what it says was passed."""

    call: Callable[[], Any]
    kind: type[errors.TilewiseError]
    argument: str
    got: str


TENSORS = {
    "q_none": Bad(dense(q=None), DtypeError, "q", "NoneType"),
    "k_none": Bad(dense(k=None), DtypeError, "k", "NoneType"),
    "v_array": Bad(dense(v=np.zeros((2, 7, 2, 8))), DtypeError, "v", "ndarray"),
    "rank_3": Bad(dense(q=Q[0]), ShapeError, "q", "rank 3, shape [6, 4, 8]"),
    "rank_4_packed": Bad(packed(x=Q), ShapeError, "q", "rank 4"),
    "heads_do_not_divide": Bad(dense(q=Q[:, :, :3]), ShapeError, "heads", "3 query heads with 2 key/value heads"),
    "no_heads": Bad(dense(q=Q[:, :, :0], k=K[:, :, :0], v=V[:, :, :0]), ShapeError, "heads", "0 query heads"),
    "head_dims_differ": Bad(dense(k=K[..., :7]), ShapeError, "k", "head dim 7, q's is 8"),
    "head_dim_0": Bad(dense(q=Q[..., :0], k=K[..., :0]), ShapeError, "q", "head dim 0"),
    "head_dim_513": Bad(dense(v=torch.zeros(2, 7, 2, 513)), ShapeError, "v", "head dim 513"),
    "k_longer_than_v": Bad(dense(v=V[:, :5]), ShapeError, "v", "[2, 5, 2, 8] beside k [2, 7, 2, 8]"),
    "heads_of_v": Bad(dense(v=V[:, :, :1]), ShapeError, "v", "[2, 7, 1, 8]"),
    "batches_differ": Bad(dense(k=K[:1], v=V[:1]), ShapeError, "k", "batch 1, q's is 2"),
    "dtypes_differ": Bad(dense(k=K.double()), DtypeError, "q, k, v", "k torch.float64, v torch.float32"),
    "float8": Bad(dense(q=Q.to(torch.float8_e4m3fn)), DtypeError, "q", "torch.float8_e4m3fn"),
    "complex": Bad(dense(q=Q + 0j, k=K + 0j, v=V + 0j), DtypeError, "q", "torch.complex64"),
    "bool": Bad(dense(q=Q > 0, k=K > 0, v=V > 0), DtypeError, "q", "torch.bool"),
    "expanded": Bad(dense(q=torch.zeros(1).expand(2, 6, 4, 8)), ShapeError, "q", "last-dimension stride 0"),
    "transposed": Bad(dense(v=V.mT.contiguous().mT), ShapeError, "v", "last-dimension stride 2"),
    "sparse": Bad(dense(q=Q.to_sparse()), ShapeError, "q", "layout torch.sparse_coo"),
    "mkldnn": Bad(dense(k=K.to_mkldnn()), ShapeError, "k", "layout torch._mkldnn"),
    "jagged": Bad(
        dense(v=torch.nested.nested_tensor([V[0], V[1, :3]], layout=torch.jagged)),
        ShapeError,
        "q",
        "beside nested ones",
    ),
    "k_elsewhere": Bad(dense(k=K.to("meta")), DeviceError, "k", "meta, q on cpu"),
    "q_elsewhere": Bad(dense(q=Q.to("meta")), DeviceError, "k", "cpu, q on meta"),
    "out_dtype_narrow": Bad(dense(out_dtype=torch.float16), DtypeError, "out_dtype", "torch.float16"),
    "out_dtype_text": Bad(dense(out_dtype="float32"), DtypeError, "out_dtype", "'float32'"),
    "deterministic": Bad(dense(deterministic="no"), ArgumentError, "deterministic", "'no'"),
    "return_lse": Bad(dense(return_lse=None), ArgumentError, "return_lse", "None"),
    "validate": Bad(packed(validate=1), ArgumentError, "validate", "1"),
    "backend_unknown": Bad(dense(backend="cuda"), ArgumentError, "backend", "'cuda'"),
    "backend_type": Bad(dense(backend=["cpu"]), ArgumentError, "backend", "['cpu']"),
} | {
    f"integers_{dtype}": Bad(dense(q=Q.to(dtype), k=K.to(dtype), v=V.to(dtype)), DtypeError, "q", str(dtype))
    for dtype in INT_TYPES
}

SCALARS = (
    {
        f"{name}_{value}": Bad(dense(**{name: value}), ArgumentError, name, got)
        for name in ("softmax_scale", "softcap")
        for value, got in (
            (math.nan, "nan"),
            (math.inf, "inf"),
            (0, "0"),
            (-0.0, "-0.0"),
            (-1.5, "-1.5"),
            (10**400, "1000"),
            (1e300, "1e+300"),
            (1e-300, "1e-300"),
            (True, "True"),
            ("1", "'1'"),
            (1j, "1j"),
            (np.float32(0.5), "0.5"),
            (torch.tensor(1.0), "Tensor"),
            ([1.0], "[1.0]"),
        )
    }
    | {
        f"dropout_p_{value}": Bad(dense(dropout_p=value), ArgumentError, "dropout_p", got)
        for value, got in (
            (1.0, "1.0"),
            (1, "1"),
            (-0.1, "-0.1"),
            (math.nan, "nan"),
            (True, "True"),
            (None, "None"),
            ("0.1", "'0.1'"),
            (torch.tensor(0.1), "Tensor"),
        )
    }
    | {
        f"dropout_seed_{name}": Bad(dense(dropout_p=p, dropout_seed=seed), kind, "dropout_seed", got)
        for name, p, seed, kind, got in (
            ("float", 0.1, 1.0, ArgumentError, "1.0"),
            ("numpy", 0.1, np.int64(3), ArgumentError, "3"),
            ("too_large", 0.1, 2**63, ArgumentError, "9223372036854775808"),
            ("int32", 0.1, torch.tensor(1, dtype=torch.int32), ArgumentError, "torch.int32"),
            ("vector", 0.1, i64(1, 2), ArgumentError, "torch.int64 [2]"),
            ("generator", 0.1, torch.Generator(), ArgumentError, "Generator"),
            ("meta", 0.1, META((), dtype=torch.int64), DeviceError, "meta"),
            ("without_dropout", 0.0, "text", ArgumentError, "'text'"),
        )
    }
)

ADDED = {
    "bias_shape": Bad(dense(bias=torch.zeros(5, 7)), ShapeError, "bias", "shape [5, 7]"),
    "bias_rank_5": Bad(dense(bias=torch.zeros(1, 1, 1, 6, 7)), ShapeError, "bias", "shape [1, 1, 1, 6, 7]"),
    "bias_int": Bad(dense(bias=torch.zeros(6, 7).int()), DtypeError, "bias", "torch.int32"),
    "bias_bool": Bad(dense(bias=bools(6, 7)), DtypeError, "bias", "torch.bool"),
    "bias_complex": Bad(dense(bias=torch.zeros(6, 7) + 0j), DtypeError, "bias", "torch.complex64"),
    "bias_float8": Bad(dense(bias=torch.zeros(6, 7).to(torch.float8_e4m3fn)), DtypeError, "bias", "float8"),
    "bias_number": Bad(dense(bias=1.0), DtypeError, "bias", "float"),
    "bias_array": Bad(dense(bias=np.zeros((6, 7))), DtypeError, "bias", "ndarray"),
    "bias_sparse": Bad(dense(bias=torch.zeros(6, 7).to_sparse()), ShapeError, "bias", "sparse_coo"),
    "bias_elsewhere": Bad(dense(bias=META(6, 7)), DeviceError, "bias", "meta, q on cpu"),
    "bias_packed": Bad(packed(bias=torch.zeros(7, 7)), UnsupportedError, "bias", "packed sequences"),
    "slopes_shape": Bad(dense(alibi_slopes=torch.ones(3)), ShapeError, "alibi_slopes", "shape [3]"),
    "slopes_batch": Bad(dense(alibi_slopes=torch.ones(1, 4)), ShapeError, "alibi_slopes", "shape [1, 4]"),
    "slopes_int": Bad(dense(alibi_slopes=torch.ones(4).int()), DtypeError, "alibi_slopes", "torch.int32"),
    "slopes_double": Bad(dense(alibi_slopes=torch.ones(4).double()), DtypeError, "alibi_slopes", "torch.float64"),
    "slopes_list": Bad(dense(alibi_slopes=[0.5] * 4), DtypeError, "alibi_slopes", "list"),
    "slopes_elsewhere": Bad(dense(alibi_slopes=META(4)), DeviceError, "alibi_slopes", "meta"),
    "sinks_kv_heads": Bad(dense(sinks=torch.ones(2)), ShapeError, "sinks", "shape [2]"),
    "sinks_batch": Bad(dense(sinks=torch.ones(2, 4)), ShapeError, "sinks", "shape [2, 4]"),
    "sinks_half": Bad(dense(sinks=torch.ones(4).half()), DtypeError, "sinks", "torch.float16"),
    "sinks_number": Bad(dense(sinks=1.0), DtypeError, "sinks", "float"),
    "score_mod_function": Bad(dense(score_mod=doubled), ArgumentError, "score_mod", "function"),
    "score_mod_without_dfn": Bad(
        dense(q=Q.clone().requires_grad_(), score_mod=ScoreMod(doubled)), UnsupportedError, "score_mod", "without dfn"
    ),
    "score_mod_fn": Bad(lambda: loose.ScoreMod(3), ArgumentError, "ScoreMod.fn", "3"),
    "score_mod_dfn": Bad(lambda: loose.ScoreMod(doubled, 3), ArgumentError, "ScoreMod.dfn", "3"),
    "score_mod_parameters": Bad(lambda: ScoreMod(lambda s: s), ArgumentError, "ScoreMod.fn", "with 1 parameters"),
    "score_mod_aux_count": Bad(
        lambda: ScoreMod(lambda s, b, h, q, k: s, aux=(1,)), ArgumentError, "ScoreMod.fn", "with 5 parameters"
    ),
    "aux_needs_gradient": Bad(
        dense(score_mod=ScoreMod(doubled, doubled, (torch.ones((), requires_grad=True),))),
        UnsupportedError,
        "ScoreMod.aux[0]",
        "requires a gradient",
    ),
    "aux_elsewhere": Bad(
        dense(score_mod=ScoreMod(doubled, None, (1, META(1)))), DeviceError, "ScoreMod.aux[1]", "meta"
    ),
    "aux_text": Bad(lambda: ScoreMod(doubled, aux=("a",)), ArgumentError, "ScoreMod.aux", "('a',)"),
}

MASKS = (
    {
        f"causal_{value}": Bad(dense(causal=value), ArgumentError, "causal", got)
        for value, got in (
            (1, "1"),
            (0, "0"),
            (None, "None"),
            ("top-left", "'top-left'"),
            (torch.tensor([True, False]), "Tensor"),
            (np.bool_(True), "True"),
        )
    }
    | {
        f"window_{value}": Bad(dense(window=value), ArgumentError, argument, got)
        for value, argument, got in (
            ((-1, 0), "window left bound", "-1"),
            ((0, -1), "window right bound", "-1"),
            ((True, 0), "window left bound", "True"),
            ((2.0, 0), "window left bound", "2.0"),
            (("2", 0), "window left bound", "'2'"),
            ((np.int64(2), 0), "window left bound", "2"),
            ((torch.tensor(2), 0), "window left bound", "tensor(2)"),
            (3, "window", "3"),
            ((1, 2, 3), "window", "(1, 2, 3)"),
            (Causal(), "window", "Causal"),
        )
    }
    | {
        "mask_float": Bad(dense(mask=torch.zeros(6, 7)), DtypeError, "mask", "torch.float32 [6, 7]"),
        "mask_rank_5": Bad(dense(mask=bools(1, 1, 1, 6, 7)), DtypeError, "mask", "[1, 1, 1, 6, 7]"),
        "mask_shape": Bad(dense(mask=bools(5, 7)), ShapeError, "mask", "shape [5, 7]"),
        "mask_larger": Bad(dense(mask=bools(3, 1, 6, 7)), ShapeError, "mask", "shape [3, 1, 6, 7]"),
        "mask_elsewhere": Bad(dense(mask=bools(6, 7).to("meta")), DeviceError, "mask", "meta"),
        "mask_text": Bad(dense(mask="causal"), ArgumentError, "mask", "str"),
        "mask_class": Bad(dense(mask=Causal), ArgumentError, "Predicate.fn", "the class Causal"),
        "mask_packed": Bad(packed(mask=bools(7, 7)), UnsupportedError, "mask", "boolean tensor with packed"),
        "mask_parameters": Bad(dense(mask=lambda q, k: q >= k), ArgumentError, "Predicate.fn", "with 2 parameters"),
        "mask_captures_tensor": Bad(
            dense(mask=captures(i64(1))), ArgumentError, "captures", "captures the tensor 'value'"
        ),
        "mask_aux_needs_gradient": Bad(
            dense(mask=Predicate(sees, (torch.ones((), requires_grad=True),))), UnsupportedError, "Predicate.aux[0]", ""
        ),
        "alignments": Bad(
            dense(mask=Causal("top_left") & Causal("bottom_right")), ArgumentError, "mask", "both alignments"
        ),
        "alignment_of_causal": Bad(
            dense(causal=True, mask=Causal("top_left")), ArgumentError, "mask", "both alignments"
        ),
        "align": Bad(lambda: Causal("left"), ArgumentError, "Causal.align", "'left'"),
        "and_word": Bad(lambda: Causal() and Window(1, 0), ArgumentError, "mask", "truth value"),
        "and_function": Bad(lambda: loose.Causal() & sees, ArgumentError, "operand of &", "function"),
        "tensor_and": Bad(lambda: bools(2, 2) & loose.Causal(), ArgumentError, "operand of &", "Tensor"),
        "or_none": Bad(lambda: loose.Causal() | None, ArgumentError, "operand of |", "NoneType"),
        "document_lengths": Bad(dense(mask=Document(i64(*[0] * 6))), ShapeError, "Document.k_ids", "shape [6]"),
        "document_batch": Bad(
            dense(mask=Document(torch.zeros(3, 6).long(), i64(*[0] * 7))), ShapeError, "Document.q_ids", "shape [3, 6]"
        ),
        "document_dtype": Bad(lambda: Document(torch.zeros(3)), ShapeError, "Document.q_ids", "torch.float32 [3]"),
        "document_list": Bad(lambda: loose.Document([0, 0]), ShapeError, "Document.q_ids", "list"),
        "document_negative": Bad(
            lambda: Document.from_lengths([2, -1]), ArgumentError, "Document.from_lengths", "[2, -1]"
        ),
        "document_float": Bad(
            lambda: loose.Document.from_lengths([2.5]), ArgumentError, "Document.from_lengths", "[2.5]"
        ),
        "document_elsewhere": Bad(
            dense(mask=Document(META(6, dtype=torch.int64), i64(*[0] * 7))), DeviceError, "Document.q_ids", "meta"
        ),
        "prefix_negative": Bad(lambda: PrefixLM(-1), ArgumentError, "PrefixLM.prefix", "-1"),
        "prefix_bool": Bad(lambda: PrefixLM(True), ArgumentError, "PrefixLM.prefix", "True"),
        "prefix_batch": Bad(dense(mask=PrefixLM(i64(1, 2, 3))), ShapeError, "PrefixLM.prefix", "shape [3]"),
        "tiles_dtype": Bad(lambda: BlockMask(torch.ones(1, 1, 1, 1), 64, 64), ShapeError, "BlockMask.tiles", "float32"),
        "tiles_rank": Bad(lambda: BlockMask(bools(1, 1), 64, 64), ShapeError, "BlockMask.tiles", "[1, 1]"),
        "tiles_count": Bad(
            dense(mask=BlockMask(bools(1, 1, 2, 2), 64, 64)), ShapeError, "BlockMask.tiles", "[1, 1, 2, 2]"
        ),
        "tiles_heads": Bad(
            dense(mask=BlockMask(bools(1, 2, 1, 1), 64, 64)), ShapeError, "BlockMask.tiles", "[1, 2, 1, 1]"
        ),
        "tiles_packed": Bad(
            packed(mask=BlockMask(bools(1, 1, 1, 1), 8, 8)), UnsupportedError, "mask", "BlockMask with packed"
        ),
        "block_0": Bad(lambda: BlockMask.longformer(100, block=0), ArgumentError, "block", "0"),
        "block_q_float": Bad(lambda: loose.BlockMask(bools(1, 1, 1, 1), 64.0, 64), ArgumentError, "block_q", "64.0"),
        "random_blocks": Bad(lambda: BlockMask.bigbird(100, random_blocks=-1), ArgumentError, "random_blocks", "-1"),
        "from_function": Bad(lambda: loose.BlockMask.from_mask(sees, 5, 5), ArgumentError, "from_mask", "function"),
        "from_mask_words": Bad(lambda: BlockMask.from_mask(Causal(), 5, 5, foo=1), ArgumentError, "from_mask", "foo"),
    }
)

LENGTHS = {
    "offsets_none": Bad(packed(cu_seqlens_q=None), DtypeError, "cu_seqlens_q", "NoneType"),
    "all_none": Bad(packed(cu_seqlens_q=None, cu_seqlens_k=None), DtypeError, "cu_seqlens_q", "NoneType"),
    "offsets_list": Bad(packed(cu_seqlens_k=[0, 3, 10]), DtypeError, "cu_seqlens_k", "list"),
    "offsets_float": Bad(packed(cu_seqlens_q=torch.tensor([0.0, 3, 10])), DtypeError, "cu_seqlens_q", "torch.float32"),
    "offsets_int16": Bad(packed(cu_seqlens_q=i64(0, 3, 10).short()), DtypeError, "cu_seqlens_q", "torch.int16"),
    "offsets_empty": Bad(packed(cu_seqlens_q=i64()), DtypeError, "cu_seqlens_q", "torch.float32"),
    "offsets_rank": Bad(packed(cu_seqlens_q=i64(0, 3, 10)[None]), ShapeError, "cu_seqlens_q", "shape [1, 3]"),
    "offsets_count": Bad(packed(cu_seqlens_q=i64(0, 10)), ShapeError, "cu_seqlens", "cu_seqlens_q [2]"),
    "offsets_elsewhere": Bad(packed(cu_seqlens_q=META(3, dtype=torch.int64)), DeviceError, "cu_seqlens_q", "meta"),
    "offsets_start": Bad(packed(cu_seqlens_q=i64(1, 3, 10)), ArgumentError, "cu_seqlens_q", "first offset of 1"),
    "offsets_decrease": Bad(
        packed(cu_seqlens_k=i64(0, 11, 10)), ArgumentError, "cu_seqlens_k", "11 then 10 at member 1"
    ),
    "offsets_end": Bad(packed(cu_seqlens_q=i64(0, 3, 11)), ArgumentError, "cu_seqlens_q", "an end of 11"),
    "max_too_small": Bad(packed(max_seqlen_k=6), ArgumentError, "max_seqlen_k", "6, but member 1 has 7 rows"),
    "max_negative": Bad(packed(max_seqlen_q=-1), ArgumentError, "max_seqlen_q", "-1"),
    "max_float": Bad(packed(max_seqlen_q=7.0), ArgumentError, "max_seqlen_q", "7.0"),
    "max_text": Bad(packed(max_seqlen_q="7"), ArgumentError, "max_seqlen_q", "'7'"),
    "max_none": Bad(packed(max_seqlen_q=None), ArgumentError, "max_seqlen_q", "None"),
    "max_numpy": Bad(packed(max_seqlen_q=np.int64(7)), ArgumentError, "max_seqlen_q", "7"),
    "max_tensor": Bad(packed(max_seqlen_q=i64(7)), ArgumentError, "max_seqlen_q", "Tensor"),
    "max_overflow": Bad(packed(max_seqlen_q=2**70), ArgumentError, "max_seqlen_q", "1180591620717411303424"),
    "used_too_long": Bad(packed(seqused_k=i64(4, 0)), ArgumentError, "seqused_k[0]", "4"),
    "used_negative": Bad(packed(seqused_k=i64(0, -1)), ArgumentError, "seqused_k[1]", "-1"),
    "used_count": Bad(packed(seqused_k=i64(1)), ShapeError, "cu_seqlens", "seqused_k [1]"),
    "used_float": Bad(packed(seqused_k=torch.ones(2)), DtypeError, "seqused_k", "torch.float32"),
}

STATES = {
    "o_none": Bad(merge(o_a=None), DtypeError, "o_a", "NoneType"),
    "o_int": Bad(merge(o_a=Q.int()), DtypeError, "o_a", "torch.int32"),
    "o_dtypes": Bad(merge(o_b=Q.double()), DtypeError, "o_b", "torch.float64"),
    "o_shapes": Bad(merge(o_b=Q[:1]), ShapeError, "o_b", "[1, 6, 4, 8]"),
    "o_rank": Bad(merge(Q[0, 0], torch.zeros(4), Q[0, 0], torch.zeros(4)), ShapeError, "o_a", "rank 2"),
    "o_elsewhere": Bad(merge(o_b=Q.to("meta")), DeviceError, "o_b", "meta"),
    "lse_like_o": Bad(merge(lse_a=Q), ShapeError, "lse_a", "[2, 6, 4, 8]"),
    "lse_half": Bad(merge(lse_a=torch.zeros(2, 4, 6).half()), DtypeError, "lse_a", "torch.float16"),
    "lse_int": Bad(merge(lse_b=torch.zeros(2, 4, 6).int()), DtypeError, "lse_b", "torch.int32"),
}

CASES = TENSORS | SCALARS | ADDED | MASKS | LENGTHS | STATES


FORMAT = r"(?P<argument>.*?): got (?P<got>.*); supported: (?P<supported>.+)\. Fix: (?P<fix>.+)\."


def check(bad: Bad) -> None:
    with pytest.raises(bad.kind) as caught:
        bad.call()
    assert type(caught.value) is bad.kind
    message = re.fullmatch(FORMAT, str(caught.value))
    assert message is not None
    assert message["argument"].endswith(bad.argument) or message["argument"].startswith(bad.argument)
    assert bad.got in message["got"]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [x.clone() for x in (Q, K, V, X)]
    for work in ("forward", "backward"):
        monkeypatch.setattr(cpu, work, lambda *_: pytest.fail("the backend ran"))
    check(CASES[name])
    assert all(torch.equal(x, y) for x, y in zip(before, (Q, K, V, X), strict=True))


# What only the work itself can find out.
FOUND_LATE = {
    "document_promise": Bad(
        dense(q=X[None], k=X[None], v=X[None], mask=Document(torch.arange(10) % 2, contiguous=True)),
        ArgumentError,
        "Document.contiguous",
        "not one run of keys",
    ),
    "predicate_int": Bad(dense(mask=lambda b, h, q, k: (q >= k).int()), DtypeError, "Predicate.fn", "torch.int32"),
    "predicate_none": Bad(dense(mask=lambda b, h, q, k: None), DtypeError, "Predicate.fn", "None"),
    "predicate_shape": Bad(dense(mask=lambda b, h, q, k: bools(3, 3)), DtypeError, "Predicate.fn", "[3, 3]"),
    "score_mod_number": Bad(dense(score_mod=ScoreMod(lambda s, b, h, q, k: 1)), DtypeError, "ScoreMod.fn", "1"),
    "score_mod_int": Bad(dense(score_mod=ScoreMod(lambda s, b, h, q, k: q)), DtypeError, "ScoreMod.fn", "torch.int64"),
    "score_mod_shape": Bad(
        dense(score_mod=ScoreMod(lambda s, b, h, q, k: torch.ones(3, 3))), DtypeError, "ScoreMod.fn", "[3, 3]"
    ),
}


@pytest.mark.parametrize("name", FOUND_LATE)
def test_what_is_found_late_is_named_too(name: str) -> None:
    check(FOUND_LATE[name])


def test_wrong_result_of_a_derivative_is_named() -> None:
    mod = ScoreMod(doubled, lambda ds, s, b, h, q, k: torch.ones(3, 3))
    out = tilewise.attention(Q.clone().requires_grad_(), K, V, score_mod=mod)
    check(Bad(out.sum().backward, DtypeError, "ScoreMod.dfn", "[3, 3]"))


def test_a_backend_that_cannot_serve_the_call_says_why() -> None:
    for name in set(dispatch.BACKENDS) - {"cpu"}:
        check(Bad(dense(q=Q.double(), k=K.double(), v=V.double(), backend=name), UnsupportedError, "backend", name))


def test_errors_are_python_errors_too() -> None:
    assert issubclass(errors.ShapeError, ValueError) and issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.DtypeError, errors.ArgumentError) and issubclass(errors.DeviceError, errors.TilewiseError)


LEGAL: dict[str, dict[str, Any]] = {
    "whole_scale": {"softmax_scale": 1},
    "numpy_double_scale": {"softmax_scale": 1 / np.sqrt(8)},
    "window_list": {"window": [2, None]},
    "window_beyond_int64": {"window": (10**30, 10**30)},
    "prefix_beyond_int64": {"mask": PrefixLM(2**70)},
    "infinite_aux": {"mask": Predicate(lambda b, h, q, k, most: q - k < most, (math.inf,))},
    "seed_without_dropout": {"dropout_seed": 5},
    "constant_predicate": {"mask": lambda b, h, q, k: True},
}


@pytest.mark.parametrize("name", LEGAL)
def test_odd_but_legal_input_is_taken(name: str) -> None:
    expected = reference.attention(Q, K, V, **LEGAL[name]).float()
    torch.testing.assert_close(tilewise.attention(Q, K, V, **LEGAL[name]), expected)


def test_meta_tensors_give_shapes() -> None:
    out, lse = tilewise.attention(Q.to("meta"), K.to("meta"), V.to("meta"), return_lse=True)
    assert out.device.type == lse.device.type == "meta"
    assert out.shape == (2, 6, 4, 8) and lse.shape == (2, 4, 6)


def test_aux_without_gradients_may_require_them_later() -> None:
    learned = torch.ones((), requires_grad=True)
    mod = ScoreMod(lambda s, b, h, q, k, c: s * c, None, (learned,))
    with torch.no_grad():
        torch.testing.assert_close(tilewise.attention(Q, K, V, score_mod=mod), tilewise.attention(Q, K, V))
