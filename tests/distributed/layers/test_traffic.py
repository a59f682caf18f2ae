"""Traffic of layers: counts by collective and axis equal dslpar.costs.traffic.

Both numbers are exact, so there is no tolerance. Sizes are the proof's, which every layout divides.
"""

from __future__ import annotations

from collections import Counter
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
from dslpar.costs import traffic
from dslpar.costs.adapters import Adapter, AdapterSizes
from dslpar.costs.collective_traffic import LayerTraffic, Traffic
from dslpar.distributed.groups import Groups
from dslpar.layers import (
    MLP,
    Attention,
    Block,
    Embedding,
    Head,
    LayerNorm,
    Linear,
    PositionEmbedding,
    RMSNorm,
    cross_entropy,
    initialize,
    placement,
)
from dslpar.layout.divisors import head_ranks
from dslpar.models import GPT, build_module
from dslpar.models.gpt.costs import layers as gpt_layers
from tests.support.adapted import ALL, Q, R, V, adapted
from tests.support.compare_dense import BATCH, FFN, HEADS, HIDDEN, SEQUENCE, VOCAB, tokens
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import EACH_MODE, KEEPS, LAYOUTS, everything
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.traffic_counter import counting

TOKENS = BATCH * SEQUENCE


class Case(NamedTuple):
    """A layer, its input, and its forecast traffic."""

    layer: Callable[[Groups], Callable[..., torch.Tensor]]
    x: Callable[[mesh.TensorMesh], torch.Tensor]
    forecast: Callable[[mesh.TensorMesh], LayerTraffic]


def residual(tensor: mesh.TensorMesh) -> torch.Tensor:
    """Return the stored residual of [BATCH, SEQUENCE, HIDDEN]."""
    return torch.zeros(placement.residual(tensor, BATCH, SEQUENCE, HIDDEN).local_shape, requires_grad=True)


def inner(tensor: mesh.TensorMesh) -> torch.Tensor:
    """Return an inner activation of FFN features."""
    return torch.zeros(placement.inner(tensor, BATCH, SEQUENCE, FFN).local_shape, requires_grad=True)


def ids(tensor: mesh.TensorMesh) -> torch.Tensor:
    """Return the ids of the whole micro-batch."""
    return tokens()[0]


def model(**fields: object) -> GPT:
    """Return a GPT of two layers."""
    sizes = dict(num_layers=2, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=VOCAB)
    return GPT(**sizes, max_seq_len=SEQUENCE + 4, **fields)  # type: ignore[arg-type]


def llama(tensor: mesh.TensorMesh) -> dict[str, object]:
    """Return the fields that turn GPT's layers into Llama's."""
    other = dict(norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, tie_embeddings=False)
    return other | {"num_kv_heads": kv_heads(tensor)}


def kv_heads(tensor: mesh.TensorMesh) -> int:
    """Return the smallest number of key heads that the layout can share out."""
    return head_ranks(tensor)


