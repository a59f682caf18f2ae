"""Command lines: a job and its hosts to what starts one `python -m dslpar.training` a rank, under each launcher.

    facts = look_around(cluster, os.environ)     # what this host has (here.py); all else is pure
    plan = plan_of(Request("deepspeed", 8, ("--config", "configs/gpt_3d.py")), facts)
    plan.commands[0].shell()                     # OMP_NUM_THREADS=1 deepspeed ... --num_gpus 8 ... --module ...

The flags are those that DeepSpeed 0.19, OpenMPI 5, MPICH 5 and torchrun were measured to need, on one host and on two
(FACTS 1.1 to 1.5). Slurm's line follows its manual: it was not here to run. Over several hosts each launcher is told
the hosts in its own words, takes along the variables that ranks need, and ends when a host is gone (ssh.py).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dslpar.cluster import filter, hostfile, nodelist
from dslpar.cluster.hostfile import Cluster, Host
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.launch import ssh, validation
from dslpar.launch.agent import JOB
from dslpar.launch.job import FILES, LOCALHOST, MODULE, Command, Facts, Plan, Request, Where

# ---- the pure part ----


def plan_of(request: Request, facts: Facts) -> Plan:
    """The command lines of a job; most launchers need one.

    Raises:
        DslparError: the launcher is not here, or would start something else than what was asked for.
    """
    launcher = LAUNCHERS[request.launcher]
    hosts = request.cluster.hosts if request.cluster else ()
    elsewhere = any(host.name not in facts.here for host in hosts)
    where = Where(request, facts, hosts, elsewhere)
    findings = [
        *_absent(request.launcher, where),
        *validation.loopback_among(hosts),
        *validation.one_machine_twice(where),
    ]
    findings += [*validation.too_few_accelerators(where), *validation.colons_in_addresses(where)]
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


# ---- DeepSpeed ----


def _deepspeed(where: Where) -> Iterator[Command]:
    request, facts = where.request, where.facts
    hosts, files = _deepspeed_hosts(where)
    begin = (facts.programs["deepspeed"], "--quiet", *hosts, "--master_port", where.port, "--module", MODULE)
    if not where.elsewhere:
        yield Command(where.environ, (*begin, *request.words), files=files)
        return
    alive = " ".join([*([facts.pdsh_flags] if facts.pdsh_flags else []), *ssh.flags()])
    environ = {"PDSH_SSH_ARGS_APPEND": alive, "DS_ENV_FILE": f"{FILES}/deepspeed_env"}
    files = {**files, "deepspeed_env": _deepspeed_env(where)}
    yield Command(environ, (*begin, *map(_for_pdsh, request.words)), files=files)


def _deepspeed_hosts(where: Where) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags, and a hostfile in DeepSpeed's words where the user's is in others'.

    FACTS 1.1: without an address, DeepSpeed asks the host by ssh for one, even if it is this host.
    """
    request, facts, cluster = where.request, where.facts, where.request.cluster
    if cluster is not None and (where.elsewhere or cluster.chosen):
        own = cluster.as_deepspeed_reads_it
        file = ("--hostfile", cluster.path if own else f"{FILES}/hostfile")
        choice = ("--include", filter.as_deepspeed(cluster.hosts)) if cluster.chosen else ()
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


def _deepspeed_by_node(where: Where) -> Iterator[Command]:
    """As above, without pdsh: DeepSpeed's --no_ssh."""
    facts = where.facts
    hosts, files = _deepspeed_hosts(where)
    begin = (facts.programs["deepspeed"], "--quiet", *(flag for flag in hosts if flag != "--force_multi"))
    for number, host in enumerate(where.hosts):
        node = ("--no_ssh", "--node_rank", str(number), "--master_port", where.port)
        words = (*begin, *node, "--module", MODULE, *where.request.words)
        yield Command(where.environ, words, host.name, files)


def _deepspeed_env(where: Where) -> str:
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


def _openmpi(where: Where) -> Iterator[Command]:
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


def _exported(where: Where) -> dict[str, str]:
    return {"MASTER_ADDR": where.address, "MASTER_PORT": where.port, **where.devices, **where.environ}


def _mpich(where: Where) -> Iterator[Command]:
    facts = where.facts
    flags = [facts.programs["mpirun"], "-n", str(where.request.world_size), "-bind-to", "none"]
    if where.elsewhere:
        flags += ["-launcher", "ssh", "-hosts", ",".join(f"{host.name}:{host.slots}" for host in where.hosts)]
    for name, value in _exported(where).items():
        flags += ["-genv", name, value]
    alive = {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(ssh.flags())} if where.elsewhere else {}
    yield Command(alive, (*flags, *where.program))


def _slurm(where: Where) -> Iterator[Command]:
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


def _torchrun(where: Where) -> Iterator[Command]:
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


