"""What commands share of their command lines: configs and overrides, the world, the hostfile."""

from __future__ import annotations

import argparse
import os
import sys

from dslpar import flow, hostfile
from dslpar.config.load import Config
from dslpar.errors import DslparError
from dslpar.hostfile import Cluster
from dslpar.job import Job
from dslpar.linter import book, formats

STDIN = "stdin.py"
"""What a config from stdin goes by, if it is given no name; its ending tells Python from YAML."""


def config_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """`words`: the config, or several, and overrides among them."""
    many = "config files, folders of them, `-` for stdin; and overrides of their keys"
    help_ = many if several else "a config file, and overrides of its keys"
    parser.add_argument("words", nargs="+", metavar="CFG or key=value", help=help_)


def world_arguments(parser: argparse.ArgumentParser) -> None:
    """`world_size` and `hostfile`."""
    parser.add_argument("--world-size", type=count, metavar="N", help="ranks of the job")
    parser.add_argument("--hostfile", metavar="FILE", help="hosts and slots; gives the world size if N does not")


def count(text: str) -> int:
    """A whole number of the command line, at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return number


def configs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Config]:
    """The config files, each with the overrides."""
    return [flow.load(path, overrides(args)) for path in paths(args, parser)]


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
    from dslpar.config.limits import MAX_SOURCE_BYTES

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
    """The hostfile's hosts; its text goes into `sources`."""
    if args.hostfile is None:
        return None
    try:
        with open(args.hostfile, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read the hostfile {args.hostfile}: {error}")
    sources[args.hostfile] = text
    return hostfile.parse(text, args.hostfile)


def job_or_findings(config: Config, world_size: int, hosts: Cluster | None, sources: dict[str, str]) -> Job | None:
    """The Job, or none where lint finds an error; findings go to stderr either way."""
    texts = sources | dict(config.sources)
    try:
        job = flow.job_of(config, world_size, cluster=hosts)
    except DslparError as error:
        sys.stderr.write(formats.text(error.findings, texts))
        return None
    notes = book.lint(config, world_size, hosts)
    if notes:
        sys.stderr.write(formats.text(notes, texts))
    return job
