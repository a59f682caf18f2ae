"""A pytest plugin: CPU seconds per test, with the ranks and programs that the test waited for.

    python -m pytest -q -n 2 -p tests.support.cpu_by_test --cpu-by-test build/cpu_by_test.json tests/unit
    python -m tests.support.durations tests    # the table of what `make test` has left so

A shared fixture counts in the test that sets it up. The time of workers to start and collect counts in no test.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_PROPERTY = "cpu_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with the file's name. Without it, nothing is measured."""
    parser.addoption("--cpu-by-test", type=Path, help="write the CPU seconds of each test into this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Register the meter in each worker, and the sum in the controller, or in the only process."""
    path: Path | None = config.getoption("cpu_by_test")
    if path is not None:
        config.pluginmanager.register(_Recorder(None if hasattr(config, "workerinput") else path))


class _Recorder:
    def __init__(self, path: Path | None) -> None:
        self._path, self._since_s, self._by_test = path, 0.0, dict[str, float]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._since_s = used_s()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, None]:
        outcome = yield
        now_s = used_s()
        # xdist brings a report's properties from the worker
        outcome.get_result().user_properties.append((_PROPERTY, now_s - self._since_s))
        self._since_s = now_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        taken_s = sum(value for name, value in report.user_properties if name == _PROPERTY)
        self._by_test[report.nodeid] = self._by_test.get(report.nodeid, 0.0) + taken_s

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._by_test, indent=0))


def used_s() -> float:
    """Return the CPU seconds of this process and of all children that it has waited for."""
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime
