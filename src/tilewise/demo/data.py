"""Real text that every machine has: the source of the installed Python standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewise.errors import ArgumentError, fail

# Not prose-like code: installed packages, test data, generated tables.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
VALIDATION_EVERY = 16


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to be judged on; no file is in both."""

    train: Tensor
    validation: Tensor
    files: int
    sha256: str


def load_corpus(cap_bytes: int, root: Path | None = None) -> Corpus:
    """Read `*.py` under the standard library in sorted order until `cap_bytes`; every 16th file is for validation.

    Args:
        cap_bytes: the most bytes to keep, both parts together.
        root: folder to read, by default that of the running Python's standard library.

    Raises:
        ArgumentError: if the folder holds no more than one source file.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts = list(_texts(root, cap_bytes))
    if len(texts) < VALIDATION_EVERY:
        fail(ArgumentError, "root", root, f"a folder with at least {VALIDATION_EVERY} Python source files",
             "run a Python whose standard library is installed as source")  # fmt: skip
    validation = b"".join(texts[VALIDATION_EVERY - 1 :: VALIDATION_EVERY])
    train = b"".join(text for i, text in enumerate(texts) if i % VALIDATION_EVERY != VALIDATION_EVERY - 1)
    digest = hashlib.sha256(train + validation).hexdigest()
    return Corpus(_tensor(train), _tensor(validation), len(texts), digest)


def _texts(root: Path, cap_bytes: int) -> Iterator[bytes]:
    left = cap_bytes
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if EXCLUDED.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata"):
            text = path.read_bytes().replace(b"\r\n", b"\n")[:left]
            if text:
                yield text
            left -= len(text)


def _check_length(text: Tensor, seqlen: int) -> None:
    if len(text) <= seqlen:
        fail(ArgumentError, "corpus_bytes", f"a part of {len(text)} bytes", f"more than seqlen = {seqlen} of them",
             "raise corpus_bytes or lower seqlen")  # fmt: skip


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_batches(text: Tensor, batch: int, seqlen: int, seed: int) -> Iterator[Tensor]:
    """Endless batches `[batch, seqlen + 1]` (int64) from random places of `text`, the same for the same seed."""
    _check_length(text, seqlen)
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(seqlen + 1)
    while True:
        start = torch.randint(len(text) - seqlen, (batch, 1), generator=generator)
        yield text[start + span].long()


def even_batches(text: Tensor, batch: int, seqlen: int, count: int) -> list[Tensor]:
    """`count` batches `[batch, seqlen + 1]` spread evenly over `text`."""
    _check_length(text, seqlen)
    start = torch.linspace(0, len(text) - seqlen - 1, batch * count).long()[:, None]
    return list(text[start + torch.arange(seqlen + 1)].long().split(batch))
