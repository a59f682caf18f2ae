"""Partitions of layers over stages: the best against brute force, LiBai's rule, and no empty stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslpar import models
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layout import stages
from dslpar.layout.chunks import Chunks
from dslpar.layout.resolve import auto_counts
from dslpar.models.gpt import layout
from dslpar.models.gpt.section import GPT


def cut(model: GPT, method: str, size: int) -> tuple[int, ...]:
    counts = auto_counts(model, method, Chunks(size), model.max_seq_len)
    assert counts is not None
    return counts


LAYERS_AND_CHUNKS = st.tuples(st.integers(1, 3), st.integers(1, 3)).flatmap(
    lambda sizes: st.tuples(st.integers(sizes[0] * sizes[1], 9), st.just(Chunks(*sizes)))
)
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
    counts = stages.balanced(stages.EvenWeights(first, layer, last), layers, Chunks(size))
    assert (len(counts), sum(counts), min(counts) >= 1) == (size, layers, True)
    weights = [layer] * layers
    weights[0] += first
    weights[-1] += last
    assert score(weights, counts) == best(weights, size)


def rank_score(weights: Sequence[int], counts: Sequence[int], chunks: Chunks) -> tuple[int, int]:
    """Return the weight of the heaviest rank, and the sum of squares over all ranks."""
    ends = [0, *accumulate(counts)]
    loads = stages.loads_of_ranks([sum(weights[start:end]) for start, end in pairwise(ends)], chunks)
    return max(loads), sum(load * load for load in loads)


def cuts(num_layers: int, chunks: Chunks) -> Iterator[tuple[int, ...]]:
    """Yield every partition without an empty stage."""
    for inner in combinations(range(1, num_layers), chunks.last):
        yield tuple(end - start for start, end in pairwise((0, *inner, num_layers)))


@given(LAYERS_AND_CHUNKS, st.integers(0, 9), st.integers(0, 5), st.integers(0, 9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_balanced_is_the_best_cut_by_rank(sizes: tuple[int, Chunks], first: int, layer: int, last: int) -> None:
    """All partitions are compared. The first stage has the embedding, and the last one, on the last rank, the head."""
    layers, chunks = sizes
    weighed = stages.EvenWeights(first, layer, last)
    counts = stages.balanced(weighed, layers, chunks)
    assert (len(counts), sum(counts), min(counts) >= 1) == (chunks.stages, layers, True)
    weights = [layer] * layers
    weights[0] += first
    weights[-1] += last
    assert rank_score(weights, counts, chunks) == min(rank_score(weights, cut, chunks) for cut in cuts(layers, chunks))
    # Within a rank, moving a layer between two of its stages makes them no more even.
    loads = weighed.loads(counts)
    for rank in range(chunks.pipe):
        of_rank = [(loads[stage], counts[stage]) for stage in chunks.held_by(rank)]
        assert max([load for load, count in of_rank if count > 1], default=0) <= min(of_rank)[0] + layer


@given(
    LAYERS_AND_CHUNKS.flatmap(
        lambda sizes: st.tuples(
            st.lists(st.integers(0, 9), min_size=sizes[0], max_size=sizes[0]).filter(any), st.just(sizes[1])
        )
    )
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_listed_layers_are_cut_by_rank(drawn: tuple[list[int], Chunks]) -> None:
    """It is never worse than the partition by stage; it has stages without weight only if that one has some."""
    weights, chunks = drawn
    counts, by_stage = stages.balanced_listed(weights, chunks), stages.contiguous(weights, chunks.stages)
    assert (len(counts), sum(counts), min(counts) >= 1) == (chunks.stages, len(weights), True)
    if chunks.num == 1:
        assert counts == by_stage
    empty = [
        [not any(weights[start:end]) for start, end in pairwise([0, *accumulate(each)])].count(True)
        for each in (counts, by_stage)
    ]
    assert empty[0] <= empty[1]
    if empty[0] == empty[1]:
        assert rank_score(weights, counts, chunks) <= rank_score(weights, by_stage, chunks)


@given(LAYERS_AND_STAGES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_method_fills_every_stage(sizes: tuple[int, int]) -> None:
    layers, size = sizes
    model = GPT(num_layers=layers, hidden_size=64, num_heads=4, vocab_size=5000, max_seq_len=32)
    cuts = [
        stages.libai(layers, size),
        stages.uniform(layers, size),
        cut(model, "cost", size),
        cut(model, "parameters", size),
        cut(model, "type:block|head", size),
    ]
    for counts in cuts:
        assert (len(counts), sum(counts), min(counts) >= 1) == (size, layers, True)


def test_a_large_head_lightens_the_last_stage() -> None:
    model = GPT(num_layers=24, hidden_size=256, num_heads=4, vocab_size=50000, max_seq_len=128)
    assert cut(model, "cost", 4) == (7, 8, 8, 1)
    assert stages.uniform(24, 4) == (6, 6, 6, 6)


GPT2 = GPT(num_layers=2, hidden_size=24, num_heads=4, vocab_size=50, max_seq_len=16)
FORMS = [
    GPT2,
    replace(GPT2, tie_embeddings=False, ffn_hidden_size=40, num_kv_heads=2),
    replace(GPT2, norm="rmsnorm"),
    replace(GPT2, activation="swiglu", num_kv_heads=1),
    replace(GPT2, bias=False),
    replace(GPT2, positions="rotary"),
    replace(GPT2, norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, num_kv_heads=2),
]


@pytest.mark.parametrize("model", FORMS, ids=lambda model: f"{model.norm}-{model.activation}-{model.positions}")
def test_parameters_and_classes_are_the_module_s(model: GPT) -> None:
    """Each layer's weight is compared with the layers built on one rank."""
    weights = layout.pipeline_weights(model, "parameters", 0)
    groups = Groups(Mesh())
    built = [spec.build() for spec in models.GPT(**asdict(model)).layers(groups)]
    token, positions, block, other_block, norm, head = (sum(p.numel() for p in layer.parameters()) for layer in built)
    assert weights == (token + positions, block, norm + head)
    assert other_block == block
    assert layout.block_weights(model) == sum(p.numel() for p in built[2].parameters() if p.dim() == 2)
    *classes, _ = layout.class_names(model)
    for layer, name in zip([built[0], built[1], built[2], built[4]], classes, strict=True):
        assert name in [cls.__name__ for cls in type(layer).__mro__]


