"""Token files as memory-mapped arrays: cheap checks when they are opened, and full verification on demand.

    found = read_token_folder("corpus")            # dslpar.schema.token_folders has the files
    ids = open_tokens(found)                       # [num_tokens], of which nothing is read but some pages
    corruptions(found)                             # every byte; empty: as they were written

Opening detects wrong lengths, headers, counts and vocabularies. It checks every byte of tokens.json and documents.npy,
and some pages of tokens.npy, including the first and the last. Only `corruptions` detects changed bytes between these
pages. (safetensors files are mapped in the same way, and have no checksums.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dslpar.schema.token_folders import DOCUMENTS, HEADER_BYTES, TOKENS, TokenFolder, read_token_folder
from dslpar.schema.tokenizer_file import read_tokenizer

Ids = NDArray[Any]
_PAGE, _MAX_PAGES = 4096, 64
_CHUNK = 8 << 20


def open_tokens(found: TokenFolder) -> Ids:
    """Memory-map the ids of token files, [num_tokens].

    Raises:
        ValueError: the files differ from what was written.
        OSError: the files cannot be read.
    """
    if found.problem:
        raise ValueError(found.problem)
    if not found.is_megatron:
        checks = ((TOKENS, found.tokens_path, sampled_digest), (DOCUMENTS, found.index_path, whole_digest))
        for name, path, digest in checks:
            if digest(path) != found.files[name]["xxh3_128"]:
                raise ValueError(f"{name}: altered")
    if not found.num_tokens:
        return np.zeros(0, found.dtype or np.uint16)
    # np.asarray, since slices of an np.memmap are np.memmaps, which cost a microsecond more each.
    return np.asarray(
        np.memmap(found.tokens_path, found.dtype, "r", offset=found.tokens_offset, shape=(found.num_tokens,))
    )


def sampled_digest(path: str) -> str:
    """Return the digest of some evenly spread pages of a file, including the first and the last."""
    last = max(os.path.getsize(path) - _PAGE, 0)
    pages = min(_MAX_PAGES, last // _PAGE + 2)
    hashed = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        for index in range(pages):
            file.seek(last * index // (pages - 1))
            hashed.update(file.read(_PAGE))
    return hashed.hexdigest()


def whole_digest(path: str) -> str:
    """Return the digest of a whole file."""
    hashed = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def corruptions(path: str) -> Iterator[str]:
    """Read every byte of token files, and yield what is wrong with each file."""
    found = read_token_folder(path)
    if found.problem:
        yield found.problem
        return
    try:
        yield from _megatron_corruptions(found) if found.is_megatron else _corruptions(found)
    except OSError as error:
        yield f"{os.path.basename(str(error.filename))}: {error.strerror}"


def _corruptions(found: TokenFolder) -> Iterator[str]:
    for name, path in ((TOKENS, found.tokens_path), (DOCUMENTS, found.index_path)):
        if sha256(path, HEADER_BYTES) != found.files[name]["sha256"]:
            yield f"{name}: altered"
    starts = np.load(found.index_path, mmap_mode="r", allow_pickle=False)
    if starts[0] or starts[-1] != found.num_tokens or (np.diff(starts) < 0).any():
        yield f"{DOCUMENTS}: documents do not follow one another"
    if found.tokenizer_digest and read_tokenizer(found.tokenizer_path).digest != found.tokenizer_digest:
        yield "tokenizer/tokenizer.json: missing or altered"


def _megatron_corruptions(found: TokenFolder) -> Iterator[str]:
    """Yield inconsistencies within Megatron-LM's files, which have no digests."""
    name, size = os.path.basename(found.index_path), np.dtype(found.dtype).itemsize
    with open(found.index_path, "rb") as file:
        file.seek(34)
        lengths = np.fromfile(file, "<i4", found.num_sequences).astype(np.int64)
        starts = np.fromfile(file, "<i8", found.num_sequences)
        documents = np.fromfile(file, "<i8", found.num_documents + 1)
    if (lengths < 0).any() or (starts != np.cumsum(lengths * size) - lengths * size).any():
        yield f"{name}: sequences do not follow one another"
    if documents[0] or documents[-1] != found.num_sequences or (np.diff(documents) < 0).any():
        yield f"{name}: documents do not follow one another"
    ids = open_tokens(found)
    if any(ids[start : start + _CHUNK].min() < 0 for start in range(0, len(ids), _CHUNK)):
        yield f"{os.path.basename(found.tokens_path)}: ids below 0"


def sha256(path: str, start: int = 0) -> str:
    """Return the SHA-256 of a file from the byte `start` on."""
    hashed = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def identity_of(found: TokenFolder) -> str:
    """Return the tokens' digest, independent of their path; for Megatron-LM's files, the length and some pages."""
    if found.is_megatron:
        return f"{found.num_tokens} {sampled_digest(found.tokens_path)} {sampled_digest(found.index_path)}"
    return str(found.files[TOKENS]["sha256"])
