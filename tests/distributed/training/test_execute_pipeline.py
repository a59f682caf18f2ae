"""ColossalAI's `execute_pipeline`, `no_sync` and `sync_grads`: the same steps as `train_batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dslpar
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from tests.support.plain_models import PIPE, PIPE_DATA, assert_equal, mlp, plain_torch, points, written
from tests.support.plain_models import STEPS as POINT_STEPS
from tests.support.plain_models import sgd as make_sgd
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

STEPS, VOCAB, LENGTH, GLOBAL = 3, 256, 8, 16
CONFIG = f"""
model = dict(type='GPT', num_layers=2, hidden_size=16, num_heads=2, vocab_size={VOCAB}, max_seq_len={LENGTH},
             dropout=0.1)
optimizer = dict(type='AdamW', lr=1e-2)
train = dict(steps={STEPS}, clip_grad_norm=0.5)
"""


class Run(NamedTuple):
    """Results of one rank."""

    rows: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    weights: dict[str, Tensor]
    position: int
    """Number of samples that the run has consumed."""


def tokens(step: int, ignoring: bool) -> tuple[Tensor, Tensor]:
    """Return the ids and labels of a global batch. If `ignoring`, about a fifth of the labels does not count."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (GLOBAL, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2 * ignoring] = -100
    return ids[:, :-1], labels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def shares(engine: Any, *values: Tensor) -> list[tuple[Tensor, ...]]:
    """Return this rank's micro-batches of a global batch, for one batch of the job or two."""
    data, rank, size = engine.job.mesh.data, engine.groups.coord["data"], engine.job.batch.micro_size
    return list(zip(*(value.split(size)[rank::data] for value in values), strict=True))


def run(path: str, step_by: Callable[[Any, list[Any]], float], ignoring: bool) -> Run:
    """Train with the model's own loss if labels are ignored, else with the program's."""
    criterion = None if ignoring else cross_entropy
    engine = dslpar.initialize(path, criterion=criterion, train_data=iter(())).engine
    rows = [(step_by(engine, shares(engine, *tokens(step, ignoring))), engine.grad_norm) for step in range(STEPS)]
    weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return Run(rows, weights, engine.consumed_samples)


def assert_same(ours: list[Run], theirs: list[Run]) -> None:
    """Compare norms and weights bitwise on every rank; losses up to the order in which a test adds them."""
    for mine, other in zip(ours, theirs, strict=True):
        for (loss, norm), (other_loss, other_norm) in zip(mine.rows, other.rows, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-6)
            assert norm == other_norm
        assert mine.position == other.position == STEPS * GLOBAL
        assert mine.weights.keys() == other.weights.keys()
        for name, weight in mine.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def layouts(quick: set[tuple[int, int, int]], max_zero: int) -> list[Any]:
    """Return (pipe, tensor, ZeRO stage) of layouts; those outside `quick` take long together."""
    stages = {1: range(max_zero + 1), 2: range(2)}
    rows = [(pipe, tensor, zero) for pipe in (1, 2) for tensor in (1, 2) for zero in stages[pipe]]
    return sampled(rows, quick)


def layout_of(pipe: int, tensor: int, zero: int) -> str:
    return f"parallel = dict(pipeline={pipe}, data=2, tensor=dict(size={tensor}, mode='1d'))\nzero = {zero}\n"


# ---- a batch per step ----


def by_train_batch(engine: Any, batches: list[Any]) -> float:
    return engine.train_batch(batches)  # type: ignore[no-any-return]


def by_execute_pipeline(engine: Any, batches: list[Any]) -> float:
    result = engine.execute_pipeline(iter(batches))
    engine.step()
    return result["loss"].item()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("pipe", "tensor", "zero"), layouts(set(), max_zero=3))
def test_a_batch_and_its_step_are_train_batch(tmp_path: Path, pipe: int, tensor: int, zero: int) -> None:
    """With dropout and ignored labels."""
    batch = f"batch = dict(global_size={GLOBAL}, accumulation=2)\n"
    path, world = written(tmp_path, CONFIG + layout_of(pipe, tensor, zero) + batch), 2 * pipe * tensor
    ours = on_ranks(world, run, path, by_execute_pipeline, True, init="deepspeed")
    assert_same(ours, on_ranks(world, run, path, by_train_batch, True, init="deepspeed"))


def outputs_of(path: str) -> Any:
    engine = dslpar.initialize(path, criterion=cross_entropy, train_data=iter(())).engine
    result = engine.eval().execute_pipeline(iter(shares(engine, *tokens(0, False))))
    return result["loss"].item(), result["outputs"]


