"""Parameter and FLOP counts, equal in every layout; MFU relative to the device's peak."""

from __future__ import annotations

import dataclasses

import pytest

from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import costs, section
from dslpar.schema import sections
from dslpar.training.metrics import throughput
from tests.support.ranks import on_ranks


def _counts(job: Job) -> tuple[tuple[int, int, int], dict[str, float]]:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.training.metrics import device_name, num_parameters, throughput

    engine = build_engine(job, Groups(job.mesh))
    return num_parameters(engine), throughput(job, device_name(engine), tokens_per_s=1000.0)


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_and_flops_are_counted_once_in_every_layout(zero: int) -> None:
    model = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=30, max_seq_len=8)
    made = sections.Spec(model=model, zero=sections.Zero(stage=zero))
    (((whole, trained, held), one),) = on_ranks(1, _counts, resolve(made, 1), init="deepspeed")
    assert whole == trained == held == 30 * 16 + 8 * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16
    pipeline = sections.PipelineParallel(size=2) if zero == 1 else None
    tensor = sections.TensorParallel(size=2, mode="1d") if zero == 3 else None
    job = resolve(dataclasses.replace(made, parallel=sections.Parallel(pipeline=pipeline, tensor=tensor)), 2)
    for (everywhere, trained, here), each in on_ranks(2, _counts, job, init="deepspeed"):
        assert everywhere == trained == whole, "tied copies and vectors on both ranks are one"
        assert whole // 2 < here < whole
        assert each == {"tflops_per_s": pytest.approx(one["tflops_per_s"] / 2)}, "of each device; a CPU has no peak"
    assert one["tflops_per_s"] == pytest.approx(costs.flops_per_token(model, 8).mfu_causal * 1e-9)


@pytest.mark.parametrize(
    "parallel",
    [
        sections.Parallel(context=sections.ContextParallel(size=2), tensor=sections.TensorParallel(size=2, mode="1d")),
        sections.Parallel(tensor=sections.TensorParallel(size=2, mode="2.5d", depth=2)),
    ],
    ids=["context 2 beside 1d 2", "2.5d 2, data 2"],
)
def test_ranks_that_zero_shards_over_hold_the_same_parameters(parallel: sections.Parallel) -> None:
    model = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=30, max_seq_len=8)
    made = sections.Spec(
        model=model, zero=sections.Zero(stage=1), parallel=parallel, batch=sections.Batch(global_size=4)
    )
    for (everywhere, trained, _), _ in on_ranks(4, _counts, resolve(made, 4), init="deepspeed"):
        assert everywhere == trained == 30 * 16 + 8 * 16 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16


def test_mfu_is_the_share_of_the_device_s_peak() -> None:
    model = section.GPT(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_seq_len=1024)
    job = resolve(sections.Spec(model=model, precision=sections.Precision(dtype="bf16")), 8)
    found = throughput(job, "NVIDIA A100-SXM4-40GB", tokens_per_s=8 * 178_000)  # nanoGPT's order of magnitude
    assert found["mfu_6n"] == pytest.approx(6 * 123_532_032 * 178_000 / 312e12)
    assert found["mfu_causal"] == pytest.approx(found["tflops_per_s"] / 312)
    assert found["mfu_6n"] < found["mfu_causal"] < 0.5


def test_a_model_that_is_not_known_has_no_flops() -> None:
    made = sections.Spec(model=sections.OtherModel(target="torch.nn.Linear"), data=sections.TextData(seq_len=8))
    assert throughput(resolve(made, 1), "NVIDIA H200", 1000.0) == {}
