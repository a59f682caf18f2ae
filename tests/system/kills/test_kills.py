"""Runs killed at random moments and resumed: no reported save is lost, and the curve is the undisturbed run's.

Eight ranks of train.py (pipeline 2, data 2, tensor 2, ZeRO 1, dropout; 1F1B, or two interleaved stages per rank) are
killed and resumed until the run is done. Then the next run starts, until the requested number of kills is reached. Half
of the kills are aimed at a save, at a random moment while its `.part` folder exists. The others come at any moment:
while ranks meet, build, load, step or save. Most kill all eight ranks at once, like a machine that goes down. Some kill
a single rank, whose peers must then end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from xxhash import xxh3_128_hexdigest

from tests.support.forked_training import ForkedJob, start_job
from tests.support.runs import metrics

RANKS, STEPS, KEEP = 8, 20, 2
CONFIG = f"""\
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16, dropout=0.1)
optimizer = dict(type='AdamW', lr=1e-2)
lr_scheduler = dict(type='cosine', warmup_steps=3)
zero = 1
batch = dict(global_size=8)
train = dict(steps={STEPS}, save_interval=2, clip_grad_norm=1.0)
checkpoint = dict(keep={KEEP})
data = dict(files=['text.txt'])
"""
CONFIGS = {
    "1F1B": CONFIG,
    "interleaved": CONFIG.replace("num_layers=2", "num_layers=4").replace(
        "global_size=8", "global_size=8, accumulation=2"
    )
    + "schedule = 'interleaved'\n",
}
"""By schedule; with the second one, each rank has two stages of a layer each."""
TEXT = "".join(f"line {i} says {i * i}\n" for i in range(28))
"""About 29 samples: epochs end within steps."""
TIMINGS = {"step_s", "tokens_per_s", "data_s", "tflops_per_s", "mfu_causal", "mfu_6n"}

Part = tuple[str, int]
"""A `.part` folder, and the last change of its entries: folders left by earlier kills do not change."""


class Pace(NamedTuple):
    """Seconds of the undisturbed run; resumed parts may be much faster if the machine is less busy."""

    start_s: float
    """From the fork to the end of the first step."""
    step_s: float
    """A step, with its share of saves."""
    save_s: float
    """The median lifetime of a save's `.part` folder."""


class Kill(NamedTuple):
    """A kill, and what it hit."""

    at_a_save: bool
    """Whether the folder of an unfinished save existed."""
    alone: bool
    """Whether only one rank was killed."""


