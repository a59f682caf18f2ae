"""Guard: a small process beside each rank, which watches the rank and reports when it hangs or dies.

Each rank starts a guard as a child process (rank_monitor.py) before the ranks connect to each other. In dslpar's own
commands, a rank does so before it imports torch. A user's program has usually imported torch by then. The guard uses
little memory, and exits after the rank. The guard can do what a thread of the rank could not:

- send beats (messages with the rank's phase and step) while the rank holds Python's lock for minutes
- collect the rank's stacks while the rank hangs in C
- report that the rank was killed, and by which signal
- end the rank in any case

Rank 0's guard is the job's hub. The other guards connect to the hub once the ranks are connected, and send it one beat
per second.

    a rank fails or is gone         the rank's guard reports it to the hub, the hub reports it to all other guards, and
                                    each guard ends its rank at once
    a rank aborts (SIGABRT)         NCCL's watchdog also aborts a rank that lost a peer, so the cause may be elsewhere:
                                    the aborted rank's guard ends the job HELD_BACK_S later, unless a better cause is
                                    reported before
    a host is gone                  the hub gets no message from the host for SILENCE_S, and the host's guards get none
                                    from the hub; launchers that wait for the host are ended too (orphans.py)
    no step within the time-out     the hub asks all guards for their ranks' stacks, and names the blocking rank
    SIGTERM to a rank               the guard sees the signal at once (`signal.set_wakeup_fd`), and ends the rank after
                                    the grace period

The guard is a state machine. Its action at an event depends on its state:

    WATCHING      nothing is wrong
    COLLECTING    a rank is stuck, and this guard waits for the stacks of all ranks
    HOLDING       this guard's rank has aborted, and the guard waits HELD_BACK_S for a better cause
    ENDING        the job has failed, and this guard's rank was ordered to end
    GONE          this guard's rank is gone, everything is reported, and the guard exits

Each cell of this table (TRANSITIONS below) has the action, and the next state if the state changes. A dash means that
nothing happens. GRACE_OVER and KILL_DUE are the ends of the rank's two deadlines (rank_process.py): the time to stop
after SIGTERM, and the time after which the rank is killed.

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

A guard may be held up itself, because its machine swaps or its virtual machine is moved. It subtracts that time before
it blames a rank. NVIDIA's resiliency extension also detects hangs from a separate process. The analysis of all ranks'
stacks follows PyTorch's flight recorder: it looks for the rank that is missing from the collective in which the others
wait.
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
from dslpar.watchdog import connections, guard_messages, marks, orphans, verdicts
from dslpar.watchdog.connections import Connection, Poller
from dslpar.watchdog.guard_messages import Message
from dslpar.watchdog.hang_analysis import RankStacks, find_blocking_rank, format_stacks
from dslpar.watchdog.marks import Rank, Report, Stopped, Verdict
from dslpar.watchdog.peers import BEAT_S, HELD_BACK_S, SILENCE_S, Hub, HubLink, LaunchLink
from dslpar.watchdog.rank_process import STOPS, RankProcess, Settings
from dslpar.watchdog.status_page import TOO_LATE, Ending, Progress, join_location, rank_name
from dslpar.watchdog.verdicts import EndReason

SETTINGS = "DSLPAR_GUARD"
"""The environment variable with a guard's settings. They include the job's secret, and command lines are public."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Signals that a guard ignores. They are sent to the process group that it shares with its rank, to reach the rank."""
_POLL_S = 0.1
_EARLY_S = 0.25
"""The least time between two beats if the rank has entered another phase."""
_PAUSE_S = 2.0
"""A longer gap between two turns of the loop counts as a pause of this guard, and is subtracted from waiting times."""
_LAUNCHERS_S = 2.0
"""Time for launchers to end by themselves when a host and this guard's rank are gone."""
_ANSWER_S = 0.5
"""Time for the hub to answer which rank failed first. It is short: a launcher may be killing this guard's rank."""
_COLLECT_S = 3.0
"""Time for all ranks to show their stacks."""


