"""`dslpar diff A B`: what differs between two configs when all is decided, and what follows from it."""

from __future__ import annotations

import argparse
import sys

from dslpar.cli import arguments as cli_arguments
from dslpar.linter.report import text as report_text
from dslpar.provenance import text as provenance_text
from dslpar.provenance.differences import compare, not_compared, of_what_runs
from dslpar.provenance.subject import Case

EPILOG = """\
Values are compared, not texts: LiBai's form and `parallel`, aliases and shorthands that mean the same do not differ.
Overrides go to both. Without a world size, what follows from it is compared as far as it is known.

exit status: 0 no difference in what runs, 1 differences, 2 a config has errors or the command line is wrong"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.epilog = EPILOG
    parser.add_argument("words", nargs="+", metavar="A B or key=value", help="two config files, and overrides of both")
    cli_arguments.world_arguments(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the differences."""
    sources: dict[str, str] = {}
    hosts = cli_arguments.cluster(args, parser, sources)
    configs = cli_arguments.configs(args, parser)
    if len(configs) != 2:
        parser.error(f"diff takes two configs, and not {len(configs)}")
    left, right = (Case(config, args.world_size, hosts) for config in configs)
    for case in (left, right):
        if not case.sound:
            sys.stderr.write(report_text.text(case.findings, sources | dict(case.config.sources)))
    if not (left.sound and right.sound):
        return 2
    unknown = not_compared(left, right)
    if unknown:
        sys.stderr.write(f"not compared, since neither side tells: {', '.join(unknown)}\n")
    found, paths = compare(left, right), (left.config.path, right.config.path)
    if args.format == "json":
        sys.stdout.write(provenance_text.differences_json(paths, left.world_size, found))
    else:
        sys.stdout.write(provenance_text.difference(paths, found))
    return int(bool(of_what_runs(found)))
