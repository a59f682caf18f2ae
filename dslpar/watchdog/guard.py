"""The guard of a rank: a small process beside it, which sees what a rank that hangs or is gone cannot say.

A rank starts it (rank_monitor.py) before torch is there; it is a child of the rank, holds no memory to speak of, and
leaves with it. What a thread of the rank could not do, it does: beat while the rank holds Python's lock for minutes,
ask for the rank's stacks while it hangs in C, tell that it was killed and by which signal, and end it in any case.

Rank 0's guard is the hub of the job: the others connect to it once the ranks have met, and beat once a second.

    a rank failed, or is gone       its guard tells the hub, the hub all others: each ends its rank at once
    a rank has aborted              NCCL's watchdog does so to a rank that has lost a peer, and the cause is elsewhere:
                                    its guard ends the job HELD_BACK_S later, unless a better cause is told before
    a host is gone                  the hub has heard nothing from there for SILENCE_S; over there, they of the hub;
                                    launchers that wait for it are ended too (orphans.py)
    no step within the time-out     the hub asks all guards for the stacks of their ranks, and says who holds them up
    SIGTERM                         is seen here at once (`signal.set_wakeup_fd`); past the grace the rank is ended

It is a state machine: what an event does depends on what is known of the job. Beside the states, two clocks run against
the rank alone (rank_process.py). This table is TRANSITIONS below: the action, and the next state where it is another.

    event             WATCHING                      COLLECTING              HOLDING           ENDING                GONE
    JOB_FAILED        pass_on -> ENDING             pass_on -> ENDING       pass_on -> GONE   -                     -
    JOB_ENDS          end_rank -> ENDING            end_rank -> ENDING      end_rank -> GONE  end_rank              -
    RANK_GONE         report_death -> GONE          report_death -> GONE    -                 report_death -> GONE  -
    RANK_ABORTED      hold_back -> HOLDING          hold_back -> HOLDING    -                 -                     -
    PEER_ABORTED      note_abort                    note_abort -> WATCHING  -                 -                     -
    HOLD_OVER         -                             -                       end_held -> GONE  -                     -
    HOST_SILENT       end_job -> ENDING             end_job -> ENDING       end_job -> GONE   -                     -
    HUB_UNREACHABLE   warn                          warn                    -                 -                     -
    RANK_STUCK        report_stuck                  -                       -                 -                     -
    STACKS_WANTED     collect_stacks -> COLLECTING  -                       -                 -                     -
    STACKS_COLLECTED  -                             blame -> ENDING         -                 -                     -
    SHOW_STACKS       show_stacks                   show_stacks             -                 show_stacks           -
    SIGTERM_RECEIVED  start_grace                   start_grace             -                 start_grace           -
    GRACE_OVER        end_overdue                   end_overdue             -                 end_overdue           -
    KILL_DUE          kill_rank                     kill_rank               -                 kill_rank             -
    STOP_ORDERED      signal_rank                   signal_rank             -                 signal_rank           -
    LAUNCH_LOST       end_orphan                    end_orphan              -                 end_orphan            -

A guard that was itself held up (a machine that swaps, a virtual one that moves) takes that time off before it accuses
anybody. That hang detection belongs in a process of its own is how NVIDIA's resiliency extension has it; stacks of all
ranks, and who is not in the collective that the others wait in, is what PyTorch's flight recorder is read for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from dslpar.core.visible import visible_lines
from dslpar.watchdog import marks, messages, orphans, protocol, verdicts
from dslpar.watchdog.hang_analysis import RankStacks, find_blocking_rank, format_stacks
from dslpar.watchdog.marks import Rank, Report, Stopped, Verdict
from dslpar.watchdog.messages import Message
from dslpar.watchdog.peers import BEAT_S, HELD_BACK_S, SILENCE_S, Hub, HubLink, LaunchLink
from dslpar.watchdog.protocol import Connection, Poller
from dslpar.watchdog.rank_process import STOPS, RankProcess, Settings
from dslpar.watchdog.status_page import TOO_LATE, Ending, Progress, join_location, rank_name
from dslpar.watchdog.verdicts import Failure

SETTINGS = "DSLPAR_GUARD"
"""The variable that tells a guard what it guards: command lines are for all to see, and tokens are not."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Signals to the group of a rank, which are not for its guard."""
_POLL_S = 0.1
_EARLY_S = 0.25
"""After which a rank that has come to another part of its work beats again."""
_PAUSE_S = 2.0
"""A pause of our own that is not held against others."""
_LAUNCHERS_S = 2.0
"""How long launchers have to end by themselves when a host and our rank are gone."""
_COLLECT_S = 3.0
"""In which ranks must have shown their stacks."""


