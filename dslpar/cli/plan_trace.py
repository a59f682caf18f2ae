"""`dslpar plan CFG --world-size N --trace`: derive a model's costs from its layers, by running them without memory.

torch is imported late, since the other parts of `dslpar plan` do not need it.
"""

from __future__ import annotations

import argparse

from dslpar.cli import arguments
from dslpar.cli.action import import_with_torch
from dslpar.core.errors import DslparError
from dslpar.forecast.workload import CostsOf
from dslpar.layout.resolve import Job


def traced(job: Job, parser: argparse.ArgumentParser) -> tuple[Job, CostsOf] | None:
    """Return the job, with its layers partitioned into stages, and a function that returns the costs of its model.

    If the model cannot be built, print why and return None. Exit with a usage error if the model cannot be run without
    memory.
    """
    trace = import_with_torch("dslpar.dry_run.trace")
    try:
        tracer = trace.Tracer(job)
        tracer.costs_of(tracer.job.mesh.tensor, tracer.job.batch.micro_size)
    except trace.TraceError as error:
        parser.error(str(error))
    except DslparError as error:  # the model cannot be built, or its data cannot be read
        arguments.print_findings(error.findings, {})
        return None
    return tracer.job, tracer.costs_of
