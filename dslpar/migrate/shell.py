"""Arguments that a shell script hands to a Python program, as Megatron-LM's scripts do. Nothing is run.

    ARGS="--num-layers 24 --hidden-size $((16 * 64))"
    torchrun pretrain_gpt.py $ARGS --fp16            # --num-layers: 24, --hidden-size: 1024, --fp16: True

Known are assignments (`A=1`, `A+=" 2"`, arrays, `export`), `$A`, `${A}`, `${A[@]}`, `${A:-1}`, arithmetic on whole
numbers, quotes, comments and here-documents. What only a shell can tell (`$1`, `$(hostname)`, a variable that is set in
a branch) is unknown, and so is a value made of it. Every character keeps the place where it was written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dslpar.core.errors import Finding, Location
from dslpar.language.errors import finding
from dslpar.language.load import Config
from dslpar.language.tree import Node
from dslpar.language.yaml_io import scalar

Text = list[tuple[str, int]]
"""Characters, each with its place in the script; "" for what is unknown."""
MAX_LENGTH = 400_000
"""Characters that all variables and commands may expand to."""
BRANCHES = {"if": 1, "for": 1, "while": 1, "until": 1, "case": 1, "fi": -1, "done": -1, "esac": -1}
"""Words that open and close what may run once, often or never."""
UNKNOWN = ""


class Word(NamedTuple):
    """One word of a command, before anything in it is expanded: pieces, and whether each stands in double quotes."""

    pieces: list[tuple[str, Text]]
    """Kinds: "text" and "literal" (as they are), "expand" (split at blanks) and "quoted" (expanded in one piece)."""
    items: list[Word] | None = None
    """Of an array that is assigned: what stands between its parentheses."""


class TooLongError(Exception):
    """What a script expands to is longer than MAX_LENGTH."""


def load_arguments(text: str, path: str) -> tuple[Config, Mapping[str, Location]]:
    """Read the arguments of the Python program that a script starts; of several, of the one with the most.

    Also returns where each name of an argument stands.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    start = Location(path)
    try:
        commands = list(_commands(text))
    except TooLongError:
        failure = finding("CFG005", start, "this script expands to too long a text", "write the arguments out")
        return Config(path, Node({}, start), (failure,), {path: text}, complete=False), {}
    found = max((list(_arguments(words)) for words in commands), key=len, default=[])
    if not found:
        message = "no command of this script hands arguments to a Python program"
        failure = finding("CFG009", start, message, "name a script that runs `... program.py --argument value ...`")
        return Config(path, Node({}, start), (failure,), {path: text}, complete=False), {}
    children: dict[object, Node] = {}
    unknown: list[str] = []
    places: dict[str, Location] = {}
    findings: list[Finding] = []
    for name, words in found:
        key, key_place = _plain(name), _place(text, path, name)
        places[key] = key_place
        while len(words) > 1 and _is_unknown(words[-1]) and not _is_unknown(words[0]):
            place = _place(text, path, words.pop())
            findings.append(finding("CFG010", place, "which arguments this adds is not known", "write them out"))
        if any(map(_is_unknown, words)):
            children.pop(key, None)
            unknown.append(key)
            continue
        values = [Node(scalar(_plain(word)), _place(text, path, word)) for word in words]
        value = values if len(values) > 1 else values[0].value if values else True
        children[key] = Node(value, values[0].location if values else key_place, key_place)
    return Config(path, Node(children, start), tuple(findings), {path: text}, unknown=frozenset(unknown)), places


def _is_unknown(word: Text) -> bool:
    return any(letter == UNKNOWN for letter, _ in word)


def _arguments(words: list[Text]) -> Iterator[tuple[Text, list[Text]]]:
    """Yield each `--name` behind the program, and the words of its value."""
    programs = [number for number, word in enumerate(words) if _plain(word).endswith(".py")]
    name: Text = []
    values: list[Text] = []
    for word in words[programs[0] + 1 :] if programs else ():
        if _plain(word).startswith("--") and len(word) > 2:
            if name:
                yield name, values
            letters = [letter for letter, _ in word]
            equals = letters.index("=") if "=" in letters else len(word)
            name, values = word[:equals], [word[equals + 1 :]] if equals < len(word) else []
        elif name:
            values.append(word)
    if name:
        yield name, values


def _plain(text: Text) -> str:
    return "".join(letter for letter, _ in text)


def _place(text: str, path: str, word: Text) -> Location:
    offset = word[0][1] if word else 0
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return Location(path, line, column, line, column + len(word))


# Commands ---------------------------------------------------------------------------------------------------------


