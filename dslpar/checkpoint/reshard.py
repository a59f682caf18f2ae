"""Convert a checkpoint to another layout offline, in one process without a GPU.

    reshard(checkpoint, job, Path("outputs/wider"))       # the checkpoint as `job`'s ranks would have written it

Memory is bounded by the largest tensor, not by the model (`python -m benchmarks reshard_memory`): stored files are
mapped, and each tensor of a new file is made when it is written. To find the piece of each tensor on each target rank,
the target's layers are built on torch's "meta" device. (DeepSpeed's universal checkpoints and Megatron-LM's converters
derive from name patterns how weights are sharded, and load whole ranks or whole models into memory.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dslpar.checkpoint import folder, manifest, rank_state, resume_changes, writer
from dslpar.checkpoint.folder import Checkpoint, FileDigest
from dslpar.checkpoint.index import INDEX, Index, file_key, load_index, tensor_path
from dslpar.checkpoint.slices import Box, Piece, box_of, full_box, num_elements
from dslpar.checkpoint.state_files import read_rank_state
from dslpar.checkpoint.tensor_file import DTYPES, LazyTensor, torch_bytes, write_lazy_tensors
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import TENSOR_AXES
from dslpar.core.suggest import did_you_mean
from dslpar.distributed.groups import Groups
from dslpar.engine import partition
from dslpar.engine.model import model_from_job
from dslpar.engine.stage_layers import stage_parts
from dslpar.layers.parameter import placement_of
from dslpar.layers.placement import Placement
from dslpar.layout.resolve import Job
from dslpar.models import LayerSpec
from dslpar.reporting import run_dir


class Target(NamedTuple):
    """Shape and sharding of a parameter of the target model (the model in the new layout)."""

    shape: tuple[int, ...]
    """Full shape, unpadded."""
    placement: Placement | None
    """Sharding over the tensor group; None: every rank has the full parameter."""

    def is_owner(self, coord: Mapping[str, int]) -> bool:
        """Return whether the tensor rank at `coord` writes its piece: of equal copies, only one rank writes."""
        return self.placement.owner(coord) if self.placement else not any(coord.values())

    def box(self, coord: Mapping[str, int]) -> Box:
        """Return the piece of the tensor rank at `coord`, as a box of the full tensor (see `slices`)."""
        return box_of(self.placement, coord) if self.placement else full_box(self.shape)


Share = Mapping[str, Target]
"""Parameters of one pipeline rank, in all its stages, by global name. A tied weight is in its owner's share only."""


# ---- writing the new checkpoint ----


def reshard(checkpoint: Checkpoint, job: Job, output: Path) -> Path:
    """Write the checkpoint in `job`'s layout to `<output>/checkpoints`. Return its folder.

    Random states are left out, since they belong to the ranks that saved them. A suspect checkpoint stays suspect.

    Raises:
        DslparError: `job` cannot resume the checkpoint (another model, data, ...), `<output>/checkpoints` is not empty,
            or a file cannot be read or written.
    """
    text = checkpoint.manifest["fixed"]["data.text"]
    resume_changes.check(checkpoint, job, text)
    index = load_index(Path(checkpoint.path))
    job, shares = shares_of(job, index)
    _check_fits(checkpoint, shares, index)
    root = output / run_dir.CHECKPOINTS
    with writer.new_folder(root) as unfinished:
        written = _write_files(checkpoint, index, job, shares, writer.begin_save(unfinished, checkpoint.step))
        layout = {**manifest.layout_of(job), manifest.OFFLINE: True}
        made = manifest.manifest_of(
            job, text, checkpoint.step, checkpoint.manifest["consumed_samples"], checkpoint.eval_loss
        )
        mark = {folder.SUSPECT: checkpoint.suspect} if checkpoint.suspect else {}
        writer.publish(unfinished, made | {"layout": layout} | mark, written)
    return folder.final_path(root, checkpoint.step)


def _write_files(
    checkpoint: Checkpoint, index: Index, job: Job, shares: Sequence[Share], part: Path
) -> dict[str, FileDigest]:
    """Write all files except the manifest to the folder `part`; return their digests by path in the folder."""
    source, writers = Path(checkpoint.path), list(_writing_ranks(job, shares))
    # Training state does not depend on the layout: its bytes are copied.
    written = {part / folder.STATE: writer.write_file(part / folder.STATE, [(source / folder.STATE).read_bytes()])}
    reader = TensorReader(source, index)
    for rank, pieces in writers:
        path = tensor_path(part, rank)
        written[path] = write_lazy_tensors(path, list(_tensors_of_rank(reader, index, pieces)))
    for rank, buffers in _buffers(checkpoint, job):
        path = folder.rank_path(part, rank)
        written[path] = writer.write_file(path, [torch_bytes({"buffers": buffers})])
    written[part / INDEX] = writer.write_file(part / INDEX, [writer.json_bytes(_recut(index, writers).to_json())])
    return {path.relative_to(part).as_posix(): digest for path, digest in written.items()}


Pieces = Mapping[str, Box]
"""Pieces that a rank writes: parameter name -> box of the full tensor."""


