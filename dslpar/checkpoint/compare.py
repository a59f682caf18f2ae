"""What differs between a checkpoint and the config that goes on from it: refused, told, or free. No torch.

    check(stored, job, text)        # DslparError with everything that would make it another run
    changes(stored, job)            # ["optimizer.lr: 0.0003 -> 0.0001, from step 6 on"]

Values are compared, not texts: `train.dist` and `parallel`, `zero=1` and `zero=dict(stage=1)` are alike, and a default
that is written out is no change. DeepSpeed restores an optimizer's settings with its state, so that there a changed
lr is in the config and nowhere else; here the config of now decides, and only what moves comes from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dslpar.checkpoint import manifest
from dslpar.checkpoint.folder import FORMAT, Stored
from dslpar.checkpoint.resume_policy import REFUSED, REPORTED, resume_class
from dslpar.core.catalog import raise_finding
from dslpar.language import yaml_io
from dslpar.layout.resolve import Job
from dslpar.linter import check as linter_check
from dslpar.reporting import run_dir
from dslpar.schema import sections, sections_reader

_SHOWN = 12
"""Differing keys that a finding lists; of another model there may be dozens."""


class Change(NamedTuple):
    """A key whose value is not the stored one; None: it has none."""

    key: str
    stored: Any
    asked: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.stored)} -> {_shown(self.asked)}"


def check(stored: Stored, job: Job, data: str) -> None:
    """Refuses a checkpoint that this job cannot go on from.

    Raises:
        DslparError: it is of another run, or of another format. Equal on every rank.
    """
    _check_format(stored, job)
    refused = _refused(stored, job, data)
    if refused:
        lines = [f"{change.key}: stored {_shown(change.stored)}, asked {_shown(change.asked)}" for change in refused]
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        message = f"{stored.path} is of another run:\n    " + "\n    ".join(lines[:_SHOWN] + more)
        raise_finding("CKP202", message, _advice(refused), job.path, refused[0].key)


def changes(stored: Stored, job: Job) -> list[str]:
    """What a resume that `check` has passed does otherwise than the run that saved, a line each; of layouts one."""
    layouts = manifest.words_of(stored.manifest["layout"]), manifest.words_of(manifest.layout_of(job))
    moved = [f"layout: {layouts[0]} -> {layouts[1]}"] if layouts[0] != layouts[1] else []
    first = stored.step + 1
    told = (change for change in _differences(stored, job) if _class_of(change, stored, job) == REPORTED)
    return [*moved, *_other_versions(stored), *(f"{change}, from step {first} on" for change in told)]


def _other_versions(stored: Stored) -> Iterator[str]:
    """Not refused: but the bits of a step are those of the torch that took it."""
    before, now = stored.manifest["versions"], run_dir.versions()
    return (
        f"version of {name}: {before[name]} -> {now[name]}" for name in now if before.get(name) not in (None, now[name])
    )


def _check_format(stored: Stored, job: Job) -> None:
    found = stored.manifest["format"]
    if found > FORMAT:
        message = f"{stored.path} has format {found}, and this dslpar reads format {FORMAT}"
        raise_finding("CKP204", message, "resume with the dslpar that wrote it", job.path)
    if found < FORMAT:
        message = f"{stored.path} has format {found}, an earlier dslpar's; this one reads format {FORMAT}"
        hint = "finish that run with the dslpar that wrote it; or leave --resume out, and a new run starts"
        raise_finding("CKP220", message, hint, job.path)


# ---- differences ----


def _differences(stored: Stored, job: Job) -> Iterator[Change]:
    """All keys of the config that differ; one that the stored config has not is compared with its default."""
    before, now = manifest.flat(stored.manifest["config"]), manifest.flat(manifest.config_of(job))
    defaults = _defaults(job.spec)
    for key in sorted({*before, *now}):
        change = Change(key, before.get(key, defaults.get(key)), now.get(key))
        if change.stored != change.asked:
            yield change


def _refused(stored: Stored, job: Job, data: str) -> list[Change]:
    decided = [
        Change(key, stored.manifest["fixed"].get(key), now)
        for key, now in manifest.decided(job, data).items()
        if stored.manifest["fixed"].get(key) != now
    ]
    written = [change for change in _differences(stored, job) if _class_of(change, stored, job) == REFUSED]
    return sorted(decided + _said_by_type(written), key=lambda change: change.key)


def _said_by_type(refused: list[Change]) -> list[Change]:
    """Of a section of another type, the type alone: its other keys are those of something else."""
    other = {change.key.partition(".")[0] for change in refused if change.key.endswith(".type")}
    return [change for change in refused if change.key.endswith(".type") or change.key.partition(".")[0] not in other]


def _class_of(change: Change, stored: Stored, job: Job) -> str:
    """The class of this change: of its key, but for what depends on the values."""
    section = change.key.partition(".")[0]
    if section in ("optimizer", "lr_scheduler") and _moves_by_itself(stored, job):
        return REFUSED
    if section == "optimizer" and resume_class(change.key) == REFUSED and _keeps_states(change):
        return REPORTED
    return resume_class(change.key)


def _moves_by_itself(stored: Stored, job: Job) -> bool:
    """Whether a schedule of torch's or DeepSpeed's sets the optimizer's values, which are then restored."""
    before = stored.manifest["config"]["lr_scheduler"]["type"]
    return before not in sections.SCHEDULES or not isinstance(job.spec.lr_scheduler, sections.LRScheduler)