class State(Enum):
    """What the guard knows of the job."""

    WATCHING = auto()
    """Nothing is wrong."""
    COLLECTING = auto()
    """A rank is stuck; all guards are asked for stacks. The hub alone, or a guard that never met it."""
    HOLDING = auto()
    """The rank is gone, and most likely for a cause that is elsewhere: that is waited for."""
    ENDING = auto()
    """The job has failed; the rank has been told to end."""
    GONE = auto()
    """The rank is gone, and the guard leaves."""


class Event(Enum):
    """What happens to a guard."""

    JOB_FAILED = auto()
    """This rank has failed; or another has, says its guard, to the hub."""
    JOB_ENDS = auto()
    """The hub says so."""
    RANK_GONE = auto()
    RANK_ABORTED = auto()
    """The rank is gone, by an abort; or it was killed after another's."""
    PEER_ABORTED = auto()
    """Another rank has aborted, says its guard to the hub, and the hub to all."""
    HOLD_OVER = auto()
    """No better cause than the abort was told in time, or nobody is left to tell one."""
    HOST_SILENT = auto()
    """The hub has heard nothing from a host, or another guard nothing from the hub."""
    HUB_UNREACHABLE = auto()
    """The hub could never be connected to."""
    RANK_STUCK = auto()
    """This rank stays in one place longer than it may."""
    STACKS_WANTED = auto()
    """Some rank is stuck, and this guard is to find out why."""
    STACKS_COLLECTED = auto()
    """All guards have shown the stacks of their ranks, or time is up."""
    SHOW_STACKS = auto()
    """The hub asks for the stacks of this rank."""
    SIGTERM_RECEIVED = auto()
    """The rank was told to stop, and stops in order."""
    GRACE_OVER = auto()
    """It has not stopped in time."""
    KILL_DUE = auto()
    """It was to end by its own hand, and has not."""
    STOP_ORDERED = auto()
    """`dslpar launch` has a signal for the rank."""
    LAUNCH_LOST = auto()
    """`dslpar launch` is gone."""


