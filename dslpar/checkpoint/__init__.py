"""Checkpoints of a run: `<output_dir>/checkpoints/step_000005/`, each whole or not there.

    checkpoint.save(engine, data)               # all ranks together
    stored = checkpoint.newest(job, world)      # what rank 0 sees, the same on every rank; None: nothing
    checkpoint.check(stored, job, data)         # refuses another layout, model, seed, ... before anything is read
    checkpoint.load(engine, stored)             # to the bit

A checkpoint is DeepSpeed's own (`global_step5/`, `latest`: its tools read it), and beside that `checkpoint.json`, the
manifest, and `ranks/`, what DeepSpeed does not keep. `folder` knows names and files, `manifest` what must be equal,
`state` what is inside. `weights` is apart from these: the whole model's tensors, out of one layout and into another.

    whole = checkpoint.full_state(engine.module, engine.groups)
    checkpoint.load_full_state(other.module, whole, other.groups)
"""

from dslpar.checkpoint.folder import Stored
from dslpar.checkpoint.manifest import check, text_identity
from dslpar.checkpoint.state import load, newest, save
from dslpar.checkpoint.weights import full_state, load_full_state

__all__ = ["Stored", "check", "full_state", "load", "load_full_state", "newest", "save", "text_identity"]
