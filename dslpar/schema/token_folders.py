"""Token files on disk, read without numpy: read their metadata, check files against it, find the start of a document.

    corpus/tokens.json       format, counts, vocabulary, digests of the files beside it, sources
    corpus/tokens.npy        ids of all documents, one after the other: uint16 or uint32 [num_tokens]
    corpus/documents.npy     first token of each document, and the end of the last: int64 [num_documents + 1]
    corpus/tokenizer/        a copy of the tokenizer.json that made the ids; absent for bytes

Megatron-LM's indexed data sets (`.bin` and `.idx`, version 1) are read too. The stream of tokens with an index of
documents comes from Megatron-LM. dslpar's own files are numpy files, so that other programs can read them.

    found = read_token_folder("corpus")
    found.problem, found.num_tokens, held_out_start(found, 0.05)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dslpar.core.json_values import count, items, mapping, parse, text
from dslpar.schema.tokenizer_file import TOKENIZER_JSON

FORMAT = 1
META, TOKENS, DOCUMENTS, TOKENIZER = "tokens.json", "tokens.npy", "documents.npy", "tokenizer"
HEADER_BYTES = 128
"""Header length of dslpar's .npy files, always the same."""
TOKEN_BYTES: Mapping[str, int] = {"uint16": 2, "uint32": 4}
_DESCRIPTIONS: Mapping[str, str] = {"uint16": "<u2", "uint32": "<u4", "int64": "<i8"}
_HEX = re.compile(r"[0-9a-f]+")
_MAX_META_BYTES = 256 << 20
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_DTYPES: Mapping[int, tuple[str, int]] = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    8: ("uint16", 2),
}
"""Megatron-LM's code of an integer type -> (numpy's name, bytes)."""


class TokenFolder(NamedTuple):
    """Token files, described by their metadata."""

    path: str
    num_tokens: int = 0
    num_documents: int = 0
    dtype: str = ""
    """numpy's name of the ids' type."""
    vocab_size: int | None = None
    """Vocabulary size that a model needs; None if unknown."""
    eos: int | None = None
    """The id at the end of each document; None if there is none."""
    tokenizer_digest: str = ""
    """SHA-256 of the tokenizer.json that made the tokens; empty for bytes, or if unknown."""
    tokens_path: str = ""
    index_path: str = ""
    """documents.npy, or Megatron-LM's .idx."""
    files: Mapping[str, Any] = {}
    """Bytes and digests of tokens.npy and documents.npy, from tokens.json; empty for Megatron-LM's files."""
    sources: Sequence[Mapping[str, Any]] = ()
    """The text files that were tokenized, from tokens.json."""
    num_sequences: int = 0
    """Sequences in Megatron-LM's index; 0 for dslpar's files."""
    plan: str = ""
    """Digest of the text files that were tokenized, and of the settings; `dslpar data tokenize` compares it."""
    problem: str = ""
    """Reason why the token files cannot be used; empty if they can."""
    missing: bool = False
    """Whether the path does not exist."""

    @property
    def is_megatron(self) -> bool:
        """Return whether this is an indexed data set of Megatron-LM."""
        return self.index_path.endswith(".idx")

    @property
    def tokenizer_path(self) -> str:
        """The tokenizer.json beside the tokens; empty if there is none."""
        return os.path.join(self.path, TOKENIZER, TOKENIZER_JSON) if self.tokenizer_digest else ""

    @property
    def tokens_offset(self) -> int:
        """Bytes before the first id."""
        return 0 if self.is_megatron else HEADER_BYTES


def read_token_folder(path: str) -> TokenFolder:
    """Read the metadata of token files, and check the lengths of the files; a mistake is in the result's `problem`.

    `path`: a folder, or the path of Megatron-LM's files with or without a suffix.
    """
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    try:
        if os.path.isdir(path):
            return _read_folder(path)
        if os.path.exists(f"{prefix}.idx"):
            return _read_megatron(prefix)
    except OSError as error:
        return TokenFolder(path, problem=f"{os.path.basename(str(error.filename))}: {error.strerror}")
    except ValueError as error:
        return TokenFolder(path, problem=str(error))
    if os.path.exists(path):
        return TokenFolder(path, problem="it is neither a folder of token files nor an .idx file")
    return TokenFolder(path, problem="there is no such folder", missing=True)


