"""dslpar.training.divergence: what is to blame for a run that diverges, by what its config sets."""

import pytest

from dslpar.linter import check
from dslpar.training.divergence import suspects

CONFIG = """
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64)
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=2)
train = dict(steps=9)
"""


@pytest.mark.parametrize(
    ("overrides", "num_updates", "lr", "keys"),
    [
        ([], 1, 1e9, ["optimizer.lr", "lr_scheduler", "train.clip_grad_norm"]),
        (
            ["optimizer.weight_decay=5000", "lr_scheduler.warmup_steps=5", "train.clip_grad_norm=1.0"],
            *(5, 1e-3),
            ["optimizer.weight_decay", "optimizer.lr"],
        ),
        (
            ["train.clip_grad_norm=1.0", "optimizer.weight_decay=0"],
            1,
            1e9,
            ["optimizer.lr", "lr_scheduler"],
        ),
        (["train.clip_grad_norm=1.0", "lr_scheduler.warmup_steps=5"], 5, 0.5, ["optimizer.lr"]),
        (["train.clip_grad_norm=0.1", "lr_scheduler.warmup_steps=5"], 5, 0.5, ["optimizer.lr"]),
        (
            ["train.clip_grad_norm=40.0", "lr_scheduler.warmup_steps=5", "precision=bf16", "zero=1"],
            *(5, 0.5),
            ["optimizer.lr", "train.clip_grad_norm", "precision.dtype"],
        ),
        (["precision=fp16", "zero=1"], 0, 1e-3, ["precision.dtype", "model"]),
        (["precision=fp32"], 0, 1e9, ["model"]),
    ],
)
def test_what_is_set_already_is_no_suspect(overrides: list[str], num_updates: int, lr: float, keys: list[str]) -> None:
    spec = check.check(check.load_text(CONFIG, "cfg.py", overrides), 1).job.spec
    found = suspects(spec, num_updates=num_updates, lr=lr)
    assert [suspect.key for suspect in found] == keys


@pytest.mark.parametrize(("dtype", "wider"), [("fp16", "precision='bf16' or 'fp32'"), ("bf16", "precision='fp32'")])
def test_a_precision_is_advised_that_is_wider(dtype: str, wider: str) -> None:
    spec = check.check(check.load_text(CONFIG, "cfg.py", [f"precision={dtype}", "zero=1"]), 1).job.spec
    assert suspects(spec, num_updates=0, lr=1e-3)[0].advice == wider
