"""Checkpoints of a run, in `<output_dir>/checkpoints/step_000005/`: published all at once, readable in any layout.

A save takes DeepSpeed's engine with its weights, optimizer and counters, and the job that describes the run. It
publishes a folder of files that each rank has written. A load returns an engine to the point at which that folder was
saved.

    checkpoint.save(engine, data)                            # all ranks together
    pending = checkpoint.begin_save(engine, buffers, data)   # ... steps ...; pending.publish()
    saved = checkpoint.find_checkpoint(job, world)           # what rank 0 sees, the same on every rank; None: nothing
    checkpoint.check(saved, job, data)                       # refuses another model, text, seed, ...
    checkpoint.load(engine, saved)                           # to the bit; in another layout each tensor to the bit

Each distinct element is stored once, in safetensors files under the model's own parameter names. An index lists which
piece lies in which file, so any layout can read them.

- `folder` has the names of folders and files, and `writer` publishes them.
- `index`, `slices`, `tensor_file` and `tensor_reader` describe, write and read the tensors in the files.
- `shards` finds the tensors in DeepSpeed's engine. `saving` copies them to `host_buffers`, and `rank_files` writes
  them.
- `loading` loads a checkpoint, and `select` chooses one.
- `manifest`, `compare` and `resume_policy` define what a resume may change.
- `contents` reads a whole checkpoint as a load does, before each load and for `dslpar checkpoint verify`: a digest
  shows only that no byte has changed. It uses `manifest_format`, `state_files` and `dslpar.core.json_values`.

`full_state_dict` is separate. It gathers full tensors out of one layout and loads them into another:

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
    "changes": "compare", "check": "compare", "find_checkpoint": "select", "full_state": "full_state_dict",
    "load": "loading", "load_full_state": "full_state_dict", "save": "saving",
}  # fmt: skip
"""Public name -> its module, imported on first use: `dslpar checkpoint list` needs no torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'dslpar.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"dslpar.checkpoint.{_MODULES[name]}"), name)
