"""train.py killed and resumed, under launchers; --eval-only and --dry-run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked_training import train_alone
from tests.support.runs import ROOT, Finished, deepspeed, metrics, start
from tests.support.sampling import sampled

PYTHON = sys.executable
CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64, dropout=0.1)
optimizer = dict(type='AdamW', lr=1e-2)
lr_scheduler = dict(type='cosine', warmup_steps=3)
batch = dict(global_size=8)
train = dict(steps=10, save_interval=5, eval_steps=2, clip_grad_norm=1.0)
data = dict(files=['text.txt'], eval_fraction=0.2)
"""
TEXT = "".join(f"line {i} says {i * i}\n" for i in range(110))
"""About 24 training samples: an epoch is 3 steps, and step 5 is in the middle of the second."""
TIMINGS = {"step_s", "tokens_per_s", "data_s", "tflops_per_s", "mfu_causal", "mfu_6n"}


def command(folder: Path, *words: str, config: str = CONFIG, launcher: tuple[str, ...] = (PYTHON,)) -> list[str]:
    """Return the command of train.py on a config in `folder`, into `folder`/out."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "cfg.py").write_text(config)
    return [*launcher, "train.py", *words, "--config", str(folder / "cfg.py"), f"train.output_dir={folder / 'out'}"]


def ended(words: list[str], idle_s: float = 120) -> Finished:
    """Run a command to its end; a single process is forked from here, where its imports are already done."""
    return train_alone(*words[2:]) if words[0] == PYTHON else start(words, idle_s)


def kill_after_step_5(words: list[str], out: Path) -> None:
    """Start a run, and kill launcher and ranks as soon as the checkpoint of step 5 exists."""
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "checkpoints" / "step_000005").exists():
        assert process.poll() is None, "it ended before its step 5"
        time.sleep(0.002)
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    assert process.wait() != 0
    assert not (out / "checkpoints" / "step_000010").exists(), "too late to be a test"


def lines(out: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without timings."""
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in metrics(out)]


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in what torch.load returns."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}/{index}")


def checkpoint_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    """Return every tensor of every file, random states included."""
    root = out / "checkpoints" / f"step_{step:06d}"
    found: dict[str, torch.Tensor] = {}
    for path in sorted(root.rglob("*.pt")):
        loaded = torch.load(path, weights_only=True, map_location="cpu")
        found |= tensors(loaded, str(path.relative_to(root)))
    for path in sorted(root.rglob("*.safetensors")):
        found |= {f"{path.stem}/{key}": tensor for key, tensor in load_file(path).items()}
    return found


LAYOUTS = {
    "one process": ("", 1),
    "pipe 2, data 2, tensor 2, zero 0": ("parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n", 8),
    "zero 1": ("zero = 1\n", 2),
    "zero 2": ("zero = 2\n", 2),
    "zero 3": ("zero = 3\n", 2),
}


@pytest.mark.parametrize("name", sampled(LAYOUTS, lambda name: LAYOUTS[name][1] == 1))
def test_killed_and_resumed_it_is_the_undisturbed_run(tmp_path: Path, name: str) -> None:
    more, ranks = LAYOUTS[name]
    config = CONFIG + more + ("batch['accumulation'] = 2\n" if "pipe" in name else "")
    launch = tuple(deepspeed("--num_gpus", str(ranks))) if ranks > 1 else (PYTHON,)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    done = ended(command(whole, config=config, launcher=launch))
    assert done.status == 0, done.output
    kill_after_step_5(command(halves, "--resume", config=config, launcher=launch), halves / "out")
    log = (halves / "out" / "log.txt").read_text()
    assert "nothing to resume in" in log
    with (halves / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')  # lines of a longer run, and a partial line
    done = ended(command(halves, "--resume", config=config, launcher=launch))
    assert done.status == 0, done.output
    assert "step_000005 is loaded: step 5, sample 40" in done.output
    assert lines(halves / "out") == lines(whole / "out")
    assert [line["step"] for line in lines(whole / "out")] == list(range(1, 11))
    one, other = checkpoint_of(whole / "out", 10), checkpoint_of(halves / "out", 10)
    assert one.keys() == other.keys()
    assert len(one) > 20
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert (halves / "out" / "log.txt").read_text().startswith(log), "appended to"
    assert not (halves / "out" / "earlier").exists()


# ---- refusals, and early ends ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of 5 steps."""
    folder = tmp_path_factory.mktemp("trained")
    done = ended(command(folder, "train.steps=5"))
    assert done.status == 0, done.output
    return folder


def again(folder: Path, *words: str) -> tuple[Finished, set[Path]]:
    """Start again in a run's folder, and return the result and the changed or new files without its lock."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (folder / "cfg.py").write_text(CONFIG)
    done = train_alone("--config", str(folder / "cfg.py"), f"train.output_dir={folder / 'out'}", *words)
    after = {path for path in (folder / "out").rglob("*") if path.is_file() and path.name != ".lock"}
    return done, {path for path in after if path.stat().st_mtime_ns != before.get(path)}


def test_a_complete_run_says_so(trained: Path) -> None:
    done, touched = again(trained, "--resume", "train.steps=5")
    assert done.status == 0
    assert "step 5 is done, and train.steps is 5: complete" in done.output
    assert touched == set()


def test_what_a_kill_has_left_over_keep_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """A kill may come between publishing a checkpoint and removing the oldest; a finished run saves no more."""
    words = ("train.steps=3", "train.save_interval=1")
    done = ended(command(tmp_path, *words, "checkpoint.keep=3"))
    assert done.status == 0, done.output
    there = tmp_path / "out" / "checkpoints"
    assert sorted(path.name for path in there.iterdir()) == ["step_000001", "step_000002", "step_000003"]
    done = ended(command(tmp_path, "--resume", *words, "checkpoint.keep=2"))
    assert "complete" in done.output
    assert sorted(path.name for path in there.iterdir()) == ["step_000002", "step_000003"]


def test_another_run_s_checkpoint_is_refused_at_the_key(trained: Path) -> None:
    done, touched = again(trained, "--resume", "train.seed=7", "model.dropout=0.2", "batch.global_size=16")
    assert done.status == 1
    assert "CKP202 checkpoint-of-another-run" in done.output
    assert "train.seed: saved 1234, requested 7" in done.output
    assert "batch.global_size: saved 8, requested 16" in done.output
    assert "model.dropout: " not in done.output, "that takes effect when it is changed"
    assert "Traceback" not in done.output
    assert touched == set()


PLAIN = """\
model = dict(type='GPT', num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=32)
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=8)
train = dict(steps=10, save_interval=5, clip_grad_norm=1.0)
data = dict(files=['text.txt'], eval_fraction=0.2)
"""
ELSEWHERE = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\nbatch['accumulation'] = 2\n"


@pytest.mark.prove
def test_a_run_goes_on_in_another_layout_under_another_launcher(tmp_path: Path) -> None:
    """One process runs to step 5, then two stages of two tensor ranks: one metrics.jsonl, one curve."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, *words in ((whole,), (parts, "train.steps=5")):
        done = ended(command(folder, *words, config=PLAIN))
        assert done.status == 0, done.output
    four = tuple(deepspeed("--num_gpus", "4"))
    done = ended(command(parts, "--resume", config=PLAIN + ELSEWHERE, launcher=four))
    assert done.status == 0, done.output
    assert "step_000005 is loaded: step 5, sample 40" in done.output
    one, other = lines(whole / "out"), lines(parts / "out")
    assert [line["step"] for line in other] == list(range(1, 11))
    assert [line["tokens"] for line in other] == [line["tokens"] for line in one]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in other] == pytest.approx([line[key] for line in one], rel=1e-6)
    assert one[:5] == other[:5]


