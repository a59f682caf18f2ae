"""Capacity of experts: an expert takes at most so many tokens of a sequence, and the other choices of it are dropped.

    capacity = ExpertCapacity(groups, num_experts=8, factor=1.25)
    kept = capacity.kept(experts, weights, x.shape)          # of this rank's own tokens [n, k]

Letters: B sequences of S tokens in a micro-batch, E experts, k experts per token, n this rank's tokens.

An expert takes `ceil(k * S / E * factor)` tokens of each sequence: those in which it has the largest weights, and of
equal weights the first in the sequence. A dropped choice adds nothing to the token, and the token's other weights stay
as they are. A token whose choices are all dropped passes by on the residual.

Switch Transformer (arXiv 2101.03961) and GShard (2006.16668) drop the last tokens, Megatron-LM those of the smallest
probabilities (`--moe-token-drop-policy probs`), as here. All of them count the tokens of a rank's micro-batch. What
they drop depends on the micro-batch, and on how ranks share a sequence. Here it depends on the sequence alone, and is
equal in every layout. With one whole sequence per rank and micro-batch, Megatron-LM drops the same.

Ranks of a tensor group share sequences in many ways (`dslpar.layers.distinct_tokens`). Each sends the choices and
weights of its own tokens to all of them, `(2 k + 1) n` numbers, and all sort the whole micro-batch. No host waits for a
result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.token_ids import local_tokens


def capacity_of(factor: float, top_k: int, tokens: int, num_experts: int) -> int:
    """Return the tokens of a sequence that an expert takes at most: `factor` times its even share, rounded up."""
    return math.ceil(top_k * tokens / num_experts * factor)  # in Megatron-LM's order, which rounds as it does


class ExpertCapacity:
    """Selects the choices that a mixture keeps. All ranks of the tensor group must call `kept` together."""

    def __init__(self, groups: Groups, num_experts: int, factor: float) -> None:
        self._groups, self._num_experts, self._factor = groups, num_experts, factor
        self._split, self._cuts = DistinctTokens(groups), placement.residual_cuts(groups.tensor)

    @torch.no_grad()
    def kept(self, experts: Tensor, weights: Tensor, shape: Sequence[int]) -> Tensor:
        """Return which choices of this rank's own tokens are kept, bool [n, k].

        experts: the experts of each token [n, k]. weights: their weights [n, k]. shape: the stored residual's,
        [B/x, S/y, H/z], or [tokens/x, H/z], which is one sequence.
        """
        sequences, tokens = self._whole(shape)
        number = torch.arange(sequences * tokens, device=experts.device)
        stored = local_tokens(self._groups, number.view(sequences, tokens) if len(shape) > 2 else number, self._cuts)
        own = self._split.part(stored.flatten())
        # One row more, for the rows of ranks with fewer tokens.
        all_experts, all_weights = (each.new_zeros(len(number) + 1, each.shape[1]) for each in (experts, weights))
        missing = self._split.most(stored.numel()) - len(own)
        place = self._gathered(functional.pad(own, (0, missing), value=len(number)))
        for table, each in ((all_experts, experts), (all_weights, weights)):
            table[place] = self._gathered(functional.pad(each, (0, 0, 0, missing)))
        chosen, by = (each[:-1].view(sequences, -1) for each in (all_experts, all_weights))
        most = capacity_of(self._factor, experts.shape[1], tokens, self._num_experts)
        return first_of_each(chosen, by, most, self._num_experts).view(len(number), -1)[own]

    def _whole(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the sequences of a micro-batch and their tokens, given the shape of the stored residual."""
        tensor, coord = self._groups.tensor, self._groups.coord
        letters = (self._cuts.batch, self._cuts.sequence) if len(shape) > 2 else (self._cuts.tokens,)
        sizes = [length * placement.piece(tensor, coord, cuts)[1] for length, cuts in zip(shape, letters, strict=False)]
        return (sizes[0], sizes[1]) if len(sizes) > 1 else (1, sizes[0])

    def _gathered(self, own: Tensor) -> Tensor:
        return collectives.all_gather(own.contiguous(), self._groups.axis("tensor"))


def first_of_each(experts: Tensor, weights: Tensor, most: int, num_experts: int) -> Tensor:
    """Return which choices are among the `most` of largest weight of their expert, row by row: bool like `experts`.

    experts, weights: [rows, choices]. Of equal weights the first is chosen.
    """
    heaviest = weights.argsort(dim=1, descending=True, stable=True)
    experts_sorted, by_expert = experts.gather(1, heaviest).sort(dim=1, stable=True)
    counts = experts.new_zeros(len(experts), num_experts).scatter_add_(1, experts, torch.ones_like(experts))
    before = counts.cumsum(1) - counts
    rank = torch.arange(experts.shape[1], device=experts.device) - before.gather(1, experts_sorted)
    return torch.empty_like(experts, dtype=torch.bool).scatter_(1, heaviest.gather(1, by_expert), rank < most)
