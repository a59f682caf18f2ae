"""Asynchronous saves: a checkpoint holds the state of its step, whatever later steps change."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dslpar.checkpoint import host_buffers
from dslpar.checkpoint.folder import scan, verify
from dslpar.checkpoint.host_buffers import HostBuffers
from dslpar.checkpoint.index import Index
from dslpar.checkpoint.rank_files import RankFiles, WriterThread
from dslpar.checkpoint.tensor_file import copied_bytes, file_bytes
from dslpar.core.errors import DslparError
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from tests.distributed.checkpoint.test_folder import steps
from tests.support.data_types import one_each
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.saving_jobs import job_of

PIPE = sections.Parallel(pipeline=sections.PipelineParallel(size=2))
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {},
    "ZeRO 1": {"zero": sections.Zero(stage=1)},
    "ZeRO 3": {"zero": sections.Zero(stage=3)},
    "bf16, ZeRO 2": {"zero": sections.Zero(stage=2), "precision": sections.Precision(dtype="bf16")},
    "pipe 2": {"parallel": PIPE},
}


class Gate:
    """Holds up writes of this process's threads, as a slow disk would: os.write itself waits before the first byte.

    So only the copies of the tensors have been read by then.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self._write = os.write
        os.write = self

    def __call__(self, file: int, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(30)
        return self._write(file, data)

    def remove(self) -> None:
        os.write = self._write


def engine_of(job: Job) -> Any:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    return build_engine(job, Groups(job.mesh), all_counted=True)


def step(engine: Any) -> None:
    job = engine.job
    ids = torch.arange(job.batch.micro_size * 4).view(-1, 4) % 16
    engine.train_batch([(ids, ids)] * job.batch.accumulation)


def contents(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the bytes of a file of these tensors; each chunk is gone when the next is requested."""
    return b"".join(bytes(chunk) for chunk in file_bytes(tensors))


def manifest_of(root: Path, number: int) -> dict[str, Any]:
    (stored,) = [each for each in scan(root).checkpoints if each.step == number]
    assert verify(stored) == []
    return dict(stored.manifest)


# ---- contents ----


def _saved_twice(job: Job) -> tuple[dict[str, Any], dict[str, Any], list[bool]]:
    """Return the manifests of a synchronous save, and of an asynchronous save of the same step after two more steps."""
    from dslpar import checkpoint
    from dslpar.distributed import collectives

    engine = engine_of(job)
    root, world = Path(job.output_dir, "checkpoints"), engine.groups.axis("pipe", "data", "tensor")
    step(engine), step(engine)
    checkpoint.save(engine, "text")
    waited = manifest_of(root, 2)
    collectives.barrier(world)
    gate = Gate()
    pending = checkpoint.begin_save(engine, HostBuffers(), "text")
    step(engine), step(engine)
    seen = [pending.is_written, pending.saved is not None, (root / "step_000002.part").is_dir()]
    assert manifest_of(root, 2) == waited, "it is there all the while"
    collectives.barrier(world)
    gate.open.set()
    saved = pending.publish()
    gate.remove()
    assert pending.saved == saved == root / "step_000002"
    return waited, manifest_of(root, 2), seen


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"ZeRO 3", "bf16, ZeRO 2", "pipe 2"}))
def test_its_bytes_are_those_of_a_save_that_the_run_waits_for(tmp_path: Path, layout: str) -> None:
    """Digests of all files are equal: weights, states, random states, counters and the index. Two steps changed all
    these.
    """
    job = job_of(tmp_path, 2, **LAYOUTS[layout])
    for waited, later, (is_written, is_published, has_part) in on_ranks(2, _saved_twice, job, init="deepspeed"):
        assert later == waited
        assert (is_written, is_published, has_part) == (False, False, True)


def _changed_while_it_is_copied(job: Job) -> bool:
    """Return whether the test would notice a save without the copy, whose bytes are read after a step."""
    from dslpar.checkpoint import saving

    engine = engine_of(job)
    step(engine)
    _, tensors = saving._collect_tensors(engine, 0)
    before = contents(tensors)
    step(engine)
    return before != contents(tensors)


def test_a_step_changes_what_was_not_copied(tmp_path: Path) -> None:
    assert on_ranks(1, _changed_while_it_is_copied, job_of(tmp_path), init="deepspeed") == [True]


# ---- buffers ----


@pytest.mark.parametrize("block_bytes", [3, 16, 1 << 26])
def test_a_copy_is_the_file_whatever_the_blocks(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors end inside blocks, blocks inside tensors and inside elements; one tensor has gaps, one is empty."""
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", block_bytes)
    tensors = one_each() | {"gaps": torch.randn(4, 6)[:, ::2], "none": torch.tensor(3.0)}
    buffers = HostBuffers()
    expected = contents(tensors)
    copied = copied_bytes(tensors, buffers)
    for tensor in tensors.values():
        tensor.zero_()
    assert b"".join(copied) == expected
    blocks = [block.data_ptr() for block in buffers._blocks]
    assert b"".join(copied_bytes(tensors, buffers)) == contents(tensors)
    assert [block.data_ptr() for block in buffers._blocks] == blocks, "the second copy is in the same memory"
    assert buffers.num_bytes == len(blocks) * block_bytes
    copied_bytes(tensors | {"more": torch.randn(40)}, buffers)
    assert [block.data_ptr() for block in buffers._blocks][: len(blocks)] == blocks, "a larger one adds to it"


def _buffers_of_saves(job: Job) -> list[tuple[int, list[int]]]:
    from dslpar import checkpoint

    engine, buffers, found = engine_of(job), HostBuffers(), []
    for number in (1, 2, 3):
        step(engine)
        checkpoint.begin_save(engine, buffers).publish()
        manifest_of(Path(job.output_dir, "checkpoints"), number)
        found.append((buffers.num_bytes, [block.data_ptr() for block in buffers._blocks]))
    return found


def test_saves_of_a_run_share_their_memory(tmp_path: Path) -> None:
    ((first, *others),) = on_ranks(1, _buffers_of_saves, job_of(tmp_path), init="deepspeed")
    assert first[0] > 0
    assert others == [first, first]


# ---- failures ----


def _full_on_rank_1(job: Job) -> tuple[str, list[int]]:
    from dslpar import checkpoint

    engine, buffers = engine_of(job), HostBuffers()
    checkpoint.save(engine)
    step(engine)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.groups.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # beyond this, writes fail
    pending = checkpoint.begin_save(engine, buffers)
    step(engine)
    with pytest.raises(DslparError) as refused:
        pending.publish()
    root = Path(job.output_dir, "checkpoints")
    if engine.groups.rank == 0:
        assert not list(root.glob("*.part")), "the disk has its room again"
    visible = steps(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoint.begin_save(engine, buffers).publish()
    return str(refused.value), visible


def test_one_full_disk_is_one_finding_on_all_ranks_of_the_step_that_was_saved(tmp_path: Path) -> None:
    job = job_of(tmp_path, 2, zero=sections.Zero(stage=1))
    for message, visible in on_ranks(2, _full_on_rank_1, job, init="deepspeed"):
        assert "CKP205 no-checkpoint: cannot write checkpoints to" in message
        assert re.search(r"rank 1 of 2 on \S+, stage 0 \(.*\), step 1: \[Errno 27\] File too large", message)
        assert visible == [0], "what was there before, and nothing else"
    assert steps(tmp_path / "checkpoints") == [0, 2], "and the next one is whole"


def _blind(job: Job) -> str:
    from dslpar import checkpoint

    engine = engine_of(job)
    if engine.groups.rank == 1:
        engine.job = dataclasses.replace(job, output_dir=job.output_dir + "-not-here")
    pending = checkpoint.begin_save(engine, HostBuffers())
    with pytest.raises(DslparError) as refused:
        pending.publish()
    return str(refused.value)


def test_a_host_that_does_not_see_the_folder_is_told_on_all_ranks(tmp_path: Path) -> None:
    for message in on_ranks(2, _blind, job_of(tmp_path, 2), init="deepspeed"):
        assert "CKP203" in message


# ---- the thread ----


def thread_of(part: Path, write: Callable[[], bytes]) -> WriterThread:
    def chunks() -> Any:
        yield b"first"
        yield write()

    thread = WriterThread(RankFiles("rank 0", {"file": chunks()}, Index()), part)
    thread.start()
    return thread


def test_what_is_raised_in_it_is_raised_where_its_report_is_asked_for(tmp_path: Path) -> None:
    def broken() -> bytes:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        thread_of(tmp_path, broken).report()
    assert thread_of(tmp_path / "nowhere", lambda: b"").report().error.startswith("rank 0: [Errno 2] ")
    thread = thread_of(tmp_path, broken)
    thread.join()
    assert thread.abandon() == "ValueError('a bug')", "nor is it lost where nobody publishes"


def test_one_that_is_abandoned_ends_before_its_next_bytes(tmp_path: Path) -> None:
    asked, go = threading.Event(), threading.Event()

    def slow() -> bytes:
        asked.set()
        assert go.wait(30)
        return b"second"

    thread = thread_of(tmp_path, slow)
    assert asked.wait(30)
    assert thread.abandon() == "", "it is not waited for as long as the disk takes"
    assert thread.is_alive()
    assert thread.daemon, "nor by Python at its exit"
    go.set()
    thread.join(30)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert thread.abandon() == ""


def test_its_report_is_that_of_writing_without_it(tmp_path: Path) -> None:
    files = {"one": [b"1234", memoryview(b"5")], "two": [b""]}
    (tmp_path / "thread").mkdir()
    thread = WriterThread(RankFiles("rank 0", files, Index()), tmp_path / "thread")
    thread.start()
    assert thread.report() == RankFiles("rank 0", files, Index()).write(tmp_path)
    assert {name: digest.bytes for name, digest in thread.report().files.items()} == {"one": 5, "two": 0}
    assert (tmp_path / "one").read_bytes() == (tmp_path / "thread" / "one").read_bytes() == b"12345"
