"""ZeRO-3 empties parameters between uses: vectors read outside their module, and saved weights, still work.

On two data replicas of a tensor group of two, every gradient after the backward is compared with one process. In
float32, sums of some hundred terms in other orders differ by at most 1e-6. A stale or empty parameter is off by its own
size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups, Mpu
from dslpar.engine import build
from dslpar.engine.build import build_engine
from dslpar.layers import gather
from dslpar.linter import check
from dslpar.models import GPT, build_module
from dslpar.models.gpt import section
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

MODEL = GPT(num_layers=2, hidden_size=24, num_heads=4, vocab_size=17, max_seq_len=8, init_std=0.2)
STEPS, RATE = 3, 0.1
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(17, (8, 9), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def alone() -> dict[str, Tensor]:
    groups = Groups(Mesh())
    module, loss = build_module(MODEL, groups, seed=3), MODEL.loss(groups)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(STEPS):
        ids, labels = batch(step)
        optimizer.zero_grad()
        loss(module(ids), labels).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def through_deepspeed(tensor: mesh.TensorMesh) -> dict[str, Tensor]:
    import deepspeed

    groups = Groups(Mesh(data=2, tensor=tensor))
    module, loss = build_module(MODEL, groups, seed=3), MODEL.loss(groups)
    placements: dict[str, Any] = {name: p.placement for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=dict(CONFIG), mpu=Mpu(groups))
    for step in range(STEPS):
        ids, labels = (part.chunk(2)[groups.axis("data").index] for part in batch(step))
        engine.backward(loss(engine(ids), labels))
        engine.step()
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found[name] = gather(p.detach().clone(), placements[name], groups)
    deepspeed.comm.destroy_process_group()
    return found


@pytest.mark.filterwarnings("default")  # warnings of DeepSpeed
@pytest.mark.parametrize("layout", ["1d-sequence-2", pytest.param("2d-4", marks=pytest.mark.prove)])
def test_zero_3(layout: str) -> None:
    tensor, reference = LAYOUTS[layout], alone()
    for found in on_ranks(2 * tensor.size, through_deepspeed, tensor, init="deepspeed"):
        for name, value in reference.items():
            error = (found[name] - value).abs().max() / value.abs().max()
            assert error < 1e-5, f"{name}: {error}"


# ---- built layer by layer ----


def most_at_once(made: Any) -> tuple[int, int]:
    """Return the peak number of parameter elements during the build, and the whole model's."""
    from dslpar.engine.build import build_engine
    from dslpar.models import layered

    built: list[Tensor] = []
    counts: list[int] = []
    build_layer = layered.build_layer

    def counted(*args: Any) -> Any:
        layer = build_layer(*args)
        built.extend(layer.parameters())
        counts.append(sum(p.numel() for p in built))
        return layer

    layered.build_layer = counted
    build_engine(made, Groups(made.mesh))
    return max(counts), sum(p.ds_numel for p in built)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("default")  # warnings of DeepSpeed
def test_no_rank_ever_holds_the_whole_model() -> None:
    """One full layer exists at a time; the rest is in shards, which are no longer the parameters' own elements."""
    from dslpar.layout.resolve import resolve
    from dslpar.schema import sections

    model = section.GPT(num_layers=6, hidden_size=24, num_heads=4, vocab_size=17, max_seq_len=8)
    made = resolve(
        sections.Spec(model=model, zero=sections.Zero(stage=3), batch=sections.Batch(global_size=2)), 2, "cfg.py"
    )
    block = 12 * 24 * 24 + 13 * 24
    for most, whole in on_ranks(2, most_at_once, made, init="deepspeed"):
        assert most == block
        assert whole == 6 * block + (17 + 8 + 2) * 24


# ---- buffers ----

NORMS = """
model = dict(type='Sequential', layers_cfg=[
    dict(type='Linear', in_features=4, out_features=4), dict(type='BatchNorm1d', num_features=4)])
optimizer = dict(type='AdamW', lr=1e-3)
batch = dict(micro_size=4)
train = dict(steps=4)
precision = 'bf16'
"""


def buffers(stages: list[int]) -> list[dict[str, str]]:
    found = []
    for stage in stages:
        job = check.resolve(check.load_text(f"{NORMS}zero = {stage}\n", "cfg.py"), 1)
        module = build_engine(job, Groups(job.mesh)).module
        found.append({name: str(buffer.dtype) for name, buffer in module.named_buffers()})
    return found


def test_buffers_keep_their_dtype_as_at_other_stages() -> None:
    """A mean over many batches in bf16 would stop moving once a batch adds less than a 256th of it."""
    ((at_1, at_3),) = on_ranks(1, buffers, [1, 3], init="deepspeed")
    assert at_1 == at_3
    assert {*at_1.values()} == {"torch.float32", "torch.int64"}


def test_buffers_go_where_the_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, DeepSpeed moves no module that zero.Init has sharded, and zero.Init moves only parameters."""
    monkeypatch.setattr(build.get_accelerator(), "current_device_name", lambda: "meta")
    monkeypatch.setattr(build.deepspeed.zero, "Init", lambda module, **options: None)
    job = check.resolve(check.load_text(f"{NORMS}zero = 3\n", "cfg.py"), 1)
    layer = torch.nn.BatchNorm1d(4)
    layer.register_buffer("again", layer.running_mean)
    layer.table = torch.nn.Parameter(torch.tensor([0, 257, 513]), requires_grad=False)
    build._zero3_sharding(job, Groups(job.mesh))(layer)
    assert all(each.is_meta for each in layer.buffers())
    assert layer.weight.dtype is torch.bfloat16
    assert layer.table.tolist() == [0, 257, 513]
