"""Ten steps equal one process, for every layout, optimizer and precision; and the test can fail."""

from __future__ import annotations

import math

import pytest

from dslpar.schema import sections
from tests.properties.invariance.layouts import LAYOUTS, OPTIMIZERS, Layout, bound_of, pipe, tensor
from tests.properties.invariance.run_and_reference import Samples, deviation, out_of_bound, reference
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

DAILY = {
    "AdamW, pipe 2, data 2",
    "RMSprop, data 2, 1d 2, ZeRO 3",
    "Adagrad, data 2, ZeRO 3",
    "data 2, 1d 2 sequence, ZeRO 2",
    "bf16, pipe 2, 1d 2, ZeRO 1",
    "bf16, data 2, 1d 2, ZeRO 3",
    "fp16 dynamic, data 2, ZeRO 2",
    "fp16 static, pipe 2, data 2, ZeRO 1",
    "legacy order, pipe 2, data 2",
}
"""Each optimizer once, and each precision with ZeRO and in a pipeline."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    missing = name.startswith("transformers'") and not HAS_TRANSFORMERS
    skip = [pytest.mark.skip(reason=NO_TRANSFORMERS)] if missing else []
    return skip if name in DAILY else [*skip, pytest.mark.prove]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in LAYOUTS])
def test_ten_steps_are_those_of_one_process(name: str) -> None:
    assert not out_of_bound(LAYOUTS[name])


def test_every_optimizer_and_precision_is_there_daily() -> None:
    rows = [LAYOUTS[name] for name in DAILY]
    assert {row.optimizer for row in rows} == set(OPTIMIZERS)
    assert {row.dtype for row in rows} == {"fp32", "bf16", "fp16"}
    for dtype in ("bf16", "fp16"):
        meshes = [(row.zero, row.job().mesh.pipe) for row in rows if row.dtype == dtype]
        assert {pipes for _, pipes in meshes} == {1, 2}
    assert {row.zero for row in LAYOUTS.values() if row.dtype == "bf16"} == {1, 2, 3}
    assert {row.offload for row in LAYOUTS.values() if row.dtype != "fp32"} == {(), ("optimizer",)}


# ---- it can fail ----

_BOTH = pipe(2) | tensor("1d", 2)


def _norm_with_flags(layout: Layout, flags: str) -> float:
    """Return the norm of the first step, with deliberately changed owner flags."""
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.layers import placement_of

    job = layout.job()
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    for _, p in engine.named_parameters():
        placement = placement_of(p)
        if flags == "natural" and placement is not None:  # "this parameter is sharded", as Megatron-LM sets them
            p.tensor_model_parallel = placement.local_shape != placement.padded  # type: ignore[attr-defined]
        if flags == "tied copies" and getattr(p, "ds_pipe_replicated", False):
            p.tensor_model_parallel = True  # type: ignore[attr-defined]
    data_rank = engine.groups.coord["data"]
    engine.train_batch(micro_batches(Samples(ignoring=False), job.batch, 1, 0, job.mesh.data, data_rank))
    return engine.grad_norm


@pytest.mark.parametrize("flags", ["natural", "tied copies"])
def test_without_owner_flags_the_norm_is_wrong(flags: str) -> None:
    layout = Layout(4, _BOTH)
    norm = on_ranks(4, _norm_with_flags, layout, flags, init="deepspeed")[0]
    true = reference(layout.problem).norms[0]
    assert abs(norm - true) > 0.01 * true


def test_a_run_with_other_weights_is_seen() -> None:
    """`deviation` looks at every tensor: moving one weight of one tensor by a millionth of the largest is enough."""
    layout = LAYOUTS["one process"]
    curve = reference(layout.problem)
    weights = {name: weight.clone() for name, weight in curve.weights.items()}
    weights["blocks.2.mlp.down.bias"][3] += 1.1e-6 * weights["blocks.2.mlp.down.bias"].abs().max()
    assert deviation(layout, curve).weights == 0
    assert deviation(layout, curve._replace(weights=weights)).weights > bound_of(layout).weights


@pytest.mark.parametrize("what", ["losses", "norms", "weights"])
def test_a_run_that_breaks_is_seen(what: str) -> None:
    layout = LAYOUTS["one process"]
    curve = reference(layout.problem)
    broken = {
        "losses": [*curve.losses[:3], *[math.nan] * 7],
        "norms": [*curve.norms[:3], *[math.nan] * 7],
        "weights": {name: w if "tokens" in name else w * math.nan for name, w in curve.weights.items()},
    }
    assert max(deviation(layout, curve._replace(**{what: broken[what]}))) == math.inf


def test_the_reference_learns() -> None:
    assert isinstance(LAYOUTS["one process"].job().spec.optimizer, sections.SGD)
    losses = reference(LAYOUTS["one process"].problem).losses
    assert losses[-1] < losses[0] - 0.5
