"""Chunks of a pipeline: the stages that each rank of the axis "pipe" holds.

A stage is a contiguous run of layers. Stages are numbered in the order of the forward. With one chunk per rank, stage
and rank have the same number. With v chunks per rank, rank r holds the stages r, r + P, r + 2P, ..., as in
Megatron-LM's interleaved schedule (arXiv 2104.04473). Letters: P ranks, v chunks per rank, V = P v stages.

    >>> chunks = Chunks(pipe=2, num=2)
    >>> chunks.stages, list(chunks.held_by(1)), chunks.rank_of(2)
    (4, [1, 3], 0)
"""

from __future__ import annotations

from typing import NamedTuple


class Chunks(NamedTuple):
    """Stages of a pipeline, and the rank that holds each of them."""

    pipe: int
    """Number of ranks on the axis "pipe"."""
    num: int = 1
    """Number of stages per rank."""

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.pipe * self.num

    @property
    def last(self) -> int:
        """The stage with the model's output."""
        return self.stages - 1

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return stage % self.pipe

    def held_by(self, rank: int) -> range:
        """Return the stages that a rank holds, in the order of the forward."""
        return range(rank, self.stages, self.pipe)
