"""Guards of ranks: which rank is reported first, and that all processes end, whatever became of a rank.

Processes and guards are real. The ranks only do what a test asks for, so that torch need not start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import processes_with
from dslpar.watchdog import guard, processes, rank_monitor
from dslpar.watchdog.guard import TRANSITIONS, Event, Guard, State
from dslpar.watchdog.hang_analysis import NO_STACK
from dslpar.watchdog.peers import HELD_BACK_S, SILENCE_S, Peer
from dslpar.watchdog.rank_process import Settings
from dslpar.watchdog.receiver import Receiver
from dslpar.watchdog.status_page import TOO_LATE, Ending, StatusPage
from dslpar.watchdog.verdicts import EndReason
from tests.support.guarded_ranks import WAITS, Ranks
from tests.support.runs import ROOT
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import wait, wait_until

AT_2 = "[rank 2 of 3 on host1, stage 2 (pipe 2, data 0, tensor 0), step 7]"


def test_a_rank_that_is_killed_is_told_by_its_guard_and_ends_the_others(tmp_path: Path) -> None:
    with Ranks(tmp_path, WAITS, WAITS, "os.kill(os.getpid(), signal.SIGKILL)") as ranks:
        assert ranks.statuses() == [1, 1, -signal.SIGKILL]
        line = f"{AT_2} was the first to end, by SIGKILL: most often from the kernel's out-of-memory killer"
        unknown = f"{AT_2} was the first to end, without a message"
        (said,) = ranks.all_said()
        assert said == line or said.startswith(unknown), "the others are silent"


def test_an_exception_ends_the_others_in_silence(tmp_path: Path) -> None:
    with Ranks(tmp_path, WAITS, WAITS, "raise ValueError('wrong')") as ranks:
        assert ranks.statuses() == [1, 1, 1]
        assert ranks.said(2).startswith(f"{AT_2} Traceback (most recent call last):\n")
        assert ranks.said(2).endswith("ValueError: wrong\n")
        assert ranks.said(0) == ranks.said(1) == ""


BY_ABORT = "crashed first, by SIGABRT, which is also how NCCL's watchdog ends a rank that has lost a peer"
LOSES_PEER = "raise RuntimeError('[/pytorch/third_party/gloo/pair.cc:1] Connection closed by peer')"


def when_all_have_met(then: str, later_s: float = 0.0) -> str:
    """Return code that begins at the same time in all ranks that have it, not when each is ready on a busy machine."""
    return f"\nwhile not meeting.with_name('go').exists(): time.sleep(0.01)\ntime.sleep({later_s}); {then}"


def let_go(ranks: Ranks) -> None:
    ranks.wait_until_met()
    (ranks.folder / "go").touch()


@pytest.mark.prove  # `make test` has tests/system/test_faults.py
@pytest.mark.parametrize("aborted", [1, 0])
def test_an_abort_is_told_when_no_better_cause_was(tmp_path: Path, aborted: int) -> None:
    """The host whose guard waits does not count as silent, and consequences are not reported meanwhile."""
    then = [WAITS, WAITS, when_all_have_met(LOSES_PEER, 0.5)]
    then[aborted] = when_all_have_met("os.abort()")
    with Ranks(tmp_path, *then) as ranks:
        let_go(ranks)
        assert ranks.statuses() == [-signal.SIGABRT if rank == aborted else 1 for rank in range(3)]
        assert ranks.watch.wall_s() > HELD_BACK_S - 1
        said = ranks.said(aborted)
        assert re.match(
            rf"{re.escape(at(aborted))} {BY_ABORT} \(no better cause was known \d+ s later\):\nFatal Py", said
        )
        assert [ranks.said(rank) for rank in range(3) if rank != aborted] == ["", ""]


@pytest.mark.prove
@pytest.mark.parametrize("aborted", [1, pytest.param(0, marks=pytest.mark.prove)])
def test_a_better_cause_than_an_abort_is_told_alone(tmp_path: Path, aborted: int) -> None:
    then = [WAITS, WAITS, when_all_have_met("raise ValueError('wrong')", 2.0)]
    then[aborted] = when_all_have_met("os.abort()")
    with Ranks(tmp_path, *then) as ranks:
        let_go(ranks)
        assert ranks.statuses() == [-signal.SIGABRT if rank == aborted else 1 for rank in range(3)]
        assert ranks.said(2).startswith(f"{AT_2} Traceback (most recent call last):\n")
        assert ranks.said(0) == ranks.said(1) == ""


@pytest.mark.prove
def test_a_host_whose_loss_has_made_a_rank_abort_is_told(tmp_path: Path) -> None:
    with Ranks(tmp_path, WAITS, when_all_have_met("os.abort()"), WAITS) as ranks:
        ranks.wait_until_met()
        for pid in (ranks.guard_of(2), ranks.processes[2].pid):
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert [process.wait(15) for process in ranks.processes[:2]] == [1, -signal.SIGABRT]
        begins = f"{AT_2} is silent for 6 s, and with it all of host1 (ranks 2): the host is gone, or cut off"
        assert ranks.all_said() == [begins]


@pytest.mark.prove
def test_ranks_that_are_killed_for_an_abort_are_not_to_blame(tmp_path: Path) -> None:
    """mpirun kills them so, the hub's rank included: its guard continues to serve."""
    with Ranks(tmp_path, WAITS, when_all_have_met("os.abort()"), WAITS) as ranks:
        let_go(ranks)
        time.sleep(1)
        for rank in (0, 2):
            ranks.processes[rank].kill()
        assert ranks.statuses() == [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGKILL]
        assert ranks.said(1).startswith(f"{at(1)} {BY_ABORT} (no better cause was known ")
        assert ranks.said(0) == ranks.said(2) == ""