def _commands(script: str) -> Iterator[list[Text]]:
    """Yield the words of each command, expanded; assignments are made on the way."""
    variables: dict[str, list[Text]] = {}
    depth, total = 0, 0
    for words in _lines(script):
        first = _plain(words[0].pieces[0][1]) if words[0].pieces else ""
        depth = max(0, depth + BRANCHES.get(first, 0))
        rest = words
        while rest and (_assigned(rest[0]) or _is(rest[0], "export", "then", "else", "do", "local")):
            if match := _assigned(rest[0]):
                total += _assign(variables, match, rest[0], known=depth == 0)
                if total > MAX_LENGTH:
                    raise TooLongError
            rest = rest[1:]
        expanded = [made for word in rest for made in _expanded(word, variables)]
        if expanded and _plain(expanded[0]) == "eval":
            expanded = [piece for word in expanded[1:] for piece in _split(word)]
        total += sum(map(len, expanded))
        if total > MAX_LENGTH:
            raise TooLongError
        yield expanded


def _is(word: Word, *texts: str) -> bool:
    return len(word.pieces) == 1 and word.pieces[0][0] == "text" and _plain(word.pieces[0][1]) in texts


def _assigned(word: Word) -> re.Match[str] | None:
    if not word.pieces or word.pieces[0][0] == "quoted":
        return None
    return re.match(r"([A-Za-z_]\w*)(\+?)=", _plain(word.pieces[0][1]))


def _assign(variables: dict[str, list[Text]], match: re.Match[str], word: Word, known: bool) -> int:
    """Make an assignment; returns the length of the value."""
    kind, text = word.pieces[0]
    if word.items is not None:
        made = [item for part in word.items for item in _expanded(part, variables)]
    else:
        pieces = [(kind, text[match.end() :]), *word.pieces[1:]]
        made = [[letter for piece in pieces for letter in _text_of(piece, variables)]]
    if not known:
        made = [[(UNKNOWN, text[0][1])]]
    name, adds = match[1], bool(match[2])
    old = variables.get(name, []) if adds else []
    variables[name] = [old[-1] + made[0]] if adds and word.items is None and old else [*old, *made]
    return sum(map(len, variables[name]))


# Words ------------------------------------------------------------------------------------------------------------


def _lines(script: str) -> Iterator[list[Word]]:
    """Yield the words of each simple command, unexpanded."""
    reader = _Reader(script)
    while reader.left():
        words = reader.command()
        if words:
            yield words


_REDIRECTION = re.compile(r"(?:\d*(?:>>|>&|>\||<&|>|<)|&>>?)[ \t]*")


class _Reader:
    """Reads a script from its start to its end."""

    def __init__(self, script: str) -> None:
        self.script, self.at = script, 0
        self.here: list[str] = []
        """Ends of here-documents that begin with the next line."""

    def left(self) -> bool:
        return self.at < len(self.script)

    def command(self) -> list[Word]:
        words: list[Word] = []
        while self.left():
            letter = self.script[self.at]
            if self.script.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "\n":
                self.at += 1
                self._skip_documents()
                return words
            elif letter in " \t":
                self.at += 1
            elif letter == "#":
                end = self.script.find("\n", self.at)
                self.at = end if end >= 0 else len(self.script)
            elif found := re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.script, self.at):
                self.here.append(found[2])
                self.at = found.end()
            elif found := _REDIRECTION.match(self.script, self.at):
                self.at = found.end()
                self._word()  # the file
            elif letter in ";&|()<>":
                self.at += 1
                return words
            else:
                words.append(self._word())
        return words

    def _skip_documents(self) -> None:
        for end in self.here:
            found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.script, self.at)
            self.at = found.end() if found else len(self.script)
        self.here = []

    def _word(self) -> Word:
        pieces: list[tuple[str, Text]] = []
        while self.left() and self.script[self.at] not in " \t\n;&|()<>":
            letter = self.script[self.at]
            if self.script.startswith("\\\n", self.at):
                break
            if letter == "'":
                pieces.append(("literal", self._until("'", self.at + 1)))
            elif letter == '"':
                pieces.append(("quoted", self._double_quoted()))
            else:
                pieces.append(self._unquoted())
        items = None
        if pieces and self.left() and self.script[self.at] == "(" and _plain(pieces[-1][1]).endswith("="):
            self.at += 1
            items = self._array()
        return Word(pieces, items)

    def _array(self) -> list[Word]:
        """Read the words of an array, up to its closing parenthesis."""
        words: list[Word] = []
        while self.left() and self.script[self.at] != ")":
            if self.script.startswith("\\\n", self.at):
                self.at += 2
            elif self.script[self.at] == "#":
                end = self.script.find("\n", self.at)
                self.at = end if end >= 0 else len(self.script)
            elif self.script[self.at] in " \t\n;&|(<>":
                self.at += 1
            else:
                words.append(self._word())
        self.at += 1
        return words

    def _until(self, end: str, start: int) -> Text:
        stop = self.script.find(end, start)
        stop = stop if stop >= 0 else len(self.script)
        self.at = stop + 1
        return [(self.script[at], at) for at in range(start, stop)]

    def _double_quoted(self) -> Text:
        made: Text = []
        self.at += 1
        while self.left() and self.script[self.at] != '"':
            if self.script.startswith("\\\n", self.at):
                self.at += 2
                continue
            if self.script[self.at] == "\\" and self.at + 1 < len(self.script):
                self.at += 1
            elif self.script.startswith("$(", self.at):
                made += self._parenthesis()
                continue
            made.append((self.script[self.at], self.at))
            self.at += 1
        self.at += 1
        return made

    def _unquoted(self) -> tuple[str, Text]:
        made: Text = []
        while self.left() and self.script[self.at] not in " \t\n;&|()<>'\"":
            if self.script.startswith("\\\n", self.at):
                break
            if self.script.startswith("$(", self.at):
                made += self._parenthesis()
                continue
            if self.script.startswith("${", self.at):
                end = self.script.find("}", self.at)
                end = end if end >= 0 else len(self.script) - 1
                made += [(self.script[at], at) for at in range(self.at, end + 1)]
                self.at = end + 1
                continue
            if self.script[self.at] == "\\" and self.at + 1 < len(self.script):
                self.at += 1
            made.append((self.script[self.at], self.at))
            self.at += 1
        return ("expand" if any(letter in "$`" for letter, _ in made) else "text"), made

    def _parenthesis(self) -> Text:
        """Read `$(...)` or `$((...))` as it stands."""
        start, depth = self.at, 0
        while self.left():
            depth += {"(": 1, ")": -1}.get(self.script[self.at], 0)
            self.at += 1
            if depth == 0 and self.script[self.at - 1] == ")":
                break
        return [(self.script[at], at) for at in range(start, self.at)]