def loss_of(groups: Groups, logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x: cross_entropy(groups, logits(x), tokens()[1], VOCAB)


def gpt(groups: Groups, **fields: object) -> Callable[..., torch.Tensor]:
    whole = model(**fields)
    return lambda x: whole.loss(groups)(build_module(whole, groups, seed=1)(x), tokens()[1])


ON_Q_AND_V = AdapterSizes(qkv=(Adapter(R, HIDDEN), Adapter(R, HIDDEN)))
ON_Q_V_AND_DOWN = replace(ON_Q_AND_V, down=(Adapter(R, HIDDEN),))
CASES: Mapping[str, Case] = {
    "inward": Case(
        lambda groups: Linear(groups, HIDDEN, FFN, role="inward"),
        residual,
        lambda tensor: traffic.total([sizes.Linear(HIDDEN, FFN, "inward")], tensor, TOKENS),
    ),
    "inward, no bias": Case(
        lambda groups: Linear(groups, HIDDEN, FFN, role="inward", bias=False),
        residual,
        lambda tensor: traffic.total([sizes.Linear(HIDDEN, FFN, "inward", bias=False)], tensor, TOKENS),
    ),
    "inward, gathered": Case(
        lambda groups: Linear(groups, HIDDEN, (FFN, FFN), role="inward", gather_output=True),
        residual,
        lambda tensor: traffic.total([sizes.Linear(HIDDEN, 2 * FFN, "inward", gather_output=True)], tensor, TOKENS),
    ),
    "outward, gathered": Case(
        lambda groups: Linear(groups, FFN, HIDDEN, role="outward", gather_output=True),
        inner,
        lambda tensor: traffic.total([sizes.Linear(FFN, HIDDEN, "outward", gather_output=True)], tensor, TOKENS),
    ),
    "outward": Case(
        lambda groups: Linear(groups, FFN, HIDDEN, role="outward"),
        inner,
        lambda tensor: traffic.total([sizes.Linear(FFN, HIDDEN, "outward")], tensor, TOKENS),
    ),
    "outward, no bias": Case(
        lambda groups: Linear(groups, FFN, HIDDEN, role="outward", bias=False),
        inner,
        lambda tensor: traffic.total([sizes.Linear(FFN, HIDDEN, "outward", bias=False)], tensor, TOKENS),
    ),
    "mlp": Case(
        lambda groups: MLP(groups, HIDDEN, FFN),
        residual,
        lambda tensor: traffic.total(sizes.mlp(HIDDEN, FFN), tensor, TOKENS),
    ),
    "mlp, swiglu": Case(
        lambda groups: MLP(groups, HIDDEN, FFN, activation="swiglu", bias=False),
        residual,
        lambda tensor: traffic.total(sizes.mlp(HIDDEN, FFN, activation="swiglu", bias=False), tensor, TOKENS),
    ),
    "attention": Case(
        lambda groups: Attention(groups, HIDDEN, HEADS),
        residual,
        lambda tensor: traffic.total(sizes.attention(HIDDEN, HEADS), tensor, TOKENS),
    ),
    "attention, grouped": Case(
        lambda groups: Attention(groups, HIDDEN, HEADS, num_kv_heads=kv_heads(groups.tensor), causal=False),
        residual,
        lambda tensor: traffic.total(sizes.attention(HIDDEN, HEADS, kv_heads=kv_heads(tensor)), tensor, TOKENS),
    ),
    "layernorm": Case(
        lambda groups: LayerNorm(groups, HIDDEN),
        residual,
        lambda tensor: traffic.total([sizes.Norm(HIDDEN)], tensor, TOKENS),
    ),
    "rmsnorm": Case(
        lambda groups: RMSNorm(groups, HIDDEN),
        residual,
        lambda tensor: traffic.total([sizes.Norm(HIDDEN, "rmsnorm")], tensor, TOKENS),
    ),
    "block": Case(
        lambda groups: Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN),
        residual,
        lambda tensor: costs.layer_traffic(model(), tensor, TOKENS),
    ),
    "embedding": Case(
        lambda groups: Embedding(groups, VOCAB, HIDDEN),
        ids,
        lambda tensor: traffic.total([sizes.Embedding(VOCAB, HIDDEN)], tensor, TOKENS),
    ),
    "positions": Case(
        lambda groups: PositionEmbedding(groups, SEQUENCE + 4, HIDDEN),
        residual,
        lambda tensor: traffic.total([sizes.Vectors((SEQUENCE + 4) * HIDDEN)], tensor, TOKENS),
    ),
    "head and loss": Case(
        lambda groups: loss_of(groups, Head(groups, HIDDEN, VOCAB)),
        residual,
        lambda tensor: traffic.total([sizes.Head(HIDDEN, VOCAB), sizes.CrossEntropy(VOCAB)], tensor, TOKENS),
    ),
    "inward, adapters": Case(
        lambda groups: adapted(Attention(groups, HIDDEN, HEADS).qkv, {"": (Q, V)}),
        residual,
        lambda tensor: traffic.total(
            [sizes.Linear(HIDDEN, 3 * HIDDEN, "inward", adapters=ON_Q_AND_V.qkv)], tensor, TOKENS
        ),
    ),
    "outward, frozen": Case(
        lambda groups: adapted(Linear(groups, FFN, HIDDEN, role="outward"), {}),
        inner,
        lambda tensor: traffic.total([sizes.Linear(FFN, HIDDEN, "outward", adapters=())], tensor, TOKENS),
    ),
    "block, adapters": Case(
        lambda groups: adapted(
            Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN), {"attention.qkv": (Q, V), "mlp.down": (ALL,)}
        ),
        residual,
        lambda tensor: traffic.total(gpt_layers(model(), SEQUENCE, ON_Q_V_AND_DOWN).layer, tensor, TOKENS),
    ),
    "head and loss, frozen": Case(
        lambda groups: loss_of(groups, adapted(Head(groups, HIDDEN, VOCAB), {})),
        residual,
        lambda tensor: traffic.total(
            [sizes.Head(HIDDEN, VOCAB, frozen=True), sizes.CrossEntropy(VOCAB)], tensor, TOKENS
        ),
    ),
    "gpt": Case(gpt, ids, lambda tensor: costs.model_traffic(model(), tensor, TOKENS)),
    "gpt, untied": Case(
        lambda groups: gpt(groups, tie_embeddings=False),
        ids,
        lambda tensor: costs.model_traffic(model(tie_embeddings=False), tensor, TOKENS),
    ),
    "llama": Case(
        lambda groups: gpt(groups, **llama(groups.tensor)),
        ids,
        lambda tensor: costs.model_traffic(model(**llama(tensor)), tensor, TOKENS),
    ),
}


