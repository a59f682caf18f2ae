"""Adam under offload: which implementation steps, that both give equal steps, and that runs can switch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dslpar.distributed import deepspeed_patches
from dslpar.distributed.deepspeed_patches.optimizers import correct_bias_exactly
from dslpar.engine import offloaded_adam
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import job_of, run

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PIPE = sections.Parallel(pipeline=sections.PipelineParallel(size=2))


def _offloaded(stage: int = 2, **keys: Any) -> Job:
    return job(2, zero=sections.Zero(stage=stage, extra=OFFLOAD), **{"optimizer": sections.AdamW(lr=1e-2)} | keys)


# ---- the choice ----


def _choice(made: Job, on_device: bool, error: Callable[[int], str]) -> tuple[str, str]:
    """Return the optimizer's class, and the log's message about it; `error` is why the op does not load on a rank."""
    engine_rank = torch.distributed.get_rank()
    offloaded_adam._computes_on_device = lambda: on_device
    offloaded_adam._load_error = lambda: error(engine_rank)
    lines: list[str] = []
    offloaded_adam.log = SimpleNamespace(info=lambda text, *args: lines.append(text % args))  # type: ignore[assignment]
    optimizer = engine_of(made).deepspeed.basic_optimizer
    return type(optimizer).__name__, "; ".join(lines)


def _loads_nowhere(rank: int) -> str:
    return "its op does not load: no compiler"


def _loads_on_rank_0(rank: int) -> str:
    return _loads_nowhere(rank) if rank else ""


def _loads(rank: int) -> str:
    return ""


NOT = "the offloaded optimizer is torch's Adam, not DeepSpeedCPUAdam: "
REFUSALS = {
    "ranks on CPUs": (_offloaded(), False, _loads, "the model computes on the CPU too"),
    "no compiler": (_offloaded(), True, _loads_nowhere, "its op does not load: no compiler"),
    "no compiler on one host": (_offloaded(3), True, _loads_on_rank_0, "its op does not load: no compiler"),
    "amsgrad": (_offloaded(optimizer=sections.AdamW(lr=1e-2, amsgrad=True)), True, _loads, "it has no amsgrad"),
    "tied weights": (_offloaded(1, parallel=PIPE), True, _loads, "it rounds the end of a tensor differently"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_where_the_op_cannot_be_every_rank_takes_torch_s_and_says_why(name: str) -> None:
    made, on_device, error, reason = REFUSALS[name]
    for optimizer, line in on_ranks(2, _choice, made, on_device, error, init="deepspeed"):
        assert optimizer == "AdamW"
        assert line.startswith(NOT + reason)


SILENT = {
    "not offloaded": job(2, zero=sections.Zero(stage=2), optimizer=sections.AdamW(lr=1e-2)),
    "a program's own choice": _offloaded(deepspeed={"optimizer": {"params": {"torch_adam": True}}}),
}


@pytest.mark.parametrize("name", SILENT)
def test_elsewhere_nothing_is_chosen(name: str) -> None:
    assert on_ranks(2, _choice, SILENT[name], True, _loads, init="deepspeed") == [("AdamW", "")] * 2


def test_what_stopped_the_compiler_is_in_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def load(self: object, verbose: bool = False) -> None:
        raise RuntimeError("Ninja is required to load C++ extensions\nand more")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(CPUAdamBuilder, "load", load)
    assert offloaded_adam._load_error() == "its op does not load: Ninja is required to load C++ extensions"


def test_m19_a_killed_compilation_still_leaves_torch_s_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.file_baton import FileBaton

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    owner = FileBaton(str(lock))
    assert owner.try_acquire()
    os.close(owner.fd)  # as the kernel does when the owner is killed
    assert not FileBaton(str(lock)).try_acquire(), "torch now removes it: the patch can go"
    found = []

    class Builder(OpBuilder):  # type: ignore[misc]  # DeepSpeed ships no types
        def __init__(self) -> None:
            super().__init__("cpu_adam")

        def absolute_name(self) -> str:
            return "tests.cpu_adam"

        def sources(self) -> list[str]:
            return []

        def is_compatible(self, verbose: bool = False) -> bool:
            found.append(lock.exists())
            return False

    monkeypatch.setattr(OpBuilder, "jit_load", OpBuilder.jit_load)  # other tests get DeepSpeed's own again
    deepspeed_patches.build_ops_alone()
    deepspeed_patches.build_ops_alone()  # a second engine of a program: a nested lock would wait for itself
    with pytest.raises(RuntimeError, match="Unable to JIT load the cpu_adam op"):
        Builder().jit_load()
    assert found == [False]


# ---- the op ----


@pytest.fixture(scope="module")
def _op() -> None:
    """Build it once, apart from the tests."""
    code = "from dslpar.engine import offloaded_adam; import sys; sys.exit(offloaded_adam._load_error() or 0)"
    built = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"DeepSpeedCPUAdam: {built.stderr.strip().splitlines()[-1]}")


# ---- M20, with the formula instead of the op, which `make prove` compiles ----


class _UncorrectedOp:
    """The formula of DeepSpeed's kernel without its own bias correction, in float64."""

    adam_rollback = destroy_adam = None

    def adam_update(
        self, _: int, step: int, lr: float, b1: float, b2: float, eps: float, decay: float, *rest: Any
    ) -> None:
        corrects, p, gradient, m, v = rest
        assert not corrects
        m.mul_(b1).add_(gradient, alpha=1 - b1)
        v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        p.mul_(1 - lr * decay).sub_(lr * m / (v.sqrt() + eps))


