"""Memory of layers: elements of weights and of saved tensors equal dslpar.costs.memory exactly.

The tests count storages that autograd's saved tensors keep alive, each once and without parameters, in elements of
float64. Everything is computed in float64, statistics included (`wide` is as wide as the rest). Small constants, such
as the empty states of attention's random numbers, have no elements of that dtype and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.costs import any_model as costs
from dslpar.costs import layers as sizes
from dslpar.costs import memory
from dslpar.costs.adapters import Adapter, AdapterSizes
from dslpar.costs.memory import LayerMemory
from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Attention, BatchNorm, Block, Form, LayerNorm, Linear, RMSNorm, initialize, placement
from dslpar.layout.divisors import head_ranks
from dslpar.models.gpt import section
from dslpar.models.gpt.costs import layers as gpt_layers
from tests.support.adapted import ALL, Q, R, V, adapted
from tests.support.compare_dense import BATCH, FFN, HEADS, HIDDEN, SEQUENCE
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import EACH_MODE, KEEPS, LAYOUTS
from tests.support.sampling import sampled
from tests.support.saved_tensors import saved_by
from tests.support.versions import TORCH

TOKENS = BATCH * SEQUENCE
GPT2 = section.GPT(num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=1, max_seq_len=1)
LLAMA = replace(GPT2, norm="rmsnorm", activation="swiglu", bias=False)


ON_Q_AND_V = AdapterSizes(qkv=(Adapter(R, HIDDEN), Adapter(R, HIDDEN)))
ON_DOWN = AdapterSizes(down=(Adapter(R, HIDDEN),))
ON_OUT_AND_UP = AdapterSizes(out=(Adapter(R, HIDDEN),), up=(Adapter(R, FFN),))


class Case(NamedTuple):
    """A layer, and its forecast memory."""

    layer: Callable[[Groups], torch.nn.Module]
    forecast: Callable[[mesh.TensorMesh], LayerMemory]
    features: int = 0
    """Features of an inner input; 0: the input is the residual."""


def divides(tensor: mesh.TensorMesh) -> bool:
    """Return whether half of the heads divide over their ranks."""
    return HEADS // 2 % head_ranks(tensor) == 0


CASES: Mapping[str, Case] = {
    "inward": Case(
        lambda groups: Linear(groups, HIDDEN, FFN, role="inward"),
        lambda tensor: memory.total([sizes.Linear(HIDDEN, FFN, "inward")], tensor, TOKENS),
    ),
    "outward": Case(
        lambda groups: Linear(groups, FFN, HIDDEN, role="outward", bias=False),
        lambda tensor: memory.total([sizes.Linear(FFN, HIDDEN, "outward", bias=False)], tensor, TOKENS),
        FFN,
    ),
    "mlp": Case(
        lambda groups: MLP(groups, HIDDEN, FFN),
        lambda tensor: memory.total(sizes.mlp(HIDDEN, FFN), tensor, TOKENS),
    ),
    "mlp, swiglu": Case(
        lambda groups: MLP(groups, HIDDEN, FFN, activation="swiglu"),
        lambda tensor: memory.total(sizes.mlp(HIDDEN, FFN, activation="swiglu"), tensor, TOKENS),
    ),
    "attention": Case(
        lambda groups: Attention(groups, HIDDEN, HEADS),
        lambda tensor: memory.total(sizes.attention(HIDDEN, HEADS), tensor, TOKENS),
    ),
    "attention, grouped": Case(
        lambda groups: Attention(groups, HIDDEN, HEADS, num_kv_heads=HEADS // 2 if divides(groups.tensor) else HEADS),
        lambda tensor: memory.total(
            sizes.attention(HIDDEN, HEADS, kv_heads=HEADS // 2 if divides(tensor) else HEADS), tensor, TOKENS
        ),
    ),
    "layernorm": Case(
        lambda groups: LayerNorm(groups, HIDDEN),
        lambda tensor: memory.total([sizes.Norm(HIDDEN)], tensor, TOKENS),
    ),
    "rmsnorm": Case(
        lambda groups: RMSNorm(groups, HIDDEN),
        lambda tensor: memory.total([sizes.Norm(HIDDEN, "rmsnorm")], tensor, TOKENS),
    ),
    "batch norm, inward": Case(
        lambda groups: torch.nn.Sequential(torch.nn.Flatten(0, 1), BatchNorm(groups, FFN, after="inward")),
        lambda tensor: memory.total([sizes.BatchNorm(FFN, "inward")], tensor, TOKENS),
        FFN,
    ),
    "batch norm, outward": Case(
        lambda groups: torch.nn.Sequential(
            torch.nn.Flatten(0, 1), BatchNorm(groups, HIDDEN, after="outward", affine=False)
        ),
        lambda tensor: memory.total([sizes.BatchNorm(HIDDEN, "outward", affine=False)], tensor, TOKENS),
    ),
    "block": Case(
        lambda groups: Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN),
        lambda tensor: costs.layer_memory(GPT2, tensor, TOKENS),
    ),
    "block of Llama": Case(
        lambda groups: Block(
            groups,
            HIDDEN,
            HEADS,
            ffn_hidden_size=FFN,
            form=Form(norm="rmsnorm", activation="swiglu", bias=False),
        ),
        lambda tensor: costs.layer_memory(LLAMA, tensor, TOKENS),
    ),
    "attention, adapters": Case(
        lambda groups: adapted(Attention(groups, HIDDEN, HEADS), {"qkv": (Q, V)}),
        lambda tensor: memory.total(sizes.attention(HIDDEN, HEADS, adapters=ON_Q_AND_V), tensor, TOKENS),
    ),
    "mlp, adapters": Case(
        lambda groups: adapted(MLP(groups, HIDDEN, FFN, activation="swiglu"), {"down": (ALL,)}),
        lambda tensor: memory.total(sizes.mlp(HIDDEN, FFN, activation="swiglu", adapters=ON_DOWN), tensor, TOKENS),
    ),
    "frozen": Case(
        lambda groups: adapted(Linear(groups, HIDDEN, FFN, role="inward"), {}),
        lambda tensor: memory.total([sizes.Linear(HIDDEN, FFN, "inward", adapters=())], tensor, TOKENS),
    ),
    "block, adapters": Case(
        lambda groups: adapted(
            Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN), {"attention.out": (ALL,), "mlp.up": (ALL,)}
        ),
        lambda tensor: memory.total(gpt_layers(GPT2, SEQUENCE, ON_OUT_AND_UP).layer, tensor, TOKENS),
    ),
}
if TORCH < (2, 5):  # its fused attention has no grouped queries: keys and values are repeated, and kept
    del CASES["attention, grouped"]


def held_by(tensor: mesh.TensorMesh) -> dict[str, tuple[float, float, float]]:
    """Return by case the elements of parameters, the saved elements, and the trained parameters."""
    torch.set_default_dtype(torch.float64)
    groups, found = Groups(Mesh(tensor=tensor)), {}
    for name, case in CASES.items():
        layer = case.layer(groups)
        initialize(layer, groups, seed=1)
        if case.features:
            x_at = placement.inner(tensor, BATCH, SEQUENCE, case.features)
        else:
            x_at = placement.residual(tensor, BATCH, SEQUENCE, HIDDEN)
        x = torch.zeros(x_at.local_shape, requires_grad=True)
        trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        found[name] = sum(p.numel() for p in layer.parameters()), saved_by(layer, x), trained
    return found


def kept(tensor: mesh.TensorMesh) -> list[mesh.TensorMesh]:
    """Return every choice of panels that are kept until the backward, if any are gathered."""
    if tensor.q == tensor.z == 1 and (tensor.y == 1 or tensor.residual == "replicated"):
        return [tensor]
    return [replace(tensor, keep=keep) for keep in KEEPS]  # type: ignore[arg-type]


@cache
def held(name: str) -> list[dict[str, tuple[float, float, float]]]:
    """Return the memory of one rank of a layout, for every choice of kept panels."""
    return on_last_ranks(held_by, kept(LAYOUTS[name]))


@pytest.mark.parametrize("name", sampled(LAYOUTS, EACH_MODE))
def test_layers_keep_the_memory_that_is_forecast(name: str) -> None:
    wrong = []
    for tensor, found in zip(kept(LAYOUTS[name]), held(name), strict=True):
        for case, counts in found.items():
            forecast = CASES[case].forecast(tensor)
            saved, trained = forecast.saved.elements + forecast.saved.wide, forecast.weights - forecast.frozen
            if counts != (forecast.weights, saved, trained):
                wrong.append(f"{case}, keep {tensor.keep}: {counts} is not {forecast}")
    assert wrong == []


def test_a_wrong_memory_formula_is_detected() -> None:
    """The comparison can fail: in the square, `both` and `none` differ by panels of X and of W."""
    found = dict(zip(KEEPS, held("2d-4"), strict=True))
    both, none = (found[keep]["inward"][1] for keep in ("both", "none"))
    assert both - none == TOKENS * HIDDEN / 4 + HIDDEN * FFN / 2


# Elements saved by a block, in s b h / T (16: each activation once), for 12 h tokens, so that panels of weights are as
# large as 2 or 4 of these. A prototype had the same, and 0.3 to 0.5 more for statistics.
TABLE = {
    "1d-sequence-2": (18, 18, 16, 16),
    "2d-4": (20, 18, 18, 16),
    "2.5d-8-depth-2": (22, 18, 20, 16),
    "3d-8": (26, 24, 18, 16),
    "cuboid-2-3-2": (28, 26, 18, 16),
}


@pytest.mark.parametrize("name", TABLE)
def test_memory_of_a_block_by_keep(name: str) -> None:
    model = replace(GPT2, hidden_size=48, ffn_hidden_size=192)
    for keep, times in zip(("both", "x", "w", "none"), TABLE[name], strict=True):
        tensor = replace(LAYOUTS[name], keep=keep)  # type: ignore[arg-type]
        tokens = 12 * model.hidden_size
        saved = costs.layer_memory(model, tensor, tokens).saved
        assert saved.elements * tensor.size == times * tokens * model.hidden_size
        assert saved.wide * tensor.size < tokens * model.hidden_size
