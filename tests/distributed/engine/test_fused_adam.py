"""Fused Adam and AdamW: the same steps as torch's other implementations, on any shards and after any resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dslpar.layout import deepspeed_config
from dslpar.layout.inferred_value import InferredValue
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import job_of, run
from tests.support.sampling import sampled

PIPE = sections.Parallel(pipeline=sections.PipelineParallel(size=2))
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 0": (1, {"zero": sections.Zero(stage=0)}),
    "data 2, ZeRO 1": (2, {"zero": sections.Zero(stage=1)}),
    "data 2, ZeRO 2, bf16": (2, {"zero": sections.Zero(stage=2), "precision": sections.Precision(dtype="bf16")}),
    "data 2, ZeRO 2, offload": (2, {"zero": sections.Zero(stage=2, extra=OFFLOAD)}),
    "data 2, ZeRO 3": (2, {"zero": sections.Zero(stage=3)}),
    "data 2, ZeRO 3, offload": (2, {"zero": sections.Zero(stage=3, extra=OFFLOAD)}),
    "pipe 2, ZeRO 1": (2, {"zero": sections.Zero(stage=1), "parallel": PIPE}),
}
OPTIMIZERS: dict[str, sections.AdamW | sections.Adam] = {
    "AdamW": sections.AdamW(lr=1e-2, weight_decay=0.1),
    "Adam": sections.Adam(lr=1e-2, weight_decay=0.1),
    "AdamW, amsgrad": sections.AdamW(lr=1e-2, amsgrad=True),
}


def _unfuse() -> None:
    """Disable the fused step in this rank from here on."""
    deepspeed_config.CHOICES = {  # type: ignore[misc]
        **deepspeed_config.CHOICES,
        "optimizer.params.fused": InferredValue(None, "torch's default"),
    }


def _steps(made: Job, fused: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses of three steps, and for each state its groups' flags and its counter's place."""
    if not fused:
        _unfuse()
    engine = engine_of(made)
    losses = [engine.train_batch(batches(made, engine.groups.coord["data"], step)) for step in range(3)]
    optimizer = engine.deepspeed.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    fused = {group["fused"] for group in optimizer.param_groups}
    rows = [
        {"fused": fused, "device": state["step"].device == p.device, "step": state["step"].item()}
        for p, state in optimizer.state.items()
    ]
    return losses, rows


@pytest.mark.parametrize("where", sampled(WHERE, {"data 2, ZeRO 1", "data 2, ZeRO 3, offload"}))
@pytest.mark.parametrize("name", sampled(OPTIMIZERS, {"AdamW"}))
def test_every_stage_takes_the_fused_step_and_it_is_the_same(name: str, where: str) -> None:
    """The kernel rounds in another order: 1e-7 per step, which Adam's division by a tiny gradient's size enlarges."""
    world, keys = WHERE[where]
    made = job(world, optimizer=OPTIMIZERS[name], **keys)
    found, expected = (on_ranks(world, _steps, made, fused, init="deepspeed") for fused in (True, False))
    for (losses, rows), (others, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(others, rel=1e-3 if "bf16" in where else 1e-5)
        assert len(set(losses)) == 3, "weights move"
        assert rows
        assert all(row["device"] for row in rows), rows
        assert all(row["fused"] == ({None} if where.startswith("pipe") else {True}) for row in rows)
        assert len({row["step"] for row in rows}) == 1


def _run_unfused(made: Job, until: int) -> Any:
    _unfuse()
    return run(made, until)


@pytest.mark.parametrize("stage", sampled([0, 1, 2, 3], {1}))
def test_a_run_goes_on_that_began_without_the_fused_step(tmp_path: Path, stage: int) -> None:
    """Its step counters are on the CPU, even with a GPU; they are moved where the kernel reads them."""
    before = on_ranks(2, _run_unfused, job_of(tmp_path / "a", 2, zero=sections.Zero(stage=stage)), 3, init="deepspeed")
    made = job_of(tmp_path / "a", 2, zero=sections.Zero(stage=stage))
    after = on_ranks(2, run, made, 6, init="deepspeed")
    whole = on_ranks(2, _run_unfused, job_of(tmp_path / "b", 2, zero=sections.Zero(stage=stage)), 6, init="deepspeed")
    for rank in range(2):
        lines, expected = [*before[rank][0], *after[rank][0]], whole[rank][0]
        assert [line[0] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert [line[1] for line in lines] == pytest.approx([line[1] for line in expected], rel=1e-5)
        assert {value.item() for key, value in after[rank][1].items() if key.endswith(".step")} == {6.0}


# ---- tied weights, which two stages each step ----


def _tied(made: Job) -> torch.Tensor:
    engine = engine_of(made)
    for step in range(5):
        engine.train_batch(batches(made, 0, step))
    return next(p.detach() for name, p in engine.named_parameters() if name == "embedding.tokens.weight").clone()


@pytest.mark.parametrize("vocab", [VOCAB, 61])
@pytest.mark.parametrize("hidden", [16, 6])
def test_tied_copies_stay_equal(hidden: int, vocab: int) -> None:
    """They stay equal at any place in their stages' shards, at any length, since on a CPU their step is not fused."""
    gpt = section.GPT(num_layers=2, hidden_size=hidden, num_heads=2, vocab_size=vocab, max_seq_len=LENGTH)
    made = job(2, model=gpt, parallel=PIPE, zero=sections.Zero(stage=1), optimizer=sections.AdamW(lr=1e-2))
    first, last = on_ranks(2, _tied, made, init="deepspeed")
    assert torch.equal(first, last)


def test_the_fused_kernel_for_cpus_still_rounds_the_end_of_a_tensor_otherwise() -> None:
    """Once this fails, `_config_on_device` of dslpar.engine.build is no longer needed."""

    def stepped(values: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        p = torch.nn.Parameter(values.clone())
        optimizer = torch.optim.AdamW([p], lr=1e-2, fused=True)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        return p.detach()

    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(64, generator=generator), torch.randn(300, 64, generator=generator)
    whole, begin = stepped(values, gradients), stepped(values[:63], gradients[:, :63])
    assert torch.equal(whole[:48], begin[:48])
    assert not torch.equal(whole[48:63], begin[48:])
