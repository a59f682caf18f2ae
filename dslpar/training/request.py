"""Request of a run (train.py's flags or `dslpar.fit`'s arguments), and the run folder that it claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.layout.resolve import Job

if TYPE_CHECKING:
    from dslpar.checkpoint import Checkpoint
    from dslpar.training.session import Session


class Request(NamedTuple):
    """Options from train.py's flags or the arguments of `dslpar.fit`; the default is all steps from step 0."""

    resume: bool = False
    eval_only: bool = False
    dry_run: bool = False

    @property
    def trains(self) -> bool:
        """True if steps are taken and files are written."""
        return not (self.eval_only or self.dry_run)

    @property
    def loads_checkpoint(self) -> bool:
        """True if the newest checkpoint must be loaded, if there is one."""
        return self.resume or self.eval_only

    def is_complete(self, job: Job, stored: Checkpoint | None) -> bool:
        """Return whether this request trains and the run that saved `stored` has taken all steps."""
        return self.trains and stored is not None and stored.step >= job.spec.train.steps


def claim_run_folder(
    session: Session, job: Job, request: Request, *, loads: bool
) -> tuple[Checkpoint | None, Path | None]:
    """Lock the run folder, find the checkpoint to load, and prepare the folder. All ranks must call it together.

    loads: find a checkpoint, if there is one. Otherwise the run continues from the engine's current step.

    Returns:
        The checkpoint to load or already loaded, and the folder to write to (only on rank 0 of a run that trains).

    Raises:
        DslparError: on every rank, if another run writes to the folder, the checkpoint cannot be used, or an evaluation
            has no checkpoint.
    """
    if request.trains:
        session.lock_folder(job)  # before the folder's contents are read
    stored = session.find_checkpoint(job) if loads else session.loaded
    if stored is None and request.eval_only and loads:
        message = f"nothing to evaluate: no checkpoint in {job.output_dir}"
        hint = "train first, or name the folder of a run, train.output_dir=..."
        raise_finding("CKP206", message, hint, session.config.at("train.output_dir"), "train.output_dir")
    if request.trains and not session.is_prepared:
        if stored is not None:
            session.prune(job, stored)
        if not request.is_complete(job, stored):  # a complete run stays as it is
            session.prepare_folder(job, stored)
    writes = request.trains and session.is_prepared and session.world.index == 0
    return stored, Path(job.output_dir) if writes else None
