"""Jobs in miniature: divisibility holds, features that decide the maths stay, and every change is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslpar.layout.family_interface import conditions
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity.shrink import (
    SmallJob,
    at_full_size,
    one_process_job,
    shrink,
    shrink_both,
    with_axes,
    with_small_model,
)
from dslpar.parity.small_mesh import axes_of
from dslpar.schema.sections import OtherModel
from tests.support.drawn_layouts import draw
from tests.support.layout_factors import FAMILIES, PLAIN, job_of

DRAWN = 60


def job(**row: Any) -> Job:
    made = job_of(dict(PLAIN, **row))
    assert made is not None
    return made


def small(**row: Any) -> SmallJob:
    (made,) = shrink(job(**row), max_ranks=8, steps=3)
    return made


def test_all_that_must_divide_divides_in_drawn_layouts() -> None:
    """A build would refuse an indivisible size, one layout at a time."""
    for seed in range(DRAWN):
        row = draw(seed).row
        large = job_of(row)
        assert large is not None
        made_jobs = shrink(large, max_ranks=8, steps=3)
        assert made_jobs
        for each in made_jobs:
            made = each.job
            length = made.seq_len
            wrong = [
                c for c in conditions(made.spec.model, made.mesh.tensor, length, made.batch.micro_size) if not c.holds
            ]
            assert not wrong, f"seed {seed}: {wrong}"
            assert made.mesh.world_size <= 8
            if each.job.stages.counts is not None:
                assert min(each.job.stages.counts) >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_no_size_grows_and_each_change_is_named(family: str) -> None:
    large, made = job(family=family, data=2), small(family=family, data=2)
    named = {change.key for change in made.changes}
    before, after = large.spec.model, made.job.spec.model
    for name, value in vars(after).items():
        if isinstance(value, int) and not isinstance(value, bool) and value != getattr(before, name):
            assert f"model.{name}" in named
            assert value < getattr(before, name)
    for change in made.changes:
        assert change.before != change.after


def test_what_decides_the_maths_stays() -> None:
    row = {"family": "Llama's form", "pipe": 2, "mode": "1d 2 sequence", "schedule": "interleaved", "zero": 1}
    made = small(**row, recompute=2, tied=False, accumulation=4, clip=1.0, overlap=True, keep="both").job
    model: Any = made.spec.model
    assert (model.norm, model.activation, model.positions, model.bias) == ("rmsnorm", "swiglu", "rotary", False)
    assert model.num_heads > model.num_kv_heads > 1
    assert not model.tie_embeddings
    assert (made.chunks.num, made.spec.zero.stage, made.batch.accumulation) == (2, 1, 4)
    assert made.spec.activation_checkpoint is not None
    assert made.spec.activation_checkpoint.interval == 2
    assert (made.mesh.tensor.residual, made.mesh.tensor.keep, made.mesh.tensor.comm_overlap) == (
        "sequence",
        "both",
        True,
    )
    assert made.spec.train.clip_grad_norm == 1.0


@pytest.mark.parametrize(("factor", "small_factor"), [(2.0, 1.0), (0.5, 0.5), (None, None)])
def test_a_capacity_still_drops_tokens(factor: float | None, small_factor: float | None) -> None:
    """With few experts, a larger one would drop none."""
    experts = {"num": 64, "top_k": 8} | ({} if factor is None else {"capacity_factor": factor})
    sizes = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "vocab_size": 512, "max_seq_len": 128}
    checked = check.check(check.load({"model": {"type": "GPT", **sizes, "experts": experts}}), 2, forecasts=False)
    assert checked.job is not None
    (made,) = shrink(checked.job, max_ranks=8, steps=3)
    assert made.job.spec.model.capacity_factor == small_factor  # type: ignore[union-attr]


def test_groups_of_experts_and_latents_become_small() -> None:
    config = {"model": {"type": "transformers.DeepseekV3ForCausalLM", "config": {"num_hidden_layers": 12}}}
    checked = check.check(check.load(config), 2, forecasts=False)
    assert checked.job is not None
    (made,) = shrink(checked.job, max_ranks=8, steps=3)
    assert isinstance(made.job.spec.model, OtherModel)
    config = made.job.spec.model.args["config"]
    assert (config["n_group"], config["topk_group"], config["n_routed_experts"]) == (2, 1, 6)
    assert (config["q_lora_rank"], config["kv_lora_rank"], config["first_k_dense_replace"]) == (18, 14, 1)


def test_one_head_of_keys_stays_one() -> None:
    model: Any = small(family="one key head").job.spec.model
    assert model.num_kv_heads == 1


def test_layers_of_each_type_stay() -> None:
    """Gemma 2 has windows in every second layer."""
    config = small(family="Gemma 2", pipe=2).job.spec.model
    values = config.transformers.values  # type: ignore[union-attr]
    assert values["num_hidden_layers"] == 3
    assert "sliding_window" in values


def test_stages_by_hand_stay_uneven_in_the_same_direction() -> None:
    config = {
        "model": {
            "type": "GPT",
            "num_layers": 12,
            "hidden_size": 96,
            "num_heads": 8,
            "vocab_size": 256,
            "max_seq_len": 48,
        },
        "parallel": {"pipeline": {"size": 4, "counts": [1, 3, 4, 4]}},
        "batch": {"accumulation": 8},
    }
    (made,) = shrink(check.check(check.load(config), 4).job, max_ranks=2, steps=3)
    assert made.job.stages.counts == (1, 2)
    assert made.job.batch.accumulation == 4


@pytest.mark.parametrize(
    ("counts", "small_counts"), [([2, 4, 4, 2], (2, 1)), ([4, 3, 3, 2], (2, 1)), ([3, 3, 3, 3], (1, 1))]
)
def test_stages_by_hand_are_a_change_that_is_named(counts: list[int], small_counts: tuple[int, ...]) -> None:
    sizes = {"num_layers": 12, "hidden_size": 96, "num_heads": 8, "vocab_size": 256, "max_seq_len": 48}
    config = {"model": {"type": "GPT", **sizes}, "parallel": {"pipeline": {"size": 4, "counts": counts}}}
    (made,) = shrink(check.check(check.load(config), 4).job, max_ranks=2, steps=3)
    assert made.job.stages.counts == small_counts
    assert "parallel.pipeline.counts" in {change.key for change in made.changes}
    (kept,) = shrink(check.check(check.load(config), 4).job, max_ranks=4, steps=3, full=True)
    assert kept.job.stages.counts in (tuple(counts), None) or kept.not_proven


def test_dropout_is_off_everywhere_and_named() -> None:
    config = {
        "model": {
            "type": "transformers.LlamaForCausalLM",
            "config": {"hidden_size": 96, "num_attention_heads": 8, "num_hidden_layers": 4, "attention_dropout": 0.1},
            "lora": {"r": 2, "lora_dropout": 0.3},
        },
    }
    for full in (False, True):
        (made,) = shrink(check.check(check.load(config), 2).job, max_ranks=2, steps=3, full=full)
        named = {change.key for change in made.changes}
        assert {"model.config.attention_dropout", "model.lora.lora_dropout"} <= named
        model: Any = made.job.spec.model
        assert (model.lora.lora_dropout, model.args["config"]["attention_dropout"]) == (0.0, 0.0)


def test_another_run_is_no_resume() -> None:
    with pytest.raises(ValueError, match="model would be another run"):
        shrink_both(job(data=2), job(data=2, tied=False), max_ranks=4, steps=4)


def test_what_is_computed_otherwise_is_not_proven() -> None:
    large = job(family="GPT", data=2)
    spec = replace(large.spec, precision=replace(large.spec.precision, dtype="bf16"))
    (made,) = shrink(replace(large, spec=spec), max_ranks=8, steps=3)
    assert any("bf16" in each for each in made.not_proven)
    assert made.job.spec.precision.dtype == "fp32"
    assert any("data" in each for each in made.not_proven)


def half_precision(**row: Any) -> Job:
    large = job(**row)
    return replace(large, spec=replace(large.spec, precision=replace(large.spec.precision, dtype="bf16")))


def test_at_full_size_all_stays_but_dropout() -> None:
    large = half_precision(family="GPT", data=2, mode="2d 4")
    whole = at_full_size(large)
    assert whole.job == large
    assert whole.changes == ()
    wet = replace(large, spec=replace(large.spec, model=replace(large.spec.model, dropout=0.1)))
    dry = at_full_size(wet)
    assert [str(each) for each in dry.changes] == ["model.dropout: 0.1 -> 0.0"]
    assert (dry.job.spec.model, dry.job.mesh, dry.job.batch) == (large.spec.model, large.mesh, large.batch)


@pytest.mark.parametrize("family", ["GPT", "Llama", "ResMLP", "GPT-2"])
def test_a_small_model_in_the_job_s_own_world_keeps_layout_and_precision(family: str) -> None:
    large = half_precision(family=family, data=2, mode="1d 2", pipe=2, zero=1)
    made = with_small_model(large)
    assert made.job.mesh == large.mesh
    assert made.job.spec.precision == large.spec.precision
    assert made.job.spec.optimizer == large.spec.optimizer
    assert made.job.spec.train == large.spec.train
    assert any("hidden" in change.key or "width" in change.key or "n_embd" in change.key for change in made.changes)
    assert not any("bf16" in each for each in made.not_proven)
    found = conditions(made.job.spec.model, made.job.mesh.tensor, made.job.seq_len, made.job.batch.micro_size)
    assert all(condition.holds for condition in found)


def test_two_layouts_of_one_run_have_one_model_and_one_global_batch() -> None:
    one, other = shrink_both(job(mode="1d 3", data=2), job(mode="2d 4", pipe=3), max_ranks=12, steps=4)
    assert one.job.spec.model == other.job.spec.model
    assert one.job.batch.global_size == other.job.batch.global_size
    assert one.job.seq_len == other.job.seq_len
    for each in (one.job, other.job):
        found = conditions(each.spec.model, each.mesh.tensor, each.seq_len, each.batch.micro_size)
        assert all(condition.holds for condition in found)


def test_axes_can_be_taken_away_one_by_one() -> None:
    made = small(mode="2d 4", pipe=2, schedule="zero_bubble")
    without = with_axes(made.job, ["q"])
    assert axes_of(without.spec, without.mesh).sizes == {"pipe": 1, "data": 1, "q": 2}
    assert without.batch.global_size == made.job.batch.global_size
    assert without.spec.model == made.job.spec.model


def test_one_process_takes_the_layout_s_global_batch() -> None:
    made = small(mode="2d 4", data=2, zero=3).job
    one = one_process_job(made)
    assert one.mesh.world_size == 1
    assert one.batch.global_size == made.batch.global_size
    assert one.spec.zero.stage == 0
