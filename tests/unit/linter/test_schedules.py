"""Schedules under lint: none but 1F1B runs, and what is wrong with the others is found all the same."""

from __future__ import annotations

import re

import pytest

from dslpar.core.frozen import fields
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.linter.check import load_text, resolve
from dslpar.linter.rules import performance, pipeline
from dslpar.schema.fields import facts_of
from dslpar.schema.sections import PipelineSchedule
from tests.support.helps import Linted, carry_out
from tests.support.lint import MODEL, PATH, codes, findings

TYPES = next(facts_of(field).choices for field in fields(PipelineSchedule) if field.name == "type")


def config(schedule: str, stages: int = 4, accumulation: int = 16, more: str = "", cut: str = "") -> str:
    pipeline = f"dict(size={stages}, {cut})" if cut else stages
    return (
        f"{MODEL}parallel = dict(pipeline={pipeline})\nschedule = {schedule}\n"
        f"batch = dict(accumulation={accumulation})\n{more}"
    )


@pytest.fixture
def all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As once the executor runs every type."""
    for module in (pipeline, performance):
        monkeypatch.setattr(module, "RUNNABLE", TYPES)


def said(text: str, *ignored: str) -> list[str]:
    """Code, message and hint of what lint finds, but that stages of so few layers are uneven."""
    return [f"{each.code} {each.message}; {each.help}" for each in findings(text, ignored=("PERF106", *ignored))]


@pytest.mark.parametrize("schedule", ["'interleaved'", "'zero_bubble'", "dict(type='zero_bubble', num_model_chunks=2)"])
def test_a_schedule_that_nothing_runs_is_refused(schedule: str) -> None:
    assert codes(config(schedule)) == ["PIP112"]


@pytest.mark.usefixtures("all_run")
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("'1f1b'", Schedule(Chunks(4), 16)),
        ("'interleaved'", Schedule(Chunks(4, 2), 16)),
        ("dict(num_chunks=2, type='interleaved')", Schedule(Chunks(4, 2), 16)),
        ("'zero_bubble'", Schedule(Chunks(4), 16, split=True)),
        ("dict(type='zero_bubble', num_model_chunks=2)", Schedule(Chunks(4, 2), 16, split=True)),
    ],
)
def test_the_schedule_of_a_config(schedule: str, expected: Schedule) -> None:
    text = config(schedule)
    assert said(text) == []
    job = resolve(load_text(text, PATH), 8)
    assert job.schedule == expected
    assert len(job.stages.counts or ()) == job.chunks.stages
    assert job.stages.actual_ids == ((0, 1, 2, 3, 0, 1, 2, 3) if job.chunks.num == 2 else (0, 0, 1, 1, 2, 2, 3, 3))


def test_a_hyphen_is_a_slip() -> None:
    (finding,) = findings(config("'zero-bubble'"), ignored=("PERF106",))
    assert (finding.code, finding.help) == ("CFG108", "did you mean 'zero_bubble'?")


@pytest.mark.usefixtures("all_run")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # whole rounds
        (
            config("'interleaved'", accumulation=6),
            "PIP115 6 micro-batches for 4 ranks with 2 chunks each: not a multiple of 4; batch.accumulation=8",
        ),
        (
            config("dict(type='interleaved', num_microbatches=1)").replace("batch = dict(accumulation=16)\n", ""),
            "PIP115 1 micro-batch for 4 ranks with 2 chunks each: not a multiple of 4; schedule.num_microbatches=4",
        ),
        (
            config("'interleaved'").replace("accumulation=16", "global_size=24, micro_size=2"),
            "PIP115 6 micro-batches for 4 ranks with 2 chunks each: not a multiple of 4; batch.micro_size=3",
        ),
        # layers for all stages
        (
            config("dict(type='zero_bubble', num_model_chunks=3)"),
            "PIP101 4 ranks with 3 stages each, and the model has 8 layers;"
            " num_model_chunks at most 2: each stage has at least one layer",
        ),
        # cuts
        (
            config("'interleaved'", 2, cut="counts=[4, 4]"),
            "PIP107 2 counts for 4 stages; such as [2, 2, 2, 2]: one number for each stage",
        ),
        (
            config("'interleaved'", 2, cut="stage_ids=[0, 0, 1, 1, 0, 1, 0, 1]"),
            "PIP103 layer 6 is on stage 0, after a layer on stage 1; such as [0, 0, 1, 1, 0, 0, 1, 1]",
        ),
        (
            config("'interleaved'", cut="stage_ids=[0, 1, 2, 3, 1, 2, 3, 3]"),
            "PIP103 layer 4 is on stage 1, after a layer on stage 3; such as [0, 1, 2, 3, 0, 1, 2, 3]",
        ),
        (
            config("'interleaved'", 2, cut="stage_ids=[0, 0, 0, 0, 1, 1, 1, 1]"),
            "PIP105 stages without layers: 2, 3; such as [0, 0, 1, 1, 0, 0, 1, 1]",
        ),
        # several chunks of the one type that has none
        (
            config("dict(type='1f1b', num_model_chunks=2)"),
            "PIP112 num_model_chunks 2 needs type='interleaved' or type='zero_bubble'; num_model_chunks=1",
        ),
        # what waits for W
        (
            config("'zero_bubble'", more="activation_checkpoint = 1\n"),
            "PERF112 the last rank holds all activations of 4 micro-batches for W, recomputed or not;"
            " leave activation_checkpoint out (if they fit); or schedule.type='1f1b'",
        ),
        (
            config("dict(type='zero_bubble', num_model_chunks=2)", more="activation_checkpoint = 1\n"),
            "PERF112 the last rank holds all activations of 2 micro-batches for W, recomputed or not;"
            " leave activation_checkpoint out (if they fit); or schedule.type='1f1b' with schedule.num_model_chunks=1",
        ),
        # bubbles, each with what would be better
        (
            config("'1f1b'", accumulation=8),
            "PERF104 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches;"
            " batch.accumulation=12: 20 % or schedule=dict(type='zero_bubble'): 11.1 %",
        ),
        (
            config("'interleaved'", accumulation=4),
            "PERF104 4 stages are idle 27.3 % of the step: (S-1) / (vm+S-1), v = 2 chunks, m = 4 micro-batches;"
            " batch.accumulation=8: 15.8 % or schedule=dict(type='zero_bubble'): 20 %",
        ),
        (
            config("'zero_bubble'", 8, 8),
            "PERF104 8 stages are idle 22.6 % of the step: (S-1) / (3m+S-1), m = 8 micro-batches;"
            " batch.accumulation=10: 18.9 %",
        ),
        (
            config("'zero_bubble'", accumulation=3),
            "PERF105 3 micro-batches for 4 stages: 1 or more are always idle; batch.accumulation=4: 20 %",
        ),
    ],
)
def test_a_finding_of_a_schedule(text: str, expected: str) -> None:
    assert said(text) == [expected]


@pytest.mark.usefixtures("all_run")
def test_ids_of_each_chunk_begin_at_0() -> None:
    for ids in ([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1]):
        text = config("'interleaved'", 2, cut=f"stage_ids={ids}")
        assert said(text) == []
        job = resolve(load_text(text, PATH), 8)
        assert job.stages.actual_ids == tuple(ids)


@pytest.mark.usefixtures("all_run")
@pytest.mark.parametrize(
    "schedule", ["'1f1b'", "'interleaved'", "'zero_bubble'", "dict(type='zero_bubble', num_chunks=2)"]
)
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (4, 4), (4, 8), (8, 8)])
def test_the_better_choices_about_a_bubble_have_no_finding(schedule: str, stages: int, count: int) -> None:
    """Or, where no schedule gets to 20 %, another one whose bubble is smaller."""
    deep = config(schedule, stages, count).replace("num_layers=8", "num_layers=64")
    for finding in findings(deep, ignored=("PERF106",)):
        assert finding.code == "PERF104"
        share, before = idle(finding.message), Linted(deep)
        promised = [float(each) for each in re.findall(r": ([\d.]+) %", finding.help)]
        followed = list(carry_out(finding, before))
        assert len(followed) == len(promised) >= 1
        for (_, after), less in zip(followed, promised, strict=True):
            left = after.findings(("PERF106",))
            assert less < share
            assert [each.code for each in left] == (["PERF104"] if less > 20 else [])
            assert all(idle(each.message) == less for each in left)


def idle(message: str) -> float:
    return float(re.findall(r"idle ([\d.]+) %", message)[0])
