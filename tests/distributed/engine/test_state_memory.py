"""Model-state memory: live bytes of DeepSpeed's engine are within 2 % of dslpar.forecast.model_states.

Real ranks count the storages that Python or autograd keeps alive, each once. Between steps the count uses the garbage
collector's list of tensors. For the peak of forwards and backwards, a dispatch mode counts after each operation.
Micro-batches have so few tokens that activations hardly count, and buckets are so small that several fill.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar.forecast.activations import activations
from dslpar.forecast.model_states import States, owner_of, states
from dslpar.forecast.stage_memory import stage_memory
from dslpar.forecast.workload import Workload, workload_of
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import engine_of, job
from tests.support.live_storages import watching
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

TOLERANCE = 0.02
VOCAB, LENGTH = 256, 4


def micro_batches(made: Job, vocab: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches of zeros and ones, full and contiguous."""
    shape = made.batch.micro_size, made.seq_len
    return [(torch.ones(shape, dtype=torch.int64) % vocab, torch.zeros(shape, dtype=torch.int64))] * (
        made.batch.accumulation
    )


def _held(made: Job) -> dict[str, int]:
    """Return this rank's bytes after the engine was built, after a step, and at the second step's peak before its
    update.
    """
    before = watching().bytes()
    engine = engine_of(made)
    found = {"built": watching().bytes() - before}
    fed = micro_batches(made, VOCAB)
    engine.train_batch(fed)
    found["resting"] = watching().bytes() - before
    live = watching()
    with live:
        engine.forward_backward(fed)
        found["backwards"] = live.peak - before
        found["before the step"] = live.bytes() - before
    engine.step()
    return found


def model(**changes: Any) -> section.GPT:
    sizes: dict[str, Any] = {
        "num_layers": 16,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
    }
    return section.GPT(**(sizes | changes))


BUCKET = 40_000
"""Elements: a bucket takes most of a layer, so a model of sixteen layers fills many."""
KEYS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"reduce_bucket_size": BUCKET},
    2: {"reduce_bucket_size": BUCKET},
    3: {
        "reduce_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_param_persistence_threshold": 500,
    },
}
LAYOUTS = {"one": (1, 1), "data 2": (2, 1), "pipe 2": (2, 2), "pipe 2, data 2": (4, 2)}
CASES = [
    (layout, zero, dtype)
    for layout, zero, dtype in product(LAYOUTS, range(4), ("fp32", "bf16", "fp16"))
    if zero < 2 or LAYOUTS[layout][1] == 1
]
FEW = {("data 2", 1, "bf16"), ("pipe 2, data 2", 1, "fp32")}
"""Rows of `make test`; ZeRO 2 is below."""


def trained(layout: str, zero: int, dtype: str, **other: Any) -> Job:
    world, pipe = LAYOUTS[layout]
    parallel = sections.Parallel(pipeline=sections.PipelineParallel(size=pipe) if pipe > 1 else None)
    return job(
        world,
        parallel=parallel,
        zero=sections.Zero(stage=zero, extra=KEYS[zero]),
        precision=sections.Precision(dtype=dtype, extra={"initial_scale_power": 6} if dtype == "fp16" else {}),
        **{"batch": sections.Batch(micro_size=1, accumulation=3), "model": model(), **other},
    )


def workload(made: Job) -> Workload:
    found = workload_of(made)
    assert found is not None
    return found


def _first_moments(held: States, zero: int, dtype: str, pipe: int) -> float:
    """Return the moments that the optimizer makes in its first step; half precision without ZeRO makes them at once."""
    at_once = zero == 0 and dtype != "fp32" and not (dtype == "bf16" and pipe > 1)
    return 0.0 if at_once else held.optimizer


