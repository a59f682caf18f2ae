"""Training data by step number: micro-batches from the config's data, a loader, or a program's own iterable.

    data = step_data(loader, engine)                 # a loader that dslpar.initialize returned
    engine.train_batch(data.step(engine.consumed_samples))

As in Megatron-LM (`consumed_samples`), the position is a number of samples and not an iterator's state, so that any
layout can resume from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.data.loader import Loader, StepData
from dslpar.data.pairs import PairSamples, is_dataset
from dslpar.data.shuffled_loader import begin_epoch, seed_shuffle
from dslpar.data.source import Part, make_samples
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.engine.engine import Engine
from dslpar.engine.micro_batches import MicroBatch, take_batch
from dslpar.layout.resolve import Job
from dslpar.layout.transformers_data_types import inputs_of


class PartData:
    """One part of the config's data, such as the training part.

    The first call of `step` opens the data. All ranks must make it together; ranks that need no data open none.
    """

    def __init__(self, engine: Engine, part: Part, world: Axis) -> None:
        self.engine, self.part, self.world = engine, part, world

    def step(self, consumed: int) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches of the step that begins after `consumed` samples."""
        return iter(()) if self._loader is None else self._loader.step(consumed)

    @property
    def num_samples(self) -> int | None:
        """Number of distinct samples; None if this rank reads none. All ranks must ask for it together."""
        return None if self._loader is None else self._loader.samples.num_samples

    @cached_property
    def _loader(self) -> Loader | None:
        """Open the data. All ranks must call it together, since an error on one rank is raised on all."""
        loader: Loader | None = None
        findings: Sequence[Finding] = ()
        engine = self.engine
        if engine.needs_data:
            try:
                samples = make_samples(engine.job, self.part, inputs_of(engine.job))
                loader = Loader(samples, engine.job, engine.groups.coord["data"], lambda: engine.consumed_samples)
            except DslparError as error:
                findings = error.findings
        if found := next(filter(None, collectives.gather_objects(findings, self.world)), None):
            raise DslparError(found)
        return loader


class IterableData:
    """A program's own iterable of micro-batches, or of whole batches, which are split. It restarts at its end.

    Steps come in the iterable's own order. A DataLoader that shuffles does so by the run's seed, and each pass is an
    epoch of its sampler. The last step's micro-batches are kept, since a step with non-finite numbers runs again to
    find the cause.
    """

    def __init__(self, batches: Iterable[Any], job: Job) -> None:
        self.batches, self.job = batches, job
        seed_shuffle(batches, job.spec.train.seed)
        self._iterator: Iterator[Any] = iter(())
        self._num_epochs = 0
        self._last: tuple[int, list[MicroBatch]] = (-1, [])

    def step(self, consumed: int) -> Iterator[MicroBatch]:
        """Return the next step's micro-batches; start at the iterable's beginning if `consumed` is 0."""
        if consumed != self._last[0]:
            if consumed == 0:
                self._begin(0)
            self._last = consumed, self._take(consumed // self.job.batch.global_size)
        return iter(self._last[1])

    def skip(self, steps: int) -> None:
        """Skip the steps that a resumed run has already taken, by reading them as a fresh run does."""
        self._begin(0)
        for step in range(steps):
            self._take(step)

    def _begin(self, epoch: int) -> None:
        begin_epoch(self.batches, epoch)
        self._iterator, self._num_epochs = iter(self.batches), epoch + 1

    def _take(self, steps_done: int) -> list[MicroBatch]:
        try:
            return take_batch(self._iterator, self.job, steps_done)
        except StopIteration:
            self._begin(self._num_epochs)
        try:
            return take_batch(self._iterator, self.job, steps_done)
        except StopIteration:
            hint = "give an iterable that can be read again, such as a DataLoader; or a data set of (input, label)"
            raise_finding("BAT208", f"the data ended after step {steps_done}", hint, self.job.path)


class NoData:
    """Data of a rank that reads none."""

    def step(self, consumed: int) -> Iterator[MicroBatch]:
        """Return no micro-batches."""
        return iter(())


def num_samples(data: StepData) -> int | None:
    """Return the number of distinct samples; None: unknown, or this rank reads none. All ranks must ask together."""
    if isinstance(data, PartData):
        return data.num_samples
    return data.samples.num_samples if isinstance(data, Loader) else None


def step_data(data: Any, engine: Engine) -> StepData:
    """Return data by steps, from what `dslpar.initialize` takes or returns; `data` is None on a rank without data.

    A map-style dataset is read in the order of `dslpar.data.order`.
    """
    if data is None:
        return NoData()
    if is_dataset(data):
        data = Loader(PairSamples(data, engine.job.path), engine.job, engine.groups.coord["data"], lambda: 0)
    return data if isinstance(data, Loader) else IterableData(data, engine.job)
