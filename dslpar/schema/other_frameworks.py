"""Frameworks whose configs dslpar recognises, and cannot judge or convert.

    recognise(values, text, "torchtitan.toml").title      # 'torchtitan'

A framework is recognised by several keys that no other framework has. They are in the table
data/other_frameworks.json, each below its source. A script is recognised by a command that it starts. A framework
without keys has a table in dslpar/migrate/data: its config is converted, and the scripts that start it are not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from dslpar.schema.tables import load_table

SHELL_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
TOML = ".toml"
_DEEPEST = 4
"""Levels of keys that are looked at."""
_PACKAGE = re.compile(r"^# @package\b", re.MULTILINE)


class OtherFramework(NamedTuple):
    """A framework of the table, with the features by which its files are recognised."""

    name: str
    title: str
    endings: tuple[str, ...]
    """Endings of its config files."""
    least: int
    """Number of keys that a file must have."""
    keys: Mapping[str, str]
    """Feature -> its source. `features_of` describes features."""
    commands: Mapping[str, str]
    """Command that a script starts -> its source."""
    without: tuple[str, ...]
    """Features that its files do not have: files with one of them are for `dslpar import`."""
    yields: bool
    """Whether a framework that `dslpar import` reads comes first: its program may be started, or its files composed."""
    help: str
    """What becomes of such a file in a dslpar config."""

    @property
    def advice(self) -> str:
        """Return the help for the author of such a file."""
        return f"choose a dslpar config (`dslpar init` writes one); {self.help}"


@cache
def other_frameworks() -> tuple[OtherFramework, ...]:
    """Return the table."""
    return tuple(
        OtherFramework(
            name=name,
            title=row["title"],
            endings=tuple(row["endings"]),
            least=row["least"],
            keys={key: source for source, keys in row["keys"].items() for key in keys},
            commands={command: source for source, commands in row["commands"].items() for command in commands},
            without=tuple(row.get("without", ())),
            yields=row.get("yields", False),
            help=row["help"],
        )
        for name, row in load_table("other_frameworks").items()
    )


def comes_first(also: Collection[str], path: str) -> bool:
    """Return whether a framework that `dslpar import` reads is certain: by arguments, or two kinds of keys (`also`)."""
    return path.endswith(SHELL_ENDINGS) or bool(also)


def recognise(values: Mapping[str, Any], text: str, path: str) -> OtherFramework | None:
    """Return the framework of a file, from its values and its text; None if it is unknown."""
    if path.endswith(SHELL_ENDINGS):
        return _of_script(text)
    if path.endswith(TOML):
        values = _values_of_toml(text)
    features = set(features_of(values)) | ({"# @package"} if _PACKAGE.search(text) else set())
    counts = [
        (len(features & framework.keys.keys()), framework)
        for framework in other_frameworks()
        if path.endswith(framework.endings) and features.isdisjoint(framework.without)
    ]
    found = [(count, framework) for count, framework in counts if count >= framework.least]
    return max(found, key=lambda each: each[0])[1] if found else None


def features_of(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the features of a config.

    They are its dotted keys; `*.KEY` for a key that begins with an underscore; `defaults:WORD` for the first words in
    Hydra's list, `defaults:[]` for the list itself; `defaults:*.yaml` for a single file in place of the list, from
    which a config of NeMo RL inherits; and `${}` for an interpolation in a value.
    """
    left: list[tuple[str, object, int]] = [("", values, 0)]
    while left:
        above, value, depth = left.pop()
        if isinstance(value, str) and "${" in value:
            yield "${}"
        if above == "defaults" and isinstance(value, str) and value.endswith((".yaml", ".yml")):
            yield "defaults:*.yaml"
        if depth == _DEEPEST:
            continue
        if isinstance(value, Mapping):
            for key, below in value.items():
                dotted = f"{above}.{key}" if above else str(key)
                yield dotted
                if str(key).startswith("_"):
                    yield f"*.{key}"
                left.append((dotted, below, depth + 1))
        elif isinstance(value, list | tuple):
            if above == "defaults":
                yield "defaults:[]"
            for item in value:
                if above == "defaults":
                    word = item if isinstance(item, str) else next(iter(item), "") if isinstance(item, Mapping) else ""
                    yield f"defaults:{str(word).partition(' ')[0]}"
                left.append((above + ".*", item, depth + 1))


def _of_script(text: str) -> OtherFramework | None:
    """Return the framework whose command a script starts: the first in the script, and Accelerate last."""
    found: list[tuple[bool, int, OtherFramework]] = []
    for framework in other_frameworks():
        for command in framework.commands:
            words = r"\s+".join(map(re.escape, command.split()))
            if match := re.search(rf"^[^#\n]*?(?<![\w./-])(?:\S*/)?{words}(?![\w-])", text, re.MULTILINE):
                # `accelerate launch` may start another framework's program.
                found.append((framework.name == "accelerate", match.end(), framework))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _values_of_toml(text: str) -> Mapping[str, Any]:
    try:
        tomllib = import_module("tomllib")  # few files are TOML
        values: Mapping[str, Any] = tomllib.loads(text)
    except (ModuleNotFoundError, ValueError):  # Python 3.10 has no parser; TOMLDecodeError is a ValueError
        return {}
    return values
