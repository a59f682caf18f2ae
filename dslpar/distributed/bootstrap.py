"""Where a process stands in its job, whoever started it; the only file that reads the environment.

    place = bootstrap.find(os.environ)           # rank, world, local rank, rendezvous; no torch
    monitor = bootstrap.monitor_rank(place, os.environ)   # whatever ends one rank ends the job
    bootstrap.start(place, os.environ, monitor)     # process groups: torch.distributed and DeepSpeed
    bootstrap.stop()
    bootstrap.leave(0)                           # the end of the process

deepspeed and torchrun say it one way, OpenMPI, MPICH and Slurm each another; a process that nobody launched is a world
of one. Nothing here initializes MPI: mpi4py's exit would wait for the peers of a rank that failed. Over several hosts
rank 0's is known from deepspeed and torchrun (MASTER_ADDR), from Slurm's list of nodes, and from OpenMPI 5 itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

from dslpar.cluster import network, nodelist, pmix
from dslpar.cluster.launchers import VARIABLES, RankVariables
from dslpar.core.catalog import raise_finding
from dslpar.watchdog import rank_monitor
from dslpar.watchdog.rank_monitor import RankMonitor
from dslpar.watchdog.reports import Rank

LOCALHOST = "127.0.0.1"
_LOOPBACKS = (LOCALHOST, "localhost", "::1")
DEFAULT_PORT = 29500
_GUARD = "dslpar/guard"
"""Of torch.distributed's store: where rank 0's guard listens."""
_LATER_S = 60.0
"""How much later than our own bound torch's may come."""
_FOR_EVER = timedelta(days=365)


class Place(NamedTuple):
    """A process's place in its job, and where its ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this host."""
    master_addr: str = LOCALHOST
    master_port: int = DEFAULT_PORT


def find(environ: Mapping[str, str]) -> Place:
    """This process's place.

    Raises:
        DslparError: the environment says a part of it alone, or not where the ranks of several hosts meet.
    """
    for variables in VARIABLES:
        if variables.are_set(environ):
            return _place(variables, environ)
    for variables in VARIABLES:
        if int(environ.get(variables.world_size, 1)) > 1:
            missing = [name for name in (variables.rank, variables.local_rank) if name not in environ]
            message = f"{variables.world_size} is {environ[variables.world_size]}, and {' and '.join(missing)} not set"
            hint = "set it; or RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, which every launcher may be told to"
            raise_finding("HST201", message, hint)
    return Place()


def _place(variables: RankVariables, environ: Mapping[str, str]) -> Place:
    rank, world, local_rank = (
        int(environ[name]) for name in (variables.rank, variables.world_size, variables.local_rank)
    )
    local_size = _local_size(variables, environ, world)
    port = environ.get("MASTER_PORT") or _port_of(".".join(environ[name] for name in variables.job if name in environ))
    return Place(rank, world, local_rank, local_size, _meeting(environ, local_size < world), int(port))


