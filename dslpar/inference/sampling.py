"""Draw the next token of each sample from its logits: greedily, or by temperature, top-k and top-p.

Draws are made on the CPU from a generator seeded by the seed, the prompt and the position alone: the same on every
layout and for every batch that a prompt stands in, and of two prompts independent of each other. The draw is the
largest of logit / T plus Gumbel noise, which is one from softmax(logits / T) (the exponential race of gpt-fast): where
two layouts round differently, it changes only if two tokens are as good as equal. Top-p is the nucleus of
arXiv 1904.09751.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.layers.parameter import stable_hash


def streams_of(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the stream of random numbers of each prompt, by its ids; given again, it has another one."""
    times: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in map(tuple, prompts):
        found.append(stable_hash(times[prompt], *prompt))
        times[prompt] += 1
    return found


class Sampling(NamedTuple):
    """How a token is chosen."""

    temperature: float = 0.0
    """What logits are divided by; 0: the largest one is taken."""
    top_k: int | None = None
    """Draw among so many of the largest logits; None: among all."""
    top_p: float | None = None
    """Draw among the most probable tokens whose probabilities add up to this; None: among all."""
    seed: int = 0

    def choose(self, logits: Tensor, positions: Tensor, streams: Sequence[int]) -> Tensor:
        """Return the next id [batch] of logits [batch, vocabulary], on the CPU; of equal ones the first.

        `positions` [batch]: how many tokens each sample has drawn before; `streams` [batch]: see `streams_of`.
        """
        logits = logits.detach().to("cpu")
        if self.temperature == 0:
            return logits.argmax(-1)
        kept = self._filtered(logits.double() / self.temperature)
        draws = zip(streams, positions.tolist(), strict=True)
        noise = torch.stack([self._gumbel(kept.shape[-1], stream, position) for stream, position in draws])
        return (kept + noise).argmax(-1)

    def _filtered(self, logits: Tensor) -> Tensor:
        """Return logits with -inf for the tokens that are not drawn."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            order = logits.argsort(descending=True, stable=True)
            probabilities = torch.softmax(logits.gather(-1, order), -1)
            # A token is drawn if those before it do not yet add up to top_p: the first one always is.
            beyond = probabilities.cumsum(-1) - probabilities >= self.top_p
            logits = logits.masked_fill(torch.empty_like(beyond).scatter_(-1, order, beyond), -torch.inf)
        return logits

    def _gumbel(self, length: int, stream: int, position: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(stable_hash("sampling", self.seed, stream, position))
        uniform = torch.rand(length, generator=generator, dtype=torch.float64).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        return -(-uniform.log()).log()
