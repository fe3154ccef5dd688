"""Random combinations of everything at once: what no list of cases thinks of."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from targets import Target
from tilewise.mask_algebra import Mask
from tilewise.masks import as_mask

from .calls import Call, Draw, Shape, cotangents, dense, packed
from .features import MASKS, MODIFIERS
from .test_layouts import LAYOUTS
from .verify import compare, compute, declines

# Of a few hundred examples each mask, modifier, layout and dtype meets each other one several times.
EXAMPLES = 320
# Where nearly each is a kernel of its own, to be interpreted or compiled.
EXAMPLES_OF_KERNELS = 24

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHORTHANDS = ("causal", "window")
# Options that a packed call takes as well.
ANYWHERE = ("softcap", "alibi", "alibi_per_batch", "score_mod", "score_mod_aux", "sinks", "dropout")

sizes = st.integers(0, 40)
heads = st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)])
head_dims = st.sampled_from([(16, 16), (8, 24), (5, 3), (32, 32), (1, 7)])
dtypes = st.sampled_from(DTYPES)
kinds = st.sampled_from(["both", "both", "out", "lse"])
modifiers = st.lists(st.sampled_from(sorted(set(MODIFIERS) - {"plain"})), max_size=3, unique=True)
layouts = st.fixed_dictionaries({name: st.sampled_from([None, *LAYOUTS]) for name in ("q", "k", "v")})


@st.composite
def shapes(draw: Any) -> Shape:
    (heads_q, heads_kv), dims = draw(heads), draw(head_dims)
    return Shape(draw(st.integers(0, 2)), draw(sizes), draw(sizes), heads_q, heads_kv, *dims)


def _merged(options: list[dict[str, Any]], either: bool) -> dict[str, Any]:
    """Options together; masks combine by | or &, the first of two other values stays."""
    total: dict[str, Any] = {}
    for chosen in options:
        for name, value in chosen.items():
            if name == "mask" and name in total:
                mask: Mask = as_mask(total[name])
                total[name] = mask | as_mask(value) if either else mask & as_mask(value)
            else:
                total.setdefault(name, value)
    return total


def _verify(target: Target, call: Call, kind: str) -> None:
    if not declines(target, call):
        wanted = cotangents(call, Draw(target.device, seed=1), kind)
        compare(call, compute(target, call, wanted), wanted)


def _examples(target: Target, share: float = 1.0) -> settings:
    return settings(max_examples=int(share * (EXAMPLES if target.name == "cpu" else EXAMPLES_OF_KERNELS)))


def test_dense(target: Target) -> None:
    @_examples(target)
    @given(
        shapes(),
        dtypes,
        st.lists(st.sampled_from(sorted(MASKS)), max_size=3, unique=True),
        modifiers,
        st.booleans(),
        layouts,
        kinds,
        st.integers(0, 2**20),
    )
    def holds(
        shape: Shape,
        dtype: torch.dtype,
        chosen: list[str],
        modified: list[str],
        either: bool,
        layout: dict[str, str | None],
        kind: str,
        seed: int,
    ) -> None:
        draw = Draw(target.device, seed)
        features = [{**MASKS, **MODIFIERS}[name](shape, dtype, draw) for name in chosen + modified]
        call = dense(shape, dtype, draw, **_merged(features, either))
        laid = {name: LAYOUTS[way](call.tensors()[name]) for name, way in layout.items() if way is not None}
        _verify(target, call.with_tensors(**laid), kind)

    holds()


def test_packed(target: Target) -> None:
    lengths = st.lists(st.tuples(sizes, sizes), max_size=4)

    @_examples(target, share=0.5)
    @given(
        lengths,
        dtypes,
        st.fixed_dictionaries(
            {
                "causal": st.sampled_from([False, True, "top_left"]),
                "window": st.sampled_from([None, (5, 2), (0, None)]),
                "striped": st.booleans(),
                "used": st.booleans(),
            }
        ),
        st.lists(st.sampled_from(ANYWHERE), max_size=3, unique=True),
        kinds,
        st.integers(0, 2**20),
    )
    def holds(
        lengths: list[tuple[int, int]],
        dtype: torch.dtype,
        masked: dict[str, Any],
        modified: list[str],
        kind: str,
        seed: int,
    ) -> None:
        draw = Draw(target.device, seed)
        members, longest = len(lengths), max((k for _, k in lengths), default=0)
        # Features draw per-head and per-batch tensors from a shape; here its batch is the members.
        shape = Shape(members, 1, max(1, longest), heads_q=4, heads_kv=2)
        options = _merged([MODIFIERS[name](shape, dtype, draw) for name in modified], either=False)
        options |= {name: masked[name] for name in SHORTHANDS}
        if masked["striped"]:
            options |= MASKS["predicate"](shape, dtype, draw)
        if masked["used"]:
            share = draw.uniform(members).cpu()
            used = (torch.tensor([k for _, k in lengths]) * share).round().int()
            options["seqused_k"] = used.to(target.device)
        lengths_q, lengths_k = [q for q, _ in lengths], [k for _, k in lengths]
        _verify(target, packed(lengths_q, lengths_k, draw, dtype, **options), kind)

    holds()
