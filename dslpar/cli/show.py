"""`dslpar show CFG --world-size N`: print sizes, rank groups, stages, schedule, memory and DeepSpeed's config.

With --format html it prints a page, and with --output-dir it writes the page and its pictures to a folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dslpar.cli import arguments, foreign_files
from dslpar.core.errors import has_errors
from dslpar.core.project import add_trust
from dslpar.core.visible import visible
from dslpar.forecast.machine import MachineError, machine_of
from dslpar.forecast.plan import Forecast, forecast
from dslpar.forecast.workload import workload_of
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.planner import show

if TYPE_CHECKING:
    from dslpar.cluster.hostfile import Cluster

FORMATS = (*show.FORMATS, "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    arguments.add_operands(parser)
    arguments.add_world(parser)
    arguments.add_program(parser)
    foreign_files.add_arguments(parser)
    add_trust(parser)
    arguments.add_format(parser, *FORMATS)
    help = "with --format html: write page.html, and each of its pictures as an SVG, to DIR instead of stdout"
    parser.add_argument("--output-dir", metavar="DIR", help=help)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the resolved job, or the lint errors because of which there is none; return the exit status."""
    if args.output_dir is not None and args.format != "html":
        parser.error("--output-dir goes with --format html")
    sources: dict[str, str] = {}
    cluster = arguments.load_cluster(args, parser, sources)
    path, parts = foreign_files.one_run(arguments.config_paths(args, parser), args, parser)
    arguments.project_in(".")
    config, foreign = foreign_files.load(path, arguments.overrides(args), args, parser, parts)
    args.world_size = arguments.default_world_size(args, config.path)
    world_size = arguments.world_size(args, cluster, parser, lambda: config)
    if world_size is None:
        return 1
    if foreign is None:
        job = arguments.resolve_or_print(config, world_size, cluster, sources, args.program)
    else:
        checked = check.check(config, world_size, cluster, by_program=args.program)
        found = foreign.findings(checked.findings, world_size, cluster)
        arguments.print_findings(found, sources | dict(foreign.sources))
        job = None if has_errors(found) else checked.job
    if job is None:
        return 1
    made = _forecast(job, cluster)
    if args.format != "html":
        sys.stdout.write(show.FORMATS[args.format](job, made))
        return 0
    from dslpar.planner import page  # reads runs, which needs PyYAML

    html = page.as_html(job, made)
    if args.output_dir is None:
        sys.stdout.write(html)
    else:
        files = {f"{name}.svg": picture for name, picture in page.pictures(job, made).items()}
        _write(Path(args.output_dir), {"page.html": html, **files}, parser)
    return 0


def _forecast(job: Job, cluster: Cluster | None) -> Forecast | None:
    """Return the forecast; None if no machine is known, or if the costs of the model's layers are unknown."""
    workload = workload_of(job)
    if workload is None:
        return None
    try:
        return forecast(workload, machine_of(job, cluster=cluster))
    except MachineError as error:
        section = job.spec.cluster
        if section.device or section.calibration or (cluster is not None and cluster.device):
            sys.stderr.write(visible(error) + "\n")
        return None


def _write(folder: Path, files: Mapping[str, str], parser: argparse.ArgumentParser) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot write to {folder}: {error.strerror}")
