"""Peak memory of `dslpar checkpoint reshard` and `export --format hf`: of a model, and of one four times as deep.

python -m benchmarks reshard_memory

Both have the same largest tensor, the token table. They are resharded from one rank to 2d over four ranks and back, or
exported from 2d as a transformers folder.

The measure is anonymous memory (RssAnon of /proc/PID/status), which the process itself has allocated. Pages of the
mapped input files and of the written files belong to the system's cache and are freed when other memory is needed. The
parent reads the value about every millisecond, from the end of the child's imports to its exit. The child's allocator
returns large blocks at once (MALLOC_MMAP_THRESHOLD_), so the value is the memory in use.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measure import Ratio

if TYPE_CHECKING:
    from dslpar.checkpoint.folder import FileDigest
    from dslpar.checkpoint.index import Index
    from dslpar.layout.resolve import Job

COMMANDS = ("reshard", "export --format hf")
LAYERS = (4, 16)
VOCAB_SIZE = 16384
MOST_GROWTH = 0.05
"""Of the peak, for each byte that the model is larger: the index knows more names."""
MOST_TENSORS = 1.5
"""The peak, in largest tensors."""


class Peak(NamedTuple):
    """Memory of one reshard."""

    anonymous_bytes: int
    """The most that it had allocated, over what it had when all was imported."""
    largest_bytes: int
    """Of one tensor."""
    stored_bytes: int
    """Of all tensors."""


def ratios() -> Iterator[Ratio]:
    """Yield the growth of the peak with the model, and the peak as a multiple of its largest tensor."""
    for command in COMMANDS if find_spec("transformers") else COMMANDS[:1]:
        peaks = [peak(layers, command=command) for layers in LAYERS]
        for layers, one in zip(LAYERS, peaks, strict=True):
            sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in zip(_WORDS, one, strict=True))
            print(f"  {command}, {layers} layers: {sizes}")
        small, large = peaks
        growth = (large.anonymous_bytes - small.anonymous_bytes) / (large.stored_bytes - small.stored_bytes)
        yield Ratio(f"{command}, bytes of peak for each byte of further layers", growth, growth, growth, MOST_GROWTH)
        tensors = large.anonymous_bytes / large.largest_bytes
        yield Ratio(f"{command}, peak over the largest tensor", tensors, tensors, tensors, MOST_TENSORS)


_WORDS = ("peak", "largest tensor", "all tensors")


def peak(num_layers: int, vocab_size: int = VOCAB_SIZE, command: str = COMMANDS[0]) -> Peak:
    """Of a command in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="dslpar_reshard_") as folder:
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
        words = ["-m", "benchmarks.reshard_memory", folder, str(num_layers), str(vocab_size), command]
        with subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            largest, stored = map(int, _line(child.stdout).split())
            before = anonymous_bytes(child.pid)
            child.stdin.write("go\n")
            child.stdin.close()
            most = _most(child)
            assert child.returncode == 0, f"the child ended with {child.returncode}"
    return Peak(most - before, largest, stored)


def anonymous_bytes(process: int) -> int:
    """Return the bytes that a process has allocated; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _most(child: subprocess.Popen[str]) -> int:
    most = 0
    while child.poll() is None:
        most = max(most, anonymous_bytes(child.pid))
        time.sleep(0.001)
    return most


def _line(output: Iterable[str]) -> str:
    """The child's own: libraries may print others before it."""
    return next(line.removeprefix("ready ") for line in output if line.startswith("ready "))


# ---- the child ----


def main(folder: Path, num_layers: int, vocab_size: int, command: str) -> None:
    """Makes a checkpoint, tells its sizes, waits for a line, and reshards it, there and back, or exports it."""
    from dslpar.checkpoint import folder as files
    from dslpar.checkpoint.reshard import reshard
    from dslpar.schema import sections as schema_sections

    cut = job_of(
        num_layers,
        vocab_size,
        4,
        parallel=schema_sections.Parallel(tensor=schema_sections.TensorParallel(size=4, mode="2d")),
    )
    whole = job_of(num_layers, vocab_size, 1)
    largest, stored = write_checkpoint(folder / "from", cut, whole)
    found = files.open_checkpoint(folder / "from" / "step_000001")
    if command == COMMANDS[1]:
        from dslpar.checkpoint.export_transformers import export_transformers

        found = files.open_checkpoint(reshard(found, cut, folder / "cut"))
        export_transformers(found, folder / "first")  # what is imported, and stays, is no part of it
    print("ready", largest, stored, flush=True)
    sys.stdin.readline()
    if command == COMMANDS[1]:
        export_transformers(found, folder / "hf")
        return
    there = reshard(found, cut, folder / "cut")
    reshard(files.open_checkpoint(there), whole, folder / "whole")


def job_of(num_layers: int, vocab_size: int, world: int, **sections: Any) -> Job:
    """A GPT whose token table is larger than any other of its weights."""
    from dslpar.layout import resolve as layout_resolve
    from dslpar.models.gpt.section import GPT
    from dslpar.schema import sections as schema_sections

    gpt = GPT(num_layers=num_layers, hidden_size=256, num_heads=4, vocab_size=vocab_size, max_seq_len=64)
    return layout_resolve.resolve(
        schema_sections.Spec(model=gpt, batch=schema_sections.Batch(global_size=4), **sections), world, "cfg.py"
    )


def write_checkpoint(root: Path, cut: Job, whole: Job) -> tuple[int, int]:
    """As the one rank of `whole` would have saved it; bytes of the largest tensor, and of all.

    `cut` is the same model on ranks that share its tensors, which says what it is made of.
    """
    from dslpar.checkpoint import folder, index, manifest, reshard, writer

    _, (stage,) = reshard.shares_of(cut, index.Index())
    shapes = {name: whole.shape for name, whole in stage.items()}
    part = writer.begin_save(root, 1)
    written = {
        "tensors/00000.safetensors": _tensors(index.tensor_path(part, 0), shapes),
        index.INDEX: writer.write_file(part / index.INDEX, [json.dumps(_index(shapes).to_json()).encode()]),
        folder.STATE: writer.write_file(part / folder.STATE, [b"counts and schedule"]),
    }
    writer.publish(root, manifest.manifest_of(whole, "text", 1), written)
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    return max(sizes), len(_KEYS) * sum(sizes)


_KEYS = ("", "exp_avg", "exp_avg_sq")


def _tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> FileDigest:
    """Random weights and states, one at a time."""
    import torch

    from dslpar.checkpoint.index import file_key
    from dslpar.checkpoint.tensor_file import LazyTensor, write_lazy_tensors

    counts = {file_key(name, key): math.prod(shape) for name, shape in shapes.items() for key in _KEYS}
    tensors = [LazyTensor(name, torch.float32, (count,), partial(torch.rand, count)) for name, count in counts.items()]
    return write_lazy_tensors(path, tensors)


def _index(shapes: Mapping[str, tuple[int, ...]]) -> Index:
    from dslpar.checkpoint.index import Entry, Index
    from dslpar.checkpoint.slices import Piece, full_box

    states = dict.fromkeys(_KEYS[1:], "F32")
    pieces = {name: [Piece(0, full_box(shape), 0, math.prod(shape))] for name, shape in shapes.items()}
    entries = {
        name: Entry(shape=shape, dtype="F32", states=states, group=0, pieces=pieces[name])
        for name, shape in shapes.items()
    }
    return Index(entries, {}, [{}])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
