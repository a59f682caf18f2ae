"""Arguments that a shell script passes to a Python program, as Megatron-LM's scripts do. Nothing is executed.

    ARGS="--num-layers 24 --hidden-size $((16 * 64))"
    torchrun pretrain_gpt.py $ARGS --fp16            # --num-layers: 24, --hidden-size: 1024, --fp16: True

The script is parsed as bash parses it, and followed through its branches. Values that only a running shell knows (`$1`,
`$(hostname)`, what a branch sets) are unknown, with a finding; so is a place where arguments may be missing. Every
character keeps its position in the script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import Finding, Location
from dslpar.language.errors import finding
from dslpar.language.load import Config
from dslpar.language.tree import Node
from dslpar.language.yaml_io import scalar
from dslpar.migrate.known_arguments import ANY_NUMBER, SWITCH, Known, known_arguments
from dslpar.migrate.shell.expansion import TooLongError
from dslpar.migrate.shell.interpreter import Interpreter
from dslpar.migrate.shell.launches import Launch, launches
from dslpar.migrate.shell.letters import HOLE, Text, Unknown, first_unknown, is_known, letters, plain
from dslpar.migrate.shell.parser import ShellSyntaxError

MISSING = "arguments may be missing here"


class Argument(NamedTuple):
    """Name of an argument as written, and the words after it."""

    name: Text
    values: tuple[Text, ...]

    @property
    def key(self) -> str:
        return plain(self.name)


class ScriptError(Exception):
    """The arguments of a script cannot be read at all; `finding` says why."""

    def __init__(self, problem: Finding) -> None:
        super().__init__(problem.message)
        self.finding = problem


Places = Mapping[str, tuple[Location, Location]]


def load_arguments(text: str, path: str, has_switches: bool = True) -> tuple[Config, Places]:
    """Read the arguments of the Python program that a script starts, with two locations each.

    They are those of the argument's name and, if its value is unknown, of the expansion that makes it so.

    Of several launches, the one with the most arguments counts. `has_switches`: whether the numbers of values are those
    of Megatron's arguments.
    """
    script = Script(text, path)
    try:
        run, launch, others = script.launch()
    except ScriptError as error:
        return Config(path, Node({}, Location(path)), (error.finding,), {path: script.text}, complete=False), {}
    reader = _Reader(script, known_arguments() if has_switches else {})
    if all(letter.unknown and letter.unknown.many for letter in launch.program_word):
        reader.without_name(launch.program_word)
    for argument in reader.split(launch):
        reader.read(argument)
    reader.findings += script.others(launch, others)
    reader.findings += [
        finding("CFG010", script.place(unread.at, unread.length), unread.message, "write out what it sets")
        for unread in run.unread
    ]
    root = Node(reader.children, Location(path))
    unknown = frozenset(reader.unknown)
    return Config(path, root, tuple(reader.findings), {path: script.text}, unknown=unknown), reader.places


class Script:
    """Text of a script, and the locations in it."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text.replace("\r\n", "\n").replace("\r", "\n"), path

    def place(self, at: int, length: int = 1) -> Location:
        """Return the location of some letters of the script."""
        at = max(at, 0)
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        return Location(self.path, line, column, line, column + length)

    def place_of(self, text: Text) -> Location:
        """Return the location of a word."""
        return self.place(text[0].at if text else 0, len(text))

    def launch(self) -> tuple[Interpreter, Launch, list[Launch]]:
        """Return the launch with the most arguments, and the others. Raises ScriptError."""
        run = self.follow(past_exits=False)
        every = launches(run.started)
        if not any(map(_has_arguments, every)):  # perhaps it ends because it is not called as it should be
            run = self.follow(past_exits=True)
            every = launches(run.started)
        found = list(filter(_has_arguments, every))
        if not found:
            raise ScriptError(self.no_launch(run))
        chosen = max(found, key=lambda launch: (launch.is_python, sum(map(_is_name, launch.words))))
        return run, chosen, [launch for launch in every if launch is not chosen]

    def no_launch(self, run: Interpreter) -> Finding:
        """Return the finding of a script that starts no program, or one that is unknown."""
        for command in run.started:
            unknown = first_unknown(command.words[0])
            if unknown is not None:
                place = self.place(unknown.at, max(unknown.length, 1))
                return finding("CFG009", place, f"this command is not known: {_because(unknown)}", "write it out here")
        message = "no command of this script passes arguments to a Python program"
        hint = "name a script that runs `... program.py --argument value ...`"
        return finding("CFG009", Location(self.path), message, hint)

    def follow(self, past_exits: bool) -> Interpreter:
        """Follow the script. Raises ScriptError."""
        run = Interpreter(letters(self.text), past_exits)
        try:
            run.run()
        except ShellSyntaxError as error:
            message = f"bash cannot parse this script: {error.message}"
            raise ScriptError(finding("CFG001", self.place(error.index), message, "correct the syntax")) from None
        except (TooLongError, RecursionError):
            message = "the expanded text of this script is too long, or nested too deeply"
            raise ScriptError(finding("CFG005", Location(self.path), message, "write the arguments out")) from None
        return run

    def others(self, chosen: Launch, launches_: Sequence[Launch]) -> Iterator[Finding]:
        """Yield a finding for each other launch of the same program with other arguments."""
        words = [plain(word) for word in chosen.words]
        places: set[int] = set()
        for launch in launches_:
            if launch.program == chosen.program and [plain(word) for word in launch.words] != words:
                if launch.at in places:
                    continue
                places.add(launch.at)
                where = f"than on line {self.place(chosen.at).line}" if launch.at != chosen.at else "each time"
                message = f"this starts {chosen.program} with other arguments {where}: they are not in the result"
                hint = "import a script of its own that has only this command"
                yield finding("CFG010", self.place(launch.at), message, hint)


