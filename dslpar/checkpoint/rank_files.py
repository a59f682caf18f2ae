"""The files of one rank in a checkpoint, and the thread that writes them while the rank takes steps. No collective.

    report = files.write(part)                       # here and now
    thread = WriterThread(files, part); thread.start()
    thread.report()                                  # the same, when it is done

All collectives of a rank are the main thread's, in one order on all ranks; two threads that issue them would mix.
"""

from __future__ import annotations

import pickle
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dslpar.checkpoint import writer
from dslpar.checkpoint.folder import FileDigest
from dslpar.checkpoint.index import Index

Chunks = Iterable[bytes | memoryview]

_CHUNK_BYTES = 1 << 23
_ABANDON_S = 1.0
"""How long a rank that ends waits for its thread to see that: a disk that never answers must not keep it."""


class RankReport(NamedTuple):
    """A rank's report of its part of a save."""

    host: str
    sees_folder: bool
    """Whether it sees the folder that rank 0 has made."""
    error: str = ""
    """Which rank could not write, and why; empty: it could."""
    packed_index: bytes = b""
    """Its part of the index, pickled and compressed: only rank 0 reads it, but every rank receives all of them."""
    files: Mapping[str, FileDigest] = {}
    """Its files, by their paths in the folder."""


class RankFiles(NamedTuple):
    """What a rank writes."""

    rank: str
    """The rank, as the report of a failure names it."""
    files: Mapping[str, Chunks]
    """Bytes by paths in the folder of the checkpoint."""
    part_index: Index
    """Its part of the index: what is in them of the model's tensors."""

    def write(self, part: Path, abandoned: threading.Event | None = None) -> RankReport:
        """Write the files, each synced, below `part`. A disk that fails is reported, not raised: other ranks wait.

        Raises:
            Abandoned: `abandoned` was set.
        """
        host, written = socket.gethostname(), dict[str, FileDigest]()
        try:
            for name, chunks in self.files.items():
                written[name] = writer.write_file(part / name, _pieces(chunks, abandoned or threading.Event()))
        except OSError as error:
            return RankReport(host, True, f"{self.rank}: {error}")
        # Level 1: an index is mostly repeated names, and all ranks wait for rank 0.
        return RankReport(host, True, "", zlib.compress(pickle.dumps(self.part_index), level=1), written)


class Abandoned(Exception):  # noqa: N818  # no error: who raises it was asked to
    """The run ends, and what was being written will never be read."""


def _pieces(chunks: Chunks, abandoned: threading.Event) -> Iterator[memoryview]:
    """Yield the bytes in pieces, between which writing may be abandoned."""
    for chunk in chunks:
        with memoryview(chunk) as data:
            for at in range(0, len(data), _CHUNK_BYTES):
                if abandoned.is_set():
                    raise Abandoned
                with data[at : at + _CHUNK_BYTES] as piece:
                    yield piece


class WriterThread(threading.Thread):
    """Writes a rank's files. It lives until `report` or `abandon` was called.

    A daemon, as the thread that makes the next step's data: where a rank crashes, neither is called, and Python would
    wait at its exit for a disk that never answers.
    """

    def __init__(self, files: RankFiles, part: Path) -> None:
        super().__init__(name="checkpoint writer", daemon=True)
        self.files, self.part = files, part
        self._abandoned = threading.Event()
        self._report: RankReport | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Write; the report, or an error, is kept for whoever asks for it."""
        try:
            self._report = self.files.write(self.part, self._abandoned)
        except BaseException as error:  # noqa: BLE001  # raised by report(), in the main thread
            self._error = error

    def report(self) -> RankReport:
        """Wait, and return the report. Raises: what writing raised, but for a disk that fails, which is reported."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def abandon(self) -> str:
        """Have it end after what it is writing now, and wait a little for that; return what it had to say, if anything.

        Its last call of the system may outlive this by as long as the disk takes.
        """
        self._abandoned.set()
        self.join(_ABANDON_S)
        if self._error is not None and not isinstance(self._error, Abandoned):
            return repr(self._error)
        return self._report.error if self._report is not None else ""
