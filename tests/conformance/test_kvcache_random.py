"""Random calls with a cache: any lengths, layout and features together, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from targets import Target
from tilewise import masks

from .caches import CacheCall, Sizes, draw_call, heads_first, indexed, paged, sliced, verify
from .calls import Draw
from .features import CURVE, striped
from .test_kvcache import rotary

CAPACITY = 170


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    batch = draw(st.integers(1, 4))
    ragged = draw(st.booleans())
    most = draw(st.sampled_from([1, 2, 5, 20]))
    rows: int | tuple[int, ...] = most
    if ragged:
        rows = tuple(draw(st.integers(0, most)) for _ in range(batch))
    new = draw(st.one_of(st.none(), st.just(most))) if ragged else draw(st.one_of(st.none(), st.integers(0, 20)))
    room = CAPACITY - max(most, new or 0)
    used = tuple(draw(st.integers(0, room)) for _ in range(batch))
    pad = tuple(draw(st.integers(0, n)) for n in used) if draw(st.booleans()) else None
    group, heads_kv = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 2))
    head_dim, head_dim_v = draw(st.sampled_from([(16, 16), (8, 24), (40, 16), (32, 32), (13, 5)]))
    return Sizes(used, rows, new, group * heads_kv, heads_kv, head_dim, head_dim_v, CAPACITY, pad)


LAYOUTS: dict[str, Callable[[CacheCall], CacheCall]] = {
    "rows": lambda call: call,
    "indexed": indexed,
    "heads_first": heads_first,
    "sliced": sliced,
    "pages_of_1": lambda call: paged(call, 1),
    "pages_of_7": lambda call: paged(call, 7),
    "pages_of_16": lambda call: paged(call, 16),
    "pages_sliced": lambda call: sliced(paged(call, 32)),
}


@st.composite
def options(draw: st.DrawFn, s: Sizes, source: Draw) -> dict[str, Any]:
    """Any features together."""
    found: dict[str, Any] = {}
    causal = draw(st.sampled_from([False, True, "top_left"]))
    bound = st.one_of(st.none(), st.integers(0, 60))
    optional: dict[str, Callable[[], Any]] = {
        "window": lambda: (draw(bound), draw(bound)),
        "mask": lambda: draw(st.sampled_from(["predicate", "prefix", "tree"])),
        "softcap": lambda: draw(st.sampled_from([0.5, 4.0])),
        "score_mod": lambda: CURVE,
        "alibi_slopes": lambda: source.uniform(*draw(st.sampled_from([(s.heads_q,), (s.batch, s.heads_q)]))),
        "sinks": lambda: source.normal(s.heads_q),
        "softmax_scale": lambda: draw(st.sampled_from([0.1, 1.0])),
        "softmax_max": lambda: draw(st.sampled_from([-100.0, 0.0, 5.0, 200.0])),
        "rotary": lambda: rotary(2 * draw(st.integers(1, s.head_dim // 2)), source, draw(st.booleans())),
    }
    for name, make in optional.items():
        if draw(st.booleans()):
            found[name] = make()
    splits = draw(st.sampled_from([{}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 128}]))
    named: dict[str, Callable[[], Any]] = {
        "predicate": lambda: tilewise.Predicate(striped),
        "prefix": lambda: masks.PrefixLM(source.integers(40, s.batch)),
        "tree": lambda: source.bools(s.batch, s.seqlen_q, s.seqlen_q),
    }
    if "mask" in found:
        found["mask"] = named[found["mask"]]()
    return {"causal": causal, **splits, **found}


@pytest.mark.parametrize(
    "dtype",
    [None, *(pytest.param(x, marks=pytest.mark.large) for x in (torch.float16, torch.bfloat16))],
    ids=["usual", "float16", "bfloat16"],
)
@settings(max_examples=40)
@given(data=st.data())
def test_random_calls(target: Target, dtype: torch.dtype | None, data: st.DataObject) -> None:
    source, drawn = Draw(target.device, data.draw(st.integers(0, 2**16))), data.draw(sizes())
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    call = LAYOUTS[layout](draw_call(drawn, dtype or target.dtype, source))
    verify(target, call.having(**data.draw(options(drawn, source))))