def held_out_start(found: TokenFolder, fraction: float) -> int:
    """Return the index of the first held-out token. The last documents are held out, at least one and never all.

    If there is a single document, its end is held out. Raises: ValueError: the index is corrupted.
    """
    if not fraction:
        return found.num_tokens
    if found.num_documents < 2:
        return found.num_tokens - round(found.num_tokens * fraction)
    held_out = min(max(round(found.num_documents * fraction), 1), found.num_documents - 1)
    start = _document_start(found, found.num_documents - held_out)
    if not 0 <= start <= found.num_tokens:
        raise ValueError(f"{os.path.basename(found.index_path)}: a document begins at {start}")
    return start


def npy_header(dtype: str, length: int) -> bytes:
    """Return the header (HEADER_BYTES) of an .npy file, version 1.0, with `length` numbers."""
    described = f"{{'descr': '{_DESCRIPTIONS[dtype]}', 'fortran_order': False, 'shape': ({length},), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", HEADER_BYTES - 10)
        + described.ljust(HEADER_BYTES - 11).encode()
        + b"\n"
    )


def serialize(values: Mapping[str, Any]) -> bytes:
    """Return the content of tokens.json: these values and their digest."""
    return json.dumps({**values, "digest": _digest(values)}, indent=1).encode() + b"\n"


# ---- dslpar's token files ----


def _read_folder(path: str) -> TokenFolder:
    with open(os.path.join(path, META), "rb") as file:
        data = file.read(_MAX_META_BYTES + 1)
    if len(data) > _MAX_META_BYTES:
        raise ValueError(f"{META}: more than {_MAX_META_BYTES:,} bytes")
    try:
        found = _checked(path, mapping(parse(data), "it", "format"))
    except ValueError as error:
        raise ValueError(f"{META}: {error}") from None
    for name, dtype, length in ((TOKENS, found.dtype, found.num_tokens), (DOCUMENTS, "int64", found.num_documents + 1)):
        file_path, expected = os.path.join(path, name), found.files[name]["bytes"]
        if (size := os.path.getsize(file_path)) != expected:
            raise ValueError(f"{name}: {size:,} bytes instead of {expected:,}")
        with open(file_path, "rb") as file:
            if file.read(HEADER_BYTES) != npy_header(dtype, length):
                raise ValueError(f"{name}: its header is not that of {length:,} numbers of {dtype}")
    return found


def _checked(path: str, values: Mapping[str, Any]) -> TokenFolder:
    """Check the values of tokens.json. Raises: ValueError: they were altered, or have another format."""
    if count(values["format"], "format", least=1) != FORMAT:
        raise ValueError(f"format {values['format']}, but this dslpar reads format {FORMAT}")
    rest = {key: value for key, value in values.items() if key != "digest"}
    if values.get("digest") != _digest(rest):
        raise ValueError("altered")
    # A correct digest does not make the values valid.
    mapping(values, "it", "dtype", "num_tokens", "num_documents", "vocab_size", "eos", "tokenizer", "files", "sources")
    dtype = text(values["dtype"], "dtype", among=tuple(TOKEN_BYTES))
    num_tokens, num_documents = (count(values[key], key) for key in ("num_tokens", "num_documents"))
    vocab_size = count(values["vocab_size"], "vocab_size", least=1, most=1 << 8 * TOKEN_BYTES[dtype])
    if values["eos"] is not None:
        count(values["eos"], "eos", most=vocab_size - 1)
    files = mapping(values["files"], "files", TOKENS, DOCUMENTS)
    sizes = {TOKENS: num_tokens * TOKEN_BYTES[dtype], DOCUMENTS: (num_documents + 1) * 8}
    for name, size in sizes.items():
        file = mapping(files[name], name, "bytes", "sha256", "xxh3_128")
        if count(file["bytes"], f"{name}.bytes") != size + HEADER_BYTES:
            raise ValueError(f"{name}.bytes is {file['bytes']:,}, but its numbers take {size + HEADER_BYTES:,}")
        for digest, length in (("sha256", 64), ("xxh3_128", 32)):
            if len(text(file[digest], f"{name}.{digest}")) != length or not _HEX.fullmatch(file[digest]):
                raise ValueError(f"{name}.{digest} is not a digest")
    tokenizer = values["tokenizer"]
    digest = "" if tokenizer is None else text(mapping(tokenizer, "tokenizer", "sha256")["sha256"], "tokenizer.sha256")
    return TokenFolder(
        *(path, num_tokens, num_documents, dtype, vocab_size, values["eos"], digest),
        *(os.path.join(path, TOKENS), os.path.join(path, DOCUMENTS), files, items(values["sources"], "sources")),
        plan=text(values.get("plan", ""), "plan"),
    )


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ---- Megatron-LM's indexed data sets ----


