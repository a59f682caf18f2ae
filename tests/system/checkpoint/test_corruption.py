"""A real checkpoint, corrupted in 250 ways: each is found and its file named before anything is built on it.

200 of them change a byte or truncate a file. The others lose, swap or add files, or write blocks of zeros.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dslpar.checkpoint import folder
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support import runs
from tests.support.ranks import on_ranks

WORLD = 4
KINDS = ("checkpoint.json", "index.json", "state.pt", "tensors", "ranks")
"""Kinds of files; the last two are folders with one file per rank."""


class Corrupted(NamedTuple):
    """A corruption, and its undo."""

    description: str
    paths: tuple[str, ...]
    """The corrupted files, in the checkpoint's folder."""
    before: dict[str, bytes | None]
    """Original bytes of the touched files; None: the file did not exist."""


# ---- a real checkpoint ----


def job_of(output_dir: Path) -> Job:
    gpt = section.GPT(num_layers=2, hidden_size=8, num_heads=2, vocab_size=17, max_seq_len=4)
    parallel = sections.Parallel(
        pipeline=sections.PipelineParallel(size=2), tensor=sections.TensorParallel(size=2, mode="1d")
    )
    train = sections.Train(output_dir=str(output_dir))
    return resolve(
        sections.Spec(model=gpt, parallel=parallel, train=train, zero=sections.Zero(stage=1)), WORLD, "cfg.py"
    )


def save_two(job: Job) -> None:
    """Save steps 1 and 2 of a training run."""
    from dslpar import checkpoint
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    ids = torch.zeros(job.batch.micro_size, 4, dtype=torch.int64)
    for _ in range(2):
        engine.train_batch([(ids, ids)])
        checkpoint.save(engine)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = job_of(tmp_path_factory.mktemp("run"))
    on_ranks(WORLD, save_two, made, init="deepspeed")
    return made


@pytest.fixture
def root(job: Job) -> Path:
    return Path(job.output_dir, "checkpoints")


def newest_of(root: Path) -> Path:
    return root / "step_000002"


# ---- corruptions ----


def files_of(at: Path, kind: str) -> list[str]:
    found = (path.relative_to(at).as_posix() for path in folder.list_files(at))
    return [name for name in found if name.split("/")[0] == kind]


def flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def zero(rng: random.Random, data: bytes) -> bytes:
    """Zero a block, as after a lost write, with at least one byte that was not zero."""
    at = rng.choice([at for at, byte in enumerate(data) if byte])
    length = min(rng.randrange(1, 600), len(data) - at)
    return data[:at] + bytes(length) + data[at + length :]


def grow(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 9))


BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "a byte changed": flip,
    "cut short": cut,
    "a block of zeros": zero,
    "bytes added": grow,
}
OTHERS = ("a block of zeros", "bytes added", "deleted", "swapped", "one too many")
PLAN = [(way, kind) for _ in range(20) for way in ("a byte changed", "cut short") for kind in KINDS]
PLAN += [(way, kind) for _ in range(2) for way in OTHERS for kind in KINDS]
"""Every corruption is applied to every kind of file."""


def corrupt(at: Path, rng: random.Random, way: str, kind: str) -> Corrupted:
    name = rng.choice(files_of(at, kind))
    data = (at / name).read_bytes()
    if way in BYTES:
        return put(at, way, {name: BYTES[way](rng, data)})
    if way == "deleted":
        return put(at, way, {name: None})
    if way == "one too many":
        return put(at, way, {f"{Path(name).parent.as_posix()}/{rng.randrange(99)}.tmp".removeprefix("./"): data})
    other = rng.choice([other for one in KINDS for other in files_of(at, one) if (at / other).read_bytes() != data])
    return put(at, way, {name: (at / other).read_bytes(), other: data})


def put(at: Path, way: str, files: dict[str, bytes | None]) -> Corrupted:
    before = {name: (at / name).read_bytes() if (at / name).exists() else None for name in files}
    assert before != files
    _write(at, files)
    return Corrupted(f"{way}: {' and '.join(files)}", tuple(files), before)


def _write(at: Path, files: dict[str, bytes | None]) -> None:
    for name, data in files.items():
        if data is None:
            (at / name).unlink()
        else:
            (at / name).write_bytes(data)


def corruptions(at: Path) -> Iterator[Corrupted]:
    """Yield corruptions one by one; each is undone when the next is requested."""
    rng = random.Random(6)
    for way, kind in PLAN:
        corrupted = corrupt(at, rng, way, kind)
        yield corrupted
        _write(at, corrupted.before)


# ---- detection ----


def found(root: Path) -> list[str]:
    """Return what each rank finds in the newest checkpoint: errors in its manifest, or in its files."""
    at = newest_of(root)
    if at in folder.scan(root).unreadable:
        return [folder.scan(root).unreadable[at]]
    stored = folder.scan(root).checkpoints[-1]
    assert stored.path == str(at)
    return [str(damage) for part in range(WORLD) for damage in folder.verify(stored, part, WORLD)]


