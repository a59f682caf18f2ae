"""Hang analysis: finds the rank that holds up the others, from stacks written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslpar.watchdog.flight_recorder import GroupRecord, format_entries, parse, split
from dslpar.watchdog.hang_analysis import RankStacks, find_blocking_rank, format_stacks

IN = 'Thread 0x01 (most recent call first):\n  File "site-packages/torch/distributed/c10d.py", line 3 in all_reduce\n'
OUT = 'Thread 0x01 (most recent call first):\n  File "data.py", line 9 in read\n  File "train.py", line 1 in main\n'
READS = 'Thread 0x01 (most recent call first):\n  File "engine.py", line 5 in norm\n'
"""The stack of a rank that reads a result from the accelerator, which waits for NCCL."""


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


# ---- by flight records ----


def entry(number: int, retired: bool, group: str = "7", operation: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """Return an entry as torch dumps it, with the fields that are read."""
    return {
        "process_group": [group, "tensor"],
        "collective_seq_id": number,
        "profiling_name": f"nccl:{operation}",
        "input_sizes": [[3, 4]],
        "input_dtypes": ["BFloat16"],
        "is_p2p": False,
        "retired": retired,
        "state": "started",
    } | more


def flight(*groups: tuple[str, int, int], operation: str = "all_reduce") -> str:
    """Return a rank's record with groups of (torch's name, enqueued, done)."""
    return format_entries(
        [
            entry(number, number <= done, group, operation)
            for group, enqueued, done in groups
            for number in range(max(1, done - 2), enqueued + 1)
        ]
    )


def test_a_record_of_torch_s_entries() -> None:
    sent = entry(9, False, is_p2p=True)
    entries = [sent, entry(4, True), entry(6, False, input_sizes=[[5]]), entry(5, False), entry(3, True, "8")]
    text = format_entries(entries)
    assert text.splitlines()[1:] == [
        "  tensor (group 7): 6 enqueued, 4 done; waits in all_reduce of [3, 4] BFloat16",
        "  tensor (group 8): 3 enqueued, 3 done",
        "",
    ]
    assert split(text + IN) == (text, IN)
    assert parse(text + IN)["7"] == GroupRecord("tensor", 6, 4, "all_reduce of [3, 4] BFloat16")
    assert format_entries([sent]) == ""
    assert parse("stacks alone") == {}


@pytest.mark.parametrize(
    ("ranks", "rank", "why"),
    [
        pytest.param(
            (flight(("7", 5, 4)) + IN, flight(("7", 4, 4)) + OUT, flight(("7", 5, 4)) + IN),
            1,
            "it is in read (data.py, line 9), and has not reached all_reduce of [3, 4] BFloat16, number 5 of its group"
            " tensor, in which 2 of its peers wait",
            id="one has not come",
        ),
        pytest.param(
            (flight(("a", 5, 4)) + IN, flight(("b", 2, 2)) + OUT, flight(("a", 4, 4)) + OUT),
            2,
            "and has not reached all_reduce",
            id="of two elsewhere, the one that is waited for",
        ),
        pytest.param(
            (flight(("a", 5, 4)) + IN, flight(("a", 4, 4)) + IN, OUT),
            2,
            "it is in read (data.py, line 9), while 2 of 3 ranks wait in a collective",
            id="1 waits by sends, which no record has",
        ),
        pytest.param(
            (flight(("a", 5, 4)) + IN, flight(("a", 4, 4), ("b", 3, 2)) + OUT),
            1,
            "it is in read (data.py, line 9), and has not reached all_reduce",
            id="it has a collective under way itself",
        ),
        pytest.param(
            (flight(("a", 5, 4), ("b", 2, 2)) + IN, flight(("a", 4, 4), ("b", 3, 2)) + IN),
            0,
            "ranks 0 and 1 wait for each other: rank 0 in all_reduce of [3, 4] BFloat16, number 5 of its group tensor,",
            id="in two orders",
        ),
        pytest.param(
            (
                flight(("a", 5, 4)) + IN,
                flight(("a", 4, 4), ("b", 3, 2), ("c", 1, 1)) + IN,
                flight(("b", 2, 2), ("c", 2, 1)) + IN,
            ),
            1,
            "ranks 1 and 2 wait for each other",
            id="a circle beside one that waits for it",
        ),
        pytest.param(
            (
                flight(("a", 5, 4), ("c", 2, 2)) + IN,
                flight(("a", 4, 4), ("b", 3, 2)) + IN,
                flight(("b", 2, 2), ("c", 3, 2)) + IN,
            ),
            0,
            "ranks 0 and 1 and 2 wait for each other",
            id="a circle of three",
        ),
        pytest.param(
            (flight(("a", 5, 4)) + IN, flight(("a", 5, 4)) + IN, flight(("a", 5, 4), operation="all_gather") + IN),
            2,
            "its group takes different collectives: rank 2 in all_gather of [3, 4] BFloat16, number 5",
            id="another collective",
        ),
        pytest.param((flight(("a", 5, 4)) + IN, flight(("a", 5, 4)) + IN), 0, "all ranks wait in a", id="lost"),
        pytest.param((flight(("a", 5, 5)) + IN, IN, flight(("a", 5, 5)) + IN), 0, "all ranks wait in a", id="none"),
    ],
)
def test_the_culprit_with_flight_records(ranks: tuple[str, ...], rank: int, why: str) -> None:
    who, words = find_blocking_rank([RankStacks(number, "", "", 8, text) for number, text in enumerate(ranks)])
    assert who.rank == rank
    assert why in words


@pytest.mark.parametrize("savers", [(0,), (0, 1)])
def test_a_save_on_some_ranks_alone_is_named(savers: tuple[int, ...]) -> None:
    saves, steps = flight(("a", 5, 4), operation="broadcast") + IN, flight(("a", 5, 4)) + IN
    ranks = [
        RankStacks(number, "", "stage 0 (data 0), saving step 3", 3, saves)
        if number in savers
        else RankStacks(number, "", "stage 0 (data 1), step 4", 4, steps)
        for number in range(2 * len(savers))
    ]
    who, words = find_blocking_rank(ranks)
    assert who.rank == savers[-1]
    assert f"rank {savers[-1]} in broadcast" in words
    assert f"ranks make different calls (rank 0: saving step 3, rank {len(savers)}: step 4)" in words


def test_uneven_pieces_are_no_other_collective() -> None:
    shapes = [flight(("a", 1, 0)), flight(("a", 1, 0)).replace("[3, 4]", "[4, 4]")]
    _, words = find_blocking_rank([RankStacks(number, "", "", 8, text + IN) for number, text in enumerate(shapes)])
    assert words.startswith("all ranks wait in a collective")


def reading(tmp_path: Path) -> str:
    """Return the stack of a rank that reads a result, in an existing source file."""
    source = tmp_path / "reads.py"
    source.write_text("def norm(x):\n    return x.sum().item()\n")
    return f'Thread 0x01 (most recent call first):\n  File "{source}", line 2 in norm\n'


def test_who_waits_for_the_device_is_not_to_blame(tmp_path: Path) -> None:
    stacks = [reading(tmp_path), reading(tmp_path), OUT]
    who, words = find_blocking_rank([RankStacks(number, "", "", 8, text) for number, text in enumerate(stacks)])
    assert (who.rank, words) == (2, "it is in read (data.py, line 9), while 2 of 3 ranks wait for the device")
    who, words = find_blocking_rank([RankStacks(number, "", "", 8, reading(tmp_path)) for number in range(2)])
    assert words == "all ranks wait for the device: for a collective that not all have begun, or a kernel"


def test_of_a_backward_the_thread_counts_that_runs_it() -> None:
    backward = (
        'Thread 0x03 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 9 in wait\n'
        '  File "/usr/lib/python3.11/threading.py", line 1 in _bootstrap\n\n'
        'Thread 0x02 (most recent call first):\n  File "mine.py", line 7 in slow_backward\n'
        '  File "torch/autograd/function.py", line 3 in apply\n\n'
        "Current thread 0x01 (most recent call first):\n"
        '  File "torch/autograd/graph.py", line 5 in _engine_run_backward\n'
    )
    who, words = find_blocking_rank([RankStacks(0, "", "", 8, IN), RankStacks(1, "", "", 8, backward)])
    assert (who.rank, words.partition(",")[0]) == (1, "it is in slow_backward (mine.py")


# ---- the report ----


def test_equal_stacks_are_shown_once(tmp_path: Path) -> None:
    """Otherwise the stacks of 1,000 ranks would be too long for a terminal, and for a line to `dslpar launch`."""
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
