"""How a section declares its keys: `key(...)`, a dataclass field that carries every fact about the key.

    @section
    class Train:
        steps: PositiveInt = key(default=100, resume="reported", synonyms="train_iters max_steps")
        \"\"\"Optimizer steps.\"\"\"

What stands here is written nowhere else. From it follow the reader, the reference (docs/config.md), `dslpar config
--explain`, what a resume may change, the map to DeepSpeed's keys, and the help for keys of other frameworks: see
`dslpar.schema.keys`. That the help stands below its field comes from litgpt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dslpar.core.frozen import MISSING, Field, field, frozen
from dslpar.core.named_tuple import NamedTuple

Resume = Literal["free", "reported", "refused"]
"""What a resume says to another value; `dslpar.checkpoint.resume_policy` has the meaning of each."""
Class = TypeVar("Class", bound=type)


class KeyFacts(NamedTuple):
    """Everything about a key but its type, its default and its help; names are separated by blanks."""

    resume: Resume | None = None
    """None for a section whose keys say it themselves; of a section: for keys that it takes and does not list."""
    choices: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    """Choices that others have and dslpar has not, and why."""
    shorthand: bool = False
    """Whether a bare value in the place of the section is this key's: `pipeline=2`."""
    aliases: str = ""
    """Other names of the key in its section."""
    same_as: str = ""
    """The dotted key of another form of the config (LiBai's, ColossalAI's) that says the same."""
    synonyms: str = ""
    """What other frameworks call it: no names of ours, but a hint where somebody writes one."""
    capitals: str = ""
    """What ColossalAI's programs call it at the top level of a config; other names in capitals are the author's."""
    deepspeed: str = ""
    """The dotted keys of DeepSpeed's dict that it decides."""


_NOTHING = KeyFacts()


def key(*, default: Any = MISSING, default_factory: Callable[[], Any] | None = None, **facts: Any) -> Any:
    """Declare a key of a section: its default, and the `KeyFacts` by name."""
    return field(default=default, default_factory=default_factory, metadata={"facts": KeyFacts(**facts)})


def facts_of(item: Field) -> KeyFacts:
    """The facts that a key was declared with."""
    found: KeyFacts = item.metadata.get("facts", _NOTHING)
    return found


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, key))
    def section(cls: Class) -> Class:
        """Make a section of `cls`: a frozen, keyword-only dataclass."""
        ...

else:
    section = frozen
