"""Show the wall-clock and CPU seconds of the last `make test` and `make prove`.

    python -m tests.support.durations                    # reads what they have left in build/
    python -m tests.support.durations tests              # the folders, files and tests of which it has taken most
    python -m tests.support.durations run -q tests/unit  # runs pytest with these words, as `make test` does

CPU seconds include pytest and all its descendants: ranks, launchers, compilers. A busy machine takes up to twice the
CPU time of a quiet one, since waiting ranks are scheduled more often and caches are shared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.prove import RECORD, Record

LAST_TEST = ROOT / "build" / "test.json"
BY_TEST = ROOT / "build" / "cpu_by_test.json"
NUM_ROWS = 60
"""Rows in the tables of files and of test functions."""


def run(pytest_args: Sequence[str], path: Path = LAST_TEST) -> int:
    """Run pytest, keep its times, and return its status."""
    began = time.monotonic()
    measured = ["-p", "tests.support.cpu_by_test", "--cpu-by-test", str(path.with_name(BY_TEST.name))]
    process = subprocess.Popen([sys.executable, "-m", "pytest", *measured, *pytest_args], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"wall_s": time.monotonic() - began, "cpu_s": usage.ru_utime + usage.ru_stime}))
    return process.returncode


def taken(last_test: Path = LAST_TEST, record: Path = RECORD) -> Mapping[str, tuple[float, float]]:
    """Return (wall seconds, CPU seconds) of each recorded command."""
    found = {}
    if last_test.exists():
        row = json.loads(last_test.read_text())
        found["make test"] = row["wall_s"], row["cpu_s"]
    for name, result in Record(record).read().items():
        found[f"make prove PART={name}"] = result.wall_s, result.cpu_s
    return found


def by_test(cpu_s: Mapping[str, float]) -> list[str]:
    """Return tables of CPU seconds from {test id: CPU seconds}, largest first, with all rows of a test added up."""
    sums: dict[str, defaultdict[str, float]] = {what: defaultdict(float) for what in ("folder", "file", "test")}
    for test, taken_s in cpu_s.items():
        file, _, name = test.partition("::")
        sums["folder"][str(Path(file).parent)] += taken_s
        sums["file"][file] += taken_s
        sums["test"][f"{file}::{name.partition('[')[0]}"] += taken_s
    lines = [f"{sum(cpu_s.values()):8.1f} CPU s in {len(cpu_s)} tests"]
    for what, rows in sums.items():
        lines += ["", f"   CPU s {what}"]
        lines += [f"{rows[name]:8.1f} {name}" for name in sorted(rows, key=rows.__getitem__, reverse=True)[:NUM_ROWS]]
    return lines


def main(argv: Sequence[str]) -> int:
    """Run pytest, or print the table."""
    if argv[:1] == ["run"]:
        return run(argv[1:])
    if argv[:1] == ["tests"]:
        print("\n".join(by_test(json.loads(BY_TEST.read_text()))))
        return 0
    rows = taken()
    print(f"{'':28} {'wall s':>8} {'CPU s':>8}")
    for name, (wall_s, cpu_s) in rows.items():
        print(f"{name:28} {wall_s:8.0f} {cpu_s:8.0f}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