# Expansion --------------------------------------------------------------------------------------------------------

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\(\((.*?)\)\)|(.))", re.DOTALL)


def _expanded(word: Word, variables: Mapping[str, list[Text]]) -> list[Text]:
    """Expand one word to the words that the program sees."""
    made: list[Text] = [[]]
    quoted = False
    for kind, text in word.pieces:
        if kind == "expand":
            parts = _split(_text_of((kind, text), variables))
            if not parts:
                continue
            made[-1] = made[-1] + parts[0]
            made += parts[1:]
        elif kind == "quoted" and (found := re.fullmatch(r"\$\{(\w+)\[@\]\}", _plain(text))):
            items = variables.get(found[1], [[(UNKNOWN, text[0][1])]])
            made[-1] = made[-1] + (items[0] if items else [])
            made += items[1:]
        else:
            quoted = quoted or kind in ("quoted", "literal")
            made[-1] = made[-1] + _text_of((kind, text), variables)
    return [item for item in made if item or quoted]


def _text_of(piece: tuple[str, Text], variables: Mapping[str, list[Text]]) -> Text:
    """Expand the variables of a piece."""
    kind, text = piece
    if kind in ("text", "literal"):
        return text
    plain, made, at = "".join(letter or "?" for letter, _ in text), list[tuple[str, int]](), 0
    if "`" in plain:
        return [(UNKNOWN, text[0][1])]
    for found in _VARIABLE.finditer(plain):
        made += text[at : found.start()]
        made += _value(found, text[found.start()][1], text, variables)
        at = found.end()
        if len(made) > MAX_LENGTH:
            raise TooLongError
    return made + text[at:]


def _value(found: re.Match[str], place: int, text: Text, variables: Mapping[str, list[Text]]) -> Text:
    """Return what one `$...` stands for."""
    name, default, sum_ = found[1] or found[2], found[3], found[4]
    if sum_ is not None:
        number = _whole_number(sum_, variables)
        return [(UNKNOWN, place)] if number is None else [(letter, place) for letter in str(number)]
    if name in variables:
        items = variables[name]
        return [letter for index, item in enumerate(items) for letter in ([(" ", place)] if index else []) + item]
    if default is not None:
        return text[found.start(3) : found.end(3)]
    return [(UNKNOWN, place)]


def _split(text: Text) -> list[Text]:
    """Split at blanks; of lines that a backslash continues, within quotes too, the backslash is none of the words."""
    words: list[Text] = [[]]
    for letter, place in text:
        if letter and letter in " \t\n\\":
            words.append([])
        else:
            words[-1].append((letter, place))
    return [word for word in words if word]


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _whole_number(text: str, variables: Mapping[str, list[Text]]) -> int | None:
    """Evaluate arithmetic on whole numbers below 10**18; None where it is anything else."""

    def named(found: re.Match[str]) -> str:
        items = variables.get(found[1], [[]])
        return _plain(items[0]) if UNKNOWN not in [letter for letter, _ in items[0]] else "?"

    expanded = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", named, text)
    if len(expanded) > 500 or not re.fullmatch(r"[\d\s+*/%()-]+", expanded):
        return None
    try:
        return _evaluated(ast.parse(expanded.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluated(node.operand)
    else:
        raise ValueError(ast.dump(node))
    if abs(value) >= 10**18:
        raise ValueError("too large")
    return value