@pytest.mark.parametrize(("layout", "zero", "dtype"), sampled(CASES, FEW))
def test_states_and_buffers_are_those_that_are_forecast(layout: str, zero: int, dtype: str) -> None:
    made = trained(layout, zero, dtype)
    world, pipe = LAYOUTS[layout]
    for rank, found in enumerate(on_ranks(world, _held, made, init="deepspeed")):
        pipe_rank = made.mesh.coord(rank)["pipe"]
        held, needed = states(workload(made), pipe_rank), activations(workload(made), pipe_rank)
        gathered = held.weights - made_weights(made, pipe_rank, zero, dtype)
        built = held.resting - _first_moments(held, zero, dtype, pipe) - gathered
        assert found["built"] == pytest.approx(built, rel=TOLERANCE), (rank, "after it was built", held)
        assert found["resting"] == pytest.approx(held.resting, rel=TOLERANCE), (rank, "between steps", held)
        small = needed.saved + needed.working + needed.logits
        peak = held.resting + max(held.gradients + held.buffers + small, held.reduced)
        assert found["backwards"] == pytest.approx(peak, rel=TOLERANCE), (rank, "backwards", held)


def made_weights(made: Job, pipe_rank: int, zero: int, dtype: str) -> float:
    """Return the bytes of weights before the first forward, which gathers ZeRO 3's small weights permanently."""
    size = 4 if dtype == "fp32" else 2
    share = made.mesh.data if zero == 3 else 1
    return size * workload(made).weights(pipe_rank) / share


