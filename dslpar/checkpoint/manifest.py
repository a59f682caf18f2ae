"""Manifest of a checkpoint: `checkpoint.json`, format 2. No torch.

    {"format": 2, "step": 5, "consumed_samples": 80,
     "layout": {"world_size": 8, "pipe": 2, "num_chunks": 1, "data": 2, "tensor": {"d": 1, ...}, "counts": [2, 2], ...},
     "fixed": {"model.hidden_size": 128, "batch.global_size": 16, ...},       # values that no resume may change
     "config": {"model": {"type": "GPT", ...}, "optimizer": {...}, ...},      # all sections; loads as a config
     "eval_loss": 2.31,                                                       # held-out loss, if it was measured
     "program_model": true,                                                   # only if a program passed the model
     "versions": {...}, "files": {...}, "digest": "..."}                      # `folder` adds files and digest

A reader of tensors does not need the saved layout, since the index locates each piece in the full tensor. A load
compares the saved layout with the job's: only if they are equal does it restore each rank's random states. torch's
distributed checkpoints and Megatron-LM's `dist_checkpointing` store no layout, so they do not restore random states, or
restore them by rank number.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from dslpar.checkpoint.folder import FORMAT, Checkpoint
from dslpar.checkpoint.resume_policy import REFUSED, resume_class
from dslpar.core.mesh import STANDARD_ORDER, TensorMesh
from dslpar.language import yaml_io
from dslpar.layout.resolve import Job, offloads
from dslpar.layout.transformers_data_types import mismatch
from dslpar.reporting import run_dir
from dslpar.schema import sections
from dslpar.schema.datasets import DATASETS, with_absolute_paths

Plain = dict[str, Any]
"""JSON object."""

OFFLINE = "offline"
"""Layout key of checkpoints that `dslpar checkpoint reshard` made: they have no random states."""


def manifest_of(
    job: Job, data: str, step: int, consumed_samples: int | None = None, eval_loss: float | None = None
) -> Plain:
    """Make the manifest of a checkpoint, without the list of its files.

    `job` is the engine's job, in which the partition into stages is known. `data` describes the training data
    (`dslpar.data.source`). `consumed_samples`: samples trained on so far; None: `step` global batches. `eval_loss`: the
    held-out loss after the step; None: it was not measured.
    """
    return {
        "format": FORMAT,
        "step": step,
        "consumed_samples": step * job.batch.global_size if consumed_samples is None else consumed_samples,
        "layout": layout_of(job),
        "fixed": fixed_values(job, data),
        "config": config_of(job),
        "versions": run_dir.versions(),
        **({"program_model": True} if job.has_program_model else {}),
        **({"eval_loss": eval_loss} if eval_loss is not None and math.isfinite(eval_loss) else {}),
    }


def has_program_model(checkpoint: Checkpoint) -> bool:
    """Return whether a program passed the model, so that the checkpoint's config cannot build it."""
    if "program_model" in checkpoint.manifest:
        return bool(checkpoint.manifest["program_model"])
    # Manifests from before the key existed name the class of the program's instance: these come from no config.
    return str(checkpoint.manifest["config"]["model"]["type"]).startswith(("__main__.", "torch.nn.modules.container."))


def layout_of(job: Job) -> Plain:
    """Return the layout as JSON values: mesh, stages, ZeRO. Equal layouts give every rank the same pieces.

    The pipeline schedule is left out, since it does not change a rank's state between two steps.
    """
    mesh, cuboid = job.mesh, _fields(job.mesh.tensor)
    return {
        "world_size": mesh.world_size,
        "pipe": mesh.pipe,
        "num_chunks": job.chunks.num,
        "data": mesh.data,
        "tensor": {name: value for name, value in cuboid.items() if name not in _NOT_IN_A_LAYOUT},
        "order": list(mesh.order),
        "counts": None if job.stages.counts is None else list(job.stages.counts),
        "zero_stage": job.spec.zero.stage,
        "offload": {what: offloads(job.spec, what) for what in ("optimizer", "param")},
    }


_NOT_IN_A_LAYOUT = ("keep", "comm_overlap", "symmetric_memory", "zero_over_d", "exchanges_tokens", "expert_chunks")
"""Fields of `mesh.TensorMesh` that change no piece of a tensor on any rank, or that follow from other settings."""


