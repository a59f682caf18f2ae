"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685): Y = X W^T + s (X A^T) B^T, with W frozen.

A (r, in) and B (out, r) are cut like the dims of W's panel, and r is never cut. The product of a rank's pieces of B and
A is then the piece of B A that belongs to its panel of W. So the panels that the linear gathers serve the adapter too,
and no activation is sent for the adapter. Only the small gradients of A and B are communicated. They are partial over
the axes that do not cut the matrix, and are summed like a vector's gradient.

=========  ============================  =====================  ==============================
role       A, B (local)                  cut by                 gradients partial over
=========  ============================  =====================  ==============================
inward     [r, H/z], [F/y, r]            A: z; B: y             A: d, q, y; B: d, q, z
outward    [r, F/y], [H/z, r]            A: y; B: z             A: d, q, z; B: d, q, y
=========  ============================  =====================  ==============================

Weights of experts [E, out, in] have adapters A [E, r, in] and B [E, out, r], one pair per expert, which are added to
the weights before each use: W + s B A (`ExpertAdapter`). This is peft's way with `target_parameters`, and allows no
dropout. It needs memory for the sum as large as W, and the product of W's gradient.

(LoRA in NeMo, on Megatron-LM, cuts only A or only B and sends activations for the other. The backward recomputes X A^T,
as Unsloth does, so the adapter saves no tensors beyond the linear's.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.mesh import TENSOR_AXES
from dslpar.layers.parameter import stable_hash
from dslpar.layers.placement import Letters, Placement


class Adapter(NamedTuple):
    """Low-rank adapter of some output features of a linear; its matrices are parameters of the linear."""

    name: str
    """Prefix of "lora_A" and "lora_B" in the parameters' names."""
    begin: int
    """First feature of the output's panel to which the adapter adds."""
    end: int
    """End of these features."""
    scale: float
    dropout: float = 0.0
    """Probability of dropping a feature of the adapter's input."""

    @property
    def matrices(self) -> tuple[str, str]:
        """Names of A and B among the linear's parameters."""
        return f"{self.name}lora_A", f"{self.name}lora_B"


class Applied(NamedTuple):
    """An adapter in one forward and its backward. A and B are this rank's pieces, X and Y are panels."""

    adapter: Adapter
    seed: int
    """Seed of the dropout mask, equal on ranks with equal panels of the input; 0: no dropout."""

    def add_to(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        """Add s (X A^T) B^T to the (partial) output, in place."""
        begin, end, scale = self.adapter.begin, self.adapter.end, self.adapter.scale
        low = functional.linear(self._drop(x), a)
        y[..., begin:end].add_(functional.linear(low, b), alpha=scale)

    def backward(self, y_grad: Tensor, x: Tensor, a: Tensor, b: Tensor, x_grad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of A and B; add the adapter's part to the input's gradient `x_grad` in place."""
        begin, end, scale = self.adapter.begin, self.adapter.end, self.adapter.scale
        dropped, part = self._drop(x).flatten(0, -2), y_grad[..., begin:end].flatten(0, -2) * scale
        low_grad = part @ b
        if x_grad is not None:
            x_grad.add_(self._drop((low_grad @ a).view(x_grad.shape)))
        return low_grad.t() @ dropped, part.t() @ functional.linear(dropped, a)

    def _drop(self, x: Tensor) -> Tensor:
        """Apply the same dropout mask in each call. Dropout is linear, so this is also its backward."""
        if self.seed == 0:
            return x
        generator = torch.Generator(x.device).manual_seed(self.seed)
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.adapter.dropout
        return x * kept / (1 - self.adapter.dropout)


class ExpertAdapter(NamedTuple):
    """Low-rank adapters of all experts' weights that are in one parameter; their matrices are parameters beside it."""

    name: str
    """The parameter."""
    scale: float
    transposed: bool = False
    """Whether the parameter is [E, in, out]."""

    @property
    def matrices(self) -> tuple[str, str]:
        """Names of A and B among the module's parameters."""
        return f"{self.name}_lora_A", f"{self.name}_lora_B"

    def added(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the weights of this rank's experts with their adapters: W + s B A."""
        left, right = (a.transpose(1, 2), b.transpose(1, 2)) if self.transposed else (b, a)
        return torch.baddbmm(weight, left, right, alpha=self.scale)


def placements_of_experts(weight: Placement, r: int, *, transposed: bool) -> tuple[Placement, Placement]:
    """Return the placements of A and B for a parameter of experts' weights; experts are cut as in the parameter."""
    experts, *features = weight.shape
    outputs, inputs = reversed(features) if transposed else features
    return replace(weight, shape=(experts, r, inputs)), replace(weight, shape=(experts, outputs, r))


def placements(weight: Placement, r: int, blocks: Sequence[int]) -> tuple[Placement, Placement]:
    """Return the placements of A and B for a linear's weight; `blocks` are the lengths of the adapted blocks."""
    outputs, inputs = weight.cuts
    outputs = tuple(letter for letter in outputs if letter != "q")  # W is gathered over q for the product
    features = tuple(blocks) if len(blocks) > 1 else ()
    a = _low_rank(weight, (r, weight.shape[1]), ((), inputs))
    b = _low_rank(weight, (sum(blocks), r), (outputs, ()), features)
    return a, b


def _low_rank(
    weight: Placement, shape: tuple[int, int], cuts: tuple[Letters, Letters], blocks: tuple[int, ...] = ()
) -> Placement:
    cut = {letter for letters in cuts for letter in letters}
    partial = tuple(letter for letter in TENSOR_AXES if letter not in cut)
    return Placement(weight.tensor, shape, cuts, partial=partial, blocks=blocks)


class KaimingUniform(NamedTuple):
    """Draw from U(-1/sqrt(inputs), 1/sqrt(inputs)), as torch's Linear and peft draw A."""

    def piece(self, placement: Placement, coord: Mapping[str, int], seed: int, name: str) -> Tensor:
        """Draw the matrix [..., r, inputs] whole, float32 on the CPU, and cut the piece of the rank at `coord`."""
        generator = torch.Generator("cpu").manual_seed(stable_hash(seed, name))
        full = torch.empty(placement.shape, dtype=torch.float32, device="cpu")
        bound = 1 / math.sqrt(placement.shape[-1])
        return placement.cut(full.uniform_(-bound, bound, generator=generator), coord)
