"""load -> lint -> resolve, without torch; a config is read and linted once, by `check`.

    checked = check(load("configs/gpt_3d.py", ["train.steps=10"]), world_size=8)
    checked.findings                # everything that the rules found
    job = checked.job               # raises DslparError with all findings where one of them is an error

`dslpar.lint` and `dslpar.resolve` are this in one call each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.core.frozen import frozen
from dslpar.language.load import NO_SHORTHANDS, NO_TEXTS, Config
from dslpar.language.load import load as evaluate_file
from dslpar.language.load import load_text as evaluate_text
from dslpar.layout import resolve as layout
from dslpar.layout.resolve import Job
from dslpar.linter import engine
from dslpar.linter.context import Context
from dslpar.linter.registry import RULES
from dslpar.schema import sections_reader
from dslpar.schema.keys import shorthands
from dslpar.schema.reader import Registered
from dslpar.schema.sections_reader import Reading

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster

Source = str | os.PathLike[str] | Mapping[str, object]
"""A config file's path; or its sections, as a program has them."""


@frozen
class Checked:
    """A config that was read and linted for one world; made by `check`, and handed on to all who need either."""

    context: Context
    """What the rules looked at: sizes that follow from the config, the world and the hosts."""
    findings: list[Finding]
    """What the rules found, in file order."""

    @property
    def config(self) -> Config:
        """What the author wrote."""
        return self.context.config

    @property
    def reading(self) -> Reading:
        """The typed sections, and where each key was written."""
        return self.context.reading

    @property
    def has_errors(self) -> bool:
        """Whether one of the findings is an error, so that there is no job."""
        return has_errors(self.findings)

    @cached_property
    def job(self) -> Job:
        """The job of this world.

        Raises:
            DslparError: lint found an error; it holds all findings.
            UnknownValueError: neither a world size nor hosts were given.
        """
        return self.job_of(self.context.world)

    def job_of(self, world_size: int) -> Job:
        """Resolve the job of another world, for what does not depend on it; raises as `job` does."""
        if self.has_errors:
            raise DslparError(self.findings)
        return layout.resolve(self.reading.spec, world_size, self.config.path, self.context.trusted)


def check(
    config: Config,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    registered: Registered | None = None,
    by_program: bool = False,
    forecasts: bool = True,
    errors_only: bool = False,
) -> Checked:
    """Read and lint a config for a world, once.

    `registered` are the names that this process has registered (`dslpar.schema.registry.registered`). `by_program`: a
    config without a model is one that a program completes, with `dslpar.initialize(model=...)`. `forecasts`: whether
    memory is forecast, where a device is known. `errors_only`: warnings and hints are not looked for, as where nobody
    reads them.
    """
    reading = sections_reader.read(config, registered, by_program)
    cx = Context(config, reading, world_size, cluster, by_program, forecasts=forecasts)
    return Checked(context=cx, findings=engine.run_rules(cx, engine.ERROR_RULES if errors_only else RULES))


def load(
    source: Source,
    overrides: Sequence[str] = (),
    texts: Mapping[str, str] = NO_TEXTS,
    trusted: Sequence[str] = (),
) -> Config:
    """Evaluate a config, and apply `key=value` overrides to it; mistakes are findings of the result.

    Of a dict the findings point into its text, as a file would have it. `texts` stand for the files at their real
    paths, as in an editor that has not saved yet. `trusted` are packages that the config may have called, besides those
    that the working folder's pyproject.toml trusts.
    """
    if isinstance(source, Mapping):
        from dslpar.language.source_text import config_text  # of programs alone

        config = load_text(config_text(source), "<program>.py", overrides)
    else:
        config = evaluate_file(os.fspath(source), overrides, _shorthands(overrides), texts)
    return config._replace(trusted=tuple(trusted)) if trusted else config


def load_text(text: str, path: str, overrides: Sequence[str] = ()) -> Config:
    """Evaluate a text that is in no file, as `load` does a file."""
    return evaluate_text(text, path, overrides, _shorthands(overrides))


def _shorthands(overrides: Sequence[str]) -> Mapping[str, str]:
    """Return those of the sections. Only overrides need them; collecting them from all fields takes its time."""
    return shorthands() if overrides else NO_SHORTHANDS


def lint(
    config: Config | Source,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    cluster: Cluster | None = None,
    registered: Registered | None = None,
    by_program: bool = False,
) -> list[Finding]:
    """Return all findings of a config (or of its file, or of a dict) for a world, in file order; see `check`.

    Raises:
        TypeError: overrides for a Config, which is loaded already.
    """
    return check(_loaded(config, overrides), world_size, cluster, registered, by_program).findings


def resolve(
    config: Config | Source,
    world_size: int,
    overrides: Sequence[str] = (),
    cluster: Cluster | None = None,
    registered: Registered | None = None,
) -> Job:
    """Return the Job of a config in a world of `world_size` ranks; see `check`.

    Raises:
        DslparError: lint finds an error; it holds all findings.
        TypeError: overrides for a Config, which is loaded already.
    """
    return check(_loaded(config, overrides), world_size, cluster, registered).job


def _loaded(config: Config | Source, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load(config, overrides)
    if overrides:
        raise TypeError("overrides go to dslpar.load, which applies them")
    return config
