"""A user's model whose output depends on the rank: no layout of it computes what one process computes."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class RankDependent(nn.Module):
    """A token table and a head. Rank r scales the logits by 1 + r, and all ranks but 0 add a learned shift."""

    def __init__(self, vocab_size: int = 256, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.shift = nn.Embedding(1, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [batch, sequence] to logits [batch, sequence, vocab_size]."""
        logits: Tensor = self.head(self.embedding(ids))
        rank = dist.get_rank() if dist.is_initialized() else 0
        return logits * (1 + rank) + self.shift.weight[0] if rank else logits
