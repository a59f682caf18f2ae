"""PERF: messages have the numbers of forecast and layout, and suggested layouts have no finding."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dslpar.layout.chunks import Chunks
from dslpar.layout.stages import EvenWeights, balanced, imbalance
from dslpar.models.gpt.layout import pipeline_weights
from dslpar.models.gpt.section import GPT
from tests.support.lint import MODEL, findings

WIDE = MODEL.replace("hidden_size=96", "hidden_size=192")


def told(tensor: str, micro_size: int, world: int = 8) -> list[str]:
    """Return messages and hints of PERF103."""
    text = f"{WIDE}parallel = dict(tensor=dict({tensor}))\nbatch = dict(micro_size={micro_size})\n"
    found = findings(text, world, ignored=())
    assert {finding.code for finding in found} <= {"PERF103"}
    return [f"{finding.message}; {finding.help}" for finding in found]


@pytest.mark.parametrize(
    ("tensor", "least"), [("size=4, mode='2d'", 2), ("size=8, mode='2.5d', depth=2", 4), ("size=4, mode='sequence'", 1)]
)
def test_the_suggested_micro_size_is_the_smallest(tensor: str, least: int) -> None:
    (line,) = told(tensor, least)
    offered = int(re.findall(r"micro_size at least (\d+)", line)[0])
    assert offered > least
    assert told(tensor, offered) == []
    assert len(told(tensor, offered - least)) == 1


def test_1d_is_suggested_only_where_it_is_legal() -> None:
    (line,) = told("size=4, mode='2d'", 2)
    assert line.endswith("batch.micro_size at least 6 or mode='1d'")
    assert "for a micro-batch of 192 tokens" in line
    (line,) = told("size=16, mode='sequence'", 1, world=16)  # 24 heads
    assert re.search("; batch.micro_size at least [0-9]+$", line)


def test_1d_has_no_finding() -> None:
    assert told("size=4, mode='1d'", 1) == told("size=4, mode='1d', sequence=True", 1) == []
    assert told("size=4, mode='cuboid', shape=(1, 4, 1), residual='sequence'", 1) == []


def test_an_illegal_layout_has_no_perf_finding() -> None:
    text = f"{WIDE}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=3)\n"
    assert {finding.code for finding in findings(text, 8, ignored=())} == {"BAT102"}


# Waiting stages ---------------------------------------------------------------------------------------------------


def of_pipelines(text: str, world: int | None = 8) -> list[str]:
    """Return code, message and hint of PERF104 and later ones."""
    found = findings(text, world, ignored=("CFG112", "PERF103"))
    return [f"{finding.code}: {finding.message}; {finding.help}" for finding in found]


def piped(stages: int, **batch: int | None) -> str:
    sizes = ", ".join(f"{key}={size}" for key, size in batch.items() if size)
    return f"{MODEL}parallel = dict(pipeline={stages})\nbatch = dict({sizes})\n"


@pytest.mark.parametrize(
    ("stages", "batch", "expected"),
    [
        (2, {"accumulation": 4}, []),
        (2, {"accumulation": 3}, ["PERF104: 2 stages are idle 25 % of the step"]),
        (4, {"accumulation": 11}, ["PERF104: 4 stages are idle 21.4 % of the step"]),
        (4, {"accumulation": 12}, []),
        (4, {"accumulation": 4}, ["PERF104: 4 stages are idle 42.9 % of the step"]),
        (
            4,
            {"accumulation": 3},
            ["PERF105: 3 micro-batches for 4 stages: at least 1 stage is always idle (idle share: 50 %)"],
        ),
        (
            8,
            {},
            ["PERF105: 1 micro-batch for 8 stages: at least 7 stages are always idle (idle share: 87.5 %)"],
        ),
        (1, {"accumulation": 1}, []),
    ],
)
@pytest.mark.parametrize("world", [8, None])
def test_a_bubble_has_one_finding(stages: int, batch: dict[str, int], expected: list[str], world: int | None) -> None:
    found = [line for line in of_pipelines(piped(stages, **batch), world) if not line.startswith("PERF106")]
    assert len(found) == len(expected)
    assert all(line.startswith(words) for line, words in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("batch", "hint"),
    [
        ({"accumulation": 2}, "batch.accumulation=12: 20 %"),
        ({"global_size": 48}, "batch.accumulation=12"),
        ({"global_size": 48, "micro_size": 6}, "batch.micro_size=2"),
        ({"global_size": 48, "accumulation": 4}, "batch.accumulation=12"),
        ({"global_size": 48, "accumulation": 4, "micro_size": 6}, "batch.micro_size=2 with batch.accumulation=12"),
        ({"global_size": 8}, "batch.global_size=24 with batch.accumulation=12"),
        ({"global_size": 8, "micro_size": 4}, "batch.global_size=96"),
    ],
)
def test_hint_about_a_bubble_keeps_the_samples_of_a_step(batch: dict[str, int], hint: str) -> None:
    (line,) = of_pipelines(piped(4, **batch))
    assert line.partition("; ")[2].partition(" or schedule=")[0] == hint


@given(
    st.sampled_from([2, 4, 8]),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 6),
    st.sampled_from(["", "tensor=dict(size=4, mode='2d')"]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_hint_about_a_bubble_has_no_finding(
    stages: int, samples: int | None, micro: int | None, accumulation: int | None, tensor: str
) -> None:
    batch = {"global_size": samples and samples * 8, "micro_size": micro, "accumulation": accumulation}
    world = stages * (8 if tensor else 2)

    def text(batch: dict[str, int | None]) -> str:
        return piped(stages, **batch).replace("dict(pipeline=", f"dict({tensor}{', ' * bool(tensor)}pipeline=")

    told_ = [line for line in of_pipelines(text(batch), world) if line[:7] != "PERF106"]
    assume(len(told_) == 1 and told_[0][:7] in ("PERF104", "PERF105"))
    changes = {key: int(size) for key, size in re.findall(r"batch\.(\w+)=(\d+)", told_[0].rpartition("; ")[2])}
    assert changes
    assert [line for line in of_pipelines(text(batch | changes), world) if line[:7] != "PERF106"] == []


def test_num_microbatches_is_named_if_it_is_given() -> None:
    text = f"{MODEL}parallel = dict(pipeline=2)\nschedule = dict(num_microbatches=2)\n"
    (line,) = of_pipelines(text)
    assert line.partition("; ")[2].partition(" or schedule=")[0] == "schedule.num_microbatches=4: 20 %"


@pytest.mark.parametrize("layout", ["parallel = dict(pipeline=3)", "parallel = dict(pipeline=16)"])
def test_an_illegal_pipeline_has_no_perf_finding(layout: str) -> None:
    assert [line[:3] for line in of_pipelines(f"{MODEL}{layout}\n", 8)] in (["PAR"], ["PIP", "PAR"], ["PAR", "PIP"])


BUSY = "batch = dict(accumulation=64)\n"


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        ("4", None),
        ("dict(size=2, counts=[4, 4])", None),
        (
            "dict(size=2, counts=[5, 3])",
            "stage 0 computes 21.9 % more than the mean: stages compute as much as 5, 3.2 layers",
        ),
        ("dict(size=2, stage_ids=[0, 1, 1, 1, 1, 1, 1, 1])", "stage 1 computes 75.6 % more than the mean"),
        ("dict(size=2, counts=[1, 7], method=None)", "stage 1 computes 75.6 % more than the mean"),
        ("dict(size=2, method='parameters')", None),
        ("dict(size=4, method='type:Block')", None),
    ],
)
def test_uneven_stages_get_a_more_even_partition(pipeline: str, expected: str | None) -> None:
    lines = of_pipelines(f"{MODEL}parallel = dict(pipeline={pipeline})\n{BUSY}")
    assert len(lines) == (expected is not None)
    if expected:
        assert lines[0].startswith(f"PERF106: {expected}")
        assert "counts=[4, 4]" in lines[0]
        assert of_pipelines(f"{MODEL}parallel = dict(pipeline=dict(size=2, counts=[4, 4]))\n{BUSY}") == []


def test_layers_without_tokens_have_no_load_to_compare() -> None:
    model = "model = dict(type='ResMLP', image_size=1, patch_size=4, num_layers=8, hidden_size=64, num_classes=10)\n"
    found = findings(f"{model}parallel = dict(pipeline=4)\n", 8)
    assert [finding.code for finding in found if finding.severity == "error"] == ["TEN141"]
    assert "PERF106" not in [finding.code for finding in found]


def test_libai_s_form_gets_libai_s_keys() -> None:
    (line,) = of_pipelines(
        f"{MODEL}train = dict(dist=dict(pipeline_parallel_size=8))\n{BUSY}".replace("=8,", "=24,", 1)
    )
    cut = re.search(r"custom_pipeline_stage_id=([^:]*)", line)
    assert cut
    text = f"train = dict(dist=dict(pipeline_parallel_size=8, custom_pipeline_stage_id={cut[1]}))\n"
    assert of_pipelines(MODEL.replace("num_layers=8", "num_layers=24") + text + BUSY) == []


def test_fewer_stages_are_suggested_where_no_partition_is_even() -> None:
    model = MODEL.replace("num_layers=8", "num_layers=12").replace("vocab_size=256", "vocab_size=4096")
    (line,) = of_pipelines(f"{model}parallel = dict(pipeline=8)\n{BUSY}")
    stages = re.search(r"choose (\d) stages: [\d.]+ %; no partition of 12 layers is more even", line)
    assert stages, line
    assert of_pipelines(f"{model}parallel = dict(pipeline={stages[1]})\n{BUSY}") == []


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 5000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_no_partition_is_more_even_than_the_suggested_one(stages: int, more: int, vocab_size: int) -> None:
    layers = stages + more
    model = GPT(num_layers=layers, hidden_size=8, num_heads=1, vocab_size=vocab_size, max_seq_len=8)
    weights = pipeline_weights(model, "cost", 8)
    loads = weights.loads(balanced(weights, layers, Chunks(stages)))
    best = imbalance(loads)
    assert sum(loads) == sum(weights.loads((layers,)))
    for other in (EvenWeights(0, 1, 0), EvenWeights(1, 1, 2)):
        assert best <= imbalance(weights.loads(balanced(other, layers, Chunks(stages)))) + 1e-12


# Wasted traffic and computation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "share"), [(256, None), (257, "10.8 %"), (272, "5.6 %"), (274, None), (50257, None), (300, "6.2 %")]
)
def test_padding_is_reported_above_five_percent(vocab_size: int, share: str | None) -> None:
    model = MODEL.replace("num_heads=24", "num_heads=32").replace("vocab_size=256", f"vocab_size={vocab_size}")
    lines = of_pipelines(f"{model}parallel = dict(tensor=dict(size=32, mode='1d'))\n", 32)
    assert [share is not None and share in line for line in lines] == [True] * (share is not None)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (
            "dict(stage=1, use_multi_rank_bucket_allreduce=True)",
            "PERF108: 2.62 elements per parameter are sent per step",
        ),
        (
            "dict(stage=2, use_multi_rank_bucket_allreduce=True)",
            "PERF108: 2.62 elements per parameter are sent per step",
        ),
        ("dict(stage=2, use_multi_rank_bucket_allreduce=False)", None),
        ("2", None),
    ],
)
def test_traffic_of_zero_is_what_tests_count(zero: str, expected: str | None) -> None:
    """tests/distributed/engine/test_zero_traffic.py counts (m + 1) (N-1)/N, and 3 (N-1)/N with all-reduces."""
    lines = of_pipelines(f"{MODEL}zero = {zero}\n")
    assert [line[: len(expected or "")] for line in lines] == [expected] * (expected is not None)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (
            "dict(stage=1, overlap_comm=True, offload_optimizer='cpu')",
            "PERF111: DeepSpeed waits for the GPU before each reduction: up to 8 times per",
        ),
        (
            "dict(stage=2, overlap_comm=True, contiguous_gradients=False)",
            "PERF111: DeepSpeed waits for the GPU before each reduction: once per bucket",
        ),
        ("dict(stage=2, overlap_comm=True, reduce_scatter=False)", None),
        ("dict(stage=2, overlap_comm=True)", "DEAD116: overlap_comm=True has no effect at ZeRO stage 2: dslpar"),
        ("dict(stage=2, overlap_comm=False)", None),
        ("dict(stage=3, overlap_comm=True)", None),
    ],
)
def test_an_overlap_that_waits_for_the_device(zero: str, expected: str | None) -> None:
    lines = of_pipelines(f"{MODEL}zero = {zero}\n")
    assert [line[: len(expected or "")] for line in lines] == [expected] * (expected is not None)


def test_accumulation_with_zero_2_is_an_info() -> None:
    (found,) = findings(f"{MODEL}zero = 2\nbatch = dict(accumulation=4)\n", ignored=())
    assert (found.code, found.severity) == ("PERF109", "info")
    assert "ZeRO 2 sends 4.38 elements per parameter, step and rank with 4 micro-batches, ZeRO 1 1.75" in found.message
    assert findings(f"{MODEL}zero = 2\nbatch = dict(accumulation=4)\n", 1, ignored=()) == []


@pytest.mark.parametrize(
    ("hosts", "size", "expected"),
    [
        ("a slots=6\nb slots=6\n", 4, "ranks 4 to 7 are on a to b"),
        ("a slots=4\nb slots=4\n", 8, "ranks 0 to 7 are on a to b"),
        ("a slots=2\nb slots=2\nc slots=2\nd slots=2\n", 8, "ranks 0 to 7 are on a to d"),
        ("a slots=8\nb slots=8\n", 4, None),
        ("a slots=6\nb slots=6\n", 3, None),
        ("a slots=12\n", 4, None),
    ],
)
@pytest.mark.parametrize("mode", ["1d", "sequence"])
def test_the_ranks_that_cross_are_named(hosts: str, size: int, expected: str | None, mode: str) -> None:
    text = f"{MODEL}parallel = dict(tensor=dict(size={size}, mode={mode!r}))\n"
    found = [finding.message for finding in findings(text, None, hostfile=hosts) if finding.code == "PERF101"]
    assert len(found) == (expected is not None)
    assert not expected or found[0].endswith(expected)


def test_hint_about_padding_names_sizes_without_padding() -> None:
    model = MODEL.replace("num_heads=24", "num_heads=32").replace("vocab_size=256", "vocab_size={}")
    tensor = "parallel = dict(tensor=dict(size=32, mode='1d'))\n"
    (line,) = of_pipelines(model.format(300) + tensor, 32)
    assert line.endswith("; 288 or 320: multiples of 32; or choose a tensor size that divides 300")
    assert of_pipelines(model.format(288) + tensor, 32) == of_pipelines(model.format(320) + tensor, 32) == []


def test_an_illegal_batch_has_no_perf_finding() -> None:
    text = f"{MODEL}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(global_size=2, accumulation=4)\n"
    assert [found.code for found in findings(text, 16)] == ["BAT101"]
