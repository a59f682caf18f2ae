"""Checkpoints of a run, `<output_dir>/checkpoints/step_000005/`: each intact or not there, readable in any layout.

What comes in: DeepSpeed's engine with its weights, optimizer and counters, and the job that describes the run. What
goes out: a folder of files that each rank has written, published at once; or an engine that continues such a run.

    checkpoint.save(engine, data)                            # all ranks together
    pending = checkpoint.begin_save(engine, buffers, data)   # ... steps ...; pending.publish()
    saved = checkpoint.find_checkpoint(job, world)           # what rank 0 sees, the same on every rank; None: nothing
    checkpoint.check(saved, job, data)                       # refuses another model, text, seed, ...
    checkpoint.load(engine, saved)                           # to the bit; in another layout each tensor to the bit

Each distinct element is stored once, in safetensors files under the model's own names, with an index of which piece
lies where: so any layout reads it. `folder` knows names and files, and `writer` publishes them; `index`, `slices`,
`tensor_file` and `tensor_reader` know what is in them; `shards` finds it in DeepSpeed's engine, `saving` copies it to
`host_buffers` and has `rank_files` write it, `loading` loads it, `select` chooses one; `manifest`, `compare` and
`resume_policy` say what a resume may change. A digest says that nothing has changed, not that it makes sense:
`contents` reads all of a checkpoint as a load does, before one and for `dslpar checkpoint verify`, by
`manifest_format`, `state_files` and the typed values of `dslpar.core.json_values`. `full_state_dict` is apart from
these: full tensors, out of one layout and into another.

    full = checkpoint.full_state(engine.module, engine.groups)
    checkpoint.load_full_state(other.module, full, other.groups)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslpar.checkpoint.compare import changes, check
    from dslpar.checkpoint.folder import Checkpoint
    from dslpar.checkpoint.full_state_dict import full_state, load_full_state
    from dslpar.checkpoint.host_buffers import HostBuffers
    from dslpar.checkpoint.loading import load
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
"""The module of each public name, imported at its first use: `dslpar checkpoint list` needs no torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'dslpar.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"dslpar.checkpoint.{_MODULES[name]}"), name)
