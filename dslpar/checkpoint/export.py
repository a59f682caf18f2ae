"""Export a checkpoint's full, unsharded weights to safetensors files, for programs other than dslpar.

    export(checkpoint, Path("weights"), dtype="BF16")     # model-00001-of-00002.safetensors, ..., and the config

Only one tensor at a time is in memory, as in `reshard`. Files and their index are named as by transformers; tensors
have dslpar's own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dslpar.checkpoint import folder, resume_changes, writer
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.index import load_index
from dslpar.checkpoint.tensor_file import DTYPES, LazyTensor, write_lazy_tensors
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import raise_finding
from dslpar.language import yaml_io
from dslpar.reporting import run_dir

MAX_SHARD_BYTES = 5 * 10**9


def export(
    checkpoint: Checkpoint, output: Path, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Write full, unpadded weights under their names in dslpar, and return the files' paths.

    The files are `model-00001-of-00002.safetensors`, ..., the index from weight names to files, and `config.yaml`.
    `dtype` ("F32", "BF16", "F16") applies to floating-point weights; None: as stored. A tensor larger than
    `max_shard_bytes` gets its own file.

    Raises:
        DslparError: `output` is not empty, a file cannot be read or written, or a weight is out of the range of
            `dtype`.
    """
    index = load_index(Path(checkpoint.path))
    reader = TensorReader(Path(checkpoint.path), index)

    def load_as(name: str, dtype: torch.dtype) -> Tensor:
        return convert(name, reader.full(name), dtype)

    tensors = []
    for name, entry in index.parameters.items():
        target = target_dtype(DTYPES[entry.dtype], dtype)
        tensors.append(LazyTensor(name, target, entry.shape, partial(load_as, name, target)))
    shards = list(_shards(tensors, max_shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {lazy.key: name for name, shard in zip(names, shards, strict=True) for lazy in shard}
    metadata = {"total_size": sum(lazy.num_bytes for lazy in tensors)}
    config = resume_changes.without_defaults(checkpoint.manifest["config"])
    with writer.new_folder(output) as unfinished:
        for name, shard in zip(names, shards, strict=True):
            write_lazy_tensors(unfinished / name, shard, {"format": "pt"})
        weights_index = writer.json_bytes({"metadata": metadata, "weight_map": weight_map})
        writer.write_file(unfinished / "model.safetensors.index.json", [weights_index])
        writer.write_file(unfinished / run_dir.CONFIG, [yaml_io.dump_plain(config).encode()])
    return folder.list_files(output)


def target_dtype(stored: torch.dtype, requested: str | None) -> torch.dtype:
    """Return the dtype of an exported tensor: the requested one for floating-point tensors, else the stored one."""
    return DTYPES[requested] if requested and stored.is_floating_point else stored


def convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor. Raises: DslparError: a finite number would become infinite."""
    converted = tensor.to(dtype)
    lost = int((converted.isinf() & tensor.isfinite()).sum()) if dtype != tensor.dtype else 0
    if lost:
        message = f"{lost} of the weights in {name} exceed {torch.finfo(dtype).max:g}, the largest number of {dtype}"
        raise_finding("CKP217", message, "--dtype bf16 or fp32, which have a larger range", name)
    return converted


def _shards(tensors: Sequence[LazyTensor], max_bytes: int) -> Iterator[list[LazyTensor]]:
    """Divide the tensors over files, in order, filling each file up to `max_bytes`."""
    shard: list[LazyTensor] = []
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.num_bytes
        if shard and num_bytes > max_bytes:
            yield shard
            shard, num_bytes = [], tensor.num_bytes
        shard.append(tensor)
    yield shard
