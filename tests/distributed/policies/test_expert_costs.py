"""Costs of mixtures that send tokens to experts: the closed forms against real ranks at the even load.

Parameters and traffic are equal to the last element. Saved tensors are those of transformers' fused products, without
indices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs import memory, traffic
from dslpar.costs.collective_traffic import Number
from dslpar.costs.layers import Mixture
from dslpar.costs.transformers_costs import costs_function
from dslpar.distributed.groups import Groups
from dslpar.schema.sections import OtherModel
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.saved_tensors import saved_by
from tests.support.traffic_counter import counting
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from dslpar.policies.apply import Setting, apply
from dslpar.policies.model import HuggingFaceModel
from dslpar.schema.policy import Policy
from tests.distributed.policies.test_experts import BATCH, HIDDEN, POLICY, SEQUENCE, residual, whole

FFN, EXPERTS, ACTIVE, SHARED = 16, 8, 2, 24
WITH_SHARED = Policy(
    blocks=(),
    regions={"mlp.shared_expert": {"x": ("gate_proj", "up_proj")}},
    outward=("mlp.shared_expert.down_proj",),
    experts=("mlp.experts",),
    routers=("mlp.gate", "mlp.shared_expert_gate"),
)
EXPERT_LAYOUTS = [
    ("1d-1", 2, 2),
    ("1d-1", 4, 2),
    ("1d-2", 2, 2),
    ("1d-sequence-2", 2, 1),
    ("1d-sequence-4", 1, 1),
    ("2d-4", 2, 2),
    ("ring-2", 2, 2),
    ("3d-8", 1, 1),
]
"""Layout of a tensor group, number of replicas, and replicas over which experts are divided."""
QUICK = {("1d-1", 4, 2), ("1d-2", 2, 2)}


def cuboid(layout: str, e: int, chunks: int = 1) -> TensorMesh:
    tensor = LAYOUTS[layout] if layout != "1d-1" else TensorMesh()
    return replace(tensor, e=e, exchanges_tokens=True, expert_chunks=chunks)


# ---- parameters ----

SIZES: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=70,
    tie_word_embeddings=False,
    max_position_embeddings=32,
)
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(intermediate_size=48, num_local_experts=6, pad_token_id=None),
    "Qwen3Moe": dict(moe_intermediate_size=24, num_experts=8, head_dim=16, intermediate_size=48),
    "Qwen2Moe": dict(moe_intermediate_size=24, num_experts=8, shared_expert_intermediate_size=40, intermediate_size=48),
    "GptOss": dict(intermediate_size=48, num_local_experts=6, head_dim=16),
    "DeepseekV3": dict(
        moe_intermediate_size=24,
        n_routed_experts=6,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=40,
        kv_lora_rank=20,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=10,
    ),
}
MODELS["DeepseekV3, first block dense"] = MODELS["DeepseekV3"] | dict(first_k_dense_replace=1, v_head_dim=6)


@pytest.mark.parametrize("name", sampled(MODELS, {"Mixtral", "Qwen2Moe", "DeepseekV3, first block dense"}))
def test_parameters_of_every_rank_are_those_that_are_forecast(name: str) -> None:
    """Without processes: every rank of six layouts builds its part of a tiny model."""
    sizes = SIZES | MODELS[name]
    if "kv_lora_rank" in sizes:  # each head has a key
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    target = f"{name.partition(',')[0]}ForCausalLM"
    cls = getattr(transformers, target)
    config = OtherModel(target=f"transformers.{target}", args={"config": sizes}).transformers
    costs = costs_function(config, 16)
    assert costs is not None
    model = HuggingFaceModel(cls, cls.config_class(**sizes))
    for layout, data, e in EXPERT_LAYOUTS:
        tensor = cuboid(layout, e)
        found = costs(tensor, 64.0)
        num_blocks = 1 if found.units else 2
        expected = sum(float(part.memory.weights) for part in (found.first, found.last))
        expected += num_blocks * found.layer.memory.weights
        mesh = Mesh(data=data, tensor=tensor)
        for rank in range(mesh.world_size):
            groups = Groups.without_processes(mesh, rank=rank)
            with torch.device("meta"):
                built = [spec.build() for spec in model.layers(groups)]
            parameters = [p for part in built for p in part.parameters()]
            assert sum(p.numel() for p in parameters) == expected, (layout, rank)
            experts = sum(p.numel() for p in parameters if p.placement.is_expert)  # type: ignore[attr-defined]
            assert experts == num_blocks * (found.layer.memory.experts if e > 1 else 0), (layout, rank)


# ---- traffic and saved tensors of one mixture ----


def evenly(mixture: nn.Module) -> None:
    """Make the router give each expert as many tokens."""

    def choose(_: nn.Module, inputs: Any, outputs: Any) -> Any:
        logits, weights, index = outputs
        even = torch.arange(index.numel()).view(index.shape) % EXPERTS
        return logits, weights, even

    mixture.gate.register_forward_hook(choose)  # type: ignore[union-attr, operator]


def mixture_of(name: str, groups: Groups, implementation: str = "eager") -> tuple[nn.Module, Mixture]:
    """Return this rank's part of a mixture, and its sizes."""
    if name == "mixtral":
        part = apply(whole(implementation), "mlp", Setting(groups, POLICY, HIDDEN, transformers.MixtralConfig()))
        made = Mixture(HIDDEN, FFN, EXPERTS, ACTIVE)
    else:
        config = transformers.Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=FFN,
            num_experts=EXPERTS,
            num_experts_per_tok=ACTIVE,
            shared_expert_intermediate_size=SHARED,
        )
        config._experts_implementation = implementation
        part = apply(Qwen2MoeSparseMoeBlock(config), "mlp", Setting(groups, WITH_SHARED, HIDDEN, config))
        made = Mixture(HIDDEN, FFN, EXPERTS, ACTIVE, SHARED, shared_gate=True)
    for p in part.parameters():
        nn.init.normal_(p, std=0.3)
    evenly(part)
    return part, made


