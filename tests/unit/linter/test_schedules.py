"""Lint of schedules: invalid ones, and alternatives with a smaller bubble."""

from __future__ import annotations

import re

import pytest

from dslpar.layout.bubble import simulate_job
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.linter.check import load_text, resolve
from tests.support.helps import Linted, carry_out
from tests.support.lint import MODEL, PATH, codes, findings


def config(schedule: str, stages: int = 4, accumulation: int = 16, more: str = "", cut: str = "") -> str:
    pipeline = f"dict(size={stages}, {cut})" if cut else stages
    return (
        f"{MODEL}parallel = dict(pipeline={pipeline})\nschedule = {schedule}\n"
        f"batch = dict(accumulation={accumulation})\n{more}"
    )


def said(text: str, *ignored: str) -> list[str]:
    """Return code, message and hint of lint's findings, without the one on uneven stages of so few layers."""
    return [f"{each.code} {each.message}; {each.help}" for each in findings(text, ignored=("PERF106", *ignored))]


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # multiples of the ranks
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
            "PIP101 4 ranks with 3 stages each, but the model has 8 layers;"
            " num_model_chunks at most 2: each stage needs at least one layer",
        ),
        # partitions
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
        # several chunks of the type that has none
        (
            config("dict(type='1f1b', num_model_chunks=2)"),
            "PIP112 num_model_chunks is 2, but the schedule '1f1b' has one chunk per rank;"
            " schedule.type='interleaved' or 'zero_bubble', or num_model_chunks=1",
        ),
        # one chunk of the type that has several
        (
            config("dict(type='interleaved', num_chunks=1)"),
            "DEAD122 type='interleaved' has no effect: with num_chunks 1 the schedule is '1f1b';"
            " num_chunks=2; or schedule.type='1f1b'",
        ),
        # a backward that cannot be split
        (
            config("'zero_bubble'", more="train = dict(compile=True)\n"),
            "PIP116 'zero_bubble' splits the backward, but train.compile makes one graph of a layer's backward;"
            " train.compile_components=['loss'], or schedule.type='1f1b'",
        ),
        (
            config("dict(type='zero_bubble', num_model_chunks=2)", more="train = dict(compile=True)\n"),
            "PIP116 'zero_bubble' splits the backward, but train.compile makes one graph of a layer's backward;"
            " train.compile_components=['loss'], or schedule.type='interleaved'",
        ),
        # memory that waits for W
        (
            config("'zero_bubble'", more="activation_checkpoint = 1\n"),
            "PERF112 no memory is saved: the last rank still holds all activations of 4 deferred micro-batches;"
            " leave activation_checkpoint out (if all activations fit); or schedule.type='1f1b'",
        ),
        (
            config("dict(type='zero_bubble', num_model_chunks=2)", more="activation_checkpoint = 1\n"),
            "PERF112 no memory is saved: the last rank still holds all activations of 2 deferred micro-batches;"
            " leave activation_checkpoint out (if all activations fit); or schedule.type='interleaved'",
        ),
        # bubbles, each with a better alternative
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
            "PERF105 3 micro-batches for 4 stages: at least 1 stage is always idle; batch.accumulation=4: 20 %",
        ),
        # schedules that would have findings of their own are not suggested
        (
            config("'1f1b'", accumulation=8, more="activation_checkpoint = 1\n"),
            "PERF104 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches;"
            " batch.accumulation=12: 20 % or schedule=dict(type='interleaved', num_model_chunks=2): 15.8 %",
        ),
        (
            config("'1f1b'", accumulation=8, more="train = dict(compile=True)\n"),
            "PERF104 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches;"
            " batch.accumulation=12: 20 % or schedule=dict(type='interleaved', num_model_chunks=2): 15.8 %",
        ),
        (
            config("'1f1b'", accumulation=8, cut="counts=[2, 2, 2, 2]", more="activation_checkpoint = 1\n"),
            "PERF104 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches;"
            " batch.accumulation=12: 20 %",
        ),
        (
            config("'interleaved'", accumulation=4, cut="counts=[1, 1, 1, 1, 1, 1, 1, 1]"),
            "PERF104 4 stages are idle 27.3 % of the step: (S-1) / (vm+S-1), v = 2 chunks, m = 4 micro-batches;"
            " batch.accumulation=8: 15.8 % or schedule=dict(type='zero_bubble', num_model_chunks=2): 11.1 %",
        ),
    ],
)
def test_a_finding_of_a_schedule(text: str, expected: str) -> None:
    assert said(text) == [expected]


def test_ids_of_each_chunk_begin_at_0() -> None:
    for ids in ([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1]):
        text = config("'interleaved'", 2, cut=f"stage_ids={ids}")
        assert said(text) == []
        job = resolve(load_text(text, PATH), 8)
        assert job.stages.actual_ids == tuple(ids)


