"""Jobs that die: what each rank leaves behind, which one is named first, and that nothing outlives a launcher."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from benchmarks.faults import IN_RANK_1, LAUNCHERS, LIMIT_S, SENT, TABLE, Outcome, processes_with, run_with_fault
from dslpar.cluster.network import free_port
from dslpar.reporting import run_list
from dslpar.watchdog import failure_reports, job_watch, marks, peers, processes, rank_monitor
from dslpar.watchdog.marks import Rank
from tests.support.runs import CONFIG, ROOT, mpirun, write_config
from tests.support.sampling import sampled
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import wait_until

PYTHON = sys.executable

# ---- launcher x fault: real jobs ----

QUICK = (("dslpar launch, openmpi", "SIGKILL"),)
"""One real job. Tests below check each rank's message and the first failure without a launcher."""
CELLS = sampled(product(LAUNCHERS, (*IN_RANK_1, *SENT)), QUICK)
AT = "stage 1 (pipe 1, data 0, tensor 0), step 3"
PEER_IS_GONE = ("Connection closed", "Connection reset", "a peer is gone")


@pytest.mark.parametrize(("launcher", "fault"), CELLS)
def test_a_fault_ends_the_job(launcher: str, fault: str) -> None:
    """It ends within 15 s, with a nonzero status, and nothing is left over."""
    watch = Stopwatch()
    one = run_with_fault(launcher, fault)
    said = "\n".join(one.lines)
    assert one.seconds * watch.our_share() <= LIMIT_S, said
    assert one.status != 0, said
    assert one.survivors == 0, said
    if fault in IN_RANK_1:
        assert not [words for words in PEER_IS_GONE if words in said], "consequences are silent"
    if fault == "exception":
        assert one.rank_output()[0].startswith("[rank 1 of 3 on "), said
        assert f", {AT}] Traceback" in one.rank_output()[0], said
        assert one.rank_output()[-1] == "RuntimeError: this rank broke", said
    if launcher.startswith("dslpar launch") and fault != "launcher SIGKILL":
        last_lines(one)


def last_lines(one: Outcome) -> None:
    """Check the literal end of `dslpar launch`'s output, and its status."""
    host = os.uname().nodename
    begins = max(number for number, line in enumerate(one.lines) if line.startswith("dslpar launch: "))
    last = one.lines[begins:]
    if one.fault == "exception":
        assert last[0] == f"dslpar launch: rank 1 of 3 on {host}, {AT}, failed first:"
        assert last[1] == "  Traceback (most recent call last):"
        assert last[-1] == "  RuntimeError: this rank broke"
        assert all(line.startswith("    ") for line in last[2:-1])
        assert one.status == 1
    elif one.fault == "SIGKILL":
        # Under torchrun, torchrun reaps the rank's status; on a busy machine it is gone before we look.
        signals = ("SIGKILL", "a signal that it could not catch") if "torchrun" in one.launcher else ("SIGKILL",)
        begins = [f"dslpar launch: rank 1 of 3 on {host}, {AT}, was the first to end, by {name}" for name in signals]
        begins += [f"dslpar launch: rank 1 of 3 on {host}, {AT}, was the first to end, without a message"]
        assert last[0].startswith(tuple(begins))
        assert "the kernel's out-of-memory killer" in last[0]
        assert one.status in (1, 128 + signal.SIGKILL)
    elif one.fault == "SIGTERM" or one.status == 75:  # mpirun sends ranks SIGTERM for SIGINT, and some have time
        assert len(last) == 1
        said = rf"dslpar launch: stopped by {one.fault} after step \d+: checkpoint saved in .*/step_\d+; .*"
        assert re.fullmatch(said, last[0])
        assert one.status == 75
        assert one.fault == "SIGTERM" or "openmpi" in one.launcher
    else:
        assert len(last) == 1
        assert last[0].startswith(f"dslpar launch: stopped by {one.fault}, after step ")
        assert last[0].endswith("; no process is left")
        assert one.status == 128 + signal.Signals[one.fault]


def test_the_table_is_among_the_cells() -> None:
    cells = {tuple(cell.values) for cell in CELLS}
    assert {(launcher, fault) for launcher in TABLE[0] for fault in TABLE[1]} <= cells
    assert set(QUICK) <= cells