@pytest.mark.parametrize(("mode", "size"), [("1d", 2), pytest.param("2d", 4, marks=pytest.mark.prove)])
def test_a_criterion_and_outputs_are_whole_where_tensor_ranks_cut_logits(tmp_path: Path, mode: str, size: int) -> None:
    batch = f"batch = dict(global_size={GLOBAL}, accumulation=2)\n"
    ((loss, whole),) = on_ranks(1, outputs_of, written(tmp_path, CONFIG + batch), init="deepspeed")
    path = written(tmp_path, CONFIG + batch + f"parallel = dict(tensor=dict(size={size}, mode={mode!r}))\n")
    for other_loss, outputs in on_ranks(size, outputs_of, path, init="deepspeed"):
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert outputs.shape == whole.shape == (GLOBAL, LENGTH, VOCAB)
        assert torch.allclose(outputs, whole, rtol=1e-5, atol=1e-6)


# ---- several batches per step ----


def half(logits: Tensor, labels: Tensor) -> Tensor:
    """Return half of the loss: two batches with summed gradients give the mean."""
    return cross_entropy(logits, labels) / 2


def both_unsynced(engine: Any, batches: list[Any]) -> float:
    data_iter = iter(batches)
    with engine.no_sync():
        losses = [engine.execute_pipeline(data_iter, criterion=half)["loss"].item() for _ in range(2)]
    assert engine.has_unreduced_gradients
    assert not engine.is_between_steps
    engine.sync_grads()
    engine.step()
    return sum(losses)


def last_synced(engine: Any, batches: list[Any]) -> float:
    data_iter, loss = iter(batches), 0.0
    for index in range(2):
        with engine.no_sync() if index == 0 else nullcontext():
            loss += engine.execute_pipeline(data_iter, criterion=half)["loss"].item()
    engine.sync_grads()  # of averaged gradients: no effect
    engine.step()
    return loss


def one_by_one(engine: Any, batches: list[Any]) -> float:
    """Run single micro-batches, none with reduction."""
    losses = []
    for index, (ids, labels) in enumerate(batches, 1):
        loss = engine.criterion(engine(ids), labels)
        with engine.no_sync():
            engine.backward(loss)
        assert engine.has_unreduced_gradients == (index == len(batches))
        engine.sync_grads()
        engine.step()
        losses.append(engine.mean_over_replicas(loss))
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("step_by", [both_unsynced, pytest.param(last_synced, marks=pytest.mark.prove)])
@pytest.mark.parametrize(("pipe", "tensor", "zero"), layouts({(2, 1, 1)}, max_zero=1))
def test_gradients_add_up_without_sync(tmp_path: Path, step_by: Any, pipe: int, tensor: int, zero: int) -> None:
    """Two batches in one step equal one batch of twice as many micro-batches."""
    text, world = CONFIG + layout_of(pipe, tensor, zero), 2 * pipe * tensor
    halves = written(tmp_path, f"{text}batch = dict(global_size={GLOBAL // 2}, accumulation=2)\n")
    ours = on_ranks(world, run, halves, step_by, False, init="deepspeed")
    whole = written(tmp_path, f"{text}batch = dict(global_size={GLOBAL}, accumulation=4)\n")
    assert_same(ours, on_ranks(world, run, whole, by_train_batch, False, init="deepspeed"))


DATA, STAGES, CONTEXT = (2, "data=2"), (4, "pipeline=2, data=2"), (4, "context=2, data=2")
SETTINGS = {
    "overlapped reduction": (DATA, "zero = dict(stage=1, overlap_comm=True)\n"),
    "optimizer on the CPU": (DATA, "zero = dict(stage=1, offload_optimizer=dict(device='cpu'))\n"),
    "bf16": (DATA, "zero = 1\nprecision = 'bf16'\n"),
    "bf16, tied over stages": (STAGES, "zero = 1\nprecision = 'bf16'\n"),
    "fp16, tied over stages": (STAGES, "zero = 1\nprecision = 'fp16'\n"),
    "tied over stages": (STAGES, "zero = 0\n"),
    "recomputation": (STAGES, "zero = 1\nactivation_checkpoint = dict(interval=1)\n"),
    "over a context": (CONTEXT, "zero = 1\n"),
    "ZeRO over a context, optimizer on the CPU": (
        CONTEXT,
        "zero = dict(stage=1, offload_optimizer=dict(device='cpu'))\n",
    ),
}
"""Settings with which DeepSpeed keeps or reduces gradients differently."""


@pytest.mark.prove
@pytest.mark.parametrize("step_by", [both_unsynced, last_synced])
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_add_up_wherever_they_are_kept(tmp_path: Path, step_by: Any, name: str) -> None:
    (world, parallel), more = SETTINGS[name]
    text = CONFIG.replace("dropout=0.1", "dropout=0.1, tie_embeddings=True")
    text += f"parallel = dict({parallel})\n{more}"
    halves = written(tmp_path, f"{text}batch = dict(global_size={GLOBAL // 2}, accumulation=2)\n")
    ours = on_ranks(world, run, halves, step_by, False, init="deepspeed")
    whole = written(tmp_path, f"{text}batch = dict(global_size={GLOBAL}, accumulation=4)\n")
    assert_same(ours, on_ranks(world, run, whole, by_train_batch, False, init="deepspeed"))


