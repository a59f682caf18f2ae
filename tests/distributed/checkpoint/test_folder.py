"""Checkpoint folders: when files become visible, what is kept or refused, and what ranks agree on."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from dslpar.checkpoint import check, find_checkpoint, folder, manifest, writer
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.index import INDEX, Index, load_index
from dslpar.checkpoint.tensor_file import torch_bytes
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError
from dslpar.distributed.collectives import Axis
from dslpar.layout.resolve import Job
from dslpar.schema import sections as schema_sections
from tests.support.ranks import on_ranks
from tests.support.saving_jobs import GPT, job_of
from tests.support.versions import needs_torch


def put(root: Path, step: int) -> Path:
    """Write a one-rank checkpoint without tensors, and another file to be corrupted."""
    part = writer.begin_save(root, step)
    counts = {"global_steps": step, "global_samples": step, "skipped_steps": 0}
    numpy: Any = np.random.RandomState(1).get_state(legacy=True)
    numpy = [numpy[0], numpy[1].tolist(), *numpy[2:]]
    states = {"python": random.Random(1).getstate(), "numpy": numpy, "torch": torch.Generator().get_state()}
    files = {
        "weights": b"1234",
        INDEX: json.dumps(Index().to_json()).encode(),
        folder.STATE: torch_bytes({"counts": counts, "schedule": {}, "scale": {}}),
        "ranks/00000.pt": torch_bytes({"buffers": {}, "schedule": {}, "random": states}),
    }
    written = {name: writer.write_file(part / name, [data]) for name, data in files.items()}
    return writer.publish(root, manifest.manifest_of(job_of(), "text", step), written)


def steps(root: Path) -> list[int]:
    return [stored.step for stored in folder.scan(root).checkpoints]


# ---- visible, intact, kept ----


def test_it_is_visible_with_its_manifest_and_not_before(tmp_path: Path) -> None:
    writer.begin_save(tmp_path, 5)
    (folder.part_path(tmp_path, 5) / folder.MANIFEST).write_text('{"step": 5}')
    assert steps(tmp_path) == []
    final = put(tmp_path, 5)
    assert final.name == "step_000005"
    (stored,) = folder.scan(tmp_path).checkpoints
    assert folder.is_complete(stored)
    assert [stored.manifest[key] for key in ("format", "step", "consumed_samples")] == [2, 5, 5]
    assert stored.manifest["files"]["weights"] == {"bytes": 4, "xxh3_128": xxhash.xxh3_128_hexdigest(b"1234")}
    assert set(stored.manifest["versions"]) == {"dslpar", "torch", "deepspeed", "python"}


def test_what_was_not_finished_goes_at_the_next_save(tmp_path: Path) -> None:
    writer.begin_save(tmp_path, 5)
    put(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000006"]


@pytest.mark.parametrize("length", [0, 3, None])
def test_a_file_cut_short_or_lost_makes_it_incomplete(tmp_path: Path, length: int | None) -> None:
    weights = put(tmp_path, 5) / "weights"
    if length is None:
        weights.unlink()
    else:
        os.truncate(weights, length)
    (stored,) = folder.scan(tmp_path).checkpoints
    assert not folder.is_complete(stored)
    put(tmp_path, 5)
    (stored,) = folder.scan(tmp_path).checkpoints
    assert folder.is_complete(stored), "a save of that step replaces it"


@pytest.mark.parametrize(("keep", "left"), [(None, [2, 9, 100, 1_000_000]), (1, [1_000_000]), (3, [9, 100, 1_000_000])])
def test_the_newest_are_kept_by_their_step(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (9, 1_000_000, 2, 100):
        put(tmp_path, step)
    writer.prune(tmp_path, keep, 1_000_000)
    assert steps(tmp_path) == left


def test_an_incomplete_one_is_never_kept_in_place_of_a_complete_one(tmp_path: Path) -> None:
    """Step 10 was incomplete, so the run continued from step 5, and has saved step 6."""
    for step in (4, 5, 10):
        put(tmp_path, step)
    os.truncate(tmp_path / "step_000010" / "weights", 1)
    put(tmp_path, 6)
    writer.prune(tmp_path, 1, 6)
    assert steps(tmp_path) == [6, 10]
    os.truncate(tmp_path / "step_000006" / "weights", 1)
    put(tmp_path, 7)
    put(tmp_path, 8)
    os.truncate(tmp_path / "step_000007" / "weights", 1)
    put(tmp_path, 9)
    writer.prune(tmp_path, 2, 9)
    assert steps(tmp_path) == [8, 9, 10]


def test_suspect_ones_are_no_copies_to_count_on_and_the_last_confirmed_one_stays(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        put(tmp_path, step)
    writer.prune(tmp_path, 2, 10, confirmed_step=5)
    assert steps(tmp_path) == [4, 8, 10]
    writer.mark_suspect(tmp_path / "step_000008", "a weight differs")
    writer.mark_suspect(tmp_path / "step_000010", "a weight differs")
    put(tmp_path, 12)
    writer.prune(tmp_path, 2, 12)
    assert steps(tmp_path) == [4, 8, 10, 12], "two good ones, and none older"


def test_a_mark_changes_the_manifest_alone_and_nothing_is_left_of_its_writing(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    before = {name: (path / name).read_bytes() for name in folder.file_sizes(path)}
    writer.mark_suspect(path, "a weight differs: rank 3")
    stored = folder.open_checkpoint(path)
    assert stored.suspect == "a weight differs: rank 3"
    assert folder.verify(stored) == []
    assert {name: (path / name).read_bytes() for name in folder.file_sizes(path)} == before
    writer.mark_suspect(path, "another one")
    assert folder.open_checkpoint(path).suspect == "another one"
    assert [each.name for each in tmp_path.iterdir()] == ["step_000003"]


def test_a_kill_while_a_mark_is_written_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, 3)

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.mark_suspect(path, "a weight differs")
    assert folder.open_checkpoint(path).suspect == ""
    assert steps(tmp_path) == [3]
    writer.begin_save(tmp_path, 4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_000003", "step_000004.part"]


def test_what_cannot_be_marked_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The failure must not hide why the run ends."""
    writer.mark_suspect(tmp_path / "step_000003", "a weight differs")
    assert "step_000003 cannot be marked as suspect: missing" in caplog.text


