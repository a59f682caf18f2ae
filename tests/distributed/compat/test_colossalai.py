"""ColossalAI's API: schedules, registries, gradient handlers, and a whole ColossalAI script."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslpar
from dslpar.cluster.network import free_port
from dslpar.core.errors import DslparError
from dslpar.schema.class_registry import Registry
from tests.support.paths import ROOT
from tests.support.plain_models import GLOBAL, PIPE, assert_equal, mlp, plain_torch, points, sgd, written
from tests.support.ranks import on_ranks
from tests.support.runs import BIN, deepspeed, start

CONFIG = "batch = dict(global_size=16, accumulation=4)\ntrain = dict(steps=5, clip_grad_norm=0.5)\n"


# ---- schedules ----


def micro_batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the global batches of five steps, in pieces of `size` samples."""
    for step in range(5):
        x, y = points(step)
        yield from zip(x.split(size), y.split(size), strict=True)


def _scheduled(path: str, size: int) -> Any:
    model = dslpar.build_pipeline_model(mlp(), num_chunks=1)
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd, criterion=nn.CrossEntropyLoss())
    schedule, data_iter, rows = dslpar.PipelineSchedule(num_microbatches=4), micro_batches(size), []
    engine.train()
    given: list[Any] = []
    for _ in range(5):
        engine.zero_grad()
        given.append(schedule.forward_backward_step(engine, data_iter))
        engine.step()
        rows.append(engine.grad_norm)
    held = schedule.forward_backward_step(engine, micro_batches(size), forward_only=True, return_output_label=False)
    return given, rows, {name: p.detach().clone() for name, p in engine.named_parameters()}, held


@pytest.mark.parametrize("size", [4, 16], ids=["micro-batches", "batches"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_pipeline_schedule_gives_output_label_and_loss(tmp_path: Path, world: int, size: int) -> None:
    path = written(tmp_path, (PIPE if world == 2 else "") + CONFIG)
    ranks = on_ranks(world, _scheduled, path, size, init="deepspeed")
    *_, (given, norms, _, held) = ranks
    losses = [loss.item() for *_, loss in given]
    weights = [weights for _, _, weights, _ in ranks]
    assert_equal([(list(zip(losses, norms, strict=True)), part) for part in weights], plain_torch(mlp(), micro_size=4))
    output, label, _ = given[0]
    x, y = points(0)
    assert torch.equal(label, y)
    assert torch.allclose(output, mlp()(x), rtol=1e-6, atol=1e-6)
    assert not output.requires_grad
    module = mlp()
    module.load_state_dict({name: p for part in weights for name, p in part.items()})
    assert held[:2] == (None, None)
    assert held[2].item() == pytest.approx(nn.functional.cross_entropy(module(x), y).item(), rel=1e-6)
    for rank in ranks[:-1]:
        assert rank[0] == [(None, None, None)] * 5, "nothing on the first stage"


def _mistakes(path: str) -> list[str]:
    model = mlp()
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()))
    said = []
    for schedule, data in (
        (dslpar.PipelineSchedule(num_microbatches=2), micro_batches(4)),
        (dslpar.PipelineSchedule(num_microbatches=4), iter(list(micro_batches(4))[:3])),
        (dslpar.NonPipelineSchedule(), micro_batches(4)),
    ):
        with pytest.raises(DslparError) as error:
            schedule.forward_backward_step(engine, data)  # type: ignore[attr-defined]
        said.append(str(error.value))
    return said


def test_what_a_schedule_refuses(tmp_path: Path) -> None:
    for said in on_ranks(2, _mistakes, written(tmp_path, PIPE + CONFIG), init="deepspeed"):
        assert "PIP207 other-num-microbatches: num_microbatches is 2, but the job's accumulation is 4" in said[0]
        assert "BAT208 data-ended: the data ended after 3 of 4 micro-batches of a step" in said[1]
        assert "PIP206 single-pass-in-a-pipeline" in said[2]


def _one_at_a_time(path: str) -> Any:
    model = mlp()
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()))
    schedule, data_iter, rows = dslpar.NonPipelineSchedule(), micro_batches(4), []
    for _ in range(5):
        losses = []
        for _ in range(4):
            engine.zero_grad()
            *_, loss = schedule.forward_backward_step(engine, data_iter)
            losses.append(loss.item())
            engine.step()
        rows.append((sum(losses) / 4, engine.grad_norm))
    return rows, {name: p.detach().clone() for name, p in engine.named_parameters()}


