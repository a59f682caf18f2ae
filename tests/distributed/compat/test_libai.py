"""LiBai's API: layer_idx, get_layer_stage_id, and stage ids that the partition follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslpar
from dslpar import layers as library
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.models.sequential import Layers, Sequential
from tests.support.forked_training import start_job, train_alone
from tests.support.plain_models import points, sgd, shares, written
from tests.support.ranks import on_ranks
from tests.support.runs import CONFIG as GPT
from tests.support.runs import metrics, write_config
from tests.support.versions import needs_torch

BATCH = "batch = dict(global_size=16, accumulation=2)\n"


def _stage_ids(path: str) -> Any:
    run = dslpar.start(path)
    ids = [run.get_layer_stage_id(index) for index in (0, 1, -1)]
    with pytest.raises(DslparError) as error:
        run.get_layer_stage_id(7)
    return ids, run.stage, run.num_stages, str(error.value)


def test_the_stage_of_a_layer_by_its_index(tmp_path: Path) -> None:
    model = GPT.replace("num_layers=2", "num_layers=3").replace("clip_grad_norm=1.0", "{}")
    ids = "dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id=[0, 1, 1])"
    for said, expected in ((ids, [0, 1, 1]), (ids.replace("0, 1, 1", "0, 0, 1"), [0, 0, 1])):
        path = written(tmp_path, model.replace("{}", said))
        ranks = on_ranks(2, _stage_ids, path, init="deepspeed")
        assert [rank[:3] for rank in ranks] == [(expected, 0, 2), (expected, 1, 2)]
        assert "PIP208 no-such-layer: there is no layer 7: the model has 3\nhelp: from 0 to 2" in ranks[0][3]


def _placements(path: str) -> Any:
    from dslpar.layers.dtensor import broadcast, split

    run = dslpar.start(path)
    noise, found = torch.arange(128.0).view(16, 8), []
    for layer in (0, 1, -1):
        placement = run.get_layer_placement(layer)
        local = run.distribute(noise, run.get_nd_sbp([split(0), broadcast]), placement).to_local()
        found.append((placement.mesh.tolist(), tuple(local.shape)))
    with pytest.raises(DslparError, match="there is no layer 7"):
        run.get_layer_placement(7)
    return run.stage, found


@needs_torch(5, "it has no DTensor that computes right")
def test_the_placement_of_a_layer_is_the_mesh_of_its_stage(tmp_path: Path) -> None:
    """LiBai's get_layer_placement is also allowed on a rank of another stage, which holds nothing."""
    model = GPT.replace("num_layers=2", "num_layers=3").replace("clip_grad_norm=1.0", "{}")
    ids = "dist=dict(tensor_parallel_size=2, pipeline_parallel_size=2, custom_pipeline_stage_id=[0, 1, 1])"
    ranks = on_ranks(8, _placements, written(tmp_path, model.replace("{}", ids)), init="deepspeed")
    stages = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    for rank, (mine, found) in enumerate(ranks):
        assert mine == rank // 4
        assert [mesh for mesh, _ in found] == [stages[0], stages[1], stages[1]]
        assert [shape for _, shape in found] == [(8, 8) if stage == mine else (0,) for stage in (0, 1, 1)]


def _by_a_program(path: str) -> Any:
    run = dslpar.start(path)
    try:
        return run.get_layer_stage_id(0), run.get_layer_stage_id(-1)
    except DslparError as error:
        return str(error)


def test_a_model_of_the_program_is_cut_by_what_the_config_says(tmp_path: Path) -> None:
    said = "parallel = dict(pipeline=dict(size=2, counts=[1, 2]))\n"
    assert on_ranks(2, _by_a_program, written(tmp_path, said + BATCH), init="deepspeed") == [(0, 1)] * 2
    unsaid = on_ranks(2, _by_a_program, written(tmp_path, "parallel = dict(pipeline=2)\n" + BATCH), init="deepspeed")
    assert "PIP208 no-such-layer: the partition of the layers is unknown before there is a model" in unsaid[0]
    assert on_ranks(1, _by_a_program, written(tmp_path, BATCH), init="deepspeed") == [(0, 0)]


