"""The guard of a rank: a small process beside it, which sees what a rank that hangs or is gone cannot say.

A rank starts it (faults.py) before torch is there; it is a child of the rank, holds no memory to speak of, and
leaves with it. What a thread of the rank could not do, it does: beat while the rank holds Python's lock for minutes,
ask for the rank's stacks while it hangs in C, tell that it was killed and by which signal, and end it in any case.

Rank 0's guard is the hub of the job: the others connect to it once the ranks have met, and beat once a second.

    a rank failed, or is gone       its guard tells the hub, the hub all others: each ends its rank at once
    a host is gone                  the hub has heard nothing from there for SILENCE_S; over there, they of the hub;
                                    launchers that wait for it are ended too (stranded.py)
    no step within the time-out     the hub asks all guards for the stacks of their ranks, and says who holds them up
    SIGTERM                         is seen here at once (`signal.set_wakeup_fd`); past the grace the rank is ended

A guard that was itself held up (a machine that swaps, a virtual one that moves) takes that time off before it accuses
anybody. That hang detection belongs in a process of its own is how NVIDIA's resiliency extension has it; stacks of all
ranks, and who is not in the collective that the others wait in, is what PyTorch's flight recorder is read for.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dslpar.watchdog import orphans as stranded
from dslpar.watchdog import protocol
from dslpar.watchdog.hang_analysis import Shown, all_stacks, culprit
from dslpar.watchdog.processes import stat
from dslpar.watchdog.protocol import Line, Message
from dslpar.watchdog.status_page import ORPHAN, OVERDUE, TOLD, TOO_LATE, Progress, StatusPage, join_location, rank_name

SETTINGS = "DSLPAR_GUARD"
"""The variable that tells a guard what it guards: command lines are for all to see, and tokens are not."""
STACKS = signal.SIGRTMIN + 8
"""Makes a rank write down the stacks of all its threads (faulthandler)."""
SILENCE_S = 6.0
"""After which a host is taken for gone; beats come once a second."""
BEAT_S = 1.0
_EARLY_S = 0.25
"""After which a rank that has come to another part of its work beats again."""
_LOOK_S = 0.1
_LATE_S = 2.0
"""A pause of ours that is not held against others."""
_KILL_S = 2.5
"""After which a rank that was to end is killed."""
_AGAIN_S = 2.0
"""A second SIGTERM that comes sooner is the same one: a launcher's and its own launcher's."""
_LAUNCHERS_S = 2.0
"""How long launchers have to end by themselves when a host and our rank are gone."""
_GATHER_S = 3.0
"""In which ranks must have shown their stacks."""
_STOPS = (signal.SIGTERM, signal.SIGUSR1)
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
"""Signals to the group of a rank, which are not for its guard."""
_AT_WORK = ("building", "loading", "step", "evaluating", "saving")
"""Of a run, what no rank leaves by itself, unless something is wrong."""
_SHOWN = 8


class Settings(NamedTuple):
    """What a guard is told by its rank."""

    rank: int
    world_size: int
    host: str
    pid: int
    folder: str
    """Where the rank leaves its marks."""
    private: bool
    """Whether it is this rank's own, and goes with it."""
    boss: str
    """addresses:port:token of `dslpar launch`; empty: it reads the folder, or there is none."""
    token: str
    """That others must say to the hub."""
    signals: int
    """Where a byte comes at each signal that the rank handles."""
    loopback: bool
    """Whether ranks meet at a loopback address, so that all are on this host."""
    supervised: bool
    """Whether somebody else tells the user what happened."""

    def __str__(self) -> str:
        return rank_name(self.rank, self.world_size, self.host)


class Peer:
    """Another guard, as the hub knows it."""

    def __init__(self, line: Line, rank: int, who: str, host: str, now: float) -> None:
        self.line, self.rank, self.who, self.host, self.heard_s = line, rank, who, host, now
        self.at, self.left = Progress(), False
        self.stacks: str | None = None


