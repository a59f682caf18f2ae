"""Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)). `Form` selects GPT-2's or Llama's kind.

Block(groups, 256, 8)
Block(groups, 256, 8, form=Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=2, bias=False))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed.groups import Groups
from dslpar.layers.attention import Attention
from dslpar.layers.dropout import Dropout
from dslpar.layers.linear import Linear
from dslpar.layers.memory_order import as_stored, from_stored
from dslpar.layers.named_options import one_of
from dslpar.layers.norm import LayerNorm, RMSNorm
from dslpar.layers.parameter import GPT2, Init, Layer, Shared
from dslpar.layers.rotary import Rotary

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]


class MLP(Layer):
    """Project up, activate, project down.

    `gelu_tanh` is the tanh approximation of GELU (arXiv 1606.08415), which GPT-2 was trained with. `swiglu` (arXiv
    2002.05202) is silu(gate) * up. The layer `up` then projects to both in one product, with the rows of gate first.

    Raises:
        DslparError: an unknown activation.
    """

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        init: Init = GPT2,
        init_out: Init = GPT2,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        blocks, self.activation = one_of(ACTIVATIONS, activation, "activation")
        inner = ffn_hidden_size if blocks == 1 else [ffn_hidden_size] * blocks
        self.up = Linear(groups, hidden_size, inner, role="inward", bias=bias, init=init)
        self.up.keep_memory_order()
        self.down = Linear(groups, ffn_hidden_size, hidden_size, role="outward", bias=bias, init=init_out)
        self._may_be_flat = _may_be_flat(groups.tensor)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the stored residual, [batch/x, sequence, H/z] or [tokens/x, H/z], to the same shape."""
        shared = self.share() if shared is None else shared
        flat = self._may_be_flat and x.dim() == 3 and not (self.up.adapters or self.down.adapters)
        tokens = x.flatten(0, -2) if flat else x
        y = self.down(self.activation(self.up(tokens, shared)), shared)
        return y.view(x.shape) if flat else y


def _may_be_flat(tensor: Cuboid) -> bool:
    """Return whether the MLP may flatten batch and sequence to one dim, whose pieces are gathered without a copy.

    It may not if `overlap.py` computes halves of sequences because two collectives overlap one product. The caller also
    excludes adapters, which draw their dropout by sample and token.
    """
    return not (tensor.comm_overlap and tensor.y > 1 and tensor.z > 1)


@dataclass(frozen=True, kw_only=True)
class Form:
    """Architecture options of a block; the defaults are GPT-2's."""

    norm: Norm = "layernorm"
    """'layernorm', or 'rmsnorm' (no mean, no bias)."""
    activation: Activation = "gelu"
    """The MLP's activation: 'gelu', 'gelu_tanh', or 'swiglu'."""
    num_kv_heads: int | None = None
    """Number of key and value heads; None: the number of query heads."""
    rotary: Rotary | None = None
    """Rotates queries and keys by their positions; None: no rotation."""
    causal: bool = True
    """Whether a token attends only to itself and to earlier tokens."""
    bias: bool = True
    """Whether linear layers and LayerNorm have a bias."""

    def make_norm(self, groups: Groups, hidden_size: int, eps: float) -> LayerNorm | RMSNorm:
        """Make a norm of the residual, for a block or for the model's final norm. Raises: DslparError: unknown norm."""
        if one_of(_NORMS, self.norm, "norm") is RMSNorm:
            return RMSNorm(groups, hidden_size, eps=eps)
        return LayerNorm(groups, hidden_size, eps=eps, bias=self.bias)


class Block(Layer):
    """Attention and MLP, each after a norm; `init_out` draws the two projections that add to the residual.

    `mlp` is a layer in place of the MLP, which is called with the residual and `Shared`.
    """

    mlp_chunks: int = 1
    """Number of parts of each sequence for which norm and MLP run one after the other, and again in the backward. Then
    only one part's inner activations are in memory at a time (as in ALST, arXiv 2506.13996)."""

    def __init__(
        self,
        groups: Groups,
        hidden_size: int,
        num_heads: int,
        *,
        form: Form = Form(),
        ffn_hidden_size: int | None = None,
        dropout: float = 0.0,
        eps: float = 1e-5,
        init: Init = GPT2,
        init_out: Init = GPT2,
        mlp: nn.Module | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__(groups, layer_idx)
        self.norm1 = form.make_norm(groups, hidden_size, eps)
        self.attention = Attention(
            groups,
            hidden_size,
            num_heads,
            num_kv_heads=form.num_kv_heads,
            causal=form.causal,
            rotary=form.rotary,
            bias=form.bias,
            dropout=dropout,
            init=init,
            init_out=init_out,
        )
        self.norm2 = form.make_norm(groups, hidden_size, eps)
        self.mlp = mlp or MLP(
            groups,
            hidden_size,
            ffn_hidden_size or 4 * hidden_size,
            activation=form.activation,
            bias=form.bias,
            init=init,
            init_out=init_out,
        )
        self.dropout = Dropout(groups, dropout)
        for adds_to_residual in (self.attention.out, getattr(self.mlp, "down", None)):
            if isinstance(adds_to_residual, Linear):
                adds_to_residual.keep_memory_order()  # the sum with the contiguous residual is contiguous anyway

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map the stored residual [batch/x, sequence, H/z] to the same shape; `mask` as in `Attention.forward`."""
        shared = self.share()  # one all-reduce per backward for the vectors of all four layers, unless deferred
        x = self.add_attention(x, shared, mask)
        if self.mlp_chunks == 1 or not torch.is_grad_enabled():
            return self._add_mlp(x, shared)
        parts = [part for part in x.tensor_split(self.mlp_chunks, 1) if part.shape[1]]
        return torch.cat([checkpoint(self._add_mlp, part, shared, use_reentrant=False) for part in parts], 1)

    def add_attention(self, x: Tensor, shared: Shared, mask: Tensor | None) -> Tensor:
        """Return the block's result before its MLP: x + attention(norm(x))."""
        return x + self.dropout(self.attention(self.norm1(x, shared), shared, mask))

    def _add_mlp(self, x: Tensor, shared: Shared) -> Tensor:
        return x + self.dropout(self.mlp(self.norm2(x, shared), shared))


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up: [..., 2 F/y], gate before up, to [..., F/y].

    The backward recomputes silu(gate), so autograd keeps only the input: 2 F numbers per token. Composing torch's two
    functions would keep 3 F.
    """
    y: Tensor = _SwiGLU.apply(as_stored(gate_and_up))  # type: ignore[no-untyped-call]
    return from_stored(y, gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, -1)
        gate_grad: Tensor = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return torch.cat([gate_grad, functional.silu(gate).mul_(grads[0])], -1)


ACTIVATIONS: Mapping[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "gelu": (1, functional.gelu),
    "gelu_tanh": (1, partial(functional.gelu, approximate="tanh")),
    "swiglu": (2, swiglu),
}
"""For each activation, the number of feature blocks that it takes, and the function."""
_NORMS: Mapping[str, type[LayerNorm | RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
