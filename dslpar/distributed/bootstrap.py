"""Start and end of a rank: its place in the job, process groups, exit. `rank_session` has the order of these steps.

    dist_env = bootstrap.read_distributed_env(os.environ)         # rank, world size, rendezvous; no torch
    monitor = bootstrap.monitor_rank(dist_env, os.environ)        # from here on, what ends one rank ends the job
    bootstrap.setup_distributed(dist_env, os.environ, monitor)    # torch.distributed and DeepSpeed
    bootstrap.teardown_distributed()
    bootstrap.exit_process(0)

deepspeed and torchrun set the same variables, OpenMPI, MPICH and Slurm each others; a process that no launcher started
is a world of one. Nothing here initializes MPI: at exit mpi4py waits for peers, also of a rank that failed. In a job of
several hosts, deepspeed and torchrun name rank 0's (MASTER_ADDR), as do Slurm's list of nodes and OpenMPI 5.
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
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from dslpar.cluster import network, nodelist, pmix
from dslpar.cluster.command import DEFAULT_PORT, LOCALHOST
from dslpar.cluster.launcher import RankVariables
from dslpar.cluster.launchers import VARIABLES
from dslpar.core.catalog import raise_finding
from dslpar.distributed import rendezvous
from dslpar.distributed.distributed_env import LOOPBACKS, DistributedEnv
from dslpar.watchdog import rank_monitor
from dslpar.watchdog.marks import Rank
from dslpar.watchdog.rank_monitor import RankMonitor

if TYPE_CHECKING:
    import torch

_TIMEOUT_MARGIN_S = 60.0
"""How much longer torch waits than train.step_timeout, so that the guards report a hang first."""
_NO_TIMEOUT = timedelta(days=365)


def read_distributed_env(environ: Mapping[str, str]) -> DistributedEnv:
    """Return this process's place, as its launcher gives it.

    Raises:
        DslparError: the environment gives a part of it alone, or there are several hosts and it does not name rank 0's.
    """
    for variables in VARIABLES:
        if variables.are_set(environ):
            names = (variables.rank, variables.world_size, variables.local_rank)
            rank, world_size, local_rank = (int(environ[name]) for name in names)
            local_size = _local_size(variables, environ, world_size)
            master_addr = _rendezvous_host(environ, several=local_size < world_size)
            job = ".".join(environ[name] for name in variables.job if name in environ)
            port = int(environ.get("MASTER_PORT") or _rendezvous_port(job))
            return DistributedEnv(rank, world_size, local_rank, local_size, master_addr, port)
    for variables in VARIABLES:
        if int(environ.get(variables.world_size, 1)) > 1:
            missing = [name for name in (variables.rank, variables.local_rank) if name not in environ]
            message = f"{variables.world_size} is {environ[variables.world_size]}, and {' and '.join(missing)} not set"
            hint = "set it; or RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, which any launcher can pass to its ranks"
            raise_finding("HST201", message, hint)
    return DistributedEnv()


def _local_size(variables: RankVariables, environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host.

    A script that sets RANK, WORLD_SIZE and LOCAL_RANK by hand leaves it out. Then it is what the launcher around that
    script says; else all ranks, if they meet on this host; else some number that is less than all.
    """
    names = (*variables.local_size, *(name for other in VARIABLES for name in other.local_size))
    local_size = next((environ[name] for name in names if name in environ), None)
    if local_size is None:
        return world_size if environ.get("MASTER_ADDR", LOCALHOST) in LOOPBACKS else max(1, world_size - 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return (nodelist.tasks(local_size) * (node + 1))[node]  # a plain number is every node's


def _rendezvous_host(environ: Mapping[str, str], several: bool) -> str:
    """Return the host of rank 0; `several`: the job has other hosts too."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    # Slurm's list of nodes is sorted; with an arbitrary distribution rank 0 need not be on the first.
    if "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_DISTRIBUTION") != "arbitrary":
        return nodelist.first(environ["SLURM_STEP_NODELIST"])
    if not several:
        return LOCALHOST
    host = pmix.host_of_rank_0(environ)
    if host is None or not network.is_known(host):
        known = f"{socket.gethostname()} knows no address of {host}, where rank 0 is"
        hint = "pass MASTER_ADDR=<host of rank 0> to all ranks (OpenMPI: mpirun -x MASTER_ADDR=..., MPICH: -genv)"
        message = f"several hosts, and {known if host else 'MASTER_ADDR is not set'}"
        raise_finding("HST202", message, hint)
    return host


def _rendezvous_port(job: str) -> int:
    """Return a port for a job, below the ephemeral ones: two jobs on one host then rarely take the same."""
    digest = hashlib.blake2b(job.encode(), digest_size=4).digest()
    return 10_000 + int.from_bytes(digest, "big") % 20_000 if job else DEFAULT_PORT


# ---- start ----


def monitor_rank(dist_env: DistributedEnv, environ: Mapping[str, str]) -> RankMonitor:
    """Have an uncaught exception end this rank at once from now on, and with it the job; see dslpar/watchdog."""
    who = Rank(dist_env.rank, dist_env.world_size, socket.gethostname(), os.getpid())
    return rank_monitor.monitor_rank(who, environ, loopback=dist_env.is_one_host)


def setup_distributed(
    dist_env: DistributedEnv, environ: MutableMapping[str, str], monitor: RankMonitor | None = None
) -> None:
    """Initialize torch.distributed over the accelerator's backend, and DeepSpeed upon it. All ranks together.

    `monitor`: this rank's, whose guard then connects to rank 0's.
    """
    environ.update(
        RANK=str(dist_env.rank),
        WORLD_SIZE=str(dist_env.world_size),
        LOCAL_RANK=str(dist_env.local_rank),
        LOCAL_SIZE=str(dist_env.local_size),
        MASTER_ADDR=dist_env.master_addr,
        MASTER_PORT=str(dist_env.master_port),
    )
    environ.update(_gloo_environment(dist_env, environ))
    # Before DeepSpeed is imported, which takes as long again: what fails from here on ends the ranks that wait for it.
    store = rendezvous.meet(dist_env, environ, monitor) if dist_env.world_size > 1 else None
    logging.disable(logging.WARNING)  # each rank would log which accelerator it found
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from dslpar.distributed import deepspeed_patches, gloo_device, numa

    logging.disable(logging.NOTSET)
    accelerator = get_accelerator()
    device = local_device_index(dist_env, 0 if accelerator.device_name() == "cpu" else accelerator.device_count())
    # DeepSpeed takes its device's number from these.
    environ.update({name: str(device) for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in environ})
    accelerator.set_device(device)  # before the process group: NCCL takes the device that is current
    if accelerator.device_name() == "cuda":
        numa.bind_to_node(torch.cuda.get_device_properties(device))  # type: ignore[arg-type]  # the stub knows no PCI
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(numa.num_threads(dist_env.local_size))
    deepspeed_patches.skip_shm_op()
    gloo_device.share_device()
    backend = accelerator.communication_backend_name()
    if backend == "gloo" and dist_env.local_size > 1:
        gloo_device.use_batch_scheduling()
    store = store or dist.HashStore()  # type: ignore[attr-defined]  # of a world of one, which needs no port
    # Not left to DeepSpeed, which would ask mpi4py for this rank's number; it takes over a group that is there. Without
    # device_id: with it NCCL splits groups off the world's communicator, which all ranks must do together, and groups
    # here are made by their members alone; and sends between stages would be in one order with the world's messages.
    dist.init_process_group(backend, store=store, rank=dist_env.rank, world_size=dist_env.world_size)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def local_device_index(dist_env: DistributedEnv, num_visible: int) -> int:
    """Return which of the accelerators that this rank sees is its own.

    It is the one of the rank's number on the host, unless the rank sees one alone (Slurm's `--gpus-per-task`, a script
    that sets CUDA_VISIBLE_DEVICES rank by rank).
    """
    return 0 if num_visible == 1 else dist_env.local_rank


def current_device() -> torch.device:
    """Return the device of this process, as torch names it."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return torch.device("cpu" if accelerator.device_name() == "cpu" else accelerator.current_device_name())


