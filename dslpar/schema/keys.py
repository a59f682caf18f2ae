"""All keys that the sections declare, and tables derived from their facts.

The tables are computed: a key that is added to a section of `dslpar.schema.sections`, or of a model family, appears in
all of them.

    >>> shorthands()["parallel.pipeline"], other_forms()["batch.accumulation"]
    ('size', 'schedule.num_microbatches')
    >>> resume_class("train.seed"), resume_class("optimizer.alpha"), deepspeed_keys()["train_batch_size"]
    ('refused', 'refused', 'batch.global_size')
    >>> synonym_of("NUM_EPOCHS"), synonym_of("BATCH_SIZE"), synonym_of("DROPOUT")
    ('train.steps', 'batch.micro_size', None)
    >>> synonym_of("micro_batch_size"), synonym_of("checkpoint-activations"), synonym_of("seed")
    ('batch.micro_size', 'activation_checkpoint', None)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Any, NamedTuple

from dslpar.core.frozen import is_frozen
from dslpar.schema import datasets, families, sections
from dslpar.schema.fields import KeyFacts, Resume, facts_of
from dslpar.schema.types import TYPES, ValueType, one_of


class DeclaredKey(NamedTuple):
    """One field of one section class."""

    key: str
    """Dotted key, as an author writes it; `*` stands for keys that the section accepts without declaring them."""
    field: Field[Any]
    owner: type
    """The section class with the field."""
    facts: KeyFacts


WRITTEN_AS: Mapping[str, str] = {"target": "type", "extra": "*", "args": "*", "dataset": "*"}
"""Field -> key, if the names differ: `target` holds the class in `type`, and the others hold undeclared keys."""


@cache
def declared() -> tuple[DeclaredKey, ...]:
    """Return all keys, section by section. If a section has several classes, their common keys occur once per class."""
    return tuple(_walk(sections.Spec, ""))


def _walk(cls: type, above: str) -> Iterator[DeclaredKey]:
    for field in fields(cls):
        name = above + WRITTEN_AS.get(field.name, field.name)
        yield DeclaredKey(name, field, cls, facts_of(field))
        for below in classes_of(field):
            yield from _walk(below, f"{name}.")


def classes_of(field: Field[Any]) -> tuple[type, ...]:
    """Return the section classes in a field's annotation: two for `AdamW | SGD | None`, all families for `Model`."""
    names = str(field.type).removeprefix("tuple[").removesuffix(", ...]").split(" | ")
    classes: list[type] = []
    for name in names:
        if name == sections.Model.__name__:
            classes += families.sections().values()
            continue
        found = vars(sections).get(name) or vars(datasets).get(name)
        if isinstance(found, type) and is_frozen(found):
            classes.append(found)
    return tuple(classes)


def type_of(field: Field[Any]) -> ValueType:
    """Return the value type of a field that is not a section."""
    facts = facts_of(field)
    if facts.choices:
        return one_of(facts.choices, facts.refused)
    return TYPES[str(field.type).removesuffix(" | None")]


def shorthand_of(cls: type) -> str:
    """Return the field that a bare value given as the section sets, as in `pipeline=2`; empty if there is none."""
    return next((field.name for field in fields(cls) if facts_of(field).shorthand), "")


def aliases_of(cls: type) -> dict[str, str]:
    """Return alias -> field for a section."""
    return {alias: field.name for field in fields(cls) for alias in facts_of(field).aliases.split()}


# Tables derived from all keys -------------------------------------------------------------------------------------


@cache
def shorthands() -> Mapping[str, str]:
    """Return key of a section -> the field that gets a bare value in place of the section."""
    found = {key.rpartition(".")[0]: field.name for key, field, _, facts in declared() if facts.shorthand}
    # These two are DeepSpeed's keys, listed here because most configs do not need DeepSpeed's table.
    return {**found, "zero.offload_optimizer": "device", "zero.offload_param": "device"}


@cache
def other_forms() -> Mapping[str, str]:
    """Return key -> the key with the same meaning in another form of the config (LiBai's, ColossalAI's)."""
    return {key: facts.same_as for key, _, _, facts in declared() if facts.same_as}


@cache
def deepspeed_keys() -> Mapping[str, str]:
    """Return DeepSpeed's dotted key -> the dslpar key that determines it; a section stands for all its keys."""
    return {theirs: key for key, _, _, facts in declared() for theirs in facts.deepspeed.split()}


@cache
def _resume_classes() -> Mapping[str, Resume]:
    return {key: facts.resume for key, _, _, facts in declared() if facts.resume is not None}


def resume_class(key: str) -> Resume:
    """Return the resume policy of a key; for a key that its section does not list, the section's policy.

    Raises:
        KeyError: the key was declared without `resume=`.
    """
    known = _resume_classes()
    return known[key] if key in known else known[key.partition(".")[0]]


@cache
def _synonyms() -> Mapping[str, str]:
    return {name: key for key, _, _, facts in declared() for name in (facts.synonyms + " " + facts.capitals).split()}


def synonym_of(name: str) -> str | None:
    """Return the dslpar key that corresponds to another framework's key; None for an unknown name.

    Names in capitals have a list of their own, since they are ColossalAI's or the author's.
    """
    return _synonyms().get(name if name.isupper() else name.replace("-", "_").lower())


WITHOUT_COUNTERPART: Mapping[str, str] = {
    "CONFIG": "its keys stand at the top level of the file",
    "TENSOR_SHAPE": "stages tell each other the shapes of what they send",
    "DECAY_ITERS": "a schedule reaches its end at the last step",
    "cudnn_benchmark": "a program sets torch.backends.cudnn.benchmark",
    "cudnn_deterministic": "a program sets torch.backends.cudnn.deterministic",
    "find_unused_parameters": "DeepSpeed finds them by itself",
}
"""ColossalAI's top-level names without a counterpart in dslpar -> the reason."""
