"""Launcher commands: turn a job and its hosts into command lines that start one `python -m dslpar.training` per rank.

    facts = local_facts.find_local_facts(cluster, os.environ)
    launch = prepare(Request("deepspeed", 8, ("--config", "configs/gpt_3d.py")), facts)
    launch.commands[0].shell()               # OMP_NUM_THREADS=1 deepspeed ... --num_gpus 8 ... --module ...

Tests with DeepSpeed 0.19, OpenMPI 5, MPICH 5 and torchrun, on one host and on two, have shown which flags are needed.
For several hosts, each launcher gets the hosts in its own syntax, forwards the variables that ranks need, and ends when
a host is gone (dslpar/cluster/ssh.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslpar.cluster.launcher import Launcher
from dslpar.cluster.launchers import LAUNCHERS
from dslpar.cluster.request import Context, Launch, LocalFacts, Request
from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError, Finding
from dslpar.launch import validation
from dslpar.launch.agent import JOB

_PACKAGES = {"pdsh": "pdsh", "ssh": "openssh-client"}
"""The system's package of each program."""


def prepare(request: Request, facts: LocalFacts) -> Launch:
    """Return the command lines of a job.

    Raises:
        DslparError: the launcher is not installed, or would start something different from the request.
    """
    context, launcher = Context(request, facts), LAUNCHERS[request.launcher]
    findings = [*_not_installed(context, launcher), *validation.findings(context, launcher)]
    findings += [*_not_host_by_host(context, launcher)] if request.no_ssh else []
    if findings:
        raise DslparError(findings)
    by_host = launcher.commands_without_ssh if request.no_ssh and context.remote else None
    commands = tuple((by_host or launcher.commands)(context))
    if request.node_rank is not None and context.remote:
        commands = commands[request.node_rank : request.node_rank + 1]
    return Launch(commands, request, facts, context.remote or bool(launcher.scheduler))


def with_environ(launch: Launch, variables: Mapping[str, str]) -> Launch:
    """Return the same launch, with these variables and DSLPAR_JOB for every rank. Values must have no line breaks."""
    environ = {**launch.request.environ, **variables, JOB: launch.facts.job_id}
    return prepare(launch.request._replace(environ=environ), launch.facts)


def default_launcher(facts: LocalFacts) -> str:
    """Return "deepspeed", for GPUs and CPUs alike: it reads hostfiles, and is installed with the engine.

    Return "torchrun" if only torchrun's program is installed.
    """
    return "torchrun" if "deepspeed" not in facts.programs and "torchrun" in facts.programs else "deepspeed"


def _not_installed(context: Context, launcher: Launcher) -> Iterator[Finding]:
    name, facts = context.request.launcher, context.facts
    if launcher.program not in facts.programs:
        others = [other for other, one in LAUNCHERS.items() if one.program in facts.programs and _is_mpi(other, facts)]
        installed = f"; installed: {', '.join(others)}" if others else ""
        yield finding("HST204", f"{name}: {launcher.program} is not installed", launcher.install + installed)
    elif not _is_mpi(name, facts):
        message = f"{facts.programs['mpirun']} is {facts.mpi}, which takes other flags than {name}"
        known = f"--launcher {facts.mpi}, or " if facts.mpi in LAUNCHERS else ""
        yield finding("HST205", message, known + launcher.install)
    missing = [program for program in launcher.remote_programs if program not in facts.programs]
    if context.remote and not context.request.no_ssh and missing:
        message = f"{name} reaches other hosts with {' and '.join(missing)}, not installed here"
        packages = ", ".join(_PACKAGES[program] for program in missing)
        yield finding("HST204", message, f"the system's packages {packages}; or --no-ssh, on each host")


def _is_mpi(name: str, facts: LocalFacts) -> bool:
    """Return whether this host's `mpirun` is that of launcher `name`; True if the launcher does not use `mpirun`.

    OpenMPI and MPICH both call their program `mpirun`.
    """
    return LAUNCHERS[name].program != "mpirun" or facts.mpi == name


def _not_host_by_host(context: Context, launcher: Launcher) -> Iterator[Finding]:
    request, count = context.request, len(context.hosts)
    if launcher.commands_without_ssh is None:
        able = " and ".join(name for name, other in LAUNCHERS.items() if other.commands_without_ssh)
        message = f"{request.launcher} starts all hosts from one of them"
        yield finding("HST220", message, f"--no-ssh goes with --launcher {able}")
    if request.node_rank is not None and request.node_rank >= count:
        yield finding(
            "HST220", f"--node-rank {request.node_rank} of {count} hosts: they count from 0", f"0 to {count - 1}"
        )
