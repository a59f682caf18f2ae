"""What is to be started, on what, and by which processes: what command lines are made of, and what they become."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dslpar.cluster.hostfile import Cluster, Host
from dslpar.core.errors import Finding

MODULE = "dslpar.training"
LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 29500
"""Where ranks meet if nobody has said it, and no port can be agreed on: every launcher's own."""
FILES = "DSLPAR_FILES"
"""In a command line, the folder of its files."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Request(NamedTuple):
    """What to start."""

    launcher: str
    world_size: int
    words: tuple[str, ...]
    """Of the training program: --config FILE, flags, overrides."""
    cluster: Cluster | None = None
    """None: all ranks on this host."""
    port: int | None = None
    """Where ranks meet; None: where there is room."""
    no_ssh: bool = False
    """Each host is to be started by itself."""
    node: int | None = None
    """Which of the hosts this one is; None: all of them."""
    travels: Mapping[str, str] = NOTHING
    """Variables that every rank needs."""


class Facts(NamedTuple):
    """What this host has."""

    programs: Mapping[str, str]
    """Program to how it is called from here; one that is not installed is not in it."""
    mpi: str = ""
    """Whose `mpirun` it is: openmpi, mpich, or the first words that it says of itself."""
    mpi_prefix: str = ""
    """Where an OpenMPI that stands apart is installed."""
    here: frozenset[str] = frozenset()
    """The hosts of the cluster that are this machine."""
    cores: int = 1
    accelerators: int = 0
    """0: ranks run on the CPU."""
    visible: tuple[str, ...] | None = None
    """The accelerators that the environment leaves visible, where it says so."""
    threads: str | None = None
    """OMP_NUM_THREADS, where it is set."""
    cores_per_task: str = ""
    """Of this Slurm job, where it was asked for."""
    port: int = 29500
    """A free one, where ranks may meet."""
    root: bool = False
    job_hostfile: bool = False
    """Whether DeepSpeed would find a hostfile of its own accord."""
    travels: Mapping[str, str] = NOTHING
    """Of the environment, what ranks on other hosts get."""
    deepspeed_env: tuple[str, ...] = ()
    """The lines of the user's own .deepspeed_env files."""
    pdsh_flags: str = ""
    """The user's own PDSH_SSH_ARGS_APPEND."""
    folder: str = "."
    """Where the job runs, on every host."""
    job: str = ""
    """What tells this job's processes from others', on every host."""


class Command(NamedTuple):
    """One process to start, which starts the ranks."""

    environ: Mapping[str, str]
    """On top of what is there."""
    words: tuple[str, ...]
    host: str = ""
    """Whose ranks it starts; empty: those of all."""
    files: Mapping[str, str] = NOTHING
    """Name to text of files that it reads, in a folder that words and environment name DSLPAR_FILES; see `placed`."""

    def shell(self) -> str:
        """A line for a shell, to copy and paste."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        line = " ".join([*settings, shlex.join(self.words)])
        if not self.files:
            return line
        lines = {name: shlex.join(text.splitlines()) for name, text in self.files.items()}
        made = "".join(f"printf '%s\\n' {text} > \"$D\"/{name}; " for name, text in lines.items())
        return f"D=$(mktemp -d); {made}" + line.replace(FILES, '"$D"')

    def placed(self, folder: Path) -> Command:
        """Writes the files into `folder`; the command that finds them there."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        environ = {name: value.replace(FILES, str(folder)) for name, value in self.environ.items()}
        return Command(environ, tuple(word.replace(FILES, str(folder)) for word in self.words), self.host)


class Plan(NamedTuple):
    """What starts a job."""

    commands: tuple[Command, ...]
    request: Request
    facts: Facts
    notes: tuple[Finding, ...] = ()
    elsewhere: bool = False
    """Whether ranks run on other machines than this one, or may."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the ranks that it starts, in order; none where there was no need to name them."""
        hosts = self.request.cluster.hosts if self.request.cluster else ()
        return hosts if self.request.node is None else hosts[self.request.node : self.request.node + 1]

    @property
    def ranks(self) -> range:
        """Those that it starts; all of them, but where each host is started by itself."""
        node, count = self.request.node, sum(host.slots for host in self.hosts)
        return range(self.request.world_size) if node is None else range(node * count, (node + 1) * count)

    @property
    def hosts_elsewhere(self) -> tuple[str, ...]:
        """Those that are not this machine."""
        return tuple(host.name for host in self.hosts if host.name not in self.facts.here)

    @property
    def job(self) -> str:
        """What tells its processes from others', once it is carried."""
        return self.facts.job


class Where(NamedTuple):
    """What every launcher's lines are made of."""

    request: Request
    facts: Facts
    hosts: tuple[Host, ...]
    """Empty: this one, and no hostfile."""
    elsewhere: bool

    @property
    def slots(self) -> int:
        """Ranks a host; the linter refuses hosts that differ."""
        return self.hosts[0].slots if self.hosts else self.request.world_size

    @property
    def address(self) -> str:
        """Where ranks meet."""
        return self.hosts[0].address if self.elsewhere else LOCALHOST

    @property
    def port(self) -> str:
        """One that can be agreed on where hosts are started apart."""
        return str(self.request.port or (DEFAULT_PORT if self.request.no_ssh else self.facts.port))

    @property
    def environ(self) -> dict[str, str]:
        """Threads: unless said otherwise, ranks share the cores. Elsewhere also what this environment says."""
        threads = {"OMP_NUM_THREADS": self.facts.threads or str(max(1, self.facts.cores // self.slots))}
        return {**threads, **(self.facts.travels if self.elsewhere else {}), **self.request.travels}

    @property
    def devices(self) -> dict[str, str]:
        """Where some of the accelerators were chosen: those, if they are the same on every host."""
        chosen_ = {host.devices for host in self.hosts}
        one = chosen_.pop() if len(chosen_) == 1 else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, one))} if one else {}

    @property
    def program(self) -> tuple[str, ...]:
        return (self.facts.programs["python"], "-m", MODULE, *self.request.words)