def _keeps_states(change: Change) -> bool:
    """Whether the optimizer has the same tensors either way: a number that is not 0 became another one."""
    return all(type(value) in (int, float) and value for value in (change.stored, change.asked))


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's config with what its author must have said alone: as one would write it."""
    spec_ = sections_reader.read(linter_check.load_text(yaml_io.dump_plain(config), "config.yaml")).spec
    bare = manifest.flat(manifest.plain_of(sections.Spec(model=spec_.model)))
    defaults = {
        key: value
        for key, value in manifest.flat(manifest.plain_of(_defaulted(spec_, required=_REQUIRED))).items()
        if not key.endswith(".type") and (key in bare or not _is_optional(key, bare))
    }
    return _without(config, defaults)


_REQUIRED = "<required>"


def _is_optional(key: str, bare: Mapping[str, Any]) -> bool:
    """Whether its section is there only where it is written, as `monitor.csv` is."""
    return not any(known.startswith(key.rpartition(".")[0] + ".") for known in bare)


def _without(config: Mapping[str, Any], defaults: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    kept = {}
    for key, value in config.items():
        left = _without(value, defaults, f"{above}{key}.") if isinstance(value, Mapping) else value
        if left != {} and defaults.get(f"{above}{key}", _REQUIRED) != left:
            kept[key] = left
    return kept


def _defaults(spec_: sections.Spec) -> dict[str, Any]:
    """What each key of these sections is if it is left out; of one that cannot be, what it is."""
    return manifest.flat(manifest.plain_of(_defaulted(spec_)))


def _defaulted(section: Any, required: Any = None) -> Any:
    """The section with every field at its default; `required`: what others become, if they do not stay."""
    values = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            values[item.name] = _defaulted(value, required)
        elif item.default is not dataclasses.MISSING:
            values[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            values[item.name] = item.default_factory()
        else:
            values[item.name] = value if required is None else required
    return type(section)(**values)


# ---- words ----


def _advice(refused: list[Change]) -> str:
    """What to write instead, key by key."""
    words = dict.fromkeys(_written(change) for change in refused[:_SHOWN])
    return (
        f"to go on from it: {', '.join(words)}; or leave --resume out, and a new run starts"
        " (dslpar.checkpoint.load_full_state gives it these weights, where they fit)"
    )


def _written(change: Change) -> str:
    if change.key == "data.text":
        return "data.files as they were (names and lengths are compared)"
    if change.stored is None:
        return f"leave {change.key} out"
    return f"{change.key}={_shown(change.stored)}"


def _shown(value: Any) -> str:
    """As one writes it: a text bare, as on the command line."""
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else repr(value) if not isinstance(value, Mapping) else json.dumps(value)
