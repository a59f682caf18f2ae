"""Hints about resuming: the step that --resume goes on from, and what to do if the run folder cannot be written.

A run that is told to write to another folder finds no checkpoint there, and starts at step 0. So its folder must be
moved, or made writable again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
from pathlib import Path

from dslpar.layout.resolve import Job

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""
NEWEST = ("newest", "newest_whole")
"""Values of checkpoint.resume_from that name no particular checkpoint."""
_NAME = re.compile(r"step_([0-9]+)")
_REMEDIES = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "free space in your quota",
    errno.EROFS: "have its file system mounted for writing",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
}


def checkpoint_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None: no such name, as of an unfinished checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def newest_step(output_dir: str) -> int | None:
    """Return the step of the newest checkpoint in a run folder; None: there is none, or the folder cannot be read."""
    with contextlib.suppress(OSError):
        steps = [checkpoint_step(name) for name in os.listdir(Path(output_dir, CHECKPOINTS))]
        return max((step for step in steps if step is not None), default=None)
    return None


def resume_hint(job: Job) -> str:
    """Return "; --resume goes on from step N"; empty if there is no checkpoint, or another one is requested."""
    step = newest_step(job.output_dir) if job.spec.checkpoint.resume_from in NEWEST else None
    return "" if step is None else f"; --resume goes on from step {step}"


def write_hint(job: Job, reason: str) -> str:
    """Return what to do if the run folder cannot be written for a `reason`, which has the text of an OSError."""
    remedy = next(
        (text for number, text in _REMEDIES.items() if f"[Errno {number}]" in reason), "make it writable again"
    )
    step = newest_step(job.output_dir)
    if step is None:
        return f"{remedy}; or name a folder elsewhere, train.output_dir=..."
    return (
        f"move the run, mv {shlex.quote(job.output_dir)} NEW, and --resume with train.output_dir=NEW; or {remedy}, and"
        f" --resume; both go on from step {step}, but another folder without the run starts at step 0"
    )
