"""Command lines: a job and its hosts to what starts one `python -m dslpar.train` a rank, under each launcher.

    facts = look_around(cluster, os.environ)     # what this host has; the only impure function here
    plan = plan_of(Request("deepspeed", 8, ("--config", "configs/gpt_3d.py")), facts)
    plan.commands[0].shell()                     # OMP_NUM_THREADS=1 deepspeed ... --num_gpus 8 ... --module ...

The flags are those that DeepSpeed 0.19, OpenMPI 5, MPICH 5 and torchrun were measured to need, on one host and on two
(FACTS 1.1 to 1.5). Slurm's line follows its manual: it was not here to run. Over several hosts each launcher is told
the hosts in its own words, takes along the variables that ranks need, and ends when a host is gone (ssh.py).
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dslpar.errors import WORLD, DslparError, Finding, Location
from dslpar.hosts import chosen, hostfile, network, nodelist
from dslpar.hosts.hostfile import Cluster, Host
from dslpar.launching import ssh
from dslpar.launching.visit import JOB, num_accelerators, num_cores

MODULE = "dslpar.train"
LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 29500
"""Where ranks meet if nobody has said it, and no port can be agreed on: every launcher's own."""
_JOB_HOSTFILE = "/job/hostfile"
"""DeepSpeed reads it where it exists, whether asked to or not."""
_FILES = "DSLPAR_FILES"
"""In a command line, the folder of its files."""
TRAVELS = ("DS_", "DSLPAR_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "UCX_")
"""How variables begin that ranks on other hosts get from here."""
_STAYS = ("DS_ENV_FILE", JOB)
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
        return f"D=$(mktemp -d); {made}" + line.replace(_FILES, '"$D"')

    def placed(self, folder: Path) -> Command:
        """Writes the files into `folder`; the command that finds them there."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        environ = {name: value.replace(_FILES, str(folder)) for name, value in self.environ.items()}
        return Command(environ, tuple(word.replace(_FILES, str(folder)) for word in self.words), self.host)


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
    findings = [*_absent(request.launcher, where), *_loopback_among(hosts), *_one_machine_twice(where)]
    findings += [*_too_few_accelerators(where), *_colons_in_addresses(where)]
    findings += [*launcher.refuses(where)]
    findings += [*_nodes(where)] if request.no_ssh else []
    if findings:
        raise DslparError(findings)
    commands = tuple(launcher.by_node(where) if request.no_ssh and elsewhere else launcher.commands(where))
    if request.node is not None and elsewhere:
        commands = commands[request.node : request.node + 1]
    return Plan(commands, request, facts, (), elsewhere or launcher.chooses_hosts)


def carrying(plan: Plan, variables: Mapping[str, str]) -> Plan:
    """The same plan, and every rank has these variables and DSLPAR_JOB, under any launcher. No line breaks in them."""
    travels = {**plan.request.travels, **variables, JOB: plan.facts.job}
    return plan_of(plan.request._replace(travels=travels), plan.facts)


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


# ---- DeepSpeed ----


def _deepspeed(where: _Where) -> Iterator[Command]:
    request, facts = where.request, where.facts
    hosts, files = _deepspeed_hosts(where)
    begin = (facts.programs["deepspeed"], "--quiet", *hosts, "--master_port", where.port, "--module", MODULE)
    if not where.elsewhere:
        yield Command(where.environ, (*begin, *request.words), files=files)
        return
    alive = " ".join([*([facts.pdsh_flags] if facts.pdsh_flags else []), *ssh.flags()])
    environ = {"PDSH_SSH_ARGS_APPEND": alive, "DS_ENV_FILE": f"{_FILES}/deepspeed_env"}
    files = {**files, "deepspeed_env": _deepspeed_env(where)}
    yield Command(environ, (*begin, *map(_for_pdsh, request.words)), files=files)


def _deepspeed_hosts(where: _Where) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags, and a hostfile in DeepSpeed's words where the user's is in others'.

    FACTS 1.1: without an address, DeepSpeed asks the host by ssh for one, even if it is this host.
    """
    request, facts, cluster = where.request, where.facts, where.request.cluster
    if cluster is not None and (where.elsewhere or cluster.chosen):
        own = cluster.as_deepspeed_reads_it
        file = ("--hostfile", cluster.path if own else f"{_FILES}/hostfile")
        choice = ("--include", chosen.as_deepspeed(cluster.hosts)) if cluster.chosen else ()
        alone = ("--force_multi",) if where.elsewhere and len(where.hosts) == 1 else ()  # else taken for this one
        known = () if where.elsewhere else ("--no_ssh_check",)
        flags = (*file, *choice, *alone, *known, "--master_addr", where.address)
        return flags, ({} if own else {"hostfile": hostfile.written(_whole(cluster))})
    if facts.accelerators and facts.visible:  # --num_gpus and slots alike would take the first, whatever is visible
        devices = ",".join(facts.visible[: request.world_size])
        return (*_no_hostfile(facts), "--include", f"localhost:{devices}"), {}
    if cluster is not None and cluster.as_deepspeed_reads_it:
        return ("--hostfile", cluster.path, "--no_ssh_check", "--master_addr", LOCALHOST), {}
    return (*_no_hostfile(facts), "--num_gpus", str(request.world_size)), {}


def _whole(cluster: Cluster) -> list[Host]:
    """Hosts with as many slots as the highest that was chosen asks for: --include is checked against them."""
    return [host._replace(slots=max(host.devices) + 1) if host.devices else host for host in cluster.hosts]


def _no_hostfile(facts: Facts) -> tuple[str, ...]:
    return ("--hostfile", os.devnull) if facts.job_hostfile else ()


def _deepspeed_by_node(where: _Where) -> Iterator[Command]:
    """As above, without pdsh: DeepSpeed's --no_ssh."""
    facts = where.facts
    hosts, files = _deepspeed_hosts(where)
    begin = (facts.programs["deepspeed"], "--quiet", *(flag for flag in hosts if flag != "--force_multi"))
    for number, host in enumerate(where.hosts):
        node = ("--no_ssh", "--node_rank", str(number), "--master_port", where.port)
        words = (*begin, *node, "--module", MODULE, *where.request.words)
        yield Command(where.environ, words, host.name, files)


def _deepspeed_env(where: _Where) -> str:
    """The user's own lines first, and the last word on what they name; DeepSpeed reads no comments and no blank lines.

    DeepSpeed puts a value into double quotes where a shell would need them, and escapes nothing in it; pdsh replaces
    %h, %n, %u and %%.
    """
    own = [line for line in where.facts.deepspeed_env if line.strip() and not line.lstrip().startswith("#")]
    named = {line.partition("=")[0].strip() for line in own}
    ours = [f"{name}={_in_quotes(value)}" for name, value in where.environ.items() if name not in named]
    return "".join(f"{line}\n" for line in [*own, *ours])


def _in_quotes(text: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", text).replace("%", "%%")


def _for_pdsh(word: str) -> str:
    """A word that DeepSpeed hands to pdsh, pdsh to ssh, and ssh to a shell, each as it likes.

    DeepSpeed puts words with spaces into double quotes, and escapes those in it; pdsh replaces %h, %n, %u and %%.
    """
    quoted = re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")


# ---- the others ----


def _openmpi(where: _Where) -> Iterator[Command]:
    request, facts = where.request, where.facts
    # Not bound to cores: OpenMPI would number local ranks by core, and refuse more ranks than cores (FACTS 1.4).
    flags = [facts.programs["mpirun"], "-np", str(request.world_size), "--bind-to", "none"]
    if where.elsewhere:
        flags += ["--host", ",".join(f"{host.name}:{host.slots}" for host in where.hosts)]
        flags += ["--map-by", f"ppr:{where.slots}:node"]
        flags += ["--prefix", facts.mpi_prefix] if facts.mpi_prefix else []
        # all ssh from here: OpenMPI cuts its flags at `=` where it hands them down a tree of hosts
        flags += ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "plm_ssh_args", shlex.join(ssh.flags())]
    elif request.world_size > facts.cores:
        flags += ["--oversubscribe"]
    flags += ["--allow-run-as-root"] if facts.root else []
    for name, value in _exported(where).items():
        flags += ["-x", f"{name}={value}"]
    yield Command({}, (*flags, *where.program))


def _exported(where: _Where) -> dict[str, str]:
    return {"MASTER_ADDR": where.address, "MASTER_PORT": where.port, **where.devices, **where.environ}


def _mpich(where: _Where) -> Iterator[Command]:
    facts = where.facts
    flags = [facts.programs["mpirun"], "-n", str(where.request.world_size), "-bind-to", "none"]
    if where.elsewhere:
        flags += ["-launcher", "ssh", "-hosts", ",".join(f"{host.name}:{host.slots}" for host in where.hosts)]
    for name, value in _exported(where).items():
        flags += ["-genv", name, value]
    alive = {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(ssh.flags())} if where.elsewhere else {}
    yield Command(alive, (*flags, *where.program))


def _slurm(where: _Where) -> Iterator[Command]:
    """MASTER_ADDR is of Slurm's list of nodes, and the port, unless asked for, of the job's number (bootstrap). Since
    22.05 srun takes the job's --cpus-per-task from its own command line alone, and a core a rank without.
    """
    nodes = str(len(where.hosts) or 1)
    flags = [where.facts.programs["srun"], "--nodes", nodes, "--ntasks", str(where.request.world_size)]
    flags += ["--ntasks-per-node", str(where.slots), "--kill-on-bad-exit=1", "--export=ALL"]
    if where.elsewhere:
        flags += ["--nodelist", nodelist.compress([host.name for host in where.hosts])]
    flags += ["--cpus-per-task", where.facts.cores_per_task] if where.facts.cores_per_task else []
    threads = {"OMP_NUM_THREADS": where.environ["OMP_NUM_THREADS"]}
    port = {"MASTER_PORT": str(where.request.port)} if where.request.port else {}
    yield Command({**threads, **port, **where.request.travels}, (*flags, *where.program))


def _torchrun(where: _Where) -> Iterator[Command]:
    """One a host; over ssh where that is another."""
    if where.elsewhere:
        for command in _torchrun_by_node(where):
            own = command.host in where.facts.here
            words = ssh.words(command.host, command.words, command.environ, where.facts.folder)
            yield command if own else Command({}, words, command.host)
        return
    begin = (where.facts.programs["torchrun"], "--nproc_per_node", str(where.slots))
    meet = ("--master_addr", LOCALHOST, "--master_port", where.port) if where.request.port else ("--standalone",)
    yield Command({**where.environ, **where.devices}, (*begin, *meet, "-m", MODULE, *where.request.words))


def _torchrun_by_node(where: _Where) -> Iterator[Command]:
    """By its module: PATH is another one there."""
    begin = (where.facts.programs["python"], "-m", "torch.distributed.run", "--nproc_per_node", str(where.slots))
    meet = ("--master_addr", where.address, "--master_port", where.port)
    for number, host in enumerate(where.hosts):
        nodes = ("--nnodes", str(len(where.hosts)), "--node_rank", str(number))
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}
        words = (*begin, *nodes, *meet, "-m", MODULE, *where.request.words)
        yield Command({**where.environ, **devices}, words, host.name)


