"""Promise 1: whatever the layout, loss, norm and weights are those of one process; and the test can fail."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest

from dslpar.schema import sections
from tests.properties.invariance.cover import covering, seen_each_time, seen_in, small
from tests.properties.invariance.layouts import LAYOUTS, MODELS, MODES, Layout, bound_of, grid, pipe, tensor
from tests.properties.invariance.measure import Samples, deviation, out_of_bound, reference
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

BY_NAME = "LoRA|ResMLP|MoCo|Swin|MAE|ResNet"
"""Words in names of rows that are not sampled, but chosen."""
SMALL = small({name: row for name, row in LAYOUTS.items() if not re.search(BY_NAME, name)})
SAMPLE = [
    *covering(SMALL, seen_each_time),
    "transformers' Llama, LoRA, data 2, ZeRO 2, recompute 1",
    "transformers' ResNet, data 2, no accumulation",
]
"""The last two: a model most of which is frozen, and statistics of a micro-batch."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    missing = name.startswith("transformers'") and not HAS_TRANSFORMERS
    skip = [pytest.mark.skip(reason=NO_TRANSFORMERS)] if missing else []
    compiled = TORCH_S_OWN_WARNINGS if LAYOUTS[name].compiled else []
    return [*skip, *compiled] if name in SAMPLE else [*skip, *compiled, pytest.mark.prove]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in LAYOUTS])
def test_the_layout_does_not_change_the_maths(name: str) -> None:
    assert not out_of_bound(LAYOUTS[name])


def test_the_table_covers_what_it_should() -> None:
    rows = [row for row in LAYOUTS.values() if row.dtype == "fp32" and row.optimizer == "SGD"]
    jobs = [row.job() for row in rows]
    assert {job.mesh.pipe for job in jobs} >= {1, 2, 4}
    assert {job.mesh.data for job in jobs} >= {1, 2, 4}
    assert {job.mesh.tensor.size for job in jobs if job.mesh.tensor.mode == "1d"} >= {2, 3, 4}
    assert {job.mesh.tensor.mode for job in jobs} == {None, *("1d", "2d", "2.5d", "3d", "sequence", "cuboid")}
    assert {job.spec.zero.stage for job in jobs} == {0, 1, 2, 3}
    assert {row.tied for row in rows} == {row.ignoring for row in rows} == {True, False}
    assert len({job.mesh.order for job in jobs}) == 2
    assert {(row.offload, row.zero) for row in rows} >= {(("optimizer",), stage) for stage in (1, 2, 3)}
    assert {row.recompute for row in rows} == {0, 1, 2}
    assert {row.dtype for row in LAYOUTS.values()} == {"fp32", "bf16", "fp16"}
    assert {row.model for row in rows} == set(MODELS)
    assert {row.clip for row in rows} == {True, False}
    assert {row.accumulation for row in rows} == {1, 2, 4}
    assert len(rows) >= 100


def test_every_mode_meets_pipelines_replicas_zero_and_all_that_takes_turns() -> None:
    rows = list(grid().values())
    for words in MODES:
        held = [row for name, row in grid().items() if name.startswith(f"{words}, ")]
        jobs = [row.job() for row in held]
        assert {(job.mesh.pipe, job.mesh.data) for job in jobs} == {(1, 1), (1, 2), (2, 1), (2, 2)}
        assert {row.zero for row in held} == {0, 1, 3}
        assert {job.mesh.tensor.keep for job in jobs} == {"x", "w", "both", "none"}
        assert {row.clip for row in held} == {row.tied for row in held} == {True, False}
        assert len({row.accumulation for row in held}) > 1
    for pipes, data, clip in product((1, 2), (1, 2), (True, False)):
        met = [row for row in rows if (row.job().mesh.pipe, row.job().mesh.data, row.clip) == (pipes, data, clip)]
        assert len({row.zero for row in met}) > 1, "the norm is taken in another place with ZeRO than without"
    kept = {(job.mesh.tensor.residual, job.mesh.tensor.inner) for job in (row.job() for row in LAYOUTS.values())}
    assert {residual for residual, _ in kept} == {"replicated", "sequence", "hidden", "batch"}
    assert {inner for _, inner in kept} == {"batch", "heads"}


def test_llama_s_form_runs_in_every_mode() -> None:
    rows = [row.job().mesh for row in LAYOUTS.values() if row.model == "Llama"]
    assert {mesh.tensor.mode for mesh in rows} == {None, "1d", "2d", "2.5d", "3d", "sequence", "cuboid"}
    assert {row.zero for row in LAYOUTS.values() if row.model == "Llama"} == {0, 1, 2, 3}
    assert {mesh.pipe for mesh in rows} == {mesh.data for mesh in rows} == {1, 2}


def test_the_sample_meets_every_pair_that_the_table_has() -> None:
    assert seen_in(LAYOUTS[name] for name in SAMPLE) >= seen_in(SMALL.values())
    assert len(SAMPLE) < 0.5 * len(LAYOUTS)
    assert seen_in(LAYOUTS[name] for name in SAMPLE[1:]) != seen_in(SMALL.values())


# ---- it can fail ----

_BOTH = pipe(2) | tensor("1d", 2)


def _norm_with_flags(layout: Layout, flags: str) -> float:
    """The norm of the first step, owner flags set on purpose otherwise."""
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.layers import placement_of

    job = layout.job()
    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    for _, p in engine.named_parameters():
        placement = placement_of(p)
        if flags == "natural" and placement is not None:  # "this parameter is cut", as Megatron-LM sets them
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
    """`deviation` looks at every tensor: one weight of one tensor, moved by a millionth of the largest, is enough."""
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