def test_a_real_checkpoint_has_files_of_every_kind_and_nothing_is_found_in_it(root: Path) -> None:
    assert all(files_of(newest_of(root), kind) for kind in KINDS)
    assert {name.split("/")[0] for name in folder.file_sizes(newest_of(root))} == set(KINDS) - {folder.MANIFEST}
    assert found(root) == []


def test_each_corruption_is_found_and_its_file_named(root: Path) -> None:
    at = newest_of(root)
    for number, corrupted in enumerate(corruptions(at)):
        messages = found(root)
        named = sorted(path for path in corrupted.paths if any(one.startswith(f"{path}: ") for one in messages))
        # a damaged manifest is not trusted at all, so it alone is named
        expected = [folder.MANIFEST] if folder.MANIFEST in corrupted.paths else sorted(corrupted.paths)
        assert named == expected, f"{number}: {corrupted.description}; found: {messages}"
        assert len(messages) == len(expected), f"nothing else is: {messages}"
    assert found(root) == [], "all is as it was"


def refusals(job: Job) -> list[tuple[str, tuple[str, ...], str]]:
    """Return for each corruption: its name, its files, and the message of a resume on this rank."""
    from dslpar import checkpoint
    from dslpar.core.errors import DslparError
    from dslpar.distributed import collectives
    from dslpar.distributed.groups import Groups

    world = Groups(job.mesh).axis("pipe", "data", "tensor")
    at, messages = newest_of(Path(job.output_dir, "checkpoints")), []
    todo = corruptions(at) if world.index == 0 else iter([None] * (len(PLAN) + 1))
    for corrupted in todo:
        done = collectives.broadcast_object(corrupted and (corrupted.description, corrupted.paths), world)
        if done is None:
            break
        try:
            messages.append((*done, str(checkpoint.find_checkpoint(job, world))))
        except DslparError as error:
            messages.append((*done, str(error)))
        collectives.barrier(world)
    else:
        collectives.broadcast_object(None, world)
    return messages


@pytest.mark.prove
def test_resuming_refuses_each_of_them_on_every_rank_and_offers_the_one_before(job: Job, root: Path) -> None:
    ranks: list[list[Any]] = on_ranks(WORLD, refusals, job)
    assert all(rank == ranks[0] for rank in ranks)
    assert len(ranks[0]) == len(PLAN) == 250
    for done, paths, messages in ranks[0]:
        assert "CKP215" in messages, f"{done}: {messages}"
        assert any(path in messages for path in paths), f"{done}: {messages}"
        assert "checkpoint.resume_from=step_000001" in messages
    assert found(root) == [], "all is as it was"


# ---- through train.py ----


def train(at: Path, *words: str) -> runs.Finished:
    config = ("--config", str(at / "cfg.py"), f"train.output_dir={at / 'out'}")
    return runs.start([sys.executable, "train.py", *config, *words])


@pytest.mark.prove
def test_train_py_takes_no_step_from_a_corrupted_one_and_resumes_from_the_one_that_it_offers(tmp_path: Path) -> None:
    runs.write_config(tmp_path)
    first = train(tmp_path, "train.steps=2", "train.save_interval=1")
    assert first.status == 0, first.output
    at, rng = newest_of(tmp_path / "out" / "checkpoints"), random.Random(7)
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    for way, kind in (("a byte changed", "checkpoint.json"), ("cut short", "tensors"), ("deleted", "state.pt")):
        corrupted = corrupt(at, rng, way, kind)
        refused = train(tmp_path, "--resume")
        assert refused.status == 1, corrupted.description
        assert "CKP215" in refused.output, corrupted.description
        assert any(path in refused.output for path in corrupted.paths), f"{corrupted.description}: {refused.output}"
        assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before, "no step was taken"
        _write(at, corrupted.before)
    _write(at, {"index.json": b"{}"})
    offered = train(tmp_path, "--resume", "checkpoint.resume_from=step_000001")
    assert offered.status == 0, offered.output
    assert [line["step"] for line in runs.metrics(tmp_path / "out")] == [1, 2, 3]


# ---- folders ----


def test_folders_that_were_swapped_are_found(root: Path, tmp_path: Path) -> None:
    """Each folder is intact, under the other's name."""
    copy = tmp_path / "checkpoints"
    shutil.copytree(root, copy)
    (copy / "step_000001").rename(copy / "kept")
    (copy / "step_000002").rename(copy / "step_000001")
    (copy / "kept").rename(copy / "step_000002")
    assert [path.name for path in folder.scan(copy).unreadable] == ["step_000001", "step_000002"]
    assert folder.scan(copy).unreadable[copy / "step_000002"] == "checkpoint.json: of step 1, in step_000002"


def test_files_of_another_checkpoint_of_the_same_run_are_found(root: Path, tmp_path: Path) -> None:
    """The files have the same name and length, and are a step older."""
    copy = tmp_path / "checkpoints"
    shutil.copytree(root, copy)
    older, newer = (copy / name / "tensors" / "00003.safetensors" for name in ("step_000001", "step_000002"))
    assert older.stat().st_size == newer.stat().st_size
    shutil.copy(older, newer)
    assert found(copy) == ["tensors/00003.safetensors: altered"]
