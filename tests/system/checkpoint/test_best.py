"""checkpoint.keep_best: the checkpoint with the lowest held-out loss survives, and each command finds it by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslpar.checkpoint.folder import scan
from dslpar.cli.main import main
from tests.support.forked_training import train_alone

CONFIG = """
model = dict(type='GPT', num_layers=1, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=16, dropout=0.5)
data = dict(files=['text.txt'])
optimizer = dict(type='AdamW', lr=3e-3)
batch = dict(global_size=8)
train = dict(steps=4, eval_interval=1, eval_steps=2, eval_train=True, output_dir='OUT')
checkpoint = dict(keep=1, keep_best=True)
"""


def test_the_best_outlives_later_checkpoints_and_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(300)))
    config, out = tmp_path / "cfg.py", tmp_path / "out"
    config.write_text(CONFIG.replace("OUT", str(out)))

    def train(*words: str) -> None:
        done = train_alone("--config", str(config), *words)
        assert done.status == 0, done.output

    train()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines]
    assert losses == sorted(losses, reverse=True), "each evaluation was the best so far, so each step was saved"
    assert [each.step for each in scan(out / "checkpoints").checkpoints] == [4], "keep=1"
    # without dropout, on text that is like the held-out text: far from the step's own loss
    assert all(
        abs(line["train_eval_loss"] - line["eval_loss"]) < abs(line["loss"] - line["eval_loss"]) for line in lines
    )

    train("--resume", "optimizer.lr=3.0", "train.steps=7")
    assert [each.step for each in scan(out / "checkpoints").checkpoints] == [4, 7], "the resume knows the best so far"
    assert main(["checkpoint", "list", str(out), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["best"]) for row in rows] == [("step_000004", True), ("step_000007", False)]
    assert rows[0]["eval_loss"] == losses[-1]
    assert main(["checkpoint", "list", str(out)]) == 0
    assert f"{losses[-1]:.4f} best" in capsys.readouterr().out

    train("--resume", "checkpoint.resume_from=best", "train.steps=5")
    assert [each.step for each in scan(out / "checkpoints").checkpoints] == [5], "step 7 is of the run left behind"
    assert main(["eval", str(out), "--checkpoint", "best", "--samples", "16", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
