"""Tensor hashes: every bit counts at every position, and equal bits have equal hashes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dslpar.engine import tensor_hash
from dslpar.engine.tensor_hash import chunk_words, tensor_hashes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)


def _hash(tensor: Tensor) -> int:
    return int(tensor_hashes([tensor]))


def _drawn(dtype: torch.dtype, length: int) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(length) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_single_bit_counts(dtype: torch.dtype) -> None:
    """The bits are in the first and the last element, and on both sides of a chunk's end."""
    size = chunk_words(CPU)
    tensor = _drawn(dtype, 2 * size + 3)
    whole = _hash(tensor)
    bits = tensor.view(torch.uint8)
    width = tensor.element_size()
    for element in (0, 1, size - 1, size, 2 * size + 2):
        for byte in range(element * width, (element + 1) * width):
            for bit in range(1 if dtype is torch.bool else 8):
                bits[byte] ^= 1 << bit
                assert _hash(tensor) != whole, (element, byte, bit)
                bits[byte] ^= 1 << bit
    assert _hash(tensor) == whole


def test_the_sign_counts_of_two_elements_and_of_a_zero() -> None:
    """A sum of bits, or their XOR, would cancel two equal changes; a comparison of numbers would take -0 for 0."""
    tensor = _drawn(torch.float32, 1000)
    flipped = tensor.clone()
    flipped[[3, 700]] *= -1
    assert _hash(flipped) != _hash(tensor)
    assert _hash(torch.tensor([0.0, 1.0])) != _hash(torch.tensor([-0.0, 1.0]))
    assert _hash(torch.tensor(torch.nan)) == _hash(torch.tensor(torch.nan)), "bits are compared, not numbers"


def test_elements_and_chunks_that_change_places_count() -> None:
    size = chunk_words(CPU)
    tensor = _drawn(torch.float32, 3 * size)
    assert _hash(tensor.roll(1)) != _hash(tensor)
    assert _hash(tensor.roll(size)) != _hash(tensor), "whole chunks"


def test_a_hash_is_of_the_elements_in_row_major_order() -> None:
    tensor = _drawn(torch.float32, 12).view(3, 4)
    assert _hash(tensor.t().contiguous().t()) == _hash(tensor) == _hash(tensor.flatten())
    padded = torch.zeros(15)
    padded[3:] = tensor.flatten()
    assert _hash(padded[3:]) == _hash(tensor), "wherever a slice begins in memory"


def test_it_is_the_sum_of_words_times_odd_weights_modulo_2_to_the_64() -> None:
    """Compared with Python's integers, in two chunks."""
    size = chunk_words(CPU)
    words = torch.randint(-(2**31), 2**31, (size + 2,), dtype=torch.int32)
    weights = tensor_hash._odd_weights(size, CPU).tolist()
    first, second, *_ = tensor_hash._odd_weights(4, CPU, tensor_hash._SEED_OF_CHUNKS).tolist()
    numbers = words.tolist()
    sums = [sum(w * s for w, s in zip(weights, part, strict=False)) for part in (numbers[:size], numbers[size:])]
    expected = (first * sums[0] + second * sums[1]) % 2**64
    assert _hash(words) % 2**64 == expected
    assert all(weight % 2 for weight in (*weights, first, second))


def test_weights_and_moments_are_hashed_without_a_copy_of_them() -> None:
    """Allocations are bounded by a chunk, whatever the size."""
    from torch.profiler import ProfilerActivity, profile

    tensor = torch.zeros(64 * chunk_words(CPU))
    tensor_hashes([tensor])  # draws the weights
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        tensor_hashes([tensor])
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert 0 < largest <= 2 * 8 * chunk_words(CPU)
