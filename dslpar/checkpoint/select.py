"""Select the checkpoint that a run resumes from, `checkpoint.resume_from`; say what is wrong with those passed over."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dslpar.checkpoint import contents, folder
from dslpar.checkpoint.collective import MAX_LISTED, READ, check_seen_by_all, run_on_rank_0
from dslpar.checkpoint.folder import Checkpoint
from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job
from dslpar.reporting.run_dir import CHECKPOINTS

log = logging.getLogger("dslpar")

_NEWEST = ("newest", "newest_whole")


def find_checkpoint(job: Job, world: Axis) -> Checkpoint | None:
    """Return the checkpoint that `checkpoint.resume_from` names, every byte of it read; None if there is none at all.

    'newest' is the newest in the job's output_dir, by what rank 0 sees there; 'newest_whole' passes over corrupted
    ones, and rank 0 logs which. All ranks must call it together: each reads its share of the files.

    Raises:
        DslparError: on every rank, if one of them does not see that checkpoint; if it is corrupted, with the newest
            intact one; or there is none of that name. A long run must not begin anew because its last file was cut
            short.
    """
    requested = job.spec.checkpoint.resume_from
    corrupted: list[str] = []
    # Rank 0 lists the folder for all: caches of a network file system may show each host another one.
    for name in run_on_rank_0(lambda: _candidates(job, requested), world, job, READ):
        path = Path(job.output_dir, CHECKPOINTS, name)  # `name` alone, where that is a path
        # Every rank goes by rank 0's manifest: one that cannot read it is found below, by what it does not see.
        manifest, problem = run_on_rank_0(partial(_read_manifest, path), world, job, READ)
        problems = [problem]
        if manifest is not None:
            checkpoint = Checkpoint(str(path), manifest)
            problems = _verify_together(checkpoint, world, job)
            if not problems:
                _check_passed_over(checkpoint, corrupted, requested, world, job)
                return checkpoint
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        corrupted.append(f"{path} is corrupted: {problems[0]}{more}")
    if requested not in _NEWEST:
        _refuse_choice(requested, corrupted, world, job)
    if corrupted:
        hint = "bring the files back; or remove these folders, and the run starts at step 0"
        raise_finding("CKP205", "; ".join(corrupted), hint, job.path, "train.output_dir")
    return None


def _candidates(job: Job, requested: str) -> list[str]:
    """Return what may be resumed from, the first choice first: names, or the path of a checkpoint elsewhere."""
    root = Path(job.output_dir, CHECKPOINTS)
    if requested in _NEWEST:
        return [path.name for path in reversed(folder.list_folders(root))]
    name = str(Path(requested).absolute()) if "/" in requested else requested
    return [name] if folder.is_checkpoint(root / name) else []


def _read_manifest(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return (the manifest, ""), or (None, why it cannot be read)."""
    try:
        return folder.open_checkpoint(path).manifest, ""
    except folder.ManifestError as error:
        return None, f"{folder.MANIFEST}: {error}"


def _verify_together(checkpoint: Checkpoint, world: Axis, job: Job) -> list[str]:
    """Return what is wrong with its files, of which each rank reads a share; nothing of another format.

    (A checkpoint of another format has files that this dslpar does not know: `compare.check` refuses it.)
    """
    if checkpoint.manifest["format"] != folder.FORMAT:
        return []
    sees = Path(checkpoint.path).is_dir()
    hosts = collectives.gather_objects((socket.gethostname(), sees), world)
    check_seen_by_all(hosts, checkpoint.path, job)
    # Of several hosts each is named: it may be that host's memory or mount, and not the file.
    host_named = len({host for host, _ in hosts}) > 1

    def gather(found: list[str]) -> list[str]:
        reports = zip(hosts, collectives.gather_objects(found, world), strict=True)
        return [f"{each} (as {host} sees it)" if host_named else each for (host, _), found in reports for each in found]

    return contents.corruptions(checkpoint, world.index, world.size, gather)


def _check_passed_over(checkpoint: Checkpoint, corrupted: list[str], requested: str, world: Axis, job: Job) -> None:
    """Refuse to pass over newer, corrupted checkpoints, unless 'newest_whole' asks for that; rank 0 logs them."""
    if corrupted and requested == "newest":
        name = Path(checkpoint.path).name
        hint = f"to go back to the one before it: checkpoint.resume_from={name}; or bring the files back"
        message = f"{'; '.join(corrupted)}; {name} is intact"
        raise_finding("CKP215", message, hint, job.path, "checkpoint.resume_from")
    for message in corrupted if world.index == 0 else ():
        log.warning("%s; it is passed over", message)


def _refuse_choice(requested: str, corrupted: list[str], world: Axis, job: Job) -> NoReturn:
    """Refuse a name or path that is corrupted, or not there; the hint lists those of the run that it names."""
    there = run_on_rank_0(lambda: _alternatives(requested, Path(job.output_dir, CHECKPOINTS)), world, job, READ)
    hint = f"name one that is there: {', '.join(there[-MAX_LISTED:]) or 'none is'}"
    key = "checkpoint.resume_from"
    if corrupted:
        raise_finding("CKP215", corrupted[0], f"bring the files back; or {hint}", job.path, key)
    raise_finding("CKP209", f"there is no checkpoint {requested!r}", hint, job.path, key)


def _alternatives(requested: str, root: Path) -> list[str]:
    """Return what could be meant: the checkpoints of the run whose folder was given, or else this run's own."""
    run = Path(requested, CHECKPOINTS)
    if "/" in requested and run.is_dir():
        return [checkpoint.path for checkpoint in folder.scan(run).checkpoints]
    return [Path(checkpoint.path).name for checkpoint in folder.scan(root).checkpoints]
