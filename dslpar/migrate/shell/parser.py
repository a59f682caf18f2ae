"""Parse a shell script into a syntax tree, as bash's grammar has it (POSIX, section 2.10, and bash's arrays and tests).

    parse(letters('torchrun a.py --lr "$LR" 2>&1 | tee log')).commands[0]    # a Pipeline of two Simple commands

Left out, since no argument depends on them: redirections, the text of here-documents, and the bodies of `$(...)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from dslpar.migrate.shell.letters import Text, plain
from dslpar.migrate.shell.letters import letters as letters_of
from dslpar.migrate.shell.syntax import (
    AndOr,
    Arithmetic,
    ArithmeticCommand,
    Assignment,
    Case,
    Command,
    DoubleQuoted,
    For,
    Function,
    If,
    Literal,
    Loop,
    Parameter,
    Piece,
    Pipeline,
    Placeholder,
    Quoted,
    Sequence,
    Simple,
    Subshell,
    Substitution,
    Test,
    Word,
)

MAX_DEPTH = 60
"""Maximum depth of nested commands and expansions."""
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
"""Commands whose arguments may be assignments."""
_RESERVED = re.compile(r"(?:if|then|elif|else|fi|while|until|for|select|do|done|case|esac|function|time|[!{}]|\[\[)"
                       r"(?=[\s;&|()<>]|$)")  # fmt: skip
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?)=")
_FUNCTION = re.compile(r"([\w:.-]+)[ \t]*\([ \t]*\)")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>&|>\||<(?!\()|>(?!\())|(&>>?)")
_PLACEHOLDER = re.compile(r"<(?![\s(<&>])[^<>\n;|&$`\"']*(?<!\s)>(?![(&>])")
_OPERATORS = re.compile(r":[-=?+]|\^\^|,,|##|%%|//|/#|/%|[-=?+#%/^,@:]")
_SPECIAL = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_PLAIN = re.compile(r"[^\s;&|()<>'\"$`\\}]+")
_QUOTED = re.compile(r'[^$`"\\]+')
"""Runs of characters without a meaning of their own, outside of quotes and in double quotes."""
_END_OF_WORD = " \t\n;&|()<>"


class ShellSyntaxError(Exception):
    """bash cannot parse the script either."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.message, self.index = message, index


def parse(script: Text) -> Sequence:
    """Parse a script. Raises ShellSyntaxError, with the index of a letter."""
    return _Parser(script).script()


