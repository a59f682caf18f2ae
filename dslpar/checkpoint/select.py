"""Select the checkpoint that a run resumes from (`checkpoint.resume_from`), and report newer ones that it skips."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dslpar.checkpoint import contents, folder
from dslpar.checkpoint.collective import MAX_LISTED, READ, check_seen_by_all, run_on_rank_0
from dslpar.checkpoint.folder import Checkpoint
from dslpar.core.catalog import raise_finding
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job
from dslpar.reporting.resume_hint import CHECKPOINTS, NEWEST

log = logging.getLogger("dslpar")


def find_checkpoint(job: Job, world: Axis) -> Checkpoint | None:
    """Return the checkpoint that `checkpoint.resume_from` selects, after verifying every byte; None: the run has none.

    'newest' selects the newest checkpoint in the job's output_dir, as rank 0 sees it. 'newest_whole' selects the newest
    checkpoint that is neither corrupted nor suspect; rank 0 logs the ones it skips. 'best' selects the one with the
    lowest held-out loss. A name or path selects this checkpoint, even if it is suspect. All ranks must call this
    together: each reads its share of the files.

    Raises:
        DslparError: on every rank, if one rank does not see the checkpoint, no checkpoint has that name, the selected
            one is corrupted, the newest is suspect, or all are corrupted or suspect. For 'newest' the hint names the
            newest good checkpoint: a long run must not start over because one file is corrupted.
    """
    requested = job.spec.checkpoint.resume_from
    passed_over: list[_PassedOver] = []
    # Rank 0 lists the folder for all ranks: caches of a network file system may show each host another listing.
    for name in run_on_rank_0(lambda: _candidates(job, requested), world, job, READ):
        path = Path(job.output_dir, CHECKPOINTS, name)  # if `name` is an absolute path, this is `name` alone
        # Every rank uses rank 0's manifest. `_verify_together` finds ranks that do not see the folder.
        manifest, problem = run_on_rank_0(partial(_read_manifest, path), world, job, READ)
        problems = [problem]
        if manifest is not None:
            checkpoint = Checkpoint(str(path), manifest)
            if checkpoint.suspect and requested in NEWEST:
                passed_over.append(_PassedOver("CKP232", f"{path} is suspect: {checkpoint.suspect}"))
                continue
            problems = _verify_together(checkpoint, world, job)
            if not problems:
                _check_passed_over(checkpoint, passed_over, requested, world, job)
                return checkpoint
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        passed_over.append(_PassedOver("CKP215", f"{path} is corrupted: {problems[0]}{more}"))
    if requested not in NEWEST:
        _refuse_choice(requested, passed_over, world, job)
    if passed_over:
        _refuse_all(passed_over, job)
    return None


class _PassedOver(NamedTuple):
    """A checkpoint that a resume skips: CKP215, corrupted, or CKP232, suspect."""

    code: str
    """Code of the finding to raise if it must not be skipped."""
    message: str


def _candidates(job: Job, requested: str) -> list[str]:
    """Return the checkpoints to try, best first: names in this run's folder, or the requested path."""
    root = Path(job.output_dir, CHECKPOINTS)
    if requested in NEWEST:
        return [path.name for path in reversed(folder.list_folders(root))]
    if requested == folder.BEST:
        best = folder.best_of(each for each in folder.scan(root).checkpoints if folder.is_complete(each))
        return [] if best is None else [Path(best.path).name]
    name = str(Path(requested).absolute()) if "/" in requested else requested
    return [name] if folder.is_checkpoint(root / name) else []


def _read_manifest(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    """Return (manifest, ""), or (None, reason) if it cannot be read."""
    try:
        return folder.open_checkpoint(path).manifest, ""
    except folder.ManifestError as error:
        return None, f"{folder.MANIFEST}: {error}"


def _verify_together(checkpoint: Checkpoint, world: Axis, job: Job) -> list[str]:
    """Return the problems of the checkpoint's files; each rank reads a share of the files.

    Files of another format are not read, since this version of dslpar cannot: `resume_changes.check` refuses them.
    """
    if checkpoint.manifest["format"] != folder.FORMAT:
        return []
    sees = Path(checkpoint.path).is_dir()
    hosts = collectives.gather_objects((socket.gethostname(), sees), world)
    check_seen_by_all(hosts, checkpoint.path, job)
    # With several hosts, a problem names its host: the host's memory or mount may be at fault, and not the file.
    host_named = len({host for host, _ in hosts}) > 1

    def gather(found: list[str]) -> list[str]:
        reports = zip(hosts, collectives.gather_objects(found, world), strict=True)
        return [f"{each} (as {host} sees it)" if host_named else each for (host, _), found in reports for each in found]

    return contents.corruptions(checkpoint, world.index, world.size, gather)


def _check_passed_over(
    checkpoint: Checkpoint, passed_over: list[_PassedOver], requested: str, world: Axis, job: Job
) -> None:
    """Raise DslparError if 'newest' would skip newer checkpoints; for 'newest_whole' rank 0 logs the skipped ones.

    Rank 0 also logs if the selected checkpoint, named by the user, is suspect.
    """
    if passed_over and requested == "newest":
        name, is_corrupted = Path(checkpoint.path).name, passed_over[0].code == "CKP215"
        hint = f"to go back to the one before it: checkpoint.resume_from={name}"
        message = (
            f"{'; '.join(each.message for each in passed_over)}; {name} is {'intact' if is_corrupted else 'not marked'}"
        )
        more = "; or bring the files back" if is_corrupted else ""
        raise_finding(passed_over[0].code, message, hint + more, job.path, "checkpoint.resume_from")
    for each in passed_over if world.index == 0 else ():
        log.warning("%s; it is skipped", each.message)
    if checkpoint.suspect and world.index == 0:
        log.warning("%s is suspect, and is resumed because it was named: %s", checkpoint.path, checkpoint.suspect)


def _refuse_all(passed_over: list[_PassedOver], job: Job) -> NoReturn:
    """Raise DslparError: the run has checkpoints, but all are corrupted or suspect, so it must not start at step 0."""
    message = "; ".join(each.message for each in passed_over)
    if all(each.code == "CKP232" for each in passed_over):
        hint = (
            "start again in another train.output_dir; or resume a suspect one anyway, with checkpoint.resume_from=NAME"
        )
        raise_finding("CKP232", message, hint, job.path, "checkpoint.resume_from")
    hint = "bring the files back; or remove these folders, so that the run starts at step 0"
    raise_finding("CKP205", message, hint, job.path, "train.output_dir")


def _refuse_choice(requested: str, passed_over: list[_PassedOver], world: Axis, job: Job) -> NoReturn:
    """Raise DslparError: the requested checkpoint is corrupted or missing; the hint lists the run's checkpoints."""
    there = run_on_rank_0(lambda: _alternatives(requested, Path(job.output_dir, CHECKPOINTS)), world, job, READ)
    hint = f"name one that exists: {', '.join(there[-MAX_LISTED:]) or 'there is none'}"
    key = "checkpoint.resume_from"
    if passed_over:
        raise_finding("CKP215", passed_over[0].message, f"bring the files back; or {hint}", job.path, key)
    raise_finding("CKP209", f"there is no checkpoint {requested!r}", hint, job.path, key)


def _alternatives(requested: str, root: Path) -> list[str]:
    """Return checkpoints to suggest: those of the run whose folder was requested, or else this run's."""
    run = Path(requested, CHECKPOINTS)
    if "/" in requested and run.is_dir():
        return [checkpoint.path for checkpoint in folder.scan(run).checkpoints]
    return [Path(checkpoint.path).name for checkpoint in folder.scan(root).checkpoints]
