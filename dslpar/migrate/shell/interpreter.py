"""Follow a script through its branches and collect the commands that start programs. Nothing is executed.

    OPTIONS=(--num-layers 24)
    if [ "$FP8" = 1 ]; then OPTIONS+=(--fp8-format hybrid); fi      # FP8 is not set here: both branches are followed
    eval "torchrun pretrain_gpt.py ${OPTIONS[*]}"                   # --num-layers 24, then one unknown word

Where a condition is unknown, both branches are followed and a variable keeps what they have in common
(`variables.either`). A branch that exits is left out, since it starts no program afterwards. A loop over known words is
followed word by word; the variables of any other loop are unknown after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dslpar.migrate.shell.assigned import assigned
from dslpar.migrate.shell.builtins import BUILTINS
from dslpar.migrate.shell.conditions import Truth, both, extended_test, inverted, one_of
from dslpar.migrate.shell.expansion import Budget, Expander, TooLongError
from dslpar.migrate.shell.letters import Text, Unknown, hole, is_known, plain, unquoted
from dslpar.migrate.shell.parser import ShellSyntaxError, parse
from dslpar.migrate.shell.patterns import matches
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
    Substitution,
    Test,
    Word,
)
from dslpar.migrate.shell.variables import State, Variable, arrived, either, text_variable, unknown_variable

MAX_STEPS = 20_000
MAX_CALLS = 30
"""Maximum depth of functions, `eval` and `bash -c` within each other."""
SHELLS = ("sh", "bash", "dash", "ksh", "zsh")


class Started(NamedTuple):
    """Command of a script that is not one of the shell's own."""

    words: tuple[Text, ...]
    at: int


class Unread(NamedTuple):
    """Something in the script that is not followed, and may set arguments."""

    message: str
    at: int
    length: int


