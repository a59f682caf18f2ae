"""Save a run, and load it into an engine of any layout.

Saving, in order:

1. Rank 0 removes what earlier saves left unfinished, and makes `step_N.part`.
2. Each rank writes what it holds and owns (`shards`) to one tensor file, and its own state to another. Both are synced.
3. All ranks report to rank 0: whether they see its folder, whether they could write, their part of the index.
4. Rank 0 merges the index, writes it and the training state, sets aside what is of another course of the run, and
   publishes the folder by renaming it; then it removes checkpoints that are no longer kept.

So a save is three messages, however many tensors there are. Loading: each rank reads straight from the files what its
own layout needs, and all agree once that every one of them could.

In the same layout a run continues to the bit: random states, each replica's buffers, and each stage's copy of a tied
weight are restored too. (Copies differ in their last bits: each stage averages gradients over its replicas in buckets
of its own.) In any other layout a copy is the owner's weight, and random states are those of a start.

That all ranks write, and agree afterwards, is how torch's distributed checkpoints keep one rank's full disk from
leaving the others in a collective forever.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import folder, manifest, rank_state, shards, train_state, writer
from dslpar.checkpoint.collective import MAX_LISTED, WRITE, check_seen_by_all, raise_failed, run_on_rank_0
from dslpar.checkpoint.folder import Checkpoint, FileDigest
from dslpar.checkpoint.index import (
    INDEX,
    Entry,
    Index,
    IrregularState,
    copy_name,
    file_key,
    load_index,
    merge,
    tensor_path,
)
from dslpar.checkpoint.shards import Master, ParameterGroup, ParameterShard
from dslpar.checkpoint.slices import Piece
from dslpar.checkpoint.state_files import read_rank_state, read_train_state
from dslpar.checkpoint.tensor_file import DTYPES, dtype_name, torch_bytes, write_tensors
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.engine.engine import Engine
from dslpar.reporting.run_dir import CHECKPOINTS

log = logging.getLogger("dslpar")


def save(engine: Engine, data: str = "") -> Path:
    """Save the run as it stands, and make that visible when all of it is on disk. All ranks must call it together.

    `data` says what it is trained on (`dslpar.data.source`). Returns the checkpoint's folder.

    Raises:
        DslparError: on every rank, if one of them cannot write there, or does not see where rank 0 writes. What was
            visible before stays as it is.
    """
    job, step, world = engine.job, engine.steps_done, world_of(engine)
    root = Path(job.output_dir, CHECKPOINTS)
    part = run_on_rank_0(lambda: writer.begin_save(root, step), world, job, WRITE, engine.rank_description)
    reports = collectives.gather_objects(_write_rank_files(engine, folder.part_path(root, step)), world)
    check_seen_by_all([(report.host, report.sees_folder) for report in reports], str(part), job)
    errors = [report.error for report in reports if report.error]
    if errors:
        if world.index == 0:
            writer.remove(part)  # no rank writes any more: a full disk has its room again
        raise_failed(WRITE, "; ".join(errors[:MAX_LISTED]), job)

    def publish() -> Path:
        try:
            return _publish(engine, reports, root, manifest.manifest_of(job, data, step, engine.consumed_samples))
        except OSError:
            writer.remove(part)
            raise

    return run_on_rank_0(publish, world, job, WRITE, engine.rank_description)


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint that `compare.check` has passed into a newly built engine. All ranks must call it together.

    Raises:
        DslparError: on every rank, if it does not hold this model, or a file cannot be read.
    """
    path, same_layout = Path(checkpoint.path), manifest.same_layout(checkpoint, engine.job)
    parameters = shards.parameter_shards(engine)
    with torch.no_grad():
        shards.before_load(engine)
        index = _fill_or_refuse(engine, path, parameters, same_layout)
        shards.after_load(engine)
    # Random states have a meaning on these very ranks only: in another layout they begin as in a new run.
    own_state = read_rank_state(checkpoint, engine.groups.rank) if same_layout else None
    _restore_train_state(engine, checkpoint, index, parameters, own_state)
    assert engine.steps_done == checkpoint.step, f"{engine.steps_done} steps in {checkpoint.path}"


def world_of(engine: Engine) -> Axis:
    """Return the axis of all ranks."""
    return engine.groups.axis("pipe", "data", "tensor")


# ---- saving ----


