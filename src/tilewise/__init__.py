"""tilewise: exact attention, tile by tile."""

from . import errors, masks
from .api import attention, attention_varlen
from .block_masks import BlockMask
from .cache_api import attention_with_kvcache
from .compat.flex import flex
from .explain import Explanation, explain
from .kvcache import Rotary
from .masks import Causal, Document, Interval, Predicate, PrefixLM, Window
from .paged_cache import PagedKVCache
from .score_mods import ScoreMod
from .shared_prefix import attention_with_shared_prefix
from .softmax import merge_states
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Causal",
    "Document",
    "Explanation",
    "Interval",
    "PagedKVCache",
    "Predicate",
    "PrefixLM",
    "Rotary",
    "ScoreMod",
    "Window",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "attention_with_shared_prefix",
    "errors",
    "explain",
    "flex",
    "masks",
    "merge_states",
    "warmup",
]
