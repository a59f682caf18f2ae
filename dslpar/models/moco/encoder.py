"""Encoder of MoCo v3: a vision transformer with fixed positions and a fixed projection of patches, and its heads.

Positions are sines and cosines along both sides of the grid, and zero for the class token. The random projection of
patches is never trained, which makes contrastive learning of vision transformers stable (arXiv 2104.02057, section 4).
Heads alternate inward and outward linears, so that they are cut like all other weights. A BatchNorm over the batch of
all replicas follows each linear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar.distributed.groups import Groups
from dslpar.layers import (
    BatchNorm,
    Block,
    Form,
    Layer,
    LayerNorm,
    Linear,
    PatchEmbedding,
    PositionEmbedding,
    first_token,
    normal,
)
from dslpar.layers import Placement as At
from dslpar.layers.parameter import Drawing, stable_hash
from dslpar.models.moco.section import MoCo


class Encoder(Layer):
    """Vision transformer with a projection of its class token."""

    def __init__(self, groups: Groups, model: MoCo) -> None:
        super().__init__(groups)
        hidden, sizes = model.hidden_size, (model.image_size, model.patch_size, model.num_channels)
        token = normal(1e-6)
        self.patches = PatchEmbedding(groups, *sizes, hidden, bias=False, class_token=True, init=token)
        self.positions = PositionEmbedding(groups, model.longest_sample, hidden)
        self.positions.set_init("weight", SinCos(model.image_size // model.patch_size))
        self.blocks = nn.ModuleList(
            Block(
                groups,
                hidden,
                model.num_heads,
                form=Form(causal=False),
                ffn_hidden_size=model.ffn_size,
                eps=model.layernorm_eps,
            )
            for _ in range(model.num_layers)
        )
        self.norm = LayerNorm(groups, hidden, eps=model.layernorm_eps)
        self.projector = Projector(groups, model)
        for linear in self.modules():
            if isinstance(linear, Linear):
                linear.set_init("weight", XavierUniform())
        for fixed in (self.patches.projection.weight, self.positions.weight):
            fixed.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Map whole images [batch, channels, height, width] to [batch/x, D/y], stored like inner [tokens, features]."""
        x = self.positions(self.patches(images))
        for block in self.blocks:
            x = block(x)
        projected: Tensor = self.projector(first_token(self.groups, self.norm(x)))
        return projected


class Projector(Layer):
    """Three linears with BatchNorm: hidden_size to projection_hidden_size (twice) to projection_size."""

    def __init__(self, groups: Groups, model: MoCo) -> None:
        super().__init__(groups)
        inner = model.projection_hidden_size
        self.linear1 = Linear(groups, model.hidden_size, inner, role="inward", bias=False)
        self.norm1 = BatchNorm(groups, inner, after="inward")
        self.linear2 = Linear(groups, inner, inner, role="outward", bias=False)
        self.norm2 = BatchNorm(groups, inner, after="outward")
        self.linear3 = Linear(groups, inner, model.projection_size, role="inward", bias=False)
        self.norm3 = BatchNorm(groups, model.projection_size, after="inward", affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch/x, H/z], stored like [tokens, H], to [batch/x, D/y]."""
        shared = self.share()
        x = functional.relu(self.norm1(self.linear1(x, shared), shared))
        x = functional.relu(self.norm2(self.linear2(x, shared), shared))
        return self.norm3(self.linear3(x, shared), shared)


class Predictor(Layer):
    """Two linears with BatchNorm: projection_size to projection_hidden_size to projection_size."""

    def __init__(self, groups: Groups, model: MoCo) -> None:
        super().__init__(groups)
        size, inner = model.projection_size, model.projection_hidden_size
        self.linear1 = Linear(groups, size, inner, role="outward", bias=False)
        self.norm1 = BatchNorm(groups, inner, after="outward")
        self.linear2 = Linear(groups, inner, size, role="inward", bias=False)
        self.norm2 = BatchNorm(groups, size, after="inward", affine=False)
        for linear in (self.linear1, self.linear2):
            linear.set_init("weight", XavierUniform())

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch/x, D/y] to the same shape."""
        shared = self.share()
        x = functional.relu(self.norm1(self.linear1(x, shared), shared))
        return self.norm2(self.linear2(x, shared), shared)


class SinCos(NamedTuple):
    """Sine-cosine positions of the patches of a square grid, after a row of zeros for the class token."""

    side: int
    """Number of patches per side."""

    def piece(self, placement: At, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Compute the whole table (1 + patches, H), and cut the piece of the rank at `coord`."""
        quarter = placement.shape[1] // 4
        frequencies = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
        places = torch.arange(self.side, dtype=torch.float64)
        of_columns, of_rows = (
            side.reshape(-1, 1) * frequencies for side in torch.meshgrid(places, places, indexing="xy")
        )
        parts = [of_columns.sin(), of_columns.cos(), of_rows.sin(), of_rows.cos()]
        return placement.cut(functional.pad(torch.cat(parts, 1), (0, 0, 1, 0)).float(), coord)


class XavierUniform(NamedTuple):
    """Draw from U(-a, a), a = sqrt(6 / (inputs + outputs)). Each block (q, k, v) counts as a matrix of its own."""

    def piece(self, placement: At, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Draw the whole matrix (outputs, inputs), float32 on the CPU, and cut the piece of the rank at `coord`."""
        outputs, inputs = placement.shape
        bound = math.sqrt(6 / (inputs + outputs // max(1, len(placement.blocks))))
        generator = torch.Generator("cpu").manual_seed(stable_hash(seed, name))
        full = torch.empty(placement.shape, dtype=torch.float32, device="cpu")
        return placement.cut(full.uniform_(-bound, bound, generator=generator), coord)


class AsEncoder(NamedTuple):
    """Draw a weight of the momentum encoder with the values of the trained encoder's weight."""

    init: Drawing

    def piece(self, placement: At, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Draw the piece under the name of the trained encoder's weight."""
        return self.init.piece(placement, coord, seed, name.replace("momentum_encoder.", "encoder."))
