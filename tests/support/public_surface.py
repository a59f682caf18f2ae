"""The public surface of dslpar as data: names with signatures, config keys, rules, options, fields of JSON.

python -m tests.support.public_surface --write      # tests/unit/public_surface.json; review what `git diff` shows

A change of the house must not change what a config, a command line or a program can say. The list was written before
one; `tests/unit/test_public_surface.py` compares. Griffe and cargo-semver-checks compare an API with a former one in
the same way.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

PATH = ROOT / "tests/unit/public_surface.json"
_COMMANDS_WITH_ACTIONS = ("checkpoint", "data", "policy", "runs")
_JSON_COMMANDS = (
    ("lint", "configs/gpt_3d.py", "zero.stage=7", "--world-size", "8", "--format", "json"),
    ("show", "configs/gpt_3d.py", "--world-size", "8", "--format", "json"),
    ("plan", "configs/gpt_3d.py", "--world-size", "8", "--device", "h100-80g", "--format", "json"),
    ("config", "configs/gpt_3d.py", "--world-size", "8", "--format", "json"),
    ("config", "--reference", "--format", "json"),
    ("diff", "configs/gpt_3d.py", "configs/llama_2d.py", "--world-size", "8", "--format", "json"),
)


def surface() -> dict[str, Any]:
    """Return all of it; what only grows by a value, such as a path within JSON, has no values in it."""
    return {
        "names": names(),
        "keys": keys(),
        "rules": rules(),
        "options": options(),
        "json": {" ".join(words): fields_of(words) for words in _JSON_COMMANDS},
    }


def names() -> dict[str, dict[str, str]]:
    """Return the names of each module that docs/api shows, with the parameters of what can be called."""
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs/api").glob("*.md")))
    modules = sorted(re.findall(r"^# (dslpar.*)$", pages, re.MULTILINE))
    return {name: {each: _parameters(import_module(name), each) for each in _public(name)} for name in modules}


def _public(module: str) -> list[str]:
    found = import_module(module)
    return sorted(getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")])


def _parameters(module: Any, name: str) -> str:
    value = getattr(module, name)
    if not callable(value):
        return ""
    try:
        return ", ".join(map(_parameter, inspect.signature(value).parameters.values()))
    except ValueError:  # a class of C
        return ""


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    only = " (keyword)" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    optional = "" if parameter.default is inspect.Parameter.empty else "="
    return f"{stars}{parameter.name}{optional}{only}"


def keys() -> list[str]:
    """Return every key of a config, with what takes it, its default and its other names."""
    from dslpar.provenance.reference import rows

    found = {f"{row.key} [{row.of}] = {row.default}; {', '.join(row.aliases)}" for row in rows()}
    return sorted(found)


def rules() -> list[str]:
    """Return every code with its name and severity."""
    from dslpar.linter.registry import pages

    return sorted(f"{page.code} {page.name} {page.severity}" for page in pages())


def options() -> dict[str, list[str]]:
    """Return the options in the help of each command and action."""
    from dslpar.cli.main import COMMANDS

    found = {}
    for command in COMMANDS:
        text = _help(command)
        found[command] = _options(text)
        if command in _COMMANDS_WITH_ACTIONS:
            actions = re.findall(r"(?m)^ {2,4}([a-z][a-z-]*)  ", text)
            found |= {f"{command} {action}": _options(_help(command, action)) for action in actions}
    return found


def _options(text: str) -> list[str]:
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)))


def _help(*words: str) -> str:
    return _printed([*words, "--help"])


def _printed(words: list[str]) -> str:
    from dslpar.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(words)
    return out.getvalue()


def fields_of(words: tuple[str, ...]) -> list[str]:
    """Return the paths of all fields of what a command prints; items of lists are one."""
    with contextlib.chdir(ROOT):
        printed = json.loads(_printed(list(words)))
    return sorted(set(_paths(printed, "")))


def _paths(value: Any, path: str) -> list[str]:
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in _paths(each, f"{path}.{key}")] or [path]
    if isinstance(value, list):
        return [found for each in value for found in _paths(each, f"{path}[]")] or [path]
    return [path]


def main() -> int:
    """Write the list, or print it."""
    text = json.dumps(surface(), indent=1, sort_keys=True) + "\n"
    if sys.argv[1:] == ["--write"]:
        Path(PATH).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
