"""Which checkpoint a run goes on from: `checkpoint.resume_from`, and what is wrong with those that are passed over."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dslpar import comm
from dslpar.checkpoint import folder, manifest
from dslpar.checkpoint.folder import Stored
from dslpar.checkpoint.together import SHOWN, by_rank_0, demand_seen
from dslpar.comm import Axis
from dslpar.errors import DslparError
from dslpar.job import Job
from dslpar.record import CHECKPOINTS

log = logging.getLogger("dslpar")


def newest(job: Job, world: Axis) -> Stored | None:
    """The checkpoint that `checkpoint.resume_from` names, every byte of it read; None if there is none at all.

    'newest' is the newest in the job's output_dir, by what rank 0 sees there; 'newest_whole' passes over damaged ones,
    and rank 0 says which. All ranks together: each reads its share of the files.

    Raises:
        DslparError: on every rank, if one of them does not see that checkpoint; if it is damaged, with the newest one
            that is whole; or there is none of that name. A long run must not begin anew because its last file was cut
            short.
    """
    asked = job.spec.checkpoint.resume_from
    damaged: list[str] = []
    for at, manifest_, why in by_rank_0(lambda: list(_candidates(job, asked)), world, job):
        mine = Path(job.output_dir, CHECKPOINTS, at)  # `at` alone, where it is a path
        found = [why] if manifest_ is None else _damages(Stored(str(mine), manifest_), world, job)
        if manifest_ is not None and not found:
            return _taken(Stored(str(mine), manifest_), damaged, asked, world, job)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        damaged.append(f"{mine} is damaged: {found[0]}{more}")
    if damaged:
        help_ = "bring the files back; or remove these folders, and the run starts at step 0"
        raise manifest.error("CKP205", "no-checkpoint", "; ".join(damaged), help_, job, "train.output_dir")
    if asked not in _NEWEST:
        raise _not_there(asked, world, job)
    return None


_NEWEST = ("newest", "newest_whole")

Candidate = tuple[str, Mapping[str, Any] | None, str]
"""A folder's name, or its path where it lies elsewhere; its manifest; why there is none that can be read."""


def _candidates(job: Job, asked: str) -> Iterator[Candidate]:
    """Those that may be resumed from, the first choice first."""
    root = Path(job.output_dir, CHECKPOINTS)
    if asked in _NEWEST:
        readable = [(Path(stored.path).name, stored.manifest, "") for stored in folder.visible(root)]
        lost = [(path.name, None, why) for path, why in folder.unreadable(root).items()]
        numbered = [one for one in [*readable, *lost] if _number_of(one[0]) is not None]
        yield from sorted(numbered, key=lambda one: -(_number_of(one[0]) or 0))
    elif (path := _path_of(asked, root)).is_dir():
        try:
            yield asked if "/" not in asked else str(path.absolute()), folder.read(path).manifest, ""
        except (OSError, ValueError) as error:
            yield str(path.absolute()), None, f"{folder.MANIFEST}: {error}"


def _number_of(name: str) -> int | None:
    step = name.removeprefix("step_")
    return int(step) if step.isdecimal() else None


def _path_of(asked: str, root: Path) -> Path:
    """A name is one of this run's, a path any run's."""
    return Path(asked) if "/" in asked else root / asked


def _not_there(asked: str, world: Axis, job: Job) -> DslparError:
    root = Path(job.output_dir, CHECKPOINTS)
    there = by_rank_0(lambda: [Path(stored.path).name for stored in folder.visible(root)], world, job)
    help_ = f"name one that is there: {', '.join(there[-SHOWN:]) or 'none is'}"
    said = f"there is no checkpoint {asked!r}"
    return manifest.error("CKP209", "no-such-checkpoint", said, help_, job, "checkpoint.resume_from")


def _damages(stored: Stored, world: Axis, job: Job) -> list[str]:
    """What is wrong with its files; all ranks together. Of another format nobody here can say: `check` refuses it."""
    if stored.manifest["format"] != folder.FORMAT:
        return []
    sees = Path(stored.path).is_dir()
    mine = [str(damage) for damage in folder.verify(stored, world.index, world.size)] if sees else []
    told = comm.gather_objects((socket.gethostname(), sees, mine), world)
    demand_seen([(host, sees) for host, sees, _ in told], stored.path, job)
    return [damage for _, _, theirs in told for damage in theirs]


def _taken(stored: Stored, damaged: list[str], asked: str, world: Axis, job: Job) -> Stored:
    """The first whole one; where newer ones are damaged, only if that was asked for."""
    if damaged and asked == "newest":
        name = Path(stored.path).name
        help_ = f"to go back to the one before it: checkpoint.resume_from={name}; or bring the files back"
        said = f"{'; '.join(damaged)}; {name} is whole"
        raise manifest.error("CKP215", "damaged-checkpoint", said, help_, job, "checkpoint.resume_from")
    for said in damaged if world.index == 0 else ():
        log.warning("%s; it is passed over", said)
    return stored