def test_a_schedule_without_pipeline(tmp_path: Path) -> None:
    ranks = on_ranks(1, _one_at_a_time, written(tmp_path, CONFIG), init="deepspeed")
    assert_equal(ranks, plain_torch(mlp(), micro_size=4))


# ---- gradient handlers ----


class Halve(dslpar.BaseGradientHandler):
    """Multiplies all gradients by `by`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, by: float = 0.5) -> None:
        super().__init__(model, optimizer)
        self.by = by

    def handle_gradient(self) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.mul_(self.by)


class FreezeBiases(dslpar.BaseGradientHandler):
    """Zeroes all gradients of biases."""

    def handle_gradient(self) -> None:
        for p in self.model.parameters():
            if p.dim() == 1:
                assert p.grad is not None
                p.grad.zero_()


def _handled(path: str) -> Any:
    dslpar.GRADIENT_HANDLER.register_module(Halve)
    model = mlp()
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()))
    before = dict(mlp().named_parameters())
    engine.train_batch(list(micro_batches(4))[:4])
    moved = {name: not torch.equal(before[name], p) for name, p in engine.named_parameters()}
    return engine.grad_norm, moved


@pytest.mark.parametrize("world", [1, 2])
def test_handlers_come_after_the_sum_and_before_the_norm(tmp_path: Path, world: int) -> None:
    text = (PIPE if world == 2 else "") + CONFIG
    handlers = {
        "": 1.0,
        "gradient_handler = [dict(type='Halve')]\n": 0.5,
        "gradient_handler = [dict(type='Halve'), dict(type='Halve', by=0.5)]\n": 0.25,
    }
    norms = {
        ratio: on_ranks(world, _handled, written(tmp_path, text + more), init="deepspeed")[0][0]
        for more, ratio in handlers.items()
    }
    assert norms == pytest.approx({ratio: ratio * norms[1.0] for ratio in norms}, rel=1e-6)
    frozen = written(tmp_path, text + f"gradient_handler = [dict(type='{__name__}.FreezeBiases')]\n")
    moved = {
        name: value for _, part in on_ranks(world, _handled, frozen, init="deepspeed") for name, value in part.items()
    }
    assert moved == {name: name.endswith("weight") for name in dict(mlp().named_parameters())}


def _not_a_handler(path: str) -> str:
    with pytest.raises(DslparError) as error:
        dslpar.initialize(path, model=mlp())
    return str(error.value)


def test_what_is_no_handler_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, CONFIG + "gradient_handler = [dict(type='torch.nn.Linear')]\n")
    said = on_ranks(1, _not_a_handler, path, init="deepspeed")[0]
    assert "CFG224 not-a-handler: 'torch.nn.Linear' is not a gradient handler" in said


# ---- registries ----


def test_a_registry_is_filled_by_name_and_says_what_it_lacks() -> None:
    names = Registry("LAYERS", fallback="torch.nn")

    @names.register_module
    class Plain: ...

    @names.register_module("Chosen")
    class Other: ...

    @names.register_module(name="Third")
    class Another: ...

    assert names.names == ("Plain", "Chosen", "Third")
    assert [names.get(name) for name in ("Plain", "Chosen", "Third", "Linear")] == [Plain, Other, Another, nn.Linear]
    assert names.register_module(Plain) is Plain, "the same class once more changes nothing"
    assert names.has("ReLU")
    assert not names.has("functional"), "a module of torch.nn is no layer"
    with pytest.raises(
        DslparError, match="CFG221 not-registered: unknown name 'Linaer' in LAYERS\nhelp: did you mean 'Linear'"
    ):
        names.get("Linaer")
    with pytest.raises(DslparError, match=r"CFG222 registered-twice: LAYERS already has a 'Chosen': .*py:[0-9]+:1"):
        names.register_module(name="Chosen")(Another)
    names.remove("Chosen")
    assert not names.has("Chosen")


# ---- a script in ColossalAI's style, run for real ----

SCRIPT = """\
from pathlib import Path
import torch, torch.nn as nn
import dslpar
from dslpar import LAYERS, MODELS, ModelFromConfig, PipelineSchedule, build_pipeline_model_from_cfg