def _writing_ranks(job: Job, shares: Sequence[Share]) -> Iterator[tuple[int, Pieces]]:
    """Yield (rank, its pieces) for each rank that writes tensors; all are on data rank 0."""
    mesh = job.mesh
    for pipe_rank, targets in enumerate(shares):
        for indices in product(*(range(mesh.sizes[axis]) for axis in TENSOR_AXES)):
            coord = dict(zip(TENSOR_AXES, indices, strict=True))
            pieces = {name: target.box(coord) for name, target in targets.items() if target.is_owner(coord)}
            if pieces:
                yield mesh.rank({"pipe": pipe_rank, "data": 0, **coord}), pieces


def _tensors_of_rank(reader: TensorReader, index: Index, pieces: Pieces) -> Iterator[LazyTensor]:
    """Yield the tensors of a rank's file. Each is read when it is written."""
    for name, box in pieces.items():
        entry, count = index.parameters[name], num_elements(box)
        for key in ("", *entry.states):
            make = partial(reader.fragment, name, key, box, 0, count)
            yield LazyTensor(file_key(name, key), DTYPES[entry.dtype_of(key)], (count,), make)
        for key, state in entry.irregular.items() if box == full_box(entry.shape) else ():
            make = partial(reader.irregular, name, key)
            yield LazyTensor(file_key(name, key), DTYPES[state.dtype], (math.prod(state.shape),), make)


def _recut(index: Index, writers: Sequence[tuple[int, Pieces]]) -> Index:
    """Return the index of the same tensors in the target's pieces, without copies of tied weights.

    A load in another layout fills the copies from the owner's weight.
    """
    cut: dict[str, list[Piece]] = {name: [] for name in index.parameters}
    for rank, pieces in writers:
        for name, box in pieces.items():
            cut[name].append(Piece(rank, box, 0, num_elements(box)))
    entries = {
        name: replace(entry, pieces=cut[name], irregular_file=cut[name][0].file if entry.irregular else None)
        for name, entry in index.parameters.items()
    }
    return Index(entries, {}, index.groups)


def _buffers(checkpoint: Checkpoint, job: Job) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (rank, its buffers), from the source's replica of the same number, or from its first replica if none."""
    for rank in range(job.mesh.world_size):
        found: dict[str, Tensor] = {}
        for other in reversed(list(rank_state.source_ranks(checkpoint.manifest["layout"], job.mesh.coord(rank)))):
            found |= read_rank_state(checkpoint, other).get("buffers", {})
        if found:
            yield rank, found


# ---- parameters of the target ----


def shares_of(job: Job, index: Index) -> tuple[Job, list[Share]]:
    """Return the job with its partition into stages, and the parameters of each pipeline rank.

    Without a pipeline and tensor parallelism, the parameters come from the index: then the model need not be built,
    which only the user's script may be able to do.
    """
    if job.mesh.pipe == 1 and job.mesh.tensor.size == 1:
        return job, [{name: Target(entry.shape, None) for name, entry in index.parameters.items()}]
    groups = Groups.without_processes(job.mesh)
    # No memory, no processes: only shapes and placements are read from the layers.
    with torch.device("meta"):
        job, layers = partition.partition_layers(job, model_from_job(job), groups)
        held = [layers]
        if job.mesh.pipe > 1:
            assert job.stages.counts is not None, "partition.partition_layers has set them"
            parts = stage_parts([layer.layer_idx for layer in layers], job.stages.counts)
            of_stages = [layers[begin:end] for begin, end in pairwise(parts)]
            held = [list(chain(*of_stages[rank :: job.mesh.pipe])) for rank in range(job.mesh.pipe)]
        return job, [dict(_parameters(of_rank)) for of_rank in held]


def _parameters(layers: Sequence[LayerSpec]) -> Iterator[tuple[str, Target]]:
    """Yield (global name, parameter) of these layers, each parameter once; layers with a tied weight are skipped."""
    seen: list[Tensor] = []
    for layer in layers:
        for name, p in layer.build().named_parameters() if layer.tied is None else ():
            if not any(p is other for other in seen):
                seen.append(p)
                placement = placement_of(p)
                yield f"{layer.owner}.{name}", Target(placement.shape if placement else tuple(p.shape), placement)


def _check_fits(checkpoint: Checkpoint, shares: Sequence[Share], index: Index) -> None:
    """Raise DslparError unless the target model has exactly the stored parameters, by name and shape."""
    wanted = {name: target.shape for share in shares for name, target in share.items()}
    stored = {name: entry.shape for name, entry in index.parameters.items()}
    problems = [f"it has no {name!r}{did_you_mean(name, stored, '; ')}" for name in wanted.keys() - stored.keys()]
    problems += [f"the model has no {name!r}" for name in stored.keys() - wanted.keys()]
    differ = [name for name in wanted if name in stored and wanted[name] != stored[name]]
    problems += [f"{name!r} has shape {stored[name]}, but {wanted[name]} in the model" for name in differ]
    if problems:
        hint = "give the config of the run that saved it: `dslpar checkpoint show` prints it"
        message = f"{checkpoint.path} holds another model: {'; '.join(sorted(problems)[:8])}"
        raise_finding("CKP207", message, hint, checkpoint.path)
