"""Key-value cache for generation, which runs a sequence chunk by chunk and attends to all earlier tokens.

Each attention layer asks for the cache in use, and extends it with its own keys and values.

    cache = KeyValueCache()
    with cache.chunk_at(0):
        module(ids[:, :8])
    with cache.chunk_at(8):
        module(ids[:, 8:9])                # equals the last position of module(ids[:, :9])

All samples are at the same position, as in Meta's Llama: longer prompts are fed token by token while the other samples
already generate. So a chunk is a slice in every tensor mode, and samples need no positions of their own. A rank caches
whole sequences of its own heads and samples. There is no cache if ranks store pieces of sequences. A chunk that begins
before the end of the cache overwrites the cache from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class KeyValueCache:
    """Keys and values of one batch of sequences, for each attention layer on this rank."""

    def __init__(self) -> None:
        self.begin = 0
        """Position of the chunk's first token."""
        self._kept: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        """The cached keys and values of each attention layer: [batch, key heads, sequence, features of a head]."""

    @contextmanager
    def chunk_at(self, begin: int) -> Iterator[None]:
        """Use this cache within the context, for a chunk whose first token is at position `begin`."""
        before, _IN_USE.cache = _IN_USE.cache, self
        self.begin = begin
        try:
            yield
        finally:
            _IN_USE.cache = before

    def extended(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a chunk's keys and values [B, G, chunk, D]; return those of all tokens up to its end [B, G, S, D]."""
        before = self._kept.get(attention)
        if before is not None and self.begin:
            k, v = (torch.cat([own[:, :, : self.begin], new], 2) for own, new in zip(before, (k, v), strict=True))
        assert k.shape[2] >= self.begin, "tokens before this chunk were never run"
        self._kept[attention] = k, v
        return k, v


class _InUse(threading.local):
    """The cache in use in this thread. It is no ContextVar, since torch.compile cannot read these."""

    cache: KeyValueCache | None = None


_IN_USE = _InUse()


def cache_in_use() -> KeyValueCache | None:
    """Return the cache in use; None: modules run whole sequences."""
    return _IN_USE.cache


def first_position() -> int:
    """Return the position of the input's first token: that of the chunk if a cache is in use, else 0."""
    cache = _IN_USE.cache
    return 0 if cache is None else cache.begin
