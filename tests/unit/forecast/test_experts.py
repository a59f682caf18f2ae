"""Forecasts of mixtures that send tokens to their experts (`parallel.expert`): memory, time, and the search.

tests/distributed/policies/test_expert_costs.py compares the closed forms with real ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.forecast.candidate import Workloads, candidate_of, overrides
from dslpar.forecast.constants import DEFAULT
from dslpar.forecast.device import device_named
from dslpar.forecast.kernels import kernels_of, products_s
from dslpar.forecast.links import Group, Nodes, group_of
from dslpar.forecast.model_states import owner_of, states
from dslpar.forecast.plan import Forecast, Machine, forecast
from dslpar.forecast.search import search
from dslpar.forecast.search_space import candidates
from dslpar.forecast.stage_memory import num_communicators
from dslpar.forecast.workload import Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Schedule
from dslpar.linter import check
from dslpar.schema.sections import ExpertParallel, OtherModel

MIXTRAL = OtherModel(target="transformers.MixtralForCausalLM", args={"config": {"tie_word_embeddings": False}})
QWEN3 = OtherModel(
    target="transformers.Qwen3MoeForCausalLM",
    args={
        "config": dict(
            num_hidden_layers=48,
            num_experts=128,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            tie_word_embeddings=False,
        )
    },
)
H100 = Machine.usual(device_named("h100-80g"))
SEQUENCE = {"mode": "1d", "residual": "sequence"}


def workload(
    model: OtherModel, layers: int, pipe: int, data: int, tensor: TensorMesh, zero: int, **more: Any
) -> Workload:
    return Workload(
        model=model,
        mesh=Mesh(pipe=pipe, data=data, tensor=tensor),
        counts=(layers // pipe,) * pipe,
        schedule=Schedule(Chunks(pipe), 16),
        micro_size=1,
        seq_len=4096,
        zero=zero,
        **more,
    )


def exchanging(size: int = 8, data: int = 16, y: int = 1, pipe: int = 4, **more: Any) -> Workload:
    """Return Mixtral 8x7B with its experts over `size` ranks."""
    tensor = TensorMesh(y=y, **SEQUENCE) if y > 1 else TensorMesh()  # type: ignore[arg-type]
    tensor = replace(tensor, e=size // y, exchanges_tokens=True, expert_chunks=more.pop("expert_chunks", 1))
    return workload(MIXTRAL, 32, pipe, data, tensor, more.pop("zero", 1), **more)


def made(of: Workload) -> Forecast:
    return forecast(of, H100)


@pytest.mark.parametrize(("data", "y"), [(16, 1), (8, 2), (2, 8)])
def test_gathered_tokens_have_the_products_of_those_that_are_sent_within_a_tensor_group(data: int, y: int) -> None:
    tensor = TensorMesh(y=y, **SEQUENCE) if y > 1 else TensorMesh()  # type: ignore[arg-type]
    gathered, sent = workload(MIXTRAL, 32, 4, data, tensor, 1), exchanging(y, data, y)
    assert gathered.costs.layer.work.grouped == sent.costs.layer.work.grouped
    assert (gathered.costs.layer.traffic == sent.costs.layer.traffic) == (y == 1)
    assert gathered.experts(0) == 0
    assert made(gathered).at_uneven_load is None


# ---- memory ----


@pytest.mark.parametrize(("size", "data", "y"), [(2, 16, 1), (8, 16, 1), (8, 16, 2), (8, 4, 8)])
def test_experts_are_divided_by_their_ranks_and_their_states_by_expert_data(size: int, data: int, y: int) -> None:
    own = owner_of(exchanging(size, data, y), 0)
    hidden, ffn = 4096, 14336
    assert own.experts == 8 * 3 * hidden * ffn * 8 / size  # eight layers on a stage
    assert own.expert_replicas == data * y // size
    held = states(exchanging(size, data, y), 0)
    shard = (own.elements - own.experts) / data + own.experts * size / (data * y)
    assert (held.masters, held.optimizer) == (4 * shard, 8 * shard)
    assert held.gradients == 4 * own.elements


def test_activations_of_experts_are_reported_at_twice_the_even_load() -> None:
    even = made(exchanging())
    uneven = even.at_uneven_load
    assert uneven is not None
    tokens, hidden, ffn, layers, in_flight = 4096, 4096, 14336, 8, 4
    rows = 2 * tokens * layers * in_flight
    # Besides saved rows, the temporaries of the running layer grow, and the allocator's share of all of it.
    more = uneven.total - even.binding.total
    saved = 2 * rows * (hidden + 4 * ffn + 1)
    assert saved < more < 1.1 * saved
    assert uneven.weights == even.binding.weights


def test_chunks_bound_the_temporaries_and_not_what_is_saved() -> None:
    whole, parts = (made(exchanging(expert_chunks=chunks)).binding for chunks in (1, 4))
    assert parts.working < 0.5 * whole.working
    assert parts.activations - parts.working == whole.activations - whole.working


def test_experts_add_two_communicators() -> None:
    assert num_communicators(exchanging(8, 16).mesh) == num_communicators(exchanging(1, 16).mesh) + 2
    assert num_communicators(exchanging(16, 16).mesh) == num_communicators(exchanging(1, 16).mesh) + 1


# ---- time ----


def test_groups_of_experts_are_within_a_node_or_across() -> None:
    nodes = Nodes(per_node=8, nic_gb_per_s=400)
    mesh = exchanging(8, 16).mesh
    assert group_of(mesh, nodes, "e") == Group(8, 8, 1.0)
    assert group_of(mesh, nodes, "expert_data") == Group(2, 1, 0.125)
    assert group_of(exchanging(16, 16).mesh, nodes, "e") == Group(16, 8, 1.0)
    assert group_of(exchanging(8, 16, 2).mesh, nodes, "e", "y") == Group(8, 8, 1.0)
    assert group_of(exchanging(8, 16, 2).mesh, nodes, "e") == Group(4, 4, 0.5)


def test_tokens_cost_more_over_nodes() -> None:
    """The same Qwen3 on 16 ranks: experts over a node, or over two."""
    within, across = (
        made(workload(QWEN3, 48, 1, 16, TensorMesh(e=e, exchanges_tokens=True), 1)).time.tensor_s for e in (8, 16)
    )
    assert across > 4 * within > 0


def test_gradients_of_experts_are_reduced_over_expert_data_alone() -> None:
    found = made(exchanging()).time
    own = owner_of(exchanging(), 3)
    sent = {each.axis: each.num_bytes for each in found.sent}
    # All-reduce in fp32, and all-gather in bf16, of 15/16 of what 16 ranks share and of half of what 2 ranks share.
    assert sent["data"] == pytest.approx((2 * 4 + 2) * (own.elements - own.experts) * 15 / 16)
    assert sent["expert_data"] == pytest.approx((2 * 4 + 2) * own.experts / 2)
    of_layer = exchanging().costs.layer.traffic.both
    assert of_layer["all_to_all", "e"] == pytest.approx(7 / 8 * (8 * 4096 * 4096 + 8))  # k = 2, forth and back, twice
    assert sent["e"] == pytest.approx(2 * 8 * 16 * 7 / 8 * (8 * 4096 * 4096 + 8))
    alone = made(exchanging(16)).time
    assert "expert_data" not in {each.axis for each in alone.sent}
    assert alone.reduction_s + alone.gather_s < found.reduction_s + found.gather_s


def test_few_tokens_per_expert_make_slow_products() -> None:
    """Qwen3's experts on 8 ranks, with 2048 and with 32 tokens each: the second reads weights, and fills few tiles."""
    device = H100.device.computing_in("bf16")

    def seconds_per_token(seq_len: int) -> float:
        tensor = TensorMesh(e=8, exchanges_tokens=True)
        of = replace(workload(QWEN3, 48, 1, 8, tensor, 1), seq_len=seq_len)
        kernels = kernels_of(of.costs.layer.work._replace(products=()), device, fused=True)
        return products_s(kernels.forward, DEFAULT, wide_tiles=True) / seq_len

    assert seconds_per_token(64) > 3 * seconds_per_token(4096)


