"""`dslpar.initialize` and both uses of the engine, whole steps and micro-batches; loaders, optimizers, order."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslpar
from dslpar.core.errors import DslparError
from dslpar.reporting.logging import log
from tests.support.plain_models import PIPE, mlp, points, sgd, shares, written
from tests.support.ranks import on_ranks

CONFIG = "batch = dict(global_size=16, accumulation=2)\ntrain = dict(steps=4, clip_grad_norm=0.5)\n"


def weights(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def engine_of(path: str, **more: Any) -> Any:
    model = mlp()
    return dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()), **more).engine


# ---- one mechanism ----


def _two_ways(path: str, by_hand: bool) -> tuple[list[float], list[Tensor]]:
    """Take steps with the engine, or with DeepSpeed's own methods."""
    engine, losses = engine_of(path), []
    for step in range(4):
        batches = shares(engine, *points(step))
        if by_hand:
            losses.append(float(engine.deepspeed.train_batch(iter(batches))))
        else:
            losses.append(engine.forward_backward(batches).loss)
            engine.step()
    return losses, weights(engine)


def test_a_step_in_two_halves_is_deepspeeds_own_to_the_bit(tmp_path: Path) -> None:
    path = written(tmp_path, PIPE + CONFIG)
    ours, theirs = (on_ranks(2, _two_ways, path, by_hand, init="deepspeed") for by_hand in (False, True))
    for (loss, mine), (other_loss, other) in zip(ours, theirs, strict=True):
        assert loss == other_loss
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def _one_by_one(path: str, one_by_one: bool) -> tuple[list[Any], list[Tensor]]:
    engine, rows = engine_of(path), []
    for step in range(4):
        batches = shares(engine, *points(step))
        if one_by_one:
            losses = []
            for x, y in batches:
                engine.zero_grad()
                loss = engine.criterion(engine(x), y)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            rows.append((sum(losses) / 2, engine.grad_norm, engine.lr, engine.steps_done))
        else:
            rows.append((engine.train_batch(batches), engine.grad_norm, engine.lr, engine.steps_done))
    return rows, weights(engine)


@pytest.mark.parametrize("zero", [0, 2])
def test_micro_batches_one_by_one_are_the_same_steps(tmp_path: Path, zero: int) -> None:
    path = written(tmp_path, CONFIG + f"zero = {zero}\n")
    ((one, ours),) = on_ranks(1, _one_by_one, path, True, init="deepspeed")
    ((whole, theirs),) = on_ranks(1, _one_by_one, path, False, init="deepspeed")
    assert [row[1:] for row in one] == [row[1:] for row in whole]
    assert [row[0] for row in one] == pytest.approx([row[0] for row in whole], rel=1e-6)
    assert [row[3] for row in one] == [1, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _said(act: Any) -> str:
    try:
        act()
    except (DslparError, StopIteration) as error:
        return str(error)
    return "nothing"


def _from_an_iterator(path: str, iterates: bool) -> tuple[list[float], list[Tensor], list[str]]:
    """Take three steps, from one iterator as DeepSpeed's programs do, or from lists; then ask for more."""
    engine = engine_of(path)
    steps = [shares(engine, *points(step)) for step in range(3)]
    loader = torch.utils.data.DataLoader([pair for step in steps for pair in step], batch_size=None)
    batches = iter(loader)
    losses = [engine.train_batch(batches if iterates else step) for step in steps]
    said = [_said(lambda: engine.train_batch(batches)) if iterates else "", _said(lambda: engine.train_batch(loader))]
    said.append(_said(lambda: engine.train_batch(iter(steps[0][:1]))))
    return losses, weights(engine), said


@pytest.mark.parametrize("pipe", ["", PIPE])
def test_a_step_is_taken_from_an_iterator(tmp_path: Path, pipe: str) -> None:
    path, num_ranks = written(tmp_path, pipe + CONFIG), 2 if pipe else 1
    ours, theirs = (on_ranks(num_ranks, _from_an_iterator, path, each, init="deepspeed") for each in (True, False))
    for (losses, mine, said), (other_losses, other, _) in zip(ours, theirs, strict=True):
        assert losses == other_losses
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        assert "the data ended after step 3" in said[0]
        assert "BAT204 other-micro-batches: a DataLoader of more than 2 micro-batches was passed" in said[1]
        assert "batches = iter(data) before the loop" in said[1]
        assert "BAT208" in said[2]
        assert "the data ended after 1 of 2 micro-batches of a step" in said[2]


def _order_after_other_draws(path: str) -> list[list[float]]:
    """Return the order of a shuffled loader, on ranks that have drawn different numbers, as stages of a model do."""
    data = torch.utils.data.TensorDataset(*points(0))
    engine_of(path, train_data=(loader := torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)))
    torch.manual_seed(torch.distributed.get_rank())
    return [[float(x[:, 0].sum()) for x, _ in loader] for _ in range(2)]


