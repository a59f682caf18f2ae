"""`dslpar plan CFG --world-size N --dry-run [--rank R]`: one step of a rank, without ranks and devices.

torch is imported here, late: the other parts of `dslpar plan` need none.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch
from dslpar.core.errors import DslparError
from dslpar.layout.resolve import Job


def run(job: Job, rank: int | None, format: str, parser: argparse.ArgumentParser) -> int:
    """Print the dry run of a rank, of rank 0 if none is given, as "text" or "json"; return 1 if something is wrong."""
    with _without_collector():
        stage, step, report = (import_with_torch(f"dslpar.dry_run.{name}") for name in ("stage", "step", "report"))
        try:
            result = step.dry_run(job, rank or 0)
        except stage.NoDryRunError as error:
            parser.error(str(error))
        except DslparError as error:  # the model cannot be made
            arguments.print_findings(error.findings, {})
            return 1
    sys.stdout.write(report.FORMATS[format](result))
    return 1 if result.problems else 0


@contextmanager
def _without_collector() -> Iterator[None]:
    """Look for no garbage: among all that torch imports that is a sixth of the time of a process that ends soon."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
