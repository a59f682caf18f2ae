"""Corrections of misspelt keys and choices: the hint for the message, and the meant name if only one is possible.

A key may also come from another framework (`dslpar.schema.keys.synonym_of`); the hint then names dslpar's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.errors import Fix, Location
from dslpar.core.suggest import did_you_mean, only_near, only_recased, rename_fix
from dslpar.schema.keys import synonym_of

if TYPE_CHECKING:
    from dslpar.language.load import Config


class Correction(NamedTuple):
    """The name that an unknown one may mean."""

    hint: str
    """The question "did you mean ...?", or dslpar's key for another framework's; empty if neither is known."""
    meant: str | None
    """The known name that it must mean; None if there is none, or more than one."""
    fix: Fix | None
    """The change to the meant name; None for quite another name, since its value may have another meaning too."""


def of_key(config: Config, source_key: str, known: Sequence[str]) -> Correction:
    """Return the correction of an unknown key, which may be misspelt or come from another framework.

    Names that the section already has are not meant.
    """
    section, _, name = source_key.rpartition(".")
    beside = config.root.get(section)
    given = beside.value if beside is not None and beside.is_mapping else ()
    left = [item for item in known if item not in given]
    key = _key_of_synonym(source_key, left)
    meant = only_near(name, left) if key is None else key.rpartition(".")[2]
    meant = meant if meant in left else None
    near = meant is not None and only_near(name, [meant]) is not None
    fix = rename_fix(config.sources, config.key_at(source_key), name, meant if near else None)
    return Correction(_hint(source_key, known), meant, fix)


def of_choice(config: Config, location: Location, name: object, known: Sequence[str]) -> Correction:
    """Return the correction of an unknown choice, which means a known one if only the case of its letters differs."""
    meant = only_recased(str(name), known)
    return Correction(did_you_mean(name, known), meant, rename_fix(config.sources, location, str(name), meant))


def _hint(source_key: str, known: Sequence[str]) -> str:
    if source_key == "model.lora":  # a key of transformers models only
        return "choose a class of transformers', such as type='transformers.GPT2LMHeadModel': GPT exports to it"
    close, key = did_you_mean(source_key.rpartition(".")[2], known), _key_of_synonym(source_key, known)
    if key is None or key == source_key.rpartition(".")[0] or repr(key.rpartition(".")[2]) in close:
        return close
    return f"here that is {key}" if key != "parallel.tensor" else "add tensor=dict(size=..., mode='1d') to parallel"


def _key_of_synonym(source_key: str, known: Sequence[str]) -> str | None:
    """Return dslpar's key for another framework's key, or None.

    In the section of an axis, such as parallel.pipeline, a framework's name of the axis's size means its key `size`.
    """
    section, _, name = source_key.rpartition(".")
    key = synonym_of(name)
    return f"{key}.size" if key == section and name.endswith("size") and "size" in known else key
