"""Resume policy: every key of the spec has a class, and each class behaves as documented."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dslpar
from dslpar.checkpoint import changes, check, manifest, manifest_format, resume_changes
from dslpar.checkpoint.folder import FORMAT, Checkpoint
from dslpar.checkpoint.resume_policy import FREE, REFUSED, REPORTED, resume_class
from dslpar.core.errors import DslparError
from dslpar.language import yaml_io
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections as schema_sections
from dslpar.schema.keys import declared
from tests.support.paths import ROOT

GPT = section.GPT(num_layers=4, hidden_size=8, num_heads=4, vocab_size=16, max_seq_len=4)


def job_of(world: int = 1, **sections: Any) -> Job:
    plain: dict[str, Any] = {"model": GPT, "batch": schema_sections.Batch(global_size=8)}
    return resolve(schema_sections.Spec(**plain | sections), world, "cfg.py")


def stored_of(job: Job, text: str = "text", **other: Any) -> Checkpoint:
    """Return a checkpoint as read back from disk."""
    return Checkpoint("out/step_000005", json.loads(json.dumps(manifest.manifest_of(job, text, 5) | other)))


def refusal(stored: Checkpoint, job: Job, text: str = "text") -> Any:
    with pytest.raises(DslparError) as raised:
        check(stored, job, text)
    (finding,) = raised.value.findings
    return finding


# ---- every key has a class ----


def leaves(section: type, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of all fields below, of every type that a section may have; open ones as `section.*`."""
    hints = typing.get_type_hints(section)
    for item in dataclasses.fields(section):
        below = [kind for kind in _kinds(hints[item.name]) if dataclasses.is_dataclass(kind)]
        if item.name in ("args", "extra") or hints[item.name] == schema_sections.Dict:
            yield f"{above or item.name + '.'}*"
        elif below and above + item.name != "gradient_handler":
            for kind in below:
                yield from leaves(kind, f"{above}{item.name}.")
        else:
            yield above + ("type" if item.name == "target" else item.name)


def _kinds(hint: Any) -> Iterator[type]:
    arguments = typing.get_args(hint)
    for kind in arguments or (hint,):
        yield from (
            _kinds(kind)
            if typing.get_args(kind)
            else (kind, *kind.__subclasses__())
            if isinstance(kind, type) and dataclasses.is_dataclass(kind)
            else ()
        )


def test_every_key_of_the_spec_is_in_exactly_one_class() -> None:
    classes: dict[str, set[str]] = {}
    for declared_key, _, _, facts in declared():
        classes.setdefault(declared_key, set()).update([facts.resume] if facts.resume is not None else [])
    assert [name for name, found in classes.items() if len(found) > 1] == [], "a key stands in two classes"
    for name in {*leaves(schema_sections.Spec), "model.type", "optimizer.type", "data.type"}:
        assert resume_class(name) in (FREE, REPORTED, REFUSED), "decide, where the key is declared: resume=..."


def test_the_walk_sees_a_new_key() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Longer(schema_sections.Train):
        fresh: int = 0

    assert "train.fresh" in set(leaves(Longer, "train."))
    with pytest.raises(KeyError):
        resume_class("train.fresh")


def test_each_key_that_is_no_default_comes_into_the_manifest() -> None:
    """A key that `config_of` does not write could change silently."""
    job = job_of(
        2,
        parallel=schema_sections.Parallel(tensor=schema_sections.TensorParallel(size=2, mode="1d")),
        optimizer=schema_sections.OtherOptimizer(target="RMSprop", lr=0.1, args={"alpha": 0.9}),
        precision=schema_sections.Precision(dtype="bf16", extra={"immediate_grad_update": True}),
        zero=schema_sections.Zero(stage=1, extra={"offload_optimizer": {"device": "cpu"}}),
        gradient_handler=(schema_sections.GradientHandler(target="my.Handler", args={"a": 1}),),
    )
    config = manifest.flatten(manifest.config_of(job))
    assert {key: config[key] for key in ("optimizer.type", "optimizer.lr", "optimizer.alpha", "zero.stage")} == {
        "optimizer.type": "RMSprop",
        "optimizer.lr": 0.1,
        "optimizer.alpha": 0.9,
        "zero.stage": 1,
    }
    assert config["precision.immediate_grad_update"] is True
    assert config["zero.offload_optimizer.device"] == "cpu"
    assert config["gradient_handler"] == [{"type": "my.Handler", "a": 1}]


