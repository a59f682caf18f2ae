"""Save a run under one layout, resume it under another, and return the state of both at that moment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.layout.resolve import Job
from tests.properties.invariance.layouts import STEPS, Layout
from tests.properties.invariance.run_and_reference import Samples, _worst, reference
from tests.support.ranks import on_ranks

HALF = STEPS // 2
KEYS = {"SGD": ("momentum_buffer",), "AdamW": ("exp_avg", "exp_avg_sq")}

Whole = dict[str, Tensor]
"""Full tensors by name: weights, and optimizer states as `name::key`."""


class Run(NamedTuple):
    """One run: loss and norm of each step, and the saved tensors after them, or the loaded tensors before them."""

    losses: list[float]
    norms: list[float]
    whole: Whole


def saved_under(layout: Layout, folder: Path) -> Run:
    """Take five steps and save a checkpoint."""
    return _run(layout, folder, False)


def resumed_under(layout: Layout, folder: Path, forgets: str = "") -> Run:
    """Load the checkpoint in `folder`, zero the optimizer's tensor `forgets` if given, and take five steps."""
    return _run(layout, folder, True, forgets)


def _run(layout: Layout, folder: Path, resumes: bool, forgets: str = "") -> Run:
    ranks = on_ranks(layout.world, _rank, layout, folder, resumes, forgets, init="deepspeed")
    losses, norms, _ = ranks[0]
    whole: Whole = {}
    for other_losses, other_norms, held in ranks:
        assert (other_losses, other_norms) == (losses, norms), "ranks disagree"
        for name, tensor in held.items():
            first = whole.setdefault(name, tensor)
            copied = name.startswith("embedding.tokens.weight") and layout.job().mesh.pipe > 1 and not resumes
            assert torch.equal(first, tensor) or copied, f"{name} differs between ranks"
    return Run(losses, norms, whole)


def job_of(layout: Layout, folder: Path) -> Job:
    """Return the layout's job, which saves in `folder`."""
    job = layout.job()
    train = dataclasses.replace(job.spec.train, output_dir=str(folder))
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=train), output_dir=str(folder))


def _rank(layout: Layout, folder: Path, resumes: bool, forgets: str) -> tuple[list[float], list[float], Whole]:
    from dslpar import checkpoint
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    job = job_of(layout, folder)
    engine = build_engine(job, Groups(job.mesh), all_counted=not layout.ignoring)
    if resumes:
        stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
        assert stored is not None
        checkpoint.check(stored, job, "samples")
        checkpoint.load(engine, stored)
        whole = whole_of(engine, KEYS[layout.optimizer])
    if forgets:
        for state in engine.deepspeed.optimizer.state.values():
            state[forgets].zero_()
    samples, losses, norms = Samples(layout.ignoring, model=layout.model), [], []
    for _ in range(HALF):
        at, data_rank = engine.consumed_samples, engine.groups.coord["data"]
        losses.append(engine.train_batch(micro_batches(samples, job.batch, 1, at, job.mesh.data, data_rank)))
        norms.append(engine.grad_norm)
    if not resumes:
        checkpoint.save(engine, "samples")
        whole = whole_of(engine, KEYS[layout.optimizer])
    return losses, norms, whole


def whole_of(engine: Any, keys: tuple[str, ...]) -> Whole:
    """Return full tensors, gathered by DeepSpeed over the replicas and by the placements over the tensor group.

    Only the first rank of each tensor group has them. This code does not use checkpoints.
    """
    from dslpar.checkpoint import full_state

    first = engine.groups.axis("tensor").index == 0 and engine.groups.axis("data").index == 0
    whole = full_state(engine.module, engine.groups, everywhere=False)
    trained = [(name, p) for name, p in engine.named_parameters() if p.requires_grad]
    states = {f"{name}::{key}": _state(engine, p, key) for name, p in trained for key in keys}
    return whole | states if first else {}


def _state(engine: Any, p: Tensor, key: str) -> Tensor:
    from deepspeed.utils import safe_get_full_optimizer_state

    from dslpar.layers import gather, placement_of

    optimizer = engine.deepspeed.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False  # DeepSpeed links all groups after the step of the first one
        optimizer._lazy_init_hp_params_optimizer_state()
    sharded = hasattr(p, "_hp_mapping") or hasattr(p, "_z3_optimizer")
    state = safe_get_full_optimizer_state(p, key) if sharded else optimizer.state[p][key]
    placement = placement_of(p)
    assert placement is not None
    return gather(state.detach().view(placement.local_shape), placement, engine.groups).cpu().clone()


# ---- deviations ----


def differing(before: Whole, after: Whole) -> list[str]:
    """Return the names of tensors that are not bitwise equal."""
    assert before.keys() == after.keys()
    return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


def deviation(layout: Layout, before: Run, after: Run) -> tuple[list[str], float, float]:
    """Return the tensors that differ from the saved ones, and the deviation of ten steps from one run in double
    precision.
    """
    true = reference(layout.problem)
    losses, norms = before.losses + after.losses, before.norms + after.norms
    assert len(losses) == len(true.losses)
    return differing(before.whole, after.whole), _worst(losses, true.losses), _worst(norms, true.norms)
