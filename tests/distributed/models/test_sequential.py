"""Models that are lists of layers: the partition changes no number, against plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslpar
from dslpar.core.errors import DslparError
from tests.support.plain_models import (
    GLOBAL,
    PIPE,
    PIPE_DATA,
    STEPS,
    Weights,
    assert_equal,
    images,
    mlp,
    plain_torch,
    points,
    resnet,
    sgd,
    shares,
    written,
)
from tests.support.ranks import on_ranks

CONFIG = """\
batch = dict(global_size=16, accumulation=2)
train = dict(steps=5, clip_grad_norm=0.5)
"""


def steps_of(engine: Any, draw: Any = points) -> tuple[list[tuple[float, float]], Weights]:
    """Return the engine's losses and norms, and this rank's weights."""
    rows = [(engine.train_batch(shares(engine, *draw(step))), engine.grad_norm) for step in range(STEPS)]
    return rows, {name: p.detach().clone() for name, p in engine.named_parameters()}


# ---- an nn.Sequential over stages ----


def _sequential(path: str) -> Any:
    model = mlp()
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()))
    return steps_of(engine)


def test_an_nn_sequential_over_stages_and_replicas_is_one_process(tmp_path: Path) -> None:
    """Two stages, two replicas, accumulation 2, momentum, clipping: fp32 to 1e-6, with own noise of 2e-7."""
    path = written(tmp_path, PIPE_DATA + CONFIG)
    assert_equal(on_ranks(4, _sequential, path, init="deepspeed"), plain_torch(mlp(), micro_size=4))


SCHEDULES = ("dict(type='interleaved', num_model_chunks=2)", "dict(type='zero_bubble', num_model_chunks=2)")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_a_rank_may_have_nothing_to_train(tmp_path: Path, schedule: str) -> None:
    """Stage 1 is only a Tanh, stage 2 Linear and ReLU; each rank has one or two Linears."""
    cut = "parallel = dict(pipeline=dict(size=2, counts=[1, 1, 2, 1]), data=2)\n"
    path = written(tmp_path, f"{cut}{CONFIG}schedule = {schedule}\n")
    assert_equal(on_ranks(4, _sequential, path, init="deepspeed"), plain_torch(mlp(), micro_size=4))


def _reshaping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4))


def _from_reshaping(path: str) -> Any:
    model = _reshaping()
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd(model.parameters()))
    return steps_of(engine)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_stage_may_have_no_gradient(tmp_path: Path, schedule: str) -> None:
    """It only reshapes; the rank's other stage trains."""
    path = written(
        tmp_path, f"{PIPE}{CONFIG}schedule = {schedule}\n".replace("=2)", "=dict(size=2, counts=[1, 1, 1, 1]))", 1)
    )
    assert_equal(on_ranks(2, _from_reshaping, path, init="deepspeed"), plain_torch(_reshaping(), micro_size=8))


# ---- the same by layers_cfg: weights do not depend on the layout ----

LAYERS_CFG = [
    {"type": "Linear", "in_features": 6, "out_features": 16},
    {"type": "Tanh"},
    {"type": "Linear", "in_features": 16, "out_features": 4},
]


