"""List the runs below a folder with their states, using only the files in the run folders (`dslpar.reporting.run_dir`).

    for run in find_runs(Path("outputs")):
        run.name, run.state, run.step, run.steps, run.loss, run.problems

The first criterion that holds decides:

| state | criterion |
|---|---|
| running | the run's process holds the folder's lock |
| finished | the last record in metrics.jsonl has the last requested step |
| stopped | log.txt ends with a line that the run was told to stop, and so has saved |
| interrupted | log.txt ends with a line that Ctrl-C or another signal ended the run at once |
| failed | log.txt ends with an error, or the run has ended before the last requested step |
| unknown | the run has no records, or config.yaml has no number of steps |

Only the ends of files are read, so 200 runs take a moment. Nothing is written and no lock is taken. An unreadable file
does not end the list. It is reported in the run's `problems`. TensorBoard also finds its runs by their folders alone,
without a server or a database.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dslpar.reporting import metrics_file, run_dir
from dslpar.reporting.metrics_file import MetricsError, Record
from dslpar.schema import sections

STATES = ("running", "finished", "stopped", "interrupted", "failed", "unknown")
_NOT_ENTERED = {run_dir.CHECKPOINTS, run_dir.SOURCES, "csv", "tensorboard", "wandb", "__pycache__", "node_modules"}
_MAX_CONFIG_BYTES = 1 << 22
_LOG_BYTES = 1 << 16
_RATE_STEPS = 20
"""Number of last steps whose median is the throughput."""
_RECENT_S = 120.0
"""On a file system without locks, a run that has written within this many seconds counts as running."""
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Run(NamedTuple):
    """State of a run."""

    path: Path
    name: str
    """Path of the run folder relative to the searched folder."""
    state: str
    """One of STATES."""
    reason: str = ""
    """The reason why the run failed, stopped or was interrupted, in one line; empty if it is unknown."""
    step: int | None = None
    """Steps done."""
    steps: int | None = None
    """Steps requested."""
    loss: float | None = None
    """Loss of the last step; None if it is not finite or no step is done."""
    eval_loss: float | None = None
    """Held-out loss of the last evaluation."""
    eval_step: int | None = None
    """Step of the last evaluation."""
    unit: str = "tokens"
    """Unit of `per_s`: tokens, images, or samples of a user's program."""
    per_s: float | None = None
    """Throughput: the median of the last steps."""
    layout: str = ""
    """The layout as text: "pipeline 2 * data 2 * tensor 2 (1d), ZeRO 1"."""
    world_size: int | None = None
    """Number of ranks."""
    checkpoint: str = ""
    """Name of the newest checkpoint; `dslpar runs` fills it in."""
    updated_s: float | None = None
    """Time of the last write to metrics.jsonl, in seconds since the epoch."""
    problems: tuple[str, ...] = ()
    """Problems with files in the folder."""


def find_runs(root: Path, on_error: Callable[[OSError], object] | None = None) -> Iterator[Run]:
    """Yield the runs in a folder and its subfolders, sorted by name.

    on_error: called with the error for each subfolder that cannot be read.

    Raises:
        OSError: `root` cannot be read.
    """
    for path in run_folders(root, on_error):
        yield read_run(path, os.path.relpath(path, root))


def run_folders(root: Path, on_error: Callable[[OSError], object] | None = None) -> Iterator[Path]:
    """Yield the run folders in a folder and its subfolders. Folders that runs write, such as checkpoints, are skipped.

    Arguments and exceptions are those of `find_runs`.
    """
    os.listdir(root)  # raises, where os.walk would be silent
    for folder, folders, files in os.walk(root, onerror=on_error):
        names = {*folders, *files}
        if run_dir.METRICS in names or (run_dir.CONFIG in names and names & {run_dir.CHECKPOINTS, run_dir.LOCK}):
            yield Path(folder)
        searched = (name for name in folders if name not in _NOT_ENTERED and not name.startswith("."))
        folders[:] = sorted(searched, key=_natural)