# ---- causes and consequences ----

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
CONSEQUENCES = [
    RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:16067."),
    RuntimeError(GLOO + "Read error [127.0.0.1]:31660: Connection reset by peer."),
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
    RuntimeError("Gloo connectFullMesh failed with [...] Connection refused, remote=[127.0.0.1]:29500"),
]
CAUSES = [
    RuntimeError("rank 1 broke"),
    RuntimeError("Connection closed by peer"),
    ConnectionResetError(104, "Connection reset by peer"),
    RuntimeError(GLOO + "Enforce fail: unsupported data type"),
    ValueError("Timed out"),
]


@pytest.mark.parametrize("error", CONSEQUENCES, ids=str)
def test_a_lost_peer(error: Exception) -> None:
    assert failure_reports.is_lost_peer(error)
    outer = RuntimeError("while training")
    outer.__cause__ = error
    assert failure_reports.is_lost_peer(outer), "what it was raised from counts"


@pytest.mark.parametrize("error", CAUSES, ids=str)
def test_no_lost_peer(error: Exception) -> None:
    """A data set on a network raises the same words, and is a cause."""
    assert not failure_reports.is_lost_peer(error)


def test_torch_s_own_errors_of_a_lost_peer() -> None:
    import torch.distributed as dist

    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", free_port(), is_master=False, timeout=timedelta(milliseconds=200))
    assert failure_reports.is_lost_peer(caught.value)
    with pytest.raises(dist.DistError) as late:
        dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(milliseconds=200)).get("never set")
    assert failure_reports.is_lost_peer(late.value)


# ---- what a rank leaves ----

RANK = """\
import faulthandler, os, signal, sys, time
sys.path.insert(0, {root!r})
from dslpar.watchdog import rank_monitor
from dslpar.watchdog.marks import Rank
rank_monitor.monitor_rank(Rank({rank}, 2, "node", os.getpid()), os.environ)
{then}
"""
GLOO_ERROR = f"raise RuntimeError({CONSEQUENCES[0].args[0]!r})"


def rank(folder: Path, then: str, number: int = 0, **environ: str) -> subprocess.Popen[str]:
    """Start a rank that only runs `then`."""
    code = RANK.format(root=str(ROOT), rank=number, then=then)
    env = os.environ | {rank_monitor.REPORTS: str(folder)} | environ
    return subprocess.Popen([PYTHON, "-c", code], env=env, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], watch: job_watch.JobWatch) -> str:
    """Wait as a launcher does, which looks before anybody reaps the rank's status. Return the rank's output."""
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    time.sleep(0.05)
    watch.poll()
    process.wait(10)
    return said


