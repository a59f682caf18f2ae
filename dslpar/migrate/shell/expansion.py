"""Expand words as bash does: parameters, arithmetic, splitting at blanks. Nothing is executed.

What only a running shell knows becomes unknown, with the reason: the script's own arguments, variables that the script
does not set, output of commands, names of files. `${NAME:-default}` takes its default where the script sets no NAME.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dslpar.migrate.shell import arithmetic, patterns
from dslpar.migrate.shell.letters import (
    HOLE,
    Letter,
    Text,
    Unknown,
    all_at,
    first_unknown,
    hole,
    is_known,
    joined,
    placed,
    plain,
    unquoted,
)
from dslpar.migrate.shell.syntax import (
    Arithmetic,
    DoubleQuoted,
    Literal,
    Parameter,
    Piece,
    Placeholder,
    Quoted,
    Substitution,
    Word,
)
from dslpar.migrate.shell.variables import BLANKS, UNSET, State, Variable, text_variable

MAX_LENGTH = 400_000
"""Maximum number of letters of all expansions together."""
MAX_MATCHED = 2000
"""Maximum number of letters from which a pattern is removed."""
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")


class TooLongError(Exception):
    """The expansion of a script is longer than MAX_LENGTH, or takes too many steps."""


class Token(NamedTuple):
    """Letter of a word, with the way that it came there."""

    letter: Letter | None
    """None for an end of a word, or for empty quotes."""
    kind: str
    """"literal", "quoted", "expanded" (split at blanks), "break" (a new word) or "quotes" (a word, even if empty)."""


BREAK, QUOTES = Token(None, "break"), Token(None, "quotes")


class Budget:
    """Counts the letters that a script's expansions have."""

    def __init__(self) -> None:
        self.left = MAX_LENGTH

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise TooLongError


