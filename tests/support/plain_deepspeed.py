"""Programs of plain DeepSpeed on two ranks, and their results in a process without dslpar.

    python -m tests.support.plain_deepspeed FILE NAME ...     # pickles the fields of an `Alone` of these programs

A program sets its own seeds and keeps to what DeepSpeed documents. It is written so that a patch of dslpar's that
reached it would change its result, where the patch changes results at all. This module does not import dslpar, except
within the command above, which trains the programs before and after the import.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from tests.support import warm

WORLD, STEPS, WIDTH = 2, 3, 8
Result = dict[str, Any]
"""Losses, norms and skipped steps by step, the weights, and what DeepSpeed has chosen; or the error alone."""


class Program(NamedTuple):
    """A way to build an engine of DeepSpeed and to train it."""

    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    model: Callable[[], nn.Module] = lambda: _mlp()
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), 0.05)
    mpu: Callable[[], Any] = lambda: None
    overflows_at: int = -1
    """The step whose inputs are infinite."""
    error: type[Exception] | tuple[()] = ()
    """What DeepSpeed raises, which is the result."""

    def build(
        self,
        change_model: Callable[[nn.Module], object] = lambda model: None,
        change_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
    ) -> Any:
        """Return the engine, or the error that is the program's result. All ranks must call it together."""
        torch.manual_seed(0)
        model = self.model()
        change_model(model)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
        config |= {"zero_force_ds_cpu_optimizer": False, **self.config}
        try:
            with _quiet():
                engine, *_ = deepspeed.initialize(
                    model=model, optimizer=change_optimizer(self.optimizer(model)), config=config, mpu=self.mpu()
                )
        except self.error as error:
            return error
        return engine

    def train(self, engine: Any) -> Result:
        """Return what a few steps find on this rank. All ranks must call it together."""
        try:
            return {"error": repr(engine)} if isinstance(engine, Exception) else self._train(engine)
        except self.error as error:
            return {"error": repr(error)}

    def _train(self, engine: Any) -> Result:
        losses, norms, skipped = [], [], []
        for step in range(STEPS):
            batches = [self._batch(engine, step, micro) for micro in range(2)]
            with _quiet():
                losses.append(
                    _pipeline_step(engine, batches) if engine.pipeline_parallelism else _step(engine, batches)
                )
            norm = engine.get_global_grad_norm()
            norms.append(norm if norm is None else float(norm))
            skipped.append(bool(getattr(engine.optimizer, "overflow", False)))
        result: Result = {"losses": losses, "norms": norms, "skipped": skipped, "weights": _weights(engine)}
        result["optimizer"] = type(engine.optimizer).__name__
        result["rates"] = [group["lr"] for group in engine.optimizer.param_groups]
        return result

    def _batch(self, engine: Any, step: int, micro: int) -> tuple[Tensor, Tensor]:
        rank = 0 if engine.pipeline_parallelism else torch.distributed.get_rank()
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        x, y = torch.randn(2, 2, 3, WIDTH, generator=generator).to(self.dtype)
        return (x * torch.inf if step == self.overflows_at else x), y


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, WIDTH))


def _tied_stages() -> nn.Module:
    """Return two stages that share a weight. They mark it as tensor parallel, as a vocabulary's layers do."""
    tied = [TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(2)]
    layers = [tied[0], LayerSpec(nn.Tanh), LayerSpec(nn.Linear, WIDTH, WIDTH), tied[1]]
    with _quiet():
        model: nn.Module = PipelineModule(
            layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
    for p in model.parameters():
        p.tensor_model_parallel = True  # type: ignore[attr-defined]
    return model


@cache
def _sequence_parallel() -> Any:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(WORLD)
    return parallel_state_sp


def _adagrad_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.Adagrad([{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.2}])


def _cpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.05)
    return optimizer


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


_BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PROGRAMS: Mapping[str, Program] = {
    "fp32": Program({}),
    "ZeRO 1, fp32": Program(_zero(1)),
    "ZeRO 2, fp32": Program(_zero(2)),
    "ZeRO 3, fp32": Program(_zero(3)),
    "ZeRO 1, bf16": Program(_zero(1) | _BF16, torch.bfloat16),
    "ZeRO 2, bf16": Program(_zero(2) | _BF16, torch.bfloat16),
    "ZeRO 3, bf16": Program(_zero(3) | _BF16, torch.bfloat16),
    "ZeRO 1, bf16, offloaded": Program(_zero(1, **_OFFLOAD) | _BF16, torch.bfloat16),
    "ZeRO 2, bf16, offloaded, overflow": Program(_zero(2, **_OFFLOAD) | _BF16, torch.bfloat16, overflows_at=0),
    "ZeRO 1, DeepSpeedCPUAdam": Program(_zero(1, **_OFFLOAD), optimizer=_cpu_adam),
    "ZeRO 1, Adagrad in two groups": Program(
        _zero(1) | {"zero_allow_untested_optimizer": True}, optimizer=_adagrad_in_groups, error=IndexError
    ),
    "ZeRO 3, parts of a sequence": Program(_zero(3), mpu=_sequence_parallel),
    "fp16": Program(_zero(1) | {"fp16": {"enabled": True, "loss_scale": 1.0}}, torch.float16, error=ValueError),
    "pipeline, tied, fp32": Program({}, model=_tied_stages),
    "pipeline, tied, ZeRO 1, fp32": Program(_zero(1), model=_tied_stages),
    "pipeline, tied, ZeRO 1, bf16, offloaded": Program(
        _zero(1, **_OFFLOAD) | _BF16, torch.bfloat16, model=_tied_stages
    ),
}


def _step(engine: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return sum(losses)


def _pipeline_step(engine: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    return float(engine.train_batch(iter(batches)))


def _weights(engine: Any) -> list[Any]:
    params = list(engine.module.parameters())
    sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(params) if sharded else contextlib.nullcontext():
        return [value.float().tolist() for value in engine.module.state_dict().values()]


@contextlib.contextmanager
def _quiet() -> Any:
    """Drop what DeepSpeed prints and logs, and the warnings of torch about it, within the context."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# ---- what is patched ----


def callables() -> dict[str, int]:
    """Return the identity of each loaded function and class of DeepSpeed, and of torch's that it may replace."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed" or name in ("torch.nn.functional", "torch.distributed"):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[f"{name}.{key}"] = id(value)
                if issubclass(type(value), type) and value.__module__ == name:  # isinstance would make torch warn
                    found |= _functions(f"{name}.{key}", value)
    return found | _functions("accelerator", get_accelerator())


def _functions(name: str, owner: Any) -> dict[str, int]:
    kinds = (staticmethod, classmethod, property)
    members = vars(owner).items()
    return {f"{name}.{key}": id(value) for key, value in members if callable(value) or isinstance(value, kinds)}


def changed(before: Mapping[str, int]) -> set[str]:
    """Return what is another object now."""
    now = callables()
    added = {name for name in now.keys() - before.keys() if name.startswith("accelerator.")}  # others: new modules
    return added | {name for name, identity in before.items() if now.get(name) != identity}


# ---- a process without dslpar ----


class Alone(NamedTuple):
    """Results of a process without dslpar, and what the import of all its modules changes there."""

    results: dict[str, list[Result]]
    """Of each program, by rank."""
    results_after_import: dict[str, list[Result]]
    changed_by_import: set[str]
    """Names of functions and classes that are other objects after the import."""
    new_filters: list[str]
    """Filters of warnings that the import adds: of libraries that dslpar imports."""
    num_modules: int
    """Number of modules of dslpar that were imported."""


def _trained(names: Sequence[str]) -> dict[str, list[Result]]:
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(WORLD) as ranks:
            calls = [(name, rank, f"file://{folder}/store") for rank in range(WORLD)]
            results[name] = ranks.starmap(_rank, calls, chunksize=1)
    return results


def _rank(name: str, rank: int, store: str) -> Result:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    with _quiet():
        deepspeed.init_distributed("gloo", False, init_method=store, rank=rank, world_size=WORLD)
    program = PROGRAMS[name]
    result = program.train(program.build())
    torch.distributed.barrier()
    return result


def _import_dslpar() -> tuple[set[str], list[str], int]:
    before, filters = callables(), list(warnings.filters)
    package = import_module("dslpar")
    names = (each.name for each in pkgutil.walk_packages(package.__path__, "dslpar."))
    for name in names:
        if not name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
                import_module(name)
    imported = sum(name.startswith("dslpar.") for name in sys.modules)
    return changed(before), [repr(each) for each in warnings.filters if each not in filters], imported


def main(path: str, names: Sequence[str]) -> None:
    """Train the programs, each in its own processes, and pickle an `Alone` to a file."""
    warm.import_plain_deepspeed()
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # slow to compile, and not for training
    results = _trained(names)
    assert "dslpar" not in sys.modules
    of_import = _import_dslpar()
    Path(path).write_bytes(pickle.dumps(Alone(results, _trained(names), *of_import)._asdict()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
