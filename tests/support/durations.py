"""Shows what the last `make test` and `make prove` have taken, in wall-clock and CPU seconds.

    python -m tests.support.durations                    # reads what they have left in build/
    python -m tests.support.durations run -q tests/unit  # runs pytest with these words, as `make test` does

CPU seconds are those of pytest and of all below it: ranks, launchers, compilers. They hardly change on a busy machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.prove import RECORD, Record

LAST_TEST = ROOT / "build" / "test.json"


def run(pytest_args: Sequence[str], path: Path = LAST_TEST) -> int:
    """Run pytest, keep what it has taken, and return its status."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "pytest", *pytest_args], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"wall_s": time.monotonic() - began, "cpu_s": usage.ru_utime + usage.ru_stime}))
    return process.returncode


def taken(last_test: Path = LAST_TEST, record: Path = RECORD) -> Mapping[str, tuple[float, float]]:
    """Return (wall seconds, CPU seconds) of each that has been run."""
    found = {}
    if last_test.exists():
        row = json.loads(last_test.read_text())
        found["make test"] = row["wall_s"], row["cpu_s"]
    for name, result in Record(record).read().items():
        found[f"make prove PART={name}"] = result.wall_s, result.cpu_s
    return found


def main(argv: Sequence[str]) -> int:
    """Run, or print the table."""
    if argv[:1] == ["run"]:
        return run(argv[1:])
    rows = taken()
    print(f"{'':28} {'wall s':>8} {'CPU s':>8}")
    for name, (wall_s, cpu_s) in rows.items():
        print(f"{name:28} {wall_s:8.0f} {cpu_s:8.0f}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
