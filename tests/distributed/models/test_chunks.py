"""Several chunks of a model per rank, for every kind of model, against plain torch in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslpar
from dslpar.core.errors import DslparError
from dslpar.distributed.groups import Groups
from dslpar.models.layered import LayerSpec
from dslpar.models.sequential import PlainModel
from tests.distributed.models.test_sequential import steps_of
from tests.support.plain_models import PIPE, PIPE_DATA, assert_equal, plain_torch, points, sgd, written
from tests.support.ranks import on_ranks

CONFIG = "batch = dict(global_size=16, accumulation={})\ntrain = dict(steps=5, clip_grad_norm=0.5)\n"
INTERLEAVED = "schedule = dict(type='interleaved', num_model_chunks=2)\n"
SPLIT = INTERLEAVED.replace("interleaved", "zero_bubble")


def deep() -> nn.Sequential:
    """Seven layers on four stages; the first stage may have nothing to train."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Tanh(), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)
    )


class Listed(PlainModel):
    """A list of LayerSpecs."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        return [LayerSpec(name=name, build=partial(_itself, module)) for name, module in deep().named_children()]


def _itself(module: nn.Module) -> nn.Module:
    return module


def _trained(path: str, how: str) -> Any:
    num_chunks = 2 if "num_chunks" in how else 1
    module = deep()
    model = Listed() if "specs" in how else dslpar.build_pipeline_model(module, num_chunks=num_chunks)
    optimizer = sgd if "specs" in how else sgd(module.parameters())
    engine, *_ = dslpar.initialize(path, model=model, optimizer=optimizer)
    return *steps_of(engine), engine.job.chunks.num, engine.job.spec.schedule.type


def assert_trained(ranks: list[Any], kind: str, micro_size: int) -> None:
    assert {each[2:] for each in ranks} == {(2, kind)}
    assert_equal([each[:2] for each in ranks], plain_torch(deep(), micro_size))


@pytest.mark.parametrize(
    ("how", "schedule"),
    [
        ("Sequential", INTERLEAVED),
        ("Sequential, num_chunks=2", ""),
        ("Sequential, num_chunks=2", "schedule = dict(type='zero_bubble')\n"),
        ("specs", INTERLEAVED),
        ("specs", SPLIT),
    ],
)
def test_modules_over_chunks_and_replicas_are_one_process(tmp_path: Path, how: str, schedule: str) -> None:
    """Two ranks of two stages each, with two replicas: fp32 to 1e-6. num_chunks makes the config's key unnecessary."""
    path = written(tmp_path, PIPE_DATA + schedule + CONFIG.format(2))
    ranks = on_ranks(4, _trained, path, how, init="deepspeed")
    assert_trained(ranks, "zero_bubble" if "zero" in schedule else "interleaved", 4)


def test_a_stage_without_parameters_is_one_of_several(tmp_path: Path) -> None:
    """Stage 0 is only a Tanh, whose output needs no gradient; its rank trains stage 2."""
    cut = PIPE.replace("pipeline=2", "pipeline=dict(size=2, counts=[1, 2, 2, 2])")
    path = written(tmp_path, cut + INTERLEAVED + CONFIG.format(4))
    assert_trained(on_ranks(2, _trained, path, "Sequential", init="deepspeed"), "interleaved", 4)


LAYERS_CFG = [
    {"type": "Linear", "in_features": 6, "out_features": 16},
    {"type": "Tanh"},
    *[{"type": "Linear", "in_features": 16, "out_features": 16}] * 2,
    {"type": "Linear", "in_features": 16, "out_features": 4},
]


def _layers_cfg(path: str) -> Any:
    """Return losses with norms, the final weights, and the weights before the first step."""
    engine, *_ = dslpar.initialize(path, optimizer=sgd, train_data=[points(0)])
    first = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return *steps_of(engine), first


@pytest.mark.parametrize("schedule", [INTERLEAVED, SPLIT])
def test_layers_of_a_config_over_chunks(tmp_path: Path, schedule: str) -> None:
    """They are drawn as in one process. torch's layers can defer nothing, so 'zero_bubble' runs unsplit."""
    text = PIPE + schedule + CONFIG.format(4) + f"model = dict(type='Sequential', layers_cfg={LAYERS_CFG})\n"
    ranks = on_ranks(2, _layers_cfg, written(tmp_path, text), init="deepspeed")
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    module.load_state_dict({name: p for *_, first in ranks for name, p in first.items()})
    assert_equal([each[:2] for each in ranks], plain_torch(module, micro_size=4))


def _refused(path: str, num_chunks: int) -> str:
    model = dslpar.build_pipeline_model(deep(), num_chunks=num_chunks)
    with pytest.raises(DslparError) as error:
        dslpar.initialize(path, model=model, optimizer=sgd)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "num_chunks", "message"),
    [
        (INTERLEAVED + CONFIG.format(4), 3, "num_chunks is 3, but the config's schedule.num_model_chunks is 2"),
        (CONFIG.format(1), 2, "num_chunks is 2: 1 micro-batches must be a multiple of 2 pipeline ranks"),
        (CONFIG.format(4), 4, "8 stages, but the model has 7 layers"),
    ],
)
def test_chunks_that_a_program_cannot_have(tmp_path: Path, text: str, num_chunks: int, message: str) -> None:
    for said in on_ranks(2, _refused, written(tmp_path, PIPE + text), num_chunks, init="deepspeed"):
        assert message in said


def _alone(path: str) -> Any:
    model = dslpar.build_pipeline_model(deep(), num_chunks=2)
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd)
    return steps_of(engine)


def test_without_a_pipeline_there_are_no_chunks(tmp_path: Path) -> None:
    path = written(tmp_path, CONFIG.format(4))
    assert_equal(on_ranks(1, _alone, path, init="deepspeed"), plain_torch(deep(), micro_size=4))
