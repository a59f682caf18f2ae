"""Batch sizes of a step: which follow from which, and which do not fit."""

from __future__ import annotations

import pytest

from dslpar import resolve
from dslpar.layout.batch import Batch
from dslpar.layout.resolve import Job
from dslpar.linter.check import load_text
from tests.support.lint import MODEL, PATH, codes


def job_of(text: str, world: int = 8) -> Job:
    return resolve(load_text(MODEL + text, PATH), world)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("", (4, 1, 1)),
        ("global_size=16", (16, 4, 1)),
        ("micro_size=3", (12, 3, 1)),
        ("accumulation=5", (20, 1, 5)),
        ("global_size=16, micro_size=2", (16, 2, 2)),
        ("global_size=16, accumulation=2", (16, 2, 2)),
        ("micro_size=2, accumulation=3", (24, 2, 3)),
        ("global_size=24, micro_size=2, accumulation=3", (24, 2, 3)),
    ],
)
def test_batch(batch: str, expected: tuple[int, int, int]) -> None:
    job = job_of(f"parallel = dict(pipeline=2)\nbatch = dict({batch})\n")
    assert job.batch == Batch(*expected)
    assert job.batch.global_size == job.batch.micro_size * job.batch.accumulation * job.mesh.data


@pytest.mark.parametrize(
    "batch",
    ["global_size=3", "global_size=18", "global_size=16, micro_size=3", "global_size=16, micro_size=2, accumulation=3"],
)
def test_a_batch_that_does_not_fit(batch: str) -> None:
    assert codes(f"{MODEL}parallel = dict(pipeline=2)\nbatch = dict({batch})\n") == ["BAT101"]


@pytest.mark.parametrize(
    ("tensor", "least"),
    [
        ("size=4, mode='1d'", 1),
        ("size=4, mode='1d', sequence=True", 1),
        ("size=4, mode='2d'", 2),
        ("size=8, mode='2.5d', depth=2", 4),
        ("size=8, mode='3d'", 4),
        ("size=8, mode='3d', residual='sequence', inner='heads'", 2),
        ("size=4, mode='sequence'", 1),
        ("size=8, mode='cuboid', shape=(2, 2, 2)", 2),
    ],
)
def test_least_micro_size(tensor: str, least: int) -> None:
    assert job_of(f"parallel = dict(tensor=dict({tensor}))\n").batch.micro_size == least
    if least > 1:
        wrong = f"{MODEL}parallel = dict(tensor=dict({tensor}))\nbatch = dict(micro_size={least + 1})\n"
        assert codes(wrong) == ["BAT102"]


def test_microbatches_of_a_schedule_are_the_accumulation() -> None:
    job = job_of("parallel = dict(pipeline=2)\nschedule = dict(type='1f1b', num_microbatches=4)\n")
    assert job.batch == Batch(16, 1, 4)
    both = job_of("schedule = dict(num_microbatches=4)\nbatch = dict(accumulation=4, global_size=64)\n")
    assert both.batch == Batch(64, 2, 4)