class State(Enum):
    """State of a guard: what it knows about its rank and the job."""

    WATCHING = auto()
    """Nothing is wrong."""
    COLLECTING = auto()
    """A rank is stuck, and all guards are asked for stacks. Only the hub, or a guard without a hub, enters this state.
    """
    HOLDING = auto()
    """This guard's rank has aborted, or was killed after another rank's abort. The guard waits for a better cause."""
    ENDING = auto()
    """The job has failed, and this guard's rank was ordered to end."""
    GONE = auto()
    """This guard's rank is gone, and the guard exits."""


class Event(Enum):
    """Events that a guard reacts to."""

    JOB_FAILED = auto()
    """This guard's rank has failed. In the hub also: another guard reports that its rank has failed."""
    JOB_ENDS = auto()
    """The hub orders the end of the job."""
    RANK_GONE = auto()
    """This guard's rank is gone, in any way except RANK_ABORTED."""
    RANK_ABORTED = auto()
    """This guard's rank has aborted, or was killed after another rank's abort."""
    PEER_ABORTED = auto()
    """Another rank has aborted. That rank's guard reports it to the hub, and the hub reports it to all guards."""
    HOLD_OVER = auto()
    """No better cause than the abort was reported in time, or all other guards have left."""
    HOST_SILENT = auto()
    """In the hub: no message came from a host for too long. In another guard: no message came from the hub."""
    HUB_UNREACHABLE = auto()
    """No connection to the hub was ever made."""
    RANK_STUCK = auto()
    """This guard's rank has exceeded the time limit of its phase, such as a step."""
    STACKS_WANTED = auto()
    """Some rank is stuck, and this guard must collect stacks to find the rank to blame."""
    STACKS_COLLECTED = auto()
    """All guards have sent their ranks' stacks, or time is up."""
    SHOW_STACKS = auto()
    """The hub asks for the stacks of this guard's rank."""
    SIGTERM_RECEIVED = auto()
    """The rank got SIGTERM, and handles it by stopping in order."""
    GRACE_OVER = auto()
    """The rank has not stopped within its grace period."""
    KILL_DUE = auto()
    """The rank was ordered to end by itself, and has not."""
    STOP_ORDERED = auto()
    """`dslpar launch` orders this guard to send its rank a signal."""
    LAUNCH_LOST = auto()
    """`dslpar launch` is gone."""


