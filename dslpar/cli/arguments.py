"""Arguments that commands share: configs, overrides, world size, hosts, and output format."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from dslpar.core.errors import DslparError, Finding, Location
from dslpar.core.project import Project, find_project, project_finding
from dslpar.core.visible import json_text
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.report import text as report_text

if TYPE_CHECKING:
    from dslpar.cluster.filter import Flag
    from dslpar.cluster.hostfile import Cluster

ALLOCATIONS = ("slurm", "pbs")
"""Values of --hostfile that mean the hosts of the scheduler's job in which the command runs, instead of a file."""


# ---- flags ----


def add_operands(
    parser: argparse.ArgumentParser,
    metavar: str = "CFG",
    help: str = "a config file, and overrides of its keys",
    nargs: str = "+",
) -> None:
    """Add the positional arguments `operands`: configs and, in any order, overrides (key=value)."""
    parser.add_argument("operands", nargs=nargs, metavar=f"{metavar} or key=value", help=help)


def add_world(parser: argparse.ArgumentParser, exclude: str = "") -> None:
    """Add --world-size, --hostfile, and --include and --exclude, which select hosts of the hostfile.

    `exclude`: text to append to the help of --exclude, if the command gives that flag a further meaning.
    """
    help = "number of ranks; default with --hostfile: its number of slots"
    parser.add_argument("--world-size", type=whole_number, metavar="N", help=help)
    help = "hosts and slots, in any launcher's syntax; or slurm or pbs, for the hosts of the surrounding job"
    parser.add_argument("--hostfile", metavar="FILE", help=help)
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--include", metavar="HOSTS", help="use only these hosts and slots, such as node1@node2:0,2")
    metavar = "HOSTS or PATTERNS" if exclude else "HOSTS"
    selection.add_argument("--exclude", metavar=metavar, help=f"use all but these hosts and slots{exclude}")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add --program: a user's program passes the model, so the config may have no model."""
    help = "accept configs without a model: a program passes it, with dslpar.initialize(model=...)"
    parser.add_argument("--program", action="store_true", help=help)


