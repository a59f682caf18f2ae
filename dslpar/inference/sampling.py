"""Draw the next token of each sample from its logits: greedily, or with temperature, top-k and top-p.

A token is drawn on the CPU, by a generator seeded only by the seed, the prompt and the position. So draws are the same
in every layout and every batch, and independent between prompts. A draw is the argmax of logits / T plus Gumbel noise,
which is a sample of softmax(logits / T) (the exponential race of gpt-fast). Rounding differs between layouts, but
changes a draw only if two tokens have practically equal values. Top-p is the nucleus of arXiv 1904.09751.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.layers.parameter import stable_hash


def streams_of(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of each prompt's random stream, a hash of its ids; a repeated prompt gets another stream."""
    times: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in map(tuple, prompts):
        found.append(stable_hash(times[prompt], *prompt))
        times[prompt] += 1
    return found


class Sampling(NamedTuple):
    """Method of choosing a token."""

    temperature: float = 0.0
    """Divisor of logits; 0: take the largest logit."""
    top_k: int | None = None
    """Draw among this many of the largest logits; None: among all."""
    top_p: float | None = None
    """Draw among the fewest most probable tokens whose probabilities add up to this value; None: among all."""
    seed: int = 0

    def choose(self, logits: Tensor, positions: Tensor, streams: Sequence[int]) -> Tensor:
        """Return the next ids [batch] for logits [batch, vocabulary], on the CPU; ties take the first id.

        `positions` [batch]: number of tokens that each sample has drawn so far; `streams` [batch]: see `streams_of`.
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
            # A token is kept if the more probable tokens do not yet add up to top_p. So the most probable always is.
            beyond = probabilities.cumsum(-1) - probabilities >= self.top_p
            logits = logits.masked_fill(torch.empty_like(beyond).scatter_(-1, order, beyond), -torch.inf)
        return logits

    def _gumbel(self, length: int, stream: int, position: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(stable_hash("sampling", self.seed, stream, position))
        uniform = torch.rand(length, generator=generator, dtype=torch.float64).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        return -(-uniform.log()).log()
