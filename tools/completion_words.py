"""Generate dslpar/cli/completion.json, the words that a TAB completes, from the parsers, the schema and the rules.

    python tools/completion_words.py        # tools/docs.py does it too

`dslpar.cli.completion` reads the file, and imports none of the three.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dslpar.cli.completion import _WORDS as WORDS
from dslpar.cli.main import _KEYWORDS, COMMANDS
from dslpar.core.argument_parser import ArgumentParser
from dslpar.linter.registry import RULES
from dslpar.schema import datasets, families, sections
from dslpar.schema.keys import declared, type_of

_FOLDERS = frozenset({"DIR", "FOLDER", "RUN", "OUTPUT_DIR"})
_FILES = frozenset({"FILE", "PATH", "OUT", "SRC", "CFG"})


def text() -> str:
    """Return the file's text."""
    table = {
        "commands": {name: _command(name) for name in COMMANDS},
        "keys": keys(),
        "rules": {rule.code: rule.name for rule in RULES},
    }
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def _command(name: str) -> dict[str, Any]:
    command = importlib.import_module(f"dslpar.cli.{_KEYWORDS.get(name, name)}")
    if actions := getattr(command, "ACTIONS", None):
        made = {each: {"help": action.help, **_parsed(name, action)} for each, action in actions.items()}
        return {"default": getattr(command, "DEFAULT", ""), "actions": made}
    return _parsed(name, command)


def _parsed(name: str, command: Any) -> dict[str, Any]:
    """Return the flags and operands of a command or an action."""
    parser = ArgumentParser(prog=name)
    command.add_arguments(parser)
    return {
        # argparse has no public lists of its flags and operands.
        "flags": {flag: _argument(action, parser) for flag, action in parser._option_string_actions.items()},
        "operands": [_argument(action, parser) for action in parser._actions if not action.option_strings],
    }


def _argument(action: argparse.Action, parser: argparse.ArgumentParser) -> dict[str, Any]:
    is_hidden = action.help == argparse.SUPPRESS
    return {
        "help": parser._get_formatter()._expand_help(action) if action.help and not is_hidden else "",
        "hidden": is_hidden,
        "takes": action.nargs != 0,
        "choices": [str(each) for each in action.choices or ()],
        "of": _kind(action),
    }


def _kind(action: argparse.Action) -> str:
    """Return what values an argument has, by its metavar."""
    metavar = str(action.metavar or action.dest).partition(" ")[0]
    if "key=value" in str(action.metavar):
        return "config"
    if metavar in _FILES or action.dest == "hostfile":
        return "file"
    if metavar in _FOLDERS:
        return "folder"
    return "key" if metavar == "KEY" else "rule" if metavar in ("CODE", "CODES") else ""


def keys() -> dict[str, list[str]]:
    """Return the values of each key: types, choices, True and False."""
    of_type: Mapping[str, Sequence[str]] = {
        "model.type": sorted(families.sections()),
        "optimizer.type": sorted(sections.OPTIMIZERS),
        "lr_scheduler.type": sorted(sections.LR_SCHEDULERS),
        "data.type": sorted(datasets.DATASETS),
    }
    found: dict[str, set[str]] = {}
    for each in declared():
        values = found.setdefault(each.key, set(of_type.get(each.key, ())))
        if each.key not in of_type:
            with contextlib.suppress(KeyError):  # a section, or any value
                known = type_of(each.field)
                values.update(known.choices, ("True", "False") if bool in known.python_types else ())
    return {key: sorted(values) for key, values in sorted(found.items()) if "*" not in key}


if __name__ == "__main__":
    Path(WORDS).write_text(text(), encoding="utf-8")