class Block(nn.Module):
    """A layer that knows its index, as LiBai's layers do."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.linear(x).tanh()


class Head(Block):
    def __init__(self) -> None:
        super().__init__(layer_idx=-1)
        self.linear = nn.Linear(6, 4)


def _cut(path: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), *(Block(index) for index in range(4)), Head())
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()))
    engine.train_batch(shares(engine, *points(0)))
    return engine.job.stages.actual_ids, sorted({name.split(".")[0] for name, _ in engine.named_parameters()})


def test_the_cut_follows_stage_ids_over_layer_idx(tmp_path: Path) -> None:
    """There are four indices for six layers: earlier layers go with the first index, the head (-1) with the last."""
    ids = "train = dict(dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id=[0, 1, 1, 1]))\n"
    ranks = on_ranks(2, _cut, written(tmp_path, ids + BATCH), init="deepspeed")
    assert ranks == [((0, 1, 1, 1), ["1"]), ((0, 1, 1, 1), ["2", "3", "4", "5"])]


def test_layers_of_the_library_take_a_layer_idx() -> None:
    """As in LiBai, layers of an nn.Sequential use it as their place in the partition."""
    groups = Groups.without_processes(Mesh(pipe=2))
    model = nn.Sequential(
        library.Embedding(groups, 8, 4, layer_idx=0),
        library.PositionEmbedding(groups, 8, 4, layer_idx=0),
        library.Linear(groups, 4, 8, role="inward", layer_idx=0),
        library.Linear1D(one_d(), 8, 4, role="outward", layer_idx=0),
        library.Block(groups, 4, 2, layer_idx=1),
        library.Attention(groups, 4, 2, layer_idx=2),
        library.MLP(groups, 4, 8, layer_idx=2),
        library.RMSNorm(groups, 4, layer_idx=2),
        library.LayerNorm(groups, 4, layer_idx=-1),
        library.Head(groups, 4, 8, layer_idx=-1),
    )
    specs = Sequential.of(model).layers(groups)
    assert [spec.layer_idx for spec in specs] == [0, 0, 0, 0, 1, 2, 2, 2, -1, -1]
    assert library.Linear(groups, 4, 8, role="inward").layer_idx is None


class Wrapped(nn.Module):
    """A layer of the partition around a library layer with its own index."""

    def __init__(self, groups: Groups, layer_idx: int) -> None:
        super().__init__()
        self.linear = library.Linear(groups, 6, 6, role="inward", layer_idx=layer_idx)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def _nested(path: str, places: tuple[int, ...]) -> str:
    run = dslpar.start(path)
    torch.manual_seed(0)
    model = nn.Sequential(*(Wrapped(run.groups, place) for place in places))
    try:
        dslpar.initialize(run, model=model, optimizer=sgd)
    except DslparError as error:
        return str(error)
    return "built"


def test_a_layer_within_a_layer_is_where_it_says(tmp_path: Path) -> None:
    """Its index belongs to the same partition as the outer layer's; an index of another stage is refused by name."""
    path = written(tmp_path, "parallel = dict(pipeline=2)\n" + BATCH)
    assert on_ranks(2, _nested, path, (0, 1, 2, -1), init="deepspeed") == ["built"] * 2
    for said in on_ranks(2, _nested, path, (0, 3, 9, 3), init="deepspeed"):
        assert "PIP202" in said, said
        assert "layer_idx=3 of '1.linear' on stage 0 belongs to stage 1" in said
        assert "layer_idx=9 of '2.linear' on stage 1 is not one of 4 indices" in said


def _in_the_wrong_order(path: str) -> str:
    model = nn.Sequential(Block(1), Block(0))
    with pytest.raises(DslparError) as raised:
        dslpar.initialize(path, model=model, optimizer=sgd)
    return str(raised.value)


def test_the_order_is_checked_without_stages_too(tmp_path: Path) -> None:
    (said,) = on_ranks(1, _in_the_wrong_order, written(tmp_path, BATCH), init="deepspeed")
    assert "PIP202" in said
    assert "layer_idx [1, 0] do not increase from 0 to 1" in said


def test_a_layer_of_a_config_is_given_its_layer_idx() -> None:
    """LiBai's classes take it. torch's do not, but are placed by it as well."""
    name = f"{Block.__module__}.Block"
    cfg = [{"type": name, "layer_idx": 0}, {"type": "Tanh", "layer_idx": 0}, {"type": name, "layer_idx": -1}]
    specs = Layers(cfg).layers(one_d())
    assert [spec.layer_idx for spec in specs] == [0, 0, -1]
    assert [getattr(spec.build(), "layer_idx", None) for spec in specs] == [0, None, -1]


def one_d() -> Groups:
    return Groups.without_processes(Mesh(tensor=TensorMesh(mode="1d")))


LAYERS = """\
model = dict(type='Sequential', layers_cfg=[
    dict(type='Embedding', num_embeddings=256, embedding_dim=16),
    dict(type='Linear', in_features=16, out_features=32),
    dict(type='GELU'),
    dict(type='LayerNorm', normalized_shape=32),
    dict(type='Linear', in_features=32, out_features=256),
])
optimizer = dict(type='SGD', lr=0.5, momentum=0.9)
batch = dict(global_size=8, micro_size=4)
train = dict(steps=4, clip_grad_norm=1.0, save_interval=0)
data = dict(files=['text.txt'], seq_len=16)
"""


def test_layers_of_a_config_alone_train_on_text(tmp_path: Path) -> None:
    """By train.py, in one process and over two stages."""
    config = write_config(tmp_path, LAYERS)
    done = train_alone("--config", str(config), f"train.output_dir={tmp_path / 'one'}")
    assert done.status == 0, done.output
    words = ["--config", str(config), f"train.output_dir={tmp_path / 'two'}", "parallel.pipeline=2"]
    with start_job(2, words, tmp_path / "said.txt") as job:
        assert job.wait(120) == [0, 0], (tmp_path / "said.txt").read_text()
    lines = [[(row["loss"], row["grad_norm"]) for row in metrics(tmp_path / name)] for name in ("one", "two")]
    assert len(lines[0]) == 4
    for one, two in zip(*lines, strict=True):
        assert two == pytest.approx(one, rel=1e-6)
    assert lines[0][-1][0] < lines[0][0][0]
