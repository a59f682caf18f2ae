"""LoRA adapters in every tensor mode against peft over plain transformers: logits, loss, gradients, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.costs.any_model import model_costs
from dslpar.distributed.collectives import all_gather
from dslpar.distributed.groups import Groups
from dslpar.layers import gather, placement, placement_of
from dslpar.layers.lora import ExpertAdapter
from dslpar.models import recompute
from dslpar.models.layered import build_module
from tests.support.ranks import RankError, on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS or find_spec("peft") is None:
    pytest.skip(f"{NO_TRANSFORMERS}; and peft", allow_module_level=True)

import peft

from dslpar.policies import hf_parity
from dslpar.policies.lora import in_peft_s_form, parameters_with_peft_names
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import load, parameters_with_sources
from dslpar.schema import sections
from tests.distributed.policies.test_families import CLOSE, LAYOUTS, NAMES
from tests.support import hugging_face as hf

QV: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]}
"""A part of the linears that one product serves, with a rank that nothing divides."""
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", QV),
    "llama, all": ("llama, tied", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "qwen2, biases and head": ("qwen2", QV | {"bias": "all", "modules_to_save": ["lm_head", "input_layernorm"]}),
    "gpt2": ("gpt2", {"r": 2, "target_modules": ["c_attn", "mlp.c_proj"]}),
    "opt": ("opt", {"r": 2, "target_modules": ["k_proj", "fc1", "fc2"], "bias": "all"}),
    "phi3": ("phi3", {"r": 4, "target_modules": ["qkv_proj", "down_proj"]}),
    "mixtral, experts": ("mixtral", QV | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "gpt_oss, experts": ("gpt_oss", QV | {"target_parameters": ["experts.gate_up_proj"], "use_rslora": True}),
}
"""Family and keys. GPT-2's and Phi-3's q, k and v are one linear, and GPT-2's weights are transposed."""


@lru_cache
def expected(case: str, padded: bool) -> tuple[dict[str, Tensor], hf_parity.Batch, hf_parity.Result]:
    """Return the weights of the model with peft's adapters, and its results."""
    name, keys = CASES[case]
    family = hf.FAMILIES[name]
    model, weights = hf.plain(family)
    config = peft.LoraConfig(**keys, fan_in_fan_out=name == "gpt2")
    wrapped: Any = peft.get_peft_model(model, config)
    with torch.no_grad():
        for own, p in wrapped.named_parameters():
            p.data = p.data.double()  # not the module's double(): transformers keeps inv_freq in float32
            if "lora_B" in own:
                p.copy_(torch.randn_like(p) * 0.3)  # otherwise A has no gradient
    given, result = hf_parity.reference(wrapped, hf_parity.make_inputs(family.config(), padded=padded))
    weights |= {_plain_name(own): p.detach().clone() for own, p in wrapped.named_parameters() if "lora_" in own}
    gradients = {_plain_name(own): gradient for own, gradient in result.gradients.items()}
    return weights, given, result._replace(gradients=gradients)


def _plain_name(name: str) -> str:
    name = name.removeprefix("base_model.model.").replace(".default.", ".").replace(".modules_to_save.", ".")
    # Of two parameters of one module, base_layer tells the adapters of the one that peft wrapped first.
    return name if "experts.base_layer.lora_" in name else name.replace(".base_layer", "")


