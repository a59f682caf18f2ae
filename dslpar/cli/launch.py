"""`dslpar launch CFG`: check a config and its hosts, then print and run the launcher's command line.

The default launcher is DeepSpeed's own, for GPUs and CPUs alike: it reads hostfiles, and is installed with the engine.
If the program `deepspeed` is missing, torchrun is the default.

The phases of `run`: check flags, lint the config and find the hosts; make the command lines once, to find errors that
need no visit to the hosts; inspect the hosts; make the command lines again, with the port and the network interface
that this has found; print and run them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from dslpar.cli import arguments
from dslpar.cluster import launcher_env, network, nodelist
from dslpar.cluster.command import DEFAULT_PORT, MODULE
from dslpar.cluster.hostfile import Cluster
from dslpar.cluster.launchers import LAUNCHERS
from dslpar.cluster.request import Launch, LocalFacts, Request
from dslpar.core import requirements
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.core.project import add_trust
from dslpar.language.load import Config
from dslpar.launch import commands, preflight, supervise
from dslpar.launch.host_findings import HostChecks, port_taken
from dslpar.launch.local_facts import find_local_facts
from dslpar.layout.resolve import Job
from dslpar.parity import certificate
from dslpar.reporting import run_dir
from dslpar.schema import paths

EPILOG = """\
Without a hostfile all ranks run on this host, one per accelerator unless --world-size is given.
With a hostfile they are started on its hosts over ssh (deepspeed: pdsh) or by srun. This folder and
this Python must have the same path on all hosts. --hostfile slurm and pbs, and --launcher slurm,
which finds the hosts of its job by itself, follow the manuals and are untested on a cluster.
docs/hosts.md lists what each launcher gets, and why.

With --prove the ranks run `dslpar prove CFG --on-devices` instead of the training program: they
compare the job's first step with one process, and write only --certificate.

Before anything starts, all hosts are inspected at once (ssh, versions, config, output folder,
accelerators, port), and then try to connect to the first one. The launcher's command line is
printed to stderr, with --print to stdout.

