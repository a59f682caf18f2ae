"""Which files below a folder are configs.

Python and YAML files are evaluated (never executed), and are configs if they define `model` or `parallel`, or two
other sections. A file without a model that a config with one imports is a part of that config, and is linted as such.
Hidden folders, virtual environments, caches and `outputs` are skipped, as in ruff; links to folders are not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence

from dslpar.core.suggest import only_near
from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.language.load import Config
from dslpar.schema.sections_reader import SECTIONS

ENDINGS = (".py", ".yaml", ".yml")
SKIPPED_FOLDERS = frozenset(["__pycache__", "node_modules", "outputs", "site-packages"])
_DEFINES_MAIN_SECTION = re.compile(
    r"^(?:model|parallel)\b\s*[=.\[:]|^from \..* import .*\b(?:model|parallel)\b", re.MULTILINE
)


def files_below(folder: str, excluded: Callable[[str], bool] = lambda path: False) -> Iterator[str]:
    """Yield the Python and YAML files below a folder, in order; not those, nor the folders, that are `excluded`."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(  # in place: what is no longer in the list, os.walk does not enter
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
    """Return the files that are not linted by themselves, and why."""
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
            reasons[config.path] = "it defines neither model nor parallel"
    return reasons


def is_config(config: Config) -> bool:
    """Whether a file defines `model` or `parallel`, or two sections; a misspelt section, or an unknown one, counts."""
    if not config.complete:
        return _seems_to_be_config(config)
    sections = {name for name, node in config.root.value.items() if name in SECTIONS and node.value is not None}
    if sections & {"model", "parallel"}:
        return True
    misspelt = [name for name in config.root.value if name not in SECTIONS and only_near(str(name), SECTIONS)]
    unknown = config.unknown & (set(SECTIONS) - sections)
    # A program may assign to names of sections too, such as `data`; it also has syntax that no config has.
    is_program = any(found.code == "CFG002" for found in config.findings)
    return bool(sections) and not is_program and len(sections) + len(misspelt) + len(unknown) > 1


def _seems_to_be_config(config: Config) -> bool:
    """Whether some line of a file that could not be evaluated to its end defines `model` or `parallel`."""
    text = config.sources.get(config.path)
    if text is None and os.path.isfile(config.path):
        # Too long, or not UTF-8: latin-1 decodes any bytes, and the names looked for are ASCII.
        with contextlib.suppress(OSError), open(config.path, "rb") as file:
            text = file.read(MAX_SOURCE_BYTES).decode("latin-1")
    return text is None or bool(_DEFINES_MAIN_SECTION.search(text))


def _has_model(config: Config) -> bool:
    return "model" in config.root.value or "model" in config.unknown
