"""Text from a small model, for many requests at once: a paged cache, prompts of different lengths, continuous batching.

A byte-level decoder (that of `tilewise demo`) is trained for some seconds on the source of Python's standard library.
Then an engine serves requests: prompts that wait are let in as soon as the pool has pages for them, each step runs all
sequences in one ragged batch (whole prompts beside single tokens), several samples of one prompt share its pages until
they part, and a finished sequence gives its pages back. At the end every text is read by the model again, without a
cache: at each byte the logits must be those that it was chosen from.

    python examples/generate.py                     # some 20 seconds on a CPU
    python examples/generate.py --steps 1500 --pages 64
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.demo.attend import attend_tilewise
from tilewise.demo.config import ModelConfig, Recipe
from tilewise.demo.data import load_corpus, random_batches
from tilewise.demo.model import Decoder, rotary_tables
from tilewise.demo.train import training

MODEL = ModelConfig(layers=2, width=128, heads_q=4, heads_kv=2, head_dim=32, hidden=256, seqlen=160, window=48)
PROMPTS = (
    b"import os\nimport sys\n\n\ndef main(",
    b"class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def ",
    b"for ",
    b'    """Return the ',
    b"if not isinstance(value, int):\n    raise ",
    b"try:\n    from collections.abc import ",
)


@dataclass(frozen=True)
class Request:
    """A prompt, how many bytes are to follow it, and how many samples are wanted; temperature 0 takes the likeliest."""

    prompt: bytes
    count: int
    temperature: float = 0.0
    samples: int = 1


@dataclass
class Running:
    """One sequence that is being written."""

    request: Request
    sequence: int
    generator: torch.Generator
    pending: list[int]  # bytes that the model has not read yet
    written: bytearray = field(default_factory=bytearray)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.written) >= self.request.count

    def choose(self, logits: Tensor) -> None:
        """Write the next byte."""
        if self.request.temperature == 0:
            byte = int(logits.argmax())
        else:
            weights = (logits / self.request.temperature).softmax(dim=-1)
            byte = int(torch.multinomial(weights, 1, generator=self.generator))
        self.logits.append(logits)
        self.written.append(byte)
        self.pending = [byte]


