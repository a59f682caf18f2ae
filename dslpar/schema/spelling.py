"""Spelling of keys and choices: suggestions for messages, and the fix if only one known name is possible.

A key may also come from another framework (`dslpar.schema.keys.synonym_of`); the suggestion is then dslpar's key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from dslpar.core.errors import Fix, Location
from dslpar.core.suggest import did_you_mean, only_near, only_recased, rename_fix
from dslpar.schema.keys import synonym_of

if TYPE_CHECKING:
    from dslpar.language.load import Config


def certain_name(config: Config, source_key: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that a key must mean; None if there is none, or more than one.

    The key may be misspelt, or come from another framework. Names that the section already has are not considered.
    """
    section, _, name = source_key.rpartition(".")
    beside = config.root.get(section)
    given = beside.value if beside is not None and beside.is_mapping else ()
    left = [item for item in known if item not in given]
    key = _key_of_synonym(source_key, left)
    if key is None:
        return only_near(name, left)
    meant = key.rpartition(".")[2]
    return meant if meant in left else None


def spelling_fix(config: Config, source_key: str, known: Iterable[str]) -> Fix | None:
    """Return the fix of a misspelt key if it can mean only one known name that its section does not have, else None.

    A key of another framework with a quite different name has no fix, since its values may have another meaning too.
    """
    name, meant = source_key.rpartition(".")[2], certain_name(config, source_key, known)
    near = meant is not None and only_near(name, [meant]) is not None
    return rename_fix(config.sources, config.key_at(source_key), name, meant if near else None)


def recase_fix(config: Config, location: Location, name: object, known: Iterable[str]) -> Fix | None:
    """Return the fix of a choice that differs from a known one only in upper or lower case."""
    return rename_fix(config.sources, location, str(name), only_recased(str(name), known))


def suggestion(source_key: str, known: Collection[str]) -> str:
    """Return "did you mean ...?", or dslpar's key for another framework's; empty if neither is known."""
    if source_key == "model.lora":  # a key of transformers models only
        return "choose a class of transformers', such as type='transformers.GPT2LMHeadModel': GPT exports to it"
    close, key = did_you_mean(source_key.rpartition(".")[2], known), _key_of_synonym(source_key, known)
    if key is None or key == source_key.rpartition(".")[0] or repr(key.rpartition(".")[2]) in close:
        return close
    return f"here that is {key}" if key != "parallel.tensor" else "add tensor=dict(size=..., mode='1d') to parallel"


def _key_of_synonym(source_key: str, known: Collection[str]) -> str | None:
    """Return dslpar's key for another framework's key, or None.

    In the section of an axis, such as parallel.pipeline, a framework's name of the axis's size means its key `size`.
    """
    section, _, name = source_key.rpartition(".")
    key = synonym_of(name)
    return f"{key}.size" if key == section and name.endswith("size") and "size" in known else key
