"""Token files: equal to the library's tokens, read back unchanged, and refused once changed."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dslpar.cli.main import main
from dslpar.core.errors import DslparError
from dslpar.data import documents
from dslpar.data.documents import Form, cut, documents_of
from dslpar.data.source import find_source, make_samples
from dslpar.data.token_files import corruptions, open_tokens, sampled_digest, whole_digest
from dslpar.data.tokenize import Request, tokenize
from dslpar.layout.resolve import Job, resolve
from dslpar.linter.check import lint, load_text
from dslpar.models.gpt import section
from dslpar.schema import sections
from dslpar.schema.datasets import DATASETS
from dslpar.schema.token_folders import HEADER_BYTES, held_out_start, npy_header, read_token_folder, serialize
from dslpar.schema.tokenizer_file import read_tokenizer
from tests.support.lint import marked
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

needs_tokenizers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
GPT = section.GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=400, max_seq_len=16)
TEXT = "the quick brown fox\njumps over the lazy dog. Ümläute, too!\n"


def job(folder: Path, kind: str = "tokens", model: Any = GPT, **data: Any) -> Job:
    spec = sections.Spec(model=model, data=DATASETS[kind](**data), batch=sections.Batch(global_size=4))
    return resolve(spec, 1, str(folder / "cfg.py"))


def corpus(folder: Path, number: int = 12) -> Path:
    (folder / "text").mkdir()
    for index in range(number):
        (folder / "text" / f"{index:02d}.txt").write_text(TEXT * (index + 1) + str(index), encoding="utf-8")
    return folder / "text"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return token files of bytes."""
    folder = tmp_path_factory.mktemp("tokens")
    tokenize(Request([str(corpus(folder))], str(folder / "tokens")))
    return folder / "tokens"


# ---- progress ----


