"""Samples for transformers models, from rows whose columns are named after the arguments of the model's forward.

    samples = ColumnSamples(job, rows, inputs=("input_ids", "attention_mask"))
    inputs, labels = samples.batch([0, 1])      # tensors, or tuples of tensors

`source.py` makes them from Hugging Face data, and `own_data.py` from an author's data set whose items are dicts. Names
and meanings are those of transformers, and `labels` are a column too. Other columns are not read.

For a causal model, tokens with an attention mask of 0 are left out. Its labels default to the input ids, and are
shifted here so that each token is predicted from the tokens before it. Other models' labels are aligned with their
inputs. Short rows are padded to `seq_len` where the model cannot notice it: after the text of a causal model, or under
an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslpar.core.catalog import raise_finding
from dslpar.data.corpus import check_has_length
from dslpar.data.tokens import vocab_size_of
from dslpar.layers.loss import IGNORE_INDEX
from dslpar.layout.resolve import Job
from dslpar.schema.sections import OtherModel

Array = NDArray[Any]
_HINT = "rows must have one shape, ids within the vocabulary, and at most data.seq_len tokens"
Row = Mapping[str, Array]
_CAUSAL = ("input_ids", "attention_mask")
_MASKS = ("attention_mask", "decoder_attention_mask", "token_type_ids")
"""Inputs that rows may leave out; they default to ones, ones and zeros."""
_FILLED_IN = {"decoder_input_ids", *_MASKS}
"""Inputs that are made here if rows have no such column."""
_IDS = ("input_ids", "decoder_input_ids")
_SECOND_LABELS = {"BertForPreTraining": "next_sentence_label"}
"""{model with two labels: the column of the second one}."""


class Rows(Protocol):
    """Rows, accessed by number."""

    num_rows: int

    @property
    def columns(self) -> Sequence[str]:
        """Names of all columns."""

    def read(self, columns: Sequence[str], index: int) -> Row:
        """Return these columns of a row: integers as int64, other numbers as float32."""


class ColumnSamples:
    """Rows as samples of a model whose forward takes `inputs`; `decoder_start` is the first id of a decoder's input.

    Raises:
        DslparError: a column that the model needs is missing.
    """

    all_counted = False
    """False: labels may be -100, which do not count in the loss, so the engine must count the others."""

    def __init__(self, job: Job, rows: Rows, inputs: Sequence[str], decoder_start: int = 0) -> None:
        self.job, self.rows, self.num_samples, self.decoder_start = job, rows, rows.num_rows, decoder_start
        self.is_causal, self.may_pad = tuple(inputs) == _CAUSAL, "attention_mask" in inputs
        self.vocab_size = vocab_size_of(job)
        section = job.spec.model
        config = section.transformers if isinstance(section, OtherModel) else None
        self.pad = int((config.values.get("pad_token_id") if config is not None else None) or 0)
        self.labels = self._label_columns(getattr(section, "target", "").rpartition(".")[2])
        self._check_columns(inputs)
        if self.may_pad:
            check_has_length(job)
        self.inputs = ["input_ids"] if self.is_causal else self._input_columns(inputs)
        self.columns = [name for name in dict.fromkeys([*inputs, *self.labels]) if name in rows.columns]

    def _label_columns(self, model: str) -> list[str]:
        """Return the columns that hold the labels of a model of this class."""
        label = next((name for name in ("labels", "label") if name in self.rows.columns), "")
        if self.is_causal and not label:
            return ["input_ids"]
        return [label or "labels", *([_SECOND_LABELS[model]] if model in _SECOND_LABELS else [])]

    def _input_columns(self, inputs: Sequence[str]) -> list[str]:
        """Return the inputs that batches have: those of the rows, and those that are filled in."""
        found = [name for name in inputs if name in self.rows.columns or name in _FILLED_IN]
        if found[-1] == "decoder_attention_mask" and found[-1] not in self.rows.columns:
            found.pop()  # the last argument may be left out, and all ones mean the same
        return found

    def _check_columns(self, inputs: Sequence[str]) -> None:
        needed = [*(name for name in inputs if name not in _FILLED_IN), *self.labels]
        missing = [name for name in needed if name not in self.rows.columns]
        if missing or not inputs:
            message = (
                f"there is no column {missing[0]!r}" if missing else "the arguments of the model's forward are unknown"
            )
            message += f"; the data has these columns: {', '.join(self.rows.columns)}"
            hint = (
                "name columns after the arguments of the model's forward; or write a data set of (input, label) pairs"
            )
            raise_finding("BAT222", message, hint, self.job.path, "data")

    def batch(self, samples: Sequence[int], numbers: Sequence[int] = ()) -> tuple[Any, Any]:
        """Return inputs and labels, each a tensor [len(samples), ...] or a tuple; `numbers` is unused."""
        made = [self._sample(sample) for sample in samples]
        inputs = [self._stacked([row[name] for row in made], name) for name in self.inputs]
        for name, value in zip(self.inputs, inputs, strict=True):
            if name in _IDS:
                self._check_ids(value)
        labels = [self._stacked([row[f"label {name}"] for row in made], name) for name in self.labels]
        return tuple(inputs) if len(inputs) > 1 else inputs[0], tuple(labels) if len(labels) > 1 else labels[0]

    def _sample(self, sample: int) -> dict[str, Array]:
        row = dict(self.rows.read(self.columns, sample))
        labels = [row[name] for name in self.labels]
        if self.is_causal:
            ids, mask = row["input_ids"], row.get("attention_mask")
            lengths = {len(each) for each in (ids, labels[0], mask) if each is not None}
            if len(lengths) > 1:
                self._refuse(f"row {sample}: input_ids, labels and attention_mask have {lengths} values")
            kept = slice(None) if mask is None else mask != 0
            row["input_ids"] = ids[kept]
            labels = [np.append(labels[0][kept][1:], IGNORE_INDEX)]
        if "decoder_input_ids" in self.inputs and "decoder_input_ids" not in row:
            before = np.concatenate([[self.decoder_start], labels[0][:-1]])
            row["decoder_input_ids"] = np.where(before == IGNORE_INDEX, 0, before)
        for name in self.inputs:
            if name not in row:
                row[name] = np.full(len(row["input_ids"]), name != "token_type_ids", np.int64)
        pads = {"input_ids": self.pad}
        found = {name: self._padded(row[name], name, pads.get(name, 0), sample) for name in self.inputs}
        for name, label in zip(self.labels, labels, strict=True):
            found[f"label {name}"] = self._padded(label, name, IGNORE_INDEX, sample)
        return found

    def _padded(self, value: Array, name: str, by: int, sample: int) -> Array:
        """Pad a list of ids to the length of a sample; return other values unchanged."""
        length = self.job.seq_len
        if not self.may_pad or value.ndim != 1 or value.dtype != np.int64:
            return value
        if len(value) > length:
            self._refuse(f"row {sample} has {len(value)} {name}, but a sample has {length} tokens")
        return np.pad(value, (0, length - len(value)), constant_values=by)

    def _stacked(self, values: Sequence[Array], name: str) -> Tensor:
        if len(shapes := sorted({value.shape for value in values})) > 1:
            self._refuse(f"rows of {name!r} have the shapes {' and '.join(map(str, shapes))}")
        return torch.from_numpy(np.stack(values))

    def _check_ids(self, ids: Tensor) -> None:
        # Without this check such an id could silently look up zeros, or another rank's row.
        low, high = int(ids.min()), int(ids.max())
        if self.vocab_size is not None and not 0 <= low <= high < self.vocab_size:
            self._refuse(f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size} tokens")

    def _refuse(self, problem: str) -> NoReturn:
        raise_finding("BAT205", problem, _HINT, self.job.path, "data")
