"""Types of `data` that transformers' classes can learn from. Does not import torch.

>>> data_types("BertForPreTraining"), data_types("LlamaForCausalLM"), data_types("BertForTokenClassification")
(('mlm',), ('text', 'tokens', 'chat'), ())
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dslpar.core.catalog import raise_finding
from dslpar.layout.resolve import Job
from dslpar.schema.datasets import Data, HuggingFaceData, OtherData, parts_of, type_name
from dslpar.schema.policy import DECODER_INPUTS, Names
from dslpar.schema.sections import Model, OtherModel
from dslpar.schema.transformers_policies import DERIVED, POLICIES

PROGRAM = "dslpar.initialize(config, train_data=...), a data set of (inputs, labels), inputs in this order"


def inputs_of(job: Job) -> Names:
    """Return the arguments of the forward that a micro-batch provides, in order; empty if not known."""
    model = job.spec.model
    if isinstance(model, Model):
        return DECODER_INPUTS if DECODER_INPUTS[:1] == model.INPUTS else model.INPUTS
    name = model.target.rpartition(".")[2]
    if name in POLICIES:
        return POLICIES[name].inputs
    return DECODER_INPUTS if model.is_of_transformers else ()


def data_types(name: str) -> Names:
    """Return the types of `data` that a class learns from; empty if a program must provide the data."""
    inputs = POLICIES[name].inputs if name in POLICIES else DECODER_INPUTS
    if inputs == DECODER_INPUTS:
        return ("text", "tokens", "chat")
    if inputs[0] == "pixel_values":
        return ("images",)
    if "decoder_input_ids" in inputs:
        return ("span",)
    return ("mlm",) if name.endswith(("MaskedLM", "PreTraining")) else ()


def types_of_model(model: Model | OtherModel) -> Names | None:
    """Return the types of `data` that a config's model learns from; None if its class is not known."""
    if isinstance(model, Model):
        return model.DATA_TYPES
    return data_types(model.target.rpartition(".")[2]) if model.is_of_transformers else None


def mismatch(model: Model | OtherModel, data: Data) -> tuple[str, str] | None:
    """Return why a model cannot learn from a config's data, and what to write instead; None if it can."""
    return next((found for each in parts_of(data) if (found := _mismatch(model, each)) is not None), None)


def _mismatch(model: Model | OtherModel, data: Data) -> tuple[str, str] | None:
    types, kind = types_of_model(model), type_name(data)
    if isinstance(data, HuggingFaceData) and data.text_column is not None:
        kind = "text"
    elif isinstance(data, HuggingFaceData | OtherData):
        return None  # the columns, or the class's samples, are known only when it is read
    if types is None or kind in types:
        return None
    name = getattr(model, "target", type(model).__name__).rpartition(".")[2]
    inputs = model.INPUTS if isinstance(model, Model) else DECODER_INPUTS
    inputs = POLICIES[name].inputs if name in POLICIES else inputs
    message = f"{name} takes {', '.join(inputs)}, but the data are {_DESCRIBED[kind]}"
    return message, f"data=dict(type={types[0]!r}); or {PROGRAM}" if types else PROGRAM


_DESCRIBED = {
    "text": "text for next-token prediction",
    "tokens": "tokens for next-token prediction",
    "mlm": "text with masked tokens as targets",
    "span": "text with spans as targets",
    "images": "images",
    "chat": "conversations for next-token prediction",
}


def packing_problem(model: Model | OtherModel, seq_len: int) -> str:
    """Return why packing several conversations into one row would change their results; empty if it would not.

    Results stay the same if positions are relative and attention keeps the conversations apart.
    """
    if isinstance(model, Model):
        name = type(model).__name__
        return "" if model.packs else f"{name} uses a token's position in the row, not in its conversation"
    config = model.transformers
    if config is None:
        return ""
    name = config.model
    if name not in DERIVED and name not in POLICIES:
        return f"dslpar does not know whether {name} keeps packed conversations apart"
    if name in _KNOWS_PLACES or not {"rope_parameters", "rope_theta"} & set(config.known.get("defaults", {})):
        return f"{name} uses a token's position in the row, not in its conversation"
    for rope in _ropes([config.values.get("rope_parameters"), config.values.get("rope_scaling")]):
        kind = rope.get("rope_type", rope.get("type"))
        least = rope.get("original_max_position_embeddings", config.values.get("original_max_position_embeddings"))
        grows = kind in ("dynamic", "longrope") or "llama_4_scaling_beta" in rope
        if grows and not (isinstance(least, int) and seq_len <= least):
            return f"rotary positions of type {kind!r} depend on the row's length"
    return ""


_KNOWS_PLACES = frozenset({"BeamForCausalLM"})  # it scales its scores by position
"""Classes that use absolute positions in addition to rotary ones."""


def _ropes(values: Iterable[object]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions, which some models have per layer type."""
    for value in values:
        if isinstance(value, Mapping):
            yield value
            yield from _ropes(value.values())


def check_data(job: Job) -> None:
    """Raise DslparError if a config's model cannot learn from its data."""
    if (found := mismatch(job.spec.model, job.spec.data)) is not None:
        raise_finding("BAT211", *found, job.path, "data")
