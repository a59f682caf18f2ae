"""Compare a checkpoint's config with the config that resumes it: changes are refused, reported, or free. No torch.

    check(checkpoint, job, text)    # DslparError with everything that would make it another run
    changes(checkpoint, job)        # ["optimizer.lr: 0.0003 -> 0.0001, from step 6 on"]

`resume_policy` explains the three classes of changes. Values are compared, not text: `train.dist` equals `parallel`,
`zero=1` equals `zero=dict(stage=1)`, and a default that is written out is no change. dslpar takes an optimizer's
settings from the present config, and only its state from the checkpoint. (DeepSpeed restores the settings with the
state, so a changed learning rate has no effect.)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dslpar.checkpoint import manifest
from dslpar.checkpoint.folder import FORMAT, Checkpoint
from dslpar.checkpoint.resume_effects import effects
from dslpar.checkpoint.resume_policy import REFUSED, REPORTED, resume_class
from dslpar.core.catalog import raise_finding
from dslpar.language import yaml_io
from dslpar.layout.resolve import Job
from dslpar.linter import check as linter_check
from dslpar.reporting import run_dir
from dslpar.schema import sections, sections_reader
from dslpar.schema.fields import Resume

_MAX_LISTED = 12
"""Maximum number of differing keys that a finding lists; two models may differ in dozens of keys."""


class Change(NamedTuple):
    """A config key with its value in the checkpoint and in the present config; None: the config has no such key."""

    key: str
    saved: Any
    requested: Any

    @property
    def section(self) -> str:
        """First part of the key."""
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.saved)} -> {_format_value(self.requested)}"


def check(checkpoint: Checkpoint, job: Job, data: str) -> None:
    """Refuse a checkpoint that this job cannot resume. `data` describes the training data (`dslpar.data.source`).

    Raises:
        DslparError: a change is refused, or the checkpoint has another format. Every rank raises the same error.
    """
    _check_format(checkpoint, job)
    refused = _refused_changes(checkpoint, job, data)
    if refused:
        message = f"{checkpoint.path} comes from another run:"
        raise_finding("CKP202", message, _hint(refused), job.path, refused[0].key, _lines(refused))


def check_model(checkpoint: Checkpoint, job: Job) -> None:
    """Refuse a job whose model differs from the checkpoint's; ignore all other differences.

    Raises:
        DslparError: CKP208: keys of the model's section differ; the first `_MAX_LISTED` are listed.
    """
    if found := [each for each in _changed_keys(checkpoint, job, REFUSED) if each.section == "model"]:
        hint = ", ".join(map(_suggestion, found[:_MAX_LISTED]))
        message = f"{checkpoint.path} holds another model:"
        raise_finding("CKP208", message, hint, job.path, found[0].key, _lines(found))


def _lines(changed: Sequence[Change]) -> list[str]:
    """Return a line for each change, at most `_MAX_LISTED`, and the number of those that are left out."""
    lines = [
        f"{each.key}: saved {_format_value(each.saved)}, requested {_format_value(each.requested)}" for each in changed
    ]
    more = [f"and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return lines[:_MAX_LISTED] + more


def changes(checkpoint: Checkpoint, job: Job) -> list[str]:
    """Return the changes to report for a resume that `check` allows, one per line; a changed layout is one line.

    Keys come first, then values that follow from them, such as the lr of the next step.
    """
    layouts = manifest.describe_layout(checkpoint.manifest["layout"]), manifest.describe_layout(manifest.layout_of(job))
    layout = [f"layout: {layouts[0]} -> {layouts[1]}"] if layouts[0] != layouts[1] else []
    reported = [f"{change}, from step {checkpoint.step + 1} on" for change in _changed_keys(checkpoint, job, REPORTED)]
    followed = effects(spec_of(checkpoint), job.spec, checkpoint.step)
    return [*layout, *_other_versions(checkpoint), *reported, *followed]


def _other_versions(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield changed versions of Python packages. They are never refused, but a step's last bits depend on torch's."""
    before, now = checkpoint.manifest["versions"], run_dir.versions()
    return (
        f"version of {name}: {before[name]} -> {now[name]}" for name in now if before.get(name) not in (None, now[name])
    )


def _check_format(checkpoint: Checkpoint, job: Job) -> None:
    found = checkpoint.manifest["format"]
    if found > FORMAT:
        message = f"{checkpoint.path} has format {found}, but this dslpar reads format {FORMAT}"
        raise_finding("CKP204", message, "resume with the dslpar that wrote it", job.path)
    if found < FORMAT:
        message = f"{checkpoint.path} has format {found}, from an earlier dslpar, but this one reads format {FORMAT}"
        hint = "finish that run with the dslpar that wrote it; or start a new run, without --resume"
        raise_finding("CKP220", message, hint, job.path)


# ---- differences ----


