"""`dslpar launch CFG`: checks a config against its hosts, and the hosts against each other; prints what it runs, and
runs it.

The launcher is DeepSpeed's own unless another is asked for, on GPUs and CPUs alike: it reads hostfiles, and is there
wherever the engine is. Where its program is missing, torchrun takes its place.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from dslpar.cli import arguments as cli_arguments
from dslpar.cluster import launchers, network, nodelist
from dslpar.cluster.hostfile import Cluster
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding, has_errors
from dslpar.language.load import Config
from dslpar.launch import commands as launch_commands
from dslpar.launch import preflight, supervise
from dslpar.launch.commands import LAUNCHERS
from dslpar.launch.job import DEFAULT_PORT, Facts, Plan, Request
from dslpar.launch.local_facts import look_around
from dslpar.layout.resolve import Job
from dslpar.linter.report import text as report_text
from dslpar.reporting import run_dir

EPILOG = """\
Without a hostfile all ranks are on this host, one an accelerator unless N says otherwise. With one,
they start on its hosts over ssh (deepspeed: pdsh) or srun; this folder and this Python are at the
same path on all of them. --hostfile slurm and pbs, and --launcher slurm, which takes the hosts of
its job by itself, follow the manuals, and are untested on a cluster. docs/hosts.md has what
each launcher is told, and why.

Before anything starts, all hosts are visited at once: ssh, versions, config, output folder,
accelerators, port; then they try to meet there. The launcher's command line goes to stderr,
with --print to stdout.

exit status: 0 every rank ended in order, 1 the job cannot run or a rank failed, 2 usage, 75
(train.requeue_status) told to stop, and saved: start it again with --resume, 128 + n ended by
signal n. The last lines say which rank was the first to fail, and why: docs/faults.md."""

_PASSED = {
    "--resume": "go on from the newest checkpoint; where there is none, start at step 0",
    "--eval-only": "print the held-out loss of the newest checkpoint, and stop",
    "--dry-run": "build on every rank, and stop before the first step",
}
"""Flags of the training program."""


class _Asked(NamedTuple):
    """What is to be launched."""

    job: Job
    config: Config
    request: Request
    facts: Facts
    sources: dict[str, str]
    """The texts that findings point into."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.epilog = EPILOG
    cli_arguments.config_argument(parser)
    cli_arguments.world_arguments(parser)
    add = parser.add_argument
    add("--launcher", choices=tuple(LAUNCHERS), help="default: deepspeed; torchrun where it is missing")
    add("--master-port", type=_port, metavar="P", help="where ranks meet; default: a free port of the first host")
    add("--no-ssh", action="store_true", help="no host is reached from here: run this on each of them")
    add("--node-rank", type=_node, metavar="K", help="with --no-ssh: which of the hosts this is, from 0")
    add("--check", action="store_true", help="visit the hosts, say what is there, and start nothing")
    add("--no-checks", action="store_true", help="start without visiting the hosts; the config is checked all the same")
    add("--print", action="store_true", help="print the command lines and start nothing")
    for flag, hint in _PASSED.items():
        add(flag, action="append_const", dest="passed", const=flag, default=[], help=hint)


def _port(text: str) -> int:
    number = cli_arguments.count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is over 65535, the last port")
    return number


