"""Node lists in Slurm's syntax, and the allocations of Slurm and PBS.

    >>> expand("gpu[07-09,31],login1")
    ['gpu07', 'gpu08', 'gpu09', 'gpu31', 'login1']
    >>> compress(["gpu07", "gpu08", "gpu09", "gpu31", "login1"])
    'gpu[07-09,31],login1'
    >>> tasks("4(x2),3")
    [4, 4, 3]

The grammar is that of `scontrol show hostnames` (slurm.conf, "NodeName"; LLNL's hostlist). Numbers have as many digits
as the first number of their range. A name may have several brackets, anywhere; the leftmost bracket varies slowest.

Ranks are numbered in the list's order, which no library keeps. ClusterShell's NodeSet and python-hostlist sort the
names when they compress them, and NodeSet also when it expands a list. Both accept "" and ranges of any size. NodeSet
accepts "a[1-2-3]", but refuses the manual's rack[01-3]. python-hostlist is under the GPL.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

MAX_HOSTS = 65_536
"""Slurm's own limit for one range. A longer list is a mistake that would fill the memory."""
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,5})\))?", re.ASCII)
_NUMBER = re.compile(r"(.*?)(\d{1,18})(\D*)", re.ASCII | re.DOTALL)
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


class Allocation(NamedTuple):
    """The hosts that a scheduler has given to a job, in the scheduler's order, each with its number of ranks."""

    source: str
    """The environment variable or the file that lists the hosts."""
    text: str
    """The text of that variable or file."""
    hosts: tuple[tuple[str, int], ...]
    """Pairs (name, number of ranks)."""


def expand(text: str) -> list[str]:
    """Return a list's names, in order.

    Raises:
        ValueError: it is not a node list, or has more than MAX_HOSTS names.
    """
    names: list[str] = []
    for part in _parts(text):
        pieces = [_numbers(match[1]) if match[1] is not None else [match[2]] for match in _PIECE.finditer(part)]
        if math.prod(map(len, pieces)) + len(names) > MAX_HOSTS:
            raise ValueError(f"{text} has more than {MAX_HOSTS} names")
        names += ["".join(choice) for choice in itertools.product(*pieces)]
    return names


def _parts(text: str) -> Iterator[str]:
    """Split at commas outside of brackets, and check that each part consists of text and brackets."""
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        if not part or "".join(match[0] for match in _PIECE.finditer(part)) != part or part.isspace():
            raise ValueError(f"{part or text!r} is not a node list")
        yield part


def _numbers(inside: str) -> list[str]:
    """Expand the numbers and ranges in a bracket. The numbers of a range have as many digits as its first one."""
    found: list[str] = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(f"[{inside}] is not a list of numbers and ranges")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high - low + len(found) >= MAX_HOSTS:
            raise ValueError(f"{word} is not a range of at most {MAX_HOSTS} numbers, from low to high")
        found += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return found


def first(text: str) -> str:
    """Return a list's first name.

    >>> first("rack[2-3]node[1,4]-ib")
    'rack2node1-ib'
    """
    return expand(text)[0]


# ---- names to a list ----


class _Run(NamedTuple):
    """Consecutive names that differ only in one number, which counts up: gpu07-ib, gpu08-ib, gpu09-ib."""

    before: str
    """The text before the number."""
    after: str
    """The text after the number."""
    low: str
    """The first number, as text; empty for a name without a number."""
    high: str
    """The last number, as text."""

    def next(self, before: str, number: str, after: str) -> _Run | None:
        """Return the run with one more name, given in parts; None if the name does not continue the run."""
        wanted = str(int(self.high) + 1).zfill(len(self.low))
        return self._replace(high=number) if (before, after, number) == (self.before, self.after, wanted) else None


def compress(names: Sequence[str]) -> str:
    """Return a node list that expands to these names, in this order. Names that count up share brackets."""
    runs: list[_Run] = []
    for name in names:
        match = _NUMBER.fullmatch(name)
        before, number, after = match.groups() if match else (name, "", "")
        longer = runs[-1].next(before, number, after) if runs and number and runs[-1].low else None
        runs = [*runs[:-1], longer] if longer else [*runs, _Run(before, after, number, number)]
    groups = itertools.groupby(runs, key=lambda run: (run.before, run.after) if run.low else (run.before, None))
    return ",".join(text for key, group in groups for text in _written(list(group)))


def _written(runs: Sequence[_Run]) -> Iterator[str]:
    one = runs[0]
    if not one.low:
        yield from (run.before for run in runs)
    elif len(runs) == 1 and one.low == one.high:
        yield one.before + one.low + one.after
    else:
        ranges = (run.low if run.low == run.high else f"{run.low}-{run.high}" for run in runs)
        yield f"{one.before}[{','.join(ranges)}]{one.after}"


# ---- allocations ----


def tasks(text: str) -> list[int]:
    """Return the number of tasks on each node, from a text such as SLURM_TASKS_PER_NODE's 4(x2),3.

    Raises:
        ValueError: it is not such a list.
    """
    found: list[int] = []
    for word in text.split(","):
        match = _TASKS.fullmatch(word)
        if match is None:
            raise ValueError(f"cannot parse SLURM_TASKS_PER_NODE: {text!r} is not of the form 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def slurm_source(environ: Mapping[str, str]) -> str | None:
    """Return the variable with this Slurm job's nodes; None outside of a Slurm job."""
    return next((name for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)


def slurm(environ: Mapping[str, str]) -> Allocation:
    """Read this Slurm job's nodes. Untested on a cluster: it follows Slurm's manual.

    Raises:
        ValueError: this is not a Slurm job, or its variables contradict each other.
    """
    source = slurm_source(environ)
    if source is None:
        raise ValueError("SLURM_JOB_NODELIST is not set: this is not a Slurm job (sbatch or salloc starts one)")
    names, counts = expand(environ[source]), tasks(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(names) != len(counts):
        raise ValueError(f"{source} has {len(names)} nodes, but SLURM_TASKS_PER_NODE has {len(counts)}")
    return Allocation(source, environ[source], tuple(zip(names, counts, strict=True)))


def pbs(environ: Mapping[str, str]) -> Allocation:
    """Read this PBS job's nodes, whose file has one line per slot. Untested: it follows PBS's manual.

    Raises:
        ValueError: this is not a PBS job.
        OSError: its file cannot be read.
    """
    path = environ.get("PBS_NODEFILE")
    if not path:
        raise ValueError("PBS_NODEFILE is not set: this is not a PBS job (qsub starts one)")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    slots: dict[str, int] = {}
    for name in text.split():
        slots[name] = slots.get(name, 0) + 1
    return Allocation(path, text, tuple(slots.items()))


ALLOCATIONS = {"slurm": slurm, "pbs": pbs}
"""Functions that read an allocation, by scheduler. `--hostfile` may name a scheduler instead of a file."""


def is_inside(scheduler: str, environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in an allocation of that scheduler, even if the allocation cannot be read."""
    return slurm_source(environ) is not None if scheduler == "slurm" else bool(environ.get("PBS_NODEFILE"))


def find_allocation(environ: Mapping[str, str]) -> tuple[str, Allocation] | None:
    """Return the scheduler of this process (a key of ALLOCATIONS) and its allocation; None if none can be read."""
    for name, read in ALLOCATIONS.items():
        with contextlib.suppress(ValueError, OSError):
            return name, read(environ)
    return None