@pytest.mark.parametrize(
    ("then", "how", "trace", "number"),
    [
        ("raise ValueError('wrong')", "failed first", "ValueError: wrong\n", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was the first to end, by SIGKILL", "", signal.SIGKILL),
        ("faulthandler._sigsegv()", "crashed first", "Fatal Python error: Segmentation fault", signal.SIGSEGV),
        ("os._exit(3)", "with status 3", "", 0),
    ],
    ids=["exception", "SIGKILL", "segmentation fault", "os._exit"],
)
def test_deaths(tmp_path: Path, then: str, how: str, trace: str, number: int) -> None:
    watch = job_watch.JobWatch(tmp_path)
    process = rank(tmp_path, then)
    end(process, watch)
    assert process.returncode != 0
    assert watch.poll(), "somebody died"
    death = watch.first_failure(None)
    assert death is not None
    assert (death.who.rank, death.who.host) == (0, "node")
    assert how in death.how
    assert death.signal in (0, number), "a crash tells by its stack, and by its status where that is still to be had"
    assert trace in death.trace
    assert death.describe(", after step 7").startswith(f"rank 0 of 2 on node {death.how}, after step 7")


def test_an_abort_is_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds without a guard's report, too: the process itself shows the abort."""
    (tmp_path / "ranks").mkdir(mode=0o700)
    watch = job_watch.JobWatch(tmp_path / "ranks")
    process = rank(
        tmp_path / "ranks", "os.kill(int(open('/proc/self/task/%d/children' % os.getpid()).read()), 9); os.abort()"
    )
    end(process, watch)
    assert process.returncode == -signal.SIGABRT
    assert not watch.poll(), "it may be a consequence"
    assert 0 < watch.held_back_s() <= peers.HELD_BACK_S
    death = watch.first_failure(None)
    assert death is not None
    assert death.how == f"crashed first, {BY_ABORT}"
    assert death.note == "no better cause was known 0 s later"
    assert death.signal == signal.SIGABRT
    assert "Fatal Python error: Aborted" in death.trace
    monkeypatch.setattr(job_watch, "HELD_BACK_S", 0.0)
    assert watch.poll()
    assert not watch.held_back_s()


BY_ABORT = "by SIGABRT, which is also how NCCL's watchdog ends a rank that has lost a peer"
ABORTED = marks.Verdict(marks.Rank(1, 3, "b", 0), 1.0, f"crashed first, {BY_ABORT}", "", "step 7", 6, weak=True)
BETTER = {
    "0.error": marks.Report(marks.Rank(0, 3, "a", 7), "cause", 3.0, "E", "Traceback", "step 7"),
    "2.verdict": marks.Verdict(marks.Rank(2, 3, "c", 0), 4.0, "is silent for 6 s", "", "step 7"),
}


@pytest.mark.parametrize("name", BETTER)
def test_another_cause_goes_before_an_abort(tmp_path: Path, name: str) -> None:
    """The other cause wins although it is reported later."""
    for who in range(3):
        (tmp_path / f"{who}.born").write_text(json.dumps([who, 3, "abc"[who], 7]))
    (tmp_path / "1.verdict").write_text(json.dumps(ABORTED))
    watch = job_watch.JobWatch(tmp_path, local=False)
    assert not watch.poll()
    assert watch.held_back_s()
    (tmp_path / name).write_text(json.dumps(BETTER[name]))
    assert watch.poll()
    death = watch.first_failure(None)
    assert death is not None
    s = BETTER[name].time_s - ABORTED.time_s
    assert (death.who, death.weak, death.note) == (
        BETTER[name].who,
        False,
        f"rank 1 of 3 on b had aborted {s:.1f} s before",
    )
    early = watch.first_failure(None, before_s=2.0)
    assert early is not None
    assert early.who.rank == 1, "what comes after a signal is not a cause, and the abort was before it"


def test_of_several_aborts_the_first_is_told_and_who_is_killed_for_them_is_not(tmp_path: Path) -> None:
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    for who, process in enumerate(ranks):
        (tmp_path / f"{who}.born").write_text(json.dumps([who, 4, "a", process.pid]))
    watch = job_watch.JobWatch(tmp_path)
    for number, how in ((1, signal.SIGABRT), (0, signal.SIGKILL)):
        ranks[number].send_signal(how)
        while processes.stat(ranks[number].pid)[0] != "Z":
            time.sleep(0.01)
        assert not watch.poll()
    for number in (2, 3):
        verdict = ABORTED._replace(who=marks.Rank(number, 4, "b", 0), time_s=time.time() + number)
        (tmp_path / f"{number}.verdict").write_text(json.dumps(verdict))
    assert not watch.poll()
    death = watch.first_failure(None)
    assert death is not None
    assert death.who.rank == 1
    assert death.how == f"was the first to end, {BY_ABORT}"
    assert [process.wait() for process in ranks] == [-signal.SIGKILL, -signal.SIGABRT]


def test_a_silent_death_after_somebody_else_asked_for_its_status(tmp_path: Path) -> None:
    """mpirun reaps it; then its own exit status shows the signal."""
    (tmp_path / "ranks").mkdir(mode=0o700)
    process = rank(tmp_path / "ranks", "os.kill(os.getpid(), signal.SIGKILL)")
    process.wait(10)
    # another test covers the partial or full report of a guard that was quick enough to see the status
    shutil.copytree(tmp_path / "ranks", tmp_path / "watched", ignore=shutil.ignore_patterns("*.verdict*"))
    watch = job_watch.JobWatch(tmp_path / "watched")
    watch.poll()
    known, unknown = watch.first_failure(signal.SIGKILL), watch.first_failure(None)
    assert known is not None
    assert unknown is not None
    assert known.how == "was the first to end, by SIGKILL"
    assert unknown.how == "was the first to end, by a signal that it could not catch"
    assert process.stderr is not None
    process.stderr.close()


def test_ranks_that_end_in_order_are_no_deaths(tmp_path: Path) -> None:
    watch = job_watch.JobWatch(tmp_path)
    for number, then in enumerate(("sys.exit(1)", "")):
        end(rank(tmp_path, then, number), watch)
    assert not watch.poll()
    assert watch.first_failure(None) is None
    assert watch.all_ended(range(2))
    assert not watch.all_ended(range(3))


def test_a_rank_that_the_launcher_ended_did_not_die_first(tmp_path: Path) -> None:
    watch = job_watch.JobWatch(tmp_path)
    process = rank(tmp_path, "time.sleep(60)")
    while not watch.started():
        time.sleep(0.01)
    process.terminate()
    end(process, watch)
    assert process.returncode == -signal.SIGTERM, "at once, as ever"
    assert not watch.poll()
    assert "Stack (most recent call first)" in (tmp_path / "0.stack").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_nor_did_one_that_could_not_write_its_stack_any_more(tmp_path: Path, number: signal.Signals) -> None:
    watch = job_watch.JobWatch(tmp_path)
    unheard = f"faulthandler.unregister(signal.SIGTERM); signal.signal({number:d}, signal.SIG_DFL); "
    process = rank(tmp_path, unheard + "print('deaf', file=sys.stderr, flush=True); time.sleep(60)")
    assert process.stderr is not None
    assert process.stderr.readline() == "deaf\n"
    process.send_signal(number)
    end(process, watch)
    assert process.returncode == -number
    assert not watch.poll()


@pytest.mark.prove
def test_a_consequence_waits_to_be_ended_and_then_says_one_line(tmp_path: Path) -> None:
    watch = job_watch.JobWatch(tmp_path)
    clock = Stopwatch()
    lost, cause = rank(tmp_path, GLOO_ERROR, 1), rank(tmp_path, "time.sleep(1); raise ValueError('wrong')")
    assert end(cause, watch).endswith("ValueError: wrong\n")
    only = "[rank 1 of 2 on node] ends because a peer is gone (RuntimeError: [/pytorch/third_party/gloo"
    (line,) = end(lost, watch).splitlines()
    assert line.startswith(only)
    assert clock.wall_s() > 4
    assert clock.alone_s() < 15
    death = watch.first_failure(None)
    assert death is not None
    assert (death.who.rank, death.how) == (0, "failed first"), "though the consequence came before"


def test_consequences_alone_are_told(tmp_path: Path) -> None:
    watch = job_watch.JobWatch(tmp_path)
    process = rank(tmp_path, GLOO_ERROR)
    while not (tmp_path / "0.error").exists():
        time.sleep(0.01)
    process.terminate()
    end(process, watch)
    death = watch.first_failure(None)
    assert death is not None
    assert death.how == "lost a peer"
    assert "Connection closed by peer" in death.trace


@pytest.mark.parametrize(
    "then",
    [
        f"try:\n    {GLOO_ERROR}\nexcept RuntimeError:\n    raise KeyboardInterrupt",
        f"try:\n    raise KeyboardInterrupt\nfinally:\n    {GLOO_ERROR}",
    ],
    ids=["after the loss of a peer", "before it"],
)
def test_an_interrupt_is_one_line_even_while_a_peer_goes(tmp_path: Path, then: str) -> None:
    watch = job_watch.JobWatch(tmp_path)
    process = rank(tmp_path, then)
    assert end(process, watch) == "[rank 0 of 2 on node] interrupted\n"
    assert process.returncode == 130
    assert watch.first_failure(None) is None


@pytest.mark.parametrize(("then", "written"), [("raise ValueError('wrong')", True), (GLOO_ERROR, False)])
def test_torchrun_s_file_is_for_causes(tmp_path: Path, then: str, written: bool) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "elastic.json"
    process = rank(tmp_path, then, TORCHELASTIC_ERROR_FILE=str(path))
    while not (tmp_path / "0.error").exists():
        time.sleep(0.01)
    if not written:
        process.terminate()
    end(process, job_watch.JobWatch(tmp_path))
    assert path.exists() == written
    if written:
        failure = ProcessFailure(local_rank=0, pid=process.pid, exitcode=1, error_file=str(path))
        assert abs(failure.timestamp - time.time()) < 60
        assert "ValueError: wrong" in json.dumps(failure.message)


def test_a_folder_on_another_host_is_nobody_who_asks(tmp_path: Path) -> None:
    watch = job_watch.JobWatch(tmp_path)
    assert end(rank(tmp_path / "elsewhere", "raise ValueError('wrong')"), watch).endswith("ValueError: wrong\n")
    assert watch.started() == []


# ---- launchers above a rank ----


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (
            ["/usr/bin/python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30"],
            "deepspeed.launcher.launch",
        ),
        (["python3.11", "/env/bin/torchrun", "--standalone"], "torchrun"),
        (["/env/bin/mpirun", "-np", "2"], "mpirun"),
        (["bash", "-c", "deepspeed train.py"], "bash"),
        (["python"], "python"),
        ([], ""),
    ],
)
def test_the_program_of_a_command_line(words: list[str], program: str) -> None:
    assert processes.program(words) == program


