"""ColossalAI's launch functions: start the run, under any launcher, and set the global context.

colossalai.launch_from_torch(config="config.py")            # or a dict
"""

from __future__ import annotations

import argparse
import os

import torch.distributed as dist

from dslpar import api
from dslpar.api import Run
from dslpar.compat import program_config
from dslpar.compat.context import global_context
from dslpar.compat.dist_logger import get_dist_logger
from dslpar.compat.layers import begin_model
from dslpar.language.load import Config
from dslpar.linter.check import Source


def launch(
    config: Config | Source,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | None = None,
    verbose: bool = True,
) -> Run:
    """Start the run as rank `rank`; see `launch_from_torch`. Without `local_rank` all ranks are on one host."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank if local_rank is None else local_rank}
    os.environ.update({name: str(value) for name, value in place.items()})
    return _launch_at(host, port, config, backend, seed)


def launch_from_torch(
    config: Config | Source, backend: str | None = None, seed: int | None = None, verbose: bool = True
) -> Run:
    """Start the run, with this rank's place from the environment of torchrun or any other launcher.

    config: the path of a config file, a dict of its names, or what `dslpar.load` returns; the section `model` may be
        missing. ColossalAI's keys (`fp16`, `clip_grad_norm`, `gradient_accumulation`, `NUM_MICRO_BATCHES`,
        `zero.model_config`) are converted.
    backend: if given, it must be the backend that dslpar uses on this device.
    seed: overrides the config's `train.seed`, with which torch is seeded, as in ColossalAI's `launch`.
    verbose: without effect.

    Raises:
        DslparError: the config has errors for this world, or is not the same on all ranks.
        ValueError: the device has another backend.
    """
    read = program_config.read(config)
    overrides = [] if seed is None else [f"train.seed={seed}"]
    if isinstance(read.source, Config):
        run = api.start(program_config.with_overrides(read.source, overrides))
    else:
        run = api.start(read.source, overrides)
    if backend not in (None, dist.get_backend()):
        raise ValueError(f"backend is {backend!r}, but this device uses {dist.get_backend()!r}: leave backend out")
    global_context.set_run(run, read, overrides)
    begin_model()
    for note in read.notes:
        get_dist_logger().warning(note, ranks=[0])
    return run


def launch_from_slurm(
    config: Config | Source,
    host: str,
    port: int,
    backend: str | None = None,
    seed: int | None = None,
    verbose: bool = True,
) -> Run:
    """Start the run under srun; see `launch_from_torch`."""
    return _launch_at(host, port, config, backend, seed)


def launch_from_openmpi(
    config: Config | Source,
    host: str,
    port: int,
    backend: str | None = None,
    seed: int | None = None,
    verbose: bool = True,
) -> Run:
    """Start the run under mpirun; see `launch_from_torch`."""
    return _launch_at(host, port, config, backend, seed)


def _launch_at(host: str, port: int, config: Config | Source, backend: str | None, seed: int | None) -> Run:
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return launch_from_torch(config, backend, seed)


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser for a program's command line, with the arguments that `launch` takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="the config file")
    for name in ("rank", "local_rank", "world_size", "port"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--host", help="the host of rank 0")
    parser.add_argument("--backend", help="must be the device's own backend, the default")
    return parser