@pytest.mark.prove
@pytest.mark.parametrize("aborted", [1, 0])
def test_guards_that_are_killed_for_an_abort_are_no_hosts_that_are_gone(tmp_path: Path, aborted: int) -> None:
    """mpirun kills each rank's process group."""
    aborts = when_all_have_met("os.abort()")
    with Ranks(tmp_path, *(aborts if rank == aborted else WAITS for rank in range(3))) as ranks:
        ranks.wait_until_met()
        others = [rank for rank in range(3) if rank != aborted]
        pids = [pid for rank in others for pid in (ranks.guard_of(rank), ranks.processes[rank].pid)]
        (tmp_path / "go").touch()
        time.sleep(1)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert ranks.processes[aborted].wait(10) == -signal.SIGABRT
        assert ranks.statuses().count(-signal.SIGKILL) == 2
        # Rank 0's guard, which knows the order, may be among the killed ones.
        how = BY_ABORT if aborted == 0 else BY_ABORT.replace("crashed first", "crashed")
        note = "" if aborted == 0 else "which rank ended first is unknown; "
        assert ranks.said(aborted).startswith(f"{at(aborted)} {how} ({note}no better cause was known ")
        assert [ranks.said(rank) for rank in others] == ["", ""]


@pytest.mark.prove
def test_ranks_that_abort_all_at_once_end_as_one(tmp_path: Path) -> None:
    with Ranks(tmp_path, "os.abort()", "os.abort()", "os.abort()") as ranks:
        assert ranks.statuses() == [-signal.SIGABRT] * 3
        assert 1 <= "\n".join(ranks.all_said()).count(BY_ABORT) <= 3


@pytest.mark.prove
@pytest.mark.parametrize("gone", [2, 0])
def test_a_host_that_is_gone(tmp_path: Path, gone: int) -> None:
    """Processes and guards are frozen: no packet, no end of a connection. The remaining ranks end, the hub or the
    others.
    """
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks:
        ranks.wait_until_met()
        for pid in (ranks.guard_of(gone), ranks.processes[gone].pid):
            os.kill(pid, signal.SIGSTOP)
        left = [process for rank, process in enumerate(ranks.processes) if rank != gone]
        assert [wait(process) for process in left] == [1, 1]
        assert ranks.watch.wall_s() > SILENCE_S - 1.5
        assert ranks.watch.alone_s() < 14
        lines = ranks.all_said()
        if gone:
            begins = f"{AT_2} is silent for 6 s, and with it all of host1 (ranks 2): the host is gone, or cut off"
            assert lines == [begins]
        else:
            assert len(lines) in (1, 2), "each finds out by itself, or is told before it does"
            begins = "[rank 0 of 3 on host0, stage 0 (pipe 0, data 0, tensor 0), step 7] is silent for 6 s, and with it"
            assert all(line.startswith(begins) for line in lines)


LAUNCHER = """\
import signal, subprocess, sys, time
subprocess.Popen([sys.executable, *sys.argv[1:]])
subprocess.Popen(["bash", "-c", "exec -a ssh sleep 600"])
{deaf}
time.sleep(600)
"""


