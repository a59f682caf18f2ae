"""Syntax tree of a shell script. `dslpar.migrate.shell.parser` makes it, and `interpreter` walks it."""

from __future__ import annotations

from typing import NamedTuple, Union

from dslpar.migrate.shell.letters import Text

# Words ------------------------------------------------------------------------------------------------------------


class Literal(NamedTuple):
    """Characters outside of quotes."""

    text: Text


class Quoted(NamedTuple):
    """Characters in single quotes, or after a backslash."""

    text: Text


class DoubleQuoted(NamedTuple):
    """Pieces in double quotes."""

    pieces: tuple[Piece, ...]


class Parameter(NamedTuple):
    """`$NAME`, or `${NAME...}` with an operator."""

    name: str
    at: int
    length: int
    """Number of characters in the script."""
    subscript: Word | None = None
    operator: str = ""
    """":-", "#", "/" and so on; "len" for `${#NAME}`, "other" for one that is not evaluated."""
    argument: Word | None = None


class Arithmetic(NamedTuple):
    """`$((...))`."""

    expression: Word
    at: int
    length: int


class Substitution(NamedTuple):
    """`$(...)`, backticks or `<(...)`: the output of commands, which are not run."""

    source: str
    at: int


class Placeholder(NamedTuple):
    """`<Specify path>`: text that the script's author left for others to fill in. bash takes it for redirections."""

    source: str
    at: int


Piece = Union[Literal, Quoted, DoubleQuoted, Parameter, Arithmetic, Substitution, Placeholder]  # noqa: UP007


class Word(NamedTuple):
    """Unexpanded word."""

    pieces: tuple[Piece, ...]
    at: int

    def as_literal(self) -> str:
        """Return the characters of a word without quotes and expansions; empty for any other word."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], Literal):
            return "".join(letter.char for letter in self.pieces[0].text)
        return ""


# Commands ---------------------------------------------------------------------------------------------------------


class Assignment(NamedTuple):
    """`NAME=value`, `NAME+=value`, `NAME=(items)` or `NAME[index]=value`."""

    name: str
    value: Word | tuple[Word, ...]
    append: bool
    indexed: bool
    at: int


class Simple(NamedTuple):
    """Assignments, then the words of a command."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    """Arguments of `export` and its kind may be assignments."""
    at: int


class Pipeline(NamedTuple):
    """Commands joined by `|`."""

    commands: tuple[Command, ...]
    negated: bool
    at: int


class AndOr(NamedTuple):
    """Two commands joined by `&&` or `||`."""

    left: Command
    operator: str
    right: Command
    at: int


class Sequence(NamedTuple):
    """Commands one after the other."""

    commands: tuple[Command, ...]
    at: int


class Subshell(NamedTuple):
    """`(...)`, or a command in the background."""

    body: Command
    at: int


class If(NamedTuple):
    """`if`, with a nested `If` for each `elif`."""

    condition: Command
    then: Command
    otherwise: Command | None
    at: int


class Loop(NamedTuple):
    """`while`, `until`, `select`, or `for ((...))`."""

    kind: str
    condition: Command | None
    body: Command
    names: frozenset[str]
    """Variables that the head sets."""
    at: int


class For(NamedTuple):
    """`for NAME in words`; without `in`, over the positional parameters."""

    name: str
    words: tuple[Word, ...] | None
    body: Command
    at: int


class Case(NamedTuple):
    """`case WORD in`, with the patterns, the body and the end (`;;`, `;&`, `;;&`) of each clause."""

    word: Word
    clauses: tuple[tuple[tuple[Word, ...], Command, str], ...]
    at: int


class Function(NamedTuple):
    """Definition of a function."""

    name: str
    body: Command
    at: int


class ArithmeticCommand(NamedTuple):
    """`((...))`."""

    expression: Word
    at: int


class Test(NamedTuple):
    """`[[ ... ]]`: its words and operators; a string is an operator."""

    tokens: tuple[Word | str, ...]
    at: int


Command = Union[  # noqa: UP007
    Simple, Pipeline, AndOr, Sequence, Subshell, If, Loop, For, Case, Function, ArithmeticCommand, Test
]
