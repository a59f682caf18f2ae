"""`dslpar data tokenize | train-tokenizer | show | verify`: make token files from text, and check them.

A config reads token files with `data = dict(type='tokens', path=...)`. The actions run on one host, without torch or a
GPU. Output gets its final name when all of it is on disk, and nothing is ever overwritten.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Mapping

from dslpar.cli import arguments
from dslpar.cli.action import Action
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.core.visible import visible
from dslpar.linter.report import text as report_text
from dslpar.schema.token_folders import TokenFolder, read_token_folder

_FILES = "text files, .jsonl files (one document per line), .gz of either, or folders of them"
_FOLDER = "a folder of token files, or Megatron-LM's .bin and .idx"


# ---- tokenize ----


def _add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
dslpar data tokenize corpus -o tokens --tokenizer tokenizer.json
data = dict(type='tokens', path='tokens')

After a kill, run the same command again to continue. A document is a file, a line of a .jsonl file,
or the text between separators. Documents are in the order of the arguments, and within folders in
the order of file names.

exit status: 0 written, 1 cannot be written, 2 wrong usage"""
    parser.add_argument("paths", nargs="+", metavar="FILE", help=_FILES)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder to create; it must not exist")
    help = "a tokenizer.json of Hugging Face's tokenizers, or a folder with one; default: one token per byte"
    parser.add_argument("--tokenizer", default="", metavar="T", help=help)
    help = "number of processes; default: the number of usable CPUs"
    parser.add_argument("--workers", type=arguments.whole_number, metavar="N", help=help)
    help = "append the tokenizer's end-of-text token to each document; default: if it has one"
    parser.add_argument("--append-eos", action=argparse.BooleanOptionalAction, default=None, help=help)
    help = "key of the text in each .jsonl line; default: %(default)s"
    parser.add_argument("--json-key", default="text", metavar="KEY", help=help)
    help = r"text between documents in other files, which may have \n and \t; default: one document per file"
    parser.add_argument("--document-separator", default="", metavar="TEXT", help=help)
    arguments.add_format(parser)


def _tokenize(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # Imported by name: the command line's import contract excludes numpy.
    tokenize = importlib.import_module("dslpar.data.tokenize")
    form = importlib.import_module("dslpar.data.documents").Form
    separator = args.document_separator.replace("\\n", "\n").replace("\\t", "\t")
    workers = args.workers or len(os.sched_getaffinity(0))
    request = tokenize.Request(
        *(args.paths, args.output, args.tokenizer, args.append_eos, form(args.json_key, separator), workers)
    )
    began = time.perf_counter()
    with _Bar() as bar:
        found = tokenize.tokenize(request, bar.show)
    if args.format == "json":
        arguments.print_json(_summary(found))
    else:
        _print_summary(found)
        print(visible(f"{time.perf_counter() - began:.1f} s"))
    return 0


class _Bar:
    """A progress bar over bytes of text, shown on a terminal."""

    def __enter__(self) -> _Bar:
        from tqdm import tqdm  # of the extra `train`: `show` works without

        self._bar = tqdm(unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are processed."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)


# ---- train-tokenizer ----


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
dslpar data train-tokenizer corpus -o tokenizer --vocab-size 32000

Writes tokenizer.json and tokenizer_config.json: byte-level bpe as in GPT-2, unigram as in T5, or
wordpiece as in BERT. The same files give the same bpe. For the others the library breaks ties at
random.

exit status: 0 written, 1 cannot be written, 2 wrong usage"""
    parser.add_argument("paths", nargs="+", metavar="FILE", help=_FILES)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder to create; it must not exist")
    help = "maximum number of tokens"
    parser.add_argument("--vocab-size", required=True, type=arguments.whole_number, metavar="N", help=help)
    help = "type of the tokenizer; default: %(default)s"
    parser.add_argument("--model", choices=("bpe", "unigram", "wordpiece"), default="bpe", help=help)
    help = "replace the model's special tokens; with bpe the first one ends a text; names as in T5 and BERT have roles"
    parser.add_argument("--special-tokens", nargs="+", metavar="TOKEN", help=help)
    help = "key of the text in each .jsonl line; default: %(default)s"
    parser.add_argument("--json-key", default="text", metavar="KEY", help=help)


def _train_tokenizer(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    train = importlib.import_module("dslpar.data.train_tokenizer")
    size = train.train_tokenizer(
        args.paths, args.output, args.vocab_size, args.model, args.special_tokens, args.json_key
    )
    print(visible(f"{args.output}: {size:,} tokens"))
    return 0


# ---- show, verify ----


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit status: 0, 1 not readable, 2 wrong usage"
    parser.add_argument("path", metavar="DIR", help=_FOLDER)
    arguments.add_format(parser)


def _show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = read_token_folder(args.path)
    if found.missing:
        parser.error(f"{args.path}: {found.problem}")
    if found.problem:
        raise DslparError([_corrupted(args.path, [found.problem])])
    if args.format == "json":
        arguments.print_json(_summary(found))
    else:
        _print_summary(found)
    return 0


def _summary(found: TokenFolder) -> dict[str, object]:
    tokenizer = {"path": found.tokenizer_path, "sha256": found.tokenizer_digest} if found.tokenizer_digest else None
    return {
        "path": found.path,
        "num_tokens": found.num_tokens,
        "num_documents": found.num_documents,
        "dtype": found.dtype,
        "vocab_size": found.vocab_size,
        "eos": found.eos,
        "tokenizer": tokenizer,
        "files": found.files,
        "sources": found.sources,
    }


def _print_summary(found: TokenFolder) -> None:
    print(visible(f"{found.path}: {found.num_tokens:,} tokens of {found.num_documents:,} documents, {found.dtype}"))
    if found.vocab_size is not None:
        of = f"of {found.tokenizer_path}" if found.tokenizer_path else "bytes"
        end = "none after a document" if found.eos is None else f"{found.eos} after each document"
        print(visible(f"vocabulary: {found.vocab_size:,}, {of}; end of text: {end}"))
    if found.sources:
        print(visible(f"from {len(found.sources):,} files of {sum(each['bytes'] for each in found.sources):,} bytes"))


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Reads every byte and compares it with its digest. Megatron-LM's files have no digests: for them it
checks that sequences and documents follow one another.

exit status: 0 all are intact, 1 one is corrupted, 2 wrong usage"""
    parser.add_argument("paths", nargs="+", metavar="DIR", help=_FOLDER)
    arguments.add_format(parser)


def _verify(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    corruptions = importlib.import_module("dslpar.data.token_files").corruptions
    damages = {path: list(corruptions(path)) for path in args.paths}
    if args.format == "json":
        arguments.print_json([{"path": path, "whole": not each, "damaged": each} for path, each in damages.items()])
    else:
        for path, each in damages.items():
            print(report_text.block(_corrupted(path, each), {}) if each else visible(f"{path}: intact"))
    return int(any(damages.values()))


def _corrupted(path: str, damages: list[str]) -> Finding:
    return finding(
        "BAT216", f"{path} is corrupted:", "write it again with `dslpar data tokenize`", path, details=damages
    )


ACTIONS: Mapping[str, Action] = {
    "tokenize": Action("convert text files to token files", _add_tokenize_arguments, _tokenize),
    "train-tokenizer": Action("train a tokenizer on text files", _add_train_arguments, _train_tokenizer),
    "show": Action("print counts, vocabulary and sources of token files", _add_show_arguments, _show),
    "verify": Action("verify every byte of token files", _add_verify_arguments, _verify),
}
"""Actions of `dslpar data`."""
