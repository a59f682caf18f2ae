"""An adversary on the sockets of guards and of `dslpar launch`: strangers and malformed lines do no harm."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.watchdog import authentication, connections, guard_messages, marks, peers
from dslpar.watchdog.authentication import STRANGER_BYTES, STRANGER_S, Key
from dslpar.watchdog.connections import Connection, Poller
from dslpar.watchdog.guard_server import Server
from dslpar.watchdog.job_watch import JobWatch
from dslpar.watchdog.receiver import Receiver
from tests.support.guarded_ranks import WAITS, Ranks
from tests.support.hostile import MEMORY_BYTES, attack, dial, hostile_lines, join, peak_bytes
from tests.support.paths import ROOT
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import wait_until

SECRET = "0123456789abcdef" * 2
HUB = Key(SECRET, "hub")
COUNTS = [250, pytest.param(25_000, marks=pytest.mark.prove)]
"""Numbers of byte strings: hub and receiver, with the secret and without, make 100,000."""


def hub_of(ranks: Ranks) -> tuple[int, str]:
    """Return the port and secret that the ranks received."""
    _, port, secret = (ranks.folder / "hub").read_text().rsplit(":", 2)
    return int(port), secret


def unharmed(ranks: Ranks) -> None:
    """Check that all ranks run, and that the next failure is reported as usual."""
    time.sleep(1.5)  # guards that an adversary has displaced are back
    assert [process.poll() for process in ranks.processes] == [None] * 3
    assert peak_bytes(ranks.guard_of(0)) < MEMORY_BYTES
    os.kill(ranks.processes[2].pid, signal.SIGKILL)
    assert ranks.statuses() == [1, 1, -signal.SIGKILL]
    told = [line for line in ranks.all_said() if "its guard " not in line]
    assert len(told) == 1
    assert told[0].startswith("[rank 2 of 3 on host1, stage 2 (pipe 2, data 0, tensor 0), step 7] was the first to end")


# ---- the hub ----


@pytest.mark.parametrize("count", COUNTS)
def test_a_job_is_not_harmed_by_what_strangers_say(tmp_path: Path, count: int) -> None:
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks:
        attack(hub_of(ranks)[0], count, None)
        said = [line for line in ranks.all_said() if line]
        assert len(said) == 1, "once"
        assert said[0].startswith("[rank 0 of 3 on host0] its guard refuses a connection from 127.")
        unharmed(ranks)


@pytest.mark.prove
@pytest.mark.parametrize("count", COUNTS)
def test_a_job_is_not_harmed_by_what_a_peer_says_that_went_mad(tmp_path: Path, count: int) -> None:
    """The peer knows the secret, and repeatedly takes the place of rank 1's guard."""
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks:
        port, secret = hub_of(ranks)
        attack(port, count, Key(secret, "hub"))
        unharmed(ranks)


@pytest.mark.prove
def test_a_line_that_ended_jobs(tmp_path: Path) -> None:
    """It came from a stranger, and from a guard."""
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks:
        port, secret = hub_of(ranks)
        with contextlib.suppress(OSError), dial(port) as stranger:
            stranger.sendall(b"[" * 200_000 + b"\n")
        guard = join(port, Key(secret, "hub"), 1, guard_messages.FROM_HUB)
        guard.socket.settimeout(5)
        with contextlib.suppress(OSError):
            guard.socket.sendall(b"[" * 200_000 + b"\n")
        guard.close()
        unharmed(ranks)


@pytest.mark.prove
def test_strangers_who_say_much_or_nothing_take_neither_time_nor_memory(tmp_path: Path) -> None:
    """One sends 16 MiB of lines, and many send 16 MiB without a line and stay connected."""
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks, contextlib.ExitStack() as stack:
        port, secret = hub_of(ranks)
        crowd = [stack.enter_context(dial(port, number)) for number in range(120)]
        for data in (b"{}\n" * (16 << 18), b"x" * (16 << 20)):
            for stranger in crowd[:60]:
                stranger.settimeout(0.05)
                with contextlib.suppress(OSError):
                    stranger.sendall(data)
        watch = Stopwatch()
        join(port, Key(secret, "hub"), 1, guard_messages.FROM_HUB).close()
        assert watch.alone_s() < 1, "others are served meanwhile"
        unharmed(ranks)


def test_guards_of_one_host_listen_there_alone(tmp_path: Path) -> None:
    with Ranks(tmp_path, WAITS, WAITS) as ranks:
        sockets = psutil.Process(ranks.guard_of(0)).net_connections("inet")
        assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("env", "one_host"),
    [
        (DistributedEnv(0, 2, 0, 2, "my-laptop.example.org", 29500), True),
        (DistributedEnv(0, 2, 0, 2, "127.0.0.1", 29500), True),
        (DistributedEnv(0, 4, 0, 2, "node1", 29500), False),
        (DistributedEnv(0, 1, 0, 1, "node1", 29500), True),
    ],
)
def test_ranks_of_one_host_whatever_the_address(env: DistributedEnv, one_host: bool) -> None:
    """`torchrun --standalone` uses the host's name, which others could reach."""
    assert env.is_one_host == one_host