# ---- the config in a manifest is a config ----

CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.py") if "common" not in path.parts)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_config_in_a_manifest_means_the_same(path: Path, tmp_path: Path) -> None:
    world = 16
    config = dslpar.load(path)
    if any(finding.severity == "error" for finding in dslpar.lint(config, world)):
        world = 8
    job = dslpar.resolve(config, world)
    written = json.loads(json.dumps(manifest.config_of(job)))
    (tmp_path / path.with_suffix(".yaml").name).write_text(yaml_io.dump_plain(written))
    again = dslpar.resolve(tmp_path / path.with_suffix(".yaml").name, world)
    assert manifest.config_of(again) == written
    (tmp_path / "short.yaml").write_text(yaml_io.dump_plain(resume_changes.without_defaults(written)))
    assert manifest.config_of(dslpar.resolve(tmp_path / "short.yaml", world)) == written
    assert (again.mesh, again.stages, again.batch, again.seq_len) == (job.mesh, job.stages, job.batch, job.seq_len)
    check(stored_of(job), again, "text")
    assert changes(stored_of(job), again) == []


# ---- free ----


def test_an_unchanged_config_goes_on() -> None:
    check(stored_of(job_of()), job_of(), "text")
    assert changes(stored_of(job_of()), job_of()) == []


TENSOR = schema_sections.TensorParallel(size=4, mode="2d")


@pytest.mark.parametrize(
    ("world", "sections", "words"),
    [
        (2, {}, "pipeline 1 * data 2 * tensor 1, ZeRO 0"),
        (4, {"parallel": schema_sections.Parallel(tensor=TENSOR)}, "pipeline 1 * data 1 * tensor 4 (2d), ZeRO 0"),
        (
            2,
            {"parallel": schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2, counts=(1, 3)))},
            "pipeline 2 * data 1 * tensor 1, ZeRO 0, layers 1+3",
        ),
        (
            2,
            {
                "parallel": schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2)),
                "schedule": schema_sections.PipelineSchedule(type="interleaved"),
                "batch": schema_sections.Batch(global_size=8, accumulation=2),
            },
            "pipeline 2 (2 stages each) * data 1 * tensor 1, ZeRO 0, layers 1+1+1+1",
        ),
        (2, {"zero": schema_sections.Zero(stage=3)}, "pipeline 1 * data 2 * tensor 1, ZeRO 3"),
        (
            4,
            {
                "parallel": schema_sections.Parallel(
                    pipeline=schema_sections.PipelineParallel(size=2), order=("data", "pipe", "tensor")
                )
            },
            "pipeline 2 * data 2 * tensor 1, ZeRO 0, layers 2+2, order data/pipe/tensor",
        ),
    ],
)
def test_another_layout_is_reported_in_one_line(world: int, sections: dict[str, Any], words: str) -> None:
    stored = stored_of(job_of())
    job = job_of(world, **sections)
    check(stored, job, "text")
    assert changes(stored, job) == [f"layout: pipeline 1 * data 1 * tensor 1, ZeRO 0 -> {words}"]
    assert not manifest.same_layout(stored, job)
    assert manifest.same_layout(stored_of(job), job)


def piped(kind: str, num_chunks: int) -> Job:
    parallel = schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))
    schedule = schema_sections.PipelineSchedule(type=kind, num_model_chunks=num_chunks)
    batch = schema_sections.Batch(global_size=8, accumulation=2)
    return job_of(2, parallel=parallel, schedule=schedule, batch=batch)


def test_the_order_of_a_schedule_is_no_part_of_the_layout_and_its_chunks_are() -> None:
    for num_chunks in (1, 2):
        saved = stored_of(piped("zero_bubble", num_chunks))
        other = piped("1f1b" if num_chunks == 1 else "interleaved", num_chunks)
        assert changes(saved, other) == []
        assert manifest.same_layout(saved, other)
        assert not manifest.same_layout(saved, piped("zero_bubble", 3 - num_chunks))


def test_a_checkpoint_of_before_there_were_chunks_has_one() -> None:
    saved = stored_of(piped("1f1b", 1))
    del saved.manifest["layout"]["num_chunks"]
    manifest_format.check(saved.manifest | {"files": {}})
    assert manifest.same_layout(saved, piped("1f1b", 1))
    assert not manifest.same_layout(saved, piped("zero_bubble", 2))
    assert changes(saved, piped("1f1b", 1)) == []


