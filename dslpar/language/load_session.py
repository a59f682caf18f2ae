"""Session of one load: the files it reads, its budget and its findings.

A config file is evaluated afresh each time it is imported, so one importer does not see the changes of another (as in
detectron2's LazyConfig, whose relative imports also need no package). Only its syntax tree is cached. A file that an
absolute import names is a module: as in Python, it is evaluated once, and all of its importers share its values.
"""

from __future__ import annotations

import ast
import os.path
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from dslpar.core.errors import Finding, Location
from dslpar.language.errors import BudgetError, ConfigError, finding
from dslpar.language.limits import MAX_FINDINGS, MAX_IMPORT_DEPTH, MAX_IMPORTS, MAX_TOTAL_BYTES, Budget, limit_error
from dslpar.language.source import Source, parse, read_source
from dslpar.language.syntax import check_syntax
from dslpar.language.values import UNKNOWN, Binding, Dict, Value


class Parsed(NamedTuple):
    """A file's text and syntax tree, kept for its next import."""

    source: Source
    tree: ast.Module
    names_read: set[str]
    """Names that some expression of the file reads."""
    findings: list[Finding]
    """Findings about its syntax."""


@lru_cache(maxsize=16)
def parsed(path: str, text: str) -> Parsed:
    """Parse and check a text; `dslpar plan` loads one config with many overrides, an editor one with each key stroke.

    Raises ConfigError, as `parse` does.
    """
    source = Source(path, text)
    tree = parse(source)
    findings, names_read = check_syntax(tree, source)
    return Parsed(source, tree, names_read, findings)


class Session:
    """State shared by all files of one load."""

    def __init__(self, texts: Mapping[str, str], evaluate: Callable[[Parsed, Session], dict[str, Binding]]) -> None:
        self.texts = texts
        """Texts that replace the files at these real paths."""
        self.evaluate = evaluate
        """Evaluates a parsed file. Passed in to avoid a cycle: statements import files through this session."""
        self.budget = Budget()
        self.findings: list[Finding] = []
        self.parsed: dict[str, Parsed | None] = {}
        """Parsed files by real path; None for a file that could not be read or parsed."""
        self.sources: dict[str, str] = {}
        self.statement: tuple[Source, ast.stmt] | None = None
        """The statement under evaluation."""
        self._seen: set[Finding] = set()
        self._open: list[str] = []
        """Real paths of the files under evaluation, outermost first."""
        self.in_module = False
        """Whether the file under evaluation is a module."""
        self.modules: dict[str, dict[str, Binding] | None] = {}
        """Names of each module by real path, shared by all of its importers; None if it could not be evaluated."""
        self.is_pyyaml = False
        """Whether YAML is read as PyYAML reads it, for other frameworks' files: see `yaml_io`."""
        self._imports = 0

    def add(self, item: Finding) -> None:
        """Record a finding once, however often its expression is evaluated."""
        if item in self._seen:
            return
        self._seen.add(item)
        self.findings.append(item)
        if len(self.findings) >= MAX_FINDINGS:
            raise BudgetError(f"more than {MAX_FINDINGS} findings: the rest is not listed")

    def report(self, error: ConfigError, location: Location) -> None:
        """Record an error as a finding, at its own location if it has one, else at `location`."""
        self.budget.spend(100)  # a message costs more than a step
        self.add(finding(error.code, error.location or location, error.message[:500], error.hint[:1000]))

    def parse_text(self, source: Source, key: str) -> Parsed | None:
        """Parse and check a text. Returns None, with a finding, if it is not Python."""
        self.sources[source.path] = source.text
        if sum(map(len, self.sources.values())) > MAX_TOTAL_BYTES:
            raise BudgetError("the files of this config are too long together")
        self.parsed[key] = None
        try:
            made = parsed(source.path, source.text)
        except ConfigError as error:
            self.report(error, Location(source.path))
            return None
        for item in made.findings:
            self.add(item)
        self.parsed[key] = made
        return made

    def parse_file(self, path: str, location: Location) -> Parsed | None:
        """Read and parse a file once. A failure to read it is a finding at `location`."""
        key = os.path.realpath(path)
        if key in self.parsed:
            return self.parsed[key]
        try:
            source = read_source(path, self.texts)
        except ConfigError as error:
            missing = self._open and not os.path.lexists(path)
            self.parsed[key] = None
            self.report(ConfigError("CFG006", f"no such file: {path!r}") if missing else error, location)
            return None
        return self.parse_text(source, key)

    def names_of(self, path: str, location: Location, as_module: bool = False) -> dict[str, Binding] | None:
        """Evaluate a config file and return its names; None, with findings, if it cannot be read or parsed.

        `as_module`: an absolute import names the file, or a file imported absolutely imports it. A module is evaluated
        only once.
        """
        key = os.path.realpath(path)  # a cycle may go through links
        if as_module and key in self.modules:
            return self.modules[key]
        if key in self._open:
            chain = " -> ".join(os.path.basename(item) for item in [*self._open[self._open.index(key) :], key])
            raise ConfigError("CFG007", f"circular import: {chain}")
        self._imports += 1
        if len(self._open) >= MAX_IMPORT_DEPTH or self._imports > MAX_IMPORTS:
            raise limit_error("imports nested too deeply, or too many of them", "choose fewer files to import")
        parsed = self.parse_file(path, location)
        names = None if parsed is None else self.run(parsed, key, as_module)
        if as_module:
            self.modules[key] = names
        return names

    def run(self, parsed: Parsed, key: str, as_module: bool = False) -> dict[str, Binding]:
        """Evaluate a parsed file, marking it as open during the evaluation."""
        self.budget.spend(20)
        importer, self.in_module = self.in_module, as_module
        self._open.append(key)
        try:
            return self.evaluate(parsed, self)
        finally:
            self._open.pop()
            self.in_module = importer


def as_mapping(names: dict[str, Binding] | None) -> Value:
    """Make one mapping of a config's names without its modules; UNKNOWN if the config could not be evaluated."""
    if names is None:
        return UNKNOWN
    made = Dict()
    for name, binding in names.items():
        if binding.imported_as != "module":
            made.put(name, binding.value, binding.location, binding.name_location)
    return made