class _Parser:
    """Recursive descent over the characters of a script, in which quotes and nesting decide what a character means."""

    def __init__(self, script: Text) -> None:
        self.letters, self.text = script, plain(script)
        self.at, self.depth = 0, 0
        self.documents: list[tuple[str, bool]] = []
        """End marker of each here-document that begins on the next line, and whether tabs before it are ignored."""

    def script(self) -> Sequence:
        """Parse to the end."""
        made = self.commands()
        if self.at < len(self.text):
            raise self.error(f"unexpected {self.text[self.at]!r}")
        return made

    # Characters ----------------------------------------------------------------------------------------------

    def error(self, message: str) -> ShellSyntaxError:
        return ShellSyntaxError(message, min(self.at, max(len(self.text) - 1, 0)))

    def place(self, index: int | None = None) -> int:
        """Return the script's position of a letter; of the next one by default."""
        index = self.at if index is None else index
        if not self.letters:
            return 0
        return self.letters[min(index, len(self.letters) - 1)].at

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.at)

    def skip_blanks(self) -> None:
        """Skip blanks, continued lines, and a comment at the start of a word."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.peek("\\\n"):
                self.at += 2
            elif self.peek("#"):
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            else:
                return

    def skip_newlines(self) -> None:
        """Skip blanks, comments, ends of lines, and the here-documents that begin there."""
        self.skip_blanks()
        while self.peek("\n"):
            self.at += 1
            self.skip_documents()
            self.skip_blanks()

    def skip_documents(self) -> None:
        for marker, tabs in self.documents:
            before = r"\t*" if tabs else ""
            found = re.compile(f"^{before}{re.escape(marker)}$", re.MULTILINE).search(self.text, self.at)
            self.at = min(found.end() + 1, len(self.text)) if found else len(self.text)
        self.documents = []

    def keyword(self) -> str:
        """Return the reserved word that comes next, or an empty string."""
        found = self.match(_RESERVED)
        return found[0] if found else ""

    def expect(self, word: str) -> None:
        self.skip_newlines()
        if self.keyword() != word and not (word in "()" and self.peek(word)):
            raise self.error(f"`{word}` expected")
        self.at += len(word)

    # Commands ------------------------------------------------------------------------------------------------

    def commands(self, *ends: str) -> Sequence:
        """Parse commands up to one of the given words, which is not consumed."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("nested too deeply")
        start, made = self.place(), list[Command]()
        while True:
            self.skip_newlines()
            if self.at >= len(self.text) or self.is_end(ends):
                break
            command = self.and_or()
            self.skip_blanks()
            if self.peek("&"):
                self.at += 1
                command = Subshell(command, command.at)
            elif self.peek(";") and not self.peek(";;"):
                self.at += 1
            elif not (self.at >= len(self.text) or self.peek("\n") or self.is_end(ends)):
                raise self.error(f"unexpected {self.text[self.at]!r}")
            made.append(command)
        if ends and self.at >= len(self.text):
            raise self.error(f"`{ends[0]}` expected before the end of the script")
        self.depth -= 1
        return Sequence(tuple(made), start)

    def is_end(self, ends: tuple[str, ...]) -> bool:
        keyword = self.keyword()
        return any(keyword == end or (end in (")", ";;", ";&", "`") and self.peek(end)) for end in ends)

    def and_or(self) -> Command:
        left = self.pipeline()
        while True:
            self.skip_blanks()
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return left
            self.at += 2
            self.skip_newlines()
            left = AndOr(left, operator, self.pipeline(), left.at)

    def pipeline(self) -> Command:
        start, negated = self.place(), False
        while self.keyword() in ("!", "time"):
            negated ^= self.peek("!")
            self.at += len(self.keyword())
            self.skip_blanks()
            if found := self.match(re.compile(r"-p(?=\s)")):
                self.at = found.end()
                self.skip_blanks()
        parts = [self.command()]
        while True:
            self.skip_blanks()
            if not self.peek("|") or self.peek("||"):
                break
            self.at += 2 if self.peek("|&") else 1
            self.skip_newlines()
            parts.append(self.command())
        return parts[0] if len(parts) == 1 and not negated else Pipeline(tuple(parts), negated, start)

    def command(self) -> Command:
        self.skip_blanks()
        keyword = self.keyword()
        parse_compound = _COMPOUND.get(keyword)
        if parse_compound is not None:
            made = parse_compound(self)
        elif keyword:
            raise self.error(f"unexpected `{keyword}`")
        elif self.peek("((") and (end := self.end_of_arithmetic(self.at + 2)) >= 0:
            made = ArithmeticCommand(self.word_between(self.at + 2, end), self.place())
            self.at = end + 2
        elif self.peek("("):
            start = self.place()
            self.at += 1
            body = self.commands(")")
            self.expect(")")
            made = Subshell(body, start)
        elif found := self.match(_FUNCTION):
            return self.function(found[1], found.end())
        else:
            return self.simple()
        while self.redirection():
            pass
        return made

    def group(self) -> Command:
        self.expect("{")
        made = self.commands("}")
        self.expect("}")
        return made

    def conditional(self) -> Command:
        """Parse from `if` or `elif` on, to `fi`."""
        start = self.place()
        self.at += len(self.keyword())
        condition = self.commands("then")
        self.expect("then")
        then, otherwise = self.commands("elif", "else", "fi"), None
        if self.keyword() == "elif":
            return If(condition, then, self.conditional(), start)
        if self.keyword() == "else":
            self.expect("else")
            otherwise = self.commands("fi")
        self.expect("fi")
        return If(condition, then, otherwise, start)

    def loop(self) -> Command:
        start, kind = self.place(), self.keyword()
        self.at += len(kind)
        condition = self.commands("do")
        return Loop(kind, condition, self.body(), frozenset(), start)

    def body(self) -> Command:
        """Parse `do ... done`."""
        self.skip_blanks()
        if self.peek(";"):
            self.at += 1
        self.skip_newlines()
        ends = ("}", "{") if self.keyword() == "{" else ("done", "do")
        self.expect(ends[1])
        made = self.commands(ends[0])
        self.expect(ends[0])
        return made

    def for_loop(self) -> Command:
        start, kind = self.place(), self.keyword()
        self.at += len(kind)
        self.skip_blanks()
        if self.peek("(("):
            end = self.end_of_arithmetic(self.at + 2)
            if end < 0:
                raise self.error("`))` expected")
            head = self.text[self.at + 2 : end]
            self.at = end + 2
            return Loop("for", None, self.body(), frozenset(re.findall(r"[A-Za-z_]\w*", head)), start)
        name = self.match(re.compile(r"[A-Za-z_]\w*"))
        if name is None:
            raise self.error("a variable's name expected")
        self.at = name.end()
        self.skip_newlines()
        words: tuple[Word, ...] | None = None
        if found := self.match(re.compile(r"in(?=[\s;])")):
            self.at = found.end()
            words = tuple(self.words())
        body = self.body()
        if kind == "select":
            return Loop(kind, None, body, frozenset({name[0]}), start)
        return For(name[0], words, body, start)

    def words(self) -> list[Word]:
        """Parse words up to the end of a command."""
        made: list[Word] = []
        while True:
            self.skip_blanks()
            if self.at >= len(self.text) or self.text[self.at] in "\n;&|)":
                return made
            made.append(self.word())

    def case(self) -> Command:
        start = self.place()
        self.at += len("case")
        self.skip_newlines()
        word = self.word()
        self.skip_newlines()
        if not self.match(re.compile(r"in(?=\s)")):
            raise self.error("`in` expected")
        self.at += len("in")
        clauses: list[tuple[tuple[Word, ...], Command, str]] = []
        while True:
            self.skip_newlines()
            if self.keyword() == "esac":
                break
            clauses.append(self.clause())
        self.expect("esac")
        return Case(word, tuple(clauses), start)

    def clause(self) -> tuple[tuple[Word, ...], Command, str]:
        self.at += self.peek("(")
        patterns: list[Word] = []
        while True:
            self.skip_blanks()
            patterns.append(self.word())
            self.skip_blanks()
            if not self.peek("|"):
                break
            self.at += 1
        self.expect(")")
        body = self.commands("esac", ";;", ";&")
        end = next((end for end in (";;&", ";;", ";&") if self.peek(end)), "")
        self.at += len(end)
        return tuple(patterns), body, end

    def named_function(self) -> Command:
        self.at += len("function")
        self.skip_blanks()
        name = self.match(re.compile(r"[\w:.-]+"))
        if name is None:
            raise self.error("a function's name expected")
        self.at = name.end()
        found = self.match(re.compile(r"[ \t]*\([ \t]*\)"))
        return self.function(name[0], found.end() if found else self.at)

    def function(self, name: str, end: int) -> Command:
        start, self.at = self.place(), end
        self.skip_newlines()
        return Function(name, self.command(), start)

    def test(self) -> Command:
        """Parse `[[ ... ]]`."""
        start = self.place()
        self.at += len("[[")
        tokens: list[Word | str] = []
        while True:
            self.skip_newlines()
            if self.match(re.compile(r"\]\](?=[\s;&|()<>]|$)")):
                self.at += len("]]")
                return Test(tuple(tokens), start)
            if tokens and isinstance(tokens[-1], Word) and tokens[-1].as_literal() == "=~":
                tokens.append(self.regular_expression())  # it may begin with a parenthesis
                continue
            operator = self.match(re.compile(r"&&|\|\||[()<>]|!(?=\s)"))
            if operator:
                self.at = operator.end()
                tokens.append(operator[0])
            else:
                tokens.append(self.word())

    def regular_expression(self) -> Word:
        start, depth = self.at, 0
        while self.at < len(self.text) and (depth > 0 or self.text[self.at] not in " \t\n"):
            letter = self.text[self.at]
            if letter == '"':
                self.double_quoted()
            elif letter == "'":
                self.until("'")
            else:
                depth += {"(": 1, ")": -1}.get(letter, 0)
                self.at += 2 if letter == "\\" else 1
        return Word((Substitution(self.text[start : self.at], self.place(start)),), self.place(start))

    def simple(self) -> Command:
        start, index = self.place(), self.at
        assignments: list[Assignment] = []
        words: list[Word | Assignment] = []
        while True:
            self.skip_blanks()
            if self.at >= len(self.text) or self.text[self.at] in "\n;|)" or (self.peek("&") and not self.peek("&>")):
                break
            if self.redirection():
                continue
            first = words[0].as_literal() if words and isinstance(words[0], Word) else ""
            found = self.match(_ASSIGNMENT)
            if found and not words:
                assignments.append(self.assignment(found))
            elif found and first in DECLARATIONS:
                words.append(self.assignment(found))
            else:
                words.append(self.word())
        if self.at == index:
            raise self.error(f"unexpected {self.text[index]!r}" if index < len(self.text) else "a command expected")
        return Simple(tuple(assignments), tuple(words), start)

    def redirection(self) -> bool:
        """Skip a redirection and its file, if one comes next."""
        self.skip_blanks()
        found = self.match(_REDIRECTION)
        if found is None or self.match(_PLACEHOLDER):
            return False
        self.at = found.end()
        self.skip_blanks()
        start = self.at
        if self.at >= len(self.text) or self.text[self.at] in _END_OF_WORD.replace("<", "").replace(">", ""):
            raise self.error("a file expected after a redirection")
        word = self.word()
        if found[1] in ("<<", "<<-"):
            raw = self.text[start : self.at]
            self.documents.append((re.sub(r"[\"'\\]", "", raw), found[1] == "<<-"))
            return word is not None
        return True

    def assignment(self, found: re.Match[str]) -> Assignment:
        start, name, indexed, append = self.place(), found[1], bool(found[2]), bool(found[3])
        self.at = found.end()
        if not self.peek("("):
            value = self.word() if self.word_follows() else Word((), self.place())
            return Assignment(name, value, append, indexed, start)
        self.at += 1
        items: list[Word] = []
        while True:
            self.skip_newlines()
            if self.at >= len(self.text):
                raise self.error("`)` expected")
            if self.peek(")"):
                self.at += 1
                return Assignment(name, tuple(items), append, indexed, start)
            items.append(self.word())

    # Words ---------------------------------------------------------------------------------------------------

    def word_follows(self) -> bool:
        if self.at >= len(self.text) or self.peek("\\\n"):
            return False
        return self.text[self.at] not in _END_OF_WORD or self.starts_inside_a_word()

    def starts_inside_a_word(self) -> bool:
        """Return whether `<` or `>` belongs to a word: a placeholder, or a process substitution."""
        return self.peek("<(") or self.peek(">(") or self.match(_PLACEHOLDER) is not None

    def word(self) -> Word:
        start, pieces = self.at, list[Piece]()
        while self.at < len(self.text) and (self.text[self.at] not in _END_OF_WORD or self.starts_inside_a_word()):
            if self.peek("\\\n"):
                self.at += 2
                continue
            self.piece(pieces)
        if not pieces and self.at == start:
            raise self.error("a word expected")
        return Word(tuple(pieces), self.place(start))

    def piece(self, pieces: list[Piece]) -> None:
        """Parse the next piece of a word outside of quotes."""
        letter = self.text[self.at]
        if letter == "'":
            pieces.append(Quoted(self.until("'")))
        elif letter == '"':
            pieces.append(self.double_quoted())
        elif letter == "\\" and self.at + 1 < len(self.text):
            pieces.append(Quoted(self.letters[self.at + 1 : self.at + 2]))
            self.at += 2
        elif letter in "$`":
            pieces.append(self.expansion(quoted=False))
        elif letter in "<>":
            found = self.match(_PLACEHOLDER)
            if found:
                pieces.append(Placeholder(found[0], self.place()))
                self.at = found.end()
            else:
                pieces.append(self.substitution(2))
        else:
            self.literal(pieces, _PLAIN)

    def literal(self, pieces: list[Piece], run: re.Pattern[str] | None = None) -> None:
        """Add a run of characters, at least one."""
        found = self.match(run) if run else None
        end = found.end() if found else self.at + 1
        pieces.append(Literal(self.letters[self.at : end]))
        self.at = end

    def until(self, end: str) -> Text:
        """Return the letters up to a closing quote."""
        start = self.at + 1
        stop = self.text.find(end, start)
        if stop < 0:
            raise self.error(f"unclosed {end}")
        self.at = stop + 1
        return self.letters[start:stop]

    def double_quoted(self) -> DoubleQuoted:
        start = self.at
        self.at += 1
        pieces = self.pieces_until()
        if self.at >= len(self.text):
            self.at = start
            raise self.error('unclosed "')
        self.at += 1
        return DoubleQuoted(tuple(pieces))

    def pieces_until(self, stop: int | None = None) -> list[Piece]:
        """Parse as within double quotes, up to a position or the closing quote."""
        pieces: list[Piece] = []
        while self.at < len(self.text) and not (self.peek('"') if stop is None else self.at >= stop):
            if self.peek("\\\n"):
                self.at += 2
            elif self.peek("\\") and self.at + 1 < len(self.text) and self.text[self.at + 1] in '$`"\\':
                self.at += 1
                self.literal(pieces)
            elif self.text[self.at] in "$`":
                pieces.append(self.expansion(quoted=True))
            else:
                self.literal(pieces, _QUOTED if stop is None else None)
        return pieces

    def word_between(self, start: int, end: int) -> Word:
        """Parse a stretch of the script as within double quotes; the position stays where it is."""
        kept, self.at = self.at, start
        pieces = self.pieces_until(end)
        self.at = kept
        return Word(tuple(pieces), self.place(start))

    # Expansions ----------------------------------------------------------------------------------------------

    def expansion(self, quoted: bool) -> Piece:
        """Parse what begins with `$` or a backtick."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("nested too deeply")
        made = self.one_expansion(quoted)
        self.depth -= 1
        return made

    def one_expansion(self, quoted: bool) -> Piece:
        start = self.at
        if self.peek("`"):
            return self.backticks()
        if self.peek("$(("):
            end = self.end_of_arithmetic(self.at + 3)
            if end >= 0:
                made = self.word_between(self.at + 3, end)
                self.at = end + 2
                return Arithmetic(made, self.place(start), self.at - start)
        if self.peek("$("):
            return self.substitution(2)
        if self.peek("${"):
            return self.braces(quoted)
        if not quoted and self.peek("$'"):
            return self.ansi()
        if not quoted and self.peek('$"'):
            self.at += 1
            return self.double_quoted()
        self.at += 1
        name = self.match(_SPECIAL)
        if name is None:
            return Literal(self.letters[start : start + 1])
        self.at = name.end()
        return Parameter(name[0], self.place(start), self.at - start)

    def end_of_arithmetic(self, start: int) -> int:
        """Return the position of the `))` that closes arithmetic; -1 if the parentheses are those of commands."""
        depth = 0
        for index in range(start, len(self.text)):
            letter = self.text[index]
            if letter == "(":
                depth += 1
            elif letter == ")":
                if depth == 0:
                    return index if self.text.startswith("))", index) else -1
                depth -= 1
        return -1

    def substitution(self, opening: int) -> Piece:
        """Parse `$(...)` or `<(...)`, whose commands are parsed, since only they show where it ends."""
        start = self.at
        self.at += opening
        documents, self.documents = self.documents, []
        self.commands(")")
        self.documents = documents
        self.expect(")")
        return Substitution(self.text[start : self.at], self.place(start))

    def backticks(self) -> Piece:
        start = self.at
        self.at += 1
        while self.at < len(self.text) and not self.peek("`"):
            self.at += 2 if self.peek("\\") else 1
        if self.at >= len(self.text):
            self.at = start
            raise self.error("unclosed `")
        self.at += 1
        return Substitution(self.text[start : self.at], self.place(start))

    def ansi(self) -> Piece:
        r"""Parse `$'...'`, in which `\n` and its kind are escapes."""
        start, made = self.at, list[Text]()
        self.at += 2
        while not self.peek("'"):
            if self.at >= len(self.text):
                self.at = start
                raise self.error("unclosed '")
            if self.peek("\\"):
                char = _ESCAPES.get(self.text[self.at + 1 : self.at + 2])
                if char is None:  # octal, hexadecimal and control characters: no argument needs them
                    while not self.peek("'") and self.at < len(self.text):
                        self.at += 2 if self.peek("\\") else 1
                    self.at += 1
                    return Substitution(self.text[start : self.at], self.place(start))
                made.append(letters_of(char, self.place()))
                self.at += 2
            else:
                made.append(self.letters[self.at : self.at + 1])
                self.at += 1
        self.at += 1
        return Quoted(tuple(letter for text in made for letter in text))

    def braces(self, quoted: bool) -> Piece:
        """Parse `${...}`."""
        start = self.at
        self.at += 2
        indirect = self.peek("!") and not self.peek("!}")
        counts = self.peek("#") and re.match(r"#[\w@*?$!-]", self.text[self.at : self.at + 2]) is not None
        self.at += indirect or counts
        name = self.match(re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]"))
        if name is None:
            raise self.error("bad substitution")
        self.at = name.end()
        subscript = self.subscript()
        operator, argument = "len" if counts else "other" if indirect else "", None
        found = None if self.peek("}") else self.match(_OPERATORS)
        if found:
            self.at = found.end()
            argument = self.argument(quoted and found[0][-1] in "-=?+")
            operator = (operator and "other") or found[0]
        if not self.peek("}"):
            raise self.error("bad substitution: `}` expected")
        self.at += 1
        return Parameter(name[0], self.place(start), self.at - start, subscript, operator, argument)

    def subscript(self) -> Word | None:
        if not self.peek("["):
            return None
        end, depth = self.at + 1, 0
        while end < len(self.text) and (depth or self.text[end] != "]"):
            depth += {"[": 1, "]": -1}.get(self.text[end], 0)
            end += 1
        made = self.word_between(self.at + 1, end)
        self.at = end + 1
        return made

    def argument(self, quoted: bool) -> Word:
        """Parse the word of an operator, such as `x` of `${A:-"x"}`; in double quotes, ' is an ordinary character."""
        start, pieces = self.at, list[Piece]()
        while self.at < len(self.text) and not self.peek("}"):
            if self.peek("\\\n"):
                self.at += 2
            elif (
                (quoted and self.peek("\\") and self.text[self.at + 1 : self.at + 2] not in tuple('$`"\\}'))
                or (quoted and self.peek("'"))
                or self.text[self.at] in "<>"
            ):
                self.literal(pieces)
            elif quoted and self.text[self.at] in "$`":
                pieces.append(self.expansion(quoted=True))
            else:
                self.piece(pieces)
        return Word(tuple(pieces), self.place(start))


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "?": "?", "a": "\a", "b": "\b",
            "e": "\x1b", "f": "\f", "v": "\v"}  # fmt: skip
_COMPOUND: Mapping[str, Callable[[_Parser], Command]] = {
    "if": _Parser.conditional,
    "while": _Parser.loop,
    "until": _Parser.loop,
    "for": _Parser.for_loop,
    "select": _Parser.for_loop,
    "case": _Parser.case,
    "function": _Parser.named_function,
    "{": _Parser.group,
    "[[": _Parser.test,
}
