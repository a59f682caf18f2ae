"""Checks that need a GPU, as a table: `make gpu`, on a machine with one or more GPUs.

    python -m benchmarks.gpu                       # every check, each in its own process
    python -m benchmarks.gpu layers speed_350M     # some of them
    python -m benchmarks.gpu --device cpu          # small versions for a CPU, to test the checks themselves

A check that fails or exceeds its limit is a row like any other. Exit status 1 means that a row did not hold. Checks
that need more GPUs say so. All together end within 15 minutes. The last line names the checks for which no time was
left. Exit status 2 means that there were some, and that all rows held.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

import torch

from benchmarks.gpu import processes
from benchmarks.gpu.processes import ROOT
from benchmarks.gpu.rows import Row

BUDGET_S = 15 * 60.0
"""Time limit of all checks together."""
_LEAST_S = 20.0
"""No check begins with less time left: importing torch and DeepSpeed alone takes ten seconds."""
_FAILED, _NOT_RUN = 1, 2


class Check(NamedTuple):
    """A function that yields rows."""

    where: str
    """Its module and name, below benchmarks.gpu."""
    limit_s: float
    """Larger than the limits of each program that it starts."""
    on_cpu: bool = False
    """Whether it also runs on a CPU."""

    def function(self) -> Callable[[torch.device], Iterator[Row]]:
        """Import the function."""
        module, name = self.where.split(".")
        found: Callable[[torch.device], Iterator[Row]] = getattr(import_module(f"benchmarks.gpu.{module}"), name)
        return found


CHECKS = {
    "layers": Check("layers.numbers", 60, on_cpu=True),
    "head": Check("layers.head_and_loss", 60, on_cpu=True),
    "sums": Check("layers.sums", 60, on_cpu=True),
    "waits": Check("layers.waits", 60),
    "kernels": Check("layers.kernels", 60),
    "attention": Check("attention.blocks", 90, on_cpu=True),
    "bits": Check("layers.bits", 60, on_cpu=True),
    "saved": Check("layers.saved", 60),
    "training": Check("training.learns", 180, on_cpu=True),
    "families": Check("families.learn", 300, on_cpu=True),
    "step": Check("training.step_waits", 60),
    "peak": Check("peak.of_layouts", 480),
    "devices": Check("runs.across_devices", 180, on_cpu=True),
    "again": Check("runs.twice", 120, on_cpu=True),
    "memory": Check("runs.out_of_memory", 90),
    "ids": Check("runs.bad_id", 90, on_cpu=True),
    "spin": Check("runs.spinning_kernel", 150),
    "term": Check("runs.ended_while_spinning", 120),
    "speed_350M": Check("speed.gpt_350m", 150, on_cpu=True),
    "ranks": Check("ranks.over_nccl", 480, on_cpu=True),
    "speed_1.5B": Check("speed.gpt_1500m", 210),
    "compiled": Check("training.compiled_learns", 240),
    "speed_compiled": Check("speed.gpt_350m_compiled", 240),
}
"""Checks in the order of the table. Those that compile for minutes come last, and may find no time left."""


def main() -> int:
    """Run the checks on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"any of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--here", action="store_true", help="in this process; as the table runs each check")
    arguments = parser.parse_args()
    if unknown := set(arguments.checks) - set(CHECKS):
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    on_cpu = arguments.device == "cpu"
    if on_cpu and (needing := [name for name in arguments.checks if not CHECKS[name].on_cpu]):
        parser.error(f"{', '.join(needing)} cannot run on a CPU")
    if not on_cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs those checks that a CPU can run")
    names = arguments.checks or [name for name, check in CHECKS.items() if check.on_cpu or not on_cpu]
    if arguments.here:
        return _run_here(names, torch.device(arguments.device))
    if not on_cpu:
        device, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        print(f"{count} x {device}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    return _run_all(names, arguments.device)


def _run_here(names: list[str], device: torch.device) -> int:
    held = True
    for name in names:
        for row in CHECKS[name].function()(device):
            print(row, flush=True)
            held &= row.held is not False
    return 0 if held else _FAILED


def _run_all(names: list[str], device: str) -> int:
    """Run one check after the other while there is time. The last line sums up."""
    # In order, so that a check in its own session is not left running; Ctrl-C raises by itself.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    deadline = time.monotonic() + BUDGET_S
    statuses = {name: _run(name, device, deadline - time.monotonic()) for name in names}
    failed = [name for name, status in statuses.items() if status not in (0, _NOT_RUN)]
    left_out = [name for name, status in statuses.items() if status == _NOT_RUN]
    lines = [f"failed: {', '.join(failed)}"] if failed else []
    lines += [f"not run to the end, for want of time: {', '.join(left_out)}"] if left_out else []
    print("; ".join(lines) or f"all {len(names)} checks hold")
    return _FAILED if failed else _NOT_RUN if left_out else 0


def _run(name: str, device: str, left_s: float) -> int:
    """Run a check in a separate process, and pass on its rows as they come."""
    if left_s < _LEAST_S:
        print(Row(name, "not run: no time left"), flush=True)
        return _NOT_RUN
    env = os.environ | {"DS_ACCELERATOR": device, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", name, "--device", device, "--here"]
    limit_s = CHECKS[name].limit_s
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=stderr, start_new_session=True)
        try:
            process.wait(min(limit_s, left_s))
        except subprocess.TimeoutExpired:
            took = f"no end after {time.monotonic() - began:.0f} s"
            row = Row(name, took, "no time left") if left_s < limit_s else Row(name, took, "an end", held=False)
            print(row, flush=True)
            return _NOT_RUN if left_s < limit_s else _FAILED
        finally:
            _kill_all(process)
        stderr.seek(0)
        errors = stderr.read()
    if process.returncode not in (0, _FAILED) or (process.returncode and "Traceback" in errors):
        last = errors.strip().splitlines()[-1] if errors.strip() else f"status {process.returncode}"
        print(Row(name, last[:90], "an end", held=False), flush=True)
    if process.returncode:
        print(errors, file=sys.stderr, flush=True)
    return _FAILED if process.returncode else 0


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill everything that a check left on the GPU, which would disturb and slow down the next one.

    This includes checks that ended or crashed: their children are in the process group.
    """
    processes.kill(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
