"""Files of one rank in a checkpoint, and the thread that writes them while training goes on. No collective.

    report = files.write(part)                       # here and now
    thread = WriterThread(files, part); thread.start()
    thread.report()                                  # the same, when it is done

Only the main thread issues collectives, in one order on all ranks. Those of a second thread would mix with them.
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
"""Time that an ending rank waits for its thread: a disk that never answers must not keep the rank alive."""


class RankReport(NamedTuple):
    """A rank's report of its part of a save."""

    host: str
    sees_folder: bool
    """Whether the rank sees the folder that rank 0 has made."""
    error: str = ""
    """Rank and reason of a failed write; empty: it succeeded."""
    packed_index: bytes = b""
    """Rank's part of the index, pickled and compressed: only rank 0 reads it, but every rank receives all of them."""
    files: Mapping[str, FileDigest] = {}
    """Digests of the rank's files, by path in the folder."""


class RankFiles(NamedTuple):
    """Files that a rank writes."""

    rank: str
    """Rank, as named in the report of a failure."""
    files: Mapping[str, Chunks]
    """Bytes by path in the checkpoint's folder."""
    part_index: Index
    """Rank's part of the index: the model's tensors in these files."""

    def write(self, part: Path, abandoned: threading.Event | None = None) -> RankReport:
        """Write and sync the files below `part`. A disk failure is reported, not raised, since other ranks wait.

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


class Abandoned(Exception):  # noqa: N818  # no error: a stop that was requested
    """The run ends, and nobody will read the files being written."""


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

    It is a daemon, like the thread that prepares the next step's data. A rank that crashes calls neither method, and
    Python would wait at exit for a disk that never answers.
    """

    def __init__(self, files: RankFiles, part: Path) -> None:
        super().__init__(name="checkpoint writer", daemon=True)
        self.files, self.part = files, part
        self._abandoned = threading.Event()
        self._report: RankReport | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Write the files, and keep the report or the error for `report` and `abandon`."""
        try:
            self._report = self.files.write(self.part, self._abandoned)
        except BaseException as error:  # noqa: BLE001  # raised by report(), in the main thread
            self._error = error

    def report(self) -> RankReport:
        """Wait, and return the report. Raises: any error of writing except a disk failure, which is reported."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def abandon(self) -> str:
        """Have the thread end after its present write, wait a little for it, and return its error, or "".

        Its last system call may go on after this returns, for as long as the disk takes.
        """
        self._abandoned.set()
        self.join(_ABANDON_S)
        if self._error is not None and not isinstance(self._error, Abandoned):
            return repr(self._error)
        return self._report.error if self._report is not None else ""
