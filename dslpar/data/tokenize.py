"""Tokenize text files to token files with several processes. If it is killed, the next run continues.

Each process encodes a shard of documents (`documents`), and writes its ids to a file, which is renamed when it is
complete and on disk. The main process joins these parts, in order, to token files (`dslpar.schema.token_folders`),
which are renamed once at the end. So files with their final name are complete, and a second run only does the missing
work. (Encoding shards in processes comes from Hugging Face's `datasets`. Keeping the parts for a later run is new
here.)

    corpus.part/plan             digest of the request; a different request starts from scratch
    corpus.part/000012.ids       ids of a shard, lengths of its documents, counts and a digest
"""

from __future__ import annotations

import array
import concurrent.futures
import ctypes
import fcntl
import gzip
import hashlib
import multiprocessing
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.fsync import fsync
from dslpar.data.documents import SHARD_BYTES, Form, Shard, cut, documents_of, find_files
from dslpar.data.token_files import sampled_digest, sha256, whole_digest
from dslpar.schema.token_folders import (
    DOCUMENTS,
    FORMAT,
    HEADER_BYTES,
    META,
    TOKEN_BYTES,
    TOKENIZER,
    TOKENS,
    TokenFolder,
    npy_header,
    read_token_folder,
    serialize,
)
from dslpar.schema.tokenizer_file import TOKENIZER_CONFIG, TOKENIZER_JSON, TokenizerFile, read_tokenizer

_BATCH_BYTES = 1 << 20
"""Bytes of text that are encoded together."""
_END = struct.Struct("<QQ16s")
"""Trailer of a part: number of tokens, number of documents, digest of all bytes before the digest."""
_CODES = {"uint16": "H", "uint32": "I"}
_BYTES = 256
_THERE_HINT = "name another folder: nothing is overwritten"


class Request(NamedTuple):
    """Input files, output folder and options of a tokenization."""

    paths: Sequence[str]
    output: str
    tokenizer: str = ""
    """Path of a tokenizer.json, or of a folder with one; empty: each byte is a token."""
    append_eos: bool | None = None
    """Whether to append an end-of-text token to each document; None: if the tokenizer has one."""
    form: Form = Form()
    workers: int = 1
    shard_bytes: int = SHARD_BYTES


class _Encoding(NamedTuple):
    """Parameters by which documents are encoded to ids."""

    tokenizer_path: str
    eos: int | None
    dtype: str


class _Part(NamedTuple):
    """File with the ids of a shard."""

    path: Path
    num_tokens: int
    num_documents: int


def tokenize(request: Request, progress: Callable[[int, int], None] = lambda done, total: None) -> TokenFolder:
    """Write token files; call `progress` with (bytes of text done, bytes of all text).

    Raises:
        DslparError: a file cannot be read or has changed, the tokenizer is unusable, the folder already exists with
            other content, a process was killed, or the output cannot be written.
    """
    files, found = find_files(request.paths), _tokenizer_of(request)
    eos = _eos_of(request, found)
    vocab_size = found.size if found else _BYTES
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    stats = _stats(files)
    digest = found.digest if found else ""
    plan = hashlib.sha256(repr((FORMAT, stats, request.form, digest, eos, request.shard_bytes)).encode()).hexdigest()
    output, work = Path(os.path.abspath(request.output)), Path(os.path.abspath(request.output) + ".part")
    if os.path.lexists(output):
        return _there_already(output, work, plan)
    try:
        with _locked(work):
            _begin(work, plan)
            encoding = _Encoding(found.path if found else "", eos, dtype)
            shards = cut(files, request.form, request.shard_bytes)
            values = {"format": FORMAT, "plan": plan, "dtype": dtype, "vocab_size": vocab_size, "eos": eos}
            values["tokenizer"] = {"sha256": digest} if digest else None
            final = work / "final"
            shutil.rmtree(final, ignore_errors=True)
            final.mkdir()
            with _pool(encoding, request.workers) as pool:
                hashes = [pool.submit(sha256, path) for path in files]
                parts = _encode(pool, shards, request.form, work, progress)
                values |= _join(parts, final, dtype)
                sizes = [size for _, size, _ in stats]
                values["sources"] = [
                    {"path": os.path.abspath(path), "bytes": size, "sha256": hashed.result()}
                    for path, size, hashed in zip(files, sizes, hashes, strict=True)
                ]
            if changed := [new[0] for new, old in zip(_stats(files), stats, strict=True) if new != old]:
                raise_finding("BAT214", f"{changed[0]!r} changed while it was being read", "run it again", changed[0])
            _publish(values, final, output, found)
        shutil.rmtree(work)
    except BrokenProcessPool:
        hint = "use fewer --workers, or --document-separator for long files; then run the same command, which continues"
        raise_finding("BAT215", "a process was killed, usually because memory ran out", hint, str(output))
    except OSError as error:
        raise_finding("BAT215", f"cannot write {error.filename or output}: {error.strerror}", "make room", str(output))
    return read_token_folder(str(output))