class Registered(dslpar.ModelFromConfig):
    """A registered layer, as in ColossalAI."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers_cfg = [
            {"type": "Linear", "in_features": 6, "out_features": width},
            {"type": "Tanh"},
            {"type": "Linear", "in_features": width, "out_features": 4},
        ]


def _layers_cfg(path: str, as_config: bool) -> Any:
    dslpar.MODELS.register_module(Registered)
    model = None if as_config else dslpar.build_pipeline_model_from_cfg({"type": "Registered", "width": 16})
    engine, *_ = dslpar.initialize(path, model=model, optimizer=sgd, train_data=[points(0)])
    first = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return steps_of(engine), first


@pytest.mark.parametrize("as_config", [True, False])
def test_layers_of_a_config_are_drawn_alike_in_every_layout(tmp_path: Path, as_config: bool) -> None:
    model = "model = dict(type='Registered', width=16)\n" if as_config else ""
    path = written(tmp_path, PIPE + CONFIG + model)
    ranks = on_ranks(2, _layers_cfg, path, as_config, init="deepspeed")
    (path_1 := tmp_path / "one.py").write_text(CONFIG + model)
    ((alone, whole),) = on_ranks(1, _layers_cfg, str(path_1), as_config, init="deepspeed")
    drawn = {name: p for _, first in ranks for name, p in first.items()}
    assert set(drawn) == set(whole)
    assert all(torch.equal(drawn[name], whole[name]) for name in whole)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    module.load_state_dict(whole)
    expected = plain_torch(module, micro_size=8)
    assert_equal([steps for steps, _ in ranks], expected)
    assert_equal([alone], expected)


# ---- stages whose parameter groups differ ----

TOKENS = """\
model = dict(type='Sequential', layers_cfg=[
    dict(type='Embedding', num_embeddings=16, embedding_dim=16),
    dict(type='LayerNorm', normalized_shape=16),
    dict(type='Linear', in_features=16, out_features=16, bias=False),
])
data = dict(seq_len=4)
optimizer = dict(type='AdamW', lr=0.01, weight_decay=0.1)
batch = dict(global_size=16, accumulation=2)
train = dict(steps=5, clip_grad_norm=0.1)
zero = 1
"""


def tokens(step: int) -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(16, (2, GLOBAL, 4), generator=torch.Generator().manual_seed(step))
    return ids, labels


def _tokens(path: str) -> list[tuple[float, float]]:
    engine, *_ = dslpar.initialize(path, train_data=[tokens(0)])
    return steps_of(engine, tokens)[0]


def test_a_stage_without_vectors_steps_with_the_others(tmp_path: Path) -> None:
    """The first stage has only matrices, the second matrices and vectors: without patch M7 DeepSpeed hangs."""
    alone = on_ranks(1, _tokens, written(tmp_path, TOKENS), init="deepspeed")[0]
    cut = "parallel = dict(pipeline=dict(size=2, counts=[1, 2]))\n"
    ranks = on_ranks(2, _tokens, written(tmp_path, TOKENS + cut), init="deepspeed")
    for row, *others in zip(alone, *ranks, strict=True):
        assert others == [pytest.approx(row, rel=1e-6)] * 2


def test_m7_zero_still_reduces_a_norm_for_each_group() -> None:
    import inspect

    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Zero

    assert "for i, group in enumerate(self.bit16_groups)" in inspect.getsource(Zero.scaled_global_norm)
    assert "_model_parallel_all_reduce(tensor=total_norm" in inspect.getsource(Zero.get_grad_norm_direct)


# ---- a model split by hand ----


class Flatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def by_hand(run: dslpar.Run) -> nn.Module:
    """Build as in ColossalAI's manual."""
    model = resnet()
    if run.stage == 0:
        return nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2)
    return nn.Sequential(model.layer3, model.layer4, model.avgpool, Flatten(), model.fc)


def _by_hand(path: str) -> Any:
    run = dslpar.start(path)
    stage = by_hand(run)
    engine, *_ = dslpar.initialize(run, model=dslpar.Stage(stage), optimizer=sgd(stage.parameters()))
    rows, _ = steps_of(engine, images)
    return rows, run.stage, run.num_stages, stage.state_dict()


def test_a_resnet_split_by_hand_is_the_whole_one(tmp_path: Path) -> None:
    """Compares weights and BatchNorm's running statistics, with equal micro-batches. Convolutions sum in fp32: 1e-5."""
    path = written(tmp_path, PIPE + CONFIG)
    ranks = on_ranks(2, _by_hand, path, init="deepspeed")
    assert [(stage, stages) for _, stage, stages, _ in ranks] == [(0, 2), (1, 2)]
    parts = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2"], ["layer3", "layer4", "avgpool", "-", "fc"]
    assert_whole_resnet([(rows, [(state, part)]) for (rows, _, _, state), part in zip(ranks, parts, strict=True)])


