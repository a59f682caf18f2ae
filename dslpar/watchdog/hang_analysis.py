"""Who of ranks that wait for each other holds the others up: from where their stacks say that each of them is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dslpar.watchdog.status_page import join_location

_LONGEST = 1 << 20
"""Characters of all stacks in a report."""
NO_STACK = "(no stack: the process is stopped, or deep in the kernel)"
_WAITS = re.compile(r"torch/distributed/|deepspeed/comm/|dslpar/comm\.py")
_THREAD = re.compile(r"[Tt]hread 0x[0-9a-f]+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Shown(NamedTuple):
    """A rank, and what it does."""

    rank: int
    who: str
    words: str
    step: int
    stacks: str

    @property
    def waits(self) -> bool:
        """Whether it is in a call of torch.distributed, in any thread."""
        return bool(_WAITS.search(self.stacks))


def culprit(shown: Sequence[Shown]) -> tuple[Shown, str]:
    """The rank that holds the others up, and why we think so."""
    behind = [one for one in shown if one.step < max(other.step for other in shown)]
    elsewhere = [one for one in shown if not one.waits]
    if elsewhere:
        places = Counter(_place(one.stacks) for one in elsewhere)
        first = min(elsewhere, key=lambda one: (one.step, places[_place(one.stacks)]))
        waiting = len(shown) - len(elsewhere)
        others = f"{waiting} of {len(shown)} ranks wait in a collective"
        if not waiting:  # as NCCL has it: whoever reads a result waits for the accelerator
            usual, number = places.most_common(1)[0]
            others = f"{number} of {len(shown)} ranks are {usual}"
        return first, f"it is {_place(first.stacks)}, while {others}"
    if behind:
        return behind[0], f"it is behind the others, in a collective: {_place(behind[0].stacks)}"
    return shown[0], "all ranks wait in a collective, though not in the same one, or the network has lost it"


def all_stacks(first: Shown, shown: Sequence[Shown]) -> str:
    """Those of all ranks, beginning with one's; equal ones once, below the names of all who have them."""
    same: dict[str, list[Shown]] = {_without_numbers(first.stacks): []}
    for one in shown:
        same.setdefault(_without_numbers(one.stacks), []).append(one)
    names = ["\n".join(f"---- {join_location(one.who, one.words)} ----" for one in those) for those in same.values()]
    texts = [f"{name}\n{those[0].stacks or NO_STACK}" for name, those in zip(names, same.values(), strict=True)]
    text = "\n".join(texts).rstrip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n(and as much again: cut here)"


def _without_numbers(stacks: str) -> str:
    return _THREAD.sub("Thread", stacks)


def _place(stacks: str) -> str:
    """The innermost frame of the main thread, which faulthandler shows last."""
    main = stacks.rpartition("hread 0x")[2] if "hread 0x" in stacks else stacks
    frame = _FRAME.search(main)
    return f"in {frame[3]} ({frame[1]}, line {frame[2]})" if frame else "stopped, or deep in the kernel"
