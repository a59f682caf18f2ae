"""User-defined data sets: import the class that the config names, instantiate it, and use its items as samples.

class Pairs:                                          # data = dict(type='my_data.Pairs', path='pairs.npy')
    def __init__(self, path): ...
    def __len__(self): ...
    def __getitem__(self, index): ...                 # (input, label), or a dict by the model's arguments
    fingerprint = "v1"                                # optional: with another one, a resume is refused
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError, Location
from dslpar.language.lazy import instantiate, locate
from dslpar.language.tree import TARGET
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import OtherData

if TYPE_CHECKING:
    from dslpar.data.order import Samples


class OwnData(NamedTuple):
    """User-defined data sets for training and evaluation."""

    train: Any
    held_out: Any
    """The held-out data set; None: nothing is held out."""
    identities: tuple[str, str]
    """Class, length and fingerprint of both data sets."""


def find_own(job: Job) -> OwnData:
    """Import the class of a job's data and instantiate it, on each rank.

    Raises:
        DslparError: there is no such class, it is not a map-style data set, it does not take these arguments, it has
            too few samples for a step, or evaluation is on and nothing is held out.
    """
    data = job.spec.data
    assert isinstance(data, OtherData)
    train = _make(job, data.target, data.args, "data")
    held_out, target = None, data.target
    if data.eval is not None:
        own = data.eval.get("type", data.eval.get(TARGET))
        given = {name: value for name, value in data.eval.items() if name not in ("type", TARGET)}
        target = data.target if own is None else str(own)
        held_out = _make(job, target, given if own is not None else {**data.args, **given}, "data.eval")
    if len(train) < job.batch.global_size:
        message = f"a step takes {job.batch.global_size} samples, but there are {len(train)} to train on"
        raise_finding("BAT210", message, "a smaller batch, or more samples", job.path, "batch")
    if job.spec.train.eval_interval is not None and not (held_out is not None and len(held_out)):
        hint = (
            "give the arguments of the held-out data, data=dict(..., eval=dict(...)); or leave train.eval_interval out"
        )
        raise_finding("BAT203", "no samples are held out", hint, job.path, "data")
    return OwnData(train, held_out, (_identity(data.target, train), _identity(target, held_out)))


def _make(job: Job, target: str, args: Mapping[str, Any], key: str) -> Any:
    try:
        cls = locate(target)
    except DslparError as error:
        place = Location(job.path)
        raise DslparError([each._replace(location=place, key=f"{key}.type") for each in error.findings]) from None
    if not (isinstance(cls, type) and hasattr(cls, "__len__") and hasattr(cls, "__getitem__")):
        message = f"{target!r} is not a class with __len__ and __getitem__"
        raise_finding("BAT223", message, "name a map-style data set, as in torch", job.path, f"{key}.type")
    parameters = inspect.signature(cls).parameters
    given = dict(instantiate(dict(args), job.trusted))
    if "seq_len" in parameters and job.spec.data.seq_len is not None:
        given.setdefault("seq_len", job.spec.data.seq_len)
    try:
        inspect.signature(cls).bind(**given)
    except TypeError as error:
        hint = f"{cls.__name__} takes {inspect.signature(cls)}"
        raise_finding("CFG223", f"{cls.__name__}: {error}", hint, job.path, key)
    return cls(**given)


def _identity(target: str, dataset: Any) -> str:
    if dataset is None:
        return ""
    return f"{target} {len(dataset)} {getattr(dataset, 'fingerprint', '')}".rstrip()


def own_samples(job: Job, dataset: Any, inputs: Sequence[str], start: int) -> Samples:
    """Return the items of a data set as samples. Items are (input, label) pairs, or mappings by argument name.

    Raises:
        DslparError: there are no items, or they are neither pairs nor mappings.
    """
    from dslpar.data.column_samples import ColumnSamples
    from dslpar.data.pairs import PairSamples

    if dataset is None:
        hint = "give the arguments of the held-out data: data=dict(..., eval=dict(...))"
        raise_finding("BAT203", "no samples are held out", hint, job.path, "data")
    if len(dataset) and isinstance(dataset[0], Mapping):
        return ColumnSamples(job, ItemRows(dataset), inputs, start)
    return PairSamples(dataset, job.path)


class ItemRows:
    """Rows of columns from a data set whose items are mappings."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.num_rows, self.columns = dataset, len(dataset), tuple(dataset[0])

    def read(self, columns: Sequence[str], index: int) -> Mapping[str, Any]:
        """Return these columns of an item as arrays: integers as int64, other numbers as float32."""
        item = self.dataset[index]
        values = {name: np.asarray(item[name]) for name in columns}
        return {
            name: each.astype(np.int64 if each.dtype.kind in "biu" else np.float32) for name, each in values.items()
        }
