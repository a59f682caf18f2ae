"""Policy models: their layers, their initial weights, and what they refuse."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.engine.stage_layers import held_layers, shared_params
from dslpar.layout.chunks import Chunks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.models.layered import build_layer, build_module
from dslpar.policies import parts
from dslpar.policies.derive import derive
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import parameters_with_sources
from dslpar.schema.policy import Policy
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support import hugging_face as hf


def model_of(family: str, **config: Any) -> HuggingFaceModel:
    return HuggingFaceModel(hf.FAMILIES[family].classes()[0], hf.FAMILIES[family].config(**config))


def names_of(model: HuggingFaceModel) -> list[str]:
    return [layer.name for layer in model.layers(Groups(Mesh()))]


@pytest.mark.parametrize(
    ("family", "around"),
    [
        ("llama", ["model.embed_tokens", "back", "lm_head"]),
        ("gpt2", ["transformer.wte", "front", "back", "lm_head"]),
        ("gemma2", ["model.embed_tokens", "back", "lm_head", "logits"]),
        ("cohere", ["model.embed_tokens", "back", "lm_head", "logits"]),
    ],
)
def test_layers_that_do_nothing_are_left_out(family: str, around: list[str]) -> None:
    """A soft cap and a scale of the logits are in no module, but in the forward itself."""
    names = names_of(model_of(family))
    assert [name for name in names if not name[-1].isdigit()] == around
    assert [layer.layer_idx for layer in model_of(family).layers(Groups(Mesh())) if layer.layer_idx is not None] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_each_weight_of_transformers_is_in_one_parameter(family: str) -> None:
    model, plain = model_of(family), hf.plain(hf.FAMILIES[family])[0]
    module = build_module(model, Groups(Mesh()), seed=1)
    found = [source.name for _, _, sources in parameters_with_sources(module) for source in sources]
    assert sorted(found) == sorted(name for name, _ in plain.named_parameters())
    assert len(list(module.parameters())) == len([*parameters_with_sources(module)])


@pytest.mark.parametrize(
    ("family", "first", "last", "shared"),
    [
        (
            "gpt2",
            ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"],
            ["transformer.h.1", "transformer.h.2", "transformer.ln_f", "lm_head"],
            [{0: "transformer.wte.weight", 1: "lm_head.weight"}],
        ),
        (
            "llama",
            ["model.embed_tokens", "model.layers.0"],
            ["model.layers.1", "model.layers.2", "model.norm", "lm_head"],
            [],
        ),
        (
            "llama, tied",
            ["model.embed_tokens", "model.layers.0"],
            ["model.layers.1", "model.layers.2", "model.norm", "lm_head"],
            [{0: "model.embed_tokens.weight", 1: "lm_head.weight"}],
        ),
    ],
)
def test_stages_hold_transformers_own_modules(family: str, first: Any, last: Any, shared: Any) -> None:
    """They are those that ColossalAI's policies of these classes list by hand."""
    specs = model_of(family).layers(Groups.without_processes(Mesh(pipe=2)))
    assert [held_layers(specs, (1, 2), Chunks(2), stage) for stage in (0, 1)] == [first, last]
    assert shared_params(specs, (1, 2), Chunks(2)) == shared


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_what_stages_hold_is_all_that_has_weights(family: str) -> None:
    model, plain = model_of(family), hf.plain(hf.FAMILIES[family])[0]
    specs = model.layers(Groups.without_processes(Mesh(pipe=3)))
    num_blocks = sum(spec.layer_idx is not None for spec in specs)
    counts = (1, num_blocks - 2, 1)
    held = [name for stage in range(3) for name in held_layers(specs, counts, Chunks(3), stage)]
    weights = {id(p) for name in held for p in plain.get_submodule(name).parameters()}
    # ViTMAE's mask token belongs to a module whose blocks are on other stages, so it gets no own module.
    around = [name for piece in model.skeleton.outline.pieces for name in piece.around]
    weights |= {id(p) for name in around for p in plain.get_submodule(name).parameters(recurse=False)}
    assert [name for name, p in plain.named_parameters() if id(p) not in weights] == []
    assert [name for name in held if any(other.startswith(f"{name}.") for other in held)] == [], "none within another"