def _torchrun_by_node(where: Where) -> Iterator[Command]:
    """By its module: PATH is another one there."""
    begin = (where.facts.programs["python"], "-m", "torch.distributed.run", "--nproc_per_node", str(where.slots))
    meet = ("--master_addr", where.address, "--master_port", where.port)
    for number, host in enumerate(where.hosts):
        nodes = ("--nnodes", str(len(where.hosts)), "--node_rank", str(number))
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}
        words = (*begin, *nodes, *meet, "-m", MODULE, *where.request.words)
        yield Command({**where.environ, **devices}, words, host.name)


# ---- what each launcher is ----


def _nothing(where: Where) -> Iterator[Finding]:
    return iter(())


def _whole_job(where: Where) -> Iterator[Command]:
    """A launcher that starts all hosts, whatever is asked for; `_nodes` has refused."""
    raise AssertionError(where.request.launcher)


class Launcher(NamedTuple):
    """A launcher: its lines, what it needs, and where that is to be had."""

    commands: Callable[[Where], Iterator[Command]]
    needs: str
    install: str
    refuses: Callable[[Where], Iterator[Finding]] = _nothing
    """What it would do wrong."""
    chooses_hosts: bool = False
    """Whether ranks may run elsewhere though nobody said so."""
    by_node: Callable[[Where], Iterator[Command]] = _whole_job
    """Its lines without ssh, each for one host."""
    reaches: tuple[str, ...] = ()
    """Programs that it needs here to reach other hosts."""


LAUNCHERS: Mapping[str, Launcher] = {
    "deepspeed": Launcher(
        _deepspeed,
        "deepspeed",
        "pip install deepspeed",
        validation.for_deepspeed,
        by_node=_deepspeed_by_node,
        reaches=("pdsh", "ssh"),
    ),
    "openmpi": Launcher(
        _openmpi,
        "mpirun",
        "pip install 'dslpar[mpi]', or the system's package openmpi-bin",
        validation.one_choice_for_all,
        reaches=("ssh",),
    ),
    "mpich": Launcher(
        _mpich,
        "mpirun",
        "pip install mpich, or the system's package mpich",
        validation.one_choice_for_all,
        reaches=("ssh",),
    ),
    "slurm": Launcher(
        _slurm,
        "srun",
        "srun comes with Slurm: start this on a node of the cluster",
        validation.no_choice,
        chooses_hosts=True,
    ),
    "torchrun": Launcher(_torchrun, "torchrun", "pip install torch", by_node=_torchrun_by_node, reaches=("ssh",)),
}


def default_launcher(facts: Facts) -> str:
    """DeepSpeed's own, on GPUs and CPUs alike: it reads hostfiles, and is there wherever the engine is."""
    return "torchrun" if "deepspeed" not in facts.programs and "torchrun" in facts.programs else "deepspeed"


# ---- what must not start ----


def _absent(name: str, where: Where) -> Iterator[Finding]:
    launcher, facts = LAUNCHERS[name], where.facts
    others = [other for other, one in LAUNCHERS.items() if one.needs in facts.programs and _is_kind(other, facts)]
    if launcher.needs not in facts.programs:
        here = f"; here are {', '.join(others)}" if others else ""
        yield finding("HST204", f"{name}: no {launcher.needs} here", launcher.install + here)
    elif not _is_kind(name, facts):
        message = f"{facts.programs['mpirun']} is {facts.mpi}, and takes other flags than {name}"
        known = f"--launcher {facts.mpi}, or " if facts.mpi in LAUNCHERS else ""
        yield finding("HST205", message, known + launcher.install)
    missing = [program for program in launcher.reaches if program not in facts.programs]
    if where.elsewhere and not where.request.no_ssh and missing:
        message = f"{name}: no {' and no '.join(missing)} here, to reach other hosts"
        hint = f"the system's packages {', '.join(_PACKAGES[one] for one in missing)}; or --no-ssh, on each host"
        yield finding("HST204", message, hint)


_PACKAGES = {"pdsh": "pdsh", "ssh": "openssh-client"}


def _nodes(where: Where) -> Iterator[Finding]:
    """What cannot be started host by host."""
    request, count = where.request, len(where.hosts)
    if LAUNCHERS[request.launcher].by_node is _whole_job:
        message = f"{request.launcher} starts all hosts from one of them"
        yield finding("HST220", message, "--no-ssh goes with --launcher deepspeed and torchrun")
    if request.node is not None and request.node >= count:
        message = f"--node-rank {request.node}, and there are {count} hosts, from 0"
        yield finding("HST220", message, f"0 to {count - 1}")


def _is_kind(name: str, facts: Facts) -> bool:
    """Two MPIs call their launcher mpirun."""
    return LAUNCHERS[name].needs != "mpirun" or facts.mpi == name


# ---- this host ----