@pytest.mark.parametrize(
    "schedule", ["'1f1b'", "'interleaved'", "'zero_bubble'", "dict(type='zero_bubble', num_chunks=2)"]
)
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (4, 4), (4, 8), (8, 8)])
def test_the_better_choices_about_a_bubble_have_no_finding(schedule: str, stages: int, count: int) -> None:
    """Or, if no schedule gets to 20 %, another one with a smaller bubble is suggested."""
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


LISTED = """\
model = dict(type='Sequential', layers_cfg=[dict(type={!r}, in_features=8, out_features=8)] * 8)
parallel = dict(pipeline=4)
batch = dict(accumulation={})
schedule = dict(type='zero_bubble', num_model_chunks={})
"""


def test_beside_adapters_nothing_is_deferred() -> None:
    text = """
model = dict(type='transformers.LlamaForCausalLM', config=dict(num_hidden_layers=8), lora=dict(r=8))
data = dict(seq_len=128)
parallel = dict(pipeline=2)
batch = dict(accumulation=4)
schedule = dict(type='zero_bubble')
"""
    assert said(text) == [
        "PERF113 gradients of adapters are not deferred, and other weights are frozen: the run follows '1f1b';"
        " schedule.type='1f1b'"
    ]
    assert not resolve(load_text(text, PATH), 8).schedule.split


@pytest.mark.parametrize(("chunks", "instead"), [(1, "1f1b"), (2, "interleaved")])
def test_a_model_of_torch_layers_has_nothing_to_defer(chunks: int, instead: str) -> None:
    for name in ("Linear", "torch.nn.Linear"):
        assert said(LISTED.format(name, 16, chunks)) == [
            "PERF113 only dslpar.layers.Linear defers gradients, and all layers are from torch.nn:"
            f" the run follows {instead!r}; schedule.type={instead!r}; or choose layers of dslpar.layers"
        ]
    for name in ("dslpar.layers.Linear", "my_package.MyLayer"):
        assert "PERF113" not in codes(LISTED.format(name, 16, chunks))
    assert [resolve(load_text(LISTED.format(name, 16, 2), PATH), 8).schedule.split for name in ("Linear", "a.B")] == [
        False,
        True,
    ]


def test_a_rank_needs_a_stage_with_parameters() -> None:
    layers = "[dict(type='Linear', in_features=8, out_features=8), dict(type='ReLU')] * 2"
    text = (
        f"model = dict(type='Sequential', layers_cfg={layers})\n"
        "parallel = dict(pipeline=dict(size=2, counts=[1, 1, 1, 1]))\n"
        "schedule = 'interleaved'\nbatch = dict(accumulation=4)\n"
    )
    assert said(text) == ["PIP113 ranks without parameters: 1; choose fewer stages"]
    second = "dict(type='ReLU'), dict(type='ReLU'), dict(type='PReLU')]"  # stage 3, on rank 1 like stage 1
    assert said(text.replace("dict(type='ReLU')] * 2", second)) == []


def test_the_better_schedule_keeps_num_microbatches() -> None:
    """It is a key of the section that the hint rewrites."""
    text = f"{MODEL}parallel = dict(pipeline=4)\nschedule = dict(num_microbatches=4)\n"
    (finding,) = findings(text, ignored=("PERF106",))
    assert finding.help.endswith("or schedule=dict(type='zero_bubble', num_microbatches=4): 20 %")


def test_the_bubble_of_a_model_of_torch_layers_is_that_of_the_order_that_runs() -> None:
    bubble, _ = said(LISTED.format("Linear", 4, 1))
    assert bubble == (
        "PERF104 4 stages are idle 42.9 % of the step: (S-1) / (m+S-1), m = 4 micro-batches;"
        " batch.accumulation=12: 20 % or schedule=dict(type='interleaved', num_model_chunks=2): 27.3 %"
    )


@pytest.mark.parametrize("recompute", ["", "activation_checkpoint = 1\n"])
@pytest.mark.parametrize(
    "schedule", ["'1f1b'", "'interleaved'", "'zero_bubble'", "dict(type='zero_bubble', num_chunks=2)"]
)
@pytest.mark.parametrize(("stages", "count"), [(2, 2), (4, 4), (8, 8), (8, 16)])
def test_the_share_is_what_the_simulator_finds(schedule: str, stages: int, count: int, recompute: str) -> None:
    """The stages are even, since the head is negligible beside the layers."""
    text = config(schedule, stages, count, recompute).replace("num_layers=8", "num_layers=512")
    timeline = simulate_job(resolve(load_text(text, PATH), stages))
    assert timeline is not None
    share = 100 * timeline.bubble
    found = [each for each in findings(text, stages, ignored=("PERF106",)) if each.code == "PERF104"]
    assert len(found) == (share > 20.5) or share == pytest.approx(20, abs=0.5)
    for each in found:
        assert idle(each.message) == pytest.approx(share, abs=0.5)
