"""Weights that a program sets in dslpar.layers before `dslpar.initialize`: kept, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslpar
from dslpar.checkpoint import full_state, load_full_state
from dslpar.core.errors import DslparError
from dslpar.distributed.groups import Groups
from dslpar.layers import Init, LayerNorm, Linear
from dslpar.layers.parameter import draw
from tests.support.ranks import on_ranks

State = dict[str, Tensor]
SEED = 1234


def network(groups: Groups) -> nn.Sequential:
    """Return four layers, two per stage of a pipeline."""
    return nn.Sequential(
        LayerNorm(groups, 8), Linear(groups, 8, 12, role="inward"), nn.GELU(), Linear(groups, 12, 8, role="outward")
    )


def plain() -> nn.Sequential:
    """Return the same in torch with random weights everywhere: no zeros that a lost bias would have, too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return module


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator), torch.randint(8, (4,), generator=generator)


def without_ranks(steps: int) -> tuple[list[float], State]:
    """Return losses and weights of plain torch; "3.bias" is frozen."""
    module = plain()
    module[3].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


def started(parallel: dict[str, Any], stage: int, folder: str) -> Any:
    config = {"parallel": parallel, "batch": {"global_size": 4, "accumulation": 2 if "pipeline" in parallel else 1}}
    train = {"output_dir": folder, "save_interval": 0, "seed": SEED, "steps": 9}
    return dslpar.start(config | {"zero": {"stage": stage}, "train": train})


def engine_of(run: Any, model: Any) -> Any:
    optimizer = torch.optim.SGD
    engine, *_ = dslpar.initialize(
        run, model=model, optimizer=lambda groups: optimizer(groups, lr=0.1), criterion=nn.CrossEntropyLoss()
    )
    return engine


def stepped(engine: Any, step: int) -> float:
    x, y = batch(step)
    mine = slice(engine.groups.coord["data"], None, engine.job.mesh.data)
    pieces = engine.job.batch.accumulation
    loss: float = engine.train_batch(list(zip(x[mine].chunk(pieces), y[mine].chunk(pieces), strict=True)))
    return loss


