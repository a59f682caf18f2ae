"""Which checkpoint a run goes on from: `checkpoint.resume_from`, and what is wrong with those that are passed over."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dslpar.checkpoint import folder
from dslpar.checkpoint.collective import SHOWN, by_rank_0, demand_seen, not_read
from dslpar.checkpoint.folder import Stored
from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job
from dslpar.reporting.run_dir import CHECKPOINTS

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
    for at in by_rank_0(lambda: _candidates(job, asked), world, job, failing=not_read):
        mine = Path(job.output_dir, CHECKPOINTS, at)  # `at` alone, where it is a path
        manifest_, why = by_rank_0(partial(_manifest, mine), world, job, failing=not_read)
        found = [why] if manifest_ is None else _damages(Stored(str(mine), manifest_), world, job)
        if manifest_ is not None and not found:
            return _taken(Stored(str(mine), manifest_), damaged, asked, world, job)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        damaged.append(f"{mine} is damaged: {found[0]}{more}")
    if asked not in _NEWEST:
        _refuse_choice(asked, damaged, world, job)
    if damaged:
        hint = "bring the files back; or remove these folders, and the run starts at step 0"
        raise_finding("CKP205", "; ".join(damaged), hint, job.path, "train.output_dir")
    return None


_NEWEST = ("newest", "newest_whole")


def _candidates(job: Job, asked: str) -> list[str]:
    """Those that may be resumed from, the first choice first: names, or the path of one that lies elsewhere."""
    root = Path(job.output_dir, CHECKPOINTS)
    if asked in _NEWEST:
        return [path.name for path in reversed(folder.numbered(root))]
    at = str(Path(asked).absolute()) if "/" in asked else asked
    return [at] if folder.is_one(root / at) else []


def _manifest(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """None: it cannot be read; why."""
    try:
        return folder.read(path).manifest, ""
    except (OSError, ValueError) as error:
        return None, f"{folder.MANIFEST}: {folder.why(error)}"


def _refuse_choice(asked: str, damaged: list[str], world: Axis, job: Job) -> NoReturn:
    """What is asked for by its name or path is damaged, or not there: with those that are, of the run that it names."""
    there = by_rank_0(lambda: _beside(asked, Path(job.output_dir, CHECKPOINTS)), world, job, failing=not_read)
    hint = f"name one that is there: {', '.join(there[-SHOWN:]) or 'none is'}"
    key = "checkpoint.resume_from"
    if damaged:
        raise_finding("CKP215", damaged[0], f"bring the files back; or {hint}", job.path, key)
    raise_finding("CKP209", f"there is no checkpoint {asked!r}", hint, job.path, key)


def _beside(asked: str, root: Path) -> list[str]:
    """What could be meant instead: of a run's folder its checkpoints, of a path that is none this run's own."""
    own = [Path(stored.path).name for stored in folder.visible(root)]
    run = Path(asked, CHECKPOINTS)
    return [stored.path for stored in folder.visible(run)] if "/" in asked and run.is_dir() else own


def _damages(stored: Stored, world: Axis, job: Job) -> list[str]:
    """What is wrong with its files; all ranks together. Of another format nobody here can say: `check` refuses it."""
    if stored.manifest["format"] != folder.FORMAT:
        return []
    sees = Path(stored.path).is_dir()
    mine = [str(damage) for damage in folder.verify(stored, world.index, world.size)] if sees else []
    told = collectives.gather_objects((socket.gethostname(), sees, mine), world)
    demand_seen([(host, sees) for host, sees, _ in told], stored.path, job)
    many = len({host for host, _, _ in told}) > 1  # then it may be one host's memory or mount, and not the file
    return [f"{damage} (as {host} sees it)" if many else damage for host, _, theirs in told for damage in theirs]


def _taken(stored: Stored, damaged: list[str], asked: str, world: Axis, job: Job) -> Stored:
    """The first whole one; where newer ones are damaged, only if that was asked for."""
    if damaged and asked == "newest":
        name = Path(stored.path).name
        hint = f"to go back to the one before it: checkpoint.resume_from={name}; or bring the files back"
        message = f"{'; '.join(damaged)}; {name} is whole"
        raise_finding("CKP215", message, hint, job.path, "checkpoint.resume_from")
    for message in damaged if world.index == 0 else ():
        log.warning("%s; it is passed over", message)
    return stored
