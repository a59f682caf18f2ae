"""Search for the files that a config names: by relative import, `get_config(name)`, or as a LiBai checkout's modules.

`get_config` searches like the package that it was imported from, so that no config reads another framework's file:

- dslpar: the folder of the file, then each parent folder, then the shipped configs (`dslpar/shipped_configs`, then the
  checkout's `configs/`);
- libai: `configs/` of the file's LiBai checkout; without a checkout, the folder of the file, then each parent folder.

A file's LiBai checkout is the nearest folder with `configs/common`, from the file's own folder upwards.
`from configs.common.train import train` and `from projects.QQP.configs.model import cfg` read files in the checkout, as
with the module path that LiBai's scripts set.
"""

from __future__ import annotations

import ast
import os.path
from collections.abc import Iterator

from dslpar.language.errors import ConfigError

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS, LIBAI = "dslpar", "libai"


def find_config(name: str, importer: str, home: str = OURS) -> str:
    """Find the file of `get_config(name)`, called in `importer` and imported from the package `home`.

    Raises:
        ConfigError: there is no such file, or a config may not read it.
    """
    parts = name.split("/")
    if os.path.isabs(name) or ".." in parts or "\\" in name or "\0" in name:
        hint = "correct the path: below this folder, its parents or the shipped configs, such as 'common/train.py'"
        raise ConfigError("CFG009", f"{name!r} is not a path that a config may read", hint)
    if not name.endswith(".py"):
        raise ConfigError("CFG009", f"{name!r} is not a Python config", "choose a .py file")
    checkout = libai_checkout(importer) if home == LIBAI else None
    folders = [os.path.join(checkout, "configs")] if checkout else search_path(importer, home)
    for folder in folders:
        path = os.path.join(folder, *parts)
        if os.path.exists(path):
            return path
    where = "beside this file, in its parents or among the shipped configs"
    if home == LIBAI:
        where = f"in {folders[0]}" if checkout else "beside this file or in its parents, and no LiBai checkout is there"
    raise ConfigError("CFG006", f"cannot find {name!r} {where}", "correct the path: 'common/train.py'")


def search_path(importer: str, home: str = OURS) -> list[str]:
    """List the folders that `get_config` searches: the importer's, its parents, and for dslpar the shipped configs."""
    return [*_upwards(importer), *(_shipped() if home == OURS else ())]


def _upwards(importer: str) -> list[str]:
    """List the importer's folder and its parent folders, as relative paths if the importer's path is relative."""
    folder = os.path.dirname(importer)
    depth = min(os.path.abspath(folder).count(os.sep), 64)
    above = (os.path.join(folder or os.curdir, *[os.pardir] * steps) for steps in range(1, depth + 1))
    return [folder, *map(os.path.normpath, above)]


def _shipped() -> list[str]:
    return [os.path.join(PACKAGE, "shipped_configs"), os.path.join(os.path.dirname(PACKAGE), "configs")]


def libai_checkout(importer: str) -> str | None:
    """Return the nearest folder above a file that has `configs/common`; None if there is none or it is dslpar's own."""
    for folder in _upwards(importer):
        configs = os.path.join(folder, "configs")
        if os.path.isdir(os.path.join(configs, "common")):
            ours = os.path.realpath(configs) in map(os.path.realpath, _shipped())
            return None if ours else folder
    return None


def find_module(module: str, level: int, importer: str) -> str:
    """Return the path that `from <level dots><module>` names, without the file extension."""
    folder = os.path.dirname(importer)
    steps = [os.pardir] * (level - 1) + (module.split(".") if module else [])
    return os.path.normpath(os.path.join(folder or ".", *steps))


def find_absolute(module: str, importer: str) -> str | None:
    """Return the path, without extension, of a config module that an absolute import names; None for other modules."""
    parts = module.split(".")
    if "configs" not in parts:
        return None
    checkout = libai_checkout(importer)
    folders = [checkout] if checkout else _upwards(importer)
    bases = [os.path.normpath(os.path.join(folder, *parts)) for folder in folders]
    there = next(filter(is_config, bases), None)
    return bases[0] if checkout and parts[0] == "configs" else there


def is_config(base: str) -> bool:
    """Return whether a path without extension is that of a config file or of a folder."""
    return os.path.exists(f"{base}.py") or os.path.isdir(base)


def home_of_get_config(tree: ast.Module) -> str:
    """Return the package that a file imports `get_config` from; empty if the file does not import it."""
    homes = (home for home, name in _imported(tree) if name == "get_config")
    return next(homes, "")


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the top-level package and the bound name of each absolute `from ... import ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield node.module.partition(".")[0], alias.asname or alias.name