@pytest.mark.parametrize(("pipe", "tensor", "zero"), [row for row in layouts(set(), 1) if row.values[0] == 1])
def test_single_micro_batches_without_sync(tmp_path: Path, pipe: int, tensor: int, zero: int) -> None:
    batch = f"batch = dict(global_size={GLOBAL}, accumulation=2)\n"
    path, world = written(tmp_path, CONFIG + layout_of(pipe, tensor, zero) + batch), 2 * tensor
    ours = on_ranks(world, run, path, one_by_one, False, init="deepspeed")
    assert_same(ours, on_ranks(world, run, path, by_train_batch, False, init="deepspeed"))


def _replicas_apart(path: str) -> bool:
    """Return whether gradients differ between replicas before they are averaged, and are equal afterwards."""
    engine = dslpar.initialize(path, train_data=iter(())).engine
    data = engine.groups.axis("data")

    def is_equal() -> bool:
        grad = next(engine.module.parameters()).grad
        first, *others = collectives.gather_objects(grad, data)
        return all(torch.equal(first, other) for other in others)

    with engine.no_sync():
        engine.execute_pipeline(iter(shares(engine, *tokens(0, False))))
    before = is_equal()
    engine.sync_grads()
    return not before and is_equal()


@pytest.mark.prove
def test_no_sync_does_keep_gradients_apart(tmp_path: Path) -> None:
    batch = f"batch = dict(global_size={GLOBAL}, accumulation=2)\n"
    for pipe in (1, 2):
        path = written(tmp_path, CONFIG + layout_of(pipe, 1, 0) + batch)
        assert all(on_ranks(2 * pipe, _replicas_apart, path, init="deepspeed"))


# ---- a program's criterion, outputs, forward alone ----

POINTS = "batch = dict(global_size=16, accumulation={})\ntrain = dict(steps=5, clip_grad_norm=0.5)\n"


def whole_batches(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this replica's batches, not split into micro-batches."""
    for step in range(POINT_STEPS):
        x, y = (torch.cat(part) for part in zip(*shares(engine, *points(step)), strict=True))
        yield x, y


def _with_criterion(path: str) -> Any:
    engine = dslpar.initialize(path, model=mlp(), optimizer=make_sgd).engine
    data_iter, rows, criterion = whole_batches(engine), [], nn.CrossEntropyLoss()
    for _ in range(POINT_STEPS):
        result = engine.execute_pipeline(data_iter, criterion=criterion, return_loss=True, return_outputs=True)
        engine.step()
        rows.append((result["loss"].item(), engine.grad_norm))
    with pytest.raises(StopIteration, match="the data ended after step 5"):
        engine.execute_pipeline(data_iter, criterion=criterion)
    weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
    outputs, x, y = result["outputs"], *points(POINT_STEPS)
    held = {
        "no_grad": lambda: _without_grad(engine, x, y),
        "optimizer": lambda: engine.execute_pipeline(iter(shares(engine, x, y)), None, criterion, None),
        "eval": lambda: engine.eval().execute_pipeline(iter(shares(engine, x, y)), criterion=criterion),
    }
    results = {name: act() for name, act in held.items()}
    assert engine.is_between_steps
    engine.train()
    least = engine.execute_pipeline(iter(shares(engine, x, y)), return_loss=False, return_outputs=False)
    assert least == {"loss": None, "outputs": None}
    assert not engine.is_between_steps
    return (rows, weights), outputs, results


def _without_grad(engine: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        return engine.execute_pipeline(iter(shares(engine, x, y)), criterion=nn.CrossEntropyLoss())


def test_a_criterion_of_the_programs_and_outputs_on_the_last_stage(tmp_path: Path) -> None:
    """Compared with plain torch: the loss is on all stages, and forward alone changes nothing."""
    ranks = on_ranks(4, _with_criterion, written(tmp_path, PIPE_DATA + POINTS.format(2)), init="deepspeed")
    rows, weights = plain_torch(mlp(), micro_size=4)
    assert_equal([rank[0] for rank in ranks], (rows, weights))
    module = mlp()
    module.load_state_dict(weights)
    x, y = points(POINT_STEPS)
    output = module(x)
    for rank, (_, trained, results) in enumerate(ranks):
        last = rank >= 2
        assert (trained is None) != last
        for result in results.values():
            assert result["loss"].item() == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-6)
            assert not result["loss"].requires_grad
            assert (result["outputs"] is None) != last
    for result in ranks[2][2].values():
        mine = torch.cat(output.split(4)[0::2])
        assert torch.allclose(result["outputs"], mine, rtol=1e-5, atol=1e-6)


# ---- refusals ----


def _said(act: Callable[[], object]) -> str:
    with pytest.raises(DslparError) as raised:
        act()
    return str(raised.value)


def _refusals(path: str) -> list[str]:
    model = mlp()
    optimizer = make_sgd(model.parameters())
    engine = dslpar.initialize(path, model=model, optimizer=optimizer).engine
    batches = shares(engine, *points(0))
    x, y = points(0)

    def execute(*data: Any, **more: Any) -> Callable[[], object]:
        return lambda: engine.execute_pipeline(iter(data), **more)

    said = [
        _said(execute(*batches, model=mlp())),
        _said(execute(*batches, optimizer=make_sgd(mlp().parameters()))),
        _said(execute(*batches, criterion=nn.Sequential(nn.Linear(4, 1)))),
        _said(execute({"input_ids": x, "labels": y})),
        _said(execute(x)),
        _said(execute((x, y, y))),
        _said(execute(batches[0])),
        _said(engine.sync_grads),
    ]
    execute(*batches, model=engine, optimizer=optimizer)()
    said.append(_said(execute(*batches)))
    engine.step()
    with engine.no_sync():
        execute(*batches, optimizer=engine.deepspeed.optimizer)()
    return [*said, _said(engine.step)]


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=pytest.mark.prove)])
def test_what_it_refuses(tmp_path: Path, zero: int) -> None:
    expected = [
        "PIP210 not-the-engines-own: execute_pipeline was called with a model that is not the engine's",
        "PIP210 not-the-engines-own: execute_pipeline was called with an optimizer that is not the engine's",
        "CFG227",
        "BAT205 not-tensors: a batch is a mapping of 'input_ids', 'labels'\nhelp: give (inputs, labels)",
        "BAT205 not-tensors: a batch is a Tensor",
        "BAT205 not-tensors: a batch is 3 values",
        "BAT208 data-ended: the data ended after 1 of 2 micro-batches",
        "BAT206 step-out-of-order: sync_grads() was called without backward(loss) or forward_backward() before it",
        "BAT206 step-out-of-order: forward_backward() was called without the last backward's step() before it",
        "BAT206 step-out-of-order: step() after no_sync() without sync_grads(): each replica has its own gradients",
    ]
    path = written(tmp_path, PIPE + POINTS.format(2) + f"zero = {zero}\n")
    for said in on_ranks(2, _refusals, path, init="deepspeed"):
        for text, part in zip(said, expected, strict=True):
            assert part in text, text


