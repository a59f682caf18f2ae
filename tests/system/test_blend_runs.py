"""train.py on a blend: one process's curve, and the same after a mid-epoch resume on four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.data.tokenize import Request, tokenize
from tests.support.forked_training import start_job, train_alone
from tests.support.runs import metrics

CONFIG = """\
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size=256, max_seq_len=16)
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=8)
train = dict(steps=6, eval_interval=6, eval_steps=1, save_interval=3)
data = dict(type='blend', parts=[
    dict(type='tokens', path='tokens', eval_fraction=0.2, weight=0.5),
    dict(type='text', files=['text'], eval_fraction=0.2, weight=0.3),
    dict(type='tests.unit.data.own_classes.Rows', count=9, weight=0.2),
])
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "text").mkdir()
    for number in range(10):
        (tmp_path / "text" / f"{number}.txt").write_text(f"line {number} says {number * number}\n" * 3)
    tokenize(Request([str(tmp_path / "text")], str(tmp_path / "tokens")))
    (tmp_path / "cfg.py").write_text(CONFIG)
    return str(tmp_path / "cfg.py")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)] + [metrics(folder)[-1]["eval_loss"]]


@pytest.mark.prove
def test_the_curve_is_the_same_after_a_resume_elsewhere(config: str, tmp_path: Path) -> None:
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    done = train_alone("--config", config, f"train.output_dir={alone}")
    assert done.status == 0
    assert "a blend of tokens 'tokens': 50.0% of the run" in (alone / "log.txt").read_text()
    half = ("train.steps=3", "train.eval_interval=3", f"train.output_dir={spread}")
    assert train_alone("--config", config, *half).status == 0
    layout = "parallel={'pipeline': 2, 'data': 2}"
    said = tmp_path / "said.txt"
    with start_job(4, ["--config", config, "--resume", layout, f"train.output_dir={spread}"], said) as job:
        assert job.wait(200) == [0] * 4, said.read_text()
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    # A run's config.yaml is a config, too: its paths are relative to its own folder.
    again = train_alone("--config", str(alone / "config.yaml"), "--resume", "train.steps=7", "train.eval_interval=7")
    assert again.status == 0, again.output
    other = train_alone(
        "--config", config, "--resume", "train.steps=7", "data.parts.0.weight=0.6", f"train.output_dir={spread}"
    )
    assert other.status == 1
    assert "CKP202" in other.output