def _of_experts(own: str, matrix: Tensor, num_experts: int) -> Tensor:
    """Return A or B of experts, [E, r, in] or [E, out, r], given peft's [E r, in] or [out, r E]."""
    if "lora_A" in own:
        return matrix.unflatten(0, (num_experts, -1))
    return matrix.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def found(case: str, layout: str, padded: bool) -> hf_parity.Result:
    """Return the gathered results of this rank's piece."""
    weights, given, _ = expected(case, padded)
    name, keys = CASES[case]
    family = hf.FAMILIES[name]
    torch.set_default_dtype(torch.float64)
    tensor = LAYOUTS[layout] if layout else mesh.TensorMesh()
    groups = Groups(mesh.Mesh(tensor=tensor))
    model = HuggingFaceModel(family.classes()[0], family.config(), lora=keys)
    (labels,), inputs = given.labels, tuple(given.inputs.values())
    with hf_parity.in_float64():
        module = build_module(model, groups, seed=1).train()
        load(module, weights.__getitem__, groups)
        with torch.no_grad():
            for _, p, own in parameters_with_peft_names(module):
                at, whole = placement_of(p), weights[own]
                p.copy_(at.cut(whole if p.dim() == 2 else _of_experts(own, whole, at.shape[0]), groups.coord))
        logits = module(inputs if padded else inputs[0])
        loss = model.loss(groups)(logits, labels)
        torch.autograd.backward(loss)
    at = placement.inner(tensor, *labels.shape, placement.table(tensor, model.vocab_size, 32).padded[0])
    whole = gather(logits.detach(), at, groups)[..., : model.vocab_size]
    gradients = {
        own: in_peft_s_form(own, gather(p.grad, placement_of(p), groups))
        for _, p, own in parameters_with_peft_names(module)
    }
    for _, p, sources in parameters_with_sources(module):
        if p.grad is not None:
            parts = torch.split(gather(p.grad, placement_of(p), groups), [len(weights[each.name]) for each in sources])
            gradients |= {source.name: part for source, part in zip(sources, parts, strict=True)}
    return hf_parity.Result((whole,), loss.detach(), gradients)


def off(case: str, layout: str, padded: bool) -> dict[str, float]:
    """Return each tensor's error on the rank with the largest; infinite for a missing or additional tensor."""
    _, _, true = expected(case, padded)

    def rank() -> dict[str, float]:
        return hf_parity.worst(found(case, layout, padded), true)

    ranks = on_ranks(mesh.Mesh(tensor=LAYOUTS[layout]).world_size if layout else 1, rank)
    return {name: max(each[name] for each in ranks) for name in ranks[0]}


_SINKS = ("ring", "ulysses", "hybrid")  # no attention over ranks has the sinks of GPT-OSS
CELLS = sampled(
    (
        cell
        for cell in product(CASES, ("", *NAMES), (True, False))
        if (cell[2] or cell[:2] == ("llama", "1d-2"))
        and not (cell[0].startswith("gpt_oss") and cell[1].startswith(_SINKS))
    ),
    [("llama", "2d-4", True)],
)


@pytest.mark.parametrize(("case", "layout", "padded"), CELLS)
def test_adapters_are_those_of_peft(case: str, layout: str, padded: bool) -> None:
    found = off(case, layout, padded)
    assert len(found) > 10
    assert {name: value for name, value in found.items() if not value <= CLOSE} == {}


@pytest.mark.prove
def test_an_adapter_that_is_another_is_seen() -> None:
    """The comparison can fail: one number of one B, changed by a hundred-millionth."""
    weights, _, true = expected("llama", True)
    name = "model.layers.1.self_attn.v_proj.lora_B.weight"
    kept = weights[name].clone()
    weights[name][0, 0] += 1e-8
    try:
        (logits,) = on_ranks(1, lambda: found("llama", "", True).outputs[0])
    finally:
        weights[name] = kept
    assert float((logits - true.outputs[0]).abs().max()) > CLOSE * float(true.outputs[0].abs().max())


