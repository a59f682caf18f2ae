"""What all ranks of a save or a load agree on: who has failed, and who does not see the folder. One message each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job
from dslpar.reporting.run_dir import CHECKPOINTS

Value = TypeVar("Value")

SHOWN = 12
"""Ranks, files and names that a finding lists."""


def demand_seen(seen: Iterable[tuple[str, bool]], path: str, job: Job) -> None:
    """Raises DslparError, on every rank, if one of them does not see `path`, which rank 0 sees."""
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        message = f"rank 0 has {path}, which {', '.join(blind)} does not see"
        hint = "put train.output_dir on a file system that all hosts share"
        raise_finding("CKP203", message, hint, job.path, "train.output_dir")


Failing = Callable[[str, Job], DslparError]
"""The finding of what has failed."""


def not_written(failed: str, job: Job) -> DslparError:
    """The finding of a save that did not come to its end."""
    hint = "make room there, or name another folder, train.output_dir=..."
    return _failed(f"cannot write checkpoints to {_root(job)!r}: {failed}", hint, job)


def not_read(failed: str, job: Job) -> DslparError:
    """The finding of a folder of checkpoints that cannot be looked at: whether there are any, nobody knows."""
    hint = "let this user read that folder; or name another one, train.output_dir=..."
    return _failed(f"cannot read the checkpoints in {_root(job)!r}: {failed}", hint, job)


def _root(job: Job) -> str:
    return os.path.join(job.output_dir, CHECKPOINTS)


def _failed(message: str, hint: str, job: Job) -> DslparError:
    return DslparError([finding("CKP205", message, hint, job.path, "train.output_dir")])


def by_rank_0(
    act: Callable[[], Value], world: Axis, job: Job, place: str = "rank 0", failing: Failing = not_written
) -> Value:
    """What `act` returned on rank 0, on every rank; if it failed there, each rank raises. `place`: this rank's."""
    value, failed = None, ""
    if world.index == 0:
        try:
            value = act()
        except OSError as error:
            failed = f"{place}: {error}"
    value, failed = collectives.broadcast_object((value, failed), world)
    if failed:
        raise failing(failed, job)
    return value  # type: ignore[return-value]
