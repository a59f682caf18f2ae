"""Sampling of tokens, by brute force: the allowed tokens, and frequencies against probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.inference.sampling import Sampling, streams_of

LOGITS = st.lists(st.floats(-8, 8), min_size=1, max_size=12)


def drawn_of(sampling: Sampling, logits: list[float], draws: int = 200) -> list[int]:
    rows = torch.tensor([logits]).expand(draws, -1)
    found: list[int] = sampling.choose(rows, torch.arange(draws), [0] * draws).tolist()
    return found


@given(logits=LOGITS, top_k=st.integers(1, 12), top_p=st.floats(0.01, 1))
@settings(max_examples=25, deadline=None)
def test_only_the_most_probable_tokens_are_drawn(logits: list[float], top_k: int, top_p: float) -> None:
    values = torch.tensor(logits).double()
    order = sorted(range(len(logits)), key=lambda number: -float(values[number]))
    least = float(values[order[min(top_k, len(order)) - 1]])
    among = [number for number in order if float(values[number]) >= least]
    weights = [float(torch.exp(values[number] - values[order[0]])) for number in among]
    allowed, before = [], 0.0
    for number, weight in zip(among, weights, strict=True):
        if not allowed or before < top_p + 1e-9:
            allowed.append(number)
        before += weight / sum(weights)
    equal_to_last = [number for number in among if values[number] == values[allowed[-1]]]
    assert {*drawn_of(Sampling(1.0, top_k, top_p, seed=3), logits, 50)} <= {*allowed, *equal_to_last}


def test_frequencies_are_probabilities() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    drawn = torch.tensor(drawn_of(Sampling(0.7, seed=1), logits, 20000))
    frequencies = torch.bincount(drawn, minlength=4) / len(drawn)
    # The standard deviation of a frequency in 20,000 draws is at most 0.0036; five of these.
    assert (frequencies - torch.softmax(torch.tensor(logits) / 0.7, -1)).abs().max() < 0.018


def test_a_draw_depends_on_seed_stream_and_position_alone() -> None:
    sampling, logits, at = Sampling(1.0, seed=7), torch.randn(3, 50), torch.tensor([4, 0, 9])
    together = sampling.choose(logits, at, [1, 2, 3])
    alone = [sampling.choose(logits[[i]], at[[i]], [i + 1]).item() for i in range(3)]
    assert together.tolist() == alone
    others = [sampling._replace(seed=seed).choose(logits, at, [1, 2, 3]).tolist() for seed in range(8)]
    assert len({*map(tuple, others)}) > 1


def test_prompts_draw_independently() -> None:
    """Equal noise for all prompts would make their texts alike. A prompt draws the same at any place in the batch."""
    streams = streams_of([[5, 2], [7], [5, 2], [52]])
    assert len({*streams}) == 4
    assert streams[0] == streams_of([[7], [5, 2]])[1]
    drawn = Sampling(1.0).choose(torch.zeros(400, 2), torch.zeros(400), streams_of([[0]] * 400))
    assert 140 < drawn.sum() < 260, "six deviations of 400 fair coins"


@pytest.mark.parametrize("logits", [[1.0, 3.0, 3.0], [5.0]])
def test_without_a_temperature_the_first_of_the_largest_is_taken(logits: list[float]) -> None:
    assert {*drawn_of(Sampling(), logits, 3)} == {logits.index(max(logits))}