def test_nobody_launched_this_test() -> None:
    assert processes.launchers_above(os.getpid()) == []


def test_a_rank_ends_though_nobody_listens(tmp_path: Path) -> None:
    """A killed launcher has closed the pipe that the rank writes to."""
    process = rank(tmp_path, "time.sleep(0.3); print('x' * 100000); raise ValueError('wrong')")
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(10) == 1


LAUNCH = """\
import os, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", os.environ["RANK_CODE"]])
time.sleep(600)
"""


def test_a_rank_ends_when_its_launcher_is_gone(tmp_path: Path) -> None:
    """A program with a launcher's name is killed; the rank's report names nobody as the first failure."""
    launcher = tmp_path / "deepspeed"
    launcher.write_text(LAUNCH)
    env = os.environ | {
        rank_monitor.REPORTS: str(tmp_path),
        "RANK_CODE": RANK.format(root=str(ROOT), rank=0, then="time.sleep(600)"),
    }
    process = subprocess.Popen([PYTHON, str(launcher)], env=env, stderr=subprocess.PIPE, text=True)
    watch = job_watch.JobWatch(tmp_path)
    while not watch.started():
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    assert process.communicate()[1] == "[rank 0 of 2 on node] ends because its launcher is gone\n"
    watch.poll()
    assert watch.first_failure(None) is None
    assert not watch.all_ended(range(1))