@pytest.mark.prove
@pytest.mark.parametrize("deaf", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_a_launcher_that_waits_for_a_host_that_is_gone_is_ended(tmp_path: Path, deaf: bool) -> None:
    """Its rank's guard ends it, with the ssh that it started; processes above it stay.

    This is also the test of a lost host, whose silence takes six seconds each time.
    """
    launcher = tmp_path / "prterun"
    launcher.write_text(LAUNCHER.format(deaf="signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else ""))
    with Ranks(tmp_path, WAITS, WAITS, WAITS, launcher=launcher) as ranks:
        ranks.wait_until_met()
        for pid in (ranks.guard_of(2), ranks.processes[2].pid):
            os.kill(pid, signal.SIGSTOP)
        assert wait(ranks.processes[0]) == (-signal.SIGKILL if deaf else -signal.SIGTERM)
        assert wait(ranks.processes[1]) == 1
        wait_until(lambda: all(_is_stopped(pid) for pid in processes_with(ranks.mark)), "more than the stopped stays")
        assert ranks.all_said() == [
            f"{AT_2} is silent for 6 s, and with it all of host1 (ranks 2): the host is gone, or cut off"
        ]


def _is_stopped(pid: int) -> bool:
    return processes.stat(pid)[:1] == ["T"]


@pytest.mark.prove
def test_what_was_last_heard_is_not_taken_for_where_a_rank_is(tmp_path: Path) -> None:
    """A step may be shorter than the time between heartbeats, so the hub's own step counts."""
    then = "monitor.page.enter('step', 900); wait(600)"
    quick = "time.sleep(1.5); os.kill(int(open('/proc/self/task/%d/children' % os.getpid()).read()), signal.SIGSTOP); "
    with Ranks(tmp_path, then, then, quick + then) as ranks:
        ranks.processes[0].wait(15)
        assert "[rank 2 of 3 on host1, stage 2 (pipe 2, data 0, tensor 0), step 900] is silent for 6 s" in ranks.said(0)


@pytest.mark.prove
def test_a_guard_that_was_held_up_accuses_nobody(tmp_path: Path) -> None:
    with Ranks(tmp_path, WAITS, WAITS) as ranks:
        ranks.wait_until_met()
        hub = ranks.guard_of(0)
        os.kill(hub, signal.SIGSTOP)
        time.sleep(4)
        os.kill(hub, signal.SIGCONT)
        time.sleep(1)
        assert [process.poll() for process in ranks.processes] == [None, None]
        assert ranks.all_said() == []


@pytest.mark.parametrize("hub", ["x", "::", "host:99999:", "host:1:x:y", ":1:", "a" * 300 + ".b:1:", "\x00"])
def test_what_strangers_write_into_torch_s_store_ends_no_guard(tmp_path: Path, hub: str) -> None:
    one = guard_of_a_rank(tmp_path, 1, 2)
    one.rank.page.hub = hub
    one._connect_to_hub()
    assert one.state is State.WATCHING
    one.poller.close()


def guard_of_a_rank(folder: Path, rank: int, world: int, *, supervised: bool = False) -> Guard:
    """Return the guard of this process."""
    path = folder / f"{rank}.board"
    StatusPage(path, make=True)
    page = os.open(path, os.O_RDWR)
    return Guard(Settings(rank, world, "host0", os.getpid(), str(folder), False, page, "", "", 0, True, supervised))


def test_a_guard_that_was_held_up_before_it_met_the_others_accuses_nobody(tmp_path: Path) -> None:
    one = guard_of_a_rank(tmp_path, 1, 2)
    one._forgive(60.0)
    one._look_for_silence()
    assert one.state is State.WATCHING
    one.poller.close()


def test_a_guard_of_rank_0_that_was_never_met_ends_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its port may be closed between hosts, while training uses another network."""
    one = guard_of_a_rank(tmp_path, 1, 2)
    one.rank.page.hub = "10.0.0.1:4711:secret"
    one.link.wanted_s = one.now - SILENCE_S - 1
    one._look_for_silence()
    one._look_for_silence()
    assert one.state is State.WATCHING
    said = "cannot reach the guard of rank 0 at 10.0.0.1:4711: failures elsewhere are not reported here"
    assert capfd.readouterr().err == f"[rank 1 of 2 on host0] {said}\n"
    one.poller.close()


MEETS = """\
import os, pathlib, sys, time
sys.path.insert(0, {root!r})
from dslpar.distributed import bootstrap, rendezvous
class Store:
    path = pathlib.Path({folder!r}, "hub")
    def set(self, key, value):
        self.path.with_suffix(".part").write_text(value)
        self.path.with_suffix(".part").rename(self.path)
    def get(self, key):
        while not self.path.exists():
            time.sleep(0.01)
        return self.path.read_bytes()
place = bootstrap.DistributedEnv({rank}, 2, {rank}, 2, "127.0.1.1", 1)
monitor = bootstrap.monitor_rank(place, os.environ)
rendezvous._connect_guards(place, monitor, Store())
monitor.wait_for_rank_0(0.7 if place.rank == 0 else 10)
sys.exit(place.rank == 1 and not monitor.page.rank_0_left)
"""


def test_guards_meet_where_the_ranks_do(tmp_path: Path) -> None:
    """All ranks are on one host with MASTER_ADDR=$(hostname): on Debian a loopback address other than 127.0.0.1."""
    environ = {key: text for key, text in os.environ.items() if key != rank_monitor.REPORTS}
    codes = [MEETS.format(root=str(ROOT), folder=str(tmp_path), rank=rank) for rank in (0, 1)]
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=environ) for code in codes]
    assert [process.wait(30) for process in ranks] == [0, 0]


CROWD = """\
import os, resource, sys
sys.path.insert(0, {root!r})
limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))
from dslpar.watchdog import guard_messages, connections, rank_monitor
from dslpar.watchdog.authentication import Key
from dslpar.watchdog.marks import Rank
monitor = rank_monitor.monitor_rank(Rank(0, 80, "host0", os.getpid()), os.environ)
port = monitor.guard_port()
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
lines = []
for rank in range(1, 80):
    key = Key(monitor.secret, "hub")
    lines.append(connections.connect("127.0.0.1", port, key, rank=rank, fields=guard_messages.FROM_HUB, timeout_s=600))
    lines[-1].send(dict(who="rank %d" % rank, host="host0", at=["", "", 0]))
for line in lines:
    line.socket.settimeout(600)
    assert b"rank 0 of 80" in line.socket.recv(4096)
"""


def test_a_guard_has_room_for_more_ranks_than_a_process_may_have_files(tmp_path: Path) -> None:
    """Most systems allow 1,024 files: a job with as many ranks would report rank 0's host as lost."""
    environ = {key: text for key, text in os.environ.items() if key != rank_monitor.REPORTS}
    crowd = subprocess.run([sys.executable, "-c", CROWD.format(root=str(ROOT))], env=environ)
    assert crowd.returncode == 0


EARLY = """\
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
from dslpar.watchdog import rank_monitor
from dslpar.watchdog.marks import Rank
monitor = rank_monitor.monitor_rank(Rank(0, 2, "host0", os.getpid()), os.environ)
(guard,) = pathlib.Path("/proc/self/task/%d/children" % os.getpid()).read_text().split()
assert monitor.secret not in pathlib.Path("/proc", guard, "cmdline").read_text(), "it is for all users to see"
os.kill(int(guard), signal.SIGTERM)
assert monitor.guard_port()
"""


def test_a_signal_to_the_group_does_not_end_a_guard_that_starts(tmp_path: Path) -> None:
    environ = {key: text for key, text in os.environ.items() if key != rank_monitor.REPORTS}
    assert subprocess.run([sys.executable, "-c", EARLY.format(root=str(ROOT))], env=environ).returncode == 0


@pytest.mark.parametrize("status", [3, pytest.param(0, marks=pytest.mark.prove)])
def test_a_rank_that_leaves_by_itself_in_the_middle_ends_the_others(tmp_path: Path, status: int) -> None:
    """With status 0 no launcher would end the others: they would wait until the hang is reported, for another rank."""
    with Ranks(tmp_path, WAITS, WAITS, f"sys.exit({status})") as ranks:
        assert ranks.statuses() == [1, 1, status]
        how = "was the first to end, by sys.exit"
        (said,) = ranks.all_said()
        assert said.startswith(f"{AT_2} {how}")
        assert said.endswith(": it left in the middle of the run")


@pytest.mark.prove
def test_a_job_that_was_suspended_does_not_hang(tmp_path: Path) -> None:
    """`scontrol suspend` stops rank and guard alike."""
    with Ranks(tmp_path, "monitor.page.enter('step', 8, 2.0); time.sleep(4); monitor.page.enter('ending')") as ranks:
        both = ranks.guard_of(0), ranks.processes[0].pid
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in both:
                os.kill(pid, number)
            time.sleep(3 if number == signal.SIGSTOP else 0)
        assert ranks.statuses() == [0]
        assert ranks.all_said() == []


@pytest.mark.prove
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.prove)])
def test_a_guard_that_is_killed_is_replaced(tmp_path: Path, victim: int) -> None:
    """The out-of-memory killer may take a guard as well as a rank. Its rank is fine, and the job continues, guarded as
    before.
    """
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks:
        ranks.wait_until_met()
        os.kill(ranks.guard_of(victim), signal.SIGKILL)
        time.sleep(SILENCE_S + 2)
        assert [process.poll() for process in ranks.processes] == [None] * 3
        assert ranks.all_said() == [f"{at(victim)} its guard was ended by SIGKILL; another one is started"]
        os.kill(ranks.processes[2].pid, signal.SIGKILL)
        assert ranks.statuses() == [1, 1, -signal.SIGKILL]
        assert ranks.all_said()[-1].startswith(f"{AT_2} was the first to end")


