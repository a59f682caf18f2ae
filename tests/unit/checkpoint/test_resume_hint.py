"""dslpar.checkpoint.resume_hint: the step that --resume goes on from."""

from pathlib import Path

import pytest

from dslpar.checkpoint.resume_hint import resume_hint
from dslpar.layout.resolve import Job
from dslpar.linter import check

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
