"""The load-balancing loss of transformers' mixtures in every tensor mode: loss and every gradient, in float64.

Each comparison is with transformers' own forward, whose loss has the coefficient 1 here, so that a mistake in it is as
large as one in the cross-entropy. `tests/distributed/layers/test_balance_loss.py` has data ranks, and
`tests/distributed/parity/test_balance_loss.py` has pipelines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from tests.support.layouts import LAYOUTS
from tests.support.maths_mutants import Mutant
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.models.layered import assemble
from dslpar.policies import check, hf_parity
from dslpar.policies.balance_loss import BalancedLoss
from dslpar.policies.miniature import shrunk
from dslpar.policies.model import HuggingFaceModel
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support import hugging_face as hf

CLOSE = check.CLOSE
ENABLED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


@lru_cache
def compared(family: str, padded: bool) -> tuple[HuggingFaceModel, Any]:
    """Return a family's model with the loss enabled, and (weights, batch, result of plain transformers)."""
    of_family = hf.FAMILIES[family]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        cls, config = of_family.classes()[0], of_family.config(**ENABLED)
        model = HuggingFaceModel(cls, config)
        plain, weights = hf_parity.plain(cls, config, of_family.attention)
        inputs = hf_parity.make_inputs(config, model.policy.inputs, padded=padded)
        return model, (weights, *hf_parity.reference(plain, inputs, model.policy))
    finally:
        torch.set_default_dtype(default)


def off(
    tensor: TensorMesh, family: str = "mixtral", padded: bool = True, change: Callable[[], None] = lambda: None
) -> float:
    """Return the largest relative error of logits, loss and gradients. `change` is called first on each rank."""
    model, (weights, given, reference) = compared(family, padded)

    def rank() -> float:
        change()
        return max(hf_parity.worst(hf_parity.by_policy(model, weights, tensor, given), reference).values())

    return max(on_ranks(tensor.size, rank))


DIVIDING = [name for name, tensor in LAYOUTS.items() if tensor.size % 3]
"""Layouts over which the 8 heads and 32 features of the families divide."""
IN_TURN = {"1d-4", "2d-4", "ring-2-zigzag"}


@pytest.mark.parametrize("layout", sampled(DIVIDING, {*IN_TURN, "1d-sequence-2"}))
def test_tokens_that_are_gathered_count_once(layout: str) -> None:
    """Every rank of the tensor group routes all tokens, and counts its own."""
    assert off(LAYOUTS[layout]) < CLOSE


@pytest.mark.parametrize("layout", sampled(DIVIDING, {*IN_TURN, "1d-sequence-2"}))
def test_tokens_that_are_exchanged_count_where_they_are(layout: str) -> None:
    assert off(replace(LAYOUTS[layout], exchanges_tokens=True)) < CLOSE


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_only_mixtures_count(family: str) -> None:
    """In these models every other block, or one of them, has a plain MLP. Gates of shared experts are no routers."""
    assert off(LAYOUTS["1d-2"], family) < CLOSE


def test_routers_with_biases_count() -> None:
    """GPT-OSS's mixtures also return the scores of their routers."""
    assert off(LAYOUTS["1d-2"], "gpt_oss") < CLOSE


@pytest.mark.parametrize("exchanges", [False, True])
def test_without_a_mask_all_tokens_count(exchanges: bool) -> None:
    assert off(replace(LAYOUTS["1d-2"], exchanges_tokens=exchanges), padded=False) < CLOSE


