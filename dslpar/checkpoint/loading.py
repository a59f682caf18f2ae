"""Load a checkpoint into an engine of any layout.

Each rank reads the pieces that it holds in the present layout straight from the files. Then all ranks exchange their
errors once: if one rank has failed, all raise.

In the saved layout a run continues bit for bit. Random states, the buffers of each replica and each copy of a tied
weight are restored too. (Copies of a tied weight differ in their last bits, since each pipeline rank averages gradients
over its replicas in its own buckets.) In any other layout the copies of a tied weight are filled from its owner's, and
random states begin as in a new run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslpar.checkpoint import manifest, rank_state, shards, train_state
from dslpar.checkpoint.collective import MAX_LISTED, world_of
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.index import Entry, Index, load_index
from dslpar.checkpoint.shards import Master, ParameterShard
from dslpar.checkpoint.state_files import read_rank_state, read_train_state
from dslpar.checkpoint.tensor_file import DTYPES
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.engine.engine import Engine

log = logging.getLogger("dslpar")


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into a newly built engine, after `resume_changes.check`. All ranks must call it together.

    Raises:
        DslparError: on every rank, if the checkpoint does not hold this model, or a file cannot be read.
    """
    path, same_layout = Path(checkpoint.path), manifest.same_layout(checkpoint, engine.job)
    parameters = shards.parameter_shards(engine)
    with torch.no_grad():
        shards.before_load(engine)
        index = _fill_or_refuse(engine, path, parameters, same_layout)
        shards.after_load(engine)
    # Random states belong to the ranks that saved them: in another layout they begin as in a new run.
    own_state = read_rank_state(checkpoint, engine.groups.rank) if same_layout else None
    _restore_train_state(engine, checkpoint, index, parameters, own_state)
    assert engine.steps_done == checkpoint.step, f"{engine.steps_done} steps in {checkpoint.path}"


def _fill_or_refuse(engine: Engine, path: Path, parameters: Sequence[ParameterShard], same_layout: bool) -> Index:
    """Fill weights and optimizer state from the files. If any rank cannot, all ranks raise the same finding."""
    index, problems = Index(), []
    try:
        index = load_index(path)
        problems = list(_mismatches(index, parameters, same_layout))
        if not problems:
            _fill(index, TensorReader(path, index), parameters, same_layout)
    except DslparError as error:
        problems = [finding.line() for finding in error.findings]
    # Only one rank per pipeline rank sends its names: the others hold the same, and every rank receives all lists.
    is_first = all(index == 0 for axis, index in engine.groups.coord.items() if axis != "pipe")
    own_names = [shard.name for shard in parameters] if is_first else []
    reports = collectives.gather_objects((problems, own_names), world_of(engine))
    unknown = set(index.parameters) - {name for _, names in reports for name in names}
    everything = [problem for problems, _ in reports for problem in problems]
    everything += [f"the checkpoint has {name!r}, but the model does not" for name in sorted(unknown)]
    if distinct := list(dict.fromkeys(everything)):
        more = [f"and {len(distinct) - MAX_LISTED} more"] if len(distinct) > MAX_LISTED else []
        hint = "build the model that was saved; or start a new run, without --resume"
        message = f"{path} does not hold this model:"
        # Every rank has gathered the same reports, so all of them raise.
        raise_finding("CKP208", message, hint, engine.job.path, "model", distinct[:MAX_LISTED] + more)
    return index


def _mismatches(index: Index, parameters: Sequence[ParameterShard], same_layout: bool) -> Iterator[str]:
    stored = {**index.copies, **index.parameters}
    for shard in parameters:
        name = shard.stored_name(same_layout)
        if name not in stored and 0 not in shard.shape:
            yield f"{shard.name!r} {shard.shape} is not in the checkpoint"
        elif name in stored and stored[name].shape != shard.shape:
            yield f"{shard.name!r} has shape {stored[name].shape} in the checkpoint, but {shard.shape} in the model"


def _fill(index: Index, reader: TensorReader, parameters: Sequence[ParameterShard], same_layout: bool) -> None:
    """Fill the fp32 masters, weights that are not trained, and optimizer state; `shards.after_load` sets the others."""
    with_scalars: set[int] = set()
    for shard in sorted(parameters, key=shards.step_order):
        name = shard.stored_name(same_layout)
        if name not in index.copies and name not in index.parameters:
            continue  # a parameter without elements is not stored
        entry = index.entry(name)
        if shard.start < shard.stop:
            _copy_flat(shard.weight, reader.fragment(name, "", shard.box, shard.start, shard.stop))
        if shard.master is not None:
            _fill_states(shard, shard.master, entry, name, reader)
            if entry.scalars and id(shard.master.tensor) not in with_scalars:  # a flat tensor holds many parameters
                scalars = {
                    key: torch.tensor(value[1], dtype=DTYPES[value[0]]) if isinstance(value, list) else value
                    for key, value in entry.scalars.items()
                }
                shards.set_scalars(shard.master, scalars)
                with_scalars.add(id(shard.master.tensor))


def _fill_states(shard: ParameterShard, master: Master, entry: Entry, name: str, reader: TensorReader) -> None:
    for key in entry.states:
        # If the master's dtype is that of the stored weight, keep the state's stored dtype. Otherwise the config's
        # precision has changed, and the state takes the master's dtype.
        same_dtype = DTYPES[entry.dtype] == master.tensor.dtype
        dtype = DTYPES[entry.states[key]] if same_dtype else master.tensor.dtype
        state = shards.state_tensor(shard, key, dtype)
        if shard.start < shard.stop:
            _copy_flat(state, reader.fragment(name, key, shard.box, shard.start, shard.stop))
    for key in entry.irregular:
        master.state[master.tensor][key] = reader.irregular(name, key).clone().to(master.tensor.device)


def _copy_flat(target: Tensor, flat: Tensor) -> None:
    target.copy_(flat.view(target.shape))


def _restore_train_state(
    engine: Engine,
    checkpoint: Checkpoint,
    index: Index,
    parameters: Sequence[ParameterShard],
    own_state: Mapping[str, Any] | None,
) -> None:
    """Restore all state besides tensors. `own_state`: this rank's state if the layout is the saved one, else None."""
    path, restored = Path(checkpoint.path), set()
    for shard in parameters:
        entry = index.parameters.get(shard.name)
        if shard.master is not None and id(shard.master.group) not in restored and entry and entry.group is not None:
            train_state.restore_group(engine, shard.master.group, index.groups[entry.group])
            restored.add(id(shard.master.group))
    values = read_train_state(checkpoint)
    if checkpoint.manifest["config"].get("precision") != manifest.config_of(engine.job).get("precision"):
        values["scale"] = {}  # a loss scale of another precision is meaningless: start from the config's
    train_state.restore(engine, values, own_state["schedule"] if own_state else None)
    # Random states come last: building and filling the engine has drawn random numbers.
    if own_state:
        if lost := rank_state.restore(engine, own_state):
            log.warning("%s has buffers %s, which the model does not have: they are left out", path, ", ".join(lost))
    elif missing := rank_state.restore_buffers(engine.module, engine.groups.coord, checkpoint):
        log.warning("%s has no buffers %s of this shape: they keep their initial values", path, ", ".join(missing))
