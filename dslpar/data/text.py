"""Byte-level text as samples: windows of seq_len + 1 bytes, of which the next byte is what is learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dslpar.data import corpus


class Text:
    """Sample i is bytes i * seq_len to (i + 1) * seq_len, and the one after: each byte is learned once an epoch."""

    all_counted = True
    """Every label counts, so no rank needs to ask the others how many."""

    def __init__(self, text: bytearray, seq_len: int) -> None:
        self.tokens = torch.frombuffer(text, dtype=torch.uint8)
        self.seq_len = seq_len
        self.num_samples = (len(text) - 1) // seq_len

    @classmethod
    def of(cls, pieces: Iterable[corpus.Piece], seq_len: int) -> Text:
        """The samples of a corpus, read into memory."""
        return cls(corpus.read(pieces), seq_len)

    def batch(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """ids and labels, int64 [len(samples), seq_len]."""
        starts = torch.tensor(samples).unsqueeze(1) * self.seq_len
        windows = self.tokens[starts + torch.arange(self.seq_len + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
