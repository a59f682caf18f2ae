"""What is to be started, what this host has for it, and what launchers make their command lines of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dslpar.cluster.command import DEFAULT_PORT, LOCALHOST, MODULE, NOTHING, Command
from dslpar.cluster.hostfile import Cluster, Host


class Request(NamedTuple):
    """What to start."""

    launcher: str
    world_size: int
    arguments: tuple[str, ...]
    """Of the program, such as the training program's --config FILE, flags, overrides."""
    cluster: Cluster | None = None
    """None: all ranks on this host."""
    port: int | None = None
    """Where ranks meet; None: any free port."""
    no_ssh: bool = False
    """Each host is started by itself."""
    node_rank: int | None = None
    """Which of the hosts this one is; None: all of them."""
    environ: Mapping[str, str] = NOTHING
    """Variables that every rank needs."""
    module: str = MODULE
    """What every rank runs, as `python -m` takes it."""


class LocalFacts(NamedTuple):
    """What this host has."""

    programs: Mapping[str, str]
    """Program to how it is called from here, for each that is installed."""
    mpi: str = ""
    """The launcher that `mpirun` is: openmpi, mpich, or the first line that it prints about itself."""
    local_hosts: frozenset[str] = frozenset()
    """The hosts of the cluster that are this machine."""
    cores: int = 1
    accelerators: int = 0
    """0: ranks run on the CPU."""
    visible_devices: tuple[str, ...] | None = None
    """The accelerators that CUDA_VISIBLE_DEVICES leaves; None: it is not set."""
    port: int = DEFAULT_PORT
    """A free port."""
    root: bool = False
    environ: Mapping[str, str] = NOTHING
    """This process's environment."""
    forwarded: Mapping[str, str] = NOTHING
    """The part of it that ranks on other hosts get."""
    folder: str = "."
    """Where the job runs, on every host."""
    job_id: str = ""
    """Tells this job's processes from others', on every host."""


class Context(NamedTuple):
    """What a launcher makes its command lines of."""

    request: Request
    facts: LocalFacts

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Empty: this one, and no hostfile."""
        return self.request.cluster.hosts if self.request.cluster else ()

    @property
    def remote(self) -> bool:
        """Whether a host is another machine than this one."""
        return any(host.name not in self.facts.local_hosts for host in self.hosts)

    @property
    def slots(self) -> int:
        """Ranks a host; the linter refuses hosts that differ."""
        return self.hosts[0].slots if self.hosts else self.request.world_size

    @property
    def master_addr(self) -> str:
        return self.hosts[0].address if self.remote else LOCALHOST

    @property
    def master_port(self) -> str:
        """The default where hosts are started apart: they agree on it without a word."""
        return str(self.request.port or (DEFAULT_PORT if self.request.no_ssh else self.facts.port))

    @property
    def environ(self) -> dict[str, str]:
        """Of every rank. Unless OMP_NUM_THREADS says otherwise, the ranks of a host share its cores."""
        threads = self.facts.environ.get("OMP_NUM_THREADS") or str(max(1, self.facts.cores // self.slots))
        forwarded = self.facts.forwarded if self.remote else {}
        return {"OMP_NUM_THREADS": threads, **forwarded, **self.request.environ}

    @property
    def devices(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES, where the same accelerators were selected on every host."""
        selected = {host.devices for host in self.hosts}
        devices = selected.pop() if len(selected) == 1 else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}

    @property
    def mpi_environ(self) -> dict[str, str]:
        """Of every rank, under a launcher that names no place to meet."""
        return {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port, **self.devices, **self.environ}

    @property
    def program(self) -> tuple[str, ...]:
        return (self.facts.programs["python"], "-m", self.request.module, *self.request.arguments)


class Launch(NamedTuple):
    """What starts a job."""

    commands: tuple[Command, ...]
    request: Request
    facts: LocalFacts
    remote: bool = False
    """Whether ranks run on other machines than this one, or may."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the ranks that it starts, in order; none where there was no need to name them."""
        hosts, node = self.request.cluster.hosts if self.request.cluster else (), self.request.node_rank
        return hosts if node is None else hosts[node : node + 1]

    @property
    def ranks(self) -> range:
        """Those that it starts: all of them, unless each host is started by itself."""
        node, count = self.request.node_rank, sum(host.slots for host in self.hosts)
        return range(self.request.world_size) if node is None else range(node * count, (node + 1) * count)