def test_a_table_of_positions_moves_the_cut() -> None:
    """With a long position table the first stage has fewer blocks; rotary positions have none."""
    model = GPT(num_layers=8, hidden_size=64, num_heads=8, vocab_size=1000, max_seq_len=32, ffn_hidden_size=64)
    assert cut(model, "parameters", 2) == (4, 4)
    assert cut(replace(model, positions="rotary", max_seq_len=1000), "parameters", 2) == (4, 4)
    assert cut(replace(model, max_seq_len=1000), "parameters", 2) == (3, 5)


def test_ids_and_counts() -> None:
    assert stages.ids_of((2, 1), Chunks(2)) == (0, 0, 1)
    assert stages.counts_of((0, 0, 1), Chunks(2)) == (2, 1)


@pytest.mark.parametrize(
    ("ids", "chunks", "counts"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 1], Chunks(2, 2), (2, 2, 2, 2)),
        ([0, 1, 1, 2, 0, 1, 2, 2, 2], Chunks(3, 2), (1, 2, 1, 1, 1, 3)),
        ([0, 1, 0, 1, 0, 1, 1], Chunks(2, 3), (1, 1, 1, 1, 1, 2)),
    ],
)
def test_ids_are_of_ranks_where_counts_are_of_stages(ids: list[int], chunks: Chunks, counts: tuple[int, ...]) -> None:
    assert stages.counts_of(ids, chunks) == counts
    assert stages.ids_of(counts, chunks) == tuple(ids)


def test_the_cut_of_a_gpt_with_chunks() -> None:
    """The head weighs four layers: the last rank has as many fewer, most of them missing on its last stage."""
    model = GPT(num_layers=16, hidden_size=96, num_heads=4, vocab_size=4992, max_seq_len=96)
    counts = auto_counts(model, "cost", Chunks(2, 2), model.max_seq_len)
    assert counts == (5, 5, 5, 1)
    assert stages.uniform(16, 4) == auto_counts(model, "uniform", Chunks(2, 2), model.max_seq_len) == (4, 4, 4, 4)


def test_a_deep_model_is_cut_at_once() -> None:
    model = GPT(num_layers=1000, hidden_size=64, num_heads=4, vocab_size=5000, max_seq_len=32)
    assert sum(cut(model, "cost", 128)) == 1000
    assert sum(auto_counts(model, "cost", Chunks(32, 4), 32) or ()) == 1000
    assert sum(stages.balanced_listed([layer % 7 for layer in range(200)], Chunks(8, 2))) == 200
