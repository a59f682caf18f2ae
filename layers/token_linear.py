"""Linear layer over the tokens of a sample, applied to each feature separately: ResMLP's cross-patch layer.

Letters: S tokens per sample, H residual features. The weight (S, S) is small compared with a block's matrices of H
features (196 x 196 for an image of 224 pixels), so every rank has it whole. The features are distributed: a rank mixes
the tokens of its samples and its features. If the residual is cut by sequence, an all-to-all exchanges features for
tokens, and another one exchanges the result back, as Ulysses does with heads (arXiv 2309.14509).

Traffic in elements per rank, if n ranks cut the sequence and a rank has E elements of the residual: 2 E (n-1)/n forward
and 2 E (n-1)/n backward. The gradients of weight and bias are sent in any case.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.nn import functional

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import GPT2, ZEROS, Init, Layer, Shared, parameter
from dslpar.layers.placement import Placement, from_stored_order, residual_cuts, to_stored_order


class TokenLinear(Layer):
    """Linear over tokens: y[t] = sum over u of W[t, u] x[u] + b[t] for tokens t and u of a sample, per feature."""

    def __init__(
        self, groups: Groups, num_tokens: int, *, bias: bool = True, init: Init = GPT2, layer_idx: int | None = None
    ) -> None:
        super().__init__(groups, layer_idx)
        self.weight = parameter(_whole(groups.tensor, num_tokens, num_tokens), init)
        self.bias = parameter(_whole(groups.tensor, num_tokens), ZEROS) if bias else None
        self.cuts = residual_cuts(groups.tensor).sequence
        self.sequence = groups.axis(*self.cuts)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        """Map the stored residual [batch/x, sequence, H/z] to the same shape.

        Raises:
            DslparError: the number of tokens is not that of the weight, or a rank's features are not divisible by the
                number of ranks that cut the sequence.
        """
        shared = self.share() if shared is None else shared
        weight = cast("Tensor", self.stand_in(self.weight, shared))
        _check(x, len(weight), self.sequence.size)
        x = collectives.all_to_all_autograd(x, self.sequence, 2, 1)
        x = from_stored_order(x, 1, self.groups.tensor, self.cuts)
        y = functional.linear(x.transpose(1, 2), weight, self.stand_in(self.bias, shared)).transpose(1, 2)
        y = to_stored_order(y, 1, self.groups.tensor, self.cuts)
        return collectives.all_to_all_autograd(y, self.sequence, 1, 2)


def _whole(tensor: Cuboid, *shape: int) -> Placement:
    """Place a tensor that is whole on every rank, with a gradient that is partial over samples and features."""
    cuts = residual_cuts(tensor)
    return Placement(tensor, shape, ((),) * len(shape), partial=(*cuts.tokens, *cuts.features))


def _check(x: Tensor, num_tokens: int, pieces: int) -> None:
    if x.dim() != 3 or x.shape[1] * pieces != num_tokens:
        message = (
            f"a residual of shape {tuple(x.shape)}, its sequence in {pieces} shards, does not have {num_tokens} tokens"
        )
        raise_finding(
            "TEN226", message, f"[batch, {num_tokens} tokens, features], sharded as in this mode", key="model"
        )
    if x.shape[2] % pieces:
        message = f"{x.shape[2]} features per rank are not divisible by the {pieces} ranks that split the sequence"
        raise_finding("TEN226", message, f"features that are divisible by {pieces}", key="model.hidden_size")
