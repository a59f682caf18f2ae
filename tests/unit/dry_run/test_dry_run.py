"""Dry runs of every mode and schedule find nothing on any rank; each kind of mistake is found."""

from __future__ import annotations

from functools import cache

import pytest
import torch.distributed as dist

from dslpar.dry_run.dry_run import dry_run
from dslpar.dry_run.problem import Problem
from dslpar.dry_run.stage import NoDryRunError
from dslpar.linter import check
from tests.support.dry_run_mistakes import MISTAKES
from tests.support.dry_runs import LLAMA, MODES, SCHEDULES, job_of
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

RECOMPUTED = "activation_checkpoint = dict(interval=2)"
FORMS = (("", ""), (LLAMA, RECOMPUTED), ("", f"precision = 'bf16'\n{RECOMPUTED}"))
CASES = [
    (mode, schedule, *FORMS[(row + column) % len(FORMS)])
    for row, mode in enumerate(MODES)
    for column, schedule in enumerate(SCHEDULES)
]


QUICK = {("none", "no pipeline"), ("1d sequence", "interleaved"), ("2d", "zero_bubble"), ("ulysses", "interleaved")}
"""tests/distributed/engine/test_dry_run.py has the other modes."""


@pytest.mark.parametrize(
    ("mode", "schedule", "form", "more"),
    sampled(CASES, lambda case: case[:2] in QUICK, named=lambda case: f"{case[0]}, {case[1]}"),
)
def test_all_modes_and_schedules_have_no_problem(mode: str, schedule: str, form: str, more: str) -> None:
    on_ranks(1, _find_nothing, mode, schedule, form, more, init=None)


def _find_nothing(mode: str, schedule: str, form: str, more: str) -> None:
    job = job_of(mode, schedule, form=form, more=more)
    tensor, chunks = job.mesh.tensor, job.chunks
    for rank in (0, job.mesh.world_size - 1):
        result = dry_run(job, rank)
        assert result.problems == [], rank
        assert any(axes in ("d", "q", "y", "z") for _, axes in result.operations) == (tensor.size > 1)
        sent = [each for each in result.messages if each.kind == "send" and not each.form.startswith("int64")]
        boundaries = sum((stage > 0) + (stage < chunks.last) for stage in result.stages)
        assert len(sent) == (8 * boundaries if chunks.pipe > 1 else 0)
        assert sum(len(each.stages) for each in result.classes) == chunks.stages
    assert not dist.is_initialized()


def test_what_comes_through_symmetric_memory_goes_around_rings_in_a_dry_run() -> None:
    on_ranks(1, _dry_run_in_rings, init=None)


def _dry_run_in_rings() -> None:
    def operations(overlap: str) -> object:
        result = dry_run(job_of("1d sequence", more=f"parallel.tensor.comm_overlap = {overlap}"), 3)
        assert result.problems == []
        return result.operations

    assert operations("'symmetric_memory'") == operations("True") != operations("False")


def test_rank_of_a_rank_that_is_not_there() -> None:
    with pytest.raises(NoDryRunError, match=r"there is no rank 4: the world has 4"):
        dry_run(job_of("1d"), 4)


def test_a_model_whose_inputs_are_not_known() -> None:
    layers = "model = dict(type='Sequential', layers_cfg=[dict(type='torch.nn.Linear', in_features=4, out_features=4)])"
    job = check.resolve(check.load_text(layers + "\nbatch = dict(micro_size=1)\ntrain = dict(steps=1)", "dry.py"), 1)
    with pytest.raises(NoDryRunError, match="the inputs of Sequential are unknown"):
        dry_run(job, 0)


def test_images() -> None:
    on_ranks(1, _images, init=None)


def _images() -> None:
    config = """
model = dict(type='ResMLP', num_layers=4, hidden_size=32, image_size=32, patch_size=8, num_classes=10)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
batch = dict(micro_size=4, accumulation=4)
train = dict(steps=10)
"""
    job = check.resolve(check.load_text(config, "dry.py"), 4)
    for rank in range(4):
        assert dry_run(job, rank).problems == []


def test_tied_tables_are_summed_over_their_stages() -> None:
    on_ranks(1, _tied, init=None)


def _tied() -> None:
    job = job_of("1d", "1f1b")
    results = [dry_run(job, rank=4 * pipe) for pipe in range(4)]
    rows, features = results[0].parameters["embedding.tokens.weight"].local_shape
    assert (rows, features) == results[3].parameters["embedding.tokens.weight"].local_shape == (129, 64)
    once = 1, 4 * rows * features  # each of two ranks sends its own bytes
    over = "all_reduce", "pipe[0, 3]"
    assert [result.operations.get(over, ()) for result in results] == [once, (), (), once]
    assert over not in dry_run(job_of("1d", "1f1b", form="tie_embeddings=False"), rank=0).operations


def test_what_is_repeated_is_counted() -> None:
    on_ranks(1, _repeated, init=None)


def _repeated() -> None:
    """4 all-reduces per layer and micro-batch (arXiv 1909.08053), one for the table's lookup, two for a tied head."""
    result = dry_run(job_of("1d", more="activation_checkpoint = None"), 0)
    calls, _ = result.operations["all_reduce", "y"]
    assert calls == 8 * (4 * 8 + 1 + 1 + 2)
    again, _ = dry_run(job_of("1d", more="activation_checkpoint = dict(interval=1)"), 0).operations["all_reduce", "y"]
    assert again == 8 * (6 * 8 + 1 + 1 + 2)


def test_recomputation_saves_less() -> None:
    on_ranks(1, _recomputed, init=None)


def _recomputed() -> None:
    plain, recomputed = (
        dry_run(job_of("1d", "1f1b", more=more), 2).saved_bytes
        for more in ("", "activation_checkpoint = dict(interval=1)")
    )
    assert recomputed < plain / 4


@cache
def problems() -> dict[str, list[Problem]]:
    """Return a dry run's problems by mistake, and without any once all have been undone."""
    (found,) = on_ranks(1, _problems, init=None)
    return found  # type: ignore[no-any-return]


def _problems() -> dict[str, list[Problem]]:
    job, found = job_of("1d", "1f1b"), {}
    for name, (mistake, _, _) in MISTAKES.items():
        with mistake():
            found[name] = dry_run(job, 2).problems
    return found | {"none": dry_run(job, 2).problems}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    _, kind, text = MISTAKES[name]
    assert any(each.check == kind and text in f"{each.where}: {each.what}" for each in problems()[name]), problems()
    assert all(each.why for each in problems()[name])
    assert problems()["none"] == []
