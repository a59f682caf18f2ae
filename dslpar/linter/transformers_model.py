"""A transformers model under lint: its sizes, and the location of each for messages.

A size comes from `model.config`, or from the config.json of `model.pretrained`. Otherwise it is the default of the
config class, and a problem with it is reported at `model.config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dslpar.core.errors import Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.schema.paths import visible_path
from dslpar.schema.transformers_configs import ConfigFile


class TransformersModel:
    """The input of rules about transformers models. Raises UnknownValueError for other models."""

    def __init__(self, cx: Context) -> None:
        config = cx.model.other.transformers
        if config is None:
            raise UnknownValueError("model.config")
        self.cx, self.config = cx, config

    @property
    def name(self) -> str:
        """The model's class, without its package."""
        return self.config.model

    @property
    def args(self) -> Mapping[str, Any]:
        """The model's keys besides its type."""
        return self.cx.model.other.args

    @property
    def known_file(self) -> ConfigFile:
        """The config.json of `pretrained`. Raises UnknownValueError without `pretrained`."""
        if self.config.file is None:
            raise UnknownValueError("model.pretrained")
        return self.config.file

    def size(self, size: str) -> int:
        """Return a size, by its name in `transformers_configs.NAMES`. Raises UnknownValueError if it is unknown."""
        found = self.config.size(size)
        if found is None:
            raise UnknownValueError(f"model.config.{size}")
        return found

    def problem(self, size: str, message: str, hint: str) -> Problem:
        """Make a problem at the location of a size; the message begins with the size's key and value."""
        key = self.config.key(size)
        return self.problem_of_key(key, self.config.given(size), f"{key} {self.config.size(size)} {message}", hint)

    def problem_of_key(self, key: str, given: str, message: str, hint: str) -> Problem:
        """Make a problem at a key; `given` is the origin of its value: "config", "file", or empty for a default."""
        whole = f"model.config.{key}"
        if given == "file":
            return Problem(self.place_in_file(key), message, hint, whole)
        more = "" if given else f" (the default of {self.config.row.get('config')})"
        return Problem(self.cx.config.at(whole), message + more, hint, whole)

    def place_in_file(self, key: str = "") -> Location:
        """Return the location of a key in config.json; for an empty key, the file."""
        file = self.known_file
        path = visible_path(file.path)
        found = min(
            re.finditer(rf'^([ \t]*)"{re.escape(key)}"\s*:\s*', file.text, re.MULTILINE), default=None, key=_indent
        )
        if not key or found is None:
            return Location(path)
        line = file.text.count("\n", 0, found.end()) + 1
        column = found.end() - (file.text.rfind("\n", 0, found.end()) + 1) + 1
        value = re.match(r'"(?:[^"\\]|\\.)*"|[^\s,}\]]+', file.text[found.end() :])
        return Location(path, line, column, line, column + (value.end() if value else 1))


def _indent(found: re.Match[str]) -> int:
    return len(found[1])
