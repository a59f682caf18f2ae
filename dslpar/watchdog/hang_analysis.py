"""Hang analysis: find the rank that blocks a hanging job, from the stacks of all ranks.

The blocking rank is in no collective while other ranks wait in one. With NCCL a rank does not wait in its collective
but later, when it reads a result from the device, so a rank that reads from the device is not to blame either. If
several ranks are in no collective, torch's flight records (flight_recorder.py) show for which of these ranks the others
wait. If all ranks wait, the records show whether they wait for each other in a circle, or in different collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dslpar.watchdog import flight_recorder, guard_messages
from dslpar.watchdog.flight_recorder import GroupRecord
from dslpar.watchdog.status_page import join_location

NO_STACK = "(no stack: the process is stopped, or deep in the kernel)"
_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|dslpar/distributed/collectives\.py")
_READ = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
"""Calls that wait for the device, matched in a frame's source line, since C functions have no frames of their own."""
_AUTOGRAD = "torch/autograd/graph.py"
"""The main thread's innermost file during a backward pass. On a GPU, another thread runs the backward pass itself."""
_THREAD = re.compile(r"(?:[Cc]urrent t|T)hread 0x[0-9a-f]+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class RankStacks(NamedTuple):
    """A rank's name and progress, its flight record, and the stacks of its threads."""

    rank: int
    who: str
    """The rank's name, with its host."""
    at: str
    """The rank's stage and step, for people."""
    step: int
    stacks: str
    """The flight record, and then the stacks; empty if the rank wrote nothing."""

    @property
    def frames(self) -> str:
        """The stacks without the flight record."""
        return flight_recorder.split(self.stacks)[1]

    @property
    def waits(self) -> bool:
        """Return whether the rank waits in a call of torch.distributed, in any thread, or for the device."""
        return bool(_COLLECTIVE.search(self.frames)) or self.reads_device

    @property
    def reads_device(self) -> bool:
        """Return whether the rank's current source line waits for the device; False if the file is not on this host."""
        frame = _innermost_frame(self.frames)
        return frame is not None and bool(_READ.search(_source_line(frame[1], int(frame[2]))))


class _Wait(NamedTuple):
    """A rank that waits in a collective, and the peers that have not reached that collective."""

    rank: int
    group: str
    """torch's name of the process group."""
    record: GroupRecord
    missing: list[int]
    """The ranks of the group that have not reached the collective."""


def find_blocking_rank(ranks: Sequence[RankStacks]) -> tuple[RankStacks, str]:
    """Return the rank that holds the others up, and the evidence as text.

    The first of these that applies decides:

    1. Ranks whose stacks show that they do not wait: prefer one for which its peers wait, according to flight records.
    2. Ranks that wait for each other in a circle, according to flight records.
    3. A rank that is in another kind of collective than its peers, according to flight records.
    4. A rank that is at an earlier step than the others.
    5. The first rank, if all of the above fail.
    """
    waits = _waits(ranks)
    last_step = max(rank.step for rank in ranks)
    behind = [rank for rank in ranks if rank.step < last_step]
    elsewhere = [rank for rank in ranks if not rank.waits]
    if elsewhere:
        missed = {number for wait in waits for number in wait.missing}
        places = Counter(_place(rank.frames) for rank in elsewhere)
        candidates = [rank for rank in elsewhere if rank.rank in missed] or elsewhere
        first = min(candidates, key=lambda rank: (rank.step, places[_place(rank.frames)]))
        return first, f"it is {_place(first.frames)}, {_what_others_do(first, ranks, waits)}"
    by_records = _of_circle(ranks, waits) or _of_mismatch(ranks, waits)
    if by_records is not None:
        return by_records[0], by_records[1] + _different_calls(ranks)
    if behind:
        return behind[0], f"it is behind the others, in a collective: {_place(behind[0].frames)}"
    if any(rank.reads_device for rank in ranks):
        return ranks[0], "all ranks wait for the device: for a collective that not all have begun, or a kernel"
    return ranks[0], "all ranks wait in a collective, though not in the same one, or the network has lost it"


def _what_others_do(first: RankStacks, ranks: Sequence[RankStacks], waits: Sequence[_Wait]) -> str:
    peers = [wait for wait in waits if first.rank in wait.missing]
    if peers:
        group, record = peers[0].group, peers[0].record
        number = sum(wait.group == group for wait in peers)
        what = f"{record.waits_in}, number {record.done + 1} of its group {record.name}"
        return f"and has not reached {what}, in which {number} of its peers wait"
    reading = sum(rank.reads_device for rank in ranks)
    waiting = sum(rank.waits for rank in ranks) - reading
    said = [f"{waiting} of {len(ranks)} ranks wait in a collective"] if waiting else []
    said += [f"{reading} of {len(ranks)} ranks wait for the device"] if reading else []
    if not said:  # with NCCL: a rank whose kernel queue is full waits at any line
        usual, number = Counter(_place(rank.frames) for rank in ranks).most_common(1)[0]
        said = [f"{number} of {len(ranks)} ranks are {usual}"]
    return f"while {' and '.join(said)}"


def _waits(ranks: Sequence[RankStacks]) -> list[_Wait]:
    """Return each rank that waits in a collective, with the peers that it waits for, according to flight records.

    A collective has the same number on all ranks of its group. A rank that has enqueued fewer collectives than that
    number has not reached it yet.
    """
    records = {rank.rank: flight_recorder.parse(rank.stacks) for rank in ranks}
    return [
        _Wait(number, group, record, _missing(records, group, record.done + 1))
        for number, groups in records.items()
        for group, record in groups.items()
        if record.waits_in
    ]


def _missing(records: dict[int, dict[str, GroupRecord]], group: str, number: int) -> list[int]:
    """Return the ranks that have used a group, but have not yet enqueued the group's collective with this number."""
    return [rank for rank, groups in records.items() if group in groups and groups[group].enqueued < number]


def _of_circle(ranks: Sequence[RankStacks], waits: Sequence[_Wait]) -> tuple[RankStacks, str] | None:
    """Return the first rank of a circle of ranks that wait for each other, and the evidence; None without a circle.

    Such ranks call the collectives of several groups in different orders.
    """
    held_up = {wait.rank: wait for wait in reversed(waits) if wait.missing}
    for number in held_up:
        path = [number]
        while (following := held_up[path[-1]].missing[0]) in held_up and following not in path:
            path.append(following)
        if following in path:
            circle = sorted(path[path.index(following) :])
            said = ", ".join(_in(held_up[each]) for each in circle)
            named = " and ".join(map(str, circle))
            first = next(rank for rank in ranks if rank.rank == circle[0])
            return first, f"ranks {named} wait for each other: {said}; all ranks must take collectives in one order"
    return None


def _of_mismatch(ranks: Sequence[RankStacks], waits: Sequence[_Wait]) -> tuple[RankStacks, str] | None:
    """Return a rank that is in another kind of collective than most of its peers, and the evidence; None without one.

    The collectives that are compared have the same group and the same number.
    """
    for wait in waits:
        same = [other for other in waits if (other.group, other.record.done) == (wait.group, wait.record.done)]
        kinds = Counter(other.record.operation for other in same)
        if len(kinds) > 1:
            # Of equally frequent kinds, the usual one is that of the ranks that have gone on to a later step.
            steps = {rank.rank: rank.step for rank in ranks}
            usual = max(same, key=lambda each: (kinds[each.record.operation], steps[each.rank])).record.operation
            odd = next(other for other in reversed(same) if other.record.operation != usual)
            first = next(rank for rank in ranks if rank.rank == odd.rank)
            return first, f"its group takes different collectives: {_in(odd)}; others are in {usual}"
    return None


def _different_calls(ranks: Sequence[RankStacks]) -> str:
    """Describe ranks that are in calls of different steps, such as a save on rank 0 alone; empty if there are none."""
    earliest, latest = min(ranks, key=lambda rank: rank.step), max(ranks, key=lambda rank: rank.step)
    if earliest.step == latest.step:
        return ""
    calls = ", ".join(f"rank {rank.rank}: {_call(rank.at)}" for rank in (earliest, latest))
    return f"; ranks make different calls ({calls}), but all must make the same ones, save() too"


def _call(at: str) -> str:
    """Return what a rank does: "saving step 3" of its progress "stage 0 (...), saving step 3"."""
    return at.rpartition("), ")[2]


def _in(wait: _Wait) -> str:
    record = wait.record
    return f"rank {wait.rank} in {record.waits_in}, number {record.done + 1} of its group {record.name}"


def format_stacks(first: RankStacks, ranks: Sequence[RankStacks]) -> str:
    """Format all ranks' stacks, beginning with those of `first`.

    Equal stacks appear once, below the names of all ranks that have them. Only the first of these ranks shows its
    flight record, since records differ at least in torch's group names.
    """
    same: dict[str, list[RankStacks]] = {_THREAD.sub("Thread", first.frames): [first]}
    for rank in ranks:
        if rank is not first:
            same.setdefault(_THREAD.sub("Thread", rank.frames), []).append(rank)
    in_order = [sorted(group, key=lambda rank: rank.rank) for group in same.values()]
    names = ["\n".join(f"---- {join_location(rank.who, rank.at)} ----" for rank in group) for group in in_order]
    texts = [f"{name}\n{group[0].stacks or NO_STACK}" for name, group in zip(names, same.values(), strict=True)]
    return guard_messages.cut("\n".join(texts).rstrip())


def _place(stacks: str) -> str:
    """Describe the innermost frame of a rank's stacks."""
    frame = _innermost_frame(stacks)
    return f"in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else "stopped, or deep in the kernel"


def _innermost_frame(stacks: str) -> re.Match[str] | None:
    """Return the innermost frame of the main thread, or of the thread that runs a backward pass on a GPU.

    faulthandler shows the main thread last. C++ starts the thread of the backward pass. All other threads start in
    threading.py, which distinguishes them.
    """
    threads = [text for text in _THREAD.split(stacks) if text]
    frames = [list(_FRAME.finditer(text)) for text in threads] or [[]]
    main = frames[-1]
    if main and main[0][1].endswith(_AUTOGRAD):
        backwards = (one for one in frames[:-1] if one and not one[-1][1].endswith("threading.py"))
        main = next(backwards, main)
    return main[0] if main else None


def _source_line(path: str, number: int) -> str:
    """Return a source line; empty if this host has no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return ""
    return lines[number - 1] if 0 < number <= len(lines) else ""
