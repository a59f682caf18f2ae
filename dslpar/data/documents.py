"""Documents of text files, cut into shards that are read independently; each document is in one shard.

A document is a file, the text of a line of a .jsonl file, or the text between separators. Files that end with .gz are
decompressed. A shard is a run of small files, or a piece of a large file that begins and ends at document boundaries.
So many processes can read one file. (This is the idea of Megatron-LM's partitions, without copies of the text.)
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import walk

SHARD_BYTES = 1 << 20
"""Approximate size of a shard: less than a second of work, which is all that a killed process loses."""
_MAX_DOCUMENT_BYTES = 1 << 30
_HINT = "name text files, .jsonl files, or folders of them"


class Form(NamedTuple):
    """Rules by which files are split into documents."""

    json_key: str = "text"
    """Key of the text in each line of .jsonl files."""
    separator: str = ""
    """Separator between documents in other files; empty: each file is one document."""


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a file, with whole documents; stop -1: the whole file."""

    path: str
    start: int = 0
    stop: int = -1


Shard = Sequence[Piece]


def find_files(paths: Sequence[str]) -> list[str]:
    """Return the named files and the files of named folders, in the order of their names. Raises: DslparError."""
    found: list[str] = []
    for path in paths:
        try:
            files = [file.path for file in walk(path)] if os.path.isdir(path) else [path]
        except OSError as error:
            raise_finding("BAT214", f"cannot list {error.filename!r}: {error.strerror}", _HINT, path)
        if not files:
            raise_finding("BAT214", f"{path!r} holds no files", _HINT, path)
        for file in files:
            if not os.path.isfile(file) or not os.access(file, os.R_OK):
                problem = "may not be read by this user" if os.path.isfile(file) else "is not a file"
                raise_finding("BAT214", f"{file!r} {problem}", _HINT, file)
        found += files
    return found


def cut(files: Sequence[str], form: Form, shard_bytes: int = SHARD_BYTES) -> Sequence[Shard]:
    """Cut files into shards, in order."""
    shards: list[list[Piece]] = []
    filled = shard_bytes
    for path in files:
        size = os.path.getsize(path)
        if size <= shard_bytes or path.endswith(".gz") or not (_is_lines(path) or form.separator):
            if filled + size > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(Piece(path))
            filled += size
            continue
        ends = _ends(path, b"\n" if _is_lines(path) else form.separator.encode(), shard_bytes)
        shards += [[Piece(path, start, stop)] for start, stop in zip([0, *ends], [*ends, size], strict=True)]
        filled = shard_bytes
    return shards


def _is_lines(path: str) -> bool:
    return path.removesuffix(".gz").endswith(".jsonl")


def _ends(path: str, separator: bytes, shard_bytes: int) -> list[int]:
    """Return the offsets at which to cut a file: after the first separator beyond each `shard_bytes`."""
    ends: list[int] = []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Find all separators from the start, since a search from the middle misplaces separators that overlap
        # themselves.
        at, target = data.find(separator), shard_bytes
        while at >= 0:
            at += len(separator)
            if target <= at < len(data):
                ends.append(at)
                target = at + shard_bytes
            at = data.find(separator, at)
    return ends


def documents_of(shard: Shard, form: Form) -> Iterator[bytes]:
    """Yield the documents of a shard. Raises: DslparError: a line has no text at the key, or a document is too long."""
    for piece in shard:
        if _is_lines(piece.path):
            yield from _texts(piece, form.json_key)
            continue
        with _opened(piece) as file:
            data = file.read(_MAX_DOCUMENT_BYTES + 1 if piece.stop < 0 else piece.stop - piece.start)
        if len(data) > _MAX_DOCUMENT_BYTES:
            message = f"{piece.path!r} is one document of more than {_MAX_DOCUMENT_BYTES:,} bytes"
            raise_finding("BAT214", message, "--document-separator, where documents end", piece.path)
        if not form.separator:
            yield data
            continue
        *documents, rest = data.split(form.separator.encode())
        yield from documents
        if rest:  # empty if the file ends with a separator
            yield rest


def _opened(piece: Piece) -> IO[bytes]:
    file: IO[bytes] = gzip.open(piece.path, "rb") if piece.path.endswith(".gz") else open(piece.path, "rb")  # type: ignore[assignment]  # noqa: SIM115
    file.seek(piece.start)
    return file


def _texts(piece: Piece, key: str) -> Iterator[bytes]:
    with _opened(piece) as file:
        at = piece.start
        for number, line in enumerate(file):
            if 0 <= piece.stop <= at:
                return
            at += len(line)
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, IndexError):
                before = _lines_before(piece)
                message = f"{piece.path}:{before + number + 1}: not a JSON object with a text {key!r}"
                raise_finding("BAT214", message, "--json-key, the key of each line's text", piece.path)
            # A lone surrogate in JSON has no UTF-8 and is replaced by a question mark.
            yield text.encode("utf-8", "replace")


def _lines_before(piece: Piece) -> int:
    with open(piece.path, "rb") as file:
        return file.read(piece.start).count(b"\n") if piece.start else 0
