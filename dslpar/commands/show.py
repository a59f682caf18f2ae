"""`dslpar show CFG --world-size N`: sizes, rank groups, stages and DeepSpeed's config."""

from __future__ import annotations

import argparse
import sys

from dslpar import show
from dslpar.commands import words


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    words.config_argument(parser)
    words.world_arguments(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the job, or the findings that forbid it."""
    sources: dict[str, str] = {}
    cluster = words.cluster(args, parser, sources)
    world_size = args.world_size or (cluster.world_size if cluster else None)
    if not world_size:
        parser.error("show needs the number of ranks: --world-size N or --hostfile FILE")
    job = words.job_or_findings(words.one_config(args, parser), world_size, cluster, sources)
    if job is None:
        return 1
    sys.stdout.write(show.FORMATS[args.format](job))
    return 0