class Guard:
    """One rank's. A class, since it holds what has happened so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.rank = settings, RankProcess(settings)
        self.state = State.WATCHING
        self.now = self._ticked_s = time.monotonic()
        self.poller = Poller()
        self.hub = Hub(self.poller, self._greet, self._handle_peer, self._log) if settings.rank == 0 else None
        self.link = HubLink(self.poller, settings.secret, settings.rank, self._handle_hub)
        """To the hub, where this is not the hub itself."""
        self.launch = LaunchLink(self.poller, settings.launch, settings.secret, settings.rank, self._handle_launch)
        """To `dslpar launch`, where that is on another host."""
        self.host_lost = False
        """Whether a host is gone, and launchers may wait for it for ever."""
        self.launchers: Sequence[orphans.Process] = ()
        self._beat_s, self._beat_progress = 0.0, Progress()
        self._collecting_since_s, self._stuck = 0.0, ""
        self._pidfd = -1
        """Of the rank; -1: there is none on an old kernel, and _tick looks."""
        self._end_noticed = False
        self._held: Verdict | None = None
        """What is held back, and since when."""
        self._held_since_s = 0.0
        self._stops: set[int] = set()
        """Signals that `dslpar launch` has ordered."""

    # ---- the loop ----

    def run(self) -> None:
        """Watch until the rank is gone and what is to be said is said."""
        self._open()
        while self.state is not State.GONE:
            self.poller.poll(_POLL_S)
            self._tick()
        self._leave()

    def handle(self, event: Event, *details: object) -> None:
        """Take the event's action in this state, then go to the next. An action may itself cause an event."""
        self.now = time.monotonic()  # what is heard just after a pause of ours must not set clocks that have run out
        transition = TRANSITIONS[event].get(self.state)
        if transition is not None:
            transition.action(self, *details)
            self.state = transition.next or self.state

    def _open(self) -> None:
        self.launchers = orphans.launchers_of(self.settings.pid)  # while the rank lives: nobody knows later
        with contextlib.suppress(OSError, AttributeError):  # an old kernel; then _tick notices
            self._pidfd = os.pidfd_open(self.settings.pid)
            self.poller.watch(self._pidfd, self._notice_end)
        self.poller.watch(self.settings.signals, self._read_signals)
        if self.rank.page.ending:  # an earlier guard was killed in the middle of it
            self.rank.end(self.rank.page.ending, self.now)
        if self.hub is not None and self.settings.world_size > 1:
            self.rank.page.port = self._listen(self.hub)
        self.launch.connect()

    def _listen(self, hub: Hub) -> int:
        """Open the hub's server, at the port of an earlier guard of this rank, where the others look for it."""
        settings = self.settings
        listen = partial(hub.listen, settings.secret, settings.world_size, loopback=settings.loopback)
        try:
            return listen(port=self.rank.page.port)
        except OSError:
            return listen()

    def _tick(self) -> None:
        """Do what time brings."""
        self.now = time.monotonic()
        paused_s, self._ticked_s = self.now - self._ticked_s, self.now
        if paused_s > _PAUSE_S:
            self._forgive(paused_s)
        if self.rank.is_gone():
            self._notice_end()
        if self.hub is not None and self.hub.server is not None:
            self.hub.server.expire()
        if self.launch.is_lost(self.now):
            self.handle(Event.LAUNCH_LOST)
        self._relay_marks()
        if self.now > self.rank.stop_deadline_s:
            self.handle(Event.GRACE_OVER)
        if self.now > self.rank.kill_deadline_s:
            self.handle(Event.KILL_DUE)
        self._connect_to_hub()
        self._beat()
        self._look_for_silence()
        if (stuck := self.rank.stuck(self.now)) and not self.rank.page.abort_seen:
            self.handle(Event.RANK_STUCK, stuck)
        if self.state is State.COLLECTING and self._has_all_stacks():
            self.handle(Event.STACKS_COLLECTED)
        if self.state is State.HOLDING and self._is_hold_over():
            self.handle(Event.HOLD_OVER)

    def _notice_end(self) -> None:
        """Find out how the rank has ended, once and at once: its wait status is there until its parent takes it."""
        if self._end_noticed:
            return
        self._end_noticed = True
        self.poller.unwatch(self._pidfd)  # it could be read from now on for ever
        verdict = self._judge_death()
        self.handle(Event.RANK_ABORTED if verdict is not None and verdict.weak else Event.RANK_GONE, verdict)

    def _judge_death(self) -> Verdict | None:
        """Return the verdict about a rank that is gone; None: it ended in order, as it was to, or has said why."""
        rank, status = self.rank, self.rank.wait_status()
        self._relay_marks()  # its last mark may have come since the last tick, and says how it ended
        told = rank.page.ending or self.state is State.ENDING or rank.has_marked("error") or status in STOPS
        exited, stack = rank.has_marked("ended"), rank.read("stack")
        stopping = status is None and stack and verdicts.FATAL not in stack  # it was at SIGTERM that it wrote it
        if told or stopping or rank.ended_in_order():
            return None
        at, after_abort = rank.page.progress().describe(), rank.page.abort_seen
        return verdicts.of_death(rank.who, at, status, stack, exited=exited, after_abort=after_abort)

    def _is_hold_over(self) -> bool:
        """Whether what is held back was held for long enough, or all others have left."""
        peers = self.hub.peers.values() if self.hub else ()
        all_left = len(peers) == self.settings.world_size - 1 and all(peer.left for peer in peers)
        return self.now - self._held_since_s > HELD_BACK_S or self.link.left or all_left

    def _forgive(self, paused_s: float) -> None:
        """Whoever was silent while we slept may have spoken; and our rank may have slept as well."""
        if self.link.received_s:  # 0: it was not met yet, and may take its time
            self.link.received_s = min(self.now, self.link.received_s + paused_s)
        self.link.wanted_s += paused_s if self.link.wanted_s else 0
        self._held_since_s = min(self.now, self._held_since_s + paused_s)
        self.rank.forgive(paused_s)
        for peer in self.hub.peers.values() if self.hub else ():
            peer.received_s = min(self.now, peer.received_s + paused_s)

    def _relay_marks(self) -> None:
        """Bring the rank's new marks to `dslpar launch`, if it is elsewhere; a failure is an event as well."""
        for name, text in self.rank.new_marks():
            self.launch.send_mark(f"{self.settings.rank}.{name}", text)
            mark = marks.parse(name, text)
            if isinstance(mark, Report) and mark.kind == "cause":
                self.handle(Event.JOB_FAILED, Failure())

    def _read_signals(self) -> None:
        """Read the numbers of signals that have come to the rank."""
        numbers = os.read(self.settings.signals, 64)
        if not numbers:
            self.poller.unwatch(self.settings.signals)
        if signal.SIGTERM in numbers and self.rank.page.grace_s:
            for _ in range(numbers.count(signal.SIGTERM)):
                self.handle(Event.SIGTERM_RECEIVED)

    def _beat(self) -> None:
        """Say where the rank is, once a second, and sooner when it comes to another part of its work."""
        progress = self.rank.page.progress()
        moved = progress[:2] != self._beat_progress[:2]
        if self.now - self._beat_s < (_EARLY_S if moved else BEAT_S):
            for connection in self._connections():
                connection.flush()
            return
        self._beat_s, self._beat_progress = self.now, progress
        for connection in self._connections():
            connection.send({"at": progress[:3]})

    def _connections(self) -> Iterator[Connection]:
        links = (self.link.connection, self.launch.connection)
        yield from (connection for connection in links if connection is not None)
        yield from (peer.connection for peer in (self.hub.peers.values() if self.hub else ()))

    def _look_for_silence(self) -> None:
        own = self.rank.page.progress()
        # For an abort mpirun kills the other ranks, and their guards with them: their hosts are not gone, and the abort
        # is to be told first.
        closed_s = SILENCE_S + (HELD_BACK_S if self.rank.page.abort_seen else 0)
        if self.hub is not None:
            if host := self.hub.silent_host(self.now, closed_s):
                peers = list(self.hub.peers.values())
                self.handle(Event.HOST_SILENT, verdicts.of_silent_host(self.rank.who, host, peers, own, self.now))
        elif self.link.was_never_met(self.now):
            self.handle(Event.HUB_UNREACHABLE)
        elif self.link.is_silent(self.now, closed_s):
            host = self.link.host or self.rank.page.hub.rsplit(":", 2)[0]
            name = self.link.name or rank_name(0, self.settings.world_size, host)
            at = verdicts.last_seen(self.link.progress, own)
            self.handle(Event.HOST_SILENT, verdicts.of_silent_hub(self.rank.who, name, host, at))

    def _has_all_stacks(self) -> bool:
        """Whether all have shown their stacks, or time is up."""
        peers = self.hub.peers.values() if self.hub else ()
        waiting = any(peer.stacks is None and not peer.left for peer in peers)
        return not waiting or self.now - self._collecting_since_s >= _COLLECT_S

    # ---- messages ----

    def _at(self) -> tuple[str, str, int]:
        return self.rank.page.progress()[:3]

    def _greet(self) -> Message:
        """What the hub answers a guard's hello."""
        end = {"end": True, "host_lost": self.host_lost} if self.state is State.ENDING else {}
        return {**self._hello(), **end}

    def _hello(self) -> Message:
        """What a guard says first: who it is, and that a rank has aborted, of which the other may not have heard."""
        aborted = {"aborted": True} if self.rank.page.abort_seen else {}
        return {"who": str(self.rank.who), "host": self.settings.host, "at": self._at(), **aborted}

    def _handle_peer(self, message: Message) -> None:
        if message.get("failed"):
            self.handle(Event.JOB_FAILED, Failure())
        if message.get("aborted"):
            self.handle(Event.PEER_ABORTED)
        if "stuck" in message and not self.rank.page.abort_seen:
            self.handle(Event.STACKS_WANTED, message["stuck"])

    def _handle_hub(self, message: Message) -> None:
        if message.get("end"):
            self.handle(Event.JOB_ENDS, message.get("host_lost", False))
        if message.get("aborted"):
            self.handle(Event.PEER_ABORTED)
        if message.get("show"):
            self.handle(Event.SHOW_STACKS)
        if message.get("bye"):
            self.rank.page.rank_0_left = True

    def _handle_launch(self, message: Message) -> None:
        if "stop" in message and message["stop"] not in self._stops:  # told again where the connection was lost
            self._stops.add(message["stop"])
            self.handle(Event.STOP_ORDERED, message["stop"])

    def _connect_to_hub(self) -> None:
        """Connect once the rank has said where the hub is."""
        if self.hub is None:
            self.link.connect(self.rank.page.hub, self._hello(), self.now)

    # ---- actions ----

    def pass_on(self, failure: Failure) -> None:
        """Tell the hub, which tells all others; the hub itself, or a guard that never met it, ends the job."""
        self.link.tried_s = 0.0  # at once, though it may have been tried just now
        self._connect_to_hub()  # if it has not yet
        self.link.complete(SILENCE_S)  # of a hub that is there, and busy
        if self.link.connection is None:
            self.end_job(failure)
        else:
            self._publish(failure)
            self.link.connection.send({"failed": True})
            self.rank.end(Ending.JOB_FAILED, self.now)

    def end_job(self, failure: Failure) -> None:
        """Say why, and end all ranks that this guard can tell."""
        self.host_lost = failure.host_lost
        self._publish(failure)
        if self.hub is not None:
            self.hub.broadcast({"end": True, "host_lost": self.host_lost})
        self.rank.end(Ending.JOB_FAILED, self.now)

    def _publish(self, failure: Failure) -> None:
        """A verdict is told once, by the guard that found it: to `dslpar launch`, or else on the terminal."""
        if (verdict := failure.verdict) is None:
            return
        self._mark(verdict)
        out_of_reach = self.settings.launch and self.launch.connection is None
        if not self.settings.supervised or out_of_reach:  # nobody else says it
            _write(verdict.message(verdicts.held_note(failure.held_s) if verdict.weak else ""))

    def _mark(self, verdict: Verdict) -> None:
        """Leave the mark of a verdict, here and at `dslpar launch`."""
        name, text = f"{verdict.who.rank}.verdict", json.dumps(verdict)
        self.launch.send_mark(name, text)
        with contextlib.suppress(OSError):
            marks.write(self.rank.folder, name, text)

    def end_rank(self, host_lost: bool) -> None:
        """End the rank, since the hub says that the job ends."""
        self.host_lost = host_lost
        self.rank.end(Ending.JOB_FAILED, self.now)

    def report_death(self, verdict: Verdict | None) -> None:
        """Fail the job, unless the rank ended in order or as was to be expected; say of one that was OVERDUE that it
        stopped.
        """
        rank, progress = self.rank, self.rank.page.progress()
        if rank.page.ending is Ending.OVERDUE and not rank.ended_in_order():
            text = json.dumps(Stopped(progress.step, "", rank.page.status, overdue=True))
            rank.leave_stopped(text)
            self.launch.send_mark(f"{self.settings.rank}.stopped", text)
            _write(f"[{join_location(rank.who, progress.describe())}] {TOO_LATE}\n")
        if verdict is not None:
            self.handle(Event.JOB_FAILED, Failure(verdict))

    def hold_back(self, verdict: Verdict) -> None:
        """Wait for a better cause. `dslpar launch` knows at once, and waits as well: this guard may be killed."""
        self._held, self._held_since_s = verdict, self.now
        self._mark(verdict)
        if self.link.connection is not None:
            self.link.connection.send({"aborted": True})
        self.note_abort()

    def note_abort(self) -> None:
        """Remember that some rank has aborted, and have all guards do so. Ranks that lose it as a peer wait longer for
        their end; one that a launcher kills for it is not to blame, and none is said to hang that only waits for it.
        """
        if self.hub is not None and not self.rank.page.abort_seen:
            self.hub.broadcast({"aborted": True})
        self.rank.page.abort_seen = True

    def end_held(self) -> None:
        """End the job for what was held back: no better cause was told."""
        self.pass_on(Failure(self._held, held_s=self.now - self._held_since_s))

    def warn(self) -> None:
        """Not a reason to end a job: training may go by another network, or by ports that are open."""
        if not self.link.unreachable:
            self.link.unreachable = True
            hub = self.rank.page.hub.rpartition(":")[0]
            self._log(f"cannot reach the guard of rank 0 at {hub}: faults elsewhere are not told here")

    def report_stuck(self, reason: str) -> None:
        """Tell the hub that the rank is stuck; without one, or when rank 0 has left in order, find out alone."""
        if self.link.connection is None or self.link.left:
            self.handle(Event.STACKS_WANTED, reason)
        else:
            self.link.connection.send({"stuck": reason})

    def collect_stacks(self, reason: str) -> None:
        """Ask all guards for the stacks of their ranks."""
        self._collecting_since_s, self._stuck = self.now, reason
        if self.hub is not None:
            self.hub.broadcast({"show": True})

    def blame(self) -> None:
        """Say who holds the others up, and end the job."""
        who, progress = self.rank.who, self.rank.page.progress()
        ranks = [RankStacks(who.rank, str(who), progress.describe(), progress.step, self.rank.stacks())]
        for peer in self.hub.peers.values() if self.hub else ():
            if not peer.left:
                name, at = rank_name(peer.rank, who.world_size, peer.host), peer.progress
                ranks.append(RankStacks(peer.rank, name, at.describe(), at.step, peer.stacks or ""))
        ranks.sort(key=lambda rank: rank.rank)
        blocking, reason = find_blocking_rank(ranks)
        host = blocking.who.rpartition(" on ")[2]
        how = f"hangs ({self._stuck}); {reason}"
        text = format_stacks(blocking, ranks)
        self.end_job(Failure(verdicts.of_rank(Rank(blocking.rank, who.world_size, host, 0), how, blocking.at, text)))

    def show_stacks(self) -> None:
        """Send the hub the stacks of the rank."""
        if self.link.connection is not None:
            self.link.connection.send({"stacks": messages.cut(self.rank.stacks()), "at": self._at()})

    def start_grace(self) -> None:
        """Start the clock of a rank that is to stop."""
        self.rank.start_grace(self.now)

    def end_overdue(self) -> None:
        """End a rank that has not stopped in time."""
        self.rank.end_overdue(self.now)

    def kill_rank(self) -> None:
        """Kill a rank that does not end by its own hand."""
        self.rank.kill(self.now)

    def signal_rank(self, number: int) -> None:
        """Send the rank a signal of `dslpar launch`."""
        self.rank.send_signal(number)

    def end_orphan(self) -> None:
        """End a rank that nobody supervises: in order, where it can, and once."""
        self._log("ends because `dslpar launch` is gone")
        if not self.rank.page.grace_s:
            self.rank.end(Ending.ORPHANED, self.now)
        elif self.rank.stop_deadline_s == float("inf"):
            self.rank.send_signal(signal.SIGTERM)

    def _log(self, text: str) -> None:
        _write(f"[{self.rank.who}] {text}\n")

    # ---- the end ----

    def _leave(self) -> None:
        if self.hub is not None:
            self.hub.broadcast({"bye": True})
        if self.link.connection is not None:
            self.link.connection.send({"bye": True})
        for connection in self._connections():
            connection.finish()
        if self.settings.private:
            shutil.rmtree(self.rank.folder, ignore_errors=True)
        if self.host_lost and self.launchers and not os.fork():  # DeepSpeed's launcher waits for us before it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # OpenMPI's for the end of what its ranks say
            orphans.end(self.launchers, _LAUNCHERS_S)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, visible_lines(text).encode())


