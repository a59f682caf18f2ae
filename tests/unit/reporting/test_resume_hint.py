"""dslpar.reporting.resume_hint: the step that --resume goes on from."""

import errno
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.reporting.resume_hint import resume_hint, write_hint

CONFIG = """
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=2)
"""


def job(folder: Path, resume_from: str) -> Job:
    text = (
        f"{CONFIG}checkpoint = dict(resume_from={resume_from!r})\ntrain = dict(steps=9, output_dir={str(folder)!r})\n"
    )
    return check.check(check.load_text(text, "cfg.py"), 1).job


@pytest.mark.parametrize(
    ("folders", "resume_from", "hint"),
    [
        (["step_000004", "step_000010", "step_000012.part"], "newest", "; --resume goes on from step 10"),
        (["step_000004"], "newest_whole", "; --resume goes on from step 4"),
        (["step_000004"], "step_000002", ""),
        ([], "newest", ""),
    ],
)
def test_the_newest_published_checkpoint_is_named(
    tmp_path: Path, folders: list[str], resume_from: str, hint: str
) -> None:
    for name in folders:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert resume_hint(job(tmp_path, resume_from)) == hint


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space on its file system"),
        (errno.EDQUOT, "free space in your quota"),
        (errno.EROFS, "have its file system mounted for writing"),
        (errno.EACCES, "let this user write there"),
        (errno.EIO, "make it writable again"),
    ],
)
def test_a_run_that_cannot_write_is_moved_or_given_what_it_lacks_and_never_begun_again(
    tmp_path: Path, number: int, remedy: str
) -> None:
    folder = tmp_path / "a run"
    reason = f"rank 1 of 2 on h: {OSError(number, os.strerror(number))}"
    assert write_hint(job(folder, "newest"), reason) == f"{remedy}; or name a folder elsewhere, train.output_dir=..."
    (folder / "checkpoints" / "step_000020").mkdir(parents=True)
    hint = write_hint(job(folder, "newest"), reason)
    assert remedy in hint
    assert hint.index("move the run") < hint.index(remedy), "in this order"
    # Followed literally, the run is found in its new place, and goes on from the same step.
    moved = shlex.split(re.findall(r"mv .* NEW(?=,)", hint)[0].replace("NEW", shlex.quote(str(tmp_path / "new"))))
    subprocess.run(moved, check=True)
    assert resume_hint(job(tmp_path / "new", "newest")) == "; --resume goes on from step 20"
    assert "step 20" in hint