def _sharded(path: str) -> str:
    engine = dslpar.initialize(path, model=mlp(), optimizer=make_sgd).engine

    def enter() -> None:
        with engine.no_sync():
            pass

    return _said(enter)


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.prove)])
def test_sharded_gradients_have_no_whole_to_keep(tmp_path: Path, zero: int) -> None:
    path = written(tmp_path, POINTS.format(2) + f"zero = {zero}\n")
    (said,) = on_ranks(1, _sharded, path, init="deepspeed")
    assert f"ZER202 no-sync-of-shards: no_sync() at ZeRO {zero}" in said


# ---- the position in the data ----


class Numbers(torch.utils.data.Dataset[Any]):
    """Sample i is (its number, its half)."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([index / 2])


def _two_batches_a_step(path: str, steps: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    engine, train_data, *_ = dslpar.initialize(path, model=model, criterion=nn.MSELoss(), train_data=Numbers())
    engine.resume()
    assert train_data is not None
    began, batches, seen = engine.consumed_samples, iter(train_data), []

    def noted() -> Iterator[Any]:
        for x, y in batches:
            seen.append(x.flatten().tolist())
            yield x, y

    data_iter = noted()
    for _ in range(steps):
        with engine.no_sync():
            engine.execute_pipeline(data_iter)
        engine.execute_pipeline(data_iter)
        engine.step()
    engine.save()
    return began, engine.consumed_samples, [number for batch in seen for number in batch]


@pytest.mark.prove
def test_a_resume_goes_on_after_all_batches_of_a_step(tmp_path: Path) -> None:
    """With two batches of 4 samples per step, no sample comes twice within an epoch of 40."""
    folder = f"train = dict(steps=5, output_dir={str(tmp_path / 'out')!r})\n"
    path = written(tmp_path, "batch = dict(global_size=4, accumulation=2)\n" + folder)
    ((began, ended, first),) = on_ranks(1, _two_batches_a_step, path, 2, init="deepspeed")
    assert (began, ended) == (0, 16)
    ((began, ended, then),) = on_ranks(1, _two_batches_a_step, path, 3, init="deepspeed")
    assert (began, ended) == (16, 40)
    assert sorted(first + then) == list(map(float, range(40)))
    assert math.isclose(sum(first + then), 780)
