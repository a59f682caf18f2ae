"""`dslpar show CFG --world-size N`: sizes, rank groups, stages, schedule and DeepSpeed's config."""

from __future__ import annotations

import argparse
import sys

from dslpar.cli import arguments
from dslpar.core.project import add_trust
from dslpar.reporting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    arguments.add_operands(parser)
    arguments.add_world(parser)
    arguments.add_program(parser)
    add_trust(parser)
    arguments.add_format(parser, *show.FORMATS)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the job, or the findings that forbid it."""
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    (config,) = arguments.load_configs(args, parser)
    args.world_size = arguments.default_world_size(args, config.path)
    world_size = arguments.world_size(args, cluster, parser)
    job = arguments.resolve_or_print(config, world_size, cluster, sources, args.program)
    if job is None:
        return 1
    sys.stdout.write(show.FORMATS[args.format](job))
    return 0
