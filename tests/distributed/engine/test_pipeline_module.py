"""Stages of DeepSpeed's PipelineModule: where they begin, what they build, how parameters are named."""

from __future__ import annotations

from typing import Any

import pytest

from dslpar.core.mesh import LEGACY_ORDER, STANDARD_ORDER, Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled


def job(world: int, **parallel: Any) -> Job:
    model = section.GPT(num_layers=4, hidden_size=8, num_heads=2, vocab_size=30, max_seq_len=8)
    return resolve(sections.Spec(model=model, parallel=sections.Parallel(**parallel)), world, "cfg.py")


@pytest.mark.parametrize("order", [STANDARD_ORDER, LEGACY_ORDER])
def test_deepspeed_sees_the_mesh_as_we_do(order: tuple[str, str, str]) -> None:
    from dslpar.engine.pipeline_module import topology

    mesh = Mesh(pipe=2, data=3, tensor=Cuboid(q=2, y=2, mode="2d"), order=order)
    theirs = topology(mesh)
    for rank in range(mesh.world_size):
        coord, tensor = theirs.get_coord(rank), mesh.index(rank, "tensor")
        assert (coord.pipe, coord.data, coord.model) == (mesh.coord(rank)["pipe"], mesh.coord(rank)["data"], tensor)


@pytest.mark.parametrize(
    ("counts", "parts"), [([4], [0, 8]), ([1, 3], [0, 3, 8]), ([1, 1, 1, 1], [0, 3, 4, 5, 8]), ([3, 1], [0, 5, 8])]
)
def test_embeddings_go_with_the_first_stage_norm_and_head_with_the_last(counts: list[int], parts: list[int]) -> None:
    from dslpar.engine.stage_layers import stage_parts

    assert stage_parts([None, None, 0, 1, 2, 3, None, -1], counts) == parts


def _names(made: Job) -> tuple[list[str], list[str]]:
    """Return all global names of this rank, and those of parameters that it owns."""
    from dslpar.distributed.groups import Groups
    from dslpar.engine.pipeline_module import named_parameters, pipeline_module
    from dslpar.models import GPT

    groups = Groups(made.mesh)
    model = GPT(**vars(made.spec.model))
    assert made.stages.counts is not None
    module = pipeline_module(model.layers(groups), made.stages.counts, made.chunks, groups, 1, model.loss(groups))
    named = list(named_parameters(module))
    assert all(p.requires_grad for _, p in named)
    return [name for name, _ in named], [name for name, p in named if p.tensor_model_parallel]  # type: ignore[attr-defined]


def test_each_stage_builds_its_own_layers_under_their_global_names() -> None:
    from dslpar.distributed.groups import Groups
    from dslpar.models import GPT, build_module

    made = job(2, pipeline=sections.PipelineParallel(size=2, counts=(1, 3)))
    (first, _), (last, owned) = on_ranks(2, _names, made, init="deepspeed")
    whole = build_module(GPT(**vars(made.spec.model)), Groups(Mesh(), rank=0), 1)
    tied = {"embedding.tokens.weight"}
    assert set(first) | set(last) == {name for name, _ in whole.named_parameters()}
    assert set(first) & set(last) == tied
    assert {name.split(".")[1] for name in last if name.startswith("blocks")} == {"1", "2", "3"}
    assert set(last) - set(owned) == tied, "the tied copy of the last stage owns nothing"


def test_the_rank_that_holds_copy_0_owns() -> None:
    tensor = sections.TensorParallel(size=2, mode="1d")
    ranks = on_ranks(4, _names, job(4, pipeline=sections.PipelineParallel(size=2), tensor=tensor), init="deepspeed")
    for (names, owned), (_, owned_by_other) in (ranks[:2], ranks[2:]):
        tied = {"embedding.tokens.weight"} - set(owned)
        assert set(owned) == set(names) - tied
        assert not any(name.endswith(("norm1.weight", "norm2.bias", "norm.bias")) for name in owned_by_other)
        assert any(name.endswith("qkv.weight") for name in owned_by_other)


