"""What a misspelt key or choice was meant to be: a suggestion for the message, and where only one will do, the fix.

A key may also be another framework's (`dslpar.schema.keys.synonym_of`): then the message names ours.
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
    """Return the one known name that a key can stand for, by its letters or in another framework.

    Names that its section has already are none.
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
    """Return the fix of a misspelt key, where it can be only one of the known names, and none that its section has.

    A key of another framework that is written quite otherwise here has none: its values may mean something else, too.
    """
    name, meant = source_key.rpartition(".")[2], certain_name(config, source_key, known)
    near = meant is not None and only_near(name, [meant]) is not None
    return rename_fix(config.sources, config.key_at(source_key), name, meant if near else None)


def recase_fix(config: Config, location: Location, name: object, known: Iterable[str]) -> Fix | None:
    """Return the fix of a choice that differs from a known one by the case of its letters alone."""
    return rename_fix(config.sources, location, str(name), only_recased(str(name), known))


def suggestion(source_key: str, known: Collection[str]) -> str:
    """Return "did you mean ...?", or the key that says what another framework's key says; empty: neither is known."""
    if source_key == "model.lora":  # a key of models of transformers' alone
        return "choose a class of transformers', such as type='transformers.GPT2LMHeadModel': GPT exports to it"
    close, key = did_you_mean(source_key.rpartition(".")[2], known), _key_of_synonym(source_key, known)
    if key is None or key == source_key.rpartition(".")[0] or repr(key.rpartition(".")[2]) in close:
        return close
    return f"here that is {key}" if key != "parallel.tensor" else "add tensor=dict(size=..., mode='1d') to parallel"


def _key_of_synonym(source_key: str, known: Collection[str]) -> str | None:
    """Return the key that another framework's key stands for; in the section of an axis, its size."""
    section, _, name = source_key.rpartition(".")
    key = synonym_of(name)
    return f"{key}.size" if key == section and name.endswith("size") and "size" in known else key
