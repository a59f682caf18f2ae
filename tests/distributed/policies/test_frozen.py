"""Cost of a frozen base model through DeepSpeed: its weights in the run's dtype, and nothing else."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch

from tests.properties.invariance.layouts import Layout
from tests.properties.invariance.run_and_reference import Samples
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)


class Held(NamedTuple):
    """A rank's memory after a step of AdamW."""

    total: int
    """Parameters of the model with padding."""
    trained: int
    """Parameters of adapters."""
    dtypes: set[torch.dtype]
    """Dtypes of frozen weights."""
    sharded: int
    """Elements of frozen weights that ZeRO 3 leaves here."""
    gradients: list[str]
    """Frozen weights that have a gradient."""
    changed: list[str]
    """Frozen weights that have changed."""
    states: int
    """Elements of the optimizer's state."""


def _held(layout: Layout) -> Held:
    from dslpar.checkpoint import full_state
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.training.metrics import num_parameters

    job = layout.job()
    engine = build_engine(job, Groups(job.mesh))
    before = full_state(engine.module, engine.groups)
    batches = micro_batches(Samples(ignoring=False), job.batch, 1, 0, job.mesh.data, engine.groups.coord["data"])
    engine.train_batch(batches)
    after = full_state(engine.module, engine.groups)
    optimizer = engine.deepspeed.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    frozen = {name: p for name, p in engine.named_parameters() if not p.requires_grad}
    counts = num_parameters(engine)
    return Held(
        total=counts.total,
        trained=counts.trained,
        dtypes={p.dtype for p in frozen.values()},
        sharded=sum(p.ds_tensor.numel() for p in frozen.values() if hasattr(p, "ds_tensor")),
        gradients=[name for name, p in frozen.items() if p.grad is not None or hasattr(p, "grad_accum")],
        changed=[name for name in frozen if not torch.equal(before[name], after[name])],
        states=sum(each.numel() for state in states for each in state.values() if torch.is_tensor(each) and each.dim()),
    )


CELLS = [(0, "fp32"), *product((1, 2, 3), ("fp32", "bf16"))]


@pytest.mark.prove
@pytest.mark.parametrize(("zero", "dtype"), CELLS)
def test_what_is_frozen_has_weights_alone(zero: int, dtype: str) -> None:
    layout = Layout(2, {}, zero=zero, dtype=dtype, optimizer="AdamW", model="transformers' Llama, LoRA")
    for held in on_ranks(2, _held, layout, init="deepspeed"):
        # Two blocks; q, v, o and down are [48, 48], [16, 48], [48, 48] and [48, 96] each, at rank 3.
        assert held.trained == 2 * 3 * (96 + 64 + 96 + 144)
        assert held.total > 10 * held.trained
        assert held.dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}, "no fp32 masters"
        assert held.gradients == held.changed == []
        assert held.states == 2 * held.trained // (2 if zero else 1), "two moments of adapters, over both ranks"
        assert held.sharded == ((held.total - held.trained) // 2 if zero == 3 else 0)
