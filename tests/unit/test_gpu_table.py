"""The table of `make gpu` without a GPU: every check exists, every config resolves, baselines are equal GPTs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch import nn

from benchmarks import by_hand
from benchmarks.gpu import attention, families, peak, ranks, runs, speed, training
from benchmarks.gpu.__main__ import CHECKS
from benchmarks.gpu.nano_gpt import NanoGPT
from benchmarks.plain_torch import StockGPT
from dslpar.forecast.stage_memory import stage_memory
from dslpar.forecast.workload import workload_of
from dslpar.linter import check
from tests.support.paths import ROOT

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_a_function(name: str) -> None:
    assert callable(CHECKS[name].function())


TRAINED = {
    f"{form}, {kind}": training.CONFIG.format(form=keys, train="") + more
    for form, keys in training.FORMS.items()
    for kind, more in training.KINDS.items()
}
OF_OTHERS = {
    f"{model}, {kind}": families.config_of(model, kind) for model in families.MODELS for kind in families.KINDS
}
TIMED = {size: speed.CONFIG.format(s=size, train="") for size in (speed.GPT_350M, speed.GPT_1500M)}


@pytest.mark.parametrize(
    "config", [*TRAINED.values(), *OF_OTHERS.values(), *TIMED.values()], ids=[*TRAINED, *OF_OTHERS, "350M", "1.5B"]
)
def test_a_config_of_one_gpu_resolves(config: str) -> None:
    assert check.resolve(check.load_text(config, "gpu.py"), 1).mesh.world_size == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_zero_stage_of_half_precision_is_left_out(dtype: str) -> None:
    assert {f"{dtype}, ZeRO {stage}" for stage in range(4)} <= {*training.KINDS, *training.REFUSED}


def test_what_lint_refuses_is_a_row_of_its_own() -> None:
    assert [(row.seen, row.held) for row in training.refusals()] == [("PRE101", True)] * 4


LAYOUTS = [
    (world, layouts, name)
    for world, layouts in (*ranks.LAYOUTS.items(), (2, ranks.THROUGH_SYMMETRIC_MEMORY))
    for name in layouts
]


@pytest.mark.parametrize(
    ("world", "keys"), [pytest.param(world, layouts[name], id=f"{name}-{world}") for world, layouts, name in LAYOUTS]
)
def test_a_layout_of_several_gpus_resolves(world: int, keys: str) -> None:
    assert check.resolve(check.load_text(ranks.CONFIG + keys, "gpu.py"), world).mesh.world_size == world


def test_one_dim_is_on_every_number_of_gpus() -> None:
    for world, layouts in ranks.LAYOUTS.items():
        assert any(f"size={world}, mode='1d'" in keys for keys in layouts.values()), world


# ---- code that no CPU run reaches ----


def _accelerator_attributes() -> set[str]:
    """Return dslpar's attributes of DeepSpeed's accelerator: `get_accelerator().name`, directly or by a variable."""
    found: set[str] = set()
    for path in (ROOT / "dslpar").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                found |= {node.attr} if owner in ("accelerator", "get_accelerator()") else set()
    return found


def test_the_accelerator_of_gpus_has_what_is_asked_of_it() -> None:
    """A CPU accelerator answers any name, and a run on a GPU would end there."""
    names = _accelerator_attributes()
    assert {"device_name", "set_device", "max_memory_allocated"} <= names
    assert [name for name in sorted(names) if not hasattr(CUDA_Accelerator, name)] == []


def test_a_batch_that_no_device_holds_passes_lint(tmp_path: Path) -> None:
    """Otherwise nothing would run out of memory: lint refuses what does not fit a known device."""
    config = tmp_path / "cfg.py"
    config.write_text(runs.TOO_LARGE)
    runs.write_text(tmp_path, runs.TOO_LARGE_LINES)
    job = check.resolve(check.load(str(config)), 1)
    made = workload_of(job)
    assert made is not None
    assert stage_memory(made, 0).allocated > 150e9


@pytest.mark.parametrize(("world", "name"), [(w, name) for w, layouts in peak.LAYOUTS.items() for name in layouts])
def test_a_layout_whose_peak_is_forecast_resolves(world: int, name: str) -> None:
    job = check.resolve(check.load_text(peak.config_of(peak.LAYOUTS[world][name]), "gpu.py"), world)
    made = workload_of(job)
    assert made is not None
    assert all(stage_memory(made, rank).allocated < 2**33 for rank in range(made.mesh.pipe)), "eight share 80 GB"


@pytest.mark.prove
def test_attention_by_blocks_on_a_cpu() -> None:
    rows = list(attention.blocks(CPU))
    assert len(rows) == len(attention.CASES) * len(attention.TOLERANCE)
    assert [row.name for row in rows if not row.held] == []


# ---- baselines ----

MODELS: dict[str, Callable[[by_hand.Sizes], nn.Module]] = {"plain torch": StockGPT, "nanoGPT-like": NanoGPT}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("sizes", "parameters"), [(speed.GPT_350M, 355e6), (speed.GPT_1500M, 1.44e9)])
def test_the_other_models_are_of_the_size_that_they_are_timed_at(
    name: str, sizes: by_hand.Sizes, parameters: float
) -> None:
    with torch.device("meta"):
        found, ours = (sum(p.numel() for p in model(sizes).parameters()) for model in (MODELS[name], by_hand.GPT))
    assert found == ours
    assert abs(found / parameters - 1) < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_the_other_models_are_causal(name: str) -> None:
    model = MODELS[name](speed.TINY).train()
    ids = torch.randint(speed.TINY.vocab, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % speed.TINY.vocab
    same = (model(ids) - model(changed)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 9 + [False] * 7


@pytest.mark.parametrize("name", speed.OTHERS)
def test_the_other_sides_learn(name: str) -> None:
    torch.manual_seed(1)
    batches = speed.batches_of(speed.TINY, CPU)
    step = speed.OTHERS[name](speed.TINY, CPU)
    losses = [step(batches).item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("speed") and CHECKS[name].on_cpu])
def test_every_side_has_its_rows(name: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", name, "--device", "cpu", "--here"]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for other in speed.OTHERS:
        assert f"tiny, {other}" in ran.stdout
        assert f"a step over {other}'s" in ran.stdout
