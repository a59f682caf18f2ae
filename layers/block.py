"""A pre-norm transformer block (GPT-2's): x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dslpar.groups import Groups
from dslpar.layers.attention import Attention
from dslpar.layers.dropout import Dropout
from dslpar.layers.linear import Linear
from dslpar.layers.norm import LayerNorm
from dslpar.layers.parameter import GPT2, Init, Layer, Shared


class MLP(Layer):
    """Up, gelu, down: stored residual to stored residual."""

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        init: Init = GPT2,
        init_out: Init = GPT2,
    ) -> None:
        super().__init__(groups)
        self.up = Linear(groups, hidden_size, ffn_hidden_size, role="inward", init=init)
        self.down = Linear(groups, ffn_hidden_size, hidden_size, role="outward", init=init_out)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """See the class."""
        shared = self.share() if shared is None else shared
        return self.down(functional.gelu(self.up(x, shared)), shared)


class Block(Layer):
    """Stored residual to stored residual. `init_out` is of the two projections that add to the residual."""

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        num_heads: int,
        *,
        ffn_hidden_size: int | None = None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        init: Init = GPT2,
        init_out: Init = GPT2,
    ) -> None:
        super().__init__(groups)
        self.norm1 = LayerNorm(groups, hidden_size, eps=eps)
        self.attention = Attention(groups, hidden_size, num_heads, dropout=dropout, init=init, init_out=init_out)
        self.norm2 = LayerNorm(groups, hidden_size, eps=eps)
        self.mlp = MLP(groups, hidden_size, ffn_hidden_size or 4 * hidden_size, init=init, init_out=init_out)
        self.dropout = Dropout(groups, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        shared = self.share()
        x = x + self.dropout(self.attention(self.norm1(x, shared), shared))
        return x + self.dropout(self.mlp(self.norm2(x, shared), shared))
