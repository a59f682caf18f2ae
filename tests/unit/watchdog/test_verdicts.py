"""Guards' verdicts on ranks: how a rank ended, and which hosts are silent."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dslpar.watchdog import verdicts
from dslpar.watchdog.marks import Rank
from dslpar.watchdog.peers import Peer
from dslpar.watchdog.status_page import Progress


def test_where_every_other_host_is_silent_it_may_be_ours() -> None:
    connection: Any = None
    peers = {rank: Peer(connection, rank, f"host{rank // 2}", 93.0) for rank in range(1, 8)}

    def others() -> str:
        return verdicts.other_silent_hosts("host0", "host1", list(peers.values()), now=100.0)

    peers[1].received_s = 100.0
    ours = ", so every host but host0, which may itself be the one that is cut off"
    assert others() == f", and of host2, host3{ours}"
    peers[7].received_s = 100.0
    assert others() == ", and of host2"
    peers[5].left = peers[4].left = True
    assert others() == ""


BY_ABORT = "by SIGABRT, which is also how NCCL's watchdog ends a rank that has lost a peer"


@pytest.mark.parametrize(
    ("status", "stack", "exited", "how"),
    [
        (
            signal.SIGKILL,
            "",
            False,
            "was the first to end, by SIGKILL: most often from the kernel's out-of-memory killer",
        ),
        (signal.SIGBUS, "", False, "was the first to end, by SIGBUS"),
        (signal.SIGABRT, "", False, f"was the first to end, {BY_ABORT}"),
        (signal.SIGABRT, "Fatal Python error: Aborted", False, f"crashed first, {BY_ABORT}"),
        (None, "Fatal Python error: Aborted", False, f"crashed first, {BY_ABORT}"),
        (signal.SIGABRT, "Fatal Python error: Aborted", True, "crashed first"),
        (signal.SIGSEGV, "Fatal Python error: Segmentation fault", False, "crashed first"),
        (3 << 8, "", False, "was the first to end, with status 3, by os._exit or C's exit"),
        (3 << 8, "", True, "was the first to end, by sys.exit, with status 3: it left in the middle of the run"),
        (None, "", False, "was the first to end, without a message: usually by SIGKILL"),
    ],
)
def test_how_a_rank_ended(status: int | None, stack: str, exited: bool, how: str) -> None:
    verdict = verdicts.of_death(Rank(1, 2, "host0", 7), "step 7", status, stack, exited=exited)
    assert verdict.how.startswith(how)
    assert verdict.signal == (signal.SIGABRT if "Aborted" in stack else (status or 0) & 0x7F)
    assert verdict.message().startswith(f"[rank 1 of 2 on host0, step 7] {how}")
    assert verdict.weak == (BY_ABORT in how)
    note = verdicts.held_note(7.1)
    assert verdict.message(note).startswith(f"[rank 1 of 2 on host0, step 7] {verdict.how} ({note})")


@pytest.mark.parametrize(
    ("status", "stack", "weak"),
    [
        (signal.SIGKILL, "", True),
        (None, "", True),
        (signal.SIGABRT, "", True),
        (signal.SIGSEGV, "", False),
        (None, "Fatal Python error: Segmentation fault", False),
        (3 << 8, "", False),
    ],
)
def test_who_is_killed_after_an_abort_is_not_the_cause(status: int | None, stack: str, weak: bool) -> None:
    rank = Rank(1, 2, "host0", 7)
    assert verdicts.of_death(rank, "", status, stack, exited=False, after_abort=True).weak == weak
    assert not verdicts.of_death(rank, "", status, stack, exited=True, after_abort=True).weak


def test_of_one_rank_there_is_no_better_cause() -> None:
    verdict = verdicts.of_death(Rank(0, 1, "host0", 7), "", signal.SIGABRT, "", exited=False)
    assert (verdict.weak, verdict.how) == (False, "was the first to end, by SIGABRT")


def test_a_silent_host_and_one_silent_rank() -> None:
    connection: Any = None
    peers = [Peer(connection, rank, f"host{rank // 2}", 93.0) for rank in range(1, 4)]
    own = Rank(0, 4, "host0", 7)
    failure = verdicts.of_silent_host(own, "host1", peers, Progress(phase="step", step=9), now=100.0)
    assert failure.host_lost
    assert failure.verdict is not None
    assert (failure.verdict.who.rank, failure.verdict.at) == (2, "step 9")
    assert "and with it all of host1 (ranks 2, 3): the host is gone, or cut off" in failure.verdict.how
    peers[2].received_s = 100.0
    alone = verdicts.of_silent_host(own, "host1", peers, Progress(), now=100.0)
    assert not alone.host_lost
    assert alone.verdict is not None
    assert alone.verdict.how == "is silent for 6 s, though its host is not"
