"""Layers refuse an activation that was not split, in words, on every rank; `to_residual` makes it right."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dslpar import layers
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

LAYERS: dict[str, Callable[[Groups], torch.nn.Module]] = {
    "Linear": lambda groups: layers.Linear(groups, 16, 32, role="inward"),
    "LayerNorm": lambda groups: layers.LayerNorm(groups, 16),
    "RMSNorm": lambda groups: layers.RMSNorm(groups, 16),
    "Affine": lambda groups: layers.Affine(groups, 16),
    "Head": lambda groups: layers.Head(groups, 16, 10),
    "Embedding": lambda groups: layers.Embedding(groups, 10, 16),
    "PositionEmbedding": lambda groups: layers.PositionEmbedding(groups, 8, 16),
}


def refusals() -> list[str]:
    groups, x = Groups(Mesh(tensor=LAYOUTS["2d-4"])), torch.ones(4, 8, 16)
    said = []
    for name, make in LAYERS.items():
        layer = make(groups)
        try:
            layer(x)
            said.append(f"{name}: nothing")
        except DslparError as error:
            said.append(str(error))
        layer(layers.to_residual(groups, x))
    try:
        layers.Linear(groups, 32, 16, role="outward")(torch.ones(4, 8, 32))
    except DslparError as error:
        said.append(str(error))
    return said


def test_a_whole_activation_is_refused_with_what_to_write() -> None:
    for *said, outward in on_ranks(4, refusals):
        for name, text in zip(LAYERS, said, strict=True):
            assert "TEN226 wrong-shape" in text, text
            assert name in text
            assert "got an activation of shape (4, 8, 16), but takes 8 of 16 features" in text
            assert "dslpar.layers.to_residual(groups, x)" in text
        assert "dslpar.layers.to_inner(groups, x)" in outward