# ---- what each launcher is ----


def _not_for_deepspeed(where: _Where) -> Iterator[Finding]:
    if where.elsewhere:
        yield from _bad_lines(where)
        yield from () if where.request.no_ssh else _paths_for_pdsh(where)
    else:
        yield from _devices_by_name(where)


def _devices_by_name(where: _Where) -> Iterator[Finding]:
    """DeepSpeed's --include takes numbers."""
    named = [word for word in where.facts.visible or () if not word.isdecimal()]
    if where.facts.accelerators and named:
        said = f"CUDA_VISIBLE_DEVICES names {named[0]}, and DeepSpeed's launcher takes numbers alone"
        yield _error("HST208", "devices-by-name", said, "--launcher torchrun, or the devices' numbers")


def _bad_lines(where: _Where) -> Iterator[Finding]:
    """DeepSpeed's own reading of .deepspeed_env takes no other lines."""
    lines = [line.strip() for line in where.facts.deepspeed_env]
    bad = [line for line in lines if line and not line.startswith("#") and "=" not in line]
    if bad:
        said = f"a line of .deepspeed_env is {bad[0]!r}, and DeepSpeed reads NAME=value alone"
        yield _error("HST218", "bad-deepspeed-env", said, "NAME=value a line")


_NOT_FOR_PDSH = re.compile(r"[^\w@%+=:,./~-]|%[hnu%]")
"""What a shell, or pdsh, reads as something else."""


