"""Small helpers of `colossalai.utils`: the device's memory, ports and folders."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from dslpar.compat.engine import current_device


def empty_cache() -> None:
    """Give cached memory back to the device."""
    get_accelerator().empty_cache()


def set_to_cuda(models: Any) -> Any:
    """Move a module, or a list of them, to this rank's device; a list of one becomes that module."""
    if not isinstance(models, list):
        return models.to(current_device())
    moved = [model.to(current_device()) for model in models]
    return moved if len(moved) > 1 else moved[0]


def colo_set_process_memory_fraction(ratio: float) -> None:
    """Bound this process's share of the GPU's memory; without a GPU, do nothing."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(ratio)


@contextlib.contextmanager
def conditional_context(context_manager: Any, enable: bool = True) -> Iterator[None]:
    """Enter a context if `enable`."""
    with context_manager if enable else contextlib.nullcontext():
        yield


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def ensure_path_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