def test_two_who_take_each_other_s_connection_are_not_silent() -> None:
    """Each is displaced before it has sent anything: its proof of the secret is enough of a sign, on both sides."""
    poller, link_poller = Poller(), Poller()
    hub = peers.Hub(poller, lambda: {"who": "rank 0", "host": "a", "at": ["", "", 0]}, lambda *_: None, lambda _: None)
    port = hub.listen(SECRET, 2, loopback=True)
    link = peers.HubLink(link_poller, SECRET, 1, lambda _: None)
    hello = {"who": "rank 1", "host": "b", "at": ["", "", 0]}

    def meet(now: float) -> None:
        link.connect(f"127.0.0.1:{port}:{SECRET}", hello, now)
        for _ in range(20):
            poller.poll(0.01)
            link_poller.poll(0.01)

    meet(10.0)
    hub.peers[1].received_s = link.received_s = 0.1  # long ago
    assert hub.silent_host(time.monotonic()) == "b"
    assert hub.server is not None
    hub.server._on_join = lambda connection: (hub._join(connection), poller.drop(connection))  # by the other, at once
    poller.drop(hub.peers[1].connection)
    link_poller.poll(0.1)
    meet(20.0)
    assert not link.is_silent(time.monotonic())
    assert hub.silent_host(time.monotonic()) == ""
    link.give_up()
    hub.server.close()


# ---- the server ----


@pytest.fixture
def server() -> Iterator[tuple[Server, list[Connection], list[str]]]:
    """Return a server for two ranks beside the hub, the joined connections, and the refusals."""
    poller, joined, refused, over = Poller(), list[Connection](), list[str](), threading.Event()
    one = Server(poller, HUB, range(1, 3), guard_messages.TO_HUB, joined.append, refused.append, loopback=True)

    def serve() -> None:
        while not over.is_set():
            poller.poll(0.02)
            one.maintain()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield one, joined, refused
    finally:
        over.set()
        thread.join()
        one.close()
        poller.close()


Served = tuple[Server, list[Connection], list[str]]


def ends(stranger: socket.socket) -> Stopwatch:
    """Return the time until the server closes the connection."""
    watch = Stopwatch()
    stranger.settimeout(600)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass
    return watch


def test_who_says_nothing_has_two_seconds(server: Served) -> None:
    with dial(server[0].port) as stranger:
        watch = ends(stranger)
        assert watch.wall_s() > STRANGER_S - 0.5
        assert watch.alone_s() < STRANGER_S + 1
    assert server[2] == [], "a probe of a port is nothing to tell"


@pytest.mark.parametrize("said", [b"x" * STRANGER_BYTES, b"hello\n", b"\n", b"{}\n{}\n"])
def test_who_says_something_else_is_sent_away_at_once(server: Served, said: bytes) -> None:
    with dial(server[0].port) as stranger:
        stranger.sendall(said)
        assert ends(stranger).alone_s() < 1
    wait_until(lambda: server[2] == ["127.1.0.1"], "the server has not seen it")


def test_of_strangers_the_oldest_makes_room(server: Served) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(dial(server[0].port, number)) for number in range(100)]
        assert ends(crowd[0]).alone_s() < 1
        join(server[0].port, HUB, 1, guard_messages.FROM_HUB).close()
        assert len(server[0]._strangers) < 70


def test_a_job_s_guard_is_let_in_and_has_one_connection(server: Served) -> None:
    first, second = (join(server[0].port, HUB, 2, guard_messages.FROM_HUB) for _ in range(2))
    assert ends(first.socket).alone_s() < 1
    wait_until(lambda: [connection.rank for connection in server[1]] == [2, 2], "the server has not seen it")
    assert server[0].connections[2] is server[1][1]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("key", "rank"),
    [(Key(secrets.token_hex(16), "hub"), 1), (Key(SECRET, "launch"), 1), (HUB, 3), (HUB, 0), (Key("", "hub"), 1)],
    ids=["another secret", "another service", "no such rank", "the hub's own", "no secret"],
)
def test_who_does_not_belong_to_the_job_is_not_let_in(server: Served, key: Key, rank: int) -> None:
    args = ("127.0.0.1", server[0].port, key)
    assert connections.connect(*args, rank=rank, fields=guard_messages.FROM_HUB, timeout_s=5) is None
    assert server[1] == []


