"""Failing jobs on two hosts: for each fault and launcher, the seconds until no process is left on either host, the exit
status, and whether the job's report names the failed rank, its host and stage, and the step.

The time is in seconds, from the fault until no process is left on either host. The report must name who failed (rank),
where (host, stage) and when (step).

    python -m benchmarks.faults_on_hosts                       # the table, as markdown; about half a minute per row
    python -m benchmarks.faults_on_hosts hang "host gone"      # some rows

Four ranks, two on each of two hosts that are namespaces of this machine (tests/support/two_hosts.py), form a pipeline
of two stages with data parallelism 2. Rank 2 has the fault: the first on host1, in stage 1. Faults come from outside of
dslpar. Under every launcher, a `sitecustomize` in PYTHONPATH wraps `Engine.train_batch` when its module is imported.
Other faults cut links, shrink disks or send signals. The exit status is 1 if a job falls short.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import injected
from tests.support.paths import ROOT
from tests.support.two_hosts import Hosts, Job, missing, two_hosts

SLOTS, RANK, STEP = 2, 2, 3
"""Ranks per host, the failing rank, and its step."""
HANG_S = 8
"""train.step_timeout."""
LIMIT_S = 15
"""The longest time in which a job may end; a hanging one has HANG_S more."""
WATCHED_S = 45
"""After this time, remaining processes are killed."""

CONFIG = """\
parallel = dict(pipeline=2)
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16)
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=4)
train = dict(steps=100000, log_interval=1000, save_interval={save_interval}, step_timeout={hang_s})
data = dict(files=['text.txt'])
"""

ALIVE = "-o ServerAliveInterval=3 -o ServerAliveCountMax=2"
"""Without these options ssh, and so pdsh and `deepspeed`, waits a quarter of an hour for a host that is gone. `dslpar
launch` sets them. For bare `deepspeed`, put them into ~/.ssh/config, or into this variable, which pdsh reads.
"""
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": (
        *("env", f"PDSH_SSH_ARGS_APPEND={ALIVE}"),
        *("deepspeed", "--hostfile", "{hostfile}", "train.py", "--config"),
    ),
    "mpirun": (
        *("mpirun", "--allow-run-as-root", "--prefix", sys.prefix, "--bind-to", "none", "--hostfile", "{hostfile}"),
        *("-np", str(2 * SLOTS), sys.executable, "train.py", "--config"),
    ),
    "dslpar launch": ("dslpar", "launch", "--hostfile", "{hostfile}"),
    "dslpar launch, openmpi": ("dslpar", "launch", "--launcher", "openmpi", "--hostfile", "{hostfile}"),
}


class Fault(NamedTuple):
    """A fault, and the expected behaviour of a job with it."""

    details: tuple[str, ...] = (rf"rank {RANK}\b", "host1", r"stage 1\b", rf"step ({STEP - 1}|{STEP})\b")
    """Patterns that a report must contain: rank, host, stage, step."""
    inject: Callable[[Hosts, Job], None] | None = None
    """Injects the fault; None: the rank causes it itself."""
    save_interval: int = 100000
    disk_bytes: int = 0
    """Size of the file system that both hosts write to; 0: large enough."""
    limit_s: float = LIMIT_S
    saves_under: tuple[str, ...] = ()
    """Launchers that must leave a checkpoint at the end."""
    launchers: tuple[str, ...] = tuple(LAUNCHERS)
    """Launchers that meet this fault."""


def _cut(hosts: Hosts, job: Job) -> None:
    hosts.cut(1)


def _power_off(hosts: Hosts, job: Job) -> None:
    hosts.kill(1)


def _terminate(hosts: Hosts, job: Job) -> None:
    """Signal the launcher alone, as `kill` does."""
    os.kill(job.pid, signal.SIGTERM)


def _warn(hosts: Hosts, job: Job) -> None:
    """Signal the launcher, which only forwards this signal."""
    os.kill(job.pid, signal.SIGUSR1)


def _terminate_ranks(hosts: Hosts, job: Job) -> None:
    """Signal every rank, as schedulers do."""
    for host in (0, 1):
        for pid, words in hosts.processes(host).items():
            if any(word in ("train.py", "dslpar.training") for word in words) and "--config" in words and is_rank(pid):
                os.kill(pid, signal.SIGTERM)


_STEP_OR_LATER = r"step \d+"
FAULTS: Mapping[str, Fault] = {
    "SIGKILL": Fault(),
    "exception": Fault(),
    "out of memory": Fault(),
    "NaN": Fault(details=(r"rank \d", r"host\d", r"stage \d", r"step [3-9]\b")),
    "hang": Fault(limit_s=HANG_S + LIMIT_S),
    "host gone": Fault(details=(r"ranks? [23]", "host1", r"stages? 1\b", _STEP_OR_LATER), inject=_cut),
    "power off": Fault(details=(r"ranks? [23]", "host1", r"stages? 1\b", _STEP_OR_LATER), inject=_power_off),
    "disk full": Fault(
        details=(r"rank \d", r"host\d", r"stage \d", _STEP_OR_LATER), save_interval=STEP, disk_bytes=40_000
    ),
    # After SIGTERM `mpirun` leaves ranks a quarter of a second, whatever its options: saving in it is luck.
    "SIGTERM": Fault(details=(), inject=_terminate, saves_under=tuple(name for name in LAUNCHERS if name != "mpirun")),
    "SIGTERM to ranks": Fault(details=(), inject=_terminate_ranks, saves_under=tuple(LAUNCHERS)),
    "SIGUSR1": Fault(details=(), inject=_warn, saves_under=("mpirun",), launchers=("mpirun",)),
}


class Outcome(NamedTuple):
    """The end of one job."""

    launcher: str
    fault: str
    seconds: float
    """Time from the fault until no process was left on either host."""
    status: int | None
    """The launcher's exit status; negative: ended by a signal; None: it had to be killed."""
    left: list[str]
    """Command lines that still ran on either host at the end of the watch."""
    lines: list[str]
    """All output."""
    checkpoints: tuple[str, ...] = ()
    """The saved checkpoints."""

    def missing_details(self) -> list[str]:
        """Return the required patterns that no report has."""
        return [pattern for pattern in FAULTS[self.fault].details if not re.search(pattern, self.report())]

    def report(self) -> str:
        """Return the line with the most details, the last one of equals."""
        patterns = FAULTS[self.fault].details
        if not patterns:
            return f"saved: {', '.join(self.checkpoints) or 'nothing'}"
        said = [(sum(bool(re.search(p, line)) for p in patterns), number) for number, line in enumerate(self.lines)]
        return self.lines[max(said)[1]].strip() if said and max(said)[0] else ""

    def shortfalls(self) -> list[str]:
        """Return what falls short, or nothing if all is well."""
        found = [f"{self.seconds:.0f} s"] if self.seconds > FAULTS[self.fault].limit_s else []
        found += [f"{len(self.left)} processes left"] if self.left else []
        found += ["status 0"] if self.status == 0 else ["no end"] if self.status is None else []
        found += ["no checkpoint"] if self.launcher in FAULTS[self.fault].saves_under and not self.checkpoints else []
        return found + [f"not said: {pattern}" for pattern in self.missing_details()]


