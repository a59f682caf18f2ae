"""A model of transformers under lint: its sizes, and the places where they were written.

A size stands in `model.config`, in the config.json of `model.pretrained`, or nowhere: then it is the config class's
default, and what is wrong with it is reported at `model.config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dslpar.core.errors import Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.schema.transformers_configs import ConfigFile, visible_path


class TransformersModel:
    """What rules about models of transformers look at. Raises UnknownValueError where the model is none."""

    def __init__(self, cx: Context) -> None:
        config = cx.other_model.transformers
        if config is None:
            raise UnknownValueError("model.config")
        self.cx, self.config = cx, config

    @property
    def name(self) -> str:
        """The class, without its package."""
        return self.config.model

    @property
    def args(self) -> Mapping[str, Any]:
        """What the config gives beside the type."""
        return self.cx.other_model.args

    @property
    def known_file(self) -> ConfigFile:
        """The config.json of `pretrained`. Raises UnknownValueError: there is none."""
        if self.config.file is None:
            raise UnknownValueError("model.pretrained")
        return self.config.file

    def size(self, size: str) -> int:
        """Return a size of `transformers_configs.NAMES`. Raises UnknownValueError: it is not known."""
        found = self.config.size(size)
        if found is None:
            raise UnknownValueError(f"model.config.{size}")
        return found

    def problem(self, size: str, message: str, hint: str) -> Problem:
        """Make a problem of a size, at its place; `message` goes on after the size's name and value."""
        key = self.config.key(size)
        return self.problem_of_key(key, self.config.given(size), f"{key} {self.config.size(size)} {message}", hint)

    def problem_of_key(self, key: str, given: str, message: str, hint: str) -> Problem:
        """Make a problem of a key, where "config", "file" or nobody gives it."""
        whole = f"model.config.{key}"
        if given == "file":
            return Problem(self.place_in_file(key), message, hint, whole)
        more = "" if given else f" (the default of {self.config.row.get('config')})"
        return Problem(self.cx.config.at(whole), message + more, hint, whole)

    def place_in_file(self, key: str = "") -> Location:
        """Return where config.json has a key; without one, its beginning."""
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
