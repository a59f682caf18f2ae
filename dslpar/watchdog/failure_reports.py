"""Reports of failing ranks: separate causes from consequences (a lost peer), and add advice for known errors."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from dslpar.core.errors import DslparError
from dslpar.core.visible import visible_lines
from dslpar.watchdog import guard_messages
from dslpar.watchdog.marks import Kind, Rank, Report

_MAX_LINE = 500


def make_report(who: Rank, at: str, error: BaseException, trace: TracebackType | None) -> Report:
    """Return the report of an exception that nobody caught. `at`: the rank's stage and step."""
    kind: Kind = "consequence" if is_lost_peer(error) else "cause"
    if is_interrupt(error):  # even if a peer was lost meanwhile, by the same interrupt
        kind = "interrupt"
    line = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:_MAX_LINE]
    if isinstance(error, DslparError):
        whole = f"{error}\n{_place(error, trace)}"  # the finding has everything but the place in the user's program
    else:
        whole = "".join(traceback.format_exception(type(error), error, trace))
    text = guard_messages.cut(whole)
    return Report(who, kind, time.time(), line, text + advice(error), at)


def _place(error: DslparError, trace: TracebackType | None) -> str:
    """Return the frames of a finding's traceback that are in the user's own code, not in dslpar or installed packages.

    If the finding was raised from other findings, the frames are those of the first finding in the chain. If the first
    finding was raised from an error of another kind, that error's traceback follows in full.
    """
    cause = error.__cause__
    while isinstance(cause, DslparError):
        trace, cause = cause.__traceback__, cause.__cause__
    frames = [frame for frame in traceback.extract_tb(trace) if not _INSTALLED.search(frame.filename)]
    own = [frame for frame in frames if not frame.filename.startswith(f"{_DSLPAR}{os.sep}")]
    place = "".join(["raised by\n", *traceback.format_list(own)]) if own else ""
    return place + ("".join(traceback.format_exception(cause)) if cause is not None else "")


_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|^<frozen|[/\\]lib[/\\]python3\.\d+[/\\]")
_DSLPAR = str(Path(__file__).parents[1])


# ---- a peer that is gone ----

_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Read error|Write error|Socket Timeout|Timed out|timed out"
    r"|wait timeout|connectFullMesh|Application timeout|recv, got 0 bytes|remote process (has )?exited"
    r"|ncclRemoteError|failed to connect|peer (closed|rank)"
)
_GLOO = re.compile(r"\[[^\]]*gloo/|Gloo ")


def is_interrupt(error: BaseException) -> bool:
    """Return whether this error is a KeyboardInterrupt, or the loss of a peer that was raised while it was handled."""
    interrupted = any(isinstance(link, KeyboardInterrupt) for link in _chain(error))
    return isinstance(error, KeyboardInterrupt) or (interrupted and is_lost_peer(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then those that it was raised from, or during the handling of which it was raised."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a lost peer is the cause of this error, or of an error that it was raised from.

    The text decides, since gloo's errors are plain RuntimeErrors. In addition torch.distributed must have raised the
    error, since a dataset on a network may raise errors with the same text.
    """
    return any(_is_of_distributed(link) and _LOST.search(str(link)) for link in _chain(error))


def _is_of_distributed(error: BaseException) -> bool:
    """Return whether an error comes from torch.distributed (DistBackendError, DistNetworkError, ...) or from gloo."""
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("torch")}
    return "DistError" in names or (type(error) is RuntimeError and bool(_GLOO.search(str(error))))


def elastic(report: Report) -> str:
    """Return the report in torchrun's JSON format for error files. torchrun prints the earliest as the root cause."""
    text = visible_lines(report.text)
    extra = {"py_callstack": text, "timestamp": str(int(report.time_s))}
    return json.dumps({"message": {"message": text, "extraInfo": extra}})


# ---- what helps ----

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED", re.IGNORECASE
)
_INDEX = re.compile("device-side assert", re.IGNORECASE)
_MEMORY = """\
HST230 out-of-memory: this rank asked for more memory than there is
help: a smaller batch.micro_size (a larger batch.accumulation keeps the global batch), activation_checkpoint=1,
      zero.stage=1 to 3 over data ranks, precision='bf16', or more ranks in parallel.tensor or parallel.pipeline;
      if the host's memory runs out at a save, train.async_save=False, which makes no copy in it
"""
_RANGE = """\
HST232 index-out-of-range-on-device: most often a token's id outside the vocabulary, or a label outside the classes
help: the line above is not the cause: CUDA_LAUNCH_BLOCKING=1, or AMD_SERIALIZE_KERNEL=3 on ROCm, shows the right one;
      `dslpar data show` counts the ids of token files, which model.vocab_size must exceed
"""
_DISK = """\
CKP230 disk-full: a file could not be written
help: if that is the run's file system, move the folder of the run and name its new place, train.output_dir=..., or
      free space; then --resume goes on from the last checkpoint
"""
_NO_ROOM = (28, 122)
"""ENOSPC and EDQUOT."""


def advice(error: BaseException) -> str:
    """Return advice for errors whose traceback does not show what to change; otherwise an empty string."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return _MEMORY
    if isinstance(error, RuntimeError) and _INDEX.search(str(error)):
        return _RANGE
    return _DISK if isinstance(error, OSError) and error.errno in _NO_ROOM else ""