class Transition(NamedTuple):
    """What an event does in a state."""

    action: Callable[..., None]
    next: State | None = None
    """None: the same."""


_Row = dict[State, Transition]


def _in(states: Sequence[State], action: Callable[..., None], next_state: State | None = None) -> _Row:
    return {state: Transition(action, next_state) for state in states}


_UNDECIDED = (State.WATCHING, State.COLLECTING)
_ALIVE = (*_UNDECIDED, State.ENDING)
_HELD = (State.HOLDING,)
TRANSITIONS: Mapping[Event, _Row] = {
    Event.JOB_FAILED: _in(_UNDECIDED, Guard.pass_on, State.ENDING) | _in(_HELD, Guard.pass_on, State.GONE),
    Event.JOB_ENDS: _in(_ALIVE, Guard.end_rank, State.ENDING) | _in(_HELD, Guard.end_rank, State.GONE),
    Event.RANK_GONE: _in(_ALIVE, Guard.report_death, State.GONE),
    Event.RANK_ABORTED: _in(_UNDECIDED, Guard.hold_back, State.HOLDING),
    Event.PEER_ABORTED: _in([State.WATCHING], Guard.note_abort)
    | _in([State.COLLECTING], Guard.note_abort, State.WATCHING),
    Event.HOLD_OVER: _in(_HELD, Guard.end_held, State.GONE),
    Event.HOST_SILENT: _in(_UNDECIDED, Guard.end_job, State.ENDING) | _in(_HELD, Guard.end_job, State.GONE),
    Event.HUB_UNREACHABLE: _in(_UNDECIDED, Guard.warn),
    Event.RANK_STUCK: _in([State.WATCHING], Guard.report_stuck),
    Event.STACKS_WANTED: _in([State.WATCHING], Guard.collect_stacks, State.COLLECTING),
    Event.STACKS_COLLECTED: _in([State.COLLECTING], Guard.blame, State.ENDING),
    Event.SHOW_STACKS: _in(_ALIVE, Guard.show_stacks),
    Event.SIGTERM_RECEIVED: _in(_ALIVE, Guard.start_grace),
    Event.GRACE_OVER: _in(_ALIVE, Guard.end_overdue),
    Event.KILL_DUE: _in(_ALIVE, Guard.kill_rank),
    Event.STOP_ORDERED: _in(_ALIVE, Guard.signal_rank),
    Event.LAUNCH_LOST: _in(_ALIVE, Guard.end_orphan),
}
"""What each event does; in a state that is not in its row, nothing. The table of the module's docstring."""


def main() -> None:
    """Run the guard that the environment asks for."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    protocol.raise_file_limit()
    Guard(Settings(**json.loads(os.environ[SETTINGS]))).run()
