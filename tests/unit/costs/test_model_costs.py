"""Costs of a model's parts: they sum to the traffic and memory counted for its layers one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dslpar.core.mesh import TensorMesh
from dslpar.costs.any_model import flops_per_token, model_costs
from dslpar.costs.model_costs import ModelCosts
from dslpar.costs.transformers_costs import gpt_of
from dslpar.layout.family_interface import layout_of, pipeline_weights
from dslpar.layout.stages import EvenWeights
from dslpar.models.gpt.section import GPT
from dslpar.models.moco.section import MoCo
from dslpar.models.resmlp.section import ResMLP
from dslpar.schema.sections import LoRA, Model, OtherModel
from tests.support.mlp_family.section import ResidualMLP

MODELS: Mapping[str, Model] = {
    "gpt": GPT(num_layers=4, hidden_size=64, num_heads=8, vocab_size=96, max_seq_len=16),
    "llama": GPT(
        num_layers=4,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=96,
        max_seq_len=16,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
        tie_embeddings=False,
    ),
    "resmlp": ResMLP(num_layers=4, hidden_size=64, image_size=32, patch_size=8, num_classes=10),
    "moco": MoCo(num_layers=4, hidden_size=64, num_heads=8, image_size=32, patch_size=8),
}
CUBOIDS: Mapping[str, TensorMesh] = {
    "none": TensorMesh(),
    "1d": TensorMesh(y=2, mode="1d"),
    "1d sequence": TensorMesh(y=2, mode="1d", residual="sequence"),
    "2d": TensorMesh(q=2, y=2, mode="2d", residual="hidden"),
    "2.5d": TensorMesh(d=2, q=2, y=2, mode="2.5d", residual="hidden"),
    "3d": TensorMesh(q=2, y=2, z=2, mode="3d", residual="batch", inner="batch", keep="none"),
}


def parts(model: Model, cuboid: TensorMesh, tokens: float) -> ModelCosts:
    found = model_costs(model, cuboid, tokens, model.longest_sample)
    assert found is not None
    return found


@pytest.mark.parametrize("cuboid", CUBOIDS)
@pytest.mark.parametrize("name", ["gpt", "llama", "resmlp"])
def test_ranks_hold_all_parameters(name: str, cuboid: str) -> None:
    model, tensor = MODELS[name], CUBOIDS[cuboid]
    made = parts(model, tensor, 8 * model.longest_sample)
    weights = pipeline_weights(model, "parameters", model.longest_sample)
    assert isinstance(weights, EvenWeights)
    held = made.first.memory.weights + made.layer.memory.weights * model.num_layers + made.last.memory.weights
    total = weights.first + weights.last + weights.layer * model.num_layers
    if tensor.size == 1:
        assert held == total
    else:  # matrices are sharded over all but d; vectors and positions over fewer axes
        assert total / tensor.size * tensor.d <= held <= total / tensor.size * tensor.d * 1.35
    assert made.tied == (64 * 96 / tensor.size * tensor.d if name == "gpt" else 0)


@pytest.mark.parametrize("name", ["gpt", "llama", "resmlp"])
def test_products_are_the_operations_of_a_forward(name: str) -> None:
    model = MODELS[name]
    tokens = 8 * model.longest_sample
    made = parts(model, TensorMesh(), tokens)
    products = [
        *made.first.work.products,
        *(each for each in made.layer.work.products for _ in range(model.num_layers)),
        *made.last.work.products,
    ]
    operations = 3 * sum(2 * rows * depth * columns for rows, depth, columns in products)
    counted = flops_per_token(model, model.longest_sample)
    assert counted is not None
    assert operations == pytest.approx(counted.mfu_6n * tokens, rel=0.01)


@pytest.mark.parametrize("cuboid", CUBOIDS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_share_the_work(name: str, cuboid: str) -> None:
    model, tensor = MODELS[name], CUBOIDS[cuboid]
    if (name, cuboid) == ("resmlp", "1d"):
        pytest.skip("a ResMLP mixes tokens of the residual stream, which all ranks have whole in 1d")
    tokens = 8 * model.longest_sample

    def operations(tensor: TensorMesh) -> float:
        products = parts(model, tensor, tokens).layer.work.products
        return sum(rows * depth * columns for rows, depth, columns in products)

    assert operations(tensor) * tensor.size == pytest.approx(operations(TensorMesh()))


@pytest.mark.parametrize("cuboid", CUBOIDS)
@pytest.mark.parametrize("name", MODELS)
def test_floats_count_as_fractions_do(name: str, cuboid: str) -> None:
    model, tensor = MODELS[name], CUBOIDS[cuboid]
    tokens = 8 * model.longest_sample
    exact, quick = parts(model, tensor, tokens), parts(model, tensor, float(tokens))
    for one, other in ((exact.first, quick.first), (exact.layer, quick.layer), (exact.last, quick.last)):
        assert one.work == other.work
        assert float(one.memory.saved.elements) == pytest.approx(float(other.memory.saved.elements))
        assert {key: pytest.approx(float(number)) for key, number in one.traffic.both.items()} == dict(
            other.traffic.both
        )
        assert one.traffic.both.calls == other.traffic.both.calls


def test_every_family_has_costs_of_its_parts() -> None:
    model = ResidualMLP(num_layers=2, width=8, vocab_size=16, max_seq_len=4)
    assert parts(model, TensorMesh(), 8).layer.work.products
    assert layout_of(model) is not None


# Models of transformers' --------------------------------------------------------------------------------------------

LLAMA3: Mapping[str, Any] = dict(
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)


def other(name: str, **config: object) -> OtherModel:
    return OtherModel(target=f"transformers.{name}", args={"config": config})


def held(model: OtherModel, num_layers: int) -> float:
    made = model_costs(model, TensorMesh(), 64, 64)
    assert made is not None
    return float(made.first.memory.weights + made.layer.memory.weights * num_layers + made.last.memory.weights)


@pytest.mark.parametrize(
    ("model", "num_layers", "billions"),
    [
        (other("LlamaForCausalLM", **LLAMA3, tie_word_embeddings=False), 32, 8.03),
        (other("GPT2LMHeadModel", n_layer=48, n_embd=1600, n_head=25), 48, 1.64),  # the tied table twice
        (other("MixtralForCausalLM", tie_word_embeddings=False), 32, 46.7),
    ],
)
def test_transformers_models_hold_their_parameters(model: OtherModel, num_layers: int, billions: float) -> None:
    assert held(model, num_layers) / 1e9 == pytest.approx(billions, rel=0.01)


def test_experts_count_as_those_that_a_token_takes() -> None:
    model = other("MixtralForCausalLM")
    gpt = gpt_of(model.transformers, 64)
    assert gpt is not None
    assert gpt.ffn_size == 2 * 14336  # type: ignore[attr-defined]
    made = model_costs(model, TensorMesh(), 64, 64)
    counted = flops_per_token(model, 64)
    assert made is not None
    assert counted is not None
    of_layer = (*made.layer.work.products, *made.layer.work.kernels)
    products = [*(each for each in of_layer for _ in range(32)), *made.last.work.products]
    operations = 6 * sum(rows * depth * columns for rows, depth, columns in products) / 64
    assert operations == pytest.approx(counted.mfu_6n, rel=0.01)


def test_encoders_have_no_causal_mask() -> None:
    made = model_costs(other("BertForMaskedLM"), TensorMesh(), 64, 64)
    assert made is not None
    assert not made.layer.work.scores[0].causal


@pytest.mark.parametrize("model", [other("NoSuchModel"), other("ViTForImageClassification"), OtherModel(target="a.B")])
def test_models_of_unknown_sizes_have_no_costs(model: OtherModel) -> None:
    assert model_costs(model, TensorMesh(), 64, 64) is None
    assert model.transformers is not None or flops_per_token(model, 64) is None


# Adapters ---------------------------------------------------------------------------------------------------------


def with_lora(model: OtherModel, **lora: Any) -> OtherModel:
    return replace(model, lora=LoRA(**lora))


def test_of_a_model_with_adapters_these_alone_are_trained() -> None:
    llama = other("LlamaForCausalLM", **LLAMA3, tie_word_embeddings=False)
    plain, lora = (
        model_costs(each, TensorMesh(), 64, 64)
        for each in (llama, with_lora(llama, r=16, target_modules=("q_proj", "v_proj")))
    )
    assert plain is not None
    assert lora is not None
    assert plain.frozen == (0, 0, 0, 0)
    assert lora.weights[1] - lora.frozen[1] == 16 * (2 * 4096 + 4096 + 1024)
    assert (lora.frozen[0], lora.frozen[1], lora.frozen[2]) == plain.weights[:3]
    assert [len(each) for each in (lora.layer.work.products, lora.layer.work.frozen)] == [0, 4]
    # the MLP's inputs are saved only for the gradients of its weights
    saved = [float(each.layer.memory.saved.elements) / 64 for each in (plain, lora)]
    assert saved[0] - saved[1] == 4096 + 14336


def test_a_head_that_is_trained_whole_has_its_gradient() -> None:
    llama = other("LlamaForCausalLM", **LLAMA3, tie_word_embeddings=False)
    made = model_costs(with_lora(llama, modules_to_save=("lm_head",)), TensorMesh(), 64, 64)
    assert made is not None
    assert len(made.last.work.products) == 1
    assert made.frozen[2] == 4096  # the last norm


def test_a_linear_of_the_blocks_that_is_trained_whole_has_no_adapter() -> None:
    llama = other("LlamaForCausalLM", **LLAMA3, tie_word_embeddings=False)
    made = model_costs(with_lora(llama, r=4, modules_to_save=("down_proj",)), TensorMesh(), 64, 64)
    assert made is not None
    assert made.layer.work.products == ((64.0, 14336.0, 4096.0),)
    of_others = 4 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 2 * (4096 + 14336))
    assert made.weights[1] - made.frozen[1] == 14336 * 4096 + of_others
    flops = flops_per_token(with_lora(llama, r=4, modules_to_save=("down_proj",)), 64)
    plain = flops_per_token(with_lora(llama, r=4), 64)
    assert flops is not None
    assert plain is not None
    assert flops.mfu_6n - plain.mfu_6n == 32 * (2 * 14336 * 4096 - 6 * 4 * (14336 + 4096))


@pytest.mark.parametrize(
    ("name", "target", "features"),
    [
        ("BloomForCausalLM", "self_attention.query_key_value", 64 + 3 * 64),
        ("LlamaForCausalLM", "model.layers.0.self_attn.q_proj", 2 * 4096),
        ("GPT2LMHeadModel", "c_attn", 768 + 3 * 768),
        ("GPT2LMHeadModel", "c_proj", 2 * 768 + 5 * 768),
        ("LlamaForCausalLM", "mlp.down_proj", 11008 + 4096),
        ("LlamaForCausalLM", "a_name_of_its_own", 4096 + 11008),
    ],
)
def test_names_of_linears(name: str, target: str, features: int) -> None:
    made = model_costs(with_lora(other(name), r=2, target_modules=(target,)), TensorMesh(), 64, 64)
    assert made is not None
    assert made.weights[1] - made.frozen[1] == 2 * features


def test_a_gradient_that_is_not_made_is_a_third_of_the_operations() -> None:
    llama = other("LlamaForCausalLM", **LLAMA3, tie_word_embeddings=False)
    plain, lora = (flops_per_token(each, 64) for each in (llama, with_lora(llama, r=1, target_modules=("k_proj",))))
    assert plain is not None
    assert lora is not None
    assert lora.mfu_6n == plain.mfu_6n * 4 // 6 + 6 * 32 * (4096 + 1024)
    assert lora.mfu_causal - lora.mfu_6n == plain.mfu_causal - plain.mfu_6n
