"""`dslpar launch CFG`: checks a config against its hosts, prints the launcher's command line, and runs it.

The launcher is DeepSpeed's own unless another is asked for, on GPUs and CPUs alike: it reads hostfiles, and is there
wherever the engine is. Where its program is missing, torchrun takes its place.
"""

from __future__ import annotations

import argparse
import os
import sys

from dslpar import launcher, supervise
from dslpar.commands import words
from dslpar.errors import WORLD, DslparError, Finding, Location
from dslpar.launcher import LAUNCHERS, Facts, Plan, Request
from dslpar.linter import formats

EPILOG = """\
The launcher's command line goes to stderr, or with --print to stdout, and nothing starts. Without a hostfile all
ranks are on this host, one an accelerator unless N says otherwise. Ranks on several hosts, and all of Slurm's, are
for --print alone so far. Slurm is untested: its line follows the manual.

exit status: 0 every rank ended in order, 1 the job cannot run or a rank failed, 2 the command line is wrong,
128 + n: ended by signal n. The last lines say which rank was first to fail, and why."""

_PASSED = {
    "--resume": "continue from the last checkpoint",
    "--eval-only": "evaluate, and do not train",
    "--dry-run": "build on every rank, and stop before the first step",
}
"""Flags of the training program."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.epilog = EPILOG
    words.config_argument(parser)
    words.world_arguments(parser)
    parser.add_argument("--launcher", choices=tuple(LAUNCHERS), help="default: deepspeed; torchrun where it is missing")
    parser.add_argument("--print", action="store_true", help="print the command line and start nothing")
    for flag, help_ in _PASSED.items():
        parser.add_argument(flag, action="append_const", dest="passed", const=flag, default=[], help=help_)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Checks, prints, and runs to the end."""
    sources: dict[str, str] = {}
    cluster = words.cluster(args, parser, sources)
    config = words.one_config(args, parser)
    facts = launcher.look_around(cluster, os.environ)
    world_size = args.world_size or (cluster.world_size if cluster else None) or facts.accelerators
    if not world_size:
        parser.error("this host has no accelerators to count: --world-size N, or --hostfile FILE")
    job = words.job_or_findings(config, world_size, cluster, sources)
    if job is None:
        return 1
    program = ("--config", config.path, *args.passed, *words.overrides(args))
    request = Request(args.launcher or launcher.default_launcher(facts), world_size, program, cluster)
    plan = _plan(request, facts, sources, only_print=args.print)
    if plan is None:
        return 1
    _say(plan, to_stdout=args.print)
    return 0 if args.print else supervise.run(plan.commands[0], world_size, job.output_dir)


def _plan(request: Request, facts: Facts, sources: dict[str, str], *, only_print: bool) -> Plan | None:
    """The command lines, or none where they must not run; findings go to stderr."""
    try:
        plan = launcher.plan_of(request, facts)
        if plan.elsewhere and not only_print:
            raise DslparError([_several_hosts()])
    except DslparError as error:
        sys.stderr.write(formats.text(error.findings, sources))
        return None
    if plan.notes:
        sys.stderr.write(formats.text(plan.notes, sources))
    return plan


def _several_hosts() -> Finding:
    said = "ranks on other hosts; dslpar launch starts jobs on this host alone, so far"
    return Finding("HST210", "other-hosts", "error", said, "--print, and run what it prints", Location(WORLD))


def _say(plan: Plan, *, to_stdout: bool) -> None:
    """The command lines; of several, each after the name of its host."""
    out = sys.stdout if to_stdout else sys.stderr
    for command in plan.commands:
        out.write((f"# on {command.host}\n" if command.host else "") + command.shell() + "\n")
    out.flush()
