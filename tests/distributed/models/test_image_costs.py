"""Costs of image models: traffic and memory, counted on one rank of each layout, equal the forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.costs import any_model as costs
from dslpar.costs.collective_traffic import LayerTraffic, Traffic
from dslpar.distributed.groups import Groups
from dslpar.layers import initialize, placement
from dslpar.models import MoCo, ResMLP, build_module
from dslpar.models.layered import LayeredModel
from dslpar.models.resmlp.model import ResMLPBlock
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import LAYOUTS
from tests.support.saved_tensors import saved_by
from tests.support.traffic_counter import counting

BATCH = 12
RESMLP = ResMLP(
    num_layers=2, hidden_size=48, ffn_hidden_size=72, num_classes=5, image_size=12, patch_size=2, num_channels=3
)
MOCO = MoCo(
    num_layers=2,
    hidden_size=48,
    num_heads=12,
    ffn_hidden_size=72,
    image_size=6,
    patch_size=2,
    num_channels=3,
    projection_size=24,
    projection_hidden_size=36,
)
SAMPLE = ("1d-sequence-2", "2d-4", "3d-8")
OF_MOCO = [
    *("1d-2", "1d-sequence-2", "2d-4", "2.5d-8-depth-2", "2.5d-3-depth-3", "3d-8", "3d-8-sequence-heads", "ring-2"),
    *("ulysses-2", "cuboid-1-2-2-replicated", "cuboid-1-2-2-sequence-batch"),
]
"""Layouts that divide ten tokens."""


def _sent(tensor: mesh.TensorMesh, model: LayeredModel, views: int) -> tuple[Traffic, Traffic]:
    """Return the traffic of forward with loss, and of backward."""
    groups = Groups(Mesh(tensor=tensor))
    module = build_module(model, groups, seed=1)
    size = model.image_size  # type: ignore[attr-defined]
    images, labels = torch.ones(BATCH, 3, size, size), torch.zeros(BATCH, dtype=torch.long)
    with counting(groups) as forward:
        loss = model.loss(groups)(module(images if views == 1 else (images, images)), labels)
    with counting(groups) as backward:
        loss.backward()
    return forward.elements, backward.elements


def _sent_by_resmlp(tensor: mesh.TensorMesh) -> tuple[Traffic, Traffic]:
    return _sent(tensor, RESMLP, 1)


def _sent_by_moco(tensor: mesh.TensorMesh) -> tuple[Traffic, Traffic]:
    return _sent(tensor, MOCO, 2)


def _both(sent: LayerTraffic) -> tuple[Traffic, Traffic]:
    return sent.forward, sent.backward


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(tuple(LAYOUTS), marks=pytest.mark.prove)], ids=["some", "all"])
def test_resmlp_sends_what_is_forecast(names: tuple[str, ...]) -> None:
    tensors = [LAYOUTS[name] for name in names]
    for tensor, sent in zip(tensors, on_last_ranks(_sent_by_resmlp, tensors), strict=True):
        assert sent == _both(costs.model_traffic(RESMLP, tensor, BATCH * 36)), tensor


@pytest.mark.parametrize("names", [SAMPLE[:2], pytest.param(OF_MOCO, marks=pytest.mark.prove)], ids=["some", "all"])
def test_moco_sends_what_is_forecast(names: tuple[str, ...]) -> None:
    tensors = [LAYOUTS[name] for name in names]
    for tensor, sent in zip(tensors, on_last_ranks(_sent_by_moco, tensors), strict=True):
        assert sent == _both(costs.model_traffic(MOCO, tensor, BATCH * 10)), tensor


def _held_by_a_block(tensor: mesh.TensorMesh) -> tuple[int, float]:
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    block = ResMLPBlock(groups, RESMLP)
    initialize(block, groups, seed=1)
    x = torch.zeros(placement.residual(tensor, BATCH, 36, 48).local_shape, requires_grad=True)
    return sum(p.numel() for p in block.parameters()), saved_by(block, x)


def test_a_resmlp_block_keeps_the_memory_that_is_forecast() -> None:
    tensors = list(LAYOUTS.values())
    for tensor, (weights, saved) in zip(tensors, on_last_ranks(_held_by_a_block, tensors), strict=True):
        forecast = costs.layer_memory(RESMLP, tensor, BATCH * 36)
        assert (weights, saved) == (forecast.weights, forecast.saved.elements), tensor


def _held_by_moco(tensor: mesh.TensorMesh) -> tuple[int, int]:
    module = build_module(MOCO, Groups(Mesh(tensor=tensor)), seed=1)
    held = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(number for number, _ in held), sum(number for number, is_trained in held if not is_trained)


def test_moco_holds_the_weights_that_are_forecast() -> None:
    tensors = [LAYOUTS[name] for name in OF_MOCO]
    for tensor, held in zip(tensors, on_last_ranks(_held_by_moco, tensors), strict=True):
        made = costs.model_costs(MOCO, tensor, BATCH * 10, 10)
        assert made is not None
        memories = made.first.memory, *[made.layer.memory] * MOCO.num_layers, made.last.memory
        assert held == (sum(each.weights for each in memories), sum(each.frozen for each in memories)), tensor


@pytest.mark.parametrize(("sizes", "millions"), [((12, 384), 15.4), ((24, 384), 30.0), ((36, 384), 44.7)])
def test_resmlp_has_the_parameters_of_its_paper(sizes: tuple[int, int], millions: float) -> None:
    """Table 1 of arXiv 2105.03404: S12 has 15 million, S24 30, S36 45."""
    from dslpar.models.resmlp.layout import pipeline_weights

    model = ResMLP(num_layers=sizes[0], hidden_size=sizes[1])
    weights = pipeline_weights(model, "parameters", 196)
    assert round(sum(weights.loads((sizes[0],))) / 1e6, 1) == millions
    small = replace(RESMLP, num_layers=1)
    built = build_module(small, Groups.without_processes(Mesh()), seed=1)
    loads = pipeline_weights(small, "parameters", 36).loads((1,))
    assert sum(p.numel() for p in built.parameters()) == sum(loads)