def sent_by(tensor: mesh.TensorMesh) -> dict[str, tuple[Traffic, Traffic]]:
    """Return the forward and backward traffic of every case on this rank."""
    groups, counts = Groups(Mesh(tensor=tensor)), {}
    for name, case in CASES.items():
        layer, x = case.layer(groups), case.x(tensor)
        if isinstance(layer, torch.nn.Module):
            initialize(layer, groups, seed=1)
        with counting(groups) as forward:
            y = layer(x)
        with counting(groups) as backward:
            y.sum().backward()
        counts[name] = forward.elements, backward.elements
    return counts


def differences(tensor: mesh.TensorMesh, counts: Mapping[str, tuple[Traffic, Traffic]]) -> list[str]:
    """Return differences between a rank's traffic and the forecast."""
    forecast = {name: case.forecast(tensor) for name, case in CASES.items()}
    return [
        f"{name} in {tensor}: sent {counts[name]}, forecast {passes}"
        for name, passes in forecast.items()
        if counts[name] != (passes.forward, passes.backward)
    ]


@cache
def counted(name: str) -> list[dict[str, tuple[Traffic, Traffic]]]:
    """Return the traffic of one rank of a layout, for every choice of kept panels."""
    return on_last_ranks(sent_by, kept(LAYOUTS[name]))


def kept(tensor: mesh.TensorMesh) -> list[mesh.TensorMesh]:
    """Return every choice of panels that are kept until the backward, if any are gathered."""
    if tensor.q == tensor.z == 1 and (tensor.y == 1 or tensor.residual == "replicated"):
        return [tensor]
    return [replace(tensor, keep=keep) for keep in KEEPS]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sampled(LAYOUTS, EACH_MODE))
def test_layers_send_what_is_forecast(name: str) -> None:
    pairs = zip(kept(LAYOUTS[name]), counted(name), strict=True)
    assert [line for tensor, counts in pairs for line in differences(tensor, counts)] == []


@pytest.mark.prove
def test_every_cuboid_sends_what_is_forecast() -> None:
    tensors = list(everything().values())
    pairs = zip(tensors, on_last_ranks(sent_by, tensors), strict=True)
    assert [line for tensor, counts in pairs for line in differences(tensor, counts)] == []


@pytest.mark.parametrize("name", sampled(["1d-sequence-2", "2d-4", "ring-3", "ulysses-2"], {"2d-4", "ring-3"}))
def test_real_ranks_send_the_same(name: str) -> None:
    tensor = LAYOUTS[name]
    assert [line for counts in on_ranks(tensor.size, sent_by, tensor) for line in differences(tensor, counts)] == []


def test_a_term_left_out_is_detected() -> None:
    """The comparison can fail: with another formula, and with another layer."""
    keep_x, counts = LAYOUTS["2d-4"], counted("2d-4")[KEEPS.index("x")]
    assert keep_x.keep == "x"
    assert differences(keep_x, counts) == []
    assert len(differences(replace(keep_x, keep="none"), counts)) >= 8
    assert differences(keep_x, counts | {"mlp": counts["attention"]})


def calls_of_a_block(tensor: mesh.TensorMesh) -> dict[str, int]:
    """Return how often a block calls each collective, forward and backward."""
    groups = Groups(Mesh(tensor=tensor))
    block = Block(groups, HIDDEN, HEADS, ffn_hidden_size=FFN)
    initialize(block, groups, seed=1)
    with counting(groups) as sent:
        block(residual(tensor)).sum().backward()
    calls: Counter[str] = Counter()
    for (collective, _), number in sent.calls.items():
        calls[collective] += number
    return calls


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("1d-2", {"all_reduce": 4}),  # Megatron's two forward and two backward; vectors need none
        ("1d-sequence-2", {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1}),  # one for all residual vectors
        ("2.5d-3-depth-3", {"all_reduce": 4 + 1}),  # one per weight; all vectors, residual and inner, are summed over d
        ("ulysses-2", {"all_reduce": 4 + 1, "all_to_all": 4}),
    ],
)
def test_a_block_calls_no_more_collectives_than_it_must(name: str, calls: dict[str, int]) -> None:
    assert on_last_ranks(calls_of_a_block, [LAYOUTS[name]]) == [calls]
