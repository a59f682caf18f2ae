"""What commands share of their command lines: configs and overrides, the world, the hostfile."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from dslpar.core.errors import Location
from dslpar.language.load import Config
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.report import text as report_text

if TYPE_CHECKING:
    from dslpar.cluster.filter import Flag
    from dslpar.cluster.hostfile import Cluster

ALLOCATIONS = ("slurm", "pbs")
"""What --hostfile may name instead of a file."""
STDIN = "stdin.py"
"""What a config from stdin goes by, if it is given no name; its ending tells Python from YAML."""


def config_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """`words`: the config, or several, and overrides among them."""
    many = "config files, folders of them, `-` for stdin; and overrides of their keys"
    hint = many if several else "a config file, and overrides of its keys"
    parser.add_argument("words", nargs="+", metavar="CFG or key=value", help=hint)


def world_arguments(parser: argparse.ArgumentParser) -> None:
    """`world_size`, `hostfile`, and the choice among its hosts."""
    parser.add_argument("--world-size", type=count, metavar="N", help="ranks of the job")
    hint = (
        "hosts and slots, in any launcher's syntax; slurm or pbs: this job's hosts. Gives the world size if N does not"
    )
    parser.add_argument("--hostfile", metavar="FILE", help=hint)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--include", metavar="HOSTS", help="of these hosts and slots alone: node1@node2:0,2")
    choice.add_argument("--exclude", metavar="HOSTS", help="without these hosts and slots")


def count(text: str) -> int:
    """A whole number of the command line, at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return number


def configs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Config]:
    """The config files, each with the overrides."""
    return [check.load(path, overrides(args)) for path in paths(args, parser)]


def paths(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The words that are no overrides; it is a mistake to give none."""
    found = [word for word in args.words if not is_override(word)]
    if not found:
        parser.error("there is no config file among the arguments")
    return found


def stdin_name(args: argparse.Namespace) -> str:
    """What the config from stdin goes by."""
    return args.stdin_filename or STDIN


def stdin_texts(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, str]:
    """The text of stdin, where `-` is among the words, under the real path that it goes by."""
    if "-" not in args.words:
        if args.stdin_filename:
            parser.error("--stdin-filename goes with `-`")
        return {}
    if len(paths(args, parser)) > 1:
        parser.error("`-` is the only config where it stands")
    from dslpar.language.limits import MAX_SOURCE_BYTES

    data = sys.stdin.buffer.read(MAX_SOURCE_BYTES + 1)
    try:
        return {os.path.realpath(stdin_name(args)): data.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        parser.error(f"stdin is not UTF-8: {error.reason} at byte {error.start}")


def one_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Config:
    """The config file; it is a mistake to name two."""
    found = configs(args, parser)
    if len(found) > 1:
        parser.error(f"{parser.prog.split()[-1]} takes one config")
    return found[0]


def overrides(args: argparse.Namespace) -> list[str]:
    """The overrides among the words."""
    return [word for word in args.words if is_override(word)]


def is_override(word: str) -> bool:
    """`key=value` and `~key`; a path with a `=` in one of its folders is a path."""
    return word.startswith("~") or "=" in word.partition("/")[0]


def cluster(args: argparse.Namespace, parser: argparse.ArgumentParser, sources: dict[str, str]) -> Cluster | None:
    """The hosts that were asked for: of the hostfile or the allocation, what `--include` or `--exclude` leaves. Texts,
    of the flags as well, go into `sources`.
    """
    flags: tuple[Flag, ...] = ("--include", "--exclude")
    flag, text = next(((flag, given) for flag in flags if (given := getattr(args, flag[2:]))), (None, ""))
    if args.hostfile is None:
        if flag:
            parser.error(f"{flag} chooses among the hosts of --hostfile")
        return None
    hosts = _hosts(args.hostfile, parser, sources)
    if not flag:
        return hosts
    from dslpar.cluster import filter

    sources[flag] = text
    return filter.choose(hosts, text, flag)


def _hosts(name: str, parser: argparse.ArgumentParser, sources: dict[str, str]) -> Cluster:
    """Of a hostfile, or of an allocation: `slurm`, `pbs`."""
    try:
        if name in ALLOCATIONS:
            return _allocation(name, sources)
        with open(name, encoding="utf-8-sig") as file:
            sources[name] = file.read()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read the hostfile {name}: {error}")
    except ValueError as error:
        parser.error(f"--hostfile {name}: {error}")
    from dslpar.cluster import hostfile

    return hostfile.parse(sources[name], name)


def _allocation(name: str, sources: dict[str, str]) -> Cluster:
    """Its place is the variable, or the file, that says it."""
    from dslpar.cluster import nodelist
    from dslpar.cluster.hostfile import Cluster, Host

    source, text, hosts = nodelist.ALLOCATIONS[name](os.environ)
    sources[source] = text
    place = Location(source, 1, 1, 1, len(text.partition("\n")[0]) + 1)
    return Cluster(source, tuple(Host(name, slots, place, place) for name, slots in hosts), (), a_file=False)


def job_or_findings(config: Config, world_size: int, hosts: Cluster | None, sources: dict[str, str]) -> Job | None:
    """The Job, or none where lint finds an error; findings go to stderr either way."""
    checked = check.check(config, world_size, hosts)
    if checked.findings:
        sys.stderr.write(report_text.text(checked.findings, sources | dict(config.sources)))
    return None if checked.has_errors else checked.job
