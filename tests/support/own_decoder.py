"""A user's model in transformers' style; docs/transformers.md writes a policy for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OwnConfig(PreTrainedConfig):
    """Sizes of an OwnDecoder."""

    model_type = "own_decoder"
    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    max_position_embeddings: int = 64
    dropout: float = 0.1
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, config: OwnConfig, index: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, index, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """[batch, sequence, H] to the same."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (linear(x).view(heads).transpose(1, 2) for linear in (self.query, self.key, self.value))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        y, _ = attend(self, q, k, v, mask, dropout=self.config.dropout if self.training else 0.0)
        return self.out(y.reshape(*x.shape[:-1], -1))


class MLP(nn.Module):
    """Two linears."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, H] to the same."""
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, config: OwnConfig, index: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(config.hidden_size), Attention(config, index)
        self.norm2, self.mlp = nn.LayerNorm(config.hidden_size), MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """[batch, sequence, H] to the same."""
        x = x + self.drop(self.attn(self.norm1(x), mask))
        return x + self.drop(self.mlp(self.norm2(x)))


class OwnDecoder(PreTrainedModel):
    """A decoder with learned positions."""

    config_class = OwnConfig
    base_model_prefix = ""
    _supports_attention_backend = True
    _supports_sdpa = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token table."""
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Ids [batch, sequence] to logits."""
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        x = x + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return CausalLMOutputWithPast(logits=self.head(self.norm(x)))
