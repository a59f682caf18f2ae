"""Dry runs of a mixture whose tokens are sent to experts: no problem on any kind of rank, and the forecast's counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dslpar.core.mesh import TensorMesh
from dslpar.costs.any_model import flops_per_token
from dslpar.dry_run.dry_run import DryRun, dry_run
from dslpar.dry_run.tiling import tiling_errors
from dslpar.dry_run.trace import Tracer
from dslpar.forecast.workload import workload_of
from dslpar.layers.placement import Placement
from dslpar.layout.resolve import Job
from dslpar.linter import check
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

pytestmark = pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)

CONFIG = """
model = dict(type='transformers.MixtralForCausalLM', config=dict(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
    vocab_size=257, num_local_experts=8, max_position_embeddings=32, tie_word_embeddings=False, pad_token_id=None))
data = dict(type='tokens', path='none', seq_len=32)
batch = dict(micro_size=8, accumulation=4)
train = dict(steps=10)
zero = 1
"""
SEQUENCE = "tensor=dict(size=2, mode='1d', sequence=True)"
LAYOUTS = {
    "experts over data": (4, "expert=4", ""),
    "experts over data and tensor, pipeline": (8, f"pipeline=2, {SEQUENCE}, expert=4", "precision = 'bf16'"),
    "experts over a half of data, recomputed": (4, "expert=2", "activation_checkpoint = dict(interval=1)"),
    "2d, in chunks": (8, "tensor=dict(size=4, mode='2d'), expert=dict(size=8, chunks=2)", ""),
    "gathered tokens": (2, SEQUENCE, ""),
}
QUICK = {"experts over data and tensor, pipeline"}


OWN = """
model = dict(type='GPT', num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=4, vocab_size=257, max_seq_len=32,
    tie_embeddings=False, experts=dict(num=8, ffn_hidden_size=96, shared=1, every=2))
data = dict(type='tokens', path='none', seq_len=32)
batch = dict(micro_size=8, accumulation=4)
train = dict(steps=10)
zero = 1
"""
LATENT = (
    CONFIG.replace("Mixtral", "DeepseekV3")
    .replace("num_local_experts", "n_routed_experts")
    .replace(
        "pad_token_id=None",
        "n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, q_lora_rank=40,"
        "kv_lora_rank=20, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=10, first_k_dense_replace=1",
    )
    .replace("num_key_value_heads=4", "num_key_value_heads=8")
)
OF_LATENTS = {"latents, first block dense": (4, "expert=2", "precision = 'bf16'")}
OF_OURS = {f"{name}, dslpar's": layout for name, layout in LAYOUTS.items() if name != "gathered tokens"}


ALL = LAYOUTS | OF_OURS | OF_LATENTS


def job_of(layout: str) -> Job:
    world, parallel, more = ALL[layout]
    written = OWN if layout in OF_OURS else LATENT if layout in OF_LATENTS else CONFIG
    return check.resolve(check.load_text(f"{written}parallel = dict({parallel})\n{more}\n", "dry.py"), world)


@pytest.mark.parametrize("layout", sampled(ALL, QUICK | set(OF_LATENTS)))
def test_every_kind_of_rank_has_no_problem_and_what_is_forecast(layout: str) -> None:
    on_ranks(1, _find_nothing, layout, init=None)


def _find_nothing(layout: str) -> None:
    job = job_of(layout)
    tensor, workload = job.mesh.tensor, workload_of(job)
    assert workload is not None
    for rank in (0, job.mesh.world_size - 1):
        result = dry_run(job, rank)
        assert result.problems == [], rank
        if not tensor.exchanges_tokens:
            continue
        pipe_rank = result.coord["pipe"]
        assert sum(_elements(each.local_shape) for each in result.parameters.values()) == workload.weights(pipe_rank)
        _check_exchange(job, result)
        ran = {job.mesh.index(each, "expert") for each in result.classes[0].ran}
        assert {0, job.mesh.size("expert") - 1} <= ran | {job.mesh.index(rank, "expert")}


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _check_exchange(job: Job, result: DryRun) -> None:
    """Compare the all-to-alls over the ranks of experts with the closed form; numbers of rows are int64."""
    tensor, workload = job.mesh.tensor, workload_of(job)
    assert workload is not None
    axes = " ".join(letter for letter in ("e", "d", "q", "y", "z") if getattr(tensor, letter) > 1)
    key, size = ("all_to_all", axes), workload.element_bytes
    mixtures = [(layer, number) for layer, number in workload.layers_of(0) if key in layer.traffic.forward]
    forward, backward = mixtures[0][0].traffic
    counts = tensor.expert_chunks * 8 * (job.mesh.size("expert") - 1) / job.mesh.size("expert")
    again = 2 if workload.recompute == "full" else 1
    expected = again * (size * (forward[key] - counts) + 8 * counts) + size * backward[key]
    calls = again * forward.calls[key] + backward.calls[key]
    times = job.batch.accumulation * sum(number for _, number in mixtures)
    found_calls, num_bytes = result.operations[key]
    assert (found_calls, float(num_bytes)) == (times * calls, pytest.approx(times * float(expected)))


@pytest.mark.prove
def test_a_trace_finds_what_the_closed_form_says(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("tokens go to their experts and come back. " * 400)
    on_ranks(1, _compare_with_trace, str(tmp_path / "text.txt"), init=None)


def _compare_with_trace(text: str) -> None:
    config = CONFIG.replace("type='tokens', path='none'", f"type='text', files=[{text!r}]")
    config += "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True), expert=4)\nprecision = 'bf16'\n"
    job = check.resolve(check.load_text(config, "traced.py"), 4)
    tracer = Tracer(job)
    known, traced = workload_of(job), workload_of(tracer.job, tracer.costs_of)
    assert known is not None
    assert traced is not None
    assert (traced.weights(0), traced.experts(0)) == (known.weights(0), known.experts(0))
    (unit, *_), layer = traced.costs.units[1:], known.costs.layer
    grouped = [each._replace(times=1) for each in unit.work.grouped]
    assert grouped == list(layer.work.grouped)
    key = ("all_to_all", "e y")
    assert unit.traffic.backward[key] == layer.traffic.backward[key]
    assert unit.traffic.forward.calls[key] == layer.traffic.forward.calls[key]
    flops = flops_per_token(job.spec.model, 32)
    assert flops is not None
    assert traced.costs.flops == pytest.approx(flops, rel=0.01)  # the head's vocabulary is padded on two ranks


def test_pieces_of_experts_over_data_ranks_tile_them() -> None:
    tensor = replace(TensorMesh(y=2, mode="1d"), e=2, exchanges_tokens=True)
    assert tiling_errors(Placement(tensor, (8, 4), (("e", "y"), ()))) == []
    assert tiling_errors(Placement(tensor, (6, 4), (("e", "y"), ()), padded_rows=8)) == []
    assert tiling_errors(Placement(tensor, (8, 4), (("e", "e"), ())))[0].startswith("dim 0, sharded over e e: 4 of 8")
    assert tiling_errors(Placement(tensor, (8, 4), (("e",), ()))) == [], "two equal copies along y"
    assert tiling_errors(Placement(tensor, (8, 4), (("e",), ("e",)))) == [
        "2 of 4 shards are on no rank: two dims are sharded over one axis"
    ]