def add_format(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add --format with these names; the first one is the default."""
    names = names or ("text", "json")
    parser.add_argument("--format", choices=names, default=names[0], help="output format; default: %(default)s")


def whole_number(text: str, least: int = 1) -> int:
    """Parse a whole number, at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


# ---- configs ----


def is_override(operand: str) -> bool:
    """Return whether an operand is an override, `key=value` or `~key`, and not a path.

    An operand whose first `=` comes after a `/` is a path.
    """
    return operand.startswith("~") or "=" in operand.partition("/")[0]


def overrides(args: argparse.Namespace) -> list[str]:
    """Return the overrides among the operands."""
    return [operand for operand in args.operands if is_override(operand)]


def config_paths(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the paths among the operands; exit with a usage error if there are none."""
    paths = [operand for operand in args.operands if not is_override(operand)]
    if not paths:
        parser.error("no config file among the arguments")
    return paths


def load_configs(args: argparse.Namespace, parser: argparse.ArgumentParser, count: int = 1) -> list[Config]:
    """Load each config among the operands with the overrides; exit with a usage error unless `count` are given."""
    paths = config_paths(args, parser)
    if len(paths) != count:
        wanted = "one config" if count == 1 else f"{count} configs"
        parser.error(f"{parser.prog.split()[-1]} takes {wanted}, not {len(paths)}")
    project_in(".")
    return [check.load(path, overrides(args), trusted=getattr(args, "trust", ())) for path in paths]


def project_in(folder: str) -> Project | None:
    """Return the `[tool.dslpar]` settings that apply to a folder; exit with status 2 if they are invalid."""
    try:
        return find_project(folder)
    except DslparError as error:
        print_findings(error.findings, {})
        sys.exit(2)


def project_device(folder: str) -> str | None:
    """Return the device that the project of a folder names for forecasts; exit with status 2 if it is unknown."""
    project = project_in(folder)
    if project is None or not project.device:
        return None
    from dslpar.forecast.device import device_hint, find_device  # most commands make no forecast

    if find_device(project.device) is None:
        unknown = project_finding(
            project, "device", f"unknown device {project.device!r} in [tool.dslpar]", device_hint(project.device)
        )
        print_findings([unknown], {})
        sys.exit(2)
    return project.device


# ---- the world ----


def load_cluster(args: argparse.Namespace, parser: argparse.ArgumentParser, sources: dict[str, str]) -> Cluster | None:
    """Read the hosts of --hostfile that --include or --exclude selects; None without --hostfile.

    The hostfile's text and the flag's value are added to `sources` (texts by path), since findings may point into them.
    """
    flags: tuple[Flag, ...] = ("--include", "--exclude")
    flag, text = next(((flag, value) for flag in flags if (value := getattr(args, flag[2:]))), (None, ""))
    if args.hostfile is None:
        if flag:
            parser.error(f"{flag} selects among the hosts of --hostfile, so it needs one")
        return None
    # Only with --hostfile: the parsers of hosts take 3 % of lint's start.
    from dslpar.cluster.filter import filter_hosts

    hosts = _read_cluster(args.hostfile, parser, sources)
    if not flag:
        return hosts
    sources[flag] = text
    return filter_hosts(hosts, text, flag)


def _read_cluster(name: str, parser: argparse.ArgumentParser, sources: dict[str, str]) -> Cluster:
    """Read a hostfile, or the allocation of the scheduler that `name` names (see ALLOCATIONS)."""
    from dslpar.cluster import hostfile, nodelist

    if name not in ALLOCATIONS:
        try:
            with open(name, encoding="utf-8-sig") as file:
                sources[name] = file.read()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"cannot read the hostfile {name}: {getattr(error, 'strerror', '') or error}")
        return hostfile.parse(sources[name], name)
    try:
        source, text, slots = nodelist.ALLOCATIONS[name](os.environ)
    except (OSError, ValueError) as error:
        parser.error(f"--hostfile {name}: {error}")
    sources[source] = text
    location = Location(source, 1, 1, 1, len(text.partition("\n")[0]) + 1)  # the variable, or file, that lists them
    hosts = tuple(hostfile.Host(host, count, location, location) for host, count in slots)
    return hostfile.Cluster(source, hosts, (), from_file=False)


def default_world_size(args: argparse.Namespace, path: str) -> int | None:
    """Return --world-size. Without it and --hostfile, return the world size in the project's settings, if any."""
    size: int | None = args.world_size
    if size is None and args.hostfile is None:
        project = project_in(os.path.dirname(path))
        size = project.world_size_of(path) if project else None
    return size


def world_size(
    args: argparse.Namespace,
    cluster: Cluster | None,
    parser: argparse.ArgumentParser,
    load: Callable[[], Config],
) -> int | None:
    """Return the number of ranks, from --world-size or the hosts; exit with a usage error if both are missing.

    If both are missing and the config that `load` returns cannot be read, print why and return None instead.
    """
    size: int | None = args.world_size or (cluster.world_size if cluster else None)
    if not size:
        if print_if_unreadable(load()):
            return None
        command = parser.prog.split()[-1]
        parser.error(f"{command} needs the number of ranks: --world-size N or --hostfile FILE")
    return size


def print_if_unreadable(config: Config) -> bool:
    """Print why the config's file cannot be read, and return True; return False if it can be read.

    Commands call this before they report a missing world size, which is not the problem if the file is unreadable.
    """
    unreadable = [each for each in config.findings if each.code == "CFG009"]
    print_findings(unreadable, dict(config.sources))
    return bool(unreadable)


# ---- results ----


def print_findings(findings: Sequence[Finding], sources: Mapping[str, str]) -> None:
    """Print findings, if any, to stderr."""
    if findings:
        sys.stderr.write(report_text.text(findings, sources))


def print_json(value: object) -> None:
    """Print a value to stdout as indented JSON."""
    sys.stdout.write(json_text(value))


def resolve_or_print(
    config: Config,
    world_size: int,
    cluster: Cluster | None,
    sources: dict[str, str],
    by_program: bool = False,
    reported_later: Collection[str] = (),
) -> Job | None:
    """Lint a config and print its findings to stderr; return the job, or None if a finding is an error.

    `reported_later`: codes of findings that the caller reports itself if there is a job.
    """
    checked = check.check(config, world_size, cluster, by_program=by_program)
    shown = [each for each in checked.findings if checked.has_errors or each.code not in reported_later]
    print_findings(shown, sources | dict(config.sources))
    return None if checked.has_errors else checked.job