def test_a_mark_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    values = {key: value for key, value in folder.open_checkpoint(path).manifest.items() if key != "digest"}
    (path / folder.MANIFEST).write_bytes(folder.serialize({**values, folder.SUSPECT: 1}))
    with pytest.raises(folder.ManifestError, match="suspect"):
        folder.open_checkpoint(path)


# ---- checkpoints that cannot be removed or read ----


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that two users share, as the other user (if the tests run as root; otherwise modes alone deny)."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made, "checkpoints")
        root.mkdir()
        for path in (Path(made), root):
            path.chmod(0o777)
        yield root


@contextmanager
def other_user() -> Iterator[None]:
    before = os.geteuid()
    finding("CKP205", "", "")  # the texts of findings are in a file that the other user may not be allowed to read
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_link_to_an_archive_goes_and_the_archive_stays(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    archive = put(root, 1).rename(tmp_path / "archive")
    (root / "step_000001").symlink_to(archive)
    put(root, 2)
    writer.prune(root, 1, 2)
    assert sorted(path.name for path in root.iterdir()) == ["step_000002"]
    assert (archive / "weights").exists()


def test_what_cannot_be_removed_is_logged_and_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """It belongs to another user, or a process reads it from a network file system. It is invisible, and tried again
    later.
    """
    with shared_folder() as root:
        old = put(root, 1)
        old.chmod(0o555)
        put(root, 2)
        with other_user():
            writer.prune(root, 1, 2)
            assert steps(root) == [2]
            assert "cannot be removed: [Errno 13] Permission denied" in caplog.text
            put(root, 3)
            put(root, 4)
            writer.prune(root, 1, 4)
            assert steps(root) == [4]
        (root / "step_000001.old.part").chmod(0o755)
        put(root, 5)
        assert sorted(path.name for path in root.iterdir()) == ["step_000004", "step_000005"]


def test_a_folder_that_may_not_be_listed_is_not_one_without_checkpoints() -> None:
    """Otherwise the run would start at step 0, and set the other user's checkpoints aside."""
    with shared_folder() as root:
        put(root, 5)
        root.chmod(0o300)
        with other_user(), pytest.raises(DslparError) as refused:
            find_checkpoint(job_of(root.parent), Axis())
        assert "CKP205 no-checkpoint: cannot read the checkpoints in" in str(refused.value)
        assert "Permission denied" in str(refused.value)
        root.chmod(0o700)


def test_a_file_system_that_cannot_bring_a_folder_to_the_disk_is_none_that_fails() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(os.open("/proc", os.O_RDONLY))
    writer.fsync(Path("/proc"))


def test_what_is_no_checkpoint_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "step_mine").mkdir()
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "step_000002").write_text("a file")
    for number, text in enumerate((b'{"step":', b"[]", b'{"step": 4}', b"\xff\x00"), start=3):
        (tmp_path / f"step_{number:06d}").mkdir()
        (tmp_path / f"step_{number:06d}" / folder.MANIFEST).write_bytes(text)
    assert steps(tmp_path) == []
    assert steps(tmp_path / "nowhere") == []
    lost = [f"step_{number:06d}" for number in (1, 3, 4, 5, 6)]
    assert [path.name for path in folder.scan(tmp_path).unreadable] == lost


