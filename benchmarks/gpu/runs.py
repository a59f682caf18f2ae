"""Whole runs of train.py: from CPU to GPU and back, out of memory, an invalid id, and an endless kernel."""

from __future__ import annotations

import contextlib
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
from typing import NamedTuple

import torch

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Ended
from benchmarks.gpu.rows import Row, at_most, holds

LIMIT_S = 60.0
"""Time limit of one run of train.py, mostly imports. It is below the limit of any check here."""
CONFIG = """
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=32)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=4, accumulation=2)
train = dict(steps=8, save_interval=4, clip_grad_norm=1.0)
data = dict(files=['text.txt'])
"""
CLOSE = 1e-4
"""Relative difference of float32 losses on another device."""


def _run(folder: Path, *words: str, **env: str) -> Ended:
    command = [sys.executable, "train.py", "--config", str(folder / "cfg.py"), *words]
    return processes.run(command, LIMIT_S, os.environ | env)


def how_it_ended(ended: Ended) -> str:
    """Return the message of a run that should have ended in order."""
    return "it hung" if ended.status is None else f"it failed: {ended.reason[:160]}"


def _folder(folder: str, config: str = CONFIG, num_lines: int = 400) -> Path:
    path = Path(folder)
    write_text(path, num_lines)
    (path / "cfg.py").write_text(config)
    return path


def write_text(folder: Path, num_lines: int = 400) -> None:
    """Write text.txt, the training text of the runs here."""
    (folder / "text.txt").write_text("".join(f"line {i} says {i * i}\n" for i in range(num_lines)))


def losses_of(output: Path) -> list[float]:
    """Return the loss of each step of a run, from its folder."""
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def across_devices(device: torch.device) -> Iterator[Row]:
    """Check a run whose second half is on the other device (on a CPU-only machine, the same) against the run that
    stays.
    """
    pairs = (("cuda", "cpu"), ("cpu", "cuda")) if device.type == "cuda" else (("cpu", "cpu"),)
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name)
        for first, second in pairs:
            stays, moves = folder / f"stays_{first}", folder / f"moves_{first}"
            ends = [
                _run(folder, f"train.output_dir={stays}", DS_ACCELERATOR=first),
                _run(folder, f"train.output_dir={moves}", "train.steps=4", DS_ACCELERATOR=first),
                _run(folder, f"train.output_dir={moves}", "--resume", DS_ACCELERATOR=second),
            ]
            yield _compare(f"{first} to {second}: losses against the run that stays", ends, stays, moves, CLOSE)


def twice(device: torch.device) -> Iterator[Row]:
    """Check that two runs with `train.deterministic=True` have bitwise equal losses."""
    config = CONFIG.replace("max_seq_len=32", "max_seq_len=32, dropout=0.1") + "precision = 'bf16'\nzero = 1\n"
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name, config)
        outputs = [folder / "one", folder / "other"]
        words = ("train.deterministic=True", "train.save_interval=0")
        ends = [_run(folder, f"train.output_dir={output}", *words) for output in outputs]
        yield _compare("deterministic=True, bf16, dropout: losses of a second run", ends, outputs[0], outputs[1], 0)


def _compare(name: str, ends: list[Ended], stays: Path, moves: Path, limit: float) -> Row:
    """Return a row with the largest difference of the losses of two runs, both of which must have ended in order."""
    failed = next((end for end in ends if end.status != 0), None)
    if failed is not None:
        return holds(name, how_it_ended(failed), "a run", held=False)
    off = max(abs(own / other - 1) for own, other in zip(losses_of(moves), losses_of(stays), strict=True))
    return at_most(name, off, limit)


# Float32 logits of 320 samples are 66 GB, their softmax and its gradient as much again; the weights are 300 MB. Few
# devices have room for that, and the host draws no more weights than for any small model.
TOO_LARGE = """
model = dict(type='GPT', num_layers=2, hidden_size=1024, num_heads=16, vocab_size=50304, max_seq_len=1024)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=320)
train = dict(steps=1, save_interval=0)
data = dict(files=['text.txt'])
cluster = dict(device='b300-288g')  # or lint, which knows the device at hand, would let nothing start
"""
TOO_LARGE_LINES = 60_000
"""1.5 MB: 320 samples of 1025 bytes, and the held-out part."""
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
    """Check the report and exit status of a batch that no device has room for."""
    with tempfile.TemporaryDirectory() as name:
        ended = _run(_folder(name, TOO_LARGE, TOO_LARGE_LINES), f"train.output_dir={name}/run")
        said = re.search(r"HST230[^\n]*", ended.text)
        if said is None:
            sys.stderr.write(ended.text)
        yield holds(
            "out of memory: what is said",
            said.group(0)[:28] if said else how_it_ended(ended),
            "HST230",
            said is not None and ended.status not in (0, None),
        )