def _is_name(word: Text) -> bool:
    """Return whether a word names an argument; argparse takes one with a blank for a value.

    `--$TYPE` names an argument that is not known, so that arguments may be missing there.
    """
    shown = plain(word)
    is_known_name = HOLE not in shown.partition("=")[0]
    return shown.startswith("--") and len(shown) > 2 and is_known_name and " " not in shown


def _has_arguments(launch: Launch) -> bool:
    """Return whether a program receives arguments, or perhaps some that are unknown."""
    return any(_is_name(word) or not is_known(word) for word in (launch.program_word, *launch.words))


class _Reader:
    """Collects the arguments of one launch."""

    def __init__(self, script: Script, known: Mapping[str, Known]) -> None:
        self.script, self.known = script, known
        self.children: dict[object, Node] = {}
        self.unknown: list[str] = []
        self.places: dict[str, tuple[Location, Location]] = {}
        self.findings: list[Finding] = []

    def split(self, launch: Launch) -> Iterator[Argument]:
        """Yield the arguments among the words that a program receives."""
        name: Text = ()
        values: list[Text] = []
        for word in launch.words:
            if _is_name(word):
                if name:
                    yield Argument(name, tuple(values))
                shown = plain(word)
                equals = shown.find("=") if "=" in shown else len(word)
                name, values = word[:equals], [word[equals + 1 :]] if equals < len(word) else []
            elif name:
                values.append(word)
            else:
                self.without_name(word)
        if name:
            yield Argument(name, tuple(values))

    def read(self, argument: Argument) -> None:
        """Record an argument, and a finding for each word that does not belong to it."""
        key, place = argument.key, self.script.place_of(argument.name)
        values, rest = self.own_values(argument)
        for word in rest:
            self.without_name(word)
        self.places[key] = (place, place)
        if key in self.unknown:
            self.unknown.remove(key)
        if any(not is_known(value) for value in values):
            self.children.pop(key, None)
            self.unknown.append(key)
            value = next(value for value in values if not is_known(value))
            unknown = next(letter.unknown for letter in value if letter.unknown)
            where = self.place_of(unknown)
            self.places[key] = (place, where)
            # A part of a path is hardly several words.
            more = f"; {MISSING}" if unknown.many and (len(value) == 1 or unknown.choices) else ""
            message = f"{_because(unknown)}: write the value here{more}"
            self.findings.append(finding("CFG010", where, message, "write the value here"))
            return
        nodes = [Node(scalar(plain(value)), self.script.place_of(value)) for value in values]
        made = nodes if len(nodes) > 1 else nodes[0].value if nodes else True
        self.children[key] = Node(made, nodes[0].location if nodes else place, place)

    def own_values(self, argument: Argument) -> tuple[list[Text], list[Text]]:
        """Divide the words after a name into its values and words that are nobody's."""
        # A backslash before a blank is meant to continue a line.
        words = [word for word in argument.values if plain(word) != "\\"]
        known = self.known.get(argument.key)
        if known is not None and known.values == SWITCH:
            takes = 1 if words and plain(words[0]).lower() in ("true", "false") else 0
        elif known is not None and known.values not in ANY_NUMBER:
            takes = 1
        else:
            takes = next((index for index, word in enumerate(words) if index and not is_known(word)), len(words))
            if known is None and words and _adds_arguments(words[0]):
                takes = 0
        return words[:takes], words[takes:]

    def without_name(self, word: Text) -> None:
        """Record a finding for a word that is not the value of an argument."""
        unknown = first_unknown(word)
        if unknown is None:
            message = f"{plain(word)!r} is not the value of an argument"
            self.findings.append(finding("CFG010", self.script.place_of(word), message, "leave it out"))
            return
        message = f"{MISSING}: {_because(unknown)}"
        self.findings.append(finding("CFG010", self.place_of(unknown), message, "write them out"))

    def place_of(self, unknown: Unknown) -> Location:
        """Return the location of the expansion that is unknown."""
        return self.script.place(unknown.at, max(unknown.length, 1))


def _adds_arguments(word: Text) -> bool:
    """Return whether an unknown word holds whole arguments, by its choices."""
    unknown = first_unknown(word)
    if unknown is None or not unknown.choices:
        return False
    return all(not choice or choice.startswith("--") for choice in unknown.choices)


def _because(unknown: Unknown) -> str:
    """Return the reason with the choices."""
    if not unknown.choices:
        return unknown.why
    return f"{unknown.why}: {' or '.join(repr(choice) if choice else 'nothing' for choice in unknown.choices)}"
