"""tilewise: exact attention, tile by tile."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from . import cache_operators as _cache_operators  # noqa: F401  # operators that saved graphs may hold
from . import errors, masks
from .api import attention, attention_varlen
from .block_masks import BlockMask
from .masks import Causal, Document, Interval, Predicate, PrefixLM, Window
from .score_mods import ScoreMod

if TYPE_CHECKING:
    from . import compat as compat
    from . import roofline as roofline
    from .cache_api import attention_with_kvcache
    from .compat.flex import flex
    from .explanation import Explanation, explain
    from .kvcache import Rotary
    from .paged_cache import PagedKVCache
    from .shared_prefix import attention_with_shared_prefix
    from .softmax import merge_states
    from .warming import warmup

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

# Where the names live that few programs use: they are imported when they are first asked for. None may be the name of
# a module too, for importing that would put the module in its place.
_LATE = {
    "Explanation": "explanation",
    "PagedKVCache": "paged_cache",
    "Rotary": "kvcache",
    "attention_with_kvcache": "cache_api",
    "attention_with_shared_prefix": "shared_prefix",
    "explain": "explanation",
    "flex": "compat.flex",
    "merge_states": "softmax",
    "warmup": "warming",
}
_LATE_MODULES = ("compat", "roofline")


def __getattr__(name: str) -> Any:
    if name in _LATE_MODULES:
        return _import_module(f".{name}", __name__)
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f".{_LATE[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_LATE_MODULES})
