"""Masks for the page's viewer, as the library sees them: each row's runs of visible keys, and tiles by sort."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..block_masks import BlockMask
from ..mask_algebra import Mask, Positions
from ..masks import Causal, Document, Predicate, PrefixLM, Window

SEQLEN = 256
BLOCKS = (8, 16, 32, 64)
DOCUMENTS = [70, 34, 96, 56]


class Shown(NamedTuple):
    """A mask, its name on the page and the call that asks for it."""

    name: str
    code: str
    mask: Mask


def _first_keys(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < 8


def shown() -> list[Shown]:
    """The masks of the viewer."""
    documents = Document.from_lengths(DOCUMENTS)
    longformer = BlockMask.longformer(SEQLEN, block=16, window_blocks=2)
    asked = f"mask=BlockMask.longformer({SEQLEN}, block=16, window_blocks=2)"
    return [
        Shown("causal", "attention(q, k, v, causal=True)", Causal()),
        Shown("window", "attention(q, k, v, window=(63, 0))", Window(63, 0)),
        Shown("window, both sides", "attention(q, k, v, window=(40, 40))", Window(40, 40)),
        Shown("documents", f"attention(q, k, v,\n          mask=Document.from_lengths({DOCUMENTS}))", documents),
        Shown(
            "documents, causal",
            f"attention(q, k, v, causal=True,\n          mask=Document.from_lengths({DOCUMENTS}))",
            documents & Causal(),
        ),
        Shown("prefix", "attention(q, k, v, mask=PrefixLM(96))", PrefixLM(96)),
        Shown(
            "first keys and a window",
            "attention(q, k, v, causal=True,\n          mask=Window(47, 0) | Predicate(lambda b, h, q, k: k < 8))",
            (Window(47, 0) | Predicate(_first_keys)) & Causal(),
        ),
        Shown(
            "block map",
            f"attention(q, k, v,\n          {asked})",
            longformer,
        ),
        Shown(
            "block map, causal",
            f"attention(q, k, v, causal=True,\n          {asked})",
            longformer & Causal(),
        ),
    ]


def visible(mask: Mask) -> torch.Tensor:
    """Which keys each row sees, by the mask's definition: bool [SEQLEN, SEQLEN]."""
    position = torch.arange(SEQLEN)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    seen = mask.visible(Positions(zero, zero, position[:, None], position[None], 0))
    return seen.expand(SEQLEN, SEQLEN)


def runs(row: torch.Tensor) -> list[int]:
    """First and one past the last key of each run of visible keys.

    >>> runs(torch.tensor([True, True, False, True]))
    [0, 2, 3, 4]
    """
    padded = torch.nn.functional.pad(row.int(), (1, 1))
    return torch.nonzero(padded.diff()).flatten().tolist()


def sorts(seen: torch.Tensor, block: int) -> list[int]:
    """How many tiles are hidden, cut and full."""
    tiles = seen.unfold(0, block, block).unfold(1, block, block).flatten(2)
    some, every = tiles.any(dim=2), tiles.all(dim=2)
    return [int((~some).sum()), int((some & ~every).sum()), int(every.sum())]


def figures() -> list[dict[str, Any]]:
    """What the page needs of each mask."""
    found = []
    for name, code, mask in shown():
        seen = visible(mask)
        found.append(
            {
                "name": name,
                "code": code,
                "seqlen": SEQLEN,
                "rows": [runs(row) for row in seen],
                "tiles": {block: sorts(seen, block) for block in BLOCKS},
                "visible": int(seen.sum()),
            }
        )
    return found
