"""Checkpoints with valid digests and wrong contents: `verify` and `--resume` agree, without a traceback.

A real checkpoint is changed as by a program, not as by a disk: a value of its manifest, its index, a header or a state
is replaced, and all digests are recomputed. Each is verified, listed, shown, and loaded into a real engine. Intact ones
load, or are refused as another run's. Others are findings on both sides.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dslpar import checkpoint
from dslpar.checkpoint import folder, writer
from dslpar.cli.main import main
from dslpar.core.errors import DslparError
from dslpar.layout.resolve import Job
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import job_of, run

STEP = 2
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 10**24, 10**30, 2**63, -(2**70), 0.5, -1e300, float("nan"), float("inf")),
    *("", "2", "F32", "I64", "x\ny", "../../x", "/dev/zero", "\x1b[2J", "\ud800", "constant", "GPT"),
    *([], {}, [[]], [0], [1, 2], [[[0, 3]]], {"a": 1}, {"type": "GPT"}, {"bytes": 1}, [None], ["I8", 10**30]),
)
Change = Callable[[random.Random, Any], Any]


def mutated(rng: random.Random, tree: Any, times: int = 1) -> Any:
    """Return the tree with some of its values changed, lost, doubled or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(times):
        parents = [node for node in nodes(tree) if isinstance(node, dict | list) and node]
        parent = rng.choice(parents)
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        match rng.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[f"{key}x"] = copy.deepcopy(parent[key])
            case 1:
                parent.append(copy.deepcopy(parent[key]))
            case 2 if isinstance(parent[key], int) and not isinstance(parent[key], bool):
                parent[key] += rng.choice([-1, 1, 10, 2**31])
            case 3:
                parent[key] = copy.deepcopy(rng.choice(list(nodes(tree))))
            case _:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
    return tree


def nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from nodes(child)


# ---- files ----


def change_manifest(rng: random.Random, at: Path) -> None:
    sign(at, mutated(rng, manifest_of(at), rng.randint(1, 3)))


def change_index(rng: random.Random, at: Path) -> None:
    index = json.loads((at / "index.json").read_bytes())
    part = rng.choice([index, index["parameters"], rng.choice(list(index["parameters"].values()))])
    changed = mutated(rng, part, rng.randint(1, 2))
    part.clear()
    part.update(changed)
    write(at, "index.json", json.dumps(index).encode("utf-8", "surrogatepass"))


