"""Whole runs of train.py: from CPU to GPU and back, out of memory, a bad id, and a kernel that never ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.rows import Row, at_most, holds

ROOT = Path(__file__).parents[2]
CONFIG = """
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=32)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=4, accumulation=2)
train = dict(steps=8, save_interval=4, clip_grad_norm=1.0)
data = dict(files=['text.txt'])
"""
CLOSE = 1e-4
"""Relative, of float32's losses on another device."""


def _run(folder: Path, *words: str, timeout_s: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "--config", str(folder / "cfg.py"), *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=timeout_s)


def _folder(folder: str, config: str = CONFIG) -> Path:
    path = Path(folder)
    (path / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(400)))
    (path / "cfg.py").write_text(config)
    return path


def _losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def across_devices(device: torch.device) -> Iterator[Row]:
    """A run whose second half is on the other device, against the run that stays."""
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name)
        kinds = ("cuda", "cpu") if device.type == "cuda" else ("cpu", "cpu")
        for first, second in (kinds, kinds[::-1]):
            stays, moves = folder / f"stays_{first}", folder / f"moves_{first}"
            _run(folder, f"train.output_dir={stays}", DS_ACCELERATOR=first)
            _run(folder, f"train.output_dir={moves}", "train.steps=4", DS_ACCELERATOR=first)
            ended = _run(folder, f"train.output_dir={moves}", "--resume", DS_ACCELERATOR=second)
            if ended.returncode:
                yield holds(f"{first} to {second}", ended.stderr[-200:], "a run", held=False)
                continue
            off = max(abs(own / other - 1) for own, other in zip(_losses(moves), _losses(stays), strict=True))
            yield at_most(f"{first} to {second}: losses against the run that stays", off, CLOSE)


TOO_LARGE = """
model = dict(type='GPT', num_layers=8, hidden_size=16384, num_heads=64, vocab_size=256, max_seq_len=8192)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=64)
train = dict(steps=1, save_interval=0)
data = dict(files=['text.txt'])
"""
BAD_ID = '''
import torch
from torch.utils.data import Dataset


class BadIds(Dataset):
    """Its 20th sample has an id that the vocabulary does not."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.full((33,), 9999 if index == 19 else 7)
        return ids[:-1], ids[1:]
'''


def out_of_memory(device: torch.device) -> Iterator[Row]:
    """A model that no device holds: what is said of it, and the status."""
    with tempfile.TemporaryDirectory() as name:
        ended = _run(_folder(name, TOO_LARGE))
        said = re.search(r"(HST\d+|out of memory)[^\n]*", ended.stderr + ended.stdout)
        yield holds(
            "out of memory: what is said",
            said.group(0)[:28] if said else "nothing",
            "out of memory",
            said is not None and ended.returncode != 0,
        )


def bad_id(device: torch.device) -> Iterator[Row]:
    """An id outside the vocabulary in the data: the device stops, and the report says why."""
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name, CONFIG.replace("dict(files=['text.txt'])", "dict(type='bad_ids.BadIds')"))
        (folder / "bad_ids.py").write_text(BAD_ID)
        ended = _run(folder, "--trust", "bad_ids", PYTHONPATH=name)
        said = re.search(r"outside the vocabulary|HST232|TEN222", ended.stderr + ended.stdout)
        yield holds(
            "a bad id: what is said",
            said.group(0) if said else ended.stderr[-60:],
            "why the device stopped",
            said is not None and ended.returncode != 0,
        )


SPIN = """
import torch

import dslpar

args = dslpar.arguments()
run = dslpar.start(args.config, args.overrides, args.trust)
engine, train, held_out, _ = dslpar.initialize(run)


def spin(event):
    if event.name == "step" and event.step == 3:
        torch.cuda._sleep(10**15)


dslpar.fit(run, engine, train, held_out, hooks=[spin])
"""


def spinning_kernel(device: torch.device) -> Iterator[Row]:
    """A kernel that never ends, in step 3: the report comes at the step's time-out, with stacks, and blames nobody
    who waits."""
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name)
        (folder / "spin.py").write_text(SPIN)
        command = [sys.executable, str(folder / "spin.py"), "--config", str(folder / "cfg.py"), "train.step_timeout=10"]
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            output = process.communicate()[0]
        taken = time.monotonic() - began
        has_stack = "step 4" in output and ".tolist()" in output
        yield holds(
            "a spinning kernel: the report",
            f"after {taken:.0f} s, {'with' if has_stack else 'without'} stack",
            "a stack, within 60 s",
            has_stack and taken < 60,
        )
