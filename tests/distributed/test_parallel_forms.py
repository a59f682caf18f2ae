"""Every accepted form of `parallel` trains two steps with the losses of one process.

Forms of the same job run once. The tolerance is 1e-6 for fp32 through DeepSpeed, whose own noise is 3e-7.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dslpar.layout.resolve import Job
from dslpar.linter.check import load_text, resolve
from tests.support.paths import TABLES
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

FORMS = json.loads((TABLES / "parallel_forms.json").read_text())["forms"]
MODEL = "model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=12, vocab_size=256, max_seq_len=16)\n"
REST = "optimizer = dict(type='SGD', lr=0.1)\nbatch = dict(global_size=16)\n"
ACCEPTED = [form for form in FORMS if form["verdict"] == "ok" and form["world"] <= 8]
STEPS = 2


def job(parallel: str, world: int) -> Job:
    line = "" if parallel == "<absent>" else f"parallel = {parallel}\n"
    return resolve(load_text(MODEL + REST + line, "form.py"), world)


_SEEN: dict[object, list[list[float]]] = {}


def losses(wanted: Job) -> list[list[float]]:
    key = (wanted.mesh, wanted.stages, wanted.batch)
    if key not in _SEEN:
        _SEEN[key] = on_ranks(wanted.mesh.world_size, _train, wanted, init="deepspeed")
    return _SEEN[key]


def _train(wanted: Job) -> list[float]:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    groups = Groups(wanted.mesh)
    engine = build_engine(wanted, groups, all_counted=True)
    tokens = torch.randint(256, (16, 17), generator=torch.Generator().manual_seed(1))
    size, data = wanted.batch.micro_size, groups.coord["data"]
    rows = tokens[data * size : (data + 1) * size]
    return [engine.train_batch([(rows[:, :-1], rows[:, 1:])]) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "form",
    sampled(
        ACCEPTED, lambda form: form["mode"] in (None, "1d"), named=lambda form: f"{form['world']}-{form['parallel']}"
    ),
)
def test_form_trains(form: dict[str, Any]) -> None:
    (true,) = losses(job("None", 1))
    for rank_losses in losses(job(form["parallel"], form["world"])):
        assert rank_losses == pytest.approx(true, rel=1e-6)
