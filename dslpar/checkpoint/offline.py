"""Checkpoints without the ranks that wrote them: cut for another layout, or exported, by one process without a GPU.

    reshard(stored, job, Path("outputs/wider"))           # a checkpoint as `job`'s ranks would have written it
    export(stored, Path("weights"), dtype="BF16")         # whole weights in safetensors files, and the config

One tensor is in memory at a time: what is read is a map of the stored files, what is written goes to the disk as it is
made. So the largest tensor bounds the memory, not the model (`python -m benchmarks reshard_memory`). Which rank holds
what of the target is asked of its own layers, built on torch's "meta" device on a picture of its groups. DeepSpeed's
universal checkpoints and Megatron-LM's converters know how each layer's weights are cut by patterns of their names;
these load whole ranks or whole models into memory.
"""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import compare, folder, manifest, rank_state
from dslpar.checkpoint.folder import Stored, Written
from dslpar.checkpoint.index import INDEX, Entry, Index, file_key, load_index, tensor_path
from dslpar.checkpoint.slices import Box, Piece, box_of, num_elements, whole_box
from dslpar.checkpoint.tensor_file import DTYPES, Lazy, Reader, write_lazily
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.core.mesh import TENSOR_AXES
from dslpar.core.suggest import did_you_mean
from dslpar.distributed.groups import Groups
from dslpar.engine import partition
from dslpar.engine.pipeline_module import stage_parts
from dslpar.language import yaml_io
from dslpar.layers.parameter import placement_of
from dslpar.layers.placement import Placement
from dslpar.layout.resolve import Job
from dslpar.models import LayerSpec
from dslpar.models.build import model_of
from dslpar.reporting import run_dir


class Whole(NamedTuple):
    """A parameter of the target's model."""

    shape: tuple[int, ...]
    placement: Placement | None
    """None: it is not cut."""


Stage = Mapping[str, Whole]
"""What a pipeline stage holds, by global names; of tied weights the owner alone."""


# ---- another layout ----


def reshard(stored: Stored, job: Job, output: Path) -> Path:
    """Writes the checkpoint as `job`'s layout holds it, to `<output>/checkpoints`. Returns its folder.

    Random states are left out: they have a meaning on the ranks alone that had them.

    Raises:
        DslparError: the job is of another run, its model has other parameters, something is there already, or a file
            cannot be read or written.
    """
    text = stored.manifest["fixed"]["data.text"]
    compare.check(stored, job, text)
    index = load_index(Path(stored.path))
    job, stages = stages_of(job, index)
    _check_fits(stored, stages, index)
    root = output / run_dir.CHECKPOINTS
    with _new(root) as unready:
        written = _write_all(stored, index, job, stages, folder.begin(unready, stored.step))
        layout = {**manifest.layout_of(job), manifest.OFFLINE: True}
        folder.publish(unready, manifest.manifest_of(job, text, stored.step) | {"layout": layout}, written)
    return folder.final_path(root, stored.step)


def _write_all(stored: Stored, index: Index, job: Job, stages: Sequence[Stage], part: Path) -> dict[str, Written]:
    """All files but the manifest: by their paths in the folder."""
    source, holders = Path(stored.path), list(_holders(job, stages))
    written = {folder.STATE: folder.write(part / folder.STATE, [(source / folder.STATE).read_bytes()])}
    reader = Reader(source, index)
    for rank, pieces in holders:
        path = tensor_path(part, rank)
        written[path.relative_to(part).as_posix()] = write_lazily(path, list(_tensors(reader, index, rank, pieces)))
    for rank, buffers in _buffers(stored, job):
        path = folder.rank_path(part, rank)
        written[path.relative_to(part).as_posix()] = _save(path, {"buffers": buffers})
    written[INDEX] = folder.write(part / INDEX, [_json(_recut(index, holders).to_json())])
    return written


Pieces = Mapping[str, Box]
"""What a rank writes, by name."""


def _holders(job: Job, stages: Sequence[Stage]) -> Iterator[tuple[int, Pieces]]:
    """Each rank that writes, and what: the owner of a piece, of data rank 0."""
    mesh = job.mesh
    for stage, held in enumerate(stages):
        for indices in product(*(range(mesh.sizes[axis]) for axis in TENSOR_AXES)):
            coord = dict(zip(TENSOR_AXES, indices, strict=True))
            pieces = {name: _box(whole, coord) for name, whole in held.items() if _owns(whole, coord)}
            if pieces:
                yield mesh.rank({"pipe": stage, "data": 0, **coord}), pieces


