"""Declaration of keys: `key(...)`, a dataclass field that carries every fact about the key.

    @section
    class Train:
        steps: PositiveInt = key(default=100, resume="reported", synonyms="train_iters max_steps")
        \"\"\"Optimizer steps.\"\"\"

The facts of a key are written nowhere else. The reader, the reference (docs/config.md), `dslpar config --explain`, the
resume policy, the map to DeepSpeed's keys, and the hints for other frameworks' keys are derived from the declarations:
see `dslpar.schema.keys`. Writing the help below its field comes from litgpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

Resume = Literal["free", "reported", "refused"]
"""Policy for a changed value on resume; `dslpar.checkpoint.resume_policy` defines each."""
Class = TypeVar("Class", bound=type)


class KeyFacts(NamedTuple):
    """All facts about a key except its type, default and help; several names are separated by blanks."""

    resume: Resume | None = None
    """Policy for a changed value on resume. For a section, the policy of keys that it accepts without declaring them;
    None if it declares all its keys."""
    choices: tuple[str, ...] = ()
    """The valid strings, if there is a list of them."""
    refused: Mapping[str, str] = {}
    """Choices of other frameworks that dslpar does not have -> the reason."""
    shorthand: bool = False
    """Whether a bare value in place of the section is the value of this key: `pipeline=2`."""
    aliases: str = ""
    """Other names of the key in its section."""
    same_as: str = ""
    """The dotted key with the same meaning in another form of the config (LiBai's, ColossalAI's)."""
    synonyms: str = ""
    """The key's names in other frameworks. A config with such a name gets a finding that names this key."""
    capitals: str = ""
    """Names in capitals that ColossalAI's programs read at the top level; other names in capitals are the author's."""
    deepspeed: str = ""
    """The dotted keys of DeepSpeed's config that this key determines."""


_NOTHING = KeyFacts()


def key(*, default: Any = MISSING, default_factory: Any = MISSING, **facts: Any) -> Any:
    """Declare a key of a section: its default, and its facts as keyword arguments (the fields of `KeyFacts`)."""
    return field(default=default, default_factory=default_factory, metadata={"facts": KeyFacts(**facts)})


def facts_of(item: Field[Any]) -> KeyFacts:
    """Return the facts with which a key was declared."""
    found: KeyFacts = item.metadata.get("facts", _NOTHING)
    return found


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, key))
    def section(cls: Class) -> Class:
        """Make a section of `cls`: a frozen, keyword-only dataclass."""
        ...

else:

    def section(cls):
        """Make a section of `cls`: a frozen, keyword-only dataclass, with the same three methods as all sections.

        They do what those of `dataclass` do, which generates them anew for each class: a tenth of lint's start.
        """
        cls.__eq__, cls.__hash__, cls.__repr__ = _equal, _hash, _text
        return dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)


def _values(made: Any) -> tuple[object, ...]:
    return tuple(getattr(made, item.name) for item in fields(made))


def _equal(made: Any, other: object) -> bool:
    return _values(made) == _values(other) if type(other) is type(made) else NotImplemented


def _hash(made: Any) -> int:
    return hash(_values(made))


def _text(made: Any) -> str:
    shown = (f"{item.name}={getattr(made, item.name)!r}" for item in fields(made))
    return f"{type(made).__qualname__}({', '.join(shown)})"
