"""Memory-mapped bytes of text files: samples read pages on demand, and the ranks of a host share them.

    text = MappedText(job, corpus.train)         # nothing is opened yet
    text.windows([0, 512], 513)                  # int64 [2, 513], as if all files were one array

Only byte-level text is mapped, whose ids are the bytes. With a tokenizer, ids are made at the start (tokens.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import FileSlice
from dslpar.data.tokens import Ids
from dslpar.layout.resolve import Job

NUM_MAPPED = 64
"""Number of files that stay mapped, the most recent ones. Each stays open, and a process may open about 1000."""


class MappedText:
    """The concatenated bytes of `slices`."""

    def __init__(self, job: Job, slices: Sequence[FileSlice]) -> None:
        self._job, self._slices = job, [part for part in slices if part.num_bytes]  # an empty file cannot be mapped
        self._ends = np.cumsum([0, *(part.num_bytes for part in self._slices)])[1:]
        self._mapped = lru_cache(NUM_MAPPED)(self._map)

    def __len__(self) -> int:
        """Return the number of bytes."""
        return int(self._ends[-1]) if self._slices else 0

    def windows(self, starts: Sequence[int] | Ids, length: int) -> Ids:
        """Return the `length` bytes from each of `starts` on, int64 [len(starts), length].

        Raises:
            DslparError: a file has become shorter, or was removed, before it is mapped. If a file is truncated while it
                is mapped, SIGBUS ends the process.
        """
        found = np.empty((len(starts), length), np.int64)
        for row, start in zip(found, starts, strict=True):
            index = int(np.searchsorted(self._ends, start, side="right"))
            filled = 0
            while filled < length:  # a window may continue in the next files
                part, end = self._slices[index], int(self._ends[index])
                piece = self._mapped(index)[start + filled - end + part.num_bytes :][: length - filled]
                row[filled : filled + len(piece)] = piece
                filled, index = filled + len(piece), index + 1
        return found

    def _map(self, index: int) -> Ids:
        part = self._slices[index]
        try:
            # np.asarray, since slices of an np.memmap are np.memmaps, which cost a microsecond more each.
            return np.asarray(np.memmap(part.path, np.uint8, "r", part.start, (part.num_bytes,)))
        except (OSError, ValueError) as error:
            message = f"{part.path!r} has changed since the run began: {error}"
            raise_finding(
                "BAT201", message, "do not change a run's text before the run has ended", self._job.path, "data"
            )
