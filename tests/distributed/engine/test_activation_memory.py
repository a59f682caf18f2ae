"""Activation memory: live bytes of saved activations are within 2 % of dslpar.forecast.activations.

The tests cover models on every layout, with each choice of kept panels and with recomputation, and real pipelines under
all schedules. Pipelines are measured after each action, while nothing runs. Everything alive counts except weights,
gradients, ids, and whatever existed before the first micro-batch: saved tensors, received and sent activations,
operands of delayed weight gradients. The vocabulary is so small that logits hardly count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.engine.pipeline_executor import PipelineExecutor
from dslpar.forecast.activations import activations
from dslpar.forecast.workload import Framework, Recompute, Workload
from dslpar.layers import loss
from dslpar.layout.chunks import Chunks
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Schedule
from dslpar.models.gpt import model, section
from dslpar.models.layered import build_module
from dslpar.schema import sections
from tests.distributed.engine.test_state_memory import TOLERANCE, micro_batches, watching, workload
from tests.support.engines import engine_of, job
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import KEEPS, LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

VOCAB, LENGTH, SAMPLES = 12, 48, 12
GPT2 = section.GPT(num_layers=4, hidden_size=48, num_heads=12, vocab_size=VOCAB, max_seq_len=LENGTH)
LLAMA = replace(GPT2, norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, tie_embeddings=False)
INTERVALS = (0, 1, 3)

# ---- one stage ----


def _waiting(gpt: section.GPT, tensor: mesh.TensorMesh) -> dict[int, int]:
    """Return the bytes that a whole model's forward leaves alive, by interval of recomputation."""
    groups, found = Groups(Mesh(tensor=tensor)), {}
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    sizes = {item.name: getattr(gpt, item.name) for item in fields(gpt)}
    for interval in INTERVALS:
        module = build_module(model.GPT(**sizes), groups, seed=1, interval=interval)
        module(ids)  # creates what is made once, such as tables of angles
        live = watching()
        before = live.bytes()
        with live:
            logits = module(ids)
        found[interval] = live.bytes() - before
        del logits, module
    return found


def _alone(gpt: section.GPT, tensor: mesh.TensorMesh, interval: int) -> Workload:
    recompute: Recompute = "full" if interval else "none"
    return Workload(
        model=gpt,
        mesh=Mesh(tensor=tensor),
        counts=(gpt.num_layers,),
        schedule=Schedule(Chunks(1), 1),
        micro_size=SAMPLES,
        seq_len=LENGTH,
        dtype="fp32",
        recompute=recompute,
        interval=interval or 1,
        framework=Framework(fused_norms=False),
    )


def kept(tensor: mesh.TensorMesh) -> list[mesh.TensorMesh]:
    """Return the layout with each choice of panels that are kept until the backward."""
    return [replace(tensor, keep=keep) for keep in KEEPS]  # type: ignore[arg-type]


MODELS = {"gpt2": GPT2, "llama": LLAMA}
SOME = {("1d-sequence-2", "gpt2"), ("2d-4", "llama")}


IN_TURN = [*sorted(SOME), *((name, form) for name, form in zip(LAYOUTS, cycle(MODELS)) if (name, form) not in SOME)]


@pytest.mark.parametrize(("name", "form"), sampled(IN_TURN, SOME))
def test_a_forward_leaves_what_is_forecast(name: str, form: str) -> None:
    tensors, gpt = kept(LAYOUTS[name]), MODELS[form]
    for tensor, found in zip(tensors, on_last_ranks(partial(_waiting, gpt), tensors), strict=True):
        for interval, alive in found.items():
            made = _alone(gpt, tensor, interval)
            logits = 4 * float(made.costs.logits)
            expected = activations(made, 0).saved + logits
            assert alive == pytest.approx(expected, rel=TOLERANCE), f"keep {tensor.keep}, interval {interval}"