@pytest.mark.prove
def test_a_guard_that_is_killed_again_and_again_is_what_the_end_of_the_job_is_put_down_to(tmp_path: Path) -> None:
    with Ranks(tmp_path, WAITS, WAITS, WAITS) as ranks:
        ranks.wait_until_met()
        for number in range(4):
            os.kill(ranks.guard_of(1), signal.SIGKILL)
            while ranks.said(1).count("its guard was ended by SIGKILL") <= number:
                time.sleep(0.05)
        assert [ranks.processes[rank].wait(20) for rank in (0, 2)] == [1, 1], "the other one is its launcher's to end"
        assert ranks.said(1).splitlines()[-1] == (
            f"{at(1)} its guard was ended by SIGKILL, as 3 before it; no other one is started"
        )
        how = "is silent for 6 s, since its guard was killed, and the rank has started no other guard"
        assert ranks.said(0).splitlines()[-1] == f"{at(1)} {how}"


@pytest.mark.prove
def test_a_rank_whose_folder_a_cleaner_has_deleted_is_well(tmp_path: Path) -> None:
    """Its guard is still replaced, and the cause of a failure is still reported."""
    reports = tmp_path / "reports"
    reports.mkdir()
    then = "\nwhile not meeting.with_name('fail').exists(): time.sleep(0.01)\nraise ValueError('wrong')"
    with Ranks(tmp_path, then, reports=str(reports)) as ranks:
        shutil.rmtree(reports)
        os.kill(ranks.guard_of(0), signal.SIGKILL)
        time.sleep(2)
        (tmp_path / "fail").touch()
        assert ranks.statuses() == [1]
        assert ranks.all_said()[0].endswith("its guard was ended by SIGKILL; another one is started")
        assert ranks.all_said()[-1] == "ValueError: wrong"