def _read_megatron(prefix: str) -> TokenFolder:
    """Read an .idx: a header, the lengths (int32) and first bytes (int64) of all sequences, then documents (int64)."""
    index_path, tokens_path = f"{prefix}.idx", f"{prefix}.bin"
    name, size, tokens_bytes = os.path.basename(index_path), os.path.getsize(index_path), os.path.getsize(tokens_path)
    with open(index_path, "rb") as file:
        head = file.read(_INDEX_HEADER.size)
    if len(head) < _INDEX_HEADER.size or not head.startswith(_INDEX_MAGIC):
        raise ValueError(f"{name}: it is not a Megatron-LM index (MMIDIDX)")
    _, version, code, num_sequences, num_indices = _INDEX_HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"{name}: version {version}, but dslpar reads version 1")
    if code not in _INDEX_DTYPES:
        raise ValueError(f"{name}: tokens of type {code}, which are not whole numbers")
    dtype, item = _INDEX_DTYPES[code]
    expected = _INDEX_HEADER.size + 12 * num_sequences + 8 * num_indices
    if size not in (expected, expected + num_sequences) or num_indices < 1:  # several modalities add a byte each
        raise ValueError(f"{name}: {size:,} bytes, but its sequences and documents take {expected:,}")
    if tokens_bytes % item:
        raise ValueError(f"{os.path.basename(tokens_path)}: {tokens_bytes:,} bytes are not a whole number of {dtype}")
    found = TokenFolder(
        *(prefix, tokens_bytes // item, num_indices - 1, dtype, None, None, "", tokens_path, index_path),
        num_sequences=num_sequences,
    )
    if (end := _document_start(found, found.num_documents)) != found.num_tokens:
        message = f"{os.path.basename(tokens_path)}: {found.num_tokens:,} tokens, but the index has {end:,}"
        raise ValueError(message)
    return found


def _document_start(found: TokenFolder, document: int) -> int:
    """Return the first token of a document; for the one after the last, the number of tokens. Raises: ValueError."""
    if not found.is_megatron:
        return _number_at(found.index_path, HEADER_BYTES + 8 * document, "<q")
    lengths = _INDEX_HEADER.size
    pointers = lengths + 4 * found.num_sequences
    sequence = _number_at(found.index_path, pointers + 8 * (found.num_sequences + document), "<q")
    if not 0 <= sequence <= found.num_sequences:
        raise ValueError(f"{os.path.basename(found.index_path)}: a document begins with sequence {sequence}")
    item = next(size for name, size in _INDEX_DTYPES.values() if name == found.dtype)
    if sequence < found.num_sequences:
        return _number_at(found.index_path, pointers + 8 * sequence, "<q") // item
    if not sequence:
        return 0
    last = _number_at(found.index_path, pointers + 8 * (sequence - 1), "<q") // item
    return last + _number_at(found.index_path, lengths + 4 * (sequence - 1), "<i")


def _number_at(path: str, offset: int, form: str) -> int:
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(struct.calcsize(form))
    if len(data) < struct.calcsize(form):
        raise ValueError(f"{os.path.basename(path)}: it ends too early")
    (number,) = struct.unpack(form, data)
    return int(number)
