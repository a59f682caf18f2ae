"""Arguments that a shell script passes to a Python program, as Megatron-LM's scripts do. Nothing is executed.

    ARGS="--num-layers 24 --hidden-size $((16 * 64))"
    torchrun pretrain_gpt.py $ARGS --fp16            # --num-layers: 24, --hidden-size: 1024, --fp16: True

Supported are assignments (`A=1`, `A+=" 2"`, arrays, `export`), `$A`, `${A}`, `${A[@]}`, `${A:-1}`, arithmetic on whole
numbers, quotes, comments and here-documents. Values that only a shell knows (`$1`, `$(hostname)`, a variable set in a
branch) are unknown. A value that contains an unknown value is unknown too. Every character keeps its position in the
script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dslpar.core.errors import Finding, Location
from dslpar.language.errors import finding
from dslpar.language.load import Config
from dslpar.language.tree import Node
from dslpar.language.yaml_io import scalar
from dslpar.migrate.shell_expansion import MAX_LENGTH, TooLongError, expanded, split, text_of
from dslpar.migrate.shell_words import UNKNOWN, Text, Word, lines, plain

BRANCHES = {"if": 1, "for": 1, "while": 1, "until": 1, "case": 1, "fi": -1, "done": -1, "esac": -1}
"""Words that open (1) or close (-1) a block that may run any number of times, or never."""


def load_arguments(text: str, path: str) -> tuple[Config, Mapping[str, Location]]:
    """Read the arguments of the Python program that a script starts, and the location of each argument's name.

    Of several commands, the one with the most arguments counts.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    start = Location(path)
    try:
        commands = list(_commands(text))
    except TooLongError:
        failure = finding("CFG005", start, "the expanded text of this script is too long", "write the arguments out")
        return Config(path, Node({}, start), (failure,), {path: text}, complete=False), {}
    found = max((list(_arguments(words)) for words in commands), key=len, default=[])
    if not found:
        message = "no command of this script passes arguments to a Python program"
        failure = finding("CFG009", start, message, "name a script that runs `... program.py --argument value ...`")
        return Config(path, Node({}, start), (failure,), {path: text}, complete=False), {}
    children: dict[object, Node] = {}
    unknown: list[str] = []
    places: dict[str, Location] = {}
    findings: list[Finding] = []
    for name, words in found:
        key, key_place = plain(name), _place(text, path, name)
        places[key] = key_place
        while len(words) > 1 and _is_unknown(words[-1]) and not _is_unknown(words[0]):
            place = _place(text, path, words.pop())
            findings.append(finding("CFG010", place, "the arguments that this adds are not known", "write them out"))
        if any(map(_is_unknown, words)):
            children.pop(key, None)
            unknown.append(key)
            continue
        values = [Node(scalar(plain(word)), _place(text, path, word)) for word in words]
        value = values if len(values) > 1 else values[0].value if values else True
        children[key] = Node(value, values[0].location if values else key_place, key_place)
    return Config(path, Node(children, start), tuple(findings), {path: text}, unknown=frozenset(unknown)), places


def _is_unknown(word: Text) -> bool:
    return any(letter == UNKNOWN for letter, _ in word)


def _arguments(words: list[Text]) -> Iterator[tuple[Text, list[Text]]]:
    """Yield each `--name` after the program, and the words of its value."""
    programs = [number for number, word in enumerate(words) if plain(word).endswith(".py")]
    name: Text = []
    values: list[Text] = []
    for word in words[programs[0] + 1 :] if programs else ():
        if plain(word).startswith("--") and len(word) > 2:
            if name:
                yield name, values
            letters = [letter for letter, _ in word]
            equals = letters.index("=") if "=" in letters else len(word)
            name, values = word[:equals], [word[equals + 1 :]] if equals < len(word) else []
        elif name:
            values.append(word)
    if name:
        yield name, values


def _place(text: str, path: str, word: Text) -> Location:
    offset = word[0][1] if word else 0
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return Location(path, line, column, line, column + len(word))


# Commands ---------------------------------------------------------------------------------------------------------


def _commands(script: str) -> Iterator[list[Text]]:
    """Yield the expanded words of each command, applying assignments in order."""
    variables: dict[str, list[Text]] = {}
    depth, total = 0, 0
    for words in lines(script):
        first = plain(words[0].pieces[0][1]) if words[0].pieces else ""
        depth = max(0, depth + BRANCHES.get(first, 0))
        rest = words
        while rest and (_assigned(rest[0]) or _is(rest[0], "export", "then", "else", "do", "local")):
            if match := _assigned(rest[0]):
                total += _assign(variables, match, rest[0], known=depth == 0)
                if total > MAX_LENGTH:
                    raise TooLongError
            rest = rest[1:]
        command = [made for word in rest for made in expanded(word, variables)]
        if command and plain(command[0]) == "eval":
            command = [piece for word in command[1:] for piece in split(word)]
        total += sum(map(len, command))
        if total > MAX_LENGTH:
            raise TooLongError
        yield command


def _is(word: Word, *texts: str) -> bool:
    return len(word.pieces) == 1 and word.pieces[0][0] == "text" and plain(word.pieces[0][1]) in texts


def _assigned(word: Word) -> re.Match[str] | None:
    if not word.pieces or word.pieces[0][0] == "quoted":
        return None
    return re.match(r"([A-Za-z_]\w*)(\+?)=", plain(word.pieces[0][1]))


def _assign(variables: dict[str, list[Text]], match: re.Match[str], word: Word, known: bool) -> int:
    """Make an assignment and return the length of the variable's value. The value is unknown if not `known`."""
    kind, text = word.pieces[0]
    if word.items is not None:
        made = [item for part in word.items for item in expanded(part, variables)]
    else:
        pieces = [(kind, text[match.end() :]), *word.pieces[1:]]
        made = [[letter for piece in pieces for letter in text_of(piece, variables)]]
    if not known:
        made = [[(UNKNOWN, text[0][1])]]
    name, adds = match[1], bool(match[2])
    old = variables.get(name, []) if adds else []
    variables[name] = [old[-1] + made[0]] if adds and word.items is None and old else [*old, *made]
    return sum(map(len, variables[name]))