def _paths_for_pdsh(where: _Where) -> Iterator[Finding]:
    """DeepSpeed has pdsh run `cd FOLDER; PYTHON ...` on the hosts, and quotes neither path."""
    for what, path in (("folder", where.facts.folder), ("Python", where.facts.programs["python"])):
        if bad := _NOT_FOR_PDSH.search(path):
            said = f"this {what} is {path}, and DeepSpeed hands the {bad[0]!r} to pdsh and a shell as it stands"
            yield _error("HST222", "path-not-for-pdsh", said, "another path, or --launcher torchrun")


def _one_choice_for_all(where: _Where) -> Iterator[Finding]:
    """One command line for all hosts has one CUDA_VISIBLE_DEVICES."""
    if len({host.devices for host in where.hosts}) > 1:
        said = f"{where.request.launcher} gives every host the same accelerators, and the choice differs"
        yield _error("HST219", "choice-of-accelerators", said, "--launcher deepspeed or torchrun")


def _no_choice(where: _Where) -> Iterator[Finding]:
    if any(host.devices for host in where.hosts):
        said = "accelerators are chosen, and Slurm gives them out itself"
        yield _error(
            "HST219", "choice-of-accelerators", said, "whole hosts in --include and --exclude, or --launcher torchrun"
        )


def _nothing(where: _Where) -> Iterator[Finding]:
    return iter(())


