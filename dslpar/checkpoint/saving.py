"""Save a run: each rank writes its own files, and rank 0 publishes their folder when all of them are on disk.

Steps of a save:

1. Rank 0 removes what earlier saves left unfinished, and makes `step_N.part`.
2. Each rank writes to one file the tensor pieces that it owns (of equal copies one rank owns each element: `shards`),
   and to another file its random states and buffers (`rank_state`). It syncs both files to disk.
3. All ranks report to rank 0: whether they see its folder, whether they could write, and their part of the index.
4. Rank 0 merges the parts of the index, and writes the index and the training state. It sets aside checkpoints of this
   step or later, left from before the run was resumed at an earlier step. It publishes the folder by renaming it, and
   then removes checkpoints beyond the number to keep.

A save has three collectives (in steps 1, 3 and 4), however many tensors there are. The run can wait for all four steps:

    checkpoint.save(engine, data)

Or it waits only for step 1 and a copy of the tensors to host memory. A thread per rank writes the copy while training
goes on. Steps 3 and 4 follow when all threads have finished:

    pending = checkpoint.begin_save(engine, HostBuffers(), data)
    ...                                             # steps, until pending.is_written on every rank
    pending.publish()

As in torch's distributed checkpoints, ranks report errors only after writing, so one rank's full disk cannot leave the
others in a collective forever. As in Megatron-LM's asynchronous save, training waits only for the copy to host memory,
and all ranks agree that the writing has ended. Megatron-LM writes in separate processes, since pickling holds Python's
global interpreter lock. Here a thread is enough: hashing, writing and syncing large buffers do not hold the lock.
"""

from __future__ import annotations

import json
import pickle
import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from dslpar.checkpoint import folder, manifest, rank_state, shards, train_state, writer
from dslpar.checkpoint.collective import MAX_LISTED, WRITE, check_seen_by_all, raise_failed, run_on_rank_0, world_of
from dslpar.checkpoint.host_buffers import HostBuffers
from dslpar.checkpoint.index import INDEX, Entry, Index, IrregularState, file_key, merge, tensor_path
from dslpar.checkpoint.rank_files import Chunks, RankFiles, RankReport, WriterThread
from dslpar.checkpoint.shards import ParameterGroup, ParameterShard
from dslpar.checkpoint.slices import Piece
from dslpar.checkpoint.tensor_file import copied_bytes, dtype_name, file_bytes, torch_bytes
from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.reporting.run_dir import CHECKPOINTS


def save(engine: Engine, data: str = "", confirmed_step: int | None = None, eval_loss: float | None = None) -> Path:
    """Save the run's present state, and publish the checkpoint. All ranks must call it together.

    `data` describes the training data (`dslpar.data.source`); `confirmed_step` is as in `writer.prune`; `eval_loss` is
    the held-out loss after the last step, if it was measured. Returns the checkpoint's folder.

    Raises:
        DslparError: on every rank, if one rank cannot write, or does not see rank 0's folder. Published checkpoints
            stay unchanged.
    """
    return PendingSave(engine, data, None, eval_loss).publish(confirmed_step)


def begin_save(engine: Engine, buffers: HostBuffers, data: str = "", eval_loss: float | None = None) -> PendingSave:
    """Copy the state that this rank saves to `buffers`, and start a thread that writes the copy. Collective.

    After the return, training may change the copied tensors. Only one save may be pending: `publish` it before the
    next `begin_save`.

    Raises:
        DslparError: on every rank, if rank 0 cannot make the folder.
    """
    return PendingSave(engine, data, buffers, eval_loss)


