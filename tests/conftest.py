"""Settings of every test: one thread per process, no accelerator, compiled ops beside the environment.

They are set in the environment before anything imports torch, so ranks and subprocesses inherit them. Markers, the
default selection and the time-out are in setup.cfg.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import cpu_progress_timeout, huge_pages
from tests.support.sampling import rows_of_prove

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # `nohup make test &` ignores SIGINT, and children would inherit that
# Workers share the cores: a pause is no failure. Where CI is set, Hypothesis would draw the same examples in both.
settings.register_profile("prove", deadline=None, derandomize=False)
settings.register_profile("test", settings.get_profile("prove"), derandomize=True)
settings.load_profile("prove")
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores, and a fork must not inherit torch's thread pool
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of programs that choose among rows."""
    parser.addoption("--all-rows", action="store_true", help="also run the rows listed in rows_of_prove.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples at each `make test`, which judges a change; `make prove` draws new ones."""
    settings.load_profile("test" if config.getoption("markexpr") == "not prove" else "prove")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    """Collect without the garbage collector, and exclude imported objects from it, since they live to the end.

    Forked ranks do not scan them either, and so do not copy their memory pages. All that was imported is in huge pages
    then, so that a fork takes little.
    """
    gc.disable()
    yield
    gc.enable()
    gc.freeze()
    huge_pages.collapse()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave listed rows to prove. Run tests that take minutes first: at the end, workers would wait for one of them."""
    left = frozenset() if config.getoption("all_rows") else rows_of_prove()
    for item in items:
        if item.nodeid in left:
            item.add_marker("prove")
    items.sort(key=_minutes, reverse=True)


def _minutes(item: pytest.Item) -> float:
    mark = item.get_closest_marker("minutes")
    return float(mark.args[0]) if mark else 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Replace pytest-timeout's timer, which only counts wall-clock time."""
    cpu_progress_timeout.start_timer(settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """Stop the replaced timer."""
    cpu_progress_timeout.stop_timer()
    return True


@pytest.fixture(autouse=True)
def keep_default_dtype() -> Iterator[None]:
    """Restore the default dtype: a test may compute in float64, and the next one starts in float32 again."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
