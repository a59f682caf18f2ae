"""What a run leaves in its output_dir: `config.yaml` with the sources beside it, `metrics.jsonl`, `log.txt`,
`checkpoints/`, `eval.jsonl`, and what monitors write.

Only rank 0 writes, and of one run at a time: it holds a lock of the file system (`.lock`), which goes with its process
whatever ends that. A folder that holds steps of a run is set aside under a new name, never written over; a run that is
resumed goes on in its folder, behind the last step that its checkpoint knows of.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import COMMAND_LINE, Finding
from dslpar.language import yaml_io
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.reporting import show
from dslpar.schema import sections as schema_sections

CONFIG, METRICS, LOG, SOURCES = "config.yaml", "metrics.jsonl", "log.txt", "sources"
CHECKPOINTS, EVAL = "checkpoints", "eval.jsonl"
_LOCK = ".lock"
_LOCK_PATIENCE_S = 100.0
"""A run that is being ended may hold it a while; that of a host that is gone, NFS's server keeps for 90 s."""
_LOCK_LOOK_S = 0.2
_IS_HELD = (errno.EACCES, errno.EAGAIN)
_HAS_NONE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_OF_A_RUN = (CONFIG, METRICS, LOG, SOURCES, CHECKPOINTS, EVAL, "csv", "tensorboard", "wandb")


def hold(job: Job, config: Config) -> None:
    """Makes the output_dir this process's own to write to, for as long as the process lives.

    Two runs in one folder would each move, prune and remove what the other writes: a job that is queued again while its
    ranks are still being ended, or the same line typed twice. Where the file system has no locks, that is said.

    Raises:
        DslparError: it cannot be written to, or another run holds it and does not end.
    """
    try:
        Path(job.output_dir).mkdir(parents=True, exist_ok=True)
        file = os.open(Path(job.output_dir, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # never closed
        if not _lock(file, job.output_dir):
            return
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    except BlockingIOError as error:
        message = f"another run writes to {job.output_dir!r}: {error.strerror}"
        hint = "wait until it has ended, or name another folder, train.output_dir=..."
        raise_finding("CKP211", message, hint, config.at("train.output_dir"), "train.output_dir")
    except OSError as error:
        _refuse_folder(job, config, error)


def _lock(file: int, folder: str) -> bool:
    """Whether the lock is ours; no: there are none here.

    Raises:
        BlockingIOError: it is another's, and stayed so. The words are who that is.
    """
    ends, told = time.monotonic() + _LOCK_PATIENCE_S, False
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _HAS_NONE:
                print(f"{folder}: no locks on this file system ({error.strerror}): run one at a time there", flush=True)
                return False
            if error.errno not in _IS_HELD:
                raise
        holder = os.pread(file, 200, 0).decode(errors="replace") or "a process that has not said which"
        if time.monotonic() > ends:
            raise BlockingIOError(errno.EAGAIN, holder)
        if not told:
            print(f"{folder} is in use, by {holder}: waiting for up to {_LOCK_PATIENCE_S:.0f} s", flush=True)
        told = True
        time.sleep(_LOCK_LOOK_S)


def claim(job: Job, config: Config, *, resumed: bool = False) -> Path:
    """Makes the output_dir and writes down what will run; a run that was there is set aside, whole, unless it is the
    one that is `resumed`.

    Call it when every rank has read the config, which may be the config.yaml of the run that is set aside.
    """
    folder = Path(job.output_dir)
    try:
        if not resumed:
            _set_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, config_yaml(job, config))
        _copy_sources(config, folder / SOURCES)
    except OSError as error:
        _refuse_folder(job, config, error)
    return folder


def _refuse_folder(job: Job, config: Config, error: OSError) -> NoReturn:
    key = "train.output_dir"
    message = f"cannot write to {job.output_dir!r}: {error}"
    raise_finding("CKP201", message, "name another folder, train.output_dir=...", config.at(key), key)


def unused_checkpoint(job: Job, config: Config, *, loads: bool) -> Iterator[Finding]:
    """A run that loads none, and a config that chooses one; the policies ('newest', ...) choose among what there is."""
    key, asked = "checkpoint.resume_from", job.spec.checkpoint.resume_from
    if not loads and asked not in ("newest", "newest_whole"):
        message = f"{key} is {asked!r}, and without --resume no checkpoint is loaded: the run starts at step 0"
        yield finding("CKP210", message, "--resume", config.at(key), key)


def _set_aside(folder: Path) -> None:
    """Moves what a run left in `folder`, and nothing else, to earlier/1 below it, or 2, and so on."""
    metrics, checkpoints = folder / METRICS, folder / CHECKPOINTS
    if not (metrics.exists() and metrics.stat().st_size) and not checkpoints.exists():
        return
    aside = next(path for path in (folder / "earlier" / str(number) for number in count(1)) if not path.exists())
    aside.mkdir(parents=True)
    for name in _OF_A_RUN:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    print(f"the run that was in {folder} is in {aside} now", flush=True)


def cut(folder: Path, step: int) -> None:
    """Takes from metrics.jsonl what was written after `step`, and what is no whole line of a step."""
    metrics = folder / METRICS
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_whole(metrics, "".join(line for line in lines if line.endswith("\n") and _step_of(line) <= step))


def _step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; of one that says none, no step is late enough."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def cut_rows(path: Path, step: int) -> None:
    """The same of a CSV file, whose first line is a header and whose first column the step."""
    header, *rows = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
    kept = [row for row in rows if row.endswith("\n") and _number(row.partition(",")[0]) <= step]
    write_whole(path, "".join((header, *kept)))


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else math.inf


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that at each moment, whatever ends the process, either its old or its new text is there."""
    unready = path.with_name(path.name + ".part")
    with open(unready, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unready.replace(path)


def config_yaml(job: Job, config: Config, more: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The author's merged values, and what dslpar made of them, and `more` of that; it loads as a config itself."""
    sections = {field.name for field in fields(schema_sections.Spec)}
    values = {name: yaml_io.portable(node) for name, node in config.root.value.items() if name in sections}
    resolved = {**resolved_of(job), **more}
    if job.spec.train.dist != schema_sections.Dist():
        ids = {key: resolved[key] for key in ("auto_pipeline_stage_id", "actual_pipeline_stage_id")}
        values["train"]["dist"] |= ids
    if job.spec.data.files is not None:  # relative to the author's config, which may stand elsewhere
        folder = os.path.dirname(job.path)
        values["data"]["files"] = [os.path.abspath(os.path.join(folder, name)) for name in job.spec.data.files]
    return yaml_io.dump_plain(values | {"resolved": resolved})


def resolved_of(job: Job) -> dict[str, Any]:
    """What dslpar decided, and with which versions: for information."""
    shown: Any = show.as_record(job)
    return {
        "world_size": shown["world_size"],
        "parallel": shown["parallel"],
        "batch": shown["batch"],
        "auto_pipeline_stage_id": shown["stages"]["auto_pipeline_stage_id"],
        "actual_pipeline_stage_id": shown["stages"]["actual_pipeline_stage_id"],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what a run depends on."""
    packages = {name: version(name) for name in ("dslpar", "torch", "deepspeed")}
    return packages | {"python": platform.python_version()}


def write_line(file: TextIO, record: Mapping[str, Any]) -> None:
    """One line of metrics.jsonl, on disk when this returns; numbers that are not finite become null."""
    broken = any(isinstance(value, float) and not math.isfinite(value) for value in record.values())
    values = {key: _finite(value) for key, value in record.items()} | ({"skipped": True} if broken else {})
    file.write(json.dumps(values, allow_nan=False) + "\n")
    file.flush()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _copy_sources(config: Config, folder: Path) -> None:
    """The text of each file that was read, at its place relative to the others."""
    paths = {os.path.abspath(path): text for path, text in config.sources.items() if path != COMMAND_LINE}
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    for path, text in paths.items():
        copy = folder / os.path.relpath(path, root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