LORA = [(zero, dtype) for zero in range(4) for dtype in ("fp32", "bf16")]


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.prove
@pytest.mark.parametrize(("zero", "dtype"), LORA)
def test_beside_adapters_what_is_frozen_has_no_state(zero: int, dtype: str) -> None:
    config = {
        "num_hidden_layers": 16,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
    }
    lora = sections.LoRA(r=12, target_modules=("q_proj", "v_proj", "down_proj"))
    llama = sections.OtherModel(target="transformers.LlamaForCausalLM", args={"config": config}, lora=lora)
    made = trained("data 2", zero, dtype, model=llama)
    held, needed = states(workload(made), 0), activations(workload(made), 0)
    own = owner_of(workload(made), 0)
    assert 4 < own.frozen / own.elements < 10
    small = needed.saved + needed.working + needed.logits
    peak = held.resting + max(held.gradients + held.buffers + small, held.reduced)
    peak = stage_memory(workload(made), 0).allocated if zero == 2 else peak
    for found in on_ranks(2, _held, made, init="deepspeed"):
        assert found["resting"] == pytest.approx(held.resting, rel=TOLERANCE), held
        # So little else is there that activations count, and those of transformers' own code are estimates.
        assert found["backwards"] == pytest.approx(peak, rel=3 * TOLERANCE), held


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize(
    ("zero", "dtype", "data", "size"),
    sampled([(0, "fp32", 4, 2), (1, "bf16", 4, 2), (1, "fp32", 2, 2), (2, "bf16", 4, 2)], {(1, "fp32", 2, 2)}),
)
def test_experts_have_the_states_of_their_own_replicas(zero: int, dtype: str, data: int, size: int) -> None:
    """Experts are divided over `size` replicas, so data / size ranks share the optimizer states of each."""
    config = {
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
    }
    mixtral = sections.OtherModel(target="transformers.MixtralForCausalLM", args={"config": config})
    made = job(
        data,
        model=mixtral,
        parallel=sections.Parallel(expert=sections.ExpertParallel(size=size)),
        zero=sections.Zero(stage=zero, extra=KEYS[zero]),
        precision=sections.Precision(dtype=dtype),
        batch=sections.Batch(micro_size=1, accumulation=3),
    )
    held, own = states(workload(made), 0), owner_of(workload(made), 0)
    assert 0.6 < own.experts / own.elements < 0.9
    assert own.shard == (own.elements - own.experts) / data + own.experts / (data // size)
    for found in on_ranks(data, _held, made, init="deepspeed"):
        assert found["resting"] == pytest.approx(held.resting, rel=TOLERANCE), held


@pytest.mark.parametrize("dtype", sampled(("fp32", "bf16"), ()))
def test_zero_3_gathers_few_weights_where_few_may_be_live(dtype: str) -> None:
    made = trained("data 2", 3, dtype)
    keys = made.spec.zero.extra | {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 60_000}
    made = replace(made, spec=replace(made.spec, zero=sections.Zero(stage=3, extra=keys)))
    held, needed = states(workload(made), 0), activations(workload(made), 0)
    peak = held.resting + held.buffers + needed.saved + needed.working + needed.logits
    for found in on_ranks(2, _held, made, init="deepspeed"):
        assert found["backwards"] == pytest.approx(peak, rel=TOLERANCE), held


OPTIMIZERS = {
    "sgd": (sections.SGD(), 0),
    "momentum": (sections.SGD(momentum=0.9), 1),
    "adam": (sections.Adam(), 2),
    "amsgrad": (sections.AdamW(amsgrad=True), 3),
}


@pytest.mark.parametrize("name", sampled(OPTIMIZERS, {"amsgrad"}))
def test_moments_are_those_of_the_optimizer(name: str) -> None:
    optimizer, moments = OPTIMIZERS[name]
    made = trained("one", 1, "bf16", optimizer=optimizer)
    (found,) = on_ranks(1, _held, made, init="deepspeed")
    held = states(workload(made), 0)
    assert held.optimizer == 4 * moments * workload(made).weights(0)
    assert found["resting"] == pytest.approx(held.resting, rel=TOLERANCE)


def _of_zero_2(dtype: str, accumulation: int, vocab: int, length: int) -> tuple[float, Workload]:
    """Return a step's peak bytes on the rank with the most; a tied table is larger than a bucket."""
    sizes = {"vocab_size": vocab, "max_seq_len": length, "positions": "rotary"}
    batch = sections.Batch(micro_size=1, accumulation=accumulation)
    made = trained("data 2", 2, dtype, model=model(**sizes), batch=batch)
    return max(found["backwards"] for found in on_ranks(2, _held, made, init="deepspeed")), workload(made)


@pytest.mark.parametrize("dtype", sampled(("fp32", "bf16"), {"bf16"}))
def test_a_loss_finds_the_buckets_of_zero_2_that_the_backward_before_it_left(dtype: str) -> None:
    """A step with many logits peaks there, and not when most buckets are filled."""
    alone, _ = _of_zero_2(dtype, 1, 2048, 128)
    several, made = _of_zero_2(dtype, 3, 2048, 128)
    held, forecast = states(made, 0), stage_memory(made, 0)
    assert (forecast.moment, forecast.working, forecast.buffers) == ("backward", 0.0, held.left)
    # Beside the first micro-batch's peak: a CPU's loss takes memory that an accelerator's does not.
    assert several - alone == pytest.approx(held.gradients + held.left, rel=0.05)
    assert held.buffers > 1.5 * held.left


@pytest.mark.parametrize("dtype", sampled(("fp32", "bf16"), ()))
def test_buckets_of_zero_2_are_filled_as_activations_go(dtype: str) -> None:
    found, made = _of_zero_2(dtype, 3, 1024, 64)
    made = replace(made, framework=replace(made.framework, fused_norms=False))
    held, forecast = states(made, 0), stage_memory(made, 0)
    # Vectors are spread over the matrices, and a bucket's copies are estimated.
    assert found - held.resting == pytest.approx(forecast.allocated - held.resting, rel=0.04)
    assert forecast.logits < 0.1 * forecast.activations


def test_a_wrong_formula_is_detected() -> None:
    """The comparison can fail: ZeRO 1 states over two replicas differ from those of one."""
    alone, two = (states(workload(trained(layout, 1, "bf16")), 0) for layout in ("one", "data 2"))
    assert abs(alone.resting / two.resting - 1) > 10 * TOLERANCE
