"""Text corpus: find files, check them, and split them into training and held-out text. Needs no torch.

The default corpus is the source of Python's standard library, which is on every machine that runs dslpar: about 12 MB
in 700 files, without its tests (some distributions omit them). The split is by file, so that training sees no part of a
held-out file. The files whose names have the smallest hashes are held out, the same files on every machine. A single
file is split near its end.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from dslpar.core.catalog import raise_finding
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import type_name

_NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_HINT = "name text files, or folders of them, relative to the config's folder"


class FileSlice(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    path: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Length of the slice."""
        return self.stop - self.start


class Corpus(NamedTuple):
    """Text of a run as slices of files."""

    train: tuple[FileSlice, ...]
    held_out: tuple[FileSlice, ...]


class File(NamedTuple):
    """File; its name is relative to the folder in which it was found, and so the same on every machine."""

    name: str
    path: str


def load_corpus(job: Job) -> Corpus:
    """Find, split and check the corpus of a job.

    Raises:
        DslparError: a file is missing, or there is too little text for a sample or for a step.
    """
    try:
        if job.spec.data.files is not None:
            files = find_files(job, job.spec.data.files)
        else:
            source = walk(sysconfig.get_path("stdlib"), skip=_NOT_SOURCE)
            files = [file for file in source if file.name.endswith(".py")]
    except OSError as error:
        raise_finding("BAT201", f"cannot list {error.filename!r}: {error.strerror}", _HINT, job.path, "data.files")
    corpus = split(files, job.spec.data.eval_fraction)
    _check_length(job, corpus)
    # With a tokenizer, the number of samples is only known after encoding.
    if type_name(job.spec.data) == "text" and job.spec.data.tokenizer is None:
        check_number(job, (sum(part.num_bytes for part in corpus.train) - 1) // job.seq_len)
    return corpus


def split(files: Sequence[File], fraction: float) -> Corpus:
    """Hold out a share of the files: at least one if it is not 0, and never all. A single file is split at its end."""
    slices = {file.path: FileSlice(file.path, 0, os.path.getsize(file.path)) for file in files}
    if len(slices) == 1:
        (whole,) = slices.values()
        middle = whole.stop - round(whole.stop * fraction)
        parts = whole._replace(stop=middle), whole._replace(start=middle)
        return Corpus(*((part,) if part.num_bytes else () for part in parts))
    count = min(max(round(len(slices) * fraction), 1), len(slices) - 1) if fraction else 0
    # A hash of the name is equal on every machine, unlike the order of a listing or Python's hash().
    by_hash = sorted(files, key=lambda file: (_name_digest(file.name), file.path))
    held_out = {file.path for file in by_hash[:count]}
    train = tuple(part for path, part in slices.items() if path not in held_out)
    return Corpus(train, tuple(part for path, part in slices.items() if path in held_out))


def read(slices: Iterable[FileSlice]) -> bytearray:
    """Return the concatenated bytes of all slices."""
    text = bytearray()
    for part in slices:
        with open(part.path, "rb") as file:
            file.seek(part.start)
            text += file.read(part.num_bytes)
    return text


def _name_digest(name: str) -> bytes:
    return hashlib.blake2b(name.replace(os.sep, "/").encode(errors="surrogateescape"), digest_size=8).digest()


# ---- files ----


def find_files(
    job: Job, names: Sequence[str], key: str = "data.files", suffixes: tuple[str, ...] = ("",)
) -> list[File]:
    """Return the files that a config names, and the files of named folders that end with one of `suffixes`.

    Raises:
        DslparError: a file does not exist or cannot be read, or a folder has no such files.
    """
    folder = os.path.dirname(job.path)
    found: list[File] = []
    for name in names:
        path = os.path.normpath(os.path.join(folder, name))
        files = [File(os.path.basename(path), path)]
        if os.path.isdir(path):
            files = [file for file in walk(path) if file.name.endswith(suffixes)]
        problems = [f"{file.path!r} {problem}" for file in files if (problem := _problem_of(file.path))]
        if problems or not files:
            problem = problems[0] if problems else f"{path!r} holds no files {' or '.join(suffixes)}".rstrip()
            more = f", and {len(problems) - 1} more like it" if len(problems) > 1 else ""
            raise_finding("BAT201", problem + more, _HINT, job.path, key)
        found += files
    return found


def _problem_of(path: str) -> str:
    """Return the reason why a file cannot be read; empty: it can be read."""
    if not os.path.exists(path):
        return f"is a link to {os.readlink(path)!r}, which does not exist" if os.path.islink(path) else "does not exist"
    if not os.path.isfile(path):
        return "is not a file, but a device, a pipe or a socket"
    return "" if os.access(path, os.R_OK) else "may not be read by this user"


def walk(root: str, skip: frozenset[str] = frozenset()) -> Iterator[File]:
    """Yield all files below `root` in the order of their names, except hidden ones. Raises: OSError."""

    def fail(error: OSError) -> NoReturn:
        raise error  # os.walk would skip a folder that it cannot list

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = os.path.normpath(os.path.join(folder, name))
                yield File(os.path.relpath(path, root), path)


# ---- length ----


def check_has_length(job: Job) -> None:
    """Refuse data if neither the data nor the model has a length of samples."""
    if job.seq_len == 0:
        message = "the length of a sample is unknown: neither data.seq_len nor the model determines it"
        raise_finding("BAT202", message, "give data=dict(seq_len=...)", job.path, "data.seq_len")


def _check_length(job: Job, corpus: Corpus) -> None:
    check_has_length(job)
    _check_part(job, corpus.train, "to train on", "longer files, or a shorter data.seq_len")
    if job.spec.train.eval_interval is not None:
        _check_part(job, corpus.held_out, "held out", "raise data.eval_fraction, or leave train.eval_interval out")


def _check_part(job: Job, slices: Sequence[FileSlice], which: str, hint: str) -> None:
    num_bytes = sum(part.num_bytes for part in slices)
    # The number of tokens is not known yet, but a tokenizer seldom makes more tokens than there are bytes.
    if num_bytes <= job.seq_len:
        message = f"{num_bytes} bytes are {which}, but a sample takes seq_len + 1 = {job.seq_len + 1}"
        raise_finding("BAT203", message, hint, job.path, "data")


def check_number(job: Job, samples: int, what: str = "") -> None:
    """Refuse a step that takes more samples than there are. It would repeat samples, or never end."""
    if job.batch.global_size > samples:
        there_are = f"there are {samples} {what}" if what else f"the text has {samples} of {job.seq_len} tokens"
        message = f"a step takes {job.batch.global_size} samples, but {there_are}"
        raise_finding("BAT210", message, "a smaller batch, more text, or a shorter data.seq_len", job.path, "batch")
