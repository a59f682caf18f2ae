"""Training from your own program, with everything that train.py does: `dslpar.fit`.

    args = dslpar.arguments()                                        # train.py's flags: --config, --resume, key=value
    run = dslpar.start(args.config, args.overrides, args.trust)
    engine, train_data, eval_data, _ = dslpar.initialize(run, model=model, criterion=loss_fn, train_data=pairs)
    dslpar.fit(run, engine, train_data, eval_data, resume=args.resume)

The name comes from Lightning and Keras. train.py runs the same loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.data.loader import StepData
from dslpar.engine.replica_samples import ReplicaSamples
from dslpar.linter.report import text as report_text
from dslpar.reporting import logging
from dslpar.reporting.logging import log
from dslpar.training.events import Hook
from dslpar.training.loop import Record
from dslpar.training.request import Request, claim_run_folder
from dslpar.training.run_loop import interrupt_logged, log_no_checkpoint, run_loop
from dslpar.training.session import NO_LIMIT, any_rank
from dslpar.training.started_run import Run
from dslpar.training.step_data import IterableData, step_data
from dslpar.training.user_loop_engine import ProgramEngine


def fit(
    run: Run,
    engine: ProgramEngine,
    train_data: Any,
    eval_data: Any = None,
    *,
    hooks: Sequence[Hook] = (),
    resume: bool = False,
    eval_only: bool = False,
    dry_run: bool = False,
) -> Record:
    """Take the remaining steps of train.steps, as train.py does. All ranks must call it together.

    `fit` writes config.yaml, metrics.jsonl and log.txt to train.output_dir, and checkpoints at train.save_interval and
    at the end. It evaluates at train.eval_interval. It ends the job if a step hangs, or if loss or gradient are no
    longer finite. On SIGTERM it saves and raises SystemExit(train.requeue_status), so code after `fit` runs only if the
    run is complete.

    run, engine: from `dslpar.start` and `dslpar.initialize`.
    train_data, eval_data: the data that `dslpar.initialize` returned, a map-style dataset of (input, label) pairs, or
        any iterable of micro-batches. An iterable restarts at its end. A resume skips the steps already taken from it.
    hooks: called on every rank with an `Event` at each step, evaluation and checkpoint, and at the end.
    resume: continue from the newest checkpoint, on this layout or any other; without a checkpoint, start at step 0.
    eval_only: load the newest checkpoint and evaluate it; its loss goes to eval.jsonl.
    dry_run: show what was built (with `resume`, also what was loaded), and write nothing.

    Returns:
        The last step's line of metrics.jsonl, or with `eval_only` that of eval.jsonl; empty if no step was left.

    Raises:
        DslparError: on every rank, with the findings that would end train.py.
        SystemExit: SIGTERM or SIGUSR1 stopped the run, which must be started again with `resume`.
    """
    if engine.session.config is not run.config:
        hint = "pass the run that dslpar.initialize was given"
        raise_finding("BAT206", "fit() was called with the engine of another run", hint, run.job.path)
    if not engine.is_between_steps:
        raise_finding("BAT206", "fit() was called in the middle of a step", "call it after step()", run.job.path)
    session, request = engine.session, Request(resume, eval_only, dry_run)
    loads = request.loads_checkpoint and session.loaded is None and engine.steps_done == 0
    stored, folder = claim_run_folder(session, engine.job, request, loads=loads)

    def make_data() -> tuple[StepData, StepData | None]:
        train, held_out = step_data(train_data, engine), _eval_data(engine, eval_data)
        if isinstance(train, IterableData) and engine.replica_samples is None:
            engine.replica_samples = ReplicaSamples(engine.groups)
        if session.loaded is not None and request.trains and isinstance(train, IterableData) and engine.needs_data:
            log.info("reading past the %d steps of data that the run has already used", engine.steps_done)
            train.skip(engine.steps_done)
        return train, held_out

    logs = logging.log_to_run_folder(folder, engine.groups.rank)
    with _in_loop(engine), logs, _logged_findings(engine), interrupt_logged(session, engine.job):
        if resume and stored is None:
            log_no_checkpoint(engine.job.output_dir, engine.steps_done)
        outcome = run_loop(engine, session, request, stored if loads else None, folder, make_data, hooks)
    if outcome.status:
        raise SystemExit(outcome.status)
    return outcome.record


def _eval_data(engine: ProgramEngine, data: Any) -> StepData | None:
    """Return the data to evaluate on; None: no rank has any. A rank with a middle stage may have none itself."""
    (has_data,) = any_rank(engine, data is not None)
    if has_data != (engine.job.spec.train.eval_interval is not None):
        missing = "train.eval_interval" if has_data else "eval_data"
        log.warning("nothing is evaluated while it trains: there is no %s", missing)
    return step_data(data, engine) if has_data else None


@contextlib.contextmanager
def _in_loop(engine: ProgramEngine) -> Iterator[None]:
    """Let the loop, and not the engine, handle time limits and stop requests in this context."""
    engine.in_loop = True
    try:
        yield
    finally:
        engine.in_loop = False
    engine.session.enter("in the program", engine.steps_done, NO_LIMIT)


@contextlib.contextmanager
def _logged_findings(engine: ProgramEngine) -> Iterator[None]:
    """Write findings that end the run to log.txt, at their keys in the config; the terminal shows the exception."""
    try:
        yield
    except DslparError as error:
        findings = engine.session.at_keys(error.findings)
        logging.log_to_file(report_text.text(findings, engine.session.config.sources).rstrip())
        raise DslparError(findings) from error
