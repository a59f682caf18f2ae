"""Settings of a config in an editor: the worlds and the device that it is linted for.

    # dslpar: world-size=8,64 device=h100-80g

Such a comment on the first line, or one of the lines of comments that a file begins with, comes before the
`[tool.dslpar]` of the project. Several world sizes are linted at once.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from dslpar.core.errors import DslparError
from dslpar.core.project import Project, find_project
from dslpar.lsp.lines import lines_of

_COMMENT = re.compile(r"#\s*dslpar:(?P<settings>(?:\s+[\w-]+=\S+)+)\s*$")
_SETTING = re.compile(r"([\w-]+)=(\S+)")


class Settings(NamedTuple):
    """Settings of one config."""

    worlds: tuple[int | None, ...] = (None,)
    """Numbers of ranks; None: not given."""
    device: str = ""
    project: Project | None = None
    is_claimed: bool = False
    """The file says in such a comment that it is a config, whatever it has so far."""


def settings_of(path: str, text: str) -> Settings:
    """Return the settings of a config file with this text.

    Raises:
        DslparError: the table of the nearest pyproject.toml is invalid.
    """
    project = find_project(os.path.dirname(path) or ".")
    size = project.world_size_of(path) if project is not None else None
    found = Settings((size,), project.device if project is not None else "", project)
    for line in lines_of(text):
        if line.strip() and not line.startswith("#"):
            break
        if match := _COMMENT.match(line):
            found = _with(found, dict(_SETTING.findall(match["settings"])))._replace(is_claimed=True)
    return found


def settings_or_none(path: str, text: str) -> tuple[Settings, DslparError | None]:
    """Return the settings, and the error of the project's table, without which they are found then."""
    try:
        return settings_of(path, text), None
    except DslparError as error:
        return Settings(), error


def _with(settings: Settings, given: dict[str, str]) -> Settings:
    if "world-size" in given:
        sizes = [int(size) for size in given["world-size"].split(",") if size.isdecimal() and int(size)]
        settings = settings._replace(worlds=tuple(dict.fromkeys(sizes)) or settings.worlds)
    return settings._replace(device=given.get("device", settings.device))
