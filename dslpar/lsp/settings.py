"""Settings of a config in an editor: the worlds and the device that it is linted for.

    # dslpar: world-size=8,64 device=h100-80g

Such a comment on the first line, or one of the lines of comments that a file begins with, comes before the
`[tool.dslpar]` of the project. Several world sizes are linted at once. Mistakes in it are warnings at their place.
Comments of other kinds, such as `# dslpar: ignore-file[CFG101] why`, are left to lint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding, Location
from dslpar.core.project import Project, find_project, project_finding
from dslpar.core.suggest import did_you_mean, only_near
from dslpar.forecast.device import device_hint, find_device
from dslpar.linter.selection import Selection
from dslpar.lsp.lines import lines_of

_COMMENT = re.compile(r"#\s*dslpar:(?!\s*ignore\b)(?P<settings>[^#]*)")
"""Text after another `#` is a remark."""
_WORD = re.compile(r"\S+")
_MOST_RANKS = 2**31


class Settings(NamedTuple):
    """Settings of one config."""

    worlds: tuple[int | None, ...] = (None,)
    """Numbers of ranks; None: not given."""
    device: str = ""
    project: Project | None = None
    is_claimed: bool = False
    """The file in such a comment, or a pattern of its project, says that it is a config, whatever it has so far."""
    mistakes: tuple[Finding, ...] = ()
    """In the comment."""


def settings_of(path: str, text: str) -> Settings:
    """Return the settings of a config file with this text.

    Raises:
        DslparError: the table of the nearest pyproject.toml is invalid.
    """
    project = find_project(os.path.dirname(path) or ".")
    if project is not None:
        _check(project)
    size = project.world_size_of(path) if project is not None else None
    is_claimed = project is not None and project.claims(path)
    found = Settings((size,), project.device if project is not None else "", project, is_claimed)
    return _settings_in(path, text, found)


def _check(project: Project) -> None:
    """Raise DslparError for values of the table that need more than their type to be judged."""
    if project.device and find_device(project.device) is None:
        message = f"unknown device {project.device!r} in [tool.dslpar]"
        raise DslparError([project_finding(project, "device", message, device_hint(project.device))])
    try:
        Selection.parse((), (), project)
    except ValueError as error:
        message = str(error).removeprefix(f"{project.path}: ")
        hint = "choose codes, beginnings of codes, or names of docs/rules"
        raise DslparError([project_finding(project, "select", message, hint)]) from None


def _settings_in(path: str, text: str, found: Settings) -> Settings:
    """Return settings, with those of a file's comment."""
    for word, at in words_of(path, text):
        found = _with(found, word, at)
    return found


def words_of(path: str, text: str) -> Iterator[tuple[str, Location]]:
    """Yield the words of the comments of settings that a text begins with, such as `world-size=8`, and their places."""
    for number, line in enumerate(lines_of(text), 1):
        if line.strip() and not line.startswith("#"):
            return
        if match := _COMMENT.match(line):
            words = [*_WORD.finditer(line, *match.span("settings"))]
            if _is_remark([word[0] for word in words]):
                continue
            for word in words:
                yield word[0], Location(path, number, word.start() + 1, number, word.end() + 1)


def _is_remark(words: list[str]) -> bool:
    """Return whether words are a sentence, such as `dslpar: needs 64 GPUs`, and no settings with mistakes."""
    return len(words) > 2 and not any("=" in word or only_near(word, _READ) for word in words)


def settings_or_none(path: str, text: str) -> tuple[Settings, DslparError | None]:
    """Return the settings, and the error of the project's table, without which they are found then."""
    try:
        return settings_of(path, text), None
    except DslparError as error:
        return _settings_in(path, text, Settings()), error


def _with(settings: Settings, word: str, at: Location) -> Settings:
    """Return the settings with one word of the comment: `name=value`, or a mistake."""
    name, equals, value = word.partition("=")
    settings = settings._replace(is_claimed=settings.is_claimed or bool(equals))
    if not equals or name not in _READ:
        if not equals:
            message, hint = f"{word!r} is no setting", "write name=value, without blanks: world-size=8,64"
        else:
            message = f"unknown setting {name!r}"
            hint = did_you_mean(name.replace("_", "-"), _READ) or f"the settings are {', '.join(_READ)}"
        # A fix replaces what the hint is about alone: the name, or the value.
        at = at._replace(end_column=at.column + len(name))
        return settings._replace(mistakes=(*settings.mistakes, _mistake(message, hint, at)))
    read = _READ[name](settings, value)
    if isinstance(read, Settings):
        return read
    shown = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
    at = at._replace(column=at.column + len(word) - len(value)) if value else at
    mistake = _mistake(f"{name} is {shown!r}", read, at)
    return settings._replace(mistakes=(*settings.mistakes, mistake))


_MOST_SHOWN = 40


def worlds_of(value: str) -> tuple[int, ...] | str:
    """Return the numbers of ranks that a setting such as "8,64" gives, each once; the help if it is invalid."""
    sizes = value.split(",")
    if not all(map(_is_size, sizes)):
        return f"world-size is one or several numbers of ranks, from 1 and below {_MOST_RANKS}: world-size=8,64"
    return tuple(dict.fromkeys(map(int, sizes)))


def _with_sizes(settings: Settings, value: str) -> Settings | str:
    worlds = worlds_of(value)
    return worlds if isinstance(worlds, str) else settings._replace(worlds=worlds)


def _is_size(text: str) -> bool:
    # Python refuses to read a number of thousands of digits.
    return text.isdecimal() and len(text) <= len(str(_MOST_RANKS)) and 0 < int(text) < _MOST_RANKS


def _with_device(settings: Settings, value: str) -> Settings | str:
    return settings._replace(device=value) if find_device(value) is not None else device_hint(value)


_READ: dict[str, Callable[[Settings, str], Settings | str]] = {"world-size": _with_sizes, "device": _with_device}
"""Name -> the settings with a value; the help if the value is invalid."""


def _mistake(message: str, hint: str, at: Location) -> Finding:
    """Make a warning: the config itself may be right, and only an editor reads the comment."""
    return finding("CFG230", f"{message} in the comment of settings", hint, at)._replace(severity="warning")