PARTS = ["conv1", "bn1", "relu"], ["maxpool", "layer1"], ["layer2", "layer3"], ["layer4", "avgpool", "-", "fc"]
"""Modules of four stages."""


def part(stage: int) -> nn.Sequential:
    model = resnet()
    return nn.Sequential(*(getattr(model, name) if name != "-" else Flatten() for name in PARTS[stage]))


def _by_hand_in_chunks(path: str, as_colossalai: bool) -> Any:
    if as_colossalai:
        from dslpar.compat import colossalai

        run = colossalai.launch_from_torch(path)
        model = nn.ModuleList(map(part, run.stages))
        engine = colossalai.initialize(model, sgd(model.parameters())).engine
    else:
        run = dslpar.start(path)
        model = nn.ModuleList(map(part, run.stages))
        engine = dslpar.initialize(run, model=dslpar.Stage(*model), optimizer=sgd(model.parameters())).engine
    rows, _ = steps_of(engine, images)
    return rows, list(run.stages), engine.get_held_layers(), [each.state_dict() for each in model]


@pytest.mark.parametrize("as_colossalai", [False, True])
def test_a_resnet_split_by_hand_into_chunks_is_the_whole_one(tmp_path: Path, as_colossalai: bool) -> None:
    path = written(tmp_path, f"{PIPE}{CONFIG}schedule = {SCHEDULES[0]}\n")
    ranks = on_ranks(2, _by_hand_in_chunks, path, as_colossalai, init="deepspeed")
    assert [stages for _, stages, _, _ in ranks] == [[0, 2], [1, 3]]
    assert [held for _, _, held, _ in ranks] == [["stages.0", "stages.2"], ["stages.1", "stages.3"]]
    assert_whole_resnet(
        [(rows, list(zip(states, PARTS[rank::2], strict=True))) for rank, (rows, *_, states) in enumerate(ranks)]
    )


Part = tuple[dict[str, Tensor], list[str]]
"""A stage's state, and the names of its modules in the whole model."""


def assert_whole_resnet(ranks: list[tuple[list[tuple[float, float]], list[Part]]]) -> None:
    rows, weights = plain_torch(resnet(), micro_size=8, draw=images)
    for ours, parts in ranks:
        for (loss, norm), (other_loss, other_norm) in zip(ours, rows, strict=True):
            assert (loss, norm) == pytest.approx((other_loss, other_norm), rel=1e-5)
        for state, names in parts:
            for name, value in state.items():
                index, _, rest = name.partition(".")
                other = weights.pop(f"{names[int(index)]}.{rest}")
                assert (value - other).abs().max() <= 1e-5 * max(1.0, other.abs().max()), name
    assert not weights, "every weight and every statistic stood on one stage"


# ---- the partition ----


def counts_of(method: str, stages: int, modules: list[nn.Module]) -> tuple[int, ...]:
    from dslpar.engine.partition import partition_layers
    from dslpar.layout.resolve import resolve
    from dslpar.models import Sequential
    from dslpar.schema import sections

    pipeline = sections.PipelineParallel(size=stages, **({"method": method} if method else {}))
    parts = sections.Spec(model=sections.OtherModel(target="x"), parallel=sections.Parallel(pipeline=pipeline))
    job, _ = partition_layers(resolve(parts, stages, "cfg.py"), Sequential.of(nn.Sequential(*modules)), None)  # type: ignore[arg-type]
    assert job.stages.counts is not None
    return job.stages.counts


@pytest.mark.parametrize(
    ("method", "counts"),
    [("uniform", (3, 2)), ("libai", (2, 3)), ("parameters", (4, 1)), ("", (4, 1)), ("type:Linear", (4, 1))],
)
def test_methods_of_the_cut(method: str, counts: tuple[int, ...]) -> None:
    modules = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 100)]
    assert counts_of(method, 2, modules) == counts