class Guard:
    """One rank's; a class, since all of it is what has happened so far."""

    def __init__(self, settings: Settings) -> None:
        self.my, self.folder = settings, Path(settings.folder)
        self.page = StatusPage(self.folder / f"{settings.rank}.board")
        self.waits = selectors.DefaultSelector()
        self.now = time.monotonic()
        self.is_hub = settings.rank == 0
        self.peers: dict[int, Peer] = {}
        self.hub: Line | None = None
        self.hub_heard_s = self.hub_tried_s = self.hub_sought_s = 0.0
        self.hub_unmet = False
        """Whether it was said that rank 0's guard is out of reach."""
        self.hub_left = False
        self.hub_at, self.hub_who, self.hub_host = Progress(), "", ""
        self.boss: Line | None = None
        self.beat_s = 0.0
        self.beat_at = Progress()
        self.told: set[str] = set()
        self.decided = False
        self.stranded = False
        """Whether a host is gone, and launchers may wait for it for ever."""
        self.launchers: Sequence[stranded.Process] = ()
        self.kill_s = self.stop_s = self.signalled_s = float("inf")
        self.asked_s: float | None = None
        self.stuck_moves = self.held_moves = -1
        self.held_s = 0.0
        """How long we were held up ourselves while the rank was where it is now."""
        self.stuck = ""
        self.gone = False

    # ---- the loop ----

    def run(self) -> None:
        """Until the rank is gone and what is to be said is said."""
        self._open()
        while not self.gone:
            for key, _ in self.waits.select(_LOOK_S):
                key.data()
            self._look()
        self._leave()

    def _open(self) -> None:
        self.launchers = stranded.launchers_of(self.my.pid)
        with contextlib.suppress(OSError, AttributeError):  # an old kernel; then its parent is asked for
            self._on(os.pidfd_open(self.my.pid), self._rank_is_gone)
        self._on(self.my.signals, self._signal)
        if self.is_hub and self.my.world_size > 1:
            server = protocol.listen(loopback=self.my.loopback)
            server.setblocking(False)
            self._on(server, lambda: self._accept(server))
            self.page.port = server.getsockname()[1]
        self._meet_boss()

    def _on(self, file: Any, then: Callable[[], None]) -> None:
        self.waits.register(file, selectors.EVENT_READ, then)

    def _look(self) -> None:
        """What time brings."""
        late = time.monotonic() - self.now
        self.now += late
        if late > _LATE_S:
            self._forgive(late)
        if os.getppid() != self.my.pid:
            self._rank_is_gone()
        self._relay()
        self._overdue()
        self._meet_hub()
        self._beat()
        if not self.decided and not self.gone:
            self._silent()
            self._hangs()
            self._accuse()

    def _forgive(self, late_s: float) -> None:
        """Whoever was silent while we slept may have spoken; and our rank may have slept as well."""
        self.hub_heard_s += late_s if self.hub_heard_s else 0  # 0: it was not met yet, and may take its time
        self.hub_sought_s += late_s if self.hub_sought_s else 0
        moves = self.page.progress().moves
        self.held_s = late_s + (self.held_s if moves == self.held_moves else 0)
        self.held_moves = moves
        for peer in self.peers.values():
            peer.heard_s += late_s

    # ---- the rank ----

    def _rank_is_gone(self) -> None:
        """Notes it, and how, where the status is still to be had."""
        if self.gone:
            return
        self.gone = True
        status = _status(self.my.pid)
        self._relay()
        if self._in_order():
            return
        words = self.page.progress().words()
        if self.page.ending == OVERDUE:
            self._mark(f"{self.my.rank}.stopped", json.dumps([self.page.progress().step, "", self.page.status, True]))
            _write(f"[{join_location(self.my, words)}] {TOO_LATE}\n")
        if self.page.ending or self.decided or f"{self.my.rank}.error" in self.told or status in _STOPS:
            return
        stack = self._read("stack")
        number = (status or 0) & 0x7F
        left = f"{self.my.rank}.ended" in self.told
        how = "crashed first" if FATAL in stack else f"was the first to end, {_left(status) if left else _how(status)}"
        self._cause(self._verdict(self.my.rank, str(self.my), words, how, stack.rstrip(), number))

    def _in_order(self) -> bool:
        """Whether the rank came to its end by itself, well or after a signal."""
        ended = f"{self.my.rank}.ended" in self.told and self.page.progress().phase not in _AT_WORK
        return ended or f"{self.my.rank}.stopped" in self.told

    def _relay(self) -> None:
        """The rank's marks, each once: to `dslpar launch` if it is elsewhere, and causes to the hub."""
        for name in ("born", "error", "ended", "stopped"):
            path = self.folder / f"{self.my.rank}.{name}"
            if path.name in self.told or not path.exists():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            self.told.add(path.name)
            if self.boss is not None:
                self.boss.send({"mark": path.name, "text": text})
            if name == "error":
                report = json.loads(text)
                if report[1] == "cause":
                    self._cause({"report": report, "said": True})

    def _mark(self, name: str, text: str) -> None:
        """A mark of our own, in the folder or at `dslpar launch`."""
        self.told.add(name)
        if self.boss is not None:
            self.boss.send({"mark": name, "text": text})
        part = self.folder / f"{name}.part"
        with contextlib.suppress(OSError):
            part.write_text(text, encoding="utf-8")
            part.replace(self.folder / name)

    def _read(self, name: str) -> str:
        path = self.folder / f"{self.my.rank}.{name}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _verdict(self, rank: int, who: str, words: str, how: str, text: str, number: int = 0) -> dict[str, Any]:
        """What this guard found out, of whatever rank: the fields of a Verdict."""
        named = [rank, self.my.world_size, who.rpartition(" on ")[2], 0]
        return {"verdict": [named, time.time(), how, text, words, number], "said": False, "stranded": False}

    def _end_rank(self, why: int) -> None:
        """By its own hand if it can, else by SIGKILL."""
        self.page.ending = why
        self.kill_s = min(self.kill_s, self.now + _KILL_S)

    def _overdue(self) -> None:
        """What must have ended by now."""
        if self.now > self.stop_s:
            self.stop_s = float("inf")
            self._end_rank(OVERDUE)
        if self.now > self.kill_s:
            self.kill_s = self.now + _KILL_S
            self._send(signal.SIGKILL)

    def _signal(self) -> None:
        """The numbers of signals that have come to the rank."""
        numbers = os.read(self.my.signals, 64)
        if not numbers:
            self.waits.unregister(self.my.signals)
        for number in numbers:
            if number in _STOPS and self.page.grace_s:
                self._stop(number)

    def _stop(self, number: int) -> None:
        """The first SIGTERM starts the clock; one that comes again, and not from the same hand, ends it."""
        if number == signal.SIGTERM:
            again = self.now - self.signalled_s > _AGAIN_S and not self._in_order()  # that leaves: a launcher's haste
            self.signalled_s = min(self.signalled_s, self.now)
            self.stop_s = min(self.stop_s, self.now if again else self.now + self.page.grace_s)

    def _send(self, number: int) -> None:
        if os.getppid() == self.my.pid:
            os.kill(self.my.pid, number)

    # ---- causes ----

    def _cause(self, cause: Mapping[str, Any]) -> None:
        """Something has gone wrong first-hand: all are to end."""
        self.hub_tried_s = 0.0
        self._meet_hub()  # if it has not yet
        if self.is_hub or self.hub is None:
            self._decide(cause)
        else:
            self.decided = True
            self._say(cause)
            self.hub.send({"cause": {**cause, "said": True}})
            self._end_rank(TOLD)

    def _decide(self, cause: Mapping[str, Any]) -> None:
        """The first one counts."""
        if self.decided:
            return
        self.decided, self.stranded = True, cause.get("stranded", False)
        self._say(cause)
        for peer in self.peers.values():
            peer.line.send({"end": True, "stranded": self.stranded})
        self._end_rank(TOLD)

    def _say(self, cause: Mapping[str, Any]) -> None:
        """A verdict is told once, by who found it: to `dslpar launch`, or else on the terminal."""
        if cause["said"] or "verdict" not in cause:
            return
        named, _, how, text, words, _ = cause["verdict"]
        self._mark(f"{named[0]}.verdict", json.dumps(cause["verdict"]))
        if not self.my.supervised or (self.my.boss and self.boss is None):  # nobody, or out of reach
            _write(f"[{join_location(rank_name(*named[:3]), words)}] {how}" + (f":\n{text}\n" if text else "\n"))

    # ---- beats ----

    def _beat(self) -> None:
        at = self.page.progress()
        early = at[:2] != self.beat_at[:2]  # elsewhere in its work, not one step further
        if self.now - self.beat_s < (_EARLY_S if early else BEAT_S):
            for line in self._lines():
                line.flush()
            return
        self.beat_s, self.beat_at = self.now, at
        for line in self._lines():
            line.send({"at": at[:3]})

    def _lines(self) -> Iterator[Line]:
        yield from (line for line in (self.hub, self.boss) if line is not None)
        yield from (peer.line for peer in self.peers.values())

    def _silent(self) -> None:
        """Hosts that nothing is heard from."""
        if self.is_hub:
            late = [peer for peer in self.peers.values() if not peer.left and self.now - peer.heard_s > SILENCE_S]
            if late:
                self._host_is_gone(min(late, key=lambda peer: peer.heard_s).host)
        elif not self.hub_heard_s and self.hub_sought_s and self.now - self.hub_sought_s > SILENCE_S:
            self._hub_is_unmet()
        elif self.hub_heard_s and not self.hub_left and self.now - self.hub_heard_s > SILENCE_S:
            host = self.hub_host or self.page.hub.rsplit(":", 2)[0]
            who = self.hub_who or rank_name(0, self.my.world_size, host)
            how = f"is silent for {SILENCE_S:.0f} s, and with it the host {host}: gone, or cut off from {self.my.host}"
            verdict = self._verdict(0, who, self._last_seen(self.hub_at), how, "")
            self._decide({**verdict, "stranded": host != self.my.host})

    def _hub_is_unmet(self) -> None:
        """No reason to end a job: training itself may go by another network, or by ports that are open."""
        if not self.hub_unmet:
            self.hub_unmet = True
            at = self.page.hub.rpartition(":")[0]
            _write(f"[{self.my}] cannot reach the guard of rank 0 at {at}: faults elsewhere are not told here\n")

    def _host_is_gone(self, host: str) -> None:
        there = sorted((peer for peer in self.peers.values() if peer.host == host), key=lambda peer: peer.rank)
        late = [peer for peer in there if self.now - peer.heard_s > SILENCE_S / 2]
        ranks = ", ".join(str(peer.rank) for peer in late[:_SHOWN]) + (", ..." if len(late) > _SHOWN else "")
        whole = f"and with it all of {host} (ranks {ranks}){self._other_hosts(host)}: the host is gone, or cut off"
        is_whole = len(late) == len(there) and host != self.my.host
        how = f"is silent for {SILENCE_S:.0f} s, {whole if is_whole else 'though its host is not'}"
        verdict = self._verdict(late[0].rank, late[0].who, self._last_seen(late[0].at), how, "")
        self._decide({**verdict, "stranded": is_whole})

    def _other_hosts(self, host: str) -> str:
        """That are as silent; where it is all of several, the fault may be with us."""
        there = {peer.host for peer in self.peers.values() if not peer.left} - {self.my.host, host}
        heard = {peer.host for peer in self.peers.values() if self.now - peer.heard_s <= SILENCE_S / 2}
        names = sorted(there - heard)
        if not names:
            return ""
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        ours = f", so every host but {self.my.host}, which may itself be the one that is cut off"
        return f", and of {listed}{'' if there & heard else ours}"

    def _last_seen(self, at: Progress) -> str:
        """Where a rank is that nobody hears: no more than a step from ours, since all end a step together; the step
        that it was last heard in may be long ago, where steps are short.
        """
        mine = self.page.progress()
        return (at if at.step >= mine.step else mine._replace(where=at.where)).words()

    # ---- the hub and its peers ----

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            line = Line(server.accept()[0])
            self._on(line, lambda: self._hear_stranger(line))

    def _hear_stranger(self, line: Line) -> None:
        """Its first message must be the token; it may have said more by then, and have gone."""
        messages = list(line.receive())
        if messages and messages[0].get("hello") == self.my.token:
            self._hear(self._welcome(line, messages[0]), messages[1:])
        elif messages or not line.open:
            self._drop(line)

    def _welcome(self, line: Line, hello: Message) -> Peer:
        peer = Peer(line, hello["rank"], hello["who"], hello["host"], self.now)
        peer.at = Progress(*hello["at"])
        if (old := self.peers.get(peer.rank)) is not None:  # it has lost its connection, and is here again
            self._drop(old.line)
        self.peers[peer.rank] = peer
        self.waits.modify(line, selectors.EVENT_READ, partial(self._hear, peer))
        message = {"who": str(self.my), "host": self.my.host, "at": self.page.progress()[:3]}
        line.send({**message, **({"end": True, "stranded": self.stranded} if self.decided else {})})
        return peer

    def _hear(self, peer: Peer, messages: Sequence[Message] | None = None) -> None:
        for message in peer.line.receive() if messages is None else messages:
            peer.heard_s = self.now = time.monotonic()
            peer.at = Progress(*message.get("at", peer.at))
            peer.left |= "bye" in message
            if "cause" in message:
                self._decide(message["cause"])
            if "stuck" in message:
                self._ask_for_stacks(message["stuck"])
            peer.stacks = message.get("stacks", peer.stacks)
        if not peer.line.open:  # it may come again; if not, its silence tells
            self._drop(peer.line)

    def _drop(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.waits.unregister(line)
        line.close()

    def _meet_hub(self) -> None:
        """Connects to rank 0's guard, once the rank has said where that is; again where the connection is lost."""
        lost = self.hub is None or not self.hub.open
        pause_s = SILENCE_S if self.hub_unmet else BEAT_S
        if self.is_hub or self.hub_left or not lost or not self.page.hub or self.now - self.hub_tried_s < pause_s:
            return
        self.hub_tried_s = self.now
        self.hub_sought_s = self.hub_sought_s or self.now
        address, port, token = self.page.hub.rsplit(":", 2)
        if (connection := protocol.connect(address, int(port), BEAT_S)) is not None:
            line = self.hub = Line(connection)
            self._on(line, lambda: self._hear_hub(line))
            message = {"hello": token, "rank": self.my.rank, "who": str(self.my), "host": self.my.host}
            self.hub.send({**message, "at": self.page.progress()[:3]})

    def _hear_hub(self, line: Line) -> None:
        for message in line.receive():
            self.hub_heard_s = time.monotonic()
            self.hub_at = Progress(*message.get("at", self.hub_at))
            self.hub_who, self.hub_host = message.get("who", self.hub_who), message.get("host", self.hub_host)
            if "end" in message:
                self.decided, self.stranded = True, message["stranded"]
                self._end_rank(TOLD)
            if "show" in message:
                line.send({"stacks": self._stacks(), "at": self.page.progress()[:3]})
            if "bye" in message:
                self.hub_left = self.page.first_left = True
        if not line.open:
            self._drop(line)

    # ---- `dslpar launch` ----

    def _meet_boss(self) -> None:
        """At the first of its addresses that answers."""
        addresses, port, token = self.my.boss.rsplit(":", 2) if self.my.boss else ("", "0", "")
        for address in filter(None, addresses.split(",")):
            if (connection := protocol.connect(address, int(port), 2 * BEAT_S)) is not None:
                line = self.boss = Line(connection)
                self._on(line, partial(self._hear_boss, line))
                line.send({"hello": token, "rank": self.my.rank})
                return

    def _hear_boss(self, line: Line) -> None:
        for message in line.receive():
            if "stop" in message:
                self._send(message["stop"])
        if not line.open:
            self._drop(line)
            self._orphan("is gone")

    def _orphan(self, how: str) -> None:
        if not self.gone:
            _write(f"[{self.my}] ends because `dslpar launch` {how}\n")
            if not self.page.grace_s:
                self._end_rank(ORPHAN)
            elif self.stop_s == float("inf"):  # as if told to stop, and once
                self._send(signal.SIGTERM)

    # ---- hangs ----

    def _hangs(self) -> None:
        """Our own rank, longer in one place than it may: tells the hub, once for each place."""
        moment = self.page.progress()
        held_s = self.held_s if moment.moves == self.held_moves else 0
        overdue = 0 < moment.allowed_s < self.now - moment.since_s - held_s
        if overdue and moment.moves == self.stuck_moves and not self.stuck:  # seen twice: the page is not locked
            self.stuck = f"{moment.words()} takes longer than {moment.allowed_s:g} s"
            if self.is_hub or self.hub is None:
                self._ask_for_stacks(self.stuck)
            else:
                self.hub.send({"stuck": self.stuck})
        self.stuck_moves = moment.moves if overdue else -1
        self.stuck = self.stuck if overdue else ""

    def _ask_for_stacks(self, stuck: str) -> None:
        if self.asked_s is None and not self.decided:
            self.asked_s, self.stuck = self.now, stuck
            for peer in self.peers.values():
                peer.line.send({"show": True})

    def _accuse(self) -> None:
        """Says who holds the others up, when all have shown their stacks, or time is up."""
        if self.asked_s is None:
            return
        waiting = [peer for peer in self.peers.values() if peer.stacks is None and not peer.left]
        if waiting and self.now - self.asked_s < _GATHER_S:
            return
        mine = self.page.progress()
        shown = [Shown(self.my.rank, str(self.my), mine.words(), mine.step, self._stacks())]
        there = [peer for peer in self.peers.values() if not peer.left]
        shown += [Shown(p.rank, p.who, p.at.words(), p.at.step, p.stacks or "") for p in there]
        shown.sort(key=lambda one: one.rank)
        who, why = culprit(shown)
        text = all_stacks(who, shown)
        self._decide(self._verdict(who.rank, who.who, who.words, f"hangs ({self.stuck}); {why}", text))

    def _stacks(self) -> str:
        """Of all threads of the rank, as Python's C level writes them; empty: it is stopped, or deep in the kernel."""
        path = self.folder / f"{self.my.rank}.stacks"
        self._send(STACKS)
        ends, size = time.monotonic() + 1.0, -1
        while time.monotonic() < ends:
            time.sleep(0.05)
            now = path.stat().st_size if path.exists() else 0
            if now == size > 0:
                break
            size = now
        return self._read("stacks")

    # ---- the end ----

    def _leave(self) -> None:
        for peer in self.peers.values():
            peer.line.send({"bye": True})
        if self.hub is not None:
            self.hub.send({"bye": True})
        for line in self._lines():
            line.last_words()
        if self.my.private:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.stranded and self.launchers and not os.fork():  # DeepSpeed's launcher waits for us before it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # OpenMPI's for the end of what its ranks say
            stranded.end(self.launchers, _LAUNCHERS_S)


FATAL = "Fatal Python error"


def _status(pid: int) -> int | None:
    """The wait status of a process that has just ended, if nobody has asked for it yet."""
    fields = stat(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else None


def _how(status: int | None) -> str:
    if status is None:
        return "without a word: most often by SIGKILL, most often from the kernel's out-of-memory killer"
    if number := status & 0x7F:
        killer = ": most often from the kernel's out-of-memory killer" if number == signal.SIGKILL else ""
        return f"by {signal.Signals(number).name}{killer}"
    return f"with status {status >> 8}, by os._exit or C's exit"


def _left(status: int | None) -> str:
    return f"by sys.exit{'' if status is None else f', with status {status >> 8}'}: it left in the middle of the run"


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def main() -> None:
    """Runs the guard that the environment asks for."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    protocol.many()
    Guard(Settings(**json.loads(os.environ[SETTINGS]))).run()