def _natural(name: str) -> list[int | str]:
    """Return a sort key that puts run2 before run10: a list of text and numbers in turn."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"([0-9]{1,18})", name))]


def read_run(path: Path, name: str = "") -> Run:
    """Read the state of the run in a folder."""
    return _with_state(_with_metrics(_with_config(Run(path, name or path.name, "unknown"))))


def _with_problem(run: Run, problem: str) -> Run:
    return run._replace(problems=(*run.problems, problem))


# ---- config.yaml: the task ----


def _with_config(run: Run) -> Run:
    path = run.path / run_dir.CONFIG
    try:
        if not path.is_file():
            return _with_problem(run, f"{run_dir.CONFIG}: missing")
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return _with_problem(run, f"{run_dir.CONFIG}: more than {_MAX_CONFIG_BYTES:,} bytes")
        values = yaml.load(path.read_bytes(), Loader=_LOADER)  # both loaders are safe loaders
    except OSError as error:
        return _with_problem(run, f"{run_dir.CONFIG}: {error.strerror}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        return _with_problem(run, f"{run_dir.CONFIG}: not YAML: {why}")
    if not isinstance(values, dict):
        return _with_problem(run, f"{run_dir.CONFIG}: not a config")
    steps = _at(values, "train", "steps")
    run = run._replace(steps=steps if type(steps) is int else sections.Train().steps)
    world_size, layout = _at(values, "resolved", "world_size"), _layout(values)
    if type(world_size) is not int or not layout:
        return _with_problem(run, f"{run_dir.CONFIG}: has no layout")
    return run._replace(layout=layout, world_size=world_size)


def _layout(values: Mapping[str, Any]) -> str:
    """Return a layout as text, as in the records of checkpoints; empty if config.yaml has no layout."""
    pipe, data, tensor = (_at(values, "resolved", "parallel", axis) for axis in ("pipeline", "data", "tensor"))
    if not isinstance(tensor, dict) or type(pipe) is not int or type(data) is not int:
        return ""
    mode = f" ({tensor['mode']})" if tensor.get("mode") else ""
    chunks = _at(values, "resolved", "schedule", "num_model_chunks")
    each = f" ({chunks} stages each)" if type(chunks) is int and chunks > 1 else ""
    zero = values.get("zero")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else zero or 0
    return f"pipeline {pipe}{each} * data {data} * tensor {tensor.get('size')}{mode}, ZeRO {stage}"


def _at(values: object, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


# ---- metrics.jsonl: the progress ----


def _with_metrics(run: Run) -> Run:
    path = run.path / run_dir.METRICS
    try:
        tail = metrics_file.read_tail(path)
    except MetricsError as error:
        if not os.path.lexists(path):  # not begun, or a program that writes no metrics
            return run
        return _with_problem(run, f"{run_dir.METRICS}: {error}")
    for problem in tail.problems:
        run = _with_problem(run, f"{run_dir.METRICS}: {problem}")
    last, evaluated = tail.last, tail.evaluated
    unit = next((unit for unit in ("images", "samples") if f"{unit}_per_s" in last), "tokens")
    return run._replace(
        step=last.get("step", 0),
        loss=metrics_file.number(last, "loss"),
        eval_loss=metrics_file.number(evaluated, "eval_loss"),
        eval_step=evaluated.get("step"),
        unit=unit,
        per_s=_median(tail.records[-_RATE_STEPS:], f"{unit}_per_s"),
        updated_s=tail.updated_s,
    )


def _median(records: Sequence[Record], name: str) -> float | None:
    values = [value for record in records if (value := metrics_file.number(record, name)) is not None]
    return statistics.median(values) if values else None


# ---- .lock and log.txt: the state ----

_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ dslpar (INFO|ERROR) (.*)((?:\n  .*)*)$", re.MULTILINE)
_BEGUN = re.compile(r"world of \d+ = ")
_ENDS = {"told to stop": "stopped", "interrupted": "interrupted", "dslpar launch: stopped": "interrupted"}
"""Beginnings of lines about a run's end that are no errors, with the state that follows."""


def _with_state(run: Run) -> Run:
    held = run_dir.is_locked(run.path)
    if held is None and run.updated_s is not None and time.time() - run.updated_s < _RECENT_S:
        run = _with_problem(run, "its file system has no locks: it counts as running because it has just written")
        held = True
    if held:
        return run._replace(state="running")
    if run.step is not None and run.steps is not None and run.step >= run.steps:
        return run._replace(state="finished")
    try:
        level, reason = _last_words(run.path / run_dir.LOG)
    except OSError as error:
        run = _with_problem(run, f"{run_dir.LOG}: {error.strerror}")
        level, reason = "", ""
    if level:
        return run._replace(state="failed" if level == "ERROR" else _state_after(reason), reason=reason)
    if run.step is None or run.steps is None:
        what = "metrics" if run.step is None else "number of steps in config.yaml"
        return run._replace(reason=f"no {what}")
    return run._replace(state="failed", reason=f"it ended after step {run.step}, and {run_dir.LOG} does not say why")


def _state_after(line: str) -> str:
    """Return the state of a run that a line of log.txt tells; empty if it tells none."""
    return next((state for begin, state in _ENDS.items() if line.startswith(begin)), "")


def _last_words(path: Path) -> tuple[str, str]:
    """Return the level and the text of the log's line about the run's end; both are empty without such a line."""
    if not path.is_file():
        return "", ""
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - _LOG_BYTES, 0))
        text = file.read(_LOG_BYTES).decode(errors="replace")
    for found in reversed(list(_LINE.finditer(text))):
        level, line, more = found.groups()
        if level == "ERROR" and line.endswith(":") and more:  # take a traceback's last line
            line += " " + more.splitlines()[-1].strip()
        if level == "ERROR" or _state_after(line):
            return level, line
        if _BEGUN.search(line):  # lines above belong to an earlier start of the run
            break
    return "", ""
