"""Find the configs below a folder.

Python and YAML files are evaluated (never executed). A file is a config if it defines `model` or `parallel`, or two
other sections, at least one of them as a dict: many programs have a line `model = "gpt2"`, or `data = "x"` and
`train = True`. If a config with a model imports a file without a model, that file is a part of the config and is linted
with it. Hidden folders, virtual environments, caches and `outputs` are skipped, as in ruff. Links to folders are not
followed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence

from dslpar.core.suggest import only_near
from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.language.load import Config
from dslpar.language.tree import Node
from dslpar.schema.sections_reader import SECTIONS

ENDINGS = (".py", ".yaml", ".yml")
SKIPPED_FOLDERS = frozenset(["__pycache__", "node_modules", "outputs", "site-packages"])
_MAIN = frozenset(["model", "parallel"])
"""Sections that make a file a config."""
_DEFINES_MAIN_SECTION = re.compile(
    r"^(?:model|parallel)\s*(?::[^=\n]+)?=\s*(?:\{|(?:dict|L|LazyCall|DictConfig|OmegaConf\.create|GPT|Parallel)\()"
    r"|^(?:model|parallel):\s*(?:#.*)?$|^from \..* import .*\b(?:model|parallel)\b",
    re.MULTILINE,
)
"""A dict, by call or literal, or YAML's mapping: a program's own `model = load("gpt2")` is none."""


def files_below(folder: str, excluded: Callable[[str], bool] = lambda path: False) -> Iterator[str]:
    """Yield the Python and YAML files below a folder, in order, without the files and folders that are `excluded`."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(  # in place: os.walk enters only the folders that stay in the list
            name
            for name in folders
            if name not in SKIPPED_FOLDERS
            and not name.startswith(".")
            and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
            and not excluded(os.path.join(parent, name))
        )
        for name in sorted(files):
            path = os.path.join(parent, name)
            if name.endswith(ENDINGS) and not name.startswith(".") and not excluded(path):
                yield path


def skipped(configs: Sequence[Config]) -> dict[str, str]:
    """Return path -> reason for the files that are not linted by themselves."""
    with_model = [config for config in configs if _has_model(config)]
    parts = {
        os.path.realpath(path): config.path for config in with_model for path in config.sources if path != config.path
    }
    reasons = {}
    for config in configs:
        importer = parts.get(os.path.realpath(config.path))
        if not _has_model(config) and importer is not None:
            reasons[config.path] = f"a part of {importer}"
        elif not is_config(config):
            reasons[config.path] = "it defines no section model or parallel"
    return reasons


def is_config(config: Config) -> bool:
    """Return whether a file defines `model` or `parallel`, or two other sections, one of them as a dict.

    The second section may be misspelt, or have an unknown value.
    """
    if not config.complete:
        return _seems_to_be_config(config)
    sections = {name for name, node in config.root.value.items() if name in SECTIONS and _may_be_section(name, node)}
    if sections & _MAIN:
        return True
    misspelt = [name for name in config.root.value if name not in SECTIONS and only_near(str(name), SECTIONS)]
    unknown = config.unknown & (set(SECTIONS) - sections)
    # A program may assign to the name of a section too, such as `data`; its unsupported syntax gives it away.
    is_program = any(found.code == "CFG002" for found in config.findings)
    is_dict = any(config.root.value[name].is_mapping for name in (*sections, *misspelt))
    return is_dict and bool(sections) and not is_program and len(sections) + len(misspelt) + len(unknown) > 1


def _may_be_section(name: str, node: Node) -> bool:
    """Return whether a value may be that of a section; the two that make a file a config have no short form."""
    return node.value is not None and (node.is_mapping or name not in _MAIN)


def _seems_to_be_config(config: Config) -> bool:
    """Return whether a line defines `model` or `parallel`, for a file that could not be evaluated to its end."""
    text = config.sources.get(config.path)
    if text is None and os.path.isfile(config.path):
        # The file is too long or not UTF-8. latin-1 decodes any bytes, and the two names are ASCII.
        with contextlib.suppress(OSError), open(config.path, "rb") as file:
            text = file.read(MAX_SOURCE_BYTES).decode("latin-1")
    return text is None or bool(_DEFINES_MAIN_SECTION.search(text))


def _has_model(config: Config) -> bool:
    return "model" in config.root.value or "model" in config.unknown