# ---- refused ----


def stored_of(job: Job, **manifest_: Any) -> Checkpoint:
    text = json.dumps(manifest.manifest_of(job, "text", 5) | manifest_)
    return Checkpoint("out/checkpoints/step_000005", json.loads(text))


CHANGED: dict[str, dict[str, Any]] = {
    "optimizer.type": {"optimizer": schema_sections.Adam(weight_decay=0.01)},
    "model.hidden_size": {"model": dataclasses.replace(GPT, hidden_size=16)},
    "train.seed": {"train": schema_sections.Train(seed=1)},
    "batch.global_size": {"batch": schema_sections.Batch(global_size=8)},
    "data.seq_len": {"data": schema_sections.TextData(seq_len=2)},
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_checkpoint_of_another_run_is_refused_by_the_key(key: str) -> None:
    with pytest.raises(DslparError) as refused:
        check(stored_of(job_of()), job_of(**CHANGED[key]), "text")
    (finding,) = refused.value.findings
    assert (finding.code, finding.severity) == ("CKP202", "error")
    differing = [line.strip().partition(":")[0] for line in finding.lines().splitlines()[1:]]
    assert key in differing
    assert len(differing) == 1, "nothing else differs"


def test_the_finding_shows_both_values_and_what_to_do() -> None:
    parallel = schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))
    with pytest.raises(DslparError) as refused:
        check(
            stored_of(job_of(world=2)),
            job_of(world=4, parallel=parallel, optimizer=schema_sections.SGD(lr=0.1)),
            "other",
        )
    (finding,) = refused.value.findings
    assert "out/checkpoints/step_000005 comes from another run:" in finding.message
    for line in ("optimizer.type: saved AdamW, requested SGD", "data.text: saved text, requested other"):
        assert f"    {line}" in finding.lines().splitlines()
    assert "parallel" not in finding.lines(), "a layout is free"


