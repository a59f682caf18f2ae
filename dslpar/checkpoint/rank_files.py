"""Files of one rank in a checkpoint, and the thread that writes them while training goes on. No collective.

    report = files.write(part)                       # here and now
    thread = WriterThread(files, part); thread.start()
    thread.report()                                  # the same, when it is done

The thread issues no collectives: only the main thread does, in the same order on all ranks. Collectives from a second
thread would change that order.
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
"""Time in seconds that an ending rank waits for its thread: a disk that hangs must not keep the rank alive."""


class RankReport(NamedTuple):
    """Result of one rank's part of a save, sent to rank 0."""

    host: str
    """Host name of the rank."""
    sees_folder: bool
    """Whether the rank sees the folder that rank 0 has made."""
    error: str = ""
    """Rank and reason of a failed write; empty: the write succeeded."""
    packed_index: bytes = b""
    """Rank's part of the index, pickled and compressed: the gather sends it to every rank, but only rank 0 reads it."""
    files: Mapping[str, FileDigest] = {}
    """Digests of the rank's files, by path in the folder."""


class RankFiles(NamedTuple):
    """Files that a rank writes."""

    rank: str
    """Description of the rank, for error messages."""
    files: Mapping[str, Chunks]
    """Bytes by path in the checkpoint's folder."""
    part_index: Index
    """Rank's part of the index: the model's tensors in these files."""

    def write(self, part: Path, abandoned: threading.Event | None = None) -> RankReport:
        """Write and sync the files in the unfinished folder `part`.

        OSError is returned in the report and not raised, since other ranks wait for the report.

        Raises:
            Abandoned: the event `abandoned` was set.
        """
        host, written = socket.gethostname(), dict[str, FileDigest]()
        try:
            for name, chunks in self.files.items():
                written[name] = writer.write_file(part / name, _pieces(chunks, abandoned or threading.Event()))
        except OSError as error:
            return RankReport(host, True, f"{self.rank}: {error}")
        # Level 1: an index is mostly repeated names, and all ranks wait for rank 0.
        return RankReport(host, True, "", zlib.compress(pickle.dumps(self.part_index), level=1), written)


class Abandoned(Exception):  # noqa: N818  # no error: a stop that was requested
    """Raised to stop writing: the run ends, and the files are not needed."""


def _pieces(chunks: Chunks, abandoned: threading.Event) -> Iterator[memoryview]:
    """Yield the bytes in pieces; writing may be abandoned between two pieces."""
    for chunk in chunks:
        with memoryview(chunk) as data:
            for at in range(0, len(data), _CHUNK_BYTES):
                if abandoned.is_set():
                    raise Abandoned
                with data[at : at + _CHUNK_BYTES] as piece:
                    yield piece


class WriterThread(threading.Thread):
    """Thread that writes a rank's files; end it with `report` or `abandon`.

    It is a daemon thread. A rank that crashes calls neither method, and Python would wait at exit for a thread that is
    no daemon, even if the disk hangs.
    """

    def __init__(self, files: RankFiles, part: Path) -> None:
        super().__init__(name="checkpoint writer", daemon=True)
        self.files, self.part = files, part
        self._abandoned = threading.Event()
        self._report: RankReport | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Write the files, and store the report or the error for `report` and `abandon`."""
        try:
            self._report = self.files.write(self.part, self._abandoned)
        except BaseException as error:  # noqa: BLE001  # raised by report(), in the main thread
            self._error = error

    def report(self) -> RankReport:
        """Wait for the files, and return the report. Raises: any error but OSError, which is in the report."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def abandon(self) -> str:
        """Stop the thread after its present write, and return its error, or "".

        This waits at most `_ABANDON_S`: the thread's last system call may still be running when this returns.
        """
        self._abandoned.set()
        self.join(_ABANDON_S)
        if self._error is not None and not isinstance(self._error, Abandoned):
            return repr(self._error)
        return self._report.error if self._report is not None else ""
