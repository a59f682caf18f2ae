"""Find, check and split the conversations of a run, without importing torch.

All lines are read and hashed at the start. This takes about a second per 100 MB, and prevents runs that fail in the
middle of an epoch because of a line that is no conversation.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import File, check_has_length, check_number, find_files
from dslpar.layout.resolve import Job
from dslpar.schema.chat_templates import template_of
from dslpar.schema.conversations import HINT, SUFFIXES, Line, parse, read_lines
from dslpar.schema.datasets import ChatData, absolute_path
from dslpar.schema.tokenizer_file import read_tokenizer


class ConversationRange(NamedTuple):
    """Conversations `start` to `stop` of files with one conversation per line."""

    files: tuple[str, ...]
    start: int
    stop: int
    identity: str
    """Digest of the conversations, the template and the tokenizer, independent of their paths."""
    training: bool
    """Whether these are the training conversations; if not, the held-out ones."""

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the range."""
        return islice((line for path in self.files for line in read_lines(path)), self.start, self.stop)


class Conversations(NamedTuple):
    """Conversations of a run, for training and held out."""

    train: ConversationRange
    held_out: ConversationRange


def find_conversations(job: Job) -> Conversations:
    """Find, check and split the conversations of a job.

    Raises:
        DslparError: a file cannot be read, a line is no conversation, no template is usable, or there are too few
            conversations.
    """
    data = job.spec.data
    assert isinstance(data, ChatData)
    check_has_length(job)
    if importlib.util.find_spec("transformers") is None:
        message = "chat templates need the package transformers, which is not installed"
        raise_finding("BAT212", message, "pip install dslpar[hf]", job.path, "data.type")
    template = template_of(data, job.path)
    if template.problem:
        hint = "data.template: 'chatml', or a file with a Jinja template"
        raise_finding("BAT218", template.problem, hint, job.path, "data.template")
    written = [template.text, repr(sorted(template.special.items()))]
    if data.tokenizer is not None:
        written.append(read_tokenizer(absolute_path(job.path, data.tokenizer)).digest)
    files, count, digest = _read(job, data.files, "data.files")
    held_out = 0
    if data.eval_path is None and data.eval_fraction:
        held_out = min(max(round(count * data.eval_fraction), 1), count - 1)
    train = _range(files, 0, count - held_out, [digest, *written], training=True)
    if data.eval_path is None:
        others = _range(files, count - held_out, count, [digest, *written], training=False)
    else:
        files, count, digest = _read(job, [data.eval_path], "data.eval_path")
        others = _range(files, 0, count, [digest, *written], training=False)
    if not data.packing:  # with packing, the number of rows is only known after packing
        check_number(job, train.stop - train.start, "conversations")
    if job.spec.train.eval_interval is not None and others.stop == others.start:
        hint = "raise data.eval_fraction, set data.eval_path, or leave train.eval_interval out"
        raise_finding("BAT203", "no conversation is held out", hint, job.path, "data")
    return Conversations(train, others)


def _range(files: Sequence[File], start: int, stop: int, of: Sequence[str], training: bool) -> ConversationRange:
    identity = hashlib.sha256(repr([*of, start, stop]).encode()).hexdigest()
    return ConversationRange(tuple(file.path for file in files), start, stop, identity, training)


def _read(job: Job, names: Sequence[str], key: str) -> tuple[list[File], int, str]:
    """Check every line of the files; return the files, the number of conversations, and a digest of all lines."""
    files = find_files(job, names, key, SUFFIXES)
    digest, count, wrong = hashlib.sha256(), 0, 0
    first = ""
    for file in files:
        try:
            for line in read_lines(file.path):
                count += 1
                digest.update(line.text)
                try:
                    parse(line.text)
                except ValueError as error:
                    wrong += 1
                    first = first or f"{line.place}: {error}"
        except (OSError, EOFError) as error:
            raise_finding("BAT218", f"cannot read {file.path!r}: {error}", HINT, job.path, key)
    if wrong:
        more = f"; {wrong - 1} more of {count} lines are not conversations" if wrong > 1 else ""
        raise_finding("BAT218", first + more, HINT, job.path, key)
    return files, count, digest.hexdigest()