@pytest.mark.parametrize(
    "sections",
    [
        {"train": schema_sections.Train(steps=1000, save_interval=3, log_interval=7, eval_interval=2)},
        {"checkpoint": schema_sections.Checkpoint(keep=1)},
        {"activation_checkpoint": schema_sections.ActivationCheckpoint(interval=1)},
        {"deepspeed": {"wall_clock_breakdown": True}},
        {"optimizer": schema_sections.AdamW(lr=0.5)},
        {"zero": schema_sections.Zero(stage=2)},
        {"precision": schema_sections.Precision(dtype="bf16")},
        {"lr_scheduler": schema_sections.LRScheduler(type="cosine")},
        {"train": schema_sections.Train(clip_grad_norm=1.0)},
    ],
)
def test_what_takes_effect_when_changed_may_be_changed(sections: dict[str, Any]) -> None:
    check(stored_of(job_of()), job_of(**sections), "text")


def test_a_later_format_is_refused_unread() -> None:
    with pytest.raises(DslparError, match=r"CKP204 .*format 3, but this dslpar reads format 2"):
        check(stored_of(job_of(), format=3, fixed=None), job_of(), "text")


def test_the_panels_that_are_kept_are_no_part_of_the_layout() -> None:
    tensor = schema_sections.TensorParallel(size=4, mode="2d")
    kept = dataclasses.replace(tensor, keep="none")
    one, other = (job_of(world=4, parallel=schema_sections.Parallel(tensor=made)) for made in (tensor, kept))
    assert one != other
    assert manifest.fixed_values(one, "") == manifest.fixed_values(other, "")


# ---- on ranks ----


def _save(job: Job, at: list[int]) -> tuple[list[int], int]:
    """Save at these steps. Return the visible steps, and the steps of the newest intact checkpoint."""
    from dslpar import checkpoint
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, 4, dtype=torch.int64)
    while engine.steps_done < max(at):
        engine.train_batch([(ids, ids)])
        if engine.steps_done in at:
            checkpoint.save(engine)
    stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
    return steps(Path(job.output_dir, "checkpoints")), stored.step if stored else 0


def test_the_oldest_go_when_a_new_one_is_there(tmp_path: Path) -> None:
    job = job_of(tmp_path, 2, checkpoint=schema_sections.Checkpoint(keep=2), zero=schema_sections.Zero(stage=1))
    assert on_ranks(2, _save, job, [1, 2, 3], init="deepspeed") == [([2, 3], 3)] * 2
    weights = tmp_path / "checkpoints" / "step_000003" / "tensors" / "00001.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    for message in on_ranks(2, _refused, job):
        assert "CKP215 damaged-checkpoint" in message, "never to an earlier one, without being asked"
        assert "step_000003 is corrupted: tensors/00001.safetensors: altered; step_000002 is intact" in message
        assert "checkpoint.resume_from=step_000002" in message
    for requested in ("step_000002", "newest_whole", str(tmp_path / "checkpoints" / "step_000002")):
        assert on_ranks(2, _newest, _from(job, requested)) == [2, 2], "on every rank"
    next((tmp_path / "checkpoints" / "step_000002" / "ranks").iterdir()).unlink()
    for message in on_ranks(2, _refused, _from(job, "newest_whole")):
        assert "CKP205 no-checkpoint" in message, "never from the beginning, without a word"
        assert "step_000003 is corrupted: tensors/00001.safetensors: altered" in message
        assert re.search(r"step_000002 is corrupted: ranks/0000\d.pt: missing", message)


