"""MoCo v3 against plain torch: two steps over replicas and tensor ranks equal those of a whole batch.

In float64, the tests compare the loss and all gradients (averaged over replicas, as in an engine). After a step of SGD
and of the momentum encoder, they compare the loss of other images and the momentum encoder's weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import all_reduce
from dslpar.distributed.groups import Groups
from dslpar.layers import gather
from dslpar.models import MoCo, build_module
from tests.support import dense
from tests.support.compare_dense import TOLERANCE, numbers, randomized, relative, whole
from tests.support.dense import Parameters, under
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

MODEL = MoCo(
    num_layers=2,
    hidden_size=48,
    num_heads=12,
    image_size=6,
    patch_size=2,
    num_channels=3,
    ffn_hidden_size=72,
    projection_size=24,
    projection_hidden_size=36,
    layernorm_eps=1e-5,
)
"""Nine patches and the class token: sequences of 10, which two ranks can shard, but not three or four."""
SAMPLES, RATE, PROGRESS = 24, 0.05, 0.25
ZERO = "moco.encoder.norm.bias"
"""Its gradient is zero apart from rounding: the following BatchNorm subtracts what is added to every sample."""
SAMPLE = ((2, "1d-2"),)
"""Replicas and layouts in the default run."""
NAMES = [
    "",
    *("1d-2", "1d-3", "1d-4", "1d-6", "1d-sequence-2", "2d-4", "2.5d-8-depth-2", "2.5d-3-depth-3", "2.5d-12-depth-3"),
    *("3d-8", "cuboid-2-3-2", "cuboid-1-2-2-replicated", "cuboid-1-2-2-sequence-batch", "3d-8-sequence-heads"),
    *("ring-2", "ulysses-2"),
]


def views(step: int) -> tuple[Tensor, Tensor]:
    """Return views of the whole batch: noise on images with something in common."""
    images = numbers((SAMPLES, 3, 6, 6), step)
    return images + 0.3 * numbers(images.shape, step + 50), images + 0.3 * numbers(images.shape, step + 51)


# ---- the reference ----


def encoded(p: Parameters, images: Tensor) -> Tensor:
    x = dense.patches(under(p, "patches"), images, MODEL.patch_size)
    token = p["patches.class_token"].expand(len(x), 1, -1)
    x = dense.positions(under(p, "positions"), torch.cat([token, x], 1))
    for index in range(MODEL.num_layers):
        x = dense.block(under(p, f"blocks.{index}"), x, MODEL.num_heads, causal=False)
    x, head = dense.norm(under(p, "norm"), x)[:, 0], under(p, "projector")
    for number in (1, 2, 3):
        x = dense.batch_norm(under(head, f"norm{number}"), dense.linear(under(head, f"linear{number}"), x))
        x = x.relu() if number < 3 else x
    return x


def predicted(p: Parameters, x: Tensor) -> Tensor:
    hidden = dense.batch_norm(under(p, "norm1"), dense.linear(under(p, "linear1"), x)).relu()
    return dense.batch_norm(under(p, "norm2"), dense.linear(under(p, "linear2"), hidden))


def contrastive_loss(p: Parameters, both: tuple[Tensor, Tensor]) -> Tensor:
    encoder, momentum_encoder = under(p, "moco.encoder"), under(p, "moco.momentum_encoder")
    queries = [predicted(under(p, "moco.predictor"), encoded(encoder, view)) for view in both]
    keys = [encoded(momentum_encoder, view).detach() for view in both]
    total = torch.zeros(())
    for query, key in ((queries[0], keys[1]), (queries[1], keys[0])):
        similar = functional.normalize(query, dim=1) @ functional.normalize(key, dim=1).T / MODEL.temperature
        total = total + 2 * MODEL.temperature * functional.cross_entropy(similar, torch.arange(SAMPLES))
    return total


# ---- the comparison ----


def errors(data: int, tensor: mesh.TensorMesh) -> dict[str, float]:
    """Return each rank's errors of the loss, of each gradient, and after a step."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(data=data, tensor=tensor))
    module = build_module(MODEL, groups, seed=3)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    full = whole(randomized(module, groups), groups)
    found = {"loss": relative(*_losses(groups, module, full, 1))}
    for name, p in module.named_parameters():
        if name in trained:
            assert p.grad is not None, f"no gradient of {name}"
            p.grad = all_reduce(p.grad, groups.axis("data")) / data
            expected = p.placement.cut(full[name].grad, groups.coord)
            size = 1.0 if name == ZERO else full[name].grad.abs().max()
            found[f"gradient of {name}"] = ((p.grad - expected).abs().max() / size).item()
        else:
            assert p.grad is None, f"a gradient of {name}"
    _step(module, full, trained)
    found |= {"loss after a step": relative(*_losses(groups, module, full, 2))}
    for name, p in module.named_parameters():
        found[f"weight {name}"] = relative(gather(p, p.placement, groups), full[name].detach())
    return found


