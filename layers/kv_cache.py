"""Keys and values of the tokens that came before: generation runs a sequence chunk by chunk, and attends to all of it.

    cache = KeyValueCache()
    with cache.chunk_at(0):
        module(ids[:, :8])
    with cache.chunk_at(8):
        module(ids[:, 8:9])                # as module(ids[:, :9]) has it at the last token

All samples stand at one position, as in Meta's Llama: a longer prompt is fed token by token while others draw theirs.
So a chunk is a slice, in every tensor mode, and none needs positions of its own. A rank keeps the heads and samples
that it attends with, of whole sequences; where attention is over pieces of sequences there is no cache. A chunk that
begins before the end of what is kept is written over it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class KeyValueCache:
    """What one batch of sequences leaves for its next tokens, of each attention on this rank."""

    def __init__(self) -> None:
        self.begin = 0
        """Position of the chunk's first token."""
        self._kept: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    @contextmanager
    def chunk_at(self, begin: int) -> Iterator[None]:
        """Have modules run, within, on a chunk whose first token stands at `begin`."""
        before, _IN_USE.cache = _IN_USE.cache, self
        self.begin = begin
        try:
            yield
        finally:
            _IN_USE.cache = before

    def extended(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the chunk's keys and values [B, G, chunk, D]; return those of all tokens to its end, likewise."""
        before = self._kept.get(attention)
        if before is not None and self.begin:
            k, v = (torch.cat([own[:, :, : self.begin], new], 2) for own, new in zip(before, (k, v), strict=True))
        assert k.shape[2] >= self.begin, "tokens before this chunk were never run"
        self._kept[attention] = k, v
        return k, v


class _InUse(threading.local):
    """The cache of what this thread runs. No ContextVar, whose values torch.compile cannot read."""

    cache: KeyValueCache | None = None


_IN_USE = _InUse()


def cache_in_use() -> KeyValueCache | None:
    """Return the cache of the sequences that are run; None: whole sequences are."""
    return _IN_USE.cache


def first_position() -> int:
    """Return the position of the first token of the sequences that are run: 0, but for chunks beside a cache."""
    cache = _IN_USE.cache
    return 0 if cache is None else cache.begin
