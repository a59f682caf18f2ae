"""Which data of a config a class of transformers' learns from. No torch.

>>> data_types("BertForPreTraining"), data_types("LlamaForCausalLM"), data_types("BertForTokenClassification")
(('mlm',), ('text', 'tokens'), ())
"""

from __future__ import annotations

from dslpar.core.catalog import raise_finding
from dslpar.layout.resolve import Job
from dslpar.policies.families import POLICIES
from dslpar.policies.policy import DECODER_INPUTS, Names
from dslpar.schema.datasets import type_name
from dslpar.schema.sections import Model, OtherModel

PROGRAM = "dslpar.initialize(config, train_data=...), a data set of (inputs, labels), inputs in this order"


def inputs_of(job: Job) -> Names:
    """Return the arguments of the forward that a micro-batch brings, in order; of a model without a policy: ids."""
    name = getattr(job.spec.model, "target", "").rpartition(".")[2]
    return POLICIES[name].inputs if name in POLICIES else DECODER_INPUTS


def data_types(name: str) -> Names:
    """Return the types of `data` that a class learns from; none: a program brings the data."""
    inputs = POLICIES[name].inputs if name in POLICIES else DECODER_INPUTS
    if inputs == DECODER_INPUTS:
        return ("text", "tokens")
    if inputs[0] == "pixel_values":
        return ("images",)
    if "decoder_input_ids" in inputs:
        return ("span",)
    return ("mlm",) if name.endswith(("MaskedLM", "PreTraining")) else ()


def types_of_model(model: Model | OtherModel) -> Names | None:
    """Return the types of `data` that a config's model learns from; None: its class is not known."""
    if isinstance(model, Model):
        return model.DATA_TYPES
    return data_types(model.target.rpartition(".")[2]) if model.is_of_transformers else None


def mismatch(model: Model | OtherModel, data: object) -> tuple[str, str] | None:
    """Return why a model cannot learn from a config's data, and what to write instead; None: it can."""
    types = types_of_model(model)
    if types is None or type_name(data) in types:
        return None
    name = getattr(model, "target", model.__class__.__name__).rpartition(".")[2]
    inputs = model.INPUTS if isinstance(model, Model) else DECODER_INPUTS
    inputs = POLICIES[name].inputs if name in POLICIES else inputs
    message = f"{name} is given {', '.join(inputs)}, and data are {_DESCRIBED[type_name(data)]}"
    return message, f"data=dict(type={types[0]!r}); or {PROGRAM}" if types else PROGRAM


_DESCRIBED = {
    "text": "text of which each next token is predicted",
    "tokens": "tokens of which each next one is predicted",
    "mlm": "text of which masked tokens are told",
    "span": "text of which spans are told",
    "images": "images",
}


def check_data(job: Job) -> None:
    """Raise DslparError where a config's data are not what its model is given."""
    if (found := mismatch(job.spec.model, job.spec.data)) is not None:
        raise_finding("BAT211", *found, job.path, "data")