def _losses(groups: Groups, module: torch.nn.Module, full: Parameters, step: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch's losses after their backward: the mean over replicas, and the reference's."""
    data = groups.axis("data")
    own = tuple(view.chunk(data.size)[data.index] for view in views(step))
    loss = MODEL.loss(groups)(module(own), torch.zeros(SAMPLES // data.size, dtype=torch.long))
    expected = contrastive_loss(full, views(step))
    loss.backward()
    expected.backward()
    return all_reduce(loss.detach(), data) / data.size, expected


@torch.no_grad()
def _step(module: torch.nn.Module, full: Parameters, trained: set[str]) -> None:
    for name, p in module.named_parameters():
        if name in trained:
            p -= RATE * p.grad
            full[name].sub_(RATE * full[name].grad)
    MODEL.after_step(module, PROGRESS)
    kept = 1 - 0.5 * (1 + math.cos(math.pi * PROGRESS)) * (1 - MODEL.momentum)
    for name, value in full.items():
        if ".momentum_encoder." in name:
            value.mul_(kept).add_(full[name.replace("momentum_encoder", "encoder")] * (1 - kept))


@pytest.mark.parametrize(
    ("data", "layout"),
    [
        pytest.param(data, layout, marks=[] if (data, layout) in SAMPLE else pytest.mark.prove)
        for layout in NAMES
        for data in (1, 2)
        if data * (LAYOUTS[layout].size if layout else 1) <= 16
    ],
)
def test_two_steps_are_those_of_the_whole_batch(data: int, layout: str) -> None:
    tensor = LAYOUTS[layout] if layout else mesh.TensorMesh()
    for found in on_ranks(data * tensor.size, errors, data, tensor):
        wrong = {what: error for what, error in found.items() if not error <= TOLERANCE}
        assert not wrong, wrong
        assert sum("gradient" in what for what in found) == 12 * MODEL.num_layers + 14


# ---- the model alone ----


def _weights(tensor: mesh.TensorMesh) -> dict[str, Tensor]:
    groups = Groups(Mesh(tensor=tensor))
    return {name: gather(p, p.placement, groups) for name, p in build_module(MODEL, groups, seed=3).named_parameters()}


def test_the_momentum_encoder_begins_as_the_encoder_in_every_layout() -> None:
    alone = _weights(mesh.TensorMesh())
    for name, value in alone.items():
        if ".momentum_encoder." in name:
            assert torch.equal(value, alone[name.replace("momentum_encoder", "encoder")]), name
    for cut in on_ranks(4, _weights, LAYOUTS["2d-4"]):
        assert all(torch.equal(cut[name], value) for name, value in alone.items())


def test_positions_and_initial_weights_are_the_paper_s() -> None:
    weights = _weights(mesh.TensorMesh())
    positions = weights["moco.encoder.positions.weight"]
    assert positions.shape == (10, 48)
    assert torch.equal(positions[0], torch.zeros(48))
    row, column = 2, 1  # of patch 2 * 3 + 1
    frequencies = 10000.0 ** -(torch.arange(12) / 12)
    expected = [(column * frequencies).sin(), (column * frequencies).cos()]
    expected += [(row * frequencies).sin(), (row * frequencies).cos()]
    assert torch.allclose(positions[8], torch.cat(expected), atol=1e-6)
    qkv = weights["moco.encoder.blocks.0.attention.qkv.weight"]
    assert qkv.abs().max() <= math.sqrt(6 / (48 + 48))
    assert qkv.abs().max() > 0.99 * math.sqrt(6 / (48 + 48))


def test_the_momentum_rises_to_one() -> None:
    module = build_module(MODEL, Groups(Mesh(), rank=0), seed=1)
    weight = module.get_parameter("moco.momentum_encoder.norm.weight")
    with torch.no_grad():
        module.get_parameter("moco.encoder.norm.weight").fill_(3.0)
    MODEL.after_step(module, 1.0)
    assert torch.equal(weight, torch.ones(48))
    replace(MODEL, momentum=0.5).after_step(module, 0.0)
    assert torch.equal(weight, torch.full((48,), 2.0))


@pytest.mark.prove
def test_a_missing_reduction_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With statistics per replica alone, the comparison must fail."""
    monkeypatch.setattr("dslpar.layers.batch_norm._sum_over", lambda x, axis: x * axis.size)
    found = on_ranks(2, errors, 2, mesh.TensorMesh())[0]
    assert found["loss"] > 1e-4