class Expander:
    """Expansion of words in one state of the shell, which `${NAME:=default}` changes."""

    def __init__(self, state: State, budget: Budget) -> None:
        self.state, self.budget = state, budget

    def fields(self, word: Word) -> list[Text]:
        """Expand one word of the script to the words that a program receives."""
        tokens = list(self.tokens(word))
        if unknown := _unreadable(word, tokens):
            return [(hole(unknown),)]
        if any(token.kind == "expanded" for token in tokens) and "IFS" in self.state.variables:
            return [(hole(Unknown("the script sets IFS, where this is split", word.at, 1, many=True)),)]
        fields: list[list[Token]] = []
        is_open = False
        for token in tokens:
            if token.kind == "break" or (token.kind == "expanded" and token.letter and token.letter.char in BLANKS):
                is_open = False
                continue
            if not is_open:
                fields.append([])
                is_open = True
            fields[-1].append(token)
        return [_file_names(field) or tuple(letter for letter, _ in field if letter) for field in fields]

    def text(self, word: Word) -> Text:
        """Expand a word without splitting it, as in assignments."""
        made: list[Letter] = []
        for letter, kind in self.tokens(word):
            if letter is not None:
                made.append(letter)
            elif kind == "break":
                made.append(Letter(" ", word.at))
        if made and isinstance(word.pieces[0], Literal) and made[0].char == "~":
            made[0] = hole(_home(word.at))
        return tuple(made)

    def pattern(self, word: Word) -> str | None:
        """Return a word as a pattern, in which what is quoted matches itself; None if it is unknown."""
        tokens = list(self.tokens(word))
        if any(token.letter is not None and token.letter.unknown for token in tokens):
            return None
        return "".join(
            patterns.escaped(letter.char) if kind == "quoted" else letter.char for letter, kind in tokens if letter
        )

    def tokens(self, word: Word) -> Iterator[Token]:
        """Yield the letters of a word."""
        for piece in word.pieces:
            yield from self.of_piece(piece)

    def of_piece(self, piece: Piece) -> Iterator[Token]:
        if isinstance(piece, Literal):
            yield from (Token(letter, "literal") for letter in piece.text)
        elif isinstance(piece, Quoted):
            yield QUOTES
            yield from (Token(letter, "quoted") for letter in piece.text)
        elif isinstance(piece, DoubleQuoted):
            yield from self.double_quoted(piece)
        elif isinstance(piece, Parameter):
            yield from self.parameter(piece, quoted=False)
        else:
            yield from (Token(letter, "expanded") for letter in self.computed(piece, many=True))

    def double_quoted(self, quotes: DoubleQuoted) -> Iterator[Token]:
        lists = [isinstance(piece, Parameter) and _is_list(piece) for piece in quotes.pieces]
        if not lists or not all(lists):
            yield QUOTES
        for piece in quotes.pieces:
            if isinstance(piece, Parameter):
                yield from self.parameter(piece, quoted=True)
            elif isinstance(piece, (Literal, Quoted)):
                yield from (Token(letter, "quoted") for letter in piece.text)
            elif isinstance(piece, DoubleQuoted):
                yield from self.double_quoted(piece)
            else:
                yield from (Token(letter, "quoted") for letter in self.computed(piece, many=False))

    def computed(self, piece: Arithmetic | Substitution | Placeholder, many: bool) -> Text:
        if isinstance(piece, Arithmetic):
            number = self.number(piece.expression)
            if isinstance(number, Unknown):
                return (hole(number._replace(at=piece.at, length=piece.length) if number.at < 0 else number),)
            return all_at(str(number), piece.at)
        if isinstance(piece, Placeholder):
            return (hole(Unknown(f"{piece.source} is a placeholder", piece.at, len(piece.source), one_word=True)),)
        source = " ".join(piece.source.split())
        shown = source if len(source) <= 60 else f"{source[:57]}..."
        why = "is the output of a command" if piece.source[0] in "$`" else "is known only as the script runs"
        return (hole(Unknown(f"{shown} {why}", piece.at, len(piece.source), many)),)

    # Parameters ----------------------------------------------------------------------------------------------

    def parameter(self, piece: Parameter, quoted: bool) -> Iterator[Token]:
        """Yield the letters of `$NAME` or `${NAME...}`."""
        if piece.operator in _DEFAULTS and piece.argument is not None:
            variable = self.variable(piece)
            is_set = variable is not None and variable.is_set and bool(variable.items)
            if is_set and variable is not None and piece.operator.startswith(":"):
                text = joined(variable.items)
                if not is_known(text) and all(letter.unknown for letter in text):
                    yield from self.listed(piece, (self.unknown_letter(piece, text),), quoted)
                    return
                is_set = bool(text)
            if is_set == (piece.operator[-1] == "+"):
                if variable is None and piece.operator[-1] == "-" and not piece.argument.pieces:
                    # An empty default is for `set -u`: it says as little as `$NAME`.
                    yield from self.listed(piece, ((hole(self.not_set(piece)),),), quoted)
                    return
                yield from self.of_argument(piece, quoted)
                return
            if not is_set:  # `${NAME:+word}` of a variable that the script does not set
                return
        yield from self.listed(piece, self.items(piece), quoted)

    def of_argument(self, piece: Parameter, quoted: bool) -> Iterator[Token]:
        """Yield the letters of the default in `${NAME:-default}`; `:=` assigns it, too."""
        assert piece.argument is not None
        if piece.operator[-1] == "?":
            yield from self.listed(piece, ((hole(self.not_set(piece)),),), quoted)
            return
        if piece.operator[-1] == "=":
            value = self.text(piece.argument)
            self.state.variables[piece.name] = text_variable(value)
            yield from self.listed(piece, (value,), quoted)
            return
        for letter, kind in self.tokens(piece.argument):
            # Blanks of the default itself separate words, unless they are quoted.
            yield Token(letter, "quoted" if quoted and letter else "expanded" if kind == "literal" else kind)

    def listed(self, piece: Parameter, items: tuple[Text, ...], quoted: bool) -> Iterator[Token]:
        """Yield the letters of a variable, or of each item of an array."""
        if quoted and not _is_list(piece):
            items = (joined(items),)
        for number, item in enumerate(items):
            if number:
                yield BREAK
            self.budget.take(len(item))
            text = placed(item, piece.at, piece.length)
            if quoted:
                yield from ([QUOTES] if _is_list(piece) else [])
                yield from (Token(letter, "quoted") for letter in text)
            else:
                yield from (Token(unquoted(letter), "expanded") for letter in text)

    def variable(self, piece: Parameter) -> Variable | None:
        """Return what is known of a parameter; None if the script does not set it."""
        if piece.name in "@*" or piece.name.isdigit():
            given = self.state.parameters
            if given is None or piece.name == "0":
                return None
            if piece.name in "@*":
                return Variable(given, is_array=True) if given else UNSET
            index = int(piece.name) - 1
            return text_variable(given[index]) if index < len(given) else UNSET
        return self.state.variables.get(piece.name)

    def items(self, piece: Parameter) -> tuple[Text, ...]:
        """Return the text of a parameter, or the items of an array, after the operator."""
        if piece.name == "#" and self.state.parameters is not None:
            return (all_at(str(len(self.state.parameters)), piece.at),)
        variable = self.variable(piece)
        if variable is None:
            return ((hole(self.not_set(piece)),),)
        items = self.subscripted(piece, variable)
        if piece.operator in ("", *_DEFAULTS):
            return items
        if piece.operator == "len":
            if _is_list(piece):
                counted = all(is_known(item) or not _may_vanish(item) for item in items)
                return (all_at(str(len(items)), piece.at),) if counted else (self.unknown_letter(piece, items[0]),)
            text = joined(items)
            return (all_at(str(len(text)), piece.at),) if is_known(text) else (self.unknown_letter(piece, text),)
        return self.transformed(piece, items)

    def subscripted(self, piece: Parameter, variable: Variable) -> tuple[Text, ...]:
        if piece.subscript is None or piece.name in "@*":
            return variable.items if piece.name in "@*" else variable.items[:1]
        if _is_list(piece) or plain(self.text(piece.subscript)) == "*":
            return variable.items
        index = self.number(piece.subscript)
        if isinstance(index, Unknown) or not all(map(is_known, variable.items)):
            return (self.unknown_letter(piece, joined(variable.items)),)
        return variable.items[index:][:1] if -len(variable.items) <= index < len(variable.items) else ()

    def unknown_letter(self, piece: Parameter, text: Text) -> Text:
        """Return one unknown letter in place of a text that is unknown in parts."""
        unknown = first_unknown(text) or Unknown("it has an index that only a running shell knows")
        unknown = unknown._replace(choices=())  # they are those of a part of the text
        return (hole(unknown if unknown.at >= 0 else unknown._replace(at=piece.at, length=piece.length)),)

    def not_set(self, piece: Parameter) -> Unknown:
        shown = f"${piece.name}" if len(piece.name) == 1 or not piece.operator else f"${{{piece.name}}}"
        many = piece.name in ("@", "*")
        if piece.name.isdigit() or many or piece.name == "#":
            why = f"{shown} is what the script is called with"
        elif piece.name in "?$!-":
            why = f"{shown} is known only as the script runs"
        else:
            why = f"the script does not set {piece.name}"
        return Unknown(why, piece.at, piece.length, many)

    def transformed(self, piece: Parameter, items: tuple[Text, ...]) -> tuple[Text, ...]:
        """Apply an operator that changes the text of a parameter to each item."""
        change = _CHANGES.get(piece.operator)
        if piece.operator == ":" and (_is_list(piece) or piece.name in "@*"):
            change = None
        made: list[Text] = []
        for item in items:
            changed = change(self, piece, plain(item)) if change and is_known(item) else None
            if changed is None:
                return (self.unknown_letter(piece, (hole(_not_evaluated(piece)),) if is_known(item) else item),)
            made.append(all_at(changed, piece.at))
        return tuple(made)

    # Numbers -------------------------------------------------------------------------------------------------

    def number(self, expression: Word) -> int | Unknown:
        """Evaluate arithmetic, or say why it is unknown. Variables that it sets become unknown."""
        text = self.text(expression)
        if (unknown := first_unknown(text)) is not None:
            return unknown
        shown = plain(text)
        found: list[Unknown] = []

        def value_of(name: str) -> int:
            items = self.items(Parameter(name, -1, 0))
            value = items[0] if items else ()
            if (missing := first_unknown(value)) is not None:
                found.append(missing)
                raise arithmetic.ArithmeticError_(name)
            return arithmetic.number(plain(value)) if plain(value).strip() else 0

        try:
            return arithmetic.evaluate(shown, value_of)
        except arithmetic.ArithmeticError_:
            for name in assigned_in_arithmetic(shown):
                self.state.variables[name] = text_variable((hole(Unknown(f"arithmetic sets {name}")),))
            return found[0] if found else Unknown(f"`{shown.strip()[:60]}` is not evaluated")