def _changed_keys(checkpoint: Checkpoint, job: Job, wanted: Resume) -> Iterator[Change]:
    """Yield changed config keys of class `wanted`. A key that the checkpoint's config lacks had its default."""
    before, now = manifest.flatten(checkpoint.manifest["config"]), manifest.flatten(manifest.config_of(job))
    defaults = manifest.flatten(manifest.plain_of(_with_defaults(job.spec)))
    for key in sorted({*before, *now}):
        change = Change(key, before.get(key, defaults.get(key)), now.get(key))
        if change.saved != change.requested and _resume_class(change, checkpoint, job) == wanted:
            yield change


def _refused_changes(checkpoint: Checkpoint, job: Job, data: str) -> list[Change]:
    derived = [
        Change(key, checkpoint.manifest["fixed"].get(key), now)
        for key, now in manifest.derived_values(job, data).items()
        if checkpoint.manifest["fixed"].get(key) != now
    ]
    configured = list(_changed_keys(checkpoint, job, REFUSED))
    # If a section's type has changed, only the type is listed: its other keys mean something else.
    retyped = {change.key.removesuffix(".type") for change in configured if change.key.endswith(".type")}
    configured = [each for each in configured if each.key.endswith(".type") or each.section not in retyped]
    return sorted(derived + configured, key=lambda change: change.key)


def _resume_class(change: Change, checkpoint: Checkpoint, job: Job) -> Resume:
    """Return the class of a change: the class of its key, except for optimizers and schedulers, as commented."""
    try:
        of_key = resume_class(change.key)
    except KeyError:  # a key of another version of dslpar
        return REFUSED
    if change.section in ("optimizer", "lr_scheduler"):
        # Schedulers of torch and DeepSpeed set the optimizer's values. A resume restores these values with the
        # scheduler's state, so a changed setting would have no effect.
        before = checkpoint.manifest["config"]["lr_scheduler"]["type"]
        if before not in sections.LR_SCHEDULERS or not isinstance(job.spec.lr_scheduler, sections.LRScheduler):
            return REFUSED
    # If a number changes from one non-zero value to another, the optimizer keeps the same state tensors, so the change
    # is only reported. A change from or to 0 is refused: SGD with momentum 0 has no momentum buffer.
    keeps_tensors = all(type(value) in (int, float) and value for value in (change.saved, change.requested))
    return REPORTED if change.section == "optimizer" and of_key == REFUSED and keeps_tensors else of_key


def model_section(checkpoint: Checkpoint) -> sections.Model | sections.OtherModel:
    """Return the model section of the config that a checkpoint was saved with."""
    return spec_of(checkpoint).model


def spec_of(checkpoint: Checkpoint) -> sections.Spec:
    """Return the spec of the config that a checkpoint was saved with."""
    return _spec(checkpoint.manifest["config"])


def _spec(config: Mapping[str, Any]) -> sections.Spec:
    return sections_reader.read(linter_check.load_text(yaml_io.dump_plain(config), "config.yaml")).spec


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's config without default values, as its author would write it."""
    spec = _spec(config)
    bare = manifest.flatten(manifest.plain_of(sections.Spec(model=spec.model)))
    # `bare` is the spec of a config that has only a model. A section that `bare` lacks, such as `monitor.csv`, exists
    # only if it is written. Its default values stay: without them an all-default section would disappear.
    defaults = {
        key: value
        for key, value in manifest.flatten(manifest.plain_of(_with_defaults(spec, required=_REQUIRED))).items()
        if not key.endswith(".type")
        and (key in bare or any(known.startswith(f"{key.rpartition('.')[0]}.") for known in bare))
    }
    return _without(config, defaults)


_REQUIRED = "<required>"


def _without(config: Mapping[str, Any], defaults: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    remaining = {}
    for key, value in config.items():
        rest = _without(value, defaults, f"{above}{key}.") if isinstance(value, Mapping) else value
        if rest != {} and defaults.get(f"{above}{key}", _REQUIRED) != rest:
            remaining[key] = rest
    return remaining


def _with_defaults(section: Any, required: Any = None) -> Any:
    """Return the section with every field at its default. Required fields become `required`; None: they stay."""
    values = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            values[item.name] = _with_defaults(value, required)
        elif item.default is not dataclasses.MISSING:
            values[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            values[item.name] = item.default_factory()
        else:
            values[item.name] = value if required is None else required
    return type(section)(**values)


# ---- messages ----


def _hint(refused: list[Change]) -> str:
    """Return the hint of a refused resume: the saved value of each refused key, to write in the config."""
    suggestions = dict.fromkeys(_suggestion(change) for change in refused[:_MAX_LISTED])
    return (
        f"to resume it: {', '.join(suggestions)}; or start a new run, without --resume"
        " (dslpar.checkpoint.load_full_state loads the weights that fit into it)"
    )


def _suggestion(change: Change) -> str:
    if change.key == "data.text":
        return "the original data (their type, file names, file lengths and tokenizer are compared)"
    if change.saved is None:
        return f"leave {change.key} out"
    return f"{change.key}={_format_value(change.saved)}"


def _format_value(value: object) -> str:
    """Format a value as on the command line."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return "nothing" if value is None else value if isinstance(value, str) else repr(value)
