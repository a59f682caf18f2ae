"""The config section of GPT: its keys, their help, and their names in other frameworks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from dslpar.schema.fields import key, section
from dslpar.schema.sections import Experts, TokenModel
from dslpar.schema.types import Choice, Fraction, LayerCount, PositiveFloat, PositiveInt


@section
class GPT(TokenModel):
    """A decoder-only transformer of pre-norm blocks: GPT-2 by default, Llama with other field values."""

    INLINE: ClassVar[str] = "cfg"  # LiBai keeps a model's arguments under cfg
    KNOWN_AS: ClassVar[Mapping[str, str]] = {
        r"llama[23]?": "norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, tie_embeddings=False",
        r"gpt2?": "",
    }
    """Other models' names as patterns -> the fields with which GPT is that model."""

    num_layers: LayerCount = key(
        resume="refused", aliases="hidden_layers", synonyms="n_layer n_layers num_hidden_layers"
    )
    """Number of transformer blocks."""
    hidden_size: PositiveInt = key(resume="refused", synonyms="n_embd d_model embed_dim")
    """Features of the residual stream."""
    num_heads: PositiveInt = key(
        resume="refused", aliases="num_attention_heads", synonyms="n_head n_heads num_attention_heads"
    )
    """Number of attention heads; hidden_size must be a multiple of it."""
    vocab_size: PositiveInt = key(resume="refused", synonyms="padded_vocab_size")
    """Number of tokens in the vocabulary, before padding."""
    max_seq_len: PositiveInt = key(
        resume="refused", aliases="max_seq_length", synonyms="max_position_embeddings n_positions n_ctx block_size"
    )
    """The longest sequence, in tokens; the table of learned positions has this many rows."""
    num_kv_heads: PositiveInt | None = key(
        default=None, resume="refused", synonyms="n_kv_heads num_query_groups num_key_value_heads"
    )
    """Key/value heads, each shared by num_heads / num_kv_heads query heads; left out: num_heads."""
    ffn_hidden_size: PositiveInt | None = key(
        default=None, resume="refused", synonyms="intermediate_size mlp_ratio ffn_dim"
    )
    """Features of the MLP's hidden layer; default: 4 * hidden_size."""
    dropout: Fraction = key(default=0.0, resume="reported")
    """Probability of dropping an activation."""
    tie_embeddings: bool = key(default=True, resume="refused")
    """Whether the output head uses the weight of the token embedding."""
    norm: Choice = key(default="layernorm", resume="refused", choices=("layernorm", "rmsnorm"))
    """'layernorm', or 'rmsnorm' (no mean, no bias)."""
    activation: Choice = key(default="gelu", resume="refused", choices=("gelu", "gelu_tanh", "swiglu"))
    """MLP activation: 'gelu', 'gelu_tanh' (approximate, as in GPT-2), or 'swiglu' (silu(gate) * up, three weights)."""
    positions: Choice = key(default="learned", resume="refused", choices=("learned", "rotary"))
    """'learned': a table that is added to the token embeddings; 'rotary': queries and keys rotated by position."""
    rope_theta: PositiveFloat = key(default=10000.0, resume="refused", synonyms="rotary_base rotary_emb_base")
    """Base of rotary positions: the longest wavelength is 2 pi times this, in tokens."""
    bias: bool = key(default=True, resume="refused")
    """Whether linear layers and LayerNorm have a bias."""
    layernorm_eps: PositiveFloat = key(
        default=1e-5,
        resume="refused",
        aliases="layernorm_epsilon",
        synonyms="layer_norm_epsilon norm_epsilon layer_norm_eps rms_norm_eps",
    )
    """Added to the variance (RMSNorm: to the mean square) before the square root."""
    init_std: PositiveFloat = key(default=0.02, resume="refused", aliases="initializer_range")
    """Standard deviation of initial weights."""
    init_out_std: PositiveFloat | None = key(default=None, resume="refused")
    """Standard deviation in projections that add to the residual; default: init_std / sqrt(2 * num_layers)."""
    experts: Experts | None = key(default=None)
    """A mixture of experts in place of the MLPs: dict(num=8, top_k=2). Left out: MLPs."""
    pretrained: str | None = key(
        default=None, resume="free", synonyms="model_name_or_path pretrained_model_name_or_path init_checkpoint"
    )
    """A folder with the initial weights, relative to the config: a GPT2LMHeadModel, LlamaForCausalLM or
    MixtralForCausalLM saved by transformers.
    """

    def __post_init__(self) -> None:
        given: object = self.experts
        if isinstance(given, Mapping):  # a program's own GPT(experts=dict(...))
            object.__setattr__(self, "experts", Experts(**given))

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def packs(self) -> bool:
        return self.positions == "rotary"

    @property
    def ffn_size(self) -> int:
        """Features of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def num_experts(self) -> int | None:
        return None if self.experts is None else self.experts.num

    @property
    def capacity_factor(self) -> float | None:
        return None if self.experts is None else self.experts.capacity_factor

    @property
    def expert_ffn_size(self) -> int:
        """Features of the hidden layer of one expert; the MLP's without experts."""
        return (self.experts and self.experts.ffn_hidden_size) or self.ffn_size

    @property
    def is_balanced(self) -> bool:
        """Return whether the loss includes a load-balancing loss."""
        return self.experts is not None and self.experts.balance > 0 and self.experts.every <= self.num_layers

    @property
    def router_sums(self) -> tuple[int, int] | None:
        experts = self.experts
        if experts is None or experts.every > self.num_layers or not (experts.balance or experts.z_loss):
            return None
        return 3 if experts.z_loss else 2, experts.num

    def has_mixture(self, block: int) -> bool:
        """Return whether a block, from 0, has a mixture of experts in place of an MLP."""
        return self.experts is not None and (block + 1) % self.experts.every == 0

    @property
    def out_std(self) -> float:
        """Standard deviation of initial weights in projections that add to the residual."""
        return self.init_out_std or self.init_std / math.sqrt(2 * self.num_layers)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads
