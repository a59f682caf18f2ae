"""Variables that a command may set, found without following it: those of a loop are unknown after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslpar.migrate.shell.expansion import assigned_in_arithmetic
from dslpar.migrate.shell.parser import DECLARATIONS
from dslpar.migrate.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Case,
    Command,
    For,
    Function,
    If,
    Loop,
    Pipeline,
    Sequence,
    Simple,
    Subshell,
    Word,
)

_SETTERS = ("read", "mapfile", "readarray", "getopts", "unset", "printf", "let", *DECLARATIONS)


def assigned(command: Command, functions: Mapping[str, Command], seen: frozenset[str] = frozenset()) -> set[str] | None:
    """Return the variables that a command may set; None for any variable."""
    names: set[str] = set()
    for part in _parts(command):
        if isinstance(part, Simple):
            names |= {assignment.name for assignment in part.assignments}
            names |= {word.name for word in part.words if isinstance(word, Assignment)}
            words = [word.as_literal() for word in part.words if isinstance(word, Word)]
            first = words[0] if words else ""
            if first in ("eval", "source", "."):
                return None
            if first in _SETTERS:
                names |= {word for word in words[1:] if word.isidentifier()}
                names |= {name for word in words for name in assigned_in_arithmetic(word)}
            if first in functions and first not in seen:
                below = assigned(functions[first], functions, seen | {first})
                if below is None:
                    return None
                names |= below
        elif isinstance(part, For):
            names.add(part.name)
        elif isinstance(part, Loop):
            names |= part.names
        elif isinstance(part, ArithmeticCommand):
            shown = "".join(letter.char for piece in part.expression.pieces for letter in getattr(piece, "text", ()))
            names |= set(assigned_in_arithmetic(shown))
    return names


def _parts(command: Command) -> Iterator[Command]:
    """Yield a command and all commands within it."""
    yield command
    below: tuple[Command | None, ...] = ()
    if isinstance(command, (Sequence, Pipeline)):
        below = command.commands
    elif isinstance(command, AndOr):
        below = (command.left, command.right)
    elif isinstance(command, If):
        below = (command.condition, command.then, command.otherwise)
    elif isinstance(command, Loop):
        below = (command.condition, command.body)
    elif isinstance(command, (For, Subshell, Function)):
        below = (command.body,)
    elif isinstance(command, Case):
        below = tuple(body for _, body, _ in command.clauses)
    for part in below:
        if part is not None:
            yield from _parts(part)
