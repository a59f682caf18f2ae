"""Batch of a step: three sizes, of which two determine the third."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.inferred_value import InferredValue
from dslpar.schema import sections
from dslpar.schema.sections import Spec


class Batch(NamedTuple):
    """Batch sizes of one step: global_size = micro_size * accumulation * data size."""

    global_size: int
    """Samples per optimizer step."""
    micro_size: int
    """Samples per micro-batch on each replica."""
    accumulation: int
    """Micro-batches per step."""


def requested_batch(spec: Spec) -> sections.Batch:
    """Return the section `batch`, with schedule.num_microbatches as accumulation if it has none."""
    batch, schedule = spec.batch, spec.schedule
    accumulation = batch.accumulation or (schedule.num_microbatches if schedule is not None else None)
    return sections.Batch(global_size=batch.global_size, micro_size=batch.micro_size, accumulation=accumulation)


class KnownSizes(Protocol):
    """Sizes that the batch depends on, besides the section `batch`. The linter's layout raises for an unknown size."""

    @property
    def data_size(self) -> int:
        """Number of replicas."""
        ...

    @property
    def cuboid(self) -> TensorMesh:
        """Ranks of one stage of a replica."""
        ...


class Sizes(NamedTuple):
    """Plain values of `KnownSizes`."""

    data_size: int
    cuboid: TensorMesh


def batch_of(requested: sections.Batch, sizes: KnownSizes) -> Batch:
    """Return all batch sizes, from the requested ones. If these contradict each other, BAT101 reports the product."""
    return Batch(*(decide(requested, sizes).value for decide in (global_size_of, micro_size_of, accumulation_of)))


_DATA = "parallel.data.size"


def global_size_of(requested: sections.Batch, sizes: KnownSizes) -> InferredValue:
    """Decide the number of samples per step."""
    if requested.global_size is not None:
        return InferredValue(requested.global_size)
    micro, accumulation = micro_size_of(requested, sizes).value, accumulation_of(requested, sizes).value
    why = f"micro_size {micro} * accumulation {accumulation} * data {sizes.data_size}"
    value = micro * accumulation * sizes.data_size
    return InferredValue(value, why, ("batch.micro_size", "batch.accumulation", _DATA))


def micro_size_of(requested: sections.Batch, sizes: KnownSizes) -> InferredValue:
    """Decide the number of samples per micro-batch: the least legal number if global_size is not given either."""
    if requested.micro_size is not None:
        return InferredValue(requested.micro_size)
    if requested.global_size is None:
        least = divisors.least_micro_size(sizes.cuboid)
        cuts = [each.why for each in divisors.batch(least, sizes.cuboid) if each.by > 1]
        why = (
            f"the smallest number divisible by {' and '.join(cuts)}"
            if cuts
            else "the smallest possible, since no rank splits samples"
        )
        sources = ("parallel.tensor.shape",) if cuts else ()
        return InferredValue(least, f"neither micro_size nor global_size is set: {why}", sources)
    whole, accumulation = requested.global_size, accumulation_of(requested, sizes).value
    why = f"global_size {whole} / (accumulation {accumulation} * data {sizes.data_size})"
    value = whole // (accumulation * sizes.data_size)
    return InferredValue(value, why, ("batch.global_size", "batch.accumulation", _DATA))


def accumulation_of(requested: sections.Batch, sizes: KnownSizes) -> InferredValue:
    """Decide the number of micro-batches per step."""
    if requested.accumulation is not None:
        return InferredValue(requested.accumulation)
    whole, micro = requested.global_size, requested.micro_size
    if whole is None or micro is None:
        return InferredValue(1, "left out: one micro-batch per step", how="default")
    why = f"global_size {whole} / (micro_size {micro} * data {sizes.data_size})"
    return InferredValue(whole // (micro * sizes.data_size), why, ("batch.global_size", "batch.micro_size", _DATA))