def _whole_job(where: _Where) -> Iterator[Command]:
    """A launcher that starts all hosts, whatever is asked for; `_nodes` has refused."""
    raise AssertionError(where.request.launcher)


class Launcher(NamedTuple):
    """A launcher: its lines, what it needs, and where that is to be had."""

    commands: Callable[[_Where], Iterator[Command]]
    needs: str
    install: str
    refuses: Callable[[_Where], Iterator[Finding]] = _nothing
    """What it would do wrong."""
    chooses_hosts: bool = False
    """Whether ranks may run elsewhere though nobody said so."""
    by_node: Callable[[_Where], Iterator[Command]] = _whole_job
    """Its lines without ssh, each for one host."""
    reaches: tuple[str, ...] = ()
    """Programs that it needs here to reach other hosts."""


LAUNCHERS: Mapping[str, Launcher] = {
    "deepspeed": Launcher(
        _deepspeed,
        "deepspeed",
        "pip install deepspeed",
        _not_for_deepspeed,
        by_node=_deepspeed_by_node,
        reaches=("pdsh", "ssh"),
    ),
    "openmpi": Launcher(
        _openmpi,
        "mpirun",
        "pip install 'dslpar[mpi]', or the system's package openmpi-bin",
        _one_choice_for_all,
        reaches=("ssh",),
    ),
    "mpich": Launcher(
        _mpich, "mpirun", "pip install mpich, or the system's package mpich", _one_choice_for_all, reaches=("ssh",)
    ),
    "slurm": Launcher(
        _slurm, "srun", "srun comes with Slurm: start this on a node of the cluster", _no_choice, chooses_hosts=True
    ),
    "torchrun": Launcher(_torchrun, "torchrun", "pip install torch", by_node=_torchrun_by_node, reaches=("ssh",)),
}


def default_launcher(facts: Facts) -> str:
    """DeepSpeed's own, on GPUs and CPUs alike: it reads hostfiles, and is there wherever the engine is."""
    return "torchrun" if "deepspeed" not in facts.programs and "torchrun" in facts.programs else "deepspeed"


# ---- what must not start ----


def _absent(name: str, where: _Where) -> Iterator[Finding]:
    launcher, facts = LAUNCHERS[name], where.facts
    others = [other for other, one in LAUNCHERS.items() if one.needs in facts.programs and _is_kind(other, facts)]
    if launcher.needs not in facts.programs:
        here = f"; here are {', '.join(others)}" if others else ""
        yield _error("HST204", "launcher-not-installed", f"{name}: no {launcher.needs} here", launcher.install + here)
    elif not _is_kind(name, facts):
        said = f"{facts.programs['mpirun']} is {facts.mpi}, and takes other flags than {name}"
        known = f"--launcher {facts.mpi}, or " if facts.mpi in LAUNCHERS else ""
        yield _error("HST205", "mpi-of-another-kind", said, known + launcher.install)
    missing = [program for program in launcher.reaches if program not in facts.programs]
    if where.elsewhere and not where.request.no_ssh and missing:
        said = f"{name}: no {' and no '.join(missing)} here, to reach other hosts"
        help_ = f"the system's packages {', '.join(_PACKAGES[one] for one in missing)}; or --no-ssh, on each host"
        yield _error("HST204", "launcher-not-installed", said, help_)


_PACKAGES = {"pdsh": "pdsh", "ssh": "openssh-client"}


def _nodes(where: _Where) -> Iterator[Finding]:
    """What cannot be started host by host."""
    request, count = where.request, len(where.hosts)
    if LAUNCHERS[request.launcher].by_node is _whole_job:
        said = f"{request.launcher} starts all hosts from one of them"
        yield _error("HST220", "not-by-host", said, "--no-ssh goes with --launcher deepspeed and torchrun")
    if request.node is not None and request.node >= count:
        said = f"--node-rank {request.node}, and there are {count} hosts, from 0"
        yield _error("HST220", "not-by-host", said, f"0 to {count - 1}")