def test_eval_only_prints_and_notes_the_held_out_loss(trained: Path) -> None:
    done, touched = again(trained, "--eval-only", "train.steps=5")
    assert done.status == 0, done.output
    assert touched == {trained / "out" / "eval.jsonl"}
    (line,) = [json.loads(text) for text in (trained / "out" / "eval.jsonl").read_text().splitlines()]
    assert line == {"step": 5, "eval_loss": line["eval_loss"], "tokens": 2 * 8 * 64}
    assert f"held-out loss at step 5: {line['eval_loss']:.4f}, over 1024 tokens" in done.output
    assert 0 < line["eval_loss"] < 5.5, "ln 256 before any step"


def test_a_run_from_another_s_checkpoint_sets_aside_the_run_that_is_in_its_folder(
    trained: Path, tmp_path: Path
) -> None:
    """It does not resume the run in the folder, whose metrics were once truncated and continued as one curve."""
    words = command(tmp_path, "--resume", f"checkpoint.resume_from={trained / 'out' / 'checkpoints' / 'step_000005'}")
    (tmp_path / "out").mkdir()
    before = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 10))
    (tmp_path / "out" / "metrics.jsonl").write_text(before)
    done = ended([*words, "train.steps=6"])
    assert done.status == 0, done.output
    assert [line["step"] for line in metrics(tmp_path / "out")] == [6]
    assert (tmp_path / "out" / "earlier" / "1" / "metrics.jsonl").read_text() == before


def test_dry_run_builds_says_what_and_writes_nothing(trained: Path, tmp_path: Path) -> None:
    done = ended(command(tmp_path, "--dry-run", "train.steps=5"))
    assert done.status == 0, done.output
    assert "world of 1 = pipeline 1 * data 1 * tensor 1" in done.output
    # tables 256 * 64 + 64 * 64, blocks 2 * (12 * 64**2 + 13 * 64), norm 2 * 64
    assert "120,576 parameters in all, of which rank 0 holds 120,576" in done.output
    assert "step 1/" not in done.output
    assert not (tmp_path / "out").exists()
    done, touched = again(trained, "--resume", "--dry-run")
    assert done.status == 0
    assert "step_000005 is loaded: step 5, sample 40" in done.output
    assert touched == set()


def test_nothing_to_evaluate_is_a_finding(tmp_path: Path) -> None:
    done = ended(command(tmp_path, "--eval-only"))
    assert done.status == 1
    assert "CKP206 nothing-to-evaluate" in done.output
    assert not (tmp_path / "out").exists()


def test_without_resume_the_checkpoints_are_set_aside_with_their_run(trained: Path) -> None:
    """The last of these tests, since it starts afresh in the folder."""
    (trained / "out" / "eval.jsonl").touch()  # what --eval-only leaves
    done, _ = again(trained, "train.steps=1", "train.save_interval=0")
    assert done.status == 0, done.output
    earlier = trained / "out" / "earlier" / "1"
    assert (earlier / "checkpoints" / "step_000005" / "checkpoint.json").exists()
    assert (earlier / "eval.jsonl").exists()
    assert not (trained / "out" / "checkpoints").exists(), "save_interval=0"