class RankReport(NamedTuple):
    """A rank's report of its part of a save."""

    host: str
    sees_folder: bool
    """Whether it sees the folder that rank 0 has made."""
    error: str = ""
    """Which rank could not write, and why; empty: it could."""
    packed_index: bytes = b""
    """Its part of the index, pickled and compressed: only rank 0 reads it, but every rank receives all of them."""
    files: Mapping[str, FileDigest] = {}
    """Its files, by their paths in the folder."""


def _write_rank_files(engine: Engine, part: Path) -> RankReport:
    rank, host = engine.groups.rank, socket.gethostname()
    if not part.exists():
        return RankReport(host, sees_folder=False)
    index, tensors = _collect_tensors(engine, rank)
    # A full disk is reported, not raised: the other ranks wait in the gather that follows.
    tensors_at, state_at = tensor_path(part, rank), folder.rank_path(part, rank)
    try:
        written = {
            tensors_at: write_tensors(tensors_at, tensors),
            state_at: writer.write_file(state_at, [torch_bytes(rank_state.collect(engine))]),
        }
    except OSError as error:
        return RankReport(host, True, f"{engine.rank_description}: {error}")
    files = {path.relative_to(part).as_posix(): digest for path, digest in written.items()}
    # Level 1: an index is mostly repeated names, and all ranks wait for rank 0.
    return RankReport(host, True, "", zlib.compress(pickle.dumps(index), level=1), files)


def _collect_tensors(engine: Engine, rank: int) -> tuple[Index, dict[str, Tensor]]:
    """Return this rank's part of the index, and its tensors by their keys: views, nothing is copied."""
    groups: list[ParameterGroup] = []
    parameters: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    for shard in shards.parameter_shards(engine):
        if shard.write_range:
            name = _stored_name(shard, same_layout=True)
            begin, end = shard.write_range.start - shard.start, shard.write_range.stop - shard.start
            for key, tensor in {"": shard.weight, **shard.states}.items():
                tensors[file_key(name, key)] = tensor.reshape(-1)[begin:end]
            # States of another shape cannot be cut along with the weight: who writes its beginning writes all of them.
            irregular = shard.irregular if shard.write_range.start == 0 else {}
            tensors |= {file_key(name, key): tensor for key, tensor in irregular.items()}
            found = parameters if shard.tied_copy_stage is None else copies
            found[name] = _entry(shard, rank, irregular, groups)
    return Index(parameters, copies, [train_state.group_values(group) for group in groups]), tensors


