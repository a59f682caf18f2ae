"""Which files below a folder are configs.

Python and YAML files are read (never executed) and taken for configs where they give `model` or `parallel`, or two
other sections. What is imported by such a file and has no model itself is a part of it, and is linted as such. Hidden
folders, virtual environments, caches and `outputs` are left out, as in ruff; linked folders are not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from dslpar.core.suggest import only_near
from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.language.load import Config
from dslpar.schema.sections_reader import SECTIONS

ENDINGS = (".py", ".yaml", ".yml")
LEFT_OUT = frozenset(["__pycache__", "node_modules", "outputs", "site-packages"])
_MAIN = ("model", "parallel")
_GIVES = re.compile(r"^(?:model|parallel)\b\s*[=.\[:]|^from \..* import .*\b(?:model|parallel)\b", re.MULTILINE)


def files_below(folder: str) -> Iterator[str]:
    """The Python and YAML files below a folder, in order."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _left_out(os.path.join(parent, name)))
        yield from (os.path.join(parent, name) for name in sorted(files) if _may_be(name))


def _left_out(folder: str) -> bool:
    name = os.path.basename(folder)
    return name in LEFT_OUT or name.startswith(".") or os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _may_be(name: str) -> bool:
    return name.endswith(ENDINGS) and not name.startswith(".")


def skipped(configs: Sequence[Config]) -> dict[str, str]:
    """Path -> why it is not linted by itself, of the files that are no configs."""
    whole = [config for config in configs if _has_model(config)]
    parts = {os.path.realpath(path): config.path for config in whole for path in config.sources if path != config.path}
    why = {}
    for config in configs:
        user = parts.get(os.path.realpath(config.path))
        if not _has_model(config) and user is not None:
            why[config.path] = f"a part of {user}"
        elif not is_config(config):
            why[config.path] = "it gives neither model nor parallel"
    return why


def is_config(config: Config) -> bool:
    """Whether a file gives `model` or `parallel`, or two sections: misspelt ones and unknown ones among them."""
    if not config.complete:
        return _seems_to_be(config)
    given = {name for name, node in config.root.value.items() if name in SECTIONS and node.value is not None}
    if given & set(_MAIN):
        return True
    program = any(found.code == "CFG002" for found in config.findings)
    return bool(given) and not program and len(given) + _likely(config, given) > 1


def _seems_to_be(config: Config) -> bool:
    """Of a file that could not be read to its end: whether some line gives `model` or `parallel`."""
    text = config.sources.get(config.path)
    if text is None and os.path.isfile(config.path):
        with contextlib.suppress(OSError), open(config.path, "rb") as file:
            text = file.read(MAX_SOURCE_BYTES).decode("latin-1")  # too long, or not UTF-8
    return text is None or bool(_GIVES.search(text))


def _has_model(config: Config) -> bool:
    return "model" in config.root.value or "model" in config.unknown


def _likely(config: Config, given: Collection[str]) -> int:
    """How many other sections the file means to give."""
    names: Iterable[str] = (str(name) for name in config.root.value if name not in SECTIONS)
    misspelt = [name for name in names if only_near(name, SECTIONS)]
    return len(misspelt) + len(config.unknown & (set(SECTIONS) - set(given)))