def test_a_user_s_pipeline_of_unknown_layers_is_not_cut_by_guess() -> None:
    from dslpar.engine.stage_layers import stage_parts

    for layer_idx in ([None], [0, 2], [0, 1, 0], [0, 1, 2], [0, -2, 1, -3]):
        with pytest.raises(ValueError, match="do not increase"):
            stage_parts(layer_idx, [1, 1])


# ---- tensors across a boundary ----

BOUNDARIES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "1d 2": ({"size": 2, "mode": "1d"}, (4, 12, 24)),
    "1d 2 sequence": ({"size": 2, "mode": "1d", "sequence": True}, (4, 6, 24)),
    "2d 4": ({"size": 4, "mode": "2d"}, (2, 12, 12)),
    "2.5d 8": ({"size": 8, "mode": "2.5d", "depth": 2}, (1, 12, 12)),
    "3d 8": ({"size": 8, "mode": "3d"}, (1, 12, 12)),
    "cuboid (1, 2, 2) hidden": ({"size": 4, "mode": "cuboid", "shape": (1, 2, 2)}, (4, 12, 6)),
    "cuboid (1, 2, 2) batch": ({"size": 4, "mode": "cuboid", "shape": (1, 2, 2), "residual": "batch"}, (2, 12, 12)),
    "ring 2": ({"size": 2, "mode": "sequence"}, (4, 6, 24)),
    "ulysses 2": ({"size": 2, "mode": "sequence", "impl": "ulysses"}, (4, 6, 24)),
}
"""By mode, the shape that each rank sends of a residual [4, 12, 24]."""


def _sent(made: Job) -> tuple[list[tuple[int, ...]], bool]:
    """Return the shapes of all floating tensors that this rank sends in a step, and whether any is partitioned."""
    import torch

    from dslpar.distributed.groups import Groups
    from dslpar.distributed.point_to_point import StageMessages
    from dslpar.engine.build import build_engine

    engine = build_engine(made, Groups(made.mesh), all_counted=True)
    shapes, send = [], StageMessages.send

    def counted(self: Any, values: list[torch.Tensor], taken_by: Any) -> None:
        shapes.extend(tuple(value.shape) for value in values)
        send(self, values, taken_by)

    StageMessages.send = counted  # type: ignore[method-assign, assignment]
    ids = torch.zeros(4, 12, dtype=torch.long)
    engine.train_batch([(ids, ids)] * 2)
    return shapes, engine.deepspeed.is_pipe_partitioned or engine.deepspeed.is_grad_partitioned


@pytest.mark.filterwarnings("default")  # warnings of DeepSpeed
@pytest.mark.parametrize("name", sampled(BOUNDARIES, {"1d 2 sequence", "2d 4", "cuboid (1, 2, 2) batch"}))
def test_the_stored_residual_crosses_a_boundary_and_nothing_else(name: str) -> None:
    """It goes forward from the first stage, and its gradient back from the last, once per micro-batch. DeepSpeed's own
    partitioning is off: it would partition copies once more, and take pieces for copies.
    """
    tensor, shape = BOUNDARIES[name]
    model = section.GPT(num_layers=2, hidden_size=24, num_heads=4, vocab_size=30, max_seq_len=12)
    parallel = sections.Parallel(pipeline=sections.PipelineParallel(size=2), tensor=sections.TensorParallel(**tensor))
    batch = sections.Batch(micro_size=4, accumulation=2)
    world = 2 * tensor["size"]
    made = resolve(sections.Spec(model=model, parallel=parallel, batch=batch), world, "cfg.py")
    ranks = on_ranks(world, _sent, made, init="deepspeed")
    assert [partitioned for _, partitioned in ranks] == [False] * world
    assert [sent for sent, _ in ranks] == [[shape] * 2] * world
