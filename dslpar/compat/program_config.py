"""Configs of ColossalAI programs: as the program reads them (`gpc.config`), and as dslpar's sections.

    config = read("config.py")                  # or a dict
    config.values.BATCH_SIZE                    # the program's names, classes among them
    config.source                               # {'parallel': {...}, 'precision': {'dtype': 'fp16'}, ...}

A config whose lower-case names are all sections of dslpar is used unchanged. ColossalAI's own keys (`fp16`,
`clip_grad_norm`, `gradient_accumulation`, `zero.model_config`, ...) become sections by the table of `dslpar import`.
The program itself reads the model, the optimizer and the names in capitals.
"""

from __future__ import annotations

import inspect
import os
import runpy
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from dslpar.core.errors import DslparError, has_errors
from dslpar.language.lazy import Settings, settings
from dslpar.language.load import Config
from dslpar.language.source_text import config_text
from dslpar.language.tree import Reference
from dslpar.linter import check
from dslpar.linter.check import Source
from dslpar.linter.registry import rule_finding
from dslpar.migrate.convert import Entry, Import, convert
from dslpar.migrate.sources import read_text
from dslpar.schema.sections_reader import SECTIONS

_OF_THE_PROGRAM = ("model", "optimizer", "lr_scheduler", "data")
"""Sections whose contents a ColossalAI program builds itself."""
_RUN = (
    *("parallel", "precision", "zero", "schedule", "batch.accumulation", "train.clip_grad_norm", "train.seed"),
    *("gradient_handler", "activation_checkpoint", "deepspeed"),
)
"""What the keys of a ColossalAI config decide in a program's run, by dslpar's key."""
_READ_BY_COLOSSALAI = ("NUM_MICRO_BATCHES",)


class ProgramConfig(NamedTuple):
    """A program's config."""

    values: Settings
    """Every name of the file, with attribute access."""
    source: Config | Source
    """The file or dict that dslpar reads, or what `dslpar.load` has read."""
    notes: tuple[str, ...] = ()
    """What the author may have meant otherwise."""


def read(config: Config | Source) -> ProgramConfig:
    """Read a config file, or a dict of its names, or take what `dslpar.load` has read.

    Raises:
        DslparError: a key of ColossalAI needs a decision that only the config's author can make.
    """
    if isinstance(config, Mapping):
        return _read(config)
    loaded = config if isinstance(config, Config) else check.load(config)
    values = loaded.root.plain()
    if _is_native(values) and (values.keys() <= {*SECTIONS} or not has_errors(loaded.findings)):
        return ProgramConfig(settings(values), config)
    # The file is run, as ColossalAI runs it: programs call the classes in it, `gpc.config.model.pop('type')(...)`.
    path = config.path if isinstance(config, Config) else os.fspath(config)
    values = dict(_variables(runpy.run_path(path)))
    return _read(values)


def with_overrides(source: Config | Source, overrides: Sequence[str]) -> Config | Source:
    """Return a source that takes `key=value` overrides: a Config is loaded again with them, from its values."""
    if not isinstance(source, Config) or not overrides:
        return source
    return check.load(source.root.plain(), overrides, trusted=source.trusted)


def _read(values: Mapping[str, Any]) -> ProgramConfig:
    if _is_native(values):
        own = {name: value for name, value in values.items() if name in SECTIONS}
        return ProgramConfig(settings(values), own)
    result = _convert(values)
    notes = [
        f"{entry.key} has no effect: {entry.why}" for entry in result.entries if entry.fate == "dead" and entry.key
    ]
    return ProgramConfig(settings(values), _sections(values, result), tuple(notes))


def _variables(names: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in names.items():
        if not (name.startswith("_") or inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


def _is_native(values: Mapping[str, Any]) -> bool:
    """Return whether dslpar reads the config as it is; names in capitals belong to the program."""
    own = [name for name in values if name in SECTIONS or not name.isupper()]
    zero = values.get("zero")
    by_parts = isinstance(zero, Mapping) and not {"model_config", "optimizer_config", "level"}.isdisjoint(zero)
    holds_classes = any(isinstance(values.get(name), Mapping) and _has_class(values[name]) for name in own)
    reads = any(name in values for name in _READ_BY_COLOSSALAI)
    return set(own) <= {*SECTIONS} and not (by_parts or holds_classes or reads)


def _has_class(section: Mapping[str, object]) -> bool:
    return isinstance(section.get("type"), Reference) or callable(section.get("type"))


def sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dslpar's sections for ColossalAI's keys.

    >>> sections({"clip_grad_norm": 1.0, "gradient_accumulation": 4, "BATCH_SIZE": 8, "model": {"width": 4}})
    {'train': {'clip_grad_norm': 1.0, 'seed': 1024}, 'batch': {'accumulation': 4}}

    Raises:
        DslparError: a key needs a decision that only the config's author can make.
    """
    return _sections(values, _convert(values))


def _convert(values: Mapping[str, Any]) -> Import:
    read_by_run = {name: value for name, value in values.items() if name not in _OF_THE_PROGRAM}
    return convert(read_text(config_text(_plain(read_by_run)), "<program>.py", "colossalai"))


def _sections(values: Mapping[str, Any], result: Import) -> dict[str, Any]:
    for entry in result.entries:
        if entry.fate == "needed" and _is_of_run(entry):
            hint = f"write {entry.to} in dslpar's words, or correct the value" if entry.to else "correct the name"
            raise DslparError([rule_finding("CFG102", f"{entry.key}: {entry.why}", hint, entry.location, entry.key)])
    made: dict[str, Any] = {name: dict(value) for name, value in values.items() if name == "train"}
    for key, value in result.values.items():
        if key.startswith(_RUN):
            *path, last = key.split(".")
            section = made
            for name in path:
                section = section.setdefault(name, {})
            section[last] = value
    return made


def _is_of_run(entry: Entry) -> bool:
    return entry.to.startswith(_RUN) or (not entry.to and entry.key != "" and not entry.key.isupper())


def _plain(value: Any) -> Any:
    """Return a value as a config can write it: of an Enum its name, of another object its class's name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return (value if inspect.isclass(value) or inspect.isfunction(value) else type(value)).__qualname__
