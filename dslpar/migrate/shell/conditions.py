"""Evaluate `[ ... ]` and `[[ ... ]]` to True, False or None, which means that only a running shell knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dslpar.migrate.shell import arithmetic, patterns
from dslpar.migrate.shell.expansion import Expander
from dslpar.migrate.shell.letters import Text, Unknown, is_known, letters, plain
from dslpar.migrate.shell.syntax import Literal, Word

Truth = bool | None
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_EQUAL = ("=", "==", "!=")
_OTHER_BINARY = ("-nt", "-ot", "-ef", "=~", "<", ">")
_UNARY = tuple(f"-{letter}" for letter in "abcdefghknoprstuvwxzGLNORS")


def both(first: Truth, second: Truth) -> Truth:
    """Return `first && second`."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def inverted(value: Truth) -> Truth:
    """Return `! value`."""
    return None if value is None else not value


def one_of(first: Truth, second: Truth) -> Truth:
    """Return `first || second`."""
    return inverted(both(inverted(first), inverted(second)))


def test(words: Sequence[Text]) -> Truth:
    """Evaluate the words between `[` and `]`."""
    if any(letter.unknown and letter.unknown.many for word in words for letter in word):
        return None  # even how many words there are is unknown
    return _Test(list(words)).value()


class _Test:
    """Recursive descent: `-o` binds less than `-a`, and both less than `!`."""

    def __init__(self, words: list[Text]) -> None:
        self.words, self.at = words, 0

    def value(self) -> Truth:
        made = self.disjunction()
        return made if self.at == len(self.words) else None

    def shown(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return plain(self.words[index]) if index < len(self.words) else ""

    def left(self) -> int:
        return len(self.words) - self.at

    def disjunction(self) -> Truth:
        made = self.conjunction()
        while self.shown() == "-o":
            self.at += 1
            made = one_of(made, self.conjunction())
        return made

    def conjunction(self) -> Truth:
        made = self.negation()
        while self.shown() == "-a":
            self.at += 1
            made = both(made, self.negation())
        return made

    def negation(self) -> Truth:
        if self.shown() == "!" and self.left() > 1:
            self.at += 1
            return inverted(self.negation())
        return self.primary()

    def primary(self) -> Truth:
        if self.left() == 0:
            return False
        if self.left() >= 3 and self.shown(1) in (*_EQUAL, *_NUMBERS, *_OTHER_BINARY, r"\<", r"\>"):
            left, operator, right = self.words[self.at : self.at + 3]
            self.at += 3
            return compare(left, plain(operator), right)
        if self.shown() == "(" and self.left() > 2:
            self.at += 1
            made = self.disjunction()
            if self.shown() != ")":
                self.at = len(self.words) + 1
                return None
            self.at += 1
            return made
        if self.left() >= 2 and self.shown() in _UNARY:
            self.at += 2
            return unary(plain(self.words[self.at - 2]), self.words[self.at - 1])
        self.at += 1
        return unary("-n", self.words[self.at - 1])


def unary(operator: str, operand: Text) -> Truth:
    """Evaluate `-n` and `-z`; what asks for files is unknown."""
    if operator not in ("-n", "-z"):
        return None
    some = True if any(letter.unknown is None for letter in operand) else None if operand else False
    return some if operator == "-n" else inverted(some)


def compare(left: Text, operator: str, right: Text) -> Truth:
    """Compare two words as texts or as whole numbers."""
    if not (is_known(left) and is_known(right)):
        return None
    if operator in _EQUAL:
        return (plain(left) == plain(right)) == (operator != "!=")
    if operator in _NUMBERS:
        try:
            return _NUMBERS[operator](_decimal(plain(left)), _decimal(plain(right)))
        except (ValueError, arithmetic.ArithmeticError_):
            return None
    return None


def _decimal(text: str) -> int:
    if not text.strip().lstrip("+-").isdigit():
        raise ValueError(text)
    return int(text)


def extended_test(tokens: Sequence[Word | str], expander: Expander) -> Truth:
    """Evaluate the words and operators between `[[` and `]]`."""
    return _ExtendedTest(tokens, expander).value()


class _ExtendedTest:
    def __init__(self, tokens: Sequence[Word | str], expander: Expander) -> None:
        self.tokens, self.expander, self.at = tokens, expander, 0

    def value(self) -> Truth:
        made = self.disjunction()
        return made if self.at == len(self.tokens) else None

    def take(self, operator: str) -> bool:
        taken = self.at < len(self.tokens) and self.tokens[self.at] == operator
        self.at += taken
        return taken

    def word(self, ahead: int = 0) -> Word | None:
        index = self.at + ahead
        token = self.tokens[index] if index < len(self.tokens) else None
        return token if isinstance(token, Word) else None

    def disjunction(self) -> Truth:
        made = self.conjunction()
        while self.take("||"):
            made = one_of(made, self.conjunction())
        return made

    def conjunction(self) -> Truth:
        made = self.negation()
        while self.take("&&"):
            made = both(made, self.negation())
        return made

    def negation(self) -> Truth:
        if self.take("!"):
            return inverted(self.negation())
        if self.take("("):
            made = self.disjunction()
            return made if self.take(")") else None
        return self.primary()

    def primary(self) -> Truth:
        first = self.word()
        if first is None:
            self.at = len(self.tokens) + 1
            return None
        operator = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        shown = operator.as_literal() if isinstance(operator, Word) else operator
        last = self.word(2)
        if last is not None and shown in (*_EQUAL, *_NUMBERS, *_OTHER_BINARY):
            self.at += 3
            return self.binary(first, shown, last)
        if first.as_literal() in _UNARY and (operand := self.word(1)) is not None:
            self.at += 2
            return self.unary(first.as_literal(), operand)
        self.at += 1
        return unary("-n", self.expander.text(first))

    def unary(self, operator: str, operand: Word) -> Truth:
        if operator == "-v":
            variable = self.expander.state.variables.get(operand.as_literal())
            return None if variable is None else variable.is_set
        return unary(operator, self.expander.text(operand))

    def binary(self, left: Word, operator: str, right: Word) -> Truth:
        text = self.expander.text(left)
        if operator in _EQUAL:
            pattern = self.expander.pattern(right)
            if pattern is None or not is_known(text):
                return None
            return patterns.matches(pattern, plain(text)) == (operator != "!=")
        if operator in _NUMBERS:
            numbers = [self.expander.number(_arithmetic(item)) for item in (text, self.expander.text(right))]
            known = [number for number in numbers if not isinstance(number, Unknown)]
            return _NUMBERS[operator](*known) if len(known) == 2 else None
        return None


def _arithmetic(text: Text) -> Word:
    """Return a text as an arithmetic expression, which `[[` compares; a text with unknown letters stays unknown."""
    return Word((Literal(text if text else letters("0")),), 0)