def test_a_checkpoint_of_before_a_cuboid_had_some_field_has_its_default() -> None:
    job = job_of(
        2,
        parallel=schema_sections.Parallel(context=schema_sections.ContextParallel(size=2)),
        zero=schema_sections.Zero(stage=1),
    )
    saved = stored_of(job)
    assert job.mesh.tensor.zero_over_d
    assert "zero_over_d" not in saved.manifest["layout"]["tensor"]
    del saved.manifest["layout"]["tensor"]["ulysses_size"]
    assert manifest.same_layout(saved, job)
    del saved.manifest["layout"]["tensor"]["zigzag"]
    assert not manifest.same_layout(saved, job), "its ranks store two pieces of a sequence, those of before stored one"


@pytest.mark.parametrize("num_chunks", [0, 3, 1.5, None, "2"])
def test_counts_are_of_all_stages(num_chunks: Any) -> None:
    saved = stored_of(piped("interleaved", 2)).manifest | {"files": {}}
    manifest_format.check(saved)
    with pytest.raises(ValueError, match=r"layout\.(num_chunks|counts)"):
        manifest_format.check(saved | {"layout": saved["layout"] | {"num_chunks": num_chunks}})


def test_other_versions_are_reported() -> None:
    stored = stored_of(job_of())
    now = stored.manifest["versions"]
    older = stored._replace(manifest={**stored.manifest, "versions": now | {"torch": "2.0.1"}})
    check(older, job_of(), "text")
    assert changes(older, job_of()) == [f"version of torch: 2.0.1 -> {now['torch']}"]


def test_two_ways_of_writing_are_one() -> None:
    dist = schema_sections.Dist(pipeline_parallel_size=2, tensor_parallel_size=2, custom_pipeline_stage_id=(0, 0, 1, 1))
    pipeline = schema_sections.PipelineParallel(size=2, stage_ids=(0, 0, 1, 1))
    tensor = schema_sections.TensorParallel(size=2, mode="1d")
    one = job_of(4, train=schema_sections.Train(dist=dist))
    other = job_of(4, parallel=schema_sections.Parallel(pipeline=pipeline, tensor=tensor))
    check(stored_of(one), other, "text")
    assert changes(stored_of(one), other) == []
    assert manifest.same_layout(stored_of(one), other)


def test_speed_and_output_change_without_a_word() -> None:
    job = job_of(
        batch=schema_sections.Batch(global_size=8, micro_size=2, accumulation=4),
        activation_checkpoint=schema_sections.ActivationCheckpoint(interval=2),
        train=schema_sections.Train(log_interval=7, output_dir="elsewhere", save_interval=3, eval_interval=2),
        checkpoint=schema_sections.Checkpoint(keep=2),
        monitor=schema_sections.Monitor(csv=schema_sections.FileMonitor()),
    )
    check(stored_of(job_of()), job, "text")
    assert changes(stored_of(job_of()), job) == []


# ---- reported ----


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"optimizer": schema_sections.AdamW(lr=1e-4)}, "optimizer.lr: 0.0003 -> 0.0001, from step 6 on"),
        (
            {"optimizer": schema_sections.AdamW(betas=(0.9, 0.95))},
            "optimizer.betas: [0.9, 0.999] -> [0.9, 0.95], from step 6 on",
        ),
        (
            {"lr_scheduler": schema_sections.LRScheduler(type="cosine")},
            "lr_scheduler.type: constant -> cosine, from step 6 on\nlr at step 6: 0.0003 -> 0.000298116",
        ),
        ({"train": schema_sections.Train(steps=200)}, "train.steps: 100 -> 200, from step 6 on"),
        ({"train": schema_sections.Train(clip_grad_norm=1.0)}, "train.clip_grad_norm: nothing -> 1.0, from step 6 on"),
        ({"model": dataclasses.replace(GPT, dropout=0.1)}, "model.dropout: 0.0 -> 0.1, from step 6 on"),
        ({"deepspeed": {"prescale_gradients": True}}, "deepspeed.prescale_gradients: nothing -> True, from step 6 on"),
    ],
)
def test_what_takes_effect_is_reported_with_both_values(sections: dict[str, Any], line: str) -> None:
    stored, job = stored_of(job_of()), job_of(**sections)
    check(stored, job, "text")
    assert changes(stored, job) == line.splitlines()


