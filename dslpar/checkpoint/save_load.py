"""A run saved, and loaded into an engine of any layout.

Each rank writes what it holds and owns (`held`), flat, under global names, to one file; rank 0 writes which piece lies
where, and makes the folder visible once all have told that theirs is on disk. Three messages a save, however many
tensors. Each rank reads straight from the files what its own layout asks for, and agrees once that all of them could.

On the same layout a run goes on to the bit: random states, each replica's buffers, and each stage's copy of a tied
weight are restored too. (Copies differ in their last bits: each stage averages gradients over its replicas in buckets
of its own.) On any other layout a copy is the owner's weight, and random states are those of a start.

That all ranks write, and agree afterwards, is how torch's distributed checkpoints keep one rank's full disk from
leaving the others in a collective for ever.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import folder, manifest, rank_state, shards, train_state
from dslpar.checkpoint.collective import SHOWN, by_rank_0, demand_seen, not_written
from dslpar.checkpoint.folder import Stored, Written
from dslpar.checkpoint.index import INDEX, Entry, Index, Odd, copy_name, file_key, load_index, merge, tensor_path
from dslpar.checkpoint.shards import Held, Master
from dslpar.checkpoint.slices import Piece, num_elements
from dslpar.checkpoint.tensor_file import DTYPES, Reader, dtype_name, write
from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis
from dslpar.engine.engine import Engine
from dslpar.reporting.run_dir import CHECKPOINTS

log = logging.getLogger("dslpar")


def save(engine: Engine, data: str = "") -> Path:
    """Saves the run as it stands, and makes that visible when all of it is on disk. All ranks together.

    `data` says what it is trained on (see `text_identity`). Returns the checkpoint's folder.

    Raises:
        DslparError: on every rank, if one of them cannot write there, or does not see where rank 0 writes. What was
            visible before stays as it is.
    """
    job, step, world = engine.job, engine.steps_done, world_of(engine)
    root = Path(job.output_dir, CHECKPOINTS)
    made = by_rank_0(lambda: folder.begin(root, step), world, job, engine.rank_description)
    told = collectives.gather_objects(_write(engine, folder.part_path(root, step)), world)
    demand_seen([(part.host, part.sees) for part in told], str(made), job)
    failed = [part.failed for part in told if part.failed]

    def publish() -> Path:
        try:
            return _publish(engine, told, root, manifest.manifest_of(job, data, step))
        except OSError:
            folder.remove(made)
            raise

    if not failed:
        return by_rank_0(publish, world, job, engine.rank_description)
    if world.index == 0:
        folder.remove(made)  # all have told that they write no more: a full disk has its room again
    raise not_written("; ".join(failed[:SHOWN]), job)


def load(engine: Engine, stored: Stored) -> None:
    """Gives a freshly built engine the state of a checkpoint that `check` has passed. All ranks together.

    Raises:
        DslparError: on every rank, if it does not hold this model, or a file cannot be read.
    """
    path, same = Path(stored.path), manifest.same_layout(stored, engine.job)
    found = shards.of_engine(engine)
    with torch.no_grad():
        shards.before_load(engine)
        index = _fill_or_refuse(engine, path, found, same)
        shards.after_load(engine)
    _move(engine, stored, index, found, rank_state.read(path, engine.groups.rank) if same else None)
    assert engine.steps_done == stored.step, f"{engine.steps_done} steps in {stored.path}"


def world_of(engine: Engine) -> Axis:
    """All ranks."""
    return engine.groups.axis("pipe", "data", "tensor")


# ---- saving ----


class Told(NamedTuple):
    """What a rank tells of its part of a save."""

    host: str
    sees: bool
    """Whether it has the folder that rank 0 has made."""
    failed: str = ""
    """Who could not write, and why; empty: it could."""
    pieces: bytes = b""
    """Its part of the index, pickled and packed: rank 0 alone reads it, and a thousand ranks tell a thousand."""
    files: Mapping[str, Written] = {}
    """Its files, by their paths in the folder."""


def _write(engine: Engine, part: Path) -> Told:
    """Writes this rank's files."""
    rank, host = engine.groups.rank, socket.gethostname()
    if not part.exists():
        return Told(host, False)
    index, tensors = _to_write(engine, rank)
    names = tensor_path(part, rank), folder.rank_path(part, rank)
    try:
        written = write(names[0], tensors), folder.write(names[1], [_saved(rank_state.values_of(engine))])
    except OSError as error:
        return Told(host, True, f"{engine.rank_description}: {error}")
    files = {path.relative_to(part).as_posix(): file for path, file in zip(names, written, strict=True)}
    return Told(host, True, "", zlib.compress(pickle.dumps(index), level=1), files)


