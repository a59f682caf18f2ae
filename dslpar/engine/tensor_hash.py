"""Hash tensors on their device: exact 64-bit hashes, without waiting on the host.

    hashes = tensor_hashes([weight, moment])    # int64 [2], on the tensors' device; equal bits have equal hashes

A tensor is a string of words s_i in row-major order: its elements' bits as integers of the element's width (an 8-byte
element is two 4-byte words). Its hash is the sum of w_i s_i modulo 2^64, with odd random w_i. This is MULTILINEAR of
Lemire and Kaser, "Strongly universal string hashing is fast" (arXiv 1202.4961), with all 64 bits of the sum kept.

- A change of one word, such as one flipped bit, always changes the hash: it changes the sum by w d, 0 < |d| < 2^32. d
  has at most 31 factors of two and w has none, so w d is not a multiple of 2^64.
- A change of several words goes unseen with a probability of about 2^-32: given all weights but one, few values of the
  last one make the sum of the changes a multiple of 2^64.

Integer sums do not round, so the hash does not depend on the order in which a device adds. Megatron-LM copies all
parameters to the host and hashes them there with SHA-1 (`check_param_hashes_across_dp_replicas`). This module reads
them once, on their device. (torch.hash_tensor XORs the bits: two equal changes cancel.)

The random w_i are drawn for one chunk of words (`chunk_words`), and all chunks use the same ones. The chunks' sums are
multiplied by other odd numbers and added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_SEED, _SEED_OF_CHUNKS = 2012, 4961
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integer dtype as which an element's bits are read, by element size in bytes."""


def chunk_words(device: torch.device) -> int:
    """Return how many words are multiplied at once; each product takes 8 bytes.

    On a CPU, the products stay in cache. On an accelerator, products and weights take 64 MB, and a few large kernels do
    the work.
    """
    return 1 << 16 if device.type == "cpu" else 1 << 22


def tensor_hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the hash of each tensor, int64 [n]; takes one or more tensors, all on one device.

    A tensor that is not contiguous is copied. The host does not wait for the device.
    """
    return torch.stack([_hash(tensor.detach()) for tensor in tensors])


def _hash(tensor: Tensor) -> Tensor:
    """Return a tensor's hash, a scalar."""
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    size = chunk_words(words.device)
    weights = _odd_weights(size, words.device)
    if len(words) <= size:
        return (words * weights[: len(words)]).sum()
    sums = torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in torch.split(words, size)])
    return (sums * _odd_weights(1 << len(sums).bit_length(), words.device, _SEED_OF_CHUNKS)[: len(sums)]).sum()


@cache
def _odd_weights(size: int, device: torch.device, seed: int = _SEED) -> Tensor:
    """Return random odd numbers, equal in every process and on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    bounds = torch.iinfo(torch.int64)
    drawn = torch.randint(bounds.min, bounds.max, (size,), generator=generator, dtype=torch.int64, device="cpu")
    return (drawn | 1).to(device)
