"""What is inside a checkpoint: saved and loaded through DeepSpeed, and what it leaves out added, to the bit.

DeepSpeed keeps the model, the optimizer, the schedule's position, the loss scaler, the counts of steps, of skipped
steps and of samples. Beside that each rank keeps (FACTS 2.3, 2.6):

- its random states: Python's, numpy's, torch's, the device's;
- its tied copies. DeepSpeed broadcasts the owner's weight over them when it loads; but each stage averages gradients
  over its own replicas, in buckets of its own, and copies come to differ in their last bits;
- its buffers: of the statistics that a norm keeps of each replica's own samples, DeepSpeed stores the first replica's.

A learning rate that depends on `train.steps` is taken from the schedule again, since the number of steps may have been
changed; in an unchanged run that is the value that was stored.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch.optim.lr_scheduler import LambdaLR

from dslpar import comm
from dslpar.checkpoint import folder, manifest
from dslpar.checkpoint.folder import Stored
from dslpar.comm import Axis
from dslpar.engine import Engine
from dslpar.job import Job
from dslpar.record import CHECKPOINTS

log = logging.getLogger("dslpar")

Value = TypeVar("Value")


def save(engine: Engine, data: str = "") -> Path:
    """Saves the run as it stands, and makes that visible when all of it is on disk. All ranks together.

    `data` says what it is trained on (see `text_identity`). Returns the checkpoint's folder.

    Raises:
        DslparError: on every rank, if rank 0 cannot write there, or one of them does not see where it writes.
    """
    job, step, world = engine.job, engine.steps_done, world_of(engine)
    root = Path(job.output_dir, CHECKPOINTS)
    part = folder.part_path(root, step)
    made = _by_rank_0(lambda: folder.begin(root, step), world, job)
    _demand_seen(part.exists(), str(made), world, job)
    engine.deepspeed.save_checkpoint(str(part), tag=folder.tag_of(step))
    torch.save(_of_rank(engine), folder.rank_path(part, world.index))
    hosts = comm.gather_objects(socket.gethostname(), world)  # and so every rank has written
    if hosts.index(socket.gethostname()) == world.index:
        folder.flush(*folder.files(part))
    comm.barrier(world)
    final = _by_rank_0(lambda: folder.publish(root, manifest.manifest_of(job, data, step)), world, job)
    _by_rank_0(lambda: folder.prune(root, job.spec.checkpoint.keep, step), world, job)
    return final


def newest(job: Job, world: Axis) -> Stored | None:
    """The newest whole checkpoint in the job's output_dir, by what rank 0 sees there; None if there is none at all.

    All ranks together. Rank 0 says which newer ones are damaged.

    Raises:
        DslparError: on every rank, if one of them does not see that checkpoint, or all that are there are damaged: a
            long run must not begin anew because its last file was cut short.
    """
    root = Path(job.output_dir, CHECKPOINTS)
    whole, damaged = _by_rank_0(lambda: _newest_whole(root), world, job)
    if whole is None and damaged:
        help_ = "bring the files back; or remove these folders, and the run starts at step 0"
        raise manifest.error("CKP205", "no-checkpoint", "; ".join(damaged), help_, job, "train.output_dir")
    if whole is None:
        return None
    for said in damaged if world.index == 0 else ():
        log.warning("%s; it is passed over", said)
    mine = next((stored for stored in folder.visible(root) if stored.manifest == whole.manifest), None)
    _demand_seen(mine is not None, whole.path, world, job)
    return mine


def _newest_whole(root: Path) -> tuple[Stored | None, list[str]]:
    """It, and of each newer one what is wrong."""
    damaged: list[str] = []
    for stored in reversed(folder.visible(root)):
        if folder.is_whole(stored):
            return stored, damaged
        files = folder.damaged_files(stored)
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        damaged.append(f"{stored.path} is damaged: {files[0]}{more} not in full length")
    return None, damaged + [f"{path} has no {folder.MANIFEST} that can be read" for path in folder.unreadable(root)]


def load(engine: Engine, stored: Stored) -> None:
    """Gives a freshly built engine the state of a checkpoint that `check` has passed. All ranks together."""
    # BF16_Optimizer prints while it loads; tied weights are broadcast in place, which autograd would remember.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        loaded, _ = engine.deepspeed.load_checkpoint(stored.path, tag=stored.tag)
    assert loaded is not None, f"DeepSpeed finds no {stored.tag} in {stored.path}"
    _onto_schedule(engine)
    _to_rank(engine, torch.load(folder.rank_path(Path(stored.path), engine.groups.rank), weights_only=True))
    assert engine.steps_done == stored.step, f"{engine.steps_done} steps in {stored.path}"


def world_of(engine: Engine) -> Axis:
    """All ranks."""
    return engine.groups.axis("pipe", "data", "tensor")


def _demand_seen(sees: bool, path: str, world: Axis, job: Job) -> None:
    """Raises DslparError, on every rank, if one of them does not see `path`, which rank 0 sees."""
    seen = comm.gather_objects((socket.gethostname(), sees), world)
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        said = f"rank 0 has {path}, which {', '.join(blind)} does not see"
        help_ = "put train.output_dir on a file system that all hosts share"
        raise manifest.error("CKP203", "checkpoint-not-everywhere", said, help_, job, "train.output_dir")


# ---- what DeepSpeed leaves out ----


def _of_rank(engine: Engine) -> dict[str, Any]:
    """Plain values and tensors alone, which load without running what a file says."""
    return {
        "random": _random_states(engine.deepspeed.device),
        "tied": _tied_copies(engine),
        "buffers": _buffers(engine),
    }


def _to_rank(engine: Engine, state: dict[str, Any]) -> None:
    copies = dict(engine.module.named_parameters())
    with torch.no_grad():
        for name, weight in state["tied"].items():
            copies[name].copy_(weight)
        buffers = dict(engine.module.named_buffers())
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)
    _set_random_states(state["random"], engine.deepspeed.device)


def _tied_copies(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights of this stage that another stage owns."""
    named = engine.module.named_parameters()
    return {name: p.detach().cpu().clone() for name, p in named if getattr(p, "ds_pipe_replicated", False)}


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """The persistent ones of this rank's module."""
    parts = engine.module.named_modules()
    passing = {f"{path}.{name}".lstrip(".") for path, part in parts for name in part._non_persistent_buffers_set}
    named = engine.module.named_buffers()
    return {name: value.detach().cpu().clone() for name, value in named if name not in passing}


def _random_states(device: torch.device) -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy
    states = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {"device": get_accelerator().get_rng_state()}


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu":
        get_accelerator().set_rng_state(states["device"])


def _onto_schedule(engine: Engine) -> None:
    """The learning rate that the schedule of *this* config has at the step that was stored."""
    scheduler = engine.deepspeed.lr_scheduler
    if isinstance(scheduler, LambdaLR):
        at = zip(engine.deepspeed.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, share in at:
            group["lr"] = base * share(scheduler.last_epoch)


def _by_rank_0(act: Callable[[], Value], world: Axis, job: Job) -> Value:
    """What `act` returned on rank 0, on every rank; if it failed there, each rank raises."""
    value, failed = None, ""
    if world.index == 0:
        try:
            value = act()
        except OSError as error:
            failed = str(error)
    value, failed = comm.broadcast_object((value, failed), world)
    if failed:
        where = os.path.join(job.output_dir, CHECKPOINTS)
        help_ = "make room there, or name another folder, train.output_dir=..."
        said = f"cannot write checkpoints to {where!r}: {failed}"
        raise manifest.error("CKP205", "no-checkpoint", said, help_, job, "train.output_dir")
    return value  # type: ignore[return-value]
