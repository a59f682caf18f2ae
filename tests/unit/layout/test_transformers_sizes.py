"""Lint's sizes of a transformers model, against the layers that are built."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layout import divisors
from dslpar.layout.transformers_sizes import Size, conditions, sizes_of
from dslpar.models.layered import LayerSpec
from dslpar.schema.sections import OtherModel
from tests.support import hugging_face as hf
from tests.support.layouts import LAYOUTS
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

QUICK = ("1d-4", "2.5d-8-depth-2", "cuboid-2-3-2", "hybrid-4-1d-2")
# Ulysses shares heads out when it attends, not when layers are built
NAMES = sampled((name for name in LAYOUTS if not name.startswith("ulysses")), QUICK)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("layout", NAMES)
def test_what_lint_refuses_cannot_be_built_and_what_it_passes_can(layout: str) -> None:
    import transformers

    from dslpar.policies.model import HuggingFaceModel

    groups, seen = Groups.without_processes(Mesh(tensor=LAYOUTS[layout])), set()
    for heads, kv_heads, hidden, ffn in product((4, 6, 12), (2, 4, 6), (48, 72), (36, 48)):
        if heads % kv_heads or (hidden // heads) % 2:
            continue
        config = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            "num_hidden_layers": 1,
            "vocab_size": 70,
        }
        known = OtherModel(target="transformers.LlamaForCausalLM", args={"config": config}).transformers
        passes = all(each.holds for each in conditions(known, groups.tensor))
        model = HuggingFaceModel(transformers.LlamaForCausalLM, config)
        ranks = divisors.head_ranks(groups.tensor)
        whole = heads % ranks == kv_heads % ranks == 0  # of activations: a weight may be split within a head
        assert passes == (whole and _is_built(model.layers(groups)[:2])), config
        seen.add(passes)
    assert True in seen


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
@pytest.mark.parametrize("layout", sampled(["1d-4", "2d-4", "3d-8", "cuboid-2-3-2"], {"2d-4"}))
def test_latents_and_shared_experts_that_lint_passes_can_be_built(layout: str) -> None:
    import transformers

    from dslpar.policies.model import HuggingFaceModel

    groups, seen = Groups.without_processes(Mesh(tensor=LAYOUTS[layout])), set()
    for heads, latent, value, of_expert in product((4, 12), (6, 12, 18), (2, 3), (3, 12)):
        config = hf.FAMILIES["deepseek_v3"].sizes | {
            "hidden_size": 48,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": 2 * latent,
            "kv_lora_rank": latent,
            "qk_rope_head_dim": 6,
            "v_head_dim": value,
            "moe_intermediate_size": of_expert,
        }
        known = OtherModel(target="transformers.DeepseekV3ForCausalLM", args={"config": config}).transformers
        passes = all(each.holds for each in conditions(known, groups.tensor))
        layers = HuggingFaceModel(transformers.DeepseekV3ForCausalLM, config).layers(groups)
        whole = heads % divisors.head_ranks(groups.tensor) == 0
        assert passes == (whole and _is_built(layers[:3])), config
        seen.add(passes)
    assert seen == {True, False}


def _is_built(layers: list[LayerSpec]) -> bool:
    """Return whether the table and the first blocks are built; failures other than a size are errors."""
    try:
        for layer in layers:
            layer.build()
    except DslparError as error:
        if {finding.code for finding in error.findings} != {"TEN227"}:
            raise
        return False
    return True


def sizes_in(target: str, **args: object) -> dict[str, Size]:
    return sizes_of(OtherModel(target=target, args=args).transformers)


def test_names_of_several_families() -> None:
    given = {"n_embd": 8, "num_attention_heads": 2, "n_layer": 3, "n_inner": None, "use_cache": True}
    sizes = {"hidden": Size("n_embd", 8), "heads": Size("num_attention_heads", 2)}
    assert sizes_in("transformers.GPT2LMHeadModel", config=given) == sizes
    assert sizes_in("my.Model", config=given) == {}
    assert sizes_in("transformers.NoSuchModel", config={"hidden_size": 8}) == {"hidden": Size("hidden_size", 8)}


def test_what_is_left_out_has_the_default_of_the_class() -> None:
    sizes = sizes_in("transformers.MistralForCausalLM", config={"num_attention_heads": 16})
    assert sizes["heads"].value == 16
    assert (sizes["kv_heads"].value, sizes["hidden"].value, sizes["ffn"].value) == (8, 4096, 14336)


def test_a_folder_gives_what_the_config_leaves_out(tmp_path: Path) -> None:
    values = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    args = {"pretrained": str(tmp_path), "config": {"hidden_size": 72}}
    config = OtherModel(target="transformers.LlamaForCausalLM", args=args).transformers
    assert config is not None
    assert [config.size(name) for name in ("hidden", "heads", "ffn", "layers")] == [72, 6, 11008, 5]
    assert [config.given(name) for name in ("hidden", "heads", "ffn")] == ["config", "file", ""]


@pytest.mark.parametrize(
    ("name", "config", "broken"),
    [
        ("Mixtral", {"intermediate_size": 10}, []),  # of experts, which are not sharded
        ("Qwen3Moe", {"intermediate_size": 10}, []),
        ("Qwen3Moe", {"intermediate_size": 10, "mlp_only_layers": [0]}, ["intermediate_size"]),
        ("Qwen3Moe", {"intermediate_size": 10, "decoder_sparse_step": 2}, ["intermediate_size"]),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 10}, ["shared_expert_intermediate_size"]),
        ("GptOss", {"intermediate_size": 10}, []),
        ("Glm4Moe", {"intermediate_size": 10}, ["intermediate_size"]),
        ("Glm4Moe", {"intermediate_size": 10, "first_k_dense_replace": 0}, []),
        ("Glm4Moe", {"moe_intermediate_size": 10}, ["moe_intermediate_size"]),
        ("Glm4Moe", {"moe_intermediate_size": 10, "n_shared_experts": 2}, []),
        ("DeepseekV3", {"q_lora_rank": 10}, ["q_lora_rank"]),
        ("DeepseekV3", {"q_lora_rank": None, "qk_nope_head_dim": 3}, []),
        ("DeepseekV3", {"kv_lora_rank": 10, "qk_rope_head_dim": 6, "v_head_dim": 3}, []),
        ("DeepseekV3", {"kv_lora_rank": 12, "qk_rope_head_dim": 6}, ["kv_lora_rank"]),
    ],
)
def test_mlps_beside_experts(name: str, config: dict[str, object], broken: list[str]) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    known = OtherModel(target=f"transformers.{name}ForCausalLM", args={"config": sizes | config}).transformers
    found = [each.key for each in conditions(known, LAYOUTS["1d-4"]) if not each.holds]
    assert list(dict.fromkeys(found)) == broken
