"""Activation checkpointing: bitwise equal results, blocks that run twice, and less memory until the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # the first checkpoint imports it: once, here, and not on every rank
from torch import Tensor

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layout.resolve import Job, resolve
from dslpar.models import GPT, build_module
from dslpar.models.gpt import section
from dslpar.models.recompute import Step, recompute_groups, run_layers
from dslpar.schema import sections
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

VOCAB, LENGTH, LAYERS = 30, 12, 4


def gpt(**more: Any) -> section.GPT:
    sizes = {"num_layers": LAYERS, "hidden_size": 24, "num_heads": 4, "vocab_size": VOCAB, "max_seq_len": LENGTH}
    return section.GPT(**(sizes | more))


def ids(samples: int = 4, step: int = 0) -> Tensor:
    return torch.randint(VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(step))


# ---- layers that are recomputed together ----


@pytest.mark.parametrize(
    ("interval", "lengths"),
    [
        (0, [(False, 7)]),
        (1, [(False, 1), (True, 1), (True, 1), (True, 1), (False, 2), (True, 1)]),
        (2, [(False, 1), (True, 2), (True, 1), (False, 2), (True, 1)]),
        (9, [(False, 1), (True, 3), (False, 2), (True, 1)]),
    ],
)
def test_only_recomputable_neighbours_go_together(interval: int, lengths: list[tuple[bool, int]]) -> None:
    steps = [Step(torch.neg, recomputable) for recomputable in (False, True, True, True, False, False, True)]
    groups = list(recompute_groups(steps, interval))
    assert [(recomputed, len(group)) for recomputed, group in groups] == lengths
    assert [step for _, group in groups for step in group] == steps, "none is lost, none moved"


def test_without_gradients_nothing_is_stored_for_a_second_run() -> None:
    calls: list[str] = []

    def layer(x: Tensor) -> Tensor:
        calls.append("run")
        return x * 2

    with torch.no_grad():
        assert run_layers([Step(layer, True)] * 3, torch.ones(1), 1) == 8
    assert calls == ["run"] * 3


@pytest.mark.parametrize("number", [1, 2])
def test_all_stored_inputs_are_offloaded(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may pass on several tensors, such as the residual and the sums of routers."""
    moved: list[int] = []

    def hooks(**_: object) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: (moved.append(x.numel()), x)[1], lambda x: x)

    monkeypatch.setattr("dslpar.models.recompute.save_on_cpu", hooks)
    given = tuple(torch.ones(length, requires_grad=True) for length in range(5, 5 + number))
    x = run_layers([Step(_times_two, True)] * 2, given if number > 1 else given[0], 1, offload=True)
    assert sorted(each for each in moved if each >= 5) == sorted(2 * [len(each) for each in given])
    sum(each.sum() for each in (x if number > 1 else [x])).backward()  # type: ignore[union-attr]
    assert all(each.grad is not None and each.grad.eq(4).all() for each in given)


def _times_two(x: Any) -> Any:
    return tuple(each * 2 for each in x) if isinstance(x, tuple) else x * 2


# ---- saved tensors, and repeated runs ----


