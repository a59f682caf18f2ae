"""Data-parallel traffic of a step, counted at torch's collectives, against closed forms of the ring.

Ring counts in elements per rank, for N ranks and a tensor of E elements: an all-gather or a reduce-scatter sends
(N-1)/N E, an all-reduce twice that. A reduce to one rank passes E along a chain of N ranks. That makes N - 1 sends for
N ranks, (N-1)/N E on average, and the ranks take turns as roots of equal pieces. A broadcast does the same in the other
direction. Weights are chosen so that nothing is padded.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2
from torch.utils._python_dispatch import TorchDispatchMode

from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

Sent = Counter[str]
SMALL = 2
"""Elements of a tensor that is neither gradient nor weight: a loss, a norm, an overflow flag."""


def _size(tensors: Any) -> int:
    """Return the elements of a tensor, or of nested lists of tensors."""
    return tensors.numel() if isinstance(tensors, torch.Tensor) else sum(map(_size, tensors))


SENDS: Mapping[str, Callable[[int, tuple[Any, ...]], float]] = {
    "allreduce_": lambda n, args: 2 * (n - 1) / n * _size(args[0]),
    "_allgather_base_": lambda n, args: (n - 1) / n * _size(args[0]),
    "allgather_": lambda n, args: (n - 1) / n * _size(args[0]),
    "_reduce_scatter_base_": lambda n, args: (n - 1) / n * _size(args[1]),
    "broadcast_": lambda n, args: (n - 1) / n * _size(args[0]),
    "reduce_": lambda n, args: (n - 1) / n * _size(args[0]),
    "alltoall_base_": lambda n, args: _size(args[1]),  # dslpar's sums of two ranks over gloo: all goes to the other
}
"""By torch's name, the elements that one call sends, from the group's size and the operator's arguments."""


class _Counting(TorchDispatchMode):
    """Counts every collective of torch.distributed while active; one outside of the table is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            elements = SENDS[name](_group_of(args).size(), args)
            self.sent["scalars" if elements <= 2 * SMALL else "elements"] += elements
            self.sent[name] += 1
        return func(*args, **(kwargs or {}))


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    (group,) = (box for box in boxed if box._type().qualified_name().endswith(".ProcessGroup"))
    return dist.ProcessGroup.unbox(group)


def _a_step(made: Job) -> tuple[Sent, int, int]:
    """Return the second step's traffic, and the elements of this rank's matrices and vectors."""
    engine = engine_of(made)
    data_rank = engine.groups.coord["data"]
    engine.train_batch(batches(made, data_rank, 0))
    with _Counting() as counting:
        engine.train_batch(batches(made, data_rank, 1))
    sizes = [sum(p.numel() for p in engine.module.parameters() if (p.dim() >= 2) == whole) for whole in (True, False)]
    return counting.sent, *sizes  # type: ignore[return-value]


def trained(world: int, stage: int, accumulation: int, dtype: str = "fp32", **zero: Any) -> Job:
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, max_seq_len=LENGTH)
    return job(
        world,
        model=gpt,
        zero=sections.Zero(stage=stage, overlap_param_gather=zero.pop("overlap_param_gather", False), extra=zero),
        batch=sections.Batch(global_size=8, accumulation=accumulation),
        precision=sections.Precision(dtype=dtype),
    )


def counted(made: Job) -> tuple[float, Sent]:
    """Return a rank's average traffic in parameters' worth over (N-1)/N, and the calls of rank 0."""
    ranks = on_ranks(made.mesh.world_size, _a_step, made, init="deepspeed")
    n, (_, matrices, vectors) = made.mesh.world_size, ranks[0]
    assert matrices % (2 * n) == vectors % (2 * n) == 0, "nothing to pad: DeepSpeed aligns shards to 2 elements"
    elements = sum(sent["elements"] for sent, *_ in ranks) / n
    assert all(sent["scalars"] < 30 for sent, *_ in ranks)
    return elements / (matrices + vectors) / ((n - 1) / n), ranks[0][0]


# A gradient is reduced to the rank with its optimizer state, and the weights come back.
@pytest.mark.parametrize("world", sampled([2, 4], {2}))
@pytest.mark.parametrize(
    ("stage", "accumulation", "parameters"),
    [
        (1, 1, 2),
        (2, 1, 2),
        (1, 2, 2),  # micro-batches add up before they are sent
        (2, 2, 3),  # ZeRO 2 keeps no full gradient, so it reduces each micro-batch's
    ],
)
def test_zero_sends_two_parameters_a_step(world: int, stage: int, accumulation: int, parameters: int) -> None:
    found, calls = counted(trained(world, stage, accumulation))
    assert found == pytest.approx(parameters, rel=1e-12), calls


@pytest.mark.parametrize(("world", "stage"), sampled(product([2, 4], [1, 2]), {(2, 1), (4, 2)}))
def test_weights_that_are_gathered_under_the_forward_are_as_many(world: int, stage: int) -> None:
    found, calls = counted(trained(world, stage, 1, overlap_param_gather=True, allgather_bucket_size=1000))
    assert found == pytest.approx(2, rel=1e-12), calls
    assert calls["broadcast_"] > world, "the matrices, in buckets"
    assert calls["_allgather_base_"] == 1, "the vectors, at once"


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_s_default_sends_three(stage: int) -> None:
    """An all-reduce is sent where a reduce would do; dslpar's default, `use_multi_rank_bucket_allreduce=False`, avoids
    it.
    """
    found, _ = counted(trained(2, stage, 1, use_multi_rank_bucket_allreduce=True))
    assert found == pytest.approx(3, rel=1e-12)


def test_without_zero_gradients_are_all_reduced_once() -> None:
    found, calls = counted(trained(2, 0, 2))
    assert found == pytest.approx(2, rel=1e-12)
    assert calls["reduce_"] == calls["_allgather_base_"] == 0


@pytest.mark.parametrize(("dtype", "stage"), sampled(product(["bf16", "fp16"], [1, 2]), [("bf16", 1), ("fp16", 2)]))
def test_half_precision_sends_as_many(dtype: str, stage: int) -> None:
    found, calls = counted(trained(2, stage, 1, dtype))
    assert found == pytest.approx(2, rel=1e-12), calls


def test_deepspeed_waits_for_the_device_before_each_reduction_that_overlaps() -> None:
    """This checks PERF111's claim in DeepSpeed's source. When this fails, the rule can go."""
    source = inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_and_copy)
    assert "if self.overlap_comm:" in source
    assert source.index("get_accelerator().synchronize()") < source.index("self.allreduce_bucket(")