@LAYERS.register_module
class Scale(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = nn.Parameter(torch.full((1,), by))
    def forward(self, x):
        return x * self.by

@MODELS.register_module
class MyModel(ModelFromConfig):
    def __init__(self, width):
        super().__init__()
        self.layers_cfg = [dict(type='Linear', in_features=2, out_features=width), dict(type='Tanh'),
                           dict(type='Scale', by=2.0), dict(type='Linear', in_features=width, out_features=2)]

class Quadrants(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return 256
    def __getitem__(self, i):
        return self.x[i], (self.x[i].prod() > 0).long()

run = dslpar.start(Path(__file__).with_name('cfg.py'))
config = dict(type='MyModel', width=16)
model = build_pipeline_model_from_cfg(config, num_chunks=1)
engine, train_dataloader, test_dataloader, lr_scheduler = dslpar.initialize(
    run, model=model, criterion=nn.CrossEntropyLoss(), train_data=Quadrants(), eval_data=Quadrants(),
    optimizer=lambda groups: torch.optim.Adam(groups, lr=0.05))
schedule = PipelineSchedule(num_microbatches=4)
for epoch in range(4):
    engine.train()
    data_iter = iter(train_dataloader)
    for i in range(train_dataloader.num_steps):
        engine.zero_grad()
        output, label, loss = schedule.forward_backward_step(engine, data_iter)
        engine.step()
    engine.eval()
    data_iter, right = iter(test_dataloader), 0
    for i in range(test_dataloader.num_steps):
        output, label, loss = schedule.forward_backward_step(engine, data_iter, forward_only=True)
        if output is not None:
            right += (output.argmax(-1) == label).sum().item()
    if output is not None:
        print(f'epoch {epoch} loss {loss.item():.6f} right {right}', flush=True)
"""
SCRIPT_CONFIG = """\
parallel = dict(pipeline=2)
batch = dict(global_size=32, accumulation=4)
train = dict(steps=32)
gradient_handler = []
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "cfg.py").write_text(SCRIPT_CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def epochs(output: str) -> list[str]:
    return re.findall(r"^.*?(epoch \d loss [\d.]+ right \d+)$", output, re.MULTILINE)


LAUNCHERS = {
    "torchrun": lambda: [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())],
    "deepspeed": lambda: deepspeed("--num_gpus", "2"),
}


@pytest.mark.prove
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_script_of_colossalai_s_kind_runs_under_a_launcher(script: Path, launcher: str) -> None:
    piped = start([*LAUNCHERS[launcher](), str(script)])
    assert piped.status == 0, piped.output
    said = epochs(piped.output)
    assert len(said) == 4
    assert int(said[-1].split()[-1]) > 220, said


@pytest.mark.prove
def test_the_script_is_the_same_in_one_process(script: Path) -> None:
    piped = start([*LAUNCHERS["torchrun"](), str(script)])
    (script.parent / "cfg.py").write_text(SCRIPT_CONFIG.replace("pipeline=2", "pipeline=1"))
    alone = start([sys.executable, str(script)])
    assert alone.status == 0, alone.output
    assert epochs(alone.output) == epochs(piped.output)
    assert GLOBAL == 16


# ---- the code in docs/porting.md ----


def _readme(folder: str, code: str) -> tuple[float | None, int]:
    os.chdir(folder)
    torch.manual_seed(0)
    images = torch.utils.data.TensorDataset(torch.randn(64, 784), torch.randint(10, (64,)))
    names = {"dslpar": dslpar, "nn": nn, "pairs": images}
    exec(code, names)
    loss: Any = names["loss"]
    engine: Any = names["engine"]
    return None if loss is None else loss.item(), engine.steps_done


def test_the_program_of_the_porting_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "porting.md").read_text()
    (code,) = re.findall(r"```python\n(run = dslpar.start.*?)```", page, re.DOTALL)
    config = re.search(r"# (parallel = .*)", code)
    assert config
    (tmp_path / "config.py").write_text(config[1].replace("; ", "\n"))
    assert dslpar.lint(tmp_path / "config.py", 2, by_program=True)[0].code == "CFG111"
    (nothing, steps), (loss, _) = on_ranks(2, _readme, str(tmp_path), code, init="deepspeed")
    assert nothing is None, "the first stage has no loss"
    assert loss is not None
    assert 0 < loss < 10
    assert steps == 2
