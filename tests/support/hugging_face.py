"""Small transformers models that the ranks of a test can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import transformers
from torch import Tensor

from dslpar.policies import hf_parity

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 70,  # which every mode must pad
    "max_position_embeddings": 32,
    "initializer_range": 0.2,  # activations are of order 1, so a lost term shows
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Family(NamedTuple):
    """A transformers class and its config."""

    name: str
    """The name of its classes without "ForCausalLM" and "Config"."""
    sizes: Mapping[str, Any]
    head: str = "ForCausalLM"
    attention: str = "sdpa"
    model: str = ""
    """The model class, if its name is not the family's with the head."""

    def classes(self) -> tuple[Any, Any]:
        """Return the classes of model and config."""
        cls = getattr(transformers, self.model or self.name + self.head)
        return cls, cls.config_class

    def config(self, **more: Any) -> Any:
        """Return its config in miniature."""
        return self.classes()[1](**{**self.sizes, **more})


_GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 8,
    "vocab_size": 70,
    "n_positions": 32,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_OPT = SIZES | {
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "pad_token_id": 0,
    "init_std": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
_ENCODER |= _NO_DROPOUT | {"type_vocab_size": 3}
_T5 = {
    "d_model": 32,
    "d_kv": 4,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "vocab_size": 70,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
_OF_TEXT = {"num_key_value_heads", "vocab_size", "max_position_embeddings"}
_IMAGES = {name: value for name, value in SIZES.items() if name not in _OF_TEXT and "token" not in name}
_IMAGES |= _NO_DROPOUT | {"image_size": 12, "patch_size": 4, "num_channels": 2, "num_labels": 5}
"""Nine patches and the class token."""
_SWIN = _NO_DROPOUT | {
    "image_size": 32,
    "patch_size": 4,
    "num_channels": 2,
    "num_labels": 5,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [4, 8],
    "window_size": 4,
    "drop_path_rate": 0.0,
    "initializer_range": 0.2,
}
"""4 x 4 windows on 8 x 8 grids, shifted in every second block, and on 4 x 4 grids, with a single window."""
_MAE = _IMAGES | {
    "mask_ratio": 0.6,
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 24,
}
"""Three of nine patches remain, and the class token."""
_RESNET = {
    "num_channels": 2,
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24],
    "depths": [1, 2, 2],
    "layer_type": "basic",
    "num_labels": 5,
}

_BLOOM = {
    "hidden_size": 32,
    "n_layer": 3,
    "n_head": 8,
    "vocab_size": 70,
    "initializer_range": 0.2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_EXPERTS = SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPS = _EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
_LATENT = _GROUPS | {
    "num_key_value_heads": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", SIZES),
    "llama, tied": Family("Llama", SIZES | {"tie_word_embeddings": True}),
    "qwen2": Family("Qwen2", SIZES | {"use_sliding_window": False}),
    "qwen3": Family("Qwen3", SIZES | {"head_dim": 4}),
    "mistral": Family("Mistral", SIZES | {"sliding_window": 5}),
    "gemma": Family("Gemma", SIZES | {"head_dim": 4}),
    "gemma2": Family(
        "Gemma2",
        SIZES | {"head_dim": 4, "query_pre_attn_scalar": 5, "sliding_window": 5},
        attention="eager",
    ),
    "gemma3": Family(
        "Gemma3Text",
        SIZES | {"head_dim": 4, "query_pre_attn_scalar": 5, "sliding_window": 5},
        model="Gemma3ForCausalLM",
    ),
    "phi3": Family("Phi3", SIZES),
    "olmo2": Family("Olmo2", SIZES),
    "gpt_neox": Family("GPTNeoX", SIZES),
    "gpt2": Family("GPT2", {**_GPT2, "n_inner": 48}, "LMHeadModel"),
    "opt": Family("OPT", _OPT),
    "opt, norms after": Family("OPT", _OPT | {"do_layer_norm_before": False, "tie_word_embeddings": False}),
    "bloom": Family("Bloom", _BLOOM, attention="eager"),
    "mixtral": Family("Mixtral", _EXPERTS),
    "mixtral, 5 experts": Family("Mixtral", _EXPERTS | {"num_experts": 5, "tie_word_embeddings": True}),
    "qwen3_moe": Family("Qwen3Moe", _EXPERTS | {"head_dim": 4, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2_moe": Family("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2}),
    "olmoe": Family("Olmoe", _EXPERTS | {"num_key_value_heads": 8}),
    "cohere": Family("Cohere", SIZES | {"logit_scale": 0.3}),
    "bert": Family("Bert", _ENCODER, "ForMaskedLM"),
    "bert, with the next sentence": Family("Bert", _ENCODER, "ForPreTraining"),
    "bert, classes": Family("Bert", _ENCODER | {"num_labels": 5}, "ForSequenceClassification"),
    "roberta": Family("Roberta", _ENCODER | {"pad_token_id": 1}, "ForMaskedLM"),
    "roberta, classes": Family("Roberta", _ENCODER | {"pad_token_id": 1}, "ForSequenceClassification"),
    "bert, classes of tokens": Family("Bert", _ENCODER | {"num_labels": 5}, "ForTokenClassification"),
    "roberta, classes of tokens": Family("Roberta", _ENCODER | {"pad_token_id": 1}, "ForTokenClassification"),
    "t5": Family("T5", _T5, "ForConditionalGeneration"),
    "t5, gated": Family("T5", _T5 | {"feed_forward_proj": "gated-gelu"}, "ForConditionalGeneration"),
    "vit": Family("ViT", _IMAGES, "ForImageClassification"),
    "vit_mae": Family("ViTMAE", _MAE, "ForPreTraining"),
    "swin": Family("Swin", _SWIN, "ForImageClassification"),
    "swinv2": Family("Swinv2", _SWIN, "ForImageClassification", attention="eager"),
    "resnet": Family("ResNet", _RESNET, "ForImageClassification", attention="eager"),
    "deepseek_v3": Family("DeepseekV3", _LATENT | {"norm_topk_prob": True}),
    "deepseek_v2": Family("DeepseekV2", _LATENT | {"topk_method": "group_limited_greedy"}),
    "glm4_moe": Family("Glm4Moe", _GROUPS | {"head_dim": 4, "attention_bias": True, "use_qk_norm": True}),
    "gpt_oss": Family(
        "GptOss", _EXPERTS | {"head_dim": 4, "sliding_window": 5, "swiglu_limit": 0.8}, attention="eager"
    ),
}


def plain(family: Family) -> tuple[Any, dict[str, Tensor]]:
    """Return the transformers model in float64, and its weights."""
    return hf_parity.plain(family.classes()[0], family.config(), family.attention)


def subject(family: Family) -> hf_parity.Subject:
    """Return the subject of the comparison."""
    return hf_parity.Subject(family.classes()[0], family.config())
