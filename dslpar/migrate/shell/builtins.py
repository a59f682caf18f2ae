"""The shell's own commands, as far as they change what a program receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dslpar.migrate.shell.conditions import Truth, test
from dslpar.migrate.shell.expansion import assigned_in_arithmetic
from dslpar.migrate.shell.letters import Text, Unknown, hole, joined, plain
from dslpar.migrate.shell.parser import DECLARATIONS
from dslpar.migrate.shell.syntax import Assignment, Simple
from dslpar.migrate.shell.variables import UNSET, State, Variable, unknown_variable

ENVIRONMENTS = ("activate", "bashrc", "profile", "conda.sh", "modules.sh", "init/bash", "setvars.sh")
"""Ends of the names of files that are sourced for the programs that they make available."""


class Run(Protocol):
    """The part of the interpreter that the shell's own commands use."""

    past_exits: bool
    """Whether `exit` does nothing."""

    def line(self, at: int) -> int:
        """Return the line number of a position."""

    def assign(self, assignment: Assignment, state: State) -> None:
        """Make an assignment."""

    def text(self, text: Text, state: State, at: int) -> Truth:
        """Run a text as a script."""

    def external(self, fields: list[Text], at: int, state: State) -> None:
        """Record a command that is not one of the shell's own."""

    def not_followed(self, message: str, at: int) -> None:
        """Record something that may set arguments and is not followed."""


def _declare(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    """`export`, `declare` and their kind."""
    options = "".join(plain(field)[1:] for field in fields[1:] if plain(field)[:1] == "-")
    name_of_command = plain(fields[0])
    exports = name_of_command == "export" or "x" in options
    is_local = name_of_command in ("local", "declare", "typeset") and "g" not in options
    for word in command.words[1:]:
        if isinstance(word, Assignment):
            name = word.name
            _shadow(state, name, is_local)
            run.assign(word, state)
            if set(options) & set("iAnul") and name_of_command != "export":
                state.variables[name] = unknown_variable(f"`{name_of_command} -{options}` of {name} is not evaluated")
        else:
            name = word.as_literal()
            if name.isidentifier():
                _shadow(state, name, is_local)
            if "A" in options and name.isidentifier():
                state.variables[name] = Variable(
                    ((hole(Unknown(f"{name} is an associative array", many=True)),),), True
                )
            elif name_of_command == "local" and name.isidentifier():
                state.variables[name] = UNSET
        if exports and name:
            state.exported.add(name)
    return True


def _shadow(state: State, name: str, is_local: bool) -> None:
    """Keep what a variable is outside of the function that makes it its own."""
    if is_local and state.shadowed is not None and name not in state.shadowed:
        state.shadowed[name] = state.variables.get(name)


def _unset(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    for field in fields[1:]:
        state.variables[plain(field)] = UNSET
    return True


def _eval(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    return run.text(joined(fields[1:]), state, command.at)


def _source(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    name = plain(fields[1]) if len(fields) > 1 else ""
    if not name.endswith(ENVIRONMENTS):
        shown = name.replace("\0", "...")
        message = f"{shown or 'a file'} is not read: what it sets may change arguments"
        run.not_followed(message, command.at)
    return None


def _set(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    words = [plain(field) for field in fields]
    if "--" in words:
        state.parameters = tuple(fields[words.index("--") + 1 :])
    elif "-a" in words or "allexport" in words:
        state.exports_all = True
    return True


def _shift(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    count = int(plain(fields[1])) if len(fields) > 1 and plain(fields[1]).isdigit() else 1
    if state.parameters is not None:
        state.parameters = state.parameters[count:]
    return True


def _read(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    """`read`, `mapfile` and their kind: variables whose value comes from outside."""
    for field in fields[1:]:
        if plain(field).isidentifier():
            why = f"`{plain(fields[0])}` of line {run.line(command.at)} sets it"
            state.variables[plain(field)] = Variable(((hole(Unknown(why, many=True)),),), is_array=True)
    return None


def _printf(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    words = [plain(field) for field in fields]
    if "-v" in words[:-1]:
        name = words[words.index("-v") + 1]
        state.variables[name] = unknown_variable(f"`printf` of line {run.line(command.at)} sets it")
    return True


def _test(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    words = fields[1:]
    if plain(fields[0]) == "[":
        if not words or plain(words[-1]) != "]":
            return None
        words = words[:-1]
    return test(words)


def _let(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    for field in fields[1:]:
        for name in assigned_in_arithmetic(plain(field)):
            state.variables[name] = unknown_variable(f"`let` of line {run.line(command.at)} sets it")
    return None


def _end(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    if not (plain(fields[0]) == "exit" and run.past_exits):
        state.ended = plain(fields[0])
    return None


def _run_rest(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    """`exec`, `command` and `builtin`: the rest is a command."""
    rest = fields[1:]
    if rest:
        run.external(rest, command.at, state)
        if plain(fields[0]) == "exec":
            state.ended = "exit"
    return None


def _succeed(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    return True


def _fail(run: Run, command: Simple, fields: list[Text], state: State) -> Truth:
    return False


Builtin = Callable[[Run, Simple, list[Text], State], Truth]
BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys(DECLARATIONS, _declare),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _read),
    **dict.fromkeys(("exit", "return", "break", "continue"), _end),
    **dict.fromkeys((":", "true", "echo", "umask", "ulimit", "trap", "shopt"), _succeed),
    **dict.fromkeys(("exec", "command", "builtin"), _run_rest),
    **dict.fromkeys(("[", "test"), _test),
    **dict.fromkeys(("source", "."), _source),
    "false": _fail,
    "unset": _unset,
    "eval": _eval,
    "set": _set,
    "shift": _shift,
    "printf": _printf,
    "let": _let,
}