def test_m20_the_correction_is_torch_s() -> None:
    """Use betas and an eps that matter: in float64, with betas that fp32 represents exactly."""
    adam = SimpleNamespace(ds_opt_adam=_UncorrectedOp(), adam_w_mode=True)
    correct_bias_exactly(SimpleNamespace(basic_optimizer=adam))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(6, generator=generator, dtype=torch.float64)
    other = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([other], lr=0.1, betas=(0.5, 0.75), eps=0.125, weight_decay=0.25)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 4):
        other.grad = torch.randn(6, generator=generator, dtype=torch.float64)
        adam.ds_opt_adam.adam_update(0, step, 0.1, 0.5, 0.75, 0.125, 0.25, True, p, other.grad, m, v)
        optimizer.step()
        assert p.tolist() == pytest.approx(other.tolist(), rel=1e-12)


pytestmark_op = [pytest.mark.prove, pytest.mark.usefixtures("_op")]


def _cpu_adam(p: torch.nn.Parameter, patched: bool = True, **keys: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam([p], **keys)
    if patched:
        deepspeed_patches.correct_bias_exactly(SimpleNamespace(basic_optimizer=optimizer))  # type: ignore[arg-type]
    return optimizer


def _gradients(num_steps: int, length: int = 77) -> torch.Tensor:
    """Return gradients of a length that fills no vector register."""
    return torch.randn(num_steps, length, generator=torch.Generator().manual_seed(0))


def _stepped(optimizer: Any, gradients: torch.Tensor) -> torch.Tensor:
    (p,) = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        p.grad = gradient.to(p.dtype, copy=True)
        optimizer.step()
    return p.detach()


class TestOp:
    """The compiled op."""

    pytestmark = pytestmark_op

    @pytest.mark.parametrize("decouples", [True, False], ids=["AdamW", "Adam"])
    def test_its_steps_are_adam_s(self, decouples: bool) -> None:
        """The tolerance is the rounding of 30 fp32 steps, 6e-8 each."""
        keys: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8, "betas": (0.9, 0.999)}
        initial, gradients = _gradients(1)[0], _gradients(30)
        found = _stepped(_cpu_adam(torch.nn.Parameter(initial.clone()), adamw_mode=decouples, **keys), gradients)
        cls = torch.optim.AdamW if decouples else torch.optim.Adam
        expected = _stepped(cls([torch.nn.Parameter(initial.double())], **keys), gradients)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)

    def _resumed(self, patched: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights after 60 steps, and the same with another instance for the last 30."""
        gradients, initial = _gradients(60), _gradients(1)[0]
        whole = _stepped(_cpu_adam(torch.nn.Parameter(initial.clone()), patched, lr=1e-2), gradients)
        p = torch.nn.Parameter(initial.clone())
        first = _cpu_adam(p, patched, lr=1e-2)
        _stepped(first, gradients[:30])
        second = _cpu_adam(p, patched, lr=1e-2)
        second.state[p] = first.state[p]
        return whole, _stepped(second, gradients[30:])

    def test_a_run_that_goes_on_takes_the_same_bits(self) -> None:
        assert torch.equal(*self._resumed(patched=True))

    def test_m20_deepspeed_s_own_still_takes_others(self) -> None:
        assert not torch.equal(*self._resumed(patched=False))

    def test_it_still_rounds_the_end_of_a_tensor_otherwise(self) -> None:
        """Once this fails, `_unfit` need not mention tied weights."""
        gradients = _gradients(300, 64)
        whole = _stepped(_cpu_adam(torch.nn.Parameter(torch.ones(64)), lr=1e-2), gradients)
        begin = _stepped(_cpu_adam(torch.nn.Parameter(torch.ones(63)), lr=1e-2), gradients[:, :63])
        assert torch.equal(whole[:48], begin[:48])
        assert not torch.equal(whole[48:63], begin[48:])


# ---- in an engine ----


def _steps(made: Job, on_device: bool) -> tuple[str, list[tuple[float, float]]]:
    offloaded_adam._computes_on_device = lambda: on_device
    engine = engine_of(made)
    rows = []
    for step in range(3):
        loss = engine.train_batch(batches(made, engine.groups.coord["data"], step))
        rows.append((loss, engine.grad_norm))
    return type(engine.deepspeed.basic_optimizer).__name__, rows


def _run(made: Job, until: int, on_device: bool) -> Any:
    offloaded_adam._computes_on_device = lambda: on_device
    return run(made, until)


class TestEngine:
    """The engine as with a device's host."""

    pytestmark = pytestmark_op

    @pytest.mark.parametrize("optimizer", [sections.AdamW(lr=1e-2, weight_decay=0.1), sections.Adam(lr=1e-2)])
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_a_run_takes_it_and_its_losses_are_torch_s(self, stage: int, optimizer: Any) -> None:
        """The difference is 1e-7 per step, which Adam's division by a tiny gradient's size enlarges."""
        made = _offloaded(stage, optimizer=optimizer)
        found, expected = (on_ranks(2, _steps, made, device, init="deepspeed") for device in (True, False))
        for (name, rows), (other, others) in zip(found, expected, strict=True):
            assert (name, other) == ("DeepSpeedCPUAdam", type(optimizer).__name__)
            for row, torchs in zip(rows, others, strict=True):
                assert row == pytest.approx(torchs, rel=1e-5)

    @pytest.mark.parametrize("stage", [2, 3])
    @pytest.mark.parametrize("begins_with_op", [True, False], ids=["op first", "torch first"])
    def test_a_run_goes_on_with_the_other(self, tmp_path: Path, begins_with_op: bool, stage: int) -> None:
        first = job_of(tmp_path / "a", 2, zero=sections.Zero(stage=stage, extra=OFFLOAD))
        whole = job_of(tmp_path / "b", 2, zero=sections.Zero(stage=stage, extra=OFFLOAD))
        before = on_ranks(2, _run, first, 3, begins_with_op, init="deepspeed")
        after = on_ranks(2, _run, first, 6, not begins_with_op, init="deepspeed")
        expected = on_ranks(2, _run, whole, 6, False, init="deepspeed")
        for rank in range(2):
            lines = [*before[rank][0], *after[rank][0]]
            assert [line[0] for line in lines] == [1, 2, 3, 4, 5, 6]
            assert [line[1] for line in lines] == pytest.approx([line[1] for line in expected[rank][0]], rel=1e-5)

    def test_a_resumed_run_of_it_takes_the_same_bits(self, tmp_path: Path) -> None:
        first, whole = (job_of(tmp_path / name, 2, zero=sections.Zero(stage=2, extra=OFFLOAD)) for name in "ab")
        on_ranks(2, _run, first, 3, True, init="deepspeed")
        after = on_ranks(2, _run, first, 6, True, init="deepspeed")
        expected = on_ranks(2, _run, whole, 6, True, init="deepspeed")
        for (lines, held), (others, kept) in zip(after, expected, strict=True):
            assert lines == others[3:]
            assert all(torch.equal(value, kept[key]) for key, value in held.items())
