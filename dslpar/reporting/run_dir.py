"""Run folder, train.output_dir: `config.yaml` with its sources, `metrics.jsonl`, `log.txt`, `checkpoints/`,
`eval.jsonl`, `experts.json`, and the files of monitors.

Only rank 0 writes to the folder, and only one run at a time. Rank 0 holds a lock of the file system (`.lock`). The
operating system releases the lock when the process ends, even if it crashes. Files of an earlier run are moved to
`earlier/` in the folder, and never overwritten. A resumed run continues in its folder, after the last step of its
checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TextIO

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import COMMAND_LINE, Finding
from dslpar.core.visible import visible, visible_lines
from dslpar.language import yaml_io
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.reporting.layout_record import layout_record, schedule_record
from dslpar.reporting.resume_hint import CHECKPOINTS as CHECKPOINTS
from dslpar.reporting.resume_hint import NEWEST, write_hint
from dslpar.schema import sections as schema_sections
from dslpar.schema.datasets import with_absolute_paths

CONFIG, METRICS, LOG, SOURCES = "config.yaml", "metrics.jsonl", "log.txt", "sources"
EVAL, EXPERTS = "eval.jsonl", "experts.json"
LOCK = ".lock"
_LOCK_TIMEOUT_S = 100.0
"""Seconds to wait for the lock. A run that is being stopped may hold it for a while, and NFS servers keep the lock of a
lost host for 90 s."""
_LOCK_POLL_S = 0.2
_LOCK_IS_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
FILES_OF_A_RUN = (CONFIG, METRICS, LOG, SOURCES, CHECKPOINTS, EVAL, EXPERTS, "csv", "tensorboard", "wandb")


def lock_run_folder(job: Job, config: Config) -> None:
    """Lock the run folder for this process, until the process ends.

    Without the lock, two runs in one folder would move, prune and remove each other's files. Two runs meet if a job is
    queued again while its ranks are still being stopped, or if a command is typed twice. If the file system has no
    locks, the function prints a line and returns.

    Raises:
        DslparError: the folder cannot be written to, or another run holds the lock and does not end.
    """
    try:
        Path(job.output_dir).mkdir(parents=True, exist_ok=True)
        file = os.open(Path(job.output_dir, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # never closed
        if not _acquire_lock(file, job.output_dir):
            return
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    except BlockingIOError as error:
        message = f"another run writes to {job.output_dir!r}: {error.strerror}"
        hint = "wait until it has ended; or start another run, train.output_dir=..., without --resume"
        raise_finding("CKP211", message, hint, config.at("train.output_dir"), "train.output_dir")
    except OSError as error:
        _refuse_folder(job, config, error)


def _acquire_lock(file: int, folder: str) -> bool:
    """Wait for the lock; return False if the file system has no locks.

    Raises:
        BlockingIOError: another process has held the lock for too long; strerror names that process.
    """
    # Reasons against the package filelock: its flock belongs to the open file, and so to every process forked from the
    # rank (data workers, W&B). These would keep a dead run's folder locked. The lock of lockf belongs to the process.
    # Without flock, filelock falls back to a file that stays after a kill. And filelock does not name the holder.
    deadline, reported = time.monotonic() + _LOCK_TIMEOUT_S, False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                why = f"no locks on this file system ({error.strerror})"
                print(visible(f"{folder}: {why}: run one at a time there"), flush=True)
                return False
            if error.errno not in _LOCK_IS_HELD:
                raise
        holder = os.pread(file, 200, 0).decode(errors="replace") or "an unknown process"
        if time.monotonic() > deadline:
            raise BlockingIOError(errno.EAGAIN, holder)
        if not reported:
            print(visible(f"{folder} is in use, by {holder}: waiting for up to {_LOCK_TIMEOUT_S:.0f} s"), flush=True)
        reported = True
        time.sleep(_LOCK_POLL_S)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run folder; None if its file system has no locks.

    The function only queries the lock, so a run that starts meanwhile does not wait. The process that holds the lock
    must not call the function: POSIX drops a process's lock when it closes any descriptor of the file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        # struct flock: type, whence, start, length, process; "@" is the C compiler's alignment.
        asked = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found: bytes = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return None
        raise
    finally:
        os.close(file)


def prepare_run_folder(job: Job, config: Config, archived: Sequence[str] = FILES_OF_A_RUN) -> None:
    """Create the run folder, archive an earlier run's files, and write the config and its sources.

    `archived` has the names of files and folders to archive. Call the function after every rank has read the config,
    because the config may be the config.yaml of the archived run.
    """
    folder = Path(job.output_dir)
    try:
        _archive_earlier_run(folder, archived)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG, config_yaml(job, config))
        _copy_sources(config, folder / SOURCES)
    except OSError as error:
        _refuse_folder(job, config, error)


def _refuse_folder(job: Job, config: Config, error: OSError) -> NoReturn:
    key = "train.output_dir"
    message = f"cannot write to {job.output_dir!r}: {error}"
    raise_finding("CKP201", message, write_hint(job, str(error)), config.at(key), key)


def unused_checkpoint(job: Job, config: Config, *, loads: bool) -> Iterator[Finding]:
    """Yield a warning if the config names a checkpoint to resume from, but the run starts without `--resume`.

    The values 'newest' and 'newest_whole' name no particular checkpoint, so they cause no warning.
    """
    key, resume_from = "checkpoint.resume_from", job.spec.checkpoint.resume_from
    if not loads and resume_from not in NEWEST:
        message = f"{key} is {resume_from!r}, and without --resume no checkpoint is loaded: the run starts at step 0"
        yield finding("CKP210", message, "--resume", config.at(key), key)


def _archive_earlier_run(folder: Path, names: Sequence[str]) -> None:
    """Move a run's files with these names to `folder`/earlier/1, or to the first number that does not exist.

    Nothing is moved if the folder has no metrics and no checkpoints.
    """
    metrics, checkpoints = folder / METRICS, folder / CHECKPOINTS
    has_metrics = METRICS in names and metrics.exists() and metrics.stat().st_size
    if not has_metrics and not (CHECKPOINTS in names and checkpoints.exists()):
        return
    archive = next(path for path in (folder / "earlier" / str(number) for number in count(1)) if not path.exists())
    archive.mkdir(parents=True)
    for name in names:
        if (folder / name).exists():
            (folder / name).rename(archive / name)
    print(visible(f"the run that was in {folder} is in {archive} now"), flush=True)


def truncate_metrics(folder: Path, step: int) -> None:
    """Remove the lines of steps after `step` from metrics.jsonl, and lines that are cut off or have no step."""

    def step_of(line: str) -> float:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            return math.inf

    metrics = folder / METRICS
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_atomically(metrics, "".join(line for line in lines if line.endswith("\n") and step_of(line) <= step))


def truncate_csv(path: Path, step: int) -> None:
    """Remove the rows of steps after `step` from a CSV file with a header line and the step in its first column."""
    header, *rows = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
    steps = ((row, row.partition(",")[0]) for row in rows if row.endswith("\n"))
    kept = [row for row, text in steps if text.isdecimal() and int(text) <= step]
    write_atomically(path, "".join((header, *kept)))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that its path always has either the old or the new text, even if the process is killed."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def config_yaml(job: Job, config: Config, more: Mapping[str, object] = MappingProxyType({})) -> str:
    """Return the text of config.yaml, which is a config too.

    It has the author's merged values, and the section `resolved`: the values that dslpar has resolved, and `more`.
    """
    sections = {field.name for field in fields(schema_sections.Spec)}
    values = {name: yaml_io.portable(node) for name, node in config.root.value.items() if name in sections}
    resolved = {**resolved_values(job), **more}
    if job.spec.train.dist != schema_sections.Dist():
        ids = {key: resolved[key] for key in ("auto_pipeline_stage_id", "actual_pipeline_stage_id")}
        values["train"]["dist"] |= ids
    if "data" in values:  # paths in the section are relative to the author's config, and config.yaml is elsewhere
        values["data"] = with_absolute_paths(values["data"], job.spec.data, job.path)
    model = job.spec.model
    args = model.args if isinstance(model, schema_sections.OtherModel) else vars(model)
    # The config reader has made the path absolute. If a program passes the model, the config has no such section.
    if "pretrained" in values.get("model", {}) and "pretrained" in args:
        values["model"]["pretrained"] = args["pretrained"]
    calibration = job.spec.cluster.calibration
    if calibration is not None:
        values["cluster"]["calibration"] = os.path.abspath(os.path.join(os.path.dirname(job.path), calibration))
    return yaml_io.dump_plain(values | {"resolved": resolved})


def resolved_values(job: Job) -> dict[str, object]:
    """Return the resolved values of a job (sizes, batch, stages, schedule) and the versions of packages."""
    record: Any = layout_record(job)
    return {
        "world_size": record["world_size"],
        "parallel": record["parallel"],
        "batch": record["batch"],
        "auto_pipeline_stage_id": record["stages"]["auto_pipeline_stage_id"],
        "actual_pipeline_stage_id": record["stages"]["actual_pipeline_stage_id"],
        "schedule": schedule_record(job) if job.mesh.pipe > 1 else None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of a run's dependencies."""
    packages = {name: version(name) for name in ("dslpar", "torch", "deepspeed")}
    return packages | {"python": platform.python_version()}