def test_a_rank_that_has_promised_to_stop_in_order_does_so_when_its_launcher_is_gone(tmp_path: Path) -> None:
    """`deepspeed` on one host dies of SIGTERM without forwarding it: its ranks treat that as SIGTERM."""
    launcher = tmp_path / "deepspeed"
    launcher.write_text(LAUNCH)
    stops = "monitor.stop_on_signal(5.0, 75)\nprint('promised', file=sys.stderr, flush=True)\n"
    stops += "while not monitor.stop_requested: time.sleep(0.01)\nsys.exit(monitor.mark_stopped(7, 'there'))"
    code = RANK.format(root=str(ROOT), rank=0, then=stops).replace(
        "rank_monitor.monitor_rank(", "monitor = rank_monitor.monitor_rank("
    )
    env = os.environ | {rank_monitor.REPORTS: str(tmp_path), "RANK_CODE": code}
    process = subprocess.Popen([PYTHON, str(launcher)], env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "promised\n"
    time.sleep(0.2)
    process.terminate()
    assert process.communicate()[1] == "[rank 0 of 2 on node] ends because its launcher is gone\n"
    stopped = job_watch.JobWatch(tmp_path).stopped()
    assert stopped is not None
    assert (stopped.step, stopped.saved, stopped.status) == (7, "there", 75)


# ---- mpirun and signals ----

STAYS = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 75)])
def test_mpirun_kills_soon_after_sigterm_whatever_its_options_and_passes_on_sigusr1(
    number: int, status: int, tmp_path: Path
) -> None:
    """docs/faults.md and docs/hosts.md document it. If mpirun waits some day, they should name the option."""
    up = tmp_path / "up"
    words = [*mpirun(1), "--prtemca", "odls_base_sigkill_timeout", "30", PYTHON, "-c", STAYS, str(up)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(up)
        process.send_signal(number)
        assert process.wait(20) == status
    finally:
        process.kill()


# ---- supervision ----

SUPERVISED = """\
import sys
sys.path.insert(0, {root!r})
from dslpar.linter import check
from dslpar.launch import commands, supervise
from dslpar.launch.local_facts import find_local_facts
from dslpar.cluster.command import Command
from dslpar.cluster.request import Request
job = check.resolve({config!r}, 1, ["train.output_dir=" + {folder!r}])
facts = find_local_facts(None, {{}})
launch = commands.prepare(Request("deepspeed", 1, ()), facts)
commands.with_environ = lambda launch, more: launch._replace(
    commands=(Command({{"SUPERVISED": {mark!r}, **more}}, ({python!r}, "-c", {launcher!r})), *{others})
)
launch = launch._replace(remote={remote})
sys.exit(supervise.run(launch, job))
"""


def supervised(
    tmp_path: Path, launcher: str, config: str = CONFIG, others: str = "()", *, remote: bool = False
) -> subprocess.Popen[str]:
    """Start `dslpar launch` over a program that launches badly, and `others`; processes have SUPERVISED=tmp_path."""
    path = str(write_config(tmp_path, config))
    paths = {"root": str(ROOT), "mark": str(tmp_path), "folder": str(tmp_path), "config": path}
    code = SUPERVISED.format(**paths, python=PYTHON, launcher=launcher, others=others, remote=remote)
    return subprocess.Popen([PYTHON, "-c", code], stderr=subprocess.PIPE, text=True)


def test_what_a_launcher_leaves_behind_is_ended(tmp_path: Path) -> None:
    """DeepSpeed's runner ends with 0 when its child is killed, and leaves its ranks running."""
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {how})"
    for how in ("start_new_session=False", "start_new_session=True"):
        process = supervised(tmp_path, orphan.format(how=how))
        said = process.communicate()[1]
        assert process.returncode == 1
        assert said == "dslpar launch: the launcher ended with status 0, but not every rank had ended\n"
        assert processes_with(f"SUPERVISED={tmp_path}") == []


