"""What only a GPU can show, as a table: `make gpu`, on a machine with one GPU or several.

    python -m benchmarks.gpu                       # every check, each in a process of its own
    python -m benchmarks.gpu layers speed          # some of them
    python -m benchmarks.gpu --device cpu          # those that a CPU can run, small: that the checks themselves work

A check that fails, or outlasts its limit, is a row like any other; exit status 1 says that a row did not hold. What
needs more GPUs than there are says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.rows import Row

ROOT = Path(__file__).parents[2]


class Check(NamedTuple):
    """One function that yields rows."""

    where: str
    """Its module and name, below benchmarks.gpu."""
    limit_s: float
    on_cpu: bool = False
    """Whether a CPU has it as well."""

    def function(self) -> Callable[[torch.device], Iterator[Row]]:
        """Import it."""
        module, name = self.where.split(".")
        found: Callable[[torch.device], Iterator[Row]] = getattr(import_module(f"benchmarks.gpu.{module}"), name)
        return found


CHECKS = {
    "layers": Check("layers.numbers", 60, on_cpu=True),
    "waits": Check("layers.waits", 60),
    "kernels": Check("layers.kernels", 60),
    "bits": Check("layers.bits", 60, on_cpu=True),
    "saved": Check("layers.saved", 60),
    "training": Check("training.learns", 240, on_cpu=True),
    "step": Check("training.step_waits", 60),
    "devices": Check("runs.across_devices", 180, on_cpu=True),
    "memory": Check("runs.out_of_memory", 90),
    "ids": Check("runs.bad_id", 90, on_cpu=True),
    "spin": Check("runs.spinning_kernel", 150),
    "speed": Check("speed.in_turns", 300, on_cpu=True),
    "ranks": Check("ranks.over_nccl", 300),
}
"""By name, in the order of the table: together at most 15 minutes, if none of them hangs."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"any of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--here", action="store_true", help="in this process; as the table runs each check")
    arguments = parser.parse_args()
    if unknown := set(arguments.checks) - set(CHECKS):
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs those checks that a CPU has")
    names = arguments.checks or [name for name, check in CHECKS.items() if check.on_cpu or arguments.device == "cuda"]
    if arguments.here:
        return _run_here(names, torch.device(arguments.device))
    if arguments.device == "cuda":
        device, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        print(f"{count} x {device}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return max([_run(name, arguments.device) for name in names])


def _run_here(names: list[str], device: torch.device) -> int:
    held = True
    for name in names:
        for row in CHECKS[name].function()(device):
            print(row, flush=True)
            held &= row.held is not False
    return 0 if held else 1


def _run(name: str, device: str) -> int:
    """Run a check in a process of its own, whose rows go to this one's output as they come."""
    env = os.environ | {"DS_ACCELERATOR": device, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", name, "--device", device, "--here"]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=CHECKS[name].limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        print(Row(name, f"no end after {time.monotonic() - began:.0f} s", "an end", held=False), flush=True)
        return 1
    if process.returncode not in (0, 1) or (process.returncode and "Traceback" in errors):
        last = errors.strip().splitlines()[-1] if errors.strip() else f"status {process.returncode}"
        print(Row(name, last[:90], "an end", held=False), flush=True)
        print(errors, file=sys.stderr)
    return int(process.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
