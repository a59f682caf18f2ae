"""Samples from a map-style data set of (input, label) pairs, which a program passes or a config names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.data import default_collate

from dslpar.core.catalog import raise_finding


class Dataset(Protocol):
    """Map-style data set of (input, label) pairs, as in torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[object]: ...


class PairSamples:
    """Samples of a map-style data set. Pairs are collated as in torch's DataLoader, but lists become tuples."""

    def __init__(self, dataset: Dataset, path: str = "<program>") -> None:
        self.dataset, self.num_samples = dataset, len(dataset)
        first = dataset[0] if self.num_samples else None
        if not isinstance(first, tuple | list) or len(first) != 2:
            wrong_item = "an item of the data set is not an (input, label) pair"
            message = wrong_item if self.num_samples else "the data set is empty"
            hint = "give a data set of (input, label) pairs, each a tensor or a tuple of tensors"
            raise_finding("BAT207", message, hint, path)

    all_counted = False
    """Labels may be -100, which does not count in the loss."""

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Any, Any]:
        """Return inputs and labels, each [len(samples), ...]; `numbers` is unused, since nothing is random."""
        inputs, labels = default_collate([tuple(self.dataset[index]) for index in samples])
        return _tuples(inputs), _tuples(labels)


def is_dataset(data: object) -> bool:
    """Return whether data can be read in dslpar's order. Data that can only be iterated keep their own order."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