def test_what_a_run_was_resumed_before_is_set_aside_and_not_resumed_from(tmp_path: Path) -> None:
    """Say steps 1 and 3 diverged, and the run continues from an earlier step: they are no longer the newest."""
    job = job_of(tmp_path)
    on_ranks(1, _save, job, [1, 3], init="deepspeed")
    assert on_ranks(1, _save, job, [1], init="deepspeed") == [([1], 1)]
    names = ["step_000001", "step_000001.aside", "step_000003.aside"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    assert on_ranks(1, _newest, _from(job, "step_000003.aside")) == [3], "by its name"
    put(tmp_path / "checkpoints", 3)
    writer.set_aside(tmp_path / "checkpoints", 2)
    assert (tmp_path / "checkpoints" / "step_000003.1.aside" / "weights").exists(), "nothing is written over"


def test_a_run_s_folder_is_no_checkpoint_and_a_corrupted_one_is_not_to_be_removed(tmp_path: Path) -> None:
    run = tmp_path / "123456"
    for step in (5, 10):
        put(run / "checkpoints", step)
    (run / "checkpoints" / "step_000010" / "weights").write_bytes(b"124")
    (message,) = on_ranks(1, _refused, _from(job_of(tmp_path / "other"), str(run)))
    assert f"CKP209 no-such-checkpoint: there is no checkpoint '{run}'" in message
    assert f"name one that exists: {run}/checkpoints/step_000005, {run}/checkpoints/step_000010" in message
    (message,) = on_ranks(1, _refused, _from(job_of(run), "step_000010"))
    assert "CKP215 damaged-checkpoint: " in message
    assert "step_000010 is corrupted: weights: 3 bytes of 4" in message
    assert "bring the files back; or name one that exists: step_000005, step_000010" in message


def _from(job: Job, requested: str) -> Job:
    section = dataclasses.replace(job.spec.checkpoint, resume_from=requested)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, checkpoint=section))


@pytest.mark.parametrize("requested", ["step_000009", "elsewhere/step_000001"])
def test_a_name_that_is_not_there_is_a_finding(tmp_path: Path, requested: str) -> None:
    put(tmp_path / "checkpoints", 5)
    for message in on_ranks(2, _refused, _from(job_of(tmp_path, 2), requested)):
        assert f"CKP209 no-such-checkpoint: there is no checkpoint '{requested}'" in message
        assert "name one that exists: step_000005" in message