class Interpreter:
    """Walk through the commands of a script."""

    def __init__(self, script: Text, past_exits: bool = False) -> None:
        self.script = script
        self.ends_of_lines = [index for index, letter in enumerate(script) if letter.char == "\n"]
        self.past_exits = past_exits
        """Whether `exit` does nothing, so that what follows is read too."""
        self.budget, self.steps, self.calls = Budget(), 0, 0
        self.started: list[Started] = []
        self.unread: list[Unread] = []

    def run(self) -> None:
        """Follow the whole script. Raises ShellSyntaxError and TooLongError."""
        self.execute(parse(self.script), State())

    def line(self, at: int) -> int:
        """Return the line number of a position."""
        return bisect_left(self.ends_of_lines, at) + 1

    def execute(self, command: Command, state: State) -> Truth:
        """Change the state as a command does, and return whether it succeeds."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLongError
        if state.ended:
            return None
        return _EXECUTE[type(command)](self, command, state)

    # Compound commands ---------------------------------------------------------------------------------------

    def sequence(self, command: Sequence, state: State) -> Truth:
        status: Truth = True
        for part in command.commands:
            if state.ended:
                break
            status = self.execute(part, state)
        return status

    def pipeline(self, command: Pipeline, state: State) -> Truth:
        if len(command.commands) == 1:
            return inverted(self.execute(command.commands[0], state))
        statuses = [self.execute(part, state.copy()) for part in command.commands]
        return inverted(statuses[-1]) if command.negated else statuses[-1]

    def subshell(self, command: Subshell, state: State) -> Truth:
        return self.execute(command.body, state.copy())

    def and_or(self, command: AndOr, state: State) -> Truth:
        left = self.execute(command.left, state)
        if left is not None:
            runs = left is (command.operator == "&&")
            return self.execute(command.right, state) if runs and not state.ended else left
        other = state.copy()
        other.escapes = []
        right = self.execute(command.right, other)
        why = f"`{command.operator}` of line {self.line(command.at)} decides"
        escapes, state.escapes = state.escapes, []
        made = either(other, state, why)
        made.escapes += escapes
        state.become(made)
        return both(left, right) if command.operator == "&&" else one_of(left, right)

    def conditional(self, command: If, state: State) -> Truth:
        condition = self.execute(command.condition, state)
        if state.ended:
            return None
        if condition is not None:
            branch = command.then if condition else command.otherwise
            return self.execute(branch, state) if branch is not None else True
        why = f"`if` of line {self.line(command.at)} decides"
        if command.otherwise is None:
            return self.both_branches([command.then], True, why, state)
        return self.both_branches([command.then, command.otherwise], False, why, state)

    def both_branches(self, branches: list[Command], may_skip: bool, why: str, state: State) -> Truth:
        """Follow branches of which one runs, or none if `may_skip`."""
        escapes, state.escapes = state.escapes, []
        ends: list[State] = []
        for branch in branches:
            ends.append(state.copy())
            self.execute(branch, ends[-1])
        if may_skip:
            ends.append(state.copy())
        made = ends.pop()
        while ends:
            made = either(ends.pop(), made, why)
        made.escapes += escapes
        state.become(made)
        return None

    def case(self, command: Case, state: State) -> Truth:
        text = Expander(state, self.budget).text(command.word)
        bodies: list[Command] = []
        falls_through = any(end in (";&", ";;&") for _, _, end in command.clauses)
        ends_with_all = False
        for words, body, _ in command.clauses:
            wanted = [Expander(state, self.budget).pattern(word) for word in words]
            if is_known(text) and not falls_through and None not in wanted:
                if any(matches(pattern, plain(text)) for pattern in wanted if pattern is not None):
                    if not bodies:
                        return self.execute(body, state)
                    bodies.append(body)
                    ends_with_all = True
                    break
                continue
            bodies.append(body)
            ends_with_all = "*" in wanted
        if not bodies:
            return True
        return self.both_branches(bodies, not ends_with_all, f"`case` of line {self.line(command.at)} decides", state)

    def for_loop(self, command: For, state: State) -> Truth:
        if command.words is None:
            items = state.parameters
        else:
            items = tuple(field for word in command.words for field in Expander(state, self.budget).fields(word))
        why = f"`for` of line {self.line(command.at)} sets it"
        if items is None or any(letter.unknown and letter.unknown.many for item in items for letter in item):
            choices = () if items is None else tuple(plain(item) for item in items if is_known(item))
            state.variables[command.name] = unknown_variable(
                why, choices if items and len(choices) == len(items) else ()
            )
            return self.repeated(command.body, state, why)
        around, state.escapes = state.escapes, []
        broken: list[State] = []
        for item in items:
            state.variables[command.name] = text_variable(item)
            self.execute(command.body, state)
            broken += [path for path in (state, *state.escapes) if path.ended == "break"]
            state.escapes = [path for path in state.escapes if path.ended != "break"]
            state.become(arrived(state, ("continue",), why))
            if state.ended:
                break
        if broken:
            kept = state.copy()
            kept.escapes = [*state.escapes, *broken]
            state.become(arrived(kept, ("break",), why))
        state.escapes += around
        return None

    def loop(self, command: Loop, state: State) -> Truth:
        why = f"the loop of line {self.line(command.at)} sets it"
        if command.condition is not None and command.kind in ("while", "until"):
            first = self.execute(command.condition, state.copy())
            if first is (command.kind == "until"):
                return True
        for name in command.names:
            state.variables[name] = unknown_variable(why)
        return self.repeated(command.body, state, why)

    def repeated(self, body: Command, state: State, why: str) -> Truth:
        """Follow the body of a loop once; what it sets is unknown before and after it, since it may run any often."""
        names = assigned(body, state.functions)
        for name in state.variables if names is None else names:
            before = state.variables.get(name)
            choice = () if before is None or not all(map(is_known, before.items)) else tuple(map(plain, before.items))
            shown = f"{why} (before it: {' '.join(choice)!r})" if choice and choice != ("",) else why
            made = unknown_variable(shown)
            if before is not None and before.is_array:
                made = Variable(((hole(Unknown(shown, many=True)),),), is_array=True)
            state.variables[name] = made
        inside = state.copy()
        self.execute(body, inside)
        state.escapes += [path for path in (inside, *inside.escapes) if path.ended == "return"]
        return None

    def function(self, command: Function, state: State) -> Truth:
        state.functions[command.name] = command.body
        return True

    def test(self, command: Test, state: State) -> Truth:
        return extended_test(command.tokens, Expander(state, self.budget))

    def arithmetic(self, command: ArithmeticCommand, state: State) -> Truth:
        number = Expander(state, self.budget).number(command.expression)
        return None if isinstance(number, Unknown) else number != 0

    # Simple commands -----------------------------------------------------------------------------------------

    def simple(self, command: Simple, state: State) -> Truth:
        expander = Expander(state, self.budget)
        fields = [field for word in command.words if isinstance(word, Word) for field in expander.fields(word)]
        if not command.words or (not fields and not any(isinstance(word, Assignment) for word in command.words)):
            return self.assign_all(command.assignments, state)
        name = plain(fields[0]) if fields else ""
        inside = self.with_prefix(command.assignments, state) if command.assignments else state
        if name in BUILTINS:
            status = BUILTINS[name](self, command, fields, inside)
        elif name in state.functions:
            status = self.call(state.functions[name], tuple(fields[1:]), inside)
        else:
            self.external(fields, command.at, inside)
            return None
        if inside is not state:
            self.keep(state, inside, command.assignments)
        return status

    def with_prefix(self, assignments: tuple[Assignment, ...], state: State) -> State:
        """Return the state of a command that has assignments before it."""
        made = state.copy()
        self.assign_all(assignments, made)
        made.exported |= {assignment.name for assignment in assignments}
        return made

    def keep(self, state: State, after: State, assignments: tuple[Assignment, ...]) -> None:
        """Take over what a command did, without the assignments before its name."""
        for assignment in assignments:
            if assignment.name in state.variables:
                after.variables[assignment.name] = state.variables[assignment.name]
            else:
                after.variables.pop(assignment.name, None)
        state.become(after)

    def assign_all(self, assignments: tuple[Assignment, ...], state: State) -> Truth:
        """Make assignments; `A=$(command)` fails as the command does."""
        for assignment in assignments:
            self.assign(assignment, state)
        return True if all(map(_is_plain, assignments)) else None

    def assign(self, assignment: Assignment, state: State) -> None:
        expander = Expander(state, self.budget)
        name, value = assignment.name, assignment.value
        old = state.variables.get(name)
        if assignment.indexed:
            why = f"line {self.line(assignment.at)} sets an item of it"
            state.variables[name] = Variable(((hole(Unknown(why, many=True)),),), is_array=True)
            return
        if isinstance(value, Word):
            text = expander.text(value)
            if not assignment.append:
                state.variables[name] = text_variable(text)
            elif old is not None and old.items:
                state.variables[name] = old._replace(items=(old.items[0] + text, *old.items[1:]))
            else:
                before: Text = () if old is not None else (hole(Unknown(f"the script does not set {name} before")),)
                state.variables[name] = text_variable(before + text)
            self.budget.take(len(text))
            return
        items = [field for word in value for field in expander.fields(word)]
        if assignment.append:
            items = [*(old.items if old is not None else ()), *items]
        self.budget.take(sum(map(len, items)))
        state.variables[name] = Variable(tuple(items), is_array=True)

    def call(self, body: Command, arguments: tuple[Text, ...], state: State) -> Truth:
        """Run a function's body with its arguments as `$1`, `$2`..."""
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise TooLongError
        parameters, shadowed, around = state.parameters, state.shadowed, state.escapes
        state.parameters, state.shadowed, state.escapes = arguments, {}, []
        status = self.execute(body, state)
        state.become(arrived(state, ("return",), "a `return` decides"))
        for name, value in (state.shadowed or {}).items():
            if value is None:
                state.variables.pop(name, None)
            else:
                state.variables[name] = value
        state.parameters, state.shadowed = parameters, shadowed
        state.escapes += around
        self.calls -= 1
        return status

    def text(self, text: Text, state: State, at: int) -> Truth:
        """Run a text as a script, as `eval` and `bash -c` do."""
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise TooLongError
        status: Truth = None
        try:
            commands = parse(tuple(map(unquoted, text)))  # what is unknown may be several words of this script
        except ShellSyntaxError as error:
            shown = plain(text)[:40].replace("\0", "...")
            self.not_followed(f"bash cannot parse what is run here ({error.message}): {shown}", at)
        else:
            status = self.execute(commands, state)
        self.calls -= 1
        return status

    def not_followed(self, message: str, at: int) -> None:
        """Record something that may set arguments and is not followed."""
        self.unread.append(Unread(message, at, 1))

    def external(self, fields: list[Text], at: int, state: State) -> None:
        """Record a command, or run the script that it hands to `bash -c`."""
        script = _script_of_shell(fields)
        if script is None:
            self.started.append(Started(tuple(fields), at))
            return
        inside = State()
        exported = set(state.variables) if state.exports_all else state.exported
        inside.variables = {name: value for name, value in state.variables.items() if name in exported}
        inside.exported = set(state.exported)
        inside.parameters = tuple(fields[script + 2 :])
        self.text(fields[script], inside, at)


