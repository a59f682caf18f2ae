"""Hint for a run that ended without saving: the step from which --resume continues. No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dslpar.checkpoint import folder
from dslpar.layout.resolve import Job
from dslpar.reporting.run_dir import CHECKPOINTS, NEWEST


def resume_hint(job: Job) -> str:
    """Return "; --resume goes on from step N"; empty if there is no checkpoint, or another one is requested."""
    if job.spec.checkpoint.resume_from in NEWEST:
        with contextlib.suppress(OSError):  # whoever resumes gets the file system's error
            if found := folder.list_folders(Path(job.output_dir, CHECKPOINTS)):
                return f"; --resume goes on from step {folder.step_of(found[-1])}"
    return ""
