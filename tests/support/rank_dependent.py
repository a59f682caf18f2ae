"""A model of one's own whose output depends on the rank: a layout of it never computes what one process computes."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


class RankDependent(nn.Module):
    """A table of tokens and a head, whose logits rank r scales by 1 + r."""

    def __init__(self, vocab_size: int = 256, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] ids to logits [batch, sequence, vocab_size]."""
        logits: Tensor = self.head(self.embedding(ids))
        return logits * (1 + (dist.get_rank() if dist.is_initialized() else 0))
