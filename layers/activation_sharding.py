"""Convert between whole activations, equal on every rank, and the sharded ones that a tensor group stores.

    class Net(Layer):                                       # images as patches, tables: whatever is no GPT
        def forward(self, images):
            x = to_residual(self.groups, self.patches(images))      # [batch, sequence, H], whole, to this rank's piece
            for block in self.blocks:
                x = block(x)
            return self.classifier(from_residual(self.groups, x))   # and back

Whole activations are [batch, sequence, features] or [tokens, features], equal on all ranks of the tensor group. The
tokens of [tokens, features] are cut over the axes that cut the batch, then over those that cut the sequence. Gradients
of whole activations are equal too: every rank computes the same values, and nothing is summed. So modules that work on
whole activations must start with equal weights (torch.manual_seed) and draw the same dropout.

=================  ==========================  =======================  ============================================
function           forward                     backward                 ColossalAI's name
=================  ==========================  =======================  ============================================
`to_residual`      this rank's piece           all-gather               partition_batch and split_batch_2d, ...;
`to_inner`                                                              split_forward_gather_backward in 1d
`from_residual`    all-gather                  this rank's piece        gather_forward_split_backward; gather_output
`from_inner`                                                            of Linear1D_Col
=================  ==========================  =======================  ============================================

Traffic in elements per rank, for E elements in n pieces: E (n-1)/n in the direction that gathers, 0 in the other.
"""

from __future__ import annotations

from torch import Tensor

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.placement import (
    ActivationSharding,
    Letters,
    from_stored_order,
    inner_cuts,
    piece,
    residual_cuts,
    to_stored_order,
)
from dslpar.layout.nearest import multiples


def to_residual(groups: Groups, x: Tensor) -> Tensor:
    """Shard [batch, sequence, H] to [batch/x, sequence, H/z], as the residual is stored; or shard [tokens, H].

    Raises:
        DslparError: a dim is not divisible by the number of ranks that cut it, or `x` has neither two nor three dims.
    """
    return _shard(groups, x, residual_cuts(groups.tensor))


def from_residual(groups: Groups, x: Tensor) -> Tensor:
    """Gather the stored residual [batch/x, sequence, H/z] to [batch, sequence, H], equal on all ranks."""
    return _unshard(groups, x, residual_cuts(groups.tensor))


def to_inner(groups: Groups, x: Tensor) -> Tensor:
    """Shard [batch, sequence, F], one block of features, to [batch/x, sequence, F/y], as inner activations are stored.

    Raises:
        DslparError: for the same reasons as `to_residual`.
    """
    return _shard(groups, x, inner_cuts(groups.tensor))


def from_inner(groups: Groups, x: Tensor) -> Tensor:
    """Gather a stored inner activation [batch/x, sequence, F/y] to [batch, sequence, F], equal on all ranks."""
    return _unshard(groups, x, inner_cuts(groups.tensor))


def unshard(groups: Groups, x: Tensor, dims: tuple[Letters, ...]) -> Tensor:
    """Gather the pieces of a tensor whose dim i is cut over the axes dims[i], slowest axis first.

    The fastest axis is gathered first. If context parallelism cuts dim 1, the sequence, its tokens are put back in
    sequence order.
    """
    for dim, letters in enumerate(dims):
        for letter in reversed(letters):
            x = collectives.gather_from_group(x, groups.axis(letter), dim)
        if dim == 1:
            x = from_stored_order(x, dim, groups.tensor, letters)
    return x


def _unshard(groups: Groups, x: Tensor, cuts: ActivationSharding) -> Tensor:
    return unshard(groups, x, _dims(x, cuts))


def _shard(groups: Groups, x: Tensor, cuts: ActivationSharding) -> Tensor:
    dims = _dims(x, cuts)
    check_divides(groups, x, dims, "an activation")
    for dim, letters in enumerate(dims):
        if dim == 1:
            x = to_stored_order(x, dim, groups.tensor, letters)
        for letter in letters:
            x = collectives.scatter_to_group(x, groups.axis(letter), dim)
    return x


def _dims(x: Tensor, cuts: ActivationSharding) -> tuple[Letters, ...]:
    """Return the axes that cut each dim of `x`. Raises: DslparError: `x` has neither two nor three dims."""
    if x.dim() not in (2, 3):
        message = f"an activation of shape {tuple(x.shape)}"
        hint = "[batch, sequence, features] or [tokens, features]: flatten or add dims first"
        raise_finding("TEN226", message, hint, key="model")
    return cuts.of(x.dim())


def check_divides(groups: Groups, x: Tensor, dims: tuple[Letters, ...], what: str) -> None:
    """Raise DslparError, listing every dim that is not divisible by the number of ranks that cut it."""
    counts = [piece(groups.tensor, groups.coord, letters)[1] for letters in dims]
    findings = [
        _does_not_divide(what, dim, length, count, groups.tensor.mode)
        for dim, (length, count) in enumerate(zip(x.shape, counts, strict=True))
        if length % count
    ]
    if findings:
        raise DslparError(findings)


def _does_not_divide(what: str, dim: int, length: int, count: int, mode: str | None) -> Finding:
    lengths = " or ".join(map(str, multiples(length, count)))
    return finding(
        "TEN221",
        f"dim {dim} of {what} has {length} entries, but mode {mode!r} splits it into {count} shards",
        f"{lengths} entries: pad it, or choose another size",
        key="parallel.tensor",
    )
