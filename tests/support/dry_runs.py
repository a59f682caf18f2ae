"""Jobs to dry-run: a small GPT in every mode and schedule."""

from __future__ import annotations

from dslpar.layout.resolve import Job
from dslpar.linter import check

LLAMA = (
    "norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, tie_embeddings=False, num_kv_heads=4, "
    "dropout=0.1"
)
MODES = {
    "none": (1, ""),
    "1d": (2, "size=2, mode='1d'"),
    "1d sequence": (4, "size=4, mode='1d', sequence=True"),
    "2d": (4, "size=4, mode='2d'"),
    "2.5d": (8, "size=8, mode='2.5d', depth=2"),
    "3d": (8, "size=8, mode='3d'"),
    "ring": (2, "size=2, mode='sequence'"),
    "ulysses": (2, "size=2, mode='sequence', impl='ulysses'"),
}
SCHEDULES = {
    "no pipeline": (1, ""),
    "1f1b": (4, "schedule = dict(type='1f1b')"),
    "interleaved": (2, "schedule = dict(type='interleaved', num_model_chunks=2)"),
    "zero_bubble": (4, "schedule = dict(type='zero_bubble')"),
    "zero_bubble, chunks": (2, "schedule = dict(type='zero_bubble', num_model_chunks=2)"),
}


def job_of(mode: str = "none", schedule: str = "no pipeline", data: int = 2, form: str = "", more: str = "") -> Job:
    (size, tensor), (pipe, keys) = MODES[mode], SCHEDULES[schedule]
    parallel = [f"pipeline={pipe}"] * (pipe > 1) + [f"tensor=dict({tensor})"] * (size > 1)
    config = f"""
model = dict(type='GPT', num_layers=8, hidden_size=64, num_heads=8, vocab_size=257, max_seq_len=32, {form})
parallel = dict({", ".join(parallel)})
batch = dict(micro_size=8, accumulation=8)
train = dict(steps=10)
zero = 1
{keys}
{more}
"""
    return check.resolve(check.load_text(config, "dry.py"), size * pipe * data)
