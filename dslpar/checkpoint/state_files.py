"""Read and check `state.pt` (training state) and `ranks/00003.pt` (rank state), without running code from the files.

`dslpar checkpoint verify` and a resume use the same functions. So this module needs torch, but not DeepSpeed.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dslpar.checkpoint import folder
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.manifest import OFFLINE
from dslpar.core.json_values import count, items, mapping, number, text
from dslpar.schema.sections import LR_SCHEDULERS

COUNTS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of DeepSpeed's engine."""
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes that DeepSpeed's loss scalers change during a run."""
POSITION = ("last_epoch", "_step_count")
"""Attributes with the position of torch's LR schedulers."""

_MALFORMED = (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""Errors that torch.load and random number generators raise for a malformed file."""


def read_train_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the training state of a checkpoint.

    Raises:
        DslparError: CKP216: the file is missing or malformed.
    """
    file = Path(checkpoint.path, folder.STATE)
    try:
        values = mapping(_load(file), "the state", "counts", "schedule", "scale")
        counts = mapping(values["counts"], "counts", *COUNTS)
        for name in COUNTS:
            count(counts[name], f"counts.{name}")
        if counts["global_steps"] != checkpoint.step:
            raise ValueError(f"it is of step {counts['global_steps']}, but the manifest is of step {checkpoint.step}")
        for name, value in mapping(values["scale"], "scale").items():
            number(value, f"scale.{text(name, 'scale', LOSS_SCALE)}")
        _check_schedule(values["schedule"], checkpoint)
        mapping(values.get("random_ltd", {}), "random_ltd")
    except (OSError, pickle.UnpicklingError, *_MALFORMED) as error:
        raise folder.unreadable(file, _describe(error)) from error
    return values


def read_rank_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Read the rank state of one rank; {} if the rank has no file.

    In a checkpoint made by `reshard`, only ranks with buffers have a file, and it has only the buffers.

    Raises:
        DslparError: CKP216: the file is malformed.
    """
    file = folder.rank_path(Path(checkpoint.path), rank)
    if not file.exists():
        return {}
    keys = () if checkpoint.manifest["layout"].get(OFFLINE) else ("random", "schedule")
    try:
        values = mapping(_load(file), "the state", "buffers", *keys)
        for name, buffer in mapping(values["buffers"], "buffers").items():
            _check_tensor(buffer, f"buffers[{name!r}]")
        if keys:
            _check_random(mapping(values["random"], "random", "python", "numpy", "torch"))
            _check_schedule(values["schedule"], checkpoint)
    except (OSError, pickle.UnpicklingError, *_MALFORMED) as error:
        raise folder.unreadable(file, _describe(error)) from error
    return values


def _load(file: Path) -> object:
    # weights_only: a checkpoint may come from a stranger, and must not run code.
    return torch.load(file, weights_only=True, map_location="cpu")


def _describe(error: Exception) -> str:
    """Describe an error by its first line; torch's further lines explain how to load a trusted file."""
    line = str(error).partition("\n")[0]
    return line if type(error) in (ValueError, OSError) else f"{type(error).__name__}: {line}"


def _check_tensor(value: object, at: str) -> None:
    if not (isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"):
        raise ValueError(f"{at} is not a dense tensor")


def _check_schedule(value: object, checkpoint: Checkpoint) -> None:
    """Check the state of an LR scheduler: a load needs the position of dslpar's own schedulers."""
    own = checkpoint.manifest["config"]["lr_scheduler"]["type"] in LR_SCHEDULERS
    for key in POSITION if mapping(value, "schedule") and own else ():
        count(mapping(value, "schedule", key)[key], f"schedule.{key}")


def _check_random(states: Mapping[str, Any]) -> None:
    """Check random states by setting them on new generators: only a generator can tell whether a state is valid."""
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(numpy_state(states["numpy"]))
    _check_tensor(states["torch"], "random.torch")
    torch.Generator().set_state(states["torch"])
    if "device" in states:
        _check_tensor(states["device"], "random.device")


def numpy_state(plain: object) -> Any:
    """Convert the stored list to a random state of numpy."""
    kind, keys, *rest = items(plain, "random.numpy", length=5)
    return kind, np.array(keys, dtype=np.uint32), *rest