def run_with_fault(launcher: str, fault: str, start_s: float = 120) -> Outcome:
    """Run a job on two hosts through a fault, to its end. The fault must come within `start_s`."""
    wanted = FAULTS[fault]
    with tempfile.TemporaryDirectory(prefix="dslpar_faults_") as name:
        folder = Path(name)
        _prepare(folder, fault)
        with two_hosts(PYTHONPATH=os.pathsep.join([name, str(ROOT)])) as hosts:
            if wanted.disk_bytes:
                hosts.shared_disk(folder / "out", wanted.disk_bytes)
            words = [word.format(hostfile=hosts.hostfile(SLOTS)) for word in LAUNCHERS[launcher]]
            words += [str(folder / "cfg.py"), f"train.output_dir={folder / 'out'}"]
            job = hosts.start(0, words, folder / "output")
            at = _wait_for_fault(wanted, hosts, job, folder, start_s)
            return _watch(launcher, fault, hosts, job, at, folder / "output")


def _prepare(folder: Path, fault: str) -> None:
    (folder / "out").mkdir()
    (folder / "cfg.py").write_text(CONFIG.format(save_interval=FAULTS[fault].save_interval, hang_s=HANG_S))
    (folder / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))
    injected.write(folder, fault, RANK, STEP)


def _wait_for_fault(fault: Fault, hosts: Hosts, job: Job, folder: Path, start_s: float) -> float:
    """Return the time of the fault in seconds since the epoch. Inject it if the rank does not cause it itself."""
    at, deadline = folder / "at", time.time() + start_s
    while not at.exists():
        said = (folder / "output").read_text(errors="replace")[-5000:]
        assert job.process.poll() is None, f"ended before the fault:\n{said}"
        assert time.time() < deadline, f"no step {STEP} within {start_s} s:\n{said}"
        time.sleep(0.02)
    if fault.inject is None:
        return float(at.read_text())
    began = time.time()
    fault.inject(hosts, job)
    return began