exit status: 0 every rank ended in order, 1 the job cannot run or a rank failed, 2 wrong usage, 75
(train.requeue_status) the job stopped on request (start it again with --resume), 128 + n signal n
ended it. With --prove: 0 proved, 1 something differs or a rank failed, 2 lint or the build refuses
the layout, or wrong usage. The last lines name the rank that failed first, and the reason: see
docs/faults.md."""

_TRAINING_FLAGS = {
    "--resume": "continue from the newest checkpoint; if there is none, start at step 0",
    "--eval-only": "print the newest checkpoint's held-out loss, and exit",
    "--dry-run": "build the model on every rank, and exit before the first step",
}
"""Flags that are passed on to the training program."""
_PROVE_FLAGS = ("--small", "--certificate", "--format")
"""Flags that are passed on to `dslpar prove`."""


class _Prepared(NamedTuple):
    """A request to launch a job, with the job, its config, and the facts about this host."""

    job: Job
    config: Config
    request: Request
    facts: LocalFacts
    sources: dict[str, str]
    """Texts by path, such as the hostfile's, that findings may point into."""

    @property
    def by_scheduler(self) -> bool:
        """Return whether the launcher starts ranks on a scheduler's hosts, which may not accept ssh."""
        return bool(LAUNCHERS[self.request.launcher].scheduler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    arguments.add_operands(parser)
    arguments.add_world(parser)
    add_trust(parser)
    add = parser.add_argument
    add("--launcher", choices=tuple(LAUNCHERS), help="default: deepspeed, or torchrun if deepspeed is missing")
    help = "port where ranks connect; default: a free one of the first host (--no-ssh: 29500, slurm: by the job id)"
    add("--master-port", type=_port, metavar="P", help=help)
    add("--no-ssh", action="store_true", help="start only this host's ranks; run the command on every host")
    index = partial(arguments.whole_number, least=0)
    add("--node-rank", type=index, metavar="K", help="with --no-ssh: the index of this host, from 0")
    add("--check", action="store_true", help="inspect the hosts, print a table of them, and start nothing")
    add("--no-checks", action="store_true", help="start without inspecting the hosts; the config is still checked")
    add("--print", action="store_true", help="print the command lines, and start nothing")
    for flag, help in _TRAINING_FLAGS.items():
        add(flag, action="append_const", dest="training_flags", const=flag, default=[], help=help)
    add("--prove", action="store_true", help="prove the layout on the job's ranks instead of training")
    add("--small", action="store_true", help="with --prove: shrink the model and the batch")
    add("--certificate", metavar="FILE", help="with --prove: write the result to FILE as JSON")
    add("--format", choices=("text", "json"), help="with --prove: output format of the result; default: text")


def _port(text: str) -> int:
    number = arguments.whole_number(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535, the last port")
    return number


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check, print, and run the job to its end."""
    if args.node_rank is not None and not args.no_ssh:
        parser.error("--node-rank goes with --no-ssh")
    _refuse_flags_of_another_program(args, parser)
    prepared = _prepare(args, parser)
    if prepared and _checks_paths(args, prepared.request.cluster, prepared.facts):  # ranks run this Python, here
        missing = requirements.explain_missing("dslpar launch", "torch", "deepspeed")
        if missing:
            sys.stderr.write(missing + "\n")
            return 2
    if prepared is None:
        return certificate.STATUS[certificate.REFUSED] if args.prove else 1
    try:
        _refuse_launched_twice(args)
        _check_paths(args, prepared)
        commands.prepare(prepared.request, prepared.facts)  # to find errors before any host is visited
        prepared = _check_hosts(args, prepared)
        launch = commands.prepare(prepared.request, prepared.facts)
        if args.no_ssh and args.node_rank is None and launch.remote and not (args.print or args.check):
            parser.error("--no-ssh starts the ranks of one host: --node-rank K, or --print for the lines of all hosts")
        if not args.check or args.print:
            _print_commands(launch, to_stdout=args.print)
        return 0 if args.print or args.check else supervise.run(launch, prepared.job)
    except DslparError as error:
        arguments.print_findings(error.findings, prepared.sources)
        return 1


def _refuse_flags_of_another_program(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with a usage error if a flag of training is given with --prove, or a flag of `prove` without it."""
    if args.prove and args.training_flags:
        parser.error(f"{args.training_flags[0]} is a flag of training, and --prove starts no training")
    for flag in _PROVE_FLAGS:
        if getattr(args, flag[2:]) and not args.prove:
            parser.error(f"{flag} goes with --prove")


def _check_paths(args: argparse.Namespace, prepared: _Prepared) -> None:
    """Check that the files and folders that the config names are here, if this host runs ranks.

    Raises:
        DslparError: some are missing.
    """
    job = prepared.job
    if not _checks_paths(args, prepared.request.cluster, prepared.facts):
        return
    named = [*paths.named_paths(job.spec, job.path)]
    if {"--resume", "--eval-only"} & {*args.training_flags} and (stored := paths.resumed_checkpoint(job.spec)):
        named.append(stored)
    try:
        paths.check(named, job.path)
    except DslparError as error:
        raise DslparError(prepared.config.at_keys(error.findings)) from None


def _checks_paths(args: argparse.Namespace, cluster: Cluster | None, facts: LocalFacts) -> bool:
    """Return whether this host runs ranks, so that missing paths are errors: the job's other hosts may have others."""
    runs_here = cluster is None or any(host.name in facts.local_hosts for host in cluster.hosts)
    return runs_here and (args.check or not args.print)


_OF_MISSING_PATHS = ("BAT111", "CKP102")
"""Lint's warnings of missing paths."""


def _refuse_launched_twice(args: argparse.Namespace) -> None:
    """Raise DslparError if `srun` or `mpirun` has started several of this process: each would start the whole job."""
    variables = launcher_env.starts_several(os.environ)
    if variables is not None and not (args.no_ssh or args.print or args.check):
        launcher = launcher_env.titles(variables)
        message = f"{launcher} started this as one of several processes, each of which would start the whole job"
        program = "dslpar prove CFG --on-devices" if args.prove else "dslpar.training --config CFG"
        hint = (
            f"run dslpar launch by itself, once; or have the launcher run python -m {program};"
            f" if its variables are left over: unset {variables.names()}"
        )
        raise_finding("HST228", message, hint)


def _prepare(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _Prepared | None:
    """Read the command line, the hosts and the config, and print findings. Return None if a finding is an error."""
    sources: dict[str, str] = {}
    scheduler = LAUNCHERS[args.launcher].scheduler if args.launcher else ""
    if args.hostfile is None and scheduler and nodelist.is_inside(scheduler, os.environ):
        args.hostfile = scheduler  # srun starts ranks on the hosts of its job
    cluster = arguments.load_cluster(args, parser, sources)
    (config,) = arguments.load_configs(args, parser)
    facts = find_local_facts(cluster, os.environ)
    world_size = args.world_size or (cluster.world_size if cluster else None) or facts.accelerators
    if not world_size:
        if arguments.print_if_unreadable(config):
            return None
        parser.error("this host has no accelerators to count: give --world-size N or --hostfile FILE")
    if args.no_ssh and cluster is None:
        parser.error("--no-ssh needs the hosts: --hostfile FILE")
    if args.no_ssh and args.check and not facts.local_hosts:
        parser.error("--no-ssh --check inspects this host, but --hostfile does not list it")
    later = _OF_MISSING_PATHS if _checks_paths(args, cluster, facts) else ()
    job = arguments.resolve_or_print(config, world_size, cluster, sources, reported_later=later)
    if job is None:
        return None
    notes = [*_unused_allocation(args), *_idle_accelerators(cluster, facts)]
    if (args.print or args.check) and not args.prove:  # otherwise the ranks report it
        loads = bool({"--resume", "--eval-only"} & {*args.training_flags})
        notes += run_dir.unused_checkpoint(job, config, loads=loads)
    arguments.print_findings(notes, config.sources)
    module, program = _program(args, config)
    name = args.launcher or commands.default_launcher(facts)
    request = Request(name, world_size, program, cluster, args.master_port, args.no_ssh, args.node_rank, module=module)
    return _Prepared(job, config, request, facts, sources)


def _program(args: argparse.Namespace, config: Config) -> tuple[str, tuple[str, ...]]:
    """Return the module that every rank runs, and its arguments."""
    words = [word for package in args.trust for word in ("--trust", package)] + arguments.overrides(args)
    if not args.prove:
        return MODULE, ("--config", config.path, *args.training_flags, *words)
    flags = ["--small"] if args.small else []
    for flag in ("--certificate", "--format"):
        flags += [flag, value] if (value := getattr(args, flag[2:])) else []
    return "dslpar", ("prove", config.path, "--on-devices", *flags, *words)


def _idle_accelerators(cluster: Cluster | None, facts: LocalFacts) -> Iterator[Finding]:
    """Warn if the scheduler's allocation has fewer ranks than accelerators on this host.

    Schedulers give a host one task by default.
    """
    for host in cluster.hosts if cluster and not cluster.from_file else ():
        if host.name in facts.local_hosts and host.devices is None and host.slots < facts.accelerators:
            message = f"{host.slots} ranks on {host.name}, which has {facts.accelerators} accelerators"
            hint = f"sbatch --ntasks-per-node={facts.accelerators}; PBS: mpiprocs={facts.accelerators}"
            yield finding("HST225", message, hint, host.location)


def _unused_allocation(args: argparse.Namespace) -> Iterator[Finding]:
    """Note that all ranks start here, although the scheduler has given this job other hosts."""
    found = nodelist.find_allocation(os.environ) if args.hostfile is None else None
    hosts = [host for host, _ in found[1].hosts] if found else []
    if found and not (len(hosts) == 1 and network.is_here(hosts[0])):
        message = f"all ranks start on this host, not on those of {found[1].source}: {nodelist.compress(hosts)}"
        yield finding("HST223", message, f"--hostfile {found[0]}")


# ---- the hosts, before anything starts ----


def _check_hosts(args: argparse.Namespace, prepared: _Prepared) -> _Prepared:
    """Inspect the hosts if needed, and print the findings, with --check also a table.

    Return the request with the port, the number of cores and the network interface that the inspection has found.

    Raises:
        DslparError: the job would not run on these hosts.
    """
    cluster, facts = prepared.request.cluster, prepared.facts
    remote = cluster is not None and any(host.name not in facts.local_hosts for host in cluster.hosts)
    starts = remote and not (args.print or args.no_checks or args.no_ssh or prepared.by_scheduler)
    if cluster is None or not (args.check or starts):
        _check_own_port(args, prepared)
        return _with_interface(prepared, _own_interface(args, cluster, facts))
    hosts = tuple(host for host in cluster.hosts if not args.no_ssh or host.name in facts.local_hosts)
    checks = HostChecks(
        files=[path for path in prepared.config.sources if os.path.isfile(path)],
        paths=[*filter(None, (each.on_hosts for each in paths.named_paths(prepared.job.spec, prepared.job.path)))],
        output_dir=prepared.job.output_dir,
        port=prepared.request.port,
        local_hosts=facts.local_hosts,
        environ=facts.forwarded,
        on_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
    )
    result = preflight.check_hosts(hosts, checks)
    if args.check:
        ready = "" if has_errors(result.findings) else f"ready for {sum(host.slots for host in hosts)} ranks\n"
        sys.stdout.write(result.table() + ready)
        sys.stdout.flush()
    if has_errors(result.findings):
        raise DslparError(result.findings)
    arguments.print_findings(result.findings, prepared.sources)
    port = facts.port if args.no_ssh else result.port or facts.port
    cores = min((one.report.cores for one in result.results if one.report), default=facts.cores)
    return _with_interface(prepared._replace(facts=facts._replace(port=port, cores=cores)), result.interface)


def _check_own_port(args: argparse.Namespace, prepared: _Prepared) -> None:
    """Check that the port at which rank 0 will listen is free, if rank 0 runs on this host and the port is fixed.

    The port is fixed by --master-port. With --no-ssh the default port is fixed as well, because the hosts cannot agree
    on a free one.

    Raises:
        DslparError: another process listens at this port.
    """
    request, facts = prepared.request, prepared.facts
    port = request.port or (DEFAULT_PORT if request.no_ssh else 0)
    is_here = request.cluster is None or request.cluster.hosts[0].name in facts.local_hosts
    starts = is_here and not (args.print or request.node_rank or prepared.by_scheduler)
    if port and starts and not network.is_free(port):
        taken = port_taken("this host", port, facts.port)
        on_all = f"--master-port {facts.port}, on every host"
        raise DslparError([taken._replace(help=on_all) if request.no_ssh else taken])


def _own_interface(args: argparse.Namespace, cluster: Cluster | None, facts: LocalFacts) -> str:
    """Return this host's network interface towards the other hosts, if --node-rank starts only this host's ranks.

    Otherwise return an empty string: interface names may differ between hosts, and the other hosts were not inspected.
    Ranks then find their host's interface themselves (dslpar/distributed/bootstrap.py).
    """
    others = [host.address for host in cluster.hosts if host.name not in facts.local_hosts] if cluster else []
    with contextlib.suppress(OSError):
        return network.interface_to(others[0]) if others and args.node_rank is not None else ""
    return ""


def _with_interface(prepared: _Prepared, interface: str) -> _Prepared:
    """Make ranks use a network interface, unless the forwarded environment already names one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    variables = {name: interface for name in names if interface and name not in prepared.facts.forwarded}
    request = prepared.request
    return prepared._replace(request=request._replace(environ={**variables, **request.environ}))


def _print_commands(launch: Launch, *, to_stdout: bool) -> None:
    """Print the command lines as a shell script that runs them concurrently.

    With --no-ssh, each line is meant for another host, and is printed below the host's name.
    """
    out = sys.stdout if to_stdout else sys.stderr
    together = len(launch.commands) > 1 and not launch.request.no_ssh
    for command in launch.commands:
        if command.host:
            out.write(f"# {'on' if launch.request.no_ssh else 'for'} {command.host}\n")
        out.write(command.shell() + (" &" if together else "") + "\n")
    out.write("wait\n" if together else "")
    out.flush()