def _local_size(variables: RankVariables, environ: Mapping[str, str], world: int) -> int:
    """Ranks on this host. A script that sets RANK, WORLD_SIZE and LOCAL_RANK by hand leaves it out: then it is what the
    launcher around that says, or all of them if they meet on this host alone, or else not all.
    """
    names = (*variables.local_size, *(name for one in VARIABLES for name in one.local_size))
    message = next((environ[name] for name in names if name in environ), None)
    if message is None:
        return world if environ.get("MASTER_ADDR", LOCALHOST) in _LOOPBACKS else max(1, world - 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return (nodelist.tasks(message) * (node + 1))[node]  # a plain number is every node's


def _meeting(environ: Mapping[str, str], several: bool) -> str:
    """The host of rank 0, where there are several."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_DISTRIBUTION") != "arbitrary":
        return nodelist.first(environ["SLURM_STEP_NODELIST"])
    if not several:
        return LOCALHOST
    host = pmix.host_of_rank_0(environ)
    if host is None or not network.is_known(host):
        hint = "pass MASTER_ADDR=<host of rank 0> to all ranks (OpenMPI: mpirun -x MASTER_ADDR=..., MPICH: -genv)"
        raise_finding("HST202", f"several hosts, and {_unmet(host)}", hint)
    return host


def _unmet(host: str | None) -> str:
    if host is None:
        return "MASTER_ADDR is not set"
    return f"{socket.gethostname()} knows no address of {host}, where rank 0 is"


def _port_of(job: str) -> int:
    """One port a job, below those that the system gives out: two jobs on one host then rarely meet."""
    digest = hashlib.blake2b(job.encode(), digest_size=4).digest()
    return 10_000 + int.from_bytes(digest, "big") % 20_000 if job else DEFAULT_PORT


# ---- from start to end of the process ----


def monitor_rank(place: Place, environ: Mapping[str, str]) -> RankMonitor:
    """An exception that nobody catches ends this rank from now on, and with it the job; see faults."""
    who = Rank(place.rank, place.world_size, socket.gethostname(), os.getpid())
    return rank_monitor.monitor_rank(who, environ, loopback=place.master_addr == LOCALHOST)


def start(place: Place, environ: MutableMapping[str, str], monitor: RankMonitor | None = None) -> None:
    """torch.distributed over the accelerator's backend, and DeepSpeed upon it; all ranks together. `monitor`: this
    rank's, whose guard then meets the others'.
    """
    environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_SIZE=str(place.local_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
    )
    environ.update(_over_the_network(place, environ))
    logging.disable(logging.WARNING)  # each rank would say which accelerator it found
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from dslpar.distributed import deepspeed_patches

    logging.disable(logging.NOTSET)
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_size))
    accelerator = get_accelerator()
    device = device_of(place, 0 if accelerator.device_name() == "cpu" else accelerator.device_count())
    environ.update({name: str(device) for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in environ})
    accelerator.set_device(device)
    deepspeed_patches.avoid_compiling()
    alone = dist.HashStore() if place.world_size == 1 else None  # type: ignore[attr-defined]  # needs no port
    backend = accelerator.communication_backend_name()
    dist.init_process_group(backend, store=alone, rank=place.rank, world_size=place.world_size)
    if monitor is not None and place.world_size > 1:
        _meet_guards(place, monitor, dist.distributed_c10d._get_default_store())
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def device_of(place: Place, num_visible: int) -> int:
    """Which of the accelerators that this rank sees is its own: the one of its number on the host, unless it sees one
    alone (Slurm's `--gpus-per-task`, a script that sets CUDA_VISIBLE_DEVICES rank by rank). DeepSpeed takes the number
    for its own from LOCAL_RANK.
    """
    return 0 if num_visible == 1 else place.local_rank


def _over_the_network(place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """The interface for gloo, which else takes the address of this host's own name: of many hosts a loopback's, as
    Debian sets them up, and other hosts would then connect to themselves.
    """
    if place.local_size == place.world_size or "GLOO_SOCKET_IFNAME" in environ:
        return {}
    interface = ""
    with contextlib.suppress(OSError):
        interface = network.interface_to(place.master_addr)
    interface = interface or network.interface_outwards()  # rank 0's own name may be a loopback's here
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _meet_guards(place: Place, monitor: RankMonitor, store: Any) -> None:
    """The others learn where rank 0's guard listens."""
    if place.rank == 0:
        store.set(_GUARD, f"{place.master_addr}:{monitor.guard_port()}:{monitor.token}")
    else:
        monitor.page.set_hub(store.get(_GUARD).decode())


def outwait(bound_s: float | None) -> None:
    """Has all process groups that there are wait longer than any bound of ours, which tells who is waited for; None:
    there is none. torch's own limits, ten minutes of NCCL and half an hour of gloo, end the rank that waits, and it
    would be taken for the first to fail.
    """
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    limit = _FOR_EVER if bound_s is None else max(c10d.default_pg_timeout, timedelta(seconds=bound_s + _LATER_S))
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(limit, group)


def stop(*, together: bool = True) -> None:
    """The end of what `start` began: without it torch sometimes aborts at exit. A run that went well ends `together`;
    one that is refused does not wait for ranks that may be elsewhere.
    """
    import torch.distributed as dist

    if together:
        dist.barrier()
    dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but for destructors of C++: once in some dozens of runs that had gone well,
    one of torch's aborts ("terminate called without an active exception"), and the launcher calls the job failed.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