TERMINATES = """\
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the rank's status is taken at once
rank = subprocess.Popen([sys.executable, *sys.argv[1:]])
while not pathlib.Path(__file__).with_name("ready0").exists():
    time.sleep(0.01)
rank.terminate()
time.sleep(2)
"""


def test_a_rank_that_was_told_to_end_before_it_could_promise_anything_is_not_told_as_killed(tmp_path: Path) -> None:
    """torchrun or deepspeed do so when rank 0 refuses the config; when the guard looks, they have reaped the status."""
    launcher = tmp_path / "launcher"
    launcher.write_text(TERMINATES)
    with Ranks(tmp_path, WAITS, launcher=launcher) as ranks:
        assert ranks.statuses() == [0]
        assert ranks.all_said() == []


def at(rank: int) -> str:
    """Return the beginning of a line from one of three ranks."""
    return f"[rank {rank} of 3 on host{rank // 2}, stage {rank} (pipe {rank}, data 0, tensor 0), step 7]"


def hang(seconds: float = 1.0) -> str:
    return f"monitor.page.enter('step', 8, {seconds}); "


def test_a_hang_is_told_with_the_stacks_of_all_and_who_holds_them_up(tmp_path: Path) -> None:
    """The others are in a collective. Rank 1 holds the GIL, so that none of its threads can do anything."""
    holds = "import re; re.match('(a*)*b', 'a' * 60)"
    with Ranks(tmp_path, hang() + WAITS, hang() + holds, hang() + WAITS) as ranks:
        assert ranks.statuses() == [1, -signal.SIGKILL, 1]
        text = "\n".join(ranks.all_said())
        assert "[rank 1 of 3 on host0, stage 1 (pipe 1, data 0, tensor 0), step 8] hangs (stage " in text
        assert "step 8 takes longer than 1 s); it is in " in text
        assert ", while 2 of 3 ranks wait in a collective:" in text
        for rank in range(3):
            assert (
                f"---- rank {rank} of 3 on host{rank // 2}, stage {rank} (pipe {rank}, data 0, tensor 0), step 8"
                in text
            )
        assert 1 <= text.count(" in all_reduce\n") <= 2, "equal stacks stand there once"
        assert "match\n" in text, "what it does in C is not to be seen, who called it is"


@pytest.mark.prove
def test_a_stopped_rank_has_no_stack(tmp_path: Path) -> None:
    with Ranks(tmp_path, hang() + WAITS, hang() + "os.kill(os.getpid(), signal.SIGSTOP)") as ranks:
        assert ranks.statuses() == [1, -signal.SIGKILL]
        text = "\n".join(ranks.all_said())
        assert "it is stopped, or deep in the kernel, while 1 of 2 ranks wait in a collective" in text
        assert NO_STACK in text


@pytest.mark.prove
def test_a_rank_that_hangs_on_leaving_is_ended_though_the_hub_has_left(tmp_path: Path) -> None:
    leaves = "monitor.page.enter('ending', 8)"
    with Ranks(tmp_path, leaves, "monitor.page.enter('ending', 8, 2.0); time.sleep(600)") as ranks:
        assert ranks.statuses() == [0, 1]
        (said, *stacks) = ranks.all_said()
        place = "[rank 1 of 2 on host0, stage 1 (pipe 1, data 0, tensor 0), ending after step 8]"
        assert said.startswith(f"{place} hangs (stage 1 (pipe 1, data 0, tensor 0), ending after step 8 takes longer")
        assert stacks


ENDS = "; monitor.page.enter('ending')"


def test_no_bound_no_hang(tmp_path: Path) -> None:
    """Building a model may take any time."""
    with Ranks(tmp_path, "monitor.page.enter('building'); time.sleep(2)" + ENDS, "time.sleep(2)" + ENDS) as ranks:
        assert ranks.statuses() == [0, 0]
        assert ranks.all_said() == []


PROMISE = "monitor.stop_on_signal(1.0, 75); pathlib.Path(meeting.parent, 'promised').touch(); "


def promised(folder: Path) -> None:
    while not (folder / "promised").exists():
        time.sleep(0.02)


