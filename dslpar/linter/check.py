"""load -> lint -> resolve: the flow as functions, and all of it without torch.

config = dslpar.load("configs/gpt_3d.py", ["train.steps=10"])
findings = dslpar.lint(config, world_size=8)
job = dslpar.resolve(config, world_size=8)     # raises DslparError where lint finds an error
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.language.load import NO_SHORTHANDS, NO_TEXTS, Config
from dslpar.language.load import load as evaluate_file
from dslpar.language.load import load_text as evaluate_text
from dslpar.layout.resolve import Job, resolve
from dslpar.linter import engine
from dslpar.schema import sections_reader
from dslpar.schema.keys import shorthands
from dslpar.schema.reader import Registered

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster

Path = str | os.PathLike[str]


def load(path: Path, overrides: Sequence[str] = (), texts: Mapping[str, str] = NO_TEXTS) -> Config:
    """Evaluate a config file, and apply `key=value` overrides to it; mistakes are findings of the result.

    `texts` stand for the files at their real paths, as in an editor that has not saved yet.
    """
    return evaluate_file(os.fspath(path), overrides, _shorthands(overrides), texts)


def load_text(text: str, path: str, overrides: Sequence[str] = ()) -> Config:
    """As `load`, of a text that stands in no file."""
    return evaluate_text(text, path, overrides, _shorthands(overrides))


def _shorthands(overrides: Sequence[str]) -> Mapping[str, str]:
    """Return those of the sections. Only overrides need them; collecting them from all fields takes its time."""
    return shorthands() if overrides else NO_SHORTHANDS


def lint(
    config: Config | Path,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    cluster: Cluster | None = None,
    registered: Registered | None = None,
) -> list[Finding]:
    """All findings of a config (or of the file at a path) for a world, in file order.

    `registered` are the names that this process has registered (`dslpar.schema.registry.registered`).

    Raises:
        TypeError: overrides for a Config, which is loaded already.
    """
    return engine.lint(_loaded(config, overrides), world_size, cluster, registered)


def job_of(
    config: Config | Path,
    world_size: int,
    overrides: Sequence[str] = (),
    cluster: Cluster | None = None,
    registered: Registered | None = None,
) -> Job:
    """The Job of a config in a world of `world_size` ranks; `registered` as in `lint`.

    Raises:
        DslparError: lint finds an error; it holds all findings.
        TypeError: overrides for a Config, which is loaded already.
    """
    loaded = _loaded(config, overrides)
    findings = engine.lint(loaded, world_size, cluster, registered)
    if has_errors(findings):
        raise DslparError(findings)
    return resolve(sections_reader.read(loaded, registered).spec, world_size, loaded.path)


def _loaded(config: Config | Path, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load(config, overrides)
    if overrides:
        raise TypeError("overrides go to dslpar.load, which applies them")
    return config
