"""Hang analysis: which rank holds the others up, by stacks that are written out here."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.watchdog.hang_analysis import RankStacks, find_blocking_rank, format_stacks

IN = 'Thread 0x01 (most recent call first):\n  File "site-packages/torch/distributed/c10d.py", line 3 in all_reduce\n'
OUT = 'Thread 0x01 (most recent call first):\n  File "data.py", line 9 in read\n  File "train.py", line 1 in main\n'
READS = 'Thread 0x01 (most recent call first):\n  File "engine.py", line 5 in norm\n'
"""Of a rank that reads a result from the accelerator, which waits for NCCL."""


@pytest.mark.parametrize(
    ("stacks", "steps", "rank", "why"),
    [
        ((IN, OUT, IN), (8, 8, 8), 1, "it is in read (data.py, line 9), while 2 of 3 ranks wait in a collective"),
        ((IN, IN, ""), (8, 8, 8), 2, "it is stopped, or deep in the kernel, while 2 of 3 ranks wait in a collective"),
        ((IN, IN, IN), (8, 7, 8), 1, "it is behind the others, in a collective: in all_reduce"),
        ((IN, IN, IN), (8, 8, 8), 0, "all ranks wait in a collective, though not in the same one"),
        ((OUT, OUT, IN), (8, 7, 8), 1, "it is in read (data.py, line 9), while 1 of 3"),
        (
            (READS, READS, OUT),
            (8, 8, 8),
            2,
            "it is in read (data.py, line 9), while 2 of 3 ranks are in norm (engine.py",
        ),
        ((READS, OUT, IN, READS), (8, 8, 8, 8), 1, "it is in read (data.py, line 9), while 1 of 4 ranks wait"),
    ],
)
def test_the_culprit(stacks: tuple[str, ...], steps: tuple[int, ...], rank: int, why: str) -> None:
    shown = [
        RankStacks(number, "", "", step, stack) for number, (stack, step) in enumerate(zip(stacks, steps, strict=True))
    ]
    who, words = find_blocking_rank(shown)
    assert who.rank == rank
    assert words.startswith(why)


def test_equal_stacks_are_shown_once(tmp_path: Path) -> None:
    """Those of 1,000 ranks would else be too long for a terminal, and for a line to `dslpar launch`."""
    other = IN.replace("0x01", "0x7f02")
    shown = [
        RankStacks(rank, f"rank {rank}", "", 8, (OUT if rank == 500 else (IN, other)[rank % 2])) for rank in range(1000)
    ]
    text = format_stacks(shown[500], shown)
    assert text.startswith(f"---- rank 500 ----\n{OUT}\n---- rank 0 ----\n---- rank 1 ----\n")
    assert text.endswith(f"---- rank 999 ----\n{IN.rstrip()}")
    assert text.count("most recent call first") == 2
    many = [RankStacks(rank, "", "", 8, f"{rank}" * 100_000) for rank in range(40)]
    assert len(format_stacks(many[0], many)) < 2**20 + 100