def test_stages_shuffle_a_program_s_loader_alike(tmp_path: Path) -> None:
    first, last = on_ranks(2, _order_after_other_draws, written(tmp_path, PIPE + CONFIG), init="deepspeed")
    assert first == last
    assert first[0] != first[1]


def _replicas(path: str, same: bool, whole_steps: bool) -> list[str]:
    """Train on a DataLoader of the whole data set, or of this replica's half; return the warnings."""
    data = torch.utils.data.TensorDataset(*points(0))
    sampler = None if same else torch.utils.data.DistributedSampler(data, 2, torch.distributed.get_rank())
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    engine, batches = engine_of(path, train_data=loader), iter(loader)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    for x, y in batches if not whole_steps else ():
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    if whole_steps:
        engine.train_batch(batches)
    log.removeHandler(handler)
    return said


@pytest.mark.parametrize("whole_steps", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_replicas_that_read_the_same_samples_are_told(tmp_path: Path, same: bool, whole_steps: bool) -> None:
    first, second = on_ranks(2, _replicas, written(tmp_path, CONFIG), same, whole_steps, init="deepspeed")
    assert second == []
    if not same:
        assert first == []
        return
    (text,) = first
    assert "all 2 data replicas read the same samples, so each sample counts 2 times in a step" in text
    assert "sampler=DistributedSampler(dataset, 2, run.groups.axis('data').index)" in text


def _out_of_order(path: str) -> list[str]:
    engine = engine_of(path)
    batches = shares(engine, *points(0))
    (x, y), _ = batches
    said = [_said(engine.step), _said(lambda: engine.train_batch(batches[:1]))]
    said.append(_said(lambda: engine.train_batch([(x[:3], y[:3])] * 2)))
    said.append(_said(lambda: engine.train_batch([("x", y)] * 2)))
    engine.backward(engine.criterion(engine(x), y))
    said += [_said(lambda: engine.backward(torch.zeros(()))), _said(engine.zero_grad)]
    engine.step()
    said.append(_said(lambda: engine.train_batch(batches)))
    return said


def test_calls_out_of_order_are_said(tmp_path: Path) -> None:
    said = on_ranks(1, _out_of_order, written(tmp_path, CONFIG), init="deepspeed")[0]
    expected = [
        "BAT206 step-out-of-order: step() was called without backward(loss) or forward_backward() before it",
        "BAT204 other-micro-batches: a step takes 2 micro-batches of 8 samples, but got 1 of 8",
        "BAT204 other-micro-batches: a step takes 2 micro-batches of 8 samples, but got 2 of 3",
        "BAT205 not-tensors: a micro-batch holds a str",
        "BAT206 step-out-of-order: backward() was called without the last backward's step() before it",
        "zero_grad() between backward and step() would throw the gradient away",
        "forward_backward() was called in the middle of a step that backward() began",
    ]
    for text, part in zip(said, expected, strict=True):
        assert part in text, text


def _in_a_pipeline(path: str) -> list[str]:
    engine = engine_of(path)
    x, _ = points(0)
    return [_said(lambda: engine(x)), _said(lambda: engine.backward(x.sum()))]


def test_a_pipeline_has_no_single_passes(tmp_path: Path) -> None:
    for said in on_ranks(2, _in_a_pipeline, written(tmp_path, PIPE + CONFIG), init="deepspeed"):
        assert "PIP206" in said[0]
        assert "engine(inputs) cannot run in a pipeline of 2 stages" in said[0]
        assert "engine.backward(loss) cannot run in a pipeline" in said[1]


# ---- data ----


class Squares(torch.utils.data.Dataset[Any]):
    """10 samples; sample i is (its number, its square)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([float(index) ** 2])


def _read(path: str, passes: int) -> Any:
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    engine, train, held_out, _ = dslpar.initialize(
        path, model=model, criterion=nn.MSELoss(), train_data=Squares(), eval_data=Squares()
    )
    assert train is not None
    assert held_out is not None
    seen, lengths = [], []
    for _ in range(passes):
        lengths.append(len(train))  # type: ignore[arg-type]
        batches = list(train)
        seen.append([x.flatten().tolist() for x, _ in batches])
        for first in range(0, len(batches), 2):
            engine.train_batch(batches[first : first + 2])
    return seen, lengths, engine.consumed_samples, [x.flatten().tolist() for x, _ in held_out]


def test_the_order_of_a_data_set_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    """10 samples with 4 per step: the first pass takes 3 steps and 2 samples of the next epoch, where the second
    begins.
    """
    batch = "batch = dict(global_size=4, accumulation=2)\n"
    ((seen, lengths, consumed, held),) = on_ranks(1, _read, written(tmp_path, batch), 2, init="deepspeed")
    assert (lengths, consumed) == ([3, 2], 20)
    order = [number for epoch in seen for micro in epoch for number in micro]
    assert sorted(order[:10]) == sorted(order[10:]) == list(map(float, range(10)))
    assert order[:10] != order[10:]
    assert {number for micro in held for number in micro} == set(map(float, range(10)))
    for text in (PIPE + batch, batch):
        ranks = on_ranks(2, _read, written(tmp_path, text), 2, init="deepspeed")
        if text == batch:  # data 2: the ranks' micro-batches of one sample, put together
            pairs = [
                [a + b for a, b in zip(*epochs, strict=True)]
                for epochs in zip(*(rank[0] for rank in ranks), strict=True)
            ]
            assert pairs == seen
        else:
            assert [rank[0] for rank in ranks] == [seen, seen]


def _no_pairs(path: str) -> Any:
    return _said(lambda: dslpar.initialize(path, model=mlp(), train_data=[torch.zeros(3)]))


def test_what_holds_no_pairs_is_no_data(tmp_path: Path) -> None:
    said = on_ranks(1, _no_pairs, written(tmp_path, CONFIG), init="deepspeed")[0]
    assert "BAT207 no-pairs: an item of the data set is not an (input, label) pair" in said


class Two(nn.Module):
    """A model with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) * self.right(y)  # type: ignore[no-any-return]