def test_the_heaviest_stage_is_as_light_as_can_be() -> None:
    """Compared with every possible partition."""
    from itertools import combinations

    from dslpar.layout.stages import contiguous

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        length = int(torch.randint(2, 8, (), generator=generator))
        stages = int(torch.randint(1, length + 1, (), generator=generator))
        weights = torch.randint(0, 9, (length,), generator=generator).tolist()
        counts = contiguous(weights, stages)
        assert len(counts) == stages
        assert sum(counts) == length
        assert min(counts) > 0

        def heaviest(bounds: tuple[int, ...], weights: list[int] = weights) -> int:
            return max(sum(weights[a:b]) for a, b in zip((0, *bounds), (*bounds, len(weights)), strict=True))

        best = min(heaviest(bounds) for bounds in combinations(range(1, length), stages - 1))
        ours = heaviest(tuple(torch.tensor(counts).cumsum(0)[:-1].tolist()))
        assert ours == best, (weights, stages, counts)


def test_layer_idx_says_where_a_layer_goes() -> None:
    """As in LiBai, an embedding goes beside layer 0, and a head with the last, -1."""
    modules: list[Any] = [nn.Linear(2, 2) for _ in range(5)]
    for module, layer_idx in zip(modules, [0, 0, 1, 2, -1], strict=True):
        module.layer_idx = layer_idx
    assert counts_of("uniform", 3, modules) == (1, 1, 1)


@pytest.mark.parametrize("indices", [[0, 2], [1, 0], [0, -3], [1, 2]])
def test_layer_idx_must_rise_by_one(indices: list[int]) -> None:
    modules: list[Any] = [nn.Linear(2, 2) for _ in indices]
    for module, layer_idx in zip(modules, indices, strict=True):
        module.layer_idx = layer_idx
    with pytest.raises(DslparError, match=r"PIP20[12] .*layer"):
        counts_of("uniform", 2, modules)


# ---- mistakes ----


def _mistaken(text_path: str, make: Callable[[], Any], keywords: dict[str, Any]) -> str:
    try:
        dslpar.initialize(text_path, model=make(), **keywords)
    except DslparError as error:
        return str(error)
    return "nothing"


def _shared() -> nn.Sequential:
    linear = nn.Linear(4, 4)
    return nn.Sequential(linear, nn.ReLU(), linear)


def _frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))


def _unequal() -> nn.Sequential:
    torch.manual_seed(torch.distributed.get_rank())
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))


def _entry(entry: dict[str, Any]) -> Callable[[], Any]:
    from dslpar.models import Layers

    return lambda: Layers([{"type": "Linear", "in_features": 4, "out_features": 4}, entry])


INTERLEAVED = "batch = dict(global_size=4, accumulation=2)\nschedule = 'interleaved'\n"


def _cut_as(*counts: int) -> str:
    return f"parallel = dict(pipeline=dict(size=2, counts={list(counts)}))\n{INTERLEAVED}"


def _linears(*layer_idx: int | None) -> nn.Sequential:
    """Return dslpar layers inside others, which set their place."""
    from dslpar.core.mesh import Mesh
    from dslpar.distributed.groups import Groups

    groups, made = Groups(Mesh(pipe=2)), []
    for index in layer_idx:
        inner = dslpar.layers.Linear(groups, 4, 4, role="inward")
        inner.layer_idx = index
        made.append(nn.Sequential(inner))
    return nn.Sequential(*made)


