"""Launch requests: the job to start, the facts about this host, and the context from which launchers make commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dslpar.cluster.command import DEFAULT_PORT, LOCALHOST, MODULE, NOTHING, Command
from dslpar.cluster.hostfile import Cluster, Host


class Request(NamedTuple):
    """A request to start a job."""

    launcher: str
    world_size: int
    arguments: tuple[str, ...]
    """Arguments of the program, such as the training program's --config FILE, flags and overrides."""
    cluster: Cluster | None = None
    """None: all ranks on this host."""
    port: int | None = None
    """The port at which ranks connect to each other; None: any free port."""
    no_ssh: bool = False
    """Whether each host is started separately, without ssh."""
    node_rank: int | None = None
    """The index of the host to start; None: all hosts."""
    environ: Mapping[str, str] = NOTHING
    """Variables that every rank needs."""
    module: str = MODULE
    """The module that every rank runs with `python -m`."""


class LocalFacts(NamedTuple):
    """Facts about this host."""

    programs: Mapping[str, str]
    """The command for each installed program, by the program's name."""
    mpi: str = ""
    """The kind of `mpirun`: openmpi, mpich, or the first line of its version text."""
    local_hosts: frozenset[str] = frozenset()
    """Names of the cluster's hosts that mean this machine."""
    cores: int = 1
    accelerators: int = 0
    """The number of accelerators that ranks may use; 0: ranks run on the CPU."""
    visible_devices: tuple[str, ...] | None = None
    """The accelerators in CUDA_VISIBLE_DEVICES; None: it is not set."""
    port: int = DEFAULT_PORT
    """A free port."""
    root: bool = False
    """Whether this process runs as root."""
    environ: Mapping[str, str] = NOTHING
    """This process's environment."""
    forwarded: Mapping[str, str] = NOTHING
    """The part of `environ` that is forwarded to ranks on other hosts."""
    folder: str = "."
    """The folder in which the job runs, on every host."""
    job_id: str = ""
    """Identifies this job's processes on every host."""


class Context(NamedTuple):
    """Input from which a launcher makes its command lines."""

    request: Request
    facts: LocalFacts

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The job's hosts; empty without a hostfile: all ranks run on this host."""
        return self.request.cluster.hosts if self.request.cluster else ()

    @property
    def remote(self) -> bool:
        """Return whether any host is a different machine from this one."""
        return any(host.name not in self.facts.local_hosts for host in self.hosts)

    @property
    def slots(self) -> int:
        """The number of ranks per host. The linter refuses hosts with different numbers."""
        return self.hosts[0].slots if self.hosts else self.request.world_size

    @property
    def master_addr(self) -> str:
        return self.hosts[0].address if self.remote else LOCALHOST

    @property
    def master_port(self) -> str:
        """The requested port, or else a free one. Hosts that are started separately use the default port, to agree."""
        return str(self.request.port or (DEFAULT_PORT if self.request.no_ssh else self.facts.port))

    @property
    def environ(self) -> dict[str, str]:
        """Variables of every rank. Unless OMP_NUM_THREADS is set, a host's ranks share its cores equally."""
        threads = self.facts.environ.get("OMP_NUM_THREADS") or str(max(1, self.facts.cores // self.slots))
        forwarded = self.facts.forwarded if self.remote else {}
        return {"OMP_NUM_THREADS": threads, **forwarded, **self.request.environ}

    @property
    def devices(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES, if the same accelerators are selected on every host; otherwise empty."""
        selected = {host.devices for host in self.hosts}
        devices = selected.pop() if len(selected) == 1 else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}

    @property
    def mpi_environ(self) -> dict[str, str]:
        """Variables of every rank under a launcher that sets no MASTER_ADDR and MASTER_PORT."""
        return {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port, **self.devices, **self.environ}

    @property
    def program(self) -> tuple[str, ...]:
        return (self.facts.programs["python"], "-m", self.request.module, *self.request.arguments)


class Launch(NamedTuple):
    """The commands that start a job, with their request."""

    commands: tuple[Command, ...]
    request: Request
    facts: LocalFacts
    remote: bool = False
    """Whether ranks run, or may run, on other machines."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the ranks that it starts, in order; empty if the request names no hosts."""
        hosts, node = self.request.cluster.hosts if self.request.cluster else (), self.request.node_rank
        return hosts if node is None else hosts[node : node + 1]

    @property
    def ranks(self) -> range:
        """The ranks that it starts: all, or those of one host if `node_rank` is given."""
        node, count = self.request.node_rank, sum(host.slots for host in self.hosts)
        return range(self.request.world_size) if node is None else range(node * count, (node + 1) * count)