def _publish(engine: Engine, told: list[Told], root: Path, message: Mapping[str, Any]) -> Path:
    """What rank 0 adds, and the moment at which the checkpoint is there."""
    part = folder.part_path(root, message["step"])
    index = merge(pickle.loads(zlib.decompress(rank.pieces)) for rank in told)
    assert not (lost := index.incomplete()), f"not held once by the ranks, so nobody could load it: {lost[:SHOWN]}"
    added = {
        INDEX: folder.write(part / INDEX, [json.dumps(index.to_json(), separators=(",", ":")).encode()]),
        folder.STATE: folder.write(part / folder.STATE, [_saved(train_state.values_of(engine))]),
    }
    folder.set_aside(root, message["step"])
    final = folder.publish(root, message, {name: file for rank in told for name, file in rank.files.items()} | added)
    folder.prune(root, engine.job.spec.checkpoint.keep, message["step"])
    return final


def _saved(values: Any) -> bytes:
    """What torch.save makes of them; on a full disk it raises no OSError itself."""
    made = io.BytesIO()
    torch.save(values, made)
    return made.getvalue()


def _to_write(engine: Engine, rank: int) -> tuple[Index, dict[str, Tensor]]:
    """This rank's part of the index, and its tensors by their keys: views, nothing is copied."""
    groups: list[Any] = []
    parameters: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    for one in shards.of_engine(engine):
        if one.writes:
            name = _stored_name(one, same=True)
            written = {file_key(name, key): _part(one, tensor) for key, tensor in _whole_range(one)}
            odd = one.odd if one.writes.start == 0 else {}
            tensors |= written | {file_key(name, key): tensor for key, tensor in odd.items()}
            (parameters if one.copy_of_stage is None else copies)[name] = _entry(one, rank, odd, groups)
    return Index(parameters, copies, [train_state.group_values(group) for group in groups]), tensors


def _whole_range(one: Held) -> Iterator[tuple[str, Tensor]]:
    yield from [("", one.weight), *one.states.items()]


def _part(one: Held, tensor: Tensor) -> Tensor:
    """What this rank writes of what it holds."""
    return tensor.reshape(-1)[one.writes.start - one.start : one.writes.stop - one.start]


