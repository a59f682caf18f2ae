"""`dslpar diff A B`: print the differences of two resolved configs, and their consequences."""

from __future__ import annotations

import argparse
import sys

from dslpar.cli import arguments
from dslpar.core.project import add_trust
from dslpar.core.visible import visible
from dslpar.provenance import text as provenance_text
from dslpar.provenance.differences import compare, not_compared, of_what_runs
from dslpar.provenance.subject import Subject

EPILOG = """\
Compares values, not texts: LiBai's form and `parallel`, aliases and shorthands do not differ if
they mean the same. Overrides apply to both configs. Without a world size, values that depend on it
are compared only if they are known.

exit status: 0 the configs run the same, 1 they differ, 2 a config has errors, or wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EPILOG
    arguments.add_operands(parser, "A B", "two config files, and overrides of both")
    arguments.add_world(parser)
    add_trust(parser)
    arguments.add_format(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the differences; return 1 if the configs run differently, and 2 if one has errors."""
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    configs = arguments.load_configs(args, parser, 2)
    world_size = arguments.default_world_size(args, configs[0].path)
    left, right = (Subject(config, world_size, cluster) for config in configs)
    for subject in (left, right):
        if not subject.sound:
            arguments.print_findings(subject.findings, sources | dict(subject.config.sources))
    if not (left.sound and right.sound):
        return 2
    if unknown := not_compared(left, right):
        sys.stderr.write(visible(f"not compared, because unknown on both sides: {', '.join(unknown)}") + "\n")
    found, paths = compare(left, right), (left.config.path, right.config.path)
    if args.format == "json":
        sys.stdout.write(provenance_text.differences_json(paths, left.world_size, found))
    else:
        sys.stdout.write(provenance_text.difference(paths, found))
    return int(bool(of_what_runs(found)))