def lives(parallel: dict[str, Any], stage: int, folder: str) -> dict[str, Any]:
    """Build, load, initialize, train, save; build, initialize, resume; build, load in part, initialize."""
    run = started(parallel, stage, folder)
    given = plain().state_dict()
    model = network(run.groups)
    load_full_state(model, given, run.groups)
    model[3].bias.requires_grad_(False)
    engine = engine_of(run, model)
    found: dict[str, Any] = {"kept": full_state(engine.module, engine.groups)}
    found["losses"] = [stepped(engine, step) for step in range(2)]
    found["trained"] = full_state(engine.module, engine.groups)
    engine.save()
    again = network(run.groups)
    load_full_state(again, given, run.groups)
    again[3].bias.requires_grad_(False)
    engine = engine_of(run, again)
    engine.resume()
    found["resumed"] = full_state(engine.module, engine.groups)
    part = network(run.groups)
    load_full_state(part, {"1.bias": given["1.bias"]}, run.groups, strict=False)
    engine = engine_of(run, part)
    found["in part"] = full_state(engine.module, engine.groups)
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "tensor": (2, {"tensor": {"size": 2, "mode": "1d"}}, 0),
    "pipeline": (2, {"pipeline": 2}, 1),
    "ZeRO 3": (2, {"data": 2}, 3),
    "tensor and pipeline": (4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_weights_are_what_a_run_begins_with(name: str, tmp_path: Any) -> None:
    world, parallel, stage = LAYOUTS[name]
    losses, trained = without_ranks(2)
    parts = on_ranks(world, lives, parallel, stage, str(tmp_path), init="deepspeed")
    for part in parts:
        assert part["losses"] == pytest.approx(losses, rel=1e-5)
    merged = {what: _merged([part[what] for part in parts]) for what in ("kept", "trained", "resumed", "in part")}
    assert_close(merged["kept"], plain().state_dict(), 0)
    assert_close(merged["trained"], trained, 1e-5)
    assert_close(merged["resumed"], merged["trained"], 0)
    assert torch.equal(merged["in part"]["1.bias"], plain().state_dict()["1.bias"])
    assert torch.equal(merged["in part"]["1.weight"], draw((12, 8), Init(0.0, 0.02), SEED, "1.weight"))


def _merged(states: list[State]) -> State:
    """Return the model of all stages; copies must be equal."""
    model: State = {}
    for state in states:
        for name, value in state.items():
            assert torch.equal(model.setdefault(name, value), value), f"{name} differs"
    return model


def assert_close(found: State, expected: State, rel: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= rel * value.abs().max(), name


class Mixed(nn.Module):
    """Layers of dslpar.layers beside torch's own."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.up, self.down = Linear(groups, 8, 16, role="inward"), Linear(groups, 16, 8, role="outward")
        self.own = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(self.down(self.up(x)))
        return y


def by_colossalai() -> dict[str, Tensor]:
    """Build a model of one module whose weights the program fills, all but one."""
    from dslpar.compat import colossalai

    config = {"batch": {"micro_size": 4, "accumulation": 1}, "train": {"save_interval": 0, "seed": SEED}}
    run = colossalai.launch_from_torch(config=config)
    model = Mixed(run.groups)
    for name, p in model.named_parameters():
        if name != "down.weight":
            nn.init.constant_(p, 0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), [(torch.ones(4, 8), torch.arange(4) % 2)]
    )
    return {name: p.detach() for name, p in engine.named_parameters()}


def test_colossalai_initialize_keeps_them_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = on_ranks(1, by_colossalai, init="deepspeed")
    left_out = found.pop("model.down.weight")
    assert torch.equal(left_out, draw((8, 16), Init(0.0, 0.02), SEED, "model.down.weight"))
    assert len(found) == 5
    assert all(value.eq(0.25).all() for value in found.values()), found


# ---- weights that cannot be kept ----


def refused(parallel: dict[str, Any], folder: str, write: Callable[[nn.Sequential, int], Any]) -> str:
    run = started(parallel, 0, folder)
    model = network(run.groups)
    with torch.no_grad():
        model = write(model, torch.distributed.get_rank()) or model
    try:
        engine_of(run, model)
    except DslparError as error:
        return str(error)
    return "nothing"


def loaded_on_rank_0(model: nn.Sequential, rank: int) -> None:
    if rank == 0:
        model[1].weight.fill_(0.25)


def other_on_each_rank(model: nn.Sequential, rank: int) -> None:
    model[0].weight.fill_(rank + 1.0)


def pieces_on_each_rank(model: nn.Sequential, rank: int) -> None:
    """Write a sharded weight: other ranks may have other numbers."""
    model[1].weight.fill_(rank + 1.0)


def init_of_pieces(model: nn.Sequential, rank: int) -> None:
    """Use torch's init, with equal seeds."""
    torch.manual_seed(0)
    nn.init.zeros_(model[1].bias)
    nn.init.normal_(model[1].weight)


def repeated_whole(model: nn.Sequential, rank: int) -> None:
    """Write halves, as the author intends."""
    halves = torch.arange(48.0).view(6, 8).repeat(2, 1)
    load_full_state(model, {"1.weight": halves}, model[1].groups, strict=False)


def by_stage(model: nn.Sequential, rank: int) -> Any:
    """Build each rank's own stage alone."""
    model[3 * rank].weight.fill_(rank + 1.0)
    return dslpar.Stage(model[2 * rank : 2 * rank + 2])


def in_a_builder(model: nn.Sequential, rank: int) -> Any:
    """Build in a wrapped function, with other torch weights on each rank."""
    torch.manual_seed(rank)
    return dslpar.build_pipeline_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


TENSOR, PIPE, DATA = {"tensor": {"size": 2, "mode": "1d"}}, {"pipeline": 2}, {"data": 2}
WRITES: dict[str, tuple[dict[str, Any], Callable[[nn.Sequential, int], Any], str]] = {
    "loaded on one tensor rank": (TENSOR, loaded_on_rank_0, "choice of weights to keep"),
    "loaded on one replica": (DATA, loaded_on_rank_0, "choice of weights to keep"),
    "loaded on one stage": (PIPE, loaded_on_rank_0, "choice of weights to keep"),
    "copies of a vector": (TENSOR, other_on_each_rank, "values of the weights to keep"),
    "replicas": (DATA, other_on_each_rank, "values of the weights to keep"),
    "a Sequential's": (PIPE, other_on_each_rank, "values of the weights to keep"),
    "a wrapped Sequential's": (PIPE, in_a_builder, "set of initial weights"),
    "an init of pieces": (TENSOR, init_of_pieces, "TEN237"),
    "halves of a whole": (TENSOR, repeated_whole, ""),
    "pieces": (TENSOR, pieces_on_each_rank, ""),
    "stages": (PIPE, by_stage, ""),
}


@pytest.mark.parametrize("name", WRITES)
def test_ranks_that_would_not_begin_with_one_model_are_refused(name: str, tmp_path: Any) -> None:
    parallel, write, what = WRITES[name]
    for text in on_ranks(2, refused, parallel, str(tmp_path), write, init="deepspeed"):
        if what == "TEN237":
            assert "the same values to different shards of '1.weight'\nhelp: init=" in text, text
        elif what:
            assert re.search(rf"HST221 weights-differ: rank 1 on .* has a different {what} than rank 0 on", text), text
        else:
            assert text == "nothing"


def test_one_process_needs_no_comparison(tmp_path: Any) -> None:
    (text,) = on_ranks(1, refused, {}, str(tmp_path), loaded_on_rank_0, init="deepspeed")
    assert text == "nothing"