def _node(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, from 0")
    return int(text)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Checks, prints, and runs to the end."""
    if args.node_rank is not None and not args.no_ssh:
        parser.error("--node-rank goes with --no-ssh")
    asked = _asked(args, parser)
    if asked is None:
        return 1
    try:
        _demand_one_start(args)
        launch_commands.plan_of(asked.request, asked.facts)  # before anybody is asked over the network
        asked = _visited(args, asked)
        plan = launch_commands.plan_of(asked.request, asked.facts)
    except DslparError as error:
        sys.stderr.write(report_text.text(error.findings, asked.sources))
        return 1
    if args.no_ssh and args.node_rank is None and plan.elsewhere and not (args.print or args.check):
        parser.error("--no-ssh starts the ranks of one host: --node-rank K, or --print for the lines of all")
    if not args.check or args.print:
        _say(plan, to_stdout=args.print)
    return 0 if args.print or args.check else supervise.run(plan, asked.job)


def _demand_one_start(args: argparse.Namespace) -> None:
    """`srun dslpar launch` and `mpirun dslpar launch` would start the whole job once a rank.

    Raises:
        DslparError: this is one of several processes that a launcher has started, and is not for its host alone.
    """
    launcher = launchers.launched_by(os.environ)
    if launcher and not (args.no_ssh or args.print or args.check):
        message = f"{launcher} has started this as one of several processes, and each of them would start the whole job"
        hint = "dslpar launch by itself, once; or python -m dslpar.training --config CFG in its place, as it is"
        raise_finding("HST228", message, hint)


def _asked(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _Asked | None:
    """None where lint finds an error; findings go to stderr."""
    sources: dict[str, str] = {}
    if args.hostfile is None and args.launcher == "slurm" and nodelist.slurm_source(os.environ):
        args.hostfile = "slurm"  # srun starts ranks on the hosts of its job: those are meant
    cluster = cli_arguments.cluster(args, parser, sources)
    config = cli_arguments.one_config(args, parser)
    facts = look_around(cluster, os.environ)
    world_size = args.world_size or (cluster.world_size if cluster else None) or facts.accelerators
    if not world_size:
        parser.error("this host has no accelerators to count: --world-size N, or --hostfile FILE")
    if args.no_ssh and cluster is None:
        parser.error("--no-ssh needs the hosts: --hostfile FILE")
    if args.no_ssh and args.check and not facts.here:
        parser.error("--no-ssh --check looks at this host, and it is none of those of --hostfile")
    job = cli_arguments.job_or_findings(config, world_size, cluster, sources)
    if job is None:
        return None
    notes = [*_unused_hosts(args), *_idle_accelerators(cluster, facts), *_unused_checkpoint(args, config, job)]
    if notes:
        sys.stderr.write(report_text.text(notes, dict(config.sources)))
    program = ("--config", config.path, *args.passed, *cli_arguments.overrides(args))
    name = args.launcher or launch_commands.default_launcher(facts)
    request = Request(name, world_size, program, cluster, args.master_port, args.no_ssh, args.node_rank)
    return _Asked(job, config, request, facts, sources)


def _idle_accelerators(cluster: Cluster | None, facts: Facts) -> Iterator[Finding]:
    """An allocation with fewer ranks a host than accelerators: schedulers give a task a host unless asked for more."""
    here = [host for host in cluster.hosts if host.name in facts.here] if cluster and not cluster.a_file else []
    for host in here:
        if host.devices is None and host.slots < facts.accelerators:
            message = f"{host.slots} ranks on {host.name}, which has {facts.accelerators} accelerators"
            hint = f"sbatch --ntasks-per-node={facts.accelerators}; PBS: mpiprocs={facts.accelerators}"
            yield finding("HST225", message, hint, host.location)


def _unused_hosts(args: argparse.Namespace) -> Iterator[Finding]:
    """Inside an allocation of which nothing was said: all ranks start here."""
    found = nodelist.around(os.environ) if args.hostfile is None else None
    hosts = [host for host, _ in found[1].hosts] if found else []
    if found and not (len(hosts) == 1 and network.is_here(hosts[0])):
        message = f"all ranks start on this host, and not on those of {found[1].source}: {nodelist.compress(hosts)}"
        yield finding("HST223", message, f"--hostfile {found[0]}")


def _unused_checkpoint(args: argparse.Namespace, config: Config, job: Job) -> Iterator[Finding]:
    """Where ranks start, they say it."""
    if args.print or args.check:
        yield from run_dir.unused_checkpoint(job, config, loads=bool({"--resume", "--eval-only"} & {*args.passed}))


# ---- the hosts, before anything starts ----


def _visited(args: argparse.Namespace, asked: _Asked) -> _Asked:
    """What the hosts said goes to stderr, and what is learnt of them into the facts.

    Raises:
        DslparError: the job would not run there.
    """
    cluster, facts = asked.request.cluster, asked.facts
    if cluster is None or not _wanted(args, asked):
        _demand_own_port(args, asked)
        return _with_interface(asked, _own_interface(args, cluster, facts))
    hosts = cluster.hosts if not args.no_ssh else tuple(host for host in cluster.hosts if host.name in facts.here)
    checked = preflight.check(hosts, _look(asked))
    if args.check:
        ready = "" if has_errors(checked.findings) else f"ready for {sum(host.slots for host in hosts)} ranks\n"
        sys.stdout.write(checked.table() + ready)
        sys.stdout.flush()
    if has_errors(checked.findings):
        raise DslparError(checked.findings)
    sys.stderr.write(report_text.text(checked.findings, asked.sources) if checked.findings else "")
    port = facts.port if args.no_ssh else checked.port or facts.port
    cores = min((one.sight.cores for one in checked.visited if one.sight), default=facts.cores)
    return _with_interface(asked._replace(facts=facts._replace(port=port, cores=cores)), checked.interface)


def _demand_own_port(args: argparse.Namespace, asked: _Asked) -> None:
    """Where rank 0 is to listen, if that is on this host and a port was asked for, or agreed on without a word.

    Raises:
        DslparError: somebody listens there.
    """
    request, facts = asked.request, asked.facts
    port = request.port or (DEFAULT_PORT if request.no_ssh else 0)
    is_here = request.cluster is None or request.cluster.hosts[0].name in facts.here
    starts = is_here and not (args.print or request.node) and request.launcher != "slurm"
    if port and starts and not network.is_free(port):
        found = preflight.port_taken("this host", port, facts.port)
        agreed = f"--master-port {facts.port}, on every host"
        raise DslparError([found._replace(help=agreed) if request.no_ssh else found])


def _wanted(args: argparse.Namespace, asked: _Asked) -> bool:
    """Other hosts are visited before a job starts there; srun starts where there may be no ssh."""
    cluster, facts = asked.request.cluster, asked.facts
    elsewhere = cluster is not None and any(host.name not in facts.here for host in cluster.hosts)
    starts = elsewhere and not (args.print or args.no_checks or args.no_ssh) and asked.request.launcher != "slurm"
    return args.check or starts


def _look(asked: _Asked) -> preflight.Look:
    files = [path for path in asked.config.sources if os.path.isfile(path)]
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    port, facts = asked.request.port, asked.facts
    return preflight.Look(
        files=files, output_dir=asked.job.output_dir, port=port, here=facts.here, environ=facts.travels, on_cpu=on_cpu
    )


def _own_interface(args: argparse.Namespace, cluster: Cluster | None, facts: Facts) -> str:
    """Where this host's ranks alone are started, that by which it meets the first, or as the first the second. What
    other hosts call theirs nobody has asked: their ranks look for themselves (bootstrap).
    """
    others = [host.address for host in cluster.hosts if host.name not in facts.here] if cluster else []
    return preflight.interface_to(others[0]) if others and args.node_rank is not None else ""


def _with_interface(asked: _Asked, interface: str) -> _Asked:
    """The environment has the last word."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    message = {name: interface for name in names if interface and name not in asked.facts.travels}
    return asked._replace(request=asked.request._replace(travels={**message, **asked.request.travels}))


def _say(plan: Plan, *, to_stdout: bool) -> None:
    """The command lines: of several, all at once, and each after the name of its host; or where it is to be started."""
    out = sys.stdout if to_stdout else sys.stderr
    together = len(plan.commands) > 1 and not plan.request.no_ssh
    for command in plan.commands:
        line = command.shell() + (" &" if together else "")
        out.write(
            (f"# {'on' if plan.request.no_ssh else 'for'} {command.host}\n" if command.host else "") + line + "\n"
        )
    out.write("wait\n" if together else "")
    out.flush()
