"""Hang analysis: which of the ranks that wait for each other holds the others up, by where their stacks are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dslpar.watchdog import messages
from dslpar.watchdog.status_page import join_location

NO_STACK = "(no stack: the process is stopped, or deep in the kernel)"
_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|dslpar/distributed/collectives\.py")
_THREAD = re.compile(r"[Tt]hread 0x[0-9a-f]+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class RankStacks(NamedTuple):
    """A rank, where it is in its run, and the stacks of its threads."""

    rank: int
    who: str
    at: str
    step: int
    stacks: str

    @property
    def waits(self) -> bool:
        """Whether it waits in a call of torch.distributed, in any thread."""
        return bool(_COLLECTIVE.search(self.stacks))


def find_blocking_rank(ranks: Sequence[RankStacks]) -> tuple[RankStacks, str]:
    """Return the rank that holds the others up, and what shows it."""
    last_step = max(rank.step for rank in ranks)
    behind = [rank for rank in ranks if rank.step < last_step]
    elsewhere = [rank for rank in ranks if not rank.waits]
    if elsewhere:
        places = Counter(_innermost_frame(rank.stacks) for rank in elsewhere)
        first = min(elsewhere, key=lambda rank: (rank.step, places[_innermost_frame(rank.stacks)]))
        waiting = len(ranks) - len(elsewhere)
        others = f"{waiting} of {len(ranks)} ranks wait in a collective"
        if not waiting:  # as NCCL has it: a rank that reads a result waits for the accelerator
            usual, number = places.most_common(1)[0]
            others = f"{number} of {len(ranks)} ranks are {usual}"
        return first, f"it is {_innermost_frame(first.stacks)}, while {others}"
    if behind:
        return behind[0], f"it is behind the others, in a collective: {_innermost_frame(behind[0].stacks)}"
    return ranks[0], "all ranks wait in a collective, though not in the same one, or the network has lost it"


def format_stacks(first: RankStacks, ranks: Sequence[RankStacks]) -> str:
    """Return the stacks of all ranks, beginning with `first`; equal ones once, below the names of all who have them."""
    same: dict[str, list[RankStacks]] = {_THREAD.sub("Thread", first.stacks): []}
    for rank in ranks:
        same.setdefault(_THREAD.sub("Thread", rank.stacks), []).append(rank)
    names = ["\n".join(f"---- {join_location(rank.who, rank.at)} ----" for rank in group) for group in same.values()]
    texts = [f"{name}\n{group[0].stacks or NO_STACK}" for name, group in zip(names, same.values(), strict=True)]
    return messages.cut("\n".join(texts).rstrip())


def _innermost_frame(stacks: str) -> str:
    """Return where the main thread is, which faulthandler shows last."""
    main = stacks.rpartition("hread 0x")[2] if "hread 0x" in stacks else stacks
    frame = _FRAME.search(main)
    return f"in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else "stopped, or deep in the kernel"
