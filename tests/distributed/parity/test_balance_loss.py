"""The load-balancing loss through DeepSpeed: data ranks, stages and accumulation against one process, by `prove`.

One process is compared with transformers' own forward. The coefficient is 1, so that the loss is as large as the
cross-entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dslpar.distributed.groups import Groups
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity.prove import Proof, prove
from tests.support import warm
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.layout_factors import PLAIN, config_of
from tests.support.maths_mutants import Mutant
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

ENABLED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


def job(
    expert: int = 0, config: Mapping[str, Any] = ENABLED, batch: Mapping[str, Any] | None = None, **row: Any
) -> Job:
    made, world = config_of(dict(PLAIN, family="Mixtral", optimizer="SGD", **row))
    made["model"]["config"] |= config
    made["parallel"] |= {"expert": expert} if expert else {}
    made["batch"] = dict(batch) if batch else made["batch"]
    checked = check.check(check.load(made), world, forecasts=False)
    assert checked.job is not None, checked.findings
    return checked.job


def is_proved(proof: Proof) -> None:
    assert proof.verdict == "proved", (proof.checks, proof.first_difference, proof.findings)


ROWS: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "data 2, 1d 2": {"data": 2, "mode": "1d 2", "zero": 1, "recompute": 1, "accumulation": 2},
    "experts 2, ZeRO 2": {"data": 2, "expert": 2, "zero": 2, "accumulation": 2},
    "experts 4 over 1d 2 sequence, ZeRO 0": {"data": 2, "mode": "1d 2 sequence", "expert": 4, "loss_chunks": 3},
    "pipe 2, experts 2": {"pipe": 2, "data": 2, "expert": 2, "zero": 1, "recompute": 1},
    "pipe 2, interleaved": {"pipe": 2, "data": 2, "schedule": "interleaved", "accumulation": 2},
    "pipe 2, zero bubble, ring 2": {"pipe": 2, "context": "ring 2", "schedule": "zero_bubble", "zero": 1},
    "pipe 2, 2d 4": {"pipe": 2, "mode": "2d 4"},
    "data 2, ring 2, ZeRO 3": {"data": 2, "context": "ring 2", "zero": 3},
    "2d 4, experts 8": {"data": 2, "mode": "2d 4", "expert": 8, "zero": 2},
    "3d 8, experts 8": {"mode": "3d 8", "expert": 8, "zero": 1},
    "adapters": {"data": 2, "adapters": True},
}


@pytest.mark.parametrize("row", sampled(ROWS, {"pipe 2, experts 2"}))
def test_a_layout_computes_the_loss_of_one_process(row: str) -> None:
    proof = prove(job(**ROWS[row]))
    is_proved(proof)
    says_accumulation = [
        each for each in proof.not_proven if "the load-balancing loss for another accumulation" in each
    ]
    assert bool(says_accumulation) == (proof.runs[0].job.batch.accumulation > 1)


@pytest.mark.prove
@pytest.mark.filterwarnings(*[each.args[0] for each in TORCH_S_OWN_WARNINGS])
def test_compiled_layers_compute_it() -> None:
    is_proved(prove(job(data=2, mode="1d 2", compile=True)))


@pytest.mark.prove
def test_a_resume_with_another_accumulation_is_proved() -> None:
    is_proved(prove(job(data=2), steps=2, resume_on=job(data=2, accumulation=2)))


MODULE = "dslpar.layers.balance_loss"
MISTAKES = [
    (
        "choices-of-one-data-rank",
        "balance_loss",
        "choices = collectives.all_reduce(choices.detach(), data)",
        "choices = choices.detach() * data.size",
    ),
    ("share-not-scaled", "balance_loss", "* (len(choices) * data.size)", "* len(choices)"),
]


@pytest.mark.parametrize(("name", "function", "old", "new"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_prove_finds_a_mistake(name: str, function: str, old: str, new: str) -> None:
    mutant = Mutant(name, "reduction", MODULE, function, old, new, name)
    proof = prove(job(data=2), steps=1, change=mutant.apply)
    assert proof.verdict == "differs"


# ---- what the definition depends on ----


def first_loss(made: Job) -> float:
    """Return the loss that the first step reports, of samples that do not depend on the layout.

    The loss of an evaluation of the same samples is compared with it.
    """
    warm.import_deepspeed()
    return on_ranks(made.mesh.world_size, _first_loss, made, init="deepspeed")[0]


def _first_loss(made: Job) -> float:
    from dslpar.engine.build import build_engine

    engine: Any = build_engine(made, Groups(made.mesh), all_counted=True)
    tokens = torch.randint(0, 64, (made.batch.global_size, 9), generator=torch.Generator().manual_seed(0))
    parts = tokens.chunk(made.batch.accumulation * made.mesh.data)[engine.groups.coord["data"] :: made.mesh.data]
    batches = [(part[:, :-1], part[:, 1:]) for part in parts]
    evaluated = engine.eval_batch(batches)
    loss = engine.train_batch(batches)
    assert evaluated == pytest.approx(loss, rel=1e-6)
    return float(loss)


SMALL = ENABLED | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.5,
}


def test_the_loss_depends_on_the_global_batch_and_the_accumulation_alone() -> None:
    """Data ranks do not change it; the accumulation does, in transformers as here."""
    whole = {"global_size": 8, "accumulation": 1}
    one, two = first_loss(job(config=SMALL, batch=whole)), first_loss(job(config=SMALL, batch=whole, data=2))
    assert two == pytest.approx(one, rel=1e-6)
    halves = first_loss(job(config=SMALL, batch={"global_size": 8, "accumulation": 2}))
    assert abs(halves - one) > 1e-4 * one
    without = first_loss(job(config=SMALL | {"output_router_logits": False}, batch=whole))
    assert one - without > 1, "with the coefficient 1, the loss of k experts per token is at least about k"