class Wire:
    """A wire between client and server that records both directions."""

    def __init__(self, port: int) -> None:
        self.said: dict[str, bytes] = {"client": b"", "server": b""}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.thread = threading.Thread(target=self._carry, args=(port,))
        self.thread.start()

    def _carry(self, port: int) -> None:
        listener, connect = self._listener, socket.create_connection
        with listener, listener.accept()[0] as client, connect(("127.0.0.1", port)) as server:
            back = threading.Thread(target=self._pipe, args=("client", client, server))
            back.start()
            self._pipe("server", server, client)
            back.join()

    def _pipe(self, name: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self.said[name] += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def test_what_was_overheard_is_worth_nothing(server: Served) -> None:
    """The secret is not in it, and neither side's proof is accepted a second time."""
    wire = Wire(server[0].port)
    join(wire.port, HUB, 1, guard_messages.FROM_HUB).close()
    wait_until(lambda: server[1], "the server has not seen it")
    server[0].connections[1].close()
    wire.thread.join()
    assert SECRET.encode() not in wire.said["client"] + wire.said["server"]
    for said in (wire.said["client"], wire.said["server"]):
        with dial(server[0].port) as replay:
            replay.sendall(said.splitlines()[0] + b"\n")
            assert ends(replay).alone_s() < 1
    assert len(server[1]) == 1


def test_a_proof_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    nonce = authentication.new_secret()
    answer = authentication.answer(HUB, 1, authentication.greeting(nonce).rstrip())
    assert answer is not None
    assert authentication.verify(HUB, nonce, answer.line.rstrip()) == (1, answer.proof + b"\n")
    assert len(compared) == 1


FALSE_SERVERS: dict[str, Callable[[socket.socket], object]] = {
    "silent": lambda one: time.sleep(2),
    "endless": lambda one: [one.sendall(b"x" * 4096) for _ in range(10_000)],
    "another service": lambda one: one.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "without the secret": lambda one: one.sendall(
        b"dslpar " + b"0" * 32 + b"\n" + b"0" * 64 + b'\n{"end": true, "host_lost": true}\n'
    ),
    "an echo": lambda one: [one.sendall(b"dslpar " + b"0" * 32 + b"\n"), one.sendall(one.recv(4096))],
}


@pytest.mark.parametrize("name", FALSE_SERVERS)
def test_a_guard_does_not_listen_to_a_server_that_is_none_of_the_job(name: str) -> None:
    """The port of a guard that is gone may belong to another process by now."""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def serve() -> None:
            with contextlib.suppress(OSError), false.accept()[0] as one:
                FALSE_SERVERS[name](one)

        thread = threading.Thread(target=serve)
        thread.start()
        watch = Stopwatch()
        args = ("127.0.0.1", false.getsockname()[1], HUB)
        assert connections.connect(*args, rank=1, fields=guard_messages.FROM_HUB, timeout_s=0.5) is None
        assert watch.alone_s() < 1.5
        thread.join()


def test_a_message_goes_through_whole_whatever_it_holds(server: Served) -> None:
    guard = join(server[0].port, HUB, 1, guard_messages.FROM_HUB)
    text = 'line\n"quoted" \\ \x1b \udce4 Ä 🜚' * 5000
    guard.send({"stacks": guard_messages.cut(text), "at": ["stage 0", "step", 3]})
    found = list[guard_messages.Message]()

    def receive() -> bool:
        guard.flush()
        found.extend(server[1][0].receive() if server[1] else [])
        return bool(found)

    wait_until(receive, "the server has not seen it")
    guard.close()
    assert found[0]["stacks"] == guard_messages.cut(text)
    assert len(guard_messages.cut(text)) == guard_messages.MAX_TEXT < len(text)


def test_the_longest_report_fits_into_a_message() -> None:
    for character in ("\x00", "🜚", "\\", "\udce4"):
        report = marks.Report(marks.Rank(1, 2, "h", 3), "cause", 1.0, "e", guard_messages.cut(character * 10**6), "at")
        assert len(guard_messages.encode({"mark": "1.error", "text": json.dumps(report)})) < guard_messages.MAX_BYTES


# ---- the receiver ----

RECEIVER = """\
import pathlib, select, sys
sys.path.insert(0, {root!r})
from dslpar.watchdog.receiver import Receiver
from dslpar.watchdog.guard_server import Server
from dslpar.watchdog.job_watch import JobWatch
folder = pathlib.Path({folder!r})
with Receiver(folder / "marks", range(3), ("127.0.0.1",), folder / "secret", loopback=True) as receiver:
    print(receiver._server.port, flush=True)
    watch = JobWatch(folder / "marks", local=False)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        receiver.poll()
        assert not watch.poll()
"""


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("known", [False, True], ids=["strangers", "a guard gone mad"])
def test_a_receiver_is_not_harmed(tmp_path: Path, count: int, known: bool) -> None:
    (tmp_path / "marks").mkdir()
    code = RECEIVER.format(root=str(ROOT), folder=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    attack(port, count, Key((tmp_path / "secret").read_text(), "launch") if known else None)
    time.sleep(0.2)
    assert peak_bytes(process.pid) < MEMORY_BYTES
    said = process.communicate("over")[1].splitlines()
    assert process.returncode == 0, said
    assert list((tmp_path / "marks").iterdir()) == []
    begins = "dslpar launch: closes the connection to " if known else "dslpar launch: refuses a connection from 127."
    assert {line[: len(begins)] for line in said} == {begins}
    assert len(said) == 1, "once"


RIGHT = {
    "0.born": [0, 3, "node", 7],
    "0.error": [[0, 3, "node", 7], "cause", 1.5, "e", "text", "at"],
    "0.stopped": [3, "there", 75, False],
    "0.result": [2],
    "1.verdict": [[1, 3, "node", 0], 1.5, "hangs", "", "at", 9, False],
}
WRONG = {
    "0.born": ["x", [0, 3, "node"], [True, 3, "node", 7], [0, 3, "node", -7], {}, None, [1, 3, "node", 7]],
    "0.error": [[[0, 3, "node", 7], "news", 1.5, "e", "t", ""], [7, "cause", 1.5, "e", "t", ""], [], [[], 1]],
    "0.stopped": [[1e400, "", 0, False], ["3", "", 0, False], [3, "", 0, 1], [3, "", 0, False, 0]],
    "0.result": [2, ["2"], [2, 0], [-1], [True]],
    "1.verdict": [
        [[1, 3, "n", 0], float("nan"), "", "", "", 0, False],
        [[1, 3, "n", 0], 1, "", "", "", 77, False],
        [[1, 3, "n", 0], 1, "", "", "", 0, 1],
        [[1, 3, "n", 0], 1, "", "", "", 0],
        [[1, 3, "n", 0], 1, "", "", "", 0, True, True],
    ],
    "1.born": [[1, 3, "node", 7]],
    "0.board": ["x"],
    "../0.born": [[0, 3, "node", 7]],
}


def test_marks_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    """From rank 0's guard, only verdicts on other ranks are accepted."""
    (tmp_path / "marks").mkdir()
    with Receiver(tmp_path / "marks", range(3), ("127.0.0.1",), tmp_path / "secret", loopback=True) as receiver:
        key = Key((tmp_path / "secret").read_text(), "launch")

        def send(name: str, fields: object) -> None:
            poll = threading.Thread(target=lambda: [receiver.poll() or time.sleep(0.002) for _ in range(60)])
            poll.start()
            guard = join(receiver._server.port, key, 0, guard_messages.FROM_LAUNCH)
            guard.send({"mark": name, "text": fields if isinstance(fields, str) else json.dumps(fields)})
            poll.join()
            guard.close()

        for name, values in WRONG.items():
            for fields in values:
                send(name, fields)
                assert list((tmp_path / "marks").iterdir()) == [], (name, fields)
        for name, fields in RIGHT.items():
            send(name, fields)
        assert {path.name for path in (tmp_path / "marks").iterdir()} == set(RIGHT)
        watch = JobWatch(tmp_path / "marks", local=False)
        assert watch.poll()
        assert watch.started() == [marks.Rank(0, 3, "node", 7)]
        assert watch.result() == marks.Result(2)


def test_a_watch_passes_over_what_is_no_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0.born").write_text(json.dumps(RIGHT["0.born"]))
    for number, text in enumerate(("[" * 200_000, "\0", "{}", "[[1], 2]", '"x"', "9" * 5000)):
        for kind in marks.KINDS[:-1]:
            (tmp_path / f"{number + 1}.{kind}").write_text(text)
    watch = JobWatch(tmp_path, local=False)
    assert not watch.poll()
    assert watch.started() == [marks.Rank(0, 3, "node", 7)]
    assert watch.stopped() is watch.first_failure(None) is None
    assert "1.born is not a valid mark of a rank, and is ignored" in capsys.readouterr().err
    assert not watch.poll()
    assert capsys.readouterr().err == "", "once"


def test_no_hostile_line_is_a_message() -> None:
    """Parsing is total in both directions, and accepted messages have the right types."""
    for fields in (
        guard_messages.TO_HUB,
        guard_messages.FROM_HUB,
        guard_messages.TO_LAUNCH,
        guard_messages.FROM_LAUNCH,
    ):
        for line in hostile_lines(3_000, seed=1):
            message = guard_messages.decode(line.rstrip(b"\n"), fields)
            assert message is None or {"failed", "end", "show", "stuck", "stop", "bye"}.isdisjoint(message)
    for line in hostile_lines(3_000, seed=2):
        for kind in marks.KINDS[:-1]:
            marks.parse(kind, line.decode(errors="replace"))


def test_services_have_names_of_their_own() -> None:
    assert peers.HUB != peers.LAUNCH
