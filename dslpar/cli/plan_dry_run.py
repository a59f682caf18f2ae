"""`dslpar plan CFG --world-size N --dry-run [--rank R]`: run one rank's step without other ranks or devices.

torch is imported late, since the other parts of `dslpar plan` do not need it.
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
    """Print a rank's dry run (default: rank 0) as "text" or "json"; return 1 if it has problems."""
    with _without_collector():
        dry_run = import_with_torch("dslpar.dry_run.dry_run").dry_run
        stage, report = (import_with_torch(f"dslpar.dry_run.{name}") for name in ("stage", "report"))
        try:
            result = dry_run(job, rank or 0)
        except stage.NoDryRunError as error:
            parser.error(str(error))
        except DslparError as error:  # the model cannot be built
            arguments.print_findings(error.findings, {})
            return 1
    sys.stdout.write(report.FORMATS[format](result))
    return 1 if result.problems else 0


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector. With torch's many objects it would take a sixth of this short process's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