def _two_inputs(path: str) -> float:
    loader = torch.utils.data.DataLoader([((torch.ones(3), torch.ones(3)), 1)] * 32, batch_size=8)
    engine, train, *_ = dslpar.initialize(
        path, model=Two(), optimizer=partial(torch.optim.SGD, lr=0.5), train_data=loader
    )
    assert train is loader, "what can only be iterated is used as it is"
    batches = iter(train)
    return engine.train_batch([next(batches), next(batches)])


def test_inputs_may_be_tuples_and_a_loader_ones_own(tmp_path: Path) -> None:
    loss = on_ranks(1, _two_inputs, written(tmp_path, CONFIG), init="deepspeed")[0]
    expected = nn.functional.cross_entropy(Two()(torch.ones(1, 3), torch.ones(1, 3)), torch.tensor([1])).item()
    assert loss == pytest.approx(expected, rel=1e-6)


# ---- the program's arguments, and the config's keys ----


def _scheduled(path: str) -> tuple[list[float], str, float]:
    engine, _, _, scheduler = dslpar.initialize(path, model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.4))
    rates = []
    for step in range(4):
        engine.train_batch(shares(engine, *points(step)))
        rates.append(engine.lr)
    return rates, _said(scheduler.step), scheduler.get_last_lr()[0]


def test_the_schedule_is_the_config_s_over_the_program_s_rate(tmp_path: Path) -> None:
    path = written(tmp_path, CONFIG + "lr_scheduler = dict(type='linear', warmup_steps=2)\n")
    rates, said, last = on_ranks(1, _scheduled, path, init="deepspeed")[0]
    assert rates == pytest.approx([0.2, 0.4, 0.2, 0.0])
    assert last == pytest.approx(0.0)
    assert "BAT209 second-schedule-step: lr_scheduler.step(): the engine steps the LR scheduler" in said