MISTAKES: list[tuple[str, Callable[[], Any], str]] = [
    (PIPE, lambda: nn.Linear(2, 2), "PIP204 one-module: the model is one module, which cannot be split over 2 stages"),
    ("parallel = dict(pipeline=4)\n", mlp_of_3 := (lambda: mlp()[:3]), "PIP201.*4 stages, but the model has 3 layers"),
    ("parallel = dict(pipeline=dict(size=2, counts=[2, 2]))\n", mlp_of_3, r"PIP202.*counts \[2, 2\] .* 3 layers"),
    ("parallel = dict(pipeline=dict(size=2, stage_ids=[0, 1]))\n", mlp_of_3, "PIP202.*2 stage ids .* for 3 layers"),
    ("parallel = dict(pipeline=dict(size=2, counts=[2, 1]))\n", lambda: mlp()[:2].append(nn.ReLU()), "PIP203.*stage 1"),
    ("parallel = dict(pipeline=dict(size=2, counts=[2, 1]))\n", _shared, "PIP205.*0.weight on stage 0 and 2.weight"),
    ("parallel = dict(pipeline=dict(size=2, counts=[1, 1]))\n", _frozen, "PIP203.*stage 0 has no trainable parameter"),
    (_cut_as(1, 1, 1, 1), lambda: mlp()[:4], "PIP203.*stages 1 and 3 have no trainable parameter"),
    (
        _cut_as(1, 1, 1, 1),
        lambda: _shared().append(nn.Linear(4, 4)),
        "PIP205.*0.weight on stage 0 and 2.weight on stage 2",
    ),
    (
        _cut_as(1, 1, 1, 1),
        lambda: _linears(None, 1, 0, 3),
        "PIP202.*layer_idx=0 of '2.0' on stage 2 belongs to stage 0",
    ),
    (
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0, 1, 0]))\n" + INTERLEAVED,
        mlp_of_3,
        "PIP201.*4 stages, but the model has 3 layers",
    ),
    (
        PIPE + INTERLEAVED,
        lambda: dslpar.Stage(nn.Linear(2, 2)),
        "PIP202.*dslpar.Stage has one module, but each rank has 2 stages",
    ),
    (
        PIPE,
        lambda: dslpar.Stage(nn.Linear(2, 2), nn.Linear(2, 2)),
        "PIP202.*dslpar.Stage has 2 modules, but each rank has one stage",
    ),
    (PIPE, _unequal, "HST221 weights-differ: rank 1 on .* has a different set of initial weights than rank 0"),
    ("", lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), Scale()), "CFG226.*'2.by': DeepSpeed cannot broadcast"),
    (PIPE, _entry({"type": "Linaer"}), "CFG221.*layer 1: unknown name 'Linaer' in LAYERS\nhelp: did you mean 'Linear'"),
    (PIPE, _entry({"type": "Linear", "in_featurs": 4}), "CFG223.*Linear: missing a required argument|unexpected"),
    (
        "activation_checkpoint = 1\n",
        _batch_norm,
        "CFG228.*'1' keeps running statistics, which activation checkpointing",
    ),
    (
        "parallel = dict(tensor=dict(size=2, mode='1d'))\n",
        mlp_of_3,
        "TEN111.*plain parameters, which each of 2 tensor ranks would hold whole: '0.weight', '0.bias'",
    ),
]


@pytest.mark.parametrize(("config", "make", "said"), MISTAKES)
def test_what_cannot_be_cut_is_said_on_every_rank(
    tmp_path: Path, config: str, make: Callable[[], Any], said: str
) -> None:
    import re

    world = 4 if "pipeline=4" in config else 2
    texts = on_ranks(world, _mistaken, written(tmp_path, config), make, {}, init="deepspeed")
    for text in texts:
        assert re.search(said, text), text
        assert "help: " in text


def test_what_the_builders_refuse() -> None:
    with pytest.raises(DslparError, match=r"PIP209.*num_chunks is 0"):
        dslpar.build_pipeline_model(mlp(), num_chunks=0)
    with pytest.raises(DslparError, match=r"PIP202.*unknown partition_method 'balanced'"):
        dslpar.build_pipeline_model(mlp(), partition_method="balanced")
