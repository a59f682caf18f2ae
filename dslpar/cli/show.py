"""`dslpar show CFG --world-size N`: sizes, rank groups, stages and DeepSpeed's config."""

from __future__ import annotations

import argparse
import sys

from dslpar.cli import arguments as cli_arguments
from dslpar.reporting import show


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    cli_arguments.config_argument(parser)
    cli_arguments.world_arguments(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the job, or the findings that forbid it."""
    sources: dict[str, str] = {}
    cluster = cli_arguments.cluster(args, parser, sources)
    world_size = args.world_size or (cluster.world_size if cluster else None)
    if not world_size:
        parser.error("show needs the number of ranks: --world-size N or --hostfile FILE")
    job = cli_arguments.job_or_findings(cli_arguments.one_config(args, parser), world_size, cluster, sources)
    if job is None:
        return 1
    sys.stdout.write(show.FORMATS[args.format](job))
    return 0
