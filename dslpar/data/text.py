"""Byte-level text as samples: windows of seq_len + 1 bytes, to predict each next byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dslpar.data import corpus


class TextSamples:
    """Samples of a text: the i-th is bytes i * seq_len to (i + 1) * seq_len, and the one after as its last label."""

    all_counted = True
    """Every label counts, so the ranks need not sum up how many do."""

    def __init__(self, text: bytearray, seq_len: int) -> None:
        # One byte a token: as int64, eight times as much would lie in memory on every rank.
        self.tokens = torch.frombuffer(text, dtype=torch.uint8)
        self.seq_len = seq_len
        self.num_samples = (len(text) - 1) // seq_len

    @classmethod
    def from_files(cls, slices: Iterable[corpus.FileSlice], seq_len: int) -> TextSamples:
        """Read slices of files into memory."""
        return cls(corpus.read(slices), seq_len)

    def batch(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ids and labels, int64 [len(samples), seq_len]."""
        starts = torch.tensor(samples).unsqueeze(1) * self.seq_len
        windows = self.tokens[starts + torch.arange(self.seq_len + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
