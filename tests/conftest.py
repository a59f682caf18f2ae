"""Settings for every test: one thread a process, no accelerator, compiled ops beside the environment.

They stand in the environment before anything imports torch, so ranks and subprocesses inherit them. Markers, the
default selection and the time-out are in setup.cfg.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # `nohup make test &` ignores it, and children would inherit that
settings.register_profile("busy machine", deadline=None)  # two workers share two cores: a pause is no finding
settings.load_profile("busy machine")
os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores; and a fork must not meet torch's thread pool
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that may take longer than others: at the end, workers would wait for one of them."""
    items.sort(key=_longer_s, reverse=True)


def _longer_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return max(0.0, mark.args[0] - float(item.config.getini("timeout"))) if mark else 0.0


@pytest.fixture(autouse=True)
def keep_default_dtype() -> Iterator[None]:
    """A test may compute in float64; the next one starts in float32 again."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
