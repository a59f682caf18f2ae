"""train.py on token files: the curve of the same text, on every layout, and after a resume on another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.data.tokenize import Request, tokenize
from tests.support.forked_training import start_job, train_alone
from tests.support.runs import metrics

CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16)
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=4)
train = dict(steps=6, eval_interval=6, eval_steps=1, save_interval=3)
data = dict(type='tokens', path='tokens', eval_fraction=0.2)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return a config with ten documents; an epoch is 19 samples, and ends within a step."""
    (tmp_path / "text").mkdir()
    for number in range(10):
        (tmp_path / "text" / f"{number}.txt").write_text(f"line {number} says {number * number}\n" * 2)
    tokenize(Request([str(tmp_path / "text")], str(tmp_path / "tokens")))
    (tmp_path / "cfg.py").write_text(CONFIG)
    return str(tmp_path / "cfg.py")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)] + [metrics(folder)[-1]["eval_loss"]]


def test_the_curve_is_the_same_after_a_resume_elsewhere(config: str, tmp_path: Path) -> None:
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    assert train_alone("--config", config, f"train.output_dir={alone}").status == 0
    half = ("train.steps=3", "train.eval_interval=3", f"train.output_dir={spread}")
    assert train_alone("--config", config, *half).status == 0
    layout = "parallel={'pipeline': 2}"
    said = tmp_path / "said.txt"
    with start_job(2, ["--config", config, "--resume", layout, f"train.output_dir={spread}"], said) as job:
        assert job.wait(120) == [0, 0], said.read_text()
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert all(0 <= line["data_s"] < line["step_s"] for line in metrics(alone))


@pytest.mark.prove
def test_other_tokens_are_another_run(config: str, tmp_path: Path) -> None:
    output = f"train.output_dir={tmp_path / 'out'}"
    assert train_alone("--config", config, output, "train.steps=3").status == 0
    (tmp_path / "text" / "0.txt").write_text("line 0 says 1\n" * 2)
    tokenize(Request([str(tmp_path / "text")], str(tmp_path / "other")))
    done = train_alone("--config", config, output, "--resume", "data.path=other")
    assert done.status == 1
    assert "CKP202" in done.output