def _entry(shard: ParameterShard, rank: int, irregular: Mapping[str, Tensor], groups: list[ParameterGroup]) -> Entry:
    return Entry(
        shape=shard.shape,
        dtype=dtype_name(shard.weight.dtype),
        trained=shard.trained,
        states={key: dtype_name(tensor.dtype) for key, tensor in shard.states.items()},
        scalars={
            key: [dtype_name(value.dtype), value.item()] if isinstance(value, Tensor) else value
            for key, value in shard.scalars.items()
        },
        irregular={
            key: IrregularState(dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in irregular.items()
        },
        irregular_file=rank if irregular else None,
        group=None if shard.master is None else _group_number(shard.master.group, groups),
        pieces=[Piece(rank, shard.box, shard.write_range.start, shard.write_range.stop)],
    )


def _group_number(group: ParameterGroup, groups: list[ParameterGroup]) -> int:
    """Return the number of an optimizer's group among those seen so far, with it."""
    if not any(known is group for known in groups):  # `in` would compare the tensors that they hold
        groups.append(group)
    return next(number for number, known in enumerate(groups) if known is group)


def _stored_name(shard: ParameterShard, same_layout: bool) -> str:
    """Return the name in the index: a tied copy's own in the layout that saved it, its owner's in any other."""
    if same_layout and shard.tied_copy_stage is not None:
        return copy_name(shard.name, shard.tied_copy_stage)
    return shard.name


def _publish(engine: Engine, reports: Sequence[RankReport], root: Path, manifest_: Mapping[str, Any]) -> Path:
    """Write what rank 0 adds, publish the folder, and remove checkpoints that are no longer kept. On rank 0."""
    step = manifest_["step"]
    part = folder.part_path(root, step)
    # What is unpickled was pickled by this job's own ranks a moment ago.
    index = merge(pickle.loads(zlib.decompress(report.packed_index)) for report in reports)
    assert not (lost := index.incomplete()), f"not held once by the ranks, so nobody could load it: {lost[:MAX_LISTED]}"
    files = {path: digest for report in reports for path, digest in report.files.items()}
    index_bytes = json.dumps(index.to_json(), separators=(",", ":")).encode()
    files[INDEX] = writer.write_file(part / INDEX, [index_bytes])
    files[folder.STATE] = writer.write_file(part / folder.STATE, [torch_bytes(train_state.collect(engine))])
    # Before the rename: a kill between the two must not leave a newer checkpoint of another course as the newest one.
    writer.set_aside(root, step)
    final = writer.publish(root, manifest_, files)
    writer.prune(root, engine.job.spec.checkpoint.keep, step)
    return final


# ---- loading ----


def _fill_or_refuse(engine: Engine, path: Path, parameters: Sequence[ParameterShard], same_layout: bool) -> Index:
    """Fill weights and optimizer state from the files; if any rank cannot, raise the same finding on all of them."""
    index, problems = Index(), []
    try:
        index = load_index(path)
        problems = list(_mismatches(index, parameters, same_layout))
        if not problems:
            _fill(index, TensorReader(path, index), parameters, same_layout)
    except DslparError as error:
        problems = [finding.line() for finding in error.findings]
    # Each name is sent once, by one rank of its stage: every rank receives all that is gathered.
    is_first = all(index == 0 for axis, index in engine.groups.coord.items() if axis != "pipe")
    names_of_stage = [shard.name for shard in parameters] if is_first else []
    reports = collectives.gather_objects((problems, names_of_stage), world_of(engine))
    unknown = set(index.parameters) - {name for _, names in reports for name in names}
    everything = [problem for problems, _ in reports for problem in problems]
    everything += [f"{name!r} is in it, and not in the model" for name in sorted(unknown)]
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
        name = _stored_name(shard, same_layout)
        if name not in stored and 0 not in shard.shape:
            yield f"{shard.name!r} {shard.shape} is not in it"
        elif name in stored and stored[name].shape != shard.shape:
            yield f"{shard.name!r} has shape {stored[name].shape} there, and {shard.shape} here"


def _fill(index: Index, reader: TensorReader, parameters: Sequence[ParameterShard], same_layout: bool) -> None:
    """Fill the optimizer's tensors and scalars, and weights that it does not train; `after_load` casts the others."""
    with_scalars: set[int] = set()
    for shard in sorted(parameters, key=shards.step_order):
        name = _stored_name(shard, same_layout)
        if name not in index.copies and name not in index.parameters:
            continue  # it has no elements
        entry = index.entry(name)
        if shard.start < shard.stop:
            _copy_flat(shard.weight, reader.fragment(name, "", shard.box, shard.start, shard.stop))
        if shard.master is not None:
            _fill_states(shard, shard.master, entry, name, reader)
            if entry.scalars and id(shard.master.tensor) not in with_scalars:  # a flat tensor is of many parameters
                scalars = {
                    key: torch.tensor(value[1], dtype=DTYPES[value[0]]) if isinstance(value, list) else value
                    for key, value in entry.scalars.items()
                }
                shards.set_scalars(shard.master, scalars)
                with_scalars.add(id(shard.master.tensor))


def _fill_states(shard: ParameterShard, master: Master, entry: Entry, name: str, reader: TensorReader) -> None:
    for key in entry.states:
        # As stored, where the master has the stored weight's dtype; a change of precision changes its states with it.
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
    """Restore what is no tensor of the model's; `own_state` is this rank's, in the layout that saved it."""
    path, restored = Path(checkpoint.path), set()
    for shard in parameters:
        entry = index.parameters.get(shard.name)
        if shard.master is not None and id(shard.master.group) not in restored and entry and entry.group is not None:
            train_state.restore_group(engine, shard.master.group, index.groups[entry.group])
            restored.add(id(shard.master.group))
    values = read_train_state(checkpoint)
    if checkpoint.manifest["config"].get("precision") != manifest.config_of(engine.job).get("precision"):
        values["scale"] = {}  # a loss scale of another precision means nothing: start where the config says
    train_state.restore(engine, values, own_state["schedule"] if own_state else None)
    # Last: what was drawn while the engine was built and filled must not count.
    if own_state:
        rank_state.restore(engine, own_state)
    elif missing := rank_state.restore_buffers(engine.module, engine.groups.coord, checkpoint):
        log.warning("%s has no buffers %s of this shape: they are as they were built", path, ", ".join(missing))