class Guard:
    """One rank's guard; the module's docstring describes it. The methods below `actions` are those of TRANSITIONS."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.rank = settings, RankProcess(settings)
        self.state = State.WATCHING
        self.now = self._ticked_s = time.monotonic()
        self.poller = Poller()
        self.hub = Hub(self.poller, self._greet, self._handle_peer, self._log) if settings.rank == 0 else None
        self.link = HubLink(self.poller, settings.secret, settings.rank, self._handle_hub)
        """Link to the hub; not used by the hub itself."""
        self.launch = LaunchLink(self.poller, settings.launch, settings.secret, settings.rank, self._handle_launch)
        """Link to `dslpar launch`, if that is on another host."""
        self.host_lost = False
        """Whether a host is gone, so that launchers may wait for it forever."""
        self.first_failed: int | None = None
        """The rank that failed first, by the hub's order; None: the hub has not ended the job."""
        self.launchers: Sequence[orphans.Process] = ()
        self._beat_s, self._beat_progress = 0.0, Progress()
        self._collecting_since_s, self._stuck = 0.0, ""
        self._pidfd = -1
        """The rank's pidfd; -1 on an old kernel without one, where _tick checks instead."""
        self._end_noticed = False
        """Whether the rank's end was noticed."""
        self._held: Verdict | None = None
        """The verdict on the rank's abort, which is held back in state HOLDING."""
        self._held_since_s = 0.0
        """Time since which it is held back."""
        self._stops: set[int] = set()
        """Numbers of the signals that `dslpar launch` has sent for the rank."""

    # ---- the loop ----

    def run(self) -> None:
        """Watch until the rank is gone and everything is reported."""
        self._open()
        while self.state is not State.GONE:
            self.poller.poll(_POLL_S)
            self._tick()
        self._leave()

    def handle(self, event: Event, *details: object) -> None:
        """Run the event's action in the current state, then enter the next state. An action may cause another event."""
        self.now = (
            time.monotonic()
        )  # after a pause of this guard, an old time would set deadlines that are over already
        transition = TRANSITIONS[event].get(self.state)
        if transition is not None:
            transition.action(self, *details)
            self.state = transition.next or self.state

    def _open(self) -> None:
        # Find the launchers while the rank lives: the ancestors of a dead process cannot be found.
        self.launchers = orphans.launchers_of(self.settings.pid)
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: _tick notices the rank's end instead
            self._pidfd = os.pidfd_open(self.settings.pid)
            self.poller.watch(self._pidfd, self._notice_end)
        self.poller.watch(self.settings.signals, self._read_signals)
        if self.rank.page.ending:  # an earlier guard was killed while it ended the rank
            self.rank.end(self.rank.page.ending, self.now)
        if self.hub is not None and self.settings.world_size > 1:
            self.rank.page.port = self._listen(self.hub)
        self.launch.connect()

    def _listen(self, hub: Hub) -> int:
        """Open the hub's server; return its port.

        If this guard replaces an earlier one, it tries that one's port first, where the other guards look for the hub.
        """
        settings = self.settings
        listen = partial(hub.listen, settings.secret, settings.world_size, loopback=settings.loopback)
        try:
            return listen(port=self.rank.page.port)
        except OSError:
            return listen()

    def _tick(self) -> None:
        """Check everything that depends on time, in this order: the rank's end, messages, deadlines, silence, hangs."""
        self.now = time.monotonic()
        paused_s, self._ticked_s = self.now - self._ticked_s, self.now
        if paused_s > _PAUSE_S:
            self._forgive(paused_s)
        if self.rank.is_gone():
            self._notice_end()
        if self.hub is not None and self.hub.server is not None:
            self.hub.server.maintain()
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
        """Determine how the rank ended; later calls do nothing.

        This must be quick: the rank's wait status is gone as soon as its parent has reaped it.
        """
        if self._end_noticed:
            return
        self._end_noticed = True
        self.poller.unwatch(self._pidfd)  # a pidfd stays readable forever once its process has ended
        verdict = self._judge_death()
        self.handle(Event.RANK_ABORTED if verdict is not None and verdict.weak else Event.RANK_GONE, verdict)

    def _judge_death(self) -> Verdict | None:
        """Return the verdict on the rank's death.

        None: the rank ended in order, was ordered to end, or has reported an error itself.
        """
        rank, status = self.rank, self.rank.wait_status()
        self._relay_marks()  # the rank's last mark shows how it ended, and may be newer than the last tick
        told = rank.page.ending or self.state is State.ENDING or rank.has_marked("error") or status in STOPS
        exited, stack = rank.has_marked("ended"), rank.read("stack")
        stopping = status is None and stack and verdicts.FATAL not in stack  # then SIGTERM made it write the stack
        if told or stopping or rank.ended_in_order():
            return None
        at, after_abort = rank.page.progress().describe(), rank.page.abort_seen
        return verdicts.of_death(rank.who, at, status, stack, exited=exited, after_abort=after_abort)

    def _is_hold_over(self) -> bool:
        """Return whether the verdict was held back for long enough, or all other guards have left."""
        peers = self.hub.peers.values() if self.hub else ()
        all_left = len(peers) == self.settings.world_size - 1 and all(peer.left for peer in peers)
        return self.now - self._held_since_s > HELD_BACK_S or self.link.left or all_left

    def _forgive(self, paused_s: float) -> None:
        """Subtract this guard's own pause from all waiting times.

        Meanwhile the other guards may have sent messages that were not read, and the rank may have paused as well.
        """
        if self.link.received_s:  # 0: the hub has sent nothing yet
            self.link.received_s = min(self.now, self.link.received_s + paused_s)
        self.link.wanted_s += paused_s if self.link.wanted_s else 0
        self._held_since_s = min(self.now, self._held_since_s + paused_s)
        self.rank.forgive(paused_s)
        for peer in self.hub.peers.values() if self.hub else ():
            peer.received_s = min(self.now, peer.received_s + paused_s)

    def _relay_marks(self) -> None:
        """Send the rank's new marks to `dslpar launch` on another host. A mark of a failure also causes JOB_FAILED."""
        for name, text in self.rank.new_marks():
            self.launch.send_mark(f"{self.settings.rank}.{name}", text)
            mark = marks.parse(name, text)
            if isinstance(mark, Report) and mark.kind == "cause":
                self.handle(Event.JOB_FAILED, EndReason())

    def _read_signals(self) -> None:
        """Read the numbers of the signals that the rank received."""
        numbers = os.read(self.settings.signals, 64)
        if not numbers:
            self.poller.unwatch(self.settings.signals)
        if signal.SIGTERM in numbers and self.rank.page.grace_s:
            for _ in range(numbers.count(signal.SIGTERM)):
                self.handle(Event.SIGTERM_RECEIVED)

    def _beat(self) -> None:
        """Send the rank's progress once per second, and sooner when it enters another phase."""
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
        """Detect hosts that send nothing (in the hub), or a hub that sends nothing (in the other guards)."""
        own = self.rank.page.progress()
        # After an abort mpirun kills the other ranks and their guards. Their hosts are not gone, and the abort must be
        # reported first.
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
        """Return whether all guards have sent their ranks' stacks, or time is up."""
        peers = self.hub.peers.values() if self.hub else ()
        waiting = any(peer.stacks is None and not peer.left for peer in peers)
        return not waiting or self.now - self._collecting_since_s >= _COLLECT_S

    # ---- messages ----

    def _at(self) -> tuple[str, str, int]:
        return self.rank.page.progress()[:3]

    def _greet(self) -> Message:
        """Return the hub's answer to a guard's hello."""
        return {**self._hello(), **(self._end() if self.state is State.ENDING else {})}

    def _end(self) -> Message:
        """Return the hub's order to end the job."""
        first = {} if self.first_failed is None else {"first": self.first_failed}
        return {"end": True, "host_lost": self.host_lost, **first}

    def _hello(self) -> Message:
        """Return a guard's first message: its rank's name and progress, and whether the guard knows of an abort."""
        aborted = {"aborted": True} if self.rank.page.abort_seen else {}
        return {"who": str(self.rank.who), "host": self.settings.host, "at": self._at(), **aborted}

    def _handle_peer(self, rank: int, message: Message) -> None:
        if message.get("failed"):
            self.handle(Event.JOB_FAILED, EndReason(reporter=rank))
        if message.get("aborted"):
            self.handle(Event.PEER_ABORTED)
        if "stuck" in message and not self.rank.page.abort_seen:
            self.handle(Event.STACKS_WANTED, message["stuck"])

    def _handle_hub(self, message: Message) -> None:
        if message.get("end"):
            self.first_failed = message.get("first", self.first_failed)
            self.handle(Event.JOB_ENDS, message.get("host_lost", False))
        if message.get("aborted"):
            self.handle(Event.PEER_ABORTED)
        if message.get("show"):
            self.handle(Event.SHOW_STACKS)
        if message.get("bye"):
            self.rank.page.rank_0_left = True

    def _handle_launch(self, message: Message) -> None:
        if "stop" in message and message["stop"] not in self._stops:  # sent again after a lost connection
            self._stops.add(message["stop"])
            self.handle(Event.STOP_ORDERED, message["stop"])

    def _connect_to_hub(self) -> None:
        """Connect as soon as the rank's status page has the hub's address."""
        if self.hub is None:
            self.link.connect(self.rank.page.hub, self._hello(), self.now)

    # ---- actions ----

    def pass_on(self, reason: EndReason) -> None:
        """Report a failure to the hub, which ends the job. The hub itself, or a guard without a hub, ends the job."""
        self.link.tried_s = 0.0  # connect at once, even if the last attempt was just now
        self._connect_to_hub()
        self.link.complete(SILENCE_S)  # the hub may be there, but busy
        if self.link.connection is None:
            self.end_job(reason)
        else:
            if reason.verdict is not None:
                self._mark(reason.verdict)
            self.link.connection.send({"failed": True})
            self._publish(reason)
            self.rank.end(Ending.JOB_FAILED, self.now)

    def end_job(self, reason: EndReason) -> None:
        """Publish the cause, and end all ranks that this guard can reach."""
        self.host_lost = reason.host_lost
        if reason.verdict is not None:
            self._mark(reason.verdict)
        if self.hub is not None:
            self.first_failed = reason.first_failed(self.settings.rank)
            self.hub.broadcast(self._end())
        self._publish(reason)
        self.rank.end(Ending.JOB_FAILED, self.now)

    def _publish(self, reason: EndReason) -> None:
        """Print the verdict that this guard has found, unless `dslpar launch` reports it.

        Several ranks may leave at the same time, so that each guard finds its own rank gone and knows of no other. The
        hub decides which of them was first, and the others print nothing. Without the hub's answer, the verdict leaves
        the order open.
        """
        out_of_reach = self.settings.launch and self.launch.connection is None
        if (verdict := reason.verdict) is None or (self.settings.supervised and not out_of_reach):
            return
        first = self._ask_first()
        if first not in (None, verdict.who.rank, self.settings.rank):
            return
        notes = [verdicts.held_note(reason.held_s)] if verdict.weak else []
        if first is None and (how := verdicts.without_order(verdict.how)) != verdict.how:
            verdict, notes = verdict._replace(how=how), [verdicts.ORDER_UNKNOWN, *notes]
        _write(verdict.message("; ".join(notes)))

    def _ask_first(self) -> int | None:
        """Return the rank that failed first, by the hub's order; None: the hub does not answer, or cannot know."""
        if self.settings.world_size == 1:
            return self.settings.rank
        if self.hub is not None:  # a guard that has not connected yet may have found its rank gone before
            return self.first_failed if len(self.hub.peers) == self.settings.world_size - 1 else None
        deadline_s = time.monotonic() + _ANSWER_S
        while self.first_failed is None and self.link.is_open and time.monotonic() < deadline_s:
            self.poller.poll(_POLL_S / 2)
        return self.first_failed

    def _mark(self, verdict: Verdict) -> None:
        """Write the mark of a verdict to the rank's folder, and send it to `dslpar launch` on another host."""
        name, text = f"{verdict.who.rank}.verdict", json.dumps(verdict)
        self.launch.send_mark(name, text)
        with contextlib.suppress(OSError):
            marks.write(self.rank.folder, name, text)

    def end_rank(self, host_lost: bool) -> None:
        """End the rank, because the hub has ordered the end of the job."""
        self.host_lost = host_lost
        self.rank.end(Ending.JOB_FAILED, self.now)

    def report_death(self, verdict: Verdict | None) -> None:
        """Fail the job if there is a verdict on the rank's death. Report an overdue rank as stopped."""
        rank, progress = self.rank, self.rank.page.progress()
        if rank.page.ending is Ending.OVERDUE and not rank.ended_in_order():
            text = json.dumps(Stopped(progress.step, "", rank.page.status, overdue=True))
            rank.leave_stopped(text)
            self.launch.send_mark(f"{self.settings.rank}.stopped", text)
            _write(f"[{join_location(rank.who, progress.describe())}] {TOO_LATE}\n")
        if verdict is not None:
            self.handle(Event.JOB_FAILED, EndReason(verdict))

    def hold_back(self, verdict: Verdict) -> None:
        """Hold a verdict on an abort back, and wait for a better cause.

        `dslpar launch` gets the verdict at once, since this guard may be killed, and also waits for a better cause.
        """
        self._held, self._held_since_s = verdict, self.now
        self._mark(verdict)
        if self.link.connection is not None:
            self.link.connection.send({"aborted": True})
        self.note_abort()

    def note_abort(self) -> None:
        """Remember that some rank has aborted. The hub makes all other guards remember it.

        This has three effects. Ranks that lose the aborted rank as a peer wait longer to be ended. A rank that a
        launcher kills after the abort is not blamed. A rank that waits for the aborted rank is not reported as hanging.
        """
        if self.hub is not None and not self.rank.page.abort_seen:
            self.hub.broadcast({"aborted": True})
        self.rank.page.abort_seen = True

    def end_held(self) -> None:
        """End the job with the verdict that was held back, because no better cause was reported."""
        self.pass_on(EndReason(self._held, held_s=self.now - self._held_since_s))

    def warn(self) -> None:
        """Warn that the hub is unreachable. The job goes on: training may use another network, or other ports."""
        if not self.link.unreachable:
            self.link.unreachable = True
            hub = self.rank.page.hub.rpartition(":")[0]
            self._log(f"cannot reach the guard of rank 0 at {hub}: failures elsewhere are not reported here")

    def report_stuck(self, reason: str) -> None:
        """Report the stuck rank to the hub. Without a hub, or if rank 0 has left in order, analyse the hang here."""
        if self.link.connection is None or self.link.left:
            self.handle(Event.STACKS_WANTED, reason)
        else:
            self.link.connection.send({"stuck": reason})

    def collect_stacks(self, reason: str) -> None:
        """Ask all guards for their ranks' stacks."""
        self._collecting_since_s, self._stuck = self.now, reason
        if self.hub is not None:
            self.hub.broadcast({"show": True})

    def blame(self) -> None:
        """Name the rank that holds the others up, and end the job."""
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
        self.end_job(EndReason(verdicts.of_rank(Rank(blocking.rank, who.world_size, host, 0), how, blocking.at, text)))

    def show_stacks(self) -> None:
        """Send the rank's stacks to the hub."""
        if self.link.connection is not None:
            self.link.connection.send({"stacks": guard_messages.cut(self.rank.stacks()), "at": self._at()})

    def start_grace(self) -> None:
        """Start the grace period of a rank that got SIGTERM."""
        self.rank.start_grace(self.now)

    def end_overdue(self) -> None:
        """End a rank that has not stopped in time."""
        self.rank.end_overdue(self.now)

    def kill_rank(self) -> None:
        """Kill a rank that does not end by itself."""
        self.rank.kill(self.now)

    def signal_rank(self, number: int) -> None:
        """Send the rank a signal that `dslpar launch` ordered."""
        self.rank.send_signal(number)

    def end_orphan(self) -> None:
        """End a rank that nobody supervises any more: by SIGTERM if the rank handles it, and only once."""
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
        # End the launchers from a new process, because DeepSpeed's launcher waits for this one to end. The new process
        # closes the ranks' stderr, because OpenMPI's launcher waits until that is closed.
        if self.host_lost and self.launchers and not os.fork():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            orphans.end(self.launchers, _LAUNCHERS_S)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, visible_lines(text).encode())


class Transition(NamedTuple):
    """An event's action in a state."""

    action: Callable[..., None]
    next: State | None = None
    """None: the state stays."""


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
"""Actions by event and state, as in the module's docstring. An event is ignored in a state that its row lacks."""


def main() -> None:
    """Run a guard with the settings in the environment."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    connections.raise_file_limit()
    Guard(Settings(**json.loads(os.environ[SETTINGS]))).run()