def write_record(file: TextIO, record: Mapping[str, int | float]) -> None:
    """Append a line to metrics.jsonl and flush it; a non-finite number becomes null and marks the line as skipped."""
    values: dict[str, int | float | None] = {k: v if math.isfinite(v) else None for k, v in record.items()}
    if None in values.values():
        values["skipped"] = True
    file.write(json.dumps(values, allow_nan=False) + "\n")
    file.flush()


Level = Literal["INFO", "ERROR"]


def append_to_log(folder: Path, level: Level, text: str, since_s: float) -> None:
    """Append the reason for a run's end to log.txt if the run has ended, and has written there since `since_s`.

    A killed rank cannot log the reason itself. The launcher's message in the folder survives a closed terminal. Write
    errors, such as a full disk, are ignored. `since_s` is Unix time.
    """
    with contextlib.suppress(OSError):
        log = folder / LOG
        if log.stat().st_mtime >= since_s and not is_locked(folder):
            time_s = time.time()
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)) + f",{int(time_s % 1 * 1000):03d}"
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{stamp} dslpar {level} {visible_lines(text.rstrip())}".replace("\n", "\n  ") + "\n")


def is_in_place(file: TextIO) -> bool:
    """Return whether an open file is still at its path; False if the file or a parent folder was deleted or moved.

    Raises:
        OSError: the file system does not answer.
    """
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _copy_sources(config: Config, folder: Path) -> None:
    """Write the text of each file that the config was read from to `folder`; relative paths between files stay."""
    paths = {os.path.abspath(path): text for path, text in config.sources.items() if path != COMMAND_LINE}
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    for path, text in paths.items():
        copy = folder / os.path.relpath(path, root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
