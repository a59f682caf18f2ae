"""Agree on errors in a save or a load: if one rank fails, or one host does not see the folder, every rank raises."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn, TypeVar

from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.engine.engine import Engine
from dslpar.layout.resolve import Job
from dslpar.reporting.resume_hint import write_hint
from dslpar.reporting.run_dir import CHECKPOINTS

Value = TypeVar("Value")

MAX_LISTED = 12
"""Maximum number of ranks, files or names that a finding lists."""


class Access(NamedTuple):
    """Text of finding CKP205 for a failed write or read of the folder of checkpoints."""

    failure: str
    """Beginning of the message; the folder's path follows."""
    hint: Callable[[Job, str], str]
    """Makes the hint from the job and the reason of the failure."""


def _read_hint(job: Job, reason: str) -> str:
    return "let this user read that folder; or start another run, train.output_dir=..., without --resume"


WRITE = Access("cannot write checkpoints to", write_hint)
READ = Access("cannot read the checkpoints in", _read_hint)


def world_of(engine: Engine) -> Axis:
    """Return the axis (communicator) of all ranks of the job."""
    return engine.groups.axis("pipe", "data", "tensor")


def raise_failed(access: Access, reason: str, job: Job) -> NoReturn:
    """Raise CKP205: the folder of checkpoints cannot be written or read. All ranks must call it together."""
    root = os.path.join(job.output_dir, CHECKPOINTS)
    raise_finding(
        "CKP205", f"{access.failure} {root!r}: {reason}", access.hint(job, reason), job.path, "train.output_dir"
    )


def check_seen_by_all(hosts: Iterable[tuple[str, bool]], path: str, job: Job) -> None:
    """Raise DslparError, on every rank, if a host does not see `path`. `hosts`: (name, whether it sees `path`)."""
    blind = sorted({host for host, sees in hosts if not sees})
    if blind:
        message = f"rank 0 has {path}, but {', '.join(blind)} cannot see it"
        hint = "put train.output_dir on a file system that all hosts share"
        raise_finding("CKP203", message, hint, job.path, "train.output_dir")


def run_on_rank_0(
    action: Callable[[], Value], world: Axis, job: Job, access: Access = WRITE, place: str = "rank 0"
) -> Value:
    """Run `action` on rank 0, and return its result on every rank. If it fails with OSError, every rank raises.

    `place` names this rank in the finding. Any error but OSError is a bug: rank 0 raises it, and the run ends.
    """
    value, reason = None, ""
    if world.index == 0:
        try:
            value = action()
        except OSError as error:
            reason = f"{place}: {error}"
    # Rank 0 broadcasts after a failure too, since the other ranks wait for it here.
    value, reason = collectives.broadcast_object((value, reason), world)
    if reason:
        raise_failed(access, reason, job)
    return value  # type: ignore[return-value]
