"""Blend several data sets into one. A sample's position in the run determines its part (`dslpar.data.blend_order`).

Each part's samples are ordered by the seed and the part's own epochs, as if the part were the only data set. So small
parts repeat sooner. As in Megatron-LM, a blend only decides which data set gives the next sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.data.blend_order import BlendOrder
from dslpar.data.blend_parts import at_part
from dslpar.data.order import Permutations, Samples, SamplesWithReplacement
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import BlendData, part_key, type_name


class BlendSamples:
    """Samples of all parts. Indices count the samples part by part. The order in a run blends parts by `weights`.

    `names` are the parts' numbers in the config, for error messages.
    """

    def __init__(self, parts: Sequence[Samples], weights: Sequence[Fraction], seed: int, names: Sequence[int]) -> None:
        self.parts, self.names = parts, names
        self.order = BlendOrder(weights)
        self.offsets = [0, *accumulate(part.num_samples for part in parts)]
        self.num_samples = self.offsets[-1]
        self.all_counted = all(part.all_counted for part in parts)
        self._orders = [
            part if isinstance(part, SamplesWithReplacement) else Permutations(part.num_samples, seed) for part in parts
        ]

    def in_order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the indices of the samples at these positions of the run."""
        found = []
        for number in numbers:
            part, index = self.order.locate(number)
            found.append(self.offsets[part] + self._orders[part].sample_index(index))
        return found

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and labels in the form that the parts have: tensors [len(samples), ...], or tuples of them.

        Each part makes the rows of its own samples, which are then put back in the order of `samples`.
        """
        rows_of: defaultdict[int, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            rows_of[bisect_right(self.offsets, sample) - 1].append(row)
        batches, places = [], []
        for part, rows in rows_of.items():
            own = [samples[row] - self.offsets[part] for row in rows]
            try:
                batches.append(self.parts[part].batch(own, [numbers[row] for row in rows]))
            except DslparError as error:
                raise at_part(error, self.names[part]) from None
            places += rows
        inputs, labels = _joined(batches, torch.tensor(places).argsort())
        return inputs, labels

    def describe(self, job: Job) -> Iterator[str]:
        """Yield one line per part: its share of the run, and its number of epochs."""
        total = job.spec.train.steps * job.batch.global_size
        data = job.spec.data
        assert isinstance(data, BlendData)
        for part, count in sorted(self.order.counts(total).items()):
            section, size = data.parts[self.names[part]].dataset, self.parts[part].num_samples
            path = getattr(section, "path", None)
            name = f"{type_name(section)} {path!r}" if path else type_name(section)
            yield f"{name}: {count / total:.1%} of the run, {count / size:.2f} epochs of {size:,} samples"


def _joined(values: Sequence[Any], order: Tensor) -> Any:
    """Concatenate the rows of all values (tensors or tuples of tensors), and reorder them by `order`."""
    if isinstance(values[0], tuple):
        return tuple(_joined(each, order) for each in zip(*values, strict=True))
    return torch.cat(list(values))[order]


def check_forms(job: Job, parts: Mapping[int, Samples]) -> None:
    """Check that samples of all parts have the same dtypes and shapes. Raises: DslparError: a part differs.

    `parts` is {number of the part in the config: its samples}.
    """
    forms: dict[int, str] = {}
    for number, part in parts.items():
        try:
            forms[number] = _form_of(part.batch([0], [0]))
        except DslparError as error:
            raise at_part(error, number) from None
    first = next(iter(forms))
    for number, form in forms.items():
        if form != forms[first]:
            message = f"part {number} gives (inputs, labels) of {form}, and part {first} of {forms[first]}"
            hint = "use parts with the same seq_len, size or columns"
            raise_finding("BAT224", message, hint, job.path, part_key(number))


def _form_of(value: Any) -> str:
    """Return the dtypes and shapes of a sample."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_form_of, value))})"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
