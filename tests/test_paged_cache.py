"""`PagedKVCache` against a model of it: lists of tokens. A page that is written has one owner, whatever came before."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

import tilewise
from tilewise import errors

PAGES, LAYERS = 7, 2


class Books(RuleBasedStateMachine):
    """Tokens are numbers; layer i holds them plus i / 4, values as their negatives."""

    sequences = Bundle("sequences")

    @initialize(page_size=st.sampled_from([1, 3, 4]), latent=st.booleans())
    def begin(self, page_size: int, latent: bool) -> None:
        sizes = {"head_dim": 2, "head_dim_v": 1} if latent else {"head_dim": 1}
        self.cache = tilewise.PagedKVCache(PAGES, page_size, 1, **sizes, layers=LAYERS, latent=latent)
        self.latent = latent
        self.tokens: dict[int, list[float]] = {}
        self.next = 1.0

    @rule(target=sequences)
    def allocate(self) -> int:
        new = self.cache.allocate()
        assert new not in self.tokens
        self.tokens[new] = []
        return new

    @rule(target=sequences, source=sequences)
    def fork(self, source: int) -> int:
        new = self.cache.fork(source)
        assert new not in self.tokens
        self.tokens[new] = list(self.tokens[source])
        return new

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.cache.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(errors.ArgumentError):
            self.cache.length(sequence)

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        length = int(share * len(self.tokens[sequence]))
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @rule(chosen=st.lists(sequences, min_size=1, max_size=4, unique=True), tokens=st.integers(0, 6))
    def append(self, chosen: list[int], tokens: int) -> None:
        books = {x: (self.cache.length(x), self.cache.pages(x)) for x in self.tokens}
        free = self.cache.free_pages
        try:
            step = self.cache.append(chosen, tokens)
        except errors.OutOfPagesError:
            assert books == {x: (self.cache.length(x), self.cache.pages(x)) for x in self.tokens}
            assert free == self.cache.free_pages
            return
        assert step["cache_seqlens"].tolist() == [len(self.tokens[x]) for x in chosen]
        new = torch.arange(len(chosen) * tokens).view(len(chosen), tokens, 1, 1) + self.next
        self.next += len(chosen) * tokens
        for row, sequence in enumerate(chosen):
            self.tokens[sequence] += new[row].flatten().tolist()
        width = self.cache.k.shape[-1]
        for i in range(LAYERS):
            k_new = (new + i / 4).repeat(1, 1, 1, width)
            v_new = k_new[..., :1] if self.latent else -k_new
            q = torch.zeros(len(chosen), tokens, 1, width)
            keys = {"k_new": k_new, "v_new": v_new, "validate": True}
            tilewise.attention_with_kvcache(q, self.cache.k[i], self.cache.v[i], **keys, **step)

    @invariant()
    def each_sequence_reads_its_own_tokens(self) -> None:
        if not getattr(self, "tokens", None):
            return
        found = self.cache.lookup(list(self.tokens))
        assert found["cache_seqlens"].tolist() == [len(own) for own in self.tokens.values()]
        size = self.cache.page_size
        for row, own in zip(found["page_table"].tolist(), self.tokens.values(), strict=True):
            for i in range(LAYERS):
                read = [float(self.cache.k[i, row[t // size], t % size, 0, 0]) for t in range(len(own))]
                assert read == [token + i / 4 for token in own]
                values = [float(self.cache.v[i, row[t // size], t % size, 0, 0]) for t in range(len(own))]
                assert values == (read if self.latent else [-x for x in read])

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "cache"):
            return
        listed = [page for x in self.tokens for page in self.cache.pages(x)]
        assert set(self.cache.sequences) == set(self.tokens)
        assert [self.cache.owners(page) for page in range(PAGES)] == [listed.count(page) for page in range(PAGES)]
        assert self.cache.free_pages == PAGES - len(set(listed))
        for x, own in self.tokens.items():
            assert len(self.cache.pages(x)) == -(-len(own) // self.cache.page_size)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestBooks = Books.TestCase


def test_forks_write_apart() -> None:
    """Both continue from the same page: one gets a copy, the other keeps it; what was there is read by both."""
    cache = tilewise.PagedKVCache(4, 4, 1, 1)
    a = cache.allocate()
    _fill(cache, [a], [1.0, 2.0])
    b = cache.fork(a)
    assert cache.pages(a) == cache.pages(b) and cache.free_pages == 3
    _fill(cache, [a, b], [3.0])
    assert cache.pages(a) != cache.pages(b) and cache.free_pages == 2
    _fill(cache, [b], [9.0])
    slots = [[float(cache.k[0, cache.pages(x)[0], t, 0, 0]) for t in range(cache.length(x))] for x in (a, b)]
    assert slots == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 9.0]]


def _fill(cache: tilewise.PagedKVCache, sequences: list[int], tokens: list[float]) -> None:
    step = cache.append(sequences, len(tokens))
    new = torch.tensor(tokens).view(1, -1, 1, 1).expand(len(sequences), -1, -1, -1)
    tilewise.attention_with_kvcache(torch.zeros_like(new), cache.k[0], cache.v[0], k_new=new, v_new=new, **step)


def test_too_few_pages_change_nothing() -> None:
    cache = tilewise.PagedKVCache(3, 4, 1, 1)
    a = cache.allocate()
    cache.append([a], 6)
    b = cache.fork(a)
    # Six more tokens for both: one page to copy and two to grow, where one is free.
    with pytest.raises(errors.OutOfPagesError, match=r"tokens: got what takes 3 more pages; supported: 1 free ones"):
        cache.append([a, b], 6)
    assert cache.pages(a) == cache.pages(b) == (0, 1) and cache.length(a) == 6
    cache.free(a)
    assert cache.append([b], 6)["page_table"].tolist() == [[0, 1, 2]]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "pages": ({"pages": 0}, "pages: got 0"),
    "page_size": ({"page_size": 2.5}, "page_size: got 2.5"),
    "head_dim": ({"head_dim": 577}, "head_dim: got 577; supported: a Python int, 1 to 576"),
    "head_dim_v": ({"head_dim_v": 17, "latent": True}, "head_dim_v: got 17; supported: a Python int, 1 to 16"),
    "dtype": ({"dtype": torch.int8}, "dtype: got torch.int8"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_sizes(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(errors.ArgumentError, match=message):
        tilewise.PagedKVCache(**{"pages": 4, "page_size": 4, "heads_kv": 1, "head_dim": 16, **changes})


def test_refused_calls() -> None:
    cache = tilewise.PagedKVCache(4, 4, 1, 1)
    a = cache.allocate()
    for call, message in (
        (lambda: cache.append([a, a], 1), "sequences: got"),
        (lambda: cache.append([a], [1, 2]), "tokens: got 2 counts; supported: one, or 1"),
        (lambda: cache.append([a], -1), "tokens: got -1"),
        (lambda: cache.append([7], 1), "sequence: got 7"),
        (lambda: cache.truncate(a, 1), "length: got 1; supported: a Python int, 0 to 0"),
        (lambda: cache.owners(4), "page: got 4"),
        (lambda: cache.append([a], 9, width=2), "width: got 2; supported: a Python int, 3 to"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            call()


def test_tables_of_a_fixed_width() -> None:
    cache = tilewise.PagedKVCache(4, 4, 1, 1)
    a, b = cache.allocate(), cache.allocate()
    assert cache.append([a, b], [5, 0], width=3)["page_table"].tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert cache.lookup([b], width=2)["page_table"].tolist() == [[-1, -1]]
    with pytest.raises(errors.ArgumentError, match="width: got 1"):
        cache.lookup([a], width=1)


def test_a_latent_cache_holds_values_in_its_keys() -> None:
    cache = tilewise.PagedKVCache(2, 4, 1, 576, 512, dtype=torch.float16, latent=True)
    assert cache.v.shape == (1, 2, 4, 1, 512) and cache.v.data_ptr() == cache.k.data_ptr()
