"""Start and end a rank: read its place in the job, set up process groups, exit. `rank_session` calls these steps.

    dist_env = bootstrap.read_distributed_env(os.environ)         # rank, world size, rendezvous; no torch
    monitor = bootstrap.monitor_rank(dist_env, os.environ)        # from here on, what ends one rank ends the job
    bootstrap.setup_distributed(dist_env, os.environ, monitor)    # torch.distributed and DeepSpeed
    bootstrap.teardown_distributed()
    bootstrap.exit_process(0)

deepspeed and torchrun set the same environment variables. OpenMPI, MPICH and Slurm each set different ones. A process
that no launcher started is a world of one. This module does not initialize MPI: at exit mpi4py waits for peers, even on
a rank that failed. In a job on several hosts, rank 0's host comes from MASTER_ADDR (deepspeed, torchrun), Slurm's node
list or OpenMPI 5. A guard is a process beside each rank that watches it (dslpar/watchdog).
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

from dslpar.cluster import launcher_env, network, nodelist, pmix
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
"""Seconds that torch waits longer than train.step_timeout, so that the guards report a hang first."""
_NO_TIMEOUT = timedelta(days=365)


def read_distributed_env(environ: Mapping[str, str]) -> DistributedEnv:
    """Return this process's place in its job, from the launcher's variables.

    Raises:
        DslparError: some variables are missing or contradict each other, or there are several hosts and no variable
            names rank 0's host.
    """
    if variables := launcher_env.rank_variables(environ):
        rank, world_size, local_rank = launcher_env.read_place(variables, environ)
        local_size = _local_size(variables, environ, world_size)
        master_addr = _rendezvous_host(environ, several=local_size < world_size)
        job = ".".join(environ[name] for name in variables.job if name in environ)
        has_port = bool(environ.get("MASTER_PORT"))
        port = launcher_env.read_number("MASTER_PORT", environ) if has_port else _rendezvous_port(job)
        return DistributedEnv(rank, world_size, local_rank, local_size, master_addr, port)
    for variables in VARIABLES:
        if variables.world_size in environ and launcher_env.read_number(variables.world_size, environ) > 1:
            missing = [name for name in (variables.rank, variables.local_rank) if name not in environ]
            unset = f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not set"
            message = f"{variables.world_size} is {environ[variables.world_size]}, but {unset}"
            hint = (
                f"set {'them' if missing[1:] else 'it'}; or set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, which any"
                f" launcher can pass to its ranks; if it is left over: unset {variables.world_size}"
            )
            raise_finding("HST201", message, hint)
    return DistributedEnv()


def _local_size(variables: RankVariables, environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host.

    A script that sets RANK, WORLD_SIZE and LOCAL_RANK by hand may not set this number. The number then comes from the
    launcher around that script. If no launcher sets it either, it is the world size if MASTER_ADDR is this host, and
    otherwise a number below the world size.
    """
    names = (*variables.local_size, *(name for other in VARIABLES for name in other.local_size))
    local_size = next((environ[name] for name in names if name in environ), None)
    if local_size is None:
        return world_size if environ.get("MASTER_ADDR", LOCALHOST) in LOOPBACKS else max(1, world_size - 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return (nodelist.tasks(local_size) * (node + 1))[node]  # a plain number holds for every node


def _rendezvous_host(environ: Mapping[str, str], several: bool) -> str:
    """Return rank 0's host; `several`: the job has several hosts."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    # Slurm sorts its node list. With an arbitrary distribution, rank 0 need not be on the first node.
    if "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_DISTRIBUTION") != "arbitrary":
        return nodelist.first(environ["SLURM_STEP_NODELIST"])
    if not several:
        return LOCALHOST
    host = pmix.host_of_rank_0(environ)
    if host is None or not network.is_known(host):
        known = f"{socket.gethostname()} cannot resolve {host}, the host of rank 0"
        hint = "pass MASTER_ADDR=<host of rank 0> to all ranks (OpenMPI: mpirun -x MASTER_ADDR=..., MPICH: -genv)"
        message = f"the ranks are on several hosts, but {known if host else 'MASTER_ADDR is not set'}"
        raise_finding("HST202", message, hint)
    return host


def _rendezvous_port(job: str) -> int:
    """Return a port for a job, below the ephemeral ports; two jobs on one host rarely get the same one."""
    digest = hashlib.blake2b(job.encode(), digest_size=4).digest()
    return 10_000 + int.from_bytes(digest, "big") % 20_000 if job else DEFAULT_PORT


# ---- start ----


def monitor_rank(dist_env: DistributedEnv, environ: Mapping[str, str]) -> RankMonitor:
    """Start this rank's monitor: an uncaught exception ends the rank and the job at once; see dslpar/watchdog."""
    who = Rank(dist_env.rank, dist_env.world_size, socket.gethostname(), os.getpid())
    return rank_monitor.monitor_rank(who, environ, loopback=dist_env.is_one_host)


def setup_distributed(
    dist_env: DistributedEnv, environ: MutableMapping[str, str], monitor: RankMonitor | None = None
) -> None:
    """Initialize torch.distributed over the accelerator's backend, then DeepSpeed. All ranks must call it together.

    1. Set torch's environment variables.
    2. Join torch's store, and connect `monitor`'s guard to rank 0's guard.
    3. Import torch and DeepSpeed, choose this rank's device, and bind the rank to CPUs near the device.
    4. Make the process group of all ranks.
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
    # Joined before the slow import of DeepSpeed: from here on, a failure of this rank ends the ranks that wait for it.
    store = rendezvous.meet(dist_env, environ, monitor) if dist_env.world_size > 1 else None
    logging.disable(logging.WARNING)  # else each rank logs which accelerator it found
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from dslpar.distributed import deepspeed_patches, gloo_threads, numa

    logging.disable(logging.NOTSET)
    accelerator = get_accelerator()
    device = local_device_index(dist_env, 0 if accelerator.device_name() == "cpu" else accelerator.device_count())
    # DeepSpeed reads its device index from these.
    environ.update({name: str(device) for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in environ})
    accelerator.set_device(device)  # before the process group: NCCL uses the current device
    if accelerator.device_name() == "cuda":
        numa.bind_to_node(torch.cuda.get_device_properties(device))  # type: ignore[arg-type]  # the stub knows no PCI
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(numa.num_threads(dist_env.local_size))
    deepspeed_patches.skip_shm_op()
    gloo_threads.share_device()
    backend = accelerator.communication_backend_name()
    if backend == "gloo" and dist_env.local_size > 1:
        gloo_threads.use_batch_scheduling()
    store = store or dist.HashStore()  # type: ignore[attr-defined]  # a world of one needs no port
    # DeepSpeed would ask mpi4py for this rank's number, so the process group is made here, and DeepSpeed uses it. No
    # device_id is passed: with it, NCCL would split groups off the world's communicator. All ranks must call such a
    # split, but here only a group's members make the group. Sends between stages would also be serialized with the
    # world's messages.
    dist.init_process_group(backend, store=store, rank=dist_env.rank, world_size=dist_env.world_size)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def local_device_index(dist_env: DistributedEnv, num_visible: int) -> int:
    """Return the index of this rank's accelerator among the visible ones.

    It is the local rank, unless the rank sees only one accelerator (Slurm's `--gpus-per-task`, or a script that sets
    CUDA_VISIBLE_DEVICES per rank).
    """
    return 0 if num_visible == 1 else dist_env.local_rank


def current_device() -> torch.device:
    """Return the device of this process, as torch names it."""
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return torch.device("cpu" if accelerator.device_name() == "cpu" else accelerator.current_device_name())


def _gloo_environment(dist_env: DistributedEnv, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that names gloo's network interface, if there are several hosts.

    By default gloo uses the address of this host's own name. On many hosts (Debian's default setup) that is a loopback
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
    """Set the timeout of all existing process groups above `bound_s`, a rank's time limit; None: no timeout.

    The guards report which rank hangs after `bound_s`. torch's own timeouts (ten minutes for NCCL, half an hour for
    gloo) would end a waiting rank first, which would then be reported as the first failure.
    """
    import torch.distributed as dist

    c10d = dist.distributed_c10d
    timeout = _NO_TIMEOUT
    if bound_s is not None:
        timeout = max(c10d.default_pg_timeout, timedelta(seconds=bound_s + _TIMEOUT_MARGIN_S))
    # torch 2.15 has a public function to change an existing group's timeout. Older versions have only a private one.
    set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    for group in list(c10d._world.pg_map):
        set_timeout(timeout, group)


# ---- end ----


def teardown_distributed(*, together: bool = True) -> None:
    """Destroy the process groups: without this, torch sometimes aborts at exit.

    together: wait for all ranks first, as at the end of a successful run. A rank that ends for another reason must not
        wait, since other ranks may be stuck elsewhere.
    """
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from dslpar.distributed.collectives import wait_for_all

    # A program's last step may still run on its device: a communicator must outlive kernels that use it.
    accelerator = get_accelerator()
    if together:
        wait_for_all()
        accelerator.synchronize()
    elif not _is_idle(accelerator, within_s=_LAST_KERNELS_S):
        return  # a collective whose peers never come, or a failed device: the end of the process frees both
    dist.destroy_process_group()


_LAST_KERNELS_S = 5.0
"""Seconds to wait for work on the device if a rank ends alone."""


def _is_idle(accelerator: Any, within_s: float) -> bool:
    """Return whether the device finishes all queued work within `within_s`."""
    if accelerator.is_synchronized_device():
        return True
    end_s = time.monotonic() + within_s
    try:
        stream = accelerator.current_stream()
        while not (idle := bool(stream.query())) and time.monotonic() < end_s:
            time.sleep(0.01)
    except RuntimeError as error:  # from a kernel, and usually the error with which the program ends
        logging.getLogger(__name__).debug("the device has failed: %s", error)
        return False
    return idle


def exit_process(status: int) -> NoReturn:
    """End this process as `sys.exit` does, but without C++ destructors.

    In one of some dozens of successful runs, one of torch's destructors aborts ("terminate called without an active
    exception"), and the launcher reports a failed job.
    """
    # The same order as in the interpreter: threads end first, since they may still need objects that exit hooks tear
    # down. Pool threads (torch's compiler leaves some) end only on request, which `_shutdown` sends before it joins.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
