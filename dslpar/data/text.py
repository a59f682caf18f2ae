"""Text as samples: windows of seq_len + 1 tokens, to predict each next one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dslpar.data.tokens import Ids, windows


class TextSamples:
    """Samples of a text: the i-th is tokens i * seq_len to (i + 1) * seq_len, and the one after as its last label.

    `ids` [tokens], or bytes, of which each is a token.
    """

    all_counted = True

    def __init__(self, ids: Ids | bytearray, seq_len: int) -> None:
        self.ids = np.frombuffer(ids, np.uint8) if isinstance(ids, bytearray) else ids
        self.seq_len = seq_len
        self.num_samples = (len(ids) - 1) // seq_len

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return ids and labels, int64 [len(samples), seq_len]; nothing is drawn here by `numbers`."""
        found = torch.from_numpy(windows(self.ids, np.array(samples) * self.seq_len, self.seq_len + 1))
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()
