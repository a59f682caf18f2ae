"""`dslpar lint --fix` and `--diff`: which files may change, and what becomes of each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from dslpar.cli import arguments
from dslpar.cli.lint import Linted
from dslpar.core.errors import Finding
from dslpar.language.load import Config
from dslpar.linter import check, fixes

FindingsOf = Callable[[Config], list[Finding]]


def run(
    args: argparse.Namespace, batch: Sequence[Linted], findings_of: FindingsOf, given: Mapping[str, str]
) -> tuple[list[Linted], bool]:
    """Changes files, or shows how they would; what is found with the changes, and whether there were any."""
    texts = dict(given)

    def again(config: Config) -> Linted:
        loaded = check.load(config.path, arguments.overrides(args), texts)
        return Linted(loaded, findings_of(loaded))

    done = []
    for path, data in _files(args, batch, given).items():
        made = _repair(path, data, batch, findings_of, texts, arguments.overrides(args))
        if made.after != made.before and (args.diff or _written(args, made, data, given)):
            texts[os.path.realpath(path)] = made.after
            done.append(made)
        for finding, why in made.refused:
            sys.stderr.write(f"{finding.location}: {finding.code} is not fixed: {why}\n")
    if args.diff:
        _out("".join(fixes.diff(done)))
    elif given:
        _out(next(iter(texts.values())))
    return [again(config) for config, _ in batch] if done else list(batch), bool(done)


def _out(text: str) -> None:
    """Text of files goes out in UTF-8, as it was read, whatever the encoding of stdout: `patch` and editors take it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


def _repair(
    path: str,
    data: bytes,
    batch: Sequence[Linted],
    findings_of: FindingsOf,
    texts: Mapping[str, str],
    overrides: Sequence[str],
) -> fixes.Repair:
    """One file's changes, judged by every config that reads it."""
    real = os.path.realpath(path)
    readers = [config.path for config, _ in batch if real in map(os.path.realpath, config.sources)]

    def relint(instead: Mapping[str, str]) -> list[Finding]:
        found = (item for each in readers for item in findings_of(check.load(each, overrides, instead)))
        return list(dict.fromkeys(found))  # of a part, each of its configs finds the same

    return fixes.repair(path, fixes.text_of(data), relint, texts)


def _files(args: argparse.Namespace, batch: Sequence[Linted], given: Mapping[str, str]) -> dict[str, bytes]:
    """The files with something to fix that were named, or lie below a named folder; and their bytes."""
    fixable = [item.fix.location.path for each in batch for item in each.findings if item.fix is not None]
    paths = {os.path.realpath(path): path for path in reversed(fixable)}
    roots = [
        arguments.stdin_name(args) if word == "-" else word for word in args.words if not arguments.is_override(word)
    ]
    real = [os.path.realpath(root) for root in roots]
    named = {}
    for there, path in paths.items():
        if there in given:
            named[path] = given[there].encode("utf-8")
        elif not given and any(there == root or there.startswith(root + os.sep) for root in real):
            with open(path, "rb") as file:
                named[path] = file.read()
    return named


def _written(args: argparse.Namespace, made: fixes.Repair, data: bytes, given: Mapping[str, str]) -> bool:
    """Whether the changed text stands in its file now; stdin has none."""
    if not given:
        try:
            fixes.write(made.path, data, made.after)
        except OSError as error:
            sys.stderr.write(f"{made.path} is not changed: {error.strerror or error}\n")
            return False
    sys.stderr.write(f"{made.path}: {made.changes} fixed\n")
    return True
