"""Cuts of layers over stages: the best cut against brute force, LiBai's rule, no empty stage ever."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar.plan import stages
from dslpar.spec import GPT

LAYERS_AND_STAGES = st.integers(1, 9).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers)))


def score(weights: list[int], counts: tuple[int, ...]) -> tuple[int, int]:
    sums = [0, *accumulate(weights)]
    ends = [0, *accumulate(counts)]
    loads = [sums[end] - sums[start] for start, end in pairwise(ends)]
    return max(loads), sum(load * load for load in loads)


def best(weights: list[int], size: int) -> tuple[int, int]:
    layers = len(weights)
    cuts = ((0, *cut, layers) for cut in combinations(range(1, layers), size - 1))
    return min(score(weights, tuple(end - start for start, end in pairwise(cut))) for cut in cuts)


@given(LAYERS_AND_STAGES, st.integers(0, 9), st.integers(0, 5), st.integers(0, 9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_balanced_is_the_best_cut(sizes: tuple[int, int], first: int, layer: int, last: int) -> None:
    layers, size = sizes
    counts = stages.balanced(first, layer, last, layers, size)
    assert (len(counts), sum(counts), min(counts) >= 1) == (size, layers, True)
    weights = [layer] * layers
    weights[0] += first
    weights[-1] += last
    assert score(weights, counts) == best(weights, size)


@given(LAYERS_AND_STAGES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_method_fills_every_stage(sizes: tuple[int, int]) -> None:
    layers, size = sizes
    model = GPT(num_layers=layers, hidden_size=64, num_heads=4, vocab_size=5000, max_seq_len=32)
    cuts = [
        stages.libai(layers, size),
        stages.uniform(layers, size),
        stages.by_cost(model, size, 32),
        stages.by_parameters(model, size),
        stages.by_type("block|head", layers, size),
    ]
    for counts in cuts:
        assert (len(counts), sum(counts), min(counts) >= 1) == (size, layers, True)


def test_a_large_head_lightens_the_last_stage() -> None:
    model = GPT(num_layers=24, hidden_size=256, num_heads=4, vocab_size=50000, max_seq_len=128)
    assert stages.by_cost(model, 4, 128) == (7, 8, 8, 1)
    assert stages.uniform(24, 4) == (6, 6, 6, 6)


def test_ids_and_counts() -> None:
    assert stages.ids_of((2, 1)) == (0, 0, 1)
    assert stages.counts_of((0, 0, 1), 2) == (2, 1)


def test_a_deep_model_is_cut_at_once() -> None:
    model = GPT(num_layers=1000, hidden_size=64, num_heads=4, vocab_size=5000, max_seq_len=32)
    assert sum(stages.by_cost(model, 128, 32)) == 1000
