"""Values that ColossalAI's engine, trainer, loaders and checkpoints compute."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from dslpar.compat import colossalai
from dslpar.compat.colossalai import global_context as gpc
from dslpar.compat.colossalai.context import ParallelMode
from dslpar.compat.colossalai.nn import LinearWarmupLR
from dslpar.compat.colossalai.trainer import Trainer, hooks
from dslpar.compat.colossalai.utils import DataParallelSampler, get_dataloader, load_checkpoint, save_checkpoint
from dslpar.core.errors import DslparError
from tests.support.ranks import on_ranks


def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(num: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, 6, generator=generator), torch.randint(3, (num,), generator=generator))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)


def _by_engine(config: dict[str, Any]) -> list[list[float]]:
    """Return the learning rate and all weights after each step of two epochs."""
    colossalai.launch_from_torch(config)
    module, rows = model(), []
    optimizer = sgd(module)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=4, warmup_steps=1)
    loader = get_dataloader(data(), batch_size=8 // gpc.data_parallel_size)
    engine, loader, _, lr_scheduler = colossalai.initialize(
        module, optimizer, nn.CrossEntropyLoss(), loader, None, lr_scheduler
    )
    for x, y in itertools.chain(loader, loader):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        rows.append([engine.lr, *torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()])
        lr_scheduler.step()
    return rows


def _plain(size: int, accumulation: int = 1) -> list[list[float]]:
    """Return the same of plain torch, in one process."""
    module, rows = model(), []
    optimizer = sgd(module)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=4, warmup_steps=1)
    loader = torch.utils.data.DataLoader(data(), batch_size=size)
    for number, (x, y) in enumerate(itertools.chain(loader, loader), 1):
        (nn.functional.cross_entropy(module(x), y) / accumulation).backward()
        used = optimizer.param_groups[0]["lr"]
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        rows.append([used, *torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()])
    return rows


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 1)])
def test_the_program_steps_its_scheduler(ranks: int, zero: int) -> None:
    """Weights after each step are those of plain torch, with clipping, on one rank and on shards of two."""
    config = {"clip_grad_norm": 0.1, "zero": {"stage": zero}}
    for rows in on_ranks(ranks, _by_engine, config, init="deepspeed"):
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(_plain(8)), rtol=1e-5, atol=1e-6)


def test_accumulation_steps_weights_and_the_returned_scheduler_every_second_batch() -> None:
    (rows,) = on_ranks(1, _by_engine_in_quarters, init="deepspeed")
    wanted = torch.tensor(_plain(4, accumulation=2))
    torch.testing.assert_close(torch.tensor(rows)[:, 1:], wanted[:, 1:], rtol=1e-5, atol=1e-6)


def _by_engine_in_quarters() -> list[list[float]]:
    colossalai.launch_from_torch({"clip_grad_norm": 0.1, "gradient_accumulation": 2})
    module, rows = model(), []
    optimizer = sgd(module)
    engine, loader, _, lr_scheduler = colossalai.initialize(
        module,
        optimizer,
        nn.CrossEntropyLoss(),
        get_dataloader(data(), batch_size=4),
        lr_scheduler=LinearWarmupLR(optimizer, total_steps=4, warmup_steps=1),
    )
    assert len(loader) == 4
    for x, y in itertools.chain(loader, loader):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        rows.append([engine.lr, *torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()])
        lr_scheduler.step()
    return rows


def _resumed(folder: str, steps: int) -> list[float]:
    colossalai.launch_from_torch({"train": {"output_dir": folder}})
    module = model()
    optimizer = sgd(module)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=10)
    engine, loader, _, lr_scheduler = colossalai.initialize(
        module, optimizer, nn.CrossEntropyLoss(), get_dataloader(data(), batch_size=4), None, lr_scheduler
    )
    engine.resume()
    rates = []
    for _, (x, y) in zip(range(steps), loader, strict=False):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        lr_scheduler.step()
        rates.append(engine.lr)
    engine.save()
    return rates


def test_a_resumed_run_has_the_state_of_the_programs_scheduler(tmp_path: Path) -> None:
    ((first,), (second,)) = (on_ranks(1, _resumed, str(tmp_path), 2, init="deepspeed") for _ in range(2))
    assert [*first, *second] == pytest.approx([0.5, 0.45, 0.4, 0.35])


# ---- gradients ----


def _gradients() -> Any:
    colossalai.launch_from_torch({})
    module = model()
    engine, *_ = colossalai.initialize(module, sgd(module), nn.CrossEntropyLoss(), get_dataloader(data(), batch_size=4))
    rank = gpc.get_local_rank(ParallelMode.DATA)
    x, y = data(8)[4 * rank : 4 * rank + 4]
    engine.backward(engine.criterion(engine(x), y))
    before = [p.grad.clone() for p in module.parameters()]
    engine.step()
    return before, [p.grad for p in module.parameters()]


def test_gradients_are_complete_before_the_step_and_gone_after_it() -> None:
    """At ZeRO 0 they are the mean over replicas; ColossalAI keeps them until zero_grad()."""
    module = model()
    x, y = data(8)[:]
    nn.functional.cross_entropy(module(x), y).backward()
    for before, after in on_ranks(2, _gradients, init="deepspeed"):
        torch.testing.assert_close(before, [p.grad for p in module.parameters()])
        assert after == [None] * 4


# ---- ZeRO 3 by wrappers ----


def _losses_by_lr(file: str) -> Any:
    colossalai.launch_from_torch({})
    module = model()
    optimizer = colossalai.nn.HybridAdam(module.parameters(), lr=0.0)
    wrapped = colossalai.zero.ZeroDDP(module, colossalai.gemini.GeminiManager("auto"))
    with pytest.raises(RuntimeError, match="ZeroOptimizer\\(optimizer, model\\)"):
        wrapped(data()[:][0])
    optimizer = colossalai.zero.ZeroOptimizer(optimizer, wrapped, initial_scale=2**5)
    losses, (x, y) = [], data()[:]
    for lr in (0.0, 0.1, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(wrapped(x), y))
        optimizer.backward(losses[-1])
        optimizer.step()
    save_checkpoint(file, 0, wrapped.module)
    spec = wrapped.engine.job.spec
    return [loss.item() for loss in losses], (spec.zero.stage, spec.optimizer.target)


def test_zero_ddp_trains_at_the_learning_rate_of_its_optimizer(tmp_path: Path) -> None:
    file = str(tmp_path / "weights.pt")
    for losses, run in on_ranks(2, _losses_by_lr, file, init="deepspeed"):
        assert run == (3, "torch.optim.AdamW"), "a subclass that only has other defaults steps as its base"
        assert losses[1] == losses[0]
        assert losses[2] < losses[1]
    saved = torch.load(file)["model"]
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in model().state_dict().items()
    }


# ---- loaders ----


def _indices() -> Any:
    colossalai.launch_from_torch({})
    rank, found = gpc.get_global_rank(), []
    for shuffle, drop_last in itertools.product((False, True), (False, True)):
        ours = DataParallelSampler(data(7), shuffle=shuffle, drop_last=drop_last)
        torchs = DistributedSampler(data(7), 2, rank, shuffle, seed=0, drop_last=drop_last)
        for epoch in range(2):
            torchs.set_epoch(epoch)
            found.append((list(ours), list(torchs), len(ours)))
    return found


def test_the_sampler_is_torchs_with_epochs_that_count_themselves() -> None:
    for found in on_ranks(2, _indices, init="deepspeed"):
        for ours, torchs, length in found:
            assert ours == torchs
            assert len(ours) == length


# ---- checkpoints ----


def _saved(file: str, config: dict[str, Any]) -> list[float]:
    colossalai.launch_from_torch(config)
    module = colossalai.build_pipeline_model(model())
    engine, *_ = colossalai.initialize(module, sgd(module), nn.CrossEntropyLoss(), get_dataloader(data(), batch_size=8))
    save_checkpoint(file, 3, engine.model)
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def _loaded(file: str, config: dict[str, Any]) -> Any:
    colossalai.launch_from_torch(config)
    module = colossalai.build_pipeline_model(model())
    for p in module.parameters():
        nn.init.zeros_(p)
    epoch = load_checkpoint(file, module)
    return epoch, torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


def test_a_file_of_a_pipeline_has_the_whole_model(tmp_path: Path) -> None:
    file, two = str(tmp_path / "weights.pt"), {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    stages = on_ranks(2, _saved, file, two, init="deepspeed")
    whole = torch.load(file)["model"]
    assert {name: value.tolist() for name, value in whole.items()} == {
        name: value.tolist() for name, value in model().state_dict().items()
    }
    loaded = on_ranks(2, _loaded, file, two, init="deepspeed")
    assert loaded == [(3, stage) for stage in stages]
    assert all(stages)


def _refused(file: str) -> str:
    colossalai.launch_from_torch({})
    with pytest.raises(RuntimeError) as error:
        load_checkpoint(file, nn.Sequential(nn.Linear(6, 8)))
    return str(error.value)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "model": model().state_dict()}, tmp_path / "w.pt")
    (error,) = on_ranks(1, _refused, str(tmp_path / "w.pt"), init="deepspeed")
    assert "missing in the file [], unknown to the model ['2.weight', '2.bias']" in error


# ---- trainer ----


def _calls() -> Any:
    colossalai.launch_from_torch({})
    module, calls = model(), []

    class Recorder(hooks.BaseHook):
        def after_hook_is_attached(self, trainer: Any) -> None:
            calls.append("attached")

        def before_train_epoch(self, trainer: Any) -> None:
            calls.append(f"epoch {trainer.cur_epoch}")

        def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
            calls.append((tuple(output.shape), tuple(label.shape), trainer.cur_step))

        def after_test(self, trainer: Any) -> None:
            calls.append("tested")

    loader = get_dataloader(data(), batch_size=8)
    engine, loader, *_ = colossalai.initialize(module, sgd(module), nn.CrossEntropyLoss(), loader)
    trainer = Trainer(engine)
    trainer.fit(loader, epochs=3, max_steps=3, test_dataloader=loader, test_interval=2, hooks=[Recorder(1)])
    predicted = trainer.predict(data()[:][0][:2])
    assert not engine.training
    with pytest.raises(TypeError, match="derive its class from BaseHook"):
        trainer.fit(loader, 1, hooks=[print])
    with pytest.raises(ValueError, match="Trainer\\(engine, timer=MultiTimer\\(\\)\\)"):
        trainer.fit(loader, 1, hooks=[hooks.ThroughputHook()])
    return calls, tuple(predicted.shape), engine.steps_done


def test_the_trainer_calls_hooks_and_ends_at_max_steps() -> None:
    ((calls, predicted, steps),) = on_ranks(1, _calls, init="deepspeed")
    step = ((8, 3), (8,))
    assert calls == ["attached", "epoch 0", (*step, 0), (*step, 1), "tested", "epoch 1", (*step, 2)]
    assert (predicted, steps) == ((2, 3), 3)


# ---- refusals ----


def _wrong_calls() -> Any:
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4})
    errors = []
    for call in (
        lambda: colossalai.pipeline.PipelinableContext().model,
        lambda: _cut(["0", "nothing"]),
        lambda: _cut(["0", lambda attention_mask=None: attention_mask]),
        lambda: _cut(["0", "SPLIT_NODE", "2"]),
        lambda: colossalai.initialize(model(), None, None, get_dataloader(data(), batch_size=6)),
        lambda: colossalai.engine.PipelineSchedule(4, data_process_func=lambda stage_output, batch: batch),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        errors.append(str(error.value))
    return errors


def _cut(exec_seq: list[Any]) -> None:
    context = colossalai.pipeline.PipelinableContext()
    with context:
        model()
    context.to_layer_list(exec_seq)
    context.partition(1, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))


def test_mistakes_tell_what_to_write() -> None:
    parts = (
        "build it within `with pipelinable:`",
        "no module 'nothing'",
        "pass it on with the activations",
        "counts=[...]",
        "cuts it into 4 micro-batches",
        "takes one argument",
    )
    for errors in on_ranks(2, _wrong_calls, init="deepspeed"):
        for error, part in zip(errors, parts, strict=True):
            assert part in error


def test_a_context_without_a_launch_says_so() -> None:
    for read in (lambda: gpc.config, lambda: gpc.pipeline_parallel_size):
        with pytest.raises(DslparError, match="HST231 not-launched"):
            read()
    assert not gpc.is_initialized(ParallelMode.DATA)
