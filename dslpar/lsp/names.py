"""Variables of configs across files: where a name is bound, where it is used, and what a rename changes.

    names = Names(folders, texts)
    names.at("cfg.py", 3, 12)          # Symbol("common.py", "hidden")
    names.occurrences(symbol)          # every place of it, in all configs that read it

A file's module scope has one binding of a name: an assignment, or an import of another config's name. Parameters of
functions and names of comprehensions are other variables.
"""

from __future__ import annotations

import ast
import contextlib
import keyword
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dslpar.core.errors import Location
from dslpar.core.regular_file import read_bounded
from dslpar.language.errors import ConfigError
from dslpar.language.finder import find_absolute, find_config, find_module, home_of_get_config
from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.language.source import Source, parse
from dslpar.schema.sections_reader import SECTIONS

_MOST_FILES = 2000
"""Bound of the files of a folder that are searched."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Symbol(NamedTuple):
    """A variable: the file that assigns it, and its name there."""

    path: str
    """Real path."""
    name: str


class _Use(NamedTuple):
    """A place where a name of a file's module scope is written."""

    name: str
    at: Location
    is_alias: bool = False
    """It is the name in the other file, of `from .x import NAME as other`."""
    of: str = ""
    """The module that it is an attribute of, as in `common.NAME`."""


class RefusedError(Exception):
    """A rename that would change what a config means, or that cannot be carried out."""


