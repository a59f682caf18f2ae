"""One load: the files it reads, its budget and its findings; imports resolved by position.

A config file is evaluated afresh each time it is imported, so what one importer changes, another does not see (as in
detectron2's LazyConfig, whose relative imports also need no package); its syntax tree is kept. `get_config(name)`
looks beside the importing file, then in each parent folder, then among the shipped configs: `dslpar/shipped_configs`
where the package has it, else the checkout's `configs/`.
"""

from __future__ import annotations

import ast
import os.path
from collections.abc import Mapping
from typing import Any

from dslpar.core.errors import Finding, Location
from dslpar.core.named_tuple import NamedTuple
from dslpar.language.codes import BudgetError, MistakeError, finding
from dslpar.language.limits import MAX_FINDINGS, MAX_IMPORT_DEPTH, MAX_IMPORTS, MAX_TOTAL_BYTES, Budget, too_much
from dslpar.language.source import Source, parse, read_source
from dslpar.language.syntax import Checked, check
from dslpar.language.values import UNKNOWN, Dict, Slot

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Parsed(NamedTuple):
    """A file's text and syntax, kept for its next import."""

    source: Source
    tree: ast.Module
    checked: Checked


class Session:
    """What all files of one load share."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        """Texts that stand for the files at their real paths."""
        self.budget = Budget()
        self.findings: list[Finding] = []
        self.seen: set[Finding] = set()
        self.parsed: dict[str, Parsed | None] = {}
        self.sources: dict[str, str] = {}
        self.open: list[str] = []
        """Real paths of the files under evaluation, outermost first."""
        self.main = ""
        self.imports = 0
        self.now: tuple[Source, Any] | None = None
        """The statement under evaluation."""

    def enter(self, path: str) -> str:
        """Name the main file; its key among the parsed."""
        self.main = os.path.realpath(path)
        return self.main

    def add(self, item: Finding) -> None:
        """Record a finding once, however often its place is evaluated."""
        if item in self.seen:
            return
        self.seen.add(item)
        self.findings.append(item)
        if len(self.findings) >= MAX_FINDINGS:
            raise BudgetError(f"more than {MAX_FINDINGS} findings: the rest is not listed")

    def report(self, failed: MistakeError, place: Location) -> None:
        self.budget.spend(100)  # a message costs more than a step
        self.add(finding(failed.code, failed.place or place, failed.message[:500], failed.help[:1000]))

    def parse_text(self, source: Source, key: str) -> Parsed | None:
        """Parse and check a text; None if it is not Python, with a finding."""
        self.sources[source.path] = source.text
        if sum(map(len, self.sources.values())) > MAX_TOTAL_BYTES:
            raise BudgetError("the files of this config are too long together")
        self.parsed[key] = None
        try:
            tree = parse(source)
        except MistakeError as failed:
            self.report(failed, Location(source.path))
            return None
        checked = check(tree, source)
        for item in checked.findings:
            self.add(item)
        self.parsed[key] = Parsed(source, tree, checked)
        return self.parsed[key]

    def parse_file(self, path: str, place: Location) -> Parsed | None:
        """Read and parse a file, once; a failure to read it is a finding at `place`."""
        key = os.path.realpath(path)
        if key in self.parsed:
            return self.parsed[key]
        try:
            source = read_source(path, self.texts)
        except MistakeError as failed:
            missing = self.open and not os.path.lexists(path)
            self.parsed[key] = None
            self.report(MistakeError("CFG006", f"there is no file {path!r}") if missing else failed, place)
            return None
        return self.parse_text(source, key)

    def names_of(self, path: str, place: Location) -> dict[str, Slot] | None:
        """The names of a config file, evaluated afresh; None if that failed, with findings."""
        key = os.path.realpath(path)
        if key in self.open:
            chain = " -> ".join(os.path.basename(item) for item in [*self.open[self.open.index(key) :], key])
            raise MistakeError("CFG007", f"this import closes a cycle: {chain}")
        self.imports += 1
        if len(self.open) >= MAX_IMPORT_DEPTH or self.imports > MAX_IMPORTS:
            raise too_much("imports nested too deep, or too many of them", "import fewer files")
        parsed = self.parse_file(path, place)
        if parsed is None:
            return None
        return self.run(parsed, key)

    def run(self, parsed: Parsed, key: str) -> dict[str, Slot]:
        """Evaluate a parsed file."""
        from dslpar.language.statements import Evaluator

        self.budget.spend(20)
        evaluator = Evaluator(parsed.source, self)
        self.open.append(key)
        try:
            evaluator.run(parsed.tree.body)
        finally:
            self.open.pop()
        return evaluator.globals.names

    def open_config(self, name: str, importer: str, place: Location) -> Any:
        """`get_config(name)`: a mapping of that file's names."""
        return as_mapping(self.names_of(find_config(name, importer), place))


def as_mapping(names: dict[str, Slot] | None) -> Any:
    """A config's names as one mapping; unknown if the config could not be evaluated."""
    if names is None:
        return UNKNOWN
    made = Dict()
    for name, slot in names.items():
        if slot.bound_by != "module":
            made.put(name, slot.value, slot.place, slot.key_place)
    return made


def find_config(name: str, importer: str) -> str:
    """The path of `get_config(name)` in a file. Raises MistakeError if there is none."""
    parts = name.split("/")
    if os.path.isabs(name) or ".." in parts or "\\" in name or "\0" in name:
        help = "write a path below this folder, one of its parents or the shipped configs: 'common/train.py'"
        raise MistakeError("CFG009", f"{name!r} is not a path that a config may read", help)
    if not name.endswith(".py"):
        raise MistakeError("CFG009", f"{name!r} is not a Python config", "name a .py file")
    for folder in search_path(importer):
        path = os.path.join(folder, *parts)
        if os.path.exists(path):
            return path
    where = "beside this file, in its parents or among the shipped configs"
    raise MistakeError("CFG006", f"there is no {name!r} {where}", "correct the path: 'common/train.py'")


def search_path(importer: str) -> list[str]:
    """Folders where `get_config` looks."""
    folder = os.path.dirname(importer)
    full = os.path.abspath(folder)
    folders = [folder]
    while os.path.dirname(full) != full and len(folders) < 64:
        full = os.path.dirname(full)
        folders.append(full)
    return [*folders, os.path.join(PACKAGE, "shipped_configs"), os.path.join(os.path.dirname(PACKAGE), "configs")]


def find_module(module: str, level: int, importer: str) -> str:
    """The path that `from <level dots><module>` names, without its ending."""
    folder = os.path.dirname(importer)
    steps = [os.pardir] * (level - 1) + (module.split(".") if module else [])
    return os.path.normpath(os.path.join(folder or ".", *steps))
