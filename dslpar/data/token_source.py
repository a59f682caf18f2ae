"""Find, split and check the token files of a run. It reads at most some pages of tokens, and needs no torch."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, NoReturn

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import check_has_length, check_number
from dslpar.data.token_files import identity_of
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import TokensData, absolute_path
from dslpar.schema.token_folders import TokenFolder, held_out_start, read_token_folder


class TokenRange(NamedTuple):
    """Tokens `start` to `stop` of token files."""

    folder: TokenFolder
    start: int
    stop: int
    identity: str
    """Digest of these tokens, independent of their path."""
    training: bool
    """Whether these are the training tokens; if not, the held-out ones."""

    @property
    def num_tokens(self) -> int:
        """Length of the range."""
        return self.stop - self.start


class Tokens(NamedTuple):
    """Token ranges of a run, for training and held out."""

    train: TokenRange
    held_out: TokenRange


def find_tokens(job: Job) -> Tokens:
    """Find, split and check the token files of a job.

    Raises:
        DslparError: the files are unusable, or have too few tokens for a sample or for a step.
    """
    data = job.spec.data
    assert isinstance(data, TokensData)
    folder = _read(job, data.path, "data.path")
    try:
        start = held_out_start(folder, 0 if data.eval_path is not None else data.eval_fraction)
    except (ValueError, OSError) as error:
        refuse(job, folder.path, str(error), "data.path")
    train = _range(folder, 0, start, training=True)
    held_out = _range(folder, start, folder.num_tokens, training=False)
    if data.eval_path is not None:
        other = _read(job, data.eval_path, "data.eval_path")
        held_out = _range(other, 0, other.num_tokens, training=False)
    _check_length(job, train, held_out)
    return Tokens(train, held_out)


def refuse(job: Job, path: str, problem: str, key: str) -> NoReturn:
    """Raise a finding about unusable token files."""
    hint = "`dslpar data verify` names every corrupted file; write them again with `dslpar data tokenize`"
    raise_finding("BAT216", f"{path!r}: {problem}", hint, job.path, key)


def _read(job: Job, name: str, key: str) -> TokenFolder:
    found = read_token_folder(absolute_path(job.path, name))
    if found.problem:
        refuse(job, found.path, found.problem, key)
    return found


def _range(folder: TokenFolder, start: int, stop: int, training: bool) -> TokenRange:
    identity = hashlib.sha256(f"{identity_of(folder)} {start} {stop}".encode()).hexdigest()
    return TokenRange(folder, start, stop, identity, training)


def _check_length(job: Job, train: TokenRange, held_out: TokenRange) -> None:
    check_has_length(job)
    check_number(job, (train.num_tokens - 1) // job.seq_len)
    if job.spec.train.eval_interval is not None and held_out.num_tokens <= job.seq_len:
        message = f"{held_out.num_tokens} tokens are held out, but a sample takes seq_len + 1 = {job.seq_len + 1}"
        hint = "raise data.eval_fraction, set data.eval_path, or leave train.eval_interval out"
        raise_finding("BAT203", message, hint, job.path, "data")
