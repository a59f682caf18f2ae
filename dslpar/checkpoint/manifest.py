"""What a checkpoint and the run that resumes from it must share, and the finding where they do not. No torch.

Everything that DeepSpeed keeps in its files, and that a changed config would therefore change in name only, is fixed:
layout, model, optimizer, schedule, ZeRO, precision, clipping; and what makes the curve: seed, data, global batch. What
takes effect when it is changed may be changed: train.steps, intervals, monitors, accumulation, recomputation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from dslpar import record
from dslpar.checkpoint.folder import FORMAT, Stored
from dslpar.data.corpus import Piece
from dslpar.errors import DslparError, Finding, Location
from dslpar.job import Job

_SHOWN = 12
"""Differing keys that a finding lists; of another model there may be dozens."""

_RAW = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "data_types", "gradient_clipping")
"""Sections of the raw `deepspeed` config that its checkpoint depends on."""


def manifest_of(job: Job, data: str, step: int) -> dict[str, Any]:
    """The manifest of a checkpoint, but for the sizes of its files."""
    return {
        "format": FORMAT,
        "step": step,
        "consumed_samples": step * job.batch.global_size,
        "fixed": fixed(job, data),
        "versions": record.versions(),
    }


def fixed(job: Job, data: str) -> dict[str, Any]:
    """What must be equal on resume: a plain JSON value by each dotted key of the config."""
    mesh, made = job.mesh, job.spec
    cuboid = {name: value for name, value in _plain(mesh.tensor).items() if name != "keep"}
    sections: dict[str, Any] = {
        "parallel.pipeline": {"size": mesh.pipe, "counts": job.stages.counts},
        "parallel.data": mesh.data,
        "parallel.tensor": cuboid,
        "parallel.order": mesh.order,
        "model": {"type": type(made.model).__name__, **_plain(made.model)},
        "data": {"text": data, "seq_len": job.seq_len},
        "batch.global_size": job.batch.global_size,
        "optimizer": {"type": type(made.optimizer).__name__, **_plain(made.optimizer)},
        "lr_scheduler": _plain(made.lr_scheduler),
        "zero": _plain(made.zero),
        "precision": _plain(made.precision),
        "train.seed": made.train.seed,
        "train.clip_grad_norm": made.train.clip_grad_norm,
        "gradient_handler": [_plain(handler) for handler in made.gradient_handler],
        "deepspeed": {key: made.deepspeed[key] for key in _RAW if key in made.deepspeed},
    }
    plain: dict[str, Any] = json.loads(json.dumps(_flat(sections), default=str))
    return plain


def text_identity(pieces: Iterable[Piece]) -> str:
    """Of a text: names and lengths of its files; where they lie may differ."""
    seen = [(os.path.basename(piece.path), piece.num_bytes) for piece in pieces]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def check(stored: Stored, job: Job, data: str) -> None:
    """Refuses a checkpoint that this job cannot go on from.

    Raises:
        DslparError: a value that must be equal is not, or a later dslpar wrote it. Equal on every rank.
    """
    if stored.manifest["format"] > FORMAT:
        said = f"{stored.path} has format {stored.manifest['format']}, and this dslpar reads up to {FORMAT}"
        raise error("CKP204", "checkpoint-of-a-later-version", said, "resume with the dslpar that wrote it", job)
    before, now = stored.manifest["fixed"], fixed(job, data)
    differ = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if differ:
        listed = [f"{key}: stored {_shown(before, key)}, asked {_shown(now, key)}" for key in differ[:_SHOWN]]
        more = [f"and {len(differ) - _SHOWN} more"] if len(differ) > _SHOWN else []
        said = f"{stored.path} is of another run:\n    " + "\n    ".join(listed + more)
        help_ = "give these keys their stored values to resume; or leave --resume out, and a new run starts"
        raise error("CKP202", "checkpoint-of-another-run", said, help_, job, differ[0])


def error(code: str, name: str, said: str, help_: str, job: Job, key: str = "") -> DslparError:
    """One finding about a checkpoint."""
    return DslparError([Finding(code, name, "error", said, help_, Location(job.path), key)])


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"


def _plain(section: Any) -> dict[str, Any]:
    """The fields of one of the config's sections."""
    return {item.name: getattr(section, item.name) for item in dataclasses.fields(section)}


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat
