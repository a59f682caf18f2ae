"""PatchEmbedding with a class token against torch's Conv2d, which never sees the token: output and all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import PatchEmbedding
from dslpar.layers import placement as at_of
from tests.support import dense
from tests.support.compare_dense import (
    BATCH,
    HIDDEN,
    TOLERANCE,
    Errors,
    Found,
    assert_copies_equal,
    error,
    numbers,
    piece,
    proven,
    randomized,
    whole,
)
from tests.support.layouts import EACH_MODE, LAYOUTS
from tests.support.ranks import on_ranks

CHANNELS, PATCH, SIDE = 3, 2, 6
"""Nine patches, so ten tokens: both ranks of a layout that shards sequences have five."""
MODES = sorted({*EACH_MODE} - {"ring-2-zigzag", "ring-2-1d-2"})
"""All modes but those that shard a sequence in four, which a square number of patches and one token never fill."""


def class_token(groups: Groups, bias: bool) -> Found:
    layer = randomized(PatchEmbedding(groups, SIDE, PATCH, CHANNELS, HIDDEN, bias=bias, class_token=True), groups)
    full, at = whole(layer, groups), at_of.residual(groups.tensor, BATCH, (SIDE // PATCH) ** 2 + 1, HIDDEN)

    def once(step: int) -> Found:
        images, y_grad = numbers((BATCH, CHANNELS, SIDE, SIDE), 1), numbers(at.shape, 2)
        y, dense_y = layer(images), _convolved(full, images)
        y.backward(piece(y_grad, at, groups))
        dense_y.backward(y_grad)
        yield "output", error(y, at, dense_y, groups)

    yield from proven(groups, layer, full, once)


def _convolved(p: dense.Parameters, images: Tensor) -> Tensor:
    kernel = p["projection.weight"].view(HIDDEN, CHANNELS, PATCH, PATCH)
    patches = functional.conv2d(images, kernel, p.get("projection.bias"), stride=PATCH).flatten(2).transpose(1, 2)
    return torch.cat([p["class_token"].expand(len(images), 1, HIDDEN), patches], 1)


def errors(tensor: mesh.TensorMesh) -> list[Errors]:
    torch.set_default_dtype(torch.float64)
    groups = Groups(mesh.Mesh(tensor=tensor))
    found = [dict(class_token(groups, bias)) for bias in (True, False)]
    assert_copies_equal(groups)
    return found


@pytest.mark.parametrize("name", MODES)
def test_a_class_token_stands_before_the_patches_and_takes_no_bias(name: str) -> None:
    for with_bias, without in on_ranks(LAYOUTS[name].size, errors, LAYOUTS[name]):
        names = {"output", "gradient of class_token", "gradient of projection.weight"}
        assert set(without) == names
        assert set(with_bias) == names | {"gradient of projection.bias"}
        assert max(*with_bias.values(), *without.values()) < TOLERANCE