def test_sigterm_is_a_flag(tmp_path: Path) -> None:
    then = PROMISE + "\nwhile not monitor.stop_requested: time.sleep(0.01)\nsys.exit(monitor.mark_stopped(7, 'there'))"
    with Ranks(tmp_path, then) as ranks:
        promised(tmp_path)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.statuses() == [75]
        assert ranks.all_said() == []


@pytest.mark.parametrize("busy", ["time.sleep(600)", "import re; re.match('(a*)*b', 'a' * 60)"], ids=["sleeps", "in C"])
def test_what_does_not_stop_in_time_is_ended(tmp_path: Path, busy: str) -> None:
    """This holds even if the GIL is held, when no handler and no thread of the rank can run."""
    with Ranks(tmp_path, PROMISE + busy) as ranks:
        promised(tmp_path)
        watch = Stopwatch()
        ranks.processes[0].send_signal(signal.SIGTERM)
        ranks.processes[0].send_signal(signal.SIGTERM)  # from a launcher, and from the launcher's launcher
        (status,) = ranks.statuses()
        assert watch.wall_s() > 0.9
        assert watch.alone_s() < 8
        assert status == (75 if "sleep" in busy else -signal.SIGKILL)
        place = "[rank 0 of 1 on host0, stage 0 (pipe 0, data 0, tensor 0), step 7]"
        assert ranks.all_said() == [f"{place} {TOO_LATE}"], "by its guard, and no out-of-memory killer"


@pytest.mark.prove
def test_a_rank_that_has_stopped_in_order_may_take_its_time_to_leave(tmp_path: Path) -> None:
    """A launcher that sees another rank leave sends SIGTERM again, and monitors may have much to close."""
    then = "monitor.stop_on_signal(6.0, 75); pathlib.Path(meeting.parent, 'promised').touch()\n"
    then += "while not monitor.stop_requested: time.sleep(0.01)\n"
    then += "monitor.mark_stopped(7, 'there'); time.sleep(4); sys.exit(75)"
    with Ranks(tmp_path, then) as ranks:
        promised(tmp_path)
        ranks.processes[0].send_signal(signal.SIGTERM)
        time.sleep(2.3)
        again = time.monotonic()
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.statuses() == [75]
        assert time.monotonic() - again > 1
        assert ranks.all_said() == []


@pytest.mark.prove
def test_a_fork_of_a_rank_has_its_own_signals(tmp_path: Path) -> None:
    """A worker that SIGTERM ends does not stop the run."""
    then = PROMISE + "\npid = os.fork()\nif pid == 0: time.sleep(600)\n"
    then += "time.sleep(0.3); os.kill(pid, signal.SIGTERM); status = os.waitpid(pid, 0)[1]; time.sleep(2)\n"
    then += "sys.exit(0 if status == signal.SIGTERM and not monitor.stop_requested else 1)"
    with Ranks(tmp_path, then) as ranks:
        assert ranks.statuses() == [0]


# ---- reports over a network ----


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    (tmp_path / "marks").mkdir()
    with Receiver(tmp_path / "marks", range(3), ("127.0.0.1",), tmp_path / "secret", loopback=True) as server:
        yield server


def look(receiver: Receiver, until: str) -> str:
    """Wait for a mark, and return its text."""
    path = receiver.folder / until

    def received() -> bool:
        receiver.poll()
        return path.exists()

    # a guard does not wait long for an answer
    wait_until(received, lambda: f"{until}: {sorted(receiver.folder.iterdir())}", longest_pause_s=0.02)
    return path.read_text()


def test_marks_come_over_the_network(tmp_path: Path, receiver: Receiver) -> None:
    dies = when_all_have_met("os.kill(os.getpid(), signal.SIGKILL)")
    with Ranks(tmp_path, WAITS, dies, reports=receiver.variable) as ranks:
        # First: rank 1's death ends rank 0, which on a busy machine may not have started by then.
        assert json.loads(look(receiver, "0.born"))[:2] == [0, 2]
        (ranks.folder / "go").touch()
        verdict = json.loads(look(receiver, "1.verdict"))
        assert verdict[2].startswith("was the first to end, ")
        assert verdict[4] == "stage 1 (pipe 1, data 0, tensor 0), step 7"
        assert ranks.statuses()[0] == 1
        assert ranks.all_said() == [], "`dslpar launch` says it"


def test_a_stop_goes_over_the_network(tmp_path: Path, receiver: Receiver) -> None:
    then = PROMISE + "\nwhile not monitor.stop_requested: time.sleep(0.01)\nsys.exit(monitor.mark_stopped(7, 'there'))"
    with Ranks(tmp_path, then, reports=receiver.variable) as ranks:
        promised(tmp_path)
        look(receiver, "0.born")
        receiver.send_stop(signal.SIGTERM)
        assert json.loads(look(receiver, "0.stopped")) == [7, "there", 75, False]
        assert ranks.statuses() == [75]


