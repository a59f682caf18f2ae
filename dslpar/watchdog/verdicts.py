"""Verdicts: guards' findings about ranks that were killed, are silent, or are lost with their host.

Such a rank cannot report by itself. A verdict is weak if a failure that is reported later may be its cause: after an
abort (SIGABRT), since NCCL's watchdog aborts a rank that lost a peer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from dslpar.watchdog import guard_messages
from dslpar.watchdog.marks import Rank, Verdict
from dslpar.watchdog.peers import SILENCE_S, Peer
from dslpar.watchdog.status_page import Progress

FATAL = "Fatal Python error"
"""The first words that faulthandler writes when Python crashes."""
_ABORTED = f"{FATAL}: Aborted"
_MAX_NAMES = 8


class EndReason(NamedTuple):
    """The reason for which a guard ends the job."""

    verdict: Verdict | None = None
    """The guard's verdict; None: the rank itself has reported its error."""
    host_lost: bool = False
    """Whether a host is gone, so that launchers may wait for it forever."""
    held_s: float = 0.0
    """Time for which a weak verdict was held back."""
    reporter: int = -1
    """The rank whose guard has reported the failure to the hub; -1: this guard has found it."""

    def first_failed(self, own: int) -> int:
        """Return the rank that failed, in the hub; `own`: the hub's rank."""
        if self.reporter >= 0:
            return self.reporter
        return self.verdict.who.rank if self.verdict is not None else own


def of_rank(rank: Rank, how: str, at: str, text: str = "", number: int = 0) -> Verdict:
    """Return a verdict about a rank, dated now. `number`: the signal that ended the rank."""
    return Verdict(rank._replace(pid=0), time.time(), how, guard_messages.cut(text), at, number)


def of_death(
    rank: Rank, at: str, status: int | None, stack: str, *, exited: bool, after_abort: bool = False
) -> Verdict:
    """Return the verdict about a rank that is gone without reporting an error.

    `status`: the rank's wait status, if it could still be read. `stack`: the text that faulthandler wrote. `exited`:
    the rank left by sys.exit, so that Python's exit hooks ran. `after_abort`: another rank had aborted before.
    Launchers then kill the other ranks.
    """
    # Not weak in a job of one rank, or if the rank left by sys.exit: then the cause cannot be elsewhere.
    weak = rank.world_size > 1 and not exited
    if weak and is_abort(status, stack):
        how = describe_abort(stack)
    elif weak and after_abort and is_kill(status) and FATAL not in stack:
        how = "was killed after another rank had aborted"
    else:
        weak, how = False, _describe_death(status, stack, exited=exited)
    number = signal.SIGABRT if is_abort(status, stack) else (status or 0) & 0x7F
    return of_rank(rank, how, at, stack.rstrip(), number)._replace(weak=weak)


def _describe_death(status: int | None, stack: str, *, exited: bool) -> str:
    code = "" if status is None else f", with status {status >> 8}"
    if FATAL in stack:
        return "crashed first"
    if exited:
        return f"was the first to end, by sys.exit{code}: it left in the middle of the run"
    if status is None:
        how = "was the first to end, without a message: usually by SIGKILL, usually from the kernel's "
        return how + "out-of-memory killer"
    if number := status & 0x7F:
        killer = ": most often from the kernel's out-of-memory killer" if number == signal.SIGKILL else ""
        return f"was the first to end, by {signal.Signals(number).name}{killer}"
    return f"was the first to end{code}, by os._exit or C's exit"


ORDER_UNKNOWN = "which rank ended first is unknown"
_CLAIMS = {"was the first to end": "ended", "left first": "left", "crashed first": "crashed"}
"""Claims about the order in which ranks ended, and what remains true of each if the order is unknown."""


def without_order(how: str) -> str:
    """Return how a rank failed, without the claim that it was the first.

    >>> without_order("was the first to end, by SIGKILL"), without_order("hangs")
    ('ended, by SIGKILL', 'hangs')
    """
    for claim, rest in _CLAIMS.items():
        if how.startswith(claim):
            return rest + how.removeprefix(claim)
    return how


def is_abort(status: int | None, stack: str) -> bool:
    """Return whether a rank ended by SIGABRT, according to its stack, or to its wait status if that is known."""
    return _ABORTED in stack or (status is not None and status & 0x7F == signal.SIGABRT)


def is_kill(status: int | None) -> bool:
    """Return whether SIGKILL ended a rank, or may have ended it because its wait status is unknown."""
    return status is None or status & 0x7F == signal.SIGKILL


def describe_abort(stack: str) -> str:
    """Describe a rank's abort, and why it is weak evidence."""
    how = "crashed first" if FATAL in stack else "was the first to end"
    return f"{how}, by SIGABRT, which is also how NCCL's watchdog ends a rank that has lost a peer"


def held_note(held_s: float) -> str:
    """Describe how long a weak verdict was held back."""
    return f"no better cause was known {held_s:.0f} s later"


def of_silent_hub(own: Rank, name: str, host: str, at: str) -> EndReason:
    """Return the verdict of rank `own`'s guard about rank 0, whose guard (the hub) has gone silent.

    `name`, `host`, `at`: rank 0's name, host, and last known stage and step.
    """
    how = f"is silent for {SILENCE_S:.0f} s, and with it the host {host}: gone, or cut off from {own.host}"
    return EndReason(of_rank(Rank(0, own.world_size, name.rpartition(" on ")[2], 0), how, at), host != own.host)


def of_silent_host(own: Rank, host: str, peers: Sequence[Peer], own_progress: Progress, now: float) -> EndReason:
    """Return the verdict of rank 0's guard about the ranks of a host that has gone silent.

    `own`: rank 0. `peers`: all other ranks' guards. The verdict names the host's first silent rank.
    """
    on_host = sorted((peer for peer in peers if peer.host == host), key=lambda peer: peer.rank)
    late = [peer for peer in on_host if now - peer.received_s > SILENCE_S / 2]
    first, whole = late[0], len(late) == len(on_host) and host != own.host
    rest = "though its host is not"
    if not first.is_connected:
        rest = "since its guard was killed, and the rank has started no other guard"
    if whole:
        ranks = _first_few([str(peer.rank) for peer in late])
        others = other_silent_hosts(own.host, host, peers, now)
        rest = f"and with it all of {host} (ranks {ranks}){others}: the host is gone, or cut off"
    how = f"is silent for {SILENCE_S:.0f} s, {rest}"
    at = last_seen(first.progress, own_progress)
    return EndReason(of_rank(Rank(first.rank, own.world_size, first.host, 0), how, at), whole)


def other_silent_hosts(own_host: str, host: str, peers: Sequence[Peer], now: float) -> str:
    """Name the other hosts that are silent too, besides `host`.

    If every host except `own_host` is silent, `own_host` itself may be cut off, and the text says so.
    """
    expected = {peer.host for peer in peers if not peer.left} - {own_host, host}
    heard = {peer.host for peer in peers if now - peer.received_s <= SILENCE_S / 2}
    if not (silent := sorted(expected - heard)):
        return ""
    ours = "" if expected & heard else f", so every host but {own_host}, which may itself be the one that is cut off"
    return f", and of {_first_few(silent)}{ours}"


def last_seen(progress: Progress, own: Progress) -> str:
    """Describe the stage and step of a silent rank.

    `progress`: what that rank last reported. `own`: the progress of this guard's rank. All ranks end a step together,
    so the two ranks are at most one step apart. With short steps, the last report may be many steps old, so the later
    of the two steps is used.
    """
    return (progress if progress.step >= own.step else own._replace(location=progress.location)).describe()


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
