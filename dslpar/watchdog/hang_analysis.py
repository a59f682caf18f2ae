"""Hang analysis: which of the ranks that wait for each other holds the others up.

By their flight records, where torch keeps them (flight_recorder.py): the rank that has not come to a collective in
which its peers wait. Else by where their stacks are: a rank that is in no collective, while others are. With NCCL a
rank does not wait in its collective but later, where it reads a result from the device: it is not to blame either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dslpar.watchdog import flight_recorder, messages
from dslpar.watchdog.flight_recorder import GroupRecord
from dslpar.watchdog.status_page import join_location

NO_STACK = "(no stack: the process is stopped, or deep in the kernel)"
_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|dslpar/distributed/collectives\.py")
_READ = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
"""What waits for the device, in the source line of a frame: C functions have no frames of their own."""
_AUTOGRAD = "torch/autograd/graph.py"
"""Where the main thread is during a backward, which runs in a thread of its own on a GPU."""
_THREAD = re.compile(r"(?:[Cc]urrent t|T)hread 0x[0-9a-f]+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class RankStacks(NamedTuple):
    """A rank, where it is in its run, and what it has shown: the stacks of its threads, and its flight record."""

    rank: int
    who: str
    at: str
    step: int
    stacks: str

    @property
    def frames(self) -> str:
        """The stacks alone."""
        return self.stacks.partition(flight_recorder.HEADER)[0]

    @property
    def waits(self) -> bool:
        """Whether it waits in a call of torch.distributed, in any thread, or for the device."""
        return bool(_COLLECTIVE.search(self.frames)) or self.reads_device

    @property
    def reads_device(self) -> bool:
        """Whether the line that it is in waits for the device; as far as this host has the same source."""
        frame = _innermost_frame(self.frames)
        return frame is not None and bool(_READ.search(_source_line(frame[1], int(frame[2]))))


class _Wait(NamedTuple):
    """A rank that waits in a collective, and the peers that have not come to it."""

    rank: int
    group: str
    record: GroupRecord
    missing: list[int]


def find_blocking_rank(ranks: Sequence[RankStacks]) -> tuple[RankStacks, str]:
    """Return the rank that holds the others up, and what shows it."""
    if recorded := _by_flight_records(ranks):
        return recorded
    last_step = max(rank.step for rank in ranks)
    behind = [rank for rank in ranks if rank.step < last_step]
    elsewhere = [rank for rank in ranks if not rank.waits]
    if elsewhere:
        places = Counter(_place(rank.frames) for rank in elsewhere)
        first = min(elsewhere, key=lambda rank: (rank.step, places[_place(rank.frames)]))
        reading = sum(rank.reads_device for rank in ranks)
        waiting = len(ranks) - len(elsewhere) - reading
        said = [f"{waiting} of {len(ranks)} ranks wait in a collective"] if waiting else []
        said += [f"{reading} of {len(ranks)} ranks wait for the device"] if reading else []
        if not said:  # as NCCL has it too: a rank whose queue of kernels is full waits wherever it is
            usual, number = places.most_common(1)[0]
            said = [f"{number} of {len(ranks)} ranks are {usual}"]
        return first, f"it is {_place(first.frames)}, while {' and '.join(said)}"
    if behind:
        return behind[0], f"it is behind the others, in a collective: {_place(behind[0].frames)}"
    if any(rank.reads_device for rank in ranks):
        return ranks[0], "all ranks wait for the device: for a collective that not all have begun, or a kernel"
    return ranks[0], "all ranks wait in a collective, though not in the same one, or the network has lost it"


def _by_flight_records(ranks: Sequence[RankStacks]) -> tuple[RankStacks, str] | None:
    """Return the rank for which others wait and that waits for nobody, by their records; None where they do not tell.

    Ranks of a group number its collectives alike, so a rank that has enqueued fewer has not come to the others' yet.
    """
    records = {rank.rank: flight_recorder.parse(rank.stacks) for rank in ranks}
    by_number = {rank.rank: rank for rank in ranks}
    waits = [
        _Wait(number, group, record, _missing(records, group, record.done + 1))
        for number, groups in records.items()
        for group, record in groups.items()
        if record.waits_in
    ]
    held_up = [wait for wait in waits if wait.missing]
    if not held_up:
        return _by_mismatch(waits, by_number)
    waiting = {wait.rank for wait in held_up}
    to_blame = Counter(missing for wait in held_up for missing in wait.missing if missing not in waiting)
    if to_blame:
        first = by_number[min(to_blame, key=lambda number: (-to_blame[number], number))]
        peers = [wait for wait in held_up if first.rank in wait.missing]
        group, record = peers[0].group, peers[0].record
        number = sum(wait.group == group for wait in peers)
        what = f"{record.waits_in}, number {record.done + 1} of its group {record.name}, in which {number} of its peers"
        return first, f"it is {_place(first.frames)}, and has not come to {what} wait"
    one = held_up[0]
    other = next(wait for wait in held_up if wait.rank in one.missing)
    return by_number[one.rank], (
        f"ranks {one.rank} and {other.rank} wait for each other: {_in(one)}, and {_in(other)}; all ranks must take"
        " their collectives in one order"
    )


def _missing(records: dict[int, dict[str, GroupRecord]], group: str, number: int) -> list[int]:
    """Return the ranks of a group that have not enqueued its collective of that number."""
    return [rank for rank, groups in records.items() if group in groups and groups[group].enqueued < number]


def _by_mismatch(waits: Sequence[_Wait], by_number: dict[int, RankStacks]) -> tuple[RankStacks, str] | None:
    """Return a rank that is in another collective than its peers, under the same number of the same group."""
    for wait in waits:
        same = [other for other in waits if (other.group, other.record.done) == (wait.group, wait.record.done)]
        kinds = Counter(other.record.waits_in for other in same)
        if len(kinds) > 1:
            usual = kinds.most_common(1)[0][0]
            odd = next(other for other in reversed(same) if other.record.waits_in != usual)
            return by_number[odd.rank], f"it is in another collective than its peers: {_in(odd)}; they are in {usual}"
    return None


def _in(wait: _Wait) -> str:
    record = wait.record
    return f"rank {wait.rank} in {record.waits_in}, number {record.done + 1} of its group {record.name}"


def format_stacks(first: RankStacks, ranks: Sequence[RankStacks]) -> str:
    """Return the stacks of all ranks, beginning with `first`; equal ones once, below the names of all who have them.

    Of ranks with equal stacks, the flight record of the first: group by group they differ in torch's names at least.
    """
    same: dict[str, list[RankStacks]] = {_THREAD.sub("Thread", first.frames): [first]}
    for rank in ranks:
        if rank is not first:
            same.setdefault(_THREAD.sub("Thread", rank.frames), []).append(rank)
    in_order = [sorted(group, key=lambda rank: rank.rank) for group in same.values()]
    names = ["\n".join(f"---- {join_location(rank.who, rank.at)} ----" for rank in group) for group in in_order]
    texts = [f"{name}\n{group[0].stacks or NO_STACK}" for name, group in zip(names, same.values(), strict=True)]
    return messages.cut("\n".join(texts).rstrip())


def _place(stacks: str) -> str:
    """Return where a rank is."""
    frame = _innermost_frame(stacks)
    return f"in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else "stopped, or deep in the kernel"


def _innermost_frame(stacks: str) -> re.Match[str] | None:
    """Return the innermost frame of the main thread, which faulthandler shows last; in a backward, of the backward's.

    That is a thread which C++ has begun: those of Python begin in threading.py.
    """
    threads = [text for text in _THREAD.split(stacks) if text]
    frames = [list(_FRAME.finditer(text)) for text in threads] or [[]]
    main = frames[-1]
    if main and main[0][1].endswith(_AUTOGRAD):
        backwards = (one for one in frames[:-1] if one and not one[-1][1].endswith("threading.py"))
        main = next(backwards, main)
    return main[0] if main else None


def _source_line(path: str, number: int) -> str:
    """Return a line of source; empty where this host has no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return ""
    return lines[number - 1] if 0 < number <= len(lines) else ""
