"""Checkpoints of a run: `<output_dir>/checkpoints/step_000005/`, each whole or not there.

    checkpoint.save(engine, data)               # all ranks together
    stored = checkpoint.newest(job, world)      # what rank 0 sees, the same on every rank; None: nothing
    checkpoint.check(stored, job, data)         # refuses another model, text, seed, ... before anything is read
    checkpoint.load(engine, stored)             # to the bit; on another layout each tensor to the bit

Each distinct element is stored once, in safetensors files under the model's own names, with an index of which piece
lies where: so any layout reads it. `folder` knows names and files, `index`, `pieces` and `tensorfile` what is in them;
`held` finds it in DeepSpeed's engine, `state` saves and loads, `choice` says which one; `manifest` and `compare` what a
resume may change. `weights` is apart from these: the whole model's tensors, out of one layout and into another.

    whole = checkpoint.full_state(engine.module, engine.groups)
    checkpoint.load_full_state(other.module, whole, other.groups)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslpar.checkpoint.compare import changes, check
    from dslpar.checkpoint.folder import Stored
    from dslpar.checkpoint.full_state import full_state, load_full_state
    from dslpar.checkpoint.manifest import text_identity
    from dslpar.checkpoint.save_load import load, save
    from dslpar.checkpoint.select import newest

_HOMES = {
    "Stored": "folder",
    "changes": "compare",
    "check": "compare",
    "full_state": "full_state",
    "load": "save_load",
    "load_full_state": "full_state",
    "newest": "select",
    "save": "save_load",
    "text_identity": "manifest",
}
"""Loaded at first use: `dslpar checkpoint verify` needs no torch."""

__all__ = ["Stored", "changes", "check", "full_state", "load", "load_full_state", "newest", "save", "text_identity"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dslpar.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"dslpar.checkpoint.{_HOMES[name]}"), name)