class PendingSave:
    """A checkpoint that is being written and is not published yet, with a copy of all state that later steps change.

    All ranks must create and publish it together. `buffers`: copy the tensors to these and write them in a thread;
    None: write the files at once, in this thread.
    """

    def __init__(self, engine: Engine, data: str, buffers: HostBuffers | None, eval_loss: float | None = None) -> None:
        self.step = engine.steps_done
        """Step that is saved."""
        self.saved: Path | None = None
        """Checkpoint's folder, once it is published."""
        self._job, self._world, self._rank = engine.job, world_of(engine), engine.rank_description
        self._root = Path(engine.job.output_dir, CHECKPOINTS)
        self._part = folder.part_path(self._root, self.step)
        self._made = run_on_rank_0(
            lambda: writer.begin_save(self._root, self.step), self._world, self._job, WRITE, self._rank
        )
        """Rank 0's path of the unfinished folder, for error messages."""
        self._manifest = manifest.manifest_of(engine.job, data, self.step, engine.consumed_samples, eval_loss)
        self._train_state = torch_bytes(train_state.collect(engine))
        self._thread: WriterThread | None = None
        if not self._part.exists():
            self._report = RankReport(socket.gethostname(), sees_folder=False)
        elif buffers is None:
            self._report = _rank_files(engine, None).write(self._part)
        else:
            self._thread = WriterThread(_rank_files(engine, buffers), self._part)
            self._thread.start()

    @property
    def is_written(self) -> bool:
        """Return whether this rank has finished writing, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def publish(self, confirmed_step: int | None = None) -> Path:
        """Wait until all ranks have written; publish the checkpoint, and return its folder. Collective.

        `confirmed_step` is as in `writer.prune`.

        Raises:
            DslparError: on every rank, as `save` does.
        """
        report = self._report if self._thread is None else self._thread.report()
        reports = collectives.gather_objects(report, self._world)
        check_seen_by_all([(report.host, report.sees_folder) for report in reports], str(self._made), self._job)
        errors = [report.error for report in reports if report.error]
        if errors:
            if self._world.index == 0:
                writer.remove(self._part)  # no rank writes to it any more, and the disk may be full
            raise_failed(WRITE, "; ".join(errors[:MAX_LISTED]), self._job)

        def publish() -> Path:
            try:
                return self._publish(reports, confirmed_step)
            except OSError:
                writer.remove(self._part)
                raise

        self.saved = run_on_rank_0(publish, self._world, self._job, WRITE, self._rank)
        return self.saved

    def _publish(self, reports: Sequence[RankReport], confirmed_step: int | None) -> Path:
        """Write rank 0's files, publish the folder, and remove checkpoints beyond the number to keep. Rank 0 only."""
        # Safe to unpickle: this job's own ranks pickled it a moment ago.
        index = merge(pickle.loads(zlib.decompress(report.packed_index)) for report in reports)
        lost = index.incomplete()
        assert not lost, f"not held once by the ranks, so nobody could load it: {lost[:MAX_LISTED]}"
        files = {path: digest for report in reports for path, digest in report.files.items()}
        index_bytes = json.dumps(index.to_json(), separators=(",", ":")).encode()
        files[INDEX] = writer.write_file(self._part / INDEX, [index_bytes])
        files[folder.STATE] = writer.write_file(self._part / folder.STATE, [self._train_state])
        # This precedes the rename: if the run is killed between them, the newest checkpoint must not be one from before
        # the resume.
        writer.set_aside(self._root, self.step)
        final = writer.publish(self._root, self._manifest, files)
        kept = self._job.spec.checkpoint
        writer.prune(self._root, kept.keep, self.step, confirmed_step, keep_best=kept.keep_best)
        return final

    def abandon(self) -> str:
        """Stop writing on this rank only; the save stays unpublished. Return this rank's error, or ""."""
        return "" if self._thread is None else self._thread.abandon()


# ---- files of a rank ----


def _rank_files(engine: Engine, buffers: HostBuffers | None) -> RankFiles:
    """Return this rank's files, with tensors copied to `buffers`; None: tensors are read when they are written."""
    rank, here = engine.groups.rank, Path()
    index, tensors = _collect_tensors(engine, rank)
    files: dict[str, Chunks] = {
        tensor_path(here, rank).as_posix(): file_bytes(tensors) if buffers is None else copied_bytes(tensors, buffers),
        folder.rank_path(here, rank).as_posix(): [torch_bytes(rank_state.collect(engine))],
    }
    return RankFiles(engine.rank_description, files, index)


def _collect_tensors(engine: Engine, rank: int) -> tuple[Index, dict[str, Tensor]]:
    """Return this rank's part of the index, and views of its tensors by key."""
    groups: list[ParameterGroup] = []
    parameters: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    tensors: dict[str, Tensor] = {}
    for shard in shards.parameter_shards(engine):
        if shard.write_range:
            name = shard.stored_name(same_layout=True)
            begin, end = shard.write_range.start - shard.start, shard.write_range.stop - shard.start
            for key, tensor in {"": shard.weight, **shard.states}.items():
                tensors[file_key(name, key)] = tensor.reshape(-1)[begin:end]
            # Optimizer tensors of another shape cannot be sharded like the weight: the rank that writes the weight's
            # first element writes them whole.
            irregular = shard.irregular if shard.write_range.start == 0 else {}
            tensors |= {file_key(name, key): tensor for key, tensor in irregular.items()}
            found = parameters if shard.tied_copy_rank is None else copies
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
    """Return the position of an optimizer's parameter group in `groups`; append the group if it is new."""
    if not any(known is group for known in groups):  # `in` would compare their tensors
        groups.append(group)
    return next(number for number, known in enumerate(groups) if known is group)
