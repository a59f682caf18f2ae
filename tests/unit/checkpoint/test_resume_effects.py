"""dslpar.checkpoint.resume_effects: values that change on a resume, though no key names them."""

import pytest

from dslpar.checkpoint.resume_effects import effects
from dslpar.linter import check
from dslpar.schema.sections import Spec

GPT = "dict(type='GPT', num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64)"
MOCO = "dict(type='MoCo', num_layers=2, hidden_size=64, num_heads=4, image_size=32, patch_size=8, num_channels=3)"
REST = """
optimizer = dict(type='AdamW', lr=2e-3)
lr_scheduler = dict(type='cosine', warmup_steps=20, min_lr=2e-4)
batch = dict(micro_size=2)
train = dict(steps=80)
"""


def spec(overrides: list[str], model: str = GPT) -> Spec:
    return check.check(check.load_text(f"model = {model}\n{REST}", "cfg.py", overrides), 1).job.spec


CONSTANT = ["lr_scheduler.type=constant", "lr_scheduler.warmup_steps=0", "lr_scheduler.min_lr=0"]


@pytest.mark.parametrize(
    ("before", "now", "step", "lines"),
    [
        ([], ["train.steps=110"], 80, ["lr at step 81: 0.0002 -> 0.000623073"]),
        ([], ["train.steps=110"], 60, ["lr at step 61: 0.000609825 -> 0.00122526"]),
        ([], ["train.steps=110"], 10, ["lr at step 80: 0.0002 -> 0.00065"]),  # the warm-up is the same
        ([], ["lr_scheduler.warmup_steps=40"], 10, ["lr at step 11: 0.0011 -> 0.00055"]),
        ([], ["lr_scheduler.warmup_steps=10"], 30, ["lr at step 31: 0.0018548 -> 0.00162901"]),
        ([], ["lr_scheduler.type=linear"], 40, ["lr at step 41: 0.00150859 -> 0.00137"]),
        ([], ["lr_scheduler.min_lr=0"], 79, ["lr at step 80: 0.0002 -> 0"]),
        ([], ["optimizer.lr=1e-3"], 40, ["lr at step 41: 0.00150859 -> 0.000781596"]),
        (CONSTANT, [*CONSTANT, "optimizer.lr=1e-3"], 40, []),  # the key says so itself
        (CONSTANT, [*CONSTANT, "train.steps=110"], 40, []),
        ([], ["train.clip_grad_norm=1.0", "optimizer.weight_decay=0.1"], 40, []),
        ([], [], 40, []),
    ],
)
def test_the_lr_that_a_changed_key_gives(before: list[str], now: list[str], step: int, lines: list[str]) -> None:
    assert list(effects(spec(before), spec(now), step)) == lines


def test_the_momentum_of_a_moco_follows_the_steps() -> None:
    before, now = (spec([*CONSTANT, f"train.steps={steps}"], MOCO) for steps in (80, 160))
    assert list(effects(before, now, 39)) == ["momentum of the momentum encoder at step 40: 0.995 -> 0.991464"]