# ---- logits ----


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 2 + 4 + 2), (torch.float32, 4 + 4 + 4)])
def test_bytes_of_a_logit(dtype: torch.dtype, expected: int) -> None:
    """The bytes are logits, fp32 softmax and gradient, with the accelerators' function and with sharded logits."""
    groups, tokens, vocab = Groups(Mesh()), 64, 4096
    leaf = torch.zeros(tokens, vocab, dtype=dtype, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    live = watching()
    before = live.bytes()
    with live:
        logits = leaf * 1
        losses = loss._TokenLosses.apply(logits, targets, groups.axis("y"), vocab, 0.0, 0.0)
        live.peak = 0  # a CPU upcasts before its softmax
        losses.sum().backward(inputs=[logits])
    assert (live.peak - before) / (tokens * vocab) == pytest.approx(expected, rel=TOLERANCE)
    made = replace(_alone(GPT2, mesh.TensorMesh(), 0), dtype="bf16" if dtype is torch.bfloat16 else "fp32")
    needed = activations(made, 0)
    assert needed.logits == expected * float(made.costs.logits)
    assert needed.output == torch.empty(0, dtype=dtype).element_size() * float(made.costs.logits)


# ---- pipelines ----


def _after_actions(made: Job) -> int:
    """Return the most bytes of activations that are alive after an action of a step."""
    engine = engine_of(made)
    fed = micro_batches(made, VOCAB)
    engine.train_batch(fed)
    live = watching()
    weights = list(engine.module.parameters())
    before = live.bytes(weights)
    sizes: list[int] = []

    def counted(method: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, *args: Any) -> None:
            method(self, *args)
            gradients = [p.grad for p in weights if p.grad is not None]
            sizes.append(live.bytes([*weights, *gradients, *_on_their_way(self)]) - before)

        return run

    for name in ("_forward", "_backward", "_weight_gradients"):
        setattr(PipelineExecutor, name, counted(getattr(PipelineExecutor, name)))
    with live:
        engine.forward_backward(fed)
    engine.step()
    return max(sizes)


def _on_their_way(pipeline: PipelineExecutor) -> list[torch.Tensor]:
    """Return messages beside micro-batches in flight: received ahead or soon, and sent ones that gloo still holds."""
    messages = pipeline._messages
    held = {each.data_ptr() for forward in pipeline._forwards.values() for each in forward.outputs}
    sent = [each for _, each in messages._in_flight if each.data_ptr() not in held]
    posted = [each for incoming in messages._incoming.values() for each in incoming.posted]
    return sent + [
        value for values in (*(each.values for each in posted), *messages._buffers.values()) for value in values
    ]


def pipelined(pipe: int, kind: str, chunks: int, interval: int, gpt: section.GPT) -> Job:
    return job(
        pipe,
        model=replace(gpt, num_layers=2 * pipe * chunks),
        parallel=sections.Parallel(pipeline=sections.PipelineParallel(size=pipe, method="uniform")),
        schedule=sections.PipelineSchedule(type=kind, num_model_chunks=chunks),
        activation_checkpoint=sections.ActivationCheckpoint(interval=interval) if interval else None,
        batch=sections.Batch(micro_size=2 * SAMPLES, accumulation=2 * pipe),
    )


PIPELINES = [
    (pipe, kind, chunks, interval)
    for pipe in (2, 4)
    for kind, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
    for interval in (0, 1)
]


@pytest.mark.parametrize(
    ("pipe", "kind", "chunks", "interval"),
    sampled(PIPELINES, {(2, "interleaved", 2, 1), (2, "zero_bubble", 1, 0)}),
)
def test_a_rank_holds_what_the_schedule_has_in_flight(pipe: int, kind: str, chunks: int, interval: int) -> None:
    made = pipelined(pipe, kind, chunks, interval, GPT2)
    for rank, alive in enumerate(on_ranks(pipe, _after_actions, made, init="deepspeed")):
        costs = workload(made).costs
        expected = activations(workload(made), rank).saved + (4 * float(costs.logits) if rank == pipe - 1 else 0.0)
        # If little is saved, one temporary tensor of a split backward shows, with the residual's size.
        more = 4 * float(costs.boundary) if kind == "zero_bubble" and interval else 0.0
        assert (1 - TOLERANCE) * expected <= alive <= (1 + TOLERANCE) * expected + more, rank


def test_a_wrong_schedule_is_detected() -> None:
    """The comparison can fail: the first and last rank of a pipeline hold different numbers of micro-batches."""
    made = workload(pipelined(2, "1f1b", 1, 0, GPT2))
    assert activations(made, 0).saved > 1.5 * activations(made, 1).saved