def test_one_launcher_of_several_that_does_not_start_leaves_none_behind(tmp_path: Path) -> None:
    process = supervised(tmp_path, "import time; time.sleep(600)", others="[Command({}, ('/no/such/launcher',))]")
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/launcher'" in process.communicate()[1]
    assert process.returncode == 1
    assert processes_with(f"SUPERVISED={tmp_path}") == []


def test_a_second_signal_ends_what_is_deaf(tmp_path: Path) -> None:
    deaf = "import pathlib, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    deaf += f"pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(600)"
    process = supervised(tmp_path, deaf)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "patient"
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert said == "dslpar launch: stopped by SIGTERM; no process is left\n"
    assert process.returncode == 128 + signal.SIGTERM
    assert processes_with(f"SUPERVISED={tmp_path}") == []


FAILING_RANK = """\
import json, os, pathlib, time
marks, who = pathlib.Path(os.environ["DSLPAR_REPORTS"]), [0, 1, "node", os.getpid()]
(marks / "0.born").write_text(json.dumps(who))
with open(pathlib.Path({folder!r}, "log.txt"), "a") as log:
    log.write("2026-01-02 03:04:05,678 dslpar INFO step 3/9\\n")
report = [who, "cause", time.time(), "ValueError: bad", "Traceback\\nValueError: bad\\n", "step 4"]
(marks / "0.error").write_text(json.dumps(report))
raise SystemExit(1)
"""


def test_the_first_failure_is_in_the_log_of_the_run(tmp_path: Path) -> None:
    """The terminal may be closed before somebody looks."""
    (tmp_path / "log.txt").write_text("")
    process = supervised(tmp_path, FAILING_RANK.format(folder=str(tmp_path)))
    said = process.communicate()[1]
    assert said.startswith("dslpar launch: rank 0 of 1 on node, step 4, failed first:\n  Traceback\n  ValueError: bad")
    level, reason = run_list._last_words(tmp_path / "log.txt")
    assert (level, reason) == (
        "ERROR",
        "dslpar launch: rank 0 of 1 on node, step 4, failed first: ValueError: bad",
    )


FAKE_RANK = """\
import json, os, pathlib, signal, sys, time
marks, here = pathlib.Path(os.environ["DSLPAR_REPORTS"]), pathlib.Path({folder!r})
def note(number, frame):
    with open(here / "got", "a") as file:
        print(signal.Signals(number).name, file=file)
signal.signal(signal.SIGTERM, note); signal.signal(signal.SIGUSR1, note)
who = [0, 1, "node", os.getpid()]
(marks / "0.born.part").write_text(json.dumps(who)); (marks / "0.born.part").rename(marks / "0.born")
{then}
(here / "ready").touch()
while not (here / "leave").exists():
    time.sleep(0.01)
(marks / "0.stopped").write_text(json.dumps([7, {saved!r}, 75, False])); (marks / "0.ended").touch()
sys.exit(75)
"""