class Signs(torch.optim.SGD):
    """An optimizer whose step is its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _refusals(path: str) -> list[str]:
    other = nn.Linear(2, 2)
    given: list[Any] = [Signs, sgd(other.parameters()), lambda groups: 3, lambda groups: sgd(groups[:1])]
    said = [_said(lambda made=made: dslpar.initialize(path, model=mlp(), optimizer=made)) for made in given]
    said.append(_said(lambda: dslpar.initialize(path, model=3)))  # type: ignore[arg-type]
    said.append(_said(lambda: dslpar.initialize(path)))
    said.append(_said(lambda: dslpar.initialize(path, model=mlp(), criterion=nn.PReLU())))  # type: ignore[arg-type]
    return said


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    said = on_ranks(1, _refusals, written(tmp_path, CONFIG + "zero = 1\n"), init="deepspeed")[0]
    expected = [
        "ZER201 optimizer-not-for-shards",
        "CFG225 not-an-optimizer: the optimizer holds no parameter of the model",
        "CFG225 not-an-optimizer: the optimizer is a int",
        "CFG225 not-an-optimizer: the optimizer leaves out 3 parameters that have a gradient, such as '0.bias'",
        "CFG201 not-a-model: int is neither a torch.nn.Module",
        "CFG107 no-model: there is no model",
        "CFG227 criterion-with-parameters",
    ]
    for text, part in zip(said, expected, strict=True):
        assert part in text, text


def _differing(path: str) -> str:
    return _said(lambda: dslpar.initialize(path, model=mlp(), overrides=[f"train.seed={torch.distributed.get_rank()}"]))


def test_ranks_with_other_configs_are_refused(tmp_path: Path) -> None:
    for said in on_ranks(2, _differing, written(tmp_path, CONFIG), init="deepspeed"):
        assert re.search("HST203 ranks-differ: rank 1 on .* has another config than rank 0", said)


class Counted:
    """A data set of `length` pairs."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((6,), float(index)), torch.tensor(0)


def _of_another_length(path: str) -> list[str]:
    mine = Counted(40 - torch.distributed.get_rank())
    return [
        _said(lambda: dslpar.initialize(path, model=mlp(), train_data=mine)),
        _said(lambda: dslpar.initialize(path, model=mlp(), train_data=Counted(40), eval_data=mine)),
    ]


def test_ranks_with_data_of_other_lengths_are_refused(tmp_path: Path) -> None:
    """They would read in different orders, and wait for each other at the end of the shorter epoch."""
    for train, held_out in on_ranks(2, _of_another_length, written(tmp_path, CONFIG), init="deepspeed"):
        assert re.search("HST203 ranks-differ: rank 1 on .* has another number of training samples", train)
        assert re.search("HST203 ranks-differ: rank 1 on .* has another number of evaluation samples", held_out)


def _labels_in_a_tuple(path: str) -> str:
    engine = engine_of(path)
    return _said(lambda: engine.train_batch([(x, (y, y)) for x, y in shares(engine, *points(0))]))


def test_labels_that_the_model_s_own_loss_cannot_take_are_said(tmp_path: Path) -> None:
    (said,) = on_ranks(1, _labels_in_a_tuple, written(tmp_path, CONFIG), init="deepspeed")
    assert "BAT205 not-tensors: labels are 2 tensors, but the model's own loss takes 1" in said


def _own_modes(path: str) -> tuple[list[bool], bool]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.Linear(16, 4))
    engine = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters())).engine
    norm.eval()
    engine.eval_batch(shares(engine, *points(0)))
    frozen = [norm.training, engine.module.training]
    engine.train_batch(shares(engine, *points(0)))
    return frozen, bool(norm.num_batches_tracked)


def test_a_norm_in_evaluation_mode_stays_so_after_an_evaluation(tmp_path: Path) -> None:
    ((frozen, moved),) = on_ranks(1, _own_modes, written(tmp_path, CONFIG), init="deepspeed")
    assert frozen == [False, True]
    assert not moved


def _two_rates(path: str) -> tuple[list[list[float]], str]:
    """Use an optimizer with one rate for the first layers and one for the last, on their stages."""
    model, rates = mlp(), []
    groups = [{"params": list(model[:-1].parameters()), "lr": 1e-3}, {"params": list(model[-1].parameters())}]
    engine = dslpar.initialize(path, model=model, optimizer=torch.optim.SGD(groups, lr=1e-2)).engine
    for step in range(4):
        engine.train_batch(shares(engine, *points(step)))
        rates.append([group["lr"] for group in engine.deepspeed.optimizer.param_groups])
    return rates, repr(engine.job.spec.optimizer)


