"""The training program, one process a rank: `train.py --config FILE [key=value ...]`, under any launcher or none.

    deepspeed --num_gpus 8 train.py --config configs/gpt_3d.py train.steps=50
    mpirun -np 8 --bind-to none python train.py --config configs/gpt_3d.py --resume
    python train.py --config configs/gpt_3d.py parallel=None            # one process, the same steps

A rank goes through these: parse the arguments, load and lint the config (without torch, before any process group
exists), set up torch.distributed, check that all ranks run the same, claim the run folder, build the engine, load the
checkpoint, train, tear down. Rank 0 reports; the others only in error. Exit status: 0 the run is complete, 1 it cannot
run or has failed, 2 the command line is wrong, train.requeue_status (75) it was told to stop by SIGTERM or SIGUSR1, has
saved a checkpoint, and is to be queued again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed import bootstrap, determinism
from dslpar.distributed.device_environment import device_environment
from dslpar.distributed.distributed_env import DistributedEnv
from dslpar.distributed.failed_start import end_after_rank_0, end_before_start
from dslpar.launch.agent import JOB
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.report import text as report_text
from dslpar.reporting import logging, monitors, run_dir
from dslpar.reporting.logging import log
from dslpar.training.arguments import make_parser

if TYPE_CHECKING:
    from dslpar.checkpoint import Checkpoint
    from dslpar.data.source import Source
    from dslpar.language.load import Config
    from dslpar.training.session import Session
    from dslpar.watchdog.rank_monitor import RankMonitor


class Request(NamedTuple):
    """What the command line requests: a job, its data, the config it came from, and how much of it to do."""

    job: Job
    source: Source
    config: Config
    arguments: argparse.Namespace

    @property
    def trains(self) -> bool:
        """Whether steps are taken, and files written."""
        return not (self.arguments.eval_only or self.arguments.dry_run)

    @property
    def loads_checkpoint(self) -> bool:
        """Whether a checkpoint is loaded, if there is one."""
        return bool(self.arguments.resume or self.arguments.eval_only)

    def is_complete(self, stored: Checkpoint | None) -> bool:
        """Whether the run that saved this checkpoint had taken all steps."""
        return self.trains and stored is not None and stored.step >= self.job.spec.train.steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; return its exit status."""
    try:
        dist_env = bootstrap.read_distributed_env(os.environ)
    except DslparError as error:
        logging.print_findings(error.findings)
        return 1
    rank_monitor = bootstrap.monitor_rank(dist_env, os.environ)
    with logging.muted_unless_rank_0(dist_env.rank) as muted:
        status, request = load_and_lint(sys.argv[1:] if argv is None else argv, dist_env, linted=JOB in os.environ)
    if request is not None:
        return run_rank(request, dist_env, rank_monitor)
    if status:
        end_before_start(dist_env, os.environ, rank_monitor, muted.getvalue())
    return status


def run_rank(request: Request, dist_env: DistributedEnv, rank_monitor: RankMonitor) -> int:
    """Do what was requested, together with the other ranks; return the exit status."""
    job = request.job
    os.environ.update(monitors.environment(job) | device_environment(job, os.environ))
    if request.trains:  # before the ranks meet: a scheduler may end a job whose ranks still wait for each other
        rank_monitor.stop_on_signal(job.spec.train.term_grace, job.spec.train.requeue_status)
    rank_monitor.page.enter("starting")
    bootstrap.setup_distributed(dist_env, os.environ, rank_monitor)
    determinism.use_deterministic_algorithms(job)
    from dslpar.distributed.collectives import Axis
    from dslpar.training.session import Session

    world = Axis(dist_env.world_size, dist_env.rank, tuple(range(dist_env.world_size)))
    session = Session(job, request.config, world, rank_monitor, request.source.identity)
    session.extend_timeouts()
    try:
        stored, folder = claim_run_folder(request, session)
    except DslparError as error:
        if dist_env.rank == 0:
            logging.print_findings(session.at_keys(error.findings), request.config.sources)
        session.enter_ending()
        return end_after_rank_0(dist_env, rank_monitor)
    with logging.log_to_run_folder(folder, dist_env.rank):
        try:
            status = _run(request, stored, folder, session)
        except DslparError as error:  # what only the machine could know; every rank has the same findings
            log.error(report_text.text(session.at_keys(error.findings), request.config.sources).rstrip())
            session.enter_ending()
            return end_after_rank_0(dist_env, rank_monitor)
        session.enter_ending()
        bootstrap.teardown_distributed()
    return status