def test_what_is_recomputed_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan counted such tokens twice (its issue 4772)."""
    monkeypatch.setattr(hf_parity, "assemble", partial(assemble, interval=1))
    assert off(LAYOUTS["1d-2"]) < CLOSE


CHAIN, SUMS = "dslpar.policies.chain", "dslpar.policies.balance_loss"
LOSS = "dslpar.models.router_losses"
SPLIT = "dslpar.layers.distinct_tokens"
MISTAKES = [
    ("all-ranks-count-one-part", SPLIT, "DistinctTokens.part", "self._index * most", "0 * most"),
    ("padding-of-other-tokens", SUMS, "_RouterSums.begin", "self.cuts).flatten()", "self.cuts).flatten().flip(0)"),
    ("last-mixture-alone", CHAIN, "Chain.run_block", "sum(sums, state[ROUTING])", "sums[-1] + 0 * state[ROUTING]"),
    # Counting every mixture twice would change nothing, since f and P are divided by the number of choices.
    ("a-mixture-twice", CHAIN, "Chain.run_block", "sum(sums, state", "sum((1 + block) * sums, state"),
    ("without-coefficient", LOSS, "BalancedLoss.__call__", "self.coefficient * ", "0.5 * "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "module", "function", "old", "new"), MISTAKES, ids=[each[0] for each in MISTAKES])
def test_a_mistake_is_far_from_it(name: str, module: str, function: str, old: str, new: str) -> None:
    mutant = Mutant(name, "reduction", module, function, old, new, name)
    assert off(LAYOUTS["1d-2"], change=mutant.apply) > 1e-4


# ---- classes of transformers ----


def classes() -> list[str]:
    """Return the supported classes for which transformers has a load-balancing loss."""
    names = sorted({*DERIVED, *POLICIES})
    return [name for name in names if hasattr(_module_of(name), "load_balancing_loss_func")]


def _module_of(name: str) -> Any:
    return sys.modules[getattr(transformers, name).__module__]


@pytest.mark.parametrize("name", sampled(classes(), {"GraniteMoeForCausalLM", "PhimoeForCausalLM"}))
def test_the_loss_is_that_of_each_class(name: str) -> None:
    cls = getattr(transformers, name)
    config = shrunk(cls.config_class(), ENABLED | {"router_jitter_noise": 0.0})
    (row,) = check.check(hf_parity.Subject(cls, config), {"one process": None})
    assert (row.outcome, row.worst < CLOSE) == ("exact", True), row


def test_no_supported_class_has_a_loss_of_router_logits_squared() -> None:
    """A z-loss would be another term."""
    assert len(classes()) >= 11
    named = [name for name in classes() if any("z_loss" in each for each in vars(_module_of(name)))]
    configs = {name: getattr(transformers, name).config_class().to_dict() for name in classes()}
    named += [name for name, config in configs.items() if any("z_loss" in key for key in config)]
    assert named == []


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_a_class_without_such_a_loss_is_refused(name: str) -> None:
    cls = getattr(transformers, name)
    with pytest.raises(
        DslparError, match=r"TEN234 .*transformers has no load-balancing loss for this class\nhelp: output"
    ):
        HuggingFaceModel(cls, shrunk(cls.config_class(), {"output_router_logits": True, "first_k_dense_replace": 1}))


def test_another_loss_of_that_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _module_of("MixtralForCausalLM").load_balancing_loss_func
    monkeypatch.setattr(_module_of("MixtralForCausalLM"), "load_balancing_loss_func", lambda *each: 2 * own(*each))
    family = hf.FAMILIES["mixtral"]
    with pytest.raises(DslparError, match=r"TEN234 .*its load-balancing loss is not the one of transformers' decoders"):
        HuggingFaceModel(family.classes()[0], family.config(**ENABLED))


# ---- outputs ----


def test_a_program_s_criterion_gets_the_loss_and_inference_does_not() -> None:
    model, (_, given, _) = compared("mixtral", True)
    groups = Groups(Mesh())
    module = assemble(model.layers(groups), groups, seed=1).eval()
    inputs = tuple(given.inputs.values())
    output: Any = module(inputs)  # type: ignore[arg-type]
    loss: Any = model.loss(groups)
    whole = model.whole_output(groups, output)
    assert isinstance(loss, BalancedLoss)
    assert loss(output, given.labels[0]) == loss.of_logits(output[0], given.labels[0]) + whole.aux_loss
    alone = model.for_inference()
    logits = assemble(alone.layers(groups), groups, seed=1).eval()(inputs)  # type: ignore[arg-type]
    assert torch.equal(logits, output[0])
    assert list(alone.whole_output(groups, logits)) == ["logits"]
    assert model.balance is not None


def test_the_user_s_config_keeps_the_setting() -> None:
    family = hf.FAMILIES["mixtral"]
    config = family.config(**ENABLED)
    model = HuggingFaceModel(family.classes()[0], config)
    assert config.output_router_logits
    assert model.config.output_router_logits
    assert not model.model.config.output_router_logits