class Measured(NamedTuple):
    forward: dict[Any, tuple[Number, int]]
    backward: dict[Any, tuple[Number, int]]
    saved: float
    weights: int


def _measured(name: str, tensor: TensorMesh, data: int) -> Measured:
    groups = Groups(Mesh(data=data, tensor=tensor))
    part, _ = mixture_of(name, groups, "grouped_mm")
    x = residual(groups)
    with counting(groups) as forward:
        y = part(x)
    with counting(groups) as backward:
        y.sum().backward()
    ways = [{key: (number, sent.calls[key]) for key, number in sent.elements.items()} for sent in (forward, backward)]
    weights = sum(p.numel() for p in part.parameters())
    return Measured(*ways, saved_by(part, x), weights)


def _named(sent: traffic.Traffic, tensor: TensorMesh, data: int) -> dict[Any, Number]:
    """Return traffic by the names of the counter, which knows the data axis only whole."""
    found: dict[Any, Number] = {}
    for (kind, axis), number in sent.items():
        letters = axis.replace("e", "data") if data == tensor.e else "other" if "e" in axis.split() else axis
        found[kind, letters] = found.get((kind, letters), 0) + number
    return found


CASES = [(name, *layout, chunks) for name in ("mixtral", "qwen2") for layout in EXPERT_LAYOUTS for chunks in (1, 2)]


@pytest.mark.parametrize(
    ("name", "layout", "data", "e", "chunks"),
    sampled(CASES, lambda case: case[1:4] in QUICK and (case[0] == "qwen2") == (case[4] == 2)),
)
def test_traffic_and_memory_of_a_mixture(name: str, layout: str, data: int, e: int, chunks: int) -> None:
    tensor, tokens = cuboid(layout, e, chunks), BATCH * SEQUENCE
    groups = Groups.without_processes(Mesh(data=data, tensor=tensor))
    _, sizes = mixture_of(name, groups)
    sent = traffic.mixture(sizes, tensor, tokens)
    held = memory.mixture(sizes, tensor, tokens)
    for found in on_ranks(data * tensor.size, _measured, name, tensor, data):
        for way, expected in ((found.forward, sent.forward), (found.backward, sent.backward)):
            assert {key: number for key, (number, _) in way.items()} == _named(expected, tensor, data)
        if tokens // tensor.size // chunks * ACTIVE % EXPERTS == 0:  # every part has rows for every expert
            assert sum(calls for _, calls in found.forward.values()) == sum(sent.forward.calls.values())
        assert found.weights == held.weights
        saved = held.saved.elements + held.saved.wide
        assert found.saved == pytest.approx(float(saved), rel=0.02)