def _gloo_environment(dist_env: DistributedEnv, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that names gloo's network interface, where there are several hosts.

    By itself gloo takes the address of this host's own name. On many hosts (as Debian sets them up) that is a loopback
    address, and other hosts would then connect to themselves.
    """
    if dist_env.local_size == dist_env.world_size or "GLOO_SOCKET_IFNAME" in environ:
        return {}
    interface = ""
    with contextlib.suppress(OSError):
        interface = network.interface_to(dist_env.master_addr)
    interface = interface or network.interface_outwards()  # on rank 0's host, its own name may mean a loopback
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def extend_timeouts(bound_s: float | None) -> None:
    """Have all process groups made so far wait longer than `bound_s`, the longest that a rank may take; None: for ever.

    The guards report who hangs after `bound_s`. torch's own timeouts (ten minutes of NCCL, half an hour of gloo) would
    end the rank that waits, which would then be taken for the first to fail.
    """
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    timeout = _NO_TIMEOUT
    if bound_s is not None:
        timeout = max(c10d.default_pg_timeout, timedelta(seconds=bound_s + _TIMEOUT_MARGIN_S))
    # A group's timeout is fixed when it is made; torch 2.15 has a public name for changing it later, older ones none.
    set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    for group in list(c10d._world.pg_map):
        set_timeout(timeout, group)


# ---- end ----


def teardown_distributed(*, together: bool = True) -> None:
    """Destroy the process groups: without it torch sometimes aborts at exit.

    A run that went well ends `together`; one that is refused does not wait for ranks that may be elsewhere.
    """
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from dslpar.distributed.collectives import wait_for_all

    # A program's last step may still be on its device: a communicator must not go while a kernel uses it.
    accelerator = get_accelerator()
    if together:
        wait_for_all()
        accelerator.synchronize()
    elif not _is_idle(accelerator, within_s=_LAST_KERNELS_S):
        return  # a collective whose peers never come, or a device that has failed: the end of the process frees both
    dist.destroy_process_group()


_LAST_KERNELS_S = 5.0
"""How long a rank that ends by itself waits for what it has begun on its device."""


def _is_idle(accelerator: Any, within_s: float) -> bool:
    """Whether the device has done all that it was given, after at most `within_s`."""
    if accelerator.is_synchronized_device():
        return True
    end_s = time.monotonic() + within_s
    try:
        stream = accelerator.current_stream()
        while not (idle := bool(stream.query())) and time.monotonic() < end_s:
            time.sleep(0.01)
    except RuntimeError as error:  # of a kernel: as a rule the very error with which the program ends
        logging.getLogger(__name__).debug("the device has failed: %s", error)
        return False
    return idle


def exit_process(status: int) -> NoReturn:
    """End this process as `sys.exit` does, but without C++ destructors.

    Once in some dozens of runs that had gone well, one of torch's aborts ("terminate called without an active
    exception"), and the launcher calls the job failed.
    """
    # In the interpreter's own order. Threads first, which may still need what exit hooks take down; but those of pools,
    # as torch's compiler leaves, end when they are told to, by what `_shutdown` calls before it joins any.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
