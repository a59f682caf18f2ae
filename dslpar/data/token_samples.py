"""Samples from token files: windows of seq_len + 1 tokens, as for text (`dslpar.data.text`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dslpar.data.text import TextSamples
from dslpar.data.token_files import open_tokens
from dslpar.data.token_source import TokenRange, refuse
from dslpar.data.tokens import vocab_size_of
from dslpar.layout.resolve import Job


class TokenSamples(TextSamples):
    """Samples of a range of memory-mapped token files.

    Raises:
        DslparError: the files differ from what was written, or cannot be read.
    """

    def __init__(self, job: Job, part: TokenRange) -> None:
        try:
            ids = open_tokens(part.folder)[part.start : part.stop]
        except (ValueError, OSError) as error:
            refuse(job, part.folder.path, str(error), "data.path" if part.training else "data")
        super().__init__(ids, job.seq_len)
        self.job, self.part, self.vocab_size = job, part, vocab_size_of(job) or part.folder.vocab_size

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Return ids and labels, int64 [len(samples), seq_len]. Raises DslparError for ids outside the vocabulary."""
        ids, labels = super().batch(samples)
        # Without this check such an id could silently look up zeros, or another rank's row.
        low, high = (int(bound(torch.stack([ids, labels]))) for bound in (torch.min, torch.max))
        if self.vocab_size is not None and not 0 <= low <= high < self.vocab_size:
            wrong = low if low < 0 else high
            problem = f"token id {wrong} is outside the vocabulary of {self.vocab_size} tokens"
            refuse(self.job, self.part.folder.path, problem, "data.path")
        return ids, labels
