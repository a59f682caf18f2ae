"""Checkpoints of a run, in `<output_dir>/checkpoints/step_000005/`: published atomically, readable in any layout.

A save writes the weights, optimizer state and counters of DeepSpeed's engine: each rank writes its own files, and rank
0 publishes their folder. A load returns an engine to the point at which the folder was saved. In the saved layout the
run continues bit for bit. In another layout each tensor of the model and the optimizer is restored bit for bit, but
random states begin as in a new run.

    checkpoint.save(engine, data)                            # all ranks together
    pending = checkpoint.begin_save(engine, buffers, data)   # ... steps ...; pending.publish()
    saved = checkpoint.find_checkpoint(job, world)           # what rank 0 sees, the same on every rank; None: nothing
    checkpoint.check(saved, job, data)                       # refuses another model, text, seed, ...
    checkpoint.load(engine, saved)                           # to the bit; in another layout each tensor to the bit

Each distinct tensor element is stored once, in safetensors files, under the model's parameter names. The index
(`index.json`) lists the file of each piece of each tensor, so a job of any layout can read the tensors.

- `folder` has the names of folders and files, and `writer` publishes them.
- `index`, `slices`, `tensor_file` and `tensor_reader` describe, write and read the tensors in the files.
- `shards` finds the tensors in DeepSpeed's engine. `saving` copies them to `host_buffers`, and `rank_files` writes
  the copies.
- `train_state` has the counters and the LR scheduler; `rank_state` has each rank's random states and buffers.
- `loading` loads a checkpoint, and `select` chooses the checkpoint to resume from.
- `manifest`, `resume_changes` and `resume_policy` define what a resume may change.
- `contents` checks that a load can read every file, before each load and for `dslpar checkpoint verify`: a digest
  shows only that no byte has changed. It uses `manifest_format`, `state_files` and `dslpar.core.json_values`.

`full_state_dict` writes no files. It gathers the full tensors of a model in one layout, and loads them into a model in
another layout:

    full = checkpoint.full_state(engine.module, engine.groups)
    checkpoint.load_full_state(other.module, full, other.groups)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslpar.checkpoint.folder import Checkpoint
    from dslpar.checkpoint.full_state_dict import full_state, load_full_state
    from dslpar.checkpoint.host_buffers import HostBuffers
    from dslpar.checkpoint.loading import load
    from dslpar.checkpoint.resume_changes import changes, check
    from dslpar.checkpoint.saving import PendingSave, begin_save, save
    from dslpar.checkpoint.select import find_checkpoint

__all__ = [
    "Checkpoint", "HostBuffers", "PendingSave", "begin_save", "changes", "check", "find_checkpoint", "full_state",
    "load", "load_full_state", "save",
]  # fmt: skip

_MODULES = {
    "Checkpoint": "folder", "HostBuffers": "host_buffers", "PendingSave": "saving", "begin_save": "saving",
    "changes": "resume_changes", "check": "resume_changes", "find_checkpoint": "select",
    "full_state": "full_state_dict", "load": "loading", "load_full_state": "full_state_dict", "save": "saving",
}  # fmt: skip
"""Public name -> its module, imported on first use: `dslpar checkpoint list` needs no torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'dslpar.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"dslpar.checkpoint.{_MODULES[name]}"), name)