def _entry(one: Held, rank: int, odd: Mapping[str, Tensor], groups: list[Any]) -> Entry:
    return Entry(
        shape=one.shape,
        dtype=dtype_name(one.weight.dtype),
        trained=one.trained,
        states={key: dtype_name(tensor.dtype) for key, tensor in one.states.items()},
        numbers={key: _number(value) for key, value in one.numbers.items()},
        odd={key: Odd(dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in odd.items()},
        odd_file=rank if odd else None,
        group=None if one.master is None else _place(one.master.group, groups),
        pieces=[Piece(rank, one.box, one.writes.start, one.writes.stop)],
    )


def _place(group: Any, groups: list[Any]) -> int:
    if not any(group is known for known in groups):
        groups.append(group)
    return next(at for at, known in enumerate(groups) if known is group)


def _number(value: shards.Number) -> Any:
    return [dtype_name(value.dtype), value.item()] if isinstance(value, Tensor) else value


def _stored_name(one: Held, same: bool) -> str:
    """In the index; of a tied copy its own, where stages are those that saved it, and its owner's elsewhere."""
    return copy_name(one.name, one.copy_of_stage) if same and one.copy_of_stage is not None else one.name


# ---- loading ----


def _fill_or_refuse(engine: Engine, path: Path, found: list[Held], same: bool) -> Index:
    """Every tensor and number of the optimizer's, and the model's weights where ZeRO does not make them of these."""
    index, said = Index(), []
    try:
        index = load_index(path)
        said = list(_not_fitting(index, found, same))
        if not said:
            _fill(index, Reader(path, index), found, same)
    except DslparError as error:
        said = [finding.message for finding in error.findings]
    told = collectives.gather_objects((said, _names_here(engine, found)), world_of(engine))
    unknown = set(index.parameters) - {name for _, names in told for name in names}
    everything = dict.fromkeys([*(text for texts, _ in told for text in texts), *_unknown(unknown)])
    if everything:
        lines = [*list(everything)[:SHOWN], *[f"and {len(everything) - SHOWN} more"] * (len(everything) > SHOWN)]
        hint = "build the model that was saved; or start a new run, without --resume"
        message = f"{path} does not hold this model:\n    " + "\n    ".join(lines)
        raise_finding("CKP208", message, hint, engine.job.path, "model")
    return index


def _names_here(engine: Engine, found: list[Held]) -> tuple[str, ...]:
    """Of this stage's parameters, told by one of its ranks."""
    coord = engine.groups.coord
    first = all(index == 0 for axis, index in coord.items() if axis != "pipe")
    return tuple(one.name for one in found) if first else ()


def _not_fitting(index: Index, found: list[Held], same: bool) -> Iterator[str]:
    known = {**index.copies, **index.parameters}
    for one in found:
        name = _stored_name(one, same)
        if name not in known and 0 not in one.shape:
            yield f"{one.name!r} {one.shape} is not in it"
        elif name in known and known[name].shape != one.shape:
            yield f"{one.name!r} has shape {known[name].shape} there, and {one.shape} here"


def _unknown(names: set[str]) -> Iterator[str]:
    return (f"{name!r} is in it, and not in the model" for name in sorted(names))


def _fill(index: Index, reader: Reader, found: list[Held], same: bool) -> None:
    numbered: set[int] = set()
    for one in sorted(found, key=shards.turn_of):
        name = _stored_name(one, same)
        if name not in index.copies and name not in index.parameters:
            continue  # of no elements
        entry = index.entry(name)
        if one.start < one.stop:
            _set(one.weight, reader.fragment(name, "", one.box, one.start, one.stop))
        if one.master is not None:
            _fill_states(one, one.master, entry, name, reader)
            if entry.numbers and id(one.master.tensor) not in numbered:
                shards.set_numbers(one.master, {key: _of_number(value) for key, value in entry.numbers.items()})
                numbered.add(id(one.master.tensor))
        if hasattr(one.parameter, "_hp_mapping"):  # ZeRO 1 and 2: a shard is not what the model computes with
            _set(one.parameter, reader.fragment(name, "", one.box, 0, num_elements(one.box)))


def _fill_states(one: Held, master: Master, entry: Entry, name: str, reader: Reader) -> None:
    for key in entry.states:
        same_kind = DTYPES[entry.dtype] == master.tensor.dtype
        dtype = DTYPES[entry.states[key]] if same_kind else master.tensor.dtype
        state = shards.state_of(one, key, dtype)
        if one.start < one.stop:
            _set(state, reader.fragment(name, key, one.box, one.start, one.stop))
    for key in entry.odd:
        master.state[master.tensor][key] = reader.odd(name, key).clone().to(master.tensor.device)


def _set(into: Tensor, flat: Tensor) -> None:
    into.copy_(flat.view(into.shape))


def _of_number(value: Any) -> shards.Number:
    return torch.tensor(value[1], dtype=DTYPES[value[0]]) if isinstance(value, list) else value


def _move(engine: Engine, stored: Stored, index: Index, found: list[Held], kept: Mapping[str, Any] | None) -> None:
    """What is no tensor of the model's; `kept` is this rank's own, on the same layout."""
    path, done = Path(stored.path), set()
    for one in found:
        entry = index.parameters.get(one.name)
        if one.master is not None and id(one.master.group) not in done and entry and entry.group is not None:
            train_state.restore_group(engine, one.master.group, index.groups[entry.group])
            done.add(id(one.master.group))
    values = torch.load(path / folder.STATE, weights_only=True)
    if stored.manifest["config"].get("precision") != manifest.config_of(engine.job).get("precision"):
        values["scale"] = {}  # the new one begins where the config says
    train_state.restore(engine, values, kept["schedule"] if kept else None)
    if kept:
        rank_state.restore(engine, kept)
    elif nobody_s := rank_state.restore_buffers(engine, path, stored.manifest["layout"]):
        log.warning("%s has no buffers %s of this shape: they are as they were built", path, ", ".join(nobody_s))
