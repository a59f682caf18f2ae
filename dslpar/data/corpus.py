"""Which text: files found, checked, and split into train and held-out; plain Python, no torch.

The default is the source of Python's own standard library, which is on every machine that runs this: about 12 MB in
700 files, without its tests (some distributions leave them out). The split is by file, so that nothing of a held-out
file was seen in training: the files whose names hash lowest are held out, whatever the machine. One file by itself is
cut near its end.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.layout.resolve import Job

_NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    path: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.stop - self.start


class Corpus(NamedTuple):
    """The text of a run; a byte is a token."""

    train: tuple[Piece, ...]
    held_out: tuple[Piece, ...]


class File(NamedTuple):
    """A file, by its name relative to where it was found: the same on every machine."""

    name: str
    path: str


def corpus_of(job: Job) -> Corpus:
    """The corpus that a job asks for.

    Raises:
        DslparError: a file is missing, or there is too little text for one sample.
    """
    files = _asked(job) if job.spec.data.files is not None else _standard_library()
    corpus = split(files, job.spec.data.eval_fraction)
    _check_length(job, corpus)
    return corpus


def split(files: Sequence[File], fraction: float) -> Corpus:
    """A share of the files held out, at least one if any, and never all; of a single file, the end of it."""
    pieces = {file.path: Piece(file.path, 0, os.path.getsize(file.path)) for file in files}
    if len(pieces) == 1:
        (whole,) = pieces.values()
        return _cut(whole, fraction)
    count = min(max(round(len(pieces) * fraction), 1), len(pieces) - 1) if fraction else 0
    by_hash = sorted(files, key=lambda file: (_hash(file.name), file.path))
    held_out = {file.path for file in by_hash[:count]}
    train = tuple(piece for path, piece in pieces.items() if path not in held_out)
    return Corpus(train, tuple(pieces[path] for path in pieces if path in held_out))


def read(pieces: Iterable[Piece]) -> bytearray:
    """The bytes of all pieces, one after the other."""
    text = bytearray()
    for piece in pieces:
        with open(piece.path, "rb") as file:
            file.seek(piece.start)
            text += file.read(piece.num_bytes)
    return text


def _cut(piece: Piece, fraction: float) -> Corpus:
    middle = piece.stop - round(piece.stop * fraction)
    parts = piece._replace(stop=middle), piece._replace(start=middle)
    train, held_out = (((part,) if part.num_bytes else ()) for part in parts)
    return Corpus(train, held_out)


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.replace(os.sep, "/").encode(errors="surrogateescape"), digest_size=8).digest()


# ---- files ----


def _standard_library() -> list[File]:
    root = sysconfig.get_path("stdlib")
    return [file for file in _walk(root, skip=_NOT_SOURCE) if file.name.endswith(".py")]


def _asked(job: Job) -> list[File]:
    folder = os.path.dirname(job.path)
    found: list[File] = []
    for name in job.spec.data.files or ():
        path = os.path.normpath(os.path.join(folder, name))
        files = [File(os.path.basename(path), path)] if os.path.isfile(path) else list(_walk(path))
        if not files:
            what = "holds no files" if os.path.isdir(path) else "does not exist"
            hint = "name text files, or folders of them, relative to the config's folder"
            raise_finding("BAT201", f"{path!r} {what}", hint, job.path, "data.files")
        found += files
    return found


def _walk(root: str, skip: frozenset[str] = frozenset()) -> Iterator[File]:
    """All files below `root`, but for hidden ones, in the order of their names."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = os.path.normpath(os.path.join(folder, name))
                yield File(os.path.relpath(path, root), path)


# ---- length ----


def _check_length(job: Job, corpus: Corpus) -> None:
    if job.seq_len == 0:
        message = "a sample has no length: the model says nothing of it"
        raise_finding("BAT202", message, "give data=dict(seq_len=...)", job.path, "data.seq_len")
    _check_part(job, corpus.train, "to train on", "longer files, or a shorter data.seq_len")
    if job.spec.train.eval_interval is not None:
        _check_part(job, corpus.held_out, "held out", "a larger data.eval_fraction, or no train.eval_interval")


def _check_part(job: Job, pieces: Sequence[Piece], which: str, hint: str) -> None:
    num_bytes = sum(piece.num_bytes for piece in pieces)
    if num_bytes <= job.seq_len:
        message = f"{num_bytes} bytes are {which}, and a sample takes seq_len + 1 = {job.seq_len + 1}"
        raise_finding("BAT203", message, hint, job.path, "data")
