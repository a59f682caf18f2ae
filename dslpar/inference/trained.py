"""Open a run for inference: find its checkpoint, and lint the job of these ranks, before torch is imported.

    trained = open_run("outputs/gpt", world_size=2, overrides=["parallel.tensor.size=2"])
    trained.checkpoint, trained.job

The config is the one stored in the checkpoint. A single process runs the whole model, whatever the run's layout was.
Several ranks use the run's layout with overrides, or the layout of another config. Sections about training are left
out: they have no effect here, and could be invalid for these ranks. (litgpt and nanoGPT also read the config beside the
weights.)

The pipeline schedule is left out too, and with it the stages (chunks) per pipeline rank. Several chunks per rank serve
to overlap micro-batches. A forward here has one micro-batch, and would visit every rank once per chunk. So each
pipeline rank gets one stage, and the layers are partitioned anew.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dslpar.checkpoint import folder, manifest, resume_changes
from dslpar.checkpoint.folder import FORMAT, Checkpoint
from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.core.visible import visible
from dslpar.language import yaml_io
from dslpar.language.load import Config
from dslpar.layout.resolve import Job, Stages, chunks_of
from dslpar.linter import check
from dslpar.reporting.run_dir import CHECKPOINTS
from dslpar.schema import sections, sections_reader
from dslpar.schema.parallel_forms import pipeline_of, stage_ids_key

_OF_TRAINING = (
    *("optimizer", "lr_scheduler", "activation_checkpoint", "checkpoint", "monitor", "gradient_handler", "schedule"),
    *("deepspeed", "batch"),
)
"""Config sections that only training uses."""
_ZERO = 1
"""ZeRO stage in the config, which lint accepts with half precision and with pipelines. Inference shards nothing."""


class Trained(NamedTuple):
    """A checkpoint, and the job (config and layout) that runs its model."""

    checkpoint: Checkpoint
    config: Config
    """The checkpoint's config, or the config given instead, with overrides."""
    job: Job


def open_run(
    path: str,
    world_size: int,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    config: str | None = None,
    trusted: Sequence[str] = (),
    program_model: bool = False,
) -> Trained:
    """Open a checkpoint, and lint its config for these ranks.

    `path`: a checkpoint, or a run, of which the checkpoint called `name` is opened, or the newest if it is None.

    `config`: a config file of the same model, whose layout is used; None: the run's own config.

    `program_model`: the caller builds the model, because the run's program passed it. The config then has none.

    Raises:
        DslparError: there is no such checkpoint, its manifest cannot be read, lint finds errors, the model of `config`
            is not the one that was trained, or `program_model` is not true of the run.
    """
    stored = find_checkpoint(Path(path), name)
    _check_builder(stored, program_model)
    if config is None:
        kept = _without_training(stored.manifest["config"], world_size == 1, program_model)
        text = yaml_io.dump_plain(kept)
        left_out = [] if world_size == 1 else _cut_into_chunks(resume_changes.spec_of(stored))
        loaded = check.load_text(text, str(Path(stored.path, folder.MANIFEST)), [*left_out, *overrides])
        loaded = loaded._replace(trusted=tuple(trusted))
    else:
        left_out = [f"{section}=None" for section in _OF_TRAINING]
        left_out += _cut_into_chunks(sections_reader.read(check.load(config, trusted=trusted)).spec)
        loaded = check.load(config, [*left_out, f"zero={_ZERO}", *overrides], trusted=trusted)
    checked = check.check(loaded, world_size, by_program=program_model)
    if checked.has_errors:  # warnings are about training
        raise DslparError([found for found in checked.findings if found.severity == "error"])
    if program_model:
        return Trained(stored, loaded, _with_program_model(checked.job, stored))
    resume_changes.check_model(stored, checked.job)
    return Trained(stored, loaded, checked.job)


def _check_builder(stored: Checkpoint, program_model: bool) -> None:
    """Refuse a run whose model only its program can build, unless the caller builds it; and a needless builder."""
    if manifest.has_program_model(stored) == program_model:
        return
    cls = stored.manifest["config"]["model"]["type"]
    if program_model:
        message = f"{stored.path} has the model {cls} in its config, so --model has no effect"
        raise_finding("CFG233", message, "leave --model out", stored.path, "model")
    message = f"{stored.path} was saved by a program that passed the model, a {cls}; its config cannot build it"
    hint = "name the program's function or class that builds it: --model MODULE.NAME, such as own_model.build"
    raise_finding("CFG233", message, hint, stored.path, "model")