def _owns(whole: Whole, coord: Mapping[str, int]) -> bool:
    return whole.placement.owner(coord) if whole.placement else not any(coord.values())


def _box(whole: Whole, coord: Mapping[str, int]) -> Box:
    return box_of(whole.placement, coord) if whole.placement else whole_box(whole.shape)


def _tensors(reader: Reader, index: Index, rank: int, pieces: Pieces) -> Iterator[Lazy]:
    """A rank's file, each tensor made when its turn comes."""
    for name, box in pieces.items():
        entry, count = index.parameters[name], num_elements(box)
        for key in ("", *entry.states):
            make = partial(reader.fragment, name, key, box, 0, count)
            yield Lazy(file_key(name, key), DTYPES[entry.dtype_of(key)], (count,), make)
        for key, odd in entry.odd.items() if _is_whole(entry, box) else ():
            make = partial(reader.odd, name, key)
            yield Lazy(file_key(name, key), DTYPES[odd.dtype], (math.prod(odd.shape),), make)


def _is_whole(entry: Entry, box: Box) -> bool:
    return box == whole_box(entry.shape)


def _recut(index: Index, holders: Sequence[tuple[int, Pieces]]) -> Index:
    """The same tensors in other pieces; tied copies are not there, the owner's weight is."""
    cut_: dict[str, list[Piece]] = {name: [] for name in index.parameters}
    for rank, pieces in holders:
        for name, box in pieces.items():
            cut_[name].append(Piece(rank, box, 0, num_elements(box)))
    entries = {
        name: replace(entry, pieces=cut_[name], odd_file=cut_[name][0].file if entry.odd else None)
        for name, entry in index.parameters.items()
    }
    return Index(entries, {}, index.groups)


def _buffers(stored: Stored, job: Job) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """What each rank of the target would find of buffers in the source: its own replica's, or the first one's."""
    for rank in range(job.mesh.world_size):
        found: dict[str, Tensor] = {}
        for other in reversed(list(rank_state.had_them(stored.manifest["layout"], job.mesh.coord(rank)))):
            found |= rank_state.read(Path(stored.path), other).get("buffers", {})
        if found:
            yield rank, found


def _json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _save(path: Path, values: Mapping[str, Any]) -> Written:
    made = io.BytesIO()
    torch.save(values, made)
    return folder.write(path, [made.getbuffer()])


# ---- what the target holds ----


def stages_of(job: Job, index: Index) -> tuple[Job, list[Stage]]:
    """The job with its cut into stages, and what each of them holds.

    A model that nobody cuts is taken at the index's word: it may be one that only a program can build.
    """
    if job.mesh.pipe == 1 and job.mesh.tensor.size == 1:
        return job, [{name: Whole(entry.shape, None) for name, entry in index.parameters.items()}]
    groups = Groups.without_processes(job.mesh)
    with torch.device("meta"):
        job, layers = partition.decided(job, model_of(job), groups)
        parts = [0, len(layers)]
        if job.mesh.pipe > 1:
            assert job.stages.counts is not None, "cut.decided has said"
            parts = stage_parts([layer.layer_idx for layer in layers], job.stages.counts)
        owners = [layers[begin:end] for begin, end in pairwise(parts)]
        return job, [dict(_held(stage)) for stage in owners]


def _held(layers: Sequence[LayerSpec]) -> Iterator[tuple[str, Whole]]:
    """The parameters of these layers, each once, by global names."""
    seen: list[Tensor] = []
    for layer in layers:
        for name, p in layer.build().named_parameters() if layer.tied is None else ():
            if not any(p is other for other in seen):
                seen.append(p)
                placement = placement_of(p)
                yield f"{layer.owner}.{name}", Whole(placement.shape if placement else tuple(p.shape), placement)