def test_initial_weights_are_transformers_own_and_of_no_layout() -> None:
    """GPT-2 draws projections to the residual smaller, norms are 1, biases 0, and a tensor rank has its piece."""
    model = model_of("gpt2")
    layers = {layer.name: layer for layer in model.layers(Groups(Mesh()))}
    block = build_layer(layers["transformer.h.1"], Groups(Mesh()), seed=5)
    weights = dict(block.named_parameters())
    assert weights["attn.entrance.weight"].std().item() == pytest.approx(0.2, rel=0.05)
    assert weights["attn.c_proj.weight"].std().item() == pytest.approx(0.2 / math.sqrt(6), rel=0.1)
    assert weights["ln_1.weight"].eq(1).all()
    assert weights["attn.c_proj.bias"].eq(0).all()
    again = build_layer(layers["transformer.h.1"], Groups(Mesh()), seed=5)
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
    other = build_layer(layers["transformer.h.0"], Groups(Mesh()), seed=5)
    assert not torch.equal(dict(other.named_parameters())["attn.c_proj.weight"], weights["attn.c_proj.weight"])
    groups = Groups.without_processes(Mesh(tensor=TensorMesh(y=2, mode="1d")))
    half = build_layer({layer.name: layer for layer in model.layers(groups)}["transformer.h.1"], groups, seed=5)
    assert torch.equal(dict(half.named_parameters())["attn.c_proj.weight"], weights["attn.c_proj.weight"][:, :16])


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("XGLMForCausalLM", {"num_layers": 1}, "its attention does not"),
        ("BloomForCausalLM", {"slow_but_exact": True}, r"slow_but_exact=True: its policy is for slow_but_exact=False"),
        ("OPTForCausalLM", hf.SIZES | {"layerdrop": 0.1}, r"layerdrop=0\.1: its policy is for layerdrop=0\.0"),
        ("OPTForCausalLM", hf.SIZES | {"word_embed_proj_dim": 16}, r"16 features, .* 32\nhelp: word_embed_proj_dim=32"),
        ("PersimmonForCausalLM", hf.SIZES, "no tensor plan"),
        ("BertForMaskedLM", {"tie_word_embeddings": False}, r"cls\.predictions: .*\nhelp: tie_word_embeddings=True"),
        ("RobertaForMaskedLM", {"tie_word_embeddings": False}, r"lm_head: .*\nhelp: tie_word_embeddings=True"),
        ("MixtralForCausalLM", hf.SIZES | {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1: its policy"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name: str, config: dict[str, Any], said: str) -> None:
    cls = getattr(transformers, name)
    with pytest.raises(DslparError, match=f"TEN234 .*{said}"):
        HuggingFaceModel(cls, cls.config_class(**config))


def test_a_parameter_that_nothing_tells_how_to_cut_is_named() -> None:
    policy = Policy(
        blocks=("model.layers",),
        regions={"model.layers.*.self_attn": ("q_proj", "k_proj", "v_proj")},
        outward=("model.layers.*.self_attn.o_proj",),
    )
    family = hf.FAMILIES["llama"]
    model = HuggingFaceModel(family.classes()[0], family.config(), policy)
    with pytest.raises(DslparError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight \(48, 32\) of Linear") as raised:
        build_module(model, Groups(Mesh()), seed=1)
    assert len(raised.value.findings) == 3


def test_heads_that_do_not_divide_are_refused() -> None:
    groups = Groups.without_processes(Mesh(tensor=TensorMesh(y=3, mode="1d")))
    with pytest.raises(DslparError, match="TEN227"):
        [layer.build() for layer in model_of("llama").layers(groups)]


def test_the_user_s_config_stays_as_it_was() -> None:
    family = hf.FAMILIES["phi3"]
    config = family.config()
    before = config.to_dict()
    groups = Groups.without_processes(Mesh(tensor=TensorMesh(y=2, mode="1d")))
    for layer in HuggingFaceModel(family.classes()[0], config).layers(groups):
        layer.build()
    assert config.to_dict() == before


def test_every_class_that_has_a_policy_is_among_the_proven_families() -> None:
    """tests/distributed/policies/test_derived.py proves those with derived policies."""
    proven = {hf.FAMILIES[family].classes()[0].__name__ for family in hf.FAMILIES}
    assert {*POLICIES} <= proven <= {*DERIVED, *POLICIES}


def test_a_class_that_nobody_has_proven_is_not_trained_by_its_plan_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dslpar.policies.config.DERIVED", DERIVED - {"GraniteForCausalLM"})
    cls = transformers.GraniteForCausalLM
    config = cls.config_class(**hf.SIZES)
    with pytest.raises(DslparError, match=r"TEN234 .*GraniteForCausalLM: .* is not tested for this class"):
        HuggingFaceModel(cls, config)
    assert "model.layers.0" in names_of(HuggingFaceModel(cls, config, policy="derived"))


def test_no_block_is_called_with_a_cache_that_grows_from_step_to_step() -> None:
    """GraniteMoE's forward does not name `use_cache`, and passes it on to a module that does."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.GraniteMoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    with torch.device("meta"):
        model = transformers.GraniteMoeForCausalLM(config)
    assert "use_cache" not in inspect.signature(type(model).forward).parameters
    assert parts.Parts(model, derive(model))._settings == {"use_cache": False}