class Engine:
    """Serves requests with one model and one pool of pages."""

    def __init__(self, model: Decoder, pages: int, page_size: int) -> None:
        config, device = model.config, next(model.parameters()).device
        self.model, self.config, self.device = model.eval(), config, device
        self.cache = tilewise.PagedKVCache(
            pages, page_size, config.heads_kv, config.head_dim, layers=config.layers, device=device
        )
        cos, sin = rotary_tables(config.head_dim, 0, config.seqlen, device)
        self.rotary = tilewise.Rotary(cos[:, 0], sin[:, 0])
        self.batches: list[list[int]] = []
        self.most_pages = 0

    def serve(self, requests: list[Request]) -> Iterator[Running]:
        """Every sample of every request, as soon as it is done."""
        waiting, running = deque(requests), list[Running]()
        promised: dict[int, int] = {}
        while waiting or running:
            self._admit(waiting, running, promised)
            if not running:
                raise SystemExit(f"the pool of {self.cache.free_pages} pages is too small for one request")
            self._step(running)
            running += [copy for one in list(running) for copy in self._split(one, promised)]
            for one in [one for one in running if one.done]:
                running.remove(one)
                self.cache.free(one.sequence)
                promised.pop(one.sequence)
                yield one

    def _pages_for(self, request: Request) -> int:
        """What a request may come to need: all its samples apart from each other, which none has to be in the end."""
        tokens = len(request.prompt) + request.count
        return request.samples * -(-tokens // self.cache.page_size)

    def _admit(self, waiting: deque[Request], running: list[Running], promised: dict[int, int]) -> None:
        """Let in who waits, in order, while there are pages for all that it may become."""
        pages = self.cache.k.shape[1]
        while waiting and sum(promised.values()) + self._pages_for(waiting[0]) <= pages:
            request, sequence = waiting.popleft(), self.cache.allocate()
            promised[sequence] = self._pages_for(request)
            generator = torch.Generator().manual_seed(sequence)
            running.append(Running(request, sequence, generator, list(request.prompt)))

    def _split(self, one: Running, promised: dict[int, int]) -> Iterator[Running]:
        """The other samples of a prompt that has just been read: they go on from its pages."""
        if len(one.written) != 1 or one.request.samples == 1:
            return
        alone = replace(one.request, samples=1)
        one.request, logits = alone, one.logits[0]
        each = self._pages_for(alone)
        others = promised[one.sequence] // each - 1
        promised[one.sequence] = each
        for _ in range(others):
            sequence = self.cache.fork(one.sequence)
            promised[sequence] = each
            copy = Running(alone, sequence, torch.Generator().manual_seed(sequence), [])
            copy.choose(logits)
            yield copy

    @torch.no_grad()
    def _step(self, running: list[Running]) -> None:
        """One pass over whatever each sequence has pending: a prompt, or the byte that it wrote last."""
        counts = [len(one.pending) for one in running]
        tokens = torch.tensor([byte for one in running for byte in one.pending], device=self.device)
        offsets = torch.tensor([0, *counts]).cumsum(0).int().to(self.device)
        ragged = {"cu_seqlens_q": offsets, "max_seqlen_q": max(counts)}
        step = self.cache.append([one.sequence for one in running], counts)
        self.batches.append(counts)
        self.most_pages = max(self.most_pages, self.cache.k.shape[1] - self.cache.free_pages)
        x = self.model.embedding(tokens) * self.config.width**0.5
        for layer, block in enumerate(self.model.blocks):
            x = x + self._attend(block.attention, block.attention_norm(x), layer, {**ragged, **step})
            x = x + block.mlp(block.mlp_norm(x))
        last = self.model.norm(x[offsets[1:].long() - 1])
        for one, logits in zip(running, F.linear(last, self.model.embedding.weight).float().cpu(), strict=True):
            one.choose(logits)

    def _attend(self, attention: torch.nn.Module, x: Tensor, layer: int, step: dict[str, object]) -> Tensor:
        """A layer's attention over its pages: keys and values of this step are written by the same call."""
        q, k, v = (t.unflatten(-1, (-1, self.config.head_dim)) for t in attention.qkv(x).split(attention.widths, -1))
        out = tilewise.attention_with_kvcache(
            q, self.cache.k[layer], self.cache.v[layer], k_new=k, v_new=v, rotary=self.rotary, causal=True,
            window=attention.window, split_size=128, **step,
        )  # fmt: skip
        return attention.out(out.flatten(1))


@torch.no_grad()
def largest_difference(model: Decoder, one: Running) -> float:
    """Between the logits that each byte was chosen from and those of a pass over the whole text without a cache.

    Raises:
        RuntimeError: a byte was written for the likeliest that is not so without a cache.
    """
    text = one.request.prompt + bytes(one.written)
    device = next(model.parameters()).device
    logits = model(torch.tensor([list(text[:-1])], device=device))[0, len(one.request.prompt) - 1 :].float().cpu()
    if one.request.temperature == 0 and logits.argmax(dim=-1).tolist() != list(one.written):
        raise RuntimeError(f"not the text without a cache: {text!r}")
    return float((logits - torch.stack(one.logits)).abs().max())


def trained(steps: int, device: torch.device) -> Decoder:
    """A decoder after so many steps on the standard library's source."""
    model = Decoder(MODEL, attend_tilewise, seed=0).to(device)
    batches = random_batches(load_corpus(1 << 20).train, 4, MODEL.seqlen, seed=0)
    started, losses = time.perf_counter(), []
    for loss in training(model, batches, Recipe(steps=steps), None, dropout_seed=0):
        losses.append(loss)
    print(f"training: {steps} steps, {losses[0]:.2f} to {losses[-1]:.2f} nats per byte, ", end="")
    print(f"{time.perf_counter() - started:.0f} s")
    return model


def main(arguments: list[str] | None = None) -> float:
    """Train, serve, check; the largest difference of a logit from the one without a cache comes back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--count", type=int, default=64, help="bytes to write for each request")
    parser.add_argument("--pages", type=int, default=40, help="of the pool; fewer make requests wait")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(arguments)
    longest = max(map(len, PROMPTS)) + asked.count
    if longest > MODEL.seqlen:
        parser.error(f"--count {asked.count} makes texts of {longest} bytes; the model has read {MODEL.seqlen} at most")
    model = trained(asked.steps, torch.device(asked.device))
    requests = [Request(prompt, asked.count - 3 * i) for i, prompt in enumerate(PROMPTS)]
    requests += [Request(PROMPTS[1], asked.count, temperature=0.8, samples=3)]

    engine, started, finished = Engine(model, asked.pages, asked.page_size), time.perf_counter(), []
    for one in engine.serve(requests):
        finished.append(one)
        print(f"\n--- {len(one.request.prompt)} + {len(one.written)} bytes, temperature {one.request.temperature}")
        print((one.request.prompt + bytes(one.written)).decode("utf-8", "replace"))
    seconds, written = time.perf_counter() - started, sum(len(one.written) for one in finished)
    mixed = sum(len(set(counts)) > 1 for counts in engine.batches)
    print(f"\n{len(finished)} texts, {written} bytes in {seconds:.1f} s, {len(engine.batches)} steps")
    print(f"up to {max(map(len, engine.batches))} sequences a step, prompts beside single bytes in {mixed} of them")
    print(f"up to {engine.most_pages} of {asked.pages} pages in use, {engine.cache.free_pages} free at the end")
    worst = max(largest_difference(model, one) for one in finished)
    print(f"without a cache: the same bytes, logits within {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
