"""Loads of experts: the same in every layout, and a warning about a router that collapses."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dslpar.layout.resolve import Job
from dslpar.models.gpt.section import GPT
from dslpar.reporting.expert_loads import LayerLoad
from dslpar.schema import sections
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

CONFIG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 16,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "sent over replicas": (4, {"expert": sections.ExpertParallel(size=4)}),
    "gathered in tensor groups, on two stages": (
        4,
        {
            "tensor": sections.TensorParallel(size=2, mode="1d"),
            "pipeline": sections.PipelineParallel(size=2),
        },
    ),
}


def made(world: int, parallel: dict[str, Any], **config: Any) -> Job:
    model = sections.OtherModel(target="transformers.MixtralForCausalLM", args={"config": CONFIG | config})
    micro = 8 if world == 1 else 2
    data = world if "expert" in parallel else 1
    return job(
        world,
        model,
        sections.Batch(micro_size=micro, accumulation=8 // (micro * data)),
        parallel=sections.Parallel(**parallel),
        data=sections.TextData(seq_len=8),
        activation_checkpoint=sections.ActivationCheckpoint(interval=1),
    )


def _measured(of: Job) -> list[list[LayerLoad]]:
    """Return the loads of a step, and of an evaluation after it."""
    from dslpar.training.expert_loads import ExpertLoads

    engine = engine_of(of)
    loads = ExpertLoads(engine)
    engine.train_batch(iter(batches(of, engine.groups.coord["data"])))
    found = [loads.measure()]
    engine.eval_batch(iter(batches(of, engine.groups.coord["data"])))
    return [*found, loads.measure()]


def test_loads_are_those_of_one_process_in_every_layout() -> None:
    found = {
        name: on_ranks(world, _measured, made(world, how), init="deepspeed") for name, (world, how) in LAYOUTS.items()
    }
    ((expected, after_evaluation),) = found.pop("one process")
    assert [each.layer for each in expected] == ["model.layers.0", "model.layers.1"]
    assert [each.top_k for each in expected] == [2, 2]
    assert all(len(each.shares) == 6 for each in expected)
    assert expected[0].shares != expected[1].shares
    assert after_evaluation == []
    for name, of_ranks in found.items():
        assert [each for each, _ in of_ranks] == [expected] * len(of_ranks), name


def of_gpt(world: int, parallel: dict[str, Any]) -> Job:
    sizes: dict[str, Any] = dict(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, max_seq_len=8)
    model = GPT(**sizes, experts=sections.Experts(num=6, capacity_factor=1.0))
    return job(
        world,
        model,
        sections.Batch(micro_size=8 if world == 1 else 4, accumulation=1),
        parallel=sections.Parallel(**parallel),
        data=sections.TextData(seq_len=8),
    )


def test_dropped_choices_are_those_of_one_process() -> None:
    ((expected, _),) = on_ranks(1, _measured, of_gpt(1, {}), init="deepspeed")
    assert all(each.dropped is not None and 0.05 < each.dropped < 0.5 for each in expected)
    parallel = {"expert": sections.ExpertParallel(size=4), "tensor": sections.TensorParallel(size=2, mode="1d")}
    for found, _ in on_ranks(4, _measured, of_gpt(4, parallel), init="deepspeed"):
        assert found == expected


def _warnings(of: Job, loads: list[list[LayerLoad]]) -> list[str]:
    """Return the texts of the warnings about these measurements."""
    from dslpar.training.expert_loads import ExpertLoads

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dslpar")
    log.addHandler(handler)
    try:
        measured = ExpertLoads(engine_of(of))
        for each in loads:
            measured.warn_of_collapse(each)
    finally:
        log.removeHandler(handler)
    return texts


def test_a_router_that_collapses_is_reported_once_with_the_key_that_helps() -> None:
    even, few = (1 / 6,) * 6, (0.5, 0.4, 0.1, 0.0, 0.0, 0.0)
    names = ("model.layers.0", "model.layers.1")
    collapsed = [LayerLoad(names[0], 2, even), LayerLoad(names[1], 2, few)]
    recovered = [LayerLoad(name, 2, even) for name in names]
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.001}
    for config, hint in (({}, "output_router_logits=True"), (balanced, "router_aux_loss_coef, now 0.001")):
        of = made(1, {}, **config)
        ((text,),) = on_ranks(
            1, _warnings, of, [collapsed, recovered, collapsed, collapsed, collapsed], init="deepspeed"
        )
        assert text.startswith("the router of model.layers.1 has collapsed: 6 experts get the tokens of 2.6 even ones")
        assert hint in text