class Names:
    """The variables of the configs below some folders; `texts` has what is open in the editor, by real path."""

    def __init__(self, folders: Sequence[str], texts: Mapping[str, str]) -> None:
        self.folders, self.texts = folders, texts
        self._parsed: dict[str, tuple[Source, ast.Module] | None] = {}

    # ---- places ----

    def at(self, path: str, line: int, column: int) -> Symbol | None:
        """Return the variable at a line and column, both from 1."""
        found = self._use_at(os.path.realpath(path), line, column)
        return self._home(*found) if found is not None else None

    def _use_at(self, path: str, line: int, column: int) -> tuple[str, str] | None:
        parsed = self._parse(path)
        for use in _uses(*parsed) if parsed is not None else ():
            at = use.at
            if at.line == line and at.column <= column <= at.end_column:
                if use.of:
                    file = self._modules(path).get(use.of)
                    return (file, use.name) if file else None
                there = [each for each in self._imports(path).values() if use.is_alias and each[1] == use.name]
                return there[0] if there else (path, use.name)
        return None

    def definition(self, symbol: Symbol) -> Location | None:
        """Return where a variable is assigned first."""
        parsed = self._parse(symbol.path)
        if parsed is None:
            return None
        source, tree = parsed
        for node in tree.body:
            for target in _targets(node):
                if isinstance(target, ast.Name) and target.id == symbol.name:
                    return source.location(target)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == symbol.name:
                return source.location(node)
        return None

    def file_at(self, path: str, line: int, column: int) -> str | None:
        """Return the file that an import or `get_config("FILE")` at a place names."""
        path = os.path.realpath(path)
        parsed = self._parse(path)
        if parsed is None:
            return None
        source, tree = parsed
        home = home_of_get_config(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.lineno == line:
                start = len("from ")
                if (
                    node.col_offset + start
                    < column
                    <= node.col_offset + start + node.level + len(node.module or "") + 1
                ):
                    return self._module(path, node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_config":
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    at = source.location(first)
                    if at.line == line and at.column <= column <= at.end_column:
                        return _or_none(first.value, path, home)
        return None

    def occurrences(self, symbol: Symbol) -> Iterator[Location]:
        """Yield every place of a variable: in its file, and in the configs of the folders that import it."""
        yield from (use.at for use in self._uses_of(symbol))

    def _uses_of(self, symbol: Symbol) -> Iterator[_Use]:
        for path in self._files(symbol):
            parsed = self._parse(path)
            if parsed is None:
                continue
            imports, modules = self._imports(path), self._modules(path)
            for use in _uses(*parsed):
                if use.of:
                    is_it = use.of in modules and self._home(modules[use.of], use.name) == symbol
                elif use.is_alias:
                    is_it = any(self._home(*home) == symbol for home in imports.values() if home[1] == use.name)
                else:
                    is_it = self._home(path, use.name) == symbol
                if is_it:
                    yield use

    def rename(self, symbol: Symbol, name: str) -> list[Location]:
        """Return the places that get the new name.

        Raises:
            RefusedError: the new name is taken or is no name, or the variable is a section.
        """
        if symbol.name in SECTIONS:
            raise RefusedError(f"{symbol.name!r} is a section: its name is dslpar's")
        if not name.isidentifier() or keyword.iskeyword(name):
            raise RefusedError(f"{name!r} is no name of a variable")
        if name in SECTIONS:
            raise RefusedError(f"{name!r} is a section: choose another name")
        # Another name that an import gives it (`import NAME as other`) stays.
        places = [use.at for use in self._uses_of(symbol) if use.name == symbol.name]
        for path in dict.fromkeys(at.path for at in places):
            parsed = self._parse(path)
            if parsed is not None and name in _names_in(parsed[1]):
                raise RefusedError(f"{os.path.basename(path)} has {name!r} already: choose another name")
        broken = next((path for path in self._files(symbol) if self._parse(path) is None), None)
        if broken is not None:
            raise RefusedError(f"{os.path.basename(broken)} does not parse: correct it first")
        return places

    # ---- files ----

    def _files(self, symbol: Symbol) -> list[str]:
        """List the files that may have a variable: its own, the open ones, and those of the folders that write it."""
        found = dict.fromkeys([symbol.path, *(path for path in self.texts if path.endswith(".py"))])
        count = 0
        for folder in self.folders:
            for where, inside, files in os.walk(folder):
                inside[:] = sorted(each for each in inside if not each.startswith((".", "__")))
                for file in sorted(files):
                    if file.endswith(".py") and count < _MOST_FILES:
                        count += 1
                        found.setdefault(os.path.realpath(os.path.join(where, file)))
        return [path for path in found if path == symbol.path or symbol.name in (self._text(path) or "")]

    def _text(self, path: str) -> str | None:
        if path in self.texts:
            return self.texts[path]
        try:
            return read_bounded(path, MAX_SOURCE_BYTES).decode("utf-8")
        except (OSError, ValueError, ConfigError):
            return None  # what reads it reports it

    def _parse(self, path: str) -> tuple[Source, ast.Module] | None:
        """Return the tree of a file; None if it does not parse or cannot be read."""
        if path not in self._parsed:
            text = self._text(path) if path.endswith(".py") else None
            self._parsed[path] = None
            if text is not None:
                source = Source(path, text)
                with contextlib.suppress(ConfigError):  # lint reports it
                    self._parsed[path] = source, parse(source)
        return self._parsed[path]

    def _imports(self, path: str) -> dict[str, tuple[str, str]]:
        """Return the file and the name there of each name that a file imports from another config."""
        parsed = self._parse(path)
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(parsed[1]) if parsed is not None else ():
            if isinstance(node, ast.ImportFrom) and (file := self._module(path, node)):
                found |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
        return found

    def _modules(self, path: str) -> dict[str, str]:
        """Return the file of each name that `from . import NAME` binds to another config."""
        parsed = self._parse(path)
        found: dict[str, str] = {}
        for node in ast.walk(parsed[1]) if parsed is not None else ():
            if isinstance(node, ast.ImportFrom) and node.level and not node.module:
                for alias in node.names:
                    file = f"{find_module(alias.name, node.level, path)}.py"
                    if os.path.isfile(file):
                        found[alias.asname or alias.name] = os.path.realpath(file)
        return found

    def _module(self, path: str, node: ast.ImportFrom) -> str | None:
        """Return the config that an import reads; None for a package, or a module of another kind."""
        if node.level:
            base: str | None = find_module(node.module or "", node.level, path)
        else:
            base = find_absolute(node.module or "", path)
        return os.path.realpath(f"{base}.py") if base and os.path.isfile(f"{base}.py") else None

    def _home(self, path: str, name: str) -> Symbol:
        """Follow imports to the file that assigns a name."""
        seen = set()
        while (path, name) not in seen:
            seen.add((path, name))
            other = self._imports(path).get(name)
            if other is None:
                break
            path, name = other
        return Symbol(path, name)


def _or_none(name: str, importer: str, home: str) -> str | None:
    try:
        return os.path.realpath(find_config(name, importer, home))
    except ConfigError:
        return None  # lint reports it


# ---- one file ----


def _uses(source: Source, tree: ast.Module) -> Iterator[_Use]:
    """Yield the uses of names of the module's scope, in the order of the tree."""
    yield from _uses_below(source, tree, frozenset())


def _uses_below(source: Source, node: ast.AST, hidden: frozenset[str]) -> Iterator[_Use]:
    """Yield the uses below a node; `hidden` are names of inner scopes."""
    if isinstance(node, ast.Name) and node.id not in hidden:
        yield _Use(node.id, source.location(node))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in hidden:
        at = source.location(node)
        start = at.end_column - len(node.attr)
        yield _Use(node.attr, Location(at.path, at.end_line, start, *at[3:5]), of=node.value.id)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield from _of_alias(source, alias)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in hidden:
        word = "class " if isinstance(node, ast.ClassDef) else "def "
        at = source.location(node)
        start = at.column + len(word)
        yield _Use(node.name, Location(at.path, at.line, start, at.line, start + len(node.name)))
    inner = hidden | _bound_in(node) if isinstance(node, _SCOPES) else hidden
    outside = _evaluated_outside(node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension) and child.iter in outside:
            # The first iterable belongs to the scope around the comprehension.
            yield from _uses_below(source, child.iter, hidden)
            for part in (child.target, *child.ifs):
                yield from _uses_below(source, part, inner)
        elif isinstance(child, ast.arguments):
            for default in filter(None, (*child.defaults, *child.kw_defaults)):
                yield from _uses_below(source, default, hidden)
        else:
            yield from _uses_below(source, child, hidden if child in outside else inner)


def _of_alias(source: Source, alias: ast.alias) -> Iterator[_Use]:
    at = source.location(alias)
    first = Location(at.path, at.line, at.column, at.line, at.column + len(alias.name))
    if alias.asname is None:
        yield _Use(alias.name, first)
    else:
        yield _Use(alias.name, first, is_alias=True)
        yield _Use(alias.asname, Location(at.path, at.end_line, at.end_column - len(alias.asname), *at[3:5]))


def _names_in(tree: ast.Module) -> set[str]:
    """Return every name that a file writes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def _bound_in(scope: ast.AST) -> frozenset[str]:
    """Return the names that a function or comprehension binds itself."""
    stored = (node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return frozenset([*stored, *(node.arg for node in ast.walk(scope) if isinstance(node, ast.arg))])


def _evaluated_outside(scope: ast.AST) -> list[ast.AST]:
    """Return the parts of a scope that are evaluated around it: defaults, decorators, and the first iterable."""
    if isinstance(scope, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return [scope.generators[0].iter]
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*scope.decorator_list]
    return []


def _targets(node: ast.stmt) -> Sequence[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            each for target in node.targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def foldable(text: str, path: str) -> Iterator[tuple[int, int, bool]]:
    """Yield the first and last line of what an editor may fold, and whether it is a comment."""
    lines = text.split("\n")
    start = 0
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("#"):
            start = start or number
        else:
            if start and number - 1 > start:
                yield start, number - 1, True
            start = 0
    try:
        tree = parse(Source(path, text))
    except ConfigError:
        return  # the editor keeps its folds
    kinds = (ast.stmt, ast.Call, ast.Dict, ast.List, ast.Tuple)
    spans = {(node.lineno, node.end_lineno or 0) for node in ast.walk(tree) if isinstance(node, kinds)}
    last_of: dict[int, int] = {}
    for first, last in spans:
        last_of[first] = max(last_of.get(first, 0), last)
    yield from ((first, last, False) for first, last in sorted(last_of.items()) if last > first)
