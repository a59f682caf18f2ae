"""All findings at once: a mistake in one field hides no independent one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations

import pytest

from tests.support.lint import codes

CONFIG = """
model = dict(type='GPT', num_layers=4, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)
parallel = dict(pipeline=dict(size=2), tensor=dict(size=4, mode='1d'))
optimizer = dict(type='AdamW', lr=1e-3, betas=(0.9, 0.95))
lr_scheduler = dict(type='cosine', warmup_steps=10)
batch = dict(global_size=32, micro_size=4)
train = dict(steps=100, eval_interval=10)
precision = dict(dtype='bf16')
zero = dict(stage=1)
data = dict(seq_len=64)
checkpoint = dict(keep=3)
"""
MISTAKES = re.findall(
    r"\S+",
    """
parallel.tensor.mode='1D' parallel.tensor.mode='4d' parallel.tensor.size=6 parallel.tensor.size=-4 parallel.tensr=2
parallel.pipeline.size=3 parallel.pipeline.size=8 parallel.pipeline.size='two' parallel.pipeline.siz=2
optimizer.type='adamw' optimizer.type='Foo' optimizer.lr=-1 optimizer.betas=(2,3) optimizer.weight_decay=-1
optimizer.bogus=1 lr_scheduler.type='Cosine' lr_scheduler.type='foo' lr_scheduler.warmup_steps=1000
lr_scheduler.min_lr=-1 lr_scheduler.min_lr=5.0 batch.global_size=33 batch.micro_size=0 batch.micro_size='4'
batch.accumulation=3 train.steps=0 train.steps='100' train.eval_interval=1000 train.save_interval=-1
train.clip_grad_norm=-1 train.output_dir=3 precision.dtype='BF16' precision.dtype='fp8' zero.stage=2 zero.stage=3
zero.stage=7 zero.overlap_comm='yes' data.seq_len=128 data.seq_len=0 data.files=3 checkpoint.keep=0
checkpoint.keep=2.5 model.num_heads=7 model.hidden_size=50 model.num_layers=0 model.num_layers=1
model.vocab_size=-1 model.type='gpt' model.type='Llama' model.dropout=2.0 model.bogus=1 schedule.type='2f2b'
schedule.num_microbatches=7 paralel=3
""",
)
DEPENDS = {
    "BAT101": ("parallel.tensor", "parallel.pipeline.size", "batch.micro_size"),
    "BAT103": ("model.type='Llama'",),
    "BAT105": ("train.steps=0", "lr_scheduler.type='foo'"),
    "BAT106": ("optimizer.type='Foo'", "optimizer.lr=-1", "lr_scheduler.type='foo'"),
    "DEAD113": ("train.steps=0",),
    "DEAD116": ("precision.dtype='fp8'", "zero.stage=7"),
    "PAR102": ("parallel.tensor.size=-4", "parallel.pipeline.size='two'"),
    "PIP101": ("parallel.pipeline.size='two'", "model.num_layers=0", "model.type='Llama'"),
    "TEN201": ("parallel.tensor", "model.type='Llama'"),
    "TEN202": ("parallel.tensor", "model.type='Llama'"),
    "TEN205": ("model.type='Llama'",),
    "ZER101": ("parallel.pipeline.size='two'",),
    "CFG101": ("optimizer.type='Foo'", "model.type='Llama'"),
    "CFG103": ("optimizer.type='Foo'", "lr_scheduler.type='foo'", "model.type='Llama'"),
}
"""A code, and the mistakes that must be corrected before its check has a meaning.

A section of an unknown class may have any keys. Checks that depend on a size wait until the size is valid.
"""
NEVER_HIDDEN = ("optimizer.lr=-1", "optimizer.weight_decay=-1", "model.num_layers=0", "model.vocab_size=-1")
"""Keys that every class of their section has."""


@pytest.mark.prove
def test_a_mistake_hides_no_other_that_does_not_depend_on_it() -> None:
    assert hidden(combinations(MISTAKES, 2)) == []


def test_a_mistake_hides_none_of_some_others() -> None:
    """Each mistake is combined with the next two, and with a distant one."""
    ahead = [(one, MISTAKES[(at + by) % len(MISTAKES)]) for at, one in enumerate(MISTAKES) for by in (1, 2, 17)]
    assert hidden(ahead) == []


def hidden(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Yield for pairs of mistakes: (the one that is not found, the other, its code)."""
    alone = {mistake: set(codes(CONFIG, overrides=[mistake])) for mistake in MISTAKES}
    assert [mistake for mistake, found in alone.items() if not found] == []
    hidden = []
    for one, other in pairs:
        if one.partition("=")[0] == other.partition("=")[0]:
            continue
        both = set(codes(CONFIG, overrides=[one, other]))
        for mistake, beside in ((one, other), (other, one)):
            if mistake in NEVER_HIDDEN:
                hidden += [(mistake, beside, code) for code in alone[mistake] - both]
            else:
                hidden += [
                    (mistake, beside, code)
                    for code in alone[mistake] - both
                    if not beside.startswith(DEPENDS.get(code, ()))
                ]
    return hidden


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("optimizer = dict(type='adamw', lr=-1)\n", 8, ["CFG108", "CFG103"]),
        ("parallel = dict(tensor=dict(size=8, mode='2D'))\n", 8, ["TEN102", "TEN104"]),
        ("parallel = dict(pipeline=3, tensor=dict(size=6, mode='3D'))\n", 64, ["TEN102", "TEN103", "PAR101"]),
        ("parallel = dict(tensor=dict(size=6, mode='4d'))\n", 64, ["TEN102", "PAR101"]),
        ("lr_scheduler = dict(type='Cosine', min_lr=9.0)\n", 8, ["CFG108", "BAT106"]),
        ("batch = dict(micro_size='16', global_size=17)\n", 8, ["CFG102", "BAT101"]),
        ("parallel = dict(pipeline=3, tensor=[2])\n", 8, ["CFG102", "PAR101"]),
        (
            "parallel = dict(pipeline=[2], tensor=dict(size=7, mode='1d'))\n",
            8,
            ["CFG102", "PAR101", "TEN201", "TEN202"],
        ),
    ],
)
def test_what_is_meant_is_checked_at_once(text: str, world: int, expected: list[str]) -> None:
    model = "model = dict(type='gpt', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)\n"
    assert sorted(codes(model + text, world)) == sorted(["CFG108", *expected])