def _run(request: Request, stored: Checkpoint | None, folder: Path | None, session: Session) -> int:
    """Build the engine, load the checkpoint, and train, evaluate or stop there; return the exit status."""
    from dslpar.data.source import all_counted
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.training.loop import Trainer
    from dslpar.training.metrics import log_job
    from dslpar.training.session import NO_LIMIT
    from dslpar.training.step_data import PartData

    job, source = request.job, request.source
    if stored is not None and request.is_complete(stored):
        log.info("%s is of step %d, and train.steps is %d: complete", stored.path, stored.step, job.spec.train.steps)
        return 0
    if request.loads_checkpoint and stored is None:
        log.info("nothing to resume in %s: starting at step 0", job.output_dir)
    with logging.prints_to_log(folder):
        groups = Groups(job.mesh, num_chunks=job.chunks.num)
        session.locate(groups)
        session.enter("building", times=NO_LIMIT)
        engine = build_engine(job, groups, all_counted=all_counted(job))
        session.extend_timeouts()  # of the groups that were made since
    log_job(job, engine)
    if stored is not None:
        session.load(engine, stored, folder)
    if request.arguments.dry_run:
        return 0
    train_data, held_out = (PartData(engine, part, session.world) for part in (source.train, source.held_out))
    eval_data = held_out if job.spec.train.eval_interval is not None else None
    trainer = Trainer(engine, train_data, eval_data, folder, session)
    if request.arguments.eval_only:
        trainer.evaluate_alone()
        return 0
    if folder is not None:
        run_dir.truncate_metrics(folder, engine.steps_done)
    trainer.train()
    if not trainer.stopped or engine.steps_done == job.spec.train.steps:
        return 0
    saved = trainer.last_checkpoint
    log.info("told to stop: %s", f"step {engine.steps_done} is saved in {saved}" if saved else "not saved")
    return session.mark_stopped(engine.steps_done, saved)


# ---- before torch is imported ----


def load_and_lint(argv: Sequence[str], dist_env: DistributedEnv, linted: bool = False) -> tuple[int, Request | None]:
    """Find all that is wrong before a process group exists, and print it; return the exit status with the request.

    `linted`: `dslpar launch` started this rank, and has printed what lint only warns of.
    """
    from dslpar.data.source import find_source
    from dslpar.layout.transformers_data_types import check_data

    config: Config | None = None
    try:
        arguments = make_parser("train.py", "Train what a config describes, on this rank.").parse_intermixed_args(argv)
        config = check.load(arguments.config, arguments.overrides, trusted=arguments.trust)
        checked = check.check(config, dist_env.world_size)
        if checked.has_errors or not linted:
            logging.print_findings(checked.findings, config.sources)
        if checked.has_errors:
            return 1, None
        job = _requested_job(checked.job, arguments)
        if dist_env.rank == 0:
            monitors.check_packages(job)
        check_data(job)
        request = Request(job, find_source(job), config, arguments)
        unused = run_dir.unused_checkpoint(job, config, loads=request.loads_checkpoint)
        logging.print_findings([*unused], config.sources)
        return 0, request
    except DslparError as error:
        if config is None:
            logging.print_findings(error.findings)
        else:
            logging.print_findings(config.at_keys(error.findings), config.sources)
        return 1, None
    except SystemExit as ended:  # argparse's, which has printed why
        return int(ended.code or 0), None


def _requested_job(job: Job, arguments: argparse.Namespace) -> Job:
    """Return the job as the flags change it: only training needs monitors, and an evaluation needs held-out text."""
    if arguments.eval_only or arguments.dry_run:
        job = monitors.without_monitors(job)
    if arguments.eval_only:
        train = dataclasses.replace(job.spec.train, eval_interval=job.spec.train.steps)
        job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=train))
    return job


# ---- ranks together, before anything is built ----


def claim_run_folder(request: Request, session: Session) -> tuple[Checkpoint | None, Path | None]:
    """Check that all ranks run the same; lock the run folder, find the checkpoint to load, and prepare the folder.

    Returns:
        The checkpoint, if one is to be loaded; and the folder to write to, on rank 0 of a run that trains.
    """
    from dslpar.distributed.consistency import check_consistency

    job, source = request.job, request.source
    flags = {name: value for name, value in vars(request.arguments).items() if isinstance(value, bool)}
    facts = {"text": source.whole_identity, "command line": repr(flags)}
    facts |= {f"version of {name}": version for name, version in run_dir.versions().items()}
    check_consistency(job, session.world, facts)
    # From here on every rank has read the config, which may be in the folder that is now changed.
    if request.trains:
        session.lock_folder(job)  # before it is looked at what is there
    stored = session.find_checkpoint(job) if request.loads_checkpoint else None
    if stored is None and request.arguments.eval_only:
        message = f"--eval-only, and no checkpoint in {job.output_dir}"
        hint = "train first, or name the folder of a run, train.output_dir=..."
        key = "train.output_dir"
        raise_finding("CKP206", message, hint, job.path, key)
    if stored is not None and request.trains:
        session.prune(job, stored)
    if not request.trains or request.is_complete(stored):
        return stored, None
    session.prepare_folder(job, stored)
    return stored, None if session.world.index else Path(job.output_dir)