def _watch(launcher: str, fault: str, hosts: Hosts, job: Job, at: float, output: Path) -> Outcome:
    left = _all(hosts)
    while left and time.time() < at + WATCHED_S:
        time.sleep(0.05)
        job.process.poll()
        left = _all(hosts)
    seconds = time.time() - at
    status = job.process.poll() if left else job.process.wait()
    hosts.sweep()
    saved = tuple(sorted(path.name for path in output.with_name("out").glob("checkpoints/step_*[0-9]")))
    return Outcome(launcher, fault, seconds, status, left, output.read_text(errors="replace").splitlines(), saved)


def _all(hosts: Hosts) -> list[str]:
    return [" ".join(words) for host in (0, 1) for words in hosts.processes(host).values()]


def is_rank(pid: int) -> bool:
    """Return whether a process is a rank, not a launcher or a helper."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return any(each.startswith((b"LOCAL_RANK=", b"OMPI_COMM_WORLD_RANK=")) for each in environ)


def row(one: Outcome) -> str:
    """Return a line of the table."""
    verdict = "; ".join(one.shortfalls()).replace("|", r"\|") or "as expected"
    report = one.report().replace("|", r"\|")[:160] or "-"
    cells = (one.fault, one.launcher, f"{one.seconds:.1f}", "none" if one.status is None else one.status)
    return f"| {' | '.join(map(str, cells))} | {len(one.left)} | {report} | {verdict} |"


HEADER = "| fault | launcher | seconds | status | left over | the report | verdict |\n|---|---|---|---|---|---|---|"


def main(words: list[str]) -> int:
    """Print the table of the named faults and launchers, or of all. Return 1 if one falls short."""
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    faults = [word for word in words if word in FAULTS] or list(FAULTS)
    launchers = [word for word in words if word in LAUNCHERS] or ["deepspeed", "mpirun"]
    if unknown := [word for word in words if word not in (*FAULTS, *LAUNCHERS)]:
        print(
            f"unknown fault or launcher {unknown[0]!r}; there are {', '.join((*FAULTS, *LAUNCHERS))}", file=sys.stderr
        )
        return 2
    print(HEADER, flush=True)
    short = False
    for fault in faults:
        for launcher in (name for name in launchers if name in FAULTS[fault].launchers):
            try:
                one = run_with_fault(launcher, fault)
            except AssertionError as error:
                print(f"| {fault} | {launcher} | - | - | - | - | did not come so far: {error} |", flush=True)
                short = True
                continue
            print(row(one), flush=True)
            short |= bool(one.shortfalls())
    return int(short)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
