"""Candidates: overrides turn a config into exactly that layout, with the same global batch."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from dslpar.forecast.candidate import Candidate, Workloads, candidate_of, overrides, settings
from dslpar.forecast.search_space import candidates
from dslpar.layout.resolve import Job, resolve
from dslpar.linter import check
from dslpar.linter.check import Checked
from dslpar.schema.sections import ContextParallel, TensorParallel

GPT = "model = dict(type='GPT', num_layers=16, hidden_size=512, num_heads=16, vocab_size=512, max_seq_len=64)\n"
CONFIGS: Mapping[str, str] = {
    "plain": "batch = dict(global_size=64)",
    "micro and accumulation": "parallel = dict(pipeline=2)\nbatch = dict(micro_size=2, accumulation=4)",
    "accumulation of the schedule": "parallel = dict(pipeline=2)\nschedule = dict(num_microbatches=8)\nzero = 1",
    "counts": "parallel = dict(pipeline=dict(size=2, counts=[7, 9]))\nbatch = dict(global_size=64, micro_size=1)",
    "method": "parallel = dict(pipeline=dict(size=4, method='libai'))\nbatch = dict(global_size=64, micro_size=2)",
    "2d": "parallel = dict(tensor=dict(size=4, mode='2d', comm_overlap=True))\n"
    "batch = dict(global_size=64, micro_size=4)",
    "libai": "train = dict(dist=dict(tensor_parallel_size=2, pipeline_parallel_size=2))\nbatch = dict(global_size=64)",
    "context": "parallel = dict(context=dict(size=4, impl='ring'), tensor=dict(size=2, mode='1d'))\n"
    "batch = dict(global_size=64, micro_size=2)",
    "a number of context ranks": "parallel = dict(context=2)\nbatch = dict(global_size=64)",
    "recomputed": "activation_checkpoint = 2\nprecision = 'bf16'\nzero = dict(stage=2)\nbatch = dict(global_size=64)",
    "interleaved": "parallel = dict(pipeline=2)\nschedule = dict(type='interleaved', num_chunks=2)\n"
    "batch = dict(global_size=64, micro_size=2)",
}
WORLD = 16


def checked(text: str, words: list[str]) -> Checked:
    config = check.load_text(GPT + text + "\n", "config.py", words)
    return check.check(config, WORLD)


def legal(text: str) -> Checked:
    found = checked(text, [])
    assert not found.has_errors, found.findings
    return found


def job_of(text: str) -> Job:
    return legal(text).job


@pytest.mark.parametrize("name", CONFIGS)
def test_words_make_the_candidate(name: str) -> None:
    own = legal(CONFIGS[name])
    job, workloads = own.job, Workloads(own.job)
    every = list(candidates(workloads))
    assert len(every) > 100
    refused = 0
    for candidate in random.Random(name).sample(every, 40):
        words = overrides(job, candidate, own.reading.written)
        made = checked(CONFIGS[name], words)
        if made.has_errors:
            refused += 1
            continue
        other = resolve(made.reading.spec, WORLD)
        assert candidate_of(other) == candidate, words
        assert other.batch.global_size == job.batch.global_size
        workload = workloads.workload(candidate)
        assert workload.mesh == other.mesh
        assert workload.counts == other.stages.counts
        assert workload.schedule == other.schedule
        assert (workload.micro_size, workload.zero) == (other.batch.micro_size, other.spec.zero.stage)
    assert refused <= 4, "what a search tries is legal, but for a few"


@pytest.mark.parametrize("name", CONFIGS)
def test_no_words_where_nothing_changes(name: str) -> None:
    job = job_of(CONFIGS[name])
    assert overrides(job, candidate_of(job)) == []
    assert candidate_of(job).changes(candidate_of(job)) == 0


def test_few_words() -> None:
    job = job_of(CONFIGS["micro and accumulation"])
    own = candidate_of(job)

    def changed(**values: object) -> dict[str, str]:
        return settings(job, Candidate(**{**_values(own), **values}))  # type: ignore[arg-type]

    assert changed(zero=1) == {"zero.stage": "1"}
    assert changed(interval=1) == {"activation_checkpoint": "1"}
    assert changed(micro_size=1) == {"batch.micro_size": "1", "batch.accumulation": "8"}
    assert changed(pipe=1) == {"parallel.pipeline": "1", "batch.accumulation": "2"}
    assert changed(tensor=TensorParallel(size=2, mode="1d")) == {
        "parallel.tensor": 'dict(size=2, mode="1d")',
        "batch.accumulation": "8",
    }
    assert changed(split=True) == {"schedule.type": "zero_bubble"}
    assert changed(chunks=2) == {"schedule.type": "interleaved"}
    assert changed(chunks=4) == {"schedule.type": "interleaved", "schedule.num_model_chunks": "4"}


def test_context_parallelism_in_words() -> None:
    job = job_of(CONFIGS["context"])

    def changed(job: Job, context: ContextParallel | None) -> dict[str, str]:
        return settings(job, candidate_of(job)._replace(context=context))

    assert changed(job, ContextParallel(size=4, impl="ulysses")) == {"parallel.context.impl": "ulysses"}
    assert changed(job, ContextParallel(size=2, impl="ring"))["parallel.context.size"] == "2"
    assert changed(job, None)["parallel.context"] == "None"
    by_number = job_of(CONFIGS["a number of context ranks"])
    assert changed(by_number, ContextParallel(size=2, impl="ulysses")) == {
        "parallel.context": 'dict(size=2, impl="ulysses")'
    }


def test_changes_count_options_of_context_parallelism() -> None:
    own = candidate_of(job_of(CONFIGS["context"]))
    assert own.changes(own._replace(context=ContextParallel(size=4, impl="ulysses"))) == 1
    assert own.changes(own._replace(context=ContextParallel(size=2, impl="ulysses"))) == 2
    assert own.changes(own._replace(context=None)) == 1
    assert own._replace(context=None).changes(own) == 1


def _values(candidate: Candidate) -> dict[str, object]:
    names = ("pipe", "chunks", "split", "tensor", "context", "zero", "micro_size", "interval")
    return {name: getattr(candidate, name) for name in names}


def test_changes_count_settings() -> None:
    job = job_of(CONFIGS["2d"])
    own = candidate_of(job)
    values = _values(own) | {"tensor": TensorParallel(size=4, mode="1d"), "zero": 1}
    assert own.changes(Candidate(**values)) == 3  # type: ignore[arg-type]  # the stage, the mode, its option