def test_progress_ends_at_the_bytes_of_all_files(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = corpus(tmp_path)
    tokenize(Request([str(folder)], str(tmp_path / "tokens")), lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert told == sorted(told)
    assert {total for _, total in told} == {size}
    assert told[-1][0] == size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_bar_is_for_terminals(tmp_path: Path, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    assert main(["data", "tokenize", str(corpus(tmp_path)), "-o", str(tmp_path / "tokens")]) == 0
    assert ("B/s" in shown.getvalue()) is shown.isatty()


# ---- writing ----


@needs_tokenizers
def test_ids_are_the_library_s_whatever_the_shards(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from dslpar.data.train_tokenizer import train_tokenizer

    text = corpus(tmp_path)
    assert train_tokenizer([str(text)], str(tmp_path / "tokenizer"), 300) == 300
    folders = []
    for workers, shard_bytes in ((1, 1 << 20), (2, 100)):
        folders.append(tmp_path / f"by_{workers}")
        request = Request([str(text)], str(folders[-1]), str(tmp_path / "tokenizer"), workers=workers)
        found = tokenize(request._replace(shard_bytes=shard_bytes))
    library = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    end = library.token_to_id("<|endoftext|>")
    each = [[*library.encode(path.read_text(encoding="utf-8")).ids, end] for path in sorted(text.iterdir())]
    assert np.load(folders[0] / "tokens.npy").tolist() == [id for ids in each for id in ids]
    assert np.load(folders[0] / "documents.npy").tolist() == [0, *np.cumsum([len(ids) for ids in each])]
    for name in ("tokens.npy", "documents.npy", "tokenizer/tokenizer.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert (found.vocab_size, found.eos, found.dtype) == (300, end, "uint16")
    assert found.tokenizer_path == str(folders[1] / "tokenizer" / "tokenizer.json")
    assert [source["bytes"] for source in found.sources] == [path.stat().st_size for path in sorted(text.iterdir())]


@needs_tokenizers
@pytest.mark.parametrize("model", ["bpe", "unigram", "wordpiece"])
def test_a_tokenizer_is_trained(tmp_path: Path, model: str) -> None:
    from dslpar.data.train_tokenizer import train_tokenizer

    text = corpus(tmp_path)
    size = 280 if model == "bpe" else 60
    for name in "ab":
        train_tokenizer([str(text)], str(tmp_path / name), size, model)
    assert read_tokenizer(str(tmp_path / "a")).special("eos" if model != "wordpiece" else "cls") is not None
    if model == "bpe":  # for the other models, a hash table's order breaks the library's ties
        assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    with pytest.raises(DslparError, match="BAT215"):
        train_tokenizer([str(text)], str(tmp_path / "a"), size, model)


def test_documents_of_all_forms(tmp_path: Path) -> None:
    lines = [{"id": number, "text": f"line {number} " * number} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "c.txt").write_text("x--y----z--")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]
    texts = [line["text"].encode() for line in lines]  # type: ignore[attr-defined]
    for shard_bytes in (1, 3, 50, 700, 1 << 20):
        form = Form("text", "--")
        found = [document for shard in cut(files, form, shard_bytes) for document in documents_of(shard, form)]
        assert found == [*texts, *texts, b"x", b"y", b"", b"z"]
    assert [*documents_of(cut(files[2:], Form())[0], Form())] == [b"x--y----z--"]


def test_a_line_without_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 9 + '{"content": "b"}\n')
    for shard_bytes in (20, 1 << 20):
        with pytest.raises(DslparError, match=r"BAT214.*a\.jsonl:10: not a JSON object with a text 'text'"):
            tokenize(Request([str(tmp_path / "a.jsonl")], str(tmp_path / "out"), shard_bytes=shard_bytes))
    assert not (tmp_path / "out").exists()
    (tmp_path / "a.txt").write_text("abcdef")
    monkeypatch.setattr(documents, "_MAX_DOCUMENT_BYTES", 5)
    with pytest.raises(DslparError, match="--document-separator"):
        tokenize(Request([str(tmp_path / "a.txt")], str(tmp_path / "out")))
    with pytest.raises(DslparError, match=r"BAT214.*is not a file"):
        tokenize(Request([str(tmp_path / "gone")], str(tmp_path / "out")))


def test_a_finished_folder_stays(written: Path, tmp_path: Path) -> None:
    text, before = str(written.parent / "text"), (written / "tokens.json").stat().st_mtime_ns
    assert tokenize(Request([text], str(written))) == read_token_folder(str(written))
    assert (written / "tokens.json").stat().st_mtime_ns == before
    with pytest.raises(DslparError, match=r"BAT215.*already exists"):
        tokenize(Request([text, text], str(written)))


# ---- reading ----


def test_samples_are_those_of_text(written: Path) -> None:
    as_text = job(written.parent, "text", files=("text",), eval_fraction=0.0)
    as_tokens = job(written.parent, path="tokens", eval_fraction=0.0)
    text, tokens = (make_samples(each, find_source(each).train, ()) for each in (as_text, as_tokens))
    assert text.num_samples == tokens.num_samples > 20
    for mine, theirs in zip(tokens.batch([0, 7, 3], [0, 1, 2]), text.batch([0, 7, 3], [0, 1, 2]), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_the_last_documents_are_held_out(written: Path, tmp_path: Path) -> None:
    found = read_token_folder(str(written))
    starts = np.load(written / "documents.npy")
    assert held_out_start(found, 0.0) == found.num_tokens
    for fraction, first in ((0.01, 11), (0.25, 9), (0.99, 1)):
        assert held_out_start(found, fraction) == starts[first]
    source = find_source(job(written.parent, path="tokens", eval_fraction=0.25))
    assert source.identity != find_source(job(written.parent, path="tokens")).identity
    shutil.copytree(written, tmp_path / "elsewhere")
    assert find_source(job(tmp_path, path="elsewhere", eval_fraction=0.25)).identity == source.identity
    other = find_source(job(written.parent, path="tokens", eval_path="tokens"))
    assert other.held_out.tokens is not None
    assert other.held_out.tokens.num_tokens == found.num_tokens


def test_an_id_beyond_the_vocabulary_is_refused(written: Path) -> None:
    small = section.GPT(num_layers=1, hidden_size=8, num_heads=2, vocab_size=100, max_seq_len=16)
    config = job(written.parent, model=small, path="tokens")
    samples = make_samples(config, find_source(config).train, ())
    with pytest.raises(DslparError, match=r"BAT216.*outside the vocabulary of 100 tokens"):
        samples.batch(range(20), range(20))


def test_a_hundred_gigabytes_open_at_once(tmp_path: Path) -> None:
    """The file is sparse: only headers, the index and some pages are read."""
    num_tokens, folder = 50_000_000_000, tmp_path / "tokens"
    folder.mkdir()
    starts = np.linspace(0, num_tokens, 100_001).astype(np.int64)
    (folder / "documents.npy").write_bytes(npy_header("int64", len(starts)) + starts.tobytes())
    with open(folder / "tokens.npy", "wb") as file:
        file.write(npy_header("uint16", num_tokens))
        file.truncate(HEADER_BYTES + 2 * num_tokens)
    files = {}
    for name, digest in (("tokens.npy", sampled_digest), ("documents.npy", whole_digest)):
        path = folder / name
        files[name] = {"bytes": path.stat().st_size, "sha256": "0" * 64, "xxh3_128": digest(str(path))}
    values = {"format": 1, "dtype": "uint16", "num_tokens": num_tokens, "num_documents": 100_000, "vocab_size": 256}
    values |= {"eos": None, "tokenizer": None, "files": files, "sources": []}
    (folder / "tokens.json").write_bytes(serialize(values))
    took = []
    for _ in range(5):
        began = time.process_time()
        config = job(tmp_path, path="tokens", seq_len=16)
        samples = make_samples(config, find_source(config).train, ())
        samples.batch([0, samples.num_samples - 1], [0, 1])
        took.append(time.process_time() - began)
    assert min(took) < 0.1
    assert samples.num_samples == (47_500_000_000 - 1) // 16


# ---- Megatron-LM's ----


def indexed(prefix: Path, lengths: list[int], documents: list[int], code: int = 8) -> np.ndarray[Any, Any]:
    """Write an indexed data set in the layout of Megatron-LM's indexed_dataset.py."""
    dtype = {8: np.uint16, 4: np.int32}[code]
    ids = np.random.default_rng(5).integers(0, 400, sum(lengths)).astype(dtype)
    starts = (np.cumsum([0, *lengths[:-1]]) * ids.itemsize).astype(np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    parts = (np.array(lengths, np.int32), starts, np.array(documents, np.int64))
    prefix.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    return ids


@pytest.mark.parametrize("code", [8, 4])
def test_megatron_s_files_are_read(tmp_path: Path, code: int) -> None:
    ids = indexed(tmp_path / "corpus", [100, 50, 30, 20], [0, 1, 3, 4], code)
    for name in ("corpus", "corpus.idx", "corpus.bin"):
        found = read_token_folder(str(tmp_path / name))
        assert (found.problem, found.num_tokens, found.num_documents) == ("", 200, 3)
        assert open_tokens(found).tolist() == ids.tolist()
        assert held_out_start(found, 0.3) == 180
        assert held_out_start(found, 0.7) == 100
        assert list(corruptions(str(tmp_path / name))) == []
    config = job(tmp_path, path="corpus", eval_fraction=0.3)
    samples = make_samples(config, find_source(config).train, ())
    assert samples.num_samples == 179 // 16
    assert samples.batch([1], [0])[1].tolist() == [ids[17:33].tolist()]
    (tmp_path / "corpus.bin").write_bytes(ids.tobytes()[:-4])
    assert "but the index has 200" in read_token_folder(str(tmp_path / "corpus")).problem


# ---- damage ----


def flip(path: Path, low: int, high: int, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(low, min(high, len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def shorten(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    **{f"shorter {n}": lambda f, r, n=n: shorten(f / n, r) for n in ("tokens.json", "tokens.npy", "documents.npy")},
    **{f"longer {n}": lambda f, r, n=n: lengthen(f / n, r) for n in ("tokens.json", "tokens.npy", "documents.npy")},
    **{f"head of {n}": lambda f, r, n=n: flip(f / n, 0, 128, r) for n in ("tokens.npy", "documents.npy")},
    **{f"no {n}": lambda f, r, n=n: (f / n).unlink() for n in ("tokens.json", "tokens.npy", "documents.npy")},
    "JSON": lambda f, r: flip(f / "tokens.json", 0, 1 << 30, r),
    "offsets": lambda f, r: flip(f / "documents.npy", 128, 1 << 30, r),
    "a token": lambda f, r: flip(f / "tokens.npy", 128, 1 << 30, r),
    "swapped": lambda f, r: (
        (f / "tokens.npy").rename(f / "x"),
        (f / "documents.npy").rename(f / "tokens.npy"),
        (f / "x").rename(f / "documents.npy"),
    ),
    "another type": lambda f, r: np.save(f / "tokens.npy", np.load(f / "tokens.npy").astype(np.uint32)),
    "of another text": lambda f, r: np.save(f / "tokens.npy", np.roll(np.load(f / "tokens.npy"), r.randrange(1, 99))),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused(written: Path, tmp_path: Path, name: str) -> None:
    """12 of each kind, 204 in all: a run refuses them, and `verify` names them."""
    rng = random.Random(name)
    for _ in range(12):
        folder = tmp_path / "tokens"
        shutil.copytree(written, folder)
        DAMAGES[name](folder, rng)
        config = job(tmp_path, path="tokens", eval_fraction=0.2)
        with pytest.raises(DslparError, match=r"BAT216|BAT210"):
            make_samples(config, find_source(config).train, ())
        assert list(corruptions(str(folder)))
        shutil.rmtree(folder)


def test_a_token_between_the_pages_is_seen_by_verify_alone(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(random.Random(1).randbytes(1 << 20))
    tokenize(Request([str(tmp_path / "text.txt")], str(tmp_path / "tokens")))
    data = bytearray((tmp_path / "tokens" / "tokens.npy").read_bytes())
    data[9000] ^= 1
    (tmp_path / "tokens" / "tokens.npy").write_bytes(data)
    assert list(corruptions(str(tmp_path / "tokens"))) == ["tokens.npy: altered"]
    config = job(tmp_path, path="tokens")
    assert make_samples(config, find_source(config).train, ()).num_samples


# ---- lint of a folder for evaluation ----


def lint_of(folder: Path, data: str) -> dict[str, str]:
    """Return the text that lint marks with BAT117, and the message."""
    text = (
        "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=400, max_seq_len=16)\n"
        f"batch = dict(global_size=4)\ndata = dict(type='tokens', {data})\n"
    )
    found = lint(load_text(text, str(folder / "cfg.py"), ()), 1)
    return {marked(text, each): each.message for each in found if each.code == "BAT117"}


def test_lint_reads_the_folder_to_evaluate_on(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "tokens")
    shutil.copytree(written, tmp_path / "held")
    assert lint_of(tmp_path, "path='tokens', eval_path='held'") == {}
    given = lint_of(tmp_path, "path='tokens', eval_path='held', eval_fraction=0.1")
    assert given == {"0.1": "eval_fraction has no effect with eval_path, which is the held-out data"}
    (tmp_path / "held" / "tokens.npy").unlink()
    (marked_text,) = lint_of(tmp_path, "path='tokens', eval_path='held'")
    assert marked_text == "'held'"


@needs_tokenizers
def test_lint_compares_the_tokenizers_of_both_folders(written: Path, tmp_path: Path) -> None:
    from dslpar.data.train_tokenizer import train_tokenizer

    shutil.copytree(written, tmp_path / "tokens")
    text = corpus(tmp_path)
    train_tokenizer([str(text)], str(tmp_path / "tokenizer"), 300)
    tokenize(Request([str(text)], str(tmp_path / "held"), str(tmp_path / "tokenizer")))
    found = lint_of(tmp_path, "path='tokens', eval_path='held'")
    assert found == {"'held'": "path and eval_path were made by different tokenizers"}