def change_header(rng: random.Random, at: Path) -> None:
    data = (at / "tensors/00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(rng, json.loads(data[8 : 8 + length]))).encode()
    write(at, "tensors/00000.safetensors", len(header).to_bytes(8, "little") + header + data[8 + length :])


def change_states(rng: random.Random, at: Path) -> None:
    name = rng.choice(["state.pt", "ranks/00000.pt"])
    values = torch.load(at / name, weights_only=True)
    buffer = io.BytesIO()
    torch.save(rng.choice([mutated(rng, values), mutated(rng, values), rng.choice(VALUES)]), buffer)
    write(at, name, buffer.getvalue())


def change_files(rng: random.Random, at: Path) -> None:
    """Replace whole files: by another's bytes, by nothing, or by garbage, with valid digests."""
    name = rng.choice(sorted(manifest_of(at)["files"]))
    other = rng.choice(["index.json", "state.pt", "ranks/00000.pt"])
    write(at, name, rng.choice([b"", b"[" * 100_000, b"{}", b"PK\3\4", (at / other).read_bytes()]))


CHANGES: dict[str, Callable[[random.Random, Path], None]] = {
    "manifest": change_manifest,
    "index": change_index,
    "header": change_header,
    "states": change_states,
    "files": change_files,
}


def manifest_of(at: Path) -> Any:
    return {key: value for key, value in json.loads((at / folder.MANIFEST).read_bytes()).items() if key != "digest"}


def sign(at: Path, manifest: Any) -> None:
    """Write a manifest with a digest that matches it."""
    whole = manifest if isinstance(manifest, dict) else {"files": manifest}
    (at / folder.MANIFEST).write_bytes(folder.serialize({key: whole[key] for key in whole if key != "digest"}))


def write(at: Path, name: str, data: bytes) -> None:
    digest = writer.write_file(at / name, [data])
    manifest = manifest_of(at)
    manifest["files"][name] = digest._asdict()
    sign(at, manifest)


# ---- results ----


class Said(NamedTuple):
    """The results of one checkpoint."""

    name: str
    codes: tuple[str, ...]
    """Codes of a resume's findings; () if it loaded."""
    seconds: float


def resume_all(job: Job, places: list[Path]) -> list[Said]:
    """Load each of them into one engine."""
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    world = engine.groups.axis("pipe", "data", "tensor")
    said = []
    for place in places:
        section = dataclasses.replace(job.spec.checkpoint, resume_from=str(place))
        asks = dataclasses.replace(job, spec=dataclasses.replace(job.spec, checkpoint=section))
        start, codes = time.process_time(), ()
        try:
            stored = checkpoint.find_checkpoint(asks, world)
            assert stored is not None
            checkpoint.check(stored, asks, "text")
            checkpoint.load(engine, stored)
            checkpoint.changes(stored, asks)
        except DslparError as error:
            codes = tuple(finding.code for finding in error.findings if finding.help)
        except Exception as error:
            codes = (f"{type(error).__name__}: {error}, {traceback.format_tb(error.__traceback__)[-1]}",)
        said.append(Said(place.name, codes, time.process_time() - start))
    return said


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "run"
    on_ranks(1, run, job_of(root, 1), STEP, init="deepspeed")
    return root / "checkpoints" / f"step_{STEP:06d}"


def copies(source: Path, root: Path, count: int) -> dict[Path, str]:
    """Return changed copies, each with a description of the change."""
    places = {}
    for number in range(count):
        what = list(CHANGES)[number % len(CHANGES)]
        place = root / f"{what}_{number}"
        shutil.copytree(source, place)
        CHANGES[what](random.Random(number), place)
        places[place] = what
    return places


MISMATCH = {"CKP202", "CKP208"}
"""Codes of an intact checkpoint of another run or another model."""


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.prove)])
def test_verify_and_resume_agree_and_neither_raises(
    source: Path, tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    places = copies(source, tmp_path, count)
    (resumed,) = on_ranks(1, resume_all, job_of(tmp_path / "out", 1), list(places), init="deepspeed")
    corrupted = Counter()
    for (place, what), said in zip(places.items(), resumed, strict=True):
        assert all(code.startswith("CKP") for code in said.codes), f"{place}: {said.codes}"
        start = time.process_time()
        status = main(["checkpoint", "verify", str(place)])
        out = capsys.readouterr().out
        if status == 0:
            assert set(said.codes) <= MISMATCH, f"{place} is intact, and a resume says {said.codes}"
        else:
            assert said.codes, f"{place} loads, and verify says {out}"
            assert set(said.codes).isdisjoint(MISMATCH), f"{said.codes}, and verify says {out}"
        for words in (["list"], ["show"], ["export", "--output", f"{place}_exported"])[
            : 3 if what == "manifest" else 2
        ]:
            assert main(["checkpoint", *words, str(place)]) in (0, 1)
        assert max(said.seconds, time.process_time() - start) < 20, place
        corrupted[what] += status
    assert all(corrupted[what] for what in CHANGES), "some are found in each"


GONE = object()
MANIFESTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "files is [], not a mapping": (("files",), []),
    "the manifest has no 'layout'": (("layout",), GONE),
    "format is '2', not a whole number from 1 to 9223372036854775807": (("format",), "2"),
    "layout.world_size is 1000000000000000000000000000000, not a whole number from 1 to 1048576": (
        *(("layout", "world_size"), 10**30),
    ),
    "layout.pipe is 1000000000000000000000000000000, not a whole number from 1 to 1048576": (
        ("layout", "pipe"),
        10**30,
    ),
    "layout.world_size is 1, but its axes have 2 ranks": (("layout", "data"), 2),
    "layout.order is ['x', 'y', 'z']": (("layout", "order"), ["x", "y", "z"]),
    "files has '../x', which is not a path within the folder": (("files", "../x"), {}),
    "config.lr_scheduler has no 'type'": (("config", "lr_scheduler"), {}),
    "fixed has no 'data.text'": (("fixed", "data.text"), GONE),
    "versions.torch is 2, not a string": (("versions", "torch"), 2),
    "step is True, not a whole number from 0 to 9223372036854775807": (("step",), True),
}


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    if value is GONE:
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


