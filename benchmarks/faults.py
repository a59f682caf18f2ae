"""Failing jobs: for each launcher and fault, the seconds until the last process ends, the status, the last line.

    python -m benchmarks.faults                  # the table, as markdown

Three ranks on this host form a pipeline of three stages. Rank 1 has the fault.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import injected

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WORLD = 3
RANK, STEP = 1, 3
"""The rank with the fault, and its step."""

CONFIG = """\
parallel = dict(pipeline=3)
model = dict(type='GPT', num_layers=3, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16)
optimizer = dict(type='SGD', lr=0.1)
batch = dict(global_size=4)
train = dict(steps=100000, log_interval=1000)
data = dict(files=['text.txt'])
"""

PROGRAM = ("-m", "dslpar.training", "--config")
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": (
        "deepspeed",
        "--num_gpus",
        "{n}",
        "--master_port",
        "{port}",
        "--module",
        "dslpar.training",
        "--config",
    ),
    "mpirun": (
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "{n}"),
        *("python", *PROGRAM),
    ),
    "torchrun": ("torchrun", "--standalone", "--nproc_per_node", "{n}", *PROGRAM),
    "dslpar launch": ("dslpar", "launch", "--world-size", "{n}"),
    "dslpar launch, openmpi": ("dslpar", "launch", "--launcher", "openmpi", "--world-size", "{n}"),
    "dslpar launch, torchrun": ("dslpar", "launch", "--launcher", "torchrun", "--world-size", "{n}"),
}
IN_RANK_1 = ("exception", "SIGKILL")
SENT = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "launcher SIGKILL": signal.SIGKILL}
"""Signals to the launcher's process alone, as `kill` sends them; a terminal would signal all processes."""
LIMIT_S = 15
"""The longest time in which a job may end."""
TABLE = ("deepspeed", "mpirun", "torchrun", "dslpar launch"), ("exception", "SIGKILL", "SIGINT")


class Outcome(NamedTuple):
    """The end of one job."""

    launcher: str
    fault: str
    seconds: float
    """Time from the fault to the end of the last process."""
    status: int
    """The launcher's exit status; negative: ended by a signal."""
    survivors: int
    """Processes that were alive at the deadline, and were killed."""
    lines: list[str]
    """All output."""

    def rank_output(self) -> list[str]:
        """Return the last message of a rank: its own line and the traceback after it, or nothing."""
        at = max((number for number, line in enumerate(self.lines) if line.startswith("[rank ")), default=None)
        if at is None:
            return []
        ends = at + 1
        while ends < len(self.lines) and self.lines[ends].startswith(" "):
            ends += 1
        return self.lines[at : ends + (ends > at + 1)]  # the exception's own line

    def last_line(self) -> str:
        """Return the last meaningful line: a rank's, else the launcher's."""
        lines = self.lines if self.launcher.startswith("dslpar") else self.rank_output() or self.lines
        return next(line.strip() for line in reversed(lines) if re.search(r"\w", line))


def run_with_fault(launcher: str, fault: str, timeout_s: float = 120) -> Outcome:
    """Run a job under a launcher, through a fault, to its end, with at most `timeout_s` before and after the fault."""
    mark = f"FAULT_MARK={uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="dslpar_faults_") as name:
        folder = Path(name)
        (folder / "cfg.py").write_text(CONFIG)
        (folder / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))
        injected.write(folder, fault, RANK, STEP)
        process = _start(launcher, folder, mark)
        try:
            at = _wait_for_fault(fault, process, folder, timeout_s)
            while (left := processes_with(mark)) and time.time() < at + timeout_s:
                process.poll()
                time.sleep(0.05)
            seconds = time.time() - at
        finally:
            for pid in processes_with(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        lines = (folder / "output").read_text(errors="replace").splitlines()
        return Outcome(launcher, fault, seconds, process.wait(), len(left), lines)


def _start(launcher: str, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    argv = [word.format(n=WORLD, port=_free_port()) for word in LAUNCHERS[launcher]]
    argv += [str(folder / "cfg.py"), f"train.output_dir={folder / 'out'}"]
    environ = os.environ | {
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        mark.partition("=")[0]: mark.partition("=")[2],
    }
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            argv, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def _wait_for_fault(fault: str, process: subprocess.Popen[bytes], folder: Path, timeout_s: float) -> float:
    """Return the time of the fault in seconds since the epoch. Inject the fault if rank 1 does not cause it itself."""
    at, deadline = folder / "at", time.time() + timeout_s
    while not (at.exists() and at.read_text()):
        said = (folder / "output").read_text(errors="replace")[-3000:]
        assert process.poll() is None, f"ended before the fault:\n{said}"
        assert time.time() < deadline, f"no step {STEP} within {timeout_s} s:\n{said}"
        time.sleep(0.02)
    if fault in SENT:
        process.send_signal(SENT[fault])
        return time.time()
    return float(at.read_text())


def processes_with(mark: str) -> list[int]:
    """Return the living processes that have a NAME=value in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    """Print the table. Return 1 if a job did not end in time, or ended with status 0."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would children
    print("| launcher | fault | seconds | status | left over | last line |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = False
    for launcher in TABLE[0]:
        for fault in TABLE[1]:
            one = run_with_fault(launcher, fault)
            failed |= one.seconds > LIMIT_S or one.status == 0 or one.survivors > 0
            cells = (launcher, fault, f"{one.seconds:.1f}", one.status, one.survivors, one.last_line()[:150])
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