# ---- search ----

CONFIG = """
model = dict(type='transformers.MixtralForCausalLM', config=dict(tie_word_embeddings=False))
precision = 'bf16'
zero = 1
data = dict(type='tokens', path='tokens', seq_len=4096)
batch = dict(global_size=256, micro_size=1)
train = dict(steps=1)
"""


def job_of(*words: str, world: int = 64) -> Job:
    return check.check(check.load_text(CONFIG, "config.py", words), world).job


def test_layouts_with_experts_over_ranks_are_candidates() -> None:
    workloads = Workloads(job_of("parallel.pipeline=8"), per_node=8)
    found = search(workloads, H100)
    best = next(option for option in found.fastest() if option.candidate.expert is not None)
    assert best.forecast.workload.mesh.tensor.exchanges_tokens
    sizes = {each.expert.size for each in candidates(workloads) if each.expert is not None}
    assert sizes == {2, 4, 8}  # divisors of 8 experts
    for each in candidates(workloads):
        if each.expert is not None:
            e = each.expert.size // workloads.cuboid(each.tensor, each.context).size
            assert e >= 1
            assert each.zero < 3 or e == 1


def test_a_candidates_overrides_resolve_to_it() -> None:
    job = job_of("parallel.pipeline=8", "parallel.expert=dict(size=8, chunks=2)")
    own = candidate_of(job)
    assert own.expert == ExpertParallel(size=8, chunks=2)
    others = {
        own._replace(expert=None): "parallel.expert=None",
        own._replace(expert=ExpertParallel(size=4)): "parallel.expert=4",
        own._replace(expert=ExpertParallel(size=4, chunks=2)): "parallel.expert=dict(size=4, chunks=2)",
    }
    for candidate, word in others.items():
        assert overrides(job, candidate) == [word]
        again = job_of("parallel.pipeline=8", "parallel.expert=dict(size=8, chunks=2)", word)
        assert candidate_of(again) == candidate
        assert Workloads(job).workload(candidate).mesh == again.mesh
    assert own.changes(own._replace(expert=None)) == 1
    assert own.changes(own._replace(expert=ExpertParallel(size=4))) == 2


def test_a_traced_or_dense_model_has_its_own_experts_alone() -> None:
    dense = CONFIG.replace("Mixtral", "Llama").replace("config=dict(", "config=dict(max_position_embeddings=4096, ")
    workloads = Workloads(check.check(check.load_text(dense, "config.py"), 8).job)
    assert {each.expert for each in candidates(workloads)} == {None}