@pytest.mark.parametrize("expected", MANIFESTS)
def test_what_is_said_of_a_manifest(
    source: Path, tmp_path: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(source, tmp_path / source.name))
    manifest = manifest_of(place)
    put(manifest, *MANIFESTS[expected])
    sign(place, manifest)
    assert main(["checkpoint", "verify", str(place)]) == 1
    out = capsys.readouterr().out
    assert f"CKP215 damaged-checkpoint: {place.name} is corrupted:\n    checkpoint.json: {expected}\nhelp: " in out
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert f"corrupted: checkpoint.json: {expected}" in capsys.readouterr().out


INDICES: dict[str, tuple[tuple[str, ...], Any]] = {
    "has shape [1000000000000000000, 1000000] of F32, but all tensor files together have": (
        ("shape",),
        [10**18, 10**6],
    ),
    "dtype is 'F128', not one of 'F64', 'F32', ": (("dtype",), "F128"),
    "group is 7, not a whole number from 0 to ": (("group",), 7),
    "pieces[0] is [0, 0, 0], not a list of 4": (("pieces",), [[0, 0, 0]]),
    "pieces[0]: the box is -1, not a whole number from 0 to 0": (("pieces",), [[0, -1, 0, 1]]),
    "pieces[0]: the end is 9223372036854775807, not a whole number": (("pieces",), [[0, 0, 0, 2**63 - 1]]),
    "has two shards in one file, which can hold only one tensor per name": (("pieces",), [[0, 0, 0, 1], [0, 0, 1, 2]]),
    "boxes[0] has too many segments or elements": (("boxes",), [[[[0, 1]] * 70, [[0, 1]] * 70]]),
    "numbers.step is 'x', not a number": (("numbers", "step"), "x"),
    "is not there exactly once": (("pieces",), []),
}


@pytest.mark.parametrize("expected", INDICES)
def test_what_is_said_of_an_index(
    source: Path, tmp_path: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(source, tmp_path / source.name))
    index = json.loads((place / "index.json").read_bytes())
    name = next(name for name, entry in index["parameters"].items() if len(entry["shape"]) == 2)
    put(index["parameters"][name], *INDICES[expected])
    write(place, "index.json", json.dumps(index).encode())
    assert main(["checkpoint", "verify", str(place)]) == 1
    out = capsys.readouterr().out
    assert "\n    index.json: " in out
    assert name in out
    assert expected in out


def test_what_verify_called_intact_and_a_resume_could_not_read(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases: an optimizer's tensor that no file holds, a state of another step, a rank without its random states."""
    place = Path(shutil.copytree(source, tmp_path / source.name))
    index = json.loads((place / "index.json").read_bytes())
    next(iter(index["parameters"].values()))["states"]["missing"] = "F32"
    write(place, "index.json", json.dumps(index).encode())
    for name, change in (("state.pt", {"counts": {"global_steps": 9}}), ("ranks/00000.pt", {"random": {}})):
        values = torch.load(place / name, weights_only=True)
        for key, value in change.items():
            values[key] = {**values[key], **value} if value else {}
        buffer = io.BytesIO()
        torch.save(values, buffer)
        write(place, name, buffer.getvalue())
    assert main(["checkpoint", "verify", str(place)]) == 1
    out = capsys.readouterr().out
    assert "    state.pt: it is of step 9, but the manifest is of step 2\n" in out
    assert "::missing'" in out
    assert "    ranks/00000.pt: random has no 'python'\n" in out


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "step_000001"
    place.mkdir()
    os.mkfifo(place / folder.MANIFEST)
    assert main(["checkpoint", "verify", str(place)]) == 1
    assert "    checkpoint.json: no file\n" in capsys.readouterr().out