def test_an_optimizer_s_rates_do_not_depend_on_the_cut(tmp_path: Path) -> None:
    """The scheduler's factor is relative to the first group's rate, even on a stage without that group."""
    config = CONFIG + "lr_scheduler = dict(type='linear', min_lr=2e-4)\n"
    ((whole, job),) = on_ranks(1, _two_rates, written(tmp_path, config), init="deepspeed")
    cut = "parallel = dict(pipeline=dict(size=2, counts=(4, 1)))\n"
    (first, of_first), (last, of_last) = on_ranks(2, _two_rates, written(tmp_path, cut + config), init="deepspeed")
    assert [one + other for one, other in zip(first, last, strict=True)] == whole
    assert whole[-1] == pytest.approx([2e-4, 2e-3])
    assert job == of_first == of_last


def _rates_from(path: str, lr: float) -> str | list[float]:
    model = mlp()
    groups = [{"params": list(model[:-1].parameters()), "lr": lr}, {"params": list(model[-1].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    try:
        engine = dslpar.initialize(path, model=model, optimizer=optimizer).engine
    except DslparError as error:
        return str(error)
    engine.train_batch(shares(engine, *points(0)))
    return [group["lr"] for group in engine.deepspeed.optimizer.param_groups]


def test_a_first_group_of_rate_0_stays_there(tmp_path: Path) -> None:
    config = CONFIG + "lr_scheduler = dict(type='linear')\n"
    (rates,) = on_ranks(1, _rates_from, written(tmp_path, config), 0.0, init="deepspeed")
    assert rates == pytest.approx([0.0, 0.5 * 2 / 3]), "after the first of four steps, the last of which uses 0"


def test_a_schedule_that_would_rise_from_the_program_s_rate_is_refused(tmp_path: Path) -> None:
    config = CONFIG + "lr_scheduler = dict(type='linear', min_lr=2e-4)\n"
    (said,) = on_ranks(1, _rates_from, written(tmp_path, config), 1e-4, init="deepspeed")
    assert "BAT106 min-lr-above-lr: min_lr 0.0002 is above lr 0.0001 of the given optimizer" in said


def _loss_in_half(path: str) -> float:
    engine = engine_of(path, criterion=nn.CrossEntropyLoss())
    loss: float = engine.train_batch(shares(engine, *points(0)))
    return loss


def test_a_criterion_sees_fp32_so_that_a_mean_of_losses_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    """In bf16 the loss itself would have 8 bits: two replicas' mean was off by 1e-2."""
    config = CONFIG + "precision = 'bf16'\nzero = 1\n"
    losses = {
        world: on_ranks(world, _loss_in_half, written(tmp_path, more + config), init="deepspeed")[0]
        for world, more in ((1, ""), (2, ""), (4, "parallel = dict(pipeline=2, data=2)\n"))
    }
    # Each sample's logits are the same numbers in each layout, so only the order of fp32 sums differs.
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)
    assert losses[4] == pytest.approx(losses[1], rel=1e-6)


def _everything_from_the_config(path: str) -> tuple[float, float, int]:
    engine, train, held_out, _ = dslpar.initialize(path)
    first, held = (engine.train_batch, train), (engine.eval_batch, held_out)
    losses = [run(list(islice(data, 2))) for run, data in (first, held) if data is not None]
    return losses[0], losses[1], len(train)  # type: ignore[arg-type]


def test_all_of_it_may_come_from_the_config(tmp_path: Path) -> None:
    """As in train.py: the same model, text and order."""
    from tests.support.runs import CONFIG as GPT
    from tests.support.runs import write_config

    path = write_config(tmp_path, GPT + "batch.accumulation = 2\ntrain.eval_interval = 2\n")
    first, held, length = on_ranks(1, _everything_from_the_config, str(path), init="deepspeed")[0]
    assert first == pytest.approx(5.55, abs=0.1)
    assert held == pytest.approx(5.55, abs=0.2)
    assert length > 100


def test_importing_the_names_costs_no_torch() -> None:
    code = "import sys, dslpar; dslpar.MODELS.register_module(name='A'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(dslpar, name) for name in dslpar.__all__)
    assert callable(dslpar.initialize)
