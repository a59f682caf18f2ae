"""Load, lint and resolve a config, without torch; `check` reads and lints it once.

    checked = check(load("configs/gpt_3d.py", ["train.steps=10"]), world_size=8)
    checked.findings                # everything that the rules found
    job = checked.job               # raises DslparError with all findings if one of them is an error

`dslpar.lint` returns the findings in one call, and `dslpar.resolve` the job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.core.project import trusted_packages
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
"""The path of a config file, or its sections as a dict."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A config that was read and linted for one world size; the result of `check`."""

    context: Context
    """The input of the rules: sizes that follow from the config, the world size and the hosts."""
    findings: list[Finding]
    """All findings, in file order."""

    @property
    def config(self) -> Config:
        """The config as the author wrote it."""
        return self.context.config

    @property
    def reading(self) -> Reading:
        """The typed sections, and the key that the author wrote for each field."""
        return self.context.reading

    @property
    def has_errors(self) -> bool:
        """Return whether a finding is an error. Then `job` raises an exception."""
        return has_errors(self.findings)

    @cached_property
    def job(self) -> Job:
        """The resolved job: the config with all inferred values, for this world size.

        Raises:
            DslparError: lint found an error; the exception holds all findings.
            UnknownValueError: neither a world size nor hosts were given.
        """
        return self.job_of(self.context.world.size)

    def job_of(self, world_size: int) -> Job:
        """Resolve the job for any world size, even if `check` got none. Raises DslparError as `job` does."""
        if self.has_errors:
            raise DslparError(self.findings)
        return layout.resolve(self.reading.spec, world_size, self.config.path, trusted_packages(self.config.trusted))


def check(
    config: Config,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    registered: Registered | None = None,
    by_program: bool = False,
    forecasts: bool = True,
    errors_only: bool = False,
) -> Checked:
    """Read a config once, and lint it for a world size.

    `registered` are the names that this process has registered (`dslpar.schema.class_registry.registered`).
    `by_program`: the config may lack a model, since a program passes it to `dslpar.initialize(model=...)`.
    `forecasts`: forecast memory if the device is known. `errors_only`: skip the rules for warnings and infos, for
    callers that do not show them.
    """
    cx = context_of(config, world_size, cluster, registered, by_program, forecasts)
    return Checked(context=cx, findings=engine.run_rules(cx, engine.ERROR_RULES if errors_only else RULES))


def context_of(
    config: Config,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    registered: Registered | None = None,
    by_program: bool = False,
    forecasts: bool = True,
) -> Context:
    """Read a config, and return the input of the rules; see `check`, which also runs them."""
    reading = sections_reader.read(config, registered, by_program)
    return Context(config, reading, world_size, cluster, by_program, forecasts=forecasts)


def load(
    source: Source,
    overrides: Sequence[str] = (),
    texts: Mapping[str, str] = NO_TEXTS,
    trusted: Sequence[str] = (),
) -> Config:
    """Evaluate a config, and apply `key=value` overrides to it; mistakes become findings of the result.

    The findings of a dict point into the text that a config file with the same sections would have. `texts` maps real
    paths to texts that replace the files, for an editor with unsaved changes. `trusted` are packages that the config
    may call, in addition to those that the working folder's pyproject.toml trusts.
    """
    if isinstance(source, Mapping):
        from dslpar.language.source_text import config_text  # only programs pass a dict

        config = load_text(config_text(source), "<program>.py", overrides)
    else:
        config = evaluate_file(os.fspath(source), overrides, _shorthands(overrides), texts)
    return config._replace(trusted=tuple(trusted)) if trusted else config


def load_text(text: str, path: str, overrides: Sequence[str] = (), is_pyyaml: bool = False) -> Config:
    """Evaluate a text as `load` evaluates a file; `path` stands for the file in findings.

    `is_pyyaml`: whether YAML is read as PyYAML reads it, since its author's program does.
    """
    return evaluate_text(text, path, overrides, _shorthands(overrides), is_pyyaml)


def _shorthands(overrides: Sequence[str]) -> Mapping[str, str]:
    """Return the sections' shorthands, which only overrides need; without overrides return none, which is faster."""
    return shorthands() if overrides else NO_SHORTHANDS


def lint(
    config: Config | Source,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    cluster: Cluster | None = None,
    registered: Registered | None = None,
    by_program: bool = False,
) -> list[Finding]:
    """Return all findings of a config (or of its file, or of a dict) for a world size, in file order; see `check`.

    Raises:
        TypeError: overrides were given for a Config, which is already loaded.
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
        DslparError: lint found an error; the exception holds all findings.
        TypeError: overrides were given for a Config, which is already loaded.
    """
    return check(_loaded(config, overrides), world_size, cluster, registered).job


def _loaded(config: Config | Source, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load(config, overrides)
    if overrides:
        raise TypeError("overrides go to dslpar.load, which applies them")
    return config
