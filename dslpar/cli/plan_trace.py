"""`dslpar plan CFG --world-size N --trace`: costs of a model that only torch knows.

torch is imported here, late: the other parts of `dslpar plan` need none.
"""

from __future__ import annotations

import argparse

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch
from dslpar.core.errors import DslparError
from dslpar.forecast.workload import CostsOf
from dslpar.layout.resolve import Job


def traced(job: Job, parser: argparse.ArgumentParser) -> tuple[Job, CostsOf] | None:
    """Return the job, with its stages, and what its model costs; None: it cannot be made, which is said.

    Exits with a usage error where it cannot be run without memory.
    """
    trace = import_with_torch("dslpar.dry_run.trace")
    try:
        tracer = trace.Tracer(job)
        tracer.costs_of(tracer.job.mesh.tensor, tracer.job.batch.micro_size)
    except trace.TraceError as error:
        parser.error(str(error))
    except DslparError as error:  # the model cannot be made, or its data not be read
        arguments.print_findings(error.findings, {})
        return None
    return tracer.job, tracer.costs_of