def _tokenizer_of(request: Request) -> TokenizerFile | None:
    if not request.tokenizer:
        return None
    found = read_tokenizer(request.tokenizer)
    if found.problem:
        hint = "name a tokenizer.json that Hugging Face's tokenizers wrote, or a folder with one"
        raise_finding("BAT212", f"{found.path!r}: {found.problem}", hint, found.path)
    return found


def _eos_of(request: Request, found: TokenizerFile | None) -> int | None:
    eos = found.special("eos") if found else None
    if request.append_eos and eos is None:
        hint = "leave --append-eos out, or name an eos_token in its tokenizer_config.json"
        what = f"{found.path!r} has no token that ends a text" if found else "byte-level tokens have no end-of-text id"
        raise_finding("BAT212", what, hint, found.path if found else request.output)
    return None if request.append_eos is False else eos


def _stats(files: Sequence[str]) -> list[tuple[str, int, int]]:
    stats = [os.stat(path) for path in files]
    return [(os.path.abspath(path), stat.st_size, stat.st_mtime_ns) for path, stat in zip(files, stats, strict=True)]


def _there_already(output: Path, work: Path, plan: str) -> TokenFolder:
    """Return the result of an earlier run of the same request; refuse a folder with other content."""
    found = read_token_folder(str(output))
    if found.problem or found.plan != plan:
        raise_finding("BAT215", f"{output} already exists", _THERE_HINT, str(output))
    shutil.rmtree(work, ignore_errors=True)
    return found


class _locked:  # a context manager
    """Lock of a work folder, released when the process ends. Two processes would remove each other's parts."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.file = os.open(work / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.work = work

    def __enter__(self) -> None:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.file)
            raise_finding("BAT215", f"another process writes to {self.work}", "wait until it has ended", str(self.work))

    def __exit__(self, *_: object) -> None:
        os.close(self.file)


def _begin(work: Path, plan: str) -> None:
    """Keep the parts of an earlier run of the same plan; remove those of other plans."""
    path = work / "plan"
    if path.exists() and path.read_text(errors="replace") == plan:
        return
    for part in work.glob("*.ids*"):
        part.unlink()
    path.write_text(plan)
    fsync(path, work)


# ---- in worker processes ----

_encoding: _Encoding
_tokenizer: Any = None


def _pool(encoding: _Encoding, workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """Return a pool of processes that encode. They are forked, and so inherit the loaded tokenizer."""
    global _encoding, _tokenizer
    _encoding, _tokenizer = encoding, None
    if encoding.tokenizer_path:
        from tokenizers import Tokenizer

        _tokenizer = Tokenizer.from_file(encoding.tokenizer_path)
        _tokenizer.no_truncation()
        _tokenizer.no_padding()
    context = multiprocessing.get_context("fork")
    return concurrent.futures.ProcessPoolExecutor(workers, context, _prepare, (os.getpid(),))


def _prepare(parent: int) -> None:
    """Make this process die with its parent, even if that is killed, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel already


_PR_SET_PDEATHSIG = 1


def _try_part(shard: Shard, form: Form, path: Path) -> Sequence[Finding]:
    """Encode a shard to a part; return problems of the text as findings, which can be sent between processes."""
    try:
        _write_part(shard, form, path)
    except DslparError as error:
        return error.findings
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return [finding("BAT214", f"{shard[0].path!r}: {error}", "unpack that file again", shard[0].path)]
    return ()


