"""tilewise: exact attention, tile by tile."""

from . import errors, masks
from .api import attention, attention_varlen
from .block_masks import BlockMask
from .explain import Explanation, explain
from .masks import Causal, Document, Interval, Predicate, PrefixLM, Window
from .score_mods import ScoreMod
from .softmax import merge_states

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Causal",
    "Document",
    "Explanation",
    "Interval",
    "Predicate",
    "PrefixLM",
    "ScoreMod",
    "Window",
    "attention",
    "attention_varlen",
    "errors",
    "explain",
    "masks",
    "merge_states",
]