def assigned_in_arithmetic(text: str) -> list[str]:
    """Return the variables that arithmetic sets, as `i++` and `i = 1` do."""
    names = re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))", text)
    return names + re.findall(r"(?:\+\+|--)\s*([A-Za-z_]\w*)", text)


_DEFAULTS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")


def _is_list(piece: Parameter) -> bool:
    """Return whether a parameter stays several words in double quotes."""
    if piece.name == "@":
        return piece.operator != "len"
    subscript = piece.subscript
    literal = subscript is not None and len(subscript.pieces) == 1 and isinstance(subscript.pieces[0], Literal)
    return literal and plain(subscript.pieces[0].text) == "@"  # type: ignore[union-attr]


def _may_vanish(text: Text) -> bool:
    return any(letter.unknown.many for letter in text if letter.unknown)


def _home(at: int) -> Unknown:
    return Unknown("~ is the home folder of whoever starts the script", at, 1, one_word=True)


def _unreadable(word: Word, tokens: list[Token]) -> Unknown | None:
    """Return why a word is unknown although its letters are known: braces, a home folder."""
    literal = "".join(letter.char if kind == "literal" else "x" for letter, kind in tokens if letter)
    if literal.startswith("~"):
        return _home(word.at)
    if _BRACES.search(literal):
        return Unknown(f"`{literal}` is several words by its braces", word.at, len(literal), many=True)
    return None