def test_ctrl_c_says_where_a_resume_goes_on_and_no_launcher_prints_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000020").mkdir(parents=True)
    then = "signal.signal(signal.SIGINT, lambda *_: os._exit(130)); (here / 'log.txt').touch()"
    rank = FAKE_RANK.format(folder=str(tmp_path), then=then, saved="")
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], check=True)"
    process = supervised(tmp_path, launcher)
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGINT)
    said = "dslpar launch: stopped by SIGINT; --resume goes on from step 20; no process is left\n"
    assert process.communicate()[1] == said
    assert process.returncode == 128 + signal.SIGINT
    assert processes_with(f"SUPERVISED={tmp_path}") == []
    assert run_list._last_words(tmp_path / "log.txt") == ("INFO", said.rstrip()), "for `dslpar runs`"


def wait_for(path: Path, text: str = "") -> None:
    wait_until(lambda: path.exists() and text in path.read_text(), str(path))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_a_signal_that_comes_twice_at_once_and_an_early_warning(tmp_path: Path, early: bool) -> None:
    """A scheduler signals every process of the job, and the script forwards the signal as well: both count as one.
    SIGUSR1 starts no clock, and the SIGTERM that follows is the first.
    """
    process = supervised(tmp_path, FAKE_RANK.format(folder=str(tmp_path), then="", saved="there"))
    wait_for(tmp_path / "ready")
    if early:
        process.send_signal(signal.SIGUSR1)
        wait_for(tmp_path / "got", "SIGUSR1\n")
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "got", "SIGTERM\n")
    if not early:
        process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "patient"
    (tmp_path / "leave").touch()
    by = "SIGUSR1" if early else "SIGTERM"
    said = f"dslpar launch: stopped by {by} after step 7: checkpoint saved in there; to be requeued with --resume"
    assert process.communicate()[1].startswith(said)
    assert process.returncode == 75
    assert (tmp_path / "got").read_text().split() == ["SIGUSR1", "SIGTERM"][not early :]


@pytest.mark.prove
def test_a_run_that_never_saves_says_so(tmp_path: Path) -> None:
    text = FAKE_RANK.format(folder=str(tmp_path), then="", saved="")
    process = supervised(tmp_path, text, CONFIG + "train['save_interval'] = 0\n")
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    (tmp_path / "leave").touch()
    said = "dslpar launch: stopped by SIGTERM after step 7: nothing is saved, with train.save_interval=0; "
    assert process.communicate()[1].startswith(said)


@pytest.mark.prove
def test_a_death_before_a_signal_is_told(tmp_path: Path) -> None:
    """A person who sees a stalled job presses Ctrl-C."""
    then = "(marks / '0.verdict').write_text(json.dumps([who, time.time(), 'hangs', '', 'step 7', 0, False]))"
    process = supervised(tmp_path, FAKE_RANK.format(folder=str(tmp_path), then=then, saved=""))
    wait_for(tmp_path / "ready")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1].endswith("dslpar launch: rank 0 of 1 on node, step 7, hangs\n")
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("launcher", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, "ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
        ("import sys; sys.exit(247)", 137, "was ended by SIGKILL"),
    ],
)
def test_a_launcher_that_fails_by_itself(tmp_path: Path, launcher: str, status: int, said: str) -> None:
    process = supervised(tmp_path, launcher)
    assert process.communicate()[1].startswith(f"dslpar launch: the launcher {said}; its messages and those of")
    assert process.returncode == status


def test_ranks_that_are_found_gone_together_are_not_ordered(tmp_path: Path) -> None:
    """Exactly one is named, and it is not called the first."""
    gone = subprocess.Popen([PYTHON, "-c", ""])
    gone.wait()
    for number in range(3):
        marks.write(tmp_path, f"{number}.born", json.dumps(Rank(number, 3, "node", gone.pid)))
    watch = job_watch.JobWatch(tmp_path)
    assert watch.poll()
    failure = watch.first_failure(signal.SIGKILL)
    assert failure is not None
    assert failure.describe("").startswith("rank 0 of 3 on node ended, by SIGKILL (SIGKILL comes most often from")
    assert "; 2 other ranks ended within 0.1 s of it, and which rank ended first is unknown)" in failure.describe("")