def _with_program_model(job: Job, stored: Checkpoint) -> Job:
    """Return the job as in training: with the class of the program's model, and a partition that is not known yet."""
    if job.mesh.tensor.size > 1:
        message = "a program's model cannot be measured on tensor ranks: its logits would be in parts"
        hint = "parallel.tensor=None: on its ranks, run replicas or pipeline stages"
        raise_finding("CFG233", message, hint, stored.path, "parallel.tensor")
    section = sections.OtherModel(target=stored.manifest["config"]["model"]["type"])
    spec = dataclasses.replace(job.spec, model=section)
    return dataclasses.replace(job, spec=spec, stages=Stages(None, None, None), has_program_model=True)


def _without_training(config: Mapping[str, Any], alone: bool, program_model: bool) -> dict[str, Any]:
    """Return a checkpoint's config without sections about training; `alone`: also without the layout.

    `program_model`: also without the class of the program's model.
    """
    left_out = {*_OF_TRAINING, *(["parallel"] if alone else []), *(["model"] if program_model else [])}
    found: dict[str, Any] = {name: value for name, value in config.items() if name not in left_out}
    train = {name: value for name, value in found.get("train", {}).items() if not (alone and name == "dist")}
    return found | {"zero": _ZERO, "train": train | {"eval_interval": 1}}


def _cut_into_chunks(spec: sections.Spec) -> list[str]:
    """Return the overrides that remove a config's partition into chunks; [] if each pipeline rank has one stage."""
    pipeline = pipeline_of(spec)
    if pipeline is None or chunks_of(spec, pipeline.size).num == 1:
        return []
    if spec.parallel.pipeline is None:
        return [f"{stage_ids_key(spec)}=None"]
    return [f"parallel.pipeline.{name}=None" for name in ("stage_ids", "counts")]


def find_checkpoint(path: Path, name: str | None = None) -> Checkpoint:
    """Return the checkpoint at `path`; if `path` is a run, its checkpoint called `name`, or its newest if it is None.

    "best" is the name of the checkpoint with the lowest held-out loss.

    Raises:
        DslparError: there is no such checkpoint, its manifest is corrupted, it has another format, or the newest
            checkpoint is suspect. (If the user names a suspect checkpoint, it is opened, and a note is printed.)
    """
    if not path.is_dir():
        hint = "name the output_dir of a run, or a checkpoint"
        raise_finding("CKP209", f"{str(path)!r} is not a folder", hint, str(path))
    if folder.is_checkpoint(path):
        if name is not None:
            message = f"{str(path)!r} is itself a checkpoint, and has no checkpoint {name!r} in it"
            raise_finding("CKP209", message, "leave --checkpoint out, or name the run's folder", str(path))
        return _noted(_opened(path))
    there = folder.list_folders(path / CHECKPOINTS) or folder.list_folders(path)
    found = there[-1:] if name is None else [each for each in there if each.name == name]
    if name == folder.BEST and (best := folder.best_of(folder.scan(there[0].parent).checkpoints if there else ())):
        found = [Path(best.path)]
    if not found:
        _refuse_name(path, name, there)
    stored = _opened(found[0])
    if name is None:
        folder.note_of_suspect(stored, was_named=False, others=there)
        return stored
    return _noted(stored)


def _noted(stored: Checkpoint) -> Checkpoint:
    if note := folder.note_of_suspect(stored, was_named=True):
        print(visible(note), file=sys.stderr)
    return stored


def _refuse_name(path: Path, name: str | None, there: Sequence[Path]) -> NoReturn:
    what = "checkpoint" if name is None else f"checkpoint {name!r}"
    names = ", ".join(each.name for each in there[-12:])
    hint = f"name one that is there: {names}" if names else "name the output_dir of a run that has saved one"
    raise_finding("CKP209", f"there is no {what} in {str(path)!r}", hint, str(path))


def _opened(path: Path) -> Checkpoint:
    try:
        stored = folder.open_checkpoint(path)
    except folder.ManifestError as error:
        hint = "restore it, or name another checkpoint of the run: --checkpoint NAME"
        raise_finding("CKP215", f"{path.name} is corrupted: {folder.MANIFEST}: {error}", hint, str(path))
    if stored.manifest["format"] != FORMAT:
        message = f"{path} has format {stored.manifest['format']}, but this dslpar reads format {FORMAT}"
        code = "CKP220" if stored.manifest["format"] < FORMAT else "CKP204"
        raise_finding(code, message, "use the dslpar that wrote it", str(path))
    return stored
