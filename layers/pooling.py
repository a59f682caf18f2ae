"""Pooling to one vector per sample: the mean of its tokens, whole on every rank, or its first token, sharded.

    logits = classifier(mean_of_tokens(groups, x))        # [batch, H], whole: what follows is equal on all ranks
    z = projector(first_token(groups, x))                 # [batch/n, H/z], stored as [tokens, H] is

They send one token per sample. A gather before the pooling would send all tokens.
"""

from __future__ import annotations

from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.activation_sharding import unshard
from dslpar.layers.placement import residual_cuts
from dslpar.layout.sharding import samples_are_cut_first


def mean_of_tokens(groups: Groups, x: Tensor) -> Tensor:
    """Map the stored residual [batch/x, sequence, H/z] to mean tokens [batch, H], whole and equal on all ranks."""
    cuts = residual_cuts(groups.tensor)
    sequence = groups.axis(*cuts.sequence)
    pooled = collectives.reduce_from_group(x.mean(1), sequence) / sequence.size
    return unshard(groups, pooled, (cuts.batch, cuts.features))


def first_token(groups: Groups, x: Tensor) -> Tensor:
    """Return each sample's first token, [batch/n, H/z], stored like [tokens, H]: cut over all axes that cut tokens.

    The batch must also divide by the number of ranks that cut the sequence.
    """
    cuts = residual_cuts(groups.tensor)
    token, axis = x[:, 0], groups.axis(*cuts.sequence)
    if axis.size == 1:
        return token
    first = collectives.gather_from_group(token.unsqueeze(0), axis, 0)[0]
    if samples_are_cut_first(groups.tensor, cuts):
        return collectives.scatter_to_group(first, axis, 0)
    whole = collectives.gather_from_group(first, groups.axis(*cuts.batch), 0)
    return collectives.scatter_to_group(whole, groups.axis(*cuts.tokens), 0)
