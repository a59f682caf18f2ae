"""The layers of a ResidualMLP."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Embedding, Head, cross_entropy
from dslpar.layers.block import Activation
from dslpar.layers.parameter import Shared
from dslpar.models.layered import Labels, LayeredModel, LayerSpec, Loss
from tests.support.mlp_family import section


class ResidualMLP(section.ResidualMLP, LayeredModel):
    def layers(self, groups: Groups) -> list[LayerSpec]:
        build = partial(_Residual, groups, self.width, self.width, activation=cast("Activation", self.activation))
        return [
            LayerSpec(name="embedding", build=partial(Embedding, groups, self.vocab_size, self.width)),
            *(LayerSpec(name=f"layers.{index}", build=build, layer_idx=index) for index in range(self.num_layers)),
            LayerSpec(name="head", build=partial(Head, groups, self.width, self.vocab_size)),
        ]

    def loss(self, groups: Groups) -> Loss:
        def loss(logits: Tensor, labels: Labels) -> Tensor:
            labels, denominator = (labels, None) if isinstance(labels, torch.Tensor) else labels
            return cross_entropy(groups, logits, labels, self.vocab_size, denominator)

        return loss


class _Residual(MLP):
    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        return x + super().forward(x, shared)