def bad_id(device: torch.device) -> Iterator[Row]:
    """Check an id outside the vocabulary: the device stops, and the report gives the reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name, CONFIG.replace("dict(files=['text.txt'])", "dict(type='bad_ids.BadIds')"))
        (folder / "bad_ids.py").write_text(BAD_ID)
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        ended = _run(folder, "--trust", "bad_ids", f"train.output_dir={name}/run", PYTHONPATH=path)
        said = re.search(r"outside the vocabulary|HST232|TEN222", ended.text)
        yield holds(
            "a bad id: what is said",
            said.group(0) if said else how_it_ended(ended),
            "why the device stopped",
            said is not None and ended.status not in (0, None),
        )


# ---- an endless kernel ----

STEP_TIMEOUT_S, TERM_GRACE_S = 10, 5
SPINS = "the device spins"
SPIN = f"""
import torch

import dslpar

args = dslpar.arguments()
run = dslpar.start(args.config, args.overrides, args.trust)
engine, train, held_out, _ = dslpar.initialize(run)


def spin(event):
    if event.name == "step" and event.step == 3:
        torch.cuda._sleep(10**15)
        print("{SPINS}", flush=True)


dslpar.fit(run, engine, train, held_out, hooks=[spin])
"""
STACKS_S = 5.0
"""Time for the guards to collect all stacks."""
LEAVING_S = 5.0
"""Further time: the guard checks several times per second, and the driver removes the kernel from the device."""


class _Spun(NamedTuple):
    """The end of a program whose device runs an endless kernel."""

    taken_s: float
    """Time from there to the end."""
    status: int | None
    """None: it did not end."""
    text: str


def spinning_kernel(device: torch.device) -> Iterator[Row]:
    """Check an endless kernel after step 3: the report comes at the time-out of step 4, with stacks, and blames no
    waiting rank.
    """
    spun = _spin(f"train.step_timeout={STEP_TIMEOUT_S}", "train.term_grace=600")
    # faulthandler prints files and lines without source: the place where the host reads the numbers of a step
    has_stack = "wait for the device" in spun.text and "host_reads.py" in spun.text
    due_s = STEP_TIMEOUT_S + STACKS_S
    yield _row("a spinning kernel: the report", spun, "with" if has_stack else "without", due_s, has_stack)


def ended_while_spinning(device: torch.device) -> Iterator[Row]:
    """Check SIGTERM during an endless kernel: the guard ends the rank after `train.term_grace`."""
    spun = _spin("train.step_timeout=600", f"train.term_grace={TERM_GRACE_S}", number=signal.SIGTERM)
    yield _row("a spinning kernel: SIGTERM", spun, "", TERM_GRACE_S, True)


def _row(name: str, spun: _Spun, stack: str, due_s: float, held: bool) -> Row:
    stack = f", {stack} stack" if stack else ""
    if spun.status is None:
        seen = f"no end after {spun.taken_s:.0f} s{stack}"
    elif SPINS not in spun.text:
        seen = f"it ended before: {spun.text.strip()[-160:]}"
    else:
        seen = f"status {spun.status} after {spun.taken_s:.0f} s{stack}"
    in_time = spun.taken_s <= due_s + LEAVING_S
    if not held:
        sys.stderr.write(spun.text)
    ended = spun.status not in (0, None) and SPINS in spun.text
    return holds(name, seen, f"an end within {due_s + LEAVING_S:.0f} s", held and in_time and ended)


def _spin(*words: str, number: signal.Signals | None = None) -> _Spun:
    """Run SPIN, send it the signal once its device spins, and wait at most a minute for its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = _folder(name)
        (folder / "spin.py").write_text(SPIN)
        command = [sys.executable, "spin.py", "--config", "cfg.py", "train.save_interval=0", *words]
        env = os.environ | {"PYTHONPATH": str(processes.ROOT)}
        said = folder / "said.txt"
        with open(said, "w") as output:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_for(SPINS, said, process)
            began = time.monotonic()
            if number is not None and process.poll() is None:
                time.sleep(2)  # the host continues to step 4, and waits there
                process.send_signal(number)
                began = time.monotonic()
            status = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(LIMIT_S)
            return _Spun(time.monotonic() - began, status, said.read_text())
        finally:
            processes.kill(process)


def _wait_for(word: str, path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait at most a minute until a program has printed a word, or has ended."""
    deadline = time.monotonic() + LIMIT_S
    while word not in path.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