def _is_kind(name: str, facts: Facts) -> bool:
    """Two MPIs call their launcher mpirun."""
    return LAUNCHERS[name].needs != "mpirun" or facts.mpi == name


def _loopback_among(hosts: Sequence[Host]) -> Iterator[Finding]:
    loop = [host for host in hosts if host.address in ("localhost", LOCALHOST, "::1")]
    if len(hosts) > 1 and loop:
        said = f"{loop[0].name} is another machine on each host: the others could not reach it"
        yield Finding("HST207", "localhost-among-hosts", "error", said, "its name in the network", loop[0].location)


def _one_machine_twice(where: _Where) -> Iterator[Finding]:
    """Two names of this one: the slots of one would be left out."""
    here = [host for host in where.hosts if host.name in where.facts.here]
    for host in here[1:]:
        said = f"{host.name} is the same machine as {here[0].name}: this one"
        help_ = f"one line, with all of its slots: {here[0].name} slots={here[0].slots + host.slots}"
        yield Finding("HST226", "one-machine-twice", "error", said, help_, host.location)


def _colons_in_addresses(where: _Where) -> Iterator[Finding]:
    """An IPv6 address, where the launcher takes what follows a colon for a number or a name of its own."""
    colons = [host for host in where.hosts if ":" in host.name]
    if where.elsewhere and colons and not (where.request.launcher == "torchrun" or where.request.no_ssh):
        said = f"{where.request.launcher} takes {colons[0].name} apart at its colons"
        help_ = "a name for the address (/etc/hosts, on every host), or --launcher torchrun"
        yield Finding("HST227", "colons-in-an-address", "error", said, help_, colons[0].location)


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
        mpi_prefix=_prefix(programs.get("mpirun", ""), environ),
        here=frozenset(host.name for host in (cluster.hosts if cluster else ()) if network.is_here(host.name)),
        cores=num_cores(),
        accelerators=0 if environ.get("DS_ACCELERATOR") == "cpu" else _num_accelerators(visible),
        visible=visible if environ.get("DS_ACCELERATOR") != "cpu" else None,
        threads=environ.get("OMP_NUM_THREADS"),
        cores_per_task=environ.get("SLURM_CPUS_PER_TASK", ""),
        port=network.free_port(),
        root=os.geteuid() == 0,
        job_hostfile=os.path.isfile(_JOB_HOSTFILE),
        travels={name: environ[name] for name in sorted(environ) if name.startswith(TRAVELS) and name not in _STAYS},
        deepspeed_env=tuple(_deepspeed_env_lines(environ)),
        pdsh_flags=environ.get("PDSH_SSH_ARGS_APPEND", ""),
        folder=os.getcwd(),
        job=secrets.token_hex(8),
    )


def _programs(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """By name alone where the shell would find the same. DeepSpeed's and torch's launchers are those of this Python,
    since they start it; for an MPI or Slurm, PATH has the word.
    """
    beside, path = os.path.dirname(sys.executable), environ.get("PATH", os.defpath)
    yield "python", sys.executable
    for name in dict.fromkeys(word for launcher in LAUNCHERS.values() for word in (launcher.needs, *launcher.reaches)):
        folders = (beside, path) if name in ("deepspeed", "torchrun") else (path, beside)
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            known = shutil.which(name, path=path)
            yield name, name if known and os.path.samefile(known, found) else found


def _mpi_of(mpirun: str) -> str:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60).stdout
    kinds = {"Open MPI": "openmpi", "OpenRTE": "openmpi", "HYDRA": "mpich"}
    return next((kind for words, kind in kinds.items() if words in said), said.strip().partition("\n")[0] or "unknown")


def _prefix(mpirun: str, environ: Mapping[str, str]) -> str:
    """The folder above bin/mpirun, which other hosts' PATH may not know; the system's own they know."""
    found = shutil.which(mpirun, path=environ.get("PATH", os.defpath)) if mpirun else None
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(found))) if found else ""
    return "" if prefix in ("/usr", "/usr/local", "/") else prefix


def _deepspeed_env_lines(environ: Mapping[str, str]) -> Iterator[str]:
    """Of the files that DeepSpeed would read: at home, then here."""
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in dict.fromkeys(Path(folder, name) for folder in (os.path.expanduser("~"), ".")):
        if path.is_file():
            yield from path.read_text(encoding="utf-8").splitlines()


def _visible(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    said = environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else tuple(word.strip() for word in said.split(",") if word.strip() not in ("", "-1"))


def _num_accelerators(visible: tuple[str, ...] | None) -> int:
    """Those that are visible."""
    return num_accelerators() if visible is None else min(num_accelerators(), len(visible))