def _write_part(shard: Shard, form: Form, path: Path) -> None:
    """Encode a shard to a part, and rename it when it is on disk."""
    hashed, lengths, num_tokens = xxhash.xxh3_128(), array.array("q"), 0
    unfinished = path.with_suffix(f".ids.{os.getpid()}")
    with open(unfinished, "wb") as file:
        for documents in _batches(documents_of(shard, form)):
            for ids in _ids_of(documents):
                lengths.append(len(ids) // TOKEN_BYTES[_encoding.dtype])
                hashed.update(ids)
                file.write(ids)
        num_tokens = sum(lengths)
        for data in (lengths.tobytes(), _END.pack(num_tokens, len(lengths), b"")[:16]):
            hashed.update(data)
            file.write(data)
        file.write(hashed.digest())
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _ids_of(documents: list[bytes]) -> Iterator[bytes]:
    """Yield the ids of documents, as bytes."""
    end = [] if _encoding.eos is None else [_encoding.eos]
    if _tokenizer is None:
        for document in documents:
            yield np.frombuffer(document, np.uint8).astype(_encoding.dtype).tobytes()
        return
    texts = [document.decode("utf-8", "replace") for document in documents]
    code = _CODES[_encoding.dtype]
    for encoded in _tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        # array converts a list of Python integers in half the time of numpy.
        yield array.array(code, encoded.ids + end).tobytes()


def _batches(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch, size = list[bytes](), 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---- in the main process ----


def _encode(
    pool: concurrent.futures.Executor,
    shards: Sequence[Shard],
    form: Form,
    work: Path,
    progress: Callable[[int, int], None],
) -> Iterator[Path]:
    """Yield the parts in order as they are completed, including the parts that an earlier run has left."""
    paths = [work / f"{number:06d}.ids" for number in range(len(shards))]
    for left in work.glob("*.ids.*"):
        left.unlink()
    futures = [
        None if _is_intact(path) else pool.submit(_try_part, shard, form, path)
        for path, shard in zip(paths, shards, strict=True)
    ]
    sizes = [sum(os.path.getsize(p.path) if p.stop < 0 else p.stop - p.start for p in shard) for shard in shards]
    done = 0
    try:
        for path, future, size in zip(paths, futures, sizes, strict=True):
            if future is not None and (findings := future.result()):
                raise DslparError(findings)
            done += size
            progress(done, sum(sizes))
            yield path
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _is_intact(path: Path) -> bool:
    """Return whether a part exists and matches its digest."""
    if not path.exists() or path.stat().st_size < _END.size:
        return False
    hashed, left = xxhash.xxh3_128(), path.stat().st_size - 16
    with open(path, "rb") as file:
        while left and (chunk := file.read(min(left, 1 << 20))):
            hashed.update(chunk)
            left -= len(chunk)
        return file.read() == hashed.digest()


def _join(parts: Iterator[Path], final: Path, dtype: str) -> dict[str, Any]:
    """Write the token files from all parts; return their values for tokens.json."""
    hashed, num_tokens = hashlib.sha256(), 0
    lengths: list[NDArray[np.int64]] = []
    with open(final / TOKENS, "wb") as tokens:
        tokens.write(bytes(HEADER_BYTES))
        for path in parts:
            with open(path, "rb") as part:
                part.seek(-_END.size, os.SEEK_END)
                in_part, documents, _ = _END.unpack(part.read())
                part.seek(0)
                left = in_part * TOKEN_BYTES[dtype]
                while left:
                    chunk = part.read(min(left, 1 << 20))
                    hashed.update(chunk)
                    tokens.write(chunk)
                    left -= len(chunk)
                lengths.append(np.frombuffer(part.read(8 * documents), np.int64))
                num_tokens += in_part
        tokens.seek(0)
        tokens.write(npy_header(dtype, num_tokens))
    starts = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
    (final / DOCUMENTS).write_bytes(npy_header("int64", len(starts)) + starts.tobytes())
    files = {}
    for name, content, digest_of in (
        (TOKENS, hashed.hexdigest(), sampled_digest),
        (DOCUMENTS, sha256(str(final / DOCUMENTS), HEADER_BYTES), whole_digest),
    ):
        file = str(final / name)
        files[name] = {"bytes": os.path.getsize(file), "sha256": content, "xxh3_128": digest_of(file)}
    return {"num_tokens": num_tokens, "num_documents": len(starts) - 1, "files": files}


def _publish(values: dict[str, Any], final: Path, output: Path, found: TokenizerFile | None) -> None:
    """Write the tokenizer and tokens.json, flush all files to disk, and rename the folder to its final name."""
    if found is not None:
        (final / TOKENIZER).mkdir()
        shutil.copyfile(found.path, final / TOKENIZER / TOKENIZER_JSON)
        beside = Path(found.path).with_name(TOKENIZER_CONFIG)
        if beside.exists():
            shutil.copyfile(beside, final / TOKENIZER / TOKENIZER_CONFIG)
    (final / META).write_bytes(serialize(values))
    fsync(*final.rglob("*"), final)
    final.rename(output)
    fsync(output.parent)