def test_a_launcher_does_not_see_another_job_s_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under mpirun, ranks would believe WORLD_SIZE=1, and each would train alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    process = supervised(tmp_path, "import os, sys; sys.exit(3 + ('WORLD_SIZE' in os.environ))")
    process.communicate()
    assert process.returncode == 3


@pytest.mark.parametrize("remote", [False, True])
def test_255_is_no_signal(tmp_path: Path, remote: bool) -> None:
    """255 is ssh's status for a lost connection, not SIGHUP, as DeepSpeed's arithmetic would have it."""
    process = supervised(tmp_path, "import sys; sys.exit(255)", remote=remote)
    ssh = ", which is ssh's own status if a connection was lost, or never made" if remote else ""
    said = process.communicate()[1]
    assert said.startswith(f"dslpar launch: the launcher ended with status 255{ssh}; its messages")
    assert process.returncode == 255


def test_a_job_outlives_the_folder_of_its_reports(tmp_path: Path) -> None:
    """A cleaner of /tmp deletes the folder during the job: the job continues, and its end is reported."""
    gone = "import shutil; shutil.rmtree(marks)\n"
    process = supervised(tmp_path, FAKE_RANK.format(folder=str(tmp_path), then=gone, saved="there"))
    wait_for(tmp_path / "ready")
    time.sleep(0.5)
    assert process.poll() is None
    (tmp_path / "leave").touch()
    said = process.communicate()[1].splitlines()
    assert re.fullmatch(
        r"dslpar launch: /.*/dslpar_reports_\w+ was deleted while the job runs, and is made again.*", said[0]
    )
    assert said[1].startswith("dslpar launch: stopped after step 7: checkpoint saved in there")
    assert process.returncode == 75


TWO_RANKS = """\
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in {codes!r}]
ranks[1].wait()
{then}
sys.exit(250)
"""


@pytest.mark.parametrize("better", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_an_abort_is_told_when_there_is_no_better_cause(tmp_path: Path, better: bool) -> None:
    """Whichever cause is named first, the job ends with a nonzero status: at once, or after the abort was held back."""
    raises = f"time.sleep({2 if better else 600}); raise ValueError('wrong')"
    codes = [RANK.format(root=str(ROOT), rank=number, then=then) for number, then in enumerate((raises, "os.abort()"))]
    process = supervised(tmp_path, TWO_RANKS.format(codes=codes, then="ranks[0].wait()" if better else ""))
    said = process.communicate()[1]
    last = said[said.index("dslpar launch: ") :]
    if better:
        after = r"\(rank 1 of 2 on node had aborted [12]\.\d s before\)"
        assert re.match(rf"dslpar launch: rank 0 of 2 on node failed first {after}:\n  Traceback", last)
        assert process.returncode == 1
    else:
        assert re.match(rf"dslpar launch: rank 1 of 2 on node crashed first, {BY_ABORT} \(no better cause", last)
        assert "  Fatal Python error: Aborted" in last
        assert process.returncode == 128 + signal.SIGABRT
    assert processes_with(f"SUPERVISED={tmp_path}") == []


def test_a_cleaner_of_tmp_spares_the_folder_of_a_job(tmp_path: Path) -> None:
    """systemd-tmpfiles takes a directory's lock before it deletes old files there, and skips a locked directory."""
    held = marks.lock_folder(tmp_path)
    cleaner = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held)
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)


@pytest.mark.parametrize(("text", "when"), [('{"step": 4}\n{"st', ", after step 4"), ('{"step": 4}\n\0\0\n', "")])
def test_half_a_line_of_metrics_is_passed_over(tmp_path: Path, text: str, when: str) -> None:
    """Partial lines, left by a full disk or a broken file system, must not hide the first failure."""
    launcher = (
        f"import pathlib, sys; pathlib.Path({str(tmp_path / 'metrics.jsonl')!r}).write_text({text!r}); sys.exit(3)"
    )
    said = supervised(tmp_path, launcher).communicate()[1]
    assert said.startswith(f"dslpar launch: the launcher ended with status 3{when}; its messages")
