"""Variables of a shell, and what they are after two branches of which either may have run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dslpar.migrate.shell.letters import Letter, Text, Unknown, first_unknown, hole, plain
from dslpar.migrate.shell.syntax import Command

BLANKS = " \t\n"
MAX_CHOICES = 8
"""Maximum number of texts that a message lists."""


class Variable(NamedTuple):
    """Value of a variable."""

    items: tuple[Text, ...]
    """One text, or the items of an array."""
    is_array: bool = False
    is_set: bool = True
    """False after `unset`."""


UNSET = Variable((), is_set=False)


def text_variable(text: Text) -> Variable:
    """Return a variable that is not an array."""
    return Variable((text,))


def unknown_variable(why: str, choices: tuple[str, ...] = ()) -> Variable:
    """Return a variable of which nothing is known. Its letters get their position where it is used."""
    return Variable(((hole(Unknown(why, choices=choices)),),))


class State:
    """Variables, functions and parameters of a shell at a command."""

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.exported: set[str] = set()
        self.exports_all = False
        """Whether `set -a` exports every variable."""
        self.functions: dict[str, Command] = {}
        self.parameters: tuple[Text, ...] | None = None
        """`$1`, `$2`... of a function or of `set --`; None for those of the script, which are unknown."""
        self.shadowed: dict[str, Variable | None] | None = None
        """What a function's local variables were outside of it; None outside of functions."""
        self.ended = ""
        """The word that ended this path: "exit", "return", "break" or "continue"; empty while it goes on."""
        self.escapes: list[State] = []
        """Paths that ended by `return`, `break` or `continue` and join this one where that word leads."""

    def copy(self) -> State:
        """Return an independent copy for a branch, without escapes."""
        made = State()
        made.variables = dict(self.variables)
        made.exported = set(self.exported)
        made.functions = dict(self.functions)
        made.exports_all, made.parameters, made.ended = self.exports_all, self.parameters, self.ended
        made.shadowed = None if self.shadowed is None else dict(self.shadowed)
        return made

    def become(self, other: State) -> None:
        """Take over everything of another state."""
        self.__dict__.update(other.__dict__)


def either(first: State, second: State, why: str) -> State:
    """Return the state after two branches, of which only one runs. `why` names what decides."""
    escapes = [*first.escapes, *second.escapes]
    escapes += [path for path in (first, second) if path.ended not in ("", "exit")]
    going_on = [path for path in (first, second) if not path.ended]
    if len(going_on) == 2:
        made = _mixed(first, second, why)
    else:  # a path that exits starts no program afterwards
        made = (going_on or [first])[0].copy()
        made.ended = "" if going_on else "exit"
    made.escapes = escapes
    return made


def arrived(state: State, words: tuple[str, ...], why: str) -> State:
    """Return the state where paths that ended by one of the words (`break`, `return`) join the one that did not."""
    paths = [path for path in (state, *state.escapes) if path.ended in ("", *words)]
    others = [path for path in state.escapes if path.ended not in words]
    if not paths:
        return state
    made = paths[0].copy()
    for path in paths[1:]:
        made = _mixed(made, path, why)
    made.ended, made.escapes = "", others
    return made


def _mixed(first: State, second: State, why: str) -> State:
    made = first.copy()
    made.exported |= second.exported
    made.exports_all |= second.exports_all
    if made.shadowed is not None:
        made.shadowed = {**(second.shadowed or {}), **made.shadowed}
    made.functions |= second.functions
    if first.parameters != second.parameters:
        made.parameters = None
    for name in {**first.variables, **second.variables}:
        made.variables[name] = mixed(first.variables.get(name), second.variables.get(name), why)
    return made


def mixed(first: Variable | None, second: Variable | None, why: str) -> Variable:
    """Return what is known of a variable that has one of two values; None stands for one that the script never set."""
    if first is not None and second is not None:
        if first is second or (_same(first.items, second.items) and first[1:] == second[1:]):
            return first
        if first.is_array and second.is_array:
            return Variable(_mixed_items(first.items, second.items, why), is_array=True)
        if not (first.is_array or second.is_array) and first.is_set and second.is_set:
            return text_variable(_mixed_text(first.items[0], second.items[0], why))
    return unknown_variable(why, _listed(*_choices(first), *_choices(second)))


def _choices(variable: Variable | None) -> tuple[str, ...]:
    if variable is None or not variable.is_set:
        return ("",)
    return _of_texts(variable.items)


def _same(first: Sequence[Text], second: Sequence[Text]) -> bool:
    if len(first) != len(second):
        return False
    return all(map(_same_text, first, second))


def _same_text(first: Text, second: Text) -> bool:
    """Compare texts regardless of their positions."""
    if first is second:
        return True
    if len(first) != len(second):
        return False
    return all(a.char == b.char and a.unknown == b.unknown for a, b in zip(first, second, strict=True))


def _mixed_items(first: tuple[Text, ...], second: tuple[Text, ...], why: str) -> tuple[Text, ...]:
    """Keep the items that both arrays begin and end with; one unknown item stands for those between."""
    most = min(len(first), len(second))
    head = next((index for index in range(most) if not _same_text(first[index], second[index])), most)
    tail = next(
        (index for index in range(most - head) if not _same_text(first[-1 - index], second[-1 - index])), most - head
    )
    between = [items[head : len(items) - tail] for items in (first, second)]
    choices = _listed(*_of_texts(between[0]), *_of_texts(between[1]))
    return (*first[:head], (hole(Unknown(why, many=True, choices=choices)),), *first[len(first) - tail :])


def _of_texts(items: Sequence[Text]) -> tuple[str, ...]:
    """Return the possible texts of some items, joined by blanks: those of an earlier branch, or the known ones."""
    if len(items) == 1 and len(items[0]) == 1 and (unknown := items[0][0].unknown) and unknown.choices:
        return unknown.choices
    return (" ".join("..." if first_unknown(item) else plain(item) for item in items),)


def _mixed_text(first: Text, second: Text, why: str) -> Text:
    """Keep the words that both texts begin and end with; one unknown letter stands for what is between."""
    head = _common(first, second)
    tail = _common(first[head:][::-1], second[head:][::-1])
    between = [text[head : len(text) - tail] for text in (first, second)]
    choices = _listed(*_of_texts(between[:1]), *_of_texts(between[1:]))
    before, after = first[:head], first[len(first) - tail :]
    made = [*before, hole(Unknown(why, choices=choices)), *after]
    # What differs are whole words, even where one of the texts has none of them.
    if after and after[0].char not in BLANKS:
        made.insert(len(before) + 1, Letter(" ", after[0].at))
    if before and before[-1].char not in BLANKS:
        made.insert(len(before), Letter(" ", before[-1].at))
    return tuple(made)


def _common(first: Text, second: Text) -> int:
    """Return the length of the common beginning, up to the end of a word in both texts."""
    most = min(len(first), len(second))
    index = 0
    while index < most and first[index].char == second[index].char and first[index].unknown == second[index].unknown:
        index += 1
    if index == len(first) == len(second):
        return index
    while index and not all(_is_boundary(text, index) for text in (first, second)):
        index -= 1
    return index


def _is_boundary(text: Text, index: int) -> bool:
    """Return whether a word ends or begins at an index."""
    return index in (0, len(text)) or text[index].char in BLANKS or text[index - 1].char in BLANKS


def _listed(*choices: str) -> tuple[str, ...]:
    made = tuple(dict.fromkeys(" ".join(choice.split()) for choice in choices))
    return made if len(made) <= MAX_CHOICES else ()