def same_layout(checkpoint: Checkpoint, job: Job) -> bool:
    """Return whether the saved layout equals the layout of `job`: the engine's job, with its partition into stages."""
    saved, own = checkpoint.manifest["layout"], layout_of(job)
    # Fields that the dslpar version of the checkpoint did not have get their defaults.
    tensor = {name: value for name, value in _fields(TensorMesh()).items() if name in own["tensor"]} | saved["tensor"]
    return bool(saved | {"num_chunks": num_chunks_of(saved), "tensor": tensor} == own)


def num_chunks_of(layout: Mapping[str, Any]) -> int:
    """Return the number of stages per pipeline rank in a saved layout: 1 in layouts from before the key existed."""
    return int(layout.get("num_chunks", 1))


def describe_layout(layout: Mapping[str, Any]) -> str:
    """Describe a layout in one line."""
    cuboid = layout["tensor"]
    mode = f" ({cuboid['mode']})" if cuboid["mode"] else ""
    ranks = cuboid["d"] * cuboid["q"] * cuboid["y"] * cuboid["z"]
    experts = f" (experts over {e * ranks} ranks)" if (e := cuboid.get("e", 1)) > 1 else ""
    each = f" ({chunks} stages each)" if (chunks := num_chunks_of(layout)) > 1 else ""
    pipe, data = f"pipeline {layout['pipe']}{each}", f"data {layout['data']}"
    sizes = f"{pipe} * {data} * tensor {ranks}{mode}{experts}, ZeRO {layout['zero_stage']}"
    legacy = "" if tuple(layout["order"]) == STANDARD_ORDER else f", order {'/'.join(layout['order'])}"
    counts = f", layers {'+'.join(map(str, layout['counts']))}" if layout["pipe"] > 1 and layout["counts"] else ""
    return sizes + counts + legacy


def fixed_values(job: Job, data: str) -> Plain:
    """Return the values that a resume must not change, by dotted config key."""
    written = {key: value for key, value in flatten(config_of(job)).items() if resume_class(key) == REFUSED}
    return written | derived_values(job, data)


def derived_values(job: Job, data: str) -> Plain:
    """Return the values that a resume must not change and that follow from several keys; `data` as in `manifest_of`."""
    return {"data.text": data, "data.seq_len": job.seq_len, "batch.global_size": job.batch.global_size}


# ---- the config as plain values ----


def config_of(job: Job) -> Plain:
    """Return all values of the config, including defaults, as a config that loads again; None values are left out."""
    config = plain_of(job.spec)
    # Paths become absolute: in the config file they are relative to its folder, and this copy is in another one.
    config["data"] = with_absolute_paths(config["data"], job.spec.data, job.path)
    if mismatch(job.spec.model, job.spec.data) is not None:  # a script passes the data, and may use these keys
        config["data"] = {key: value for key, value in config["data"].items() if key in ("seq_len", "eval_fraction")}
    return config


def plain_of(spec: sections.Spec) -> Plain:
    """Return a spec as plain JSON values."""
    # Converted to JSON and back: a resume compares them with values from a JSON file, in which tuples are lists.
    plain: Plain = json.loads(json.dumps(_plain_section(spec), default=str))
    return plain


def flatten(config: Mapping[str, Any], above: str = "") -> Plain:
    """Return the values by dotted key; a list is one value."""
    found: Plain = {}
    for key, value in config.items():
        found |= flatten(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


_BY_TYPE = (sections.Model, *sections.OPTIMIZERS.values(), *DATASETS.values())
"""Section classes whose class name a config gives as `type`; other classes are named by their field `target`."""
_NAMES = {cls: name for name, cls in DATASETS.items()}
_OPEN_FIELDS = ("args", "extra")
"""Fields whose entries are written as keys of the section itself."""
_EMPTY: tuple[object, ...] = (None, {}, [])


def _plain_section(value: Any) -> Any:
    """Return a section as in a config: its class as `type`, open fields beside the others, no empty values."""
    if isinstance(value, tuple | list) and any(map(dataclasses.is_dataclass, value)):
        return [_plain_section(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return yaml_io.portable(value)
    written: Plain = {"type": _NAMES.get(type(value), type(value).__name__)} if isinstance(value, _BY_TYPE) else {}
    for name, item in _fields(value).items():
        if name == "dataset":
            written = _plain_section(item) | written
        elif name in _OPEN_FIELDS:
            written |= yaml_io.portable(item)
        elif (plain := _plain_section(item)) not in _EMPTY:
            written["type" if name == "target" else name] = plain
    return written


def _fields(section: Any) -> Plain:
    return {item.name: getattr(section, item.name) for item in dataclasses.fields(section)}
