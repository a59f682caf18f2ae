"""Mixtures of experts in a GPT: against a dense mixture, and the closed forms of their costs against real ranks.

tests/properties/layouts compares whole runs with one process, in all modes. Float64 sums of some hundred terms in
another order differ by some units in the last place: 1e-12 relative, as for all layers.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dslpar.checkpoint.rank_state import persistent_buffers
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs import memory, traffic
from dslpar.costs.model_costs import function_of
from dslpar.distributed.groups import Groups
from dslpar.engine.model import CustomModel
from dslpar.layers import Mixture, MixtureBlock, initialize, normal, placement
from dslpar.layers.balance_loss import balance_loss, router_sums, squares_of_logits, sums_of_choices, z_loss
from dslpar.layers.block import ACTIVATIONS
from dslpar.layout.stages import EvenWeights
from dslpar.models.gpt import costs, layout, section
from dslpar.models.gpt.model import GPT
from dslpar.models.layered import LayeredModule, build_module
from dslpar.schema.sections import Experts
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.saved_tensors import saved_by
from tests.support.traffic_counter import counting

BATCH, SEQUENCE, HIDDEN, FFN, EXPERTS, TOP_K = 8, 8, 32, 16, 8, 2


# ---- one process, against the definition ----


def dense(mixture: Mixture, x: Tensor, router: str) -> Tensor:
    """Return what a mixture computes, expert by expert and token by token."""
    logits = x.flatten(0, -2) @ mixture.router.T  # type: ignore[union-attr, operator]
    scores = logits.softmax(-1) if router == "softmax" else logits.sigmoid()
    rows = []
    for token, of_token in zip(x.flatten(0, -2), scores, strict=True):
        chosen = sorted(range(EXPERTS), key=lambda expert: -of_token[expert].item())[:TOP_K]
        total = sum(of_token[expert] for expert in chosen) if mixture.renormalize else 1.0
        row = torch.zeros(HIDDEN, dtype=x.dtype)
        for expert in chosen:
            inner = mixture.activation(mixture.up[expert] @ token)  # type: ignore[index]
            row = row + of_token[expert] / total * (mixture.down[expert] @ inner)  # type: ignore[index]
        rows.append(row)
    y = torch.stack(rows).view(x.shape)
    return y if mixture.shared_expert is None else y + mixture.shared_expert(x)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_mixture_is_the_weighted_sum_of_its_experts(router: Any, renormalize: bool, activation: Any) -> None:
    groups = Groups(Mesh())
    mixture = Mixture(
        groups,
        HIDDEN,
        FFN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        router=router,
        renormalize=renormalize,
        activation=activation,
        shared_ffn_hidden_size=24,
        init=normal(0.3),
    ).double()
    initialize(mixture, groups, seed=1)
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(mixture(x), dense(mixture, x, router), rtol=1e-12, atol=1e-12)


def test_sums_of_choices_are_those_of_the_router() -> None:
    logits = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scores = logits.softmax(-1)
    found = sums_of_choices(scores.topk(TOP_K).indices, scores)
    torch.testing.assert_close(found, router_sums(logits, TOP_K), rtol=1e-12, atol=1e-12)
    found = sums_of_choices(scores.topk(TOP_K).indices, 7 * scores)
    torch.testing.assert_close(found, router_sums(logits, TOP_K), rtol=1e-12, atol=1e-12)


# ---- the model ----

SIZES: dict[str, Any] = dict(num_layers=4, hidden_size=HIDDEN, num_heads=8, vocab_size=48, max_seq_len=SEQUENCE)
MODELS = {
    "every block": section.GPT(**SIZES, experts=Experts(num=6, ffn_hidden_size=24)),
    "every second": section.GPT(**SIZES, tie_embeddings=False, experts=Experts(num=8, shared=2, every=2)),
    "swiglu": section.GPT(**SIZES, activation="swiglu", bias=False, experts=Experts(num=8, top_k=3, every=3)),
}


def test_the_last_of_every_so_many_blocks_has_a_mixture() -> None:
    model = GPT(**SIZES, experts=Experts(num=4, every=2))
    module = build_module(model, Groups(Mesh()), seed=1)
    found = [isinstance(module.get_submodule(f"blocks.{index}"), MixtureBlock) for index in range(4)]
    assert found == [False, True, False, True]
    assert GPT(**SIZES, experts=dict(num=4, every=2)) == model  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_a_rank_are_those_that_are_forecast(name: str) -> None:
    """Without processes: every rank builds its part. The weights of a pipeline are those of one rank."""
    gpt = MODELS[name]
    weights, alone = layout.pipeline_weights(gpt, "parameters", SEQUENCE), built(gpt, Mesh(), 0)
    total = sum(weights.loads((4,)) if isinstance(weights, EvenWeights) else weights)
    table = gpt.vocab_size * gpt.hidden_size if gpt.tie_embeddings else 0
    assert total - table == sum(p.numel() for p in alone.parameters())
    for form, data, e in (("1d-1", 1, 1), ("1d-1", 4, 2), ("1d-2", 2, 2), ("2d-4", 2, 2), ("3d-8", 1, 1)):
        tensor = cuboid(form, e)
        found = function_of(costs.layers(gpt, SEQUENCE))(tensor, 64.0)
        num_blocks = 1 if found.units else gpt.num_layers
        expected = found.first.memory.weights + found.last.memory.weights - found.tied
        expected += num_blocks * found.layer.memory.weights
        mesh = Mesh(data=data, tensor=tensor)
        for rank in range(mesh.world_size):
            parameters = list(built(gpt, mesh, rank).parameters())
            assert sum(p.numel() for p in parameters) == expected, (form, rank)
            experts = sum(p.numel() for p in parameters if p.placement.is_expert)  # type: ignore[attr-defined]
            assert experts == (num_blocks * found.layer.memory.experts if e > 1 else 0), (form, rank)


def built(gpt: section.GPT, mesh: Mesh, rank: int) -> LayeredModule:
    groups = Groups.without_processes(mesh, rank=rank)
    with torch.device("meta"):
        return LayeredModule(model_of(gpt).layers(groups))


def model_of(gpt: section.GPT) -> GPT:
    return GPT(**{item.name: getattr(gpt, item.name) for item in fields(gpt)})


# ---- losses of routers, and their bias ----


def test_the_z_loss_is_the_mean_square_of_the_log_sum_exp() -> None:
    groups = Groups(Mesh())
    logits = torch.randn(2, 7, EXPERTS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sums = sum(torch.cat([router_sums(each, TOP_K), squares_of_logits(each)]) for each in logits)  # of two mixtures
    expected = logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(z_loss(groups, sums, TOP_K), expected, rtol=1e-12, atol=0)  # type: ignore[arg-type]


def test_both_losses_are_added() -> None:
    groups, ids = Groups(Mesh()), torch.randint(48, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))
    experts = Experts(num=4, balance=0.5, z_loss=0.25)
    model = GPT(**SIZES, experts=experts)
    logits, sums = build_module(model, groups, seed=1)(ids)
    assert sums.shape == (3, 4)
    found = model.loss(groups)((logits, sums), ids)
    alone = model.for_inference().loss(groups)(logits, ids)
    expected = alone + 0.5 * balance_loss(groups, sums[:2], 2) + 0.25 * z_loss(groups, sums, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    without = GPT(**SIZES, experts=replace(experts, balance=0.0, z_loss=0.0))
    torch.testing.assert_close(build_module(without, groups, seed=1)(ids), logits, rtol=0, atol=0)


def test_a_program_s_own_criterion_is_completed() -> None:
    groups, ids = Groups(Mesh()), torch.randint(48, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))
    model = GPT(**SIZES, experts=Experts(num=4, balance=0.5))
    logits, sums = build_module(model, groups, seed=1)(ids)
    custom = CustomModel(model, criterion=lambda output, label: output.square().mean())
    expected = logits.square().mean() + 0.5 * balance_loss(groups, sums, 2)
    torch.testing.assert_close(custom.loss(groups)((logits, sums), ids), expected)
    assert custom.takes_statistics
    assert not CustomModel(model.for_inference(), criterion=custom.criterion).takes_statistics


def test_a_frozen_bias_stays() -> None:
    learning = GPT(**SIZES, experts=Experts(num=4, bias_update=0.1))
    frozen = replace(learning, experts=Experts(num=4, bias_update=0.0))
    groups, ids = Groups(Mesh()), torch.randint(48, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))
    module = build_module(frozen, groups, seed=1)
    before = persistent_buffers(module)
    assert before.keys() == persistent_buffers(build_module(learning, groups, seed=1)).keys() != set()
    module(ids)
    assert (learning.changes_after_step, frozen.changes_after_step) == (True, False)
    learning.after_step(module, 0.0)
    assert any(bias.any() for bias in persistent_buffers(module).values())
    assert not GPT(**SIZES, experts=Experts(num=4)).changes_after_step


def test_a_bias_moves_towards_an_even_load_and_changes_no_weight() -> None:
    groups = Groups(Mesh())
    mixture = Mixture(groups, HIDDEN, FFN, num_experts=EXPERTS, top_k=TOP_K, with_bias=True)
    initialize(mixture, groups, seed=1)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.5
    _, before = mixture.run(x)
    load = torch.bincount(before.experts.flatten(), minlength=EXPERTS).double()
    mixture.update_bias(0.5)
    assert mixture.bias is not None
    assert torch.equal(mixture.bias.double(), 0.5 * (load.mean() - load).sign())
    _, after = mixture.run(x)
    assert torch.equal(after.scores, before.scores)
    assert not torch.equal(after.experts, before.experts)
    chosen = after.scores.gather(1, after.experts)
    torch.testing.assert_close(after.weights, chosen / chosen.sum(1, keepdim=True))
    moved = mixture.bias.clone()
    mixture.eval().run(x)
    mixture.update_bias(0.5)
    assert not torch.equal(mixture.bias, moved), "the tokens of the second forward count, those of evaluation do not"
    mixture.update_bias(0.5)
    mixture.bfloat16()
    assert mixture.bias.dtype is torch.float32
    assert "bias" in mixture.state_dict()


# ---- costs of one mixture ----


def cuboid(form: str, e: int, chunks: int = 1) -> TensorMesh:
    tensor = LAYOUTS[form] if form != "1d-1" else TensorMesh()
    return replace(tensor, e=e, exchanges_tokens=True, expert_chunks=chunks)


class Measured(NamedTuple):
    forward: dict[Any, Any]
    backward: dict[Any, Any]
    saved: float
    weights: int


def measured(activation: Any, factor: float | None, tensor: TensorMesh, data: int) -> Measured:
    groups = Groups(Mesh(data=data, tensor=tensor))
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "capacity_factor": factor}
    mixture = Mixture(groups, HIDDEN, FFN, activation=activation, **sizes)
    initialize(mixture, groups, seed=1)
    route = mixture.route

    def evenly(tokens: Tensor, router: Tensor) -> Any:
        made = route(tokens, router)
        return made._replace(experts=torch.arange(made.experts.numel()).view(made.experts.shape) % EXPERTS)

    mixture.route = evenly  # type: ignore[method-assign]
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(6))
    x = placement.residual(tensor, *x.shape).cut(x, groups.coord).requires_grad_()
    with counting(groups) as forward:
        y = mixture(x)
    with counting(groups) as backward:
        y.sum().backward()
    weights = sum(p.numel() for p in mixture.parameters())
    return Measured(dict(forward.elements), dict(backward.elements), saved_by(mixture, x), weights)


FORMS = [("1d-1", 1, 1), ("1d-1", 4, 2), ("1d-2", 2, 2), ("1d-sequence-2", 2, 1), ("2d-4", 2, 2), ("3d-8", 1, 1)]
CASES = [(activation, None, *form) for activation in ("gelu", "swiglu") for form in FORMS]
CASES += [("gelu", 1.0, *form) for form in FORMS]


@pytest.mark.parametrize(
    ("activation", "factor", "form", "data", "e"),
    sampled(CASES, [("gelu", 1.0, "1d-2", 2, 2), ("swiglu", None, "1d-1", 4, 2), ("swiglu", None, "1d-1", 1, 1)]),
)
def test_traffic_and_memory_of_a_mixture(activation: str, factor: float | None, form: str, data: int, e: int) -> None:
    """At the even load, a capacity of the even share drops nothing."""
    tensor, tokens = cuboid(form, e), BATCH * SEQUENCE
    experts = Experts(num=EXPERTS, top_k=TOP_K, ffn_hidden_size=FFN, capacity_factor=factor)
    gpt = section.GPT(**SIZES, activation=activation, experts=experts)
    (sizes,) = costs.layers(gpt, SEQUENCE).mlp_part[2:]
    sent, held = traffic.total([sizes], tensor, tokens), memory.total([sizes], tensor, tokens)
    for found in on_ranks(data * tensor.size, measured, activation, factor, tensor, data):
        for way, expected in ((found.forward, sent.forward), (found.backward, sent.backward)):
            assert sum(way.values()) == sum(expected.values())
        assert found.weights == held.weights
        assert found.saved == pytest.approx(float(held.saved.elements + held.saved.wide), rel=0.02)
