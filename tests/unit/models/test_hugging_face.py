"""GPT against its transformers counterpart: logits, fields from a config.json, incompatible models."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.models import build_module
from dslpar.models.gpt import hugging_face
from dslpar.models.gpt.model import GPT
from dslpar.schema.sections import Experts
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 70, "max_seq_len": 16}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}
KINDS: dict[str, dict[str, Any]] = {
    "GPT-2": {"activation": "gelu_tanh"},
    "the default": {},
    "untied, narrow": {"tie_embeddings": False, "ffn_hidden_size": 48, "layernorm_eps": 1e-6},
    "Llama": {**LLAMA, "bias": False, "tie_embeddings": False, "num_kv_heads": 2, "rope_theta": 500.0},
    "Llama, tied, with biases": {**LLAMA, "ffn_hidden_size": 48, "dropout": 0.1},
    "Mixtral": {
        **LLAMA,
        "bias": False,
        "tie_embeddings": False,
        "num_kv_heads": 2,
        "experts": Experts(num=5, top_k=2, ffn_hidden_size=24, balance=0.02),
    },
    "Mixtral without a balance loss": {**LLAMA, "bias": False, "experts": Experts(num=4, top_k=3, balance=0.0)},
}


MODEL_TYPES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral"}


def model_of(kind: str, **more: Any) -> GPT:
    return GPT(**SIZES, **KINDS[kind], **more)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("kind", KINDS)
def test_its_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """The tolerance is 1e-5 in float32, and 1e-12 in float64 with frequencies and norms in float64."""
    import transformers

    from dslpar.policies import hf_parity

    model = model_of(kind)
    cls = getattr(transformers, hugging_face.class_of(model))
    torch.manual_seed(5)
    theirs = cls(cls.config_class(**hugging_face.config_of(model))).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(tmp_path)
    read = model_of(kind, pretrained=str(tmp_path)).for_inference()
    ours = build_module(read, Groups(Mesh()), seed=1).eval()
    ids = torch.randint(70, (3, 16))
    torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    for module in theirs.modules():
        if hasattr(module, "inv_freq"):
            exponents = torch.arange(0, 8, 2, dtype=torch.float64) / 8
            module.inv_freq = model.rope_theta**-exponents
    theirs.config._experts_implementation = "eager"  # their grouped products have no float64
    with hf_parity.in_float64():
        expected = theirs.double()(input_ids=ids).logits
    torch.testing.assert_close(ours.double()(ids), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_its_load_balancing_loss_is_that_of_transformers(tmp_path: Path) -> None:
    import transformers

    model, groups = model_of("Mixtral"), Groups(Mesh())
    torch.manual_seed(6)
    theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**hugging_face.config_of(model))).eval()
    theirs.save_pretrained(tmp_path)
    ours = build_module(dataclasses.replace(model, pretrained=str(tmp_path)), groups, seed=1).eval()
    ids = torch.randint(70, (3, 16))
    output = ours(ids)
    of_logits = model.for_inference().loss(groups)(output[0], ids)
    expected = of_logits + 0.02 * theirs(input_ids=ids).aux_loss
    torch.testing.assert_close(model.loss(groups)(output, ids), expected, rtol=1e-6, atol=1e-6)
    assert expected - of_logits > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_tells_the_fields_that_made_it(kind: str) -> None:
    model = model_of(kind)
    written = {"model_type": MODEL_TYPES[hugging_face.class_of(model)], **hugging_face.config_of(model)}
    found = hugging_face.fields_of(written)
    same = dataclasses.replace(model, **found)
    assert (same.kv_heads, same.expert_ffn_size) == (model.kv_heads, model.expert_ffn_size)
    alike = {"num_kv_heads": None, "ffn_hidden_size": None}
    if model.experts is not None:
        alike["experts"] = dataclasses.replace(model.experts, ffn_hidden_size=model.expert_ffn_size)
        assert found["experts"] == alike["experts"]
    assert found | alike == {name: getattr(model, name) for name in found} | alike
    hugging_face.check_fits(model, written, "config.json")


def test_older_configs_are_read() -> None:
    """transformers 4 wrote rotary settings in two keys, and left defaults out."""
    older = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None, "hidden_size": 64}
    assert hugging_face.fields_of(older)["rope_theta"] == 5e5
    assert hugging_face.fields_of({"model_type": "gpt2"})["activation"] == "gelu_tanh"
    assert hugging_face.fields_of({"model_type": "gpt2"})["ffn_hidden_size"] == 3072


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "a model of type 'bert', but a GPT is a 'gpt2', a 'llama' or a 'mixtral'"),
        ({}, "a model of type None"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function='relu'"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}, "rope_type='llama3'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True with mlp_bias=False"),
        ({"model_type": "llama", "head_dim": 64}, "head_dim=64"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "mixtral", "sliding_window": 4096}, "sliding_window=4096"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ],
)
def test_a_config_of_another_model_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(DslparError, match=f"CKP222 .*{re.escape(said)}.*\nhelp: use type='transformers.X'"):
        hugging_face.fields_of(config)


def test_each_field_that_differs_is_named_and_the_section_is_written_out() -> None:
    model = model_of("GPT-2")
    config = {"model_type": "gpt2", **hugging_face.config_of(model), "n_head": 8, "vocab_size": 80}
    with pytest.raises(DslparError) as raised:
        hugging_face.check_fits(model, config, "gpt2/config.json")
    told = str(raised.value)
    assert "CKP207 other-weights: gpt2/config.json has the weights of another model:" in told
    assert "model.num_heads is 4, but config.json has 8\n" in told
    assert "model.vocab_size is 70, but config.json has 80\n" in told
    assert "help: model = dict(type='GPT', num_layers=2, hidden_size=32, num_heads=8, vocab_size=80, " in told


def test_rotary_positions_need_no_length() -> None:
    model = model_of("Llama")
    config = {"model_type": "llama", **hugging_face.config_of(model), "max_position_embeddings": 4096}
    hugging_face.check_fits(model, config, "config.json")


def test_what_the_folder_lacks_is_told(tmp_path: Path) -> None:
    with pytest.raises(DslparError, match=r"CKP205 .*config\.json: there is no such file"):
        build_module(model_of("GPT-2", pretrained=str(tmp_path)), Groups(Mesh()), seed=1)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(DslparError, match=r"CKP205 .*config\.json: it is not a JSON object"):
        build_module(model_of("GPT-2", pretrained=str(tmp_path)), Groups(Mesh()), seed=1)