def test_a_manifest_that_is_gone_or_altered_is_corruption(tmp_path: Path) -> None:
    """A crash leaves no folder without a manifest: someone has removed it, and with it the newest steps."""
    for step in (5, 6, 7):
        put(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step_000007" / folder.MANIFEST).unlink()
    path = tmp_path / "checkpoints" / "step_000006" / folder.MANIFEST
    path.write_text(path.read_text().replace('"step": 6', '"step": 8'))
    for message in on_ranks(1, _refused, job_of(tmp_path, 1)):
        assert "step_000007 is corrupted: checkpoint.json: missing" in message
        assert "step_000006 is corrupted: checkpoint.json: altered; step_000005 is intact" in message


def _newest(job: Job) -> int:
    from dslpar import checkpoint

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stored = checkpoint.find_checkpoint(job, Axis(world, rank, tuple(range(world))))
    return stored.step if stored else 0


def _refused(job: Job) -> str:
    with pytest.raises(DslparError) as refused:
        _newest(job)
    return str(refused.value)


def _on_a_host_of_its_own(job: Job) -> str:
    import socket

    socket.gethostname = lambda: f"host{os.environ['RANK']}"
    return _refused(job)


def test_of_several_hosts_the_one_that_sees_the_corruption_is_named(tmp_path: Path) -> None:
    """The cause may be a bad mount or memory there, and no corruption of the file."""
    (put(tmp_path / "checkpoints", 5) / "weights").write_bytes(b"1235")
    for message in on_ranks(2, _on_a_host_of_its_own, job_of(tmp_path, 2)):
        assert "step_000005 is corrupted: weights: altered (as host1 sees it)" in message


def _blind(job: Job) -> str:
    from dslpar import checkpoint

    rank = int(os.environ["RANK"])
    mine = _elsewhere(job) if rank else job
    with pytest.raises(DslparError) as refused:
        checkpoint.find_checkpoint(mine, Axis(2, rank, (0, 1)))
    return str(refused.value)


def _elsewhere(job: Job) -> Job:
    """Return the job as on a host with another folder of that name."""
    return dataclasses.replace(job, output_dir=job.output_dir + "-not-here")


def test_a_host_that_does_not_see_it_is_named_on_all_ranks(tmp_path: Path) -> None:
    put(tmp_path / "checkpoints", 5)
    for message in on_ranks(2, _blind, job_of(tmp_path, 2)):
        assert "CKP203" in message
        assert "put train.output_dir on a file system that all hosts share" in message


def test_hosts_that_share_no_folder_learn_it_before_anything_is_written(tmp_path: Path) -> None:
    for message in on_ranks(2, _no_room, job_of(tmp_path, 2), True, init="deepspeed"):
        assert "CKP203" in message
        assert f"rank 0 has {tmp_path}/checkpoints/step_000001.part, but " in message


def test_a_folder_that_cannot_be_made_is_a_finding_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    for message in on_ranks(2, _no_room, job_of(tmp_path, 2), init="deepspeed"):
        assert "CKP205" in message
        assert "cannot write checkpoints to" in message


def _no_room(job: Job, elsewhere: bool = False) -> str:
    if elsewhere and os.environ["RANK"] == "1":
        job = _elsewhere(job)
    with pytest.raises(DslparError) as refused:
        _save(job, [1])
    return str(refused.value)


def _fails_on_rank_1(job: Job) -> tuple[str, list[int]]:
    """Return the message of a save when one rank's disk is full, and the visible steps."""
    from dslpar import checkpoint
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    checkpoint.save(engine)
    ids = torch.zeros(job.batch.micro_size, 4, dtype=torch.int64)
    engine.train_batch([(ids, ids)])
    if engine.groups.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # beyond this, writes fail
    with pytest.raises(DslparError) as refused:
        checkpoint.save(engine)
    if engine.groups.rank == 0:
        assert not list(Path(job.output_dir, "checkpoints").glob("*.part")), "the disk has its room again"
    return str(refused.value), steps(Path(job.output_dir, "checkpoints"))


@pytest.mark.parametrize("stage", [0, 3])
def test_one_full_disk_is_one_finding_on_all_ranks_and_nothing_new_is_visible(tmp_path: Path, stage: int) -> None:
    for message, visible in on_ranks(
        2, _fails_on_rank_1, job_of(tmp_path, 2, zero=schema_sections.Zero(stage=stage)), init="deepspeed"
    ):
        assert "CKP205 no-checkpoint: cannot write checkpoints to" in message
        assert re.search(r"rank 1 of 2 on \S+, stage 0 \(.*\), step \d+: \[Errno 27\] File too large", message)
        assert visible == [0], "what was there before, and nothing else"


def _holds_less(job: Job) -> str:
    from dslpar import checkpoint
    from dslpar.checkpoint import shards
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    shards._replica_range = lambda p, number, index, size: range(p.numel() - 1)
    with pytest.raises(AssertionError) as failed:
        checkpoint.save(engine)
    return str(failed.value)


def test_a_checkpoint_that_lacks_an_element_is_never_visible(tmp_path: Path) -> None:
    """DeepSpeed may hold its weights differently some day: better no checkpoint than one that loads zeros."""
    (message,) = on_ranks(1, _holds_less, job_of(tmp_path), init="deepspeed")
    assert "not held once by the ranks, so nobody could load it: ['embedding.tokens.weight'" in message
    assert steps(tmp_path / "checkpoints") == []


def test_random_states_of_a_run_on_cpus_are_set_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were saved without an accelerator, and the run resumes with one."""
    from dslpar.checkpoint import rank_state

    states = rank_state._random_states(torch.device("cpu"))
    drawn = torch.rand(3)
    rank_state._set_random_states(states, torch.device("cuda", 0))
    assert torch.equal(torch.rand(3), drawn)


def _loses_a_file(job: Job) -> str:
    """Return the message of a load on a rank where a file has just disappeared."""
    from dslpar import checkpoint
    from dslpar.distributed import collectives
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    at, world = checkpoint.save(engine), engine.groups.axis("pipe", "data", "tensor")
    stored = checkpoint.find_checkpoint(job, world)
    assert stored is not None
    if engine.groups.rank == 0:
        (at / "tensors" / "00001.safetensors").unlink()
    collectives.barrier(world)
    with pytest.raises(DslparError) as refused:
        checkpoint.load(engine, stored)
    return str(refused.value)


def test_a_file_that_goes_while_it_is_loaded_is_one_finding_on_all_ranks(tmp_path: Path) -> None:
    """In ZeRO 3 each rank reads its own shard: a rank that finds its own file must not continue alone."""
    for message in on_ranks(
        2, _loses_a_file, job_of(tmp_path, 2, zero=schema_sections.Zero(stage=3)), init="deepspeed"
    ):
        assert "CKP208 checkpoint-does-not-fit" in message
        assert "00001.safetensors is not a checkpoint file, or is corrupted: FileNotFoundError" in message


# ---- its contents ----

PIPE = schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))
TENSOR = schema_sections.Parallel(tensor=schema_sections.TensorParallel(size=2, mode="1d", sequence=True))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 0, data 2": (2, {}),
    "ZeRO 1, data 3": (3, {"zero": schema_sections.Zero(stage=1)}),
    "ZeRO 2, tensor 2": (4, {"zero": schema_sections.Zero(stage=2), "parallel": TENSOR}),
    "ZeRO 3, data 3": (3, {"zero": schema_sections.Zero(stage=3)}),
    "pipe 2, data 2, ZeRO 0": (4, {"parallel": PIPE}),
    "pipe 2, data 2, bf16": (4, {"parallel": PIPE, "precision": schema_sections.Precision(dtype="bf16")}),
}


NEED_2_5 = {"pipe 2, data 2, bf16": [needs_torch(5, "its gloo refuses DeepSpeed's all-gather of bf16 weights")]}


EACH_TIME = ("ZeRO 2, tensor 2", "ZeRO 3, data 3", "pipe 2, data 2, bf16")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [*NEED_2_5.get(name, ()), *([] if name in EACH_TIME else [pytest.mark.prove])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in LAYOUTS])
def test_every_element_is_stored_once(tmp_path: Path, name: str) -> None:
    world, sections = LAYOUTS[name]
    job = job_of(tmp_path, world, **sections)
    counted = on_ranks(world, _save_and_show, job, init="deepspeed")
    at = tmp_path / "checkpoints" / "step_000001"
    index = load_index(at)
    assert index.incomplete() == [], "each element of each tensor, and none twice"
    assert {"blocks.0.attention.qkv.weight", "embedding.tokens.weight"} <= index.parameters.keys()
    assert {tuple(entry.states) for entry in index.parameters.values()} == {("exp_avg", "exp_avg_sq")}
    assert (set(index.copies) == {"embedding.tokens.weight@1"}) == (job.mesh.pipe > 1)
    num_bytes = sum(path.stat().st_size for path in (at / "tensors").iterdir())
    copied = 16 * 8 if index.copies else 0
    headers = 8192 * world
    assert num_bytes < 12 * (sum(counted[0].values()) + copied) + headers, "a weight and two moments, in fp32"


def _save_and_show(job: Job) -> dict[str, int]:
    """Return elements by name, after checking that two replicas hold bitwise equal values."""
    from dslpar.checkpoint import save, shards
    from dslpar.distributed import collectives
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.arange(job.batch.micro_size * 4).view(-1, 4).remainder(16) * (engine.groups.coord["data"] + 1) % 16
    engine.train_batch([(ids, ids)] * job.batch.accumulation)
    for one in shards.parameter_shards(engine):
        if job.spec.zero.stage == 0 and not hasattr(one.parameter, "_hp_mapping"):
            mine = torch.cat([one.weight.reshape(-1), *(state.reshape(-1) for state in one.states.values())]).double()
            data = engine.groups.axis("data")
            assert torch.equal(collectives.all_reduce(mine, data, "max"), collectives.all_reduce(mine, data, "min")), (
                one.name
            )
    save(engine)
    counted = {one.name: int(torch.Size(one.shape).numel()) for one in shards.parameter_shards(engine)}
    return {
        name: size
        for stage in collectives.gather_objects(counted, engine.groups.axis("pipe"))
        for name, size in stage.items()
    }