def _file_names(field: list[Token]) -> Text | None:
    """Return an unknown text if a word is a pattern of file names; None if it is not."""
    shown = "".join(letter.char for letter, kind in field if letter and kind in ("literal", "expanded"))
    if not set(shown) & set("*?") or set(shown) & set("()=+,$"):
        return None  # a pattern that no file matches stays as it is
    first = next(letter for letter, _ in field if letter)
    why = f"`{shown}` is a pattern of file names".replace(HOLE, "...")
    return (hole(Unknown(why, first.at, len(field), many=True)),)


def _not_evaluated(piece: Parameter) -> Unknown:
    return Unknown(f"${{{piece.name}{piece.operator}...}} is not evaluated", piece.at, piece.length)


# Operators that change a text -------------------------------------------------------------------------------------


def _removed(expander: Expander, piece: Parameter, text: str) -> str | None:
    """Remove the shortest (`#`, `%`) or longest (`##`, `%%`) match of a pattern from an end of the text."""
    assert piece.argument is not None
    pattern = expander.pattern(piece.argument)
    if pattern is None or len(text) > MAX_MATCHED:
        return None
    at_start, longest = piece.operator[0] == "#", len(piece.operator) == 2
    cuts = range(len(text) + 1)
    for cut in cuts if at_start != longest else reversed(cuts):
        if patterns.matches(pattern, text[:cut] if at_start else text[cut:]):
            return text[cut:] if at_start else text[:cut]
    return text


def _replaced(expander: Expander, piece: Parameter, text: str) -> str | None:
    """Replace the first (`/`) match of a pattern, or every one (`//`)."""
    assert piece.argument is not None
    tokens = list(expander.tokens(piece.argument))
    slash = next(
        (index for index, (letter, kind) in enumerate(tokens) if letter and letter.char == "/" and kind == "literal"),
        len(tokens),
    )
    pattern, new = tokens[:slash], tokens[slash + 1 :]
    if any(letter is not None and letter.unknown for letter, _ in tokens):
        return None
    shown = "".join(
        patterns.escaped(letter.char) if kind == "quoted" else letter.char for letter, kind in pattern if letter
    )
    if not shown:
        return text
    if patterns.has_star(shown) or shown[0] in "#%":
        return None  # the longest match, or one at an end
    replacement = "".join(letter.char for letter, _ in new if letter)
    if "&" in replacement:
        return None
    return re.sub(
        patterns.as_regex(shown), lambda _: replacement, text, count=0 if piece.operator == "//" else 1, flags=re.DOTALL
    )


def _substring(expander: Expander, piece: Parameter, text: str) -> str | None:
    """Return `${NAME:offset:length}`."""
    assert piece.argument is not None
    shown = expander.text(piece.argument)
    if not is_known(shown):
        return None
    parts = plain(shown).split(":")
    numbers = [expander.number(Word((Literal(all_at(part, 0)),), 0)) for part in parts]
    if len(numbers) > 2 or any(isinstance(number, Unknown) for number in numbers):
        return None
    start, *count = (number for number in numbers if isinstance(number, int))
    start = start if start >= 0 else len(text) + start
    if start < 0:
        return ""
    end = len(text) if not count else start + count[0] if count[0] >= 0 else len(text) + count[0]
    return text[start:end] if end >= start else None


def _in_case(expander: Expander, piece: Parameter, text: str) -> str | None:
    if piece.argument is not None and piece.argument.pieces:
        return None
    first, rest = text[:1], text[1:]
    return {"^^": text.upper(), ",,": text.lower(), "^": first.upper() + rest, ",": first.lower() + rest}[
        piece.operator
    ]


_CHANGES: dict[str, Callable[[Expander, Parameter, str], str | None]] = {
    **dict.fromkeys(("#", "##", "%", "%%"), _removed),
    **dict.fromkeys(("/", "//"), _replaced),
    ":": _substring,
    **dict.fromkeys(("^^", ",,", "^", ","), _in_case),
}