class Run(NamedTuple):
    """A run in its own folder."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def root(self) -> Path:
        return self.out / "checkpoints"

    @property
    def said(self) -> Path:
        """The output of its last part."""
        return self.folder / "said.txt"

    def start(self, *flags: str) -> contextlib.AbstractContextManager[ForkedJob]:
        """Start or resume the run."""
        self.said.unlink(missing_ok=True)
        config = str(self.folder / "cfg.py")
        return start_job(RANKS, ["--config", config, f"train.output_dir={self.out}", *flags], self.said)

    def parts(self) -> set[Part]:
        """Return the folders of unfinished saves."""
        found = set()
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                with contextlib.suppress(FileNotFoundError):
                    if entry.name.endswith(".part"):
                        found.add((entry.name, entry.stat().st_mtime_ns))
        return found

    def saved(self) -> list[int]:
        """Return the steps of the existing checkpoints, oldest first."""
        named = (path.name.removeprefix("step_") for path in self.root.glob("step_*"))
        return sorted(int(name) for name in named if name.isdecimal())

    def reported(self) -> list[int]:
        """Return the steps whose checkpoints the log reports as saved."""
        log = self.out / "log.txt"
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        return sorted({int(step) for step in re.findall(r"checkpoint of step (\d+) in ", text)})

    def lines(self) -> list[dict[str, Any]]:
        """Return metrics.jsonl without timings."""
        return [{name: value for name, value in line.items() if name not in TIMINGS} for line in metrics(self.out)]

    def num_lines(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def has_stepped(self, lines: int) -> bool:
        """Return whether the number of lines is no longer `lines`."""
        return self.num_lines() != lines


def new_run(folder: Path, schedule: str = "1F1B") -> Run:
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    (folder / "cfg.py").write_text(CONFIGS[schedule])
    return Run(folder)


# ---- the undisturbed run ----


class Undisturbed(NamedTuple):
    """Results of a run without kills."""

    lines: list[dict[str, Any]]
    last: dict[str, Any]
    """The contents of its last checkpoint."""
    pace: Pace


@pytest.fixture(scope="module")
def undisturbed_under(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    return cache(lambda schedule: undisturbed_run(tmp_path_factory.mktemp("kills") / "undisturbed", schedule))


def undisturbed_run(folder: Path, schedule: str) -> Undisturbed:
    run = new_run(folder, schedule)
    began, first_s, seen = time.monotonic(), 0.0, dict[str, list[float]]()
    with run.start() as job:
        while job.runs:
            now = time.monotonic() - began
            first_s = first_s or (now if run.num_lines() else 0.0)
            for name, _ in run.parts():
                seen.setdefault(name, []).append(now)
            time.sleep(0.001)
        whole_s = time.monotonic() - began
        assert job.wait(60) == [0] * RANKS, run.said.read_text()
    saves = [times[-1] - times[0] for name, times in seen.items() if not name.endswith(".old.part")]
    assert run.reported() == list(range(2, STEPS + 1, 2))
    assert run.saved() == run.reported()[-KEEP:]
    pace = Pace(first_s, (whole_s - first_s) / (STEPS - 1), statistics.median(saves))
    return Undisturbed(run.lines(), contents(run, STEPS), pace)


def contents(run: Run, step: int) -> dict[str, Any]:
    """Return every tensor and number of a checkpoint's files, without the states of Python's and numpy's generators:
    nothing draws from these, and each process begins with others.
    """
    root, found = run.root / f"step_{step:06d}", dict[str, Any]()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix == ".pt":
            found |= leaves(torch.load(path, weights_only=False, map_location="cpu"), name)
        elif path.suffix == ".safetensors":
            found |= leaves(load_file(path), name)
    return {path: value for path, value in found.items() if not re.search("/random/(python|numpy)/", path)}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor or number) of everything in nested containers."""
    if isinstance(value, (torch.Tensor, int, float)):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the paths that only one has, and those whose values are not bitwise equal."""
    same = {path for path in one.keys() & other.keys() if is_same(one[path], other[path])}
    return sorted((one.keys() | other.keys()) - same)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


# ---- kills ----


def strike(run: Run, job: ForkedJob, pace: Pace, rng: random.Random, at_a_save: bool, alone: bool) -> Kill | None:
    """Wait for the moment, and kill. Return None if the run was done before."""
    known = run.parts()

    def saves() -> bool:
        return bool(run.parts() - known)

    if alone and not until(job, partial(run.has_stepped, run.num_lines())):
        return None  # not earlier: ranks that have not met yet end only with a launcher
    if not at_a_save:
        return hit(job, rng, saves, alone) if at_any_moment(run, job, pace, rng, starts=not alone) else None
    for _ in range(rng.randint(0, 1)):  # the first save, or the second
        if not (until(job, saves) and until(job, lambda: not saves())):
            return None
    window_s = pace.save_s
    while until(job, saves):
        time.sleep(delay_s := rng.uniform(0, window_s))
        job.freeze()
        if saves():
            return hit(job, rng, saves, alone)
        job.thaw()
        window_s = delay_s  # too late, since saves are faster now: take the next one
        until(job, lambda: not saves())
    return None


def at_any_moment(run: Run, job: ForkedJob, pace: Pace, rng: random.Random, starts: bool) -> bool:
    """Wait for a moment during the start, or in one of the next steps. Return whether it came before the job ended.

    Steps are counted, and each is assumed to take as long as the last one.
    """
    if starts:
        end = time.monotonic() + rng.uniform(0, pace.start_s + 6 * pace.step_s)
        lines = run.num_lines()
        if not until(job, lambda: run.has_stepped(lines) or time.monotonic() > end):
            return False
        if not run.has_stepped(lines):
            return True
    step_s = pace.step_s
    for _ in range(rng.randint(0, 5)):
        began = time.monotonic()
        if not until(job, partial(run.has_stepped, run.num_lines())):
            return False
        step_s = min(step_s, time.monotonic() - began)
    time.sleep(rng.uniform(0, step_s))
    return job.runs


def hit(job: ForkedJob, rng: random.Random, saves: Callable[[], bool], alone: bool) -> Kill:
    """Kill one rank, or all, at once."""
    job.freeze()
    saving = saves()
    job.kill(*([rng.randrange(RANKS)] if alone else rng.sample(range(RANKS), RANKS)))
    job.thaw()
    if not alone:
        job.wait(30)
    return Kill(saving, alone)


def until(job: ForkedJob, condition: Callable[[], bool]) -> bool:
    """Wait for a condition. Return whether it came before the job ended."""
    while not condition():
        if not job.runs:
            return False
        time.sleep(0.001)
    return True


def check_after_kill(run: Run, before: list[int], lines: list[dict[str, Any]]) -> None:
    """Check that reported saves exist, that checkpoints are intact, and that the metrics are the undisturbed run's.

    `before`: the steps of the checkpoints at the start or resume.
    """
    saved, reported = run.saved(), run.reported()
    for ours, theirs in zip(reversed(saved), reversed(reported), strict=False):
        assert ours >= theirs, f"saved {saved}, reported {reported}"
    assert len(saved) >= min(KEEP, len(reported))
    for step in saved:
        assert damaged_files(run.root / f"step_{step:06d}") == [], f"step {step}"
    check_loaded(run, before)
    if run.num_lines():
        text = (run.out / "metrics.jsonl").read_text()
        written = run.lines() if text.endswith("\n") else []
        assert written == lines[: len(written)]
        assert run.num_lines() >= max(saved, default=0)


def check_loaded(run: Run, before: list[int]) -> None:
    """Check that it continued from the newest checkpoint, if it came that far."""
    text = run.said.read_text()
    loaded = [int(step) for step in re.findall(r" is loaded: step (\d+), sample", text)]
    assert loaded in ([], before[-1:]), text
    assert "nothing to resume in" not in text or not before, text


def damaged_files(folder: Path) -> list[str]:
    """Return a checkpoint's files that are missing, unexpected, or different from the manifest."""
    wanted = json.loads((folder / "checkpoint.json").read_text())["files"]
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    del found["checkpoint.json"]
    return sorted(name for name in {*wanted, *found} if name not in found or said_of(found[name]) != wanted.get(name))