def _is_plain(assignment: Assignment) -> bool:
    words = (assignment.value,) if isinstance(assignment.value, Word) else assignment.value
    return not any(isinstance(piece, Substitution) for word in words for piece in word.pieces)


def _script_of_shell(fields: list[Text]) -> int | None:
    """Return the index of the script in `bash -c SCRIPT`, which other words, such as srun's, may precede."""
    for index, field in enumerate(fields):
        word = plain(field)
        if word.endswith(".py"):
            return None
        if word.rpartition("/")[2] in SHELLS:
            at = index + 1
            while at < len(fields) and plain(fields[at])[:1] in ("-", "+"):
                if plain(fields[at])[0] == "-" and "c" in plain(fields[at]) and not plain(fields[at]).startswith("--"):
                    return at + 1 if at + 1 < len(fields) else None
                at += 1
    return None


_EXECUTE: Mapping[type, Callable[[Interpreter, Any, State], Truth]] = {
    Sequence: Interpreter.sequence,
    Pipeline: Interpreter.pipeline,
    Subshell: Interpreter.subshell,
    AndOr: Interpreter.and_or,
    If: Interpreter.conditional,
    Case: Interpreter.case,
    For: Interpreter.for_loop,
    Loop: Interpreter.loop,
    Function: Interpreter.function,
    Test: Interpreter.test,
    ArithmeticCommand: Interpreter.arithmetic,
    Simple: Interpreter.simple,
}