def costs(tensor: mesh.TensorMesh, interval: int) -> tuple[int, int]:
    """Return live bytes between forward and backward without parameters, and the number of runs of a block."""
    groups = Groups(Mesh(tensor=tensor))
    model = GPT(**vars(gpt()))
    module = build_module(model, groups, 1, interval)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}
    runs: list[str] = []
    for block in module.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda *_: runs.append("run"))

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        kept.append(x)  # keep them, so that no other tensor gets their addresses
        return x

    kept: list[Tensor] = []
    tokens = ids(12)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.loss(groups)(module(tokens[:, :-1]), tokens[:, 1:])
    # torch stores a checkpointed group's input outside these hooks: one stored residual.
    inputs = {0: 0, 1: LAYERS, 2: LAYERS // 2, LAYERS: 1}[interval]
    loss.backward()
    residual = 12 * LENGTH * 24 * 4 // (tensor.size if tensor.residual != "replicated" else 1)
    return sum(size for at, size in saved.items() if at not in weights) + inputs * residual, len(runs)


@pytest.mark.parametrize("layout", sampled(["1d-2", "1d-sequence-2", "ring-2"], {"1d-sequence-2"}))
def test_blocks_run_twice_and_keep_one_residual_each(layout: str) -> None:
    tensor = LAYOUTS[layout]
    found = {interval: on_ranks(tensor.size, costs, tensor, interval)[0] for interval in (0, 1, 2, LAYERS)}
    bytes_ = {interval: cost for interval, (cost, _) in found.items()}
    assert [runs for _, runs in found.values()] == [LAYERS, 2 * LAYERS, 2 * LAYERS, 2 * LAYERS]
    assert bytes_[0] > 2.5 * bytes_[1], "a block keeps 16 times its input, the head and loss theirs in any case"
    assert bytes_[1] > bytes_[2] > bytes_[LAYERS]


# ---- through DeepSpeed: bitwise equal ----

PIPE = sections.PipelineParallel(size=2)
ONE_D = sections.TensorParallel(size=2, mode="1d")


def job(world: int, interval: int, zero: int = 0, tied: bool = True, dtype: str = "fp32", **parallel: Any) -> Job:
    made = sections.Spec(
        model=gpt(dropout=0.1, tie_embeddings=tied),
        parallel=sections.Parallel(**parallel),
        optimizer=sections.SGD(lr=0.5, momentum=0.9),
        zero=sections.Zero(stage=zero, extra={"stage3_param_persistence_threshold": 0} if zero == 3 else {}),
        precision=sections.Precision(dtype=dtype),
        batch=sections.Batch(global_size=8, accumulation=2),
        train=sections.Train(clip_grad_norm=0.5),
        activation_checkpoint=sections.ActivationCheckpoint(interval=interval) if interval else None,
    )
    return resolve(made, world, "cfg.py")


Outcome = tuple[list[float], dict[str, Tensor], int]


def _runs(jobs: list[Job]) -> list[Outcome]:
    """Run the jobs one after the other, on the same ranks."""
    return [_run(job) for job in jobs]


def _run(made: Job) -> Outcome:
    import deepspeed

    from dslpar.engine.build import build_engine

    engine = build_engine(made, Groups(made.mesh), all_counted=True)
    runs: list[str] = []
    for module in engine.module.modules():
        if type(module).__name__ == "Block":
            module.register_forward_pre_hook(lambda *_: runs.append("run"))
    rows: list[float] = []
    for step in range(3):
        tokens = ids(8, step).chunk(2 * made.mesh.data)[engine.groups.coord["data"] :: made.mesh.data]
        rows += [engine.train_batch([(part[:, :-1], part[:, 1:]) for part in tokens]), engine.grad_norm]
    weights = {}
    for name, p in engine.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            weights[name] = p.detach().clone()
    return rows, weights, len(runs)


CASES: dict[str, Callable[[int], Job]] = {
    "one process": lambda k: job(1, k),
    "data 2, ZeRO 2, bf16": lambda k: job(2, k, zero=2, dtype="bf16"),
    "data 2, ZeRO 3": lambda k: job(2, k, zero=3),
    "data 2, ZeRO 3, untied": lambda k: job(2, k, zero=3, tied=False),
    "pipe 2": lambda k: job(2, k, pipeline=PIPE),
    "pipe 2, ZeRO 1, 1d 2": lambda k: job(4, k, zero=1, pipeline=PIPE, tensor=ONE_D),
    "1d 2 sequence, data 2, ZeRO 3": lambda k: job(
        4, k, zero=3, tensor=sections.TensorParallel(size=2, mode="1d", sequence=True)
    ),
    "ring 2, ZeRO 1": lambda k: job(2, k, zero=1, tensor=sections.TensorParallel(size=2, mode="sequence")),
    "2d 4": lambda k: job(4, k, tensor=sections.TensorParallel(size=4, mode="2d")),
    "3d 8, ZeRO 3": lambda k: job(8, k, zero=3, tensor=sections.TensorParallel(size=8, mode="3d")),
}
EACH_TIME = {"pipe 2, ZeRO 1, 1d 2"}


@pytest.mark.parametrize("case", sampled(CASES, EACH_TIME))
def test_recomputing_changes_no_bit(case: str) -> None:
    """Dropout, accumulation, clipping and momentum would carry any difference on."""
    made = CASES[case]
    jobs = [made(interval) for interval in (0, 1, 2)]
    for (rows, weights, ran), *others in on_ranks(jobs[0].mesh.world_size, _runs, jobs, init="deepspeed"):
        for same, equal, twice in others:
            assert rows == same
            assert all(torch.equal(weight, equal[name]) for name, weight in weights.items())
            assert twice == 2 * ran > 0
