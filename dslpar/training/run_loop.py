"""Run a job from its checkpoint: load it, then train or evaluate, or return if it is a dry run or no steps are left.

Shared by train.py and `fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from logging import INFO
from pathlib import Path
from typing import NamedTuple

from dslpar.checkpoint import Checkpoint
from dslpar.core.catalog import raise_finding
from dslpar.data.loader import StepData
from dslpar.engine.engine import Engine
from dslpar.layout.resolve import Job
from dslpar.reporting import logging, run_dir
from dslpar.reporting.logging import log
from dslpar.reporting.resume_hint import resume_hint
from dslpar.training.events import Hook
from dslpar.training.loop import Record, Trainer
from dslpar.training.metrics import log_job
from dslpar.training.request import Request
from dslpar.training.session import Session
from dslpar.watchdog.failure_reports import is_interrupt

MakeData = Callable[[], tuple[StepData, StepData | None]]
"""Makes the training and evaluation data, once the engine is at the step from which the run continues."""


class Outcome(NamedTuple):
    """The outcome of a run."""

    record: Record
    """The last step's line of metrics.jsonl, or an evaluation's of eval.jsonl; empty if no step was taken."""
    status: int
    """The exit status: 0, or train.requeue_status if a signal stopped the run."""


def run_loop(
    engine: Engine,
    session: Session,
    request: Request,
    stored: Checkpoint | None,
    folder: Path | None,
    make_data: MakeData,
    hooks: Sequence[Hook] = (),
) -> Outcome:
    """Load `stored`, if there is one, and run the request from the engine's step. All ranks must call it together.

    stored: the checkpoint to load, from `claim_run_folder`; None: the run continues from the engine's current step.
    folder: the folder to write to, on rank 0 of a run that trains; else None.

    Raises:
        DslparError: on every rank, if the run cannot continue.
    """
    log_job(engine.job, engine)
    if stored is not None:
        session.load(engine, stored, folder)
    if request.dry_run:
        return Outcome({}, 0)
    train_data, held_out = make_data()
    if request.eval_only:
        return Outcome(_evaluate(engine, session, train_data, held_out), 0)
    if engine.steps_done >= engine.job.spec.train.steps:
        log_complete(engine.steps_done, engine.job.spec.train.steps)
        return Outcome({}, 0)
    if folder is not None:
        run_dir.truncate_metrics(folder, engine.steps_done)
    trainer = Trainer(engine, train_data, held_out, folder, session, hooks)
    record = trainer.train()
    if not trainer.stopped or engine.steps_done == engine.job.spec.train.steps:
        return Outcome(record, 0)
    saved = trainer.last_checkpoint
    log.info("told to stop: %s", f"step {engine.steps_done} is saved in {saved}" if saved else "not saved")
    return Outcome(record, session.mark_stopped(engine.steps_done, saved))


@contextlib.contextmanager
def interrupt_logged(session: Session, job: Job) -> Iterator[None]:
    """Log an interrupt (Ctrl-C) on rank 0, with the step that --resume goes on from. The run ends without saving."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error) and session.world.index == 0:
            line = f"interrupted{resume_hint(job)}"
            if session.monitor is not None and session.monitor.is_supervised:
                logging.log_to_file(line, INFO)  # `dslpar launch` prints the same
            else:
                log.info("%s", line)
        raise


def log_complete(step: int, steps: int) -> None:
    """Log that no steps are left."""
    log.info("step %d is done, and train.steps is %d: complete", step, steps)


def log_no_checkpoint(output_dir: str, step: int) -> None:
    """Log that a run found nothing to resume and starts from the beginning."""
    log.info("nothing to resume in %s: starting at step %d", output_dir, step)


def _evaluate(engine: Engine, session: Session, train_data: StepData, held_out: StepData | None) -> Record:
    if held_out is None:
        hint = "give dslpar.fit(eval_data=...)"
        raise_finding("CKP206", "eval_only needs evaluation data, but there is none", hint, engine.job.path)
    return Trainer(engine, train_data, held_out, None, session).evaluate_alone()