def _check_fits(stored: Stored, stages: Sequence[Stage], index: Index) -> None:
    """The model that the config describes has the stored tensors, and no others."""
    wanted = {name: whole.shape for stage in stages for name, whole in stage.items()}
    there = {name: entry.shape for name, entry in index.parameters.items()}
    said = [f"it has no {name!r}{did_you_mean(name, there, '; ')}" for name in wanted.keys() - there.keys()]
    said += [f"the model has no {name!r}" for name in there.keys() - wanted.keys()]
    both = [name for name in wanted if name in there]
    differ = [name for name in both if wanted[name] != there[name]]
    said += [f"{name!r} has shape {there[name]}, the model's {wanted[name]}" for name in differ]
    if said:
        hint = "give the config of the run that saved: `dslpar checkpoint show` prints it"
        message = f"{stored.path} is of another model: {'; '.join(sorted(said)[:8])}"
        raise_finding("CKP207", message, hint, stored.path)


# ---- whole weights ----


def export(stored: Stored, output: Path, dtype: str | None = None, max_shard_bytes: int = 5 * 10**9) -> list[Path]:
    """Writes whole, unpadded weights under global names: `model-00001-of-00002.safetensors`, ..., the index that says
    where each of them lies, and `config.yaml`. Returns the files.

    `dtype` ("F32", "BF16", "F16"): what floating weights become; None: as stored. A tensor
    that is larger than a shard may be has a shard of its own.

    Raises:
        DslparError: something is there already, a file cannot be read or written, or `dtype` does not reach as far as
            a weight.
    """
    index = load_index(Path(stored.path))
    reader = Reader(Path(stored.path), index)
    tensors = [_exported(reader, name, entry, dtype) for name, entry in index.parameters.items()]
    shards = list(_shards(tensors, max_shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    where = {lazy.key: name for name, shard in zip(names, shards, strict=True) for lazy in shard}
    total = {"total_size": sum(_num_bytes(lazy) for shard in shards for lazy in shard)}
    config = compare.without_defaults(stored.manifest["config"])
    with _new(output) as unready:
        for name, shard in zip(names, shards, strict=True):
            write_lazily(unready / name, shard, {"format": "pt"})
        folder.write(unready / "model.safetensors.index.json", [_json({"metadata": total, "weight_map": where})])
        folder.write(unready / run_dir.CONFIG, [yaml_io.dump_plain(config).encode()])
    return list(folder.files(output))


def _exported(reader: Reader, name: str, entry: Entry, dtype: str | None) -> Lazy:
    stored = DTYPES[entry.dtype]
    wanted = DTYPES[dtype] if dtype and stored.is_floating_point else stored
    return Lazy(name, wanted, entry.shape, lambda: _converted(name, reader.whole(name), wanted))


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Raises DslparError where a number would become infinite."""
    converted = tensor.to(dtype)
    lost = int((converted.isinf() & tensor.isfinite()).sum()) if dtype != tensor.dtype else 0
    if lost:
        message = f"{lost} of {name}'s weights are beyond {torch.finfo(dtype).max:g}, the largest number of {dtype}"
        raise_finding("CKP217", message, "--dtype bf16 or fp32, which reach further", name)
    return converted


def _shards(tensors: Sequence[Lazy], max_bytes: int) -> Iterator[list[Lazy]]:
    """In order, each as full as it may be."""
    shard: list[Lazy] = []
    num_bytes = 0
    for tensor in tensors:
        num_bytes += _num_bytes(tensor)
        if shard and num_bytes > max_bytes:
            yield shard
            shard, num_bytes = [], _num_bytes(tensor)
        shard.append(tensor)
    yield shard


def _num_bytes(tensor: Lazy) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


# ---- files ----


@contextmanager
def _new(output: Path) -> Iterator[Path]:
    """Where to write what then becomes `output` at once; gone if anything fails before.

    Raises:
        DslparError: something stands at `output`, or it cannot be written.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        message, hint = f"{output} is there already", "name a folder that is not there: nothing is written over"
        raise_finding("CKP221", message, hint, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=output.name, suffix=folder.PART, dir=output.parent) as made:
            unready = Path(made, output.name)
            unready.mkdir()
            yield unready
            folder.flush(unready)
            unready.rename(output)
            folder.flush(output.parent)
    except OSError as error:
        message = f"cannot write to {output}: {error}"
        hint = "make room there, or name another folder"
        raise DslparError([finding("CKP205", message, hint, str(output))]) from error