def _pieces(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the initial adapters in full, and their gradients with dropout, which copies must share."""
    tensor = LAYOUTS[layout] if layout else mesh.TensorMesh()
    groups = Groups(mesh.Mesh(tensor=tensor))
    family = hf.FAMILIES["llama"]
    ids, mask = hf_parity.make_inputs(family.config()).values()
    model = HuggingFaceModel(family.classes()[0], family.config(), lora=QV | {"lora_dropout": 0.3})
    module = build_module(model, groups, seed=1).train()
    adapters = {own: p for _, p, own in parameters_with_peft_names(module)}
    begins = {own: gather(p, placement_of(p), groups) for own, p in adapters.items()}
    torch.nn.init.ones_(next(p for own, p in adapters.items() if "v_proj.lora_B" in own))
    torch.manual_seed(11)
    model.loss(groups)(module((ids, mask)), ids).backward()
    for own, p in adapters.items():
        held: dict[Any, Tensor] = {}
        for rank, piece in enumerate(all_gather(p.grad[None], groups.axis("tensor"))):
            coord = mesh.Mesh(tensor=tensor).coord(rank)
            cut = tuple(tuple(coord[letter] for letter in letters) for letters in placement_of(p).cuts)
            assert torch.equal(held.setdefault(cut, piece), piece), f"{own}: copies differ"
    return begins, {own: p.grad for own, p in adapters.items()}


@pytest.mark.prove
@pytest.mark.parametrize("layout", NAMES)
def test_copies_of_adapters_have_equal_gradients_with_dropout_on(layout: str) -> None:
    """And they begin as in one process: A from U(-1/sqrt(in), 1/sqrt(in)) by its name, B as zeros."""
    ranks = on_ranks(mesh.Mesh(tensor=LAYOUTS[layout]).world_size, _pieces, layout)
    ((alone, _),) = on_ranks(1, _pieces, "")
    for begins, gradients in ranks:
        assert all(torch.equal(begins[own], alone[own]) for own in alone)
        assert any(gradient.abs().max() > 0 for own, gradient in gradients.items() if "lora_A" in own)
    a = [p for own, p in alone.items() if "lora_A" in own]
    assert all(0.8 < float(p.abs().max()) * 32**0.5 <= 1 for p in a)
    assert len({float(p[0, 0]) for p in a}) == len(a) == 6
    assert all(not p.any() for own, p in alone.items() if "lora_B" in own)


def _flops_and_gradients(lora: dict[str, Any] | None) -> tuple[int, int, int]:
    """Return the products' operations in forward and backward, and the number of tensors with a gradient."""
    groups, family = Groups(mesh.Mesh()), hf.FAMILIES["llama"]
    model = HuggingFaceModel(family.classes()[0], family.config(), lora=lora)
    module, ids = (
        build_module(model, groups, seed=1),
        hf_parity.make_inputs(family.config())["input_ids"],
    )
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(groups)(module(ids), ids)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops(), sum(p.grad is not None for p in module.parameters())


@pytest.mark.prove
def test_a_frozen_base_costs_no_product_of_weights_gradients() -> None:
    ((whole, whole_backward, _),) = on_ranks(1, _flops_and_gradients, None)
    ((forward, backward, gradients),) = on_ranks(1, _flops_and_gradients, QV)
    assert gradients == 3 * 2 * 2  # three blocks, q and v, A and B
    assert whole_backward > 1.9 * whole  # for each product, the gradients of both factors
    assert backward < 1.3 * forward < 1.3 * 1.1 * whole  # of one factor; for the adapters' small products, of both


@pytest.mark.parametrize(
    ("family", "keys", "message", "hint"),
    [
        ("llama", {"target_modules": []}, "no weight has an adapter", "choose from .down_proj., .gate_proj."),
        (
            "mixtral",
            {"target_parameters": ["experts.gate_up"]},
            "no weight of experts is called 'experts.gate_up'",
            "did you mean 'experts.gate_up_proj'",
        ),
        ("mixtral", {"target_parameters": ["q_proj.weight"]}, r"q_proj\.weight is no weight of experts", "choose from"),
        (
            "llama",
            {"target_parameters": ["experts.gate_up_proj"]},
            "no weight of experts",
            "leave target_parameters out",
        ),
        (
            "gpt_oss",
            {"target_parameters": ["gate_up_proj_bias"]},
            "gate_up_proj_bias is no weight of experts",
            "choose from",
        ),
        (
            "mixtral",
            {"target_parameters": ["gate_up_proj"], "lora_dropout": 0.1},
            "no input to drop",
            "lora_dropout=0.0",
        ),
    ],
)
def test_what_is_no_weight_of_experts_is_refused(family: str, keys: dict[str, Any], message: str, hint: str) -> None:
    cls, config = hf.FAMILIES[family].classes()[0], hf.FAMILIES[family].config()
    with pytest.raises(DslparError, match=rf"CFG223 .*{message}[\s\S]*{hint}"):
        HuggingFaceModel(cls, config, lora=QV | keys)


def _sums(chunks: int) -> int:
    """Return how many sums of weights and adapters a forward of two weights in each block's experts computes."""
    made = 0

    def counted(self: ExpertAdapter, *tensors: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return added(self, *tensors)

    added, family = ExpertAdapter.added, hf.FAMILIES["mixtral"]
    groups = Groups(mesh.Mesh(tensor=mesh.TensorMesh(exchanges_tokens=True, expert_chunks=chunks)))
    model = HuggingFaceModel(family.classes()[0], family.config(), lora=CASES["mixtral, experts"][1])
    module, ids = build_module(model, groups, seed=1), hf_parity.make_inputs(family.config())["input_ids"]
    with patch.object(ExpertAdapter, "added", counted):
        module(ids)
    return made


@pytest.mark.parametrize("chunks", [1, 3])
def test_adapters_are_added_once_however_many_parts_tokens_are_sent_in(chunks: int) -> None:
    assert on_ranks(1, _sums, chunks) == [2 * 3]


def test_linears_of_experts_have_no_adapter() -> None:
    cls, config = hf.FAMILIES["qwen2_moe"].classes()[0], hf.FAMILIES["qwen2_moe"].config()
    HuggingFaceModel(cls, config, lora={"r": 2, "target_modules": ["q_proj"]})
    with pytest.raises(DslparError, match=r"CFG223 .*mlp\.shared_expert\.down_proj \(Linear\) cannot have an adapter"):
        HuggingFaceModel(cls, config, lora={"r": 2, "target_modules": ["down_proj"]})


def _recomputed(interval: int, *, reentrant: bool = False) -> dict[str, Tensor | None]:
    """Return adapters' gradients if blocks run again in the backward; the first block's input needs no gradient."""
    groups, family = Groups(mesh.Mesh()), hf.FAMILIES["llama"]
    ids = hf_parity.make_inputs(family.config())["input_ids"]
    model = HuggingFaceModel(family.classes()[0], family.config(), lora=QV | {"lora_dropout": 0.3})
    module = build_module(model, groups, seed=1, interval=interval).train()
    adapters = {own: p for _, p, own in parameters_with_peft_names(module)}
    for own, p in adapters.items():
        if "lora_B" in own:
            torch.nn.init.ones_(p)
    torch.manual_seed(11)
    with patch.object(recompute, "checkpoint", _as_torch_s_other_kind) if reentrant else nullcontext():
        model.loss(groups)(module(ids), ids).backward()
    return {own: p.grad for own, p in adapters.items()}


def _as_torch_s_other_kind(function: Any, group: Any, x: Tensor, **_: bool) -> Any:
    return checkpoint(function, group, x, use_reentrant=True)


@pytest.mark.prove
def test_a_frozen_table_loses_no_gradient_where_blocks_are_recomputed() -> None:
    """They are bitwise equal, with dropout. With torch's reentrant checkpoint, no output would need a gradient."""
    (kept,), (again,) = on_ranks(1, _recomputed, 0), on_ranks(1, _recomputed, 1)
    assert len(kept) == 12
    for own, gradient in kept.items():
        assert gradient is not None
        assert gradient.any()
        assert torch.equal(gradient, again[own]), own
    with pytest.raises(RankError, match="Gradients will be None"):  # torch's warning
        on_ranks(1, partial(_recomputed, reentrant=True), 1)


# ---- the forecast ----


def trained(case: str) -> float:
    name, keys = FORECAST[case]
    family = hf.FAMILIES[name]
    module = build_module(
        HuggingFaceModel(family.classes()[0], family.config(), lora=keys), Groups(mesh.Mesh()), seed=1
    )
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


ALL = {"r": 4, "target_modules": "all-linear"}
FORECAST = {name: of for name, of in CASES.items() if "bias" not in of[1]} | {
    "bloom": ("bloom", ALL),
    "experts": ("mixtral", ALL),
    "a linear whole": ("llama", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}),
}


@pytest.mark.parametrize("case", FORECAST)
def test_the_forecast_knows_what_is_trained(case: str) -> None:
    name, keys = FORECAST[case]
    family = hf.FAMILIES[name]
    target = f"transformers.{family.classes()[0].__name__}"
    lora = sections.LoRA(**keys)
    # Without sizes of other mixtures, which a family of the tests may have too.
    known, config = type(family.config())().to_dict(), family.config().to_dict()
    config = {name: value for name, value in config.items() if name in known}
    other = sections.OtherModel(target=target, args={"config": config}, lora=lora)
    costs = model_costs(other, mesh.TensorMesh(), 8, 8)
    assert costs is not None
    num_layers = other.transformers.num_layers
    forecast = num_layers * (costs.weights[1] - costs.frozen[1])
    (found,) = on_ranks(1, trained, case)
    assert found == forecast
