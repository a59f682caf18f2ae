"""Lint a config as it stands in an editor: unsaved, perhaps broken, for one world or several.

    found = analysed("cfg.py", texts={os.path.realpath("cfg.py"): "model = dict("})
    found.findings, found.config, found.place(...)

A text that does not parse is recovered first (`dslpar.language.recovery`), so that one statement hides no other one's
findings. What a half-written statement causes is not reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dslpar.core.errors import COMMAND_LINE, WORLD, DslparError, Finding, Location, Related
from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.language.load import YAML_ENDINGS, Config
from dslpar.language.recovery import UNKNOWN, Recovered, recovered
from dslpar.language.tree import Node
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.check import Checked
from dslpar.linter.config_files import is_config
from dslpar.linter.problem import UnknownValueError
from dslpar.linter.related import MOST, RelatedPlaces, key_place, overlap
from dslpar.linter.selection import Selection
from dslpar.lsp.settings import Settings, settings_or_none

_FITS = "FIT"
"""Family of rules about memory: a layout that does not fit is a layout."""


@dataclass(frozen=True)
class Shown:
    """A finding, and for which of several worlds it holds."""

    finding: Finding
    worlds: tuple[int, ...] = ()
    """Empty: for all."""
    key_place: Location | None = None
    """For a value of another file: where this file takes it, which is where the editor shows the finding."""

    @property
    def place(self) -> Location:
        """Return where the finding is shown."""
        return self.key_place or self.finding.location

    @property
    def message(self) -> str:
        """The message and its details; with the worlds if it does not hold for all."""
        only = f" (with {' and '.join(map(str, self.worlds))} ranks)" if self.worlds else ""
        return "\n".join([self.finding.message + only, *self.finding.details])


@dataclass(frozen=True)
class Analysis:
    """A config file's text, and what lint makes of it."""

    path: str
    text: str
    settings: Settings
    made: Recovered
    evaluated: Config
    is_config: bool
    """The file is a config, and no other Python file."""
    checked: Mapping[int | None, Checked]
    """By number of ranks; empty for other files, which are not linted."""
    findings: tuple[Shown, ...]

    @property
    def first(self) -> Checked:
        """The config for its first world.

        Raises:
            StopIteration: the file is no config.
        """
        return next(iter(self.checked.values()))

    @property
    def config(self) -> Config:
        """The evaluated config; for other files what could be evaluated of them."""
        return self.first.config if self.checked else self.evaluated

    def job(self, world: int | None = None) -> Job | None:
        """Return the job of a world, by default the first; None if the config has errors, but for what does not fit."""
        if not self.checked:
            return None
        world = world or next(iter(self.checked))
        checked = self.checked[world]
        if any(item.code.startswith(_FITS) for item in checked.findings):
            checked = check.check(self.config, world, errors_only=True, forecasts=False)
        try:
            return None if checked.has_errors else checked.job
        except (UnknownValueError, DslparError):
            return None  # no world, or what lint could not tell

    @cached_property
    def _related(self) -> dict[Shown, tuple[Related, ...]]:
        return {}

    @cached_property
    def _places(self) -> Mapping[int | None, RelatedPlaces]:
        return {world: RelatedPlaces(one.context) for world, one in self.checked.items()}

    def related(self, shown: Shown) -> tuple[Related, ...]:
        """Return the places of the other values that a finding names; of its own, if that is in another file."""
        if shown not in self._related:
            item, world = shown.finding, next(iter(shown.worlds or self._places))
            found = self._places[world].of(item)
            if shown.key_place is not None:
                written = Related(item.location, "the value is written here")
                found = (written, *(each for each in found if not overlap(each.location, shown.place)))[:MOST]
            self._related[shown] = found
        return self._related[shown]

    @cached_property
    def files(self) -> frozenset[str]:
        """Real paths of all files that the config reads."""
        return frozenset(os.path.realpath(path) for path in self.config.sources if not path.startswith("<"))


def analysed(path: str, texts: Mapping[str, str]) -> Analysis:
    """Lint a file; `texts` has the texts in the editor by real path, and this file's among them."""
    real = os.path.realpath(path)
    text = texts[real]
    settings, error = settings_or_none(path, text)
    # The evaluator refuses longer texts; parsing one takes long, and an editor asks at each key stroke.
    is_left = path.endswith(YAML_ENDINGS) or len(text) > MAX_SOURCE_BYTES
    made = Recovered(text, frozenset()) if is_left else recovered(text, path)
    config = check.load(path, (), {**texts, real: made.text})
    if not (settings.is_claimed or is_config(config)):
        return Analysis(path, text, settings, made, config, False, {}, ())
    if settings.device and config.root.get("cluster.device") is None and "cluster" not in config.unknown:
        config = _on(settings.device, config)
    checked = {world: check.check(config, world) for world in settings.worlds}
    of_project = map(_of_project, error.findings if error is not None else ())
    found = [Shown(item) for item in (*made.findings, *settings.mistakes, *of_project)]
    shown = (*found, *_shown(path, settings, made, checked))
    return Analysis(path, text, settings, made, config, True, checked, shown)


def _of_project(item: Finding) -> Finding:
    """Return a finding of pyproject.toml as one that every config shows: an editor may not have that file open."""
    return item._replace(message=f"{item.location}: {item.message}", location=Location(WORLD))


def _on(device: str, config: Config) -> Config:
    """Return a config with the device that its project or its comment names, as `cluster.device` would."""
    root, at = config.root, Location(COMMAND_LINE)
    cluster = root.get("cluster") or Node({}, at)
    if not isinstance(cluster.value, dict):
        return config  # lint says so
    named = cluster._replace(value={**cluster.value, "device": Node(device, at, at)})
    return config._replace(root=root._replace(value={**root.value, "cluster": named}))


def _shown(path: str, settings: Settings, made: Recovered, checked: Mapping[int | None, Checked]) -> list[Shown]:
    """Return the findings of all worlds, each once, without those that a broken statement causes."""
    worlds_of: dict[Finding, list[int | None]] = {}
    selection = Selection.parse((), (), settings.project)
    ignored = settings.project.ignored_in(path) if settings.project is not None else ()
    for world, one in checked.items():
        for item in one.findings:
            at = item.location
            hidden = at.path == path and any(line in made.broken for line in range(at.line, at.end_line + 1))
            if hidden or at.path == COMMAND_LINE or UNKNOWN in item.message:
                continue
            if selection.includes(item.code, ignored):
                worlds_of.setdefault(item, []).append(world)
    return [
        Shown(
            item,
            () if len(worlds) == len(checked) else tuple(world for world in worlds if world is not None),
            _key_place(path, made, next(iter(checked.values())).config, item),
        )
        for item, worlds in worlds_of.items()
    ]


def _key_place(path: str, made: Recovered, config: Config, item: Finding) -> Location | None:
    """Return where this file takes a value that another one writes; None for its own values, and for broken lines."""
    if item.location.path == path or item.location.path.startswith("<"):
        return None
    found = key_place(config, item.key)
    return found[0] if found is not None and found[0].line not in made.broken else None


def whole_of(key: Location, value: Location) -> Location:
    """Return the range of a key and its value; of the key alone if a variable holds the value, written above it.

    VS Code refuses a symbol that does not contain its key, and with it the whole list.
    """
    end = max((key.end_line, key.end_column), (value.end_line, value.end_column))
    return Location(key.path, key.line, key.column, *end)