def test_ranks_end_when_dslpar_launch_is_gone(tmp_path: Path, receiver: Receiver) -> None:
    with Ranks(tmp_path, "time.sleep(600)", reports=receiver.variable) as ranks:
        look(receiver, "0.born")
        receiver.__exit__(None, None, None)
        assert ranks.statuses() == [1]
        assert "[rank 0 of 1 on host0] ends because `dslpar launch` is gone" in ranks.all_said()


@pytest.mark.prove
def test_ranks_that_have_promised_to_stop_in_order_do_so_when_dslpar_launch_is_gone(
    tmp_path: Path, receiver: Receiver
) -> None:
    then = PROMISE + "\nwhile not monitor.stop_requested: time.sleep(0.01)\n"
    then += "pathlib.Path(meeting.parent, 'saved').touch(); sys.exit(monitor.mark_stopped(7, 'there'))"
    with Ranks(tmp_path, then, reports=receiver.variable) as ranks:
        promised(tmp_path)
        look(receiver, "0.born")
        receiver.__exit__(None, None, None)
        assert ranks.statuses() == [75]
        assert (tmp_path / "saved").exists()
        assert ranks.all_said() == ["[rank 0 of 1 on host0] ends because `dslpar launch` is gone"]


# ---- the state machine ----


def test_the_table_of_the_docstring_is_the_one_that_is_used() -> None:
    lines = str(guard.__doc__).splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == ["event"])
    states = [State[name] for name in lines[start].split()[1:]]
    assert states == list(State)
    rows = [re.split(r"  +", line.strip()) for line in lines[start + 1 : start + 1 + len(Event)]]
    assert [row[0] for row in rows] == [event.name for event in Event] == [event.name for event in TRANSITIONS]
    for name, *cells in rows:
        assert len(cells) == len(State)
        for state, cell in zip(states, cells, strict=True):
            assert cell == written(state, TRANSITIONS[Event[name]].get(state)), (name, state)


def written(state: State, transition: guard.Transition | None) -> str:
    """Return a cell of the table in a state's column."""
    if transition is None:
        return "-"
    return transition.action.__name__ + (
        f" -> {transition.next.name}" if transition.next and transition.next is not state else ""
    )


class Recorder:
    """Replaces a guard: its actions are recorded and not carried out."""

    def __init__(self, state: State) -> None:
        self.state, self.done = state, list[str]()

    handle = Guard.handle


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_every_event_in_every_state(event: Event, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event is handled or ignored, and nothing leaves the end state: a rank that is gone stays gone."""
    transition = TRANSITIONS[event].get(state)
    if transition is not None:
        action = lambda one, *details: one.done.append(transition.action.__name__)  # noqa: E731
        monkeypatch.setitem(TRANSITIONS, event, {state: transition._replace(action=action)})  # type: ignore[misc]
    one: Any = Recorder(state)
    one.handle(event)
    assert one.done == ([transition.action.__name__] if transition else [])
    assert one.state is ((transition.next if transition else None) or state)
    if state is State.GONE:
        assert transition is None
    if state in (State.ENDING, State.HOLDING):
        assert one.state in (state, State.GONE)


def test_an_event_that_an_action_causes_comes_first(tmp_path: Path) -> None:
    """The rank is gone, and handling that reveals its failure."""
    one = guard_of_a_rank(tmp_path, 0, 1, supervised=True)
    one._notice_end()
    assert one.state is State.GONE
    assert json.loads((tmp_path / "0.verdict").read_text())[2].startswith("was the first to end")
    one.poller.close()


class Sent:
    """Replaces a connection: messages are recorded."""

    open = True

    def __init__(self) -> None:
        self.sent = list[Any]()

    def send(self, message: object) -> None:
        self.sent.append(message)

    def flush(self) -> None: ...


def guard_of_an_aborted_rank(folder: Path, monkeypatch: pytest.MonkeyPatch, world: int = 3) -> Guard:
    """Return the hub of a rank that has ended by SIGABRT; the hub has not noticed yet."""
    one = guard_of_a_rank(folder, 0, world)
    monkeypatch.setattr(one.rank, "wait_status", lambda: int(signal.SIGABRT))
    return one


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (0, ""),
        (1, "was the first to end, with status 3, by os._exit or C's exit"),
        (None, "ended, with status 3, by os._exit or C's exit (which rank ended first is unknown)"),
    ],
)
def test_of_ranks_that_leave_together_one_is_named_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    first: int | None,
    said: str,
) -> None:
    """Each guard finds its own rank gone before it hears of another one, and asks rank 0's guard, the hub."""
    monkeypatch.setattr(guard, "_ANSWER_S", 0.05)
    one = guard_of_a_rank(tmp_path, 1, 2)
    monkeypatch.setattr(one.rank, "wait_status", lambda: 3 << 8)
    connection: Any = Sent()

    def send(message: object) -> None:
        connection.sent.append(message)
        if message == {"failed": True} and first is not None:
            one._handle_hub({"end": True, "first": first})

    connection.send = send
    one.link.connection = connection
    one._notice_end()
    assert {"failed": True} in connection.sent
    assert capfd.readouterr().err == (f"[rank 1 of 2 on host0] {said}\n" if said else "")
    assert one.state is State.GONE
    one.poller.close()


@pytest.mark.parametrize("own_first", [True, False])
def test_the_hub_decides_by_what_it_has_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_first: bool
) -> None:
    one = guard_of_a_rank(tmp_path, 0, 2)
    monkeypatch.setattr(one.rank, "wait_status", lambda: 3 << 8)
    connection: Any = Sent()
    assert one.hub is not None
    one.hub.peers = {1: Peer(connection, 1, "host1", one.now)}
    happens = [one._notice_end, lambda: one._handle_peer(1, {"failed": True})]
    for event in happens if own_first else reversed(happens):
        event()
    ends = [message for message in connection.sent if message.get("end")]
    assert [message["first"] for message in ends] == [0 if own_first else 1]
    said = capfd.readouterr().err
    assert said.startswith("[rank 0 of 2 on host0] was the first to end, with status 3") if own_first else said == ""
    one.poller.close()


