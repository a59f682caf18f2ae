"""Order of samples: independent of the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from dslpar.data.order import (
    SamplesWithReplacement,
    epoch_permutation,
    micro_batches,
    sample_index,
    sample_indices,
)
from dslpar.data.text import TextSamples
from dslpar.layout.batch import Batch


class Numbered:
    """Samples that are their own indices; labels are their numbers in the run."""

    all_counted = True

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert [sample_index(number, self.num_samples, 3) for number in numbers] == list(samples)
        return torch.tensor(samples), torch.tensor(numbers)


def step_of(data: int, accumulation: int, num_samples: int, consumed: int, seed: int = 3) -> list[int]:
    """Return the samples of one step in row order, put together from all data ranks."""
    size = 72
    batch = Batch(size, size // (data * accumulation), accumulation)
    rows: dict[int, int] = {}
    for rank in range(data):
        batches = micro_batches(Numbered(num_samples), batch, seed, consumed, data, rank)
        for index, (ids, numbers) in enumerate(batches):
            first = (index * data + rank) * batch.micro_size
            assert numbers.tolist() == list(range(consumed + first, consumed + first + batch.micro_size))
            rows |= dict(enumerate(ids.tolist(), first))
    return [rows[row] for row in range(size)]


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 6]), st.integers(5, 60), st.integers(0, 5))
def test_a_step_takes_the_next_samples_of_the_run_in_every_layout(
    data: int, accumulation: int, num_samples: int, step: int
) -> None:
    expected = [sample_index(k, num_samples, 3) for k in range(step * 72, (step + 1) * 72)]
    assert step_of(data, accumulation, num_samples, step * 72) == expected


@given(st.integers(1, 50), st.integers(0, 3), st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(num_samples: int, epoch: int, seed: int) -> None:
    order = [sample_index(k, num_samples, seed) for k in range(epoch * num_samples, (epoch + 1) * num_samples)]
    assert sorted(order) == list(range(num_samples))
    assert order == epoch_permutation(num_samples, seed, epoch).tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(epoch_permutation(100, seed, epoch).tolist()) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_the_order_is_the_same_in_every_version() -> None:
    """Another order would change every run's curve."""
    assert epoch_permutation(8, 1234, 0).tolist() == [0, 2, 6, 7, 4, 5, 1, 3]


def test_windows_of_text_overlap_in_one_byte() -> None:
    text = TextSamples(bytearray(b"abcdefghij"), 3)
    assert text.num_samples == 3
    ids, labels = text.batch([2, 0])
    assert ids.dtype == labels.dtype == torch.int64
    assert [bytes(row) for row in ids.tolist()] == [b"ghi", b"abc"]
    assert [bytes(row) for row in labels.tolist()] == [b"hij", b"bcd"]


def test_the_last_window_needs_a_byte_after_it() -> None:
    assert TextSamples(bytearray(b"abcdef"), 3).num_samples == 1
    assert TextSamples(bytearray(b"abcdefg"), 3).num_samples == 2


def test_draws_with_replacement_are_uniform_and_depend_on_the_position_alone() -> None:
    samples = SamplesWithReplacement(Numbered(50), 3)
    drawn = samples.in_order(range(5000))
    counts = torch.bincount(torch.tensor(drawn), minlength=50)
    assert (counts.min() > 60, counts.max() < 150) == (True, True), "100 +- 10 of each"
    assert len(set(drawn[:50])) < 50, "an epoch of draws repeats some"
    assert list(sample_indices(samples, range(700, 800), 9)) == list(drawn[700:800]), "in any layout, from any step"
    assert drawn != SamplesWithReplacement(Numbered(50), 4).in_order(range(5000))