def said_of(path: Path) -> dict[str, Any]:
    """Return a file's manifest entry as computed now."""
    return {"bytes": path.stat().st_size, "xxh3_128": xxh3_128_hexdigest(path.read_bytes())}


def killed_until_done(run: Run, theirs: Undisturbed, rng: random.Random, kills: list[Kill], number: int) -> None:
    """Run to the last step, with kills and resumes until there are `number` kills, which are added to `kills`."""
    while True:
        before = run.saved()
        with run.start("--resume") as job:
            struck = None
            if len(kills) < number:
                behind = 2 * sum(kill.at_a_save for kill in kills) <= len(kills) + 1
                struck = strike(run, job, theirs.pace, rng, behind, alone=len(kills) % 5 == 4)
            statuses = job.wait(60)
            if struck is None or statuses == [0] * RANKS:  # on a busy machine, all may end before the signal comes
                assert statuses == [0] * RANKS, run.said.read_text()
                check_loaded(run, before)
                return
            assert -9 in statuses
            assert not struck.alone or 0 not in statuses or STEPS in run.saved(), (
                "peers of the dead called it a success"
            )
        kills.append(struck)
        check_after_kill(run, before, theirs.lines)


@pytest.mark.minutes(15)
@pytest.mark.parametrize(
    ("schedule", "number"),
    [
        pytest.param("1F1B", 3, marks=pytest.mark.prove),
        pytest.param("interleaved", 2, marks=pytest.mark.prove),
        pytest.param("1F1B", 60, marks=pytest.mark.prove),
        pytest.param("interleaved", 20, marks=pytest.mark.prove),
    ],
)
def test_killed_and_resumed_it_is_the_undisturbed_run(
    undisturbed_under: Callable[[str], Undisturbed], tmp_path: Path, schedule: str, number: int
) -> None:
    undisturbed, rng, kills = undisturbed_under(schedule), random.Random(number), list[Kill]()
    for chain in range(2 * number):  # on a busy machine, runs may end before the signal comes
        run = new_run(tmp_path / str(chain), schedule)
        killed_until_done(run, undisturbed, rng, kills, number)
        assert run.lines() == undisturbed.lines
        assert [line["step"] for line in run.lines()] == list(range(1, STEPS + 1))
        assert run.saved() == [STEPS - 2, STEPS]
        assert differences(contents(run, STEPS), undisturbed.last) == []
        if len(kills) == number:
            break
    assert len(kills) == number
    assert sum(kill.at_a_save for kill in kills) >= number / 2
    assert any(kill.alone for kill in kills) or number < 5


@pytest.mark.prove  # it is of the comparison that the tests above make, and trains for it
def test_the_comparison_sees_one_bit(undisturbed_under: Callable[[str], Undisturbed]) -> None:
    """Every kind of content of a checkpoint is compared."""
    one = undisturbed_under("1F1B").last
    assert len(one) > 100
    assert differences(one, one) == []
    for path, value in one.items():
        other = flipped(value) if isinstance(value, torch.Tensor) else value + 1
        assert differences(one | {path: other}, one) == [path]


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the last bit of its last element flipped."""
    raw = tensor.contiguous().clone()
    raw.view(-1).view(torch.uint8)[-1] ^= 1
    return raw