def test_an_abort_is_held_back_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one = guard_of_an_aborted_rank(tmp_path, monkeypatch)
    one._tick()
    one._tick()
    assert one.state is State.HOLDING
    assert json.loads((tmp_path / "0.verdict").read_text())[-2:] == [signal.SIGABRT, True], "`dslpar launch` may know"
    assert capfd.readouterr().err == ""
    one._held_since_s -= HELD_BACK_S + 0.1
    one._tick()
    assert one.state is State.GONE
    unknown = "which rank ended first is unknown; no better cause was known 7 s later"
    assert capfd.readouterr().err.endswith(f"that has lost a peer ({unknown})\n"), "no other guard has connected"
    assert one.rank.page.ending
    one.poller.close()


@pytest.mark.parametrize("event", [Event.JOB_FAILED, Event.JOB_ENDS, Event.HOST_SILENT], ids=lambda event: event.name)
def test_what_is_told_meanwhile_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], event: Event
) -> None:
    one = guard_of_an_aborted_rank(tmp_path, monkeypatch)
    one._notice_end()
    one.handle(event, True if event is Event.JOB_ENDS else EndReason(host_lost=True))
    assert one.state is State.GONE
    assert one.host_lost
    assert capfd.readouterr().err == ""
    one.poller.close()


def test_a_pause_of_the_guard_is_no_time_in_which_a_cause_could_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = guard_of_an_aborted_rank(tmp_path, monkeypatch)
    one._tick()
    one._held_since_s -= HELD_BACK_S + 1
    one._ticked_s -= 10
    one._tick()
    assert one.state is State.HOLDING
    one.poller.close()


def test_nobody_is_waited_for_where_all_others_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = guard_of_an_aborted_rank(tmp_path, monkeypatch)
    connection: Any = Sent()
    assert one.hub is not None
    one.hub.peers = {rank: Peer(connection, rank, "host1", one.now) for rank in (1, 2)}
    one.hub.peers[1].left = True
    one._tick()
    one._tick()
    assert one.state is State.HOLDING
    one.hub.peers[2].left = True
    one._tick()
    assert one.state is State.GONE
    one.poller.close()


@pytest.mark.parametrize("why", ["one rank", "ending", "error", "stopped"])
def test_an_abort_that_is_told_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], why: str
) -> None:
    """The cases: nobody else could report a cause, the rank was to end, or it has reported its end."""
    one = guard_of_an_aborted_rank(tmp_path, monkeypatch, 1 if why == "one rank" else 2)
    if why == "ending":
        one.rank.end(Ending.JOB_FAILED, one.now)
    elif why != "one rank":
        (tmp_path / f"0.{why}").write_text("{}")
    one._tick()
    assert one.state is State.GONE
    assert (tmp_path / "0.verdict").exists() == (why == "one rank")
    assert ("by SIGABRT" in capfd.readouterr().err) == (why == "one rank")
    one.poller.close()


def test_an_abort_elsewhere_is_passed_on_and_who_waits_for_that_rank_does_not_hang(tmp_path: Path) -> None:
    one = guard_of_a_rank(tmp_path, 0, 2)
    connection: Any = Sent()
    assert one.hub is not None
    one.hub.peers[1] = Peer(connection, 1, "host1", one.now)
    one._handle_peer(1, {"stuck": "step 7 takes longer than 1 s"})
    assert one.state is State.COLLECTING
    for _ in range(2):
        one._handle_peer(1, {"aborted": True})
        one._handle_peer(1, {"stuck": "step 7 takes longer than 1 s"})
        assert one.state is State.WATCHING
    assert connection.sent == [{"show": True}, {"aborted": True}]
    assert one.rank.page.abort_seen
    assert one._greet()["aborted"], "who comes later hears of it too"
    one.poller.close()
