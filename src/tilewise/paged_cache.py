"""A pool of pages for keys and values, and which sequence has which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .errors import ArgumentError, OutOfPagesError, fail
from .kvcache import FP8, MAX_HEAD_DIM, MAX_HEAD_DIM_V

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, FP8)


@dataclass
class _Sequence:
    """Tokens of a sequence, and the pages that hold them in order."""

    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedKVCache:
    """Keys and values of many sequences in pages, of which each layer of a model has its own tensors.

    The object keeps the books: which pages a sequence has, and how many tokens. `append` makes room for new tokens and
    returns the arguments with which `attention_with_kvcache` writes and reads them, layer by layer. Sequences may share
    pages (`fork`); a page is copied before one of several owners writes to it, so none ever sees what another appends.

    Args:
        pages: pages of each layer.
        page_size: tokens of a page.
        heads_kv: key/value heads.
        head_dim: of keys, 1 to 576.
        head_dim_v: of values, 1 to 512; None: head_dim.
        layers: layers of the model; all share the page table.
        dtype: q's dtype, or torch.float8_e4m3fn.
        device: where the pages lie.
        latent: values are the first head_dim_v dims of keys, in the same memory (MLA).

    Attributes:
        k, v: [layers, pages, page_size, heads_kv, head_dim] and [.., head_dim_v].

    Raises:
        tilewise.errors.ArgumentError: a size or dtype that is not supported.

    Example:
        >>> import torch, tilewise
        >>> cache = tilewise.PagedKVCache(8, 4, heads_kv=2, head_dim=16)
        >>> prompt = cache.allocate()
        >>> q, k, v = torch.randn(3, 1, 6, 2, 16).unbind()
        >>> step = cache.append([prompt], 6)
        >>> out = tilewise.attention_with_kvcache(q, cache.k[0], cache.v[0], k_new=k, v_new=v, causal=True, **step)
        >>> other = cache.fork(prompt)  # both continue from the same six tokens
        >>> cache.append([prompt, other], 1)["page_table"].tolist()
        [[0, 2], [0, 1]]
        >>> cache.length(other), cache.free_pages
        (7, 5)
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        layers: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        latent: bool = False,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        most = {"head_dim": MAX_HEAD_DIM, "head_dim_v": min(MAX_HEAD_DIM_V, head_dim) if latent else MAX_HEAD_DIM_V}
        sizes = {"pages": pages, "page_size": page_size, "heads_kv": heads_kv, "layers": layers}
        for name, n in {**sizes, "head_dim": head_dim, "head_dim_v": head_dim_v}.items():
            _whole(name, n, 1, most.get(name, 2**31 - 1))
        if dtype not in _DTYPES:
            fail(ArgumentError, "dtype", dtype, ", ".join(map(str, _DTYPES)), "use the dtype of q, or float8_e4m3fn")
        shape = (layers, pages, page_size, heads_kv)
        self.page_size = page_size
        self.k = torch.zeros((*shape, head_dim), dtype=dtype, device=device)
        self.v = self.k[..., :head_dim_v] if latent else torch.zeros((*shape, head_dim_v), dtype=dtype, device=device)
        self._latent = latent
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        # The last one is handed out first: pages in use stay few, and near each other.
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that there are."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._get(sequence).length

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in order."""
        return tuple(self._get(sequence).pages)

    def owners(self, page: int) -> int:
        """How many sequences have a page."""
        _whole("page", page, 0, len(self._owners) - 1)
        return self._owners[page]

    def allocate(self) -> int:
        """A new sequence without tokens; its number is never used again."""
        self._next += 1
        self._sequences[self._next - 1] = _Sequence()
        return self._next - 1

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, in the same pages."""
        source = self._get(sequence)
        copy = self.allocate()
        self._sequences[copy] = _Sequence(source.length, list(source.pages))
        for page in source.pages:
            self._owners[page] += 1
        return copy

    def free(self, sequence: int) -> None:
        """Give back a sequence; pages that no other one has are free again."""
        self._release(self._get(sequence).pages)
        del self._sequences[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens, as after drafted ones that were not accepted."""
        entry = self._get(sequence)
        _whole("length", length, 0, entry.length)
        keep = -(-length // self.page_size)
        self._release(entry.pages[keep:])
        entry.pages, entry.length = entry.pages[:keep], length

    def append(
        self, sequences: Sequence[int], tokens: int | Sequence[int], *, width: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Room for new tokens at the end of sequences, and the arguments for the calls that fill it.

        Args:
            sequences: distinct sequences, in the order of the batch.
            tokens: how many for each, or for all.
            width: columns of the page table, as a CUDA graph or a compiled model wants them always the same; None: as
                many as the longest sequence has pages.

        Returns:
            `cache_seqlens` (tokens before) and `page_table`, for `attention_with_kvcache(..., k_new, v_new)`, which has
            to write all of the new tokens, in each layer.

        Raises:
            tilewise.errors.OutOfPagesError: too few free pages; nothing has changed, as after any other refusal.
        """
        each = [tokens] * len(sequences) if isinstance(tokens, int) else list(tokens)
        entries = [self._get(sequence) for sequence in sequences]
        if len(set(sequences)) < len(sequences):
            fail(ArgumentError, "sequences", f"{list(sequences)[:8]}", "distinct ones", "append to each once")
        if len(each) != len(entries):
            fail(ArgumentError, "tokens", f"{len(each)} counts", f"one, or {len(entries)}", "give one per sequence")
        for n in each:
            _whole("tokens", n, 0, 2**31 - 1)
        self._check_room(entries, each, width)
        before = torch.tensor([entry.length for entry in entries], dtype=torch.int32)
        copies = [pair for entry, n in zip(entries, each, strict=True) if (pair := self._own_last_page(entry, n))]
        for entry, n in zip(entries, each, strict=True):
            entry.length += n
            entry.pages += [self._take() for _ in range(-(-entry.length // self.page_size) - len(entry.pages))]
        self._copy(copies)
        return {"cache_seqlens": before.to(self.k.device), "page_table": self._table(entries, width)}

    def lookup(self, sequences: Sequence[int], *, width: int | None = None) -> dict[str, torch.Tensor]:
        """The arguments for calls that append nothing, `cache_seqlens` and `page_table`; `width` as in `append`."""
        entries = [self._get(sequence) for sequence in sequences]
        self._check_room(entries, [0] * len(entries), width)
        lengths = torch.tensor([entry.length for entry in entries], dtype=torch.int32)
        return {"cache_seqlens": lengths.to(self.k.device), "page_table": self._table(entries, width)}

    def _get(self, sequence: int) -> _Sequence:
        entry = self._sequences.get(sequence)
        if entry is None:
            fix = "allocate() and fork() return the numbers; free() ends them"
            fail(ArgumentError, "sequence", repr(sequence)[:60], "a sequence of this cache", fix)
        return entry

    def _shares_its_end(self, entry: _Sequence, tokens: int) -> bool:
        """Whether the next token goes to a page that other sequences have too."""
        return tokens > 0 and entry.length % self.page_size > 0 and self._owners[entry.pages[-1]] > 1

    def _check_room(self, entries: list[_Sequence], each: list[int], width: int | None) -> None:
        after = [-(-(entry.length + n) // self.page_size) for entry, n in zip(entries, each, strict=True)]
        if width is not None:
            _whole("width", width, max(after, default=0), 2**31 - 1)
        needed, sharing = 0, dict.fromkeys((entry.pages[-1] for entry in entries if entry.pages), 0)
        for entry, n, pages in zip(entries, each, after, strict=True):
            needed += pages - len(entry.pages)
            if self._shares_its_end(entry, n):
                # The last of all owners to write has the page to itself by then.
                sharing[entry.pages[-1]] += 1
                needed += sharing[entry.pages[-1]] < self._owners[entry.pages[-1]]
        if needed > len(self._free):
            fix = "free() sequences, or make the cache larger"
            fail(OutOfPagesError, "tokens", f"what takes {needed} more pages", f"{len(self._free)} free ones", fix)

    def _own_last_page(self, entry: _Sequence, tokens: int) -> tuple[int, int] | None:
        """Replace the last page by a new one if others have it and it is to be written: which to copy, and where."""
        if not self._shares_its_end(entry, tokens):
            return None
        shared, entry.pages[-1] = entry.pages[-1], self._take()
        self._owners[shared] -= 1
        return shared, entry.pages[-1]

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.k.device).unbind(1)
        for x in (self.k,) if self._latent else (self.k, self.v):
            raw = x.view(torch.uint8)
            raw[:, target] = raw[:, source]

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def _table(self, entries: list[_Sequence], width: int | None) -> torch.Tensor:
        """Pages of sequences as int32 [batch, width], -1 where there is none."""
        if width is None:
            width = max((len(entry.pages) for entry in entries), default=0)
        rows = [entry.pages + [-1] * (width - len(entry.pages)) for entry in entries]
        return torch.tensor(rows, dtype=torch.int32).view(len(entries), width).to(self.k.device)


def _whole(name: str, n: int, least: int, most: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not least <= n <= most:
        fail(ArgumentError, name, repr(n)[:60], f"a Python int, {least} to {most}", "check the sizes of the cache")
