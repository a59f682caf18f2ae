"""Text samples for next-token prediction: windows of seq_len + 1 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dslpar.data.mapped_text import MappedText
from dslpar.data.tokens import Ids, windows


class TextSamples:
    """Samples of a text: sample i has tokens i * seq_len to (i + 1) * seq_len, and the next token as its last label.

    `ids` are tokens [tokens], or bytes that are tokens themselves, in memory or memory-mapped.
    """

    all_counted = True
    """Every label counts in the loss."""

    def __init__(self, ids: Ids | bytearray | MappedText, seq_len: int) -> None:
        self.ids = np.frombuffer(ids, np.uint8) if isinstance(ids, bytearray) else ids
        self.seq_len = seq_len
        self.num_samples = (len(ids) - 1) // seq_len

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return ids and labels, int64 [len(samples), seq_len]; `numbers` is unused, since nothing is random."""
        starts, length = np.array(samples) * self.seq_len, self.seq_len + 1
        text = self.ids
        ids = text.windows(starts, length) if isinstance(text, MappedText) else windows(text, starts, length)
        found = torch.from_numpy(ids)
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()