def test_numbers_of_an_optimizer_may_change_and_its_states_may_not() -> None:
    stored = stored_of(job_of(optimizer=schema_sections.SGD(momentum=0.9)))
    job = job_of(optimizer=schema_sections.SGD(momentum=0.8))
    check(stored, job, "text")
    assert changes(stored, job) == ["optimizer.momentum: 0.9 -> 0.8, from step 6 on"]
    finding = refusal(stored, job_of(optimizer=schema_sections.SGD()))
    assert "optimizer.momentum: saved 0.9, requested 0.0" in finding.lines()


def test_a_key_that_an_earlier_dslpar_did_not_have_is_no_change() -> None:
    stored = stored_of(job_of())
    del stored.manifest["config"]["model"]["rope_theta"]
    check(stored, job_of(), "text")
    finding = refusal(stored, job_of(model=dataclasses.replace(GPT, rope_theta=5.0)))
    assert "model.rope_theta: saved 10000.0, requested 5.0" in finding.lines()


# ---- refused ----


@pytest.mark.parametrize(
    ("sections", "key", "written"),
    [
        ({"model": dataclasses.replace(GPT, hidden_size=16)}, "model.hidden_size", "model.hidden_size=8"),
        (
            {"model": dataclasses.replace(GPT, tie_embeddings=False)},
            "model.tie_embeddings",
            "model.tie_embeddings=True",
        ),
        (
            {"model": schema_sections.OtherModel(target="my.Net"), "data": schema_sections.TextData(seq_len=4)},
            "model.type",
            "model.type=GPT",
        ),
        ({"optimizer": schema_sections.Adam(weight_decay=0.01)}, "optimizer.type", "optimizer.type=AdamW"),
        ({"optimizer": schema_sections.AdamW(amsgrad=True)}, "optimizer.amsgrad", "optimizer.amsgrad=False"),
        ({"batch": schema_sections.Batch(global_size=16)}, "batch.global_size", "batch.global_size=8"),
        ({"train": schema_sections.Train(seed=7)}, "train.seed", "train.seed=1234"),
        ({"data": schema_sections.TextData(seq_len=2)}, "data.seq_len", "data.seq_len=4"),
        (
            {"lr_scheduler": schema_sections.OtherLRScheduler(target="StepLR", args={})},
            "lr_scheduler.type",
            "lr_scheduler.type=constant",
        ),
    ],
)
def test_another_run_is_refused_with_what_to_write(sections: dict[str, Any], key: str, written: str) -> None:
    finding = refusal(stored_of(job_of()), job_of(**sections))
    assert (finding.code, finding.key) == ("CKP202", key)
    assert f"{key}: saved " in finding.lines()
    assert written in finding.help


def test_all_differences_are_listed_at_once() -> None:
    other = job_of(model=dataclasses.replace(GPT, hidden_size=16, num_layers=2), train=schema_sections.Train(seed=1))
    finding = refusal(stored_of(job_of()), other, text="other")
    for key in ("model.hidden_size", "model.num_layers", "train.seed", "data.text"):
        assert f"{key}: saved " in finding.lines()
    assert "the original data" in finding.help


def test_a_schedule_that_moves_the_optimizer_s_values_fixes_them() -> None:
    schedule = schema_sections.OtherLRScheduler(target="StepLR", args={"step_size": 3})
    stored = stored_of(job_of(lr_scheduler=schedule))
    check(stored, job_of(lr_scheduler=schedule), "text")
    finding = refusal(stored, job_of(lr_scheduler=schedule, optimizer=schema_sections.AdamW(lr=1e-4)))
    assert "optimizer.lr: saved 0.0003, requested 0.0001" in finding.lines()
    finding = refusal(
        stored, job_of(lr_scheduler=schema_sections.OtherLRScheduler(target="StepLR", args={"step_size": 4}))
    )
    assert "lr_scheduler.step_size: saved 3, requested 4" in finding.lines()


@pytest.mark.parametrize(
    ("format_", "code"), [(FORMAT - 1, "CKP220"), (FORMAT + 1, "CKP204")], ids=["earlier", "later"]
)
def test_another_format_is_refused_before_anything_is_compared(format_: int, code: str) -> None:
    stored = Checkpoint("out/step_000005", {"format": format_, "step": 5})
    assert refusal(stored, job_of()).code == code
